"""Claims about estimated times and what covers a collective, on programs written by hand.

One second of compute is a kernel that writes 50 bytes; one of a collective sends 1 byte.
"""

import pytest

from jzero.collective import Rates
from jzero.ledger import collectives

HEAD = "HloModule jit_f, is_scheduled=true, num_partitions=2\n"
RATES = Rates(flops_per_s=1.0, memory_bytes_per_s=100.0, link=lambda row: row.wire_bytes)
GROUPS = "replica_groups={}, dimensions={0}"
BLOCKING = 'backend_config={"is_sync":true}'


def entry(*lines, computations=""):
    body = "\n".join(f"  {line}" for line in ("%x = s8[4]{0} parameter(0)", *lines))
    return f"{HEAD}{computations}\nENTRY %main (x: s8[4]) -> s8[4] {{\n{body}\n}}\n"


def kernel(name, seconds):
    return f"%{name} = s8[{50 * seconds}]{{0}} negate(%x)"


def start(name, attributes=""):
    """Sends 4 bytes: takes 4 seconds."""
    attributes = f"{GROUPS}, {attributes}" if attributes else GROUPS
    return f"%{name} = ((s8[4]{{0}}), s8[8]{{0}}) all-gather-start(%x), {attributes}"


def done(name, opcode="all-gather-done"):
    return f"%{name}.done = s8[8]{{0}} {opcode}(%{name})"


def computation(name, *lines):
    body = "\n".join(f"  {line}" for line in ("%x = s8[4]{0} parameter(0)", *lines))
    return f"%{name} (x: s8[4]) -> s8[8] {{\n{body}\n}}\n"


def read(*lines, computations=""):
    return collectives(entry(*lines, computations=computations), rates=RATES)


@pytest.mark.parametrize(("seconds", "covered"), [(0, 0.0), (1, 0.25), (4, 1.0), (9, 1.0)])
def test_compute_between_start_and_done_covers_as_long_as_it_takes(seconds, covered):
    ledger = read(start("a"), kernel("k", seconds), done("a"), kernel("after", 9))
    assert [row.covered for row in ledger] == [covered] and ledger.rows[0].is_async
    assert ledger.seconds == 4 and ledger.exposed_seconds == 4 * (1 - covered)
    assert ledger.compute_seconds == seconds + 9


def test_a_second_of_compute_covers_only_one_collective_first_come_first_served():
    ledger = read(start("a"), start("b"), kernel("k", 6), done("a"), done("b"))
    assert [row.covered for row in ledger] == [1.0, 0.5]
    assert ledger.covered == 0.75


def test_waiting_for_a_later_collective_waits_for_those_before_it():
    ledger = read(start("a"), start("b"), kernel("k", 1), done("b"), kernel("l", 9), done("a"))
    assert [row.covered for row in ledger] == [0.25, 0.0]


def test_what_starts_later_is_not_covered_by_compute_before_it():
    ledger = read(start("a"), kernel("k", 2), start("b"), kernel("l", 4), done("a"), done("b"))
    assert [row.covered for row in ledger] == [1.0, 0.5]


@pytest.mark.parametrize(
    "blocking",
    [
        f"%s = s8[8]{{0}} all-gather(%x), {GROUPS}",
        f"%s = s8[8]{{0}} all-gather(%x), {GROUPS}, {BLOCKING}",
        start("s", BLOCKING),
    ],
)
def test_a_blocking_collective_is_exposed_and_so_is_what_must_end_before_it(blocking):
    ledger = read(start("a"), kernel("k", 1), blocking, kernel("l", 9), done("a"))
    assert [row.covered for row in ledger] == [0.25, 0.0]
    assert [row.is_async for row in ledger] == [True, False]


def test_what_is_never_waited_for_in_its_computation_is_exposed_at_its_end():
    assert [row.covered for row in read(start("a"), kernel("k", 1))] == [0.25]


