"""Learning rates by step: ours, and DeepSpeed's five, as pure optax schedules.

A schedule is a function from the number of updates already applied to a rate: optax gives the
first update count 0. It takes a Python, numpy or traced integer and computes in float64 where x64
is enabled. DeepSpeed steps its scheduler after the optimizer, so update c (0-based) uses its
scheduler's index c - 1, and update 0 what stands in the optimizer before the first step; c below
counts updates.
"""

import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax

WarmupType = Literal["log", "linear"]


def cosine(
    learning_rate: float, num_steps: int, *, warmup_steps: int = 0, min_ratio: float = 0.0
) -> optax.Schedule:
    """An even rise to the peak, then half a cosine down to `min_ratio` of it at the last step.

    Args:
      learning_rate: the peak, above 0.
      num_steps: steps of the run, >= 1.
      warmup_steps: steps of the rise, 0 to num_steps: the first has peak / warmup_steps.
      min_ratio: share of the peak at count num_steps, 0 to 1.

    Raises:
      ValueError: an argument out of its range.

    >>> schedule = cosine(1.0, 10, warmup_steps=4)
    >>> [round(float(schedule(step)), 2) for step in (0, 3, 4, 7, 10)]
    [0.25, 1.0, 1.0, 0.5, 0.0]
    """
    _check_share("min_ratio", min_ratio)
    return _warmed(
        learning_rate,
        num_steps,
        warmup_steps,
        lambda share: min_ratio + (1 - min_ratio) * _half_cosine(share),
    )


def linear(
    learning_rate: float, num_steps: int, *, warmup_steps: int = 0, min_ratio: float = 0.0
) -> optax.Schedule:
    """As `cosine`, with a straight line down.

    >>> schedule = linear(1.0, 10, warmup_steps=2, min_ratio=0.5)
    >>> [round(float(schedule(step)), 2) for step in (0, 1, 2, 6, 10)]
    [0.5, 1.0, 1.0, 0.75, 0.5]
    """
    _check_share("min_ratio", min_ratio)
    return _warmed(
        learning_rate, num_steps, warmup_steps, lambda share: 1 - (1 - min_ratio) * share
    )


def constant(learning_rate: float, num_steps: int, *, warmup_steps: int = 0) -> optax.Schedule:
    """As `cosine`, with no way down.

    >>> schedule = constant(1.0, 10, warmup_steps=2)
    >>> [float(schedule(step)) for step in (0, 1, 2, 10)]
    [0.5, 1.0, 1.0, 1.0]
    """
    return _warmed(learning_rate, num_steps, warmup_steps, jnp.ones_like)


def _warmed(
    peak: float, num_steps: int, warmup_steps: int, decay: Callable[[jax.Array], jax.Array]
) -> optax.Schedule:
    """peak (c + 1) / warmup_steps, then the peak times `decay` of the share that is done."""
    _check_rate("learning_rate", peak, above_zero=True)
    _check_steps("num_steps", num_steps)
    _check_steps("warmup_steps", warmup_steps, least=0)
    if warmup_steps > num_steps:
        raise ValueError(
            f"warmup_steps {warmup_steps} is longer than num_steps {num_steps}; use 0 to "
            f"{num_steps}, or more num_steps."
        )

    def schedule(count: Any) -> jax.Array:
        count = jnp.asarray(count)
        rise = _real(count + 1) / max(warmup_steps, 1)
        share = _real(count - warmup_steps) / max(num_steps - warmup_steps, 1)
        return peak * jnp.where(count < warmup_steps, rise, decay(jnp.clip(share, 0, 1)))

    return schedule


