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


@jax.custom_jvp
def constant_weight(weight: jax.Array) -> jax.Array:
    """The identity; a weight that the loss is differentiated through is refused.

    Raises:
      ValueError: while it is traced with a tangent, that is, where it depends on the parameters.
    """
    return weight


@constant_weight.defjvp
def _constant_weight_jvp(primals: Any, tangents: Any) -> Any:
    raise ValueError(
        "the weight of the loss (sum, weight) depends on the parameters, and the mean over it is "
        "not differentiated through; put jax.lax.stop_gradient around the weight if it is to be "
        "taken as a constant, or return the mean itself."
    )


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
        or STATE (averaged).
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
        _check_floating(paths, rows, states, what)
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
        return [_reduced(x, axes) for x, k in pairs if k != ROWS], [
            x for x, k in pairs if k == ROWS
        ]

    def restore(self, replicated: Sequence[Any], split: Sequence[Any]) -> Any:
        """The output tree of both lists of `combined`."""
        r, s = iter(replicated), iter(split)
        leaves = [next(s) if kind == ROWS else next(r) for kind in self.kinds]
        return jax.tree.unflatten(self.treedef, leaves)


def _check_floating(paths: Any, rows: int, states: Any, what: str) -> None:
    """Refuses integer arrays as new values of an argument: neither mean nor sum would be right."""
    bad = [
        leaf_name(path)
        for path, x in paths
        if _kind(leaf_name(path), tuple(jnp.shape(x)), rows, states) == STATE
        and not is_floating(x.dtype)
    ]
    if bad:
        raise ValueError(
            f"{what} returned {', '.join(bad)}, integers, as new values of a replicated argument; "
            "they would differ from device to device. Make them floating-point (averaged), or "
            "return what is counted as scalars of another name (summed)."
        )


def _kind(
    name: str, shape: tuple[int, ...], rows: int, states: Mapping[str, tuple[int, ...]]
) -> str:
    if not shape:
        return SCALAR
    if states.get(_argument_of(name, states) or "") == shape:
        return STATE
    return ROWS if shape[0] == rows else ""


def _argument_of(name: str, states: Mapping[str, tuple[int, ...]]) -> str | None:
    """The argument whose new value an output is: one name ends the other, and is no mere index."""
    found = mirrored_name(name, states)
    if found is None:
        found = next((state for state in states if state.endswith(f".{name}")), None)
    common = min(name, found, key=len) if found else ""
    return found if any(not part.isdigit() for part in common.split(".")) else None


def _join(x: jax.Array, kind: str) -> jax.Array:
    if kind == ROWS:
        return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])
    return x.mean(0) if is_floating(x.dtype) else _wide(x).sum(0)


def _reduced(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    return jax.lax.pmean(x, axes) if is_floating(x.dtype) else jax.lax.psum(_wide(x), axes)


def _wide(x: jax.Array) -> jax.Array:
    """Integers and booleans to be summed, in at least 32 bits."""
    return x if x.dtype.itemsize >= 4 else x.astype(jnp.int32)
