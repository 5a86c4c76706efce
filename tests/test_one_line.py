"""One changed line at stage 1: a step that knows nothing of jzero, on a mesh of the user's own."""

import contextlib
import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jzero

LR = 1e-2
STEPS = 4
LOSS_TOLERANCE = 1e-5  # float32 sums in another order
PARAM_TOLERANCE = 0.02 * LR  # Adam divides rounding by small moments: a share of the step
SHAPES = {"table": (257, 3), "kernel": (13, 7), "bias": (8,), "scale": ()}  # padded, padded, even
MESHES = {
    "explicit": lambda: jax.make_mesh((8,), ("anything",)),
    "automatic": lambda: jax.make_mesh((8,), ("anything",), axis_types=(AxisType.Auto,)),
    "make_mesh": jzero.make_mesh,
    "five devices, explicit": lambda: jax.make_mesh((5,), ("x",), devices=jax.devices()[:5]),
    "five devices": lambda: jzero.make_mesh(devices=jax.devices()[:5]),
}
TRANSFORMS = {
    "adamw": lambda: optax.adamw(LR, eps=1e-4),
    "clipped": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(LR, eps=1e-4)),
}


def make_params():
    rng = np.random.default_rng(0)
    return {k: jnp.asarray(rng.normal(size=s), jnp.float32) for k, s in SHAPES.items()}


def make_batches():
    rng = np.random.default_rng(1)

    def make_batch():
        x, y = (rng.normal(size=(16, n)).astype(np.float32) for n in (13, 7))
        return {"x": x, "y": y, "tokens": rng.integers(257, size=16).astype(np.int32)}

    return [make_batch() for _ in range(STEPS)]


def loss_fn(params, batch):
    out = batch["x"] @ params["kernel"] * params["scale"] - batch["y"]
    side = params["table"][batch["tokens"]].sum(-1, keepdims=True) - params["bias"][None]
    return (out**2).mean() + (side**2).mean()


def make_step(tx):
    """The user's own step, unchanged."""

    @jax.jit
    def train_step(params, opt_state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return train_step


@functools.cache
def train_plain(name):
    """The reference: un-partitioned optax on one device."""
    return train(TRANSFORMS[name](), make_params())


def train(tx, params):
    """Losses of a few steps, waiting for each; then parameters, state, and state as it was born."""
    born, losses = tx.init(params), []
    step, opt_state = make_step(tx), born
    for batch in make_batches():
        params, opt_state, loss = step(params, opt_state, batch)
        losses.append(float(loss))
    return losses, params, opt_state, born


def place(params, mesh, is_placed):
    """The user's parameters: as they were made, or replicated on the mesh."""
    if not is_placed:
        return params
    return jax.device_put(params, NamedSharding(mesh, P()))


def active(mesh, is_set):
    return jax.set_mesh(mesh) if is_set else contextlib.nullcontext()


def assert_same(got, want):
    np.testing.assert_allclose(got[0], want[0], rtol=0, atol=LOSS_TOLERANCE)
    for name in SHAPES:
        assert got[1][name].shape == SHAPES[name]
        np.testing.assert_allclose(got[1][name], want[1][name], rtol=0, atol=PARAM_TOLERANCE)


def assert_cut(opt_state, num_shards):
    """Every device holds another 1/N of every state leaf that has a dim, and no more."""
    leaves = [x for x in jax.tree.leaves(opt_state) if x.ndim]
    assert len(leaves) == 2 * sum(shape != () for shape in SHAPES.values())
    for x in leaves:
        assert {shard.data.size * num_shards for shard in x.addressable_shards} == {x.size}
        assert len({str(shard.index) for shard in x.addressable_shards}) == num_shards


@contextlib.contextmanager
def counted_compilations(caplog):
    """Yields a function that says how often `train_step` has been compiled so far."""
    done = "Finished XLA compilation of jit(train_step)"
    caplog.clear()
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        yield lambda: sum(done in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("is_placed", [False, True], ids=["unplaced", "placed"])
@pytest.mark.parametrize("is_set", [False, True], ids=["not active", "set_mesh"])
@pytest.mark.parametrize("mesh_name", MESHES)
def test_one_line_trains_as_plain_optax_with_state_cut_and_no_drift(
    mesh_name, is_set, is_placed, caplog
):
    want = train_plain("adamw")
    mesh = MESHES[mesh_name]()
    with active(mesh, is_set), counted_compilations(caplog) as num_compiled:
        tx = jzero.Zero(mesh, stage=1).optimizer(TRANSFORMS["adamw"]())
        got = train(tx, place(make_params(), mesh, is_placed))
        assert num_compiled() in ([1] if is_placed else [1, 2])
    assert_same(got, want)
    for opt_state in got[2:]:
        assert_cut(opt_state, mesh.size)


@pytest.mark.parametrize("mesh_name", MESHES)
def test_clipping_by_global_norm_fires_and_equals_plain_optax(mesh_name):
    mesh = MESHES[mesh_name]()
    want = train_plain("clipped")
    unclipped = train_plain("adamw")
    assert abs(want[0][-1] - unclipped[0][-1]) > 10 * LOSS_TOLERANCE
    tx = jzero.Zero(mesh, stage=1).optimizer(TRANSFORMS["clipped"]())
    got = train(tx, place(make_params(), mesh, True))
    assert_same(got, want)
    for opt_state in got[2:]:
        assert_cut(opt_state, mesh.size)


@pytest.mark.parametrize("mesh_name", MESHES)
def test_adamw_from_the_same_gradients_equals_plain_optax_bitwise(mesh_name):
    mesh, params = MESHES[mesh_name](), make_params()
    plain = optax.adamw(LR)
    zero = jzero.Zero(mesh, stage=1)
    tx = zero.optimizer(plain)
    want_state, state = plain.init(params), tx.init(params)
    update, want_update = jax.jit(tx.update), jax.jit(plain.update)
    for batch in make_batches():
        grads = jax.grad(loss_fn)(params, batch)
        want, want_state = want_update(grads, want_state, params)
        got, state = update(grads, state, params)
        for name in SHAPES:
            np.testing.assert_array_equal(got[name], want[name])
    whole = jax.tree.leaves(zero.gather(state))
    for x, y in zip(whole, jax.tree.leaves(want_state), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("mesh_name", ["explicit", "automatic"])
def test_stages_2_and_3_in_one_line_warn_once_and_do_as_stage_1(mesh_name, stage):
    mesh, params = MESHES[mesh_name](), make_params()
    want = train_plain("adamw")
    tx = jzero.Zero(mesh, stage=stage, like=params).optimizer(TRANSFORMS["adamw"]())
    with pytest.warns(UserWarning, match="partitions the optimizer state only") as warned:
        got = train(tx, params)
    assert len(warned) == 1
    tx.update(params, got[2], params)  # silent from now on: warnings are errors here
    assert_same(got, want)
    for opt_state in got[2:]:
        assert_cut(opt_state, mesh.size)
