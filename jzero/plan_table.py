"""What `jzero plan` prints and writes: the table, the sentence it ends with, the JSON."""

import io
import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from numbers import Integral, Real
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from jzero.plan_figures import (
    CUTS,
    FIGURES,
    FORMULA,
    KEYS,
    MARK,
    MISSING,
    WIRE,
    Plan,
    StagePlan,
    best_stage,
    fits_any,
    format_figure,
    sent_by_kind,
)
from jzero.terminal import format_bytes

LEGEND = f"{MARK} by a formula or estimated; no mark: read from the compiled program, or given."
OF_THESE = "Gradients and logits are part of the temporaries above them, not counted twice."
FLOPS_RULE = "Model FLOPs are 6 N + 12 L d T a token; what remat computes again is not in them."
OF_WHAT = "  of these, "  # before what is a part of the temporaries, in the labels of FIGURES
WIDTH = 100
SHORT = 40  # characters of a failure that stand in its column


def render(plan: Plan, width: int | None = None) -> str:
    """Write the plan as a table without escape codes: stages as columns, notes, the conclusion.

    Args:
        plan: what to write. Rows that no stage has are left out.
        width: characters of a line; default 100.
    """
    width = width or WIDTH
    out = io.StringIO()
    Console(file=out, width=width, color_system=None).print(_table(plan))
    body = "\n".join(line.rstrip() for line in out.getvalue().splitlines()).strip("\n")
    notes = [textwrap.fill(f"- {note}", width, subsequent_indent="  ") for note in _notes(plan)]
    failures = [_failure(stage, width) for stage in plan.stages if stage.failure]
    last = textwrap.fill(conclusion(plan), width)
    parts = [f"{plan.title}\n{body}", "\n".join(notes), *failures, last]
    return "\n\n".join(part for part in parts if part) + "\n"


def conclusion(plan: Plan) -> str:
    """Say in a few sentences what fits, what is the fastest, and what to do if nothing fits."""
    failed = [stage for stage in plan.stages if stage.failure]
    unknown = [stage for stage in plan.stages if stage.fits is None and not stage.failure]
    parts = [f"{_named(failed)} could not be compiled."] if failed else []
    if unknown:
        parts.append(f"{_named(unknown)}: no peak to compare with a capacity.")
    known = [stage for stage in plan.stages if stage.fits is not None]
    best = best_stage(plan)
    if known:
        parts.append(_regret(plan, known) if best is None else _praise(plan, best))
    return " ".join(parts)


def to_json(plan: Plan) -> dict[str, Any]:
    """Turn the plan into what `json.dumps(..., allow_nan=False)` writes.

    Returns:
        title, facts, stages (stage, fits, failure, figures, sent), fits_any, best_stage, conclusion
        and notes. A figure is {"value": number or null, "source": one of SOURCES}, by the keys of
        FIGURES: bytes per device, seconds, shares from 0 to 1. What is not finite becomes null.
    """
    best = best_stage(plan)
    return _plain(
        {
            "title": plan.title,
            "facts": plan.facts,
            "stages": [_stage_json(stage) for stage in plan.stages],
            "fits_any": fits_any(plan),
            "best_stage": None if best is None else best.stage,
            "conclusion": conclusion(plan),
            "notes": plan.notes,
        }
    )


def _table(plan: Plan) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1), pad_edge=False)
    table.add_column("", no_wrap=True)
    for stage in plan.stages:
        table.add_column(f"stage {stage.stage}\n{CUTS[stage.stage]}", justify="right")
    for group, lines in _groups(plan):
        table.add_row(Text(group))
        for label, cells in lines:
            table.add_row(Text(f"  {label}"), *map(Text, cells))
        table.add_row()
    return table


def _groups(plan: Plan) -> Iterator[tuple[str, list[tuple[str, list[str]]]]]:
    """The lines under each heading, without those that no stage has."""
    if any(stage.failure for stage in plan.stages):
        short = [textwrap.shorten(x.failure, SHORT, placeholder=" ...") for x in plan.stages]
        yield "compile", [("failed with", short)]
    has_temp = "temp_bytes" in _shown(plan)
    for group in dict.fromkeys(row.group for row in FIGURES):
        lines = _wire_lines(plan) if group == WIRE else []
        for row in (row for row in FIGURES if row.group == group):
            cells = [format_figure(row.unit, stage.figures.get(row.key)) for stage in plan.stages]
            lines.append((row.label if has_temp else row.label.replace(OF_WHAT, ""), cells))
        lines = [(label, cells) for label, cells in lines if set(cells) != {MISSING}]
        if lines:
            yield group, lines


