"""Which devices take part in a collective together, and which axes of a mesh that is.

Devices are numbered as the partitions of a program: in the order of `mesh.devices.flat`.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Mapping

import numpy as np

from jzero.hlo import Instruction

Groups = tuple[tuple[int, ...], ...]
_LISTED = re.compile(r"replica_groups=\{(\{[\d,{}]*\})\}")
_IOTA = re.compile(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\((.*?\)?)\))? *\{([^}]*)\}")
_PART = re.compile(r"'([^']+)'(?::\((\d+)\)(\d+))?")  # 'a':(2)4 is part of axis a
_PAIRS = re.compile(r"source_target_pairs=\{(.*?)\}\}")
_SYNTHETIC = re.compile(r"axis_\d+")  # a name of XLA's own


def replica_groups(op: Instruction, num_devices: int) -> Groups | None:
    """The groups of devices that take part in a collective together.

    Args:
      op: the collective, in any of XLA's notations.
      num_devices: that the program runs on.

    Returns:
      Numbers of devices per group; None where the notation is not known.
    """
    if listed := _LISTED.search(op.rest):
        return tuple(map(_numbers, re.findall(r"\{([\d,]+)\}", listed[1])))
    if iota := _IOTA.search(op.rest):
        shape = (int(iota[1]), int(iota[2]))
        return _as_groups(_iota(iota[3], iota[4]).reshape(shape))
    if mesh := _MESH.search(op.rest):
        return _mesh_groups(mesh[1], mesh[2] or "", mesh[3])
    if "replica_groups={}" in op.rest:
        return (tuple(range(num_devices)),)
    return None


def permuted_pairs(op: Instruction) -> Groups | None:
    """(source, target) of each device that a collective-permute sends from."""
    if not (pairs := _PAIRS.search(op.rest)):
        return None
    return tuple(map(_numbers, re.findall(r"(\d+,\d+)", pairs[1])))


def group_axes(groups: Groups, mesh: Mapping[str, int]) -> tuple[str, ...] | None:
    """The axes of a mesh that devices of a group differ in, where they are whole axes.

    >>> group_axes(((0, 1, 2), (3, 4, 5)), {"a": 2, "b": 3, "c": 1})
    ('b',)
    >>> group_axes(((0, 1), (2, 3), (4, 5)), {"a": 2, "b": 3}) is None
    True
    """
    return _axes_by_groups(tuple(mesh.items())).get(frozenset(map(frozenset, groups)))


def pair_axes(pairs: Groups, mesh: Mapping[str, int]) -> tuple[str, ...] | None:
    """The axes of a mesh in which the places of some source and target differ.

    >>> pair_axes(((0, 1), (3, 4)), {"a": 2, "b": 3})
    ('b',)
    """
    sizes = tuple(mesh.values())
    if not pairs or max(map(max, pairs)) >= math.prod(sizes):
        return None
    source, target = (np.stack(np.unravel_index(side, sizes)) for side in zip(*pairs, strict=True))
    moved = (source != target).any(axis=1)
    return tuple(axis for axis, is_moved in zip(mesh, moved, strict=True) if is_moved)


def printed_axes(op: Instruction) -> tuple[str, ...] | None:
    """The axes as XLA prints them, where it does and they are whole; not where it made them up."""
    mesh = _MESH.search(op.rest)
    if not mesh:
        return None
    sizes = _sizes(mesh[1])
    parts = _PART.findall(mesh[3])
    if any(part or _SYNTHETIC.fullmatch(axis) for axis, _, part in parts):
        return None
    return tuple(axis for axis in sizes if sizes[axis] > 1 and axis in {part[0] for part in parts})


@functools.lru_cache
def _axes_by_groups(mesh: tuple[tuple[str, int], ...]) -> dict[frozenset, tuple[str, ...]]:
    """Of each subset of the axes larger than one, the groups it makes."""
    large = [axis for axis, size in mesh if size > 1]
    sizes = [size for _, size in mesh if size > 1]
    ids = np.arange(math.prod(sizes)).reshape(sizes)
    found = {}
    for count in range(len(large) + 1):
        for chosen in itertools.combinations(range(len(large)), count):
            width = math.prod(sizes[i] for i in chosen)
            last = np.moveaxis(ids, chosen, range(-count, 0)) if count else ids
            groups = frozenset(map(frozenset, _as_groups(last.reshape(-1, width))))
            found[groups] = tuple(large[i] for i in chosen)
    return found


@functools.lru_cache
def _mesh_groups(axes: str, device_ids: str, grouped: str) -> Groups | None:
    """Of XLA's own meshes; an axis may be grouped in part: of 'a':(2)4, 2 x 4 x the rest."""
    sizes = _sizes(axes)
    ids = np.arange(math.prod(sizes.values()))
    if iota := re.fullmatch(r"\[([\d,]+)\](?:T\(([\d,]+)\))?", device_ids):
        ids = _iota(iota[1], iota[2]).reshape(-1)
    elif device_ids:
        ids = np.array(_numbers(device_ids))
    shape, chosen = [], []
    for axis, size in sizes.items():
        begin = 1
        parts = [found[1:] for found in _PART.findall(grouped) if found[0] == axis]
        for before, part in sorted((int(b or 1), int(p or size)) for b, p in parts):
            shape += [before // begin, part]
            chosen.append(len(shape) - 1)
            begin = before * part
        shape.append(size // begin)
    if ids.size != math.prod(shape):
        return None
    last = np.moveaxis(ids.reshape(shape), chosen, range(-len(chosen), 0)) if chosen else ids
    return _as_groups(last.reshape(-1, math.prod(shape[i] for i in chosen)))


def _sizes(axes: str) -> dict[str, int]:
    return {axis: int(size) for axis, size in re.findall(r"'([^']+)'=(\d+)", axes)}


def _iota(dims: str, transposed: str | None) -> np.ndarray:
    """[4,2]T(1,0): the numbers from 0 in that shape, its dims then in that order."""
    shape = _numbers(dims)
    ids = np.arange(math.prod(shape)).reshape(shape)
    return ids.transpose(_numbers(transposed)) if transposed else ids


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", text))


def _as_groups(ids: np.ndarray) -> Groups:
    return tuple(map(tuple, ids.tolist()))
