"""A stack of layers taken apart: what is scanned, what is held in shards, what is trained."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import nnx

from jzero.held import Held, fetch, reduce_scatter
from jzero.layout import is_floating


def is_held(x: Any) -> bool:
    """Whether a leaf is held, to be read."""
    return isinstance(x, Held)


@dataclasses.dataclass(frozen=True)
class Stack:
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
    def of(cls, block_fn: Callable[..., Any], layers: Any, keys: Any, has_aux: bool) -> Stack:
        graphdef, tree, state = None, layers, None
        if isinstance(layers, nnx.Module):
            graphdef, tree, state = nnx.split(layers, nnx.Param, ...)
        leaves, treedef = jax.tree.flatten(tree, is_leaf=is_held)
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
            fresh = jax.tree.map(
                lambda v: v, state
            )  # Variables of this trace, so that they can change
            module = nnx.merge(self.graphdef, tree, fresh)
            out = self.block_fn(module, x, key)
            state = nnx.state(module, nnx.Not(nnx.Param))
        return (out if self.has_aux else (out, None)), state

    def fetch(self, index: Any) -> list[Any]:
        """Gathers the weights of one layer."""
        values = [jax.lax.dynamic_index_in_dim(v, index, keepdims=False) for v in self.values]
        return [
            v if h is None else fetch(v, h.wire) for v, h in zip(values, self.helds, strict=True)
        ]

    def reduce(self, grads: Sequence[Any]) -> list[Any]:
        """Reduces one layer's whole gradients to what their taps hold."""
        helds = [h for h, trained in zip(self.helds, self.is_trained, strict=True) if trained]
        return [
            g if h is None else reduce_scatter(g, h.wire).astype(h.tap.dtype)
            for g, h in zip(grads, helds, strict=True)
        ]


def remat_policy(stack: Stack, remat: str) -> Any:
    """What the backward pass finds saved. Weights and their casts are never among it."""
    if remat == "full":
        return jax.checkpoint_policies.nothing_saveable
    if remat == "dots":
        return jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    shapes = {v.shape[1:] for v in stack.values} | {h.shape[1:] for h in stack.helds if h}

    def save_all_but_casts_of_weights(prim: Any, *avals: Any, **_: Any) -> bool:
        return not (prim.name == "convert_element_type" and avals[0].shape in shapes)

    return save_all_but_casts_of_weights
