"""Learning rate, momentum and optimizer of a run, from what its configuration names."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jzero.config import (
    NO_SCHEDULE,
    Config,
    OptimizerConfig,
    decay_masks,
    momentum_arguments,
)
from jzero.schedules import MOMENTUM
from jzero.schema import (
    find_optimizer,
    find_schedule,
    own_arguments,
    parameters,
    refuse,
    takes_schedule,
)
from jzero.trees import leaf_name

DEFAULT_LEARNING_RATE = 1e-3
RISES = ("warmup_steps", "warmup_num_steps", "cycle_first_step_size")  # arguments of schedules
# Of optax's schedules, which go on without a word below these: with a constant, say.
LEAST = {"decay_steps": 1, "transition_steps": 1, "transition_begin": 0, "init_value": 0,
         "peak_value": 0, "end_value": 0, "value": 0}  # fmt: skip
MATRIX_DIMS = "muon_weight_dimension_numbers"  # argument: which leaves are matrices, and how
MOMENTA = ("b1", "momentum")  # arguments of optimizers that a schedule of the momentum may set


def make_schedule(config: Config) -> optax.Schedule:
    """The learning rate by step, as [schedule] and [optimizer] say.

    Returns:
      A function of the count of updates; of an optimizer that takes no learning rate: 1.

    Raises:
      ValueError: values that have no effect, or that do not go together.

    >>> from jzero.config import parse_config
    >>> tables = {"schedule": {"warmup_steps": 4}, "optimizer": {"learning_rate": 1.0}}
    >>> schedule = make_schedule(parse_config(tables | {"train": {"num_steps": 10}}))
    >>> [round(float(schedule(step)), 2) for step in (0, 3, 4, 10)]
    [0.25, 1.0, 1.0, 0.0]
    """
    _check_takes_schedule(config)
    name, num_steps = config.schedule.name, config.train.num_steps
    if name == NO_SCHEDULE:
        return optax.constant_schedule(1.0)
    make = find_schedule(name)
    accepted = parameters(make)
    if config.optimizer.learning_rate is not None and "learning_rate" not in accepted:
        mend = f"the schedule {name} has its own rates: leave it out"
        refuse(config.optimizer, "optimizer", "learning_rate", mend)
    given = {k: x for k, x in own_arguments(config.schedule).items() if x is not None}
    _check_numbers(name, given, num_steps)
    known = {"learning_rate": _learning_rate(config.optimizer), "num_steps": num_steps}
    known["total_num_steps"] = num_steps
    arguments = {key: x for key, x in (known | given).items() if key in accepted}
    try:
        schedule = make(**arguments)
    except (ValueError, TypeError) as error:  # TypeError: keys of an inner table
        raise ValueError(f"[schedule] {name}: {error}") from error
    _check_last(name, schedule, num_steps)
    return schedule


def _check_last(name: str, schedule: optax.Schedule, num_steps: int) -> None:
    """Refuses a schedule that is over before the run is."""
    last = float(np.asarray(schedule(num_steps - 1)))
    if num_steps > 1 and not last > 0:
        raise ValueError(
            f"[schedule] {name}: the learning rate of the last step, {num_steps}, is {last:g}; let "
            "the schedule last as long as the run ([train] num_steps), or end above 0."
        )


def _check_takes_schedule(config: Config) -> None:
    optimizer, name = config.optimizer.name, config.schedule.name
    make = find_optimizer(optimizer)
    if "learning_rate" not in parameters(make):
        if config.optimizer.learning_rate is not None:
            mend = f"{optimizer} takes none: leave it out"
            refuse(config.optimizer, "optimizer", "learning_rate", mend)
        if name != NO_SCHEDULE:
            mend = f"{optimizer} takes no learning rate: use {NO_SCHEDULE!r}, or leave it out"
            refuse(config.schedule, "schedule", "name", mend)
    elif name == NO_SCHEDULE:
        mend = f"{optimizer} takes a learning rate: use another, such as 'constant'"
        refuse(config.schedule, "schedule", "name", mend)
    elif not takes_schedule(make):
        own = own_arguments(config.schedule)
        if name != "constant" or own["warmup_steps"]:
            what = (
                name if name != "constant" else f"constant with warmup_steps {own['warmup_steps']}"
            )
            raise ValueError(
                f"[schedule] {what}: {optimizer} takes a number as learning rate, not a schedule; "
                "use 'constant' without warmup_steps."
            )


def _check_numbers(schedule: str, arguments: dict[str, Any], num_steps: int) -> None:
    for name in RISES:
        if name in arguments and arguments[name] > num_steps:
            raise ValueError(
                f"[schedule] {name} {arguments[name]} is longer than the run: [train] num_steps is "
                f"{num_steps}; use {num_steps} or less, or more num_steps."
            )
    least = LEAST | ({"warmup_steps": 1} if schedule == "warmup_constant_schedule" else {})
    for name, value in arguments.items():
        if value == ():
            raise ValueError(f"[schedule] {name} is empty; give it one table or more.")
        if name in least and value < least[name]:
            raise ValueError(f"[schedule] {name} is {value}; use {least[name]} or more.")
    if not arguments.get("decay_rate", 1) > 0:
        raise ValueError(
            f"[schedule] decay_rate is {arguments['decay_rate']}; use a number above 0."
        )


def _learning_rate(config: OptimizerConfig) -> float:
    """The one that is given, else the optimizer's own, else 1e-3."""
    if config.learning_rate is not None:
        return config.learning_rate
    found = parameters(find_optimizer(config.name)).get("learning_rate")
    default = None if found is None else found.default
    return default if isinstance(default, float) else DEFAULT_LEARNING_RATE


