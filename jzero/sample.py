"""Tokens that a trained model writes, one by one."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jzero.data import Corpus
from jzero.recipe import Setup


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
    settings, (params, others) = setup.config.train, variables
    if not settings.sample_length:
        return None
    if not callable(setup.abstract):
        say("no sample: the model has no __call__(tokens) that gives logits")
        return None
    prompt = np.frombuffer(settings.sample_prompt.encode() or b"\n", np.uint8).astype(np.int32)
    if not corpus.is_bytes:
        prompt = corpus.val[:1]
    whole = (setup.zero.gather(params), others)
    params, others = jax.tree.map(lambda x: x.addressable_data(0), whole)
    context, temperature = setup.config.data.seq_len, settings.sample_temperature
    buffer = np.zeros(max(context, prompt.size + settings.sample_length), np.int32)
    buffer[: prompt.size] = prompt
    end = prompt.size + settings.sample_length
    out = generate(graphdef, context, temperature, params, others, buffer, prompt.size, end, key)
    ids = np.asarray(out)[:end]
    text = " ".join(map(str, ids))
    if corpus.is_bytes:
        text = ids.astype(np.uint8).tobytes().decode(errors="replace")
    say(f"sample ({settings.sample_length} tokens):\n{text}")
    return text


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def generate(
    graphdef: Any,
    context: int,
    temperature: float,
    params: Any,
    others: Any,
    buffer: jax.Array,
    start: Any,
    end: Any,
    key: jax.Array,
) -> jax.Array:
    """Writes tokens start to end into a buffer, each drawn given the `context` tokens before it.

    Args:
      graphdef, params, others: a causal model, on one device.
      context: tokens the model sees, as many as in training.
      temperature: of the softmax; 0 takes the likeliest token.
      buffer: int32 (n,), n >= context, the prompt in its first `start` places, 1 <= start.
      start, end: places to write, end <= n.
      key: typed PRNG key.
    """

    def write(place: jax.Array, buffer: jax.Array) -> jax.Array:
        model: Any = nnx.merge(graphdef, params, others, copy=True)  # it may change its state
        first = jnp.maximum(place - context, 0)
        window = jax.lax.dynamic_slice(buffer, (first,), (context,))
        logits = model(window[None])[0, place - 1 - first]
        if temperature == 0:
            token = jnp.argmax(logits)
        else:
            token = jax.random.categorical(jax.random.fold_in(key, place), logits / temperature)
        return buffer.at[place].set(token.astype(buffer.dtype))

    return jax.lax.fori_loop(start, end, write, buffer)
