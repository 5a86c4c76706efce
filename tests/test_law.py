"""The paper's bytes per parameter with 16-bit parameters and a float32 master, compiled."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import jzero
from models.gpt2 import GPT2
from tests import toys

# Arguments and what is lowered do not depend on it; XLA:CPU is slow in 16 bits.
pytestmark = pytest.mark.usefixtures("unoptimized")

TIME = 32
# Bytes at rest per parameter: what is whole, and what is cut to 1/N.
LAW = {0: (14, 0), 1: (2, 12), 2: (2, 12), 3: (0, 14)}
SCALARS = 100  # bytes: step counts, and the loss scale's state


@functools.cache
def lowered(stage, num_devices, policy_name):
    policy = jzero.policy(policy_name)
    model = nnx.eval_shape(
        lambda: GPT2(
            vocab_size=515,
            num_positions=TIME,
            num_layers=3,
            num_heads=4,
            embed_dim=128,
            param_dtype=str(policy.param_dtype),
            compute_dtype=str(policy.compute_dtype),
            rngs=nnx.Rngs(0),
        )
    )
    zero = jzero.Zero(toys.data_mesh(num_devices), stage, like=model)
    tx = zero.optimizer(jzero.with_policy(optax.adamw(1e-3), policy))
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    value_and_grad = zero.value_and_grad(lambda m, b: m.loss(b, run_layers=zero.run_layers))

    def step(params, state, batch):
        scale = jzero.loss_scale(state)
        loss, grads = value_and_grad(nnx.merge(graphdef, params, rest), batch, loss_scale=scale)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    params = zero.abstract(params)
    state = zero.abstract(jax.eval_shape(tx.init, params))
    sharding = jax.NamedSharding(zero.mesh, jax.P("data"))
    batch = jax.ShapeDtypeStruct((num_devices, TIME + 1), jnp.int32, sharding=sharding)
    # Kept: whether the loss scale is stuck is only ever written.
    jitted = jax.jit(step, donate_argnums=(0, 1), keep_unused=True)
    return zero, zero.report(model, tx), jitted.lower(params, state, batch)


CASES = [(0, 8, "bfloat16"), (1, 8, "bfloat16"), (2, 8, "bfloat16"), (3, 8, "bfloat16"),
         (1, 3, "bfloat16"), (3, 3, "bfloat16"), (2, 8, "float16")]  # fmt: skip


@pytest.mark.parametrize(("stage", "num_devices", "policy"), CASES)
def test_16_bits_with_a_master_cost_the_papers_bytes_at_rest(policy, stage, num_devices):
    zero, report, step = lowered(stage, num_devices, policy)
    memory = step.compile().memory_analysis()
    whole, cut = LAW[stage]
    leaves = zero.layout().values()
    size = report.num_params
    padded = sum(leaf.rest_size for leaf in leaves)
    want = whole * size + cut * padded / num_devices
    batch_bytes = 4 * (TIME + 1)
    assert 0 <= memory.argument_size_in_bytes - batch_bytes - want <= SCALARS
    assert memory.argument_size_in_bytes == report.argument_bytes + batch_bytes
    assert memory.alias_size_in_bytes == report.argument_bytes  # all of it is donated


@pytest.mark.parametrize("policy", ["bfloat16", "float16"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_16_bits_are_what_travels(policy, stage):
    text = lowered(stage, 8, policy)[2].as_text()
    short = {"bfloat16": "bf16", "float16": "f16"}[policy]
    for kind in ("all_gather", "reduce_scatter"):
        lines = [line for line in text.splitlines() if f'stablehlo.{kind}"' in line]
        assert lines
    gathers = [line for line in text.splitlines() if "stablehlo.all_gather" in line]
    assert all(f"x{short}>" in line.split(" -> ")[-1] for line in gathers)
    blocks = text.split('"stablehlo.reduce_scatter"')[1:]
    types = [block.split("}) : ", 1)[1].split("\n")[0] for block in blocks]
    assert all(f"x{short}>" in line.split(" -> ")[-1] for line in types)
