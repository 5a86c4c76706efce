"""The main job: a model of the user's, trained under ZeRO as a configuration says."""

import functools
import importlib.util
import inspect
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
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

from jzero import data
from jzero.config import (
    DECAY_MASKS,
    Config,
    OptimizerConfig,
    TrainConfig,
    find_optimizer,
    model_factory,
    own_arguments,
    profile_steps,
)
from jzero.mesh import REPLICA_AXIS, make_mesh
from jzero.metrics import METRICS_FILE, MetricsWriter, plot_loss
from jzero.terminal import (
    Progress,
    StepLine,
    format_bytes,
    format_count,
    peak_flops,
    print_table,
    train_flops_per_token,
)
from jzero.trees import abstract_leaves, leaf_name
from jzero.zero import Zero

BYTE_VOCAB = 256
MAX_CHECKED = 1 << 28  # tokens read before the start: to look for wrong ids, to count bigrams
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
class Setup:
    """A run before anything is compiled: shapes alone."""

    config: Config
    zero: Zero
    make_model: Callable[[jax.Array], nnx.Module]
    abstract: nnx.Module  # the model, with shapes in place of arrays
    tx: optax.GradientTransformation
    schedule: optax.Schedule

    @property
    def data_axes(self) -> tuple[str, ...]:
        """The mesh axes that split the batch."""
        axes = (REPLICA_AXIS, *(self.zero.axes or ()))
        return tuple(str(axis) for axis in self.zero.mesh.axis_names if axis in axes)

    @property
    def rows(self) -> int:
        """Rows of one microbatch on all devices together."""
        shards = math.prod(self.zero.mesh.shape[axis] for axis in self.data_axes)
        return self.config.train.micro_batch * shards

    def place(self, rows: np.ndarray) -> jax.Array:
        """This process's rows (b, T + 1) as its share of the global batch, on the devices."""
        sharding = NamedSharding(self.zero.mesh, P(self.data_axes))
        return jax.make_array_from_process_local_data(sharding, rows)


