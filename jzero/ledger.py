"""The ledger of a compiled program: each collective, what it sends, and what covers its time."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from rich.table import Table

from jzero import hlo
from jzero.collective import Collective, Rates
from jzero.cover import format_seconds
from jzero.terminal import format_bytes, format_table
from jzero.walk import Walk, walk

_FROM_WIDTH = 40
_NONE = "-"  # no time, of which nothing can be covered
_DEFAULT_GPU = "H100"  # which the default rates are of
_DEFAULT_LINK = "350 GB/s of NVLink, as an H100 has them in a node of eight"


@dataclass(frozen=True)
class Ledger:
    """What a program sends in one run, per device. Seconds are estimates, by the rates given.

    Args:
      rows: its collectives.
      unread: one line for each that is not among the rows, or perhaps not as often as it runs.
      notes: what makes the seconds less certain.
      compute_seconds: of all compute.
      flops: of matrix products, as they are scheduled: what remat computes again, too.
      rates: what the seconds are estimated with, in words.
    """

    rows: tuple[Collective, ...]
    unread: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    compute_seconds: float = 0.0
    flops: float = 0.0
    rates: str = ""

    def __iter__(self) -> Iterator[Collective]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def check(self) -> Ledger:
        """Returns the ledger itself where all was read.

        Raises:
          ValueError: a collective is missing, or its number of runs is not known: of a loop that
            the data ends, of a conditional whose branches send not the same.
        """
        if self.unread:
            raise ValueError("the ledger is not complete: " + "; ".join(self.unread))
        return self

    def wire(self, kind: str) -> float:
        """Elements that a device sends for `kind`: elements x times x (g-1)/g, in a single pass.

        >>> Ledger((Collective("all-gather", "f32", 80, 8, times=3),)).wire("all-gather")
        210.0
        """
        return sum(row.elements * row.times * row.share for row in self if row.kind == kind)

    @property
    def sent_bytes(self) -> float:
        """Bytes that a device sends in all."""
        return sum(row.wire_bytes * row.times for row in self)

    def by_axis(self) -> dict[tuple[str, ...] | None, float]:
        """Bytes that a device sends, by the mesh axes they travel; None: axes that are not known.

        >>> row = Collective("all-gather", "f32", 80, 8, wire_bytes=280.0, axes=("data",))
        >>> Ledger((row, row)).by_axis()
        {('data',): 560.0}
        """
        sums: Counter[tuple[str, ...] | None] = Counter()
        for row in self:
            sums[row.axes] += row.wire_bytes * row.times  # pyright: ignore[reportArgumentType]
        return dict(sums)

    @property
    def seconds(self) -> float:
        """Of all communication."""
        return sum(row.seconds * row.times for row in self)

    @property
    def exposed_seconds(self) -> float:
        """Of communication beside which no compute is scheduled."""
        return sum(row.seconds * row.times * (1 - row.covered) for row in self)

    @property
    def covered(self) -> float:
        """The share, 0 to 1, of communication that compute covers; 1 where there is none."""
        return 1 - self.exposed_seconds / self.seconds if self.seconds else 1.0

    def __str__(self) -> str:
        return format_table(_table(self.rows)) + "\n".join(_totals(self))


def collectives(
    compiled: jax.stages.Compiled | str,
    *,
    mesh: Mesh | None = None,
    rates: Rates | None = None,
    more_than: int = 0,
) -> Ledger:
    """Reads the collectives of a compiled program, of a CPU or of a GPU, present or not.

    What cannot be read for sure is in the ledger's `unread`, and loud when printed; `.check()`
    raises. Of a conditional the branch is counted that sends the most.
    XLA:CPU widens 16-bit floats and starts nothing ahead: read dtypes and cover from a GPU program.

    Args:
      compiled: `jax.jit(f).lower(...).compile()`, or its text.
      mesh: whose axes to name; by default that of the program's inputs or outputs.
      rates: to estimate seconds with, as from `jzero.compile_step.rates_of`; by default those of
        an H100 in a node of eight, whatever the program is for. Printed with the ledger.
      more_than: leaves out collectives with no more elements; 64 drops losses and norms.

    Returns:
      The ledger of one run.

    Raises:
      ValueError: what is no compiled program, or a mesh of another size.

    >>> import jax, jax.numpy as jnp
    >>> from jax.sharding import PartitionSpec as P
    >>> total = lambda x: jax.lax.psum(x, "data")
    >>> mesh = jax.make_mesh((jax.device_count(),), ("data",))
    >>> f = jax.jit(jax.shard_map(total, mesh=mesh, in_specs=P(), out_specs=P()))
    >>> [row] = collectives(f.lower(jnp.ones(800)).compile())
    >>> row.kind, row.dtype, row.elements, row.times
    ('all-reduce', 'f32', 800, 1)
    """
    text = _text_of(compiled)
    program, entry = hlo.parse(text)
    num_devices = hlo.num_devices(text)
    if mesh is not None and mesh.size != num_devices:
        raise ValueError(
            f"the mesh has {mesh.size} devices, the program runs on {num_devices}; give the mesh "
            "that it was compiled for."
        )
    if mesh is None and not isinstance(compiled, str):
        mesh = _mesh_of(compiled)
    sizes = None if mesh is None else dict(mesh.shape)
    part = walk(Walk(program, num_devices, sizes, rates or Rates(), more_than), entry)
    return Ledger(
        tuple(row for row in part.rows if row.elements > more_than),
        part.unread,
        tuple(dict.fromkeys(part.notes)),
        part.compute,
        part.flops,
        _in_words(rates, mesh),
    )


def _text_of(compiled: Any) -> str:
    if isinstance(compiled, str):
        return compiled
    if not callable(getattr(compiled, "as_text", None)):
        raise ValueError(
            f"compiled is {compiled!r:.60}, no compiled program; give "
            "jax.jit(f).lower(...).compile(), or its text."
        )
    return compiled.as_text() or ""


def _mesh_of(compiled: jax.stages.Compiled) -> Any:
    """The mesh with the most axes that an input or output is laid out on."""
    shardings = jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
    meshes = [x.mesh for x in shardings if isinstance(x, NamedSharding)]
    return max(meshes, key=lambda mesh: sum(n > 1 for n in mesh.shape.values()), default=None)


def _in_words(rates: Rates | None, mesh: Any) -> str:
    """What seconds are estimated with, and that it is not the program's own GPU where it is not."""
    known = rates or Rates()
    words = f"{known.flops_per_s / 1e12:.0f} TFLOP/s, {known.memory_bytes_per_s / 1e12:.1f} TB/s"
    if rates is not None:
        return f"{words} and links as given"
    own = mesh.devices.flat[0] if isinstance(mesh, Mesh) else None
    words += f" and {_DEFAULT_LINK}"
    if own is None or own.platform == "cpu" or _DEFAULT_GPU in own.device_kind:
        return words
    return f"{words}; the program is for {own.device_kind}: give rates= for its own seconds"


