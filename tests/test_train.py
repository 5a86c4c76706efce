"""The main job: the same curve at every stage, what is written, and what stops it."""

import io
import math
import random
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from rich.console import Console

from jzero.config import TrainConfig, optimizer_section, parse_config
from jzero.generate import Model, Rule, generate
from jzero.metrics import MetricsWriter, read_metrics
from jzero.rates import decay_mask, make_optimizer
from jzero.recipe import make_loss_fn, make_setup
from jzero.runlog import open_writer, start_rows
from jzero.state import graphdef_of, init_state
from jzero.tokens import write_nanogpt_bin
from jzero.train import EXTRAS, Result, make_step, prepare, train
from models.gpt2 import GPT2

# What is claimed here is of the loop around the program.
pytestmark = pytest.mark.usefixtures("unoptimized")

TINY: dict[str, dict[str, Any]] = {
    "model": {"num_positions": 16, "num_layers": 2, "num_heads": 2, "embed_dim": 16,
              "vocab_size": 256},
    "optimizer": {"learning_rate": 1e-2, "eps": 1e-4, "clip_norm": 1.0, "weight_decay": 0.1},
    "data": {"seq_len": 16, "val_fraction": 0.2},
    "train": {"num_steps": 4, "micro_batch": 1, "log_every": 2, "eval_batches": 2},
}  # fmt: skip
# Float32 sums in another order: the curve over a few steps, of losses near 5.
CURVE_TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> str:
    """4000 bytes of words that repeat: something to learn in a few steps."""
    words = random.Random(0).choices(["alpha ", "beta ", "gamma\n", "delta "], k=700)
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(words)[:4000])
    return str(path)


def tiny(text: str, out_dir: Path, **changes: dict[str, Any]) -> Any:
    tables = {key: dict(table) for key, table in TINY.items()}
    tables["data"]["path"], tables["train"]["out_dir"] = text, str(out_dir)
    for section, table in changes.items():
        tables.setdefault(section, {}).update(table)
    return parse_config(tables)


def run(config: Any) -> tuple[Result, str]:
    stream = io.StringIO()
    result = train(config, Console(file=stream, width=200))
    return result, stream.getvalue()


def rates_of(schedule: optax.Schedule, num_steps: int) -> list[float]:
    return [float(np.asarray(schedule(step))) for step in range(num_steps)]


def curve(out_dir: Path) -> list[float]:
    return [row["loss"] for row in read_metrics(out_dir / "metrics.jsonl") if "loss" in row]


@pytest.fixture(scope="module")
def trained(text, tmp_path_factory) -> tuple[Path, Result, str]:
    """A whole run at stage 2, with everything a run can write."""
    out_dir = tmp_path_factory.mktemp("run")
    extra = {"eval_every": 2, "plot": True, "sample_length": 20, "sample_prompt": "al",
             "profile": "2:3", "num_steps": 5}  # fmt: skip
    return out_dir, *run(tiny(text, out_dir, train=extra))


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_all_stages_give_the_curve_of_stage_2(trained, text, tmp_path, stage):
    result, _ = run(tiny(text, tmp_path, zero={"stage": stage}, train={"num_steps": 5}))
    expected = curve(trained[0])
    assert len(expected) == 5
    assert expected[-1] < expected[0] - 0.5
    np.testing.assert_allclose(curve(tmp_path), expected, rtol=0, atol=CURVE_TOLERANCE)
    assert result.val_loss == pytest.approx(trained[1].val_loss, rel=0, abs=CURVE_TOLERANCE)


def test_metrics_have_every_steps_loss_and_each_validation(trained):
    out_dir, result, _ = trained
    rows = read_metrics(out_dir / "metrics.jsonl")
    losses = [row for row in rows if "loss" in row]
    assert [row["step"] for row in losses] == [1, 2, 3, 4, 5]
    assert all({"grad_norm", "lr"} <= row.keys() for row in losses)
    assert [row["lr"] for row in losses] == pytest.approx(
        rates_of(optax.cosine_decay_schedule(1e-2, 5), 5)
    )
    assert [row["step"] for row in rows if "val_loss" in row] == [2, 4, 5]
    assert all(row["tokens_per_s"] > 0 for row in rows if "step_ms" in row)
    assert [row["step"] for row in rows if "step_ms" in row] == [2, 4, 5]
    assert (result.steps, result.loss) == (5, losses[-1]["loss"])
    assert result.val_loss == rows[-1]["val_loss"]


