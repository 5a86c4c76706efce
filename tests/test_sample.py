"""What a model writes: with a cache as without, and the same for the same seed."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jzero.sample import Model, Rule, SampleOptions, draw, encode_prompt, generate, write_text
from jzero.tokenizer import Bytes, Ids
from models.gpt2 import GPT2

GREEDY, CONTEXT, KEY = Rule(0.0, None), 16, jax.random.key(0)
# Sums over keys in another order, of logits of size 1: float32, and 16 bits with 8 or 11.
TOLERANCE = {"float32": 1e-5, "bfloat16": 6e-2, "float16": 6e-3}


def make(dtype="float32", tied=True):
    sizes = {"vocab_size": 256, "num_positions": CONTEXT, "num_layers": 2, "num_heads": 2}
    dtypes = {"param_dtype": dtype, "compute_dtype": dtype}
    model = GPT2(embed_dim=16, tied=tied, **sizes, **dtypes, rngs=nnx.Rngs(1))
    for scale in (model.wte.weight, model.h.attn.c_attn.weight):
        scale[...] = scale[...] * 20  # so that tokens differ in what follows them
    return model


class WithoutCache(nnx.Module):
    """The same model for those who know of no cache."""

    def __init__(self, model):
        self.model = model

    def __call__(self, tokens):
        return self.model(tokens)


def parts(model):
    return Model(*nnx.split(model, nnx.Param, ...))


@functools.cache
def cached():
    return parts(make())


def rows(*prompts):
    return np.asarray(prompts, np.int32)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_cached_logits_are_those_of_a_call_in_a_prefill_and_token_by_token(dtype, tied):
    if not tied and dtype != "float32":
        pytest.skip("the head is the same for every dtype")
    model = make(dtype, tied)
    tokens = jax.random.randint(jax.random.key(2), (2, 12), 0, 256)
    want = model(tokens)
    decode = nnx.jit(lambda model, *args: model.decode(*args))
    logits, cache = decode(model, tokens[:, :7], model.init_cache(2, CONTEXT), 0)
    got = [logits]
    for place in range(7, 12):
        logits, cache = decode(model, tokens[:, place : place + 1], cache, place)
        got.append(logits)
    got = jnp.concatenate(got, axis=1)
    assert got.dtype == want.dtype
    size = float(jnp.abs(want).max())
    np.testing.assert_allclose(got / size, want / size, rtol=0, atol=TOLERANCE[dtype])


def test_greedy_tokens_with_a_cache_are_those_without():
    prompt, options = rows([5, 3, 9], [200, 1, 1]), {"context": CONTEXT, "rule": GREEDY, "key": KEY}
    with_cache = generate(cached(), prompt, 13, **options)
    without = generate(parts(WithoutCache(make())), prompt, 13, **options)
    assert [row.tolist() for row in with_cache] == [row.tolist() for row in without]
    assert len(set(with_cache[0].tolist())) > 2


def test_a_full_context_keeps_its_last_half_and_goes_on():
    (out,) = generate(cached(), rows([7]), 30, context=CONTEXT, rule=GREEDY, key=KEY)
    assert out.size == 31
    (again,) = generate(cached(), out[None, 8:16], 8, context=CONTEXT, rule=GREEDY, key=KEY)
    assert again[8:].tolist() == out[16:24].tolist()


def test_the_likeliest_of_one_is_the_likeliest_and_the_draw_is_of_the_top_alone():
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(1, 50)), jnp.float32)
    best = np.argsort(-np.asarray(logits)[0])
    drawn = {int(draw(logits, Rule(5.0, 3), jax.random.key(i))[0]) for i in range(60)}
    assert drawn == set(best[:3].tolist())
    assert int(draw(logits, Rule(5.0, 1), KEY)[0]) == best[0]


def test_a_row_ends_at_a_token_that_ends_and_the_others_go_on():
    prompt = rows([5, 3], [9, 9])
    options = {"context": CONTEXT, "rule": Rule(1e3, None), "key": KEY}
    free = generate(cached(), prompt, 10, **options)
    end = int(free[0][5])
    assert end not in [*free[0][2:5], *free[1]]
    out = generate(cached(), prompt, 10, **options, ends=(end,))
    assert out[0].tolist() == free[0][:5].tolist()
    assert out[1].tolist() == free[1].tolist()


def write(prompt="ab", **options):
    return write_text(cached(), Bytes(), prompt, SampleOptions(**options), context=CONTEXT)


def test_the_same_seed_writes_the_same_and_another_does_not():
    same = [write(length=8, seed=seed, temperature=5.0) for seed in (0, 0, 1)]
    assert same[0] == same[1] != same[2]
    two = write(length=8, temperature=5.0, num_samples=2)
    assert len(set(two)) == 2


def test_text_ends_before_its_stop():
    (text,) = write(length=9, temperature=0.0)
    assert text.startswith("ab")
    stop = text[4:6]
    (cut,) = write(length=9, temperature=0.0, stop=stop)
    assert cut == "ab" + text[2:].split(stop)[0]
    assert len(cut) < len(text)


def test_an_empty_prompt_is_the_start_of_a_text():
    assert write(prompt="", length=1, temperature=0.0)[0].startswith("\n")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length": 0}, "length is 0; use 1 or more"),
        ({"num_samples": 0}, "num_samples is 0; use 1"),
        ({"top_k": 0}, "top_k is 0; use 1"),
        ({"temperature": -1.0}, "temperature is -1.0; use 0 or more"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"stop": ""}, "stop is empty"),
    ],
)
def test_options_out_of_their_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        SampleOptions(**options)


def test_a_prompt_that_the_model_cannot_read_is_refused():
    with pytest.raises(ValueError, match="the prompt has token 300, and the model knows 0 to 255"):
        encode_prompt(Ids(), "3 300", 256)
    with pytest.raises(ValueError, match="the prompt is empty, and these tokens have no start"):
        encode_prompt(Ids(), "", 256)
    options = SampleOptions(top_k=300)
    with pytest.raises(ValueError, match="top_k is 300, and there are 256 tokens"):
        write_text(cached(), Bytes(), "a", options, context=CONTEXT, vocab_size=256)