def _table(rows: Sequence[Collective]) -> Table:
    """Rows that are alike are summed."""
    groups: dict[tuple[Any, ...], list[Collective]] = {}
    for row in rows:
        axes = _named(row.axes) if row.axes is not None else f"? ({row.group_size} devices)"
        key = (row.kind, row.dtype, axes, row.times, row.is_async)
        groups.setdefault(key, []).append(row)
    table = Table(title="collectives, per device; bytes of one time", title_justify="left")
    for name in ("collective", "dtype", "axes"):
        table.add_column(name, no_wrap=True)
    for name in ("count", "payload", "sent", "times", "how", "covered"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("from", overflow="fold")
    for (kind, dtype, axes, times, is_async), alike in groups.items():
        alone = Ledger(tuple(alike))
        table.add_row(
            *(kind, dtype, axes, str(len(alike))),
            format_bytes(sum(row.payload_bytes for row in alike)),
            format_bytes(sum(row.wire_bytes for row in alike)),
            *(f"x {times}", "async" if is_async else "sync"),
            f"{alone.covered:.0%}" if alone.seconds else _NONE,
            _origin(alike),
        )
    return table


def _named(axes: tuple[str, ...] | None) -> str:
    return "?" if axes is None else "+".join(axes) or "none"


def _origin(rows: Sequence[Collective]) -> str:
    """The parameters, else the ends of the names in the trace; as many as one line holds."""
    names = [name for row in rows for name in row.parameter.split(", ") if name]
    names = list(dict.fromkeys(names or [name for row in rows for name in _brief(row.op_name)]))
    count = len(names)
    while count > 1 and len(_listed(names, count)) > _FROM_WIDTH:
        count -= 1
    return _listed(names, count)


def _listed(names: Sequence[str], count: int) -> str:
    """The first so many names; one that is long by its end."""
    long = _FROM_WIDTH - len(" and 99 more")
    shown = [name if len(name) <= long else "…" + name[1 - long :] for name in names[:count]]
    more = f" and {len(names) - count} more" if len(names) > count else ""
    return ", ".join(shown) + more


def _brief(op_name: str) -> list[str]:
    """A name in the trace without what every name has; XLA joins those of what it combines.

    >>> _brief("jit(step)/jit(run)/shard_map/(jvp()/all_gather:while/body/eval_jaxpr/all_gather)")
    ['jvp()/all_gather', 'all_gather']
    """
    noise = r"\(?jit\([^)]*\)|shard_map|while|body|eval_jaxpr|closed_call|checkpoint|"
    names = []
    for name in op_name.split(":"):
        name = "/".join(x for x in name.split("/") if not re.fullmatch(noise, x))
        name = name[1:] if name.count("(") > name.count(")") else name
        names.append(name[:-1] if name.count(")") > name.count("(") else name)
    return [name for name in names if name]


def _totals(ledger: Ledger) -> list[str]:
    by_axis = ledger.by_axis()
    sent = ", ".join(f"{format_bytes(size)} along {_named(axes)}" for axes, size in by_axis.items())
    seconds, exposed = map(format_seconds, (ledger.seconds, ledger.exposed_seconds))
    covered = f"{ledger.covered:.1%} of it covered by compute, {exposed} exposed"
    communication = f"{seconds}, {covered}" if ledger.seconds else _NONE
    lines = [
        f"sent in all: {format_bytes(ledger.sent_bytes)}" + (f" ({sent})" if sent else ""),
        f"estimated: communication {communication}; compute "
        + format_seconds(ledger.compute_seconds),
    ]
    if ledger.rates:
        lines.append(f"estimated with: {ledger.rates}")
    if None in by_axis:
        lines.append("axes ?: not whole axes of a mesh that is known; give mesh=, of the program.")
    lines += [f"note: {note}" for note in ledger.notes]
    return lines + [f"THE SUMS MAY BE WRONG: {line}" for line in ledger.unread]
