"""Compiles the training step of a configuration for GPUs that are not here, and measures it.

A compile can kill its process, so `jzero.plan` runs this module in one of its own: a job comes in
as JSON on standard input, and what was found goes out as JSON on the last line of standard output.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import math
import resource
import sys
import time
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jzero.collective import Collective, Rates
from jzero.config import Config, parse_config
from jzero.gpus import Gpu
from jzero.ledger import Ledger, collectives
from jzero.precision import is_master
from jzero.recipe import Setup, make_setup
from jzero.schema import own_arguments
from jzero.state import TrainState
from jzero.timing import collective_seconds
from jzero.train import make_step
from jzero.trees import named_leaves
from jzero.virtual import virtual_mesh

CUDNN, BLOCKED = "cudnn", "blocked"  # of [model] attention, where the model has that argument
CUDNN_CAPABILITY = (8, 0)
SCALARS = 64  # elements; losses, norms and flags are no traffic


def compile_step(job: Mapping[str, Any]) -> dict[str, Any]:
    """Compiles one step and reads the program back.

    Args:
      job: `config`, the tables of a configuration; `gpu`, the fields of a `Gpu`; `num_gpus`.

    Returns:
      Bytes of one device by class, the program's collectives, estimated seconds, and what the
      compile took.

    Raises:
      ValueError: the configuration cannot work on these GPUs.
    """
    start = time.process_time()
    gpu = gpu_of(job["gpu"])
    config = parse_config(job["config"])
    sizes = config.mesh
    mesh = virtual_mesh(
        gpu, num_gpus=job["num_gpus"], replica=sizes.replica, data=sizes.data, model=sizes.model
    )
    attention = choose_attention(config, gpu)
    if attention:
        config = parse_config(with_key(job["config"], "model", "attention", attention))
    setup = make_setup(config, mesh)
    state, step, others = abstract_step(setup)
    compiled = _lowered(step, state, *others).compile()
    rates = rates_of(gpu, mesh, str(setup.policy.compute_dtype))
    ledger = collectives(compiled, mesh=mesh, rates=rates, more_than=SCALARS)
    return {
        "memory": memory_of(setup, state, compiled.memory_analysis()),
        "sent": sent_of(ledger),
        "unread": list(ledger.unread),
        "compute_s": (ledger.flops + _kernel_flops(setup, attention)) / rates.flops_per_s,
        "comm_s": ledger.seconds,
        "exposed_s": ledger.exposed_seconds,
        "covered": ledger.covered if ledger.seconds else None,
        "attention": attention,
        "num_params": setup.num_params,
        "flops": setup.flops_per_token * setup.batch.train_batch_size * config.data.seq_len,
        "tokens": setup.batch.train_batch_size * config.data.seq_len,
        "batch": setup.batch._asdict(),
        "compute_dtype": str(setup.policy.compute_dtype),
        "cpu_s": time.process_time() - start,
        "host_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def _lowered(step: Any, *args: Any) -> Any:
    """The step, lowered.

    Raises:
      ValueError: it calls back to Python, which takes a GPU that is here.
    """
    try:
        return step.lower(*args)
    except RuntimeError as error:
        if "Unknown backend" not in str(error):
            raise
        raise ValueError(
            "the step calls back to Python (jax.debug.print, jax.pure_callback or the like), which "
            "cannot be compiled for GPUs that are not here; leave the call out of the model to "
            "plan it."
        ) from error


def gpu_of(fields: Mapping[str, Any]) -> Gpu:
    """A GPU from the JSON of its fields."""
    given: dict[str, Any] = dict(fields)
    given["compute_capability"] = tuple(given["compute_capability"])
    return Gpu(**given)


def with_key(tables: Mapping[str, Any], section: str, key: str, value: Any) -> dict[str, Any]:
    """The tables of a configuration with one key set."""
    return {**tables, section: {**tables.get(section, {}), key: value}}


def choose_attention(config: Config, gpu: Gpu) -> str:
    """Which attention to plan with, where the model has the choice and the user left it open.

    cuDNN's kernel can be traced where its wheel is installed; the blocked loop keeps for backward
    what that kernel keeps.
    """
    sizes = own_arguments(config.model)
    if sizes.get("attention") != "auto":
        return ""
    has_wheel = importlib.util.find_spec("nvidia") and importlib.util.find_spec("nvidia.cudnn")
    if not has_wheel or gpu.compute_capability < CUDNN_CAPABILITY:
        return BLOCKED
    head_dim = sizes.get("embed_dim", 0) // max(sizes.get("num_heads", 1), 1)
    fits = head_dim % 8 == 0 and 0 < head_dim <= 128
    return CUDNN if fits and config.precision.policy in ("bfloat16", "float16") else BLOCKED


def _kernel_flops(setup: Setup, attention: str) -> float:
    """FLOPs of cuDNN's attention on one device in a step, which a compiled program does not tell.

    By the convention for the whole square: 4 L d T a token forward, again where remat computes it
    again, and 8 L d T backward.
    """
    if attention != CUDNN:
        return 0.0
    sizes, seq_len = own_arguments(setup.config.model), setup.config.data.seq_len
    one = 4.0 * sizes.get("num_layers", 0) * sizes.get("embed_dim", 0) * seq_len
    passes = 4 if sizes.get("remat") == "full" else 3
    tokens = setup.batch.micro_batch * setup.batch.num_microbatches * seq_len
    return passes * one * tokens


def abstract_step(setup: Setup) -> tuple[TrainState, Any, tuple[Any, Any]]:
    """The state at rest, the step, and its other arguments, as shapes with shardings."""
    zero = setup.zero
    graphdef, params, others = nnx.split(setup.abstract, nnx.Param, ...)
    whole = NamedSharding(zero.mesh, PartitionSpec())
    place = functools.partial(jax.tree.map, lambda x: _shape(x.shape, x.dtype, whole))
    opt_state = zero.abstract(jax.eval_shape(setup.tx.init, params))
    count: Any = _shape((), jnp.int32, whole)
    state = TrainState(zero.abstract(params), place(others), opt_state, count)
    rows = (setup.batch.train_batch_size, setup.config.data.seq_len + 1)
    split = NamedSharding(zero.mesh, PartitionSpec(setup.data_axes))
    key = place(jax.eval_shape(lambda: jax.random.key(0)))
    return state, make_step(setup, graphdef), (_shape(rows, jnp.int32, split), key)


def _shape(shape: tuple[int, ...], dtype: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def rates_of(gpu: Gpu, mesh: Mesh, dtype: str) -> Rates:
    """What the ledger estimates seconds with: this GPU, its node and its network.

    Args:
      gpu: what each device of the mesh is.
      mesh: whose axes lie in nodes as `virtual_mesh` lays them.
      dtype: of the products, as `Gpu.peak_flops` takes it.

    Raises:
      ValueError: the GPU has no unit for that dtype.
    """

    def link(row: Collective) -> float:
        stride = stride_of(mesh, row.axes)
        return collective_seconds(row.kind, row.payload_bytes, row.group_size, gpu, stride=stride)

    peak = gpu.peak_flops(dtype)
    memory = gpu.memory_efficiency * gpu.memory_bytes_per_s
    return Rates(flops_per_s=gpu.efficiency * peak, memory_bytes_per_s=memory, link=link)


def stride_of(mesh: Mesh, axes: tuple[str, ...] | None) -> int:
    """GPUs from one member of a group to the next: the axes after the last that it goes along."""
    names = list(mesh.axis_names)
    last = max((names.index(axis) for axis in axes or ()), default=len(names) - 1)
    return math.prod(mesh.shape[name] for name in names[last + 1 :])


def memory_of(setup: Setup, state: TrainState, memory: Any) -> dict[str, float]:
    """Bytes of one device: at rest by class, as the program's arguments have them; the rest."""
    held: dict[str, float] = {"params": _bytes(state.params)}
    leaves = named_leaves(state.opt_state)[0]
    held["master"] = sum(_bytes(x) for name, x in leaves.items() if is_master(name))
    held["state"] = sum(map(_bytes, leaves.values())) - held["master"]
    report = setup.zero.report(setup.abstract)
    return held | {
        "arguments": memory.argument_size_in_bytes,
        "alias": memory.alias_size_in_bytes,
        "temp": memory.temp_size_in_bytes,
        "peak": peak_of(memory),
        "grads": report.grads_bytes,
        "logits": _logits_bytes(setup),
    }


