"""Claims about attention: every form computes the same, and the blocked one keeps no scores."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.attention import BLOCK, causal_attention, choose_attention
from models.gpt2 import GPT2

FLOAT64_TOLERANCE = 1e-12
TOLERANCE = 1e-6  # float32 sums in another order


def inputs(num_positions, dtype="float32", head_dim=8):
    draw = np.random.default_rng(0).normal(size=(4, 2, num_positions, 2, head_dim))
    return tuple(jnp.asarray(draw, dtype))


def value_and_grads(attention, q, k, v, g):
    run = functools.partial(causal_attention, attention=attention)
    out, vjp = jax.vjp(run, q, k, v)
    return [out, *vjp(g)]


@pytest.mark.parametrize("num_positions", [1, 7, BLOCK, BLOCK + 1, 3 * BLOCK])
def test_blocked_attention_has_the_values_and_gradients_of_full(num_positions):
    with jax.enable_x64(True):
        arrays = inputs(num_positions, "float64")
        found = value_and_grads("blocked", *arrays)
        for one, other in zip(found, value_and_grads("full", *arrays), strict=True):
            np.testing.assert_allclose(one, other, rtol=0, atol=FLOAT64_TOLERANCE)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_blocked_attention_keeps_the_dtype_and_sums_gradients_in_float32(dtype):
    arrays = inputs(2 * BLOCK, dtype)
    found = value_and_grads("blocked", *arrays)
    assert {x.dtype for x in found} == {jnp.dtype(dtype)}
    exact = value_and_grads("full", *(x.astype("float32") for x in arrays))
    ulp = float(jnp.finfo(dtype).eps)
    for one, other in zip(found, exact, strict=True):
        scale = float(jnp.abs(other).max())
        np.testing.assert_allclose(one.astype("float32"), other, rtol=0, atol=4 * ulp * scale)


def test_blocked_attention_saves_no_scores_for_the_backward_pass():
    q, k, v, _ = inputs(4 * BLOCK)

    def largest(attention):
        run = functools.partial(causal_attention, attention=attention)
        saved = jax.eval_shape(lambda *a: jax.vjp(run, *a)[1], q, k, v)
        return max(x.size for x in jax.tree.leaves(saved))

    assert largest("blocked") == q.size
    assert largest("full") >= 2 * 2 * (4 * BLOCK) ** 2


def test_attention_with_vanishing_dropout_equals_attention_without():
    q, k, v, _ = inputs(7)
    dropped = jax.jit(functools.partial(causal_attention, rate=1e-9))(
        q, k, v, key=jax.random.key(1)
    )
    np.testing.assert_allclose(dropped, causal_attention(q, k, v), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "backend", "capability", "kernel"),
    [
        ("bfloat16", 64, "gpu", 9.0, "cudnn"),
        ("float16", 128, "gpu", 8.0, "cudnn"),
        ("float16", 64, "gpu", 7.0, "blocked"),
        ("bfloat16", 64, "cpu", 0.0, "full"),
        ("float32", 64, "gpu", 9.0, "full"),
        ("bfloat16", 60, "gpu", 9.0, "blocked"),
        ("bfloat16", 136, "gpu", 9.0, "blocked"),
    ],
)
def test_cudnn_attention_only_where_it_can_run(dtype, head_dim, backend, capability, kernel):
    assert choose_attention(dtype, head_dim, backend, capability) == kernel


@pytest.mark.parametrize(("dtype", "head_dim"), [("float32", 64), ("bfloat16", 152)])
def test_cudnn_attention_refuses_what_it_cannot_do(dtype, head_dim):
    q, k, v, _ = inputs(4, dtype, head_dim)
    with pytest.raises(ValueError, match="cuDNN attention takes.*use attention 'blocked'"):
        causal_attention(q, k, v, attention="cudnn")


def test_the_model_runs_the_attention_it_is_given_and_refuses_an_unknown_one():
    make = functools.partial(
        GPT2, vocab_size=7, num_positions=4, num_layers=1, num_heads=1, embed_dim=8
    )
    tokens = jnp.array([[1, 2, 3, 4]])
    full, blocked = (make(attention=name, rngs=nnx.Rngs(0)) for name in ("full", "blocked"))
    jaxprs = [str(jax.make_jaxpr(model)(tokens)) for model in (full, blocked)]
    assert "logsumexp" not in jaxprs[0] and jaxprs[0] != jaxprs[1]
    np.testing.assert_allclose(full(tokens), blocked(tokens), rtol=0, atol=TOLERANCE)
    with pytest.raises(ValueError, match="attention 'flash' is unknown; use one of auto, cudnn"):
        make(attention="flash", rngs=nnx.Rngs(0))
