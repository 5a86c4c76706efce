"""A run that goes on from a checkpoint is the run that was never interrupted."""

import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jzero.checkpoint import damaged
from jzero.data import open_corpus
from jzero.rates import make_momentum, make_optimizer, make_schedule
from jzero.recipe import make_setup
from jzero.resume import find_start
from jzero.saving import SaveError
from jzero.source import whole
from jzero.train import _batches, prepare
from jzero.trees import named_leaves
from jzero.weights import open_weights
from models.gpt2 import GPT2
from tests.runs import TINY, assert_same, curve, run, saved, tiny, write_text

pytestmark = pytest.mark.usefixtures("unoptimized")

FIXTURE = Path(__file__).parent / "data" / "tiny_gpt2"
TARGET = "models.gpt2:GPT2"
CURVE_TOLERANCE = 1e-5  # float32 sums in another order, of losses near 5
FLOAT16 = {"policy": "float16", "initial_scale_power": 24, "loss_scale_window": 3, "hysteresis": 1}


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> str:
    return write_text(tmp_path_factory.mktemp("text"))


def interrupted(out_dir):
    """The run as it was after step 10, before anything of step 11 was written."""
    shutil.rmtree(out_dir / "checkpoints" / "20")


@pytest.mark.parametrize(
    ("stage", "precision"),
    [(0, {}), (1, {}), (2, {}), (3, {}), (2, FLOAT16), (3, {"policy": "bfloat16"})],
    ids=["stage 0", "stage 1", "stage 2", "stage 3", "float16", "bfloat16 stage 3"],
)
def test_20_steps_equal_10_a_restart_and_10_bitwise(text, tmp_path, stage, precision):
    config = tiny(text, tmp_path, zero={"stage": stage}, precision=precision)
    run(config)
    losses, (_, state) = curve(tmp_path), saved(tmp_path)
    assert len(losses) == 20
    interrupted(tmp_path)
    _, printed = run(config)
    assert "goes on from step 10" in printed
    assert "set differently" not in printed
    assert curve(tmp_path) == losses
    assert_same(saved(tmp_path)[1], state)
    assert damaged(saved(tmp_path)[0]) == []
    if precision is FLOAT16:
        assert state["loss_scale.skipped_steps"] > 0


def test_data_goes_on_where_it_was_also_with_another_batch(text, tmp_path):
    """Each row of the data is read once an epoch, whatever the batch was before and after."""
    config = tiny(text, tmp_path)
    run(config)
    interrupted(tmp_path)
    assert saved(tmp_path)[0].manifest.info["num_rows"] == 10 * 16
    config = tiny(text, tmp_path, train={"num_microbatches": 1, "num_steps": 12})
    job = prepare(config)
    assert job.start.num_rows == 160
    batches = _batches(job.setup, job.corpus.train, 8, job.start.num_rows)
    before = _batches(job.setup, job.corpus.train, 16)
    np.testing.assert_array_equal(np.concatenate([batches[0], batches[1]]), before[10])
    job.checkpoints.close()
    _, printed = run(config)
    assert "set differently than when it was saved: train.num_microbatches 1 (was 2)" in printed
    assert "train.num_steps 12 (was 20)" in printed
    assert saved(tmp_path)[0].manifest.info["num_rows"] == 160 + 2 * 8


def test_a_run_that_is_done_trains_no_further_and_is_evaluated_alike(text, tmp_path):
    first, _ = run(tiny(text, tmp_path, train={"num_steps": 10}))
    second, printed = run(tiny(text, tmp_path, train={"num_steps": 10}))
    assert "nothing is left to train: 10 of 10 steps are done" in printed
    assert second.val_loss == first.val_loss
    assert len(curve(tmp_path)) == 10


def test_resume_never_refuses_what_another_run_saved_and_must_needs_something(text, tmp_path):
    never = {"resume": "never"}
    run(tiny(text, tmp_path, train={"num_steps": 1}, checkpoint=never))
    with pytest.raises(ValueError, match=r"never, and .* holds the checkpoints of a run, .*step 1"):
        prepare(tiny(text, tmp_path, checkpoint=never))
    with pytest.raises(ValueError, match="is must, and .* holds no checkpoint"):
        prepare(tiny(text, tmp_path / "new", checkpoint={"resume": "must"}))
    assert not (tmp_path / "new").exists()


def test_a_failed_save_is_no_success_of_the_run(text, tmp_path, monkeypatch):
    def full(directory, arrays):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("jzero.checkpoint.write_arrays", full)
    monkeypatch.setattr("jzero.saving.time.sleep", lambda _: None)
    with pytest.raises(SaveError, match="step 2: saving failed .*No space left"):
        run(tiny(text, tmp_path, train={"num_steps": 2}))