def test_a_run_writes_curve_sample_and_profile(trained):
    out_dir, result, _ = trained
    assert (out_dir / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (out_dir / "sample.txt").read_text() == result.sample
    assert result.sample is not None
    assert result.sample.startswith("al")
    assert list((out_dir / "profile").rglob("*.xplane.pb"))


def test_a_run_prints_a_table_lines_and_the_bigram_beside_the_loss(trained):
    _, result, printed = trained
    for word in ("replica 1 x data 8 x model 1 = 8 devices", "stage 2 over data", "10,", "a step",
                 "micro_batch 1 x num_microbatches 1 x 8 data shards = 8 rows of 16 tokens",
                 "param float32, compute float32, accumulator float32",
                 "3,200 tokens to train, 800 to validate",
                 "6 N + 12 L d T", "step     4/5 | loss", "| skipped 0 | eta 0:"):  # fmt: skip
        assert word in printed
    assert printed.count("6 N + 12 L d T") == 1
    bits = result.val_loss / math.log(2)
    assert result.bigram_bits is not None
    assert f"{bits:.3f} bits per byte" in printed
    assert f"a byte bigram model ({result.bigram_bits:.3f})" in printed


def test_output_that_is_no_terminal_has_no_escape_codes(trained):
    assert "\x1b" not in trained[2]
    assert "\r" not in trained[2]


def test_the_metrics_of_an_earlier_run_are_kept_beside_the_new_ones(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 7}\n')
    with open_writer(TrainConfig(out_dir=str(tmp_path))) as writer:
        writer.write(1, loss=2.0)
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 1, "loss": 2.0}]
    assert read_metrics(tmp_path / "metrics.previous.jsonl") == [{"step": 7}]


def test_metrics_that_cannot_be_written_are_told_once_and_do_not_end_the_run(
    text, tmp_path, monkeypatch
):
    write = MetricsWriter.write

    def full(self, step, **scalars):
        if int(step) in (2, 3):
            raise OSError(28, "No space left on device")
        write(self, step, **scalars)

    monkeypatch.setattr(MetricsWriter, "write", full)
    result, printed = run(tiny(text, tmp_path))
    assert result.steps == 4
    assert printed.count("METRICS CANNOT BE WRITTEN ([Errno 28] No space left on device)") == 1
    assert {row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")} == {1, 4}


class Counted(nnx.Module):
    """A model without `loss`, that counts its calls in a Variable that is no parameter."""

    def __init__(self, width: int = 8, *, rngs: nnx.Rngs):
        self.table = nnx.Param(0.1 * jax.random.normal(rngs.params(), (256, width)))
        self.head = nnx.Param(0.1 * jax.random.normal(rngs.params(), (width, 256)))
        self.calls = nnx.BatchStat(jnp.zeros(()))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        self.calls[...] = self.calls[...] + 1
        return jnp.take(self.table[...], tokens, axis=0) @ self.head[...]


def of_model(
    kind: type,
    text: str,
    out_dir: Path,
    *,
    rate: float = 1.0,
    stage: int = 2,
    optimizer: str = "sgd",
    **settings: Any,
) -> Any:
    """A configuration for a model of this file, which compiles faster than a GPT-2."""
    tables = {
        "model": {"target": f"{__name__}:{kind.__name__}"},
        "optimizer": {"name": optimizer, "learning_rate": rate},
        "schedule": {"name": "constant"},
        "data": {"path": text, "seq_len": 16, "val_fraction": 0.2},
        "zero": {"stage": stage},
        "train": {"out_dir": str(out_dir), "micro_batch": 1, "log_every": 4} | settings,
    }
    return parse_config(tables)


def losses_of(setup: Any, batches: Any) -> list[float]:
    """Losses of steps on these batches, without a run around them."""
    graphdef, state = graphdef_of(setup), init_state(setup, jax.random.key(0))
    step, losses = make_step(setup, graphdef), []
    for rows in batches:
        state, metrics = step(state, setup.place(rows), jax.random.key(1))
        losses.append(float(metrics["loss"]))
    return losses


def test_a_step_takes_its_state_over_and_compiles_once(text, tmp_path):
    setup = make_setup(of_model(Counted, text, tmp_path, stage=3, optimizer="adamw"))
    graphdef, state = graphdef_of(setup), init_state(setup, jax.random.key(0))
    step = make_step(setup, graphdef)
    key = jax.random.key(1)
    first = state
    shardings = jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), state)
    for _ in range(3):
        state, _ = step(state, setup.place(np.zeros((8, 17), np.int32)), key)
        jax.block_until_ready(state)
    assert jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), state) == shardings
    assert step._cache_size() == 1  # type: ignore
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves((first.params, first.opt_state)))
    assert int(state.step) == 3