@dataclass(frozen=True)
class Corpus:
    """The data of a run."""

    train: data.Tokens
    val: data.Tokens
    bigram_bits: float | None

    @property
    def is_bytes(self) -> bool:
        """Whether a token is a byte of text."""
        return self.train.vocab_size_hint == self.val.vocab_size_hint == BYTE_VOCAB


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
      FloatingPointError: the loss is not finite; names the step.
    """
    return run_job(prepare(config), console)


def make_setup(config: Config) -> Setup:
    """Makes mesh, abstract model, Zero and optimizer, of which nothing is compiled or run."""
    _set_cpu_devices(config.mesh.num_cpu_devices)
    sizes = config.mesh
    mesh = make_mesh(replica=sizes.replica, data=sizes.data, model=sizes.model)
    make = model_factory(config.model, config.precision)

    def make_model(key: jax.Array) -> Any:
        return make(nnx.Rngs(key))

    abstract = nnx.eval_shape(lambda: make_model(jax.random.key(0)))
    if not isinstance(abstract, nnx.Module):
        raise ValueError(
            f"[model] target {config.model.target!r} makes a {type(abstract).__name__}, not a "
            "flax.nnx.Module; name a class of modules, or a function that returns one."
        )
    zero = Zero(
        mesh,
        config.zero.stage,
        axes=config.zero.axes or None,
        like=abstract,
        reduce_dtype=config.precision.reduce_dtype,
        min_size=config.zero.min_size,
    )
    schedule = make_schedule(config.optimizer, config.train.num_steps)
    tx = zero.optimizer(make_optimizer(config.optimizer, schedule))
    return Setup(config, zero, make_model, abstract, tx, schedule)


def trace_loss(setup: Setup) -> None:
    """Traces loss and gradients, so that errors of the model come before any compile.

    The report then knows which parameters are gathered where they are read.
    """
    loss_fn = make_loss_fn(type(setup.abstract), setup.zero.run_layers)
    value_and_grad = setup.zero.value_and_grad(loss_fn)
    graphdef, state = nnx.split(setup.abstract)
    tokens = jax.ShapeDtypeStruct((setup.rows, setup.config.data.seq_len + 1), jnp.int32)
    key = jax.eval_shape(lambda: jax.random.key(0))
    jax.eval_shape(
        lambda state, *args: value_and_grad(nnx.merge(graphdef, state), *args), state, tokens, key
    )


def prepare(config: Config) -> Job:
    """Makes the setup of a run and opens its data; every check comes here, before any compile.

    Raises:
      ValueError: configuration or data that cannot work.
    """
    _check_extras(config.train)
    setup = make_setup(config)
    corpus = open_corpus(config)
    return Job(setup, corpus)


def open_corpus(config: Config) -> Corpus:
    """Opens the data, and checks it against the model's arguments.

    Raises:
      ValueError: no data, too little, ids beyond `vocab_size`, or `seq_len` above `num_positions`.
    """
    cuts, model = config.data, own_arguments(config.model)
    longest = model.get("num_positions")
    if longest is not None and cuts.seq_len > longest:
        raise ValueError(
            f"[data] seq_len {cuts.seq_len} is longer than the model's num_positions {longest}; "
            f"set seq_len to {longest} or less, or raise model.num_positions."
        )
    tokens = data.open_tokens(cuts.path, max_bytes=cuts.max_bytes)
    if cuts.val_path is None:
        train, val = data.split(tokens, cuts.val_fraction)
    else:
        train, val = tokens, data.open_tokens(cuts.val_path)
    for part in (train, val):
        head = replace(part, stop=min(part.stop, part.start + MAX_CHECKED))
        if model.get("vocab_size") is not None:
            data.check_vocab(head, model["vocab_size"])
        data.Batches(part, seq_len=cuts.seq_len, global_batch_size=1, seed=cuts.seed)
    corpus = Corpus(train, val, None)
    if not corpus.is_bytes or train.size > MAX_CHECKED:
        return corpus
    return replace(corpus, bigram_bits=data.bigram_bits(train, val))


def make_schedule(config: OptimizerConfig, num_steps: int) -> optax.Schedule:
    """Warmup from peak / warmup_steps to the peak, then the decay to the last step.

    >>> schedule = make_schedule(OptimizerConfig(learning_rate=1.0, warmup_steps=4), 10)
    >>> [round(float(schedule(step)), 2) for step in (0, 3, 4, 10)]
    [0.25, 1.0, 1.0, 0.0]
    """
    peak, warmup = config.learning_rate, config.warmup_steps
    ratio, num_decay = config.min_learning_rate_ratio, max(num_steps - warmup, 1)
    if config.schedule == "cosine":
        decay = optax.cosine_decay_schedule(peak, num_decay, alpha=ratio)
    elif config.schedule == "linear":
        decay = optax.linear_schedule(peak, ratio * peak, num_decay)
    else:
        decay = optax.constant_schedule(peak)
    if not warmup:
        return decay
    rise = optax.linear_schedule(peak / warmup, peak, max(warmup - 1, 1))
    return optax.join_schedules([rise, decay], [warmup])


def make_optimizer(
    config: OptimizerConfig, schedule: optax.Schedule
) -> optax.GradientTransformation:
    """The optimizer of optax that a configuration names, clipped, its decay masked."""
    make = find_optimizer(config.name)
    accepted = inspect.signature(make).parameters
    arguments = {name: x for name, x in own_arguments(config).items() if x is not None}
    masks = {name: decay_mask for name in DECAY_MASKS if name in accepted}
    if "weight_decay" in accepted:
        arguments["weight_decay"] = config.weight_decay
    tx = make(learning_rate=schedule, **arguments, **masks)
    if config.clip_norm:
        return optax.chain(optax.clip_by_global_norm(config.clip_norm), tx)
    return tx


def decay_mask(params: Any) -> Any:
    """Which leaves weight decay is for: not a bias or scale, nor anything of a norm, nor a vector.

    A norm is known by a part of the leaf's name: one that begins with "ln" or holds "norm".

    >>> decay_mask({"ln_1": {"weight": jnp.ones((2, 3))}, "c_fc": {"weight": jnp.ones((2, 3))}})
    {'c_fc': {'weight': True}, 'ln_1': {'weight': False}}
    """

    def is_decayed(path: Any, leaf: Any) -> bool:
        parts = leaf_name(path).lower().split(".")
        is_norm = any(part.startswith("ln") or "norm" in part for part in parts)
        return not is_norm and parts[-1] not in ("bias", "scale") and jnp.ndim(leaf) > 1

    return jax.tree_util.tree_map_with_path(is_decayed, params)


def make_loss_fn(model_type: type, run_layers: Callable[..., Any]) -> Callable[..., jax.Array]:
    """`loss_fn(model, tokens, key)`: the model's own `loss`, or cross entropy of its logits.

    Args:
      model_type: `loss(tokens)` takes int32 (B, T + 1); `__call__(tokens)` takes (B, T) and gives
        logits (B, T, V). Either is given `key` and `run_layers` where it has those arguments.
      run_layers: what is lent.
    """
    has_loss = hasattr(model_type, "loss")
    called: Any = model_type.loss if has_loss else model_type.__call__  # type: ignore
    accepted = inspect.signature(called).parameters

    def loss_fn(model: Any, tokens: jax.Array, key: jax.Array | None = None) -> jax.Array:
        lent = {"key": key, "run_layers": run_layers}
        lent = {name: value for name, value in lent.items() if name in accepted}
        if has_loss:
            return model.loss(tokens, **lent)
        logits = model(tokens[:, :-1], **lent)
        logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    return loss_fn


def make_step(setup: Setup, graphdef: Any) -> Callable[..., tuple[TrainState, dict[str, Any]]]:
    """The training step: `step(state, tokens, key)` to the next state and what was measured.

    Args:
      setup: of the run.
      graphdef: the static part of the model.

    Returns:
      A jitted function that takes the state over (it is donated). It measures `loss`, `grad_norm`
      (before clipping) and `lr`.
    """
    loss_fn = make_loss_fn(type(setup.abstract), setup.zero.run_layers)
    num_microbatches = setup.config.train.num_microbatches
    value_and_grad = setup.zero.value_and_grad(loss_fn, num_microbatches=num_microbatches)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(
        state: TrainState, tokens: jax.Array, key: jax.Array
    ) -> tuple[TrainState, dict[str, Any]]:
        model = nnx.merge(graphdef, state.params, state.others)
        loss, grads = value_and_grad(model, tokens, jax.random.fold_in(key, state.step))
        others = nnx.split(model, nnx.Param, ...)[2]
        updates, opt_state = setup.tx.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        wide = jax.tree.map(lambda g: g.astype(jnp.promote_types(g.dtype, jnp.float32)), grads)
        lr = setup.schedule(state.step)
        metrics = {"loss": loss, "grad_norm": optax.tree.norm(wide), "lr": lr}
        return TrainState(params, others, opt_state, state.step + 1), metrics

    return step


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
    print_table("jzero train", start_rows(job), console)
    init_key, step_key, sample_key = jax.random.split(jax.random.key(config.train.seed), 3)
    graphdef, state = init_state(setup, init_key)
    evaluate = _make_evaluate(job, graphdef)
    with _open_log(job, console, is_first) as log:
        state = _run_steps(job, make_step(setup, graphdef), state, step_key, evaluate, log)
        val_loss = log.write_validation(config.train.num_steps, evaluate(state))
        log.print(_verdict(val_loss, corpus))
        sample = _sample(job, graphdef, state, sample_key, log)
    out_dir = Path(config.train.out_dir)
    if is_first:
        _write_outputs(out_dir, config.train, sample, corpus.bigram_bits)
        log.print(f"{out_dir}: {', '.join(sorted(path.name for path in out_dir.iterdir()))}")
    loss, steps = log.last_loss, config.train.num_steps
    return Result(steps, loss, val_loss, corpus.bigram_bits, sample, out_dir)


def _run_steps(
    job: Job, step_fn: Any, state: TrainState, key: jax.Array, evaluate: Any, log: "Log"
) -> TrainState:
    setup, settings = job.setup, job.setup.config.train
    key = jax.device_put(key, NamedSharding(setup.zero.mesh, P()))
    # XLA's CPU collectives starve with several steps in flight; a GPU is to be kept busy.
    waits = jax.default_backend() == "cpu"
    tracer = Tracer(settings, log.is_first)
    for step, rows in enumerate(_timed(_batches(job), settings.num_steps, log), 1):
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


def _batches(job: Job) -> Iterator[np.ndarray]:
    config = job.setup.config
    batches = data.Batches(
        job.corpus.train,
        seq_len=config.data.seq_len,
        global_batch_size=job.setup.rows * config.train.num_microbatches,
        seed=config.data.seed,
        process_index=jax.process_index(),
        num_processes=jax.process_count(),
    )
    return data.prefetch(batches)


def _timed(batches: Iterator[np.ndarray], num_steps: int, log: "Log") -> Iterator[np.ndarray]:
    for _ in range(num_steps):
        begin = time.perf_counter()
        rows = next(batches)
        log.wait_s += time.perf_counter() - begin
        yield rows


def _make_evaluate(job: Job, graphdef: Any) -> Callable[[TrainState], float]:
    """Mean loss over validation batches that are the same ones each time."""
    setup, config = job.setup, job.setup.config
    loss_fn = setup.zero.apply(make_loss_fn(type(setup.abstract), setup.zero.run_layers))
    batches = data.Batches(
        job.corpus.val,
        seq_len=config.data.seq_len,
        global_batch_size=setup.rows,
        seed=config.data.seed,
        process_index=jax.process_index(),
        num_processes=jax.process_count(),
    )
    num_batches = min(config.train.eval_batches, len(batches))

    def evaluate(state: TrainState) -> float:
        model = nnx.merge(graphdef, state.params, state.others)
        losses = (loss_fn(model, setup.place(batches[i])) for i in range(num_batches))
        return float(np.mean([float(loss) for loss in losses]))

    return evaluate


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
    pending: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    since: float = field(default_factory=time.perf_counter)
    wait_s: float = 0.0
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
        if self.writer is not None:
            self.writer.close()

    def print(self, text: str) -> None:
        """A line above the bar."""
        self.progress.line(text)

    def add(self, step: int, metrics: dict[str, jax.Array]) -> None:
        """Takes what a step measured, as device arrays; prints where an interval is over."""
        self.pending.append((step, metrics))
        self.progress.advance(step)
        if step == 1 or (step > self.lag and (step - self.lag) % self.log_every == 0):
            self.flush(max(step - self.lag, 1))

    def flush(self, last: int) -> None:
        """Fetches and writes what steps up to `last` measured, and prints a line.

        Raises:
          FloatingPointError: one of the losses is not finite.
        """
        done = [entry for entry in self.pending if entry[0] <= last]
        if not done:
            return
        self.pending = self.pending[len(done) :]
        rows = [(step, jax.device_get(metrics)) for step, metrics in done]
        seconds, wait_s = time.perf_counter() - self.since, self.wait_s
        for step, row in rows:
            self._write(step, **row)
            self.last_loss = float(row["loss"])
            if not math.isfinite(self.last_loss):
                raise FloatingPointError(
                    f"step {step}: the loss is {self.last_loss}; lower optimizer.learning_rate, "
                    "lengthen warmup_steps, or set clip_norm."
                )
        if last == 1:
            self.print(f"step 1 compiled and done in {seconds:.1f} s")
        line = self._step_line(*rows[-1], seconds / len(rows), wait_s / len(rows))
        self.print(line.format())
        if last > 1:
            self._write(last, step_ms=line.step_ms, tokens_per_s=line.tokens_per_s)
        self._restart()

    def write_validation(self, step: int, loss: float) -> float:
        """Writes and prints a validation loss (nats per token), and returns it."""
        self._write(step, val_loss=loss)
        self.print(f"step {step:5d}/{self.num_steps} | validation loss {loss:.4f}")
        self._restart()
        return loss

    def _write(self, step: int, **scalars: Any) -> None:
        if self.writer is not None:
            self.writer.write(step, **scalars)

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
            memory_bytes=stats.get("peak_bytes_in_use"),
            eta_s=None if step == 1 else step_s * (self.num_steps - step),
        )


def _open_log(job: Job, console: Console, is_first: bool) -> Log:
    config, device = job.setup.config, jax.devices()[0]
    settings, is_cpu = config.train, device.platform == "cpu"
    global_rows = job.setup.rows * settings.num_microbatches
    return Log(
        progress=Progress(settings.num_steps, console=console),
        writer=open_writer(settings) if is_first else None,
        num_steps=settings.num_steps,
        log_every=settings.log_every,
        tokens_per_step=global_rows * config.data.seq_len,
        flops_per_token=None if is_cpu else _flops_per_token(job.setup),
        peak_flops=peak_flops(device.device_kind, _dtypes(job.setup)["compute"]),
        lag=0 if is_cpu else 1,
    )


def open_writer(settings: TrainConfig) -> MetricsWriter:
    """A new metrics file; an earlier run's is kept beside it."""
    path = Path(settings.out_dir) / METRICS_FILE
    if path.exists():
        path.replace(path.with_suffix(".previous.jsonl"))
    wandb = {"project": settings.wandb} if settings.wandb else None
    return MetricsWriter(settings.out_dir, tensorboard=settings.tensorboard, wandb=wandb)


