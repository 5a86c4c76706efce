"""What a run says of itself: the table before it starts, its metrics and lines, its traces."""

import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console

from jzero.config import TrainConfig, profile_steps
from jzero.data import Corpus
from jzero.gpus import peak_flops
from jzero.metrics import METRICS_FILE, MetricsWriter, keep_until
from jzero.policies import DTYPE_FIELDS
from jzero.rates import make_momentum
from jzero.recipe import Setup
from jzero.report import Report
from jzero.skips import check_skip_counts, trained_names
from jzero.terminal import (
    Progress,
    StepLine,
    format_bytes,
    format_count,
)

WRITTEN = ("loss", "grad_norm", "lr", "skipped_steps", "loss_scale")  # of what a step measures


@dataclass
class Log:
    """Losses that are still on the devices, the clock, and where both are written."""

    progress: Progress
    writer: MetricsWriter | None  # None on all processes but the first
    num_steps: int
    log_every: int
    tokens_per_step: int
    flops_per_token: float | None  # None where they are not told, as on a CPU
    peak_flops: float | None
    lag: int  # steps in flight while an earlier one is printed
    names: list[str]  # of the parameters with a gradient, in tree order
    max_skips_in_a_row: int
    first_step: int = 1  # of this process
    skipped_steps: int = 0
    pending: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    since: float = field(default_factory=time.perf_counter)
    wait_s: float = 0.0
    is_behind: bool = False  # whether metrics wait for room on the disk
    last_loss: float = math.nan

    @property
    def is_first(self) -> bool:
        """Whether this process writes."""
        return self.writer is not None

    def __enter__(self) -> "Log":
        self.progress.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self.progress.__exit__(*exception)
        if self.writer is None:
            return
        try:
            self.writer.close()
        except OSError as error:
            self.print(f"the last metrics could not be written ({error})")

    def print(self, text: str) -> None:
        """A line above the bar."""
        self.progress.line(text)

    def add(self, step: int, metrics: dict[str, jax.Array]) -> None:
        """Takes what a step measured, as device arrays; prints where an interval is over."""
        self.pending.append((step, metrics))
        self.progress.advance(step)
        if step == self.first_step or (step > self.lag and (step - self.lag) % self.log_every == 0):
            self.flush(max(step - self.lag, self.first_step))

    def flush(self, last: int) -> None:
        """Fetches and writes what steps up to `last` measured, and prints a line.

        Raises:
          FloatingPointError: one of the losses is not finite though its step was not skipped, or
            skipping can help no more.
        """
        done = [entry for entry in self.pending if entry[0] <= last]
        if not done:
            return
        self.pending = self.pending[len(done) :]
        rows = [(step, jax.device_get(metrics)) for step, metrics in done]
        seconds, wait_s = time.perf_counter() - self.since, self.wait_s
        for step, row in rows:
            written = {name: row[name] for name in WRITTEN if name in row}
            self._write(step, **({"skipped_steps": 0} | written))
            self._check(step, row)
        if last == self.first_step:
            self.print(f"step {last} compiled and done in {seconds:.1f} s")
        line = self._step_line(*rows[-1], seconds / len(rows), wait_s / len(rows))
        self.print(line.format())
        if last > self.first_step:
            self._write(last, step_ms=line.step_ms, tokens_per_s=line.tokens_per_s)
        self._restart()

    def _check(self, step: int, row: dict[str, Any]) -> None:
        """Tells of a skipped step; raises where going on makes no sense."""
        num_skipped = int(row.get("skipped_steps", 0))
        is_skipped, self.skipped_steps = num_skipped > self.skipped_steps, num_skipped
        counts = row if "skipped_steps" in row else {}
        if is_skipped:
            name = self.names[int(row["nonfinite_leaf"])]
            scale = float(row["loss_scale"])
            now = "" if scale == 1 else f"; the loss scale is now {scale:g}"
            self.print(
                f"step {step} skipped: the gradient of {name} is not finite{now}; "
                f"{num_skipped} skipped so far"
            )
        check_skip_counts(counts, self.names, max_skips_in_a_row=self.max_skips_in_a_row, step=step)
        self.last_loss = float(row["loss"])
        if not math.isfinite(self.last_loss) and not is_skipped:
            raise FloatingPointError(
                f"step {step}: the loss is {self.last_loss}; lower optimizer.learning_rate, "
                "lengthen schedule.warmup_steps, or set clip_norm."
            )

    def write_validation(self, step: int, loss: float) -> float:
        """Writes and prints a validation loss (nats per token), and returns it."""
        self._write(step, val_loss=loss)
        self.print(f"step {step:5d}/{self.num_steps} | validation loss {loss:.4f}")
        self._restart()
        return loss

    def _write(self, step: int, **scalars: Any) -> None:
        """Writes metrics; a disk that is full is told of once, and does not end the run."""
        if self.writer is None:
            return
        try:
            self.writer.write(step, **scalars)
            self.is_behind = False
        except OSError as error:
            if not self.is_behind:
                self.print(f"step {step}: METRICS CANNOT BE WRITTEN ({error}); the run goes on")
            self.is_behind = True

    def _restart(self) -> None:
        self.since, self.wait_s = time.perf_counter(), 0.0

    def _step_line(self, step: int, row: dict[str, Any], step_s: float, wait_s: float) -> StepLine:
        tokens_per_s = self.tokens_per_step / step_s
        flops = None
        if self.flops_per_token is not None:
            flops = self.flops_per_token * tokens_per_s / jax.device_count()
        stats = jax.local_devices()[0].memory_stats() or {}
        return StepLine(
            step=step,
            num_steps=self.num_steps,
            loss=float(row["loss"]),
            grad_norm=float(row["grad_norm"]),
            lr=float(row["lr"]),
            step_ms=1e3 * step_s,
            wait_ms=1e3 * wait_s,
            tokens_per_s=tokens_per_s,
            tflops=None if flops is None else flops / 1e12,
            mfu=flops / self.peak_flops if flops and self.peak_flops else None,
            skipped_steps=self.skipped_steps,
            memory_bytes=stats.get("peak_bytes_in_use"),
            eta_s=None if step == self.first_step else step_s * (self.num_steps - step),
        )