def make_momentum(config: Config) -> tuple[str, optax.Schedule] | None:
    """The argument of the optimizer that follows the schedule's cycle, and its values by step.

    Raises:
      ValueError: no argument could follow, it is set to a number too, it would reach 1, or
        arguments of the momentum are given where cycle_momentum is false.
    """
    name = config.schedule.name
    if name == NO_SCHEDULE or (make := find_schedule(name)) not in MOMENTUM:
        return None
    own = {k: x for k, x in own_arguments(config.schedule).items() if x is not None}
    if not own.pop("cycle_momentum"):
        for key in momentum_arguments(make):
            if key in own:
                mend = "has no effect with cycle_momentum = false: leave one of them out"
                refuse(config.schedule, "schedule", key, mend)
        return None
    argument = _momentum_argument(config.optimizer)
    accepted = parameters(MOMENTUM[make])
    try:
        momentum = MOMENTUM[make](**{k: x for k, x in own.items() if k in accepted})
    except ValueError as error:
        raise ValueError(f"[schedule] {name}: {error}") from error
    last = np.asarray(momentum(config.train.num_steps)) if "decay_mom_rate" in own else 0.0
    if last >= 1:
        mend = f"{argument} would grow to {last:.3g} at the last step: lower it, to stay below 1"
        refuse(config.schedule, "schedule", "decay_mom_rate", mend)
    return argument, momentum


def _momentum_argument(config: OptimizerConfig) -> str:
    """The argument of an optimizer that a cycle of the momentum sets."""
    accepted = parameters(find_optimizer(config.name))
    argument = next((name for name in MOMENTA if name in accepted), None)
    if argument is None:
        raise ValueError(
            f"[schedule] cycle_momentum is true, but {config.name} has no {' or '.join(MOMENTA)}; "
            "set cycle_momentum = false, or use an optimizer that has one, such as adamw."
        )
    value, default = own_arguments(config)[argument], accepted[argument].default
    if value != default:
        mend = f"the schedule sets {argument} at each step: leave it out, or set cycle_momentum = "
        raise ValueError(f"[optimizer] {argument} is {value!r}; {mend}false in [schedule].")
    return argument


def make_optimizer(
    config: OptimizerConfig,
    schedule: optax.Schedule,
    momentum: tuple[str, optax.Schedule] | None = None,
) -> optax.GradientTransformation:
    """The optimizer of optax that a configuration names, clipped, its decay masked.

    Args:
      config: its name and arguments.
      schedule: of the learning rate; an optimizer that takes a number is given that of `config`.
      momentum: from `make_momentum`.
    """
    make = find_optimizer(config.name)
    accepted = parameters(make)
    arguments = {name: x for name, x in own_arguments(config).items() if x is not None}
    arguments |= dict.fromkeys(decay_masks(make), decay_mask)
    if MATRIX_DIMS in accepted:
        arguments[MATRIX_DIMS] = matrix_dims
    if "weight_decay" in accepted:
        arguments["weight_decay"] = config.weight_decay
    if "learning_rate" in accepted:
        is_number = not takes_schedule(make)
        arguments["learning_rate"] = _learning_rate(config) if is_number else schedule
    if momentum is not None:
        arguments |= dict([momentum])
        # All else is static: a mask would be taken for a schedule, and a number for an array.
        static = accepted.keys() - {"learning_rate", momentum[0]}
        make = optax.inject_hyperparams(make, static)
    tx = make(**arguments)
    if config.clip_norm:
        return optax.chain(optax.clip_by_global_norm(config.clip_norm), tx)
    return tx


def decay_mask(params: Any) -> Any:
    """Which leaves weight decay is for: not a bias or scale, nor anything of a norm, nor a vector.

    A norm is known by a part of the leaf's name: one that begins with "ln" or holds "norm".

    >>> decay_mask({"ln_1": {"weight": jnp.ones((2, 3))}, "c_fc": {"weight": jnp.ones((2, 3))}})
    {'c_fc': {'weight': True}, 'ln_1': {'weight': False}}
    """

    def is_decayed(path: Any, leaf: Any) -> bool:
        parts = leaf_name(path).lower().split(".")
        is_norm = any(part.startswith("ln") or "norm" in part for part in parts)
        return not is_norm and parts[-1] not in ("bias", "scale") and jnp.ndim(leaf) > 1

    return jax.tree_util.tree_map_with_path(is_decayed, params)


def matrix_dims(params: Any) -> Any:
    """Which leaves Muon is for, and which two dims of them: the matrices of layers, stacked or not.

    Embeddings and heads, known by name, and what has no weight decay are left to its Adam. Without
    this, optax takes leaves of two dims alone: the embeddings, and no stacked layer.

    >>> dims = matrix_dims({"wte": jnp.ones((9, 2)), "h": {"fc": jnp.ones((3, 2, 4))}})
    >>> dims["wte"], dims["h"]["fc"].reduction_axis, dims["h"]["fc"].output_axis
    (None, 1, 2)
    """

    def dims(path: Any, leaf: Any, is_decayed: bool) -> Any:
        parts = leaf_name(path).lower().split(".")
        is_table = any(p in ("wte", "wpe") or "embed" in p or "head" in p for p in parts)
        if is_table or not is_decayed:
            return None
        last = jnp.ndim(leaf) - 1
        return optax.contrib.MuonDimensionNumbers(last - 1, last)

    return jax.tree_util.tree_map_with_path(dims, params, decay_mask(params))
