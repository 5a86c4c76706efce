"""Measures host memory and time of saving and restoring GPT-2 with AdamW, by stage.

    python -m scripts.checkpoint_memory --num-layers 12 --embed-dim 512

Each figure is of a process of its own: the highest resident memory while it saves or restores, less
what was resident before. On virtual CPU devices a process holds the shards of all of them, and its
"devices" are host memory, too: a restored state counts as the shards that it is.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax
import optax
from flax import nnx

from jzero.checkpoint import Checkpoints
from jzero.mesh import make_mesh
from jzero.zero import Zero
from models.gpt2 import GPT2

NUM_DEVICES = 8


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-layers", type=int, default=8)
    parser.add_argument("--embed-dim", type=int, default=512)
    parser.add_argument("--vocab-size", type=int, default=50257)
    parser.add_argument("--stage", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--measure", choices=("save", "restore"), help=argparse.SUPPRESS)
    parser.add_argument("--dir", type=Path, help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.measure:
        print(json.dumps(measure(flags)))
        return
    print("| stage | what | state | largest leaf | shards held | host memory added | seconds |")
    print("|---|---|---|---|---|---|---|")
    for stage in flags.stage:
        with tempfile.TemporaryDirectory() as folder:
            for what in ("save", "restore"):
                row = in_child([*sys.argv[1:], "--stage", str(stage), "--measure", what], folder)
                names = ("state", "largest", "held", "added")
                cells = [f"{row[name] / (1 << 20):.0f} MiB" for name in names]
                print(f"| {stage} | {what} | {' | '.join(cells)} | {row['seconds']:.2f} |")


def in_child(words: list[str], folder: str) -> dict[str, float]:
    """One measurement, in a process of its own."""
    command = [sys.executable, "-m", "scripts.checkpoint_memory", *words, "--dir", folder]
    out = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(out.stdout.splitlines()[-1])


def measure(flags: argparse.Namespace) -> dict[str, float]:
    """Saves a state, or restores it; bytes and seconds."""
    jax.config.update("jax_num_cpu_devices", NUM_DEVICES)
    like = nnx.eval_shape(lambda: make_model(flags))
    zero = Zero(make_mesh(), flags.stage[-1], like=like)
    tx = zero.optimizer(optax.adamw(1e-3))
    checkpoints = Checkpoints(flags.dir)
    if flags.measure == "save":
        model = zero.init(lambda: make_model(flags))
        parts = {"params": model, "opt_state": tx.init(nnx.state(model, nnx.Param))}
        jax.block_until_ready(jax.tree.leaves(parts))
        before, begin = start_measuring(), time.perf_counter()
        checkpoints.save(1, zero, **parts)
        checkpoints.wait()
    else:
        shapes = jax.eval_shape(tx.init, nnx.state(like, nnx.Param))
        before, begin = start_measuring(), time.perf_counter()
        parts = checkpoints.restore(zero, params=like, opt_state=shapes)
        jax.block_until_ready(jax.tree.leaves(parts))
    seconds, added = time.perf_counter() - begin, resident("VmHWM") - before
    leaves = jax.tree.leaves(parts)
    return {
        "state": sum(x.nbytes for x in leaves),
        "largest": max(x.nbytes for x in leaves),
        "held": sum(shard.data.nbytes for x in leaves for shard in x.addressable_shards),
        "added": added,
        "seconds": seconds,
    }


def make_model(flags: argparse.Namespace) -> GPT2:
    """The model."""
    sizes = {"num_layers": flags.num_layers, "embed_dim": flags.embed_dim, "num_heads": 8}
    return GPT2(vocab_size=flags.vocab_size, **sizes, rngs=nnx.Rngs(0))


def start_measuring() -> int:
    """Forgets the highest resident memory so far; what is resident now, in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return resident("VmRSS")


def resident(name: str) -> int:
    """VmRSS or VmHWM of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(f"{name}:"))
    return int(line.split()[1]) << 10


if __name__ == "__main__":
    main()