def _wire_lines(plan: Plan) -> list[tuple[str, list[str]]]:
    table = sent_by_kind(plan)
    return [(label, [format_figure("bytes", x) for x in line]) for label, line in table.items()]


def _shown(plan: Plan) -> dict[str, set[str]]:
    """The figures that a stage has, with the sources of their values."""
    found: dict[str, set[str]] = {}
    for stage in plan.stages:
        for key in stage.figures:
            if stage.value(key) is not None:
                found.setdefault(key, set()).add(stage.figures[key].source)
    return found


def _notes(plan: Plan) -> list[str]:
    shown = _shown(plan)
    has_parts = "temp_bytes" in shown and {"grads_bytes", "logits_bytes"} & set(shown)
    return [
        *([LEGEND] if any(FORMULA in sources for sources in shown.values()) else []),
        *([OF_THESE] if has_parts else []),
        *([FLOPS_RULE] if "flops" in shown else []),
        *plan.notes,
    ]


def _failure(stage: StagePlan, width: int) -> str:
    """A failure in full; its own line breaks are kept."""
    lines = [textwrap.fill(line, width - 2) for line in stage.failure.strip().splitlines()]
    return f"Stage {stage.stage} failed with:\n" + textwrap.indent("\n".join(lines), "  ")


def _praise(plan: Plan, best: StagePlan) -> str:
    fitting = [stage for stage in plan.stages if stage.fits]
    step = best.figures.get("step_s")
    estimate = "" if best.value("step_s") is None else format_figure("seconds", step)
    estimate = estimate.removeprefix(MARK)  # the sentence says that it is one
    if len(fitting) == 1:
        only = f"Only stage {best.stage}" if len(plan.stages) > 1 else _named(fitting)
        return f"{only} fits" + (f" ({estimate} a step by the estimate)." if estimate else ".")
    fastest = f"; stage {best.stage} is the fastest by the estimate ({estimate} a step)."
    return f"{_named(fitting)} fit" + (fastest if estimate else ".")


def _regret(plan: Plan, known: Sequence[StagePlan]) -> str:
    near = max(known, key=lambda stage: stage.value("margin_bytes") or 0)
    missing = format_bytes(-(near.value("margin_bytes") or 0))
    mend = _joined(_remedies(plan, near), "or")
    if len(plan.stages) == 1:
        return f"Stage {near.stage} does not fit: it misses by {missing}; use {mend}."
    scope = "" if len(known) == len(plan.stages) else "other "
    return f"No {scope}stage fits: stage {near.stage} misses by {missing}; use {mend}."


def _remedies(plan: Plan, near: StagePlan) -> list[str]:
    """What can help the stage that comes nearest."""
    return [
        *(["stage 3"] if all(stage.stage < 3 for stage in plan.stages) else []),
        *(["more GPUs"] if near.stage else []),  # stage 0 cuts nothing
        *_smaller_batch(near),
        "GPUs with more memory",
    ]


def _smaller_batch(stage: StagePlan) -> list[str]:
    batch, largest = stage.value("micro_batch"), stage.value("max_micro_batch")
    rest, capacity = stage.value("rest_bytes"), stage.value("capacity_bytes")
    if largest is not None:
        return [f"a micro batch of at most {largest:.0f}"] if largest >= 1 else []
    is_full = rest is not None and capacity is not None and rest >= capacity
    return [] if is_full or batch == 1 else ["a smaller micro batch"]


def _named(stages: Sequence[StagePlan]) -> str:
    return f"Stage{'s' * (len(stages) > 1)} {_joined([str(x.stage) for x in stages], 'and')}"


def _joined(words: Sequence[str], last: str) -> str:
    return f" {last} ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


def _stage_json(stage: StagePlan) -> dict[str, Any]:
    return {
        "stage": stage.stage,
        "fits": stage.fits,
        "failure": stage.failure,
        "figures": {k: stage.figures[k]._asdict() for k in KEYS if k in stage.figures},
        "sent": [asdict(sent) for sent in stage.sent],
    }


def _plain(value: Any) -> Any:
    """What JSON can hold: not finite is None, what is no number is its text."""
    value = value.item() if hasattr(value, "item") else value
    if isinstance(value, Mapping):
        return {str(key): _plain(x) for key, x in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(x) for x in value]
    if isinstance(value, (bool, str, type(None))):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value) if math.isfinite(value) else None
    return str(value)
