"""Tokens that a causal model writes, one by one, with a cache of keys and values where it has one.

Letters: B rows, T tokens of a window, N tokens of a piece, V vocabulary, K likeliest tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

SMALLEST_BUCKET = 16  # tokens of a prompt; longer ones are padded to a power of two
PIECE = 64  # tokens between two looks at whether a row is over
NOTHING = -1  # in the place of tokens behind a row's end


class Model(NamedTuple):
    """A causal model on one device: its static part, parameters and other Variables."""

    graphdef: Any
    params: Any
    others: Any


class Rule(NamedTuple):
    """How a token is drawn from logits; static, and one compile for each."""

    temperature: float
    top_k: int | None


class Progress(NamedTuple):
    """What the next token depends on."""

    memory: Any  # a cache, or a window (B, context) of tokens
    size: Any  # int32 scalar: tokens in it, the last of them not yet read
    token_B: Any  # int32: that last one
    place: Any  # int32 scalar: of the next token in its row
    is_done_B: Any  # bool


def generate(
    model: Model,
    prompt: np.ndarray,
    length: int,
    *,
    context: int,
    rule: Rule,
    ends: Sequence[int] = (),
    is_over: Callable[[np.ndarray], bool] | None = None,
    key: jax.Array,
) -> list[np.ndarray]:
    """Goes on from prompts, token by token.

    A model with `init_cache` and `decode`, as `models.gpt2.GPT2` has, reads each token once; where
    `context` is full, it reads the last half of it again and goes on. Any other reads the last
    `context` tokens for each one that it writes. Of a longer prompt both see the end.

    Args:
      model: causal, on one device.
      prompt: int32 (B, T), T >= 1.
      length: tokens to write at most, at least 1.
      context: tokens the model sees at most, at least 1.
      rule: how tokens are drawn.
      ends: tokens that end a row; they are not part of it.
      is_over: whether a row has ended, given what was written of it; asked once a piece.
      key: typed PRNG key; a row is the same whatever rows are beside it.

    Returns:
      For each row its prompt and what was written, int32.

    Raises:
      ValueError: a token or a top_k beyond the vocabulary; nothing has been compiled then.
    """
    rows, start = np.asarray(prompt, np.int32), prompt.shape[1]
    has_cache = _check(model, rows, rule, context)
    static = (model.graphdef, has_cache, context, rule)
    total, stops, progress, room = start + length, np.asarray(ends, np.int32), None, 0
    is_done = np.zeros(len(rows), bool)
    while rows.shape[1] < total and not is_done.all():
        if progress is None or room == 0:
            num_kept = context if progress is None else max(context // 2, 1)
            kept = rows[:, -num_kept:]
            progress = _read(model, has_cache, context, kept, rows.shape[1], is_done)
            room = context - kept.shape[1] + 1 if has_cache else length
        count = min(PIECE, total - rows.shape[1], room)
        progress = progress._replace(is_done_B=is_done)
        progress, piece = _write(*static, model.params, model.others, progress, count, stops, key)
        rows = np.concatenate([rows, np.asarray(piece)[:, :count]], axis=1)
        room, is_done = room - count, np.array(progress.is_done_B)
        if is_over is not None:
            is_done |= [is_over(_written(row, start)) for row in rows]
    return [np.concatenate([row[:start], _written(row, start)]) for row in rows]


def _written(row: np.ndarray, start: int) -> np.ndarray:
    return row[start:][row[start:] != NOTHING]


def check_vocabulary(tokens: np.ndarray, top_k: int | None, vocab_size: int) -> None:
    """Raises ValueError for a token, or a top_k, beyond a vocabulary."""
    if tokens.max() >= vocab_size:
        raise ValueError(
            f"the prompt has token {tokens.max()}, and the model knows 0 to {vocab_size - 1}; is "
            "it the model's own tokenizer?"
        )
    if top_k is not None and top_k > vocab_size:
        raise ValueError(
            f"top_k is {top_k}, and there are {vocab_size} tokens; use {vocab_size} or fewer, or "
            "leave it out."
        )


def _check(model: Model, rows: np.ndarray, rule: Rule, context: int) -> bool:
    """Whether the model has a cache; ValueError for what is beyond its vocabulary."""
    graphdef, params, others = model
    tokens = jax.ShapeDtypeStruct((1, context), jnp.int32)

    def logits_of(params: Any, others: Any, tokens: jax.Array) -> jax.Array:
        return nnx.merge(graphdef, params, others, copy=True)(tokens)

    vocab_size = jax.eval_shape(logits_of, params, others, tokens).shape[-1]
    check_vocabulary(rows, rule.top_k, vocab_size)
    merged = nnx.merge(graphdef, params, others, copy=True)
    return hasattr(merged, "init_cache") and hasattr(merged, "decode")


def _read(
    model: Model,
    has_cache: bool,
    context: int,
    kept: np.ndarray,
    place: int,
    is_done: np.ndarray,
) -> Progress:
    size = kept.shape[1]
    bucket = min(max(1 << (size - 1).bit_length(), SMALLEST_BUCKET), context)
    kept = np.maximum(kept, 0)  # rows that have ended go on, unseen
    memory = np.pad(kept, [(0, 0), (0, (bucket if has_cache else context) - size)])
    if has_cache:
        memory = _fill(model.graphdef, context, model.params, model.others, memory)
    return Progress(memory, size, kept[:, -1], place, is_done)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _fill(graphdef: Any, context: int, params: Any, others: Any, window_BT: jax.Array) -> Any:
    model: Any = nnx.merge(graphdef, params, others, copy=True)
    # What the padding leaves in the cache is written over before anything looks that far. No
    # logits are made: the first step reads the last token again.
    return model.decode(window_BT, model.init_cache(window_BT.shape[0], context), 0)[1]


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3), donate_argnames="progress")
def _write(
    graphdef: Any,
    has_cache: bool,
    context: int,
    rule: Rule,
    params: Any,
    others: Any,
    progress: Progress,
    count: Any,
    stops: jax.Array,
    key: jax.Array,
) -> tuple[Progress, jax.Array]:
    """Writes `count` tokens, or until all rows are done; (the progress, tokens (B, PIECE))."""
    step = _cached_step if has_cache else _windowed_step

    def goes_on(carry: Any) -> jax.Array:
        index, progress, _ = carry
        return (index < count) & ~progress.is_done_B.all()

    def write(carry: Any) -> Any:
        index, (memory, size, token_B, place, is_done_B), piece_BN = carry
        model: Any = nnx.merge(graphdef, params, others, copy=True)  # it may change its state
        logits_BV, memory = step(model, context, memory, token_B, size - 1)
        token_B = draw(logits_BV, rule, jax.random.fold_in(key, place))
        is_done_B = is_done_B | (token_B[:, None] == stops[None, :]).any(axis=-1)
        piece_BN = piece_BN.at[:, index].set(jnp.where(is_done_B, NOTHING, token_B))
        return index + 1, Progress(memory, size + 1, token_B, place + 1, is_done_B), piece_BN

    piece_BN = jnp.full((progress.token_B.shape[0], PIECE), NOTHING, jnp.int32)
    return jax.lax.while_loop(goes_on, write, (0, progress, piece_BN))[1:]


def _cached_step(model, context, cache, token_B, position) -> tuple[jax.Array, Any]:
    del context
    logits_B1V, cache = model.decode(token_B[:, None], cache, position)
    return logits_B1V[:, 0], cache


def _windowed_step(model, context, window_BT, token_B, position) -> tuple[jax.Array, Any]:
    """Puts the token at its position, or at the end of a window that moves on."""
    moved_BT = jnp.roll(window_BT, -1, axis=1)
    window_BT = jnp.where(position < context, window_BT, moved_BT)
    at = jnp.minimum(position, context - 1)
    window_BT = window_BT.at[:, at].set(token_B)
    return model(window_BT)[:, at], window_BT


def draw(logits_BV: jax.Array, rule: Rule, key: jax.Array) -> jax.Array:
    """One token a row, int32 (B,).

    >>> logits = jnp.array([[0.0, 3.0, 1.0]])
    >>> draw(logits, Rule(0, None), jax.random.key(0)).tolist()
    [1]
    """
    if rule.temperature == 0:
        return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
    logits_BK = logits_BV.astype(jnp.promote_types(logits_BV.dtype, jnp.float32))
    ids_BK = None
    if rule.top_k is not None:  # exactly so many, also where some are equal
        logits_BK, ids_BK = jax.lax.top_k(logits_BK, rule.top_k)
    best_B1 = logits_BK.max(axis=-1, keepdims=True)  # no quotient below is infinity
    keys_B = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(logits_BK.shape[0]))
    chosen_B = jax.vmap(jax.random.categorical)(keys_B, (logits_BK - best_B1) / rule.temperature)
    if ids_BK is None:
        return chosen_B.astype(jnp.int32)
    return jnp.take_along_axis(ids_BK, chosen_B[:, None], axis=1)[:, 0]