def test_a_model_without_a_loss_is_trained_on_its_logits_and_keeps_its_state(text, tmp_path):
    config = of_model(Counted, text, tmp_path, num_steps=3, sample_length=3)
    result, _ = run(config)
    assert result.loss < math.log(256)
    assert result.sample is not None
    setup = make_setup(config)
    graphdef, state = graphdef_of(setup), init_state(setup, jax.random.key(0))
    rows, key = np.zeros((8, 17), np.int32), jax.random.key(1)
    state, _ = make_step(setup, graphdef)(state, setup.place(rows), key)
    assert float(jax.tree.leaves(state.others)[0]) == 1.0


def test_microbatches_give_the_curve_of_rows_that_are_together(text, tmp_path):
    batches = np.random.default_rng(0).integers(0, 256, (3, 16, 17), np.int32)
    together = losses_of(make_setup(of_model(Counted, text, tmp_path, micro_batch=2)), batches)
    apart = losses_of(make_setup(of_model(Counted, text, tmp_path, num_microbatches=2)), batches)
    np.testing.assert_allclose(apart, together, rtol=0, atol=CURVE_TOLERANCE)


def test_the_model_is_called_once_for_each_microbatch(text, tmp_path):
    setup = make_setup(of_model(Counted, text, tmp_path, num_microbatches=2))
    graphdef, state = graphdef_of(setup), init_state(setup, jax.random.key(0))
    rows = setup.place(np.zeros((16, 17), np.int32))
    state, _ = make_step(setup, graphdef)(state, rows, jax.random.key(1))
    assert float(jax.tree.leaves(state.others)[0]) == 2.0


def test_a_loss_that_is_not_finite_stops_the_run_naming_step_and_loss(text, tmp_path):
    config = of_model(Counted, text, tmp_path, num_steps=9, rate=1e30)
    with pytest.raises(
        FloatingPointError, match=r"step 2: the loss is (nan|inf); lower optimizer\."
    ):
        run(config)
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows if "loss" in row] == [1, 2]


