"""Gradients per device, summed locally over microbatches and reduced by name.

One function serves all stages: the layout says which parameters arrive as shards, which gradients
are born as shards, and which are reduced once after the last microbatch.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jzero import mesh as meshes
from jzero.collectives import all_reduce, read_hook, reduce_scatter
from jzero.layout import Leaf, P, is_floating
from jzero.losses import Inputs, Loss, Place, Reads, combine_outputs
from jzero.trees import leaf_name


@dataclasses.dataclass(frozen=True)
class Accumulation:
    """How often a loss is differentiated before its gradients are used."""

    num_microbatches: int
    batch_argnums: tuple[int, ...]
    has_aux: bool

    def dtype(self, leaf: Leaf) -> Any:
        """The dtype in which a gradient is summed: at least float32 over several microbatches."""
        if self.num_microbatches == 1:
            return leaf.dtype
        return jnp.promote_types(leaf.dtype, jnp.float32)


def local_value_and_grad(
    loss: Loss, accumulation: Accumulation, values: Sequence[Any], inputs: Inputs
) -> tuple[Any, Any, list[Any], Any]:
    """One device's loss, auxiliary output and gradients, summed over its microbatches.

    Returns:
      (loss summed, aux per row or averaged, gradients, new module state). The gradient of a leaf
      that is born cut is a shard already summed over the partition axes; any other is a local sum.
    """
    acc = accumulation
    first = inputs if acc.num_microbatches == 1 else _microbatch(inputs, acc, 0)
    on_read = loss.plan(values, first)
    grad_fn = functools.partial(_grads_of_microbatch, loss, acc, values, on_read)
    if acc.num_microbatches == 1:
        return grad_fn(inputs)

    def body(carry: Any, index: jax.Array) -> Any:
        total, sums, state = carry
        mine = _microbatch(dataclasses.replace(inputs, state=state), acc, index)
        value, aux, grads, state = grad_fn(mine)
        sums = [s + g.astype(s.dtype) for s, g in zip(sums, grads, strict=True)]
        return (total + value, sums, _keys_of(inputs.state, state)), aux

    shapes = jax.eval_shape(grad_fn, first)
    zeros = [
        jnp.zeros(g.shape, acc.dtype(leaf)) for g, leaf in zip(shapes[2], loss.trained, strict=True)
    ]
    start = (jnp.zeros((), shapes[0].dtype), zeros, inputs.state)
    (total, sums, state), aux = jax.lax.scan(body, start, jnp.arange(acc.num_microbatches))
    return total, jax.tree.map(_join_microbatches, aux), sums, state


def _keys_of(before: Any, after: Any) -> Any:
    """`after` with the PRNG keys of `before`: a microbatch's folded keys are its own."""

    def pick(b: Any, a: Any) -> Any:
        return b if jax.dtypes.issubdtype(b.dtype, jax.dtypes.prng_key) else a

    return jax.tree.map(pick, before, after)


def _microbatch(inputs: Inputs, acc: Accumulation, index: Any) -> Inputs:
    def slice_rows(x: Any) -> Any:
        rows = x.shape[0] // acc.num_microbatches
        return jax.lax.dynamic_slice_in_dim(x, index * rows, rows)

    args = tuple(
        jax.tree.map(slice_rows, a) if i in acc.batch_argnums else a
        for i, a in enumerate(inputs.args)
    )
    return dataclasses.replace(inputs, args=args).folded(index, acc.batch_argnums)


def _join_microbatches(x: jax.Array) -> jax.Array:
    if x.ndim > 1:
        return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])
    return x.mean(0) if is_floating(x.dtype) else x.sum(0)


def _grads_of_microbatch(
    loss: Loss, acc: Accumulation, values: Sequence[Any], on_read: Reads, inputs: Inputs
) -> tuple[Any, Any, list[Any], Any]:
    inputs = dataclasses.replace(inputs, frozen=loss.hold_frozen(inputs.frozen, on_read))

    def loss_of(taps: Sequence[Any]) -> Any:
        given = iter(taps)
        taps = [next(given) if is_floating(leaf.dtype) else None for leaf in loss.leaves]
        out, state = loss.call(loss.hold(values, taps, on_read), inputs, read_hook)
        value, aux = out if acc.has_aux else (out, None)
        return _checked_loss(value), (aux, state)

    pairs = zip(loss.leaves, values, strict=True)
    taps = [
        jnp.zeros(leaf.shard_shape, acc.dtype(leaf)) if loss.is_born_cut(leaf) else value
        for leaf, value in pairs
        if is_floating(leaf.dtype)
    ]
    (value, (aux, state)), grads = jax.value_and_grad(loss_of, has_aux=True)(taps)
    return value, aux, grads, state


def _checked_loss(value: Any) -> Any:
    if getattr(value, "shape", None) != () or not is_floating(value.dtype):
        what = f"{getattr(value, 'dtype', type(value).__name__)}{list(getattr(value, 'shape', ()))}"
        raise ValueError(
            f"the loss must be a floating-point scalar, but loss_fn returned {what}; "
            "take its mean, or pass has_aux=True where it returns (loss, aux)."
        )
    return value


