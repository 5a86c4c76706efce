"""`Zero` says what is partitioned and over which axes; its methods are faces of pure functions."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding

from jzero import gradients, layers, losses
from jzero import mesh as meshes
from jzero.layout import (
    STAGES,
    Layout,
    Leaf,
    P,
    make_layout,
    make_state_layout,
    pad,
    unpad,
)
from jzero.memo import Memo
from jzero.optimizer import Partition, is_partitioned, partitioned
from jzero.precision import floating_dtype, with_state_dtype
from jzero.report import Report
from jzero.sent import added_bytes
from jzero.trees import abstract_leaves, check_against, named_leaves, param_tree, select, split


class AtRest(NamedTuple):
    """Where an array is between steps."""

    shape: tuple[int, ...]  # logical
    at_rest: jax.ShapeDtypeStruct  # padded, with its sharding

    def in_dtype(self, dtype: Any) -> AtRest:
        """The same place for an array of another dtype."""
        rest = self.at_rest
        return AtRest(self.shape, jax.ShapeDtypeStruct(rest.shape, dtype, sharding=rest.sharding))


@dataclasses.dataclass(frozen=True, eq=False)
class Zero:
    """ZeRO over a mesh: says what is partitioned, and makes the functions that keep it so.

    Args:
      mesh: any jax Mesh, with automatic or explicit axes.
      stage: 0 cuts nothing, 1 the optimizer state, 2 also the gradients, 3 also the parameters.
      axes: the mesh axes to partition over; "data", or the only axis, where left out.
      state_axes: the axes to partition the optimizer state over; only `axes` for now.
      like: the parameters (arrays, ShapeDtypeStructs or an `nnx.Module`), of which only shapes are
        read; stage 3 needs it.
      reduce_dtype: the dtype gradients travel in; their own where left out.
      min_size: arrays of fewer elements stay whole.
      cut_layers: at stage 1, whether stacks of layers are cut between layers, so that Muon, say,
        works on whole matrices and its update needs no collective.

    Raises:
      ValueError: for any value that cannot be honoured.

    Source: Rajbhandari et al., ZeRO, arXiv:1910.02054, section 5.

    >>> zero = Zero(meshes.make_mesh(), stage=1)
    >>> tx = zero.optimizer(optax.adamw(3e-4))
    >>> moments = tx.init({"w": jnp.ones((64, 8))})[0].mu
    >>> moments["w"].addressable_shards[0].data.size * zero.num_shards
    512
    """

    mesh: Mesh
    stage: int
    axes: Sequence[str] | str | None = dataclasses.field(default=None, kw_only=True)
    state_axes: Sequence[str] | str | None = dataclasses.field(default=None, kw_only=True)
    like: Any = dataclasses.field(default=None, kw_only=True, repr=False)
    reduce_dtype: Any = dataclasses.field(default=None, kw_only=True)
    min_size: int = dataclasses.field(default=0, kw_only=True)
    cut_layers: bool = dataclasses.field(default=False, kw_only=True)
    _memo: Memo = dataclasses.field(default=None, init=False, repr=False)  # type: ignore

    def __post_init__(self) -> None:
        _check(self)
        object.__setattr__(self, "axes", meshes.partition_axes(self.mesh, self.axes))
        if (
            self.state_axes is not None
            and meshes.partition_axes(self.mesh, self.state_axes) != self.axes
        ):
            raise ValueError(
                f"state_axes={self.state_axes!r} differs from axes={self.axes!r}, which is not "
                "supported yet; leave it out."
            )
        object.__setattr__(self, "state_axes", self.axes)
        meshes.replica_axes(self.mesh, meshes.partition_axes(self.mesh, self.axes))
        shapes = None if self.like is None else abstract_leaves(self.like)
        object.__setattr__(self, "like", shapes)
        layout = None if shapes is None else self._make_layout(shapes)
        object.__setattr__(self, "_memo", Memo(layout))

    # What is cut where.

    @property
    def num_shards(self) -> int:
        """N, the size of the partition axes."""
        return meshes.axes_size(self.mesh, self._place.axes)

    @property
    def _place(self) -> losses.Place:
        axes = meshes.partition_axes(self.mesh, self.axes)
        replicas = meshes.replica_axes(self.mesh, axes)
        return losses.Place(self.mesh, axes, replicas, STAGES[self.stage], self.reduce_dtype)

    def _make_layout(self, shapes: dict[str, jax.ShapeDtypeStruct]) -> Layout:
        layout = make_layout(
            shapes,
            num_shards=self.num_shards,
            min_size=self.min_size,
            cut_layers=self.cut_layers,
        )
        if STAGES[self.stage].state:
            return layout
        return {name: leaf.whole("stage 0") for name, leaf in layout.items()}

    def layout(self, params: Any = None) -> Layout:
        """The layout by leaf name: of `like`, or of the logical `params`.

        Args:
          params: parameters (arrays, shapes or a module); may be left out where `like` was given.

        Raises:
          ValueError: where `params` differ from `like`, or neither is given.
        """
        if params is None:
            if self._memo.layout is None:
                raise ValueError(
                    "no parameters are known; pass them, or make Zero with like=params."
                )
            return self._memo.layout
        return self._layout_of(abstract_leaves(params))

    def _layout_of(
        self, shapes: dict[str, jax.ShapeDtypeStruct], what: str = "params", may_miss: bool = False
    ) -> Layout:
        if self._memo.layout is None:
            layout = self._make_layout(shapes)
            self._memo.remember(layout)
            return layout
        layout = dict(self._memo.layout)
        check_against(shapes, layout, what=what, rest_shapes=self._cuts_params, may_miss=may_miss)
        return {
            name: dataclasses.replace(layout[name], dtype=x.dtype) for name, x in shapes.items()
        }

    @property
    def _cuts_params(self) -> bool:
        return STAGES[self.stage].params

    def _rest_sharding(self, leaf: Leaf) -> NamedSharding:
        spec = self._place.param_spec(leaf)
        return meshes.named_sharding(self.mesh, spec, len(leaf.shape))

    # Parameters.

    def init(self, init_fn: Callable[..., Any], *args: Any) -> Any:
        """Makes parameters born partitioned: no device ever holds them whole.

        Args:
          init_fn: from `args` (a PRNG key, say) to a tree of arrays or an `nnx.Module`. The same
            key gives the same values on any mesh.

        Returns:
          What `init_fn` returns, its parameters at rest in the layout of this stage.
        """
        shapes = jax.eval_shape(lambda *a: _parts(init_fn(*a))[1:], *args)
        layout = self._layout_of(abstract_leaves(shapes[0]), "what init_fn returns")
        graphdef: list[Any] = []

        def make(*args: Any) -> Any:
            static, params, state = _parts(init_fn(*args))
            graphdef[:] = [static]
            return self._padded(params, layout), state

        born = [self._rest_sharding(leaf) for leaf in layout.values()]
        out = (
            jax.tree.unflatten(jax.tree.structure(shapes[0]), born),
            jax.tree.map(lambda x: meshes.named_sharding(self.mesh, P(), x.ndim), shapes[1]),
        )
        params, state = jax.jit(make, out_shardings=out)(*args)
        self._memo.has_placed = True
        return _whole(graphdef[-1], params, state)

    def place(self, params: Any) -> Any:
        """Places parameters that exist (logical shapes, on the host or any device) at rest.

        Returns:
          The same tree, or a new module; each device receives only its shards.
        """
        graphdef, tree, state = _parts(params)
        layout = self._layout_of(abstract_leaves(tree))
        leaves, treedef = named_leaves(tree)
        placed = [self._place_leaf(x, layout[name]) for name, x in leaves.items()]
        state = jax.tree.map(
            lambda x: meshes.put(x, meshes.named_sharding(self.mesh, P(), x.ndim)), state
        )
        self._memo.has_placed = True
        return _whole(graphdef, jax.tree.unflatten(treedef, placed), state)

    def _place_leaf(self, x: Any, leaf: Leaf) -> jax.Array:
        sharding = self._rest_sharding(leaf)
        if not self._cuts_params or leaf.dim is None or tuple(x.shape) == leaf.rest_shape:
            return meshes.put(x, sharding)
        host = np.asarray(x)

        def shard(index: Any) -> np.ndarray:
            piece = host[index]
            want = leaf.shard_shape
            return np.pad(piece, [(0, n - m) for n, m in zip(want, piece.shape, strict=True)])

        return jax.make_array_from_callback(leaf.rest_shape, sharding, shard)

    def _padded(self, params: Any, layout: Layout) -> Any:
        if not self._cuts_params:
            return params
        leaves, treedef = named_leaves(params)
        return jax.tree.unflatten(treedef, [pad(x, layout[name]) for name, x in leaves.items()])

    # The optimizer and the gradients.

    def optimizer(
        self, tx: optax.GradientTransformation, *, state_dtype: Any = None
    ) -> optax.GradientTransformationExtraArgs:
        """Wraps any optax transform: the same state tree, each large leaf of it cut to 1/N.

        It computes in at least float32: moments of 16-bit parameters are float32, and so are the
        updates (optax itself keeps both in 16 bits).

        Args:
          tx: the transform, for logical parameters; it never meets padding.
          state_dtype: stores moments in this dtype instead, such as "bfloat16", and widens them for
            each update.

        Returns:
          A transform; `update(grads, state, params)` takes gradients of `value_and_grad`, or the
          user's own logical ones, and returns updates laid out as the parameters are.

        Source: arXiv:1910.02054, section 5.1 (P_os).
        """
        if not (hasattr(tx, "init") and hasattr(tx, "update")):
            raise ValueError(
                f"optimizer needs an optax transform with init and update, not "
                f"{type(tx).__name__} {tx!r:.60}; pass optax.adamw(1e-3), say."
            )
        return partitioned(with_state_dtype(tx, state_dtype), self._partition(self._keeps_shards))

    def _partition(self, keeps_shards: Callable[[], bool]) -> Partition:
        return Partition(
            place=self._place,
            layout_of=functools.partial(self._layout_of, may_miss=True),
            min_size=self.min_size,
            remember=self._memo.remember,
            keeps_shards=keeps_shards,
        )

    def _keeps_shards(self) -> bool:
        """Whether updates stay cut; warns once where stage 2 or 3 cannot be had."""
        stage = STAGES[self.stage]
        if stage.grads and not self._memo.has_grad_fn and not self._memo.has_warned:
            self._memo.has_warned = True
            kept = (
                "partitions the optimizer state and the parameters, and each device may hold whole "
                "gradients"
                if stage.params and self._memo.has_placed
                else "partitions the optimizer state only, as stage 1 does"
            )
            warnings.warn(
                f"stage {self.stage} with gradients that did not come from zero.value_and_grad "
                f"{kept}; take the gradients from zero.value_and_grad to cut them too.",
                stacklevel=4,
            )
        return stage.params and (self._memo.has_grad_fn or self._memo.has_placed)

    def value_and_grad(
        self,
        loss_fn: Callable[..., Any],
        *,
        num_microbatches: int = 1,
        has_aux: bool = False,
        batch_argnums: int | Sequence[int] = 1,
        wrt: Any = nnx.Param,
        accumulator_dtype: Any = None,
        keep_gathered: bool = False,
    ) -> Callable[..., Any]:
        """Makes a function of the global loss and its gradients, reduced by name.

        Args:
          loss_fn: `loss_fn(params_or_module, batch, *rest)` to a floating-point scalar, seeing one
            device's rows of one microbatch; the scalars are averaged. Or to a pair (sum, weight) of
            scalars, such as the summed loss of the tokens that count and their number: the global
            sum is divided by the global weight, whatever device or microbatch they fall on. The
            weight may not depend on the parameters. A pair (loss, aux) needs `has_aux`.
          num_microbatches: into how many pieces, one after the other, a device's rows are split.
          has_aux: whether `loss_fn` returns (loss, aux). Scalars of aux are averaged (integers
            summed); arrays have one row per batch row, or are new values of a replicated argument
            under its names and shapes (Linen's batch_stats), which are averaged.
          batch_argnums: which arguments hold the global batch on dim 0; every other one is
            replicated, and typed PRNG keys in those are folded with device and microbatch. Keys in
            a batch argument, one per row, are each row's own on any number of devices.
          wrt: for an `nnx.Module`, which Variables are differentiated.
          accumulator_dtype: in which gradients of several microbatches are summed; at least float32
            where left out.
          keep_gathered: at stage 3, whether parameters are gathered once and kept whole for all
            microbatches: G+1 instead of 3 G passes on the wire, and stage 2's parameter memory
            during the step.

        Returns:
          A jitted function `(params, *args, loss_scale=None) -> (loss, grads)`, or
          `((loss, aux), grads)`: what `loss_fn` closes over is read when it is traced.
          Gradients are cut as the optimizer state is, with zeros in the padding; whole at stage 0.
          They come out multiplied by `loss_scale` (a scalar), the loss does not. A module's other
          Variables are updated in place.

        Raises:
          ValueError: for options that cannot be honoured, a batch that cannot be split, or a loss
            that is no scalar.

        Source: arXiv:1910.02054, sections 5.2 and 5.3 (P_g, P_p).
        """
        argnums = _argnums(batch_argnums)
        self._check_accumulation(num_microbatches, accumulator_dtype, keep_gathered)
        acc = gradients.Accumulation(
            num_microbatches, argnums, has_aux, accumulator_dtype, keep_gathered
        )
        self._memo.has_grad_fn = True
        self._memo.accumulation = acc

        @functools.partial(jax.jit, static_argnums=0)
        def run(graphdef: Any, params: Any, inputs: losses.Inputs, scale: Any) -> Any:
            loss, values = self._loss(loss_fn, graphdef, params, inputs.frozen, num_microbatches)
            return gradients.reduced_value_and_grad(loss, acc, values, inputs, scale)

        @functools.wraps(loss_fn, assigned=("__name__", "__doc__"), updated=())
        def value_and_grad(params: Any, *args: Any, loss_scale: Any = None) -> Any:
            graphdef, tree, inputs = self._inputs(params, args, wrt, argnums, num_microbatches)
            _check_loss_scale(loss_scale)
            value, aux, grads, state = run(graphdef, tree, inputs, loss_scale)
            if graphdef is not None:
                nnx.update(params, state)
            return ((value, aux) if has_aux else value), grads

        return value_and_grad

    def _check_accumulation(self, num_microbatches: Any, dtype: Any, keep_gathered: bool) -> None:
        _check_microbatches(num_microbatches)
        if dtype is not None:
            floating_dtype("accumulator_dtype", dtype)
        if keep_gathered and not self._cuts_params:
            raise ValueError(
                f"keep_gathered has no effect at stage {self.stage}, where parameters are whole; "
                "leave it out, or use stage 3."
            )

    def apply(
        self,
        fn: Callable[..., Any],
        *,
        batch_argnums: int | Sequence[int] = 1,
        has_weight: bool = False,
    ) -> Callable[..., Any]:
        """Makes a function under the same gathers, without gradients: evaluation, say.

        Args:
          fn: `fn(params_or_module, batch, *rest)`, seeing one device's rows. It returns scalars,
            which are averaged (integers summed), or arrays as `aux` of `value_and_grad` may have.
            What it changes in a module's Variables is dropped.
          batch_argnums: as in `value_and_grad`.
          has_weight: whether `fn` is a loss that returns a pair (sum, weight), which becomes the
            global sum over the global weight.
        """
        argnums = _argnums(batch_argnums)

        @functools.partial(jax.jit, static_argnums=0)
        def run(graphdef: Any, params: Any, inputs: losses.Inputs) -> Any:
            loss, values = self._loss(fn, graphdef, params, inputs.frozen)
            return gradients.reduced_apply(loss, argnums, has_weight, values, inputs)

        @functools.wraps(fn, assigned=("__name__", "__doc__"), updated=())
        def apply(params: Any, *args: Any) -> Any:
            return run(*self._inputs(params, args, nnx.Param, argnums, 1))

        return apply

    def _inputs(
        self, params: Any, args: Any, wrt: Any, argnums: tuple[int, ...], num_microbatches: int
    ) -> tuple[Any, Any, losses.Inputs]:
        if argnums[-1] >= len(args):
            raise ValueError(
                f"batch_argnums names argument {argnums[-1] + 1}, but the function was called with "
                f"{len(args) + 1} arguments; pass the batch there, or change batch_argnums."
            )
        for i in argnums:
            losses.check_batch(args[i], self._place.num_data_shards, num_microbatches, argnum=i + 1)
        parts = split(params, wrt)
        shapes = abstract_leaves(parts.params)
        shapes |= named_leaves(parts.frozen)[0]
        layout = self._layout_of(shapes)
        if self._cuts_params:
            _check_at_rest(shapes, layout)
        if meshes.is_explicit(self.mesh):
            _check_on_mesh(named_leaves(parts.params)[0], self.mesh)
        inputs = losses.Inputs(parts.frozen, parts.state, tuple(args))
        return parts.graphdef, parts.params, inputs

    def _loss(
        self, fn: Any, graphdef: Any, params: Any, frozen: Any, num_microbatches: int | None = None
    ) -> tuple[losses.Loss, Any]:
        leaves, treedef = named_leaves(params)
        shapes = leaves | named_leaves(frozen)[0]
        layout = dict(self._layout_of(shapes))
        names, note_reads = tuple(leaves), self._memo.reads.update
        loss = losses.Loss(
            fn, self._place, layout, graphdef, treedef, names, num_microbatches, note_reads
        )
        return loss, list(leaves.values())

    def run_layers(
        self,
        block_fn: Callable[..., Any],
        layers_: Any,
        x: Any,
        *,
        remat: str = "full",
        keys: jax.Array | None = None,
        has_aux: bool = False,
    ) -> Any:
        """Runs a model's stack of layers, gathering one layer ahead and reducing one behind.

        Lend it to a model that takes the function that runs its layers; see `jzero.run_layers`.
        """
        return layers.run_layers(block_fn, layers_, x, remat=remat, keys=keys, has_aux=has_aux)

    def block_params(self, params: Any) -> Any:
        """Reads a block's weights, as its first line, in Linen modules and plain functions."""
        return layers.block_params(params)

    # Looking at what is partitioned.

    def gather(self, tree: Any, *, where: str | None = None) -> Any:
        """Returns parameters, gradients or optimizer state with logical shapes, replicated.

        Leaf by leaf: beside the result there is never more than one leaf on its way.

        Args:
          tree: what this Zero laid out.
          where: a dotted path to a part of the tree, such as "h.attn"; that part alone is gathered.
        """
        return self._viewed(tree, where, is_replicated=True)

    def logical(self, tree: Any, *, like: Any = None) -> Any:
        """Returns a tree with logical shapes, still cut: under jit without any collective.

        Outside jit a leaf with padding comes back replicated: jax cannot hold an uneven dim cut.

        Args:
          tree: parameters, gradients or optimizer state that this Zero laid out.
          like: the logical shapes, for an optimizer state this Zero has not made.
        """
        return self._viewed(tree, None, is_replicated=False, like=like)

    def _viewed(
        self, tree: Any, where: str | None, *, is_replicated: bool, like: Any = None
    ) -> Any:
        graphdef, params, state = _parts(tree)
        leaves, treedef = named_leaves(params)
        layout = self._memo.find(leaves) if like is None else self._layout_like(leaves, like)
        if where is not None:
            graphdef, (params, layout) = None, select(params, where, layout)
            leaves, treedef = named_leaves(params)
        view = self._gathered if is_replicated else self._logical
        rows = list(zip(leaves.values(), layout, strict=True))
        out = jax.tree.unflatten(treedef, view(rows))
        return out if where is not None else _whole(graphdef, out, state)

    def gather_leaves(self, tree: Any) -> Iterator[tuple[str, jax.Array]]:
        """Yields each leaf by name as `gather` returns it: drop one before you take the next.

        Args:
          tree: what this Zero laid out; of a module its parameters.
        """
        leaves = named_leaves(param_tree(tree))[0]
        for (name, x), leaf in zip(leaves.items(), self._memo.find(leaves), strict=True):
            yield name, self._gathered([(x, leaf)])[0]

    def _gathered(self, rows: list[tuple[Any, Leaf]]) -> list[jax.Array]:
        plan = [(x, dataclasses.replace(leaf, name="", why_whole="")) for x, leaf in rows]
        return [_gathered_leaf(x, leaf, self.mesh, self._place.axes) for x, leaf in plan]

    def _logical(self, rows: list[tuple[Any, Leaf]]) -> list[jax.Array]:
        specs = [self._logical_spec(leaf) for _, leaf in rows]

        def view(leaves: list[jax.Array]) -> list[jax.Array]:
            pairs = zip(leaves, [leaf for _, leaf in rows], strict=True)
            return [_unpadded(x, leaf, self.mesh, leaf.spec(self._place.axes)) for x, leaf in pairs]

        return jax.jit(meshes.with_auto_axes(self.mesh, view, specs))([x for x, _ in rows])

    def _logical_spec(self, leaf: Leaf) -> Any:
        """Where a logical array can be: an uneven dim stays free, for jit has no cut of it."""
        if leaf.padding:
            return P() if meshes.is_explicit(self.mesh) else P(P.UNCONSTRAINED)
        return leaf.spec(self._place.axes)

    def _layout_like(self, leaves: dict[str, Any], like: Any) -> list[Leaf]:
        shapes = abstract_leaves(like)
        layout = self._state_layout(shapes)
        check_against(abstract_leaves(leaves), dict(layout), what="the tree", rest_shapes=True)
        return [layout[name] for name in leaves]

    def _state_layout(self, shapes: dict[str, jax.ShapeDtypeStruct]) -> Layout:
        params = self._memo.layout or {}
        return make_state_layout(shapes, params, num_shards=self.num_shards, min_size=self.min_size)

    def abstract(self, tree: Any) -> Any:
        """Returns shapes, dtypes and shardings at rest, to lower and compile without any array.

        Args:
          tree: parameters or an `nnx.Module` of them (logical shapes do), or an optimizer state, as
            from `jax.eval_shape(tx.init, params)`; gradients are not known from parameters.

        Returns:
          The same tree of ShapeDtypeStructs; a module's other Variables are replicated.
        """
        graphdef, params, state = _parts(tree)
        rest = [x.at_rest for x in self._rest_of(params)]
        state = jax.tree.map(lambda x: self._replicated(x).at_rest, state)
        return _whole(graphdef, jax.tree.unflatten(jax.tree.structure(params), rest), state)

    def at_rest(self, tree: Any) -> dict[str, AtRest]:
        """Returns the logical shape and the place at rest of each leaf, by name, for checkpoints.

        Args:
          tree: as in `abstract`, arrays or shapes. Of a module its other Variables are there, too.
        """
        _, params, state = _parts(tree)
        rows = dict(zip(named_leaves(params)[0], self._rest_of(params), strict=True))
        return rows | {n: self._replicated(x) for n, x in named_leaves(state)[0].items()}

    def replicated(self, tree: Any) -> dict[str, AtRest]:
        """As `at_rest`, of a tree that every device holds whole: a step's number, say."""
        return {n: self._replicated(x) for n, x in named_leaves(tree)[0].items()}

    def _replicated(self, x: Any) -> AtRest:
        sharding = meshes.named_sharding(self.mesh, P(), x.ndim)
        shape = tuple(x.shape)
        return AtRest(shape, jax.ShapeDtypeStruct(shape, x.dtype, sharding=sharding))

    def _rest_of(self, tree: Any) -> list[AtRest]:
        """Of parameters or an optimizer state, in the order of its leaves."""
        leaves = named_leaves(tree)[0]
        if not leaves:  # the state of plain SGD
            return []
        known = self._memo.layout or {}
        is_params = all(name in known for name in leaves)
        layout = self._layout_of(abstract_leaves(tree)).values() if is_params else None
        cut = self._cuts_params if is_params else STAGES[self.stage].state
        rows = zip(leaves.values(), layout or self._memo.find(leaves), strict=True)
        return [AtRest(x.shape, self._abstract_leaf(y.dtype, x, cut)) for y, x in rows]

    def _abstract_leaf(self, dtype: Any, leaf: Leaf, is_cut: bool) -> jax.ShapeDtypeStruct:
        shape = leaf.rest_shape if is_cut else leaf.shape
        spec = leaf.spec(self._place.axes) if is_cut else P()
        sharding = meshes.named_sharding(self.mesh, spec, len(shape))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    def report(
        self,
        params: Any,
        tx: optax.GradientTransformation | None = None,
        *,
        num_microbatches: int | None = None,
    ) -> Report:
        """Returns the partition table: per leaf the dim cut, padding and bytes; totals and the law.

        Args:
          params: parameters, their shapes or a module; nothing is run.
          tx: the transform, partitioned or plain, for the optimizer state's rows. One with matrix
            products is compiled, to see what its update sends.
          num_microbatches: of a step; left out, those of the last `value_and_grad`, whose other
            options hold in any case.
        """
        accumulation = self._memo.accumulation
        if num_microbatches is not None:
            _check_microbatches(num_microbatches)
            accumulation = dataclasses.replace(accumulation, num_microbatches=num_microbatches)
        tree = param_tree(params)
        layout = self._layout_of(abstract_leaves(tree))
        shapes = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in layout.values()]
        logical = jax.tree.unflatten(jax.tree.structure(tree), shapes)
        if tx is not None and not is_partitioned(tx):
            tx = self.optimizer(tx)
        partition = self._partition(lambda: self._cuts_params)
        place = self._place
        return Report(
            stage_number=self.stage,
            stage=place.stage,
            num_shards=self.num_shards,
            num_replicas=place.num_data_shards // self.num_shards,
            reduce_dtype=self.reduce_dtype,
            accumulation=accumulation,
            params=layout,
            state={} if tx is None else self._reported_state(logical, tx),
            reads=dict(self._memo.reads),
            update_bytes=0 if tx is None else added_bytes(tx, partition, logical),
        )

    def _reported_state(self, params: Any, tx: optax.GradientTransformation) -> dict[str, Leaf]:
        state = named_leaves(jax.eval_shape(tx.init, params))[0]
        return dict(zip(state, self._memo.find(state), strict=True))


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _gathered_leaf(x: jax.Array, leaf: Leaf, mesh: Mesh, axes: tuple[str, ...]) -> jax.Array:
    """A leaf at rest, whole on every device."""
    return meshes.with_auto_axes(mesh, lambda x: _unpadded(x, leaf, mesh, P()), P())(x)


