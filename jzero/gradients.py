"""Losses and gradients per device, summed locally over microbatches and reduced by name.

One function serves all stages: the layout says which parameters arrive as shards, which gradients
are born as shards, and which are reduced once after the last microbatch.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jzero import mesh as meshes
from jzero.collectives import (
    Held,
    Wire,
    all_reduce,
    mark_hook,
    read,
    read_hook,
    reduce_scatter,
    with_hook,
)
from jzero.layout import Leaf, P, Stage, is_floating
from jzero.reads import find_constrained_axes, plan_reads, trace
from jzero.trees import leaf_name, merge


@dataclasses.dataclass(frozen=True)
class Place:
    """What gradient code needs of a Zero: where things are cut and how they travel."""

    mesh: Any
    axes: tuple[str, ...]
    replicas: tuple[str, ...]
    stage: Stage
    reduce_dtype: Any

    @property
    def data_axes(self) -> tuple[str, ...]:
        """The axes that split the batch."""
        return (*self.replicas, *self.axes)

    @property
    def num_data_shards(self) -> int:
        """Into how many pieces the batch is split."""
        return meshes.axes_size(self.mesh, self.data_axes)

    def wire(self, leaf: Leaf) -> Wire:
        """How a leaf travels."""
        return Wire(leaf, self.axes, gather=self.stage.params, reduce_dtype=self.reduce_dtype)

    def param_spec(self, leaf: Leaf) -> jax.sharding.PartitionSpec:
        """The spec of a parameter at rest."""
        return leaf.spec(self.axes) if self.stage.params else P()


def check_batch(batch: Any, num_shards: int, num_microbatches: int, *, argnum: int) -> None:
    """Checks that dim 0 of every array of a batch argument can be split evenly.

    Raises:
      ValueError: naming each array whose dim 0 cannot, and the nearest sizes that can.
    """
    parts = num_shards * num_microbatches
    bad = []
    for path, x in jax.tree_util.tree_leaves_with_path(batch):
        where = f"argument {argnum}{jax.tree_util.keystr(path)}"
        if not getattr(x, "shape", ()):
            bad.append(f"{where} has no dim to split; pass it after the batch arguments instead")
        elif x.shape[0] % parts or not x.shape[0]:
            below, above = x.shape[0] // parts * parts, -(-(x.shape[0] or 1) // parts) * parts
            bad.append(
                f"{where} has {x.shape[0]} rows, not divisible by {num_shards} data shards x "
                f"{num_microbatches} microbatches = {parts}; use "
                + (f"{below} or {above}" if below else f"{above}")
            )
    if bad:
        raise ValueError("batch cannot be split: " + "; ".join(bad) + ".")


def fold_keys(tree: Any, index: Any) -> Any:
    """Folds `index` into every typed PRNG key of a tree, so that devices draw different numbers."""

    def fold(x: Any) -> Any:
        if not (hasattr(x, "dtype") and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)):
            return x
        folded = functools.partial(jax.random.fold_in, data=index)
        for _ in range(x.ndim):
            folded = jax.vmap(folded)
        return folded(x)

    return jax.tree.map(fold, tree)


def combine_outputs(tree: Any, axes: tuple[str, ...], rows: int, what: str) -> tuple[list, list, Any]:
    """Makes one global value of each device's outputs, inside the manual region.

    Floating scalars are averaged over devices, integer and boolean scalars summed; arrays hold one
    row per row of the batch and stay split.

    Returns:
      The scalars, the arrays, and a function that restores the tree from both lists.
    """
    leaves, treedef = jax.tree.flatten(tree)
    leaves = [jnp.asarray(x) for x in leaves]
    bad = [x.shape for x in leaves if x.ndim and x.shape[0] != rows]
    if bad:
        raise ValueError(
            f"{what} returned arrays of shapes {bad}, but each device has {rows} rows of the batch; "
            "return scalars (averaged over devices) or arrays with one row per batch row."
        )
    is_scalar = [x.ndim == 0 for x in leaves]
    scalars = [_mean_or_sum(x, axes) for x in leaves if x.ndim == 0]
    arrays = [x for x in leaves if x.ndim]

    def restore(scalars: Sequence[Any], arrays: Sequence[Any]) -> Any:
        s, a = iter(scalars), iter(arrays)
        return jax.tree.unflatten(treedef, [next(s) if flag else next(a) for flag in is_scalar])

    return scalars, arrays, restore


def _mean_or_sum(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    if is_floating(x.dtype):
        return jax.lax.pmean(x, axes)
    return jax.lax.psum(x.astype(jnp.int32) if x.dtype == bool else x, axes)


@dataclasses.dataclass(frozen=True)
class Loss:
    """A user's function of parameters as one device calls it: which leaves arrive how.

    `layout` has every parameter; `names` are the differentiated ones in the order of `treedef`.
    """

    fn: Callable[..., Any]
    place: Place
    layout: dict[str, Leaf]
    graphdef: Any
    treedef: Any
    names: tuple[str, ...]
    note_reads: Callable[[dict[str, bool]], None]

    @property
    def leaves(self) -> list[Leaf]:
        """The layout of the differentiated parameters, in order."""
        return [self.layout[name] for name in self.names]

    def is_born_cut(self, leaf: Leaf) -> bool:
        """Whether the gradient of a parameter is reduce-scattered where it arises."""
        return self.place.stage.grads and leaf.dim is not None

    def call(self, values: Sequence[Any], inputs: Inputs, hook: Any) -> tuple[Any, Any]:
        """Rebuilds the user's parameters, calls the function; returns its output and the new state."""
        tree = jax.tree.unflatten(self.treedef, values)
        if self.graphdef is None:
            return self.fn(tree, *inputs.args), None
        frozen = self._hold_frozen(inputs.frozen)
        hooked = [with_hook(part, hook) for part in (tree, frozen, inputs.state)]
        module = merge(self.graphdef, *hooked)
        out = self.fn(module, *inputs.args)
        return out, _state_like(inputs.state, module)

    def _hold_frozen(self, frozen: Any) -> Any:
        if not self.place.stage.params:
            return frozen

        def hold(path: Any, x: Any) -> Any:
            leaf = self.layout[leaf_name(path)]
            return x if leaf.dim is None else Held(x, None, self.place.wire(leaf))

        return jax.tree_util.tree_map_with_path(hold, frozen)

    def hold(self, values: Sequence[Any], taps: Sequence[Any], on_read: Sequence[bool]) -> list[Any]:
        """What the user's function is given for each parameter: held, or read once before the loss."""
        out = []
        for leaf, value, tap, later in zip(self.leaves, values, taps, on_read, strict=True):
            if self.is_born_cut(leaf):
                held = Held(value, tap, self.place.wire(leaf))
                out.append(held if later else read(held))
            else:
                out.append(value if tap is None else tap)
        return out

    def plan(self, values: Sequence[Any], inputs: Inputs) -> list[bool]:
        """Traces the function once to say for each parameter whether it is gathered where it is read.

        Raises:
          ValueError: where the function constrains what is already split by hand.
        """
        cut = [leaf for leaf in self.leaves if self.is_born_cut(leaf)]

        def call(wholes: Sequence[Any]) -> Any:
            given = {leaf.name: w for leaf, w in zip(cut, wholes, strict=True)}
            whole = [given.get(n, v) for n, v in zip(self.names, values, strict=True)]
            out, _ = self.call(whole, inputs, mark_hook)
            return jax.tree.leaves(out)

        shapes = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in cut]
        jaxpr = _trace_without_constraints(call, shapes, self.place.data_axes)
        on_read = {leaf.name: r for leaf, r in zip(cut, plan_reads(jaxpr, cut), strict=True)}
        self.note_reads(on_read)
        return [on_read.get(name, False) for name in self.names]


