"""The main job: a model of the user's, trained under ZeRO as a configuration says."""

import contextlib
import functools
import importlib.util
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from rich.console import Console

from jzero.checkpoint import Checkpoints
from jzero.config import Config, TrainConfig
from jzero.data import Batches, Corpus, fingerprint, open_corpus, prefetch
from jzero.evaluate import evaluated, make_summed_loss
from jzero.layout import is_floating
from jzero.metrics import METRICS_FILE, plot_loss
from jzero.options import compiler_options
from jzero.recipe import Setup, check_rows, make_setup, trace_loss
from jzero.resume import INFO_DATA, INFO_TOKENS, Start, find_start, run_info
from jzero.runlog import Log, Tracer, open_log, start_rows
from jzero.sample import write_sample
from jzero.saving import Saver
from jzero.skips import loss_scale, skip_counts, was_skipped
from jzero.state import TrainState, graphdef_of, replicated, state_parts
from jzero.stopping import Stopper
from jzero.terminal import print_table
from jzero.tokens import Tokens
from jzero.weights import open_weights

EXTRAS = {"plot": "matplotlib", "tensorboard": "tensorboardX", "wandb": "wandb"}


@dataclass(frozen=True)
class Result:
    """What a run came to; losses are in nats per token, NaN where the run was stopped before."""

    steps: int
    loss: float  # of the last step
    val_loss: float
    bigram_bits: float | None  # of the validation data, per byte; None for other tokens
    sample: str | None
    out_dir: Path
    stopped_by: str | None = None  # the signal that ended it early, "SIGTERM" or "SIGINT"


@dataclass(frozen=True)
class Job:
    """A run that passed every check; `run_job` starts it."""

    setup: Setup
    corpus: Corpus
    start: Start
    checkpoints: Checkpoints | None = None  # where it saves


def train(config: Config, console: Console | None = None) -> Result:
    """Trains a model to the last step, from its latest checkpoint where it has one.

    Args:
      config: from `jzero.config.load_config`.
      console: where to print; standard output where left out.

    Returns:
      The last losses, and what was written.

    Raises:
      ValueError: configuration or data that cannot work, before anything is compiled.
      FloatingPointError: the loss is not finite, or steps are skipped that no lower loss scale can
        mend; names the step.
      SaveError: a checkpoint cannot be saved, in several tries.
    """
    return run_job(prepare(config), console)


def prepare(config: Config) -> Job:
    """Makes the setup of a run and opens its data; every check comes here, before any compile.

    Raises:
      ValueError: configuration, data or checkpoints that cannot work.
    """
    _check_extras(config.train)
    setup = make_setup(config)
    corpus = open_corpus(config.data, config.model)
    check_rows(setup.batch.train_batch_size, corpus.train.size, config.data.seq_len)
    start = find_start(setup, functools.partial(open_weights, target=config.model.target))
    settings = config.checkpoint
    if not settings.every:
        return Job(setup, corpus, start)
    options = {"keep": settings.keep, "is_async": settings.is_async}
    checkpoints = Checkpoints(config.checkpoint_dir, **options)
    checkpoints.take()
    return Job(setup, corpus, start, checkpoints)


def make_step(setup: Setup, graphdef: Any) -> Callable[..., tuple[TrainState, dict[str, Any]]]:
    """The training step: `step(state, tokens, key)` to the next state and what was measured.

    Args:
      setup: of the run.
      graphdef: the static part of the model.

    Returns:
      A jitted function that takes the state over (it is donated). It measures `loss`, `grad_norm`
      (before clipping, after unscaling), `lr`, and the counts of skipped steps.
    """
    value_and_grad = setup.value_and_grad()
    is_scaled = setup.policy.loss_scale not in (None, 1.0)
    options = compiler_options(setup.zero.mesh) or None

    @functools.partial(jax.jit, donate_argnums=0, compiler_options=options)
    def step(
        state: TrainState, tokens: jax.Array, key: jax.Array
    ) -> tuple[TrainState, dict[str, Any]]:
        copied = jax.tree.map(lambda x: x, state.others)  # merged Variables are updated in place
        model = nnx.merge(graphdef, state.params, copied)
        scale = loss_scale(state.opt_state) if is_scaled else None
        key = jax.random.fold_in(key, state.step)
        loss, grads = value_and_grad(model, tokens, key, loss_scale=scale)
        # value: what an optimizer that adapts to the loss asks for; others ignore it.
        updates, opt_state = setup.tx.update(grads, state.opt_state, state.params, value=loss)
        params = optax.apply_updates(state.params, updates)
        others = _unless_skipped(nnx.split(model, nnx.Param, ...)[2], state, opt_state)
        metrics = _measured(loss, grads, scale) | skip_counts(opt_state)
        metrics["lr"] = setup.schedule(state.step - _num_skipped(state.opt_state))
        return TrainState(params, others, opt_state, state.step + 1), metrics

    return step


