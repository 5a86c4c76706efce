"""The collectives, called by name inside a manual region, and parameters that gather when read.

Two directions, each the other's transpose: a shard is gathered to the whole weight, a whole
gradient is reduce-scattered to a shard.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jzero.layout import Leaf, is_floating

READ = "jzero_read"
DIFFERENTIATED = "jzero_differentiated"


@dataclasses.dataclass(frozen=True)
class Wire:
    """How one leaf travels: its layout, the partition axes, the dtype gradients are sent in.

    Hashable, so that it can be static data of a tree. `gather` says whether the value at rest is a
    shard (stage 3) or whole (stage 2).
    """

    leaf: Leaf
    axes: tuple[str, ...]
    gather: bool
    reduce_dtype: Any


def all_gather(shard: jax.Array, wire: Wire) -> jax.Array:
    """Gathers a shard (any leading stacked dims missing) to the logical whole, in its own dtype."""
    dim = _dim(shard, wire.leaf)
    with _named(wire.leaf):
        whole = jax.lax.all_gather(shard, wire.axes, axis=dim, tiled=True)
    if not wire.leaf.padding:
        return whole
    return jax.lax.slice_in_dim(whole, 0, _cut_size(wire.leaf), axis=dim)


def reduce_scatter(grad: jax.Array, wire: Wire) -> jax.Array:
    """Sums a logical whole over the partition axes; each device keeps its shard, padded with zeros.

    The local sum is cast to `reduce_dtype` just before it travels.
    """
    dim = _dim(grad, wire.leaf)
    if wire.leaf.padding:
        grad = jnp.pad(grad, [(0, wire.leaf.padding * (d == dim)) for d in range(grad.ndim)])
    grad = _to_send(grad, wire.reduce_dtype)
    with _named(wire.leaf):
        return jax.lax.psum_scatter(grad, wire.axes, scatter_dimension=dim, tiled=True)


def all_reduce(grad: jax.Array, wire: Wire, axes: tuple[str, ...]) -> jax.Array:
    """Sums over `axes`, where there are any, sent in `reduce_dtype`."""
    if not axes:
        return grad
    with _named(wire.leaf):
        return jax.lax.psum(_to_send(grad, wire.reduce_dtype), axes)


def _named(leaf: Leaf) -> Any:
    """A scope by which a compiled program's collectives say whose they are."""
    return jax.named_scope(f"param[{leaf.name}]")


def _to_send(grad: jax.Array, reduce_dtype: Any) -> jax.Array:
    """Casts a local sum to the dtype it travels in; complex ones keep theirs."""
    is_complex = jnp.issubdtype(grad.dtype, jnp.complexfloating)
    return grad if reduce_dtype is None or is_complex else grad.astype(reduce_dtype)


def _cut_size(leaf: Leaf) -> int:
    assert leaf.dim is not None
    return leaf.shape[leaf.dim]


def _dim(x: jax.Array, leaf: Leaf) -> int:
    """The cut dim of `x`, counted from the right: inside a scan the layer dim is gone."""
    assert leaf.dim is not None
    return x.ndim - (len(leaf.shape) - leaf.dim)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Held:
    """A parameter as a device holds it, to be read with `read`.

    `value` is the shard (stage 3) or the whole weight (stage 2). `tap` has the shape of the shard
    and is what the loss is differentiated by; None where no gradient is wanted. Slicing and
    scanning over leading dims work on both alike.
    """

    value: Any
    tap: Any
    wire: Wire = dataclasses.field(metadata={"static": True})

    def __getitem__(self, index: Any) -> Held:
        if index is Ellipsis:
            return self
        return jax.tree.map(lambda x: x[index], self)

    @property
    def shape(self) -> tuple[int, ...]:
        shape = self.wire.leaf.shape
        return shape[len(shape) - self.value.ndim :]

    @property
    def dtype(self) -> Any:
        return self.value.dtype

    @property
    def ndim(self) -> int:
        return self.value.ndim


