"""Weights by path: those of a checkpoint, or of Hugging Face files."""

from __future__ import annotations

from pathlib import Path

from jzero.checkpoint import IN_RUN, MARK_OF_STEP, open_step, steps_in
from jzero.huggingface import open_huggingface
from jzero.resume import INFO_CONFIG, Weights, stored_weights


def is_checkpoint(path: str | Path) -> bool:
    """Whether a path is a step of a checkpoint, a directory of them, or the folder of a run."""
    path = Path(path)
    return (path / MARK_OF_STEP).is_file() or bool(steps_in(path) or steps_in(path / IN_RUN))


def open_weights(path: str | Path, *, target: str) -> Weights:
    """Opens weights by the names that checkpoints give them; nothing but headers is read.

    Args:
      path: a checkpoint's step, a directory of them (the latest is taken), a Hugging Face folder,
        or a .safetensors file beside its config.json.
      target: import path of the model, which knows Hugging Face's names for its parameters.

    Raises:
      ValueError: there are no weights, or they are damaged, or of another kind of model.
    """
    if is_checkpoint(path):
        step = open_step(path)
        arguments = dict(step.manifest.info.get(INFO_CONFIG, {}).get("model", {}))
        if arguments.pop("target", target) != target:
            arguments = {}  # another class, whose arguments mean other things
        arguments.pop("init_from", None)
        return Weights(step.arrays, arguments)
    if not Path(path).exists():
        raise ValueError(
            f"there are no weights at {path}; name a checkpoint, or a Hugging Face folder with "
            "config.json and model.safetensors."
        )
    found = open_huggingface(path, target)
    return Weights(stored_weights(found), found.arguments)