def _measured(loss: jax.Array, grads: Any, scale: jax.Array | None) -> dict[str, Any]:
    """The loss, and the global norm of the gradients, before clipping and after unscaling."""
    wide = jax.tree.map(lambda g: g.astype(jnp.promote_types(g.dtype, jnp.float32)), grads)
    norm = optax.tree.norm(wide)
    return {"loss": loss, "grad_norm": norm if scale is None else norm / scale}


def _num_skipped(opt_state: Any) -> Any:
    """Steps so far that changed nothing; a schedule does not count them."""
    return skip_counts(opt_state).get("skipped_steps", 0)


def _unless_skipped(new: Any, state: TrainState, opt_state: Any) -> Any:
    """Other Variables after a step; a skipped one leaves batch statistics as they were."""

    def pick(new: jax.Array, old: jax.Array) -> jax.Array:
        return jnp.where(was_skipped(opt_state), old, new) if is_floating(old.dtype) else new

    return jax.tree.map(pick, new, state.others)


def run_job(job: Job, console: Console | None = None) -> Result:
    """Trains, evaluates, samples and draws; see `train`."""
    is_first = jax.process_index() == 0
    console = (console or Console()) if is_first else Console(quiet=True)
    with Stopper() if job.checkpoints is not None else contextlib.nullcontext() as stopper:
        return _run(job, console, stopper)


def _run(job: Job, console: Console, stopper: Stopper | None) -> Result:
    setup, corpus, start = job.setup, job.corpus, job.start
    config, is_first = setup.config, jax.process_index() == 0
    trace_loss(setup)
    print_table("jzero train", start_rows(setup, corpus), console)
    init_key, run_key, sample_key = jax.random.split(jax.random.key(config.train.seed), 3)
    graphdef, (state, key) = graphdef_of(setup), start.make(init_key, run_key)
    skipped_steps = int(_num_skipped(state.opt_state))
    evaluate = _make_evaluate(job, graphdef)
    with open_log(setup, console, is_first, start.step, skipped_steps) as log:
        for note in (*start.notes, *_data_notes(start, corpus)):
            log.print(note)
        state, stopped_by = _run_steps(
            job, make_step(setup, graphdef), state, replicated(setup, key), evaluate, log, stopper
        )
        if stopped_by is not None:
            return _stopped(log, stopped_by, int(state.step), Path(config.train.out_dir))
        val_loss = log.write_validation(config.train.num_steps, evaluate(state))
        if log.skipped_steps:
            log.print(f"{log.skipped_steps} of {config.train.num_steps} steps were skipped")
        log.print(_verdict(val_loss, corpus))
        graphdef, variables = evaluated(graphdef, (state.params, state.others))
        sample = write_sample(setup, corpus, graphdef, variables, sample_key, log.print)
    out_dir = Path(config.train.out_dir)
    if is_first:
        _write_outputs(out_dir, config.train, sample, corpus.bigram_bits)
        log.print(f"{out_dir}: {', '.join(sorted(path.name for path in out_dir.iterdir()))}")
    loss, steps = log.last_loss, config.train.num_steps
    return Result(steps, loss, val_loss, corpus.bigram_bits, sample, out_dir)


def _data_notes(start: Start, corpus: Corpus) -> tuple[str, ...]:
    """Told where a run goes on with other data than it began with, under the same name."""
    if start.data is None or start.data == fingerprint(corpus.train):
        return ()
    return (
        f"THE DATA IS NOT WHAT IT WAS: {start.data[0]:,} tokens then, {corpus.train.size:,} now; "
        "rows may come twice, or not at all",
    )


def _stopped(log: Log, signal_name: str, step: int, out_dir: Path) -> Result:
    log.print(
        f"stopped by {signal_name} after step {step}, which is saved; the same command goes on "
        "from there"
    )
    return Result(step, log.last_loss, math.nan, None, None, out_dir, signal_name)