def open_log(
    setup: Setup, console: Console, is_first: bool, start_step: int = 0, skipped_steps: int = 0
) -> Log:
    """The log of a run, and its metrics file; only the first process writes.

    Args:
      setup: of the run.
      console: to print on.
      is_first: whether this process writes.
      start_step: steps that were done before it was started, and `skipped_steps` of them skipped.
      skipped_steps: of those.
    """
    config, device = setup.config, jax.devices()[0]
    settings, is_cpu = config.train, device.platform == "cpu"
    return Log(
        progress=Progress(settings.num_steps, console=console),
        writer=open_writer(settings, start_step) if is_first else None,
        num_steps=settings.num_steps,
        log_every=settings.log_every,
        tokens_per_step=setup.batch.train_batch_size * config.data.seq_len,
        flops_per_token=None if is_cpu else setup.flops_per_token,
        peak_flops=peak_flops(device.device_kind, _dtypes(setup)["compute"]),
        lag=0 if is_cpu else 1,
        names=trained_names(setup.abstract),
        max_skips_in_a_row=config.precision.max_skips_in_a_row,
        first_step=start_step + 1,
        skipped_steps=skipped_steps,
    )


def open_writer(settings: TrainConfig, start_step: int = 0) -> MetricsWriter:
    """The metrics file of a run; that of an earlier run is kept beside it.

    Args:
      settings: of [train].
      start_step: of a run that goes on: what was written of later steps is dropped, for they come
        again.
    """
    path = Path(settings.out_dir) / METRICS_FILE
    if start_step:
        keep_until(path, start_step)
    elif path.exists():
        path.replace(path.with_suffix(".previous.jsonl"))
    wandb = {"project": settings.wandb} if settings.wandb else None
    return MetricsWriter(settings.out_dir, tensorboard=settings.tensorboard, wandb=wandb)


@dataclass
class Tracer:
    """Writes a jax.profiler trace of the steps that were asked for."""

    settings: TrainConfig
    is_first: bool
    is_running: bool = False  # a run that goes on past the first of them has none to stop

    def _steps(self) -> tuple[int, int]:
        profile = self.settings.profile if self.is_first else ""
        return profile_steps(profile, self.settings.num_steps) if profile else (0, 0)

    def before(self, step: int, state: Any) -> None:
        """Starts at the first step, once earlier ones are done."""
        if step == self._steps()[0]:
            jax.block_until_ready(state)
            jax.profiler.start_trace(str(Path(self.settings.out_dir) / "profile"))
            self.is_running = True

    def after(self, step: int, state: Any) -> None:
        """Stops after the last step, once it is done."""
        if self.is_running and step == self._steps()[1]:
            jax.block_until_ready(state)
            jax.profiler.stop_trace()