def warmup_lr(
    *,
    warmup_min_lr: float = 0.0,
    warmup_max_lr: float = 0.001,
    warmup_num_steps: int = 1000,
    warmup_type: WarmupType = "log",
) -> optax.Schedule:
    """DeepSpeed's WarmupLR: from the least to the greatest rate, and then that.

    With n = max(2, warmup_num_steps) and i = c - 1 the rate is min + (max - min) g, where g is
    log(i + 1) / log(n) ("log") or i / n ("linear") for 0 <= i < n, 1 after that, and 0 for c = 0.

    Args:
      warmup_min_lr: the least rate, 0 to warmup_max_lr.
      warmup_max_lr: the greatest rate.
      warmup_num_steps: n, >= 1.
      warmup_type: "log" or "linear".

    Raises:
      ValueError: an argument out of its range.

    Source: DeepSpeed lr_schedules.py; update c, 0-based, uses scheduler index c - 1.

    >>> schedule = warmup_lr(warmup_max_lr=1.0, warmup_num_steps=10, warmup_type="linear")
    >>> [round(float(schedule(step)), 2) for step in (0, 1, 2, 10, 11, 99)]
    [0.0, 0.0, 0.1, 0.9, 1.0, 1.0]
    """
    return _risen(
        warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, lambda index, num_rise: 1.0
    )


def _risen(
    low: float,
    high: float,
    num_steps: int,
    warmup_type: WarmupType,
    after: Callable[[jax.Array, int], Any],
) -> optax.Schedule:
    """DeepSpeed's rise from one rate to another; `after` gives the share of it from then on."""
    _check_warmup(num_steps, warmup_type)
    _check_range("warmup_min_lr", low, "warmup_max_lr", high)
    num_rise = max(2, num_steps)

    def schedule(count: Any) -> jax.Array:
        index = jnp.asarray(count) - 1
        rise = _rise(index, num_rise, warmup_type)
        return low + (high - low) * jnp.where(index < num_rise, rise, after(index, num_rise))

    return schedule


def warmup_decay_lr(
    total_num_steps: int,
    *,
    warmup_min_lr: float = 0.0,
    warmup_max_lr: float = 0.001,
    warmup_num_steps: int = 1000,
    warmup_type: WarmupType = "log",
) -> optax.Schedule:
    """DeepSpeed's WarmupDecayLR: `warmup_lr`, then a straight line back to the least rate.

    For i = c - 1 >= n the share g is max(0, (total - i) / max(1, total - n)).

    Args:
      total_num_steps: at index total the least rate is reached; >= warmup_num_steps.
      warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type: as `warmup_lr`.

    Raises:
      ValueError: an argument out of its range.

    Source: DeepSpeed lr_schedules.py; update c, 0-based, uses scheduler index c - 1.

    >>> schedule = warmup_decay_lr(20, warmup_max_lr=1.0, warmup_num_steps=10)
    >>> [round(float(schedule(step)), 2) for step in (0, 1, 2, 11, 16, 21)]
    [0.0, 0.0, 0.3, 1.0, 0.5, 0.0]
    """
    _check_warmup(warmup_num_steps, warmup_type)
    _check_total(total_num_steps, warmup_num_steps)

    def fall(index: jax.Array, num_rise: int) -> jax.Array:
        left = _real(total_num_steps - index) / max(1, total_num_steps - num_rise)
        return jnp.maximum(left, 0.0)

    return _risen(warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, fall)


def warmup_cosine_lr(
    learning_rate: float,
    total_num_steps: int,
    *,
    warmup_min_ratio: float = 0.0,
    warmup_num_steps: int = 1000,
    cos_min_ratio: float = 0.0001,
    warmup_type: WarmupType = "log",
) -> optax.Schedule:
    """DeepSpeed's WarmupCosineLR: a rise from a share of the peak, then half a cosine down.

    With n, i and g of `warmup_lr` the rate is the peak times: 0 for c = 0 (whatever the ratios);
    r + (1 - r) g with r = warmup_min_ratio for 0 <= i < n; then q + (1 - q) (1 + cos(pi p)) / 2
    with q = cos_min_ratio and p = min(1, (i - n + 1) / max(1, total - n)).

    Args:
      learning_rate: the peak, above 0.
      total_num_steps: where the cosine ends; >= warmup_num_steps.
      warmup_min_ratio: share of the peak from which it rises, 0 to 1.
      warmup_num_steps: n, >= 1.
      cos_min_ratio: share of the peak at which it ends, 0 to 1.
      warmup_type: "log" or "linear".

    Raises:
      ValueError: an argument out of its range.

    Source: DeepSpeed lr_schedules.py; update c, 0-based, uses scheduler index c - 1.

    >>> schedule = warmup_cosine_lr(1.0, 20, warmup_num_steps=10, cos_min_ratio=0.1)
    >>> [round(float(schedule(step)), 2) for step in (0, 1, 10, 15, 20)]
    [0.0, 0.0, 1.0, 0.55, 0.1]
    """
    _check_rate("learning_rate", learning_rate, above_zero=True)
    _check_warmup(warmup_num_steps, warmup_type)
    _check_total(total_num_steps, warmup_num_steps)
    _check_share("warmup_min_ratio", warmup_min_ratio)
    _check_share("cos_min_ratio", cos_min_ratio)
    num_rise = max(2, warmup_num_steps)

    def schedule(count: Any) -> jax.Array:
        index = jnp.asarray(count) - 1
        rise = _rise(index, num_rise, warmup_type)
        rise = warmup_min_ratio + (1 - warmup_min_ratio) * rise
        done = _real(index - num_rise + 1) / max(1, total_num_steps - num_rise)
        fall = cos_min_ratio + (1 - cos_min_ratio) * _half_cosine(jnp.clip(done, 0, 1))
        ratio = jnp.where(index < num_rise, rise, fall)
        return learning_rate * jnp.where(index < 0, 0.0, ratio)

    return schedule


