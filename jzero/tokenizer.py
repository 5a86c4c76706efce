"""Text to tokens and back: bytes, numbers, or GPT-2's byte-pair encoding from files at hand."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

END_OF_TEXT = "<|endoftext|>"
# How GPT-2 splits a text before byte pairs are merged; Radford et al., 2019.
SPLIT = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


class Tokenizer(Protocol):
    """Text to token ids and back."""

    @property
    def start(self) -> int | None:
        """What an empty prompt is; None where there is no such token."""
        ...

    @property
    def ends(self) -> tuple[int, ...]:
        """Tokens that end a text."""
        ...

    def encode(self, text: str) -> np.ndarray:
        """Token ids, int32 (n,)."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids; those that end a text are nothing."""
        ...


@dataclass(frozen=True)
class Bytes:
    """A token is a byte of UTF-8; ids from 256 on end a text.

    >>> Bytes(257).decode(Bytes(257).encode("aé").tolist() + [256])
    'aé'
    """

    vocab_size: int = 256
    start: int | None = 10  # a line break

    @property
    def ends(self) -> tuple[int, ...]:
        """Tokens that end a text."""
        return tuple(range(256, self.vocab_size))

    def encode(self, text: str) -> np.ndarray:
        """Token ids, int32 (n,)."""
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32)

    def decode(self, ids: Sequence[int]) -> str:
        """The text; what is no UTF-8 becomes a replacement character."""
        return bytes(i for i in ids if i < 256).decode(errors="replace")


@dataclass(frozen=True)
class Ids:
    """Tokens are written as numbers between blanks.

    >>> Ids().encode("5 7").tolist(), Ids().decode([5, 7])
    ([5, 7], '5 7')
    """

    start: int | None = None
    ends: tuple[int, ...] = ()

    def encode(self, text: str) -> np.ndarray:
        """Token ids, int32 (n,).

        Raises:
          ValueError: a word is no number.
        """
        words = text.split()
        bad = [word for word in words if not (word.isdecimal() and int(word) < 2**31)]
        if bad:
            raise ValueError(
                f"the prompt has {bad[0]!r}, and without a tokenizer it is token ids, as in "
                "'464 2068'; name a tokenizer's folder, one with vocab.json and merges.txt."
            )
        return np.asarray([int(word) for word in words], np.int32)

    def decode(self, ids: Sequence[int]) -> str:
        """The ids, separated by blanks."""
        return " ".join(map(str, ids))


@dataclass(frozen=True)
class BytePairs:
    """GPT-2's byte-pair encoding, by tiktoken."""

    encoding: Any  # tiktoken.Encoding
    end: int
    known: frozenset[int]  # ids with a text; a model's vocabulary may be padded beyond them

    @property
    def start(self) -> int | None:
        """The end of the text before."""
        return self.end

    @property
    def ends(self) -> tuple[int, ...]:
        """Tokens that end a text."""
        return (self.end,)

    def encode(self, text: str) -> np.ndarray:
        """Token ids, int32 (n,)."""
        return np.asarray(self.encoding.encode(text, allowed_special={END_OF_TEXT}), np.int32)

    def decode(self, ids: Sequence[int]) -> str:
        """The text; what is no UTF-8 becomes a replacement character, an unknown id nothing."""
        return self.encoding.decode([i for i in ids if i in self.known])

    def num_bytes(self, ids: Sequence[int]) -> int:
        """Bytes of the text of token ids."""
        return len(self.encoding.decode_bytes([i for i in ids if i in self.known]))


def find_tokenizer(
    folder: Path | None, *, is_bytes: bool, vocab_size: int | None, must_have: bool = False
) -> Tokenizer:
    """The tokenizer of a model: that of a folder, where it has one, else bytes, else numbers.

    Args:
      folder: may hold tokenizer.json, or vocab.json and merges.txt, as Hugging Face writes them.
      is_bytes: whether the model was trained on bytes.
      vocab_size: of the model, where it is known.
      must_have: whether a folder without a tokenizer is refused.

    Raises:
      ValueError: the folder's tokenizer is not GPT-2's kind, or missing; or tiktoken is.
    """
    vocab = None if folder is None else _read_vocab(folder)
    if vocab is not None:
        return byte_pairs(*vocab, name=str(folder))
    if must_have:
        raise ValueError(
            f"{folder} has no tokenizer; name a folder with vocab.json and merges.txt, or with "
            "tokenizer.json."
        )
    return Bytes(vocab_size or 256) if is_bytes else Ids()


