"""The parts that models share: the loop over stacked layers, small modules, matmuls that widen.

Letters: L stacked layers, B batch, T time, D embed, I and O the dims into and out of a projection.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

# What the backward pass finds saved; everything else is computed again, layer by layer.
REMAT_POLICIES = {
    "none": jax.checkpoint_policies.everything_saveable,
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}


INIT_STDDEV = 0.02  # GPT-2's, of weights and embeddings


def check_remat(remat: str) -> None:
    """Raises ValueError unless `remat` names a rematerialisation."""
    if remat not in REMAT_POLICIES:
        raise ValueError(f"remat {remat!r} is unknown; use one of {', '.join(REMAT_POLICIES)}.")


def run_layers(
    block_fn: Callable[[Any, Any, Any], Any],
    layers: nnx.Module,
    x: Any,
    *,
    remat: str = "full",
    keys: jax.Array | None = None,
    has_aux: bool = False,
) -> Any:
    """Runs a stack of layers one after the other, as one scanned and rematerialised loop.

    A model takes a function of this signature as an argument, so that another loop can be lent to
    it. Weights must be read inside `block_fn`.

    Args:
      block_fn: `block_fn(layer, x, key) -> x`, or `(x, aux)` with `has_aux`: one layer.
      layers: stacked module; each Variable has a leading dim of size L (made with `nnx.vmap`).
      x: pytree of arrays that goes from layer to layer; its shapes and dtypes do not change.
      remat: what backward finds saved: "none" computes nothing again, "full" keeps only each
        layer's input, "dots" keeps also the outputs of matmuls with weights.
      keys: typed PRNG keys, shape (L,), one for each layer; None gives every layer None.
      has_aux: whether `block_fn` returns a second value.

    Returns:
      x after the last layer; with `has_aux` (x, auxs), each array in auxs with a leading dim L.

    Raises:
      ValueError: `remat` is unknown.

    >>> @nnx.vmap
    ... def make(scale):
    ...     return nnx.Dict(scale=nnx.Param(scale))
    >>> layers = make(jnp.array([2.0, 3.0]))
    >>> float(run_layers(lambda layer, x, key: x * layer.scale[...], layers, jnp.array(1.0)))
    6.0
    """
    check_remat(remat)

    def body(x, layer, key):
        out = block_fn(layer, x, key)
        return out if has_aux else (out, None)

    if remat != "none":
        # Forward and backward are two loops, so there is nothing for XLA to merge by CSE.
        body = nnx.remat(body, policy=REMAT_POLICIES[remat], prevent_cse=False, graph=False)
    # As graphs, the loop would put out every weight, and refuse a model closed over in a jit.
    scanned = nnx.scan(body, in_axes=(nnx.Carry, 0, 0), out_axes=(nnx.Carry, 0), graph=False)
    x, auxs = scanned(x, layers, keys)
    return (x, auxs) if has_aux else x


def dropout(x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
    """Sets a share of x to zero and scales the rest, so that the expected value stays.

    Args:
      x: floating array of any shape.
      rate: share that becomes zero, in [0, 1).
      key: typed PRNG key; None, like rate 0, returns x itself.

    Returns:
      Array of x's shape and dtype.

    >>> print(dropout(jnp.ones(4), 0.5, None))
    [1. 1. 1. 1.]
    """
    if key is None or rate == 0.0:
        return x
    is_kept = jax.random.bernoulli(key, 1.0 - rate, x.shape)
    return jnp.where(is_kept, x / (1.0 - rate), jnp.zeros_like(x))


def normal_init(rngs: nnx.Rngs, shape: tuple[int, ...], stddev: float, dtype: str) -> jax.Array:
    """Normal weights, drawn in float32 or wider: 16-bit ones are the float32 ones, rounded."""
    return (stddev * jax.random.normal(rngs.params(), shape, wide_dtype(dtype))).astype(dtype)


class Embedding(nnx.Module):
    """A table of vectors, `weight` (num_rows, D)."""

    def __init__(self, num_rows: int, embed_dim: int, dtype: str, rngs: nnx.Rngs):
        self.weight = nnx.Param(normal_init(rngs, (num_rows, embed_dim), INIT_STDDEV, dtype))


class LayerNorm(nnx.Module):
    """Normalises the last dim, then `weight` (D,) and `bias` (D,)."""

    def __init__(self, dim: int, eps: float, dtype: str):
        self.eps = eps
        self.weight = nnx.Param(jnp.ones((dim,), dtype))
        self.bias = nnx.Param(jnp.zeros((dim,), dtype))

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        wide = wide_dtype(x_BTD.dtype)
        centred_BTD = x_BTD.astype(wide)
        centred_BTD = centred_BTD - centred_BTD.mean(-1, keepdims=True)
        variance_BT1 = jnp.square(centred_BTD).mean(-1, keepdims=True)
        normal_BTD = centred_BTD * jax.lax.rsqrt(variance_BT1 + self.eps)
        weight_D, bias_D = self.weight[...].astype(wide), self.bias[...].astype(wide)
        return (normal_BTD * weight_D[None, None, :] + bias_D[None, None, :]).astype(x_BTD.dtype)


class Projection(nnx.Module):
    """`x @ weight + bias` with `weight` (in, out) as Hugging Face's Conv1D has it."""

    def __init__(self, dim_in: int, dim_out: int, stddev: float, dtype: str, rngs: nnx.Rngs):
        self.weight = nnx.Param(normal_init(rngs, (dim_in, dim_out), stddev, dtype))
        self.bias = nnx.Param(jnp.zeros((dim_out,), dtype))

    def __call__(self, x_BTI: jax.Array) -> jax.Array:
        weight_IO, bias_O = self.weight[...].astype(x_BTI.dtype), self.bias[...].astype(x_BTI.dtype)
        return x_BTI @ weight_IO + bias_O[None, None, :]