class Noisy(nnx.Module):
    """A model whose loss is drawn from its key."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.scale = nnx.Param(jnp.ones((8,)))

    def loss(self, tokens: jax.Array, *, key: jax.Array) -> jax.Array:
        return jax.random.uniform(key) * self.scale[...].mean() + 0.0 * tokens.sum()


def test_keys_differ_from_step_to_step_and_from_run_to_run_not(text, tmp_path):
    setup = make_setup(of_model(Noisy, text, tmp_path, rate=1e-9))
    rows = np.zeros((2, 8, 17), np.int32)
    first, second = losses_of(setup, rows)
    assert abs(first - second) > 1e-4
    assert losses_of(setup, rows) == [first, second]


def test_the_loss_of_logits_is_the_cross_entropy_of_the_next_token():
    model = Counted(rngs=nnx.Rngs(0))
    tokens = jnp.array([[1, 2, 3], [4, 5, 6]])
    logits = model(tokens[:, :-1])
    logs = jax.nn.log_softmax(logits)
    expected = -np.mean([logs[0, 0, 2], logs[0, 1, 3], logs[1, 0, 5], logs[1, 1, 6]])
    loss = make_loss_fn(Counted, lambda *_: None)(model, tokens)
    assert float(loss) == pytest.approx(float(expected), abs=1e-6)


class Silent(nnx.Module):
    """A model with a loss and nothing to sample from."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.scale = nnx.Param(jnp.ones((8,)))

    def loss(self, tokens: jax.Array) -> jax.Array:
        return jnp.square(self.scale[...]).sum() + 0.0 * tokens.sum()


def test_a_model_without_logits_gives_no_sample_and_says_so(text, tmp_path):
    config = of_model(Silent, text, tmp_path, num_steps=1, sample_length=3)
    result, printed = run(config)
    assert result.sample is None
    assert "no sample: the model has no __call__" in printed


def test_a_run_reads_the_rows_of_all_microbatches(text, tmp_path):
    result, printed = run(of_model(Silent, text, tmp_path, num_steps=1, num_microbatches=2))
    assert "x num_microbatches 2 x 8 data shards = 16 rows of 16 tokens" in printed
    assert math.isfinite(result.loss)


class Sums(nnx.Module):
    """The token after others is their sum plus a parameter, modulo 7."""

    def __init__(self):
        self.offset = nnx.Param(jnp.array([1]))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        sums = jnp.cumsum(tokens, axis=1) + self.offset[...][None, :]
        return jax.nn.one_hot(sums % 7, 7)


@pytest.mark.parametrize(("size", "start"), [(40, 1), (40, 20), (16, 5)])
@pytest.mark.parametrize("temperature", [0.0, 1e-3])
def test_a_sample_is_drawn_given_the_tokens_of_one_context(size, start, temperature):
    graphdef, params, others = nnx.split(Sums(), nnx.Param, ...)
    expected = [(3 * i) % 7 for i in range(start)]
    model, rule = Model(graphdef, params, others), Rule(temperature, None)
    prompt, key = np.array([expected], np.int32), jax.random.key(0)
    (out,) = generate(model, prompt, size - start, context=16, rule=rule, key=key)
    while len(expected) < size:
        expected.append((sum(expected[-16:]) + 1) % 7)
    assert out.tolist() == expected


def test_tokens_that_are_no_bytes_are_sampled_as_ids(tmp_path):
    path = tmp_path / "tokens.bin"
    write_nanogpt_bin(path, np.arange(2000) % 50)
    config = of_model(Counted, str(path), tmp_path, num_steps=1, sample_length=4)
    result, printed = run(config)
    assert result.bigram_bits is None
    assert result.sample is not None
    assert len(result.sample.split()) == 5
    assert "bits per token" in printed
    assert "bigram" not in printed


REFUSED = [
    ("data", {"seq_len": 17}, r"seq_len 17 is longer than the model's num_positions 16; set"),
    ("data", {"path": "/nowhere"}, r"'/nowhere' does not exist; give a text file"),
    ("data", {"val_path": "/nowhere"}, r"'/nowhere' does not exist; give a text file"),
    ("data", {"max_bytes": 20}, r"seq_len 16 needs at least 17 tokens and the data has"),
    ("model", {"vocab_size": 100}, r"token id \d+ at position \d+ is beyond vocab_size 100; set"),
    ("model", {"num_heads": 3}, r"embed_dim 16 is not divisible by num_heads 3; use 15 or 18"),
    ("mesh", {"data": 3}, r"data 3 x model 1 = 3 devices, but there are 8; make the product 8"),
    ("mesh", {"num_cpu_devices": 4}, r"num_cpu_devices is 4, but jax runs with 8 CPU devices"),
    ("zero", {"axes": ["rows"]}, r"axes=\('rows',\) must be different names among the mesh axes"),
    ("model", {"target": "builtins:dict"}, r"makes a dict, not a flax.nnx.Module; name a class"),
]  # fmt: skip


