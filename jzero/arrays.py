"""Arrays on disk in their logical shapes: each process writes its pieces, anyone reads any piece.

Each array is a Zarr 3 folder, written and read by TensorStore. Every chunk carries a CRC-32C, which
every read checks; a chunk that is gone is an error, never zeros.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import hashlib
import itertools
import math
import re
import urllib.parse
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tensorstore as ts

from jzero.layout import is_key
from jzero.source import Index, Source

CHUNK_BYTES = 8 << 20  # of one file: what a reader of any smaller piece has to hold
NUM_READS = 4  # files that are read at the same time
MAX_NAME = 200  # bytes of a folder's name; file systems allow 255
NUM_OPEN = 8  # arrays that are written at the same time


class DamagedError(ValueError):
    """What is stored is not what was written."""


@dataclasses.dataclass(frozen=True)
class StoredLeaf:
    """What is known of an array on disk.

    Args:
      shape: logical; of a typed PRNG key with the dims of its data.
      dtype: its name in numpy's words.
      chunk: shape of the pieces that files hold.
      key_impl: of a typed PRNG key, which is stored as its data; empty for any other array.
    """

    shape: tuple[int, ...]
    dtype: str
    chunk: tuple[int, ...]
    key_impl: str = ""

    @property
    def num_bytes(self) -> int:
        """Bytes of the logical array."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    @property
    def metadata(self) -> dict[str, Any]:
        """What zarr.json says, apart from defaults."""
        order = {"configuration": {"endian": "little"}} if np.dtype(self.dtype).itemsize > 1 else {}
        return {
            "shape": list(self.shape),
            "data_type": self.dtype,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(self.chunk)}},
            "codecs": [
                {"name": "bytes", **order},
                {"name": "crc32c"},
            ],
        }


@dataclasses.dataclass(frozen=True)
class Pieces:
    """An array to be written, as far as this process holds it.

    Args:
      leaf: the array.
      parts: index within the logical shape, and what is there; different processes have different
        parts, whose edges are edges of chunks.
    """

    leaf: StoredLeaf
    parts: Iterable[tuple[Index, np.ndarray]]


def pieces_of(x: jax.Array, shape: tuple[int, ...]) -> Pieces:
    """Copies to the host what this process holds of an array, each part once over all processes.

    Args:
      x: an array in its shape at rest, padding included, or a typed PRNG key.
      shape: its logical shape, as large or smaller in each dim.

    Returns:
      Copies that later steps, which may reuse the device's memory, leave as they are.
    """
    key_impl = ""
    if is_key(x.dtype):
        key_impl = str(jax.random.key_impl(x))
        x = jax.random.key_data(x)
        shape = x.shape
    shard = x.sharding.shard_shape(x.shape)
    is_cut = [size != full for size, full in zip(shard, x.shape, strict=True)]
    chunk = chunk_shape(shard, is_cut, x.dtype.itemsize)
    leaf = StoredLeaf(tuple(shape), x.dtype.name, chunk, key_impl)
    mine = [s for s in x.addressable_shards if s.replica_id == 0]
    for part in mine:
        part.data.copy_to_host_async()
    parts = []
    for part in mine:
        index = _clipped(part.index, shape)
        if all(s.start < s.stop for s in index):
            size = tuple(slice(0, s.stop - s.start) for s in index)
            parts.append((index, np.array(np.asarray(part.data)[size])))
    return Pieces(leaf, parts)


def pieces_of_source(source: Source, name: str) -> Pieces:
    """One array of a source, read chunk by chunk while it is written."""
    x = source.leaves[name]
    chunk = chunk_shape(x.shape, [False] * len(x.shape), np.dtype(x.dtype).itemsize)
    leaf = StoredLeaf(tuple(x.shape), np.dtype(x.dtype).name, chunk)
    return Pieces(leaf, ((index, source.read(name, index)) for index in chunks(leaf)))


def chunk_shape(
    shard: tuple[int, ...], is_cut: Iterable[bool], itemsize: int, limit: int = CHUNK_BYTES
) -> tuple[int, ...]:
    """The shape of what one file holds: even parts of a shard, of about `limit` bytes at most.

    Along a dim that is cut, the edges of shards must be edges of chunks, or two processes would
    write one file.

    >>> chunk_shape((8, 4096, 1024), [False, True, False], 4, limit=1 << 20)
    (1, 256, 1024)
    """
    chunk = [max(size, 1) for size in shard]
    for dim, cut in enumerate(is_cut):
        excess = math.prod(chunk) * itemsize / limit
        if excess <= 1:
            break
        size = chunk[dim]
        wanted = max(int(size / excess), 1)
        if cut:
            fitting = max(k for k in range(1, wanted + 1) if size % k == 0)
            wanted = fitting if fitting * 8 >= wanted else size  # of a prime, no thousand files
        chunk[dim] = wanted
    return tuple(chunk)


