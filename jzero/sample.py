"""Tokens that a trained model writes, one by one, with a cache of keys and values where it has one.

Letters: B rows, T tokens of a window, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jzero.data import Corpus
from jzero.recipe import Setup
from jzero.tokenizer import Bytes, Ids, Tokenizer

SMALLEST_BUCKET = 16  # tokens of a prompt; longer ones are padded to a power of two


class Model(NamedTuple):
    """A causal model on one device: its static part, parameters and other Variables."""

    graphdef: Any
    params: Any
    others: Any


class Rule(NamedTuple):
    """How a token is drawn from logits; static, and one compile for each."""

    temperature: float
    top_k: int | None


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
) -> list[str]:
    """Has a model go on from a prompt.

    Args:
      model: on one device.
      tokenizer: of its tokens.
      prompt: empty for the tokenizer's start.
      options: what to write.
      context: tokens the model sees at most.
      vocab_size: of the model, where it is known.

    Returns:
      Prompt and continuation of each sample, up to `stop` or a token that ends the text.

    Raises:
      ValueError: a prompt that is empty or beyond the vocabulary, or a top_k above it.
    """
    ids = encode_prompt(tokenizer, prompt, vocab_size)
    if vocab_size is not None and options.top_k is not None and options.top_k > vocab_size:
        raise ValueError(f"top_k is {options.top_k}, and there are {vocab_size} tokens; use fewer.")
    rows = np.tile(ids, (options.num_samples, 1))
    rule = Rule(options.temperature, options.top_k)
    key = jax.random.key(options.seed)
    ends = tokenizer.ends
    written = generate(model, rows, options.length, context=context, rule=rule, ends=ends, key=key)
    texts = []
    for row in written:
        new = tokenizer.decode(row[ids.size :].tolist())
        if options.stop is not None:
            new = new.split(options.stop, 1)[0]
        given = prompt if prompt else tokenizer.decode(ids.tolist())
        texts.append(f"{given} {new}" if isinstance(tokenizer, Ids) else given + new)
    return texts


def encode_prompt(tokenizer: Tokenizer, prompt: str, vocab_size: int | None) -> np.ndarray:
    """Token ids of a prompt, at least one.

    Raises:
      ValueError: it has none, or one that the model does not know.
    """
    ids = tokenizer.encode(prompt)
    if not ids.size and tokenizer.start is not None:
        ids = np.asarray([tokenizer.start], np.int32)
    if not ids.size:
        raise ValueError("the prompt is empty, and these tokens have no start; give a prompt.")
    if vocab_size is not None and ids.max() >= vocab_size:
        raise ValueError(
            f"the prompt has token {ids.max()}, and the model knows 0 to {vocab_size - 1}; is it "
            "the model's own tokenizer?"
        )
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
    prompt = encode_prompt(Bytes(), settings.sample_prompt, None)
    if not corpus.is_bytes:
        prompt = corpus.val[:1]
    model = Model(graphdef, *on_one_device(setup, variables))
    rule, context = Rule(settings.sample_temperature, None), setup.config.data.seq_len
    length, ends = settings.sample_length, tokenizer.ends
    (row,) = generate(model, prompt[None], length, context=context, rule=rule, ends=ends, key=key)
    text = tokenizer.decode(row.tolist())
    say(f"sample ({row.size - prompt.size} tokens):\n{text}")
    return text


def on_one_device(setup: Setup, variables: tuple[Any, Any]) -> tuple[Any, Any]:
    """Parameters and other Variables, whole, as the first device of this process has them."""
    params, others = variables
    leaves = [x.addressable_data(0) for _, x in setup.zero.gather_leaves(params)]
    whole = jax.tree.unflatten(jax.tree.structure(params), leaves)
    return whole, jax.tree.map(lambda x: x.addressable_data(0), others)


def generate(
    model: Model,
    prompt: np.ndarray,
    length: int,
    *,
    context: int,
    rule: Rule,
    ends: Sequence[int] = (),
    key: jax.Array,
) -> list[np.ndarray]:
    """Goes on from prompts, token by token.

    A model with `init_cache` and `decode`, as `models.gpt2.GPT2` has, reads each token once; once
    `context` is full, it reads the last half of it again and goes on. Any other reads the last
    `context` tokens for each one that it writes.

    Args:
      model: causal, on one device.
      prompt: int32 (B, T), T >= 1.
      length: tokens to write at most.
      context: tokens the model sees at most, at least 2.
      rule: how tokens are drawn.
      ends: tokens that end a row; they are not part of it.
      key: typed PRNG key.

    Returns:
      For each row its prompt and what was written, int32.
    """
    module = nnx.merge(*model)
    has_cache = hasattr(module, "init_cache") and hasattr(module, "decode")
    write, num_kept = (_write_cached, context // 2) if has_cache else (_write_windowed, context)
    stops = np.asarray(ends, np.int32)
    rows, is_done = np.asarray(prompt, np.int32), np.zeros(len(prompt), bool)
    total = rows.shape[1] + length
    while rows.shape[1] < total and not is_done.all():
        done, left = rows.shape[1], total - rows.shape[1]
        kept = rows if done < context else rows[:, -num_kept:]
        num_new = min(left, context - kept.shape[1]) if has_cache else left
        new, is_done = write(model, context, rule, kept, done, num_new, stops, is_done, key)
        rows = np.concatenate([rows, new], axis=1)
    return [_until_end(row, prompt.shape[1], stops) for row in rows]


def _until_end(row: np.ndarray, start: int, stops: np.ndarray) -> np.ndarray:
    ends = np.flatnonzero(np.isin(row[start:], stops))
    return row[: start + ends[0]] if ends.size else row


def _write_cached(
    model: Model,
    context: int,
    rule: Rule,
    kept: np.ndarray,
    done: int,
    num_new: int,
    stops: np.ndarray,
    is_done: np.ndarray,
    key: jax.Array,
) -> tuple[np.ndarray, np.ndarray]:
    """Writes up to `num_new` tokens after those that are kept; also tells which rows are done."""
    size = kept.shape[1]
    bucket = min(max(1 << (size - 1).bit_length(), SMALLEST_BUCKET), context)
    window = np.pad(kept, [(0, 0), (0, bucket - size)])
    static = (model.graphdef, context, rule)
    rest = (model.params, model.others, window, size, done, num_new, stops, is_done, key)
    out, count, is_done_now = jax.device_get(_cached_loop(*static, *rest))
    return out[:, : int(count)], is_done_now


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _cached_loop(
    graphdef: Any,
    context: int,
    rule: Rule,
    params: Any,
    others: Any,
    window_BT: jax.Array,
    size: Any,
    done: Any,
    num_new: Any,
    stops: jax.Array,
    is_done_B: jax.Array,
    key: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Reads a window of `size` tokens and padding, then writes; (tokens, how many, who is done)."""
    model: Any = nnx.merge(graphdef, params, others, copy=True)
    num_rows = window_BT.shape[0]
    # What the padding leaves in the cache is written over before anything looks that far.
    logits_BTV, cache = model.decode(window_BT, model.init_cache(num_rows, context), 0)
    logits_BV = logits_BTV[:, size - 1]
    out_BT = jnp.zeros((num_rows, context), jnp.int32)

    def goes_on(carry: Any) -> jax.Array:
        index, _, _, _, is_done_B = carry
        return (index < num_new) & ~is_done_B.all()

    def write(carry: Any) -> Any:
        index, out_BT, cache, logits_BV, is_done_B = carry
        token_B = draw(logits_BV, rule, jax.random.fold_in(key, done + index))
        out_BT = jax.lax.dynamic_update_slice(out_BT, token_B[:, None], (0, index))
        is_done_B = is_done_B | _is_end(token_B, stops)
        logits_B1V, cache = model.decode(token_B[:, None], cache, size + index)
        return index + 1, out_BT, cache, logits_B1V[:, 0], is_done_B

    carry = (0, out_BT, cache, logits_BV, is_done_B)
    count, out_BT, _, _, is_done_B = jax.lax.while_loop(goes_on, write, carry)
    return out_BT, count, is_done_B