def one_cycle(
    cycle_min_lr: float,
    cycle_max_lr: float,
    *,
    decay_lr_rate: float = 0.0,
    cycle_first_step_size: int = 2000,
    cycle_second_step_size: int | None = None,
    cycle_first_stair_count: int = 0,
    cycle_second_stair_count: int | None = None,
    decay_step_size: int = 0,
) -> optax.Schedule:
    """DeepSpeed's OneCycle: up and down again in straight lines or stairs, then a decay.

    For c <= first + second the rate is min + (max - min) s, where s is c / first on the way up
    and (first + second - c) / second on the way down, rounded down to a multiple of 1 / stairs
    where that half has stairs. After that, with d = c - first - second, it is
    min / (1 + decay_lr_rate d / decay_step_size).

    Args:
      cycle_min_lr: rate at both ends of the cycle, 0 to cycle_max_lr.
      cycle_max_lr: rate at its middle.
      decay_lr_rate: >= 0; 0: no decay.
      cycle_first_step_size: steps up, >= 1.
      cycle_second_step_size: steps down, >= 1; None: as many as up.
      cycle_first_stair_count: stairs on the way up; 0: a straight line.
      cycle_second_stair_count: stairs on the way down; None: as many as up.
      decay_step_size: steps over which the decay's denominator grows by decay_lr_rate; 0: no decay.

    Raises:
      ValueError: an argument out of its range, or a decay rate without a step size.

    Source: DeepSpeed lr_schedules.py; update c, 0-based, uses scheduler index c - 1, and its
    cycle counts from one, so that c itself is the place in the cycle.

    >>> schedule = one_cycle(0.1, 1.1, cycle_first_step_size=10)
    >>> [round(float(schedule(step)), 2) for step in (0, 5, 10, 15, 20, 30)]
    [0.1, 0.6, 1.1, 0.6, 0.1, 0.1]
    """
    _check_range("cycle_min_lr", cycle_min_lr, "cycle_max_lr", cycle_max_lr)
    scale, past = _cycle(
        cycle_first_step_size,
        cycle_second_step_size,
        cycle_first_stair_count,
        cycle_second_stair_count,
    )
    decay = _decay_per_step("decay_lr_rate", decay_lr_rate, decay_step_size)

    def schedule(count: Any) -> jax.Array:
        rate = cycle_min_lr + (cycle_max_lr - cycle_min_lr) * scale(count)
        return rate / (1 + decay * past(count))

    return schedule


