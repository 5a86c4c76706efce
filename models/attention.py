"""Causal attention: cuDNN's kernel, a loop over blocks of queries, or all scores at once.

Letters: B batch, T time, S time of the keys, C time within a block, H heads, K head dim.
"""

from typing import Any

import jax
import jax.numpy as jnp

from models.layers import dropout, wide_dtype, wide_einsum

ATTENTIONS = ("auto", "cudnn", "blocked", "full")
BLOCK = 128  # queries whose scores exist at once


def causal_attention(
    q_BTHK: jax.Array,
    k_BTHK: jax.Array,
    v_BTHK: jax.Array,
    *,
    attention: str = "auto",
    rate: float = 0.0,
    key: jax.Array | None = None,
) -> jax.Array:
    """Attention of each position to itself and those before it, scaled by 1 / sqrt(K).

    Args:
      q_BTHK, k_BTHK, v_BTHK: floating arrays of one shape and dtype.
      attention: "cudnn" is the fused kernel; "blocked" a loop over blocks of queries that keeps for
        the backward pass what that kernel keeps, and never T x T scores; "full" makes all scores;
        "auto" takes "cudnn" where a GPU has it, "blocked" for 16 bits on other GPUs, else "full".
        With dropout of the probabilities it is always "full".
      rate: share of the attention probabilities that becomes zero, in [0, 1).
      key: typed PRNG key for that; None for none.

    Returns:
      Array (B, T, H, K) of the same dtype.

    Raises:
      ValueError: "cudnn" for what it cannot do.
    """
    if key is not None and rate > 0.0:
        return _full_attention(q_BTHK, k_BTHK, v_BTHK, rate, key)
    if attention == "auto":
        attention = choose_attention(q_BTHK.dtype, q_BTHK.shape[-1], *_backend())
    if attention == "cudnn":
        _check_cudnn(q_BTHK.dtype, q_BTHK.shape[-1])
        return jax.nn.dot_product_attention(
            q_BTHK, k_BTHK, v_BTHK, is_causal=True, implementation="cudnn"
        )
    if attention == "blocked":
        return blocked_attention(q_BTHK, k_BTHK, v_BTHK)
    if q_BTHK.dtype in (jnp.bfloat16, jnp.float32):
        return jax.nn.dot_product_attention(
            q_BTHK, k_BTHK, v_BTHK, is_causal=True, implementation="xla"
        )
    return _full_attention(q_BTHK, k_BTHK, v_BTHK, 0.0, None)


def cached_attention(
    q_BTHK: jax.Array, k_BSHK: jax.Array, v_BSHK: jax.Array, positions_BT: jax.Array
) -> jax.Array:
    """Attention of new positions to a cache of keys and values, and to those before among them.

    Args:
      q_BTHK: queries of the new positions.
      k_BSHK, v_BSHK: of positions 0 to S, the new ones among them.
      positions_BT: of the queries, int32; keys and values behind them have no weight.

    Returns:
      Array (B, T, H, K) of the values' dtype.
    """
    scores_BHTS = wide_einsum("bthk,bshk->bhts", q_BTHK, k_BSHK) * q_BTHK.shape[-1] ** -0.5
    is_past_BTS = positions_BT[:, :, None] >= jnp.arange(k_BSHK.shape[1])[None, None, :]
    lowest = jnp.finfo(scores_BHTS.dtype).min
    probs_BHTS = jax.nn.softmax(jnp.where(is_past_BTS[:, None], scores_BHTS, lowest), axis=-1)
    return jnp.einsum("bhts,bshk->bthk", probs_BHTS.astype(v_BSHK.dtype), v_BSHK)


def choose_attention(dtype: Any, head_dim: int, backend: str, capability: float) -> str:
    """What "auto" stands for.

    Args:
      dtype: of queries, keys and values.
      head_dim: K.
      backend: jax's name of it: "gpu", "cpu".
      capability: CUDA compute capability of the GPU, such as 9.0.

    >>> [choose_attention(jnp.float16, 64, "gpu", capability) for capability in (9.0, 7.0)]
    ['cudnn', 'blocked']
    """
    if backend != "gpu" or not _is_16_bit(dtype):
        return "full"
    return "cudnn" if capability >= 8.0 and _fits_cudnn(head_dim) else "blocked"


def _backend() -> tuple[str, float]:
    backend = jax.default_backend()
    found = getattr(jax.local_devices()[0], "compute_capability", 0.0) if backend == "gpu" else 0.0
    return backend, float(found)


def _is_16_bit(dtype: Any) -> bool:
    return jnp.dtype(dtype) in (jnp.dtype("bfloat16"), jnp.dtype("float16"))


def _fits_cudnn(head_dim: int) -> bool:
    return head_dim % 8 == 0 and head_dim <= 128


def _check_cudnn(dtype: Any, head_dim: int) -> None:
    if not (_is_16_bit(dtype) and _fits_cudnn(head_dim)):
        raise ValueError(
            f"cuDNN attention takes 16-bit dtypes and head dims that are multiples of 8 up to 128, "
            f"not {jnp.dtype(dtype)} and {head_dim}; use attention 'blocked'."
        )


