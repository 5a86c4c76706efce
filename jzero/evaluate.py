"""The mean loss of a model over data, the same on any mesh and at any stage."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jzero.data import Windows
from jzero.outputs import split_loss
from jzero.recipe import Setup


def evaluated(graphdef: Any, variables: tuple[Any, Any]) -> tuple[Any, tuple[Any, Any]]:
    """A model's parts as it is evaluated: Flax's dropout off, batch statistics those it has."""
    model = nnx.merge(graphdef, *variables)
    model.eval()
    graphdef, params, others = nnx.split(model, nnx.Param, ...)
    return graphdef, (params, others)


def make_summed_loss(setup: Setup) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """A function (model, tokens) to the sum and the weight of the loss, averaged over devices."""

    def summed(model: Any, tokens: jax.Array) -> tuple[jax.Array, Any]:
        total, weight, _ = split_loss(setup.loss_fn(model, tokens), has_aux=False)
        if weight is None:
            weight = jnp.full((), tokens.shape[0], jnp.float32)
            total = total * weight
        return total, weight

    return setup.zero.apply(summed)


def mean_loss(
    setup: Setup, graphdef: Any, variables: tuple[Any, Any], windows: Windows, num_rows: int
) -> float:
    """The loss over the first rows of data, in their order.

    Args:
      setup: of the model.
      graphdef, variables: the model; its parameters at rest, and its other Variables.
      windows: rows of tokens.
      num_rows: how many of them, at least 1.

    Returns:
      Nats per token. Rows that do not fill a batch are evaluated on every device alike, so none is
      left out and none counts twice.
    """
    summed = make_summed_loss(setup)
    model = nnx.merge(graphdef, *variables)
    totals = []
    for rows, factor in _batches(setup, windows, num_rows):
        total, weight = jax.device_get(summed(model, setup.place(rows)))
        totals.append((float(total) * factor, float(weight) * factor))
    sums = np.asarray(totals, np.float64).sum(axis=0)
    return float(sums[0] / sums[1])


def _batches(setup: Setup, windows: Windows, num_rows: int) -> Iterable[tuple[np.ndarray, int]]:
    """This process's rows of each batch, and how many devices have different ones."""
    num_shards = setup.rows // setup.batch.micro_batch
    local, first = setup.rows // jax.process_count(), jax.process_index()
    num_whole = num_rows // setup.rows
    for i in range(num_whole):
        start = i * setup.rows + first * local
        yield np.stack([windows[j] for j in range(start, start + local)]), num_shards
    rest = range(num_whole * setup.rows, num_rows)
    if rest:
        rows = np.stack([windows[j] for j in rest])
        yield np.tile(rows, (num_shards // jax.process_count(), 1)), 1


def describe(loss: float, unit: str, tokens_per_unit: float = 1.0) -> str:
    """A loss in nats per token, as perplexity and in bits per unit, too.

    >>> describe(math.log(2), "byte")
    'loss 0.693147 nats a token, perplexity 2.000, 1.0000 bits per byte'
    """
    bits = loss / math.log(2) * tokens_per_unit
    return (
        f"loss {loss:.6f} nats a token, perplexity {math.exp(loss):.3f}, {bits:.4f} bits per {unit}"
    )
