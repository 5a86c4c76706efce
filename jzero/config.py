"""A run's configuration: frozen typed dataclasses, read from TOML and checked key by key.

The sections [model] and [optimizer] have the arguments of what they name, so their dataclasses are
made from its signature.
"""

import dataclasses
import difflib
import importlib
import inspect
import re
import tomllib
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import optax

DTYPES = ("float16", "bfloat16", "float32", "float64")
SCALARS = (bool, int, float, str)
DECAY_MASKS = ("mask", "weight_decay_mask")  # arguments of optax: which leaves weight decay is for
ABSENT = object()  # in place of an argument that the file must give and does not
NOT_TRAINABLE_HERE = frozenset({"lbfgs"})  # its line search calls the loss


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """[model]: an import path, and the arguments of what it names."""

    target: str = "models.gpt2:GPT2"  # MODULE:NAME, importable from the current directory


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """[optimizer]: an optax optimizer with its schedule, and its own arguments."""

    name: str = "adamw"  # any optimizer of optax that takes a learning rate
    learning_rate: float = 1e-3  # its peak
    warmup_steps: int = 0  # steps in which it rises evenly to the peak
    schedule: Literal["cosine", "linear", "constant"] = "cosine"  # after warmup, to the last step
    min_learning_rate_ratio: float = 0.0  # share of the peak at the last step, 0 to 1
    weight_decay: float = 0.0  # of matrices: no bias, scale or norm
    clip_norm: float = 0.0  # largest global norm of the gradients; 0: no clipping

    def __post_init__(self) -> None:
        accepted = _parameters(find_optimizer(self.name)).keys()
        _check_above(self, "optimizer", 0, "learning_rate")
        _check_least(self, "optimizer", 0, "warmup_steps", "weight_decay", "clip_norm")
        if not 0 <= self.min_learning_rate_ratio <= 1:
            _refuse(self, "optimizer", "min_learning_rate_ratio", "use a share from 0 to 1")
        if self.weight_decay and not ("weight_decay" in accepted and accepted & set(DECAY_MASKS)):
            mend = f"{self.name} has no masked weight decay: use 0, or adamw"
            _refuse(self, "optimizer", "weight_decay", mend)


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """[data]: where tokens come from, and how they are cut."""

    path: str = "python-stdlib"  # a text, a folder of texts, .bin token files, or a glob of them
    seq_len: int = 128  # tokens the model sees at once
    val_fraction: float = 0.1  # share at the end for validation, where val_path is not given
    val_path: str | None = None  # data for validation, as path
    max_bytes: int | None = None  # of a text corpus, this many bytes alone
    seed: int = 0  # of the shuffle

    def __post_init__(self) -> None:
        _check_least(self, "data", 1, "seq_len", "max_bytes")
        _check_seed(self, "data")
        if not 0 < self.val_fraction < 1:
            _refuse(self, "data", "val_fraction", "use a share between 0 and 1, such as 0.1")


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """[precision]: dtypes by name; one left out is the model's, or the gradients', own."""

    param_dtype: str | None = None  # stored: the model's argument of this name
    compute_dtype: str | None = None  # multiplied: the model's argument of this name
    reduce_dtype: str | None = None  # in which gradients travel

    def __post_init__(self) -> None:
        for name in ("param_dtype", "compute_dtype", "reduce_dtype"):
            if getattr(self, name) not in (None, *DTYPES):
                _refuse(self, "precision", name, f"use one of {', '.join(DTYPES)}")


@dataclass(frozen=True, kw_only=True)
class ZeroConfig:
    """[zero]: what is partitioned."""

    stage: int = 2  # 0: nothing, 1: optimizer state, 2: and gradients, 3: and parameters
    axes: tuple[str, ...] = ()  # mesh axes to partition over; none named: "data"
    min_size: int = 0  # arrays of fewer elements stay whole

    def __post_init__(self) -> None:
        if self.stage not in range(4):
            _refuse(self, "zero", "stage", "use 0, 1, 2 or 3")
        _check_least(self, "zero", 0, "min_size")


@dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """[mesh]: sizes of its axes."""

    replica: int = 1  # full copies of what is partitioned
    data: int | None = None  # devices to partition over; left out: all that remain
    model: int = 1  # devices of a model-parallel group
    num_cpu_devices: int = 8  # virtual devices, where there is no GPU

    def __post_init__(self) -> None:
        _check_least(self, "mesh", 1, "replica", "data", "model", "num_cpu_devices")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """[train]: how long, how large a batch, and what is written."""

    num_steps: int = 1000  # optimizer steps
    micro_batch: int = 8  # rows of one device in one microbatch
    num_microbatches: int = 1  # accumulated in each step
    seed: int = 0  # of initialisation, dropout and the sample
    log_every: int = 10  # steps from line to line
    eval_every: int = 0  # steps from evaluation to evaluation; 0: at the end alone
    eval_batches: int = 8  # validation batches, the same ones each time
    out_dir: str = "runs/run"  # left out of a file: runs/ and the file's name
    sample_length: int = 0  # tokens to write at the end; 0: none
    sample_prompt: str = ""  # what the sample begins with, for byte data
    sample_temperature: float = 0.8  # 0: always the likeliest token
    profile: str = ""  # A:B writes a jax.profiler trace of steps A to B, the first being 1
    tensorboard: bool = False  # also write TensorBoard events
    wandb: str = ""  # also log to this project of Weights & Biases
    plot: bool = False  # draw the loss curve at the end

    def __post_init__(self) -> None:
        _check_least(
            self, "train", 1, "num_steps", "micro_batch", "num_microbatches", "log_every",
            "eval_batches",
        )  # fmt: skip
        _check_least(self, "train", 0, "eval_every", "sample_length", "sample_temperature")
        _check_seed(self, "train")
        if self.profile:
            profile_steps(self.profile, self.num_steps)


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything a run needs to know; made by `load_config`."""

    model: ModelConfig = field(default_factory=ModelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    data: DataConfig = field(default_factory=DataConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    zero: ZeroConfig = field(default_factory=ZeroConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    train: TrainConfig = field(default_factory=TrainConfig)


SECTIONS: dict[str, type] = {f.name: f.type for f in dataclasses.fields(Config)}  # type: ignore


def load_config(path: str | Path) -> Config:
    """Reads a TOML file.

    Args:
      path: the file; each section is a table, and what is left out has its default.

    Returns:
      The configuration, every key and type checked.

    Raises:
      ValueError: naming the file, the section and the key, and the nearest right one.
    """
    return parse_config(read_toml(path), source=str(path))


def read_toml(path: str | Path) -> dict[str, Any]:
    """The tables of a TOML file, `train.out_dir` named after the file where it is left out.

    Raises:
      ValueError: there is no such file, or it is not TOML.
    """
    path = Path(path)
    if not path.is_file():
        near = _nearest(path.name, [other.name for other in path.parent.glob("*.toml")])
        mend = f"did you mean {path.parent / near}?" if near else "give the path of a .toml file."
        raise ValueError(f"config {str(path)!r} does not exist; {mend}")
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not TOML: {error}; mend that line.") from error
    if isinstance(train := tables.setdefault("train", {}), dict):
        train.setdefault("out_dir", f"runs/{path.stem}")
    return tables


def parse_config(
    tables: Mapping[str, Any], *, source: str = "config", absent: Any = ABSENT
) -> Config:
    """Makes a configuration of tables by section.

    Args:
      tables: from section to key to value, as TOML has them.
      source: where they come from, for messages.
      absent: stands for a required argument of the model that is not given; left out: an error.

    Raises:
      ValueError: as `load_config`.

    >>> parse_config({"zero": {"stge": 3}})
    Traceback (most recent call last):
    ValueError: config: [zero] has no key 'stge'; did you mean 'stage'?
    """
    try:
        for name, table in tables.items():
            _check_section(name, table)
        given = {name: dict(tables.get(name, {})) for name in SECTIONS}
        kinds: dict[str, type] = dict(SECTIONS)
        target = given["model"].setdefault("target", ModelConfig.target)
        kinds["model"] = model_section(_typed(target, str, "model", "target"))
        name = given["optimizer"].setdefault("name", OptimizerConfig.name)
        kinds["optimizer"] = optimizer_section(_typed(name, str, "optimizer", "name"))
        parts = {key: _parse_section(key, kinds[key], given[key], absent) for key in SECTIONS}
        fields = [(key, kind, field(default=parts[key])) for key, kind in kinds.items()]
        kind = dataclasses.make_dataclass(
            "Config", fields, bases=(Config,), frozen=True, kw_only=True
        )
        return kind(**parts)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from error


def model_section(target: str) -> type[ModelConfig]:
    """The dataclass of [model] for a target: its arguments, but what others are to give.

    Dtypes come from [precision], `rngs` from the seed. An argument of a type that TOML has not
    keeps its default.

    Raises:
      ValueError: the target is not to be imported, or needs what TOML cannot give.
    """
    fields = []
    for name, parameter in _parameters(import_target(target)).items():
        if name in ("rngs", "param_dtype", "compute_dtype", "target"):
            continue
        hint = _toml_type(parameter.annotation, parameter.default)
        if parameter.default is not parameter.empty:
            fields += [] if hint is None else [(name, hint, field(default=parameter.default))]
        elif hint is not None:
            fields.append((name, hint, field()))
        else:
            raise ValueError(
                f"[model] {target} needs {name}: {parameter.annotation}, which TOML cannot give; "
                "give that argument a default."
            )
    return _extended(ModelConfig, fields)


def optimizer_section(name: str) -> type[OptimizerConfig]:
    """The dataclass of [optimizer] for an optimizer of optax: ours, and its own arguments."""
    known = {f.name for f in dataclasses.fields(OptimizerConfig)}
    fields = []
    for key, parameter in _parameters(find_optimizer(name)).items():
        default = None if parameter.default is parameter.empty else parameter.default
        hint = _toml_type(parameter.annotation, default)
        if hint is None and "dtype" in key:
            hint, default = str, None
        if hint is not None and key not in known:
            default = default if isinstance(default, SCALARS) else None
            hint = hint if default is not None else hint | None
            fields.append((key, hint, field(default=default)))
    return _extended(OptimizerConfig, fields)


def own_arguments(section: ModelConfig | OptimizerConfig) -> dict[str, Any]:
    """The values of a section that belong to what it names, by argument."""
    base = ModelConfig if isinstance(section, ModelConfig) else OptimizerConfig
    known = {f.name for f in dataclasses.fields(base)}
    values = {f.name: getattr(section, f.name) for f in dataclasses.fields(section)}
    return {name: value for name, value in values.items() if name not in known}


def model_factory(model: ModelConfig, precision: PrecisionConfig) -> Callable[[Any], Any]:
    """A function of `rngs` that makes the model, of its arguments and the dtypes of [precision].

    Raises:
      ValueError: a dtype is set that the model has no argument for.
    """
    target = import_target(model.target)
    accepted = _parameters(target)
    dtypes = {"param_dtype": precision.param_dtype, "compute_dtype": precision.compute_dtype}
    dtypes = {name: dtype for name, dtype in dtypes.items() if dtype is not None}
    for name, dtype in dtypes.items():
        if name not in accepted:
            raise ValueError(
                f"[precision] sets {name} {dtype!r}, but {model.target} has no argument {name}; "
                "leave it out, or give the model that argument."
            )
    arguments = own_arguments(model) | dtypes

    def make(rngs: Any) -> Any:
        return target(**arguments, **({"rngs": rngs} if "rngs" in accepted else {}))

    return make


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
        near = _nearest(name, [key for key in vars(module) if key[0] != "_"])
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
    near = _nearest(name, names)
    mend = f"did you mean {near!r}?" if near else f"use one of {', '.join(sorted(names))}."
    raise ValueError(f"[optimizer] name is {name!r}, no optimizer of optax; {mend}")


def profile_steps(profile: str, num_steps: int) -> tuple[int, int]:
    """First and last step of "A:B".

    Raises:
      ValueError: it is not of that form, or not within steps 1 to num_steps.

    >>> profile_steps("3:5", 10)
    (3, 5)
    """
    match = re.fullmatch(r"(\d+):(\d+)", profile)
    first, last = (int(match[1]), int(match[2])) if match else (0, 0)
    if not 1 <= first <= last <= num_steps:
        raise ValueError(
            f"[train] profile is {profile!r}; give A:B with 1 <= A <= B <= num_steps {num_steps}, "
            "such as 3:5."
        )
    return first, last


def _is_optimizer(name: str, value: Any) -> bool:
    if name.startswith(("_", "scale_by")) or name in NOT_TRAINABLE_HERE:
        return False
    return inspect.isfunction(value) and "learning_rate" in inspect.signature(value).parameters


def _parameters(target: Callable[..., Any]) -> dict[str, inspect.Parameter]:
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


def _toml_type(hint: Any, default: Any = None) -> Any:
    """The part of a type that TOML and a command line can give; None if there is none."""
    if hint is inspect.Parameter.empty or isinstance(hint, str):
        return type(default) if isinstance(default, SCALARS) else (bool | int | float | str | None)
    if hint in SCALARS or get_origin(hint) is Literal:
        return hint
    if get_origin(hint) in (tuple, list):
        element = _toml_type(get_args(hint)[0])
        return None if element is None else tuple[element, ...]
    if get_origin(hint) not in (Union, types.UnionType):
        return None
    members = [member for member in map(_toml_type, get_args(hint)) if member is not None]
    if float in members:  # of an array-like, say, which may be a bool, too
        members = [member for member in members if member not in (bool, int)]
    if members and type(None) in get_args(hint):
        members.append(type(None))
    return Union[tuple(members)] if members else None  # noqa: UP007


def _extended(base: type, fields: list) -> Any:
    return dataclasses.make_dataclass(
        base.__name__, fields, bases=(base,), frozen=True, kw_only=True
    )


def _check_section(name: str, table: Any) -> None:
    if not isinstance(table, dict):
        home = _home(name)
        mend = f"put it in [{home}]." if home else "put it in a section, or leave it out."
        raise ValueError(f"key {name!r} stands outside the sections; {mend}")
    if name not in SECTIONS:
        near = _nearest(name, SECTIONS)
        mend = f"did you mean [{near}]?" if near else f"the sections are {', '.join(SECTIONS)}."
        raise ValueError(f"there is no section [{name}]; {mend}")


def _home(key: str) -> str | None:
    """The section that has a key of this name."""
    homes = (s for s, kind in SECTIONS.items() if key in {f.name for f in dataclasses.fields(kind)})
    return next(homes, None)


def _parse_section(section: str, kind: type, table: dict[str, Any], absent: Any) -> Any:
    hints = get_type_hints(kind)
    for key in table:
        if key not in hints:
            raise ValueError(_unknown_key(section, key, list(hints)))
    values = {key: _typed(value, hints[key], section, key) for key, value in table.items()}
    for f in dataclasses.fields(kind):
        if f.name in values or f.default is not f.default_factory:  # both MISSING where required
            continue
        if absent is ABSENT:
            raise ValueError(
                f"[{section}] lacks {f.name!r}, which {table['target']} needs; give it a value of "
                f"type {_type_name(hints[f.name])}."
            )
        values[f.name] = absent
    return kind(**values)


def _unknown_key(section: str, key: str, keys: list[str]) -> str:
    near, home = _nearest(key, keys), _home(key)
    if home is not None and home != section:
        mend = f"it belongs in [{home}]."
    elif near is not None:
        mend = f"did you mean {near!r}?"
    else:
        mend = f"its keys are {', '.join(keys)}."
    return f"[{section}] has no key {key!r}; {mend}"


def _typed(value: Any, hint: Any, section: str, key: str) -> Any:
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


def _nearest(name: str, names: Iterable[str]) -> str | None:
    return next(iter(difflib.get_close_matches(name, list(names), 1)), None)


def _check_least(config: Any, section: str, least: int, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if value is not None and not value >= least:
            _refuse(config, section, name, f"use {least} or more")


def _check_above(config: Any, section: str, bound: int, name: str) -> None:
    if not getattr(config, name) > bound:
        _refuse(config, section, name, f"use a number above {bound}")


def _check_seed(config: Any, section: str) -> None:
    if not 0 <= config.seed < 2**32:
        _refuse(config, section, "seed", f"use 0 to {2**32 - 1}")


def _refuse(config: Any, section: str, name: str, mend: str) -> None:
    raise ValueError(f"[{section}] {name} is {getattr(config, name)!r}; {mend}.")