@pytest.mark.parametrize(("section", "change", "message"), REFUSED)
def test_what_cannot_be_trained_is_refused_before_any_compile(
    text, tmp_path, section, change, message
):
    tables = {key: dict(table) for key, table in TINY.items()}
    tables["data"]["path"], tables["train"]["out_dir"] = text, str(tmp_path / "out")
    if "target" in change:
        tables["model"] = {}
    tables.setdefault(section, {}).update(change)
    with pytest.raises(ValueError, match=message):
        prepare(parse_config(tables))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", EXTRAS)
def test_an_extra_that_is_missing_is_refused_before_training(text, tmp_path, monkeypatch, name):
    monkeypatch.setitem(EXTRAS, name, "no_such_module")
    value = "project" if name == "wandb" else True
    with pytest.raises(
        ValueError, match=rf"{name} needs no_such_module.*pip install 'jzero\[{name}"
    ):
        prepare(tiny(text, tmp_path, train={name: value}))


def test_weight_decay_is_for_the_matrices_of_a_stacked_layer_alone():
    model = nnx.eval_shape(
        lambda: GPT2(
            vocab_size=7, num_positions=4, num_layers=2, num_heads=1, embed_dim=4, rngs=nnx.Rngs(0)
        )
    )
    mask = nnx.to_pure_dict(decay_mask(nnx.state(model, nnx.Param)))
    names = {
        ".".join(map(str, path)): flag for path, flag in jax.tree_util.tree_leaves_with_path(mask)
    }
    decayed = {name for name, flag in names.items() if flag}
    assert len(decayed) == 6
    assert all("weight" in name and "ln_" not in name for name in decayed)
    assert len(names) == 16


@pytest.mark.parametrize("name", ["adamw", "lion", "lamb", "adafactor", "sgd", "lars"])
def test_optimizers_of_optax_decay_by_the_mask(name):
    has_decay = name in ("adamw", "lion", "lamb", "lars")
    kind = optimizer_section(name)
    optimizer = kind(name=name, learning_rate=0.1, weight_decay=0.1 if has_decay else 0.0)
    tx = make_optimizer(optimizer, optax.constant_schedule(0.1))
    params = {"ln": {"weight": jnp.ones((2, 3))}, "fc": {"weight": jnp.ones((2, 3))}}
    updates: Any
    updates, _ = tx.update(jax.tree.map(jnp.zeros_like, params), tx.init(params), params)
    assert not np.any(updates["ln"]["weight"])
    assert bool(np.any(updates["fc"]["weight"])) == has_decay


def test_gradients_are_clipped_where_a_norm_is_given():
    params = {"weight": jnp.zeros((2, 2))}
    grads = {"weight": jnp.full((2, 2), 10.0)}
    for clip_norm, norm in ((0.0, 20.0), (0.5, 0.5)):
        config = optimizer_section("sgd")(name="sgd", learning_rate=1.0, clip_norm=clip_norm)
        tx = make_optimizer(config, optax.constant_schedule(1.0))
        updates, _ = tx.update(grads, tx.init(params), params)
        assert float(optax.tree.norm(updates)) == pytest.approx(norm)


def test_the_start_table_has_the_bytes_of_the_report(text, tmp_path):
    job = prepare(tiny(text, tmp_path, zero={"stage": 3}))
    rows = dict(start_rows(job.setup, job.corpus))
    report = job.setup.zero.report(job.setup.abstract, job.setup.tx)
    assert report.params_bytes == 4 * sum(
        -(-leaf.size // 8) for leaf in jax.tree.leaves(nnx.state(job.setup.abstract, nnx.Param))
    )
    assert f"parameters {report.params_bytes / 1024:.1f} KiB" in rows["a device holds"]
    assert rows["ZeRO"] == "stage 3 over data"