def _trace_without_constraints(fn: Any, shapes: Sequence[Any], axes: tuple[str, ...]) -> Any:
    """Traces a function and refuses sharding constraints over axes that are split by hand."""
    message = (
        "the loss names mesh axis {!r} in a sharding constraint, but it runs on one device's rows, "
        f"where {axes} are already split by hand; drop the constraint, or use stage 1 with your own "
        "gradients."
    )
    try:
        jaxpr = trace(fn, shapes)
    except Exception as error:
        named = [axis for axis in axes if f"'{axis}'" in str(error)]
        if named and ("manual" in str(error).lower() or "Auto axes" in str(error)):
            raise ValueError(message.format(named[0])) from error
        raise
    named = sorted(find_constrained_axes(jaxpr) & set(axes))
    if named:
        raise ValueError(message.format(named[0]))
    return jaxpr


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Inputs:
    """What a loss needs besides the differentiated parameters."""

    frozen: Any
    state: Any
    args: tuple[Any, ...]

    def folded(self, index: Any, batch_argnums: Sequence[int]) -> Inputs:
        """The same with PRNG keys of the module and of the arguments folded with `index`."""
        args = tuple(a if i in batch_argnums else fold_keys(a, index) for i, a in enumerate(self.args))
        return dataclasses.replace(self, state=fold_keys(self.state, index), args=args)


