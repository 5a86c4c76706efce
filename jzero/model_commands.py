"""`jzero eval` and `jzero sample`: what a trained model is worth, and what it writes."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from jzero.data import Windows
from jzero.evaluate import describe, mean_loss
from jzero.generate import Model
from jzero.loaded import BYTES, Stored, open_stored
from jzero.sample import SampleOptions, encode_prompt, on_one_device, write_text
from jzero.schema import own_arguments
from jzero.tokenizer import BytePairs, Tokenizer, find_tokenizer
from jzero.tokens import CHUNK, Tokens, check_vocab, open_tokens

EVAL = """\
Evaluates a checkpoint, or a Hugging Face folder, on data: every row of it, at any stage and on any
mesh with the same result. Every key of its configuration can be set, as in --zero.stage 3.
"""
SAMPLE = """\
Has a checkpoint, or a Hugging Face folder, write text that goes on from a prompt.
"""
# Keys of the configuration that say something of a trained model, or of where it runs.
FLAGS = ("--model.", "--precision.", "--zero.", "--mesh.", "--data.seq_len", "--data.max_bytes",
         "--train.micro_batch")  # fmt: skip
OK = 0


def prepare_eval(words: Sequence[str]) -> Callable[[], int]:
    """Reads the words after `jzero eval`; every check comes here.

    Raises:
      ValueError: a checkpoint, data or a flag that cannot work.
      SystemExit: help was asked for (0), or a flag is wrong (2); the reason is printed.
    """
    parser = _parser("eval", "--data PATH", EVAL)
    parser.add_argument("--data", metavar="PATH", required=True, help="as [data] path")
    parser.add_argument("--max-rows", type=int, metavar="N", help="of it; default: all")
    _add_tokenizer(parser)
    flags, rest = _parsed(parser, words)
    stored = open_stored("eval", flags.checkpoint, rest)
    tokens, windows = _open_data(stored, flags.data)
    tokenizer = _tokenizer(stored, flags.tokenizer)
    num_rows = min(len(windows), flags.max_rows or len(windows))
    if flags.max_rows is not None and flags.max_rows < 1:
        raise ValueError(f"--max-rows is {flags.max_rows}; use 1 or more, or leave it out.")

    def start() -> int:
        graphdef, variables = stored.load()
        loss = mean_loss(stored.setup, graphdef, variables, windows, num_rows)
        seq_len = stored.setup.config.data.seq_len
        print(describe(loss, *_unit(tokens, tokenizer, num_rows * seq_len)))
        print(
            f"{num_rows * seq_len:,} tokens of {flags.data} in {num_rows:,} rows of {seq_len}, by "
            f"{stored.path}"
        )
        return OK

    return start


def _open_data(stored: Stored, path: str) -> tuple[Tokens, Windows]:
    config = stored.setup.config
    tokens = open_tokens(path, max_bytes=config.data.max_bytes)
    vocab_size = own_arguments(config.model).get("vocab_size")
    if stored.tokens != BYTES and tokens.vocab_size_hint == 256:
        raise ValueError(
            f"--data {path} is text, and the tokens of {stored.path} are no bytes; prepare it with "
            "its tokenizer: python scripts/prepare_data.py PATH --out DIR --tokenizer gpt2."
        )
    if vocab_size is not None:
        check_vocab(tokens, vocab_size)
    windows = Windows(tokens, config.data.seq_len)
    if not len(windows):
        raise ValueError(
            f"--data {path} has {tokens.size} tokens, and a row takes {config.data.seq_len + 1}; "
            "give more, or a smaller --data.seq_len."
        )
    return tokens, windows


def prepare_sample(words: Sequence[str]) -> Callable[[], int]:
    """Reads the words after `jzero sample`; every check comes here.

    Raises:
      ValueError: a checkpoint or a flag that cannot work.
      SystemExit: help was asked for (0), or a flag is wrong (2); the reason is printed.
    """
    parser = _parser("sample", "--prompt TEXT", SAMPLE)
    add = parser.add_argument
    add("--prompt", default="", metavar="TEXT", help="what it goes on from")
    add("--length", type=int, default=200, metavar="N", help="tokens to write; default: 200")
    add("--temperature", type=float, default=0.8, help="0: always the likeliest; default: 0.8")
    add("--top-k", type=int, metavar="K", help="of the likeliest K tokens alone")
    add("--stop", metavar="TEXT", help="end at its first occurrence")
    add("--seed", type=int, default=0, help="default: 0")
    add("--num-samples", type=int, default=1, metavar="N", help="default: 1")
    _add_tokenizer(parser)
    flags, rest = _parsed(parser, words)
    options = SampleOptions(
        length=flags.length,
        temperature=flags.temperature,
        top_k=flags.top_k,
        stop=flags.stop,
        seed=flags.seed,
        num_samples=flags.num_samples,
    )
    stored = open_stored("sample", flags.checkpoint, rest)
    tokenizer = _tokenizer(stored, flags.tokenizer)
    vocab_size = own_arguments(stored.setup.config.model).get("vocab_size")
    encode_prompt(tokenizer, flags.prompt, vocab_size, options.top_k)

    def start() -> int:
        graphdef, variables = stored.load()
        model = Model(graphdef, *on_one_device(stored.setup, variables))
        context = stored.setup.config.data.seq_len
        sizes = {"context": context, "vocab_size": vocab_size}
        for text in write_text(model, tokenizer, flags.prompt, options, **sizes):
            print(text)
        return OK

    return start


def _add_tokenizer(parser: argparse.ArgumentParser) -> None:
    text = "of vocab.json and merges.txt, or tokenizer.json; default: CHECKPOINT, where it has them"
    parser.add_argument("--tokenizer", metavar="DIR", help=text)


def _tokenizer(stored: Stored, folder: str | None) -> Tokenizer:
    if folder is not None and not Path(folder).is_dir():
        raise ValueError(f"--tokenizer {folder} is no folder; name one with vocab.json.")
    place = Path(folder) if folder else stored.folder
    vocab_size = own_arguments(stored.setup.config.model).get("vocab_size")
    return find_tokenizer(
        place,
        is_bytes=stored.tokens == BYTES,
        vocab_size=vocab_size,
        must_have=folder is not None,
    )


def _unit(tokens: Tokens, tokenizer: Tokenizer, num_tokens: int) -> tuple[str, float]:
    """What bits are counted by, and how many tokens one is: a byte, where bytes are known."""
    if tokens.vocab_size_hint == 256:
        return "byte", 1.0
    if not isinstance(tokenizer, BytePairs):
        return "token", 1.0
    starts = range(1, num_tokens + 1, CHUNK)  # the first token is no target
    parts = (tokens[i : min(i + CHUNK, num_tokens + 1)].tolist() for i in starts)
    return "byte", num_tokens / max(sum(map(tokenizer.num_bytes, parts)), 1)


def _parser(command: str, needs: str, description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"jzero {command}",
        usage=f"jzero {command} CHECKPOINT {needs} [flags] [--section.key value ...]",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "checkpoint",
        metavar="CHECKPOINT",
        help="a step's folder, a directory of steps (the latest is taken), or a Hugging Face "
        "folder or .safetensors file",
    )
    return parser


def _parsed(
    parser: argparse.ArgumentParser, words: Sequence[str]
) -> tuple[argparse.Namespace, list[str]]:
    flags, rest = parser.parse_known_args(words)
    unknown = [word for word in rest if word.startswith("--") and "." not in word.split("=")[0]]
    if unknown:
        parser.error(f"there is no flag {unknown[0]}; those of its configuration are --section.key")
    idle = [word for word in rest if word.startswith("--") and not word.startswith(FLAGS)]
    if idle:
        parser.error(f"{idle[0]} has no effect here; of the configuration, set {', '.join(FLAGS)}")
    return flags, rest