def wide_dtype(dtype: Any) -> jnp.dtype:
    """The dtype for statistics and softmax beside `dtype`: float32, or `dtype` where wider."""
    return jnp.promote_types(dtype, jnp.float32)


def wide_einsum(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """Contracts two arrays into at least float32, while backward multiplies in their own dtype.

    Plain `preferred_element_type` multiplies a float32 cotangent with a 16-bit operand on the way
    back, which leaves a GPU's 16-bit matrix units idle.

    Args:
      spec: einsum like "btd,vd->btv", no index of which occurs in one operand only and not in the
        result.
      a, b: floating arrays of one dtype.

    Returns:
      Array of dtype `wide_dtype(a.dtype)`.

    >>> half = jnp.ones((1, 2, 3), jnp.bfloat16)
    >>> wide_einsum("btd,vd->btv", half, half[0]).dtype
    dtype('float32')
    """
    if a.dtype == wide_dtype(a.dtype):
        return jnp.einsum(spec, a, b)
    return _widening_einsum(spec, a, b)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _widening_einsum(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
    wide = wide_dtype(a.dtype)

    def native(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.einsum(spec, a, b, preferred_element_type=wide)

    def widened(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.einsum(spec, a.astype(wide), b.astype(wide))

    if a.dtype != jnp.float16:
        return native(a, b)
    # XLA:CPU has no product of float16 into float32; which platform it is shows in lowering.
    return jax.lax.platform_dependent(a, b, cpu=widened, default=native)


def _widening_einsum_fwd(spec: str, a: jax.Array, b: jax.Array):
    return _widening_einsum(spec, a, b), (a, b)


def _widening_einsum_bwd(spec: str, saved: tuple[jax.Array, jax.Array], g: jax.Array):
    a, b = saved
    operands, out = spec.split("->")
    spec_a, spec_b = operands.split(",")
    g = g.astype(a.dtype)
    return (
        jnp.einsum(f"{out},{spec_b}->{spec_a}", g, b),
        jnp.einsum(f"{out},{spec_a}->{spec_b}", g, a),
    )


_widening_einsum.defvjp(_widening_einsum_fwd, _widening_einsum_bwd)
