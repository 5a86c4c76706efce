"""The picture of a plan: what each stage holds against the capacity, and what it sends."""

from pathlib import Path
from typing import Any

from jzero.metrics import import_extra
from jzero.plan_figures import FORMULA, MARK, Plan, StagePlan, best_stage, sent_by_kind
from jzero.terminal import format_bytes

SUFFIXES = (".png", ".svg", ".pdf")
GIB = 2**30
# Upwards; what is at rest in blues, what comes and goes within the step in warm colors.
CLASS_COLORS = {
    "parameters": "#1d3557",
    "fp32 master": "#2a6f97",
    "other optimizer state": "#89c2d9",
    "model states": "#2a6f97",  # where their classes are not known
    "gradients": "#e07a1f",
    "logits": "#f2b05e",
    "activations and the rest": "#f6d9a8",
}
WIRE_COLORS = ("#6a4c93", "#386641", "#a7c957", "#b185db", "#4a4e69", "#9a8c98")
GOOD, BAD, QUIET = "#2d6a4f", "#c1121f", "#6c757d"
MOST_CAPACITIES = 2.2  # a bar that is higher is cut off, so that the others can be read
LEAST_SHARE = 1e-3  # of all that is sent; a collective below it is not in the legend
BAR_WIDTH = 0.62


def check_plot_path(path: str | Path) -> Path:
    """Check where a picture shall go, and that it can be drawn, before anything is compiled.

    Raises:
        ValueError: it does not end in .png, .svg or .pdf, or its folder does not exist.
        ImportError: matplotlib is not installed; says how to install it.

    >>> check_plot_path("plan.jpg")
    Traceback (most recent call last):
    ValueError: plot path 'plan.jpg' does not end in .png, .svg or .pdf; use one of these endings.
    """
    path = Path(path)
    if path.suffix.lower() not in SUFFIXES:
        raise ValueError(
            f"plot path '{path}' does not end in .png, .svg or .pdf; use one of these endings."
        )
    if not path.parent.is_dir():
        raise ValueError(
            f"plot path '{path}' is in folder '{path.parent}', which does not exist; make it first."
        )
    import_extra("matplotlib.figure", "plot")
    return path


def plot(plan: Plan, path: str | Path) -> None:
    """Draw the plan: on the left bytes per device against the capacity, on the right the wire.

    A stage that does not fit or failed is marked; a bar far above the capacity is cut off, with
    its height in words.

    Args:
        plan: what to draw.
        path: file to write; its ending says the format.

    Raises:
        ValueError, ImportError: as `check_plot_path`.
    """
    path = check_plot_path(path)
    figure = import_extra("matplotlib.figure", "plot").Figure(
        figsize=(11, 5.6), layout="constrained"
    )
    ratios = {"height_ratios": (6, 1), "width_ratios": (1.15, 1)}  # legends in a row of their own
    (memory, wire), (memory_legend, wire_legend) = figure.subplots(2, 2, **ratios)
    _draw_memory(memory, plan)
    _draw_wire(wire, plan)
    legends = [_draw_legend(memory_legend, memory, 3), _draw_legend(wire_legend, wire, 2)]
    title = figure.suptitle(plan.title, x=0.01, ha="left", fontsize=13, fontweight="bold")
    # What is wider than its panel makes the picture wider: the layout does not see legends.
    shown = [title, *(legend for legend in legends if legend)]
    style = {"bbox_inches": "tight", "bbox_extra_artists": shown}
    figure.savefig(path, format=path.suffix[1:].lower(), dpi=150, **style)


def memory_classes(stage: StagePlan) -> dict[str, float]:
    """Split the peak of a stage into classes, from the bottom of its bar upwards.

    Returns:
        Bytes by the names of CLASS_COLORS. They sum to the peak where it is known; a part of the
        temporaries that is not alive at the peak is drawn as far as there is room.
    """
    rest = stage.value("rest_bytes") or 0.0
    names = {"parameters": "params_bytes", "fp32 master": "master_bytes"}
    names["other optimizer state"] = "state_bytes"
    held = {name: stage.value(key) or 0.0 for name, key in names.items()}
    held["model states"] = max(rest - sum(held.values()), 0.0)
    top = stage.value("peak_bytes")
    top = rest + (stage.value("temp_bytes") or 0.0) if top is None else top
    room = max(top - sum(held.values()), 0.0)
    for name, key in (("gradients", "grads_bytes"), ("logits", "logits_bytes")):
        held[name] = min(stage.value(key) or 0.0, room)
        room -= held[name]
    return {**held, "activations and the rest": room}


