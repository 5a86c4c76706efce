"""The loss scale in an optimizer state, and what its counts say: when skipping can help no more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jzero.scaling import LossScaleState, at_least_1


def find_loss_scale_state(opt_state: Any) -> LossScaleState | None:
    """Finds the state of a loss scale anywhere in an optimizer state; None where there is none.

    Raises:
      ValueError: where there are two, so that no one number scales the loss.
    """

    def is_scale(x: Any) -> bool:
        return isinstance(x, LossScaleState)

    def found(tree: Any) -> list[LossScaleState]:
        states = [x for x in jax.tree.leaves(tree, is_leaf=is_scale) if is_scale(x)]
        return [y for x in states for y in (x, *found(x.inner))]

    states = found(opt_state)
    if len(states) > 1:
        raise ValueError(
            f"the optimizer state holds {len(states)} loss scales or finite checks; "
            "keep one, around the whole optimizer."
        )
    return states[0] if states else None


def loss_scale(opt_state: Any) -> jax.Array:
    """The number to multiply the loss by before its gradient: float32, 1.0 where nothing scales.

    >>> float(loss_scale({"mu": jnp.ones(2)}))
    1.0
    """
    state = find_loss_scale_state(opt_state)
    return jnp.ones((), jnp.float32) if state is None else jnp.asarray(state.loss_scale)


def skip_counts(opt_state: Any) -> dict[str, jax.Array]:
    """The scalars of a loss scale by name, to fetch with the metrics; empty where there is none."""
    state = find_loss_scale_state(opt_state)
    return {} if state is None else {n: x for n, x in state._asdict().items() if n != "inner"}


def check_skips(
    opt_state: Any,
    names: Sequence[str],
    *,
    max_skips_in_a_row: int | None = 10,
    step: int | None = None,
) -> None:
    """Raises where skipping can help no more; `check_skip_counts` of a state, fetched here."""
    counts = jax.device_get(skip_counts(opt_state))
    check_skip_counts(counts, names, max_skips_in_a_row=max_skips_in_a_row, step=step)


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
      names: of the floating parameters, in tree order: `nonfinite_leaf` counts these.
      max_skips_in_a_row: skips in a row that no lower scale can mend, at least 1, before it is an
        error; None for any number.
      step: the number of the step for the message; None for the last update's, from 0.

    Raises:
      FloatingPointError: where that many were skipped, or an overflow happened at the minimum scale
        (under at_minimum="raise"). It names the step, the leaf, the scale and the mend.

    >>> counts = {"loss_scale": 1.0, "step": 9, "skips_in_a_row": 1, "nonfinite_leaf": 0}
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
    at = int(counts["step"]) - 1 if step is None else step
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
