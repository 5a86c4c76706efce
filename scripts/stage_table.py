"""Prints what each ZeRO stage costs and saves: GPT-2 compiled for virtual devices, read back.

    python -m scripts.stage_table --num-devices 8

Bytes at rest, temporaries and collectives are the compiler's (`memory_analysis`), the wire is the
report's, which the tests hold to the compiled collectives. Nothing is trained.
"""

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import jzero
from jzero.terminal import format_bytes
from models.gpt2 import GPT2


def measure(stage: int, sizes: dict[str, Any], rows_per_device: int) -> tuple[str, ...]:
    """Compiles one training step; returns a row of the table."""
    model = nnx.eval_shape(lambda: GPT2(**sizes, rngs=nnx.Rngs(0)))
    zero = jzero.Zero(jzero.make_mesh(), stage, like=model)
    tx = zero.optimizer(optax.adamw(3e-4))
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    value_and_grad = zero.value_and_grad(lambda m, b: m.loss(b, run_layers=zero.run_layers))

    def step(params, state, tokens):
        loss, grads = value_and_grad(nnx.merge(graphdef, params, rest), tokens)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    params = zero.abstract(params)
    state = zero.abstract(jax.eval_shape(tx.init, params))
    shape = (rows_per_device * zero.num_shards, sizes["num_positions"] + 1)
    sharding = jax.NamedSharding(zero.mesh, jax.P("data"))
    tokens = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding)
    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(params, state, tokens).compile()
    memory, report = compiled.memory_analysis(), zero.report(model, tx)
    assert memory is not None
    psi = 4 * report.num_params * (zero.num_shards - 1) / zero.num_shards
    return (
        str(stage),
        format_bytes(report.params_bytes),
        format_bytes(report.state_bytes),
        format_bytes(memory.argument_size_in_bytes),
        format_bytes(memory.temp_size_in_bytes),
        f"{report.wire_bytes / psi:.2f}",
    )


def main() -> None:
    """Compiles all four stages and prints a Markdown table."""
    parser = argparse.ArgumentParser(description="Compile and compare the stages.")
    parser.add_argument("--num-devices", type=int, default=8, help="virtual CPU devices")
    parser.add_argument("--num-layers", type=int, default=12)
    parser.add_argument("--embed-dim", type=int, default=768)
    parser.add_argument("--num-heads", type=int, default=12)
    parser.add_argument("--num-positions", type=int, default=256)
    parser.add_argument("--rows-per-device", type=int, default=1)
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", args.num_devices)
    keys = ("num_layers", "embed_dim", "num_heads", "num_positions")
    sizes = {key: getattr(args, key) for key in keys}
    names = (
        "stage",
        "parameters",
        "optimizer state",
        "at rest (compiled)",
        "temporaries (compiled)",
    )
    print("| " + " | ".join((*names, "sent, in (N-1)/N Psi")) + " |")
    print("|" + "---|" * 6)
    for stage in range(4):
        print("| " + " | ".join(measure(stage, sizes, args.rows_per_device)) + " |", flush=True)


if __name__ == "__main__":
    main()
