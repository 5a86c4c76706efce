"""Plans a run for GPUs that are not here: compiles its step stage by stage, in child processes."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax

from jzero.config import Config
from jzero.gpus import Gpu
from jzero.plan_figures import (
    CAPACITY_NOTE,
    COMPILED,
    FORMULA,
    GIVEN,
    Figure,
    Plan,
    Sent,
    StagePlan,
)
from jzero.schema import key_of
from jzero.terminal import format_count
from jzero.timing import Estimate

REFUSED = "ValueError: "  # before what a child says of a configuration that cannot work
LARGEST = 4096  # the search for the largest micro batch ends there
FARTHEST = 16  # times what is known to fit, that the search goes in one step
LAST_WORDS = 12  # lines of what a child that died has printed
ATTENTION_NOTES = {
    "blocked": "Attention is planned as a loop over blocks that keeps for backward what cuDNN's "
    "kernel keeps, no T x T scores. On GPUs before the A100 that loop is what runs; on others "
    "cuDNN's kernel is, and it is planned itself where its wheel is installed.",
    "cudnn": "Attention is planned with cuDNN's own kernel.",
    "": "Attention is planned as the model has it: if it keeps T x T scores, they are counted.",
}
PEAK_NOTE = (
    "The peak is XLA's own, or what is at rest with all temporaries where that is more: a GPU "
    "takes these at once."
)
TIME_NOTE = (
    "Times are estimates: alpha-beta per collective, overlap as the compiled schedule has it; "
    "`jzero plan --check` shows how far such estimates are off."
)
JAX_ON_FRAMES = "For simplicity, JAX has removed its internal frames"  # after a line of dashes


@dataclasses.dataclass(frozen=True)
class Request:
    """What is to be planned.

    Args:
      config: of the run.
      gpu: the GPU and its node.
      num_gpus: of the run.
      stages: in the order of the columns.
      finds_largest: whether the largest micro batch is looked for, which takes some compiles more.
      num_tokens: for the hours; None leaves them out.
      capacity_bytes: of a GPU; None: `gpu.usable_bytes`.
      num_jobs: compiles at the same time.
    """

    config: Config
    gpu: Gpu
    num_gpus: int
    stages: tuple[int, ...] = (0, 1, 2, 3)
    finds_largest: bool = True
    num_tokens: float | None = None
    capacity_bytes: float | None = None
    num_jobs: int = 2

    @property
    def capacity(self) -> float:
        """Bytes of a GPU that a step may take."""
        return self.gpu.usable_bytes if self.capacity_bytes is None else self.capacity_bytes


class CompileError(Exception):
    """A compile that failed, with the last words of its process."""


def make_plan(request: Request, say: Callable[[str], None] = lambda _: None) -> Plan:
    """Compiles the step for each stage and reads bytes, collectives and peak from the programs.

    A compile that fails or kills its process is named in its column; the others go on.

    Args:
      request: what is to be planned.
      say: is told of each compile that is done.

    Raises:
      ValueError: the configuration cannot work on these GPUs at any stage.
    """
    with ThreadPoolExecutor(request.num_jobs) as pool:
        results = list(pool.map(lambda stage: _plan_stage(request, stage, say), request.stages))
    plans = tuple(result.plan for result in results)
    found = [result.found for result in results if result.found]
    if not found and all(plan.failure.startswith(REFUSED) for plan in plans):
        raise ValueError(plans[0].failure.removeprefix(REFUSED))
    notes = [note for result in results for note in result.notes]
    return Plan(
        title=_title(request, found[0] if found else {}),
        notes=(*notes, *_attention_notes(found), *_notes(request)),
        stages=plans,
        facts=_facts(request, found[0] if found else {}),
    )


class _Result(NamedTuple):
    """A stage's column, what its first compile found, and notes on it."""

    plan: StagePlan
    found: dict[str, Any]
    notes: list[str]


