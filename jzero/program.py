"""Reads the collectives of a compiled program from its text, and how often each runs in one call.

Payloads are read from the operands: results are tuples when combined or started asynchronously.
Every branch of a conditional counts. XLA:CPU widens bf16 to f32: read dtypes from a GPU program.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
UNREADABLE = ("ragged-all-to-all", "collective-broadcast", "send", "recv")
_COMPUTATION = re.compile(r"(ENTRY )?%([\w.\-]+) .*\{$")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)$")
_CALLED = re.compile(r"(?:to_apply|calls|\w+_computations?)=(\{[^}]*\}|%[\w.\-]+)")
_LOOP = re.compile(r"condition=%([\w.\-]+), body=%([\w.\-]+)")
_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(.*?\)\))? *\{([^}]*)\}")


@dataclass(frozen=True)
class Collective:
    """A collective of a compiled program, and how often it runs."""

    kind: str  # one of KINDS
    dtype: str  # "f32"; "bf16+f32" when one collective combines both
    elements: int  # of the whole array: all-gather's output, reduce-scatter's input
    group_size: int  # devices that take part together; of a collective-permute, all it names
    op_name: str = ""  # where it comes from in the traced function
    times: int = 1  # trip counts of the loops around it, multiplied
    in_loop: bool = False


class Instruction(NamedTuple):
    """One line of a compiled program, taken apart."""

    type: str
    opcode: str
    operands: list[str]
    rest: str  # all that follows the opening bracket


Computation = dict[str, Instruction]  # by name; the root stands under "" as well
Program = dict[str, Computation]


def collectives(text: str, more_than: int = 0) -> list[Collective]:
    """Those of `compiled.as_text()` with more than so many elements; 64 drops losses and norms."""
    program, entry = _parse(text)
    counts = re.findall(r"(?:num_partitions|replica_count)=(\d+)", text.split("\n", 1)[0])
    rows = _walk(program, entry, math.prod(int(n) for n in counts))
    return [row for row in rows if row.elements > more_than]


def wire(rows: Iterable[Collective], kind: str) -> float:
    """Elements each device sends for `kind`: elements x times x (g-1)/g; all-reduce: twice that."""
    chosen = [row for row in rows if row.kind == kind]
    return sum(row.elements * row.times * (row.group_size - 1) / row.group_size for row in chosen)


def sent_bytes(rows: Iterable[Collective]) -> float:
    """Bytes each device sends in all, in the widest dtype where one collective combines several.

    >>> sent_bytes([Collective("all-gather", "f32", 80, 8), Collective("all-reduce", "bf16", 8, 8)])
    308.0
    """
    twice = {"all-reduce": 2}
    return sum(
        twice.get(row.kind, 1) * wire([row], row.kind) * max(map(itemsize, row.dtype.split("+")))
        for row in rows
    )


def itemsize(dtype: str) -> float:
    """Bytes per element of XLA's name of a dtype.

    >>> itemsize("bf16"), itemsize("f8e4m3fn"), itemsize("pred")
    (2.0, 1.0, 1.0)
    """
    digits = re.search(r"\d+", dtype)
    return int(digits[0]) / 8 if digits else 1.0


def _parse(text: str) -> tuple[Program, str]:
    program: Program = {}
    entry = current = ""
    for line in text.splitlines():
        if header := _COMPUTATION.match(line):
            program[current := header[2]] = {}
            entry = current if header[1] else entry
        elif found := _INSTRUCTION.match(line):
            root, name, type_, opcode, rest = found.groups()
            operands = re.findall(r"%([\w.\-]+)", rest.split(")")[0])
            program[current][name] = Instruction(type_, opcode, operands, rest)
            program[current] |= {"": program[current][name]} if root else {}
    if not entry:
        raise ValueError("no ENTRY computation; give jit(f).lower(...).compile().as_text()")
    return program, entry


def _walk(program: Program, name: str, num_devices: int) -> list[Collective]:
    """The collectives of one run of a computation."""
    rows: list[Collective] = []
    for op in (op for name, op in program[name].items() if name):
        kind = op.opcode.removesuffix("-start")
        if kind in UNREADABLE:
            raise ValueError(f"cannot count a {kind}: {op.rest}")
        if kind in KINDS:
            rows.append(_collective(program[name], op, kind, num_devices))
        elif kind == "while":
            test, body = (_walk(program, part, num_devices) for part in _LOOP.findall(op.rest)[0])
            trips = _trip_count(program, program[name], op) if body or test else 0
            runs = [(row, trips) for row in body] + [(row, trips + 1) for row in test]
            rows += [replace(row, times=row.times * n, in_loop=True) for row, n in runs]
        elif not kind.endswith(("-done", "-update")):
            for callee in re.findall(r"%([\w.\-]+)", " ".join(_CALLED.findall(op.rest))):
                rows += _walk(program, callee, num_devices)
    return rows


def _collective(scope: Computation, op: Instruction, kind: str, num_devices: int) -> Collective:
    types = (scope[name].type for name in op.operands)
    shapes = re.findall(r"\b([a-z]\w*)\[([\d,]*)\]", " ".join(types))
    elements = sum(math.prod(int(d) for d in dims.split(",") if d) for _, dims in shapes)
    dtype = "+".join(sorted({dtype for dtype, _ in shapes}))
    group_size = _group_size(op, num_devices)
    elements *= group_size if kind == "all-gather" else 1
    return Collective(kind, dtype, elements, group_size, *re.findall(r'op_name="([^"]*)"', op.rest))


def _group_size(op: Instruction, num_devices: int) -> int:
    if pairs := re.search(r"source_target_pairs=\{(.*?)\}\}", op.rest):
        return len(set(re.findall(r"\d+", pairs[1])))
    if iota := re.search(r"replica_groups=\[\d+,(\d+)\]<=", op.rest):
        return int(iota[1])
    if listed := re.search(r"replica_groups=\{\{([\d,]+)\}", op.rest):
        return len(listed[1].split(","))
    if mesh := _MESH.search(op.rest):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", mesh[1]))
        axes = re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", mesh[2])  # 'a':(2)4 is part of an axis
        return math.prod(int(part or sizes[axis]) for axis, part in axes)
    if "replica_groups={}" in op.rest:
        return num_devices
    raise ValueError(f"cannot read the replica groups of {op.rest}")


def _trip_count(program: Program, scope: Computation, loop: Instruction) -> int:
    """XLA's own count, else n of a plain `for i in range(n)`; never a guess."""
    if known := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.rest):
        return int(known[1])
    condition, body = (program[part] for part in _LOOP.findall(loop.rest)[0])
    limit = re.fullmatch(r"LT\(@(\d+),(\d+)\)", _formula(program, condition, ""))
    if limit and scope[loop.operands[0]].opcode == "tuple":
        begin = _formula(program, scope, scope[loop.operands[0]].operands[int(limit[1])])
        step = _formula(program, body, body[""].operands[int(limit[1])])
        if (begin, step) == ("0", f"add(@{limit[1]},1)"):
            return int(limit[2])
    raise ValueError(f"a collective's loop has no known trip count; use lax.scan: {loop.rest}")


def _formula(program: Program, scope: Computation, name: str, *inputs: str) -> str:
    """A scalar as text, through copies and fusions: "LT(@0,7)", @0 being the tuple's place 0."""
    op = scope[name]
    if op.opcode == "constant":
        return op.rest.split(")")[0]
    if op.opcode == "parameter" and inputs:
        return inputs[int(op.rest.split(")")[0])]
    if op.opcode == "get-tuple-element" and scope[op.operands[0]].opcode == "parameter":
        return "@" + re.findall(r"index=(\d+)", op.rest)[0]
    if op.opcode not in ("copy", "fusion", "compare", "add"):
        return "?"
    operands = [_formula(program, scope, operand, *inputs) for operand in op.operands]
    if op.opcode == "fusion":
        return _formula(program, program[_CALLED.findall(op.rest)[0][1:]], "", *operands)
    function = re.findall(r"direction=(\w+)", op.rest) or [op.opcode]
    return operands[0] if op.opcode == "copy" else f"{function[0]}({','.join(operands)})"