@dataclass
class Tracer:
    """Writes a jax.profiler trace of the steps that were asked for."""

    settings: TrainConfig
    is_first: bool

    def _steps(self) -> tuple[int, int]:
        profile = self.settings.profile if self.is_first else ""
        return profile_steps(profile, self.settings.num_steps) if profile else (0, 0)

    def before(self, step: int, state: TrainState) -> None:
        """Starts at the first step, once earlier ones are done."""
        if step == self._steps()[0]:
            jax.block_until_ready(state)
            jax.profiler.start_trace(str(Path(self.settings.out_dir) / "profile"))

    def after(self, step: int, state: TrainState) -> None:
        """Stops after the last step, once it is done."""
        if step == self._steps()[1]:
            jax.block_until_ready(state)
            jax.profiler.stop_trace()


def start_rows(job: Job) -> list[tuple[str, str]]:
    """Rows of the start-up table: all that follows from the configuration before a step is run."""
    setup, corpus = job.setup, job.corpus
    config, zero = setup.config, setup.zero
    settings, mesh = config.train, zero.mesh
    report = zero.report(setup.abstract, setup.tx)
    axes = " x ".join(f"{axis} {size}" for axis, size in mesh.shape.items())
    shards, global_rows = setup.rows // settings.micro_batch, setup.rows * settings.num_microbatches
    flops, dtypes = _flops_per_token(setup), _dtypes(setup)
    num_params = _num_params(setup)
    memory = {
        "parameters": report.params_bytes,
        "gradients": report.grads_bytes,
        "optimizer state": report.state_bytes,
    }
    sent = report.wire(settings.num_microbatches)
    bigram = corpus.bigram_bits
    return [
        ("model", config.model.target),
        ("mesh", f"{axes} = {mesh.size} devices ({mesh.devices.flat[0].device_kind})"),
        ("ZeRO", f"stage {zero.stage} over {' x '.join(zero.axes or ())}"),
        ("parameters", f"{num_params:,} ({format_count(num_params)})"),
        ("a device holds", ", ".join(f"{k} {format_bytes(v)}" for k, v in memory.items())),
        ("a device sends", f"{format_bytes(sent)} a step"),
        (
            "batch",
            f"micro_batch {settings.micro_batch} x num_microbatches {settings.num_microbatches} x "
            f"{shards} data shards = {global_rows} rows of {config.data.seq_len} tokens "
            f"= {global_rows * config.data.seq_len:,} tokens a step",
        ),
        ("dtypes", ", ".join(f"{name} {dtype}" for name, dtype in dtypes.items())),
        ("optimizer", f"{config.optimizer.name}, {config.optimizer.schedule} schedule"),
        (
            "data",
            f"{config.data.path}: {corpus.train.size:,} tokens to train, {corpus.val.size:,} to "
            + ("validate" if bigram is None else f"validate (byte bigram: {bigram:.3f} bits)"),
        ),
        ("FLOPs", f"{format_count(flops)} a token: 6 N + 12 L d T, as PaLM counts; remat is not"),
        ("output", settings.out_dir),
    ]