def _draw_memory(axes: Any, plan: Plan) -> None:
    classes = [memory_classes(stage) for stage in plan.stages]
    capacity = next((c for x in plan.stages if (c := x.value("capacity_bytes"))), None)
    heights = [sum(parts.values()) for parts in classes]
    top = max([*heights, capacity or 0.0, 1.0])
    top = min(top, MOST_CAPACITIES * capacity) if capacity else top
    _stack(axes, {n: [x[n] for x in classes] for n in CLASS_COLORS}, CLASS_COLORS)
    for i, (stage, height) in enumerate(zip(plan.stages, heights, strict=True)):
        color = BAD if stage.fits is False else "black"
        _write_total(axes, i, height, top, _mark(stage, "peak_bytes"), color)
    if capacity:
        axes.axhline(capacity / GIB, color=BAD, linestyle="--", linewidth=1.4, zorder=3)
        place = {"xy": (1, capacity / GIB), "xycoords": ("axes fraction", "data")}
        style = {"color": BAD, "fontsize": 9, "va": "center", "annotation_clip": False}
        label = f"capacity\n{format_bytes(capacity)}"  # outside, where no bar can be
        axes.annotate(label, **place, xytext=(4, 0), textcoords="offset points", **style)
    _decorate(axes, plan, "memory of one device at its peak (GiB)", top)


def _draw_wire(axes: Any, plan: Plan) -> None:
    table = {
        label: [0.0 if x is None else x.value or 0.0 for x in line]
        for label, line in sent_by_kind(plan).items()
    }
    totals = [stage.value("wire_bytes") or 0.0 for stage in plan.stages]
    unnamed = [t - sum(x[i] for x in table.values()) for i, t in enumerate(totals)]
    top = max([*totals, 1.0])
    table = {label: line for label, line in table.items() if max(line) >= LEAST_SHARE * top}
    if max(unnamed) >= LEAST_SHARE * top:
        table["all collectives"] = [max(x, 0.0) for x in unnamed]
    colors = {name: WIRE_COLORS[i % len(WIRE_COLORS)] for i, name in enumerate(table)}
    _stack(axes, table, colors)
    for i, (stage, height) in enumerate(zip(plan.stages, totals, strict=True)):
        if not stage.failure:
            _write_total(axes, i, height, top, _mark(stage, "wire_bytes"), "black")
    _decorate(axes, plan, "sent by one device in a step (GiB)", top)


def _stack(axes: Any, table: dict[str, list[float]], colors: dict[str, str]) -> None:
    """Stacked bars, in bytes; a class that no stage has gets no entry in the legend."""
    bottoms: list[float] = [0.0] * max(map(len, table.values()), default=0)
    for name, values in table.items():
        if any(values):
            heights = [value / GIB for value in values]
            style = {"color": colors[name], "zorder": 2}
            starts = [bottom / GIB for bottom in bottoms]
            axes.bar(range(len(values)), heights, BAR_WIDTH, bottom=starts, label=name, **style)
        bottoms = [bottom + value for bottom, value in zip(bottoms, values, strict=True)]


def _write_total(axes: Any, x: int, height: float, top: float, mark: str, color: str) -> None:
    """The height of a bar in words: above it, or at the edge where it is cut off."""
    if not height:
        return
    is_cut = height > top
    text = f"{mark}{format_bytes(height)}" + (" ↑" if is_cut else "")
    y = min(height, top) / GIB
    box = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
    style = {"ha": "center", "va": "bottom", "fontsize": 9.5, "color": color, "zorder": 4}
    place = {"xytext": (0, 3), "textcoords": "offset points", "bbox": box}
    axes.annotate(text, (x, y), **place, **style)


def _decorate(axes: Any, plan: Plan, label: str, top: float) -> None:
    axes.set_title(label, loc="left", fontsize=10.5)
    axes.set_ylim(0, top / GIB * 1.12)
    axes.set_xlim(-0.6, len(plan.stages) - 0.4)
    axes.set_xticks(range(len(plan.stages)), [_tick(plan, stage) for stage in plan.stages])
    for stage, tick in zip(plan.stages, axes.get_xticklabels(), strict=True):
        tick.set_color(_color(stage))
    for i, stage in enumerate(plan.stages):
        if stage.failure:
            axes.text(i, top / GIB * 0.03, "failed", color=BAD, rotation=90, ha="center")
    if top <= 1.0:  # nothing is known
        axes.set_yticks([])
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(axis="x", length=0)
    axes.grid(axis="y", color="#dddddd", linewidth=0.8, zorder=0)
    axes.set_axisbelow(True)


def _draw_legend(axes: Any, of: Any, ncols: int) -> Any:
    """Draws the legend of one panel into another; returns it, None where it is empty."""
    axes.axis("off")
    handles, labels = of.get_legend_handles_labels()
    if not handles:
        return None
    style = {"frameon": False, "fontsize": 9, "borderaxespad": 0, "columnspacing": 1.4}
    legend = axes.legend(handles, labels, loc="upper left", ncols=ncols, **style)
    legend.set_in_layout(False)
    return legend


def _tick(plan: Plan, stage: StagePlan) -> str:
    """A stage and what was found of it."""
    words = {True: "fits", False: "does not fit", None: ""}[stage.fits]
    best = best_stage(plan)
    if best is stage and stage.value("step_s") is not None:
        words = "fits, fastest" if sum(bool(x.fits) for x in plan.stages) > 1 else words
    return f"stage {stage.stage}\n{'not compiled' if stage.failure else words}"


def _color(stage: StagePlan) -> str:
    if stage.failure or stage.fits is None:
        return QUIET
    return GOOD if stage.fits else BAD


def _mark(stage: StagePlan, key: str) -> str:
    figure = stage.figures.get(key)
    return MARK if figure is not None and figure.source == FORMULA else ""
