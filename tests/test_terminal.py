"""Claims about what a run prints, character by character."""

import dataclasses
import io

import pytest
from rich.console import Console

from jzero.terminal import (
    Progress,
    StepLine,
    format_bytes,
    format_count,
    format_duration,
    print_table,
    train_flops_per_token,
)

FULL = StepLine(
    step=120,
    num_steps=2000,
    loss=1.23451,
    grad_norm=0.8123,
    lr=3e-4,
    step_ms=412.3,
    wait_ms=2.7,
    tokens_per_s=19_870.0,
    tflops=0.0213,
    mfu=0.4312,
    memory_bytes=round(1.2 * 2**30),
    skipped_steps=0,
    eta_s=730.2,
)
FULL_TEXT = (
    "step   120/2000 | loss 1.2345 | grad norm 0.812 | lr 3.0e-04 | 412 ms (3 ms data) | "
    "19.9k tokens/s | 0.02 TFLOP/s | mfu 43.1% | 1.2 GiB | skipped 0 | eta 12:10"
)


@pytest.fixture(autouse=True)
def no_forced_terminal(monkeypatch):
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")


def pipe():
    return Console(file=io.StringIO())


def terminal():
    return Console(file=io.StringIO(), force_terminal=True, width=60)


def written(console):
    return console.file.getvalue()


def test_the_step_line_reads_as_specified():
    assert FULL.format() == FULL_TEXT


def test_the_step_line_leaves_out_what_is_not_known_but_never_the_skipped_steps():
    bare = dataclasses.replace(FULL, tflops=None, mfu=None, memory_bytes=None, eta_s=None)
    assert dataclasses.replace(bare, skipped_steps=3).format() == (
        "step   120/2000 | loss 1.2345 | grad norm 0.812 | lr 3.0e-04 | 412 ms (3 ms data) | "
        "19.9k tokens/s | skipped 3"
    )


def test_large_rates_lose_their_decimals_and_non_finite_losses_show():
    line = dataclasses.replace(FULL, tflops=412.34, loss=float("nan")).format()
    assert "| 412 TFLOP/s |" in line and "| loss nan |" in line


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1024**2 - 1, "1.0 MiB"),
        (1.5 * 2**20, "1.5 MiB"),
        (2**30 - 1, "1.0 GiB"),
        (141 * 2**30, "141.0 GiB"),
        (2**41, "2048.0 GiB"),
    ],
)
def test_bytes_take_the_unit_that_keeps_them_below_1024(num_bytes, text):
    assert format_bytes(num_bytes) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0"),
        (999, "999"),
        (999.7, "1.0k"),
        (19_900, "19.9k"),
        (999_960, "1.0M"),
        (124_439_808, "124.4M"),
        (1_557_611_200, "1.6B"),
        (3.2e12, "3.2T"),
    ],
)
def test_counts_take_the_unit_that_keeps_them_below_1000(count, text):
    assert format_count(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0:00"),
        (59.6, "1:00"),
        (730, "12:10"),
        (3599.4, "59:59"),
        (3600, "1:00:00"),
        (86_400, "1d 0:00:00"),
        (-1, "-"),
        (float("inf"), "-"),
        (float("nan"), "-"),
    ],
)
def test_durations_read_as_clocks(seconds, text):
    assert format_duration(seconds) == text


def test_a_pipe_gets_plain_lines_and_nothing_else():
    console = pipe()
    with Progress(2000, console=console) as progress:
        progress.advance(120)
        progress.line(FULL)
        progress.line("val loss 1.5 [bold]/tmp/[x][/bold]")
        progress.advance(121)
    assert written(console) == FULL_TEXT + "\nval loss 1.5 [bold]/tmp/[x][/bold]\n"


def test_a_terminal_gets_the_same_lines_and_a_bar():
    console = terminal()
    with Progress(2000, console=console) as progress:
        progress.line(FULL)
        progress.advance(120)
    assert "\x1b[" in written(console) and FULL_TEXT + "\n" in written(console)
    assert "120/2000" in written(console).split(FULL_TEXT)[1]


def test_an_error_inside_stops_the_bar_and_goes_on():
    progress = Progress(3, console=terminal())
    with pytest.raises(KeyboardInterrupt), progress:
        raise KeyboardInterrupt
    assert written(progress.console).endswith("\x1b[?25h")  # the cursor is shown again


def test_the_table_prints_names_and_values_as_they_are_without_codes_in_a_pipe():
    console = pipe()
    print_table("gpt2, stage 2", [("mesh", "data 8 [cpu]"), ("parameters", "124.4M")], console)
    lines = [line.strip() for line in written(console).splitlines() if line.strip()]
    assert lines == ["gpt2, stage 2", "mesh         data 8 [cpu]", "parameters   124.4M"]
    assert "\x1b" not in written(console)


def test_the_table_cuts_no_long_value():
    console = pipe()
    value = "".join(chr(ord("a") + i % 26) for i in range(300))
    print_table("t", [("name", value)], console)
    assert "".join(written(console).split()) == "tname" + value


def test_training_flops_are_six_per_parameter_and_twelve_per_attended_element():
    assert train_flops_per_token(100, 0, 1024, 768) == 600
    assert train_flops_per_token(0, 2, 3, 5) == 12 * 2 * 3 * 5
