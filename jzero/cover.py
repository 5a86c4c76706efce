"""How long the instructions of a program take, and which of its communication that time covers.

An estimate from the schedule, not a measurement. Launches of kernels are taken to cost nothing.
"""

from __future__ import annotations

import math
import re

from jzero.hlo import (
    Computation,
    Instruction,
    Program,
    arrays,
    callees,
    contracted_dims,
    instructions,
    root,
)

# No kernel runs for these, or (a copy to or from the host) not on the stream of compute.
_FREE = (
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id",
    "replica-id", "opt-barrier", "domain", "copy-start", "copy-done", "add-dependency",
)  # fmt: skip
_CUBLAS = '"__cublas$'


class Stream:
    """Collectives in flight, one sent at a time, first come, first served."""

    def __init__(self) -> None:
        self._left: dict[str, float] = {}  # seconds, of those in flight, in order
        self._seconds: dict[str, float] = {}
        self._covered: dict[str, float] = {}

    def start(self, name: str, seconds: float) -> None:
        """A collective is queued."""
        self._left[name] = self._seconds[name] = seconds
        self._covered[name] = 0.0

    def compute(self, seconds: float) -> float:
        """Compute runs beside what is in flight; returns the seconds that covered nothing."""
        for name, left in self._left.items():
            used = min(seconds, left)
            self._left[name] -= used
            self._covered[name] += used
            seconds -= used
        return seconds

    def wait(self, name: str) -> None:
        """Compute waits until a collective, and so each before it, is done; none where unknown."""
        if name in self._left:
            for before in list(self._left):
                del self._left[before]
                if before == name:
                    return

    def wait_all(self) -> None:
        """Compute waits until nothing is in flight."""
        self._left.clear()

    def covered(self, name: str) -> float | None:
        """The share, 0 to 1, of a collective's time that compute covered; None if it never flew."""
        if name not in self._seconds:
            return None
        seconds = self._seconds[name]
        return self._covered[name] / seconds if seconds else 1.0


def format_seconds(seconds: float) -> str:
    """Write seconds, >= 0, in the unit that reads best.

    >>> [format_seconds(s) for s in (0, 4e-9, 2.5e-6, 8e-5, 0.018, 0.412, 83.21)]
    ['0 ms', '4 ns', '2.5 us', '80 us', '18.0 ms', '412 ms', '83.2 s']
    """
    if not seconds:
        return "0 ms"
    if seconds >= 0.9995:
        return f"{seconds:.1f} s"
    if seconds >= 0.9995e-3:
        return f"{seconds * 1e3:.{0 if seconds >= 0.0995 else 1}f} ms"
    if seconds >= 99.5e-9:
        return f"{seconds * 1e6:.{0 if seconds >= 9.95e-6 else 1}f} us"
    return f"{seconds * 1e9:.0f} ns"


def op_seconds(
    program: Program,
    scope: Computation,
    op: Instruction,
    flops_per_s: float,
    memory_bytes_per_s: float,
) -> float:
    """Estimates the time of one instruction other than a loop, a call or a collective.

    Args:
      program: all computations.
      scope: the one that holds the instruction.
      op: the instruction.
      flops_per_s: of matrix products.
      memory_bytes_per_s: of the device's memory, which sees what is written twice: read and write.

    Returns:
      Seconds: the larger of the two.
    """
    if op.opcode in _FREE:
        return 0.0
    return max(
        op_flops(program, scope, op) / flops_per_s,
        2 * _written_bytes(program, scope, op) / memory_bytes_per_s,
    )


def op_flops(program: Program, scope: Computation, op: Instruction) -> float:
    """FLOPs of the matrix products and convolutions of one instruction, and of what it fuses."""
    if op.opcode in ("fusion", "fusion-start"):
        inner = [program[name] for name in callees(program, op)]
        return sum(op_flops(program, part, x) for part in inner for x in instructions(part))
    if op.opcode == "convolution":
        return _convolution_flops(scope, op)
    is_product = op.opcode == "dot" or (op.opcode == "custom-call" and _CUBLAS in op.rest)
    summed = contracted_dims(op) if is_product else None
    if summed is None:
        return 0.0
    lhs = arrays(scope[op.operands[0]].type)[0]
    return 2.0 * arrays(op.type)[0].elements * math.prod(lhs.dims[d] for d in summed)


def unknown_kernel(op: Instruction) -> str:
    """The target of a custom call whose FLOPs are not known, so that its bytes alone count."""
    found = re.search(r'custom_call_target="([^"]*)"', op.rest)
    is_product = _CUBLAS in op.rest and contracted_dims(op) is not None
    return found[1] if found and not is_product and _bytes(op) else ""


def _convolution_flops(scope: Computation, op: Instruction) -> float:
    labels = re.search(r"dim_labels=\w+_(\w+)->", op.rest)
    if not labels:
        return 0.0
    kernel = arrays(scope[op.operands[1]].type)[0]
    per_output = kernel.elements / max(kernel.dims[labels[1].index("o")], 1)
    return 2.0 * arrays(op.type)[0].elements * per_output


def _written_bytes(program: Program, scope: Computation, op: Instruction) -> float:
    """Bytes that an instruction writes: of an update in place, the part that is updated."""
    if op.opcode in ("fusion", "fusion-start"):
        inner = program[callees(program, op)[0]]
        return _written_bytes(program, inner, root(inner))
    if op.opcode in ("tuple", "bitcast"):
        return sum(_written_bytes(program, scope, scope[name]) for name in op.operands)
    if op.opcode == "dynamic-update-slice":
        return _bytes(scope[op.operands[1]])
    if op.opcode == "scatter":
        return _bytes(scope[op.operands[-1]])
    if op.opcode == "parameter":  # returned as it came
        return 0.0
    if op.opcode == "custom-call" and _CUBLAS in op.rest:
        return arrays(op.type)[0].bytes  # the others are its workspace
    return _bytes(op)


def _bytes(op: Instruction) -> float:
    return sum(array.bytes for array in arrays(op.type))
