"""What a run prints: the start-up table, a line an interval, a bar."""

import io
import math
from dataclasses import dataclass
from types import TracebackType

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress
from rich.table import Table
from rich.text import Text

TABLE_WIDTH = 132  # characters of a line of a wide table


def train_flops_per_token(num_params: int, num_layers: int, seq_len: int, embed_dim: int) -> float:
    """Count the model FLOPs of training on one token: 6 N + 12 L d T.

    The convention of MFU: forward and backward of every matmul; attention over the whole square,
    as if it were not causal; what remat computes again is not counted.

    Args:
        num_params: N, parameters; a tied head once, since its lookup multiplies nothing.
        num_layers: L, blocks with attention.
        seq_len: T, tokens.
        embed_dim: d, heads times head_dim.

    Source: Chowdhery et al., PaLM, arXiv:2204.02311, appendix B.

    >>> train_flops_per_token(124_439_808, 12, 1024, 768)
    859885056.0
    """
    return 6.0 * num_params + 12.0 * num_layers * embed_dim * seq_len


def format_bytes(num_bytes: float) -> str:
    """Write a number of bytes, >= 0, in the unit that reads best.

    >>> [format_bytes(n) for n in (17, 2048, 1.2 * 2**30, 5000 * 2**30)]
    ['17 B', '2.0 KiB', '1.2 GiB', '5000.0 GiB']
    """
    if num_bytes < 1024:
        return f"{num_bytes:.0f} B"
    for unit in ("KiB", "MiB"):
        num_bytes /= 1024
        if round(num_bytes, 1) < 1024:
            return f"{num_bytes:.1f} {unit}"
    return f"{num_bytes / 1024:.1f} GiB"


def format_count(count: float) -> str:
    """Write a count, >= 0, with one decimal and k, M, B or T.

    >>> [format_count(n) for n in (812, 19_900, 124_439_808, 1_557_611_200)]
    ['812', '19.9k', '124.4M', '1.6B']
    """
    for unit in ("", "k", "M", "B"):
        if round(count, 1 if unit else 0) < 1000:
            return f"{count:.1f}{unit}" if unit else f"{count:.0f}"
        count /= 1000
    return f"{count:.1f}T"


def format_duration(seconds: float) -> str:
    """Write seconds as m:ss, h:mm:ss or days; "-" if negative or not finite.

    >>> [format_duration(s) for s in (7, 730, 3723, 183_845)]
    ['0:07', '12:10', '1:02:03', '2d 3:04:05']
    """
    if not (math.isfinite(seconds) and seconds >= 0):
        return "-"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if not hours:
        return f"{minute}:{second:02}"
    return (f"{days}d " if days else "") + f"{hour}:{minute:02}:{second:02}"


def format_table(table: Table) -> str:
    """Write a table as plain text, without escape codes."""
    out = io.StringIO()
    Console(file=out, width=TABLE_WIDTH, color_system=None).print(table)
    return out.getvalue()


def print_table(title: str, rows: list[tuple[str, str]], console: Console) -> None:
    """Print the start-up table.

    Args:
        title: heading.
        rows: name and value, printed as they are; long values go on in the next line.
        console: where to; without a terminal no escape codes are written.
    """
    table = Table(title=title, title_justify="left", show_header=False, box=box.SIMPLE)
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(Text(name), Text(value))
    console.print(table)


@dataclass(frozen=True)
class StepLine:
    """What one line of the log says; what is None is left out."""

    step: int  # steps done
    num_steps: int
    loss: float  # nats per token
    grad_norm: float
    lr: float
    step_ms: float  # wall time of a step, waiting included
    wait_ms: float  # of that, waiting for data
    tokens_per_s: float  # all devices together
    tflops: float | None = None  # model TFLOP/s per device, as train_flops_per_token counts
    mfu: float | None = None  # share of peak_flops, 0 to 1
    memory_bytes: int | None = None  # peak of one device
    skipped_steps: int = 0  # so far
    eta_s: float | None = None

    def format(self) -> str:
        """The line.

        >>> StepLine(120, 2000, 1.2345, 0.812, 3e-4, 412, 3, 19_900).format()
        'step   120/2000 | loss 1.2345 | grad norm 0.812 | lr 3.0e-04 | 412 ms (3 ms data) | \
19.9k tokens/s | skipped 0'
        """
        parts = [
            f"step {self.step:5d}/{self.num_steps}",
            f"loss {self.loss:.4f}",
            f"grad norm {self.grad_norm:.3f}",
            f"lr {self.lr:.1e}",
            f"{self.step_ms:.0f} ms ({self.wait_ms:.0f} ms data)",
            f"{format_count(self.tokens_per_s)} tokens/s",
        ]
        if self.tflops is not None:
            parts.append(f"{self.tflops:.{2 if self.tflops < 10 else 0}f} TFLOP/s")
        if self.mfu is not None:
            parts.append(f"mfu {self.mfu:.1%}")
        if self.memory_bytes is not None:
            parts.append(format_bytes(self.memory_bytes))
        parts.append(f"skipped {self.skipped_steps}")
        if self.eta_s is not None:
            parts.append(f"eta {format_duration(self.eta_s)}")
        return " | ".join(parts)


class Progress:
    """A progress bar with lines above it on a terminal; the lines alone in a pipe.

    Args:
        num_steps: steps of the whole run, >= 0.
        console: default: standard output.
    """

    def __init__(self, num_steps: int, *, console: Console | None = None):
        self.console = console or Console()
        self._bar = RichProgress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=None),
            TimeElapsedColumn(),
            console=self.console,
            expand=True,
            refresh_per_second=4,
            disable=not self.console.is_terminal,
        )
        self._task = self._bar.add_task("train", total=num_steps)

    def line(self, step_line: StepLine | str) -> None:
        """Print a line above the bar, never wrapped or styled."""
        text = step_line if isinstance(step_line, str) else step_line.format()
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def advance(self, step: int) -> None:
        """Move the bar to `step` steps done, which may lie behind after a resume."""
        self._bar.update(self._task, completed=step)

    def __enter__(self) -> "Progress":
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._bar.stop()
