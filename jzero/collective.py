"""One collective of a compiled program: what it sends, along which axes, of which parameter."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from jzero import groups as device_groups
from jzero.hlo import Computation, Instruction, operand_arrays, operands_of, short, users

KINDS = {  # and how JAX calls it
    "all-reduce": "psum",
    "all-gather": "all_gather",
    "reduce-scatter": "reduce_scatter",
    "all-to-all": "all_to_all",
    "collective-permute": "ppermute",
}
UNREADABLE = ("ragged-all-to-all", "collective-broadcast", "send", "recv")
_PARAMETER = re.compile(r"param\[(.+?)\](?=[/):]|$)")
_HOPS = 4  # from a collective that combines several to what still names a parameter: a slice of it


@dataclass(frozen=True)
class Collective:
    """A collective of a compiled program, and how often it runs.

    Args:
      kind: one of KINDS.
      dtype: "f32"; "bf16+f32" when one collective combines both.
      elements: of the whole array: all-gather's output, reduce-scatter's input.
      group_size: devices that take part together; of a collective-permute, all it names.
      op_name: where it comes from in the traced function.
      times: trip counts of the loops around it, multiplied.
      in_loop: whether there are any.
      payload_bytes: of the whole array, each part in its own dtype.
      wire_bytes: that a device sends in one run.
      axes: of the mesh; None where that cannot be told.
      is_async: whether it is started and waited for apart.
      seconds: estimated, of one run.
      covered: share of them, 0 to 1, beside which compute is scheduled.
      parameter: its tree path, several joined by ", "; "" where not known.
    """

    kind: str
    dtype: str
    elements: int
    group_size: int
    op_name: str = ""
    times: int = 1
    in_loop: bool = False
    payload_bytes: float = 0.0
    wire_bytes: float = 0.0
    axes: tuple[str, ...] | None = None
    is_async: bool = False
    seconds: float = 0.0
    covered: float = 0.0
    parameter: str = ""

    @property
    def share(self) -> float:
        """Of the whole array, what a device sends in one pass: (g-1)/g, all of it in a permute."""
        is_permute = self.kind == "collective-permute"
        return 1.0 if is_permute else (self.group_size - 1) / self.group_size


def _nvlink_seconds(row: Collective) -> float:
    """Of an H100 among the eight of a node: 350 GB/s."""
    return row.wire_bytes / 350e9


@dataclass(frozen=True)
class Rates:
    """What times are estimated with; by default, an H100 in a node of eight.

    Args:
      flops_per_s: of matrix products.
      memory_bytes_per_s: of the device's own memory.
      link: seconds of one run of a collective.
    """

    flops_per_s: float = 400e12
    memory_bytes_per_s: float = 2.5e12
    link: Callable[[Collective], float] = _nvlink_seconds


def collective_of(
    scope: Computation,
    op: Instruction,
    num_devices: int,
    mesh: Mapping[str, int] | None,
    rates: Rates,
) -> Collective | str:
    """Reads one collective.

    Payloads are read from the operands: results are tuples when combined or started apart.

    Args:
      scope: the computation that holds it.
      op: the collective, or its start.
      num_devices: that the program runs on.
      mesh: sizes of its axes, in order; None where no mesh is known.
      rates: for the time it takes.

    Returns:
      The row, of one run; where it cannot be read, a line that says so.
    """
    kind = op.opcode.removesuffix("-start")
    is_permute = kind == "collective-permute"
    if is_permute:
        groups = device_groups.permuted_pairs(op)
    else:
        groups = device_groups.replica_groups(op, num_devices)
    if not groups:
        return f"cannot read the replica groups of {short(op)}"
    parts = operand_arrays(scope, op)
    group_size = len({x for pair in groups for x in pair} if is_permute else groups[0])
    whole = group_size if kind == "all-gather" else 1
    row = Collective(
        kind,
        "+".join(sorted({part.dtype for part in parts})),
        whole * sum(part.elements for part in parts),
        group_size,
        op.op_name,
        payload_bytes=whole * sum(part.bytes for part in parts),
        axes=_axes(op, groups, mesh),
        parameter=", ".join(parameter_names(scope, op)),
    )
    passes = 2 if kind == "all-reduce" else 1
    row = replace(row, wire_bytes=passes * row.share * row.payload_bytes)
    return replace(row, seconds=rates.link(row))


def _axes(
    op: Instruction, groups: device_groups.Groups, mesh: Mapping[str, int] | None
) -> tuple[str, ...] | None:
    """By the mesh where there is one; XLA's own names may be made up."""
    if mesh is None:
        return device_groups.printed_axes(op)
    if op.opcode.startswith("collective-permute"):
        return device_groups.pair_axes(groups, mesh)
    return device_groups.group_axes(groups, mesh)


def parameter_names(scope: Computation, op: Instruction) -> list[str]:
    """The parameters that a collective carries, from the `param[NAME]` of names in the trace.

    A collective that combines several may have lost some: then those of what it was combined from
    and is taken apart to, too.
    """
    own = _PARAMETER.findall(op.op_name)
    if len(own) >= len(op.operands):
        return list(dict.fromkeys(own))
    near = [*_near(scope, op, users, _HOPS), *_near(scope, op, operands_of, _HOPS)]
    primitive = KINDS[op.opcode.removesuffix("-start")]
    theirs = [x.op_name for x in near if x.op_name.endswith((f"/{primitive}", f"/{primitive})"))]
    return list(dict.fromkeys([*own, *_PARAMETER.findall(" ".join(theirs))]))


def _near(
    scope: Computation,
    op: Instruction,
    step: Callable[[Computation, Instruction], list[Instruction]],
    hops: int,
) -> Iterator[Instruction]:
    """Instructions next to a collective, through nameless ones, up to the next collective."""
    for other in step(scope, op) if hops else []:
        is_done = other.opcode.endswith("-done") and op.opcode.endswith("-start")
        if other.opcode.removesuffix("-start").removesuffix("-done") in KINDS and not is_done:
            continue
        yield other
        if is_done or not other.op_name or other.opcode == "get-tuple-element":
            yield from _near(scope, other, step, hops - 1)
