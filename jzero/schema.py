"""Tables of TOML made into typed dataclasses, whose fields may come from a function's signature.

Which sections there are, and what is in them, `jzero.config` says. What optax has by which name is
found here, by inspection.
"""

import difflib
import importlib
import inspect
import math
import tomllib
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import Field, field, fields, make_dataclass
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import optax
import optax.contrib
import optax.schedules

from jzero.schedules import DEEPSPEED, OURS

SCALARS = (bool, int, float, str)
# Optimizers of optax that need more than gradients and a loss value: why, and what to use.
NEEDS_MORE = {
    "lbfgs": "its line search calls the loss; use adamw, say",
    "sophia": "it estimates the Hessian from the loss function; use adamw, say",
    "dpsgd": "it needs a gradient for each example; use noisy_sgd, say",
    "sam": "it takes gradients at moved parameters, for two other optimizers; use adamw, say",
    "schedule_free": "it wraps another optimizer; use schedule_free_adamw or schedule_free_sgd",
    "mechanize": "it wraps another optimizer; use prodigy, say",
    "lookahead": "it wraps another optimizer and keeps pairs of parameters; use adamw, say",
}
ABSENT = object()  # in place of an argument that the file must give and does not
OWN = {"own": True}  # metadata of a field that is an argument of what its section names


def read_toml(path: str | Path) -> dict[str, Any]:
    """The tables of a TOML file, `train.out_dir` named after the file where it is left out.

    Raises:
      ValueError: there is no such file, or it is not TOML.
    """
    path = Path(path)
    if not path.is_file():
        near = nearest(path.name, [other.name for other in path.parent.glob("*.toml")])
        mend = f"did you mean {path.parent / near}?" if near else "give the path of a .toml file."
        raise ValueError(f"config {str(path)!r} does not exist; {mend}")
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not TOML: {error}; mend that line.") from error
    if isinstance(train := tables.setdefault("train", {}), dict):
        train.setdefault("out_dir", f"runs/{path.stem}")
    return tables


def import_target(target: str) -> Callable[..., Any]:
    """Imports what MODULE:NAME names.

    Raises:
      ValueError: the form is wrong, the module is not to be imported, or it lacks the name.

    >>> import_target("math:sqroot")
    Traceback (most recent call last):
    ValueError: [model] target 'math:sqroot': math has no 'sqroot'; did you mean 'sqrt'?
    """
    module_name, colon, name = target.partition(":")
    if not (module_name and colon and name.isidentifier()):
        raise ValueError(f"[model] target {target!r} is not MODULE:NAME; write models.gpt2:GPT2.")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ValueError(
            f"[model] target {target!r}: {module_name} cannot be imported ({error}); give a module "
            "that is installed, or one below the current directory."
        ) from error
    if not callable(found := getattr(module, name, None)):
        near = nearest(name, [key for key in vars(module) if key[0] != "_"])
        mend = f"did you mean {near!r}?" if near else "name a class of it."
        raise ValueError(f"[model] target {target!r}: {module_name} has no {name!r}; {mend}")
    return found


def optimizers() -> dict[str, Callable[..., optax.GradientTransformation]]:
    """Every optimizer of optax and optax.contrib that a run can use, by its plain name.

    Found by inspection: public functions with an argument for a learning rate that can be called
    with a learning rate alone or with nothing at all, but those that need more than gradients and
    the value of the loss (`NEEDS_MORE`). Of two with one name optax's own goes first.

    >>> {"adamw", "lion", "muon", "prodigy", "polyak_sgd"} <= optimizers().keys()
    True
    """
    functions = _functions(optax.contrib) | _functions(optax)
    return {name: f for name, f in functions.items() if _is_optimizer(name, f)}


def find_optimizer(name: str) -> Callable[..., optax.GradientTransformation]:
    """The function of optax that makes an optimizer.

    Raises:
      ValueError: optax has none of that name, or one that needs more than a configuration gives.

    >>> find_optimizer("adamww")
    Traceback (most recent call last):
    ValueError: [optimizer] name is 'adamww', no optimizer of optax; did you mean 'adamw'?
    """
    found = optimizers()
    if name in found:
        return found[name]
    if name in NEEDS_MORE:
        raise ValueError(f"[optimizer] name is {name!r}, not for a run here: {NEEDS_MORE[name]}.")
    plain = name.rpartition(".")[2]
    if plain in found:
        mend = f"write {plain!r}: plain names reach optax and optax.contrib."
    elif near := nearest(name, found):
        mend = f"did you mean {near!r}?"
    else:
        mend = f"use one of {', '.join(sorted(found))}."
    raise ValueError(f"[optimizer] name is {name!r}, no optimizer of optax; {mend}")


def takes_schedule(make: Callable[..., optax.GradientTransformation]) -> bool:
    """Whether an optimizer's learning rate may follow a schedule, not be a number alone.

    >>> [takes_schedule(make) for make in (optax.adam, optax.rprop, optax.polyak_sgd)]
    [True, False, False]
    """
    found = parameters(make).get("learning_rate")
    if found is None:
        return False
    return any(get_origin(member) is Callable for member in get_args(found.annotation))


