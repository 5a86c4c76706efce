"""Claims about the ledger of a compiled program that other tests rest on."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jzero.collective import Collective
from jzero.ledger import Ledger, Rates, collectives

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
        collectives(stripped.replace(old, new)).check()


def test_a_loop_whose_start_cannot_be_seen_is_not_guessed():
    text = compiled_text(nested_scans, jnp.ones((16, 8)))
    stripped = re.sub(r', backend_config=.*"known_trip_count".*', "", text)
    hidden = re.sub(r" tuple\(%copy.*?\)", " custom-call()", stripped)
    assert hidden != stripped
    with pytest.raises(ValueError, match="no known trip count; use lax.scan"):
        collectives(hidden).check()


def test_a_loop_that_the_data_ends_raises():
    def until_large(x):
        return jax.lax.while_loop(lambda c: jnp.max(c) < 100, lambda c: jax.lax.psum(c, "data"), x)

    ledger = collectives(compiled_text(until_large, jnp.ones((16, 8))))
    assert [row.times for row in ledger] == [1]
    assert "THE SUMS MAY BE WRONG" in str(ledger) and "Counted is one turn" in str(ledger)
    with pytest.raises(ValueError, match="no known trip count; use lax.scan"):
        ledger.check()


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


def switch(*branches):
    """A program that takes one of the branches, and its ledger's options."""

    def run(x):
        return jax.lax.switch(x[0, 0].astype(jnp.int32), branches, x)

    return compiled_text(run, jnp.ones((16, 8)))


REDUCES = lambda x: jax.lax.psum(x, "data")
GATHERS = lambda x: jax.lax.all_gather(x, "data", tiled=True)[:16]


def test_of_a_conditional_the_branch_that_sends_the_most_counts_and_is_named():
    ledger = collectives(switch(lambda x: x, REDUCES, GATHERS))
    assert facts(ledger) == [("all-gather", 512, 1, 4, False)]
    [line] = ledger.unread
    assert re.search(r"of the 3 branches .* that sends the most, %[\w.]+: %\S+ = cond", line)
    assert f"THE SUMS MAY BE WRONG: {line}" in str(ledger)
    with pytest.raises(ValueError, match="not complete: of the 3 branches of a conditional"):
        ledger.check()


def test_branches_that_send_the_same_are_no_matter():
    ledger = collectives(switch(REDUCES, lambda x: REDUCES(2 * x))).check()
    assert facts(ledger) == [("all-reduce", 128, 1, 4, False)]


def test_branches_and_loops_that_differ_in_what_is_left_out_are_no_matter():
    def until_large(x):
        small = lambda c: jax.lax.psum(jnp.max(c), "data") < 100
        return jax.lax.while_loop(small, lambda c: c * 2, x)

    text = switch(lambda x: x, lambda x: x + jax.lax.psum(x[0, 0], "data"))
    loop = compiled_text(until_large, jnp.ones((16, 8)))
    for program in (text, loop):
        assert len(collectives(program).unread) == 1
        assert collectives(program, more_than=1).check().rows == ()


def test_asynchronous_pairs_count_once_each_part_in_its_own_dtype():
    gather, reduce = collectives(ASYNC_TEXT.replace("GROUPS", "replica_groups=[1,8]<=[8]"))
    assert (gather.kind, gather.dtype, gather.elements) == ("all-gather", "bf16+f32", 8 * 515)
    assert (gather.payload_bytes, gather.wire_bytes) == (8 * (2 * 512 + 4 * 3), 7 * (2 * 512 + 12))
    assert gather.op_name == "jit(step)/gather"
    assert (reduce.kind, reduce.dtype, reduce.elements) == ("reduce-scatter", "bf16", 512)
    assert (reduce.payload_bytes, reduce.wire_bytes) == (1024, 896)
    assert gather.is_async and reduce.is_async


def test_what_cannot_be_read_is_listed_and_printed_and_fails_the_check():
    novel = collectives(ASYNC_TEXT.replace("GROUPS", "replica_groups=novel"))
    assert len(novel) == 0 and len(novel.unread) == 2
    assert str(novel).count("THE SUMS MAY BE WRONG: cannot read the replica groups") == 2
    with pytest.raises(
        ValueError, match="cannot read the replica groups of %ag = all-gather-start"
    ):
        novel.check()
    text = ASYNC_TEXT.replace("GROUPS", "replica_groups={}")
    ragged = collectives(text.replace("all-gather-start(", "ragged-all-to-all-start("))
    assert [row.kind for row in ragged] == ["reduce-scatter"]
    with pytest.raises(ValueError, match="not complete: cannot count a ragged-all-to-all: %ag"):
        ragged.check()
    with pytest.raises(ValueError, match=r"no ENTRY computation; give jit\(f\)"):
        collectives("module @jit_step {")
    assert collectives(text).check().unread == ()


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
    assert rows.wire("reduce-scatter") == 15 * 128 * 3 / 4
    assert rows.wire("all-reduce") == 3 * 128 * 1 / 2 + 7 / 8
    assert rows.wire("all-to-all") == 0
    gathered_and_scattered = 2 * 15 * 128 * 3 / 4
    assert rows.sent_bytes == 4 * (gathered_and_scattered + 2 * (3 * 128 / 2 + 7 / 8))