def _verdict(val_loss: float, corpus: Corpus) -> str:
    bits = val_loss / math.log(2)
    unit = "byte" if corpus.is_bytes else "token"
    text = f"validation loss {val_loss:.4f} nats = {bits:.3f} bits per {unit}"
    if corpus.bigram_bits is None:
        return text
    gap = corpus.bigram_bits - bits
    side = f"{abs(gap):.3f} bits {'below' if gap >= 0 else 'above'}"
    return f"{text}, {side} a byte bigram model ({corpus.bigram_bits:.3f})"


def _sample(job: Job, graphdef: Any, state: TrainState, key: jax.Array, log: Log) -> str | None:
    """Text that the model writes, printed and returned; None where it was not asked for."""
    setup, corpus, settings = job.setup, job.corpus, job.setup.config.train
    if not settings.sample_length:
        return None
    if not callable(setup.abstract):
        log.print("no sample: the model has no __call__(tokens) that gives logits")
        return None
    prompt = np.frombuffer(settings.sample_prompt.encode() or b"\n", np.uint8).astype(np.int32)
    if not corpus.is_bytes:
        prompt = corpus.val[:1]
    whole = (setup.zero.gather(state.params), state.others)
    params, others = jax.tree.map(lambda x: x.addressable_data(0), whole)
    context, temperature = setup.config.data.seq_len, settings.sample_temperature
    buffer = np.zeros(max(context, prompt.size + settings.sample_length), np.int32)
    buffer[: prompt.size] = prompt
    end = prompt.size + settings.sample_length
    out = generate(graphdef, context, temperature, params, others, buffer, prompt.size, end, key)
    ids = np.asarray(out)[:end]
    text = " ".join(map(str, ids))
    if corpus.is_bytes:
        text = ids.astype(np.uint8).tobytes().decode(errors="replace")
    log.print(f"sample ({settings.sample_length} tokens):\n{text}")
    return text


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def generate(
    graphdef: Any,
    context: int,
    temperature: float,
    params: Any,
    others: Any,
    buffer: jax.Array,
    start: Any,
    end: Any,
    key: jax.Array,
) -> jax.Array:
    """Writes tokens start to end into a buffer, each drawn given the `context` tokens before it.

    Args:
      graphdef, params, others: a causal model, on one device.
      context: tokens the model sees, as many as in training.
      temperature: of the softmax; 0 takes the likeliest token.
      buffer: int32 (n,), n >= context, the prompt in its first `start` places, 1 <= start.
      start, end: places to write, end <= n.
      key: typed PRNG key.
    """

    def write(place: jax.Array, buffer: jax.Array) -> jax.Array:
        model: Any = nnx.merge(graphdef, params, others, copy=True)  # it may change its state
        first = jnp.maximum(place - context, 0)
        window = jax.lax.dynamic_slice(buffer, (first,), (context,))
        logits = model(window[None])[0, place - 1 - first]
        if temperature == 0:
            token = jnp.argmax(logits)
        else:
            token = jax.random.categorical(jax.random.fold_in(key, place), logits / temperature)
        return buffer.at[place].set(token.astype(buffer.dtype))

    return jax.lax.fori_loop(start, end, write, buffer)


