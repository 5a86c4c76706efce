"""Cross entropy of next tokens, without the logits of a whole sequence where asked.

Letters: B batch, T time, C time within a chunk, D embed, V vocab.
"""

import jax
import jax.numpy as jnp

from models.layers import wide_einsum


def cross_entropy(
    hidden_BTD: jax.Array,
    head_VD: jax.Array,
    targets_BT: jax.Array,
    *,
    chunk: int | None = None,
) -> jax.Array:
    """Mean cross entropy, in nats, of targets under the softmax of hidden times head.

    Args:
      hidden_BTD: floating, its dtype is the one that is multiplied in.
      head_VD: floating; each row is one vocabulary entry's weights.
      targets_BT: integers in [0, V).
      chunk: positions of the sequence whose logits exist at once, at least 1; it need not divide
        T. None means all.

    Returns:
      Scalar of at least float32 (float64 where hidden is); NaN where a target is V or above.

    Raises:
      ValueError: `chunk` below 1, or shapes that do not fit together or hold no target.

    >>> hidden, head, targets = jnp.zeros((1, 3, 2)), jnp.zeros((4, 2)), jnp.zeros((1, 3), int)
    >>> loss = cross_entropy(hidden, head, targets, chunk=2)
    >>> print(f"{loss:.4f}")  # log 4
    1.3863
    """
    _check_inputs(hidden_BTD, head_VD, targets_BT, chunk)
    num_positions = targets_BT.shape[1]
    if chunk is None or chunk >= num_positions:
        return _summed_loss(hidden_BTD, head_VD, targets_BT) / targets_BT.size
    return _chunked_loss(hidden_BTD, head_VD, targets_BT, chunk) / targets_BT.size


def _chunked_loss(
    hidden_BTD: jax.Array, head_VD: jax.Array, targets_BT: jax.Array, chunk: int
) -> jax.Array:
    """Sum over chunks, each computed again backward; a shorter last chunk stands by itself."""
    num_whole = hidden_BTD.shape[1] // chunk
    cut = num_whole * chunk

    @jax.checkpoint
    def loss_of(hidden_BCD, targets_BC):
        return _summed_loss(hidden_BCD, head_VD, targets_BC)

    def body(_, inputs):
        return None, loss_of(*inputs)

    inputs = (
        _leading_chunks(hidden_BTD[:, :cut], chunk),
        _leading_chunks(targets_BT[:, :cut], chunk),
    )
    _, sums = jax.lax.scan(body, None, inputs)
    total = sums.sum()
    if cut < hidden_BTD.shape[1]:
        total += loss_of(hidden_BTD[:, cut:], targets_BT[:, cut:])
    return total


def _leading_chunks(x: jax.Array, chunk: int) -> jax.Array:
    """(B, n C, ...) to (n, B, C, ...)."""
    num_rows, num_positions, *rest = x.shape
    return x.reshape(num_rows, num_positions // chunk, chunk, *rest).swapaxes(0, 1)


def _summed_loss(hidden_BTD: jax.Array, head_VD: jax.Array, targets_BT: jax.Array) -> jax.Array:
    head_VD = head_VD.astype(hidden_BTD.dtype)
    logits_BTV = wide_einsum("btd,vd->btv", hidden_BTD, head_VD)
    # The default mode of an index beyond the vocabulary is NaN, which a caller's check sees.
    picked_BT1 = jnp.take_along_axis(logits_BTV, targets_BT[:, :, None], axis=-1)
    return (jax.nn.logsumexp(logits_BTV, axis=-1) - picked_BT1[:, :, 0]).sum()


def _check_inputs(
    hidden_BTD: jax.Array, head_VD: jax.Array, targets_BT: jax.Array, chunk: int | None
) -> None:
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk {chunk} is below 1; give a number of positions, or None for all.")
    if hidden_BTD.shape[:2] != targets_BT.shape or hidden_BTD.shape[2:] != head_VD.shape[1:]:
        raise ValueError(
            f"hidden {hidden_BTD.shape}, head {head_VD.shape} and targets {targets_BT.shape} do not"
            " fit; give shapes (B, T, D), (V, D) and (B, T)."
        )
    if targets_BT.size == 0:
        raise ValueError(
            f"targets {targets_BT.shape} hold no target, so there is no mean; give at least one row"
            " and one position."
        )
