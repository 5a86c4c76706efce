"""Any optax transform with its state partitioned.

The transform sees logical shapes in the global view: norms, factors and trust ratios are right by
construction. Only what is between steps is padded and cut.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jzero import mesh as meshes
from jzero.held import all_gather
from jzero.layout import Layout, Leaf, P, is_floating, is_key, make_state_layout, pad, unpad
from jzero.losses import Place
from jzero.precision import PARTITIONED, exact_update
from jzero.products import with_pinned_matrices
from jzero.trees import abstract_leaves, check_against, named_leaves


@dataclasses.dataclass(frozen=True)
class Partition:
    """What the optimizer needs of a Zero.

    Args:
      place: mesh, axes and stage.
      layout_of: from shapes by name to the parameters' layout, checked.
      min_size: smaller state leaves stay whole.
      remember: told the layout of each state that is made, by its names and shapes at rest.
      keeps_shards: whether updates stay cut, for parameters that are cut at rest.
    """

    place: Place
    layout_of: Callable[[dict[str, jax.ShapeDtypeStruct]], Layout]
    min_size: int
    remember: Callable[[Layout], None]
    keeps_shards: Callable[[], bool]

    @property
    def num_shards(self) -> int:
        """Into how many pieces the state is cut."""
        return meshes.axes_size(self.place.mesh, self.place.axes)

    def spec(self, leaf: Leaf) -> Any:
        """The spec of a state leaf at rest."""
        return leaf.spec(self.place.axes)

    def state_layout(self, tx: optax.GradientTransformation, layout: Layout, params: Any) -> Layout:
        """The layout of the state that `tx.init` makes of logical parameters."""
        state = jax.eval_shape(lambda p: tx.init(_trained(p)), _abstract(params, layout))
        shapes = {
            n: jax.ShapeDtypeStruct(x.shape, x.dtype) for n, x in named_leaves(state)[0].items()
        }
        known = dict(layout, **_grads_layout(layout, params))
        state_layout = make_state_layout(
            shapes, known, num_shards=self.num_shards, min_size=self.min_size
        )
        if not self.place.stage.state:
            state_layout = {n: leaf.whole("stage 0") for n, leaf in state_layout.items()}
        self.remember(state_layout)
        return state_layout


def partitioned(
    tx: optax.GradientTransformation, partition: Partition
) -> optax.GradientTransformationExtraArgs:
    """Wraps an optax transform so that its state is born, kept and updated in shards.

    Args:
      tx: any `optax.GradientTransformation`.
      partition: from `Zero.optimizer`.

    Returns:
      A transform with the same state tree. `update` needs `params`.
    """
    inner = optax.with_extra_args_support(tx)
    mesh = partition.place.mesh

    def init(params: Any) -> Any:
        layout = _checked(partition, params)
        state_layout = partition.state_layout(inner, layout, params)
        specs = [partition.spec(leaf) for leaf in state_layout.values()]

        def make(params: Any) -> list[Any]:
            params = _on_leaves(_logical(partition), params, layout)
            state = _on_leaves(_at_rest(partition), inner.init(_trained(params)), state_layout)
            return [_strong(x) for x in jax.tree.leaves(state)]

        treedef = jax.tree.structure(jax.eval_shape(inner.init, _trained(params)))
        rows = zip(specs, state_layout.values(), strict=True)
        born = [meshes.named_sharding(mesh, spec, len(leaf.shape)) for spec, leaf in rows]
        run = jax.jit(meshes.with_auto_axes(mesh, make, specs), out_shardings=born)
        return jax.tree.unflatten(treedef, run(params))

    @functools.partial(jax.jit, static_argnums=(0, 1))
    def step(
        keeps_shards: bool, functions: Any, grads: Any, state: Any, params: Any, extra: Any
    ) -> Any:
        layout = _checked(partition, params)
        state_layout = partition.state_layout(inner, layout, params)

        def run(grads: Any, state: Any, params: Any) -> tuple[list[Any], list[Any]]:
            grads = _on_leaves(_logical(partition), grads, _grads_layout(layout, params))
            cut_params = _on_leaves(_logical(partition), params, layout)
            state = _on_leaves(_logical(partition), state, state_layout)
            given = _logical_extra(partition, extra, layout, params)

            def change(grads: Any, state: Any, params: Any, extra: Any) -> tuple[Any, Any]:
                return inner.update(grads, state, params, **extra, **dict(functions))

            moved_once = with_pinned_matrices(change, functools.partial(_pinned, partition))
            out, state = moved_once(_trained(grads), state, _trained(cut_params), given)
            out = _with_untrained(out, cut_params)
            out = _on_leaves(_at_rest(partition), out, layout)
            if not keeps_shards:
                out = _gathered(partition, out, params, layout)
            state = _on_leaves(_at_rest(partition), state, state_layout)
            return jax.tree.leaves(out), jax.tree.leaves(state)

        cut = [partition.spec(leaf) if keeps_shards else P() for leaf in layout.values()]
        specs = (cut, [partition.spec(leaf) for leaf in state_layout.values()])
        updates, new_state = meshes.with_auto_axes(mesh, run, specs)(grads, state, params)
        return (
            jax.tree.unflatten(jax.tree.structure(params), updates),
            jax.tree.unflatten(jax.tree.structure(state), new_state),
        )

    def update(grads: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        if params is None:
            raise ValueError(
                "update needs the parameters, to know the layout of what it updates; "
                "call tx.update(grads, opt_state, params)."
            )
        layout = _checked(partition, params)
        wanted = dict(_grads_layout(layout, params))
        check_against(abstract_leaves(grads), wanted, what="grads", rest_shapes=True)
        _check_state(state, partition.state_layout(inner, layout, params))
        functions = tuple((name, x) for name, x in extra.items() if callable(x))
        arrays = {name: x for name, x in extra.items() if not callable(x)}
        return step(partition.keeps_shards(), functions, grads, state, params, arrays)

    vars(update)[PARTITIONED] = tx
    return optax.GradientTransformationExtraArgs(init, update)  # pyright: ignore[reportArgumentType]


def _strong(x: Any) -> Any:
    """Without a weak type: optax's line searches are born with some and lose them in a step."""
    return x if is_key(x.dtype) else jax.lax.convert_element_type(x, x.dtype)


