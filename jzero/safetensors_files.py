"""Files of safetensors: what is in them, pieces of it, and the header of a new one.

The format: eight bytes that say how long the header is, the header (JSON, padded with blanks), then
the bytes of each tensor, one after the other (https://github.com/huggingface/safetensors#format).
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from jzero.source import Index

DTYPES = {
    "F64": np.dtype("float64"),
    "F32": np.dtype("float32"),
    "F16": np.dtype("float16"),
    "BF16": np.dtype(jnp.bfloat16),
}
CODES = {dtype: code for code, dtype in DTYPES.items()}
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"  # transformers' names
ALIGNMENT = 8  # of the tensors' bytes, by the length of the header


@dataclasses.dataclass(frozen=True)
class Tensor:
    """What a header says of a tensor.

    Args:
      shape: as stored.
      code: of its dtype, such as "F32"; `DTYPES` has those of numbers with a fraction.
    """

    shape: tuple[int, ...]
    code: str

    @property
    def num_bytes(self) -> int:
        """Bytes of its values."""
        return math.prod(self.shape) * DTYPES[self.code].itemsize


def read_header(path: Path) -> dict[str, Tensor]:
    """What is in a file, by name; none of it is read.

    Raises:
      ValueError: the file is not there, cut short, or of another format.
    """
    with _opened(path) as file:
        found = ((name, file.get_slice(name)) for name in file.keys())  # noqa: SIM118
        return {name: Tensor(tuple(x.get_shape()), x.get_dtype()) for name, x in found}


def read_piece(path: Path, name: str, index: Index) -> np.ndarray:
    """The piece of a tensor at `index`, one slice with bounds a dim; nothing else is read.

    Raises:
      ValueError: the file is gone or damaged, or has not that piece.
    """
    with _opened(path) as file:
        try:
            return file.get_slice(name)[index]
        except (SafetensorError, IndexError) as error:
            raise ValueError(f"{path} has no {name} of that shape any more ({error}).") from error


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="numpy")
    except FileNotFoundError as error:
        raise ValueError(f"{path} does not exist; was it moved or removed?") from error
    except SafetensorError as error:
        raise ValueError(
            f"{path} is not a whole safetensors file: it has {path.stat().st_size} bytes ({error});"
            " download or copy it again (a pointer of git-lfs needs `git lfs pull`)."
        ) from error


def header(tensors: Mapping[str, Tensor]) -> tuple[bytes, dict[str, int]]:
    """The first bytes of a file, and where in it each tensor begins.

    Args:
      tensors: by name. The widest go first, which keeps each at a multiple of its item size, then
        by name: what the safetensors library writes, byte for byte.

    >>> start, offsets = header({"a": Tensor((3,), "BF16"), "b": Tensor((2,), "F32")})
    >>> len(start), offsets
    (152, {'b': 152, 'a': 160})
    """
    fields: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begins, end = {}, 0
    for name in sorted(tensors, key=lambda n: (-DTYPES[tensors[n].code].itemsize, n)):
        x = tensors[name]
        begins[name], end = end, end + x.num_bytes
        fields[name] = {"dtype": x.code, "shape": x.shape, "data_offsets": (begins[name], end)}
    text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    start = len(text).to_bytes(8, "little") + text
    return start, {name: len(start) + begin for name, begin in begins.items()}


def groups(num_rows: int, row_bytes: int, limit: int) -> Iterator[slice]:
    """Rows in groups of at most `limit` bytes, or of one larger row.

    >>> list(groups(5, 4, 8))
    [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    step = max(limit // max(row_bytes, 1), 1)
    return (slice(i, min(i + step, num_rows)) for i in range(0, num_rows, step))
