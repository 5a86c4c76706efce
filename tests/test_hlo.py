"""Claims about reading the text of compiled programs. Loops are tested with the ledger."""

import jax
import jax.numpy as jnp
import pytest

from jzero import hlo

TEXT = """HloModule jit_f, is_scheduled=true, replica_count=2, num_partitions=4

%inner (p: f32[4,2]) -> f32[] {
  %p = f32[4,2]{1,0} parameter(0)
  ROOT %c = f32[] constant(7)
}, execution_thread="parallel"

ENTRY %main (x: f32[4,2]) -> (f32[], f32[4,2]) {
  %x = f32[4,2]{1,0:T(8,128)S(1)} parameter(0), sharding={replicated}
  %f.1 = (f32[], /*index=1*/s8[3]{0}) custom-call(%x, /*index=1*/%x), \
called_computations={%inner}, metadata={op_name="jit(f)/a b (c)" source_line=3}, backend_config={}
  %g = f32[] get-tuple-element(%f.1), index=0
  ROOT %t = (f32[], f32[4,2]{1,0}) tuple(%g, %x)
  %late = f32[] copy(%g)
}
"""


def test_instructions_come_in_the_order_of_the_schedule_with_operands_and_root():
    program, entry = hlo.parse(TEXT)
    assert (entry, list(program)) == ("main", ["inner", "main"])
    ops = hlo.instructions(program["main"])
    assert [op.opcode for op in ops] == [
        "parameter", "custom-call", "get-tuple-element", "tuple", "copy",
    ]  # fmt: skip
    assert ops[1].operands == ["x", "x"] and ops[1].op_name == "jit(f)/a b (c)"
    assert hlo.callees(program, ops[1]) == ["inner"]
    assert hlo.root(program["main"]) == ops[3] and hlo.root(program["inner"]).name == "c"
    assert hlo.users(program["main"], ops[0]) == [ops[1], ops[3]]
    assert hlo.operands_of(program["main"], ops[3]) == [ops[2], ops[0]]
    assert hlo.short(ops[1]).endswith("called_computations={%inner}")


def test_sizes_are_those_of_each_array_of_a_tuple():
    types = "((bf16[64,8]{1,0}, f32[]), /*index=2*/pred[16]{0}, s4[6]{0:E(4)}, c64[2], token[])"
    assert [(x.dtype, x.elements, x.bytes) for x in hlo.arrays(types)] == [
        ("bf16", 512, 1024), ("f32", 1, 4), ("pred", 16, 16), ("s4", 6, 3), ("c64", 2, 16),
        ("token", 1, 0),
    ]  # fmt: skip


def test_devices_are_partitions_times_replicas():
    assert hlo.num_devices(TEXT) == 8
    assert hlo.num_devices("HloModule jit_f\n" + TEXT) == 1


def test_a_text_that_is_no_compiled_program_says_what_to_give():
    lowered = jax.jit(jnp.sin).lower(1.0)
    with pytest.raises(ValueError, match=r"no ENTRY computation; give jit\(f\)\.lower\(\.\.\.\)"):
        hlo.parse(lowered.as_text())


def test_contracted_dims_are_read_of_dots_and_of_what_calls_cublas():
    dot = "f(%a, %b), lhs_batch_dims={0}, lhs_contracting_dims={2,3}, rhs_contracting_dims={1}"
    call = '%a), backend_config={"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions"'
    ops = [hlo.Instruction("x", "f32[]", "dot", [], rest) for rest in (dot, call, "%a)")]
    assert [hlo.contracted_dims(op) for op in ops] == [(2, 3), (1,), None]