def reduce_gradient(loss: Loss, leaf: Leaf, grad: jax.Array, count: int, dtype: Any) -> jax.Array:
    """Sums a gradient over the devices not summed over yet, and divides by `count`."""
    place = loss.place
    if loss.is_born_cut(leaf):
        grad = all_reduce(grad, place.replicas, place.reduce_dtype) if place.replicas else grad
    elif place.stage.state and leaf.dim is not None:
        grad = reduce_scatter(grad, place.wire(leaf))
        grad = all_reduce(grad, place.replicas) if place.replicas else grad
    else:
        grad = all_reduce(grad, place.data_axes, place.reduce_dtype)
    return grad.astype(dtype) / jnp.asarray(count, dtype)


def grad_spec(place: Place, leaf: Leaf) -> jax.sharding.PartitionSpec:
    """The spec of a gradient as `value_and_grad` returns it."""
    return leaf.spec(place.axes) if place.stage.state else P()


def reduced_value_and_grad(
    loss: Loss, acc: Accumulation, values: Sequence[Any], inputs: Inputs
) -> Any:
    """The global loss, aux, gradients and module state, called under `with_auto_axes`."""
    place, restore = loss.place, []
    data = P(place.data_axes)

    def local(values: Sequence[Any], inputs: Inputs) -> Any:
        rows = _num_rows(inputs, acc.batch_argnums)
        device = jax.lax.axis_index(place.data_axes)
        mine = inputs.folded(device, acc.batch_argnums)
        total, aux, grads, state = local_value_and_grad(loss, acc, values, mine)
        count = place.num_data_shards * acc.num_microbatches
        grads = [
            reduce_gradient(loss, leaf, g, count, acc.dtype(leaf))
            for leaf, g in zip(loss.trained, grads, strict=True)
        ]
        scalars, arrays, back = combine_outputs(aux, place.data_axes, rows, "has_aux: loss_fn")
        restore.append(back)
        value = jax.lax.pmean(total / acc.num_microbatches, place.data_axes)
        return (
            value,
            scalars,
            arrays,
            grads,
            _averaged(_keys_of(inputs.state, state), place.data_axes),
        )

    specs = (P(), P(), data, [grad_spec(place, leaf) for leaf in loss.trained], P())
    run = meshes.manual(place.mesh, local, _in_specs(loss, acc.batch_argnums, inputs), specs)
    value, scalars, arrays, grads, state = meshes.with_auto_axes(place.mesh, run, specs)(
        values, inputs
    )
    given = iter(grads)
    grads = [
        next(given) if is_floating(leaf.dtype) else jnp.zeros(leaf.shape, leaf.dtype)
        for leaf in loss.leaves
    ]
    return value, restore[-1](scalars, arrays), jax.tree.unflatten(loss.treedef, grads), state


def reduced_apply(
    loss: Loss, batch_argnums: tuple[int, ...], values: Sequence[Any], inputs: Inputs
) -> Any:
    """The combined output of a function without gradients, called under `with_auto_axes`."""
    place, restore = loss.place, []

    def local(values: Sequence[Any], inputs: Inputs) -> Any:
        rows = _num_rows(inputs, batch_argnums)
        mine = inputs.folded(jax.lax.axis_index(place.data_axes), batch_argnums)
        on_read = loss.plan(values, mine)
        held = loss.hold(values, [None] * len(values), on_read)
        mine = dataclasses.replace(mine, frozen=loss.hold_frozen(mine.frozen, on_read))
        out, _ = loss.call(held, mine, read_hook)
        scalars, arrays, back = combine_outputs(out, place.data_axes, rows, "the function")
        restore.append(back)
        return scalars, arrays

    specs = (P(), P(place.data_axes))
    run = meshes.manual(place.mesh, local, _in_specs(loss, batch_argnums, inputs), specs)
    scalars, arrays = meshes.with_auto_axes(place.mesh, run, specs)(values, inputs)
    return restore[-1](scalars, arrays)


def _num_rows(inputs: Inputs, batch_argnums: Sequence[int]) -> int:
    leaves = jax.tree.leaves([inputs.args[i] for i in batch_argnums])
    return leaves[0].shape[0] if leaves else 0


def _averaged(state: Any, axes: tuple[str, ...]) -> Any:
    """Module state as one value: floating parts averaged over devices, the rest alike on all."""
    return jax.tree.map(lambda x: jax.lax.pmean(x, axes) if is_floating(x.dtype) else x, state)


def _in_specs(loss: Loss, batch_argnums: Sequence[int], inputs: Inputs) -> Any:
    place = loss.place
    values = [place.param_spec(leaf) for leaf in loss.leaves]
    frozen = jax.tree_util.tree_map_with_path(
        lambda path, _: place.param_spec(loss.layout[leaf_name(path)]), inputs.frozen
    )
    args = tuple(P(place.data_axes) if i in batch_argnums else P() for i in range(len(inputs.args)))
    return (values, Inputs(frozen, P(), args))
