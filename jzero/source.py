"""Where weights come from: anything that tells shapes by name and is read piece by piece."""

from collections.abc import Mapping
from typing import Protocol

import jax
import numpy as np

Index = tuple[slice, ...]  # one slice a dim, within the logical shape


class Source(Protocol):
    """Arrays by name that are never whole in memory unless someone asks for a whole one."""

    @property
    def leaves(self) -> Mapping[str, jax.ShapeDtypeStruct]:
        """Logical shape and dtype by name, as `jzero.trees.named_leaves` names them."""
        ...

    def read(self, name: str, index: Index) -> np.ndarray:
        """The piece of a leaf at `index`, in the leaf's dtype.

        Raises:
          ValueError: what is stored is damaged or gone; names it.
        """
        ...


def whole(shape: tuple[int, ...]) -> Index:
    """The index of all of an array.

    >>> whole((2, 3))
    (slice(0, 2, None), slice(0, 3, None))
    """
    return tuple(slice(0, size) for size in shape)


class Renamed:
    """A source under other names.

    Args:
      source: where the arrays are.
      names: of each array here, its name there; what is not in it is left out.
    """

    def __init__(self, source: Source, names: Mapping[str, str]) -> None:
        self._source, self._names = source, names

    @property
    def leaves(self) -> Mapping[str, jax.ShapeDtypeStruct]:
        """As `Source.leaves`."""
        found = self._source.leaves
        return {name: found[origin] for name, origin in self._names.items()}

    def read(self, name: str, index: Index) -> np.ndarray:
        """As `Source.read`."""
        return self._source.read(self._names[name], index)