def _unpadded(x: jax.Array, leaf: Leaf, mesh: Mesh, spec: Any) -> jax.Array:
    """A leaf, at rest or logical, with its padding sliced off where it is laid out as `spec`."""
    if leaf.dim is None:
        return x
    x = pad(x, leaf) if tuple(x.shape) != leaf.rest_shape else x
    return unpad(meshes.constrain(mesh, x, spec), leaf)


def _check(zero: Zero) -> None:
    if not isinstance(zero.mesh, Mesh):
        raise ValueError(
            f"mesh is {type(zero.mesh).__name__} {zero.mesh!r:.60}; pass a jax Mesh, such as "
            "jzero.make_mesh() or jax.make_mesh((8,), ('data',))."
        )
    if (
        isinstance(zero.stage, bool)
        or zero.stage not in range(len(STAGES))
        or not isinstance(zero.stage, int)
    ):
        raise ValueError(f"stage is {zero.stage!r}; use the integer 0, 1, 2 or 3.")
    if zero.stage == 3 and zero.like is None:
        raise ValueError(
            "stage 3 needs the logical shapes of the parameters, since they are cut at rest; pass "
            "like=params, like=jax.eval_shape(init, key), or like=model."
        )
    if isinstance(zero.min_size, bool) or not isinstance(zero.min_size, int) or zero.min_size < 0:
        raise ValueError(f"min_size is {zero.min_size!r}; give a number of elements, 0 or more.")
    if not isinstance(zero.cut_layers, bool) or (zero.cut_layers and zero.stage != 1):
        raise ValueError(
            f"cut_layers is {zero.cut_layers!r} at stage {zero.stage}; True is for stage 1 alone, "
            "since above it a loop over layers gathers or reduces one at a time. Leave it out, or "
            "use stage 1."
        )
    if zero.reduce_dtype is not None:
        floating_dtype("reduce_dtype", zero.reduce_dtype)


