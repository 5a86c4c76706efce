"""How a run starts: from its own latest checkpoint, from the weights of another run, or afresh."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from jzero.checkpoint import Step, open_step, steps_in
from jzero.config import Config
from jzero.ownership import check_is_ours
from jzero.recipe import Setup
from jzero.restore import (
    LOSS_SCALE,
    MASTER,
    OPT_STATE,
    PARAMS,
    Fit,
    fit,
    is_weight,
    places_of,
    restore_state,
)
from jzero.schema import key_of
from jzero.source import Renamed, Source
from jzero.state import (
    TrainState,
    abstract_parts,
    fresh_loss_scale,
    init_state,
    replicated,
    state_parts,
)

INFO_ROWS, INFO_CONFIG, INFO_SCALE, INFO_TOKENS = "num_rows", "config", "loss_scale", "tokens"
QUIET = ("train.out_dir", "train.log_every", "checkpoint.")  # say nothing of the state


@dataclasses.dataclass(frozen=True)
class Start:
    """Where a run starts, known before anything is compiled; `make` gives the state.

    Args:
      step: steps done before.
      num_rows: rows of the data that were read before.
      notes: lines for the user.
      make: from the initial and the run's random key to the state and the key to go on with.
    """

    step: int
    num_rows: int
    notes: tuple[str, ...]
    make: Callable[[jax.Array, jax.Array], tuple[TrainState, jax.Array]]


def find_start(setup: Setup, open_weights: Callable[[str], Source]) -> Start:
    """Decides how a run starts, as [checkpoint] and [model] say.

    Args:
      setup: of the run.
      open_weights: opens what `[model] init_from` names.

    Raises:
      ValueError: what is there belongs to another run or does not fit, with every array that
        differs; or there is nothing, where something must be.
    """
    config = setup.config
    step = _own_step(config)
    if step is not None:
        return _resumed(setup, step)
    if config.model.init_from:
        return _from_weights(setup, config.model.init_from, open_weights)

    def make(init_key: jax.Array, run_key: jax.Array) -> tuple[TrainState, jax.Array]:
        return init_state(setup, init_key), run_key

    return Start(0, 0, (), make)


def _own_step(config: Config) -> Step | None:
    """The latest checkpoint of this run; None where it starts."""
    settings, directory = config.checkpoint, config.checkpoint_dir
    if not settings.every:
        return None
    check_is_ours(directory)
    steps = steps_in(directory)
    if not steps:
        if settings.resume == "must":
            raise ValueError(
                f"checkpoint.resume is must, and {directory} holds no checkpoint; name the "
                "directory of the run to go on with, or use auto."
            )
        return None
    if settings.resume == "never":
        raise ValueError(
            f"checkpoint.resume is never, and {directory} holds the checkpoints of a run, the "
            f"latest at step {steps[-1]}; name another checkpoint.dir, or remove that one."
        )
    return open_step(directory)


def _resumed(setup: Setup, step: Step) -> Start:
    info, arrays = step.manifest.info, step.arrays
    parts = abstract_parts(setup)
    places = places_of(setup.zero, parts)
    fresh = _fresh_scalars(setup, info, arrays.leaves)
    if INFO_ROWS not in info:
        raise ValueError(
            f"{step.path} holds weights, no run to go on with; start from it by "
            f"model.init_from = {str(step.path)!r} and another checkpoint.dir."
        )
    try:
        fitted = fit(places, arrays.leaves, fresh=tuple(fresh))
    except ValueError as error:
        raise ValueError(
            f"{step.path} is of another model or optimizer than this configuration: {error}\n"
            "Nothing was changed; name another checkpoint.dir, or take the configuration it was "
            "saved with (jzero checkpoint inspect shows it)."
        ) from error

    def make(init_key: jax.Array, run_key: jax.Array) -> tuple[TrainState, jax.Array]:
        born = _with_scalars(setup, parts, fresh)
        return _state(restore_state(born, places, arrays, fitted.names))

    notes = (f"goes on from step {step.manifest.step}, in {step.path}", *fitted.notes)
    notes += changes(info.get(INFO_CONFIG, {}), config_tables(setup.config))
    return Start(step.manifest.step, int(info[INFO_ROWS]), notes, make)


def _fresh_scalars(
    setup: Setup, info: Mapping[str, Any], found: Mapping[str, Any]
) -> dict[str, np.ndarray]:
    """What of a loss scale starts anew: all of it where none was saved, else what rules differ."""
    fresh = fresh_loss_scale(setup)
    if not all(name in found for name in fresh):
        return fresh
    if info.get(INFO_SCALE) == scale_rule(setup):
        return {}
    return {n: x for n, x in fresh.items() if n.endswith((".loss_scale", ".hysteresis"))}


def scale_rule(setup: Setup) -> Any:
    """The rule of the loss scale as a JSON value: two runs with the same may share a scale."""
    scale = setup.policy.loss_scale
    return [scale, setup.config.precision.scale_options] if scale == "dynamic" else scale


def _with_scalars(setup: Setup, parts: dict[str, Any], fresh: Mapping[str, Any]) -> dict[str, Any]:
    """The parts with arrays where a loss scale starts anew."""
    if not fresh:
        return parts
    opt_state = parts[OPT_STATE]
    values = {
        name.removeprefix(LOSS_SCALE): replicated(setup, value) for name, value in fresh.items()
    }
    return {**parts, OPT_STATE: opt_state._replace(**values)}


def _state(parts: Mapping[str, Any]) -> tuple[TrainState, jax.Array]:
    run = parts["run"]
    state = TrainState(parts["params"], parts["others"], parts[OPT_STATE], run["step"])
    return state, run["rng"]


def _from_weights(setup: Setup, path: str, open_weights: Callable[[str], Source]) -> Start:
    source = open_weights(path)
    parts = abstract_parts(setup)
    weights = {name: x for name, x in places_of(setup.zero, parts).items() if is_weight(name)}
    found = {name: x for name, x in source.leaves.items() if is_weight(name)}
    try:
        fitted = fit(weights, found)
    except ValueError as error:
        raise ValueError(
            f"[model] init_from {path} does not fit {setup.config.model.target}: {error}\n"
            "Give [model] the sizes of those weights."
        ) from error

    def make(init_key: jax.Array, run_key: jax.Array) -> tuple[TrainState, jax.Array]:
        return _born_of(setup, source, fitted, init_key), run_key

    return Start(0, 0, (f"starts from the weights in {path}", *fitted.notes), make)


def _born_of(setup: Setup, source: Source, fitted: Fit, init_key: jax.Array) -> TrainState:
    """A first state with weights that were read; its master copy is them, unrounded."""
    parts = abstract_parts(setup)
    params = restore_params(setup, source, fitted)
    others = parts["others"]
    if jax.tree.leaves(others):
        others = init_state(setup, init_key).others
    state = TrainState(params, others, setup.tx.init(params), replicated(setup, np.int32(0)))
    born = state_parts(state, init_key)
    places = places_of(setup.zero, {OPT_STATE: state.opt_state})
    masters = {name: x for name, x in fitted.names.items() if name.startswith(MASTER)}
    restored = restore_state({OPT_STATE: born[OPT_STATE]}, places, source, masters)
    return state._replace(opt_state=restored[OPT_STATE])


def restore_params(setup: Setup, source: Source, fitted: Fit) -> Any:
    """The parameters of a run alone, at rest."""
    params = {"params": abstract_parts(setup)["params"]}
    return restore_state(params, places_of(setup.zero, params), source, fitted.names)["params"]


def stored_weights(source: Source) -> Source:
    """A source of parameters by their own names, under the names that checkpoints give them."""
    return Renamed(source, {PARAMS + name: name for name in source.leaves})


def saved_config(step: Step) -> dict[str, dict[str, Any]]:
    """The configuration of a checkpoint, as tables.

    Raises:
      ValueError: it has none, as a script's own checkpoints.
    """
    if INFO_CONFIG not in step.manifest.info:
        raise ValueError(
            f"{step.path} keeps no configuration, so its model is not known; it was saved by a "
            "script: restore it there, or train from it with model.init_from."
        )
    return step.manifest.info[INFO_CONFIG]


def config_tables(config: Config) -> dict[str, dict[str, Any]]:
    """A configuration as tables of JSON values, without what is not set."""
    sections = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    tables = {
        name: {key_of(f): getattr(section, f.name) for f in dataclasses.fields(section)}
        for name, section in sections.items()
    }
    given = {name: {k: v for k, v in t.items() if v is not None} for name, t in tables.items()}
    return json.loads(json.dumps(given))


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[str, ...]:
    """What is set differently than when a checkpoint was saved, in a line; none where nothing is.

    >>> changes({"zero": {"stage": 2}}, {"zero": {"stage": 3}, "train": {"log_every": 5}})
    ('set differently than when it was saved: zero.stage 3 (was 2)',)
    """
    old = {f"{s}.{k}": v for s, table in before.items() for k, v in table.items()}
    new = {f"{s}.{k}": v for s, table in now.items() for k, v in table.items()}
    differ = [
        f"{key} {new.get(key, 'left out')} (was {old.get(key, 'left out')})"
        for key in sorted(old | new)
        if old.get(key) != new.get(key) and not key.startswith(QUIET)
    ]
    return (f"set differently than when it was saved: {', '.join(differ)}",) if differ else ()


def run_info(setup: Setup, num_rows: int, tokens: str) -> dict[str, Any]:
    """What a checkpoint of a run keeps beside its arrays."""
    return {
        INFO_ROWS: num_rows,
        INFO_CONFIG: config_tables(setup.config),
        INFO_SCALE: scale_rule(setup),
        INFO_TOKENS: tokens,
    }
