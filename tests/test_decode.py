"""GPT-2 with a cache of keys and values: the logits of a call, and what the cache refuses."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.gpt2 import GPT2

# What is claimed here is of what is computed, not of how fast.
pytestmark = pytest.mark.usefixtures("unoptimized")

CONTEXT = 16
# Sums over keys in another order, of logits of size 1: float32, and 16 bits with 8 or 11.
TOLERANCE = {"float32": 1e-5, "bfloat16": 6e-2, "float16": 6e-3}


def make(dtype="float32", tied=True):
    sizes = {"vocab_size": 256, "num_positions": CONTEXT, "num_layers": 2, "num_heads": 2}
    dtypes = {"param_dtype": dtype, "compute_dtype": dtype}
    model = GPT2(embed_dim=16, tied=tied, **sizes, **dtypes, rngs=nnx.Rngs(1))
    for scale in (model.wte.weight, model.h.attn.c_attn.weight):
        scale[...] = scale[...] * 20  # so that tokens differ in what follows them
    return model


@functools.cache
def plain():
    """A model, tokens and their logits in a call."""
    model, tokens = make(), jax.random.randint(jax.random.key(2), (2, CONTEXT), 0, 256)
    return model, tokens, call(model, tokens)


call = nnx.jit(lambda model, tokens: model(tokens))
decode = nnx.jit(lambda model, *args: model.decode(*args))


def assert_close(got, want, dtype="float32"):
    size = float(jnp.abs(want).max())
    np.testing.assert_allclose(got / size, want / size, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("dtype", "tied"),
    [("float32", True), ("float32", False), ("bfloat16", True), ("float16", True)],
)
def test_cached_logits_are_those_of_a_call_in_a_prefill_and_token_by_token(dtype, tied):
    model = make(dtype, tied)
    tokens = jax.random.randint(jax.random.key(2), (2, 12), 0, 256)
    want = call(model, tokens)
    logits, cache = decode(model, tokens[:, :7], model.init_cache(2, CONTEXT), 0)
    got = [logits]
    for place in range(7, 12):
        logits, cache = decode(model, tokens[:, place : place + 1], cache, place)
        got.append(logits)
    got = jnp.concatenate(got, axis=1)
    assert got.dtype == want.dtype
    assert_close(got, want, dtype)


def test_each_row_may_be_at_a_position_of_its_own():
    model, tokens, want = plain()
    _, cache = decode(model, tokens[:, :9], model.init_cache(2, CONTEXT), 0)
    starts = np.array([4, 7])
    new = jnp.stack([tokens[0, 4:7], tokens[1, 7:10]])
    got, _ = decode(model, new, cache, starts)
    assert_close(got, jnp.stack([want[0, 4:7], want[1, 7:10]]))


def test_what_is_beyond_the_cache_is_nan_and_leaves_the_rest_alone():
    model, tokens, want = plain()
    length = CONTEXT - 2
    _, cache = decode(model, tokens[:, :12], model.init_cache(2, length), 0)
    got, cache = decode(model, tokens[:, 12:], cache, 12)
    assert_close(got[:, :2], want[:, 12:14])
    assert np.isnan(got[:, 2:]).all()
    again, _ = decode(model, tokens[:, 12:14], cache, 12)
    assert_close(again, want[:, 12:14])


def test_a_cache_longer_than_the_model_and_tokens_longer_than_the_cache_are_refused():
    model, tokens, _ = plain()
    for length in (0, CONTEXT + 1):
        with pytest.raises(ValueError, match=f"length {length} of the cache is outside 1 to "):
            model.init_cache(2, length)
    with pytest.raises(ValueError, match="tokens are 16 long, but .* 15"):
        model.decode(tokens, model.init_cache(2, 15), 0)
