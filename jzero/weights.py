"""Weights by path: those of a checkpoint, or of Hugging Face files."""

from __future__ import annotations

from pathlib import Path

from jzero.checkpoint import MARK_OF_STEP, open_step, steps_in
from jzero.huggingface import open_huggingface
from jzero.resume import stored_weights
from jzero.source import Source


def is_checkpoint(path: str | Path) -> bool:
    """Whether a path is a step of a checkpoint, or a directory of steps."""
    return (Path(path) / MARK_OF_STEP).is_file() or bool(steps_in(path))


def open_weights(path: str | Path, *, target: str) -> Source:
    """Opens weights by the names that checkpoints give them; nothing but headers is read.

    Args:
      path: a checkpoint's step, a directory of them (the latest is taken), a Hugging Face folder,
        or a .safetensors file beside its config.json.
      target: import path of the model, which knows Hugging Face's names for its parameters.

    Raises:
      ValueError: there are no weights, or they are damaged, or of another kind of model.
    """
    if is_checkpoint(path):
        return open_step(path).arrays
    if not Path(path).exists():
        raise ValueError(
            f"there are no weights at {path}; name a checkpoint, or a Hugging Face folder with "
            "config.json and model.safetensors."
        )
    return stored_weights(open_huggingface(path, target))