def byte_pairs(vocab: Mapping[str, int], merges: Sequence[str], *, name: str) -> BytePairs:
    """Makes GPT-2's encoding of its vocabulary.

    Args:
      vocab: id by token, in GPT-2's letters for bytes, and "<|endoftext|>".
      merges: "left right", the first to be merged first.
      name: for messages.

    Raises:
      ValueError: ids do not follow the merges, which tiktoken takes for granted; or no tiktoken.
    """
    letters = _letters()
    ranks = {
        bytes(letters[letter] for letter in token): index
        for token, index in vocab.items()
        if token != END_OF_TEXT and all(letter in letters for letter in token)
    }
    merged = [vocab.get(pair.replace(" ", "", 1)) for pair in merges]
    if None in merged or merged != sorted(merged, key=lambda index: index or 0):
        raise ValueError(
            f"{name} has byte pairs whose ids do not follow the order of its merges; GPT-2's do. "
            "Prepare token ids with its own tokenizer, and give the prompt as ids."
        )
    missing = sorted(letter for letter in letters if letter not in vocab)
    if missing or END_OF_TEXT not in vocab:
        lacks = f"{len(missing)} single bytes" if missing else END_OF_TEXT
        raise ValueError(f"{name} lacks {lacks} in its vocabulary, so it is not GPT-2's kind.")
    end = vocab[END_OF_TEXT]
    try:
        tiktoken = importlib.import_module("tiktoken")
    except ImportError as error:
        raise ValueError(
            f"{name} has a byte-pair tokenizer, which needs tiktoken; run "
            "pip install 'jzero[data]', or give the prompt as token ids from elsewhere."
        ) from error
    special = {END_OF_TEXT: end}
    options = {"pat_str": SPLIT, "mergeable_ranks": ranks, "special_tokens": special}
    return BytePairs(tiktoken.Encoding(name, **options), end, frozenset(ranks.values()))


def _read_vocab(folder: Path) -> tuple[dict[str, int], list[str]] | None:
    """Ids by token and merges in order; None where the folder has none."""
    whole, vocab, merges = (
        folder / name for name in ("tokenizer.json", "vocab.json", "merges.txt")
    )
    if vocab.is_file() and merges.is_file():
        lines = merges.read_text(encoding="utf-8").split("\n")
        pairs = [line for line in lines if line and not line.startswith("#version")]
        return json.loads(vocab.read_text(encoding="utf-8")), pairs
    if not whole.is_file():
        return None
    tokenizer = json.loads(whole.read_text(encoding="utf-8"))
    model = tokenizer["model"]
    if model.get("type") not in (None, "BPE"):
        raise ValueError(f"{whole} is of type {model['type']}; GPT-2's tokenizer is BPE.")
    split = {"add_prefix_space": False} | (tokenizer.get("pre_tokenizer") or {})
    is_other = split.get("type", "ByteLevel") != "ByteLevel" or not split.get("use_regex", True)
    if is_other or split["add_prefix_space"] or tokenizer.get("normalizer"):
        raise ValueError(
            f"{whole} splits or changes text otherwise than GPT-2's tokenizer does (its "
            "pre_tokenizer is a plain ByteLevel, and it has no normalizer). Prepare token ids with "
            "its own tokenizer, and give the prompt as ids."
        )
    pairs = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    added = {token["content"]: token["id"] for token in tokenizer.get("added_tokens", [])}
    return model["vocab"] | added, pairs


def _letters() -> dict[str, int]:
    """GPT-2's letter for each byte: itself where it prints, else one from 256 on."""
    prints = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in prints]
    return {chr(b): b for b in prints} | {chr(256 + i): b for i, b in enumerate(others)}
