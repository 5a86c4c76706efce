"""The layout: which one dim of each leaf is cut, and how many rows of padding make it even.

Everything else reads this table: a pure function of shapes, number of shards and stage.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

P = PartitionSpec


@dataclasses.dataclass(frozen=True)
class Stage:
    """What a ZeRO stage cuts: the optimizer state, the summed gradients, the parameters at rest."""

    state: bool
    grads: bool
    params: bool


STAGES = (
    Stage(state=False, grads=False, params=False),
    Stage(state=True, grads=False, params=False),
    Stage(state=True, grads=True, params=False),
    Stage(state=True, grads=True, params=True),
)


@dataclasses.dataclass(frozen=True)
class Leaf:
    """How one array is cut: `dim` into `num_shards` even shards, after padding at its end.

    Args:
      name: its tree path, joined by dots.
      shape: the logical shape.
      dtype: its dtype.
      dim: the dim that is cut; None leaves the array whole on every device.
      num_shards: the size of the partition axes.
      why_whole: the reason where `dim` is None.
      is_stacked: whether dim 0 stacks layers, as far as shapes tell.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    dim: int | None
    num_shards: int
    why_whole: str = ""
    is_stacked: bool = False

    @property
    def padding(self) -> int:
        """Rows of zeros at the end of the cut dim, at rest."""
        return 0 if self.dim is None else -self.shape[self.dim] % self.num_shards

    @property
    def rest_shape(self) -> tuple[int, ...]:
        """The shape at rest: logical plus padding."""
        return tuple(n + self.padding * (d == self.dim) for d, n in enumerate(self.shape))

    @property
    def shard_shape(self) -> tuple[int, ...]:
        """The shape of the piece that one device holds."""
        return tuple(
            n // self.num_shards if d == self.dim else n for d, n in enumerate(self.rest_shape)
        )

    @property
    def rest_size(self) -> int:
        """Elements at rest over all shards, padding included."""
        return math.prod(self.rest_shape)

    @property
    def shard_bytes(self) -> int:
        """Bytes that one device holds."""
        return math.prod(self.shard_shape) * self.dtype.itemsize

    def spec(self, axes: tuple[str, ...]) -> PartitionSpec:
        """The PartitionSpec at rest over the partition `axes`."""
        if self.dim is None:
            return P()
        return P(*(axes if d == self.dim else None for d in range(self.dim + 1)))

    def whole(self, why: str) -> Leaf:
        """The same leaf, left whole."""
        return dataclasses.replace(self, dim=None, why_whole=why)


Layout = Mapping[str, Leaf]


def choose_dim(shape: tuple[int, ...], num_shards: int, *, is_stacked: bool) -> int:
    """Chooses the dim to cut: the least padding, then the leading one, never a stack if avoidable.

    >>> choose_dim((50257, 768), 8, is_stacked=False)
    1
    >>> choose_dim((8, 768, 768), 8, is_stacked=True)
    1
    """
    dims = range(1, len(shape)) if is_stacked and len(shape) > 1 else range(len(shape))
    return min(dims, key=lambda dim: ((-shape[dim] % num_shards) / shape[dim], dim))


def cut_leaf(
    name: str,
    shape: tuple[int, ...],
    dtype: Any,
    *,
    num_shards: int,
    min_size: int = 0,
    is_stacked: bool = False,
) -> Leaf:
    """Decides how one array is cut; scalars, empty arrays, keys and small leaves stay whole."""
    dtype = jax.dtypes.canonicalize_dtype(dtype) if not is_key(dtype) else dtype
    leaf = Leaf(name, tuple(shape), dtype, None, num_shards, is_stacked=is_stacked)
    if not shape:
        return leaf.whole("a scalar")
    if 0 in shape:
        return leaf.whole("empty")
    if is_key(dtype):
        return leaf.whole("a PRNG key")
    if num_shards == 1:
        return leaf.whole("one shard")
    if math.prod(shape) < min_size:
        return leaf.whole(f"{math.prod(shape)} elements, below min_size {min_size}")
    return dataclasses.replace(leaf, dim=choose_dim(shape, num_shards, is_stacked=is_stacked))


