"""Gradients per device, summed locally over microbatches and reduced by name.

One function serves all stages: the layout says which parameters arrive as shards, which gradients
are born as shards, and which are reduced once after the last microbatch.

What is differentiated is divided by the number of devices (or by the weights) before the backward
pass, so that what is summed and sent is a part of the mean: 16-bit sums do not overflow where the
mean does not.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jzero import mesh as meshes
from jzero.held import all_reduce, read_hook, reduce_scatter
from jzero.layout import Leaf, P, is_floating
from jzero.losses import Inputs, Loss, Place, Reads
from jzero.outputs import Outputs, constant_weight, split_loss
from jzero.trees import leaf_name


@dataclasses.dataclass(frozen=True)
class Accumulation:
    """How often a loss is differentiated before its gradients are used.

    Args:
      num_microbatches: how often.
      batch_argnums: which arguments hold the batch.
      has_aux: whether the loss returns (loss, aux).
      accumulator_dtype: in which gradients of several microbatches are summed; None: at least
        float32.
      keep_gathered: whether parameters cut at rest are gathered once for all microbatches.
    """

    num_microbatches: int = 1
    batch_argnums: tuple[int, ...] = (0,)
    has_aux: bool = False
    accumulator_dtype: Any = None
    keep_gathered: bool = False

    def dtype(self, leaf: Leaf, reduce_dtype: Any = None) -> Any:
        """The dtype of a gradient that is returned: no narrower than it was summed in."""
        if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
            return leaf.dtype
        if self.num_microbatches == 1:
            return jnp.promote_types(leaf.dtype, reduce_dtype or leaf.dtype)
        return self.accumulator_dtype or jnp.promote_types(leaf.dtype, jnp.float32)


class Microbatch(NamedTuple):
    """What one microbatch gives on one device.

    Args:
      total: the loss, or the sum that has a weight.
      weight: what the sum is to be divided by; None for a plain mean.
      unit: what the gradients were divided by and are to be multiplied with; None: nothing.
      aux: auxiliary output.
      grads: of the trained leaves; shards already summed over the partition axes for those that
        are born cut, local sums for the others.
      state: of the module afterwards.
    """

    total: jax.Array
    weight: Any
    unit: Any
    aux: Any
    grads: list[jax.Array]
    state: Any


def local_value_and_grad(
    loss: Loss, acc: Accumulation, values: Sequence[Any], inputs: Inputs, scale: Any
) -> tuple[Microbatch, list[jax.Array], Outputs]:
    """One device's sums over its microbatches; aux combined over them as `Outputs` says."""
    rows = inputs.num_rows(acc.batch_argnums) // acc.num_microbatches
    states = inputs.replicated_shapes(acc.batch_argnums)
    first = inputs if acc.num_microbatches == 1 else _microbatch(inputs, acc, 0)
    on_read = loss.plan(values, first, acc.batch_argnums)
    inputs.warn_of_raw_keys(acc.batch_argnums)
    if acc.keep_gathered:
        loss, values, inputs = loss.gathered(values, inputs)
        first = dataclasses.replace(first, frozen=inputs.frozen)
    grad_fn = functools.partial(_grads_of_microbatch, loss, acc, values, on_read, scale)
    if acc.num_microbatches == 1:
        done = grad_fn(inputs)
        outputs = Outputs.of(done.aux, rows, states, "has_aux: loss_fn")
        return done, outputs.leaves(done.aux), outputs

    def body(carry: Microbatch, index: jax.Array) -> Any:
        mine = _microbatch(dataclasses.replace(inputs, state=carry.state), acc, index)
        new = grad_fn(mine)
        pairs = zip(carry.grads, new.grads, strict=True)
        grads = [_add(total, grad, new.unit) for total, grad in pairs]
        return Microbatch(
            total=carry.total + new.total,
            weight=None if new.weight is None else carry.weight + new.weight,
            unit=None,
            aux=None,
            grads=grads,
            state=_keys_of(inputs.state, new.state),
        ), new.aux

    shapes = jax.eval_shape(grad_fn, first)
    outputs = Outputs.of(shapes.aux, rows, states, "has_aux: loss_fn")
    total, weight = jax.tree.map(jnp.zeros_like, (shapes.total, shapes.weight))
    sums = [
        jnp.zeros(g.shape, acc.dtype(leaf))
        for g, leaf in zip(shapes.grads, loss.trained, strict=True)
    ]
    start = Microbatch(total, weight, None, None, sums, inputs.state)
    done, aux = jax.lax.scan(body, start, jnp.arange(acc.num_microbatches))
    return done, outputs.joined(aux), outputs


