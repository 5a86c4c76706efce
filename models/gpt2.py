"""GPT-2 (Radford et al., 2019) in Flax NNX, with the names of the Hugging Face checkpoint.

Pre-LN blocks, tanh GELU, a head that is the token table unless told otherwise. Weights are stored
in `param_dtype` and multiplied in `compute_dtype`; statistics and softmax are float32 or wider.

Letters: B batch, T time, D embed, H heads, K head dim (D = H K), V vocab, P positions, F mlp
(F = 4 D).
"""

from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from models import huggingface
from models.attention import ATTENTIONS, cached_attention, causal_attention
from models.layers import (
    INIT_STDDEV,
    Embedding,
    LayerNorm,
    Projection,
    check_remat,
    dropout,
    run_layers,
    wide_einsum,
)
from models.loss import cross_entropy

DTYPES = ("float16", "bfloat16", "float32", "float64")


class Attention(nnx.Module):
    """Causal self-attention of `num_heads` heads."""

    def __init__(self, dim, num_heads, attention, rate, stddev, dtype, rngs):
        self.num_heads, self.attention, self.dropout = num_heads, attention, rate
        self.c_attn = Projection(dim, 3 * dim, INIT_STDDEV, dtype, rngs)
        self.c_proj = Projection(dim, dim, stddev, dtype, rngs)

    def __call__(self, x_BTD: jax.Array, key: jax.Array | None) -> jax.Array:
        q_BTHK, k_BTHK, v_BTHK = self._heads(x_BTD)
        options = {"attention": self.attention, "rate": self.dropout, "key": key}
        mixed_BTHK = causal_attention(q_BTHK, k_BTHK, v_BTHK, **options)
        return self.c_proj(mixed_BTHK.reshape(x_BTD.shape))  # (B, T, D)

    def decode(self, x_BTD, cache, positions_BT) -> tuple[jax.Array, Any]:
        q_BTHK, *new = self._heads(x_BTD)
        k_BSHK, v_BSHK = (
            _updated(old_BSHK, part_BTHK, positions_BT)
            for old_BSHK, part_BTHK in zip(cache, new, strict=True)
        )
        mixed_BTHK = cached_attention(q_BTHK, k_BSHK, v_BSHK, positions_BT)
        return self.c_proj(mixed_BTHK.reshape(x_BTD.shape)), (k_BSHK, v_BSHK)

    def _heads(self, x_BTD: jax.Array) -> list[jax.Array]:
        """Queries, keys and values, each (B, T, H, K)."""
        num_rows, num_positions, dim = x_BTD.shape
        shape = (num_rows, num_positions, self.num_heads, dim // self.num_heads)
        return [part.reshape(shape) for part in jnp.split(self.c_attn(x_BTD), 3, axis=-1)]


class MLP(nnx.Module):
    """Two projections with a tanh GELU between."""

    def __init__(self, dim: int, stddev: float, dtype: str, rngs: nnx.Rngs):
        self.c_fc = Projection(dim, 4 * dim, INIT_STDDEV, dtype, rngs)
        self.c_proj = Projection(4 * dim, dim, stddev, dtype, rngs)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        return self.c_proj(jax.nn.gelu(self.c_fc(x_BTD), approximate=True))  # F inside


class Block(nnx.Module):
    """One pre-LN layer: attention, then MLP, each added to what came in."""

    def __init__(self, dim, num_heads, attention, rate, eps, stddev, dtype, rngs):
        self.dropout = rate
        self.ln_1 = LayerNorm(dim, eps, dtype)
        self.attn = Attention(dim, num_heads, attention, rate, stddev, dtype, rngs)
        self.ln_2 = LayerNorm(dim, eps, dtype)
        self.mlp = MLP(dim, stddev, dtype, rngs)

    def __call__(self, x_BTD: jax.Array, key: jax.Array | None) -> jax.Array:
        attn_key, resid_key, mlp_key = _split(key, 3)
        mixed_BTD = self.attn(self.ln_1(x_BTD), attn_key)
        x_BTD = x_BTD + dropout(mixed_BTD, self.dropout, resid_key)
        return x_BTD + dropout(self.mlp(self.ln_2(x_BTD)), self.dropout, mlp_key)

    def decode(self, x_BTD, cache, positions_BT) -> tuple[jax.Array, Any]:
        mixed_BTD, cache = self.attn.decode(self.ln_1(x_BTD), cache, positions_BT)
        x_BTD = x_BTD + mixed_BTD
        return x_BTD + self.mlp(self.ln_2(x_BTD)), cache


class GPT2(nnx.Module):
    """The language model; its arguments are what a config file may set.

    Args:
      vocab_size: rows of the token table and of the head.
      num_positions: longest sequence.
      num_layers, num_heads: at least 1.
      embed_dim: divisible by num_heads.
      dropout: share, in [0, 1), of embeddings, attention probabilities and residual branches that
        becomes zero where a call is given a key.
      layer_norm_eps: added to the variance.
      tied: whether the token table is the head, too; otherwise that is a table of its own.
      attention: "auto", "cudnn", "blocked" or "full"; see `models.attention.causal_attention`.
      remat: "none", "full" or "dots"; see `models.layers.run_layers`.
      loss_chunk: positions whose logits `loss` holds at once; None holds all.
      param_dtype, compute_dtype: "float16", "bfloat16", "float32", or "float64" under jax's x64.
      rngs: the stream `params` gives the initial weights.

    Raises:
      ValueError: an argument is out of its range; nothing has been allocated then.

    >>> model = GPT2(vocab_size=7, num_positions=4, num_layers=2, num_heads=2, embed_dim=8,
    ...              rngs=nnx.Rngs(0))
    >>> tokens = jnp.array([[1, 2, 3, 4]])
    >>> model(tokens).shape, model.loss(tokens).shape
    ((1, 4, 7), ())
    """

    arguments_from_huggingface = staticmethod(huggingface.arguments_from_huggingface)
    huggingface_config = staticmethod(huggingface.huggingface_config)
    huggingface_names = staticmethod(huggingface.huggingface_names)

    # What a trained model may be given otherwise, and is the same function still.
    RUNTIME_ARGUMENTS: ClassVar = ("dropout", "attention", "remat", "loss_chunk")

    def __init__(
        self,
        *,
        vocab_size: int = 50257,
        num_positions: int = 1024,
        num_layers: int = 12,
        num_heads: int = 12,
        embed_dim: int = 768,
        dropout: float = 0.0,
        layer_norm_eps: float = 1e-5,
        tied: bool = True,
        attention: str = "auto",
        remat: str = "full",
        loss_chunk: int | None = None,
        param_dtype: str = "float32",
        compute_dtype: str = "float32",
        rngs: nnx.Rngs,
    ):
        sizes = {
            "vocab_size": vocab_size,
            "num_positions": num_positions,
            "num_layers": num_layers,
            "num_heads": num_heads,
            "embed_dim": embed_dim,
            "loss_chunk": loss_chunk,
        }
        _check_sizes(sizes)
        _check_heads(embed_dim, num_heads)
        _check_choices(dropout, layer_norm_eps, remat, attention)
        _check_dtypes({"param_dtype": param_dtype, "compute_dtype": compute_dtype})
        self.num_layers, self.num_positions = num_layers, num_positions
        self.dropout, self.remat, self.loss_chunk = dropout, remat, loss_chunk
        self.compute_dtype, self.tied = compute_dtype, tied
        stddev = INIT_STDDEV / (2 * num_layers) ** 0.5  # two residual branches a layer

        @nnx.split_rngs(splits=num_layers)
        @nnx.vmap(in_axes=0, out_axes=0)
        def make_layers(rngs):
            sizes = (embed_dim, num_heads, attention)
            return Block(*sizes, dropout, layer_norm_eps, stddev, param_dtype, rngs)

        self.wte = Embedding(vocab_size, embed_dim, param_dtype, rngs)
        self.wpe = Embedding(num_positions, embed_dim, param_dtype, rngs)
        self.h = make_layers(rngs)
        self.ln_f = LayerNorm(embed_dim, layer_norm_eps, param_dtype)
        if not tied:  # last: the other weights are those of the tied model
            self.lm_head = Embedding(vocab_size, embed_dim, param_dtype, rngs)

    def __call__(
        self,
        tokens_BT: jax.Array,
        *,
        key: jax.Array | None = None,
        run_layers: Callable[..., Any] = run_layers,
    ) -> jax.Array:
        """Logits of each position's next token.

        Args:
          tokens_BT: integers in [0, V), T at most num_positions.
          key: typed PRNG key for dropout; None for none.
          run_layers: the loop over layers, of `models.layers.run_layers`' signature.

        Returns:
          Shape (B, T, V), float32 or wider; NaN in rows with a token of V or above.

        Raises:
          ValueError: tokens are not integers (B, T), or too long.
        """
        wte_VD = self.wte.weight[...]
        hidden_BTD = self._hidden(wte_VD, tokens_BT, key, run_layers)
        head_VD = self._head(wte_VD).astype(hidden_BTD.dtype)
        return wide_einsum("btd,vd->btv", hidden_BTD, head_VD)  # (B, T, V)

    def hidden(
        self,
        tokens_BT: jax.Array,
        *,
        key: jax.Array | None = None,
        run_layers: Callable[..., Any] = run_layers,
    ) -> jax.Array:
        """What the head is multiplied with: (B, T, D) in compute_dtype; arguments as in a call."""
        return self._hidden(self.wte.weight[...], tokens_BT, key, run_layers)

    def loss(
        self,
        tokens_BT1: jax.Array,
        *,
        key: jax.Array | None = None,
        run_layers: Callable[..., Any] = run_layers,
    ) -> jax.Array:
        """Mean cross entropy, in nats, of each token but the first given those before it.

        Args:
          tokens_BT1: integers in [0, V), shape (B, T + 1), T from 1 to num_positions.
          key, run_layers: as in a call.

        Returns:
          Scalar, float32 or wider.

        Raises:
          ValueError: tokens are not integers (B, T + 1), too long, or hold no target.
        """
        wte_VD = self.wte.weight[...]  # read once: a hook on it may be a collective
        hidden_BTD = self._hidden(wte_VD, tokens_BT1[:, :-1], key, run_layers)
        head_VD = self._head(wte_VD)
        return cross_entropy(hidden_BTD, head_VD, tokens_BT1[:, 1:], chunk=self.loss_chunk)

    def init_cache(self, num_rows: int, length: int) -> tuple[jax.Array, jax.Array]:
        """An empty cache for `decode`: keys and values, each (L, B, S, H, K) in compute_dtype.

        Args:
          num_rows: B.
          length: S, positions it holds, from 1 to num_positions.

        Raises:
          ValueError: length is out of its range.
        """
        if not 1 <= length <= self.num_positions:
            raise ValueError(
                f"length {length} of the cache is outside 1 to num_positions {self.num_positions};"
                " give one of these."
            )
        dim = self.wte.weight.shape[1]
        num_heads = self.h.attn.num_heads
        shape = (self.num_layers, num_rows, length, num_heads, dim // num_heads)
        return jnp.zeros(shape, self.compute_dtype), jnp.zeros(shape, self.compute_dtype)

    def decode(self, tokens_BT: jax.Array, cache: Any, position: Any) -> tuple[jax.Array, Any]:
        """Logits of what follows new tokens, given a cache of all before them.

        Args:
          tokens_BT: integers in [0, V); a whole prompt, or one token a row.
          cache: from `init_cache`, or as the last call returned it.
          position: of the first new token, at most S - T: int32, a scalar or one for each row.

        Returns:
          The logits (B, T, V), float32 or wider, NaN at positions beyond S and after them; and the
          cache with the new tokens in it.

        Raises:
          ValueError: tokens are not integers (B, T), or more than the cache holds.
        """
        length = cache[0].shape[2]
        _check_tokens(tokens_BT, length, "the cache has length")
        num_rows, num_new = tokens_BT.shape
        starts_B1 = jnp.broadcast_to(jnp.asarray(position).reshape(-1, 1), (num_rows, 1))
        positions_BT = starts_B1 + jnp.arange(num_new)[None, :]
        wte_VD, wpe_SD = self.wte.weight[...], self.wpe.weight[...][:length]
        x_BTD = jnp.take(wte_VD, tokens_BT, axis=0) + jnp.take(wpe_SD, positions_BT, axis=0)
        x_BTD = x_BTD.astype(self.compute_dtype)

        def body(x_BTD, layer, cache):
            return layer.decode(x_BTD, cache, positions_BT)

        axes = {"in_axes": (nnx.Carry, 0, 0), "out_axes": (nnx.Carry, 0), "graph": False}
        x_BTD, cache = nnx.scan(body, **axes)(x_BTD, self.h, cache)
        hidden_BTD = self.ln_f(x_BTD)
        head_VD = self._head(wte_VD).astype(hidden_BTD.dtype)
        return wide_einsum("btd,vd->btv", hidden_BTD, head_VD), cache  # (B, T, V)

    def _head(self, wte_VD: jax.Array) -> jax.Array:
        """The head's table, given the token table as it was read: read once where they are one."""
        return wte_VD if self.tied else self.lm_head.weight[...]

    def _hidden(self, wte_VD, tokens_BT, key, run_layers) -> jax.Array:
        _check_tokens(tokens_BT, self.num_positions)
        if self.dropout == 0.0:
            key = None
        embed_key, layers_key = _split(key, 2)
        wpe_TD = self.wpe.weight[...][: tokens_BT.shape[1]]
        x_BTD = jnp.take(wte_VD, tokens_BT, axis=0) + wpe_TD[None, :, :]  # (B, T, D)
        x_BTD = dropout(x_BTD.astype(self.compute_dtype), self.dropout, embed_key)
        keys = None if layers_key is None else jax.random.split(layers_key, self.num_layers)
        x_BTD = run_layers(_run_block, self.h, x_BTD, remat=self.remat, keys=keys)
        return self.ln_f(x_BTD)


def _updated(old_BSHK: jax.Array, new_BTHK: jax.Array, positions_BT: jax.Array) -> jax.Array:
    """A cache with new keys or values at their positions; those beyond its end are left out."""
    rows_B1 = jnp.arange(old_BSHK.shape[0])[:, None]
    return old_BSHK.at[rows_B1, positions_BT].set(new_BTHK.astype(old_BSHK.dtype), mode="drop")


def _run_block(layer: Block, x_BTD: jax.Array, key: jax.Array | None) -> jax.Array:
    return layer(x_BTD, key)


def _split(key: jax.Array | None, num_keys: int) -> Any:
    return (None,) * num_keys if key is None else jax.random.split(key, num_keys)


def _check_sizes(sizes: dict[str, int | None]) -> None:
    for name, size in sizes.items():
        if size is not None and size < 1:
            raise ValueError(f"{name} {size} is below 1; give a positive number.")


def _check_heads(embed_dim: int, num_heads: int) -> None:
    head_dim, rest = divmod(embed_dim, num_heads)
    if rest:
        above = (head_dim + 1) * num_heads
        near = f"{head_dim * num_heads} or {above}" if head_dim else f"{above}"
        raise ValueError(
            f"embed_dim {embed_dim} is not divisible by num_heads {num_heads}; use {near}, or"
            " another number of heads."
        )


def _check_choices(dropout: float, layer_norm_eps: float, remat: str, attention: str) -> None:
    check_remat(remat)
    if attention not in ATTENTIONS:
        raise ValueError(f"attention {attention!r} is unknown; use one of {', '.join(ATTENTIONS)}.")
    if not 0.0 <= dropout < 1.0:
        raise ValueError(f"dropout {dropout} is outside [0, 1); give the share that becomes zero.")
    if not layer_norm_eps > 0.0:
        raise ValueError(f"layer_norm_eps {layer_norm_eps} is not above 0; GPT-2 has 1e-5.")


def _check_dtypes(dtypes: dict[str, str]) -> None:
    for name, dtype in dtypes.items():
        if dtype not in DTYPES:
            raise ValueError(f"{name} {dtype!r} is unknown; use one of {', '.join(DTYPES)}.")
        if dtype == "float64" and jax.dtypes.canonicalize_dtype(dtype) != dtype:
            raise ValueError(f"{name} float64 needs jax_enable_x64; set it, or use float32.")


def _check_tokens(
    tokens_BT: jax.Array, longest: int, limit: str = "the model has num_positions"
) -> None:
    if tokens_BT.ndim != 2 or not jnp.issubdtype(tokens_BT.dtype, jnp.integer):
        raise ValueError(
            f"tokens have shape {tokens_BT.shape} and dtype {tokens_BT.dtype}; give integers of"
            " shape (batch, time)."
        )
    if tokens_BT.shape[1] > longest:
        raise ValueError(
            f"tokens are {tokens_BT.shape[1]} long, but {limit} {longest}; cut the sequence or"
            f" raise {limit.split()[-1]}."
        )