# Axes.


def compiled_each(mapped_mesh, function):
    mapped = jax.shard_map(function, mesh=mapped_mesh, in_specs=P(), out_specs=P(), check_vma=False)
    return jax.jit(mapped).lower(jnp.ones((16, 8))).compile()


def along(*axes):
    return lambda x: jax.lax.psum(x, axes)


@pytest.mark.parametrize("axes", [("data",), ("model",), ("data", "model"), ("model", "data")])
def test_axes_are_told_by_the_groups_in_the_order_of_the_mesh(axes):
    compiled = compiled_each(mesh(), along(*axes))
    want = tuple(axis for axis in ("data", "model") if axis in axes)
    [row] = collectives(compiled)
    assert row.axes == want
    [of_text] = collectives(compiled.as_text(), mesh=mesh())
    assert of_text.axes == want


def test_axes_of_one_device_are_never_named():
    small = jax.make_mesh((1, 8, 1), ("a", "b", "c"), axis_types=(AxisType.Auto,) * 3)
    [row] = collectives(compiled_each(small, along("a", "b", "c")))
    assert row.axes == ("b",)


def test_a_permute_has_the_axes_along_which_something_moves():
    ring = lambda x: jax.lax.ppermute(x, "data", [(i, (i + 1) % 4) for i in range(4)])
    [row] = collectives(compiled_each(mesh(), ring))
    assert (row.kind, row.axes, row.wire_bytes) == ("collective-permute", ("data",), 4 * 128)


def test_groups_that_are_no_whole_axes_have_none_and_the_table_says_so():
    halves = lambda x: jax.lax.psum(x, "data", axis_index_groups=[[0, 1], [2, 3]])
    ledger = collectives(compiled_each(mesh(), halves))
    assert [row.axes for row in ledger] == [None]
    assert ledger.by_axis().keys() == {None}
    assert "? (2 devices)" in str(ledger) and "give mesh=" in str(ledger)


def test_a_text_without_a_mesh_names_the_axes_that_xla_prints_unless_it_made_them_up():
    axes = {
        "replica_groups=mesh['replica'=1,'data'=8] {'replica','data'}": ("data",),
        "replica_groups=mesh['axis_0'=1,'axis_1'=8] {'axis_1'}": None,
        "replica_groups=mesh['data'=8] {'data':(2)4}": None,
        "replica_groups=[1,8]<=[8]": None,
    }
    for groups, want in axes.items():
        assert {row.axes for row in collectives(ASYNC_TEXT.replace("GROUPS", groups))} == {want}


def test_a_mesh_of_another_size_is_refused():
    compiled = compiled_each(mesh(), along("data"))
    four = jax.make_mesh((4,), ("data",), devices=jax.devices()[:4])
    with pytest.raises(
        ValueError, match="mesh has 4 devices, the program runs on 8; give the mesh"
    ):
        collectives(compiled, mesh=four)


def test_sums_by_axis_are_all_that_is_sent():
    both = lambda x: (jax.lax.psum(x, "data"), jax.lax.all_gather(x, "model", tiled=True))
    ledger = collectives(compiled_each(mesh(), both))
    assert ledger.by_axis() == {("data",): 4 * 2 * 128 * 3 / 4, ("model",): 4 * 256 / 2}
    assert ledger.sent_bytes == sum(ledger.by_axis().values())


# Parameters.


def test_a_scope_names_the_parameter_of_each_collective_and_of_combined_ones_all():
    def named(x):
        with jax.named_scope("param[h.attn.weight]"):
            x = jax.lax.all_gather(x, "data", tiled=True)
        return jax.lax.psum(x, "model")

    rows = collectives(compiled_each(mesh(), named))
    assert {row.kind: row.parameter for row in rows} == {
        "all-gather": "h.attn.weight", "all-reduce": "",
    }  # fmt: skip
    joined = "jit(f)/(jvp(param[wte.weight])/all_gather:transpose(jvp(param[h[0].b]))/all_gather)"
    text = ASYNC_TEXT.replace("GROUPS", "replica_groups={}").replace("jit(step)/gather", joined)
    assert collectives(text).rows[0].parameter == "wte.weight, h[0].b"