def _write_outputs(
    out_dir: Path, settings: TrainConfig, sample: str | None, bigram_bits: float | None
) -> None:
    if sample is not None:
        (out_dir / "sample.txt").write_text(sample, encoding="utf-8")
    if settings.plot:
        label = "byte bigram" if bigram_bits is not None else ""
        metrics, png = out_dir / METRICS_FILE, out_dir / "loss.png"
        plot_loss(metrics, png, baseline=bigram_bits, baseline_label=label)


def _num_params(setup: Setup) -> int:
    return sum(math.prod(x.shape) for x in abstract_leaves(setup.abstract).values())


def _flops_per_token(setup: Setup) -> float:
    """FLOPs of the model; of attention, too, where its arguments tell layers and width."""
    arguments = own_arguments(setup.config.model)
    num_layers, dim = arguments.get("num_layers", 0), arguments.get("embed_dim", 0)
    return train_flops_per_token(
        _num_params(setup), num_layers, setup.config.data.seq_len, embed_dim=dim
    )


def _dtypes(setup: Setup) -> dict[str, str]:
    stored = {str(np.dtype(x.dtype)) for x in abstract_leaves(setup.abstract).values()}
    params = " and ".join(sorted(stored))
    precision = setup.config.precision
    computed = precision.compute_dtype or getattr(setup.abstract, "compute_dtype", None) or params
    return {"params": params, "compute": str(computed), "reduce": precision.reduce_dtype or params}


def _set_cpu_devices(num_devices: int) -> None:
    """Makes virtual CPU devices, unless jax has started; a GPU goes before them."""
    try:
        jax.config.update("jax_num_cpu_devices", num_devices)
    except RuntimeError:  # jax has started
        found = jax.local_device_count()
        if jax.default_backend() == "cpu" and found != num_devices:
            raise ValueError(
                f"[mesh] num_cpu_devices is {num_devices}, but jax runs with {found} CPU devices "
                f"already; use {found}, or start a new process."
            ) from None


def _check_extras(settings: TrainConfig) -> None:
    for name, module in EXTRAS.items():
        if getattr(settings, name) and importlib.util.find_spec(module) is None:
            raise ValueError(
                f"[train] {name} needs {module}, which is not installed; run "
                f"pip install 'jzero[{name}]', or leave {name} out."
            )