def chunks(leaf: StoredLeaf) -> Iterator[Index]:
    """The index of each chunk, those at the end as short as the array makes them."""
    pairs = zip(leaf.shape, leaf.chunk, strict=True)
    rows = [[slice(i, min(i + c, n)) for i in range(0, n, c)] for n, c in pairs]
    yield from itertools.product(*rows)


def folder_name(name: str) -> str:
    """The folder of an array: its name with what file systems forbid escaped, shortened by a hash.

    >>> folder_name("params.h/attn.weight")
    'params.h%2Fattn.weight'
    """
    quoted = urllib.parse.quote(name, safe="")
    if len(quoted) <= MAX_NAME:
        return quoted
    return f"{quoted[: MAX_NAME - 17]}-{hashlib.sha256(name.encode()).hexdigest()[:16]}"


def write_arrays(directory: Path, arrays: Mapping[str, Pieces]) -> None:
    """Writes pieces; every process calls it with its own, for the same names.

    Raises:
      OSError: the file system refused; says why.
    """
    context = _context()

    def write(name: str) -> None:
        pieces = arrays[name]
        target = _open(directory / folder_name(name), pieces.leaf, context, is_new=True)
        for index, part in pieces.parts:
            target[index].write(part, can_reference_source_data_indefinitely=True).result()

    with concurrent.futures.ThreadPoolExecutor(NUM_OPEN) as pool:
        for done in [pool.submit(write, name) for name in arrays]:
            try:
                done.result()
            except ValueError as error:  # how TensorStore tells of a full disk, say
                raise OSError(_reason(error)) from error


class StoredArrays:
    """Arrays on disk as a `jzero.source.Source`; nothing is read before it is asked for.

    Args:
      directory: where `write_arrays` put them.
      stored: what is known of each, by name.
    """

    def __init__(self, directory: Path, stored: Mapping[str, StoredLeaf]) -> None:
        self.directory, self.stored = directory, stored
        self._context = _context()

    @property
    def leaves(self) -> Mapping[str, jax.ShapeDtypeStruct]:
        """Logical shape and dtype by name; of a typed PRNG key those of its data."""
        return {
            name: jax.ShapeDtypeStruct(leaf.shape, np.dtype(leaf.dtype))
            for name, leaf in self.stored.items()
        }

    def read(self, name: str, index: Index) -> np.ndarray:
        """Reads a piece; as `jzero.source.Source.read`."""
        place = self.directory / folder_name(name)
        try:
            found = _open(place, self.stored[name], self._context, is_new=False)
            return np.asarray(found[index].read().result())
        except ValueError as error:
            raise DamagedError(f"{name} in {self.directory}: {_reason(error)}") from error

    def damaged(self, name: str) -> list[str]:
        """Reads all of an array, chunk by chunk; what is wrong with it, one line each."""
        bad = []
        for index in chunks(self.stored[name]):
            try:
                self.read(name, index)
            except ValueError as error:
                bad.append(str(error))
        return list(dict.fromkeys(bad))


def _context() -> Any:
    """Without a cache, and with few files in memory at once."""
    limits = {"cache_pool": {"total_bytes_limit": 0}, "file_io_concurrency": {"limit": NUM_READS}}
    return ts.Context(limits)


def _open(place: Path, leaf: StoredLeaf, context: Any, is_new: bool) -> Any:
    spec = {
        "driver": "zarr3",
        "kvstore": {"driver": "file", "path": f"{place}/"},
        "metadata": leaf.metadata,
        "store_data_equal_to_fill_value": True,  # a file of zeros, not the absence of one
        "fill_missing_data_reads": False,
    }
    return ts.open(ts.Spec(spec), open=True, create=is_new, context=context).result()


def _clipped(index: tuple[slice, ...], shape: tuple[int, ...]) -> Index:
    """The part of an index at rest that lies within the logical shape."""
    return tuple(
        slice(min(s.indices(10**18)[0], n), min(s.indices(10**18)[1], n))
        for s, n in zip(index, shape, strict=True)
    )


def _reason(error: Exception) -> str:
    """A TensorStore error without its source locations; of the system's, its words and the file.

    >>> _reason(ValueError("Error writing local file \\"/a/b\\": No room [os_error_code='28']"))
    'No room, writing /a/b'
    """
    text = str(error).split(" [source locations")[0].split(" [tensorstore")[0]
    of_system = re.search(r"([^:\[\]]+) \[os_error_code=", text)
    place = re.search(r'(\w+) local file "([^"]+)"', text)
    if of_system is None or place is None:
        return text
    return f"{of_system[1].strip()}, {place[1]} {place[2]}"
