"""Precision in a run: what is stored in which dtype, which steps are skipped, and who says so."""

import io
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from rich.console import Console

from jzero.config import parse_config
from jzero.metrics import read_metrics
from jzero.recipe import make_setup
from jzero.runlog import start_rows
from jzero.state import graphdef_of, init_state
from jzero.train import make_step, prepare, train
from jzero.trees import named_leaves

# What is claimed here is of the loop around the program.
pytestmark = pytest.mark.usefixtures("unoptimized")

SEQ_LEN = 16


class Small(nnx.Module):
    """A bigram model in the dtypes it is given."""

    def __init__(self, param_dtype: str = "float32", compute_dtype: str = "float32", *, rngs: Any):
        self.compute_dtype = compute_dtype
        init = (0.3 * jax.random.normal(rngs.params(), (256, 13))).astype(param_dtype)
        self.table, self.head = nnx.Param(init), nnx.Param(init.T + 0)
        self.norm = nnx.BatchStat(jnp.zeros(()))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.table[...].astype(self.compute_dtype)[tokens]
        self.norm[...] = x.astype(jnp.float32).mean()
        return x @ self.head[...].astype(self.compute_dtype)


class Overflowing(Small):
    """Overflows on the rows that begin with token 0."""

    def loss(self, tokens: jax.Array) -> jax.Array:
        logits = self(tokens[:, :-1]).astype(jnp.float32)
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()
        return jnp.where((tokens[:, 0] == 0).any(), jnp.inf, 1.0) * loss


class Masked(Small):
    """Token 32 does not count."""

    def loss(self, tokens: jax.Array) -> Any:
        logits = self(tokens[:, :-1]).astype(jnp.float32)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        keep = tokens[:, 1:] != 32
        return (losses * keep).sum(), keep.sum()


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("to be or not to be, that is the question.\n" * 90)
    return str(path)


def config_of(kind: type, text: str, out_dir: Any, **sections: dict[str, Any]) -> Any:
    tables: dict[str, dict[str, Any]] = {
        "model": {"target": f"{__name__}:{kind.__name__}"},
        "optimizer": {"name": "adamw", "learning_rate": 0.01},
        "data": {"path": text, "seq_len": SEQ_LEN, "val_fraction": 0.2},
        "train": {"out_dir": str(out_dir), "micro_batch": 1, "num_steps": 4, "log_every": 1,
                  "eval_batches": 1},
    }  # fmt: skip
    for section, table in sections.items():
        tables.setdefault(section, {}).update(table)
    return parse_config(tables)


def dtypes(tree: Any) -> set[str]:
    return {str(x.dtype) for x in jax.tree.leaves(tree) if x.ndim}


@pytest.mark.parametrize(
    ("precision", "stored", "moments", "master", "scale"),
    [
        ({}, "float32", "float32", None, None),
        ({"policy": "bfloat16"}, "bfloat16", "float32", "float32", 1.0),
        ({"policy": "float16"}, "float16", "float32", "float32", "dynamic"),
        ({"policy": "bfloat16", "param_dtype": "float32"}, "float32", "float32", None, 1.0),
        ({"param_dtype": "bfloat16"}, "bfloat16", "float32", "float32", 1.0),
        ({"policy": "bfloat16", "state_dtype": "bfloat16"}, "bfloat16", "bfloat16", "float32", 1.0),
        ({"policy": "bfloat16", "master_dtype": "none"}, "bfloat16", "float32", None, 1.0),
    ],
)
def test_everything_is_stored_in_the_dtype_the_table_says(
    text, tmp_path, precision, stored, moments, master, scale
):
    setup = make_setup(config_of(Small, text, tmp_path, precision=precision))
    state = init_state(setup, jax.random.key(0))
    inner = state.opt_state
    assert dtypes(state.params) == {stored}
    if scale is not None:
        assert float(inner.loss_scale) == (2.0**16 if scale == "dynamic" else scale)
        inner = inner.inner
    if master is not None:
        assert dtypes(inner.master) == {master}
        inner = inner.inner
    assert dtypes((inner[0].mu, inner[0].nu)) == {moments}
    table = dict(start_rows(setup, prepare(setup.config).corpus))["dtypes"]
    said = dict(part.split(" ") for part in table.split(", "))
    assert said["param"] == stored
    assert said["state"] == moments
    assert said["master"] == str(master or "none").replace("None", "none")
    assert said["reduce"] == stored
    assert said["accumulator"] == "float32"


