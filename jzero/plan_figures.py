"""What `jzero plan` found, as data: the figures of each stage, how they are written, what fits.

Every figure carries its source. Bytes are of one device; the wire is what one device sends.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jzero.cover import format_seconds
from jzero.gpus import RESERVE
from jzero.terminal import format_bytes, format_count

COMPILED, FORMULA, GIVEN = "compiled", "formula", "given"
SOURCES = (COMPILED, FORMULA, GIVEN)  # given: the GPU's capacity, the batch asked for
MARK, MISSING = "~", "-"  # before a figure that is by formula; for one that is not known
CAPACITY_NOTE = (
    f"Capacity is the GPU's memory less {RESERVE:.0%} for CUDA, NCCL and fragmentation, which the "
    "peak does not know."
)
CUTS = ("nothing cut", "state cut", "+ gradients", "+ parameters")  # what each stage adds


class Figure(NamedTuple):
    """A number with where it comes from; None or not finite where it is not known."""

    value: float | None
    source: str = COMPILED  # one of SOURCES


class Row(NamedTuple):
    """How a figure is called and written, and under which heading."""

    key: str  # names it in StagePlan.figures and in the JSON
    label: str
    unit: str  # a key of FORMATS
    group: str


REST, STEP = "at rest, on each device", "in the step, on each device"
WIRE, TIME = "sent by each device in a step", "a step, by estimate"

# All that is said of a stage, in the order in which it is printed.
FIGURES = (
    Row("params_bytes", "parameters", "bytes", REST),
    Row("master_bytes", "fp32 master", "bytes", REST),
    Row("state_bytes", "other optimizer state", "bytes", REST),
    Row("rest_bytes", "all at rest", "bytes", REST),
    Row("temp_bytes", "temporaries", "bytes", STEP),
    Row("grads_bytes", "  of these, summed gradients", "bytes", STEP),
    Row("logits_bytes", "  of these, logits", "bytes", STEP),
    Row("peak_bytes", "peak", "bytes", STEP),
    Row("capacity_bytes", "capacity", "bytes", STEP),
    Row("margin_bytes", "fits", "fits", STEP),
    Row("micro_batch", "micro batch", "count", STEP),
    Row("max_micro_batch", "largest that fits", "count", STEP),
    Row("largest_params", "largest model that fits", "rate", STEP),
    Row("wire_bytes", "all of it", "bytes", WIRE),
    Row("flops", "model FLOPs, all devices", "flops", TIME),
    Row("compute_s", "compute", "seconds", TIME),
    Row("comm_s", "communication", "seconds", TIME),
    Row("exposed_s", "  of it, exposed", "seconds", TIME),
    Row("covered", "  of it, covered by compute", "share", TIME),
    Row("step_s", "step", "seconds", TIME),
    Row("tokens_per_s", "tokens/s, all devices", "rate", TIME),
    Row("mfu", "MFU", "share", TIME),
    Row("hours", "hours for all tokens", "hours", TIME),
)
KEYS = tuple(row.key for row in FIGURES)


@dataclass(frozen=True)
class Sent:
    """What one device sends in a step by one kind of collective, in one dtype, over one axis."""

    kind: str  # "all_gather", "reduce_scatter", "all_reduce", ...
    dtype: str
    axis: str  # of the mesh
    times: float  # how often a step
    wire_bytes: float
    covered: float | None = None  # share of its time beside compute, 0 to 1; None: not known
    source: str = COMPILED

    def __post_init__(self):
        _check_source(f"{self.kind} over {self.axis}", self.source)


@dataclass(frozen=True)
class StagePlan:
    """One column of the plan.

    What is left out of `figures` and follows from others is filled in: rest_bytes, margin_bytes
    (capacity less peak) and wire_bytes (all of `sent`).

    Args:
        stage: 0 to 3.
        figures: by the keys of FIGURES.
        sent: one entry for each kind, dtype and axis.
        failure: what the compile failed with; empty where it did not.

    Raises:
        ValueError: a stage, a key or a source that does not exist.
    """

    stage: int
    figures: Mapping[str, Figure]
    sent: tuple[Sent, ...] = ()
    failure: str = ""

    def __post_init__(self):
        if self.stage not in range(len(CUTS)):
            raise ValueError(f"stage {self.stage!r} is not one of ZeRO's; use 0, 1, 2 or 3.")
        for key, figure in self.figures.items():
            if key not in KEYS:
                raise ValueError(f"there is no figure {key!r}; use one of {', '.join(KEYS)}.")
            _check_source(key, figure.source)
        object.__setattr__(self, "figures", {**_following(self), **self.figures})

    def value(self, key: str) -> float | None:
        """The number of a figure, or None where it is not known."""
        value = self.figures.get(key, Figure(None)).value
        return value if value is not None and math.isfinite(value) else None

    @property
    def fits(self) -> bool | None:
        """Whether the peak is within the capacity; None if one of them is not known, or failed."""
        margin = self.value("margin_bytes")
        return None if margin is None or self.failure else margin >= 0


@dataclass(frozen=True)
class Plan:
    """What `jzero plan` found.

    Args:
        title: such as "GPT2, 1.6B parameters on 64 x h100-sxm".
        notes: printed below: the attention planned with, what the estimate leaves out.
        stages: at least one, in the order of the columns.
        facts: for the JSON: gpu, num_gpus, num_params, num_microbatches, seq_len, versions.

    Raises:
        ValueError: there is no stage.
    """

    title: str
    notes: tuple[str, ...]
    stages: tuple[StagePlan, ...]
    facts: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        if not self.stages:
            raise ValueError("stages () is empty; plan at least one of the stages 0 to 3.")


def fits_any(plan: Plan) -> bool:
    """Whether a stage fits."""
    return any(stage.fits for stage in plan.stages)


def best_stage(plan: Plan) -> StagePlan | None:
    """The stage that fits and has the fastest step; None if none fits.

    Between equally fast steps the less exposed communication decides, then the lower stage; so
    does it where no step is known.
    """

    def rank(stage: StagePlan) -> tuple[float, float, int]:
        seconds = (stage.value("step_s"), stage.value("exposed_s"))
        step, exposed = (math.inf if x is None else x for x in seconds)
        return (step, exposed, stage.stage)

    return min((stage for stage in plan.stages if stage.fits), key=rank, default=None)


def sent_by_kind(plan: Plan) -> dict[str, list[Figure | None]]:
    """Table what the stages send: a line for each kind, dtype and axis, one figure a stage.

    Returns:
        By labels such as "all_gather bf16 over data", in the order in which they are met. None: the
        stage has no such collective.
    """
    table: dict[str, list[Figure | None]] = {}
    for i, stage in enumerate(plan.stages):
        for sent in stage.sent:
            label = " ".join(filter(None, (sent.kind, sent.dtype, "over", sent.axis)))
            line = table.setdefault(label, [None] * len(plan.stages))
            mine = Figure(sent.wire_bytes, sent.source)
            line[i] = total([x for x in (line[i], mine) if x is not None])
    return table


def format_figure(unit: str, figure: Figure | None) -> str:
    """Write a figure in its unit, with MARK where it is by formula, and MISSING if not known.

    Args:
        unit: one of FORMATS, or "fits" for a margin, which is said in words on two lines.
        figure: what to write.

    >>> format_figure("bytes", Figure(3 * 2**30, FORMULA)), format_figure("seconds", Figure(0.412))
    ('~3.0 GiB', '412 ms')
    >>> format_figure("fits", Figure(-(2**30))), format_figure("share", None)
    ('no, 1.0 GiB\\ntoo much', '-')
    """
    if figure is None or figure.value is None or not math.isfinite(figure.value):
        return MISSING
    mark = MARK if figure.source == FORMULA else ""
    if unit != "fits":
        return mark + FORMATS[unit](figure.value)
    size = mark + format_bytes(abs(figure.value))
    return f"fits, {size}\nto spare" if figure.value >= 0 else f"no, {size}\ntoo much"


def total(figures: Sequence[Figure]) -> Figure | None:
    """The sum, as sure as its least sure part; None of none, or where one is not known."""
    values = [figure.value for figure in figures]
    known = [x for x in values if x is not None and math.isfinite(x)]
    if not values or len(known) < len(values):
        return None
    found = {figure.source for figure in figures}
    return Figure(sum(known), next(x for x in (FORMULA, COMPILED, GIVEN) if x in found))


def _following(stage: StagePlan) -> dict[str, Figure]:
    """The figures that follow from others."""
    figures = stage.figures
    held = [figures[k] for k in ("params_bytes", "master_bytes", "state_bytes") if k in figures]
    peak, capacity = figures.get("peak_bytes"), figures.get("capacity_bytes")
    used = Figure(-peak.value, peak.source) if peak and peak.value is not None else None
    found = {
        "rest_bytes": total(held) if {"params_bytes", "state_bytes"} <= set(figures) else None,
        "margin_bytes": total([capacity, used]) if capacity and used else None,
        "wire_bytes": total([Figure(sent.wire_bytes, sent.source) for sent in stage.sent]),
    }
    return {key: figure for key, figure in found.items() if figure is not None}


def _flops(value: float) -> str:
    for prefix in ("", "k", "M", "G", "T", "P", "E"):
        if round(value, 1) < 1000:
            return f"{value:.1f} {prefix}FLOP"
        value /= 1000
    return f"{value:.1f} ZFLOP"


FORMATS: dict[str, Callable[[float], str]] = {
    "bytes": format_bytes,
    "count": lambda value: f"{value:.0f}",
    "flops": _flops,
    "seconds": format_seconds,
    "share": lambda value: f"{value:.1%}",
    "rate": format_count,
    "hours": lambda value: f"{value:,.{0 if value >= 100 else 1}f}",
}


def _check_source(name: str, source: str) -> None:
    if source not in SOURCES:
        raise ValueError(f"{name} has source {source!r}; use one of {', '.join(SOURCES)}.")
