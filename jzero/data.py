"""The data of a run: batches whose position is a function of the step, and the figure to beat."""

import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace

import grain
import numpy as np

from jzero.config import DataConfig, ModelConfig
from jzero.schema import own_arguments
from jzero.tokens import CHUNK, Tokens, check_vocab, open_tokens, split

BYTE_VOCAB = 256
MAX_CHECKED = 1 << 28  # tokens read before the start: to look for wrong ids, to count bigrams
MAX_BIGRAM_VOCAB = 4096  # its table of counts takes 8 vocab_size**2 bytes


@dataclass(frozen=True)
class Corpus:
    """The data of a run."""

    train: Tokens
    val: Tokens
    bigram_bits: float | None

    @property
    def is_bytes(self) -> bool:
        """Whether a token is a byte of text."""
        return self.train.vocab_size_hint == self.val.vocab_size_hint == BYTE_VOCAB


def open_corpus(cuts: DataConfig, model: ModelConfig) -> Corpus:
    """Opens the data, and checks it against the model's arguments.

    Raises:
      ValueError: no data, too little, ids beyond `vocab_size`, or `seq_len` above `num_positions`.
    """
    arguments = own_arguments(model)
    check_seq_len(cuts, model)
    tokens = open_tokens(cuts.path, max_bytes=cuts.max_bytes)
    if cuts.val_path is None:
        train, val = split(tokens, cuts.val_fraction)
    else:
        train, val = tokens, open_tokens(cuts.val_path)
    for part in (train, val):
        head = replace(part, stop=min(part.stop, part.start + MAX_CHECKED))
        if arguments.get("vocab_size") is not None:
            check_vocab(head, arguments["vocab_size"])
        Batches(part, seq_len=cuts.seq_len, global_batch_size=1, seed=cuts.seed)
    corpus = Corpus(train, val, None)
    if not corpus.is_bytes or train.size > MAX_CHECKED:
        return corpus
    return replace(corpus, bigram_bits=bigram_bits(train, val))


def check_seq_len(cuts: DataConfig, model: ModelConfig) -> None:
    """Refuses rows that are longer than the model has positions.

    Raises:
      ValueError: with both lengths.
    """
    longest = own_arguments(model).get("num_positions")
    if longest is not None and cuts.seq_len > longest:
        raise ValueError(
            f"[data] seq_len {cuts.seq_len} is longer than the model's num_positions {longest}; "
            f"set seq_len to {longest} or less, or raise model.num_positions."
        )


def fingerprint(tokens: Tokens) -> list[int]:
    """How many tokens there are, and a checksum of the first and the last of them.

    >>> fingerprint(open_tokens("python-stdlib", max_bytes=100))[0]
    100
    """
    ends = (tokens[:CHUNK], tokens[max(tokens.size - CHUNK, 0) : tokens.size])
    return [tokens.size, zlib.crc32(ends[1].tobytes(), zlib.crc32(ends[0].tobytes()))]


@dataclass(frozen=True)
class Windows:
    """Rows of int32 (seq_len + 1,), at each multiple of seq_len; the end that is left is left out.

    >>> windows = Windows(open_tokens("python-stdlib", max_bytes=100), seq_len=10)
    >>> len(windows), windows[8].shape
    (9, (11,))
    """

    tokens: Tokens
    seq_len: int

    def __len__(self) -> int:
        return (self.tokens.size - 1) // self.seq_len

    def __getitem__(self, index: int) -> np.ndarray:
        start = index * self.seq_len
        return self.tokens[start : start + self.seq_len + 1]


