"""Turns texts into token files: train.bin and val.bin, as nanoGPT or llm.c write them.

    python scripts/prepare_data.py texts/ --out data/ --tokenizer gpt2
    python scripts/prepare_data.py python-stdlib --out data/ --tokenizer bytes --val-fraction 0.1

Without a network, put GPT-2's vocabulary files into a folder and add --bpe-dir FOLDER.
"""

import argparse
import hashlib
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jzero.tokens import (
    list_files,
    num_val_tokens,
    open_tokens,
    split,
    write_llmc_bin,
    write_nanogpt_bin,
)

WRITERS = {"nanogpt": write_nanogpt_bin, "llmc": write_llmc_bin}
BPE_FILES = (("vocab.bpe", "encoder.json"), ("merges.txt", "vocab.json"))  # OpenAI, Hugging Face
GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
MEND = (
    "put vocab.bpe and encoder.json (from https://openaipublic.blob.core.windows.net/gpt-2/"
    "encodings/main/), Hugging Face's merges.txt and vocab.json, or one .tiktoken file into a "
    "folder and pass --bpe-dir FOLDER"
)


def import_tiktoken() -> Any:
    """tiktoken, an optional extra."""
    try:
        import tiktoken  # noqa: PLC0415
        import tiktoken.load  # noqa: PLC0415
    except ImportError as error:
        raise ValueError(
            "--tokenizer gpt2 needs tiktoken; pip install 'jzero[data]', or use --tokenizer bytes"
        ) from error
    return tiktoken


def load_gpt2(bpe_dir: str | None) -> Any:
    """Makes GPT-2's encoding, from local files, or else from the network or tiktoken's cache.

    Args:
      bpe_dir: a folder with the vocabulary files, or a file in tiktoken's format; None downloads.

    Returns:
      A `tiktoken.Encoding`; its `eot_token` is the last id: 50256 with GPT-2's own files.

    Raises:
      ValueError: no tiktoken, no files, files that contradict each other, no network.
    """
    tiktoken = import_tiktoken()
    if bpe_dir is None:
        try:
            return tiktoken.get_encoding("gpt2")
        except OSError as error:  # those of requests are OSErrors too
            raise ValueError(
                f"GPT-2's vocabulary was not downloaded ({type(error).__name__}); {MEND}"
            ) from error
    ranks = read_ranks(Path(bpe_dir).expanduser(), tiktoken.load)
    special = {"<|endoftext|>": len(ranks)}
    return tiktoken.Encoding(
        "gpt2-local", pat_str=GPT2_PATTERN, mergeable_ranks=ranks, special_tokens=special
    )


def read_ranks(place: Path, load: Any) -> dict[bytes, int]:
    """Mergeable tokens by rank. The hashes keep tiktoken from using an older copy it cached."""
    pair = next((p for p in BPE_FILES if all((place / name).is_file() for name in p)), None)
    single = [place] if place.is_file() else sorted(place.glob("*.tiktoken"))
    if pair is None and len(single) != 1:
        raise ValueError(f"--bpe-dir {place} holds {len(single)} vocabularies, not one; {MEND}")
    files = [place / name for name in pair] if pair else single
    names, hashes = [str(f) for f in files], [sha256(f) for f in files]
    try:
        if pair:
            ranks = load.data_gym_to_mergeable_bpe_ranks(*names, *hashes)
        else:
            ranks = load.load_tiktoken_bpe(*names, *hashes)
    except (AssertionError, KeyError) as error:
        raise ValueError(f"{' and '.join(names)} do not belong together; {MEND}") from error
    if sorted(ranks.values()) != list(range(len(ranks))) or len(ranks) < 256:
        raise ValueError(f"{names[0]}: its {len(ranks)} ranks are not 0, 1, 2, ...; {MEND}")
    return ranks


def sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def encode_documents(files: Sequence[Path], encoding: Any) -> Iterator[np.ndarray]:
    """Encodes each file, with the end-of-text token between files.

    Args:
      files: UTF-8 texts; a special token spelled out in them is encoded as ordinary text.
      encoding: has `encode_ordinary(str) -> list[int]` and `eot_token`.

    Returns:
      Pieces of the stream: int32 (n,).

    Raises:
      ValueError: a file that is not UTF-8.
    """
    for i, file in enumerate(files):
        try:
            text = file.read_bytes().decode()
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{file} is not UTF-8 (byte {error.start}); convert it, leave it out, or use "
                f"--tokenizer bytes"
            ) from error
        separator = [encoding.eot_token] if i else []
        yield np.array(separator + encoding.encode_ordinary(text), np.int32)


def prepare(args: argparse.Namespace) -> str:
    """Writes train.bin and val.bin into args.out; returns what to tell the user."""
    files = list_files(args.input)
    if files[0].suffix == ".bin":
        raise ValueError(f"{args.input} holds tokens already; give it to jzero train as it is")
    if args.tokenizer == "gpt2":
        encoding = load_gpt2(args.bpe_dir)
        stream = np.concatenate([*encode_documents(files, encoding)])
        num_val, vocab_size = num_val_tokens(stream.size, args.val_fraction), encoding.n_vocab
        parts = stream[:-num_val], stream[-num_val:]
    elif args.bpe_dir is not None:
        raise ValueError("--bpe-dir is for --tokenizer gpt2; add that, or leave --bpe-dir out")
    else:
        parts, vocab_size = split(open_tokens(args.input), args.val_fraction), 256
    args.out.mkdir(parents=True, exist_ok=True)
    paths = args.out / "train.bin", args.out / "val.bin"
    for path, tokens in zip(paths, parts, strict=True):
        WRITERS[args.format](path, tokens)
    written = [f"{path}: {len(part)} tokens" for path, part in zip(paths, parts, strict=True)]
    return "\n".join([*written, "For the config:", *config_lines(*paths, vocab_size)])


def config_lines(train: Path, val: Path, vocab_size: int) -> list[str]:
    """TOML that reads the two files; json quotes a string as TOML does."""
    return [
        f"data.path = {json.dumps(str(train))}",
        f"data.val_path = {json.dumps(str(val))}",
        f"model.vocab_size = {vocab_size}  # or more",
    ]


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("input", help="a text file, a folder or glob of texts, or python-stdlib")
    parser.add_argument("--out", type=Path, required=True, help="folder for train.bin and val.bin")
    parser.add_argument("--tokenizer", choices=("bytes", "gpt2"), default="bytes")
    parser.add_argument("--bpe-dir", help="GPT-2's vocabulary files, for use without a network")
    parser.add_argument("--val-fraction", type=float, default=0.01, help="the end of the stream")
    parser.add_argument("--format", choices=tuple(WRITERS), default="nanogpt")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    try:
        print(prepare(parse_args(argv)))
    except ValueError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
