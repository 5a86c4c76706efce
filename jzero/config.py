"""A run's configuration: frozen typed dataclasses, read from TOML and checked key by key.

The sections [model] and [optimizer] have the arguments of what they name, so their dataclasses are
made from its signature.
"""

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, make_dataclass
from pathlib import Path
from typing import Any, Literal

from jzero.schema import (
    ABSENT,
    SCALARS,
    check_least,
    check_section,
    check_seed,
    extended,
    find_optimizer,
    import_target,
    parameters,
    parse_section,
    read_toml,
    refuse,
    toml_type,
    typed,
)

DTYPES = ("float16", "bfloat16", "float32", "float64")
DECAY_MASKS = ("mask", "weight_decay_mask")  # arguments of optax: which leaves weight decay is for


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
        accepted = parameters(find_optimizer(self.name)).keys()
        if not self.learning_rate > 0:
            refuse(self, "optimizer", "learning_rate", "use a number above 0")
        check_least(self, "optimizer", 0, "warmup_steps", "weight_decay", "clip_norm")
        if not 0 <= self.min_learning_rate_ratio <= 1:
            refuse(self, "optimizer", "min_learning_rate_ratio", "use a share from 0 to 1")
        if self.weight_decay and not ("weight_decay" in accepted and accepted & set(DECAY_MASKS)):
            mend = f"{self.name} has no masked weight decay: use 0, or adamw"
            refuse(self, "optimizer", "weight_decay", mend)


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
    """[precision]: dtypes by name; one left out is the model's, or the gradients', own."""

    param_dtype: str | None = None  # stored: the model's argument of this name
    compute_dtype: str | None = None  # multiplied: the model's argument of this name
    reduce_dtype: str | None = None  # in which gradients travel

    def __post_init__(self) -> None:
        for name in ("param_dtype", "compute_dtype", "reduce_dtype"):
            if getattr(self, name) not in (None, *DTYPES):
                refuse(self, "precision", name, f"use one of {', '.join(DTYPES)}")


@dataclass(frozen=True, kw_only=True)
class ZeroConfig:
    """[zero]: what is partitioned."""

    stage: int = 2  # 0: nothing, 1: optimizer state, 2: and gradients, 3: and parameters
    axes: tuple[str, ...] = ()  # mesh axes to partition over; none named: "data"
    min_size: int = 0  # arrays of fewer elements stay whole

    def __post_init__(self) -> None:
        if self.stage not in range(4):
            refuse(self, "zero", "stage", "use 0, 1, 2 or 3")
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
        check_least(
            self, "train", 1, "num_steps", "micro_batch", "num_microbatches", "log_every",
            "eval_batches",
        )  # fmt: skip
        check_least(self, "train", 0, "eval_every", "sample_length", "sample_temperature")
        check_seed(self, "train")
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
            check_section(name, table, SECTIONS)
        given = {name: dict(tables.get(name, {})) for name in SECTIONS}
        kinds: dict[str, type] = dict(SECTIONS)
        target = given["model"].setdefault("target", ModelConfig.target)
        kinds["model"] = model_section(typed(target, str, "model", "target"))
        name = given["optimizer"].setdefault("name", OptimizerConfig.name)
        kinds["optimizer"] = optimizer_section(typed(name, str, "optimizer", "name"))
        parts = {k: parse_section(k, kinds[k], given[k], SECTIONS, absent) for k in SECTIONS}
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
        if name in ("rngs", "param_dtype", "compute_dtype", "target"):
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
