"""The layer loop that jzero lends a model, and the one-line form for plain functions and Linen.

`run_layers` is double-buffered: while one layer computes, the weights of the next are gathered and
the gradient of the last is reduce-scattered. Two explicit scans under one `jax.custom_vjp`. Above
the shards it holds two gathered layers and one gradient.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jzero.collectives import Held, fetch, mark_read, read, reduce_scatter
from jzero.layout import is_floating

REMATS = ("none", "full", "dots")


def block_params(params: Any) -> Any:
    """Reads a block's weights, as the first line of the block: for Linen modules and plain functions.

    Args:
      params: the tree of one layer's weights as the block receives it.

    Returns:
      The same tree as whole arrays: unchanged at stages 0 and 1, with a gradient tap at stage 2,
      gathered at stage 3.
    """
    is_held = functools.partial(_is, Held)
    return jax.tree.map(lambda x: read(x) if is_held(x) else mark_read(x), params, is_leaf=is_held)


def run_layers(
    block_fn: Callable[..., Any],
    layers: Any,
    x: Any,
    *,
    remat: str = "full",
    keys: jax.Array | None = None,
    has_aux: bool = False,
) -> Any:
    """Runs a stack of layers, `x = block_fn(layer, x, key)` for each, with the wire beside the compute.

    Args:
      block_fn: one layer; returns x, or (x, aux) with `has_aux`.
      layers: the stacked module (each Variable has a leading layer dim), or a stacked tree of arrays.
      x: floating-point array or tree of them; keeps its shapes and dtypes.
      remat: what the backward pass recomputes: "full" saves only each layer's input, "dots" also
        the outputs of matrix products, "none" everything except gathered weights.
      keys: typed PRNG keys of shape (num_layers,), one a layer; None passes None.
      has_aux: whether each layer also returns an output of its own.

    Returns:
      x, or (x, aux stacked on dim 0).

    Raises:
      ValueError: for an unknown remat, or layers without a common leading dim.
    """
    if remat not in REMATS:
        raise ValueError(f"remat {remat!r} is unknown; use one of {', '.join(map(repr, REMATS))}.")
    stack = _Stack.of(block_fn, layers, keys, has_aux)
    if any(held is not None for held in stack.helds):
        run = _double_buffered(stack, remat)
    else:
        run = _plain(stack, remat)
    x, aux, state = run(x)
    if stack.graphdef is not None:
        nnx.update(layers, state)
    return (x, aux) if has_aux else x


def _is(kind: type, x: Any) -> bool:
    return isinstance(x, kind)


@dataclasses.dataclass(frozen=True)
class _Stack:
    """A stack of layers taken apart.

    Args:
      values: per leaf the stacked array: shards or whole weights, as they are held.
      helds: per leaf how it is held; None for an ordinary array.
      extras: module state and keys, which go along the scan without a gradient.
    """

    block_fn: Callable[..., Any]
    graphdef: Any
    treedef: Any
    values: list[Any]
    helds: list[Held | None]
    extras: Any
    has_aux: bool
    num_layers: int

    @classmethod
    def of(cls, block_fn: Callable[..., Any], layers: Any, keys: Any, has_aux: bool) -> _Stack:
        graphdef, tree, state = None, layers, None
        if isinstance(layers, nnx.Module):
            graphdef, tree, state = nnx.split(layers, nnx.Param, ...)
        leaves, treedef = jax.tree.flatten(tree, is_leaf=functools.partial(_is, Held))
        helds = [x if isinstance(x, Held) else None for x in leaves]
        values = [x if h is None else h.value for x, h in zip(leaves, helds, strict=True)]
        sizes = {x.shape[:1] for x in values}
        if len(sizes) != 1 or sizes == {()}:
            raise ValueError(
                "run_layers needs stacked layers with one leading layer dim, but dim 0 of their "
                f"weights is {sorted(sizes)}; build them with nnx.vmap over the layers."
            )
        size = sizes.pop()[0]
        return cls(block_fn, graphdef, treedef, values, helds, (state, keys), has_aux, size)

    @property
    def is_trained(self) -> list[bool]:
        """Which leaves get a gradient."""
        pairs = zip(self.values, self.helds, strict=True)
        return [is_floating(v.dtype) and (h is None or h.tap is not None) for v, h in pairs]

    @property
    def diff(self) -> list[Any]:
        """What the stack is differentiated by: taps, or ordinary weights."""
        rows = zip(self.values, self.helds, self.is_trained, strict=True)
        return [v if h is None else h.tap for v, h, trained in rows if trained]

    def layer(self, weights: Sequence[Any], extras: Any, x: Any) -> Any:
        """Runs one layer on whole weights; returns ((x, aux), its state afterwards)."""
        tree = jax.tree.unflatten(self.treedef, weights)
        state, key = extras
        if self.graphdef is None:
            out = self.block_fn(tree, x, key)
        else:
            fresh = jax.tree.map(lambda v: v, state)  # Variables of this trace, so that they can change
            module = nnx.merge(self.graphdef, tree, fresh)
            out = self.block_fn(module, x, key)
            state = nnx.state(module, nnx.Not(nnx.Param))
        return (out if self.has_aux else (out, None)), state

    def fetch(self, index: Any) -> list[Any]:
        """Gathers the weights of one layer."""
        values = [jax.lax.dynamic_index_in_dim(v, index, keepdims=False) for v in self.values]
        return [v if h is None else fetch(v, h.wire) for v, h in zip(values, self.helds, strict=True)]

    def reduce(self, grads: Sequence[Any]) -> list[Any]:
        """Reduces one layer's whole gradients to what their taps hold."""
        helds = [h for h, trained in zip(self.helds, self.is_trained, strict=True) if trained]
        return [
            g if h is None else reduce_scatter(g, h.wire).astype(h.tap.dtype)
            for g, h in zip(grads, helds, strict=True)
        ]


