"""Tiny runs for tests: a configuration, and a run of it whose output is kept."""

import io
import random
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from jzero.checkpoint import Step, open_step
from jzero.config import parse_config
from jzero.metrics import read_metrics
from jzero.source import whole
from jzero.train import Result, train

TINY: dict[str, dict[str, Any]] = {
    "model": {"num_positions": 16, "num_layers": 2, "num_heads": 2, "embed_dim": 16,
              "vocab_size": 256, "dropout": 0.1},
    "optimizer": {"learning_rate": 1e-2, "clip_norm": 1.0, "weight_decay": 0.1},
    "data": {"seq_len": 16, "val_fraction": 0.2},
    "train": {"num_steps": 20, "micro_batch": 1, "num_microbatches": 2, "log_every": 5,
              "eval_batches": 1},
    "checkpoint": {"every": 10, "keep": 5},
}  # fmt: skip


def write_text(folder: Path) -> str:
    """4000 bytes of words that repeat; the path."""
    words = random.Random(0).choices(["alpha ", "beta ", "gamma\n", "delta "], k=700)
    (folder / "text.txt").write_text("".join(words)[:4000])
    return str(folder / "text.txt")


def tiny(text: str, out_dir: Path, **changes: dict[str, Any]) -> Any:
    """The configuration TINY with changes by section."""
    tables = {key: dict(table) for key, table in TINY.items()}
    tables["data"]["path"], tables["train"]["out_dir"] = text, str(out_dir)
    for section, table in changes.items():
        tables.setdefault(section, {}).update(table)
    return parse_config(tables)


def run(config: Any) -> tuple[Result, str]:
    """Trains; the result and what was printed."""
    stream = io.StringIO()
    result = train(config, Console(file=stream, width=200))
    return result, stream.getvalue()


def curve(out_dir: Path) -> list[float]:
    """The loss of each step, in order."""
    return [row["loss"] for row in read_metrics(out_dir / "metrics.jsonl") if "loss" in row]


def saved(out_dir: Path, step: int | None = None) -> tuple[Step, dict[str, np.ndarray]]:
    """A checkpoint of a run, the latest where no step is named, and all of its arrays."""
    place = out_dir / "checkpoints"
    found = open_step(place if step is None else place / str(step))
    arrays = found.arrays
    return found, {n: arrays.read(n, whole(x.shape)) for n, x in arrays.leaves.items()}


def assert_same(got: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> None:
    """The same names, dtypes and bits."""
    assert got.keys() == want.keys()
    for name, x in want.items():
        assert got[name].dtype == x.dtype, name
        assert got[name].tobytes() == x.tobytes(), name
