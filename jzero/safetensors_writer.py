"""New files of safetensors: one or several with an index, and texts beside them, all or none."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from jzero.safetensors_files import DTYPES, INDEX, WEIGHTS, Tensor, header


def write_folder(
    out: Path,
    texts: Mapping[str, Mapping[str, Any]],
    tensors: Mapping[str, Tensor],
    values: Iterable[tuple[str, np.ndarray]],
    max_shard_bytes: int,
) -> list[Path]:
    """Writes tensors one at a time; the files have their names only when all are whole.

    Args:
      out: directory, made where it is not there.
      texts: of JSON files, by name.
      tensors: what is to be written, by name.
      values: of each of them once, in any order; they are cast.
      max_shard_bytes: more than this makes several files and an index; at least 1.

    Returns:
      The files.

    Raises:
      ValueError: `max_shard_bytes` is too small, or a value is beyond its dtype.
      OSError: the file system refused; there is no half model then.
    """
    if max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes {max_shard_bytes} is below 1; 5 GB is usual.")
    shards = _named(in_shards(dict(sorted(tensors.items())), max_shard_bytes))
    index = {INDEX: _index(tensors, shards)} if len(shards) > 1 else {}
    # In this order they get their names: without the last one there is no model.
    with _new_files(out, [*texts, *shards, *index]) as files:
        for name, text in {**texts, **index}.items():
            files[name].write((json.dumps(text, indent=2, sort_keys=True) + "\n").encode())
        spots = _write_headers(files, tensors, shards)
        for name, array in values:
            file, offset = spots.pop(name)
            _write_values(file, offset, _cast(array, DTYPES[tensors[name].code], name))
        assert not spots, f"no values for {list(spots)}"
    return [out / name for name in files]


def in_shards(tensors: Mapping[str, Tensor], max_bytes: int) -> list[list[str]]:
    """Splits names, in their order, into files of at most `max_bytes`, or of one larger tensor.

    >>> in_shards({name: Tensor((4,), "F32") for name in "abc"}, 40)
    [['a', 'b'], ['c']]
    """
    shards: list[list[str]] = [[]]
    size = 0
    for name, x in tensors.items():
        if shards[-1] and size + x.num_bytes > max_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += x.num_bytes
    return shards


def _named(shards: list[list[str]]) -> dict[str, list[str]]:
    """The files' names, with the tensors of each."""
    if len(shards) == 1:
        return {WEIGHTS: shards[0]}
    stem, _, suffix = WEIGHTS.partition(".")
    total = f"{len(shards):05d}"
    return {f"{stem}-{i:05d}-of-{total}.{suffix}": s for i, s in enumerate(shards, 1)}


def _index(tensors: Mapping[str, Tensor], shards: Mapping[str, list[str]]) -> dict[str, Any]:
    return {
        "metadata": {"total_size": sum(x.num_bytes for x in tensors.values())},
        "weight_map": {name: file for file, names in shards.items() for name in names},
    }


@contextlib.contextmanager
def _new_files(out: Path, names: list[str]) -> Iterator[dict[str, BinaryIO]]:
    """Files to write that get their names, in this order, when all are on disk; else none stays."""
    out.mkdir(parents=True, exist_ok=True)
    drafts = {name: out / f".{name}.unfinished" for name in names}
    try:
        with contextlib.ExitStack() as stack:
            files: dict[str, BinaryIO] = {
                name: stack.enter_context(draft.open("wb")) for name, draft in drafts.items()
            }
            yield files
            for file in files.values():
                file.flush()
                os.fsync(file.fileno())
        for name, draft in drafts.items():
            draft.replace(out / name)
    finally:
        for draft in drafts.values():
            draft.unlink(missing_ok=True)


def _write_headers(
    files: Mapping[str, BinaryIO],
    tensors: Mapping[str, Tensor],
    shards: Mapping[str, list[str]],
) -> dict[str, tuple[BinaryIO, int]]:
    """Writes the header of each file; returns where each tensor goes."""
    spots = {}
    for file_name, names in shards.items():
        start, offsets = header({name: tensors[name] for name in names})
        files[file_name].write(start)
        spots |= {name: (files[file_name], offset) for name, offset in offsets.items()}
    return spots


def _write_values(file: BinaryIO, offset: int, values: np.ndarray) -> None:
    """Writes a tensor where its header says."""
    file.seek(offset)
    file.write(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)


def _cast(values: np.ndarray, dtype: np.dtype, name: str) -> np.ndarray:
    if values.dtype == dtype:
        return values
    with np.errstate(over="ignore"):
        narrow = values.astype(dtype)
    if (np.isinf(narrow) & np.isfinite(values)).any():
        raise ValueError(
            f"{name} has values beyond {dtype.name}'s largest; write bfloat16 or float32."
        )
    return narrow
