"""Whole training equals plain optax on one device, at every stage and number of devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jzero
from models.gpt2 import GPT2
from tests import toys

LR = 1e-3
# GPT-2's key bias has a mathematical gradient of zero: Adam with a small eps turns its rounding
# noise into whole steps, so parameters are compared under a large one.
EPS = 1e-4
LOSS_64, PARAMS_64 = 1e-12, 1e-10 * LR
LOSS_32, PARAMS_32 = 1e-5, 0.02 * LR
CLIPPED = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(LR, eps=EPS))


@functools.cache
def reference(num_devices, dtype, tx, num_steps):
    """The model, its batches, and what plain optax on one device makes of them."""
    model = toys.Toy(jax.random.key(0), dtype)
    batches = toys.toy_batches(num_steps, 2 * num_devices)
    return model, batches, *toys.plain_training(model, toys.toy_loss, tx, batches)


def compare(num_devices, stage, dtype, *, num_microbatches=1, lend=False, tx=CLIPPED, num_steps=20):
    model, batches, losses, params = reference(num_devices, dtype, tx, num_steps)
    zero = jzero.Zero(toys.data_mesh(num_devices), stage, like=model)
    run_layers = zero.run_layers if lend else None

    def loss_fn(model, tokens):
        return toys.toy_loss(model, tokens, run_layers)

    got, got_params, num_compiled = toys.zero_training(
        zero, model, loss_fn, tx, batches, num_microbatches=num_microbatches
    )
    assert num_compiled == 1
    loss_gap = max(abs(a - b) for a, b in zip(got, losses, strict=True))
    return loss_gap, toys.max_difference(got_params, params)


@pytest.mark.parametrize("num_devices", [1, 2, 3, 5, 7, 8])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_float64_training_equals_plain_optax(stage, num_devices):
    with jax.enable_x64(True):
        loss, params = compare(num_devices, stage, jnp.float64)
    assert loss <= LOSS_64
    assert params <= PARAMS_64


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize(("num_devices", "num_microbatches"), [(8, 1), (3, 2)])
def test_float64_training_with_the_lent_layer_loop_equals_plain_optax(
    stage, num_devices, num_microbatches
):
    with jax.enable_x64(True):
        loss, params = compare(
            num_devices, stage, jnp.float64, num_microbatches=num_microbatches, lend=True
        )
    assert loss <= LOSS_64
    assert params <= PARAMS_64


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_float64_training_over_two_microbatches_equals_plain_optax(stage):
    with jax.enable_x64(True):
        loss, params = compare(8, stage, jnp.float64, num_microbatches=2, num_steps=5)
    assert loss <= LOSS_64
    assert params <= PARAMS_64


@pytest.mark.parametrize("stage", [1, 3])
def test_float64_loss_with_adams_default_eps_equals_plain_optax(stage):
    with jax.enable_x64(True):
        loss, _ = compare(8, stage, jnp.float64, tx=optax.adamw(LR))
    assert loss <= LOSS_64


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_float32_training_equals_plain_optax(stage):
    loss, params = compare(8, stage, jnp.float32)
    assert loss <= LOSS_32
    assert params <= PARAMS_32


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gpt2_in_float64_with_dropout_off_equals_plain_optax(stage):
    with jax.enable_x64(True):
        sizes = dict(vocab_size=29, num_positions=9, num_layers=3, num_heads=2, embed_dim=12)
        model = GPT2(**sizes, param_dtype="float64", compute_dtype="float64", rngs=nnx.Rngs(0))
        batches = [b % 29 for b in toys.toy_batches(20, 14)]
        losses, params = toys.plain_training(model, lambda m, b: m.loss(b), CLIPPED, batches)
        zero = jzero.Zero(toys.data_mesh(7), stage, like=model)
        got, got_params, _ = toys.zero_training(
            zero, model, lambda m, b: m.loss(b, run_layers=zero.run_layers), CLIPPED, batches
        )
    assert max(abs(a - b) for a, b in zip(got, losses, strict=True)) <= LOSS_64
    assert toys.max_difference(got_params, params) <= PARAMS_64


def test_the_reference_clips_in_this_test():
    model = toys.Toy(jax.random.key(0))
    batch = toys.toy_batches(1, 16)[0]
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    grads = jax.grad(lambda p: toys.toy_loss(nnx.merge(graphdef, p, rest), batch))(params)
    assert optax.tree.norm(grads) > 0.1


@pytest.mark.filterwarnings("ignore:stage . with gradients")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_elementwise_update_equals_plain_optax_bitwise(stage):
    model = toys.Toy(jax.random.key(0))
    params = nnx.state(model, nnx.Param)
    rng = np.random.default_rng(0)
    grads = [jax.tree.map(lambda x: rng.normal(size=x.shape).astype(x.dtype), params)] * 3
    tx = optax.adamw(LR)
    zero = jzero.Zero(toys.data_mesh(8), stage, like=model)
    got = trained_on(zero.optimizer(tx), zero.place(params), [zero.place(g) for g in grads])
    want = trained_on(tx, params, grads)
    assert toys.max_difference(zero.gather(got), want) == 0


def trained_on(tx, params, grads):
    """Compiles updates and additions apart: in one program XLA may round them once, fused."""
    update, apply_updates = jax.jit(tx.update), jax.jit(optax.apply_updates)
    state = tx.init(params)
    for g in grads:
        updates, state = jax.block_until_ready(update(g, state, params))
        params = jax.block_until_ready(apply_updates(params, updates))
    return params