def _add(total: jax.Array, grad: jax.Array, unit: Any) -> jax.Array:
    """The sum of gradients with one more, in the sum's dtype; multiplied in at least float32."""
    if unit is None:
        return total + grad.astype(total.dtype)
    wide = jnp.promote_types(total.dtype, jnp.float32)
    return (total.astype(wide) + grad.astype(wide) * unit).astype(total.dtype)


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


def _grads_of_microbatch(
    loss: Loss,
    acc: Accumulation,
    values: Sequence[Any],
    on_read: Reads,
    scale: Any,
    inputs: Inputs,
) -> Microbatch:
    inputs = dataclasses.replace(inputs, frozen=loss.hold_frozen(inputs.frozen, on_read))

    def loss_of(taps: Sequence[Any]) -> Any:
        given = iter(taps)
        taps = [next(given) if is_floating(leaf.dtype) else None for leaf in loss.leaves]
        out, state = loss.call(loss.hold(values, taps, on_read), inputs, read_hook)
        total, weight, aux = split_loss(out, acc.has_aux)
        _check_range(acc, weight)
        return total, (None if weight is None else constant_weight(weight), aux, state)

    pairs = zip(loss.leaves, values, strict=True)
    reduce_dtype = loss.place.reduce_dtype
    taps = [
        jnp.zeros(leaf.shard_shape, acc.dtype(leaf, reduce_dtype))
        if loss.is_born_cut(leaf)
        else value
        for leaf, value in pairs
        if is_floating(leaf.dtype)
    ]
    total, backward, (weight, aux, state) = jax.vjp(loss_of, taps, has_aux=True)
    unit = None if weight is None else _unit(loss, weight)
    divisor = loss.place.num_data_shards if unit is None else unit
    seed = jnp.asarray(1 if scale is None else scale, total.dtype)
    (grads,) = backward(seed / jnp.asarray(divisor, total.dtype))
    return Microbatch(total, weight, unit, aux, grads, state)


def _check_range(acc: Accumulation, weight: Any) -> None:
    is_narrow = acc.accumulator_dtype is not None and acc.num_microbatches > 1
    if weight is not None and is_narrow and jnp.dtype(acc.accumulator_dtype) == jnp.float16:
        raise ValueError(
            "accumulator_dtype float16 cannot hold the gradients of a loss (sum, weight), which "
            "are summed times their weights; use float32 or bfloat16."
        )


def _unit(loss: Loss, weight: jax.Array) -> jax.Array:
    """What a sum is divided by before its backward pass, so that its gradient is like a mean's.

    A gradient that is reduced within the backward pass needs the same divisor on every device: the
    weight of all devices. Any other is reduced after the last microbatch: no collective here.
    """
    place = loss.place
    if any(loss.is_born_cut(leaf) for leaf in loss.trained):
        weight = jax.lax.psum(weight, place.data_axes)
    else:
        weight = weight * place.num_data_shards
    return jnp.where(weight == 0, 1, weight).astype(weight.dtype)


def reduce_gradient(loss: Loss, leaf: Leaf, grad: jax.Array, factor: Any, dtype: Any) -> jax.Array:
    """Multiplies a gradient by `factor`, and sums it over the devices not summed over yet.

    Sent in `reduce_dtype`, by default the parameter's own, whatever it was accumulated in.
    """
    place = loss.place
    wire = place.wire(leaf)
    if factor is not None:
        grad = grad.astype(jnp.promote_types(dtype, jnp.float32))
        grad = grad * jnp.asarray(factor, jnp.finfo(grad.dtype).dtype)
    if loss.is_born_cut(leaf):
        grad = all_reduce(grad, wire, place.replicas)
    elif place.stage.state and leaf.dim is not None:
        grad = all_reduce(reduce_scatter(grad, wire), wire, place.replicas)
    else:
        grad = all_reduce(grad, wire, place.data_axes)
    return grad.astype(dtype)