def _state_like(state: Any, module: nnx.Module) -> Any:
    """The non-parameter state of a module after a call; keys stay those of before."""
    after = dict(nnx.to_flat_state(nnx.state(module)))

    def updated(path: Any, before: Any) -> Any:
        value = after[path].get_raw_value()
        is_key = jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key)
        return before if is_key else before.replace(value)

    flat = [(path, updated(path, before)) for path, before in nnx.to_flat_state(state)]
    return nnx.from_flat_state(flat)


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
    zeros = [jnp.zeros(g.shape, acc.dtype(leaf)) for g, leaf in zip(shapes[2], _trained(loss), strict=True)]
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


def _trained(loss: Loss) -> list[Leaf]:
    return [leaf for leaf in loss.leaves if is_floating(leaf.dtype)]


def _grads_of_microbatch(
    loss: Loss, acc: Accumulation, values: Sequence[Any], on_read: Sequence[bool], inputs: Inputs
) -> tuple[Any, Any, list[Any], Any]:
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
    """Sums one gradient over the devices that have not been summed over yet, and divides by `count`."""
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


def reduced_value_and_grad(loss: Loss, acc: Accumulation, values: Sequence[Any], inputs: Inputs) -> Any:
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
            for leaf, g in zip(_trained(loss), grads, strict=True)
        ]
        scalars, arrays, back = combine_outputs(aux, place.data_axes, rows, "has_aux: loss_fn")
        restore.append(back)
        value = jax.lax.pmean(total / acc.num_microbatches, place.data_axes)
        return value, scalars, arrays, grads, _averaged(_keys_of(inputs.state, state), place.data_axes)

    specs = (P(), P(), data, [grad_spec(place, leaf) for leaf in _trained(loss)], P())
    run = meshes.manual(place.mesh, local, _in_specs(loss, acc.batch_argnums, inputs), specs)
    value, scalars, arrays, grads, state = meshes.with_auto_axes(place.mesh, run, specs)(values, inputs)
    given = iter(grads)
    grads = [
        next(given) if is_floating(leaf.dtype) else jnp.zeros(leaf.shape, leaf.dtype)
        for leaf in loss.leaves
    ]
    return value, restore[-1](scalars, arrays), jax.tree.unflatten(loss.treedef, grads), state


def reduced_apply(loss: Loss, batch_argnums: tuple[int, ...], values: Sequence[Any], inputs: Inputs) -> Any:
    """The combined output of a function without gradients, called under `with_auto_axes`."""
    place, restore = loss.place, []

    def local(values: Sequence[Any], inputs: Inputs) -> Any:
        rows = _num_rows(inputs, batch_argnums)
        mine = inputs.folded(jax.lax.axis_index(place.data_axes), batch_argnums)
        on_read = loss.plan(values, mine)
        held = loss.hold(values, [None] * len(values), on_read)
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
    args = tuple(
        P(place.data_axes) if i in batch_argnums else P() for i in range(len(inputs.args))
    )
    return (values, Inputs(frozen, P(), args))