def _check_at_rest(shapes: dict[str, Any], layout: Layout) -> None:
    bad = [
        f"{name} has its logical shape {tuple(x.shape)}, not {layout[name].rest_shape}"
        for name, x in shapes.items()
        if tuple(x.shape) != layout[name].rest_shape
    ]
    if bad:
        raise ValueError(
            f"stage 3 needs parameters at rest, but {'; '.join(bad)}; pass them through "
            "zero.place, make them with zero.init, or use zero.abstract to compile without arrays."
        )


def _check_on_mesh(arrays: dict[str, Any], mesh: Mesh) -> None:
    """Explicit axes are part of an array's type: jit cannot move arrays onto them."""
    on_mesh = set(mesh.devices.flat)
    concrete = {n: x for n, x in arrays.items() if isinstance(x, (jax.Array, np.ndarray))}
    bad = [name for name, x in concrete.items() if _devices_of(x, on_mesh) != on_mesh]
    if bad:
        raise ValueError(
            f"the mesh has explicit axes, but {', '.join(bad)} are not on its {len(on_mesh)} "
            "devices; pass the parameters through zero.place, or make them with zero.init."
        )


def _devices_of(x: Any, traced: set[Any]) -> set[Any]:
    """The devices that hold an array; those `traced` for a value of a jit under way."""
    if isinstance(x, Tracer):
        return traced
    return x.sharding.device_set if isinstance(x, jax.Array) else set()


