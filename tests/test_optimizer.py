"""Any optax transform: the same numbers and state tree as plain optax, large leaves cut to 1/N."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jzero
from jzero.trees import named_leaves
from tests import toys

pytestmark = pytest.mark.filterwarnings("ignore:stage . with gradients")

LR = 1e-2
TOLERANCE = 1e-10 * LR  # float64


def params():
    rng = np.random.default_rng(0)
    return {
        "layer": {"kernel": rng.normal(size=(13, 7)), "bias": rng.normal(size=5)},
        "s": rng.normal(size=()),
    }


def is_matrix(tree):
    return jax.tree.map(lambda x: x.ndim > 1, tree)


TRANSFORMS = {
    "sgd with momentum": lambda: optax.sgd(LR, momentum=0.9),
    "adamw": lambda: optax.adamw(LR),
    "clipped adamw with a masked decay": lambda: optax.chain(
        optax.clip_by_global_norm(0.5), optax.adamw(LR, mask=is_matrix)
    ),
    "lamb": lambda: optax.lamb(LR),
    "lars": lambda: optax.lars(LR),
    "adafactor": lambda: optax.adafactor(LR, min_dim_size_to_factor=4),
    "lion": lambda: optax.lion(LR),
    "muon": lambda: optax.contrib.muon(LR),
    "schedule free": lambda: optax.contrib.schedule_free_adamw(LR),
    "flatten": lambda: optax.flatten(optax.adam(LR)),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adam)(LR),
    "MultiSteps": lambda: optax.MultiSteps(optax.adam(LR), 2).gradient_transformation(),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.adam(LR), 3),
    "partition": lambda: optax.partition(
        {"a": optax.adam(LR), "b": optax.set_to_zero()}, {"layer": "a", "s": "b"}
    ),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_updates_equal_plain_optax_and_the_state_is_cut(name):
    stage, num_devices = (3, 3) if len(name) % 2 else (1, 8)
    with jax.enable_x64(True):
        tx, tree = TRANSFORMS[name](), jax.tree.map(jnp.asarray, params())
        zero = jzero.Zero(toys.data_mesh(num_devices), stage, like=tree)
        rng = np.random.default_rng(1)
        grads = [jax.tree.map(lambda x: rng.normal(size=x.shape), tree) for _ in range(4)]
        want, _ = trained(tx, tree, grads)
        mine = zero.optimizer(tx)
        got, state = trained(mine, zero.place(tree), [zero.place(g) for g in grads])
        assert toys.max_difference(zero.gather(got), want) <= TOLERANCE
        plain = jax.eval_shape(tx.init, tree)
        assert jax.tree.structure(state) == jax.tree.structure(plain)
        for (leaf, x), (_, y) in zip(
            *(named_leaves(t)[0].items() for t in (state, plain)), strict=True
        ):
            assert x.dtype == y.dtype, leaf
            if y.ndim:
                shard = x.addressable_shards[0].data
                assert shard.size * num_devices <= x.size, leaf
        assert jax.tree.structure(jax.eval_shape(mine.init, tree)) == jax.tree.structure(plain)


def trained(tx, params, grads):
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    step, state = jax.jit(step), tx.init(params)
    for g in grads:
        params, state = jax.block_until_ready(step(params, state, g))
    assert step._cache_size() == 1
    return params, state


def test_an_extra_argument_reaches_the_transform():
    tx = optax.contrib.reduce_on_plateau(factor=0.5, patience=0, rtol=0, atol=1e9)
    zero = jzero.Zero(jzero.make_mesh(), 1)
    mine = zero.optimizer(optax.chain(optax.sgd(1.0), tx))
    tree = {"w": jnp.ones((13, 7))}
    state = mine.init(tree)
    for _ in range(3):
        updates, state = mine.update(tree, state, tree, value=jnp.float32(1))
    assert float(np.asarray(updates["w"])[0, 0]) > -1


@pytest.mark.parametrize("stage", [1, 2])
def test_16_bit_parameters_travel_in_16_bits_and_arrive_exactly(stage):
    tree = {"w": jnp.asarray(np.random.default_rng(0).normal(size=(13, 7)), jnp.bfloat16)}
    widen = optax.stateless(lambda u, p: jax.tree.map(lambda x: x.astype(jnp.float32), u))
    wide = optax.chain(optax.sgd(0.1), widen)
    zero = jzero.Zero(jzero.make_mesh(), stage)
    tx = zero.optimizer(wide)
    grads = jax.tree.map(jnp.ones_like, tree)
    placed = zero.place(tree)
    text = jax.jit(tx.update).lower(grads, tx.init(placed), placed).as_text()
    gathers = [line for line in text.splitlines() if "all_gather" in line]
    assert gathers
    assert all("bf16" in line for line in gathers)
    updates, _ = tx.update(grads, tx.init(placed), placed)
    wider = jax.tree.map(lambda x: x.astype(jnp.float32), (tree, grads))  # as the wrapped one sees
    want = optax.apply_updates(tree, wide.update(wider[1], wide.init(wider[0]), wider[0])[0])
    got = optax.apply_updates(placed, updates)
    assert got["w"].dtype == jnp.bfloat16
    assert (np.asarray(got["w"], np.float32) == np.asarray(want["w"], np.float32)).all()


def test_gradients_of_the_users_own_warn_once_above_stage_1():
    tree = {"w": jnp.ones((16, 8))}
    zero = jzero.Zero(jzero.make_mesh(), 2)
    tx = zero.optimizer(optax.sgd(0.1))
    with pytest.warns(UserWarning, match="partitions the optimizer state only, as stage 1 does"):
        tx.update(tree, tx.init(tree), tree)
    with warnings.catch_warnings(action="error"):
        tx.update(tree, tx.init(tree), tree)