@pytest.mark.parametrize(("stage", "policy"), [(1, "float16"), (2, "bfloat16"), (3, "bfloat16")])
def test_16_bit_training_follows_float32(text, tmp_path, stage, policy):
    def final(precision: dict[str, Any]) -> float:
        config = config_of(
            Small, text, tmp_path, precision=precision, zero={"stage": stage},
            train={"num_steps": 8, "num_microbatches": 2, "micro_batch": 2},
        )  # fmt: skip
        stream = io.StringIO()
        return train(config, Console(file=stream, width=200)).val_loss

    assert final({"policy": policy}) == pytest.approx(final({}), rel=5e-3)


def rows_of(overflows: list[bool], num_rows: int = 8) -> list[np.ndarray]:
    """Batches in which one row of one device overflows, or none."""
    rng = np.random.default_rng(0)
    batches = [rng.integers(1, 256, (num_rows, SEQ_LEN + 1)).astype(np.int32) for _ in overflows]
    for batch, is_bad in zip(batches, overflows, strict=True):
        batch[5, 0] = 0 if is_bad else 1
    return batches


@pytest.mark.parametrize(
    ("stage", "policy"),
    [(0, "float16"), (1, "float16"), (1, "bfloat16"), (2, "float16"), (3, "float16"),
     (3, "bfloat16")],
)  # fmt: skip
def test_an_overflow_on_one_device_changes_nothing_on_any(text, tmp_path, stage, policy):
    config = config_of(
        Overflowing, text, tmp_path, precision={"policy": policy}, zero={"stage": stage}
    )
    setup = make_setup(config)
    graphdef, state = graphdef_of(setup), init_state(setup, jax.random.key(0))
    step = make_step(setup, graphdef)
    lrs = []
    for rows, is_bad in zip(rows_of([False, True, False]), [False, True, False], strict=True):
        before = jax.tree.map(np.asarray, (state.params, state.others, state.opt_state.inner))
        state, metrics = jax.block_until_ready(step(state, setup.place(rows), jax.random.key(0)))
        after = (state.params, state.others, state.opt_state.inner)
        same = [
            x.tobytes() == np.asarray(y).tobytes()
            for x, y in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
        ]
        assert all(same) if is_bad else not any(same)
        lrs.append(float(metrics["lr"]))
    assert int(metrics["skipped_steps"]) == 1
    assert lrs[1] == lrs[2] < lrs[0]  # the schedule did not move on
    assert step._cache_size() == 1


def test_a_skip_is_told_counted_and_written(text, tmp_path, monkeypatch):
    config = config_of(Overflowing, text, tmp_path, precision={"policy": "float16"})
    printed = io.StringIO()
    monkeypatch.setattr("jzero.train._batches", lambda setup, tokens, rows, *_: Bad(rows))
    train(config, Console(file=printed, width=200))
    assert (
        "step 2 skipped: the gradient of head is not finite; the loss scale is now 65536; 1 "
        "skipped so far" in printed.getvalue()
    )
    assert "| skipped 2" in printed.getvalue()
    assert "2 of 4 steps were skipped" in printed.getvalue()
    rows = [row for row in read_metrics(tmp_path / "metrics.jsonl") if "loss" in row]
    assert [row["skipped_steps"] for row in rows] == [0, 1, 1, 2]
    assert [row["loss_scale"] for row in rows] == [65536.0, 65536.0, 65536.0, 32768.0]


class Bad:
    """Batches of which each second one overflows, or all of them."""

    def __init__(self, num_rows: int, every: int = 2):
        self.num_rows, self.every = num_rows, every

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> np.ndarray:
        return rows_of([index % self.every == self.every - 1], self.num_rows)[0]

    def __iter__(self) -> Any:
        return (self[i] for i in range(len(self)))


@pytest.mark.parametrize(
    ("precision", "message"),
    [
        ({"policy": "bfloat16", "max_skips_in_a_row": 3},
         "step 3: 3 updates in a row were skipped, since the gradient of head is not finite"),
        ({"policy": "float16", "initial_scale_power": 1, "hysteresis": 1},
         "step 2: the gradient of head overflows at the minimum loss scale 1"),
        ({"policy": "float16", "initial_scale_power": 1, "hysteresis": 1, "at_minimum": "stay",
          "max_skips_in_a_row": 2}, "step 3: 2 updates in a row were skipped"),
        ({}, "step 1: the loss is inf; lower optimizer.learning_rate"),
    ],
)  # fmt: skip
def test_a_run_that_skipping_cannot_help_stops_and_names_step_and_leaf(
    text, tmp_path, monkeypatch, precision, message
):
    monkeypatch.setattr("jzero.train._batches", lambda setup, tokens, rows, *_: Bad(rows, every=1))
    config = config_of(Overflowing, text, tmp_path, precision=precision, train={"num_steps": 20})
    with pytest.raises(FloatingPointError, match=message):
        train(config, Console(file=io.StringIO(), width=200))