def _check_microbatches(value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"num_microbatches is {value!r}; give an integer of at least 1.")


def _check_loss_scale(loss_scale: Any) -> None:
    if loss_scale is not None and jnp.shape(loss_scale) != ():
        raise ValueError(
            f"loss_scale has shape {jnp.shape(loss_scale)}; give one number, such as "
            "jzero.loss_scale(opt_state)."
        )


def _argnums(batch_argnums: int | Sequence[int]) -> tuple[int, ...]:
    """Positions of the batch among the arguments after the parameters."""
    argnums = (batch_argnums,) if isinstance(batch_argnums, int) else tuple(batch_argnums)
    if not argnums or any(not isinstance(i, int) or i < 1 for i in argnums):
        raise ValueError(
            f"batch_argnums is {batch_argnums!r}; give positions of at least 1, for argument 0 is "
            "the parameters."
        )
    return tuple(sorted(i - 1 for i in argnums))


def _parts(params: Any) -> tuple[Any, Any, Any]:
    """Graphdef, parameters and other state of a module; (None, tree, ()) for a plain tree."""
    if not isinstance(params, nnx.Module):
        return None, params, ()
    graphdef, params, state = nnx.split(params, nnx.Param, ...)
    return graphdef, params, state


def _whole(graphdef: Any, params: Any, state: Any) -> Any:
    return params if graphdef is None else nnx.merge(graphdef, params, state)
