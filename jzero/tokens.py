"""Tokens from files, and files of them; a text's tokens are its bytes.

Files are memory-mapped one window at a time, so nothing is read whole, however large the data or
many the files.
"""

import bisect
import glob
import hashlib
import os
import sysconfig
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

STDLIB = "python-stdlib"
SOURCES = (
    f"give a text file, a folder of texts, a .bin token file, a folder or glob of .bin shards, "
    f"or {STDLIB!r}"
)
SKIPPED_DIRS = frozenset(
    {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
)
CHUNK = 1 << 20  # tokens looked at together where a whole stream is gone through
HEADER_INTS = 256  # llm.c: int32 magic, version, number of tokens, then zeros
LLMC_FORMATS = {  # magic: (version, dtype, vocabulary), as llm.c's data_common.py writes them
    20240520: (1, np.dtype("<u2"), 50257),
    20240801: (7, np.dtype("<u4"), 128256),
}


@dataclass(frozen=True)
class Part:
    """The tokens of one file: `size` of them in `dtype`, after `offset` bytes of header."""

    path: Path
    size: int
    dtype: np.dtype
    offset: int = 0
    vocab_size: int | None = None

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens start to stop, in the file's dtype; the map lives as long as the array."""
        first_byte = self.offset + start * self.dtype.itemsize
        return np.memmap(self.path, self.dtype, "r", first_byte, (stop - start,))


@dataclass(frozen=True)
class Tokens:
    """A stream of tokens laid end to end over files; `tokens[a:b]` is an int32 array (b - a,)."""

    parts: tuple[Part, ...]
    start: int
    stop: int

    @property
    def size(self) -> int:
        """Number of tokens."""
        return self.stop - self.start

    @property
    def vocab_size_hint(self) -> int | None:
        """Vocabulary this kind of file usually holds: 256 for texts, None where it is unknown."""
        sizes = [part.vocab_size for part in self.parts]
        return None if None in sizes else max(size for size in sizes if size is not None)

    @cached_property
    def _ends(self) -> list[int]:
        return np.cumsum([part.size for part in self.parts]).tolist()

    def runs(self, start: int, stop: int) -> Iterator[tuple[Part, int, int]]:
        """The files that hold tokens start to stop, each with its own first and last position."""
        start, stop = self.start + start, self.start + stop
        for i in range(bisect.bisect_right(self._ends, start), len(self.parts)):
            first = self._ends[i] - self.parts[i].size
            if first >= stop:
                return
            begin, end = max(start - first, 0), min(stop, self._ends[i]) - first
            if begin < end:  # an empty map is an error
                yield self.parts[i], begin, end

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: slice) -> np.ndarray:
        if not isinstance(index, slice):
            raise TypeError(f"tokens[{index!r}] is not a slice; use tokens[i : i + 1]")
        start, stop, step = index.indices(self.size)
        if step != 1:
            raise ValueError(f"tokens cannot be sliced with step {step}; slice, then [::{step}]")
        out = np.empty(max(stop - start, 0), np.int32)
        filled = 0
        for part, first, last in self.runs(start, start + out.size):
            out[filled : filled + last - first] = part.read(first, last)
            filled += last - first
        return out


def open_tokens(path: str, *, max_bytes: int | None = None) -> Tokens:
    """Opens a text, a folder of texts, token files, or the demo corpus as one stream of tokens.

    A `.bin` file holds nanoGPT's raw uint16 or llm.c's header and tokens (known by its magic).

    Args:
      path: see `list_files`.
      max_bytes: keeps the first so many bytes of a text corpus, >= 1; None keeps all.

    Returns:
      The stream, in the order of `list_files`; a text's vocabulary is 256.

    Raises:
      ValueError: missing, empty or mixed data, a malformed token file, a cap on token files.

    >>> open_tokens("python-stdlib", max_bytes=1000).size
    1000
    """
    if max_bytes is not None and max_bytes < 1:
        raise ValueError(f"max_bytes {max_bytes} keeps nothing; use 1 or more, or leave it out")
    files = list_files(path)
    if files[0].suffix == ".bin":
        if max_bytes is not None:
            raise ValueError(
                f"max_bytes {max_bytes} caps texts, and {path} holds token files; leave it out"
            )
        parts = tuple(_open_bin(file) for file in files)
    else:
        parts = tuple(Part(f, f.stat().st_size, np.dtype("u1"), 0, 256) for f in files)
    size = sum(part.size for part in parts)
    if not size:
        raise ValueError(f"data path {path!r} holds no bytes; {SOURCES}")
    return Tokens(parts, 0, size if max_bytes is None else min(size, max_bytes))


