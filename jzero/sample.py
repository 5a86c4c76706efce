"""The text that a trained model writes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jzero.data import Corpus
from jzero.generate import Model, Rule, check_vocabulary, generate
from jzero.recipe import Setup
from jzero.tokenizer import Bytes, Ids, Tokenizer


@dataclass(frozen=True, kw_only=True)
class SampleOptions:
    """What `write_text` writes.

    Args:
      length: tokens to write, at least 1.
      temperature: of the softmax, at least 0; 0 takes the likeliest token.
      top_k: draws from the likeliest so many alone, at least 1; None from all.
      stop: text at whose first occurrence a sample ends; None for none.
      seed: of the draws.
      num_samples: at least 1.

    Raises:
      ValueError: a value out of its range.
    """

    length: int = 200
    temperature: float = 0.8
    top_k: int | None = None
    stop: str | None = None
    seed: int = 0
    num_samples: int = 1

    def __post_init__(self) -> None:
        for name in ("length", "num_samples", "top_k"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; use 1 or more.")
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature is {self.temperature}; use 0 or more, such as 0.8.")
        if self.stop == "":
            raise ValueError("stop is empty, which would end every sample at once; leave it out.")


def write_text(
    model: Model,
    tokenizer: Tokenizer,
    prompt: str,
    options: SampleOptions,
    *,
    context: int,
    vocab_size: int | None = None,
    say: Callable[[str], None] | None = None,
) -> list[str]:
    """Has a model go on from a prompt.

    Args:
      model: on one device.
      tokenizer: of its tokens.
      prompt: empty for the tokenizer's start.
      options: what to write.
      context: tokens the model sees at most.
      vocab_size: of the model, where it is known without running it.
      say: prints a line; None prints to the standard error.

    Returns:
      Prompt and continuation of each sample, up to `stop` or a token that ends the text.

    Raises:
      ValueError: a prompt that is empty or beyond the vocabulary, or a top_k above it.
    """
    ids, stop = encode_prompt(tokenizer, prompt, vocab_size, options.top_k), options.stop
    if ids.size > context:
        note = f"the prompt has {ids.size} tokens, the model sees {context}: it reads the last"
        (say or _say)(f"{note} {context}.")
    written = generate(
        model,
        np.tile(ids, (options.num_samples, 1)),
        options.length,
        context=context,
        rule=Rule(options.temperature, options.top_k),
        ends=tokenizer.ends,
        is_over=lambda new: _before(tokenizer, new.tolist(), stop)[1],
        key=jax.random.key(options.seed),
    )
    given = prompt if prompt else tokenizer.decode(ids.tolist())
    gap = _gap(tokenizer)
    return [given + gap + _before(tokenizer, row[ids.size :].tolist(), stop)[0] for row in written]


def _say(line: str) -> None:
    print(line, file=sys.stderr)


def _gap(tokenizer: Tokenizer) -> str:
    return " " if isinstance(tokenizer, Ids) else ""


def _before(tokenizer: Tokenizer, ids: Sequence[int], stop: str | None) -> tuple[str, bool]:
    """The text before `stop`, and whether there is one: whole numbers, where tokens are such."""
    text, gap = tokenizer.decode(ids), _gap(tokenizer)
    if stop is None:
        return text, False
    before, found, _ = f"{gap}{text}{gap}".partition(f"{gap}{stop}{gap}")
    return before.strip(gap) if gap else before, bool(found)


def encode_prompt(
    tokenizer: Tokenizer, prompt: str, vocab_size: int | None = None, top_k: int | None = None
) -> np.ndarray:
    """Token ids of a prompt, at least one.

    Args:
      tokenizer, prompt: as for `write_text`.
      vocab_size: of the model; None where it is not known yet.
      top_k: of the options, to be held against it.

    Raises:
      ValueError: it has none, or one beyond the vocabulary; or so is top_k.
    """
    ids = tokenizer.encode(prompt)
    if not ids.size and tokenizer.start is not None:
        ids = np.asarray([tokenizer.start], np.int32)
    if not ids.size:
        raise ValueError("the prompt is empty, and these tokens have no start; give a prompt.")
    if vocab_size is not None:
        check_vocabulary(ids, top_k, vocab_size)
    return ids


def write_sample(
    setup: Setup,
    corpus: Corpus,
    graphdef: Any,
    variables: tuple[Any, Any],
    key: jax.Array,
    say: Callable[[str], None],
) -> str | None:
    """Has the model write text, says it and returns it; None where it was not asked for.

    Args:
      setup, corpus: of the run; bytes are written as text, other tokens as ids.
      graphdef, variables: the model; its parameters at rest, and its other Variables.
      key: typed PRNG key.
      say: prints a line.
    """
    settings = setup.config.train
    if not settings.sample_length:
        return None
    if not callable(setup.abstract):
        say("no sample: the model has no __call__(tokens) that gives logits")
        return None
    tokenizer = Bytes() if corpus.is_bytes else Ids()
    prompt = encode_prompt(Bytes(), settings.sample_prompt)
    if not corpus.is_bytes:
        prompt = corpus.val[:1]
    model = Model(graphdef, *on_one_device(setup, variables))
    rule, context = Rule(settings.sample_temperature, None), setup.config.data.seq_len
    length, ends = settings.sample_length, tokenizer.ends
    try:
        options = {"context": context, "rule": rule, "ends": ends, "key": key}
        (row,) = generate(model, prompt[None], length, **options)
    except ValueError as error:  # what the run has trained is worth more than this
        say(f"no sample: {error}")
        return None
    text = tokenizer.decode(row.tolist())
    say(f"sample ({row.size - prompt.size} tokens):\n{text}")
    return text


def on_one_device(setup: Setup, variables: tuple[Any, Any]) -> tuple[Any, Any]:
    """Parameters and other Variables, whole, as the first device of this process has them."""
    params, others = variables
    leaves = [x.addressable_data(0) for _, x in setup.zero.gather_leaves(params)]
    whole = jax.tree.unflatten(jax.tree.structure(params), leaves)
    return whole, jax.tree.map(lambda x: x.addressable_data(0), others)
