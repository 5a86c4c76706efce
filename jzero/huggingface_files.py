"""What a Hugging Face directory has: its config.json, and where each tensor is."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jzero.safetensors_files import (
    DTYPES,
    INDEX,
    WEIGHTS,
    Tensor,
    groups,
    read_header,
    read_piece,
)
from jzero.source import whole

CONFIG = "config.json"
PREFIX = "transformer."  # of every tensor but the head's, where the head was saved, too
BUFFERS = (".attn.bias", ".attn.masked_bias")  # masks that old versions stored
COMPARED_BYTES = 1 << 24  # held of each of two tensors that are compared


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a tensor is: in which file, and under what name."""

    path: Path
    name: str
    tensor: Tensor


def find_files(path: Path) -> tuple[Path, list[Path]]:
    """The directory of config.json, and the files that hold tensors.

    Args:
      path: a directory, or a .safetensors file.

    Raises:
      ValueError: what is needed is not there; says what is.
    """
    if not path.exists():
        raise ValueError(f"{path} does not exist; give a directory with {CONFIG} and {WEIGHTS}.")
    if path.is_file() and path.suffix != ".safetensors":
        raise ValueError(f"{path} is no .safetensors file; name one, or the directory of one.")
    folder = path if path.is_dir() else path.parent
    if not (folder / CONFIG).is_file():
        raise ValueError(
            f"{folder} has no {CONFIG}, which tells the sizes of the model; put it there."
        )
    if path.is_file():
        return folder, [path]
    if (path / WEIGHTS).is_file():
        return folder, [path / WEIGHTS]
    if (path / INDEX).is_file():
        return folder, _shard_files(path)
    pickles = sorted(file.name for file in path.glob("pytorch_model*.bin"))
    if pickles:
        raise ValueError(
            f"{path} has {', '.join(pickles)}, but no {WEIGHTS}; convert it with transformers:"
            f" GPT2LMHeadModel.from_pretrained({str(path)!r}).save_pretrained(OUT)."
        )
    raise ValueError(f"{path} has neither {WEIGHTS} nor {INDEX}; put one of them there.")


def _shard_files(folder: Path) -> list[Path]:
    weight_map = read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{folder / INDEX} has no weight_map; download it again.")
    files = sorted({folder / str(name) for name in weight_map.values()})
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise ValueError(
            f"{folder / INDEX} names {', '.join(missing)}, which {'are' if missing[1:] else 'is'}"
            f" not in {folder}; download what is missing."
        )
    return files


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
      ValueError: it is damaged, or no object.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}; download it again.") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} is a {type(found).__name__}, not an object; download it again.")
    return found


def find_tensors(files: list[Path], folder: Path) -> dict[str, Place]:
    """Every tensor but buffers by its name without the prefix; only headers are read.

    Raises:
      ValueError: a file is damaged, or tensors are there twice; names them.
    """
    found: dict[str, Place] = {}
    twice = []
    for file in files:
        for stored, tensor in read_header(file).items():
            name = stored.removeprefix(PREFIX)
            if name.endswith(BUFFERS):
                continue
            if name in found:
                other = found[name]
                twice.append(f"{other.name} in {other.path.name}, {stored} in {file.name}")
            found[name] = Place(file, stored, tensor)
    if twice:
        raise ValueError(f"{folder} has tensors twice; keep one of each:\n  " + "\n  ".join(twice))
    return found


def is_copy(tensors: Mapping[str, Place], left: str, right: str) -> bool:
    """Whether both are there and equal to the bit; compared in pieces."""
    if left not in tensors or right not in tensors:
        return False
    a, b = tensors[left], tensors[right]
    if a.tensor != b.tensor or a.tensor.code not in DTYPES or not a.tensor.shape:
        return False
    num_rows, *rest = a.tensor.shape
    for rows in groups(num_rows, a.tensor.num_bytes // max(num_rows, 1), COMPARED_BYTES):
        index = (rows, *whole(tuple(rest)))
        if (
            read_piece(a.path, a.name, index).tobytes()
            != read_piece(b.path, b.name, index).tobytes()
        ):
            return False
    return True