def list_files(path: str) -> list[Path]:
    """The files of a corpus, in the order in which their tokens follow each other.

    Args:
      path: a file, a folder (all files below it by relative path, hidden and binary ones left
        out), or a glob. "python-stdlib" is the source and topic texts of the running Python's
        standard library, in the order of a hash of their names: packages are interleaved, so the
        end of the stream (the validation split) is of the same kind as its beginning.

    Returns:
      At least one file: all of them `.bin`, or none.

    Raises:
      ValueError: nothing there, nothing but binary files, or token files mixed with texts.
    """
    if not path:
        raise ValueError(f"the data path is empty; {SOURCES}")
    place = Path(path).expanduser()
    if path == STDLIB:
        return _stdlib_files(Path(sysconfig.get_path("stdlib")))
    if place.is_dir():
        files = _walk(place)
    else:
        found = [str(place)] if place.exists() else sorted(glob.glob(str(place), recursive=True))
        files = [file for file in map(Path, found) if file.is_file()]
    if not files:
        what = "holds no files" if place.exists() else "does not exist"
        raise ValueError(f"data path {path!r} {what}; {SOURCES}")
    bins = [file for file in files if file.suffix == ".bin"]
    if bins and len(bins) < len(files):
        other = next(file for file in files if file.suffix != ".bin")
        raise ValueError(
            f"data path {path!r} mixes token files ({bins[0].name}) and others ({other.name}); "
            f"name one kind, as in {str(bins[0].parent / '*.bin')!r}"
        )
    return bins or _texts_only(path, files)


def _walk(root: Path, skipped: frozenset[str] = frozenset()) -> list[Path]:
    """Files below a folder by relative path, without hidden ones and skipped folders."""
    files = []
    for folder, dirs, names in os.walk(root):
        dirs[:] = [name for name in dirs if name[0] != "." and name not in skipped]
        files += [Path(folder, name) for name in names if name[0] != "."]
    files = [file for file in files if file.is_file()]
    return sorted(files, key=lambda file: file.relative_to(root).as_posix())


def _stdlib_files(root: Path) -> list[Path]:
    """The standard library's sources below root, tests left out, by a hash of their names."""
    files = [file for file in _walk(root, SKIPPED_DIRS) if file.suffix == ".py"]
    if not files:
        raise ValueError(
            f"{STDLIB!r}: this Python has no .py sources below {root}; use a Python that ships "
            f"them, or another corpus: {SOURCES}"
        )

    def name_hash(file: Path) -> bytes:
        return hashlib.sha256(file.relative_to(root).as_posix().encode()).digest()

    return sorted(files, key=name_hash)


def _texts_only(path: str, files: list[Path]) -> list[Path]:
    """The files without a NUL byte in their head; warns of the number left out."""
    texts = [file for file in files if not _is_binary(file)]
    if not texts:
        raise ValueError(f"data path {path!r} is binary ({files[0].name} has NULs); {SOURCES}")
    if len(texts) < len(files):
        warnings.warn(f"{path}: skipped {len(files) - len(texts)} binary files", stacklevel=3)
    return texts


def _is_binary(file: Path) -> bool:
    with file.open("rb") as stream:
        return b"\0" in stream.read(1 << 16)


