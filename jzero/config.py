"""A run's configuration: frozen typed dataclasses, read from TOML and checked key by key.

The sections [model], [optimizer] and [schedule] have the arguments of what they name, so their
dataclasses are made from its signature.
"""

import dataclasses
import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, make_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from jzero.policies import DTYPE_FIELDS, NONE
from jzero.precision import DTYPES
from jzero.scaling import dynamic_loss_scale
from jzero.schedules import MOMENTUM
from jzero.schema import (
    ABSENT,
    SCALARS,
    check_least,
    check_section,
    check_seed,
    extended,
    find_optimizer,
    find_schedule,
    import_target,
    parameters,
    parse_section,
    read_toml,
    refuse,
    takes_schedule,
    toml_type,
    typed,
)

NO_SCHEDULE = "none"  # for an optimizer that takes no learning rate
KNOWN = ("learning_rate", "num_steps")  # arguments of schedules that other sections give


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """[model]: an import path, and the arguments of what it names."""

    target: str = "models.gpt2:GPT2"  # MODULE:NAME, importable from the current directory
    init_from: str = ""  # start from these weights: a checkpoint, or a Hugging Face folder


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """[optimizer]: an optimizer of optax or optax.contrib, and its own arguments.

    `learning_rate` is for a schedule that takes it: our three and warmup_cosine_lr. Left out, it is
    the optimizer's own default, else 1e-3. A schedule that has its own rates, or an optimizer
    without a learning rate, refuses it.
    """

    name: str = "adamw"  # plain name of any optimizer of optax or optax.contrib
    learning_rate: float | None = None  # its peak; left out: the optimizer's default, or 1e-3
    weight_decay: float = 0.0  # of matrices: no bias, scale or norm
    clip_norm: float = 0.0  # largest global norm of the gradients; 0: no clipping

    def __post_init__(self) -> None:
        make = find_optimizer(self.name)
        if self.learning_rate is not None and not self.learning_rate > 0:
            refuse(self, "optimizer", "learning_rate", "use a number above 0")
        check_least(self, "optimizer", 0, "weight_decay", "clip_norm")
        if self.weight_decay and not ("weight_decay" in parameters(make) and decay_masks(make)):
            others = [key for key in parameters(make) if key.startswith("weight_decay_")]
            others = [key for key in others if not key.endswith("mask")]
            mend = f"set {others[0]} instead" if others else "use 0, or adamw"
            refuse(self, "optimizer", "weight_decay", f"{self.name} has no masked one: {mend}")


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """[schedule]: the learning rate by step, and the own arguments of what makes it.

    Arguments that the run knows are not given here: `learning_rate` is that of [optimizer], and
    `num_steps` that of [train], as is DeepSpeed's `total_num_steps` where left out.
    """

    name: str = "cosine"  # ours (cosine, linear, constant), DeepSpeed's or optax's


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
        check_least(self, "data", 1, "seq_len", "max_bytes")
        check_seed(self, "data")
        if not 0 < self.val_fraction < 1:
            refuse(self, "data", "val_fraction", "use a share between 0 and 1, such as 0.1")


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """[precision]: the dtype of everything, by one name or each separately.

    What is left out follows from the dtypes of parameters and products as `jzero.policy` says, and
    these are the model's own where neither they nor `policy` are given.
    """

    policy: Literal["float32", "bfloat16", "float16"] | None = None  # of parameters and products
    param_dtype: str | None = None  # stored and gathered: the model's argument of this name
    compute_dtype: str | None = None  # multiplied: the model's argument of this name
    accumulator_dtype: str | None = None  # sum over microbatches; left out: float32
    reduce_dtype: str | None = None  # in which gradients travel; left out: the parameters'
    state_dtype: str | None = None  # moments; left out: float32
    master_dtype: str | None = None  # copy of 16-bit parameters; "none": without; else float32
    loss_scale: float | str | None = None  # "dynamic", a number (1: finite check), "none"
    initial_scale_power: int | None = None  # of a dynamic scale: it starts at 2 ** 16
    loss_scale_window: int | None = None  # good steps until it grows: 1000
    hysteresis: int | None = None  # overflows until it falls: 2
    consecutive_hysteresis: bool | None = None  # whether a good step refills these: false
    min_loss_scale: float | None = None  # 1
    at_minimum: Literal["raise", "stay"] | None = None  # on an overflow at the minimum: "raise"
    max_skips_in_a_row: int = 10  # skipped steps that no lower scale can mend, until the run stops

    def __post_init__(self) -> None:
        for name in DTYPE_FIELDS:
            allowed = (None, NONE, *DTYPES) if name == "master_dtype" else (None, *DTYPES)
            if getattr(self, name) not in allowed:
                refuse(self, "precision", name, f"use one of {', '.join(DTYPES)}")
        if isinstance(self.loss_scale, str) and self.loss_scale not in ("dynamic", NONE):
            refuse(self, "precision", "loss_scale", "use 'dynamic', a positive number or 'none'")
        check_least(self, "precision", 1, "max_skips_in_a_row")

    @property
    def scale_options(self) -> dict[str, Any]:
        """What is given of a dynamic loss scale."""
        names = inspect.signature(dynamic_loss_scale).parameters
        given = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name in names}
        return {name: value for name, value in given.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class ZeroConfig:
    """[zero]: what is partitioned."""

    stage: int = 2  # 0: nothing, 1: optimizer state, 2: and gradients, 3: and parameters
    axes: tuple[str, ...] = ()  # mesh axes to partition over; none named: "data"
    min_size: int = 0  # arrays of fewer elements stay whole
    keep_gathered: bool = False  # stage 3: gather once a step, not in each microbatch
    cut_layers: bool = False  # stage 1: cut stacks between layers, for muon

    def __post_init__(self) -> None:
        if self.stage not in range(4):
            refuse(self, "zero", "stage", "use 0, 1, 2 or 3")
        if self.keep_gathered and self.stage != 3:
            mend = f"it is for stage 3, not {self.stage}: leave it out"
            refuse(self, "zero", "keep_gathered", mend)
        if self.cut_layers and self.stage != 1:
            refuse(self, "zero", "cut_layers", f"it is for stage 1, not {self.stage}: leave it out")
        check_least(self, "zero", 0, "min_size")


@dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """[mesh]: sizes of its axes."""

    replica: int = 1  # full copies of what is partitioned
    data: int | None = None  # devices to partition over; left out: all that remain
    model: int = 1  # devices of a model-parallel group
    num_cpu_devices: int = 8  # virtual devices, where there is no GPU

    def __post_init__(self) -> None:
        check_least(self, "mesh", 1, "replica", "data", "model", "num_cpu_devices")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """[train]: how long, how large a batch, and what is written."""

    num_steps: int = 1000  # optimizer steps
    train_batch_size: int | None = None  # rows of a step: the product of the next two and shards
    micro_batch: int | None = None  # rows of one device in one microbatch; 8 if neither is given
    num_microbatches: int | None = None  # accumulated in each step; left out: what follows, or 1
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
        check_least(
            self, "train", 1, "num_steps", "train_batch_size", "micro_batch", "num_microbatches",
            "log_every", "eval_batches",
        )  # fmt: skip
        check_least(self, "train", 0, "eval_every", "sample_length", "sample_temperature")
        check_seed(self, "train")
        if self.profile:
            profile_steps(self.profile, self.num_steps)


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """[checkpoint]: how often the run is saved, where, and how it goes on from there."""

    dir: str = ""  # left out: "checkpoints" in train.out_dir
    every: int = 0  # steps from save to save, also at the end and on SIGTERM; 0: never
    keep: int = 2  # so many of the latest steps
    is_async: Annotated[bool, tyro.conf.arg(name="async")] = field(  # write beside the next steps
        default=True, metadata={"key": "async"}
    )
    resume: Literal["auto", "never", "must"] = "auto"  # auto: from the latest step, where one is
    on_failure: Literal["retry", "stop"] = "retry"  # of a save: try again later, or end the run

    def __post_init__(self) -> None:
        check_least(self, "checkpoint", 0, "every")
        check_least(self, "checkpoint", 1, "keep")
        for name in ("dir", "resume"):
            if not self.every and getattr(self, name) not in ("", "auto"):
                mend = "it has no effect without checkpoint.every: set that, too, or leave it out"
                refuse(self, "checkpoint", name, mend)


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything a run needs to know; made by `load_config`."""

    model: ModelConfig = field(default_factory=ModelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    data: DataConfig = field(default_factory=DataConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    zero: ZeroConfig = field(default_factory=ZeroConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)

    @property
    def checkpoint_dir(self) -> Path:
        """Where checkpoints are, if any are made."""
        return Path(self.checkpoint.dir or Path(self.train.out_dir) / "checkpoints")


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


def parse_config(
    tables: Mapping[str, Any], *, source: str = "config", absent: Any = ABSENT
) -> Config:
    """Makes a configuration of tables by section.

    Args:
      tables: from section to key to value, as TOML has them.
      source: where they come from, for messages.
      absent: stands for a required argument of what a section names; left out: an error.

    Raises:
      ValueError: as `load_config`.

    >>> parse_config({"zero": {"stge": 3}})
    Traceback (most recent call last):
    ValueError: config: [zero] has no key 'stge'; did you mean 'stage'?
    """
    try:
        for name, table in tables.items():
            check_section(name, table, SECTIONS)
        given = {name: dict(tables.get(name, {})) for name in SECTIONS}
        kinds: dict[str, type] = dict(SECTIONS)
        target = given["model"].setdefault("target", ModelConfig.target)
        kinds["model"] = model_section(typed(target, str, "model", "target"))
        name = given["optimizer"].setdefault("name", OptimizerConfig.name)
        kinds["optimizer"] = optimizer_section(typed(name, str, "optimizer", "name"))
        schedule = given["schedule"].setdefault("name", default_schedule(name))
        kinds["schedule"] = schedule_section(typed(schedule, str, "schedule", "name"))
        parts = {k: parse_section(k, kinds[k], given[k], kinds, absent) for k in SECTIONS}
        fields = [(key, kinds[key], field(default=parts[key])) for key in SECTIONS]
        return make_dataclass("Config", fields, bases=(Config,), frozen=True, kw_only=True)(**parts)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from error


def model_section(target: str) -> type[ModelConfig]:
    """The dataclass of [model] for a target: its arguments, but what others are to give.

    Dtypes come from [precision], `rngs` from the seed. An argument of a type that TOML has not
    keeps its default.

    Raises:
      ValueError: the target is not to be imported, or needs what TOML cannot give.
    """
    arguments = []
    for name, parameter in parameters(import_target(target)).items():
        if name in ("rngs", "param_dtype", "compute_dtype", "target", "init_from"):
            continue
        hint = toml_type(parameter.annotation, parameter.default)
        is_required = parameter.default is parameter.empty
        if hint is not None:
            default = dataclasses.MISSING if is_required else parameter.default
            arguments.append((name, hint, default))
        elif is_required:
            raise ValueError(
                f"[model] {target} needs {name}: {parameter.annotation}, which TOML cannot give; "
                "give that argument a default."
            )
    return extended(ModelConfig, arguments)


def optimizer_section(name: str) -> type[OptimizerConfig]:
    """The dataclass of [optimizer] for an optimizer of optax: ours, and its own arguments."""
    ours = {f.name for f in dataclasses.fields(OptimizerConfig)}
    arguments = []
    for key, parameter in parameters(find_optimizer(name)).items():
        default = parameter.default if isinstance(parameter.default, SCALARS) else None
        given = None if parameter.default is parameter.empty else parameter.default
        hint = toml_type(parameter.annotation, given)
        if hint is None and "dtype" in key:
            hint, default = str, None
        if hint is not None and key not in ours:
            arguments.append((key, hint if default is not None else hint | None, default))
    return extended(OptimizerConfig, arguments)


def schedule_section(name: str) -> type[ScheduleConfig]:
    """The dataclass of [schedule] for a schedule: its arguments, and its momentum's if it has one.

    Raises:
      ValueError: there is no such schedule, or it needs what TOML cannot give.
    """
    if name == NO_SCHEDULE:
        return ScheduleConfig
    make = find_schedule(name)
    arguments: list[tuple[str, Any, Any]] = []
    for key, parameter in parameters(make).items():
        hint, default = toml_type(parameter.annotation, parameter.default), parameter.default
        if key == "total_num_steps":
            hint, default = int | None, None
        if hint is not None and key not in KNOWN:
            default = dataclasses.MISSING if default is parameter.empty else default
            arguments.append((key, hint, default))
    if make in MOMENTUM:
        arguments.append(("cycle_momentum", bool, True))
        arguments += [(key, float | None, None) for key in momentum_arguments(make)]
    return extended(ScheduleConfig, arguments)


def momentum_arguments(make: Any) -> list[str]:
    """The arguments that only the momentum of a schedule has."""
    return [key for key in parameters(MOMENTUM[make]) if key not in parameters(make)]


def default_schedule(optimizer: str) -> str:
    """The schedule of a configuration without one: cosine, where the optimizer takes a schedule.

    >>> [default_schedule(name) for name in ("adamw", "rprop", "polyak_sgd")]
    ['cosine', 'constant', 'none']
    """
    make = find_optimizer(optimizer)
    if takes_schedule(make):
        return ScheduleConfig.name
    return "constant" if "learning_rate" in parameters(make) else NO_SCHEDULE


def decay_masks(make: Any) -> list[str]:
    """The arguments of an optimizer that say which leaves weight decay is for.

    >>> decay_masks(find_optimizer("adamw")), decay_masks(find_optimizer("lars"))
    (['mask'], ['weight_decay_mask'])
    """
    return [key for key in parameters(make) if key == "mask" or key.endswith("decay_mask")]


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