def peak_of(memory: Any) -> int:
    """Bytes that a device must have free to run a program, of `compiled.memory_analysis()`.

    XLA's own peak counts temporaries by when they live, and can be below what its runtime takes at
    once: arguments, all temporaries and the results that are not written over arguments.
    """
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    taken = memory.argument_size_in_bytes + memory.temp_size_in_bytes + results
    return max(memory.peak_memory_in_bytes, taken)


def _bytes(tree: Any) -> int:
    """Bytes that one device holds of a tree of shapes with shardings."""
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree)
    )


def _logits_bytes(setup: Setup) -> float:
    """Logits that exist at once in float32, where the model's arguments tell them; else NaN."""
    sizes = own_arguments(setup.config.model)
    if "vocab_size" not in sizes:
        return math.nan
    seq_len = setup.config.data.seq_len
    positions = min(sizes.get("loss_chunk") or seq_len, seq_len)
    return 4.0 * setup.batch.micro_batch * positions * sizes["vocab_size"]


def sent_of(ledger: Ledger) -> list[dict[str, Any]]:
    """What a device sends in a step, by kind, dtype and axes."""
    groups: dict[tuple[str, str, str], list[Collective]] = defaultdict(list)
    for row in ledger:
        axes = "unknown axes" if row.axes is None else " x ".join(row.axes)
        groups[row.kind, row.dtype, axes].append(row)
    alike = {key: Ledger(tuple(rows)) for key, rows in groups.items()}
    return [
        {
            "kind": kind.replace("-", "_"),
            "dtype": dtype,
            "axis": axes,
            "times": sum(row.times for row in rows),
            "wire_bytes": rows.sent_bytes,
            "covered": rows.covered if rows.seconds else None,
        }
        for (kind, dtype, axes), rows in alike.items()
    ]


def main() -> int:
    """Runs the job on standard input."""
    try:
        found = compile_step(json.load(sys.stdin))
    except ValueError as error:  # what the user can mend; anything else keeps its traceback
        found = {"error": str(error)}
    print("\n" + json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.path.insert(0, "")  # models and user modules live in the current directory
    sys.exit(main())
