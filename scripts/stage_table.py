"""Prints what stage, precision and accumulation cost and save: GPT-2 compiled, read back.

    python -m scripts.stage_table
    python -m scripts.stage_table --precision float32 bfloat16 --num-microbatches 1 4

Bytes at rest and temporaries are the compiler's (`memory_analysis`) for virtual CPU devices, which
compute 16-bit programs in 32: no temporaries are told of those. The wire is the report's, which the
tests hold to the compiled collectives. Nothing is trained.
"""

import argparse
import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import jzero
from jzero.terminal import format_bytes
from models.gpt2 import GPT2

COLUMNS = (
    "stage",
    "precision",
    "G",
    "parameters",
    "gradients",
    "optimizer state",
    "at rest, bytes per parameter",
    "temporaries",
    "sent",
    "in (N-1)/N Psi",
)


@dataclasses.dataclass(frozen=True)
class Case:
    """One row: what is compiled."""

    stage: int
    precision: str
    num_microbatches: int
    keep_gathered: bool = False


def measure(case: Case, sizes: dict[str, Any], rows_per_device: int) -> tuple[str, ...]:
    """Compiles one training step; returns a row of the table."""
    policy = jzero.policy(case.precision)
    model = nnx.eval_shape(
        lambda: GPT2(
            **sizes,
            param_dtype=str(policy.param_dtype),
            compute_dtype=str(policy.compute_dtype),
            rngs=nnx.Rngs(0),
        )
    )
    zero = jzero.Zero(jzero.make_mesh(), case.stage, like=model, reduce_dtype=policy.reduce_dtype)
    tx = zero.optimizer(jzero.with_policy(optax.adamw(3e-4), policy))
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    value_and_grad = zero.value_and_grad(
        lambda m, b: m.loss(b, run_layers=zero.run_layers),
        num_microbatches=case.num_microbatches,
        accumulator_dtype=policy.accumulator_dtype,
        keep_gathered=case.keep_gathered,
    )

    def step(params, state, tokens):
        loss, grads = value_and_grad(
            nnx.merge(graphdef, params, rest), tokens, loss_scale=jzero.loss_scale(state)
        )
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    params = zero.abstract(params)
    state = zero.abstract(jax.eval_shape(tx.init, params))
    num_rows = rows_per_device * zero.num_shards * case.num_microbatches
    sharding = jax.NamedSharding(zero.mesh, jax.P("data"))
    tokens = jax.ShapeDtypeStruct(
        (num_rows, sizes["num_positions"] + 1), jnp.int32, sharding=sharding
    )
    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(params, state, tokens).compile()
    memory = compiled.memory_analysis()
    report = zero.report(model, tx, num_microbatches=case.num_microbatches)
    assert memory is not None
    batch_bytes = 4 * num_rows * (sizes["num_positions"] + 1) // zero.num_shards
    psi = policy.param_dtype.itemsize * report.num_params
    psi *= (zero.num_shards - 1) / zero.num_shards
    return (
        f"{case.stage}{', kept' if case.keep_gathered else ''}",
        case.precision,
        str(case.num_microbatches),
        format_bytes(report.params_bytes),
        format_bytes(report.grads_bytes),
        format_bytes(report.state_bytes),
        f"{(memory.argument_size_in_bytes - batch_bytes) / report.num_params:.2f}",
        format_bytes(memory.temp_size_in_bytes) if case.precision == "float32" else "-",
        format_bytes(report.wire_bytes),
        f"{report.wire_bytes / psi:.2f}",
    )


def cases(precisions: list[str], counts: list[int]) -> list[Case]:
    """Every combination, and stage 3 with the gathered weights kept where there is more than one
    microbatch."""
    rows = [Case(s, p, g) for p, g, s in itertools.product(precisions, counts, range(4))]
    kept = [dataclasses.replace(c, keep_gathered=True) for c in rows if c.stage == 3]
    return rows + [c for c in kept if c.num_microbatches > 1]


def main() -> None:
    """Compiles every combination and prints a Markdown table."""
    parser = argparse.ArgumentParser(description="Compile and compare the stages.")
    parser.add_argument("--num-devices", type=int, default=8, help="virtual CPU devices")
    parser.add_argument("--num-layers", type=int, default=12)
    parser.add_argument("--embed-dim", type=int, default=768)
    parser.add_argument("--num-heads", type=int, default=12)
    parser.add_argument("--num-positions", type=int, default=256)
    parser.add_argument("--rows-per-device", type=int, default=1, help="of one microbatch")
    parser.add_argument("--precision", nargs="+", default=["float32"], choices=jzero.POLICIES)
    parser.add_argument("--num-microbatches", nargs="+", type=int, default=[1])
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", args.num_devices)
    keys = ("num_layers", "embed_dim", "num_heads", "num_positions")
    sizes = {key: getattr(args, key) for key in keys}
    print("| " + " | ".join(COLUMNS) + " |")
    print("|" + "---|" * len(COLUMNS))
    for case in cases(args.precision, args.num_microbatches):
        print("| " + " | ".join(measure(case, sizes, args.rows_per_device)) + " |", flush=True)


if __name__ == "__main__":
    main()
