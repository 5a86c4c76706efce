"""Metrics on disk: one JSON line a step, TensorBoard and wandb when asked for, and a loss curve."""

import importlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, SupportsInt

METRICS_FILE = "metrics.jsonl"
NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}

TRAIN_COLOR, VALIDATION_COLOR, BASELINE_COLOR = "#2a6f97", "#e07a1f", "#6c757d"


class MetricsWriter:
    """Appends scalars to `out_dir/metrics.jsonl`, and sends them to TensorBoard and wandb if asked.

    Each line is flushed when written. A run that resumes goes on in the same file; a last line
    that a killed run left unfinished is removed first. Create it in one process only.

    Args:
        out_dir: directory for the file; made if missing.
        tensorboard: also write events to `out_dir/tensorboard`.
        wandb: keyword arguments of `wandb.init`, such as `{"project": "gpt2"}`; None: no wandb.

    Raises:
        ImportError: an extra that was asked for is not installed; says which to install.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as out_dir:
    ...     with MetricsWriter(out_dir) as writer:
    ...         writer.write(1, loss=2.5, grad_norm=float("inf"))
    ...     print((Path(out_dir) / "metrics.jsonl").read_text(), end="")
    {"step": 1, "loss": 2.5, "grad_norm": "inf"}
    """

    def __init__(
        self,
        out_dir: str | Path,
        *,
        tensorboard: bool = False,
        wandb: Mapping[str, Any] | None = None,
    ):
        events = import_extra("tensorboardX", "tensorboard") if tensorboard else None
        tracker = import_extra("wandb", "wandb") if wandb is not None else None
        out_dir = Path(out_dir)
        out_dir.mkdir(parents=True, exist_ok=True)
        self.path = out_dir / METRICS_FILE
        _drop_unfinished_line(self.path)
        self._file = self.path.open("a", encoding="utf-8")
        self._events = events.SummaryWriter(str(out_dir / "tensorboard")) if events else None
        self._run = tracker.init(**{"dir": str(out_dir), **(wandb or {})}) if tracker else None

    def write(self, step: SupportsInt, **scalars: Any) -> None:
        """Append one line.

        Args:
            step: number of optimizer steps done, >= 0.
            **scalars: one number each: Python's, numpy's or a jax array of one element (which
                waits for it). A non-finite one is written as "nan", "inf" or "-inf".

        Raises:
            ValueError: a value is not a single number, by name.
        """
        numbers = {name: _number(name, value) for name, value in scalars.items()}
        row = {"step": int(step), **{name: _to_json(value) for name, value in numbers.items()}}
        self._file.write(json.dumps(row, allow_nan=False) + "\n")
        self._file.flush()
        if self._events is not None:
            for name, value in numbers.items():
                self._events.add_scalar(name, value, int(step))
        if self._run is not None:
            self._run.log(numbers, step=int(step))

    def close(self) -> None:
        """Close the file, and finish TensorBoard and wandb; a second call does nothing."""
        self._file.close()
        if self._events is not None:
            self._events.close()
        if self._run is not None:
            self._run.finish()
        self._events = self._run = None

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """Read a metrics file back, with non-finite numbers as floats.

    Args:
        path: a `metrics.jsonl`; a last line that is still being written is left out.

    Returns:
        One dict a line, in the order written. A resumed run may repeat steps.

    Raises:
        ValueError: a line is not a JSON object; names the file and the line.
    """
    finished = Path(path).read_text(encoding="utf-8").split("\n")[:-1]
    return [_parse_line(line, f"{path}:{i}") for i, line in enumerate(finished, 1) if line.strip()]


def keep_until(path: str | Path, last_step: int) -> None:
    """Drop what a metrics file says of later steps, and a last line that is not whole.

    Args:
        path: a `metrics.jsonl`; may be missing.
        last_step: rows of steps up to this one stay.

    Raises:
        ValueError: as `read_metrics`.
    """
    path = Path(path)
    if not path.exists():
        return
    rows = [row for row in read_metrics(path) if row["step"] <= last_step]
    lines = [json.dumps({name: _to_json(x) for name, x in row.items()}) + "\n" for row in rows]
    part = path.with_suffix(".part")
    part.write_text("".join(lines), encoding="utf-8")
    part.replace(path)


