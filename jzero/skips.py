"""The loss scale in an optimizer state, and what its counts say: when skipping can help no more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jzero.layout import is_floating
from jzero.precision import MasterWeightsState
from jzero.scaling import LossScaleState, at_least_1
from jzero.trees import abstract_leaves


def find_loss_scale_state(opt_state: Any) -> LossScaleState | None:
    """The state of a loss scale, outermost or in a master's; None where there is none.

    Raises:
      ValueError: where one is further in, or there are two: what is around it would not skip.
    """

    def is_scale(x: Any) -> bool:
        return isinstance(x, LossScaleState)

    outer = opt_state.inner if isinstance(opt_state, MasterWeightsState) else opt_state
    inside = outer.inner if is_scale(outer) else outer
    if any(map(is_scale, jax.tree.leaves(inside, is_leaf=is_scale))):
        raise ValueError(
            "a loss scale or finite check is inside of another transform, which would see scaled "
            "gradients and go on where it skips; keep one, around the whole optimizer."
        )
    return outer if is_scale(outer) else None


def loss_scale(opt_state: Any) -> jax.Array:
    """The number to multiply the loss by before its gradient: float32, 1.0 where nothing scales.

    >>> float(loss_scale({"mu": jnp.ones(2)}))
    1.0
    """
    state = find_loss_scale_state(opt_state)
    return jnp.ones((), jnp.float32) if state is None else _array(state.loss_scale)


def was_skipped(opt_state: Any) -> jax.Array:
    """Whether the last update changed nothing: bool, to keep what else a step would change.

    Batch statistics, say, which a loss that is not finite spoils:
    `jnp.where(was_skipped(opt_state), before, after)`.

    >>> bool(was_skipped({"mu": jnp.ones(2)}))
    False
    """
    state = find_loss_scale_state(opt_state)
    if state is None:
        return jnp.zeros((), bool)
    last, step = _array(state.last_overflow_step), _array(state.step)
    return (step > 0) & (last == step - 1)


def _array(x: Any) -> jax.Array:
    """The array of a leaf, which nnx.Optimizer keeps in a Variable."""
    (array,) = jax.tree.leaves(x)
    return jnp.asarray(array)


def skip_counts(opt_state: Any) -> dict[str, jax.Array]:
    """The scalars of a loss scale by name, to fetch with the metrics; empty where there is none."""
    state = find_loss_scale_state(opt_state)
    if state is None:
        return {}
    return {n: _array(x) for n, x in state._asdict().items() if n != "inner"}


def check_skips(
    opt_state: Any,
    params: Any,
    *,
    max_skips_in_a_row: int | None = 10,
    step: int | None = None,
) -> None:
    """Raises where skipping can help no more; `check_skip_counts` of a state, fetched here.

    Args:
      opt_state: of an optimizer with a loss scale or finite check outermost; any other passes.
      params: what it trains (arrays, shapes or a module), for the name of the leaf in the message.
      max_skips_in_a_row, step: as in `check_skip_counts`.
    """
    counts = jax.device_get(skip_counts(opt_state))
    names = trained_names(params)
    check_skip_counts(counts, names, max_skips_in_a_row=max_skips_in_a_row, step=step)


def trained_names(params: Any) -> list[str]:
    """The names of the leaves that get a gradient, in tree order: `nonfinite_leaf` counts these."""
    leaves = abstract_leaves(params)
    return [name or "the parameter" for name, x in leaves.items() if is_floating(x.dtype)]


def check_skip_counts(
    counts: Mapping[str, Any],
    names: Sequence[str],
    *,
    max_skips_in_a_row: int | None = 10,
    step: int | None = None,
) -> None:
    """Raises where skipping can help no more: a pure function of what `skip_counts` returned.

    Args:
      counts: numbers by name, fetched; an empty one passes.
      names: from `trained_names`.
      max_skips_in_a_row: skips in a row that no lower scale can mend, at least 1, before it is an
        error; None for any number.
      step: the number of the step for the message; None for that of the last overflow, from 0.

    Raises:
      FloatingPointError: where that many were skipped, or an overflow happened at the minimum scale
        (under at_minimum="raise"). It names the step, the leaf, the scale and the mend.

    >>> counts = dict(loss_scale=1.0, last_overflow_step=8, skips_in_a_row=1, nonfinite_leaf=0)
    >>> check_skip_counts({**counts, "is_stuck": True}, ["wte"])
    Traceback (most recent call last):
    FloatingPointError: step 8: the gradient of wte overflows at the minimum loss scale 1; ...
    """
    if max_skips_in_a_row is not None:
        at_least_1("max_skips_in_a_row", max_skips_in_a_row)
    if not counts:
        return
    in_a_row = int(counts["skips_in_a_row"])
    is_over = max_skips_in_a_row is not None and in_a_row >= max_skips_in_a_row
    if not counts["is_stuck"] and not is_over:
        return
    at = int(counts["last_overflow_step"]) if step is None else step
    leaf, scale = _leaf_name(int(counts["nonfinite_leaf"]), names), float(counts["loss_scale"])
    if counts["is_stuck"]:
        raise FloatingPointError(
            f"step {at}: the gradient of {leaf} overflows at the minimum loss scale {scale:g}; "
            "lower the learning rate or min_loss_scale, look for an inf or nan in the data, or go "
            'on skipping with at_minimum="stay".'
        )
    raise FloatingPointError(
        f"step {at}: {in_a_row} updates in a row were skipped, since the gradient of {leaf} is not "
        f"finite at loss scale {scale:g}; lower the learning rate, clip gradients, look for an inf "
        "or nan in the data and the loss, or raise max_skips_in_a_row."
    )


def _leaf_name(index: int, names: Sequence[str]) -> str:
    return names[index] if 0 <= index < len(names) else f"leaf {index}"
