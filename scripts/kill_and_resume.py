"""Kills a run with SIGKILL at random moments, starts it again, and checks what it finds.

Each time there must be a complete checkpoint, or none yet, whose every byte is as written; at the
end the losses and the state must be those of a run that nobody killed, to the bit.

    python -m scripts.kill_and_resume --num-kills 50
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from jzero.checkpoint import damaged, open_step, steps_in
from jzero.metrics import read_metrics
from jzero.source import whole

CONFIG = """\
[model]
num_positions = 64
num_layers = 2
num_heads = 2
embed_dim = 64
vocab_size = 256
dropout = 0.1

[data]
seq_len = 64
max_bytes = 1_000_000

[zero]
stage = 3

[train]
num_steps = 1500
micro_batch = 1
num_microbatches = 2
log_every = 50
eval_batches = 1

[checkpoint]
every = 3
keep = 2
"""


def main() -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path, killed, straight = folder / "run.toml", folder / "killed", folder / "straight"
        path.write_text(CONFIG)
        kills = kill_and_resume(path, killed, num_kills=flags.num_kills, seed=flags.seed)
        for i, (step, kept) in enumerate(kills, 1):
            print(f"kill {i:3d}: about step {step:4d}; complete checkpoints {kept}")
        run(path, straight).communicate()
        same = losses(killed) == losses(straight) and state(killed) == state(straight)
    print("losses and state equal those of a run that nobody killed:", same)
    return 0 if same else 1


def kill_and_resume(
    path: Path, out_dir: Path, *, num_kills: int, seed: int
) -> list[tuple[int, list[int]]]:
    """Runs a configuration to its end, through a number of SIGKILLs.

    Args:
      path: of the configuration.
      out_dir: of the run.
      num_kills: how many times to kill it, at random moments after its first step.
      seed: of the moments.

    Returns:
      For each kill the step that was last logged before, and the steps that were saved whole.

    Raises:
      AssertionError: a checkpoint that counts as complete is damaged, or none is left.
      RuntimeError: the run ended otherwise than by the signal.
    """
    rng, kills = random.Random(seed), []
    while len(kills) < num_kills:
        process = run(path, out_dir)
        before = last_step(out_dir)
        while process.poll() is None and last_step(out_dir) <= before:
            time.sleep(0.01)
        time.sleep(rng.uniform(0, 0.3))
        process.send_signal(signal.SIGKILL)
        output = process.communicate()[0]
        if process.returncode != -signal.SIGKILL:
            raise RuntimeError(f"the run ended before it was killed: {output}")
        kept = steps_in(out_dir / "checkpoints")
        had = kills[-1][1] if kills else []
        assert kept or not had, "a checkpoint was there, and now none is"
        for step in kept:
            assert damaged(open_step(out_dir / "checkpoints" / str(step))) == []
        kills.append((last_step(out_dir), kept))
    process = run(path, out_dir)
    output = process.communicate()[0]
    if process.returncode != 0:
        raise RuntimeError(output)
    return kills


def run(path: Path, out_dir: Path) -> subprocess.Popen:
    """Starts `jzero train`."""
    command = [sys.executable, "-m", "jzero", "train", str(path), "--train.out_dir", str(out_dir)]
    root = str(Path(__file__).parent.parent)
    env = {"PYTHONPATH": root, **os.environ}
    return subprocess.Popen(
        command, cwd=root, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def last_step(out_dir: Path) -> int:
    """The last step that a run has logged; 0 before the first."""
    metrics = out_dir / "metrics.jsonl"
    try:
        return max((row["step"] for row in read_metrics(metrics)), default=0)
    except (FileNotFoundError, ValueError):
        return 0


def losses(out_dir: Path) -> dict[int, float]:
    """The loss of each step."""
    rows = read_metrics(out_dir / "metrics.jsonl")
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


def state(out_dir: Path) -> dict[str, bytes]:
    """All arrays of the latest checkpoint."""
    arrays = open_step(out_dir / "checkpoints").arrays
    return {n: arrays.read(n, whole(x.shape)).tobytes() for n, x in arrays.leaves.items()}


if __name__ == "__main__":
    sys.exit(main())