def test_asynchronous_wrappers_are_followed_through_updates():
    inner = computation("inner", f"ROOT %g = s8[8]{{0}} all-gather(%x), {GROUPS}")
    for opcode in ("async", "call", "fusion"):
        ledger = read(
            f"%a = ((s8[4]{{0}}), s8[8]{{0}}) {opcode}-start(%x), calls=%inner",
            kernel("k", 1),
            f"%u = ((s8[4]{{0}}), s8[8]{{0}}) {opcode}-update(%a), calls=%inner",
            kernel("l", 2),
            f"%d = s8[8]{{0}} {opcode}-done(%u), calls=%inner",
            kernel("m", 9),
            computations=inner,
        )
        assert [(row.is_async, row.covered) for row in ledger] == [(True, 0.75)], opcode
        assert ledger.compute_seconds == 12


def test_a_wrapper_around_a_blocking_collective_blocks():
    inner = computation("inner", f"ROOT %g = s8[8]{{0}} all-gather(%x), {GROUPS}, {BLOCKING}")
    ledger = read(
        "%a = ((s8[4]{0}), s8[8]{0}) async-start(%x), calls=%inner",
        kernel("k", 9),
        "%d = s8[8]{0} async-done(%a)",
        computations=inner,
    )
    assert [(row.is_async, row.covered) for row in ledger] == [(False, 0.0)]


def test_a_fusion_around_a_collective_is_one_and_no_compute():
    inner = computation("inner", kernel("k", 1), f"ROOT %g = s8[8]{{0}} all-gather(%x), {GROUPS}")
    ledger = read("%a = s8[8]{0} fusion(%x), kind=kCustom, calls=%inner", computations=inner)
    assert [row.kind for row in ledger] == ["all-gather"] and ledger.compute_seconds == 0


LOOP = (
    "%l = s8[4]{0} while(%x), condition=%test, body=%body, "
    'backend_config={"known_trip_count":{"n":"3"}}'
)
TEST = computation("test", "ROOT %p = pred[] constant(true)")


def test_a_loop_in_a_window_covers_with_all_its_turns():
    body = TEST + computation("body", "ROOT %k = s8[50]{0} negate(%x)")
    ledger = read(start("a"), LOOP, done("a"), computations=body)
    assert [row.covered for row in ledger] == [0.75] and ledger.compute_seconds == 3


def test_what_covers_a_collective_in_the_loop_covers_none_around_it():
    body = computation("body", start("b"), "%k = s8[250]{0} negate(%x)", done("b"))
    ledger = read(start("a"), LOOP, done("a"), computations=TEST + body)
    assert [(row.times, row.covered) for row in ledger] == [(1, 0.75), (3, 1.0)]
    assert ledger.seconds == 16 and ledger.exposed_seconds == 1


def test_compute_that_is_started_apart_with_a_collective_covers_none_around_it():
    call = computation("apart", f"%g = s8[8]{{0}} all-gather(%x), {GROUPS}", kernel("k", 5))
    begin = "%c = ((s8[4]{0}), s8[8]{0}) call-start(%x), calls=%apart"
    body = computation("body", begin, "ROOT %d = s8[8]{0} call-done(%c)")
    ledger = read(start("a"), LOOP, done("a"), computations=call + TEST + body)
    assert [(row.times, row.covered) for row in ledger] == [(1, 0.0), (3, 0.0)]
    assert ledger.compute_seconds == 15


def test_a_conditional_covers_with_no_more_than_its_shortest_branch():
    branches = computation("yes", kernel("k", 1)) + computation("no", kernel("k", 5))
    branch = "%c = s8[4]{0} conditional(%p, %x, %x), branch_computations={%yes, %no}"
    ledger = read(start("a"), branch, done("a"), computations=branches)
    assert [row.covered for row in ledger] == [0.25] and ledger.compute_seconds == 5


def seconds_of(*lines, computations=""):
    return read(*lines, computations=computations).compute_seconds


