"""The layer loop that jzero lends a model, and the one-line form for plain functions and Linen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from jzero.held import mark_read, mark_stream, read
from jzero.prefetch import Loop
from jzero.stack import Stack, is_held, remat_policy

REMATS = ("none", "full", "dots")


def block_params(params: Any) -> Any:
    """Reads a block's weights, as its first line: for Linen modules and plain functions.

    Args:
      params: the tree of one layer's weights as the block receives it.

    Returns:
      The same tree as whole arrays: unchanged at stages 0 and 1, with a gradient tap at stage 2,
      gathered at stage 3.
    """
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
    """Runs a stack of layers, each `x = block_fn(layer, x, key)`, the wire beside the compute.

    While one layer computes, the weights of the next are gathered and the gradient of the last is
    reduce-scattered, where the stage cuts them.

    Args:
      block_fn: one layer; returns x, or (x, aux) with `has_aux`.
      layers: the stacked module (each Variable has a leading layer dim), or a tree of such arrays.
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
    stack = Stack.of(block_fn, layers, keys, has_aux)
    is_cut = any(held is not None for held in stack.helds)
    run = Loop.of(stack, remat_policy(stack, remat), x) if is_cut else _plain(stack, remat)
    x, aux, state = run(x)
    if stack.graphdef is not None:
        nnx.update(layers, state)
    return (x, aux) if has_aux else x


def _plain(stack: Stack, remat: str) -> Callable[[Any], Any]:
    """The ordinary loop: a scan with remat around the layer; nothing in it is cut."""

    def step(x: Any, inputs: Any) -> Any:
        weights, extras = inputs
        if stack.graphdef is None:
            weights = block_params(weights)
        (x, aux), state = stack.layer(weights, extras, x)
        return x, (aux, state)

    if remat != "none":
        step = jax.checkpoint(step, policy=remat_policy(stack, remat), prevent_cse=False)

    def run(x: Any) -> Any:
        x = mark_stream(x, stack.values)
        x, (aux, state) = jax.lax.scan(step, x, (stack.values, stack.extras))
        return x, aux, state

    return run