def test_the_gradient_norm_is_the_same_at_every_stage_size_and_scale(text, tmp_path):
    (rows,) = rows_of([False], 24)
    rows = rows.repeat(1, axis=0)
    norms = []
    for stage, num_devices, precision in (
        (0, 8, {}), (1, 8, {}), (2, 8, {}), (3, 8, {}), (2, 3, {}), (3, 1, {}),
        (3, 8, {"loss_scale": "dynamic"}), (1, 8, {"loss_scale": 128.0}),
    ):  # fmt: skip
        config = config_of(
            Small, text, tmp_path, precision=precision, zero={"stage": stage},
            optimizer={"clip_norm": 0.01}, train={"micro_batch": 24 // num_devices},
        )  # fmt: skip
        with pytest.MonkeyPatch.context() as patch:
            devices = jax.devices()[:num_devices]
            patch.setattr("jzero.mesh.jax.devices", lambda devices=devices: devices)
            setup = make_setup(config)
        graphdef, state = graphdef_of(setup), init_state(setup, jax.random.key(0))
        step = make_step(setup, graphdef)
        metrics = jax.block_until_ready(step(state, setup.place(rows), jax.random.key(0))[1])
        norms.append(float(metrics["grad_norm"]))
    assert norms[0] > 0.01  # before clipping
    np.testing.assert_allclose(norms, norms[0], rtol=1e-5)


def test_a_loss_with_a_weight_trains_and_is_validated_over_what_counts(text, tmp_path):
    config = config_of(Masked, text, tmp_path, train={"num_microbatches": 2, "eval_batches": 2})
    setup = make_setup(config)
    graphdef, state = graphdef_of(setup), init_state(setup, jax.random.key(0))
    (rows,) = rows_of([False], 16)
    rows[: len(rows) // 2] = 32  # a whole microbatch that does not count
    rows[0, 3:] = 40
    step = make_step(setup, graphdef)
    weights = {
        n: np.asarray(x) for n, x in named_leaves(setup.zero.gather(state.params))[0].items()
    }
    metrics = jax.block_until_ready(step(state, setup.place(rows), jax.random.key(0))[1])
    logits = weights["table"][rows[:, :-1]] @ weights["head"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, rows[:, 1:])
    keep = rows[:, 1:] != 32
    assert float(metrics["loss"]) == pytest.approx(float((losses * keep).sum() / keep.sum()))
    assert train(config, Console(file=io.StringIO(), width=200)).val_loss > 0


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"precision": {"policy": "bfloat16", "hysteresis": 3}},
         r"\[precision\] hysteresis has no effect"),
        ({"precision": {"policy": "bfloat16", "param_dtype": "float32", "master_dtype": "float32"}},
         r"\[precision\] master_dtype float32 is not wider than param_dtype float32; leave"),
        ({"precision": {"policy": "float16", "loss_scale_window": 0}}, "loss_scale_window 0 must"),
        ({"zero": {"stage": 1, "cut_layers": True}}, "cut_layers=True, but no parameters are"),
    ],
)  # fmt: skip
def test_options_that_do_not_go_together_are_refused(text, tmp_path, sections, message):
    with pytest.raises(ValueError, match=message):
        make_setup(config_of(Small, text, tmp_path, **sections))


def test_weights_kept_for_a_step_train_alike_and_the_table_says_so(text, tmp_path):
    losses = {}
    for keep in (False, True):
        config = config_of(
            Small, text, tmp_path, zero={"stage": 3, "keep_gathered": keep},
            train={"num_microbatches": 2},
        )  # fmt: skip
        printed = io.StringIO()
        losses[keep] = train(config, Console(file=printed, width=200)).val_loss
        assert ("gathered 26.0 KiB" in printed.getvalue()) == keep
    assert losses[True] == pytest.approx(losses[False], rel=1e-6)
