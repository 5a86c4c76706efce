"""Walks the computations of a compiled program as they are scheduled: collectives and compute.

Of a conditional the branch counts that sends the most; to cover something, only as much compute as
every branch has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from jzero.collective import KINDS, UNREADABLE, Collective, Rates, collective_of
from jzero.cover import Stream, op_flops, op_seconds, unknown_kernel
from jzero.hlo import (
    Computation,
    Instruction,
    Program,
    callees,
    instructions,
    is_sync,
    loop_parts,
    short,
    trip_count,
)


class Part(NamedTuple):
    """One run of a computation, or of one instruction. Times in seconds."""

    rows: tuple[Collective, ...] = ()
    compute: float = 0.0
    free: float = 0.0  # of the compute, what covers no collective of its own
    flops: float = 0.0  # of matrix products
    unread: tuple[str, ...] = ()  # what is not among the rows, or perhaps not as often as it runs
    notes: tuple[str, ...] = ()  # what makes the times less certain


@dataclass(frozen=True)
class Walk:
    """A program, what it is read with, and the computations read so far."""

    program: Program
    num_devices: int
    mesh: Mapping[str, int] | None  # sizes of axes, in order
    rates: Rates
    more_than: int = 0  # elements of what is let be, if it cannot be counted for sure
    parts: dict[str, Part] = field(default_factory=dict)


def walk(it: Walk, name: str) -> Part:
    """One run of a computation, its instructions in order."""
    if name not in it.parts:
        it.parts[name] = _computation(it, it.program[name])
    return it.parts[name]


def _computation(it: Walk, scope: Computation) -> Part:
    stream = Stream()
    parts: dict[str, Part] = {}
    starts: dict[str, str] = {}  # of each later step of an asynchronous instruction, its start
    for op in instructions(scope):
        if op.opcode.endswith(("-done", "-update")):
            starts[op.name] = starts.get(op.operands[0], op.operands[0])
            if op.opcode.endswith("-done"):
                stream.wait(starts[op.name])
            continue
        part = _instruction(it, scope, op)
        if part.rows and _is_async(it.program, op):
            part = part._replace(rows=tuple(replace(x, is_async=True) for x in part.rows), free=0.0)
            stream.start(op.name, sum(row.seconds * row.times for row in part.rows))
        else:
            if op.opcode.removesuffix("-start") in KINDS:
                stream.wait_all()
            part = part._replace(free=stream.compute(part.free))
        parts[op.name] = part
    for name, part in parts.items():
        if (covered := stream.covered(name)) is not None:
            rows = (replace(row, covered=covered) for row in part.rows)
            parts[name] = part._replace(rows=tuple(rows))
    return _joined(list(parts.values()))


def _is_async(program: Program, op: Instruction) -> bool:
    """Whether others run until its -done: by its name, unless XLA notes that it blocks."""
    inner = (x for name in callees(program, op) for x in instructions(program[name]))
    return op.opcode.endswith("-start") and not any(map(is_sync, [op, *inner]))


def _joined(parts: Sequence[Part]) -> Part:
    """Parts that run one after the other."""
    return Part(
        tuple(row for part in parts for row in part.rows),
        sum(part.compute for part in parts),
        sum(part.free for part in parts),
        sum(part.flops for part in parts),
        tuple(line for part in parts for line in part.unread),
        tuple(line for part in parts for line in part.notes),
    )


def _instruction(it: Walk, scope: Computation, op: Instruction) -> Part:
    """One run of an instruction; of an asynchronous one, from start to done."""
    kind = op.opcode.removesuffix("-start")
    if kind in UNREADABLE:
        return Part(unread=(f"cannot count a {kind}: {short(op)}",))
    if kind in KINDS:
        row = collective_of(scope, op, it.num_devices, it.mesh, it.rates)
        return Part(unread=(row,)) if isinstance(row, str) else Part(rows=(row,))
    if kind == "while":
        return _loop(it, scope, op)
    called = [walk(it, name) for name in callees(it.program, op)]
    if kind == "conditional":
        return _conditional(it, op, called)
    if kind in ("call", "async"):
        return _joined(called)
    with_collectives = [part for part in called if part.rows or part.unread]
    if with_collectives:
        return _joined(with_collectives)._replace(compute=0.0, free=0.0)
    return _kernel(it, scope, op)


def _conditional(it: Walk, op: Instruction, branches: Sequence[Part]) -> Part:
    """One of its branches: which, the data decides."""
    sent = [sum(row.wire_bytes * row.times for row in part.rows) for part in branches]
    most = sent.index(max(sent))
    whole = _joined(branches)
    if len({_traffic(it, part) for part in branches}) > 1:
        name = callees(it.program, op)[most]
        line = (
            f"of the {len(branches)} branches of a conditional one runs, and they send not the "
            f"same; counted is the one that sends the most, %{name}: {short(op)}"
        )
        whole = whole._replace(unread=(*whole.unread, line))
    return whole._replace(
        rows=branches[most].rows,
        compute=max(part.compute for part in branches),
        free=min(part.free for part in branches),
        flops=max(part.flops for part in branches),
    )


def _traffic(it: Walk, part: Part) -> tuple[str, ...]:
    """What a branch sends, to compare it with another."""
    rows = (row for row in part.rows if row.elements > it.more_than)
    return tuple(sorted(f"{x.kind} {x.dtype} {x.elements} {x.axes} x {x.times}" for x in rows))


def _kernel(it: Walk, scope: Computation, op: Instruction) -> Part:
    rates = it.rates
    seconds = op_seconds(it.program, scope, op, rates.flops_per_s, rates.memory_bytes_per_s)
    kernel = unknown_kernel(op)
    notes = (f"FLOPs of {kernel} are not known: only the bytes it writes count",) if kernel else ()
    flops = op_flops(it.program, scope, op)
    return Part(compute=seconds, free=seconds, flops=flops, notes=notes)


def _loop(it: Walk, scope: Computation, op: Instruction) -> Part:
    """A `while`: its condition runs once more than its body."""
    condition, body = (walk(it, name) for name in loop_parts(op))
    joined = _joined([body, condition])
    trips = trip_count(it.program, scope, op)
    if trips is None and any(row.elements > it.more_than for row in joined.rows):
        line = (
            "a collective's loop has no known trip count; use lax.scan. Counted is one turn: "
            f"{short(op)}"
        )
        joined = joined._replace(unread=(*joined.unread, line))
    elif trips is None:
        line = f"a loop without a known trip count is timed as one turn: {short(op)}"
        joined = joined._replace(notes=(*joined.notes, line))
    turns = 1 if trips is None else trips
    runs = [(row, turns) for row in body.rows] + [(row, turns + 1) for row in condition.rows]
    return joined._replace(
        rows=tuple(replace(row, times=row.times * n, in_loop=True) for row, n in runs),
        compute=turns * body.compute + (turns + 1) * condition.compute,
        free=turns * body.free + (turns + 1) * condition.free,
        flops=turns * body.flops,
    )
