"""Loss scaling and the finite check as one optax transform: what is not finite changes nothing.

Each rule of the scale is data; every update computes both outcomes and selects, so it works under
jit, and on every device alike: the check reads the whole gradient.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jzero.layout import is_floating
from jzero.precision import unpartitioned_only

AtMinimum = Literal["raise", "stay"]


class LossScaleState(NamedTuple):
    """State of `dynamic_loss_scale`, `static_loss_scale` and `skip_not_finite`."""

    loss_scale: jax.Array  # float32, what the loss is to be multiplied by next
    step: jax.Array  # int32, updates seen, skipped ones included
    last_overflow_step: jax.Array  # int32, 0-based, -1 at first
    hysteresis: jax.Array  # int32, overflows left; the last of them lowers the scale
    skipped_steps: jax.Array  # int32
    skips_in_a_row: jax.Array  # int32, since the last good step, that no lower scale can mend
    nonfinite_leaf: jax.Array  # int32, first floating gradient leaf not finite at the last skip; -1
    is_stuck: jax.Array  # bool, an update overflowed at the minimum, where that is an error
    inner: Any


@dataclasses.dataclass(frozen=True)
class _Rule:
    """How a loss scale moves; see `dynamic_loss_scale`."""

    initial: float
    window: int
    hysteresis: int
    is_consecutive: bool
    minimum: float
    factor: float
    is_error_at_minimum: bool


def dynamic_loss_scale(
    tx: optax.GradientTransformation,
    *,
    initial_scale_power: int = 16,
    loss_scale_window: int = 1000,
    hysteresis: int = 2,
    consecutive_hysteresis: bool = False,
    min_loss_scale: float = 1.0,
    scale_factor: float = 2.0,
    at_minimum: AtMinimum = "raise",
) -> optax.GradientTransformationExtraArgs:
    """Divides gradients by a scale that follows overflows, and skips what is not finite.

    With steps counted from 0 and `last_overflow_step` -1 at first, the scale grows at a good step
    where step - last_overflow_step - 1 is a positive multiple of the window.

    Args:
      tx: any optax transform; it sees unscaled gradients in at least float32.
      initial_scale_power: the scale starts at 2 to this power.
      loss_scale_window: good steps before the scale grows, at least 1.
      hysteresis: the scale falls at this overflow, at least 1, and at each one after, until the
        budget is refilled.
      consecutive_hysteresis: refills at every good step, not only when the scale grows.
      min_loss_scale: the scale never falls below, positive.
      scale_factor: by which the scale grows and falls, above 1.
      at_minimum: whether an overflow at the minimum scale makes `check_skips` raise at once.

    Returns:
      A transform to put outermost. The gradients it is given are those of loss * loss_scale(state).
      On an overflow the inner state is bit-identical to before, and the updates are -0.0.

    Raises:
      ValueError: for an argument out of its range.

    Source: Micikevicius et al., Mixed Precision Training, arXiv:1710.03740, section 3.2; the rule
    and its names are those of DeepSpeed's configuration.

    >>> tx = dynamic_loss_scale(optax.sgd(1.0), initial_scale_power=8, hysteresis=1)
    >>> params = jnp.ones(2)
    >>> updates, state = tx.update(jnp.array([1.0, jnp.inf]), tx.init(params), params)
    >>> updates.tolist(), float(state.loss_scale), int(state.skipped_steps)
    ([-0.0, -0.0], 128.0, 1)
    """
    initial = _power_of_two(initial_scale_power)
    minimum = _positive("min_loss_scale", min_loss_scale)
    if initial < minimum:
        raise ValueError(
            f"initial_scale_power {initial_scale_power} starts at {initial:g}, below "
            f"min_loss_scale {minimum:g}; use at least {math.ceil(math.log2(minimum))}."
        )
    if not _positive("scale_factor", scale_factor) > 1:
        raise ValueError(f"scale_factor {scale_factor!r} must be above 1; the usual one is 2.")
    if at_minimum not in ("raise", "stay"):
        raise ValueError(f'at_minimum {at_minimum!r} is unknown; use "raise" or "stay".')
    rule = _Rule(
        initial=initial,
        window=at_least_1("loss_scale_window", loss_scale_window),
        hysteresis=at_least_1("hysteresis", hysteresis),
        is_consecutive=bool(consecutive_hysteresis),
        minimum=minimum,
        factor=float(scale_factor),
        is_error_at_minimum=at_minimum == "raise",
    )
    return _scaled(tx, rule)


def static_loss_scale(
    tx: optax.GradientTransformation, loss_scale: float
) -> optax.GradientTransformationExtraArgs:
    """Divides gradients by a fixed scale, and skips what is not finite.

    Args:
      tx: any optax transform.
      loss_scale: positive and finite.

    Raises:
      ValueError: for a scale that is not.

    >>> tx = static_loss_scale(optax.sgd(1.0), 4.0)
    >>> tx.update(jnp.ones(1), tx.init(jnp.ones(1)))[0].tolist()
    [-0.25]
    """
    # A scale at its minimum that no factor moves: every overflow is one it cannot mend.
    scale = _positive("loss_scale", loss_scale)
    return _scaled(tx, _Rule(scale, 1, 1, False, scale, 1.0, False))


def skip_not_finite(tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Skips updates whose gradients are not finite: the check for bfloat16 and float32.

    >>> tx = skip_not_finite(optax.sgd(1.0))
    >>> tx.update(jnp.array([jnp.nan]), tx.init(jnp.ones(1)))[0].tolist()
    [-0.0]
    """
    return static_loss_scale(tx, 1.0)


