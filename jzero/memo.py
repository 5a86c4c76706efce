"""What a Zero has seen: enough to find the logical shapes of a tree that it laid out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jzero.gradients import Accumulation
from jzero.layout import Layout, Leaf


class Memo:
    """Layouts by the names and shapes of the trees they belong to, and what was made so far.

    Holds no array. It changes no number: it turns shapes at rest back into logical ones, and tells
    a stage-3 optimizer whether parameters are in shards.
    """

    def __init__(self, layout: Layout | None) -> None:
        self.layout = layout
        self.reads: dict[str, bool] = {}
        self.has_grad_fn = False
        self.accumulation = Accumulation()
        self.has_placed = False
        self.has_warned = False
        self._seen: dict[tuple[Any, ...], tuple[Leaf, ...] | None] = {}
        if layout is not None:
            self.remember(layout)

    def remember(self, layout: Layout) -> None:
        """Notes a layout under its shapes at rest and its logical shapes."""
        leaves = tuple(layout.values())
        for shapes in ([leaf.rest_shape for leaf in leaves], [leaf.shape for leaf in leaves]):
            key = _signature(dict(zip(layout, shapes, strict=True)))
            old = self._seen.get(key, leaves)
            same = old is not None and [x.shape for x in old] == [x.shape for x in leaves]
            self._seen[key] = leaves if same else None

    def find(self, leaves: Mapping[str, Any]) -> list[Leaf]:
        """Finds the layout of a tree at rest or logical, by its names and shapes.

        Raises:
          ValueError: where no such tree was laid out, or two with different logical shapes were.
        """
        known = self.layout or {}
        if all(name in known for name in leaves):
            shapes = {name: (known[name].shape, known[name].rest_shape) for name in leaves}
            if all(tuple(x.shape) in shapes[name] for name, x in leaves.items()):
                return [known[name] for name in leaves]
        key = _signature({name: tuple(x.shape) for name, x in leaves.items()})
        found = self._seen.get(key)
        if found is None:
            raise ValueError(
                "the logical shapes of this tree are not known, as this Zero did not lay it out; "
                "make Zero with like=params, or use zero.logical(tree, like=<its logical shapes>)."
            )
        return list(found)


def _signature(shapes: Mapping[str, tuple[int, ...]]) -> tuple[Any, ...]:
    return tuple(shapes.items())