def one_cycle_momentum(
    *,
    cycle_min_mom: float = 0.8,
    cycle_max_mom: float = 0.9,
    decay_mom_rate: float = 0.0,
    cycle_first_step_size: int = 2000,
    cycle_second_step_size: int | None = None,
    cycle_first_stair_count: int = 0,
    cycle_second_stair_count: int | None = None,
    decay_step_size: int = 0,
) -> optax.Schedule:
    """The momentum that goes with `one_cycle`: down while the rate goes up, and back.

    With s and d of `one_cycle` it is max - (max - min) s, after the cycle
    max (1 + decay_mom_rate d / decay_step_size), and for c = 0 it is min: what DeepSpeed puts into
    the optimizer before the first step. DeepSpeed also sets Adam's second beta to 0.99; here that
    stays the optimizer's. Use: `optax.inject_hyperparams(optax.adam)(rate, b1=momentum)`.

    Args:
      cycle_min_mom: momentum at the middle of the cycle, 0 to cycle_max_mom.
      cycle_max_mom: momentum at its ends, below 1.
      decay_mom_rate: >= 0; 0: the momentum stays after the cycle.
      cycle_first_step_size, cycle_second_step_size, cycle_first_stair_count,
        cycle_second_stair_count, decay_step_size: as `one_cycle`.

    Raises:
      ValueError: an argument out of its range, or a decay rate without a step size.

    Source: DeepSpeed lr_schedules.py; update c, 0-based, uses scheduler index c - 1.

    >>> momentum = one_cycle_momentum(cycle_first_step_size=10)
    >>> [round(float(momentum(step)), 2) for step in (0, 1, 5, 10, 15, 20, 30)]
    [0.8, 0.89, 0.85, 0.8, 0.85, 0.9, 0.9]
    """
    _check_range("cycle_min_mom", cycle_min_mom, "cycle_max_mom", cycle_max_mom)
    if cycle_max_mom >= 1:
        raise ValueError(f"cycle_max_mom is {cycle_max_mom!r}; use a number below 1.")
    scale, past = _cycle(
        cycle_first_step_size,
        cycle_second_step_size,
        cycle_first_stair_count,
        cycle_second_stair_count,
    )
    growth = _decay_per_step("decay_mom_rate", decay_mom_rate, decay_step_size)

    def schedule(count: Any) -> jax.Array:
        momentum = cycle_max_mom - (cycle_max_mom - cycle_min_mom) * scale(count)
        momentum = momentum * (1 + growth * past(count))
        return jnp.where(jnp.asarray(count) <= 0, cycle_min_mom, momentum)

    return schedule


