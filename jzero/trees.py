"""Trees of arrays by name, and Flax NNX modules as such trees."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Sequence
from typing import Any

import jax
from flax import nnx

from jzero.layout import Leaf


def leaf_name(path: Sequence[Any]) -> str:
    """Joins a key path by dots; an NNX Variable's own `.value` is left off.

    >>> leaf_name((jax.tree_util.DictKey("h"), jax.tree_util.GetAttrKey("value")))
    'h'
    """
    keys = list(path)
    if keys and isinstance(keys[-1], jax.tree_util.GetAttrKey) and keys[-1].name == "value":
        keys.pop()
    return jax.tree_util.keystr(tuple(keys), simple=True, separator=".")


def named_leaves(tree: Any) -> tuple[dict[str, Any], Any]:
    """Flattens a tree to its leaves by name, in order, and its structure."""
    paths, treedef = jax.tree_util.tree_flatten_with_path(tree)
    leaves = {leaf_name(path): leaf for path, leaf in paths}
    if len(leaves) != len(paths):
        names = [leaf_name(path) for path, _ in paths]
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(f"two leaves share the name {twice}; rename one of their keys.")
    return leaves, treedef


@dataclasses.dataclass(frozen=True)
class Split:
    """A user's parameters taken apart.

    Args:
      graphdef: the static part of a module, None for a plain tree.
      params: the tree to differentiate.
      frozen: parameters of a module that get no gradient.
      state: everything else in a module (batch statistics, random streams).
    """

    graphdef: Any
    params: Any
    frozen: Any
    state: Any


def split(params: Any, wrt: Any = nnx.Param) -> Split:
    """Takes an NNX module or a plain tree of arrays apart."""
    if not isinstance(params, nnx.Module):
        return Split(None, params, None, None)
    return Split(*nnx.split(params, wrt, nnx.Param, ...))


def merge(graphdef: Any, params: Any, frozen: Any, state: Any) -> Any:
    """Puts what `split` took apart together again; a module is a new one."""
    return params if graphdef is None else nnx.merge(graphdef, params, frozen, state)


def param_tree(params: Any) -> Any:
    """Returns the parameters of a module as an `nnx.State`, a plain tree unchanged."""
    return nnx.state(params, nnx.Param) if isinstance(params, nnx.Module) else params


def abstract_leaves(tree: Any) -> dict[str, jax.ShapeDtypeStruct]:
    """Reads shape and dtype of every leaf by name.

    Raises:
      ValueError: naming every leaf that is not an array.
    """
    _check_modules(tree)
    leaves, _ = named_leaves(param_tree(tree))
    bad = [
        f"{name or 'the tree itself'} is {type(x).__name__} {str(x)[:40]!r}"
        for name, x in leaves.items()
        if not (hasattr(x, "shape") and hasattr(x, "dtype"))
    ]
    if bad:
        raise ValueError(
            f"parameters must be arrays, but {'; '.join(bad)}; wrap numbers with jnp.asarray, "
            "and keep what is not an array out of the tree."
        )
    if not leaves:
        raise ValueError("the parameter tree has no leaves; pass a tree with at least one array.")
    return {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in leaves.items()}


def _check_modules(tree: Any) -> None:
    """Refuses modules inside of a plain tree, whose Variables would all be taken for parameters."""

    def is_module(x: Any) -> bool:
        return isinstance(x, nnx.Module)

    if not is_module(tree) and any(map(is_module, jax.tree.leaves(tree, is_leaf=is_module))):
        raise ValueError(
            f"the parameters are a {type(tree).__name__} with an nnx.Module in it; put the modules "
            "into one nnx.Module, as attributes or in an nnx.Dict or nnx.List, and pass that."
        )


def check_against(
    got: dict[str, jax.ShapeDtypeStruct],
    want: dict[str, Leaf],
    *,
    what: str,
    rest_shapes: bool,
    may_miss: bool = False,
) -> None:
    """Compares leaf names and shapes with a layout; reports every bad leaf at once.

    Args:
      got: shapes by name.
      want: the layout.
      what: what `got` is, for the message.
      rest_shapes: whether the padded shape at rest is allowed besides the logical one.
      may_miss: whether `got` may lack some leaves.
    """
    bad = [f"{name} is unexpected" for name in got if name not in want]
    bad += [f"{name} is missing" for name in want if name not in got and not may_miss]
    for name, x in got.items():
        if name not in want:
            continue
        allowed = {want[name].shape} | ({want[name].rest_shape} if rest_shapes else set())
        if tuple(x.shape) not in allowed:
            bad.append(f"{name} has shape {tuple(x.shape)}, not {want[name].shape}")
    if bad:
        raise ValueError(
            f"{what} does not match the parameters this Zero was made for: {'; '.join(bad)}. "
            "Pass a tree of the same names and logical shapes, or make a Zero with like=that tree."
        )


def select(tree: Any, where: str, layout: Sequence[Leaf]) -> tuple[Any, list[Leaf]]:
    """Picks the part of a tree below a dotted path, with its rows of the layout.

    Raises:
      ValueError: where no leaf is below the path.
    """
    leaves, _ = named_leaves(tree)
    rows = zip(leaves.items(), layout, strict=True)
    below = [(n, x, leaf) for (n, x), leaf in rows if n == where or n.startswith(where + ".")]
    if not below:
        near = difflib.get_close_matches(where, list(leaves), 1, 0.0)
        raise ValueError(f"where={where!r} names no part of the tree; the nearest leaf is {near}.")
    if below[0][0] == where:
        return below[0][1], [below[0][2]]
    part = {tuple(n[len(where) + 1 :].split(".")): x for n, x, _ in below}
    rows = {n[len(where) + 1 :]: leaf for n, _, leaf in below}
    nested = nnx.traversals.unflatten_mapping(part)
    return nested, [rows[name] for name in named_leaves(nested)[0]]