def test_two_runs_cannot_write_to_one_directory(text, tmp_path):
    job = prepare(tiny(text, tmp_path))
    with pytest.raises(ValueError, match="is in use by another run"):
        prepare(tiny(text, tmp_path))
    job.checkpoints.close()


PLAIN = {"dropout": 0.0}
SHORT = {"num_steps": 2, "num_microbatches": 1}


@pytest.fixture(scope="module")
def source(text, tmp_path_factory):
    """A run whose weights others start from."""
    out_dir = tmp_path_factory.mktemp("source")
    run(tiny(text, out_dir, train=SHORT, model=PLAIN))
    return out_dir


class TestWeightsOnly:
    """From the weights of another run, with a fresh optimizer."""

    def start(self, text, tmp_path, source, stage, precision):
        model = PLAIN | {"init_from": str(source / "checkpoints")}
        return tiny(
            text, tmp_path, train=SHORT | {"seed": 3}, model=model, zero={"stage": stage},
            precision=precision, optimizer={"eps": 1e-3},
        )  # fmt: skip

    def test_the_second_step_too_is_that_of_plain_optax_on_one_device(self, text, tmp_path, source):
        config = self.start(text, tmp_path, source, 3, {})
        _, printed = run(config)
        assert "starts from the weights in" in printed
        params, graphdef = weights(source), nnx.split(nnx.eval_shape(small))[0]
        tx = make_optimizer(config.optimizer, make_schedule(config), make_momentum(config))
        opt_state, losses = tx.init(params), []
        batches = _batches(make_setup(config), open_corpus(config.data, config.model).train, 8)
        for step in range(2):
            loss, grads = jax.value_and_grad(
                lambda p, step=step: nnx.merge(graphdef, p).loss(jnp.asarray(batches[step]))
            )(params)
            updates, opt_state = tx.update(grads, opt_state, params)
            params = optax.apply_updates(params, updates)
            losses.append(float(loss))
        np.testing.assert_allclose(curve(tmp_path), losses, rtol=0, atol=CURVE_TOLERANCE)
        (_, got), want = saved(tmp_path), named_leaves(params)[0]
        for name, x in want.items():
            atol = 1e-3 * config.optimizer.learning_rate
            np.testing.assert_allclose(got[f"params.{name}"], x, rtol=0, atol=atol)

    def test_a_master_copy_is_the_weights_unrounded_and_moves_from_there(
        self, text, tmp_path, source
    ):
        config = self.start(text, tmp_path, source, 2, {"policy": "bfloat16"})
        start = find_start(make_setup(config), lambda path: open_weights(path, target=TARGET))
        state, _ = start.make(jax.random.key(0), jax.random.key(0))
        want = saved(source)[1]
        master = named_leaves(state.opt_state.inner.master)[0]
        for name, x in master.items():
            logical = tuple(slice(0, n) for n in want[f"params.{name}"].shape)
            np.testing.assert_array_equal(np.asarray(x)[logical], want[f"params.{name}"])
        run(config)
        _, got = saved(tmp_path)
        rate = config.optimizer.learning_rate
        for name in master:
            before, after = want[f"params.{name}"], got[f"master.{name}"]
            assert 0 < np.abs(after - before).max() < 3 * rate, name
            rounded = after.astype(got[f"params.{name}"].dtype)
            np.testing.assert_array_equal(got[f"params.{name}"], rounded)

    def test_what_else_an_optimizer_keeps_of_the_parameters_is_unrounded_too(
        self, text, tmp_path, source
    ):
        model = PLAIN | {"init_from": str(source)}
        config = tiny(text, tmp_path, model=model, precision={"policy": "bfloat16"},
                      schedule={"name": "constant"},
                      optimizer={"name": "schedule_free_adamw", "clip_norm": 0.0,
                                 "weight_decay": 0.0})  # fmt: skip
        start = find_start(make_setup(config), lambda path: open_weights(path, target=TARGET))
        state, _ = start.make(jax.random.key(0), jax.random.key(0))
        leaves = named_leaves(state.opt_state)[0]
        (name,) = (name for name in leaves if name.endswith("z.wpe.weight"))
        want = saved(source)[1]["params.wpe.weight"]
        np.testing.assert_array_equal(np.asarray(leaves[name])[:16, :16], want)
        assert leaves[name].dtype == jnp.float32

    def test_weights_of_another_function_with_the_same_shapes_are_refused(
        self, text, tmp_path, source
    ):
        model = PLAIN | {"init_from": str(source), "num_heads": 4}
        with pytest.raises(ValueError, match=r"num_heads is 4 \(it was 2\); give it the"):
            prepare(tiny(text, tmp_path, model=model))
        model = PLAIN | {"init_from": str(source), "remat": "none"}  # the same function
        prepare(tiny(text, tmp_path, model=model)).checkpoints.close()

    def test_hugging_face_files_are_started_from_at_once(self, text, tmp_path):
        sizes = {"vocab_size": 257, "num_positions": 64, "embed_dim": 64, "num_heads": 4}
        model = PLAIN | sizes | {"init_from": str(FIXTURE)}
        config = tiny(text, tmp_path, model=model, train=SHORT, zero={"stage": 3})
        run(config)
        loss = nnx.jit(lambda model, rows: model.loss(rows))
        arguments = {key: x for key, x in model.items() if key != "init_from"}
        like = nnx.eval_shape(lambda: GPT2(**{**arguments, "num_layers": 2}, rngs=nnx.Rngs(0)))
        source = open_weights(str(FIXTURE), target=TARGET).source
        leaves, treedef = named_leaves(nnx.state(like, nnx.Param))
        read = [source.read(f"params.{n}", whole(x.shape)) for n, x in leaves.items()]
        whole_model = nnx.merge(nnx.split(like)[0], jax.tree.unflatten(treedef, read))
        train_data = open_corpus(config.data, config.model).train
        rows = jnp.asarray(_batches(make_setup(config), train_data, 8)[0])
        want = float(loss(whole_model, rows))
        assert curve(tmp_path)[0] == pytest.approx(want, rel=0, abs=CURVE_TOLERANCE)
        other = config.__class__(**{**vars(config), "model": tiny(
            text, tmp_path, model=model | {"num_heads": 2}).model})  # fmt: skip
        with pytest.raises(ValueError, match=r"num_heads is 2 \(it was 4\)"):
            find_start(make_setup(replaced_dir(other, tmp_path / "new")), opener)

    def test_weights_of_another_size_are_refused_with_every_array_that_differs(
        self, text, tmp_path, source
    ):
        config = self.start(text, tmp_path, source, 2, {})
        config = tiny(text, tmp_path, model={"init_from": config.model.init_from, "embed_dim": 32})
        with pytest.raises(ValueError, match="does not fit models.gpt2:GPT2") as error:
            prepare(config)
        assert "params.wte.weight is 256x16, and 256x32 is wanted" in str(error.value)
        assert "Give [model] the sizes of those weights" in str(error.value)

    def test_a_path_without_weights_is_refused(self, text, tmp_path):
        config = tiny(text, tmp_path, model={"init_from": str(tmp_path / "nothing")})
        with pytest.raises(
            ValueError, match="there are no weights at .*nothing; name a checkpoint"
        ):
            prepare(config)