def lr_range_test(
    *,
    lr_range_test_min_lr: float = 0.001,
    lr_range_test_step_size: int = 2000,
    lr_range_test_step_rate: float = 1.0,
    lr_range_test_staircase: bool = False,
) -> optax.Schedule:
    """DeepSpeed's LRRangeTest: a rate that grows without end, to see where training breaks.

    The rate is min (1 + step_rate c / step_size), the quotient rounded down in a staircase.

    Args:
      lr_range_test_min_lr: the first rate, above 0.
      lr_range_test_step_size: steps over which the rate grows by min x step_rate, >= 1.
      lr_range_test_step_rate: >= 0.
      lr_range_test_staircase: whether it grows only every step_size steps.

    Raises:
      ValueError: an argument out of its range.

    Source: DeepSpeed lr_schedules.py; update c, 0-based, uses scheduler index c - 1, to which
    the test adds one.

    >>> schedule = lr_range_test(lr_range_test_min_lr=1.0, lr_range_test_step_size=10)
    >>> [float(schedule(step)) for step in (0, 5, 10)]
    [1.0, 1.5, 2.0]
    """
    _check_rate("lr_range_test_min_lr", lr_range_test_min_lr, above_zero=True)
    _check_steps("lr_range_test_step_size", lr_range_test_step_size)
    _check_rate("lr_range_test_step_rate", lr_range_test_step_rate)

    def schedule(count: Any) -> jax.Array:
        count = jnp.asarray(count)
        if lr_range_test_staircase:
            grown = _real(count // lr_range_test_step_size)
        else:
            grown = _real(count) / lr_range_test_step_size
        return lr_range_test_min_lr * (1 + lr_range_test_step_rate * grown)

    return schedule


OURS: dict[str, Callable[..., optax.Schedule]] = {
    "cosine": cosine,
    "linear": linear,
    "constant": constant,
}
DEEPSPEED: dict[str, Callable[..., optax.Schedule]] = {
    "WarmupLR": warmup_lr,
    "WarmupDecayLR": warmup_decay_lr,
    "WarmupCosineLR": warmup_cosine_lr,
    "OneCycle": one_cycle,
    "LRRangeTest": lr_range_test,
}
# The momentum that goes with a schedule of the rate.
MOMENTUM: dict[Callable[..., optax.Schedule], Callable[..., optax.Schedule]] = {
    one_cycle: one_cycle_momentum
}


def _real(x: Any) -> jax.Array:
    """As float64 where x64 is enabled, else float32."""
    return jnp.asarray(x, jnp.result_type(float))


def _half_cosine(share: jax.Array) -> jax.Array:
    return (1 + jnp.cos(jnp.pi * share)) / 2


def _rise(index: jax.Array, num_steps: int, warmup_type: WarmupType) -> jax.Array:
    """Share of a warm-up at an index of DeepSpeed's; 0 below index 0."""
    index = _real(jnp.maximum(index, 0))
    if warmup_type == "linear":
        return index / num_steps
    return jnp.log(index + 1) / jnp.log(_real(num_steps))


def _cycle(
    first: int, second: int | None, first_stairs: int, second_stairs: int | None
) -> tuple[Callable[[Any], jax.Array], Callable[[Any], jax.Array]]:
    """Functions of a count: height in the cycle, 0 to 1, and steps past its end."""
    second = first if second is None else second
    second_stairs = first_stairs if second_stairs is None else second_stairs
    _check_steps("cycle_first_step_size", first)
    _check_steps("cycle_second_step_size", second)
    _check_steps("cycle_first_stair_count", first_stairs, least=0)
    _check_steps("cycle_second_stair_count", second_stairs, least=0)
    total = first + second

    def share(done: jax.Array, size: int, stairs: int) -> jax.Array:
        if not stairs:
            return _real(done) / size
        # Stair j begins at the least step of at least j / stairs: in Python's integers, since a
        # quotient in floats may fall just below its stair, and a product in int32 overflow.
        begins = np.array([-(-j * size // stairs) for j in range(1, stairs + 1)])
        return _real(jnp.searchsorted(begins, done, side="right")) / stairs

    def scale(count: Any) -> jax.Array:
        place = jnp.clip(jnp.asarray(count), 0, total)
        rise, fall = share(place, first, first_stairs), share(total - place, second, second_stairs)
        return jnp.where(place <= first, rise, fall)

    return scale, lambda count: _real(jnp.maximum(jnp.asarray(count) - total, 0))


def _decay_per_step(name: str, rate: float, step_size: int) -> float:
    _check_rate(name, rate)
    _check_steps("decay_step_size", step_size, least=0)
    if rate and not step_size:
        raise ValueError(
            f"{name} {rate!r} has no effect with decay_step_size 0; set decay_step_size to 1 or "
            f"more, or leave {name} out."
        )
    return rate / step_size if step_size else 0.0


def _check_steps(name: str, value: Any, least: int = 1) -> None:
    is_integer = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not is_integer or value < least:
        raise ValueError(f"{name} is {value!r}; use an integer of {least} or more.")


def _check_rate(name: str, value: Any, *, above_zero: bool = False) -> None:
    is_number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value < 0 or (above_zero and value == 0):
        raise ValueError(
            f"{name} is {value!r}; use {'a number above 0' if above_zero else '0 or more'}."
        )


def _check_share(name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise ValueError(f"{name} is {value!r}; use a share from 0 to 1.")


def _check_range(low_name: str, low: float, high_name: str, high: float) -> None:
    _check_rate(low_name, low)
    _check_rate(high_name, high)
    if not low <= high:
        raise ValueError(
            f"{low_name} {low!r} is above {high_name} {high!r}; use {high!r} or less, or a greater "
            f"{high_name}."
        )


def _check_warmup(num_steps: Any, warmup_type: Any) -> None:
    _check_steps("warmup_num_steps", num_steps)
    if warmup_type not in ("log", "linear"):
        raise ValueError(f"warmup_type is {warmup_type!r}; use 'log' or 'linear'.")


def _check_total(total_num_steps: Any, warmup_num_steps: int) -> None:
    _check_steps("total_num_steps", total_num_steps)
    if total_num_steps < warmup_num_steps:
        raise ValueError(
            f"warmup_num_steps {warmup_num_steps} is longer than total_num_steps "
            f"{total_num_steps}; use 1 to {total_num_steps}, or more total_num_steps."
        )
