"""What a transform's update sends besides the one gather of updates, from its compiled program."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jzero import mesh as meshes
from jzero.layout import Layout, Leaf, is_floating
from jzero.ledger import collectives
from jzero.optimizer import Partition, partitioned, unpartitioned
from jzero.products import has_only_local_ops
from jzero.trees import abstract_leaves, named_leaves


def added_bytes(tx: optax.GradientTransformation, partition: Partition, params: Any) -> int | None:
    """Bytes that a device sends in an update of `tx` besides the gather of updates.

    Nothing is run, and nothing is compiled for a transform that is element-wise but for reductions
    to scalars, rows and columns, whose few bytes are not counted.

    Args:
      tx: a transform, partitioned or plain.
      partition: from the Zero that cuts its state.
      params: shapes of the logical parameters.

    Returns:
      Bytes, as this backend compiles the update (XLA:CPU widens 16-bit floats); None where the
      update needs more than gradients, state and parameters.
    """
    layout = partition.layout_of(abstract_leaves(params))
    sizes = [math.prod(leaf.shape) for leaf in layout.values() if leaf.dim is not None]
    if not partition.place.stage.state or not sizes:
        return 0
    tx = unpartitioned(tx)
    try:
        jaxpr = jax.make_jaxpr(tx.update)(params, jax.eval_shape(tx.init, params), params).jaxpr
    except (TypeError, ValueError):
        return None
    if has_only_local_ops(jaxpr, min(sizes)):
        return 0
    total = collectives(_compiled(tx, partition, layout, params)).check().sent_bytes
    return max(round(total - _gather_bytes(partition, layout)), 0)


def _compiled(
    tx: optax.GradientTransformation, partition: Partition, layout: Layout, params: Any
) -> str:
    """The program of one update, compiled without any array."""
    mine = partitioned(tx, partition)
    state = jax.eval_shape(tx.init, params)
    rows = partition.state_layout(tx, layout, params)
    cuts_params = partition.place.stage.params
    args = (
        _at_rest(partition, params, layout, is_cut=True),
        _at_rest(partition, state, rows, is_cut=True),
        _at_rest(partition, params, layout, is_cut=cuts_params),
    )
    return jax.jit(mine.update).lower(*args).compile().as_text() or ""


def _at_rest(partition: Partition, tree: Any, layout: Layout, *, is_cut: bool) -> Any:
    def abstract(x: Any, leaf: Leaf) -> jax.ShapeDtypeStruct:
        leaf = leaf if is_cut else leaf.whole("")
        spec = partition.spec(leaf)
        sharding = meshes.named_sharding(partition.place.mesh, spec, len(leaf.shape))
        return jax.ShapeDtypeStruct(leaf.rest_shape, x.dtype, sharding=sharding)

    leaves, treedef = named_leaves(tree)
    return jax.tree.unflatten(treedef, [abstract(x, layout[n]) for n, x in leaves.items()])


def _gather_bytes(partition: Partition, layout: Layout) -> float:
    """What the gather of updates sends: the law's, so that the rest is what the update adds."""
    if partition.keeps_shards():
        return 0.0
    ring = (partition.num_shards - 1) / partition.num_shards
    cut = (x for x in layout.values() if x.dim is not None and is_floating(x.dtype))
    return sum(ring * leaf.rest_size * _sent_itemsize(leaf) for leaf in cut)


def _sent_itemsize(leaf: Leaf) -> int:
    """Bytes of an element as this backend sends it."""
    is_widened = leaf.dtype == jnp.bfloat16 and jax.default_backend() == "cpu"
    return 4 if is_widened else leaf.dtype.itemsize
