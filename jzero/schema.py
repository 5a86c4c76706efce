"""Tables of TOML made into typed dataclasses, whose fields may come from a function's signature.

Which sections there are, and what is in them, `jzero.config` says.
"""

import difflib
import importlib
import inspect
import tomllib
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import field, fields, make_dataclass
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import optax

SCALARS = (bool, int, float, str)
NOT_TRAINABLE_HERE = frozenset({"lbfgs"})  # its line search calls the loss
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


def find_optimizer(name: str) -> Callable[..., optax.GradientTransformation]:
    """The function of optax that makes an optimizer.

    Raises:
      ValueError: optax has none of that name, or not one that takes `learning_rate`.

    >>> find_optimizer("adamww")
    Traceback (most recent call last):
    ValueError: [optimizer] name is 'adamww', no optimizer of optax; did you mean 'adamw'?
    """
    names = [key for key, value in vars(optax).items() if _is_optimizer(key, value)]
    if name in names:
        return getattr(optax, name)
    near = nearest(name, names)
    mend = f"did you mean {near!r}?" if near else f"use one of {', '.join(sorted(names))}."
    raise ValueError(f"[optimizer] name is {name!r}, no optimizer of optax; {mend}")


def _is_optimizer(name: str, value: Any) -> bool:
    if name.startswith(("_", "scale_by")) or name in NOT_TRAINABLE_HERE:
        return False
    return inspect.isfunction(value) and "learning_rate" in inspect.signature(value).parameters


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
    if get_origin(hint) in (tuple, list):
        element = toml_type(get_args(hint)[0])
        return None if element is None else tuple[element, ...]
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
    return {f.name: getattr(section, f.name) for f in fields(section) if f.metadata}


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
    homes = (s for s, kind in sections.items() if key in {f.name for f in fields(kind)})
    return next(homes, None)


def parse_section(
    section: str, kind: type, table: dict[str, Any], sections: Mapping[str, type], absent: Any
) -> Any:
    """Makes a section of its table; `absent` as in `jzero.config.parse_config`."""
    hints = get_type_hints(kind)
    for key in table:
        if key not in hints:
            raise ValueError(_unknown_key(section, key, list(hints), sections))
    values = {key: typed(value, hints[key], section, key) for key, value in table.items()}
    for f in fields(kind):
        if f.name in values or f.default is not f.default_factory:  # both MISSING where required
            continue
        if absent is ABSENT:
            raise ValueError(
                f"[{section}] lacks {f.name!r}, which {table['target']} needs; give it a value of "
                f"type {_type_name(hints[f.name])}."
            )
        values[f.name] = absent
    return kind(**values)


def _unknown_key(section: str, key: str, keys: list[str], sections: Mapping[str, type]) -> str:
    near, home = nearest(key, keys), _home(key, sections)
    if home is not None and home != section:
        mend = f"it belongs in [{home}]."
    elif near is not None:
        mend = f"did you mean {near!r}?"
    else:
        mend = f"its keys are {', '.join(keys)}."
    return f"[{section}] has no key {key!r}; {mend}"


def typed(value: Any, hint: Any, section: str, key: str) -> Any:
    """The value in its type: an integer may stand for a float, an array for a tuple."""
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
    if get_origin(hint) in (Union, types.UnionType):
        for member in sorted(get_args(hint), key=lambda member: member is not type(value)):
            try:
                return _convert(value, member)
            except TypeError:
                continue
    raise TypeError(hint)


def _type_name(hint: Any) -> str:
    if get_origin(hint) in (Union, types.UnionType):
        members = [member for member in get_args(hint) if member is not type(None)]
        return " or ".join(map(_type_name, members))
    if get_origin(hint) is Literal:
        return " or ".join(map(repr, get_args(hint)))
    if get_origin(hint) is tuple:
        return f"array of {_type_name(get_args(hint)[0])}"
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