def make_layout(
    shapes: Mapping[str, jax.ShapeDtypeStruct],
    *,
    num_shards: int,
    min_size: int = 0,
    cut_layers: bool = False,
) -> dict[str, Leaf]:
    """Makes the layout of a tree of parameters.

    Args:
      shapes: logical shape and dtype by leaf name.
      num_shards: the size of the partition axes, at least 1.
      min_size: leaves of fewer elements stay whole.
      cut_layers: whether stacks of layers are cut between layers, so that each shard holds whole
        ones.

    Returns:
      A `Leaf` per name, in the same order.

    Raises:
      ValueError: for `cut_layers` where there is no stack, or one that `num_shards` does not
        divide.
    """
    stacked = find_stacked({name: tuple(x.shape) for name, x in shapes.items()})
    layout = {}
    for name, x in shapes.items():
        leaf = cut_leaf(
            name,
            x.shape,
            x.dtype,
            num_shards=num_shards,
            min_size=min_size,
            is_stacked=name in stacked,
        )
        is_trained = is_floating(x.dtype) or leaf.dim is None
        layout[name] = leaf if is_trained else leaf.whole("an integer: not trained")
    return _cut_between_layers(layout, num_shards) if cut_layers else layout


def _cut_between_layers(layout: Layout, num_shards: int) -> dict[str, Leaf]:
    stacks = {name: leaf.shape[0] for name, leaf in layout.items() if leaf.is_stacked}
    if not stacks:
        raise ValueError(
            "cut_layers=True, but no parameters are stacked layers (a subtree whose leaves share "
            "their first dim, one of them with three dims or more); leave it out."
        )
    uneven = [f"{name} of {n} layers" for name, n in stacks.items() if n % num_shards]
    if uneven:
        raise ValueError(
            f"cut_layers=True needs stacks that {num_shards} shards divide, but there are "
            f"{', '.join(uneven)}; leave it out, or use a number of devices that divides them."
        )
    return {
        name: dataclasses.replace(leaf, dim=0) if name in stacks and leaf.dim is not None else leaf
        for name, leaf in layout.items()
    }


def make_state_layout(
    shapes: Mapping[str, jax.ShapeDtypeStruct], params: Layout, *, num_shards: int, min_size: int
) -> dict[str, Leaf]:
    """Makes the layout of an optimizer state: a leaf that mirrors a parameter is cut as it is.

    A leaf mirrors the parameter whose name ends its own and whose shape it has. Any other leaf
    (a factor, a norm, a flat buffer) is decided from its own shape.
    """
    layout = {}
    for name, x in shapes.items():
        param = params.get(mirrored_name(name, params) or "")
        if param is not None and param.shape == tuple(x.shape):
            layout[name] = dataclasses.replace(param, name=name, dtype=np.dtype(x.dtype))
        else:
            layout[name] = cut_leaf(
                name, x.shape, x.dtype, num_shards=num_shards, min_size=min_size
            )
    return layout


def mirrored_name(name: str, params: Iterable[str]) -> str | None:
    """Returns the longest parameter name that ends `name` at a dot, or None.

    >>> mirrored_name("0.mu.h.weight", {"h.weight": 0, "weight": 1})
    'h.weight'
    """
    parts = name.split(".")
    tails = (".".join(parts[i:]) for i in range(len(parts)))
    return next((tail for tail in tails if tail in params), None)


def find_stacked(shapes: Mapping[str, tuple[int, ...]]) -> frozenset[str]:
    """Finds leaves whose dim 0 is a stack of layers: a subtree in which every leaf shares it.

    The subtree needs a leaf of at least three dims and more than one leaf, so that an ordinary
    kernel with its bias is not taken for a stack. A wrong guess costs a less contiguous gather,
    never a wrong number: what a scan really slices is checked when the loss is traced.
    """
    groups: dict[str, list[str]] = {}
    for name in shapes:
        parts = name.split(".")
        for i in range(1, len(parts)):
            groups.setdefault(".".join(parts[:i]), []).append(name)
    stacked: set[str] = set()
    for names in groups.values():
        leading = {shapes[name][:1] for name in names}
        deep = any(len(shapes[name]) >= 3 for name in names)
        if len(names) > 1 and len(leading) == 1 and deep:
            stacked.update(names)
    return frozenset(stacked)


def is_floating(dtype: Any) -> bool:
    """Whether arrays of this dtype have a gradient: real or complex floating point."""
    return jax.dtypes.issubdtype(dtype, np.inexact)


def is_key(dtype: Any) -> bool:
    """Whether arrays of this dtype are typed PRNG keys."""
    return jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key)


def pad(x: jax.Array, leaf: Leaf) -> jax.Array:
    """Pads a logical array to its shape at rest; a local copy, no collective."""
    if not leaf.padding:
        return x
    return jax.numpy.pad(x, [(0, leaf.padding * (d == leaf.dim)) for d in range(x.ndim)])


def unpad(x: jax.Array, leaf: Leaf) -> jax.Array:
    """Slices an array at rest to its logical shape; a local slice, no collective."""
    if not leaf.padding:
        return x
    return jax.lax.slice_in_dim(x, 0, leaf.shape[leaf.dim or 0], axis=leaf.dim or 0)