def _run_steps(
    job: Job,
    step_fn: Any,
    state: TrainState,
    key: jax.Array,
    evaluate: Any,
    log: Log,
    stopper: Stopper | None,
) -> tuple[TrainState, str | None]:
    """Runs the steps that are left; also tells which signal ended them early, if one did."""
    setup, settings, start = job.setup, job.setup.config.train, job.start
    # XLA's CPU collectives starve with several steps in flight; a GPU is to be kept busy.
    waits = jax.default_backend() == "cpu"
    num_rows = setup.batch.train_batch_size
    batches = _batches(setup, job.corpus.train, num_rows, start.num_rows)
    tracer = Tracer(settings, log.is_first)
    num_left = max(settings.num_steps - start.step, 0)
    if not num_left:
        log.print(
            f"nothing is left to train: {start.step} of {settings.num_steps} steps are done; raise "
            "train.num_steps to go on, or name another train.out_dir to start anew"
        )
    data = {
        INFO_TOKENS: "bytes" if job.corpus.is_bytes else "ids",
        INFO_DATA: fingerprint(job.corpus.train),
    }

    def info(step: int) -> dict[str, Any]:
        return run_info(setup, start.num_rows + (step - start.step) * num_rows) | data

    with _saving(job, log) as saver:
        step = start.step
        for step, rows in enumerate(_timed(prefetch(batches), num_left, log), start.step + 1):
            tracer.before(step, state)
            state, metrics = step_fn(state, setup.place(rows), key)
            if waits:
                jax.block_until_ready((state, metrics))
            tracer.after(step, state)
            log.add(step, metrics)
            parts = functools.partial(state_parts, state, key)
            if stopper is not None and stopper.wish is not None:
                break
            if saver is not None:
                saver.after(step, parts, info(step))
            if settings.eval_every and step % settings.eval_every == 0 < settings.num_steps - step:
                log.flush(step)
                log.write_validation(step, evaluate(state))
        log.flush(step)
        if saver is not None and step > start.step:
            saver.finish(step, functools.partial(state_parts, state, key), info(step))
    return state, None if stopper is None else stopper.wish


@contextlib.contextmanager
def _saving(job: Job, log: Log) -> Iterator[Saver | None]:
    """What saves the run; None where nothing does."""
    if job.checkpoints is None:
        yield None
        return
    saver = Saver(job.setup.config.checkpoint, job.checkpoints, job.setup.zero, log.print)
    try:
        yield saver
    finally:
        saver.close()


def _timed(batches: Iterator[np.ndarray], num_steps: int, log: Log) -> Iterator[np.ndarray]:
    for _ in range(num_steps):
        begin = time.perf_counter()
        rows = next(batches)
        log.wait_s += time.perf_counter() - begin
        yield rows


def _batches(setup: Setup, tokens: Tokens, num_rows: int, start_row: int = 0) -> Batches:
    """This process's share of batches of so many rows over all processes."""
    cuts = setup.config.data
    return Batches(
        tokens,
        seq_len=cuts.seq_len,
        global_batch_size=num_rows,
        seed=cuts.seed,
        process_index=jax.process_index(),
        num_processes=jax.process_count(),
        start_row=start_row,
    )


def _make_evaluate(job: Job, graphdef: Any) -> Callable[[TrainState], float]:
    """Mean loss over validation batches that are the same ones each time."""
    setup = job.setup
    loss_fn = make_summed_loss(setup)
    batches = _batches(setup, job.corpus.val, setup.rows)
    num_batches = min(setup.config.train.eval_batches, len(batches))

    def evaluate(state: TrainState) -> float:
        model = nnx.merge(graphdef, state.params, state.others)
        model.eval()
        pairs = [loss_fn(model, setup.place(batches[i])) for i in range(num_batches)]
        totals, weights = np.asarray(jax.device_get(pairs), np.float64).T
        return float(totals.sum() / weights.sum())

    return evaluate


def _verdict(val_loss: float, corpus: Corpus) -> str:
    """What a validation loss (nats per token) is in bits, and beside the bigram model's."""
    bits = val_loss / math.log(2)
    unit = "byte" if corpus.is_bytes else "token"
    text = f"validation loss {val_loss:.4f} nats = {bits:.3f} bits per {unit}"
    if corpus.bigram_bits is None:
        return text
    gap = corpus.bigram_bits - bits
    side = f"{abs(gap):.3f} bits {'below' if gap >= 0 else 'above'}"
    return f"{text}, {side} a byte bigram model ({corpus.bigram_bits:.3f})"


def _write_outputs(
    out_dir: Path, settings: TrainConfig, sample: str | None, bigram_bits: float | None
) -> None:
    if sample is not None:
        (out_dir / "sample.txt").write_text(sample, encoding="utf-8")
    if settings.plot:
        label = "byte bigram" if bigram_bits is not None else ""
        metrics, png = out_dir / METRICS_FILE, out_dir / "loss.png"
        plot_loss(metrics, png, baseline=bigram_bits, baseline_label=label)


def _check_extras(settings: TrainConfig) -> None:
    for name, module in EXTRAS.items():
        if getattr(settings, name) and importlib.util.find_spec(module) is None:
            raise ValueError(
                f"[train] {name} needs {module}, which is not installed; run "
                f"pip install 'jzero[{name}]', or leave {name} out."
            )