def grad_spec(place: Place, leaf: Leaf) -> jax.sharding.PartitionSpec:
    """The spec of a gradient as `value_and_grad` returns it."""
    return leaf.spec(place.axes) if place.stage.state else P()


def reduced_value_and_grad(
    loss: Loss, acc: Accumulation, values: Sequence[Any], inputs: Inputs, scale: Any
) -> Any:
    """The global loss, aux, gradients and module state, called under `with_auto_axes`."""
    place, restore = loss.place, []
    axes = place.data_axes

    def local(values: Sequence[Any], inputs: Inputs, scale: Any) -> Any:
        mine = inputs.folded(jax.lax.axis_index(axes), acc.batch_argnums)
        done, aux, outputs = local_value_and_grad(loss, acc, values, mine, scale)
        restore.append(outputs.restore)
        value, factor = _global_mean(done, acc.num_microbatches, axes)
        grads = [
            reduce_gradient(loss, leaf, g, factor, acc.dtype(leaf, place.reduce_dtype))
            for leaf, g in zip(loss.trained, done.grads, strict=True)
        ]
        state = _averaged(_keys_of(inputs.state, done.state), axes)
        return value, *outputs.combined(aux, axes), grads, state

    specs = (P(), P(), P(axes), [grad_spec(place, leaf) for leaf in loss.trained], P())
    given = (*_in_specs(loss, acc.batch_argnums, inputs), P())
    run = meshes.manual(place.mesh, local, given, specs)
    value, replicated, split, grads, state = meshes.with_auto_axes(place.mesh, run, specs)(
        values, inputs, scale
    )
    found = iter(grads)
    grads = [
        next(found) if is_floating(leaf.dtype) else jnp.zeros(leaf.shape, leaf.dtype)
        for leaf in loss.leaves
    ]
    return value, restore[-1](replicated, split), jax.tree.unflatten(loss.treedef, grads), state


def _global_mean(done: Microbatch, count: int, axes: tuple[str, ...]) -> tuple[jax.Array, Any]:
    """The global loss, and the factor that makes the sum of gradients that of the mean."""
    if done.weight is None:
        mean = jax.lax.pmean(done.total / count, axes)
        return mean, None if count == 1 else 1 / count
    total, weight = jax.lax.psum((done.total, done.weight), axes)
    unit = 1 if done.unit is None else done.unit
    return total / weight, unit / weight


def reduced_apply(
    loss: Loss,
    batch_argnums: tuple[int, ...],
    has_weight: bool,
    values: Sequence[Any],
    inputs: Inputs,
) -> Any:
    """The combined output of a function without gradients, called under `with_auto_axes`."""
    place, restore = loss.place, []

    def local(values: Sequence[Any], inputs: Inputs) -> Any:
        mine = inputs.folded(jax.lax.axis_index(place.data_axes), batch_argnums)
        on_read = loss.plan(values, mine, ())
        held = loss.hold(values, [None] * len(values), on_read)
        mine = dataclasses.replace(mine, frozen=loss.hold_frozen(mine.frozen, on_read))
        out, _ = loss.call(held, mine, read_hook)
        out = split_loss(out, has_aux=False)[:2] if has_weight else out
        states = inputs.replicated_shapes(batch_argnums)
        outputs = Outputs.of(out, inputs.num_rows(batch_argnums), states, "the function")
        restore.append(outputs.restore)
        return outputs.combined(outputs.leaves(out), place.data_axes)

    specs = (P(), P(place.data_axes))
    run = meshes.manual(place.mesh, local, _in_specs(loss, batch_argnums, inputs), specs)
    replicated, split = meshes.with_auto_axes(place.mesh, run, specs)(values, inputs)
    out = restore[-1](replicated, split)
    if not has_weight:
        return out
    total, weight = out
    return total if weight is None else total / weight


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