def is_partitioned(tx: optax.GradientTransformation) -> bool:
    """Whether a transform came from `Zero.optimizer`."""
    return hasattr(tx.update, PARTITIONED)


def unpartitioned(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """What a transform that came from `Zero.optimizer` wraps."""
    return getattr(tx.update, PARTITIONED, tx)


def _on_leaves(fn: Callable[[Any, Leaf], Any], tree: Any, layout: Layout) -> Any:
    leaves, treedef = named_leaves(tree)
    return jax.tree.unflatten(treedef, [fn(x, layout[name]) for name, x in leaves.items()])


def _logical(partition: Partition) -> Callable[[Any, Leaf], Any]:
    """Cuts an array as its leaf says and slices the padding off: local, no collective."""

    def cut(x: Any, leaf: Leaf) -> Any:
        padded = x if tuple(x.shape) == leaf.rest_shape else pad(x, leaf)
        if leaf.dim is None:
            return padded
        return unpad(meshes.constrain(partition.place.mesh, padded, partition.spec(leaf)), leaf)

    return cut


def _at_rest(partition: Partition) -> Callable[[Any, Leaf], Any]:
    """Pads an array and pins it to its spec."""

    def rest(x: Any, leaf: Leaf) -> Any:
        return meshes.constrain(partition.place.mesh, pad(x, leaf), partition.spec(leaf))

    return rest


def _pinned(partition: Partition, x: Any, batch_dims: tuple[int, ...]) -> Any:
    """Gives each device whole matrices: its part of a stack that N divides, else all of them."""
    even = [d for d in batch_dims if x.shape[d] % partition.num_shards == 0]
    spec = P(*(partition.place.axes if [d] == even[:1] else None for d in range(x.ndim)))
    return meshes.constrain(partition.place.mesh, x, spec if partition.place.stage.state else P())


def _gathered(partition: Partition, updates: Any, params: Any, layout: Layout) -> Any:
    """All-gathers updates to whole ones, sent in the parameters' dtype.

    Where updates are wider than parameters, the new parameters travel instead, and the difference
    in the wide dtype is returned: adding it gives exactly the new parameters.
    """
    place = partition.place

    def gather(update: Any, param: Any, leaf: Leaf) -> Any:
        if leaf.dim is None:
            return update
        run = meshes.manual(
            place.mesh, lambda x: all_gather(x, place.wire(leaf)), partition.spec(leaf), P()
        )
        if jnp.dtype(update.dtype).itemsize <= jnp.dtype(param.dtype).itemsize:
            return run(update)
        old = meshes.constrain(place.mesh, pad(param, leaf), partition.spec(leaf))
        new = run((old + update).astype(param.dtype))
        return exact_update(new, param, update.dtype)

    leaves, treedef = named_leaves(updates)
    values = named_leaves(params)[0]
    return jax.tree.unflatten(
        treedef, [gather(x, values[name], layout[name]) for name, x in leaves.items()]
    )


def _trained(tree: Any) -> Any:
    """The tree without its integer leaves: a transform never meets them."""
    return jax.tree.map(lambda x: x if is_floating(x.dtype) else optax.MaskedNode(), tree)


def _with_untrained(updates: Any, params: Any) -> Any:
    """Gives integer leaves an update of zero."""

    def pick(param: Any, update: Any) -> Any:
        return update if is_floating(param.dtype) else jnp.zeros_like(param)

    return jax.tree.map(pick, params, updates)


def _abstract(params: Any, layout: Layout) -> Any:
    leaves, treedef = named_leaves(params)
    shapes = [jax.ShapeDtypeStruct(layout[name].shape, x.dtype) for name, x in leaves.items()]
    return jax.tree.unflatten(treedef, shapes)


def _checked(partition: Partition, params: Any) -> Layout:
    """The layout of the parameters; each of optax.lookahead's pair is laid out as one."""
    if not isinstance(params, optax.LookaheadParams):
        return partition.layout_of(abstract_leaves(params))
    one = partition.layout_of(abstract_leaves(params.fast))
    pair = {f"{part}.{name}": leaf for part in params._fields for name, leaf in one.items()}
    pair = {name: dataclasses.replace(leaf, name=name) for name, leaf in pair.items()}
    partition.remember(pair)
    return pair


def _grads_layout(layout: Layout, params: Any) -> Layout:
    """The layout of the gradients: with optax.lookahead those of the fast parameters alone."""
    if not isinstance(params, optax.LookaheadParams):
        return layout
    fast = {n.removeprefix("fast."): leaf for n, leaf in layout.items() if n.startswith("fast.")}
    return {name: dataclasses.replace(leaf, name=name) for name, leaf in fast.items()}


def _logical_extra(
    partition: Partition, extra: dict[str, Any], layout: Layout, params: Any
) -> dict[str, Any]:
    """Extra arguments; a tree like the parameters or gradients (`grad=`) is made logical."""

    def logical(tree: Any) -> Any:
        leaves = named_leaves(tree)[0]
        for rows in (layout, _grads_layout(layout, params)):
            fits = (jnp.shape(leaves[n]) in (rows[n].shape, rows[n].rest_shape) for n in leaves)
            if leaves.keys() == rows.keys() and all(fits):
                return _trained(_on_leaves(_logical(partition), tree, rows))
        return tree

    return {name: logical(tree) for name, tree in extra.items()}


def _check_state(state: Any, layout: Layout) -> None:
    leaves, _ = named_leaves(state)
    bad = [f"{name} is missing" for name in layout if name not in leaves]
    bad += [f"{name} is unexpected" for name in leaves if name not in layout]
    for name in set(leaves) & set(layout):
        shape = jnp.shape(leaves[name])
        if shape != layout[name].rest_shape:
            bad.append(f"{name} has shape {shape}, not {layout[name].rest_shape}")
    if bad:
        raise ValueError(
            f"the optimizer state does not belong to these parameters: {'; '.join(sorted(bad))}. "
            "Make it anew with tx.init(params), or restore the state saved with them."
        )
