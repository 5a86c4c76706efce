"""The partition table: what each device holds and sends, per leaf and in all, against the law.

Nothing is run. Bytes at rest are exact; bytes on the wire are the law's, from the layout.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
from rich.table import Table

from jzero.gradients import Accumulation
from jzero.layout import Layout, Leaf, Stage, is_floating
from jzero.losses import is_born_cut
from jzero.terminal import format_bytes, format_count, format_table


@dataclasses.dataclass(frozen=True)
class Report:
    """What one device holds at rest and sends in a step. All sizes in bytes per device.

    Args:
      stage_number: 0 to 3.
      stage: what it cuts.
      num_shards: N.
      num_replicas: data shards beyond N.
      reduce_dtype: the dtype gradients travel in; None for their own.
      accumulation: how many microbatches a step has, and how they are summed.
      params: the parameters' layout.
      state: the optimizer state's layout; empty where no transform was given.
      reads: per parameter, as the last traced loss has it, whether it is gathered where it is read.
      update_bytes: what the transform's own update sends besides; None where it cannot be told, as
        its update takes more than gradients and parameters.
    """

    stage_number: int
    stage: Stage
    num_shards: int
    num_replicas: int
    reduce_dtype: Any
    accumulation: Accumulation
    params: Layout
    state: Layout
    reads: Mapping[str, bool]
    update_bytes: int | None = 0

    @property
    def num_params(self) -> int:
        """Logical parameters."""
        return sum(int(np.prod(leaf.shape)) for leaf in self.params.values())

    @property
    def params_bytes(self) -> int:
        """Bytes of parameters that a device holds between steps."""
        return sum(held_bytes(leaf, self.stage.params) for leaf in self.params.values())

    @property
    def grads_bytes(self) -> int:
        """Bytes of summed gradients that a device holds within a step, in the dtype of the sum."""
        trained = (leaf for leaf in self.params.values() if is_floating(leaf.dtype))
        dtype = self.accumulation.dtype
        sums = (dataclasses.replace(x, dtype=dtype(x, self.reduce_dtype)) for x in trained)
        return sum(held_bytes(leaf, self._is_born_cut(leaf)) for leaf in sums)

    def _is_born_cut(self, leaf: Leaf) -> bool:
        return is_born_cut(leaf, self.stage, self.accumulation.num_microbatches)

    @property
    def gathered_bytes(self) -> int:
        """Bytes of gathered parameters that a device keeps during a step, beside its shards."""
        if not (self.stage.params and self.accumulation.keep_gathered):
            return 0
        cut = (leaf for leaf in self.params.values() if leaf.dim is not None)
        return sum(held_bytes(leaf, is_cut=False) for leaf in cut)

    @property
    def state_bytes(self) -> int:
        """Bytes of optimizer state that a device holds between steps."""
        return sum(held_bytes(leaf, self.stage.state) for leaf in self.state.values())

    @property
    def argument_bytes(self) -> int:
        """Bytes of a step's parameter and state arguments, as `memory_analysis` counts them."""
        return self.params_bytes + self.state_bytes

    @property
    def wire_bytes(self) -> int:
        """Bytes that a device sends in a step, besides what the update adds."""
        return self.wire(self.accumulation.num_microbatches)

    def wire(self, num_microbatches: int) -> int:
        """Bytes that a device sends in a step of `num_microbatches`, by the law of the stage."""
        return round(sum(self.wire_of(leaf, num_microbatches) for leaf in self.params.values()))

    def wire_of(self, leaf: Leaf, num_microbatches: int) -> float:
        """Bytes that a device sends for one parameter in a step."""
        if not is_floating(leaf.dtype):
            return 0.0
        ring = (self.num_shards - 1) / self.num_shards
        weight = leaf.rest_size * leaf.dtype.itemsize
        grad = leaf.rest_size * np.dtype(self.reduce_dtype or leaf.dtype).itemsize
        if leaf.dim is None or not self.stage.state:
            total = self.num_shards * self.num_replicas
            return 2 * grad * (total - 1) / total
        times = num_microbatches if self.stage.grads else 1
        is_kept = not self.stage.params or self.accumulation.keep_gathered
        gathers = 1 if is_kept else num_microbatches * self.num_gathers(leaf)
        across = 2 * (self.num_replicas - 1) / self.num_replicas * grad / self.num_shards
        return ring * (times * grad + gathers * weight) + across

    def num_gathers(self, leaf: Leaf) -> int:
        """How often a parameter is gathered in one microbatch at stage 3: twice in a layer loop."""
        return 2 if leaf.is_stacked and self.reads.get(leaf.name, True) else 1

    def rows(self) -> list[tuple[str, ...]]:
        """The table's rows: name, shape, dtype, cut, padding, held, state, note."""
        return [self._row(leaf) for leaf in self.params.values()]

    def _row(self, leaf: Leaf) -> tuple[str, ...]:
        mine = [s for s in self.state.values() if s.name.endswith(f".{leaf.name}")]
        return (
            leaf.name,
            "x".join(map(str, leaf.shape)) or "scalar",
            str(leaf.dtype),
            "whole" if leaf.dim is None else f"dim {leaf.dim} / {self.num_shards}",
            f"{leaf.padding}" if leaf.padding else "",
            format_bytes(held_bytes(leaf, self.stage.params)),
            format_bytes(sum(held_bytes(s, self.stage.state) for s in mine)) if mine else "",
            self._note(leaf),
        )

    def _note(self, leaf: Leaf) -> str:
        if leaf.dim is None:
            return leaf.why_whole
        if not self._is_born_cut(leaf):
            return ""
        if leaf.name not in self.reads:
            return "no loss traced yet"
        if self.gathered_bytes:
            return "gathered once a step"
        what = "gathered" if self.stage.params else "reduced"
        if self.reads[leaf.name]:
            return f"{what} where it is read"
        if leaf.is_stacked:
            return f"{what} whole, outside its layers: read it with block_params or run_layers"
        return f"{what} whole, once a microbatch"

    def totals(self) -> list[tuple[str, str, str]]:
        """Per class of bytes: what a device holds, and the law."""
        whole = [leaf for leaf in self.params.values() if leaf.dim is None and leaf.shape]
        fill = sum(leaf.rest_size for leaf in self.params.values()) / max(self.num_params, 1)
        cut = f"1/{self.num_shards}"
        born_cut = any(map(self._is_born_cut, self.params.values()))
        kept = ("kept gathered in a step", format_bytes(self.gathered_bytes), "whole, as stage 2")
        return [
            ("parameters", format_bytes(self.params_bytes), cut if self.stage.params else "whole"),
            *([kept] if self.gathered_bytes else []),
            ("gradients", format_bytes(self.grads_bytes), cut if born_cut else "whole"),
            (
                "optimizer state",
                format_bytes(self.state_bytes) if self.state else "no transform given",
                cut if self.stage.state else "whole",
            ),
            ("sent in a step", format_bytes(self.wire_bytes), self._law()),
            ("the update adds", self._added(), "0 if element-wise"),
            ("padded over logical", f"{fill:.4f}", "1 plus padding"),
            (
                "left whole",
                f"{len(whole)} leaves, {format_bytes(sum(x.shard_bytes for x in whole))}",
                "all of them" if not self.stage.state else "only those named above",
            ),
        ]

    def _added(self) -> str:
        if not self.state and self.update_bytes == 0:
            return "no transform given"
        return "not known" if self.update_bytes is None else format_bytes(self.update_bytes)

    def _law(self) -> str:
        n = "(N-1)/N Psi"
        third = f"(G+1) {n}" if self.accumulation.keep_gathered else f"at most 3 G {n}"
        law = (f"2 {n}", f"2 {n}", f"(G+1) {n}", third)[self.stage_number]
        return f"{law}, G = {self.accumulation.num_microbatches}"

    def __str__(self) -> str:
        table = Table(
            title=f"ZeRO stage {self.stage_number} over {self.num_shards} shards",
            title_justify="left",
        )
        for column in ("parameter", "shape", "dtype", "cut", "padding", "held", "state", "note"):
            is_number = column in ("padding", "held", "state")
            table.add_column(column, justify="right" if is_number else "left", overflow="fold")
        for row in self.rows():
            table.add_row(*row)
        totals = Table(
            title=f"{format_count(self.num_params)} parameters, per device", title_justify="left"
        )
        for column in ("what", "bytes", "law"):
            totals.add_column(column, justify="right" if column == "bytes" else "left")
        for row in self.totals():
            totals.add_row(*row)
        return format_table(table) + format_table(totals)


def held_bytes(leaf: Leaf, is_cut: bool) -> int:
    """Bytes of a leaf that one device holds: its shard, or the logical whole."""
    if is_cut or leaf.dim is None:
        return leaf.shard_bytes
    return int(np.prod(leaf.shape, dtype=np.int64)) * leaf.dtype.itemsize