def start_rows(setup: Setup, corpus: Corpus) -> list[tuple[str, str]]:
    """Rows of the start-up table: all that follows from the configuration before a step is run."""
    config, zero = setup.config, setup.zero
    settings, mesh = config.train, zero.mesh
    report = zero.report(setup.abstract, setup.tx)
    axes = " x ".join(f"{axis} {size}" for axis, size in mesh.shape.items())
    batch = setup.batch
    shards, global_rows = setup.rows // batch.micro_batch, batch.train_batch_size
    flops, dtypes = setup.flops_per_token, _dtypes(setup)
    num_params = setup.num_params
    memory = {
        "parameters": report.params_bytes,
        "gathered": report.gathered_bytes,
        "gradients": report.grads_bytes,
        "optimizer state": report.state_bytes,
    }
    memory = {name: size for name, size in memory.items() if size}
    bigram = corpus.bigram_bits
    return [
        ("model", config.model.target),
        ("mesh", f"{axes} = {mesh.size} devices ({mesh.devices.flat[0].device_kind})"),
        ("ZeRO", f"stage {zero.stage} over {' x '.join(zero.axes or ())}"),
        ("parameters", f"{num_params:,} ({format_count(num_params)})"),
        ("a device holds", ", ".join(f"{k} {format_bytes(v)}" for k, v in memory.items())),
        ("a device sends", _sent(report)),
        (
            "batch",
            f"micro_batch {batch.micro_batch} x num_microbatches {batch.num_microbatches} x "
            f"{shards} data shards = {global_rows} rows of {config.data.seq_len} tokens "
            f"= {global_rows * config.data.seq_len:,} tokens a step",
        ),
        ("dtypes", ", ".join(f"{name} {dtype}" for name, dtype in dtypes.items())),
        ("loss scale", _loss_scale(setup)),
        ("optimizer", _optimizer(setup)),
        (
            "data",
            f"{config.data.path}: {corpus.train.size:,} tokens to train, {corpus.val.size:,} to "
            + ("validate" if bigram is None else f"validate (byte bigram: {bigram:.3f} bits)"),
        ),
        ("FLOPs", f"{format_count(flops)} a token: 6 N + 12 L d T, as PaLM counts; remat is not"),
        ("output", settings.out_dir),
        ("checkpoints", _checkpoints(setup)),
    ]


def _checkpoints(setup: Setup) -> str:
    """Where the run is saved, and how often."""
    settings = setup.config.checkpoint
    if not settings.every:
        return "none: nothing of this run can be continued or sampled; checkpoint.every sets them"
    how = "in the background" if settings.is_async else "while the run waits"
    where = f"{setup.config.checkpoint_dir}, the latest {settings.keep} kept, {how}"
    return f"every {settings.every} steps in {where}"


def _optimizer(setup: Setup) -> str:
    """The optimizer, its schedule, and the rates that this makes."""
    config = setup.config
    steps = np.unique(np.linspace(0, config.train.num_steps - 1, 201).astype(np.int32))
    rates = [float(np.asarray(setup.schedule(step))) for step in steps]
    text = f"{config.optimizer.name}, schedule {config.schedule.name}: learning rate {rates[0]:.1e}"
    text += f" at first, {max(rates):.1e} at most, {rates[-1]:.1e} at last"
    momentum = make_momentum(config)
    return text if momentum is None else f"{text}; {momentum[0]} follows the cycle"


def _sent(report: Report) -> str:
    """Bytes of a step on the wire, and what the update of the optimizer adds to them."""
    added = report.update_bytes
    more = "an unknown number" if added is None else f"{format_bytes(added)} more"
    by_law = f"{format_bytes(report.wire_bytes)} a step"
    return by_law if added == 0 else f"{by_law}, {more} in the update"


def _dtypes(setup: Setup) -> dict[str, str]:
    """The dtype of everything, by what has it."""
    rows = setup.policy.rows()
    return {name.removesuffix("_dtype"): dtype for name, dtype in rows if name in DTYPE_FIELDS}


def _loss_scale(setup: Setup) -> str:
    """How the loss is scaled, and what is done about gradients that are not finite."""
    scale, options = setup.policy.loss_scale, setup.config.precision
    stops = f"stops after {options.max_skips_in_a_row} in a row"
    if scale is None:
        return "none; a loss that is not finite stops the run"
    if scale != "dynamic":
        return f"{scale:g}; a step whose gradients are not finite is skipped, {stops}"
    power = options.scale_options.get("initial_scale_power", 16)
    return f"dynamic from 2**{power}; a step that overflows is skipped"