def _scaled(tx: optax.GradientTransformation, rule: _Rule) -> optax.GradientTransformationExtraArgs:
    inner = unpartitioned_only(tx, "a loss scale or finite check")

    def init(params: Any) -> LossScaleState:
        return LossScaleState(
            loss_scale=jnp.full((), rule.initial, jnp.float32),
            step=jnp.zeros((), jnp.int32),
            last_overflow_step=jnp.full((), -1, jnp.int32),
            hysteresis=jnp.full((), rule.hysteresis, jnp.int32),
            skipped_steps=jnp.zeros((), jnp.int32),
            skips_in_a_row=jnp.zeros((), jnp.int32),
            nonfinite_leaf=jnp.full((), -1, jnp.int32),
            is_stuck=jnp.zeros((), bool),
            inner=inner.init(params),
        )

    def update(grads: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        grads = jax.tree.map(lambda g: _unscaled(g, state.loss_scale), grads)
        bad_leaf = _first_not_finite(grads)
        is_good = bad_leaf < 0
        updates, inner_state = inner.update(grads, state.inner, params, **extra)
        updates = jax.tree.map(lambda u: jnp.where(is_good, u, _nothing(u)), updates)
        kept = jax.tree.map(lambda x, old: _selected(is_good, x, old), inner_state, state.inner)
        return updates, _after(state, rule, bad_leaf)._replace(inner=kept)

    return optax.GradientTransformationExtraArgs(init, update)  # pyright: ignore[reportArgumentType]


def _unscaled(grad: Any, scale: jax.Array) -> Any:
    if not is_floating(grad.dtype):
        return grad
    return grad.astype(jnp.promote_types(grad.dtype, jnp.float32)) / scale


def _first_not_finite(grads: Any) -> jax.Array:
    """The index of the first floating leaf with an inf or nan anywhere, int32; -1 where none."""
    leaves = [g for g in jax.tree.leaves(grads) if is_floating(g.dtype)]
    if not leaves:
        return jnp.full((), -1, jnp.int32)
    is_bad = jnp.stack([~jnp.isfinite(g).all() for g in leaves])
    return jnp.where(is_bad.any(), jnp.argmax(is_bad).astype(jnp.int32), -1)


def _selected(is_good: jax.Array, new: Any, old: Any) -> Any:
    """`new` or `old`, in the dtype of `old`; PRNG keys too."""
    return jnp.where(is_good, new.astype(old.dtype) if is_floating(old.dtype) else new, old)


def _nothing(update: Any) -> Any:
    """The update that leaves every value as it is, a -0.0 too."""
    return jnp.full_like(update, -0.0 if is_floating(update.dtype) else 0)


def _after(state: LossScaleState, rule: _Rule, bad_leaf: jax.Array) -> LossScaleState:
    """The counts and the scale after an update whose first leaf that is not finite is given."""
    is_good = bad_leaf < 0
    since = state.step - state.last_overflow_step - 1
    grows = is_good & (since > 0) & (since % rule.window == 0)
    falls = ~is_good & (state.hysteresis <= 1)
    is_spent = falls & (state.loss_scale <= rule.minimum)
    larger = state.loss_scale * rule.factor
    larger = jnp.where(jnp.isfinite(larger), larger, state.loss_scale)
    smaller = jnp.maximum(state.loss_scale / rule.factor, rule.minimum)
    scale = jnp.where(grows, larger, jnp.where(falls, smaller, state.loss_scale))
    refills = is_good if rule.is_consecutive else grows
    spent = jnp.maximum(state.hysteresis - ~is_good, 1)
    return state._replace(
        loss_scale=scale.astype(jnp.float32),
        step=optax.safe_increment(state.step),
        last_overflow_step=jnp.where(is_good, state.last_overflow_step, state.step),
        hysteresis=jnp.where(refills, jnp.int32(rule.hysteresis), spent),
        skipped_steps=jnp.where(
            is_good, state.skipped_steps, optax.safe_increment(state.skipped_steps)
        ),
        skips_in_a_row=jnp.where(is_good, 0, state.skips_in_a_row + is_spent),
        nonfinite_leaf=jnp.where(is_good, state.nonfinite_leaf, bad_leaf),
        is_stuck=state.is_stuck | (is_spent & rule.is_error_at_minimum),
    )


def at_least_1(what: str, value: Any) -> int:
    """Reads an integer of at least 1, or refuses it."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
        raise ValueError(f"{what} {value!r} must be an integer of at least 1.")
    return int(value)


def _positive(what: str, value: Any) -> float:
    is_number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
    if not is_number or not 0 < value < float(np.finfo(np.float32).max):
        raise ValueError(f"{what} {value!r} must be a positive number, finite in float32.")
    return float(value)


def _power_of_two(power: Any) -> float:
    is_integer = isinstance(power, int | np.integer) and not isinstance(power, bool)
    if not is_integer or not -126 <= power <= 127:
        raise ValueError(
            f"initial_scale_power {power!r} must be an integer from -126 to 127, so that 2 to it "
            "is a float32; the usual one is 16."
        )
    return 2.0 ** int(power)