def _plan_stage(request: Request, stage: int, say: Callable[[str], None]) -> _Result:
    tables = with_stage(config_tables(request.config), stage)
    known: dict[int, dict[str, Any]] = {}

    def measure(given: dict[str, dict[str, Any]]) -> dict[str, Any]:
        found = run_child({"config": given, **_cluster(request)})
        size, peak = found["batch"]["micro_batch"], found["memory"]["peak"]
        took = f"{found['cpu_s']:.0f} s of CPU, {found['host_bytes'] / 2**30:.1f} GiB"
        say(f"stage {stage}, micro batch {size}: peak {peak / 2**30:.1f} GiB (compiled in {took})")
        known[size] = found
        return found

    def peak_of(size: int) -> float:
        found = known.get(size) or measure(with_micro_batch(tables, size))
        return found["memory"]["peak"]

    try:
        first = measure(tables)
    except CompileError as error:
        is_refused = str(error).startswith(REFUSED)
        say(f"stage {stage}: " + ("cannot work" if is_refused else "the compile failed"))
        return _Result(StagePlan(stage, {}, failure=str(error)), {}, [])
    figures = figures_of(request, first)
    notes = [f"Stage {stage}: what is sent may be wrong: {line}" for line in first["unread"]]
    if request.finds_largest:
        start = first["batch"]["micro_batch"]
        try:
            largest = largest_micro_batch(peak_of, request.capacity, start=start)
            figures["max_micro_batch"] = Figure(largest, COMPILED)
        except CompileError as error:
            notes.append(f"Stage {stage}: the search for the largest micro batch ended: {error}")
            say(notes[-1].splitlines()[0])
    sent = tuple(Sent(**row) for row in first["sent"])
    return _Result(StagePlan(stage, figures, sent), first, notes)


def largest_micro_batch(
    peak_of: Callable[[int], float], capacity: float, *, start: int = 1, limit: int = LARGEST
) -> int:
    """Bisects for the largest micro batch whose peak fits, on peaks alone.

    The next size to try is where a line through known peaks meets the capacity, or the middle of
    the bracket where that did not halve it. The answer and the next size, which does not fit, are
    both compiled.

    Args:
      peak_of: micro batch to peak, in bytes.
      capacity: in bytes.
      start: the size to begin with.
      limit: the largest size to try.

    Returns:
      The micro batch; 0 where not even one row fits, `limit` where all fit.

    >>> largest_micro_batch(lambda size: 100 + 7 * size, 200)
    14
    """
    peaks: dict[int, float] = {}

    def fits(size: int) -> bool:
        peaks.setdefault(size, peak_of(size))
        return peaks[size] <= capacity

    size = min(max(start, 1), limit)
    low, high = (size, limit + 1) if fits(size) else (0, size)
    has_halved = True
    while high - low > 1:
        guess = _crossing(peaks, capacity) if has_halved else (low + high) // 2
        guess = (2 * low or 1) if guess is None else guess
        # Peaks may not grow at all at first: a line through two of them goes too far.
        guess = min(guess, FARTHEST * low) if high > limit else guess
        size = min(max(guess, low + 1), high - 1)
        width = high - low
        low, high = (size, high) if fits(size) else (low, size)
        has_halved = high > limit or 2 * (high - low) <= width + 1
    return low


def _crossing(peaks: Mapping[int, float], capacity: float) -> int | None:
    """The largest size that fits by a line through the two nearest known peaks."""
    if len(peaks) < 2:
        return None
    (a, peak_a), (b, peak_b) = sorted(peaks.items(), key=lambda item: abs(item[1] - capacity))[:2]
    slope = (peak_b - peak_a) / (b - a)
    return math.floor(a + (capacity - peak_a) / slope) if slope > 0 else None