class Batches:
    """Batches by step: `batches[step]` depends on the step alone, in any order of asking.

    Windows of seq_len + 1 tokens start at multiples of seq_len, so the last target of one is the
    first input of the next. Each window comes once an epoch, each epoch in an order of its own;
    one epoch follows another without a gap, if need be within a batch. `len(batches)` is the
    number of whole batches an epoch holds (at least 1), and iterating stops there.

    Args:
      tokens: the stream.
      seq_len: tokens a model sees at once, 1 to tokens.size - 1.
      global_batch_size: rows of a batch over all processes, >= 1.
      seed: of the shuffle, 0 to 2**32 - 1.
      process_index: this process, 0 to num_processes - 1; it reads its share of the rows.
      num_processes: >= 1; divides global_batch_size.
      shuffle: False keeps the order of the stream.
      start_row: rows that are left out before batch 0, >= 0: those an earlier run has read.

    Returns:
      `batches[step]`: int32 (global_batch_size / num_processes, seq_len + 1).

    Raises:
      ValueError: an argument out of its range, or fewer than seq_len + 1 tokens.

    >>> tokens = open_tokens("python-stdlib", max_bytes=1000)
    >>> batches = Batches(tokens, seq_len=16, global_batch_size=4, seed=0)
    >>> len(batches), batches[10**6].shape
    (15, (4, 17))
    """

    def __init__(
        self,
        tokens: Tokens,
        *,
        seq_len: int,
        global_batch_size: int,
        seed: int,
        process_index: int = 0,
        num_processes: int = 1,
        shuffle: bool = True,
        start_row: int = 0,
    ):
        _check_window(tokens, seq_len)
        _check_shares(global_batch_size, process_index, num_processes)
        if not 0 <= seed < 2**32:
            raise ValueError(f"seed {seed} is out of range; use 0 to {2**32 - 1}")
        windows = grain.MapDataset.source(Windows(tokens, seq_len))
        self._rows = (windows.shuffle(seed=seed) if shuffle else windows).repeat()
        self._num_steps = max(len(windows) // global_batch_size, 1)
        self._global_rows = global_batch_size
        self._local_rows = global_batch_size // num_processes
        self._first_row = start_row + process_index * self._local_rows

    def __len__(self) -> int:
        return self._num_steps

    def __getitem__(self, step: int) -> np.ndarray:
        if step < 0:
            raise ValueError(f"step {step} is negative; steps count from 0")
        first = step * self._global_rows + self._first_row
        return np.stack([np.asarray(self._rows[first + i]) for i in range(self._local_rows)])

    def __iter__(self) -> Iterator[np.ndarray]:
        return (self[step] for step in range(len(self)))


def prefetch(batches: Batches, start_step: int = 0) -> Iterator[np.ndarray]:
    """Yields batches[start_step], batches[start_step + 1], ... without end, read ahead in threads.

    Args:
      batches: by step.
      start_step: the first one, >= 0.

    Returns:
      An endless iterator; what it raises is what reading that batch raised.

    Raises:
      ValueError: a negative start_step.
    """
    if start_step < 0:
        raise ValueError(f"start_step {start_step} is negative; steps count from 0")
    steps = grain.MapDataset.range(start_step, sys.maxsize)
    ahead = grain.ReadOptions(num_threads=2, prefetch_buffer_size=4)
    return iter(steps.map(batches.__getitem__).to_iter_dataset(ahead))


def _check_window(tokens: Tokens, seq_len: int) -> None:
    if not 1 <= seq_len < tokens.size:
        raise ValueError(
            f"seq_len {seq_len} needs at least {max(seq_len, 1) + 1} tokens and the data has "
            f"{tokens.size}; use 1 to {tokens.size - 1}, or more data"
        )


def _check_shares(global_batch_size: int, process_index: int, num_processes: int) -> None:
    if global_batch_size < 1:
        raise ValueError(f"global_batch_size {global_batch_size} holds no row; use 1 or more")
    if not 0 <= process_index < num_processes:
        raise ValueError(
            f"process_index {process_index} is not one of num_processes {num_processes}; "
            f"use 0 to num_processes - 1"
        )
    below = global_batch_size // num_processes * num_processes
    if below != global_batch_size:
        nearest = f"{below} or " if below else ""
        raise ValueError(
            f"global_batch_size {global_batch_size} is not divisible by num_processes "
            f"{num_processes}; use {nearest}{below + num_processes}"
        )


def bigram_bits(train: Tokens, val: Tokens, vocab_size: int = 256) -> float:
    """Cross entropy of an add-one-smoothed bigram model: the figure a real model has to beat.

    Args:
      train: what its pairs are counted on.
      val: what it is measured on, at least 2 tokens (the first has no context and no share).
      vocab_size: ids in either stream, 1 to 4096.

    Returns:
      Bits per token: per byte where tokens are bytes.

    Raises:
      ValueError: ids beyond vocab_size, a vocabulary above the limit, a val of one token.
    """
    if not 1 <= vocab_size <= MAX_BIGRAM_VOCAB:
        raise ValueError(
            f"vocab_size {vocab_size} makes a table of {8 * vocab_size**2} bytes; a bigram model "
            f"is for 1 to {MAX_BIGRAM_VOCAB} ids, such as bytes (256)"
        )
    if val.size < 2:
        raise ValueError(f"val has {val.size} token and no pair; raise val_fraction")
    counts = _count_pairs(train, vocab_size) + 1
    bits = np.log2(counts.sum(axis=1, keepdims=True)) - np.log2(counts)
    return float(np.average(bits, weights=_count_pairs(val, vocab_size)))


def _count_pairs(tokens: Tokens, vocab_size: int) -> np.ndarray:
    """How often each id follows each: int64 (vocab_size, vocab_size), [before, after]."""
    check_vocab(tokens, vocab_size)
    counts = np.zeros(vocab_size**2, np.int64)
    for at in range(0, tokens.size - 1, CHUNK):
        ids = tokens[at : at + CHUNK + 1]
        counts += np.bincount(ids[:-1] * vocab_size + ids[1:], minlength=vocab_size**2)
    return counts.reshape(vocab_size, vocab_size)
