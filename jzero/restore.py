"""What a checkpoint calls each array of a state, and how a state is read back on any mesh.

Names do not depend on the precision policy: a master copy and a loss scale are parts of their own,
and the rest of the optimizer state has the names of the plain transform's. So a state restores into
another policy: a master that is missing is the parameters, parameters in another dtype are the
master, rounded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jzero.arrays import Pieces, pieces_of
from jzero.layout import P, is_floating, is_key
from jzero.mesh import named_sharding
from jzero.precision import MasterWeightsState, bits
from jzero.scaling import LossScaleState
from jzero.source import Index, Source
from jzero.trees import named_leaves
from jzero.zero import AtRest, Zero

PARAMS, MASTER, LOSS_SCALE, OPTIMIZER = "params.", "master.", "loss_scale.", "optimizer."
OPT_STATE = "opt_state"  # the part of a state that is named as above


def stored_names(part: str, tree: Any) -> dict[str, str]:
    """What each leaf of a part of a state is called in a checkpoint, by its name in the tree.

    >>> stored_names("params", {"w": jnp.ones(2)})
    {'w': 'params.w'}
    >>> state = MasterWeightsState({"w": jnp.ones(2)}, {"mu": {"w": jnp.ones(2)}})
    >>> stored_names("opt_state", state)
    {'master.w': 'master.w', 'inner.mu.w': 'optimizer.mu.w'}
    """
    if part != OPT_STATE:
        return {name: f"{part}.{name}" if name else part for name in named_leaves(tree)[0]}
    names, prefix = {}, ""
    while isinstance(tree, LossScaleState | MasterWeightsState):
        if isinstance(tree, LossScaleState):
            own = [field for field in tree._fields if field != "inner"]
            names |= {prefix + field: LOSS_SCALE + field for field in own}
        else:
            masters = named_leaves(tree.master)[0]
            names |= {f"{prefix}master.{name}".rstrip("."): MASTER + name for name in masters}
        tree, prefix = tree.inner, f"{prefix}inner."
    return names | {prefix + name: OPTIMIZER + name for name in named_leaves(tree)[0]}


def places_of(zero: Zero, parts: Mapping[str, Any]) -> dict[str, AtRest]:
    """Where each array of a state is at rest, by stored name.

    Args:
      zero: that laid out the parts "params" and "opt_state"; any other part is replicated.
      parts: trees of arrays or shapes by part.
    """
    places: dict[str, AtRest] = {}
    for part, tree in parts.items():
        is_cut = part in (PARAMS[:-1], OPT_STATE)
        try:
            at_rest = zero.at_rest(tree) if is_cut else zero.replicated(tree)
        except ValueError as error:
            more = " Of an nnx.Optimizer pass its opt_state." if part == OPT_STATE else ""
            raise ValueError(f"{part} is no state of this Zero: {error}{more}") from error
        names = stored_names(part, tree)
        places |= {names[name]: place for name, place in at_rest.items()}
    return places


def as_arrays(zero: Zero, parts: Mapping[str, Any]) -> dict[str, Any]:
    """The parts with an array, which every device holds, in place of each number."""

    def place(x: Any) -> Any:
        if isinstance(x, jax.Array):
            return x
        x = np.asarray(x)
        return jax.device_put(x, named_sharding(zero.mesh, P(), x.ndim))

    return {part: jax.tree.map(place, tree) for part, tree in parts.items()}


def belongs(name: str, parts: Iterable[str]) -> bool:
    """Whether a stored array is of one of some parts of a state.

    >>> [belongs(name, ["opt_state"]) for name in ("params.w", "master.w", "optimizer.count")]
    [False, True, True]
    """
    mine = {OPT_STATE: (MASTER, LOSS_SCALE, OPTIMIZER)}
    starts = [start for part in parts for start in mine.get(part, (f"{part}.",))]
    return name in parts or name.startswith((*starts,))


def is_weight(name: str) -> bool:
    """Whether a stored array is a parameter or its master copy.

    >>> is_weight("master.wte.weight"), is_weight("optimizer.0.count")
    (True, False)
    """
    return name.startswith((PARAMS, MASTER))


def state_pieces(parts: Mapping[str, Any], places: Mapping[str, AtRest]) -> dict[str, Pieces]:
    """Copies what this process holds of a state to the host, by stored name.

    Args:
      parts: trees of arrays by part, such as "params" and "opt_state".
      places: by stored name.
    """
    pieces = {}
    for part, tree in parts.items():
        leaves = named_leaves(tree)[0]
        for name, stored in stored_names(part, tree).items():
            pieces[stored] = pieces_of(leaves[name], places[stored].shape)
    return pieces


def source_name(name: str, wanted: Any, found: Mapping[str, Any]) -> str | None:
    """The stored array that an array is restored from; None where there is none.

    Args:
      name: stored name of the array that is wanted.
      wanted: its dtype.
      found: shapes and dtypes by stored name.

    >>> found = {"params.w": jax.ShapeDtypeStruct((2,), jnp.float32)}
    >>> source_name("master.w", jnp.float32, found), source_name("master.v", jnp.float32, found)
    ('params.w', None)
    """
    if name.startswith(MASTER):
        params = PARAMS + name.removeprefix(MASTER)
        return next((n for n in (name, params) if n in found), None)
    if name.startswith(PARAMS) and name in found and found[name].dtype != wanted:
        master = MASTER + name.removeprefix(PARAMS)
        return master if master in found else name
    return name if name in found else None


@dataclasses.dataclass(frozen=True)
class Fit:
    """How a state is restored from a source.

    Args:
      names: for each array that is wanted, the one it is read from.
      notes: what a user should know of: dtypes that change, parts that are made anew.
    """

    names: Mapping[str, str]
    notes: tuple[str, ...] = ()


def fit(
    places: Mapping[str, AtRest], found: Mapping[str, Any], *, fresh: tuple[str, ...] = ()
) -> Fit:
    """Decides from which stored array each wanted one is restored.

    Args:
      places: what is wanted, by stored name.
      found: shapes and dtypes of the source.
      fresh: names that keep the values they are born with.

    Raises:
      ValueError: listing every array that is missing, unexpected or of another shape.
    """
    bad: list[str] = []
    names: dict[str, str] = {}
    for name, place in places.items():
        if name in fresh:
            continue
        dtype = place.at_rest.dtype
        origin = source_name(name, dtype, found)
        if origin is None:
            bad.append(f"missing: {name} {_shape(place.shape)}")
            continue
        shape = found[origin].shape
        wanted = _data_shape(place)
        if tuple(shape) != wanted:
            bad.append(f"another shape: {name} is {_shape(shape)}, and {_shape(wanted)} is wanted")
        elif not is_key(dtype) and is_floating(dtype) != is_floating(found[origin].dtype):
            bad.append(f"another dtype: {name} is {found[origin].dtype}, and {dtype} is wanted")
        names[name] = origin
    used = set(names.values()) | set(names) | set(fresh)
    left = [n for n in found if n not in used and not n.startswith((MASTER, LOSS_SCALE))]
    bad += [f"unexpected: {n} {_shape(found[n].shape)}" for n in left]
    if bad:
        what = "1 array differs" if len(bad) == 1 else f"{len(bad)} arrays differ"
        raise ValueError(f"{what}:\n  " + "\n  ".join(bad))
    return Fit(names, tuple(_notes(places, found, names)))


def _notes(places: Mapping[str, AtRest], found: Mapping[str, Any], names: Mapping[str, str]) -> Any:
    """What changes on the way, by kind of array."""
    moments = [n for n in names if n.startswith(OPTIMIZER)]
    cast = [n for n in moments if places[n].at_rest.dtype != found[names[n]].dtype]
    if cast:
        one = cast[0]
        yield (
            f"{len(cast)} arrays of the optimizer state change their dtype, such as {one}: "
            f"{found[names[one]].dtype} to {places[one].at_rest.dtype}"
        )
    rebuilt = [n for n in names if n.startswith(MASTER) and names[n] != n]
    narrow = [n for n in rebuilt if bits(found[names[n]].dtype) < bits(places[n].at_rest.dtype)]
    if narrow:
        dtype = found[names[narrow[0]]].dtype
        yield f"the master copy is made of {dtype} parameters: there is no wider one to read"
    left = [n for n in found if n.startswith(MASTER) and n not in names.values()]
    if left and any(n.startswith(PARAMS) for n in names):
        yield f"a master copy in {found[left[0]].dtype} is left behind: this precision keeps none"


def restore_state(
    parts: Mapping[str, Any], places: Mapping[str, AtRest], source: Source, names: Mapping[str, str]
) -> dict[str, Any]:
    """Reads a state, array by array; each device receives its shards, and nothing is read whole.

    Args:
      parts: trees of shapes by part; arrays where `names` has no name for them, which stay.
      places: by stored name.
      source: of the arrays.
      names: from `fit`.

    Returns:
      The same trees, of arrays at rest.
    """
    out = {}
    for part, tree in parts.items():
        leaves, treedef = named_leaves(tree)
        stored = stored_names(part, tree)
        arrays = [
            place_array(source, names[stored[n]], places[stored[n]]) if stored[n] in names else x
            for n, x in leaves.items()
        ]
        out[part] = jax.tree.unflatten(treedef, arrays)
    return out


def place_array(source: Source, name: str, place: AtRest) -> jax.Array:
    """Reads an array of a source onto the devices, in the dtype, padding and sharding at rest."""
    rest = place.at_rest
    if is_key(rest.dtype):
        return _place_key(source, name, place)
    shape = rest.sharding.shard_shape(rest.shape)
    holders: dict[tuple[tuple[int, int], ...], list[Any]] = {}
    for device, index in rest.sharding.addressable_devices_indices_map(rest.shape).items():
        pairs = zip(index or (), rest.shape, strict=True)
        spans = tuple(s.indices(n)[:2] for s, n in pairs)
        holders.setdefault(spans, []).append(device)
    shards = []
    for spans, devices in holders.items():
        piece = _padded(source, name, spans, place, shape)
        shards += [jax.device_put(piece, device) for device in devices]
    jax.block_until_ready(shards)  # before the next array is read: host memory is for one
    return jax.make_array_from_single_device_arrays(rest.shape, rest.sharding, shards)


def _padded(
    source: Source, name: str, spans: Any, place: AtRest, shape: tuple[int, ...]
) -> np.ndarray:
    """One shard: what of it is logical is read, the rest is zeros."""
    pairs = zip(spans, place.shape, strict=True)
    index: Index = tuple(slice(min(a, n), min(b, n)) for (a, b), n in pairs)
    size = tuple(s.stop - s.start for s in index)
    if 0 in size and 0 not in place.shape:
        return np.zeros(shape, place.at_rest.dtype)
    piece = source.read(name, index).astype(place.at_rest.dtype, copy=False)
    if size == shape:
        return piece
    return np.pad(piece, [(0, n - m) for n, m in zip(shape, size, strict=True)])


def _place_key(source: Source, name: str, place: AtRest) -> jax.Array:
    data = source.read(name, tuple(slice(0, n) for n in source.leaves[name].shape))
    keys = jax.random.wrap_key_data(jnp.asarray(data), impl=_impl(place.at_rest.dtype))
    return jax.device_put(keys, place.at_rest.sharding)


def _impl(dtype: Any) -> Any:
    """The implementation of keys of a dtype: it shows in tracing."""
    found: list[Any] = []
    jax.eval_shape(
        lambda key: found.append(jax.random.key_impl(key)), jax.ShapeDtypeStruct((), dtype)
    )
    return found[0]


def _data_shape(place: AtRest) -> tuple[int, ...]:
    """The shape as stored: of keys, that of their data."""
    if not is_key(place.at_rest.dtype):
        return tuple(place.shape)
    keys = jax.ShapeDtypeStruct(place.shape, place.at_rest.dtype)
    return jax.eval_shape(jax.random.key_data, keys).shape


def _shape(shape: Any) -> str:
    return "x".join(map(str, shape)) or "scalar"