def _policy(stack: _Stack, remat: str) -> Any:
    """What the backward pass finds saved. Weights and their casts are never among it."""
    if remat == "full":
        return jax.checkpoint_policies.nothing_saveable
    if remat == "dots":
        return jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    shapes = {v.shape[1:] for v in stack.values} | {h.shape[1:] for h in stack.helds if h}

    def save_all_but_casts_of_weights(prim: Any, *avals: Any, **_: Any) -> bool:
        return not (prim.name == "convert_element_type" and avals[0].shape in shapes)

    return save_all_but_casts_of_weights


def _plain(stack: _Stack, remat: str) -> Callable[[Any], Any]:
    """The ordinary loop: a scan with remat around the layer; nothing in it is cut."""

    def step(x: Any, inputs: Any) -> Any:
        weights, extras = inputs
        if stack.graphdef is None:
            weights = block_params(weights)
        (x, aux), state = stack.layer(weights, extras, x)
        return x, (aux, state)

    if remat != "none":
        step = jax.checkpoint(step, policy=_policy(stack, remat), prevent_cse=False)

    def run(x: Any) -> Any:
        x, (aux, state) = jax.lax.scan(step, x, (stack.values, stack.extras))
        return x, aux, state

    return run


def _double_buffered(stack: _Stack, remat: str) -> Callable[[Any], Any]:
    """The loop that gathers one layer ahead and reduces one layer behind."""
    count, last = stack.num_layers, stack.num_layers - 1
    policy = _policy(stack, remat)
    shapes_of_saved: list[Any] = []  # static structure, from the forward trace to the backward one

    def layer_vjp(weights: Sequence[Any], extras: Any, x: Any) -> Any:
        def fn(trained: Sequence[Any], x: Any) -> Any:
            given = iter(trained)
            pairs = zip(weights, stack.is_trained, strict=True)
            return stack.layer([next(given) if t else w for w, t in pairs], extras, x)

        trained = [w for w, t in zip(weights, stack.is_trained, strict=True) if t]
        fn = jax.checkpoint(fn, policy=policy, prevent_cse=False)
        out, vjp, state = jax.vjp(fn, trained, x, has_aux=True)
        saved, structure = _without(vjp, jax.tree.leaves((weights, extras)))
        shapes_of_saved.append(structure)
        return out, saved, state

    def restored_vjp(saved: Any, weights: Sequence[Any], extras: Any) -> Any:
        return _with(shapes_of_saved[-1], saved, jax.tree.leaves((weights, extras)))

    def run_forward(x: Any, stack: _Stack, save: bool) -> Any:
        def one(weights: Sequence[Any], extras: Any, x: Any) -> Any:
            if save:
                return layer_vjp(weights, extras, x)
            out, state = stack.layer(weights, extras, x)
            return out, (), state

        def step(carry: Any, inputs: Any) -> Any:
            x, weights = carry
            index, extras = inputs
            ahead = stack.fetch(index + 1)
            (x, aux), saved, state = one(weights, extras, x)
            return (x, ahead), (aux, state, saved)

        head, tail = _cut_last(stack.extras)
        (x, weights), outs = jax.lax.scan(step, (x, stack.fetch(0)), (jnp.arange(last), head))
        (x, aux), saved, state = one(weights, tail, x)
        aux, state = _append(outs[:2], (aux, state))
        return (x, aux, state), (outs[2], saved, weights)

    @jax.custom_vjp
    def run(diff: Any, x: Any, values: Any, extras: Any) -> Any:
        del diff
        return run_forward(x, dataclasses.replace(stack, values=values, extras=extras), False)[0]

    def forward(diff: Any, x: Any, values: Any, extras: Any) -> Any:
        del diff
        mine = dataclasses.replace(stack, values=values, extras=extras)
        out, saved = run_forward(x, mine, True)
        return out, (saved, values, extras)

    def backward(residuals: Any, cotangents: Any) -> Any:
        (saved, saved_last, weights), values, extras = residuals
        mine = dataclasses.replace(stack, values=values, extras=extras)
        dx, daux, _ = cotangents
        head, tail = _cut_last((extras, daux))
        pending, dx = restored_vjp(saved_last, weights, tail[0])((dx, tail[1]))

        def step(carry: Any, inputs: Any) -> Any:
            dx, weights, pending = carry
            index, saved, (extras, daux) = inputs
            ahead = mine.fetch(jnp.maximum(index - 1, 0))
            reduced = mine.reduce(pending)
            pending, dx = restored_vjp(saved, weights, extras)((dx, daux))
            return (dx, ahead, pending), reduced

        start = (dx, mine.fetch(max(last - 1, 0)), pending)
        rows = (jnp.arange(last), saved, head)
        (dx, _, pending), grads = jax.lax.scan(step, start, rows, reverse=True)
        first = jax.tree.map(lambda g: g[None], mine.reduce(pending))
        grads = jax.tree.map(lambda g, rest: jnp.concatenate([g, rest]), first, grads)
        return grads, dx, None, None

    assert count >= 1
    run.defvjp(forward, backward)
    return lambda x: run(stack.diff, x, jax.lax.stop_gradient(stack.values), stack.extras)


def _cut_last(tree: Any) -> tuple[Any, Any]:
    """All layers but the last, and the last."""
    return jax.tree.map(lambda x: x[:-1], tree), jax.tree.map(lambda x: x[-1], tree)


def _append(stacked: Any, one: Any) -> Any:
    return jax.tree.map(lambda xs, x: jnp.concatenate([xs, x[None]]), stacked, one)


def _without(tree: Any, known: Sequence[Any]) -> tuple[list[Any], Any]:
    """Takes the leaves out of `tree` that are among `known`: the weights need not be saved."""
    leaves, treedef = jax.tree.flatten(tree)
    slots = [next((i for i, k in enumerate(known) if k is leaf), None) for leaf in leaves]
    kept = [leaf for leaf, slot in zip(leaves, slots, strict=True) if slot is None]
    return kept, (treedef, slots)


def _with(structure: Any, kept: Sequence[Any], known: Sequence[Any]) -> Any:
    """Puts a tree together again that `_without` took apart."""
    treedef, slots = structure
    given = iter(kept)
    leaves = [next(given) if slot is None else known[slot] for slot in slots]
    return jax.tree.unflatten(treedef, leaves)