def _open_bin(file: Path) -> Part:
    """A token file, its format told by its first int32."""
    num_bytes = file.stat().st_size
    header = np.fromfile(file, "<i4", count=3).tolist()
    if not num_bytes:
        raise ValueError(f"{file} is empty; write it again, or leave it out")
    if header and header[0] in LLMC_FORMATS:
        return _open_llmc(file, num_bytes, header)
    if num_bytes % 2:
        raise ValueError(
            f"{file} has {num_bytes} bytes, an odd number, so it holds no uint16 tokens; write it "
            f"again, or name it .txt if it is a text"
        )
    return Part(file, num_bytes // 2, np.dtype("<u2"))


def _open_llmc(file: Path, num_bytes: int, header: list[int]) -> Part:
    version, dtype, vocab_size = LLMC_FORMATS[header[0]]
    num_tokens = (num_bytes - 4 * HEADER_INTS) / dtype.itemsize
    if header[1:2] != [version]:
        raise ValueError(
            f"{file} has llm.c magic {header[0]} with version {header[1:2]}, not {version}; "
            f"write it again with version {version}"
        )
    if header[2:] != [num_tokens] or num_tokens < 1:
        raise ValueError(
            f"{file}: its header promises {header[2:]} tokens and the file holds {num_tokens:g}; "
            f"it is cut short or empty: write or download it again"
        )
    return Part(file, header[2], dtype, 4 * HEADER_INTS, vocab_size)


def split(tokens: Tokens, val_fraction: float) -> tuple[Tokens, Tokens]:
    """Cuts a stream in two: the last fraction is for validation.

    Args:
      tokens: the stream.
      val_fraction: share of its tokens, above 0 and below 1.

    Returns:
      (train, val), each with at least one token.

    Raises:
      ValueError: a fraction out of range, or one that leaves a side empty.

    >>> train, val = split(open_tokens("python-stdlib", max_bytes=1000), 0.1)
    >>> train.size, val.size
    (900, 100)
    """
    middle = tokens.stop - num_val_tokens(tokens.size, val_fraction)
    return replace(tokens, stop=middle), replace(tokens, start=middle)


def num_val_tokens(num_tokens: int, val_fraction: float) -> int:
    """How many of num_tokens `split` sets aside; it raises as `split` does."""
    num_val = round(num_tokens * val_fraction) if 0 < val_fraction < 1 else 0
    if not 0 < num_val < num_tokens:
        raise ValueError(
            f"val_fraction {val_fraction} of {num_tokens} tokens leaves training or validation "
            f"empty; use a share between 0 and 1, such as 0.1, or more data"
        )
    return num_val


def check_vocab(tokens: Tokens, vocab_size: int) -> None:
    """Reads the whole stream once and refuses token ids that the model has no row for.

    Args:
      tokens: the stream.
      vocab_size: the model's number of ids, >= 1.

    Raises:
      ValueError: names the first such id, its file and position, and the vocabulary needed.
    """
    first, largest = None, 0
    for part, start, stop in tokens.runs(0, tokens.size):
        if np.iinfo(part.dtype).max < vocab_size:
            continue
        for at in range(start, stop, CHUNK):
            ids = part.read(at, min(at + CHUNK, stop))
            largest = max(largest, int(ids.max()))
            if first is None and largest >= vocab_size:
                where = int(np.argmax(ids >= vocab_size))
                first = f"{part.path}: token id {ids[where]} at position {at + where}"
    if first is not None:
        raise ValueError(
            f"{first} is beyond vocab_size {vocab_size}; set the model's vocab_size to "
            f"{largest + 1} or more, or use data of the model's tokenizer"
        )


def write_nanogpt_bin(path: str | os.PathLike, tokens: Tokens | np.ndarray | Sequence[int]) -> None:
    """Writes a token file as nanoGPT does: little-endian uint16, nothing else.

    Args:
      path: the file; it appears only when it is complete.
      tokens: ids (n,), n >= 1, each 0 to 65535.

    Raises:
      ValueError: no tokens, not a row of integers, or an id that uint16 does not hold.
    """
    _write_uint16(Path(path), b"", tokens)


def write_llmc_bin(path: str | os.PathLike, tokens: Tokens | np.ndarray | Sequence[int]) -> None:
    """Writes a token file as llm.c does for GPT-2: 256 int32 of header, then uint16.

    Args:
      path: the file; it appears only when it is complete.
      tokens: ids (n,), 1 <= n < 2**31, each 0 to 65535.

    Raises:
      ValueError: as `write_nanogpt_bin`, and more tokens than the header can count.
    """
    if len(tokens) >= 2**31:
        raise ValueError(
            f"{path}: {len(tokens)} tokens do not fit llm.c's int32 count; write shards of fewer "
            f"than {2**31} tokens, or nanoGPT's format"
        )
    header = np.zeros(HEADER_INTS, "<i4")
    header[:3] = 20240520, 1, len(tokens)
    _write_uint16(Path(path), header.tobytes(), tokens)


def _write_uint16(path: Path, header: bytes, tokens: Tokens | np.ndarray | Sequence[int]) -> None:
    ids = tokens if isinstance(tokens, Tokens) else np.asarray(tokens)
    if not len(ids):
        raise ValueError(f"{path}: no tokens to write; give at least one")
    if isinstance(ids, np.ndarray) and (ids.ndim != 1 or ids.dtype.kind not in "iu"):
        raise ValueError(f"{path}: tokens are {ids.dtype}{ids.shape}; give one row of integer ids")
    unfinished = path.with_name(path.name + ".unfinished")
    try:
        with unfinished.open("wb") as stream:
            stream.write(header)
            for at in range(0, len(ids), CHUNK):
                stream.write(_as_uint16(path, at, ids[at : at + CHUNK]).tobytes())
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def _as_uint16(path: Path, at: int, ids: np.ndarray) -> np.ndarray:
    wrong = (ids < 0) | (ids > 65535)
    if wrong.any():
        where = int(np.argmax(wrong))
        raise ValueError(
            f"{path}: token id {ids[where]} at position {at + where} does not fit uint16 (0 to "
            f"65535); use a tokenizer of at most 65536 ids"
        )
    return ids.astype("<u2")
