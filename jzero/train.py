"""The main job: a model of the user's, trained under ZeRO as a configuration says."""

import functools
import importlib.util
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console

from jzero.config import Config, TrainConfig
from jzero.data import Batches, Corpus, open_corpus, prefetch
from jzero.layout import is_floating
from jzero.metrics import METRICS_FILE, plot_loss
from jzero.options import compiler_options
from jzero.outputs import split_loss
from jzero.recipe import Setup, check_rows, make_setup, trace_loss
from jzero.runlog import Log, Tracer, open_log, start_rows
from jzero.sample import write_sample
from jzero.skips import loss_scale, skip_counts, was_skipped
from jzero.terminal import print_table
from jzero.tokens import Tokens

EXTRAS = {"plot": "matplotlib", "tensorboard": "tensorboardX", "wandb": "wandb"}


@dataclass(frozen=True)
class Result:
    """What a run came to; losses are in nats per token."""

    steps: int
    loss: float  # of the last step
    val_loss: float
    bigram_bits: float | None  # of the validation data, per byte; None for other tokens
    sample: str | None
    out_dir: Path


@dataclass(frozen=True)
class Job:
    """A run that passed every check; `run_job` starts it."""

    setup: Setup
    corpus: Corpus


class TrainState(NamedTuple):
    """What a step takes and gives back."""

    params: Any  # nnx.State of nnx.Param, at rest
    others: Any  # nnx.State of the model's other Variables
    opt_state: optax.OptState
    step: jax.Array  # int32 (), steps done


def train(config: Config, console: Console | None = None) -> Result:
    """Trains a model from its initialisation to the last step.

    Args:
      config: from `jzero.config.load_config`.
      console: where to print; standard output where left out.

    Returns:
      The last losses, and what was written.

    Raises:
      ValueError: configuration or data that cannot work, before anything is compiled.
      FloatingPointError: the loss is not finite, or steps are skipped that no lower loss scale can
        mend; names the step.
    """
    return run_job(prepare(config), console)


def prepare(config: Config) -> Job:
    """Makes the setup of a run and opens its data; every check comes here, before any compile.

    Raises:
      ValueError: configuration or data that cannot work.
    """
    _check_extras(config.train)
    setup = make_setup(config)
    corpus = open_corpus(config.data, config.model)
    check_rows(setup.batch.train_batch_size, corpus.train.size, config.data.seq_len)
    return Job(setup, corpus)


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


def init_state(setup: Setup, key: jax.Array) -> tuple[Any, TrainState]:
    """The model's static part, and the first state, born partitioned."""
    model = setup.zero.init(setup.make_model, key)
    graphdef, params, others = nnx.split(model, nnx.Param, ...)
    step = jax.device_put(np.int32(0), NamedSharding(setup.zero.mesh, P()))
    return graphdef, TrainState(params, others, setup.tx.init(params), step)


def run_job(job: Job, console: Console | None = None) -> Result:
    """Trains, evaluates, samples and draws; see `train`."""
    setup, corpus = job.setup, job.corpus
    config, is_first = setup.config, jax.process_index() == 0
    console = (console or Console()) if is_first else Console(quiet=True)
    trace_loss(setup)
    print_table("jzero train", start_rows(setup, corpus), console)
    init_key, step_key, sample_key = jax.random.split(jax.random.key(config.train.seed), 3)
    graphdef, state = init_state(setup, init_key)
    evaluate = _make_evaluate(job, graphdef)
    with open_log(setup, console, is_first) as log:
        state = _run_steps(job, make_step(setup, graphdef), state, step_key, evaluate, log)
        val_loss = log.write_validation(config.train.num_steps, evaluate(state))
        if log.skipped_steps:
            log.print(f"{log.skipped_steps} of {config.train.num_steps} steps were skipped")
        log.print(_verdict(val_loss, corpus))
        variables = state.params, state.others
        sample = write_sample(setup, corpus, graphdef, variables, sample_key, log.print)
    out_dir = Path(config.train.out_dir)
    if is_first:
        _write_outputs(out_dir, config.train, sample, corpus.bigram_bits)
        log.print(f"{out_dir}: {', '.join(sorted(path.name for path in out_dir.iterdir()))}")
    loss, steps = log.last_loss, config.train.num_steps
    return Result(steps, loss, val_loss, corpus.bigram_bits, sample, out_dir)


def _run_steps(
    job: Job, step_fn: Any, state: TrainState, key: jax.Array, evaluate: Any, log: Log
) -> TrainState:
    setup, settings = job.setup, job.setup.config.train
    key = jax.device_put(key, NamedSharding(setup.zero.mesh, P()))
    # XLA's CPU collectives starve with several steps in flight; a GPU is to be kept busy.
    waits = jax.default_backend() == "cpu"
    batches = _batches(setup, job.corpus.train, setup.batch.train_batch_size)
    tracer = Tracer(settings, log.is_first)
    for step, rows in enumerate(_timed(prefetch(batches), settings.num_steps, log), 1):
        tracer.before(step, state)
        state, metrics = step_fn(state, setup.place(rows), key)
        if waits:
            jax.block_until_ready((state, metrics))
        tracer.after(step, state)
        log.add(step, metrics)
        if settings.eval_every and step % settings.eval_every == 0 and step < settings.num_steps:
            log.flush(step)
            log.write_validation(step, evaluate(state))
    log.flush(settings.num_steps)
    return state


def _timed(batches: Iterator[np.ndarray], num_steps: int, log: Log) -> Iterator[np.ndarray]:
    for _ in range(num_steps):
        begin = time.perf_counter()
        rows = next(batches)
        log.wait_s += time.perf_counter() - begin
        yield rows


def _batches(setup: Setup, tokens: Tokens, num_rows: int) -> Batches:
    """This process's share of batches of so many rows over all processes."""
    cuts = setup.config.data
    return Batches(
        tokens,
        seq_len=cuts.seq_len,
        global_batch_size=num_rows,
        seed=cuts.seed,
        process_index=jax.process_index(),
        num_processes=jax.process_count(),
    )


def _make_evaluate(job: Job, graphdef: Any) -> Callable[[TrainState], float]:
    """Mean loss over validation batches that are the same ones each time."""
    setup = job.setup

    def weighted(*args: Any) -> tuple[jax.Array, Any]:
        total, weight, _ = split_loss(setup.loss_fn(*args), has_aux=False)
        return total, jnp.ones(()) if weight is None else weight

    loss_fn = setup.zero.apply(weighted)
    batches = _batches(setup, job.corpus.val, setup.rows)
    num_batches = min(setup.config.train.eval_batches, len(batches))

    def evaluate(state: TrainState) -> float:
        model = nnx.merge(graphdef, state.params, state.others)
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
