"""What each device returns, made one global value: weighted losses, auxiliary outputs, state."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jzero.layout import is_floating, mirrored_name
from jzero.trees import leaf_name

ROWS, SCALAR, STATE = "rows", "scalar", "state"


def split_loss(out: Any, has_aux: bool) -> tuple[Any, Any, Any]:
    """Takes what a loss returned apart: (total, weight, aux); weight None for a plain mean.

    The total is at least float32, whatever dtype the loss was computed in.

    Raises:
      ValueError: where it is neither a floating-point scalar nor a pair (sum, weight) of scalars.
    """
    value, aux = out if has_aux else (out, None)
    given = value if isinstance(value, tuple) else (value,)
    total: Any = given[0] if given else None
    weight: Any = given[1] if len(given) == 2 else None
    ok = len(given) == (2 if isinstance(value, tuple) else 1)
    ok &= _is_scalar(total) and jnp.issubdtype(getattr(total, "dtype", int), jnp.floating)
    ok &= weight is None or (_is_scalar(weight) and not _is_complex(weight))
    if not ok:
        what = ", ".join(_describe(x) for x in given) or "nothing"
        raise ValueError(
            f"the loss must be a floating-point scalar, or a pair (sum, weight) of scalars, but "
            f"loss_fn returned {what}; take its mean, or pass has_aux=True where it returns "
            "(loss, aux)."
        )
    total = total.astype(jnp.promote_types(total.dtype, jnp.float32))
    return total, None if weight is None else jnp.asarray(weight, total.dtype), aux


def _is_scalar(x: Any) -> bool:
    return isinstance(x, (int, float)) or getattr(x, "shape", None) == ()


def _is_complex(x: Any) -> bool:
    return jnp.issubdtype(jnp.asarray(x).dtype, jnp.complexfloating)


def _describe(x: Any) -> str:
    return f"{getattr(x, 'dtype', type(x).__name__)}{list(getattr(x, 'shape', ()))}"


@dataclasses.dataclass(frozen=True)
class Outputs:
    """How the leaves of an output tree combine over devices and microbatches.

    Args:
      treedef: of the output.
      kinds: per leaf SCALAR (averaged; integers are summed), ROWS (one row per batch row: joined)
        or STATE (averaged; integers are alike everywhere).
    """

    treedef: Any
    kinds: tuple[str, ...]

    @classmethod
    def of(cls, tree: Any, rows: int, states: Mapping[str, tuple[int, ...]], what: str) -> Outputs:
        """Decides from shapes and names.

        Args:
          tree: what one device returned for one microbatch.
          rows: rows of the batch it was given.
          states: shapes by name of the replicated arguments: an array of the same name and shape
            is that argument's new value, such as Linen's batch_stats.
          what: what returned it, for the message.

        Raises:
          ValueError: for arrays that are none of the three.
        """
        paths, treedef = jax.tree_util.tree_flatten_with_path(tree)
        named = [(leaf_name(path), tuple(jnp.shape(x))) for path, x in paths]
        kinds = tuple(_kind(name, shape, rows, states) for name, shape in named)
        bad = [f"{n or 'an array'} {s}" for (n, s), k in zip(named, kinds, strict=True) if not k]
        if bad:
            raise ValueError(
                f"{what} returned arrays of shapes {', '.join(bad)}, but each device has {rows} "
                "batch rows; return scalars (averaged over devices), arrays with one row per batch "
                "row, or new values of a replicated argument under the same names and shapes."
            )
        return cls(treedef, kinds)

    def leaves(self, tree: Any) -> list[jax.Array]:
        """The leaves of a tree of this structure."""
        return [jnp.asarray(x) for x in jax.tree.leaves(tree)]

    def joined(self, stacked: Any) -> list[jax.Array]:
        """Combines the outputs of microbatches, stacked on dim 0."""
        pairs = zip(self.leaves(stacked), self.kinds, strict=True)
        return [_join(x, kind) for x, kind in pairs]

    def combined(
        self, leaves: Sequence[jax.Array], axes: tuple[str, ...]
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """Combines over devices, in the manual region: what is replicated, and what stays split."""
        pairs = list(zip(leaves, self.kinds, strict=True))
        return [_reduced(x, k, axes) for x, k in pairs if k != ROWS], [
            x for x, k in pairs if k == ROWS
        ]

    def restore(self, replicated: Sequence[Any], split: Sequence[Any]) -> Any:
        """The output tree of both lists of `combined`."""
        r, s = iter(replicated), iter(split)
        leaves = [next(s) if kind == ROWS else next(r) for kind in self.kinds]
        return jax.tree.unflatten(self.treedef, leaves)


def _kind(
    name: str, shape: tuple[int, ...], rows: int, states: Mapping[str, tuple[int, ...]]
) -> str:
    if not shape:
        return SCALAR
    if states.get(mirrored_name(name, states) or "") == shape:
        return STATE
    return ROWS if shape[0] == rows else ""


def _join(x: jax.Array, kind: str) -> jax.Array:
    if kind == ROWS:
        return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])
    if is_floating(x.dtype):
        return x.mean(0)
    return x.sum(0) if kind == SCALAR else x[-1]


def _reduced(x: jax.Array, kind: str, axes: tuple[str, ...]) -> jax.Array:
    if is_floating(x.dtype):
        return jax.lax.pmean(x, axes)
    if kind == STATE:
        return jax.lax.pmax(x, axes)
    return jax.lax.psum(x.astype(jnp.int32) if x.dtype == bool else x, axes)
