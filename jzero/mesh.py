"""Meshes: making one, choosing its partition axes, running a function with automatic axes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

P = PartitionSpec
REPLICA_AXIS = "replica"


def make_mesh(
    *,
    replica: int = 1,
    data: int | None = None,
    model: int = 1,
    devices: Sequence[Any] | None = None,
) -> Mesh:
    """Makes a mesh with the axes ("replica", "data", "model"), all automatic.

    Args:
      replica: number of full copies of what is partitioned, at least 1.
      data: size of the partition axis; None takes every device that is left.
      model: size of the model-parallel axis, at least 1.
      devices: the devices to use; None means all of them.

    Returns:
      A mesh over every given device: none is left out silently.

    Raises:
      ValueError: where the sizes do not multiply to the number of devices.

    >>> make_mesh().axis_names
    ('replica', 'data', 'model')
    """
    devices = list(jax.devices() if devices is None else devices)
    for axis, size in (("replica", replica), ("data", data), ("model", model)):
        if size is not None and (not isinstance(size, int) or size < 1):
            raise ValueError(
                f"mesh axis {axis!r} has size {size!r}; give an integer of at least 1."
            )
    if data is None:
        data = max(len(devices) // (replica * model), 1)
    if replica * data * model != len(devices):
        raise ValueError(
            f"replica {replica} x data {data} x model {model} = {replica * data * model} devices, "
            f"but there are {len(devices)}; make the product {len(devices)}, or pass "
            f"devices=jax.devices()[:{replica * data * model}]."
        )
    grid = np.array(devices, dtype=object).reshape(replica, data, model)
    return Mesh(grid, (REPLICA_AXIS, "data", "model"), axis_types=(AxisType.Auto,) * 3)


def partition_axes(mesh: Mesh, axes: Sequence[str] | str | None) -> tuple[str, ...]:
    """Returns the mesh axes to partition over: `axes`, or "data", or the only axis there is."""
    names = tuple(str(name) for name in mesh.axis_names)
    if axes is None:
        if "data" in names:
            return ("data",)
        if len(names) == 1:
            return names
        raise ValueError(
            f"the mesh has axes {names} and none is called 'data'; "
            f"say which to partition over, as in axes=({names[0]!r},)."
        )
    axes = (axes,) if isinstance(axes, str) else tuple(axes)
    missing = [axis for axis in axes if axis not in names]
    if missing or not axes or len(set(axes)) != len(axes):
        raise ValueError(f"axes={axes!r} must be different names among the mesh axes {names}.")
    return axes


def replica_axes(mesh: Mesh, axes: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the axes that split the batch and partition nothing: "replica", if above 1."""
    rest = {str(name): size for name, size in mesh.shape.items() if name not in axes and size > 1}
    unknown = {name: size for name, size in rest.items() if name != REPLICA_AXIS}
    if unknown:
        raise ValueError(
            f"mesh axes {unknown} are neither partition axes {axes} nor {REPLICA_AXIS!r}; "
            "model-parallel axes are not supported yet: give them size 1, or name them in axes=."
        )
    return tuple(rest)


def axes_size(mesh: Mesh, axes: tuple[str, ...]) -> int:
    """Returns the number of shards over `axes`."""
    return int(np.prod([mesh.shape[axis] for axis in axes], dtype=np.int64))


def is_explicit(mesh: Mesh) -> bool:
    """Whether any axis of the mesh is of type Explicit, as jax.make_mesh gives by default."""
    return AxisType.Explicit in mesh.axis_types


def named_sharding(mesh: Mesh, spec: PartitionSpec, ndim: int) -> NamedSharding:
    """The sharding of an array of `ndim` dims, in the form in which jit gives it back.

    Explicit axes are part of an array's type, where P() and P(None) differ: both would compile.
    """
    if is_explicit(mesh):
        spec = P(*spec, *(None,) * (ndim - len(spec)))
    return NamedSharding(mesh, spec)


def put(x: Any, sharding: NamedSharding) -> jax.Array:
    """Puts an array on devices in buffers of its own, so that donating them leaves `x` alive.

    `device_put` shares the buffer of the device that `x` is on, even with may_alias=False.
    """
    return jax.device_put(jnp.copy(x) if isinstance(x, jax.Array) else x, sharding)


def with_auto_axes(mesh: Mesh, fn: Callable[..., Any], out_specs: Any) -> Callable[..., Any]:
    """Wraps `fn(*args)` so that every mesh axis is automatic inside; outputs leave as `out_specs`.

    Padding, slicing and constraints of uneven dims are only possible with automatic axes.
    `out_specs` is a tree prefix of PartitionSpecs. Use under jit.
    """

    def run(*args: Any) -> Any:
        if not is_explicit(mesh):
            return constrain(mesh, fn(*args), out_specs)
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return jax.sharding.auto_axes(fn, axes=mesh.axis_names, out_sharding=out_specs)(*args)

    return run


def constrain(mesh: Mesh, tree: Any, specs: Any) -> Any:
    """Pins every array of `tree` to `specs` (a tree prefix), inside jit, axes automatic."""

    def pin(spec: PartitionSpec, part: Any) -> Any:
        sharding = spec if is_explicit(mesh) else NamedSharding(mesh, spec)
        return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, sharding), part)

    return jax.tree.map(pin, specs, tree, is_leaf=lambda s: isinstance(s, PartitionSpec))


def manual(mesh: Mesh, fn: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """`jax.shard_map` over all mesh axes, inside `with_auto_axes`; `fn` names its collectives."""
    where = None if is_explicit(mesh) else mesh
    return jax.shard_map(fn, mesh=where, in_specs=in_specs, out_specs=out_specs, check_vma=False)