def test_a_product_takes_its_flops_wherever_it_is():
    args = "%a = f32[3,5]{1,0} parameter(1)", "%b = f32[5,7]{1,0} parameter(2)"
    dims = "lhs_contracting_dims={1}, rhs_contracting_dims={0}"
    dot = f"%d = f32[3,7]{{1,0}} dot(%a, %b), {dims}"
    assert seconds_of(*args, dot) == 2 * 3 * 5 * 7
    config = 'backend_config={"gemm":{"lhs_contracting_dimensions":["1"]}}'
    target = 'custom_call_target="__cublas$gemm"'
    call = f"%d = (f32[3,7]{{1,0}}, s8[99999]{{0}}) custom-call(%a, %b), {target}, {config}"
    assert seconds_of(*args, call) == 2 * 3 * 5 * 7
    fused = computation("fused", *args, "ROOT " + dot)
    fusion = "%f = f32[3,7]{1,0} fusion(%x, %a, %b), kind=kOutput, calls=%fused"
    assert seconds_of(*args, fusion, computations=fused) == 2 * 3 * 5 * 7


def test_a_convolution_takes_the_flops_of_its_window():
    args = "%a = f32[2,9,3]{2,1,0} parameter(1)", "%b = f32[5,3,4]{2,1,0} parameter(2)"
    line = "%c = f32[2,9,4]{2,1,0} convolution(%a, %b), window={size=5}, dim_labels=b0f_0io->b0f"
    assert seconds_of(*args, line) == 2 * (2 * 9 * 4) * (5 * 3)


def test_an_update_in_place_writes_only_what_it_updates():
    args = "%a = s8[5000]{0} parameter(1)", "%b = s8[50]{0} parameter(2)"
    update = "%u = s8[5000]{0} dynamic-update-slice(%a, %b, %x)"
    assert seconds_of(*args, update) == 1
    result = (
        "%v = s8[5000]{0} bitcast(%u)",
        "%n = s8[50]{0} negate(%b)",
        "ROOT %t = (s8[5000]{0}, s8[50]{0}, s8[5000]{0}) tuple(%v, %n, %a)",
    )
    fused = computation("fused", *args, update, *result)
    fusion = "%f = (s8[5000]{0}, s8[50]{0}) fusion(%x, %a, %b), kind=kLoop, calls=%fused"
    assert seconds_of(*args, fusion, computations=fused) == 2
    apart = fusion.replace("fusion(", "fusion-start(")
    assert seconds_of(*args, apart, computations=fused) == 2
    assert seconds_of(*args, "%s = s8[5000]{0} scatter(%a, %x, %b)") == 1


def test_what_runs_no_kernel_takes_no_time():
    free = "%t = (s8[4]{0}, s8[4]{0}) tuple(%x, %x)", "%g = s8[4]{0} get-tuple-element(%t), index=0"
    assert seconds_of(*free, "%b = s8[2,2]{1,0} bitcast(%g)") == 0


def test_a_kernel_of_unknown_flops_is_said():
    call = '%c = s8[50]{0} custom-call(%x), custom_call_target="__cudnn$fmhaSoftmax"'
    ledger = read(call, call.replace("%c", "%d"))
    assert ledger.compute_seconds == 2
    assert ledger.notes == (
        "FLOPs of __cudnn$fmhaSoftmax are not known: only the bytes it writes count",
    )


def test_a_loop_of_unknown_length_without_collectives_is_said_but_complete():
    loop = "%l = s8[4]{0} while(%x), condition=%test, body=%body"
    test = computation("test", "ROOT %p = pred[] custom-call(%x)")
    body = computation("body", "ROOT %k = s8[50]{0} negate(%x)")
    ledger = read(loop, computations=test + body).check()
    assert ledger.compute_seconds == pytest.approx(1 + 2 * 2 / 100)
    assert ["timed as one turn" in note for note in ledger.notes] == [True]
