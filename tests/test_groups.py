"""Claims about the groups of devices that collectives name, in each notation of XLA's."""

import jax
import pytest

from jzero import groups
from jzero.hlo import Instruction

PAIRS_OF_EIGHT = ((0, 4), (1, 5), (2, 6), (3, 7))
FORMS = [
    ("replica_groups={{0,1,2,3},{4,5,6,7}}", ((0, 1, 2, 3), (4, 5, 6, 7))),
    ("replica_groups={{0,4},{1,5},{2,6},{3,7}}", PAIRS_OF_EIGHT),
    ("replica_groups=[2,4]<=[8]", ((0, 1, 2, 3), (4, 5, 6, 7))),
    ("replica_groups=[4,2]<=[2,4]T(1,0)", PAIRS_OF_EIGHT),
    ("replica_groups=[2,4]<=[2,2,2]T(1,0,2)", ((0, 1, 4, 5), (2, 3, 6, 7))),
    ("replica_groups={}", (tuple(range(8)),)),
    ("replica_groups=mesh['a'=8] {'a'}", (tuple(range(8)),)),
    ("replica_groups=mesh['a'=4,'b'=2] {'b'}", ((0, 1), (2, 3), (4, 5), (6, 7))),
    ("replica_groups=mesh['a'=2,'b'=4] {'a'}", PAIRS_OF_EIGHT),
    ("replica_groups=mesh['x'=1,'a'=2,'b'=4] {'a','b'}", (tuple(range(8)),)),
    (
        "replica_groups=mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}",
        ((0, 2, 4, 6), (1, 3, 5, 7)),
    ),
    (
        "replica_groups=mesh['a'=2,'b'=4], device_ids=(0,2,4,6,1,3,5,7) {'b'}",
        ((0, 2, 4, 6), (1, 3, 5, 7)),
    ),
    ("replica_groups=mesh['a'=8] {'a':(2)4}", ((0, 1, 2, 3), (4, 5, 6, 7))),
    ("replica_groups=mesh['a'=8] {'a':(1)2}", PAIRS_OF_EIGHT),
    ("replica_groups=mesh['a'=8] {'a':(2)2}", ((0, 2), (1, 3), (4, 6), (5, 7))),
    ("replica_groups=mesh['a'=8] {'a':(1)2,'a':(4)2}", ((0, 1, 4, 5), (2, 3, 6, 7))),
]


def op(attributes, opcode="all-reduce"):
    return Instruction("x", "f32[8]", opcode, ["p"], f"%p), {attributes}, dimensions={{0}}")


@pytest.mark.parametrize(("text", "want"), FORMS)
def test_every_notation_gives_the_same_groups(text, want):
    got = groups.replica_groups(op(text), 8)
    assert sorted(map(sorted, got)) == sorted(map(sorted, want))


def test_a_mesh_of_many_devices_is_read_in_full():
    text = "replica_groups=mesh['a'=64,'b'=8], device_ids=([8,64]T(1,0)) {'a'}"
    assert groups.replica_groups(op(text), 512)[1] == tuple(range(64, 128))


@pytest.mark.parametrize("text", ["replica_groups=novel", "channel_id=1"])
def test_another_notation_is_not_guessed(text):
    assert groups.replica_groups(op(text), 8) is None
    assert groups.permuted_pairs(op(text, "collective-permute")) is None


MESHES = [{"a": 2, "b": 4}, {"a": 2, "b": 2, "c": 2}, {"a": 1, "b": 4, "c": 2}]


@pytest.mark.parametrize("sizes", MESHES)
def test_every_subset_of_the_axes_is_found_again(sizes):
    mesh = jax.make_mesh(tuple(sizes.values()), tuple(sizes))
    large = [axis for axis in sizes if sizes[axis] > 1]
    axes = ",".join(f"'{axis}'={n}" for axis, n in mesh.shape.items())
    for chosen in range(1, 2 ** len(large)):
        names = tuple(axis for i, axis in enumerate(large) if chosen >> i & 1)
        listed = ",".join(f"'{axis}'" for axis in names)
        found = groups.replica_groups(op(f"replica_groups=mesh[{axes}] {{{listed}}}"), 8)
        assert groups.group_axes(found, sizes) == names


def test_groups_of_one_device_have_no_axes():
    assert groups.group_axes(tuple((i,) for i in range(8)), {"a": 2, "b": 4}) == ()


def test_pairs_have_the_axes_whose_places_change():
    sizes = {"a": 2, "b": 4}
    text = "source_target_pairs={{0,1},{1,2},{2,3},{3,0}}"
    assert groups.pair_axes(groups.permuted_pairs(op(text)), sizes) == ("b",)
    assert groups.pair_axes(((0, 5),), sizes) == ("a", "b")
    assert groups.pair_axes(((3, 3),), sizes) == ()
    assert groups.pair_axes(((0, 8),), sizes) is None