def read(held: Held) -> jax.Array:
    """Reads the whole weight; its gradient is reduce-scattered to the tap where it arises."""
    _check_slice(held)
    if held.tap is None:
        return fetch(held.value, held.wire)
    return _read(held.wire, held.value, held.tap)


def fetch(value: jax.Array, wire: Wire) -> jax.Array:
    """The whole weight from what is held: gathered, or as it is."""
    return all_gather(value, wire) if wire.gather else value


def _read(wire: Wire, value: jax.Array, tap: jax.Array) -> jax.Array:
    """A gradient tap: forward the weight, backward the reduced gradient to `tap` alone."""

    dtype = tap.dtype  # not the tracer: the backward pass must hold none of the forward one

    @jax.custom_vjp
    def tapped(value: jax.Array, tap: jax.Array) -> jax.Array:
        return fetch(value, wire)

    def backward(_: None, ct: jax.Array) -> tuple[None, jax.Array]:
        return None, reduce_scatter(ct, wire).astype(dtype)

    tapped.defvjp(lambda value, tap: (fetch(value, wire), None), backward)
    return tapped(value, tap)


def _check_slice(held: Held) -> None:
    """Refuses a held value whose cut dim was sliced away or changed: the numbers would be wrong."""
    leaf, wire = held.wire.leaf, held.wire
    full = leaf.shard_shape if wire.gather else leaf.shape
    shape = tuple(held.value.shape)
    lost = len(full) - len(shape)
    if lost < 0 or shape != full[lost:] or lost > (leaf.dim or 0):
        raise ValueError(
            f"parameter {leaf.name} with shape {leaf.shape}, cut on dim {leaf.dim}, was sliced to "
            f"{shape} before it was read; only leading dims other than the cut one may be scanned "
            "or indexed. Read it whole first, or use stage 1."
        )


def read_hook(variable: nnx.Variable, value: Any) -> Any:
    """The `on_get_value` hook of a module's parameters: reads what is held."""
    del variable
    return read(value) if isinstance(value, Held) else value


def mark_hook(variable: nnx.Variable, value: Any) -> Any:
    """The hook of the recording pass: marks where a parameter is read."""
    del variable
    return mark_read(value) if is_floating(value.dtype) else value


@jax.custom_jvp
def mark_read(value: jax.Array) -> jax.Array:
    """Marks a read of a parameter in the traced program, with the number of dims the reader sees.

    Differentiating through it marks the parameter as one that the loss itself differentiates by.
    """
    return checkpoint_name(value, f"{READ}.{value.ndim}")


@mark_read.defjvp
def _mark_read_jvp(primals: tuple[Any], tangents: tuple[Any]) -> tuple[Any, Any]:
    (value,), (tangent,) = primals, tangents
    checkpoint_name(value, DIFFERENTIATED)
    return mark_read(value), tangent


@jax.custom_jvp
def mark_stream(x: Any, weights: Any) -> Any:
    """The identity on `x`; differentiating through it marks `weights`, as `mark_read` does."""
    del weights
    return x


@mark_stream.defjvp
def _mark_stream_jvp(primals: tuple[Any, Any], tangents: tuple[Any, Any]) -> tuple[Any, Any]:
    for weight in jax.tree.leaves(primals[1]):
        checkpoint_name(weight, DIFFERENTIATED)
    return primals[0], tangents[0]


def with_hook(state: Any, hook: Any) -> Any:
    """Returns fresh Variables with `hook` before a module's own read hooks."""
    state = jax.tree.map(lambda x: x, state, is_leaf=lambda x: isinstance(x, Held))
    for _, variable in nnx.to_flat_state(state):
        if isinstance(variable, nnx.Variable):
            own = variable.get_metadata("on_get_value", None)
            own = () if own is None else own if isinstance(own, tuple) else (own,)
            variable.set_metadata("on_get_value", (hook, *own))
    return state
