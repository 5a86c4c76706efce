"""Reads the text of a compiled, scheduled program: its instructions in order, their sizes, loops.

Nothing here knows of meshes or of time. What the text does not say is never guessed.
"""

from __future__ import annotations

import math
import re
from typing import NamedTuple

_COMPUTATION = re.compile(r"(ENTRY )?%([\w.\-]+) .*\{$")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)$")
_NAME = re.compile(r"%([\w.\-]+)")
_SHAPE = re.compile(r"\b([a-z]\w*)\[([\d,]*)\]")
_CALLED = re.compile(r"(?:to_apply|calls|\w+_computations?)=(\{[^}]*\}|%[\w.\-]+)")
_LOOP = re.compile(r"condition=%([\w.\-]+), body=%([\w.\-]+)")
_CONTRACTED = re.compile(r'"?lhs_contracting_dim(?:ension)?s"?[=:][\[{]([\d",]*)')


class Instruction(NamedTuple):
    """One line of a compiled program, taken apart."""

    name: str
    type: str
    opcode: str
    operands: list[str]
    rest: str  # all that follows the opening bracket

    @property
    def op_name(self) -> str:
        """Where it comes from in the traced function; "" where XLA does not say."""
        found = re.search(r'op_name="([^"]*)"', self.rest)
        return found[1] if found else ""


Computation = dict[str, Instruction]  # by name, in order; see `root`
Program = dict[str, Computation]


class Array(NamedTuple):
    """One array of a type, which may be a tuple."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.dims)

    @property
    def bytes(self) -> float:
        return self.elements * itemsize(self.dtype)


def parse(text: str) -> tuple[Program, str]:
    """Reads `compiled.as_text()`.

    Args:
      text: of one module, as XLA prints it after optimization.

    Returns:
      Computations by name, their instructions in the order of the schedule; the entry's name.

    Raises:
      ValueError: where there is no entry, as in the text of a lowered program.
    """
    program: Program = {}
    entry = current = ""
    for line in text.splitlines():
        if header := _COMPUTATION.match(line):
            program[current := header[2]] = {}
            entry = current if header[1] else entry
        elif found := _INSTRUCTION.match(line):
            is_root, name, type_, opcode, rest = found.groups()
            op = Instruction(name, type_, opcode, _NAME.findall(rest.split(")")[0]), rest)
            program[current][name] = op
            program[current] |= {"": op} if is_root else {}
    if not entry:
        raise ValueError("no ENTRY computation; give jit(f).lower(...).compile().as_text()")
    return program, entry


def instructions(scope: Computation) -> list[Instruction]:
    """Those of a computation, in the order they run."""
    return [op for name, op in scope.items() if name]


def root(scope: Computation) -> Instruction:
    """The instruction whose value a computation returns."""
    return scope[""]


def num_devices(text: str) -> int:
    """Devices that a program runs on, from its first line; 1 where that does not say."""
    counts = re.findall(r"(?:num_partitions|replica_count)=(\d+)", text.split("\n", 1)[0])
    return math.prod(int(n) for n in counts)


def itemsize(dtype: str) -> float:
    """Bytes per element of XLA's name of a dtype; 0 of a token.

    >>> itemsize("bf16"), itemsize("f8e4m3fn"), itemsize("pred"), itemsize("c64"), itemsize("s4")
    (2.0, 1.0, 1.0, 8.0, 0.5)
    """
    digits = re.search(r"\d+", dtype)
    return int(digits[0]) / 8 if digits else float(dtype == "pred")


def arrays(type_: str) -> list[Array]:
    """The arrays of a type, of a tuple in order.

    >>> [(x.dtype, x.elements, x.bytes) for x in arrays("(bf16[64,8]{1,0}, f32[])")]
    [('bf16', 512, 1024.0), ('f32', 1, 4.0)]
    """
    return [
        Array(dtype, tuple(int(d) for d in dims.split(",") if d))
        for dtype, dims in _SHAPE.findall(type_)
    ]


def operand_arrays(scope: Computation, op: Instruction) -> list[Array]:
    """The arrays that an instruction reads, in order."""
    return [array for name in op.operands for array in arrays(scope[name].type)]


def operands_of(scope: Computation, op: Instruction) -> list[Instruction]:
    """The instructions whose values one reads, in order."""
    return [scope[name] for name in op.operands]


def users(scope: Computation, op: Instruction) -> list[Instruction]:
    """The instructions that read the value of one, in order."""
    return [other for other in instructions(scope) if op.name in other.operands]


def short(op: Instruction) -> str:
    """An instruction as a message shows it: without what XLA notes for itself.

    >>> short(Instruction("ag", "f32[8]", "all-gather", ["x"], "%x), dimensions={0}, metadata={"))
    '%ag = all-gather(%x), dimensions={0}'
    """
    told = re.split(r",? *(?:metadata|backend_config|frontend_attributes)=", op.rest)[0]
    return f"%{op.name} = {op.opcode}({told[:200]}"


def callees(program: Program, op: Instruction) -> list[str]:
    """Computations that an instruction calls, every branch of a conditional; not of a `while`."""
    names = _NAME.findall(" ".join(_CALLED.findall(op.rest)))
    return [name for name in names if name in program]


def loop_parts(op: Instruction) -> tuple[str, str]:
    """Condition and body of a `while`."""
    return _LOOP.findall(op.rest)[0]


def is_sync(op: Instruction) -> bool:
    """Whether XLA says that an instruction blocks, although its name may end with -start."""
    return '"is_sync":true' in op.rest


def contracted_dims(op: Instruction) -> tuple[int, ...] | None:
    """The dims of its first operand that a matrix product sums over; None where it does not say."""
    found = _CONTRACTED.search(op.rest)
    return tuple(int(d) for d in re.findall(r"\d+", found[1])) if found else None


def trip_count(program: Program, scope: Computation, loop: Instruction) -> int | None:
    """How often the body of a `while` runs, where that is certain.

    Args:
      program: all computations.
      scope: the one that holds the loop.
      loop: the `while`.

    Returns:
      XLA's own count, else n of a plain `for i in range(n)`; None of any other loop.
    """
    if known := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.rest):
        return int(known[1])
    condition, body = (program[part] for part in loop_parts(loop))
    limit = re.fullmatch(r"LT\(@(\d+),(\d+)\)", _formula(program, condition, ""))
    if limit and scope[loop.operands[0]].opcode == "tuple":
        begin = _formula(program, scope, scope[loop.operands[0]].operands[int(limit[1])])
        step = _formula(program, body, root(body).operands[int(limit[1])])
        if (begin, step) == ("0", f"add(@{limit[1]},1)"):
            return int(limit[2])
    return None


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
        return _formula(program, program[callees(program, op)[0]], "", *operands)
    function = re.findall(r"direction=(\w+)", op.rest) or [op.opcode]
    return operands[0] if op.opcode == "copy" else f"{function[0]}({','.join(operands)})"
