"""A checkpoint knows nothing of N, of the stage, or of the precision it was trained in."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jzero.checkpoint import Checkpoints
from jzero.mesh import make_mesh
from jzero.recipe import make_setup
from jzero.restore import fit, places_of, source_name, state_pieces, stored_names
from jzero.resume import find_start
from jzero.state import state_parts
from jzero.zero import AtRest, Zero
from tests.runs import assert_same, run, saved, tiny, write_text

pytestmark = pytest.mark.usefixtures("unoptimized")

# No dim of the token table, and no other, that 8 or 7 divides: every leaf is padded.
UNEVEN = {"vocab_size": 257, "embed_dim": 18}
SHORT = {"num_steps": 2, "num_microbatches": 1}
SAVES = {"every": 2}
BFLOAT16, FLOAT16 = {"policy": "bfloat16"}, {"policy": "float16", "initial_scale_power": 12}


def mesh(num_devices):
    return make_mesh(devices=jax.devices()[:num_devices])


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("text"))


def config(text, out_dir, stage, precision, **model):
    return tiny(
        text, out_dir, zero={"stage": stage}, precision=precision, model=UNEVEN | model,
        train=SHORT, checkpoint=SAVES,
    )  # fmt: skip


@pytest.fixture(scope="module", params=[{}, BFLOAT16, FLOAT16], ids=["32", "b16", "16"])
def trained(request, text, tmp_path_factory):
    """Two steps at N = 8, stage 3; the folder and the precision."""
    out_dir = tmp_path_factory.mktemp("run")
    run(config(text, out_dir, 3, request.param))
    return out_dir, request.param


def restored(text, out_dir, num_devices, stage, precision):
    """What the run has after it went on elsewhere, by stored name, logical; and the notes."""
    setup = make_setup(config(text, out_dir, stage, precision), mesh(num_devices))
    start = find_start(setup, lambda path: pytest.fail(path))
    parts = state_parts(*start.make(jax.random.key(9), jax.random.key(9)))
    for name, place in places_of(setup.zero, parts).items():
        rest = place.at_rest
        assert rest.sharding.device_set == set(jax.devices()[:num_devices]), name
    out = {}
    for name, pieces in state_pieces(parts, places_of(setup.zero, parts)).items():
        out[name] = np.zeros(pieces.leaf.shape, pieces.leaf.dtype)
        for index, part in pieces.parts:
            out[name][index] = part
    return out, start


@pytest.mark.parametrize(
    ("num_devices", "stage"), [(7, 1), (1, 0), (5, 3)], ids=["N=7 1", "N=1 0", "N=5 3"]
)
def test_any_number_of_devices_and_any_stage_restore_every_bit(text, trained, num_devices, stage):
    out_dir, precision = trained
    got, start = restored(text, out_dir, num_devices, stage, precision)
    assert_same(got, saved(out_dir)[1])
    assert (start.step, start.num_rows) == (2, 16)


@pytest.mark.parametrize("precision", [{}, BFLOAT16, FLOAT16], ids=["32", "b16", "16"])
def test_another_precision_keeps_master_moments_and_counts_and_casts_the_parameters(
    text, trained, precision
):
    out_dir, before = trained
    got, _ = restored(text, out_dir, 4, 2, precision)
    want = saved(out_dir)[1]
    dtype = jnp.dtype(precision.get("policy", "float32"))
    for name, x in want.items():
        if name.startswith("optimizer.") or name in ("run.step", "run.rng"):
            assert_same({name: got[name]}, {name: x})
        if name.startswith("params."):
            leaf = name.removeprefix("params.")
            wide = want.get(f"master.{leaf}", x)
            kept = got.get(f"master.{leaf}", got[name])
            assert_same({name: kept}, {name: wide})
            recast = x if x.dtype == dtype else wide.astype(dtype)
            assert_same({name: got[name]}, {name: recast})
    if precision != before and "policy" in precision:
        assert got["loss_scale.loss_scale"] == (1.0 if precision is BFLOAT16 else 4096.0)


def test_another_model_lists_every_array_that_differs_and_nothing_is_overwritten(text, trained):
    out_dir, precision = trained
    before = {path: path.stat().st_mtime_ns for path in out_dir.rglob("*")}
    changed = config(text, out_dir, 3, precision, num_positions=24, num_layers=3)
    setup = make_setup(changed, mesh(4))
    with pytest.raises(ValueError, match="is of another model or optimizer") as error:
        find_start(setup, lambda path: pytest.fail(path))
    assert "another shape: params.wpe.weight is 16x18, and 24x18 is wanted" in str(error.value)
    assert "params.h.attn.c_attn.weight is 2x18x54, and 3x18x54 is wanted" in str(error.value)
    assert "optimizer." in str(error.value)
    assert "Nothing was changed" in str(error.value)
    assert {path: path.stat().st_mtime_ns for path in out_dir.rglob("*")} == before


def test_another_optimizer_lists_what_is_missing_and_unexpected(text, trained):
    out_dir, precision = trained
    changed = tiny(text, out_dir, precision=precision, model=UNEVEN, checkpoint=SAVES,
                   optimizer={"name": "lion", "clip_norm": 0.0})  # fmt: skip
    with pytest.raises(ValueError, match=r"unexpected: optimizer\..*nu\.") as error:
        find_start(make_setup(changed, mesh(4)), lambda path: pytest.fail(path))
    assert "missing: optimizer." in str(error.value)


def rest(shape, dtype):
    return AtRest(shape, jax.ShapeDtypeStruct(shape, dtype))


def leaf(shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


def test_parameters_of_the_stored_dtype_are_read_as_they_are_others_from_the_master():
    found = {"params.w": leaf((2,), "bfloat16"), "master.w": leaf((2,))}
    assert source_name("params.w", jnp.bfloat16, found) == "params.w"
    assert source_name("params.w", jnp.float16, found) == "master.w"
    assert source_name("master.w", jnp.float32, found) == "master.w"


def test_a_master_made_of_narrow_parameters_and_moments_in_another_dtype_are_told_of():
    places = {"params.w": rest((2,), "float32"), "master.w": rest((2,), "float32"),
              "optimizer.mu.w": rest((2,), "bfloat16")}  # fmt: skip
    found = {"params.w": leaf((2,), "bfloat16"), "optimizer.mu.w": leaf((2,))}
    notes = " ".join(fit(places, found).notes)
    assert "made of bfloat16 parameters" in notes
    assert "float32 to bfloat16" in notes


def test_an_integer_is_not_taken_for_a_number():
    with pytest.raises(ValueError, match=r"another dtype: optimizer.count is float32, and int32"):
        fit({"optimizer.count": rest((), "int32")}, {"optimizer.count": leaf(())})


def test_names_do_not_depend_on_what_is_wrapped_around_the_optimizer(text):
    names = []
    for precision in ({}, BFLOAT16, FLOAT16):
        setup = make_setup(config(text, "unused", 0, precision), mesh(1))
        params = nnx.state(setup.abstract, nnx.Param)
        state = jax.eval_shape(setup.tx.init, params)
        stored = stored_names("opt_state", state).values()
        names.append({n for n in stored if n.startswith("optimizer.")})
    assert names[0] == names[1] == names[2]
    assert len(names[0]) > 20


class Counted(nnx.Module):
    """A parameter, a count and a random stream."""

    def __init__(self, rngs):
        self.w = nnx.Param(jax.random.normal(rngs.params(), (13, 7)))
        self.calls = nnx.BatchStat(jnp.float32(3.0))
        self.rngs = rngs


def test_a_script_saves_a_module_and_a_factored_state_and_goes_on_elsewhere(tmp_path):
    tx = optax.adafactor(1e-2, min_dim_size_to_factor=4)
    like = nnx.eval_shape(lambda: Counted(nnx.Rngs(0)))
    here = Zero(mesh(8), 3, like=like)
    model = here.init(lambda: Counted(nnx.Rngs(0)))
    state = here.optimizer(tx).init(nnx.state(model, nnx.Param))
    state = jax.tree.map(lambda x: x + 1, state)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(4, here, params=model, opt_state=state, extra={"seen": jnp.int32(5)})
    checkpoints.wait()
    there = Zero(mesh(3), 1, like=like)
    shapes = jax.eval_shape(there.optimizer(tx).init, nnx.state(like, nnx.Param))
    got = checkpoints.restore(
        there, params=like, opt_state=shapes, extra={"seen": jax.ShapeDtypeStruct((), jnp.int32)}
    )
    assert int(got["extra"]["seen"]) == 5
    want = here.gather(nnx.state(model, nnx.Param))["w"][...]
    np.testing.assert_array_equal(got["params"].w[...], want)
    assert float(got["params"].calls[...]) == 3.0
    keys = [np.asarray(jax.random.key_data(m.rngs.params.key[...])) for m in (got["params"], model)]
    assert keys[0].tolist() == keys[1].tolist()
    for a, b in zip(
        jax.tree.leaves(there.gather(got["opt_state"])),
        jax.tree.leaves(here.gather(state)), strict=True,
    ):  # fmt: skip
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    with pytest.raises(ValueError, match=r"(?s)is of another state: .*missing: extra\.more"):
        checkpoints.restore(there, params=like, opt_state=shapes, extra={"more": jnp.ones(2)})
    checkpoints.close()
