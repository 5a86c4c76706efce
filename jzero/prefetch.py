"""The double-buffered layer loop: gathers one layer ahead and reduces one layer behind.

Two explicit scans under one `jax.custom_vjp`. Forward, the carry holds this layer's gathered
weights while the body gathers the next layer's. Backward, it also holds the last layer's whole
gradient, which the body reduces. Above the shards live two gathered layers and one gradient.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jzero.stack import Stack


@dataclasses.dataclass(frozen=True)
class Loop:
    """One run of a stack.

    Args:
      stack: the layers.
      policy: what the backward pass finds saved.
      layer: one layer, closed over nothing: (weights, extras, x, *consts) -> ((x, aux), state).
      consts: what the layer closed over and may be differentiated by: an encoder's output, say.
      structures: the static form of what was saved, from the forward trace to the backward one.
    """

    stack: Stack
    policy: Any
    layer: Any
    consts: tuple[Any, ...]
    structures: list[Any] = dataclasses.field(default_factory=list)

    @classmethod
    def of(cls, stack: Stack, policy: Any, x: Any) -> Loop:
        """Prepares a run for inputs like `x`."""
        weights = jax.eval_shape(lambda: stack.fetch(0))
        extras = jax.eval_shape(lambda: jax.tree.map(lambda e: e[0], stack.extras))
        layer, consts = jax.closure_convert(stack.layer, weights, extras, x)
        return cls(stack, policy, layer, tuple(consts))

    def __call__(self, x: Any) -> Any:
        """Runs all layers; returns (x, aux, state), differentiable by x, the taps and consts."""

        @jax.custom_vjp
        def run(diff: Any, x: Any, consts: Any, values: Any, extras: Any) -> Any:
            del diff
            return self._with(values, extras, consts)._forward(x, save=False)[0]

        def forward(diff: Any, x: Any, consts: Any, values: Any, extras: Any) -> Any:
            del diff
            out, saved = self._with(values, extras, consts)._forward(x, save=True)
            return out, (saved, consts, values, extras)

        def backward(residuals: Any, cotangents: Any) -> Any:
            saved, consts, values, extras = residuals
            dx, daux, _ = cotangents
            grads, dx, dconsts = self._with(values, extras, consts)._backward(saved, dx, daux)
            return grads, dx, dconsts, None, None

        run.defvjp(forward, backward)
        stack = self.stack
        return run(stack.diff, x, self.consts, stack.values, stack.extras)

    def _with(self, values: Any, extras: Any, consts: Any) -> Loop:
        stack = dataclasses.replace(self.stack, values=values, extras=extras)
        return dataclasses.replace(self, stack=stack, consts=consts)

    def _forward(self, x: Any, *, save: bool) -> Any:
        stack = self.stack

        def step(carry: Any, inputs: Any) -> Any:
            x, weights = carry
            index, extras = inputs
            ahead = stack.fetch(index + 1)
            (x, aux), saved, state = self._layer(weights, extras, x, save)
            return (x, ahead), (aux, state, saved)

        head, tail = _cut_last(stack.extras)
        rows = (jnp.arange(stack.num_layers - 1), head)
        (x, weights), (aux, state, saved) = jax.lax.scan(step, (x, stack.fetch(0)), rows)
        (x, last_aux), saved_last, last_state = self._layer(weights, tail, x, save)
        aux, state = _append((aux, state), (last_aux, last_state))
        return (x, aux, state), (saved, saved_last, weights)

    def _layer(self, weights: Sequence[Any], extras: Any, x: Any, save: bool) -> Any:
        """One layer; returns ((x, aux), what its backward pass needs, its state)."""
        if not save:
            out, state = self.layer(weights, extras, x, *self.consts)
            return out, (), state
        is_trained = self.stack.is_trained

        def fn(trained: Sequence[Any], x: Any, consts: Any) -> Any:
            given = iter(trained)
            pairs = zip(weights, is_trained, strict=True)
            return self.layer([next(given) if t else w for w, t in pairs], extras, x, *consts)

        trained = [w for w, t in zip(weights, is_trained, strict=True) if t]
        fn = jax.checkpoint(fn, policy=self.policy, prevent_cse=False)
        out, vjp, state = jax.vjp(fn, trained, x, self.consts, has_aux=True)
        saved, structure = _without(vjp, self._known(weights, extras))
        self.structures.append(structure)
        return out, saved, state

    def _known(self, weights: Sequence[Any], extras: Any) -> list[Any]:
        """What a layer's backward pass has at hand without saving it."""
        return jax.tree.leaves((weights, extras, self.consts))

    def _vjp(self, saved: Any, weights: Sequence[Any], extras: Any) -> Any:
        return _with(self.structures[-1], saved, self._known(weights, extras))

    def _backward(self, saved: Any, dx: Any, daux: Any) -> tuple[list[Any], Any, Any]:
        """Gradients of the taps, stacked, of x and of the consts."""
        stack = self.stack
        saved, saved_last, weights = saved
        head, (extras, daux) = _cut_last((stack.extras, daux))
        pending, dx, dconsts = self._vjp(saved_last, weights, extras)((dx, daux))

        def step(carry: Any, inputs: Any) -> Any:
            dx, weights, pending, sums = carry
            index, saved, (extras, daux) = inputs
            ahead = stack.fetch(jnp.maximum(index - 1, 0))
            reduced = stack.reduce(pending)
            pending, dx, dconsts = self._vjp(saved, weights, extras)((dx, daux))
            sums = jax.tree.map(jnp.add, sums, dconsts)
            return (dx, ahead, pending, sums), reduced

        start = (dx, stack.fetch(max(stack.num_layers - 2, 0)), pending, dconsts)
        rows = (jnp.arange(stack.num_layers - 1), saved, head)
        (dx, _, pending, dconsts), rest = jax.lax.scan(step, start, rows, reverse=True)
        first = [g[None] for g in stack.reduce(pending)]
        grads = [jnp.concatenate(pair) for pair in zip(first, rest, strict=True)]
        return grads, dx, dconsts


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