def _write_windowed(
    model: Model,
    context: int,
    rule: Rule,
    kept: np.ndarray,
    done: int,
    num_new: int,
    stops: np.ndarray,
    is_done: np.ndarray,
    key: jax.Array,
) -> tuple[np.ndarray, np.ndarray]:
    """As `_write_cached`, for a model that is given its last `context` tokens each time."""
    size = kept.shape[1]
    buffer = np.pad(kept, [(0, 0), (0, max(num_new, context - size))])
    static = (model.graphdef, context, rule)
    rest = (model.params, model.others, buffer, size, done, num_new, stops, is_done, key)
    out, count, is_done_now = jax.device_get(_windowed_loop(*static, *rest))
    return out[:, size : size + int(count)], is_done_now


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _windowed_loop(
    graphdef: Any,
    context: int,
    rule: Rule,
    params: Any,
    others: Any,
    buffer_BT: jax.Array,
    size: Any,
    done: Any,
    num_new: Any,
    stops: jax.Array,
    is_done_B: jax.Array,
    key: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Writes into a buffer that begins with `size` tokens; (the buffer, how many, who is done)."""
    num_rows = buffer_BT.shape[0]

    def goes_on(carry: Any) -> jax.Array:
        index, _, is_done_B = carry
        return (index < num_new) & ~is_done_B.all()

    def write(carry: Any) -> Any:
        index, buffer_BT, is_done_B = carry
        model: Any = nnx.merge(graphdef, params, others, copy=True)  # it may change its state
        place = size + index
        first = jnp.maximum(place - context, 0)
        window_BT = jax.lax.dynamic_slice(buffer_BT, (0, first), (num_rows, context))
        logits_BV = model(window_BT)[:, place - 1 - first]
        token_B = draw(logits_BV, rule, jax.random.fold_in(key, done + index))
        buffer_BT = jax.lax.dynamic_update_slice(buffer_BT, token_B[:, None], (0, place))
        return index + 1, buffer_BT, is_done_B | _is_end(token_B, stops)

    carry = (0, buffer_BT, is_done_B)
    count, buffer_BT, is_done_B = jax.lax.while_loop(goes_on, write, carry)
    return buffer_BT, count, is_done_B


def draw(logits_BV: jax.Array, rule: Rule, key: jax.Array) -> jax.Array:
    """One token a row, int32 (B,).

    >>> logits = jnp.array([[0.0, 3.0, 1.0]])
    >>> draw(logits, Rule(0, None), jax.random.key(0)).tolist()
    [1]
    """
    if rule.temperature == 0:
        return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
    if rule.top_k is not None:
        least_B = jax.lax.top_k(logits_BV, rule.top_k)[0][:, -1]
        logits_BV = jnp.where(logits_BV < least_B[:, None], -jnp.inf, logits_BV)
    return jax.random.categorical(key, logits_BV / rule.temperature).astype(jnp.int32)


def _is_end(token_B: jax.Array, stops: jax.Array) -> jax.Array:
    return (token_B[:, None] == stops[None, :]).any(axis=-1)
