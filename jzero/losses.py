"""A user's loss as one device calls it: its rows, its keys, its parameters held or whole."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from jzero import mesh as meshes
from jzero.held import Held, Wire, fetch, mark_hook, read, with_hook
from jzero.layout import STAGES, Leaf, P, Stage, is_floating
from jzero.reads import depends_on, find_constrained_axes, plan_reads, trace
from jzero.trees import leaf_name, merge, named_leaves


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
        """How a leaf travels; its gradient in `reduce_dtype`, by default the parameter's own."""
        return Wire(leaf, self.axes, self.stage.params, self.reduce_dtype or leaf.dtype)

    def param_spec(self, leaf: Leaf) -> jax.sharding.PartitionSpec:
        """The spec of a parameter at rest."""
        return leaf.spec(self.axes) if self.stage.params else P()


def is_born_cut(leaf: Leaf, stage: Stage, num_microbatches: int | None) -> bool:
    """Whether a gradient is reduce-scattered where it arises: no device holds it whole.

    At stage 1 several microbatches are summed first, and reduced once; a single one is reduced as
    at stage 2, beside the compute of the layers before it.
    """
    if leaf.dim is None or not stage.state:
        return False
    is_cut_in_layer = not (leaf.is_stacked and leaf.dim == 0)
    return stage.grads or (num_microbatches == 1 and is_cut_in_layer)


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


Reads = Mapping[str, bool]  # by parameter: whether it is gathered where it is read


@dataclasses.dataclass(frozen=True)
class Loss:
    """A user's function of parameters as one device calls it: which leaves arrive how.

    `layout` has every parameter; `names` are the differentiated ones in the order of `treedef`.
    `num_microbatches` is None where no gradient is taken.
    """

    fn: Callable[..., Any]
    place: Place
    layout: dict[str, Leaf]
    graphdef: Any
    treedef: Any
    names: tuple[str, ...]
    num_microbatches: int | None
    note_reads: Callable[[dict[str, bool]], None]

    @property
    def leaves(self) -> list[Leaf]:
        """The layout of the differentiated parameters, in order."""
        return [self.layout[name] for name in self.names]

    @property
    def trained(self) -> list[Leaf]:
        """The leaves that get a gradient."""
        return [leaf for leaf in self.leaves if is_floating(leaf.dtype)]

    def is_born_cut(self, leaf: Leaf) -> bool:
        """Whether the gradient of a parameter is reduce-scattered where it arises."""
        return is_born_cut(leaf, self.place.stage, self.num_microbatches)

    def call(self, values: Sequence[Any], inputs: Inputs, hook: Any) -> tuple[Any, Any]:
        """Rebuilds the user's parameters and calls; returns the output and the new state."""
        tree = jax.tree.unflatten(self.treedef, values)
        if self.graphdef is None:
            return self.fn(tree, *inputs.args), None
        hooked = [with_hook(part, hook) for part in (tree, inputs.frozen, inputs.state)]
        module = merge(self.graphdef, *hooked)
        out = self.fn(module, *inputs.args)
        return out, _state_like(inputs.state, module)

    def hold(self, values: Sequence[Any], taps: Sequence[Any], on_read: Reads) -> list[Any]:
        """What the function is given for each parameter: held, or read once before the loss."""
        out = []
        for leaf, value, tap in zip(self.leaves, values, taps, strict=True):
            if self.is_born_cut(leaf):
                out.append(self._held(leaf, value, tap, on_read))
            else:
                out.append(value if tap is None else tap)
        return out

    def hold_frozen(self, frozen: Any, on_read: Reads) -> Any:
        """The same for the parameters of a module that get no gradient."""
        return self._map_frozen(frozen, lambda leaf, x: self._held(leaf, x, None, on_read))

    def _held(self, leaf: Leaf, value: Any, tap: Any, on_read: Reads) -> Any:
        held = Held(value, tap, self.place.wire(leaf))
        return held if on_read[leaf.name] else read(held)

    def _map_frozen(self, frozen: Any, fn: Callable[[Leaf, Any], Any]) -> Any:
        """Maps `fn` over the frozen parameters that are cut at rest."""

        def visit(path: Any, x: Any) -> Any:
            leaf = self.layout[leaf_name(path)]
            return fn(leaf, x) if self.place.stage.params and leaf.dim is not None else x

        return jax.tree_util.tree_map_with_path(visit, frozen)

    def gathered(self, values: Sequence[Any], inputs: Inputs) -> tuple[Loss, list[Any], Inputs]:
        """The same with every parameter gathered now, and kept: gradients are cut as before."""

        def fetched(leaf: Leaf, value: Any) -> Any:
            return fetch(value, self.place.wire(leaf)) if self.is_born_cut(leaf) else value

        place = dataclasses.replace(self.place, stage=STAGES[2])
        whole = [fetched(leaf, value) for leaf, value in zip(self.leaves, values, strict=True)]
        frozen = self._map_frozen(inputs.frozen, fetched)
        return (
            dataclasses.replace(self, place=place),
            whole,
            dataclasses.replace(inputs, frozen=frozen),
        )

    def plan(self, values: Sequence[Any], inputs: Inputs, batch_argnums: Sequence[int]) -> Reads:
        """Traces the function once and says which parameters are gathered where they are read.

        Raises:
          ValueError: where the function constrains what is already split by hand, or sets a
            Variable of integers from the rows of one device.
        """
        cut = [leaf for leaf in self.leaves if self.is_born_cut(leaf)]
        self._map_frozen(inputs.frozen, lambda leaf, _: cut.append(leaf))
        rows, treedef = jax.tree.flatten([inputs.args[i] for i in batch_argnums])
        counted: list[str] = []

        def call(arrays: Sequence[Any]) -> Any:
            given = {leaf.name: w for leaf, w in zip(cut, arrays[: len(cut)], strict=True)}
            whole = [given.get(n, v) for n, v in zip(self.names, values, strict=True)]
            frozen = self._map_frozen(inputs.frozen, lambda leaf, _: given[leaf.name])
            batch = jax.tree.unflatten(treedef, arrays[len(cut) :])
            args = list(inputs.args)
            for i, part in zip(batch_argnums, batch, strict=True):
                args[i] = part
            mine = dataclasses.replace(inputs, frozen=frozen, args=tuple(args))
            out, state = self.call(whole, mine, mark_hook)
            counts = _counts(state)
            counted[:] = counts
            return [*counts.values(), *jax.tree.leaves(out)]

        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (*cut, *rows)]
        jaxpr = _trace_without_constraints(call, shapes, self.place.data_axes)
        bad = [
            n for i, n in enumerate(counted) if depends_on(jaxpr, i, range(len(cut), len(shapes)))
        ]
        if bad:
            raise ValueError(
                f"the loss sets {', '.join(bad)}, Variables of integers, from the rows of one "
                "device, so that each device would keep another value; make them floating-point "
                "(averaged over devices), or return them with has_aux=True (integers are summed)."
            )
        on_read = {leaf.name: r for leaf, r in zip(cut, plan_reads(jaxpr, cut), strict=True)}
        self.note_reads(on_read)
        return on_read


