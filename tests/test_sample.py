"""What a model writes: with a cache as without, and the same for the same seed."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jzero.generate import PIECE, Model, Rule, draw, generate
from jzero.sample import SampleOptions, encode_prompt, write_text
from jzero.tokenizer import Bytes, Ids
from models.gpt2 import GPT2

# What is claimed here is of what is computed, not of how fast.
pytestmark = pytest.mark.usefixtures("unoptimized")

GREEDY, CONTEXT, KEY = Rule(0.0, None), 16, jax.random.key(0)


def make():
    sizes = {"vocab_size": 256, "num_positions": CONTEXT, "num_layers": 2, "num_heads": 2}
    model = GPT2(embed_dim=16, **sizes, rngs=nnx.Rngs(1))
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


def test_greedy_tokens_with_a_cache_are_those_without():
    prompt, options = rows([5, 3, 9], [200, 1, 1]), {"context": CONTEXT, "rule": GREEDY, "key": KEY}
    with_cache = generate(cached(), prompt, 14, **options)  # the last sees a full context
    without = generate(parts(WithoutCache(make())), prompt, 14, **options)
    assert [row.tolist() for row in with_cache] == [row.tolist() for row in without]
    assert len(set(with_cache[0].tolist())) > 2


class Sums(nnx.Module):
    """The token after others is their sum plus a parameter, modulo 7; the cache holds tokens."""

    def __init__(self):
        self.offset = nnx.Param(jnp.array([1]))

    def __call__(self, tokens):
        return jax.nn.one_hot((jnp.cumsum(tokens, axis=1) + self.offset[...][None, :]) % 7, 7)

    def init_cache(self, num_rows, length):
        return jnp.zeros((num_rows, length), jnp.int32)

    def decode(self, tokens, cache, position):
        cache = jax.lax.dynamic_update_slice(cache, tokens, (0, position))
        size = (*tokens.shape, 7)
        return jax.lax.dynamic_slice(self(cache), (0, position, 0), size), cache


@pytest.mark.parametrize("size", [1, CONTEXT, 20])
def test_a_full_context_keeps_its_last_half_and_goes_on(size):
    prompt = [(3 * i) % 7 for i in range(size)]
    (out,) = generate(parts(Sums()), rows(prompt), 40, context=CONTEXT, rule=GREEDY, key=KEY)
    seen = prompt[-CONTEXT:]
    for token in out[size:].tolist():
        if len(seen) > CONTEXT:
            seen = seen[-(CONTEXT // 2) :]
        assert token == (sum(seen) + 1) % 7
        seen.append(token)
    assert out.size == size + 40


def test_of_a_prompt_longer_than_the_context_the_end_counts_and_that_is_said():
    long, said = "abcdefghij" * 3, []
    options = SampleOptions(length=2, temperature=0.0)
    (text,) = write_text(cached(), Bytes(), long, options, context=CONTEXT, say=said.append)
    (want,) = write_text(cached(), Bytes(), long[-CONTEXT:], options, context=CONTEXT)
    assert text == long[:-CONTEXT] + want
    assert said == ["the prompt has 30 tokens, the model sees 16: it reads the last 16."]


def test_a_row_is_the_same_whatever_is_written_beside_it():
    options = {"context": CONTEXT, "rule": Rule(5.0, None), "key": KEY}
    alone = generate(cached(), rows([5, 3]), 6, **options)
    beside = generate(cached(), rows([5, 3], [5, 3]), 6, **options)
    assert alone[0].tolist() == beside[0].tolist() != beside[1].tolist()


class Narrow(nnx.Module):
    """Logits of 16 bits, all equal, and a context of any size."""

    def __call__(self, tokens):
        return jnp.zeros((*tokens.shape, 5000), jnp.bfloat16)


def test_logits_of_16_bits_are_drawn_from_as_finely_as_others():
    options = {"context": 1, "rule": Rule(1.0, None), "key": KEY}
    (out,) = generate(parts(Narrow()), rows([0]), 400, **options)
    assert len(set(out.tolist())) > 350  # of 5000 equally likely ones; 384 are expected


def test_what_is_beyond_the_vocabulary_is_refused_before_any_compile():
    for rule, token, message in [
        (Rule(1.0, 5001), 3, "top_k is 5001, and there are 5000 tokens; use 5000 or fewer"),
        (GREEDY, 5000, "the prompt has token 5000, and the model knows 0 to 4999"),
    ]:
        with pytest.raises(ValueError, match=message):
            generate(parts(Narrow()), rows([token]), 3, context=1, rule=rule, key=KEY)


def test_the_likeliest_of_one_is_the_likeliest_and_the_draw_is_of_the_top_alone():
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(1, 50)), jnp.float32)
    best = np.argsort(-np.asarray(logits)[0])
    drawn = {int(draw(logits, Rule(5.0, 3), jax.random.key(i))[0]) for i in range(60)}
    assert drawn == set(best[:3].tolist())
    assert int(draw(logits, Rule(5.0, 1), KEY)[0]) == best[0]
    equal = {int(draw(jnp.zeros((1, 9)), Rule(1.0, 1), jax.random.key(i))[0]) for i in range(9)}
    assert equal == {0}


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


def test_writing_ends_soon_after_the_stop_of_every_row():
    seen = []

    def is_over(row):
        seen.append(row.size)
        return True

    options = {"context": 1, "rule": GREEDY, "key": KEY, "is_over": is_over}
    (out,) = generate(parts(Narrow()), rows([0]), 10**6, **options)
    assert seen == [PIECE]
    assert out.size == 1 + PIECE


def test_a_stop_of_numbers_is_of_whole_ones():
    def write(stop=None):
        options = SampleOptions(length=3, temperature=1e3, stop=stop)
        return write_text(cached(), Ids(), "1 1", options, context=CONTEXT)[0]

    words = write().split()
    last, part = words[-1], words[-1][1:]
    assert part and not {last, part} & set(words[:-1])
    assert write(stop=last) == " ".join(words[:-1])
    assert write(stop=part) == " ".join(words)


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