def _functions(module: types.ModuleType) -> dict[str, Callable[..., Any]]:
    """The public functions of a module."""
    return {k: f for k, f in vars(module).items() if k[0] != "_" and inspect.isfunction(f)}


def _is_optimizer(name: str, make: Callable[..., Any]) -> bool:
    if name.startswith("scale_by") or name in NEEDS_MORE:
        return False
    found = inspect.signature(make).parameters
    return any("learning_rate" in key for key in found) and _required(make) <= {"learning_rate"}


def _required(make: Callable[..., Any]) -> set[str]:
    return {name for name, p in parameters(make).items() if p.default is p.empty}


def find_schedule(name: str) -> Callable[..., optax.Schedule]:
    """The function that makes a schedule: ours, DeepSpeed's in either spelling, or optax's.

    Raises:
      ValueError: there is none of that name, or it needs an argument that TOML cannot give.

    >>> find_schedule("WarmupLR") is find_schedule("warmup_lr")
    True
    >>> find_schedule("cosin")
    Traceback (most recent call last):
    ValueError: [schedule] name is 'cosin', no schedule; did you mean 'cosine'?
    """
    found = schedules_by_name()
    if name not in found:
        near = nearest(name, found)
        mend = f"did you mean {near!r}?" if near else f"use one of {', '.join(sorted(found))}."
        raise ValueError(f"[schedule] name is {name!r}, no schedule; {mend}")
    for key in sorted(_required(found[name])):
        if toml_type(parameters(found[name])[key].annotation) is None:
            raise ValueError(
                f"[schedule] name is {name!r}, which needs {key}, and TOML cannot give that; use "
                "another schedule, or one in a training loop of your own."
            )
    return found[name]


def schedules_by_name() -> dict[str, Callable[..., optax.Schedule]]:
    """Every schedule by name; optax's are the functions of optax.schedules that return one."""
    theirs = {k: f for k, f in _functions(optax.schedules).items() if _makes_schedule(f)}
    deepspeed = {make.__name__: make for make in DEEPSPEED.values()}
    return theirs | DEEPSPEED | deepspeed | OURS


def _makes_schedule(make: Callable[..., Any]) -> bool:
    return inspect.signature(make, eval_str=True).return_annotation == optax.Schedule


