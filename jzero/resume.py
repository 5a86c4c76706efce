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
    place_array,
    places_of,
    restore_state,
    stored_names,
)
from jzero.schema import import_target, key_of
from jzero.source import Renamed, Source
from jzero.state import (
    TrainState,
    abstract_parts,
    fresh_loss_scale,
    init_state,
    replicated,
)
from jzero.trees import named_leaves

INFO_ROWS, INFO_CONFIG, INFO_SCALE = "num_rows", "config", "loss_scale"
INFO_TOKENS, INFO_DATA = "tokens", "data"
QUIET = ("train.out_dir", "train.log_every", "checkpoint.")  # say nothing of the state


OTHERS = "others."  # Variables of the model that are no parameters


@dataclasses.dataclass(frozen=True)
class Weights:
    """Weights to start from.

    Args:
      source: by the names that checkpoints give them.
      arguments: of their model, as far as they are known.
    """

    source: Source
    arguments: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Start:
    """Where a run starts, known before anything is compiled; `make` gives the state.

    Args:
      step: steps done before.
      num_rows: rows of the data that were read before.
      notes: lines for the user.
      data: `jzero.data.fingerprint` of what they were read from; None at the start.
      make: from the initial and the run's random key to the state and the key to go on with.
    """

    step: int
    num_rows: int
    notes: tuple[str, ...]
    data: list[int] | None  # fingerprint of the data that those rows are of
    make: Callable[[jax.Array, jax.Array], tuple[TrainState, jax.Array]]


def find_start(setup: Setup, open_weights: Callable[[str], Weights]) -> Start:
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

    return Start(0, 0, (), None, make)


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
    before, now = info.get(INFO_CONFIG, {}), config_tables(setup.config)
    target = setup.config.model.target
    check_model(target, before.get("model", {}), now["model"], str(step.path))
    notes += changes(before, now)
    return Start(step.manifest.step, int(info[INFO_ROWS]), notes, info.get(INFO_DATA), make)


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


def _from_weights(setup: Setup, path: str, open_weights: Callable[[str], Weights]) -> Start:
    opened = open_weights(path)
    source, parts = opened.source, abstract_parts(setup)
    places = places_of(setup.zero, parts)
    others = {name: x for name, x in places.items() if name.startswith(OTHERS)}
    has_others = all(name in source.leaves for name in others)
    wanted = {n: x for n, x in places.items() if is_weight(n)} | (others if has_others else {})
    found = {n: x for n, x in source.leaves.items() if is_weight(n) or n in wanted}
    try:
        fitted = fit(wanted, found)
    except ValueError as error:
        sizes = ", ".join(f"{key} = {json.dumps(x)}" for key, x in opened.arguments.items())
        raise ValueError(
            f"[model] init_from {path} does not fit {setup.config.model.target}: {error}\n"
            f"Give [model] the sizes of those weights{': ' + sizes if sizes else ''}."
        ) from error
    now = config_tables(setup.config)["model"]
    check_model(setup.config.model.target, opened.arguments, now, path)

    def make(init_key: jax.Array, run_key: jax.Array) -> tuple[TrainState, jax.Array]:
        return _born_of(setup, source, fitted, init_key), run_key

    notes = [f"starts from the weights in {path}", *fitted.notes]
    if not has_others:
        notes.append(f"made anew, for it has none of them: {', '.join(others)}")
    return Start(0, 0, tuple(notes), None, make)


def _born_of(setup: Setup, source: Source, fitted: Fit, init_key: jax.Array) -> TrainState:
    """A first state with weights that were read.

    The optimizer starts from the unrounded ones: they are the master copy, and what else it keeps
    of the parameters (a schedule-free average, say) is of them.
    """
    parts, names = abstract_parts(setup), fitted.names
    params = restore_params(setup, source, fitted)
    others = {"others": parts["others"]}
    if all(n in names for n in places_of(setup.zero, others)):
        others = restore_state(others, places_of(setup.zero, others), source, names)["others"]
    else:
        others = init_state(setup, init_key).others
    opt_state = setup.tx.init(params)
    masters = {name: x for name, x in names.items() if name.startswith(MASTER)}
    if masters:
        opt_state = _of_wide(setup, opt_state, source, masters, params)
    return TrainState(params, others, opt_state, replicated(setup, np.int32(0)))


def _of_wide(
    setup: Setup, opt_state: Any, source: Source, masters: Mapping[str, str], params: Any
) -> Any:
    """The state of an optimizer as it is born of unrounded parameters."""
    places = places_of(setup.zero, {OPT_STATE: opt_state})
    opt_state = restore_state({OPT_STATE: opt_state}, places, source, masters)[OPT_STATE]
    wide = setup.policy.master_dtype
    leaves, treedef = named_leaves(params)
    at_rest = setup.zero.at_rest(params)
    unrounded = [
        place_array(source, masters[MASTER + name], at_rest[name].in_dtype(wide))
        if MASTER + name in masters
        else x
        for name, x in leaves.items()
    ]
    born = setup.tx_without_master.init(jax.tree.unflatten(treedef, unrounded))
    values = {
        stored: named_leaves(born)[0][name]
        for name, stored in stored_names(OPT_STATE, born).items()
    }
    names = stored_names(OPT_STATE, opt_state)
    leaves, treedef = named_leaves(opt_state)
    return jax.tree.unflatten(treedef, [values.get(names[name], x) for name, x in leaves.items()])


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


def run_info(setup: Setup, num_rows: int) -> dict[str, Any]:
    """What a checkpoint of a run keeps beside its arrays, apart from what is said of its data."""
    return {
        INFO_ROWS: num_rows,
        INFO_CONFIG: config_tables(setup.config),
        INFO_SCALE: scale_rule(setup),
    }


def check_model(target: str, before: Mapping[str, Any], now: Mapping[str, Any], what: str) -> None:
    """Refuses another model whose arrays have the same shapes: other heads, say.

    Args:
      target: import path of the model; its class may name in `RUNTIME_ARGUMENTS` those arguments
        that a trained model may be given otherwise, such as dropout.
      before, now: arguments of the model that was saved, and of this one.
      what: where the first are from.

    Raises:
      ValueError: naming each argument that differs.
    """
    free = {"init_from", *getattr(import_target(target), "RUNTIME_ARGUMENTS", ())}
    differ = [
        f"{key} is {now[key]} (it was {before[key]})"
        for key in before
        if key in now and key not in free and before[key] != now[key]
    ]
    if differ:
        raise ValueError(
            f"[model] is another one than that of {what}: {', '.join(differ)}; give it the "
            "arguments that those weights were trained with."
        )