def run_child(job: Mapping[str, Any]) -> dict[str, Any]:
    """Runs `jzero.compile_step` on a job in a process of its own.

    Raises:
      CompileError: the job was refused, or the process failed; with its last words.
    """
    env = os.environ | {"JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "2"}
    done = subprocess.run(
        [sys.executable, "-m", "jzero.compile_step"],
        input=json.dumps(job),
        capture_output=True,
        text=True,
        env=env,
        check=False,
    )
    lines = done.stdout.strip().splitlines()
    if done.returncode == 0 and lines:
        found = json.loads(lines[-1])
        if "error" in found:
            raise CompileError(REFUSED + found["error"])
        return found
    how = f"exit status {done.returncode}"
    if done.returncode < 0:
        how = f"signal {-done.returncode} ({signal.Signals(-done.returncode).name})"
    cause, words = last_words(done.stderr)
    raise CompileError(f"{cause}the compile ended with {how}; its last words:\n{words}")


def last_words(stderr: str) -> tuple[str, str]:
    """The error that a process ended with, "" where it has none, and the last lines it printed.

    >>> last_words("Traceback:\\n  f(x)\\nTypeError: no\\n--------------------\\n" + JAX_ON_FRAMES)
    ('TypeError: no; ', 'Traceback:\\n  f(x)\\nTypeError: no')
    """
    lines = stderr.strip().splitlines()
    if JAX_ON_FRAMES in " ".join(lines[-1:]):
        lines = lines[:-2]
    errors = [line for line in lines if re.match(r"[\w.]+(Error|Exception): ", line)]
    cause = f"{errors[-1]}; " if errors else ""
    return cause, "\n".join(lines[-LAST_WORDS:])


def config_tables(config: Config) -> dict[str, dict[str, Any]]:
    """A configuration as the tables it can be made from again."""
    return {f.name: _table(getattr(config, f.name)) for f in dataclasses.fields(config)}


def _table(section: Any) -> dict[str, Any]:
    found = {key_of(f): getattr(section, f.name) for f in dataclasses.fields(section)}
    listed = {k: list(x) if isinstance(x, tuple) else x for k, x in found.items()}
    return {key: value for key, value in listed.items() if value is not None}


def with_stage(tables: dict[str, dict[str, Any]], stage: int) -> dict[str, dict[str, Any]]:
    """The same at another stage, without what is for one stage alone."""
    zero = dict(tables["zero"], stage=stage)
    if stage != 3:
        zero.pop("keep_gathered", None)
    if stage != 1:
        zero.pop("cut_layers", None)
    return tables | {"zero": zero}


def with_micro_batch(
    tables: dict[str, dict[str, Any]], micro_batch: int
) -> dict[str, dict[str, Any]]:
    """The same with so many rows a device; the batch of a step follows."""
    train = {k: v for k, v in tables["train"].items() if k != "train_batch_size"}
    return tables | {"train": dict(train, micro_batch=micro_batch)}


def _cluster(request: Request) -> dict[str, Any]:
    return {"gpu": dataclasses.asdict(request.gpu), "num_gpus": request.num_gpus}


def figures_of(request: Request, found: Mapping[str, Any]) -> dict[str, Figure]:
    """The figures of one stage, of what its compile found."""
    memory = found["memory"]
    estimate = Estimate(found["compute_s"], found["comm_s"], found["exposed_s"])
    compiled = {
        "params_bytes": memory["params"],
        "master_bytes": memory["master"],
        "state_bytes": memory["state"],
        "temp_bytes": memory["temp"],
        "peak_bytes": memory["peak"],
    }
    by_formula = {
        "grads_bytes": memory["grads"],
        "logits_bytes": memory["logits"],
        "covered": found["covered"],
        **estimate.figures(
            flops=found["flops"],
            tokens=found["tokens"],
            num_gpus=request.num_gpus,
            peak_flops=request.gpu.peak_flops(found["compute_dtype"]),
            num_tokens=request.num_tokens,
        ),
    }
    given = {"capacity_bytes": request.capacity, "micro_batch": found["batch"]["micro_batch"]}
    sources = ((compiled, COMPILED), (by_formula, FORMULA), (given, GIVEN))
    return {k: Figure(v, source) for figures, source in sources for k, v in figures.items()}


def _title(request: Request, found: Mapping[str, Any]) -> str:
    model = request.config.model.target.rsplit(":", 1)[-1]
    size = f", {format_count(found['num_params'])} parameters," if found else ""
    return f"{model}{size} on {request.num_gpus} x {request.gpu.name}"


def _notes(request: Request) -> list[str]:
    given = request.capacity_bytes is not None
    return [PEAK_NOTE, *([] if given else [CAPACITY_NOTE]), TIME_NOTE]


def _attention_notes(found: Sequence[Mapping[str, Any]]) -> list[str]:
    return [ATTENTION_NOTES[kind] for kind in sorted({result["attention"] for result in found})]


def _facts(request: Request, found: Mapping[str, Any]) -> dict[str, Any]:
    keys = ("num_params", "tokens", "flops", "attention", "compute_dtype")
    return {
        "model": request.config.model.target,
        "gpu": request.gpu.name,
        "num_gpus": request.num_gpus,
        "seq_len": request.config.data.seq_len,
        "jax": jax.__version__,
        **found.get("batch", {}),
        **{key: found[key] for key in keys if key in found},
    }
