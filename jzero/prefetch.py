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
      structures: the static form of what was saved, from the forward trace to the backward one.
    """

    stack: Stack
    policy: Any
    structures: list[Any] = dataclasses.field(default_factory=list)

    def __call__(self, x: Any) -> Any:
        """Runs all layers; returns (x, aux, state), differentiable by x and the taps."""

        @jax.custom_vjp
        def run(diff: Any, x: Any, values: Any, extras: Any) -> Any:
            del diff
            return self._forward(self._with(values, extras), x, save=False)[0]

        def forward(diff: Any, x: Any, values: Any, extras: Any) -> Any:
            del diff
            out, saved = self._forward(self._with(values, extras), x, save=True)
            return out, (saved, values, extras)

        def backward(residuals: Any, cotangents: Any) -> Any:
            saved, values, extras = residuals
            dx, daux, _ = cotangents
            grads, dx = self._backward(self._with(values, extras), saved, dx, daux)
            return grads, dx, None, None

        run.defvjp(forward, backward)
        stack = self.stack
        return run(stack.diff, x, stack.values, stack.extras)

    def _with(self, values: Any, extras: Any) -> Stack:
        return dataclasses.replace(self.stack, values=values, extras=extras)

    def _forward(self, stack: Stack, x: Any, *, save: bool) -> Any:
        def step(carry: Any, inputs: Any) -> Any:
            x, weights = carry
            index, extras = inputs
            ahead = stack.fetch(index + 1)
            (x, aux), saved, state = self._layer(stack, weights, extras, x, save)
            return (x, ahead), (aux, state, saved)

        head, tail = _cut_last(stack.extras)
        rows = (jnp.arange(stack.num_layers - 1), head)
        (x, weights), (aux, state, saved) = jax.lax.scan(step, (x, stack.fetch(0)), rows)
        (x, last_aux), saved_last, last_state = self._layer(stack, weights, tail, x, save)
        aux, state = _append((aux, state), (last_aux, last_state))
        return (x, aux, state), (saved, saved_last, weights)

    def _layer(self, stack: Stack, weights: Sequence[Any], extras: Any, x: Any, save: bool) -> Any:
        """One layer; returns ((x, aux), what its backward pass needs, its state)."""
        if not save:
            out, state = stack.layer(weights, extras, x)
            return out, (), state

        def fn(trained: Sequence[Any], x: Any) -> Any:
            given = iter(trained)
            pairs = zip(weights, stack.is_trained, strict=True)
            return stack.layer([next(given) if t else w for w, t in pairs], extras, x)

        trained = [w for w, t in zip(weights, stack.is_trained, strict=True) if t]
        fn = jax.checkpoint(fn, policy=self.policy, prevent_cse=False)
        out, vjp, state = jax.vjp(fn, trained, x, has_aux=True)
        saved, structure = _without(vjp, jax.tree.leaves((weights, extras)))
        self.structures.append(structure)
        return out, saved, state

    def _vjp(self, saved: Any, weights: Sequence[Any], extras: Any) -> Any:
        return _with(self.structures[-1], saved, jax.tree.leaves((weights, extras)))

    def _backward(self, stack: Stack, saved: Any, dx: Any, daux: Any) -> tuple[list[Any], Any]:
        """Gradients of the taps, stacked, and of x."""
        saved, saved_last, weights = saved
        head, (extras, daux) = _cut_last((stack.extras, daux))
        pending, dx = self._vjp(saved_last, weights, extras)((dx, daux))

        def step(carry: Any, inputs: Any) -> Any:
            dx, weights, pending = carry
            index, saved, (extras, daux) = inputs
            ahead = stack.fetch(jnp.maximum(index - 1, 0))
            reduced = stack.reduce(pending)
            pending, dx = self._vjp(saved, weights, extras)((dx, daux))
            return (dx, ahead, pending), reduced

        start = (dx, stack.fetch(max(stack.num_layers - 2, 0)), pending)
        rows = (jnp.arange(stack.num_layers - 1), saved, head)
        (dx, _, pending), rest = jax.lax.scan(step, start, rows, reverse=True)
        first = [g[None] for g in stack.reduce(pending)]
        return [jnp.concatenate(pair) for pair in zip(first, rest, strict=True)], dx


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