def test_a_resume_with_another_number_of_heads_is_refused(text, tmp_path):
    run(tiny(text, tmp_path, train=SHORT))
    with pytest.raises(ValueError, match=r"another one than that of .*num_heads is 4 \(it was 2"):
        prepare(tiny(text, tmp_path, model={"num_heads": 4}))


def test_data_that_changed_under_its_name_is_told(tmp_path):
    text = write_text(tmp_path)
    run(tiny(text, tmp_path / "run", train=SHORT))
    with open(text, "a") as file:
        file.write("more of it " * 40)
    config = tiny(text, tmp_path / "run", train=SHORT | {"num_steps": 3, "profile": "1:3"})
    _, printed = run(config)  # a trace that would have begun before is none, and no error
    assert "THE DATA IS NOT WHAT IT WAS: 3,200 tokens then" in printed


def opener(path):
    return open_weights(path, target=TARGET)


def replaced_dir(config, out_dir):
    train = config.train.__class__(**{**vars(config.train), "out_dir": str(out_dir)})
    return config.__class__(**{**vars(config), "train": train})


def weights(out_dir):
    """The parameters of a run's checkpoint as the model has them."""
    _, arrays = saved(out_dir)
    leaves, treedef = named_leaves(nnx.state(nnx.eval_shape(small), nnx.Param))
    return jax.tree.unflatten(treedef, [jnp.asarray(arrays[f"params.{name}"]) for name in leaves])


def small():
    sizes = {k: v for k, v in TINY["model"].items() if k != "dropout"}
    return GPT2(**sizes, rngs=nnx.Rngs(0))