def test_a_combined_collective_that_lost_its_names_takes_those_of_its_slices():
    named = """
  %s = bf16[9]{0} slice(%agd)
  %b = bf16[3,3]{1,0} bitcast(%s), metadata={op_name="jit(f)/param[b]/all_gather"}
  %w = bf16[9]{0} slice(%agd), metadata={op_name="jit(f)/param[w]/all_gather"}
  %other = bf16[9]{0} slice(%agd), metadata={op_name="jit(f)/param[no]/psum"}
  %next = bf16[9]{0} all-gather(%s), GROUPS, metadata={op_name="jit(f)/param[next]/all_gather"}
"""
    text = ASYNC_TEXT.replace(', metadata={op_name="jit(step)/gather"}', "")
    text = text.replace("  ROOT %rs-done", named + "  ROOT %rs-done")
    rows = collectives(text.replace("GROUPS", "replica_groups={}")).rows
    assert [row.parameter for row in rows] == ["b, w", "", "next"]


# What is printed.


def test_the_table_sums_what_is_alike_and_fits_a_line():
    row = Collective(
        "all-gather", "bf16", 4096, 8, "jit(f)/g", 47, True, 8192.0, 7168.0, ("data",), True,
        1e-3, 0.5, "h.attn.c_attn.weight, h.attn.c_attn.bias",
    )  # fmt: skip
    other = dataclasses.replace(row, parameter="h.mlp.c_fc.weight_of_a_name_longer_than_a_column")
    alone = dataclasses.replace(row, is_async=False, times=1, covered=0.0, parameter="")
    text = str(Ledger((row, other, alone), ("a line",), ("a remark",), 2.0))
    lines = text.splitlines()
    assert max(map(len, lines)) <= 132
    [summed] = [line for line in lines if "x 47" in line]
    for part in (
        "│     2 │",
        "16.0 KiB",
        "14.0 KiB",
        "async",
        "50%",
        "h.attn.c_attn.weight",
        "more",
    ):
        assert part in summed
    [single] = [line for line in lines if "x 1 " in line]
    assert "sync" in single and "async" not in single and " g " in single
    sent = 7168 * 95 / 2**10
    assert f"sent in all: {sent:.1f} KiB ({sent:.1f} KiB along data)" in text
    assert "communication 95.0 ms, 49.5% of it covered by compute, 48.0 ms exposed" in text
    assert lines[-2:] == ["note: a remark", "THE SUMS MAY BE WRONG: a line"]


def test_a_program_without_collectives_has_nothing_exposed():
    ledger = collectives(jax.jit(lambda x: x @ x).lower(jnp.ones((8, 8))).compile())
    assert (len(ledger), ledger.seconds, ledger.exposed_seconds, ledger.covered) == (0, 0, 0, 1)
    assert ledger.compute_seconds > 0 and "sent in all: 0 B" in str(ledger)
    assert "communication -; compute" in str(ledger) and "%" not in str(ledger)


def test_a_collective_that_takes_no_time_is_not_said_to_be_covered():
    text = str(Ledger((Collective("all-reduce", "f32", 1, 1, covered=1.0),)))
    assert "│       - │" in text and "%" not in text


def test_short_times_are_written_in_short_units():
    row = Collective("all-reduce", "f32", 1, 8, seconds=2.5e-6)
    text = str(Ledger((row,), compute_seconds=4e-9))
    assert "communication 2.5 us, 0.0% of it covered by compute, 2.5 us exposed" in text
    assert "compute 4 ns" in text


def test_the_rates_are_printed_with_what_they_are_of():
    text = ASYNC_TEXT.replace("GROUPS", "replica_groups={}")
    default = "estimated with: 400 TFLOP/s, 2.5 TB/s and 350 GB/s of NVLink, as an H100 has them"
    assert default in str(collectives(text))
    own = Rates(flops_per_s=6e13, memory_bytes_per_s=9e11)
    assert "with: 60 TFLOP/s, 0.9 TB/s and links as given" in str(collectives(text, rates=own))


@pytest.mark.parametrize("compiled", [None, len, 3])
def test_what_is_no_compiled_program_is_refused_with_the_mend(compiled):
    with pytest.raises(ValueError, match=r"no compiled program; give jax\.jit\(f\)\.lower"):
        collectives(compiled)


def test_rates_give_the_time_of_each_run():
    rates = Rates(link=lambda row: row.group_size * row.times / 1e3)
    ledger = collectives(compiled_text(nested_scans, jnp.ones((16, 8))), rates=rates)
    assert {row.seconds for row in ledger} == {2e-3, 4e-3, 8e-3}
    assert ledger.seconds == pytest.approx((2 * 15 * 4 + 3 * 2 + 8) / 1e3)