def _trace_without_constraints(fn: Any, shapes: Sequence[Any], axes: tuple[str, ...]) -> Any:
    """Traces a function and refuses sharding constraints over axes that are split by hand."""
    message = (
        "the loss names mesh axis {!r} in a sharding constraint, but it runs on one device's rows, "
        f"where {axes} are already split by hand; drop the constraint, or use stage 1 with your "
        "own gradients."
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
        args = tuple(
            a if i in batch_argnums else fold_keys(a, index) for i, a in enumerate(self.args)
        )
        return dataclasses.replace(self, state=fold_keys(self.state, index), args=args)

    def num_rows(self, batch_argnums: Sequence[int]) -> int:
        """Rows of the batch arguments."""
        leaves = jax.tree.leaves([self.args[i] for i in batch_argnums])
        return leaves[0].shape[0] if leaves else 0

    def warn_of_raw_keys(self, batch_argnums: Sequence[int]) -> None:
        """Warns of what looks like a raw PRNG key: only typed ones are folded."""
        args = [a for i, a in enumerate(self.args) if i not in batch_argnums]
        for path, x in jax.tree_util.tree_leaves_with_path(args):
            if x.dtype == np.uint32 and x.shape[-1:] == (2,):
                warnings.warn(
                    f"argument {jax.tree_util.keystr(path)} after the batch looks like a raw PRNG "
                    "key, and every device and microbatch would draw the same numbers from it; "
                    "pass a typed one, jax.random.key(seed), which is folded with both.",
                    stacklevel=2,
                )

    def replicated_shapes(self, batch_argnums: Sequence[int]) -> dict[str, tuple[int, ...]]:
        """Shapes by name of the arrays in the other arguments."""
        args = [a for i, a in enumerate(self.args) if i not in batch_argnums]
        named = [named_leaves(a)[0] for a in args]
        return {name: tuple(x.shape) for leaves in named for name, x in leaves.items() if name}


def _counts(state: Any) -> dict[str, Any]:
    """The Variables of integers and booleans in a module's state, by name."""
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {
        leaf_name(path): x
        for path, x in leaves
        if jax.dtypes.issubdtype(x.dtype, np.integer) or x.dtype == bool
    }


def _state_like(state: Any, module: nnx.Module) -> Any:
    """The non-parameter state of a module after a call; keys stay those of before."""
    after = dict(nnx.to_flat_state(nnx.state(module)))

    def updated(path: Any, before: Any) -> Any:
        value = after[path].get_raw_value()
        is_key = jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key)
        return before if is_key else before.replace(value)

    flat = [(path, updated(path, before)) for path, before in nnx.to_flat_state(state)]
    return nnx.from_flat_state(flat)
