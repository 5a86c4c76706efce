"""Holds `jzero plan` to the GPUs at hand: predicted and measured peak memory and step time.

    python -m scripts.plan_vs_gpu
    python -m scripts.plan_vs_gpu configs/gpt2_355m.toml --stage 1 3 --micro-batch 4

For each configuration and stage the step is compiled as `jzero plan` compiles it, without a GPU,
and then run here, on random tokens. Peaks are `memory_stats()`'s, which has neither CUDA's context
nor NCCL's buffers; times are the median of the steps after the first three.
"""

import argparse
import dataclasses
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence

import jax
import numpy as np

from jzero.compile_step import with_key
from jzero.config import Config, load_config, parse_config
from jzero.gpus import GPUS, Gpu
from jzero.plan import (
    Request,
    config_tables,
    figures_of,
    run_child,
    with_micro_batch,
    with_stage,
)
from jzero.recipe import Setup, make_setup
from jzero.state import graphdef_of, init_state
from jzero.train import make_step

CONFIGS = ["configs/gpt2_124m.toml", "configs/gpt2_355m.toml", "configs/gpt2_774m.toml"]
WARMUP, STEPS = 3, 10


def find_own_gpu(device_kind: str) -> Gpu | None:
    """The GPU of the table that jax calls so; None where there is none."""
    return next((gpu for gpu in GPUS.values() if gpu.device_name == device_kind), None)


def planned(config: Config, gpu: Gpu, num_gpus: int) -> tuple[float, float]:
    """Peak in bytes and seconds of a step, as `jzero plan` predicts them."""
    job = {"config": config_tables(config), "gpu": dataclasses.asdict(gpu), "num_gpus": num_gpus}
    figures = figures_of(Request(config, gpu, num_gpus), run_child(job))
    return figures["peak_bytes"].value or 0.0, figures["step_s"].value or 0.0


def measured(setup: Setup, num_steps: int = STEPS) -> tuple[int | None, float]:
    """Peak in bytes (None where the backend does not tell) and seconds of a step, run here."""
    graphdef, state = graphdef_of(setup), init_state(setup, jax.random.key(0))
    step = make_step(setup, graphdef)
    batch, seq_len = setup.batch.train_batch_size, setup.config.data.seq_len
    vocab = getattr(setup.config.model, "vocab_size", 256)
    tokens = np.random.default_rng(0).integers(0, vocab, (batch, seq_len + 1), dtype=np.int32)
    rows, key, seconds = setup.place(tokens), jax.random.key(0), []
    for _ in range(WARMUP + num_steps):
        start = time.perf_counter()
        state, metrics = step(state, rows, key)
        jax.block_until_ready((state, metrics))
        seconds.append(time.perf_counter() - start)
    stats = jax.local_devices()[0].memory_stats() or {}
    return stats.get("peak_bytes_in_use"), statistics.median(seconds[WARMUP:])


def with_settings(config: Config, stage: int, micro_batch: int) -> Config:
    """The configuration at a stage, with so many rows a device in one microbatch."""
    tables = with_micro_batch(with_stage(config_tables(config), stage), micro_batch)
    return parse_config(with_key(tables, "train", "num_microbatches", 1))


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table; exit status 2 where there is no GPU of the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("configs", nargs="*", default=CONFIGS)
    parser.add_argument("--stage", type=int, nargs="+", default=[3], choices=range(4))
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--no-header", action="store_true")
    flags = parser.parse_args(argv)
    if not flags.no_header:
        print("| config | stage | predicted peak | measured | predicted step | measured |")
        print("|---|---|---|---|---|---|", flush=True)
    runs = [(path, stage) for path in flags.configs for stage in flags.stage]
    if len(runs) == 1:
        return _run(*runs[0], flags.micro_batch)
    # A peak is that of the process so far: each run has one of its own.
    rest = ["--micro-batch", str(flags.micro_batch), "--no-header"]
    own = [sys.executable, "-m", "scripts.plan_vs_gpu"]
    words = [[*own, path, "--stage", str(stage), *rest] for path, stage in runs]
    return max(subprocess.run(each, check=False).returncode for each in words)


def _run(path: str, stage: int, micro_batch: int) -> int:
    device = jax.devices()[0]
    gpu = find_own_gpu(device.device_kind)
    if gpu is None:
        known = ", ".join(gpu.device_name for gpu in GPUS.values())
        print(f"no GPU of jzero's table is here, only {device.device_kind}; it knows {known}.")
        return 2
    print(_row(path, stage, with_settings(load_config(path), stage, micro_batch), gpu), flush=True)
    return 0


def _row(path: str, stage: int, config: Config, gpu: Gpu) -> str:
    peak, step_s = planned(config, gpu, jax.device_count())
    found = measured(make_setup(config))
    memory = "-" if found[0] is None else f"{found[0] / 2**30:.2f} GiB"
    return (
        f"| {path} | {stage} | {peak / 2**30:.2f} GiB | {memory} | {step_s * 1e3:.1f} ms | "
        f"{found[1] * 1e3:.1f} ms |"
    )


if __name__ == "__main__":
    sys.exit(main())