def parameters(target: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The arguments of a class or function that can be given by keyword."""
    called: Any = target.__init__ if inspect.isclass(target) else target
    try:
        signature = inspect.signature(called, eval_str=True)
    except NameError:  # annotations that are imported for type checkers alone
        signature = inspect.signature(called)
    found = dict(signature.parameters)
    if inspect.isclass(target):
        found.pop(next(iter(found)))
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {name: p for name, p in found.items() if p.kind in kinds}


def toml_type(hint: Any, default: Any = None) -> Any:
    """The part of a type that TOML and a command line can give; None if there is none."""
    if hint is inspect.Parameter.empty or isinstance(hint, str):
        return type(default) if isinstance(default, SCALARS) else (bool | int | float | str | None)
    if hint in SCALARS or get_origin(hint) is Literal:
        return hint
    if get_origin(hint) in (tuple, list, Iterable, Sequence):
        element = toml_type(get_args(hint)[0])
        return None if element is None else tuple[element, ...]
    if get_origin(hint) is dict:
        key, value = get_args(hint)
        value = toml_type(value)
        return dict[key, value] if key in (int, str) and value is not None else None
    if get_origin(hint) not in (Union, types.UnionType):
        return None
    members = [member for member in map(toml_type, get_args(hint)) if member is not None]
    if float in members:  # of an array-like, say, which may be a bool, too
        members = [member for member in members if member not in (bool, int)]
    if members and type(None) in get_args(hint):
        members.append(type(None))
    return Union[tuple(members)] if members else None  # noqa: UP007


def extended(base: type, arguments: Iterable[tuple[str, Any, Any]]) -> Any:
    """A section's dataclass with fields (name, type, default) for what it names; MISSING: none."""
    own = [(name, hint, field(default=x, metadata=OWN)) for name, hint, x in arguments]
    return make_dataclass(base.__name__, own, bases=(base,), frozen=True, kw_only=True)


def own_arguments(section: Any) -> dict[str, Any]:
    """The values of a section that belong to what it names, by argument."""
    return {f.name: getattr(section, f.name) for f in fields(section) if f.metadata == OWN}


def check_section(name: str, table: Any, sections: Mapping[str, type]) -> None:
    """Refuses what is no table, or a table of a name that no section has."""
    if not isinstance(table, dict):
        home = _home(name, sections)
        mend = f"put it in [{home}]." if home else "put it in a section, or leave it out."
        raise ValueError(f"key {name!r} stands outside the sections; {mend}")
    if name not in sections:
        near = nearest(name, sections)
        mend = f"did you mean [{near}]?" if near else f"the sections are {', '.join(sections)}."
        raise ValueError(f"there is no section [{name}]; {mend}")


def _home(key: str, sections: Mapping[str, type]) -> str | None:
    """The section that has a key of this name."""
    homes = (s for s, kind in sections.items() if key in {key_of(f) for f in fields(kind)})
    return next(homes, None)


def parse_section(
    section: str, kind: type, table: dict[str, Any], sections: Mapping[str, type], absent: Any
) -> Any:
    """Makes a section of its table; `absent` as in `jzero.config.parse_config`."""
    types_by_name = get_type_hints(kind)
    hints = {key_of(f): types_by_name[f.name] for f in fields(kind)}
    for key in table:
        if key not in hints:
            named = table.get("name") or table.get("target")
            raise ValueError(_unknown_key(section, key, list(hints), sections, named))
    values = {key: typed(value, hints[key], section, key) for key, value in table.items()}
    for f in fields(kind):
        key = key_of(f)
        if key in values or f.default is not f.default_factory:  # both MISSING where required
            continue
        if absent is ABSENT:
            raise ValueError(
                f"[{section}] lacks {key!r}, which {table.get('target', table.get('name'))} "
                f"needs; give it a value of type {_type_name(hints[key])}."
            )
        values[key] = absent
    return kind(**{f.name: values[key_of(f)] for f in fields(kind) if key_of(f) in values})


def key_of(f: Field[Any]) -> str:
    """What a field is called in a file: its name, unless Python has that word for itself."""
    return f.metadata.get("key", f.name)


def _unknown_key(
    section: str, key: str, keys: list[str], sections: Mapping[str, type], named: Any
) -> str:
    near, home = nearest(key, keys), _home(key, sections)
    if home is not None and home != section:
        mend = f"it belongs in [{home}]."
    elif key in sections:
        mend = f"there is a section [{key}] for it."
    elif near is not None:
        mend = f"did you mean {near!r}?"
    else:
        mend = f"its keys are {', '.join(keys)}."
    if named is not None and home is None:
        mend += f" If {named} is meant, leave {key!r} out of the file."
    return f"[{section}] has no key {key!r}; {mend}"


def typed(value: Any, hint: Any, section: str, key: str) -> Any:
    """The value in its type: an integer may stand for a float, an array for a tuple."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"[{section}] {key} is {value}; give a finite number.")
    try:
        return _convert(value, hint)
    except TypeError as error:
        raise ValueError(
            f"[{section}] {key} is {value!r}, of type {type(value).__name__}; give it a value of "
            f"type {_type_name(hint)}."
        ) from error


def _convert(value: Any, hint: Any) -> Any:
    if hint is float and type(value) is int:
        return float(value)
    if hint in SCALARS and type(value) is hint:
        return value
    if get_origin(hint) is Literal and value in get_args(hint):
        return value
    if get_origin(hint) is tuple and isinstance(value, list):
        return tuple(_convert(element, get_args(hint)[0]) for element in value)
    if get_origin(hint) is dict and isinstance(value, dict):
        key_type, value_type = get_args(hint)
        return {_key(k, key_type): _convert(x, value_type) for k, x in value.items()}
    if get_origin(hint) in (Union, types.UnionType):
        for member in sorted(get_args(hint), key=lambda member: member is not type(value)):
            try:
                return _convert(value, member)
            except TypeError:
                continue
    raise TypeError(hint)


def _key(key: str, hint: Any) -> Any:
    """A key of a table, which TOML always has as text."""
    if hint is int and not key.isdecimal():
        raise TypeError(hint)
    return hint(key)


def _type_name(hint: Any) -> str:
    if get_origin(hint) in (Union, types.UnionType):
        members = [member for member in get_args(hint) if member is not type(None)]
        return " or ".join(map(_type_name, members))
    if get_origin(hint) is Literal:
        return " or ".join(map(repr, get_args(hint)))
    if get_origin(hint) is tuple:
        return f"array of {_type_name(get_args(hint)[0])}"
    if get_origin(hint) is dict:
        return "table of " + " to ".join(map(_type_name, get_args(hint)))
    return hint.__name__


def nearest(name: str, names: Iterable[str]) -> str | None:
    """The name that one that is not there was meant to be, if any is like it."""
    return next(iter(difflib.get_close_matches(name, list(names), 1)), None)


def check_least(config: Any, section: str, least: int, *names: str) -> None:
    """Refuses values of these names below `least`; None passes."""
    for name in names:
        value = getattr(config, name)
        if value is not None and not value >= least:
            refuse(config, section, name, f"use {least} or more")


def check_seed(config: Any, section: str) -> None:
    """Refuses a seed that has more than 32 bits."""
    if not 0 <= config.seed < 2**32:
        refuse(config, section, "seed", f"use 0 to {2**32 - 1}")


def refuse(config: Any, section: str, name: str, mend: str) -> None:
    """Raises a ValueError on the value of this name that says how to mend it."""
    raise ValueError(f"[{section}] {name} is {getattr(config, name)!r}; {mend}.")