def _full_attention(q_BTHK, k_BTHK, v_BTHK, rate: float, key: jax.Array | None) -> jax.Array:
    # jax's attention drops no probabilities, takes its softmax in float32 even for float64, and
    # multiplies float16 in a way that XLA:CPU has not.
    num_positions, _, head_dim = q_BTHK.shape[1:]
    scores_BHTS = wide_einsum("bthk,bshk->bhts", q_BTHK, k_BTHK) * head_dim**-0.5  # (B, H, T, S)
    is_past_TS = jnp.tri(num_positions, dtype=bool)
    lowest = jnp.finfo(scores_BHTS.dtype).min
    scores_BHTS = jnp.where(is_past_TS[None, None, :, :], scores_BHTS, lowest)
    probs_BHTS = dropout(jax.nn.softmax(scores_BHTS, axis=-1), rate, key)
    return jnp.einsum("bhts,bshk->bthk", probs_BHTS.astype(v_BTHK.dtype), v_BTHK)  # (B, T, H, K)


@jax.custom_vjp
def blocked_attention(q_BTHK: jax.Array, k_BTHK: jax.Array, v_BTHK: jax.Array) -> jax.Array:
    """Causal attention in a loop over blocks of queries; backward makes each block's scores again.

    Saved for the backward pass are queries, keys, values, outputs and one number a query, as in
    Dao et al., FlashAttention, arXiv:2205.14135.
    """
    return _blocked_forward(q_BTHK, k_BTHK, v_BTHK)[0]


def _blocked_forward(q_BTHK, k_BTHK, v_BTHK):
    def step(_, inputs):
        index, q_BCHK = inputs
        scores_BHCS = _block_scores(index, q_BCHK, k_BTHK)
        lse_BHC = jax.nn.logsumexp(scores_BHCS, axis=-1)
        probs_BHCS = jnp.exp(scores_BHCS - lse_BHC[..., None]).astype(v_BTHK.dtype)
        mixed_BCHK = wide_einsum("bhcs,bshk->bchk", probs_BHCS, v_BTHK)
        return None, (mixed_BCHK.astype(v_BTHK.dtype), lse_BHC)

    blocks = _blocks(q_BTHK)
    _, (mixed, lse) = jax.lax.scan(step, None, (jnp.arange(len(blocks)), blocks))
    mixed_BTHK = _joined(mixed, q_BTHK.shape[1])
    return mixed_BTHK, (q_BTHK, k_BTHK, v_BTHK, mixed_BTHK, lse)


def _blocked_backward(saved, g_BTHK):
    q_BTHK, k_BTHK, v_BTHK, mixed_BTHK, lse = saved
    wide, dtype = wide_dtype(q_BTHK.dtype), q_BTHK.dtype
    scale = q_BTHK.shape[-1] ** -0.5

    def step(sums, inputs):
        index, q_BCHK, g_BCHK, mixed_BCHK, lse_BHC = inputs
        scores_BHCS = _block_scores(index, q_BCHK, k_BTHK)
        probs_BHCS = jnp.exp(scores_BHCS - lse_BHC[..., None])
        dot_BCH = (g_BCHK.astype(wide) * mixed_BCHK.astype(wide)).sum(-1)
        dprobs_BHCS = wide_einsum("bchk,bshk->bhcs", g_BCHK, v_BTHK)
        dscores_BHCS = probs_BHCS * (dprobs_BHCS - dot_BCH.swapaxes(1, 2)[..., None]) * scale
        dscores_BHCS, probs_BHCS = dscores_BHCS.astype(dtype), probs_BHCS.astype(dtype)
        dq_BCHK = wide_einsum("bhcs,bshk->bchk", dscores_BHCS, k_BTHK).astype(dtype)
        dk_BTHK = sums[0] + wide_einsum("bhcs,bchk->bshk", dscores_BHCS, q_BCHK)
        dv_BTHK = sums[1] + wide_einsum("bhcs,bchk->bshk", probs_BHCS, g_BCHK)
        return (dk_BTHK, dv_BTHK), dq_BCHK

    blocks = [_blocks(x) for x in (q_BTHK, g_BTHK, mixed_BTHK)]
    zeros = jnp.zeros(k_BTHK.shape, wide)
    rows = (jnp.arange(len(blocks[0])), *blocks, lse)
    (dk_BTHK, dv_BTHK), dq = jax.lax.scan(step, (zeros, zeros), rows)
    return _joined(dq, q_BTHK.shape[1]), dk_BTHK.astype(dtype), dv_BTHK.astype(dtype)


blocked_attention.defvjp(_blocked_forward, _blocked_backward)


def _block_scores(index: Any, q_BCHK: jax.Array, k_BTHK: jax.Array) -> jax.Array:
    """Scaled scores (B, H, C, S) of a block, the lowest number for what lies ahead."""
    scores_BHCS = wide_einsum("bchk,bshk->bhcs", q_BCHK, k_BTHK) * q_BCHK.shape[-1] ** -0.5
    rows_C1 = index * q_BCHK.shape[1] + jnp.arange(q_BCHK.shape[1])[:, None]
    is_past_CS = rows_C1 >= jnp.arange(k_BTHK.shape[1])[None, :]
    lowest = jnp.finfo(scores_BHCS.dtype).min
    return jnp.where(is_past_CS[None, None, :, :], scores_BHCS, lowest)


def _blocks(x_BTHK: jax.Array) -> jax.Array:
    """(B, T, H, K) to (T / C, B, C, H, K), filled up with zeros."""
    num_rows, num_positions, *rest = x_BTHK.shape
    size = min(BLOCK, num_positions)
    x = jnp.pad(x_BTHK, ((0, 0), (0, -num_positions % size), (0, 0), (0, 0)))
    return x.reshape(num_rows, -1, size, *rest).swapaxes(0, 1)


def _joined(blocks: jax.Array, num_positions: int) -> jax.Array:
    num_blocks, num_rows, size, *rest = blocks.shape
    x = blocks.swapaxes(0, 1).reshape(num_rows, num_blocks * size, *rest)
    return x[:, :num_positions]
