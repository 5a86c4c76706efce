"""Claims about the reader of compiled programs that other tests rest on."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jzero.program import Collective, collectives, wire

ASYNC_TEXT = """HloModule jit_step, is_scheduled=true, replica_count=2, num_partitions=4

%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %add = f32[] add(%a, %b)
}

%wrapped (p: bf16[64,8]) -> bf16[8,8] {
  %p = bf16[64,8]{1,0} parameter(0)
  ROOT %rs = bf16[8,8]{1,0} reduce-scatter(%p), GROUPS, dimensions={0}, to_apply=%sum
}, execution_thread="parallel"

ENTRY %main (x: bf16[64,8], y: f32[3]) -> bf16[8,8] {
  %x = bf16[64,8]{1,0} parameter(0)
  %y = f32[3]{0} parameter(1)
  %ag = ((bf16[64,8]{1,0}, f32[3]{0}), (bf16[512,8]{1,0}, f32[24]{0})) all-gather-start(%x, \
/*index=1*/%y), GROUPS, dimensions={0}, metadata={op_name="jit(step)/gather"}
  %rs-start = ((bf16[64,8]{1,0}), bf16[8,8]{1,0}) async-start(%x), calls=%wrapped
  %agd = (bf16[512,8]{1,0}, f32[24]{0}) all-gather-done(%ag)
  ROOT %rs-done = bf16[8,8]{1,0} async-done(%rs-start), calls=%wrapped
}
"""
GROUP_FORMS = [
    ("replica_groups={{0,1,2,3},{4,5,6,7}}", 4),
    ("replica_groups=[8,8]<=[64]", 8),
    ("replica_groups=[2,4]<=[4,2]T(1,0)", 4),
    ("replica_groups={}", 8),
    ("replica_groups=mesh['a'=8] {'a'}", 8),
    ("replica_groups=mesh['a'=64,'b'=8] {'b'}", 8),
    ("replica_groups=mesh['a'=4,'b'=2] {'a','b'}", 8),
    ("replica_groups=mesh['a'=64,'b'=8], device_ids=([64,8]T(1,0)) {'a'}", 64),
    ("replica_groups=mesh['a'=8] {'a':(2)4}", 4),
]


def mesh():
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def compiled_text(function, *args):
    mapped = jax.shard_map(function, mesh=mesh(), in_specs=P(), out_specs=P(), check_vma=False)
    return str(jax.jit(mapped).lower(*args).compile().as_text())


def nested_scans(x):
    def inner(carry, _):
        shard = jax.lax.psum_scatter(carry, "data", tiled=True)
        return jax.lax.all_gather(shard, "data", tiled=True) * 0.5, None

    def outer(carry, _):
        carry, _ = jax.lax.scan(inner, carry, None, length=5)
        return carry + jax.lax.psum(carry * carry, "model"), None

    carry, _ = jax.lax.scan(outer, x, None, length=3)
    return carry, jax.lax.psum(jnp.sum(carry), ("data", "model"))


def facts(rows):
    return sorted((r.kind, r.elements, r.times, r.group_size, r.in_loop) for r in rows)


NESTED_FACTS = [
    ("all-gather", 128, 15, 4, True),
    ("all-reduce", 1, 1, 8, False),
    ("all-reduce", 128, 3, 2, True),
    ("reduce-scatter", 128, 15, 4, True),
]


def test_trip_counts_multiply_through_nested_scans():
    assert facts(collectives(compiled_text(nested_scans, jnp.ones((16, 8))))) == NESTED_FACTS


def test_trip_counts_are_read_from_the_condition_where_xla_noted_none():
    text = compiled_text(nested_scans, jnp.ones((16, 8)))
    stripped = re.sub(r', backend_config=.*"known_trip_count".*', "", text)
    assert "known_trip_count" in text and "known_trip_count" not in stripped
    assert facts(collectives(stripped)) == NESTED_FACTS


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("s32[] constant(0)", "s32[] constant(1)"),  # another start
        ("s32[] constant(1)", "s32[] constant(2)"),  # another step
        ("direction=LT", "direction=LE"),
    ],
)
def test_a_loop_that_does_not_count_from_zero_by_one_is_not_guessed(old, new):
    text = compiled_text(nested_scans, jnp.ones((16, 8)))
    stripped = re.sub(r', backend_config=.*"known_trip_count".*', "", text)
    assert old in stripped
    with pytest.raises(ValueError, match="no known trip count; use lax.scan"):
        collectives(stripped.replace(old, new))


def test_a_loop_whose_start_cannot_be_seen_is_not_guessed():
    text = compiled_text(nested_scans, jnp.ones((16, 8)))
    stripped = re.sub(r', backend_config=.*"known_trip_count".*', "", text)
    hidden = re.sub(r" tuple\(%copy.*?\)", " custom-call()", stripped)
    assert hidden != stripped
    with pytest.raises(ValueError, match="no known trip count; use lax.scan"):
        collectives(hidden)


def test_a_loop_that_the_data_ends_raises():
    def until_large(x):
        return jax.lax.while_loop(lambda c: jnp.max(c) < 100, lambda c: jax.lax.psum(c, "data"), x)

    with pytest.raises(ValueError, match="no known trip count; use lax.scan"):
        collectives(compiled_text(until_large, jnp.ones((16, 8))))


def test_a_data_dependent_loop_without_collectives_is_no_matter():
    def local(x):
        y = jax.lax.while_loop(lambda c: jnp.max(c) < 100, lambda c: c * 2, x)
        return jax.lax.psum(y, "data")

    assert facts(collectives(compiled_text(local, jnp.ones((16, 8))))) == [
        ("all-reduce", 128, 1, 4, False)
    ]


def test_a_collective_in_a_loop_condition_runs_once_more_than_the_body():
    def body(c):
        return c[0] + 1, c[1] * 2

    def condition(c):
        return (c[0] < 6) & (jax.lax.psum(c[1], "data")[0] < jnp.inf)

    text = compiled_text(lambda x: jax.lax.while_loop(condition, body, (0, x)), jnp.ones(128))
    noted = re.sub(r"( while\(.*)", r'\1, b={"known_trip_count":{"n":"6"}}', text)
    assert facts(collectives(noted)) == [("all-reduce", 128, 7, 4, True)]


def test_each_kind_counts_its_whole_side_and_combined_ones_their_sum():
    def each(x, y):
        return (
            jax.lax.psum((x, y), "data"),
            jax.lax.all_to_all(x, "data", 0, 0, tiled=True),
            jax.lax.ppermute(y, "data", [(i, (i + 1) % 4) for i in range(4)]),
            jax.lax.psum_scatter(x, "data", tiled=True),
            jax.lax.all_gather(x, "data", tiled=True),
        )

    assert facts(collectives(compiled_text(each, jnp.ones((16, 8)), jnp.ones(12)))) == [
        ("all-gather", 4 * 128, 1, 4, False),
        ("all-reduce", 128 + 12, 1, 4, False),
        ("all-to-all", 128, 1, 4, False),
        ("collective-permute", 12, 1, 8, False),
        ("reduce-scatter", 128, 1, 4, False),
    ]


def test_a_branch_of_a_conditional_counts():
    def branch(x):
        return jax.lax.cond(x[0, 0] > 0, lambda x: jax.lax.psum(x, "data"), lambda x: x, x)

    assert facts(collectives(compiled_text(branch, jnp.ones((16, 8))))) == [
        ("all-reduce", 128, 1, 4, False)
    ]


def test_asynchronous_pairs_count_once_with_their_dtypes():
    assert collectives(ASYNC_TEXT.replace("GROUPS", "replica_groups=[1,8]<=[8]")) == [
        Collective("all-gather", "bf16+f32", 8 * (512 + 3), 8, "jit(step)/gather"),
        Collective("reduce-scatter", "bf16", 512, 8),
    ]


@pytest.mark.parametrize(("groups", "group_size"), GROUP_FORMS)
def test_every_form_of_replica_groups_gives_the_group_size(groups, group_size):
    rows = collectives(ASYNC_TEXT.replace("GROUPS", groups))
    assert {row.group_size for row in rows} == {group_size}


def test_unreadable_text_raises_instead_of_counting_nothing():
    with pytest.raises(ValueError, match="cannot read the replica groups of %x"):
        collectives(ASYNC_TEXT.replace("GROUPS", "replica_groups=novel"))
    with pytest.raises(ValueError, match="cannot count a ragged-all-to-all"):
        collectives(ASYNC_TEXT.replace("all-gather-start(", "ragged-all-to-all-start("))
    with pytest.raises(ValueError, match=r"no ENTRY computation; give jit\(f\)"):
        collectives("module @jit_step {")


def test_scalars_are_filtered_by_size():
    text = compiled_text(nested_scans, jnp.ones((16, 8)))
    assert facts(collectives(text, more_than=64)) == [f for f in NESTED_FACTS if f[1] > 64]


def test_rows_name_the_operation_they_come_from():
    rows = collectives(compiled_text(nested_scans, jnp.ones((16, 8))))
    assert {row.op_name.rsplit("/", 1)[1] for row in rows} == {
        "psum", "all_gather", "reduce_scatter",
    }  # fmt: skip


def test_wire_is_elements_times_trips_times_the_share_that_travels():
    rows = collectives(compiled_text(nested_scans, jnp.ones((16, 8))))
    assert wire(rows, "reduce-scatter") == 15 * 128 * 3 / 4
    assert wire(rows, "all-reduce") == 3 * 128 * 1 / 2 + 7 / 8
    assert wire(rows, "all-to-all") == 0