def plot_loss(
    metrics_path: str | Path,
    png_path: str | Path,
    *,
    baseline: float | None = None,
    baseline_label: str = "",
) -> None:
    """Draw training (`loss`) and validation loss (`val_loss`) over steps as a PNG.

    Args:
        metrics_path: a `metrics.jsonl` whose losses are nats per token; non-finite ones are
            left out, and of a repeated step the last is drawn.
        png_path: file to write.
        baseline: height of a dashed line, bits per token.
        baseline_label: its name in the legend.

    Raises:
        ValueError: the file holds no finite loss.
        ImportError: matplotlib is not installed; says how to install it.
    """
    rows = read_metrics(metrics_path)
    train, validation = _bits_by_step(rows, "loss"), _bits_by_step(rows, "val_loss")
    if not train and not validation:
        raise ValueError(
            f"{metrics_path} holds no finite 'loss' or 'val_loss'; "
            "write them with MetricsWriter.write(step, loss=...)"
        )
    figure = import_extra("matplotlib.figure", "plot").Figure(figsize=(8, 4.8), layout="tight")
    axes = figure.add_subplot()
    width = 1.8 if len(train) < 500 else 0.9
    if train:
        axes.plot(*zip(*train, strict=True), color=TRAIN_COLOR, linewidth=width, label="training")
    if validation:
        label = f"validation (last {validation[-1][1]:.3f})"
        style = {"marker": "o", "markersize": 5, "linewidth": 1, "linestyle": ":", "zorder": 3}
        axes.plot(*zip(*validation, strict=True), color=VALIDATION_COLOR, label=label, **style)
    if baseline is not None:
        label = f"{baseline_label or 'baseline'} ({baseline:.3f})"
        axes.axhline(baseline, color=BASELINE_COLOR, linestyle="--", linewidth=1.2, label=label)
    _decorate(axes)
    figure.savefig(png_path, format="png", dpi=150)


def _decorate(axes: Any) -> None:
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("loss (bits per token)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#dddddd", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.margins(x=0.02)
    axes.legend(frameon=False)


def _bits_by_step(rows: list[dict[str, Any]], name: str) -> list[tuple[int, float]]:
    by_step = {row["step"]: row[name] / math.log(2) for row in rows if name in row}
    return sorted((step, bits) for step, bits in by_step.items() if math.isfinite(bits))


def import_extra(module: str, extra: str) -> ModuleType:
    """Imports a module of an optional package.

    Raises:
      ImportError: it is not installed; names the extra that brings it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.split(".")[0]
        message = f"{package} cannot be imported ({error}); run: pip install 'jzero[{extra}]'"
        raise ImportError(message) from error


def _drop_unfinished_line(path: Path) -> None:
    if path.exists() and (content := path.read_bytes()):
        with path.open("r+b") as file:
            file.truncate(content.rfind(b"\n") + 1)


def _number(name: str, value: Any) -> int | float:
    if getattr(value, "size", 1) == 1 and hasattr(value, "item"):
        value = value.item()
    if not isinstance(value, (int, float)):
        kind = f"shape {value.shape}" if hasattr(value, "shape") else type(value).__name__
        raise ValueError(f"metric {name!r} is not one number but {kind}; reduce it, e.g. jnp.mean")
    return value


def _to_json(value: int | float) -> int | float | str:
    return value if math.isfinite(value) else str(float(value))


def _parse_line(line: str, place: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{place} is not JSON ({error}); remove that line") from error
    if not isinstance(row, dict) or "step" not in row:
        raise ValueError(f"{place} is {line!r}, not an object with a 'step'; remove that line")
    return {name: NON_FINITE.get(str(value), value) for name, value in row.items()}
