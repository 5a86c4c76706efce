"""scripts/bench_step.py and scripts/mutate.py: what they print, and what they notice."""

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent
TINY = (
    "--rounds 2 --steps 1 --num-layers 2 --dim 16 --num-heads 2 --vocab-size 32 --length 8 --rows 1"
)


def load_script(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


bench_step, mutate = load_script("bench_step"), load_script("mutate")


def table_rows(text):
    """The cells of every table row whose first cell is a number."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    return [row for row in rows if row[0].isdigit()]


@pytest.fixture(scope="module")
def bench_rows():
    args = bench_step.parse_args([*TINY.split(), "--count"])
    return table_rows("\n".join(bench_step.bench(args)))


def test_bench_prints_a_row_of_times_per_stage_with_the_median_between_min_and_max(bench_rows):
    times = [row for row in bench_rows if "." in row[1]]
    assert [row[0] for row in times] == ["0", "1", "2", "3"]
    for row in times:
        median, low, high = map(float, row[3:])
        assert 0 < low <= median <= high


@pytest.mark.parametrize("stage", range(4))
def test_zero_compiles_to_the_same_collectives_as_the_step_by_hand(bench_rows, stage):
    by_hand, zero = (
        [int(n) for n in row[2:5]]
        for row in bench_rows
        if row[:2] in ([str(stage), "by hand"], [str(stage), "zero"])
    )
    assert zero == by_hand
    assert (sum(by_hand[1:]) > 0) == (stage > 0)  # reduce-scatters and all-gathers


def test_bench_refuses_to_compare_steps_of_different_losses():
    def variant(loss):
        return bench_step.Variant(lambda *given: (*given[:2], np.float32(loss)), 0.0, 0.0)

    bench_step.check_same_loss(1, [variant(2.0), variant(2.0)], None)
    for other in (2.001, float("nan")):
        with pytest.raises(ValueError, match=r"stage 1, step 0: hand-written loss 2\.0, zero's"):
            bench_step.check_same_loss(1, [variant(2.0), variant(other)], None)


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (["--dim", "36"], r"--dim 36; give multiples of 8"),
        (
            ["--vocab-size", "31", "--length", "9"],
            r"--vocab-size 31, --length 9; give multiples of 8",
        ),
        (["--rounds", "0"], r"a count below 1"),
    ],
)
def test_bench_refuses_sizes_the_step_by_hand_cannot_cut(flags, error):
    with pytest.raises(SystemExit, match=error):
        bench_step.main([*TINY.split(), *flags])


LAYOUT = """
import time

def pad(x):
    return [*x, 0]

def checked(x):
    return pad(
        x,
    )

def unchecked(x):
    return pad(x)

def crashing(x):
    return pad(x)

def hanging(x):
    return pad(x)

def compile(fn, *, out_shardings=None):
    return out_shardings

def placed(fn):
    return compile(fn, out_shardings=3)
"""

TESTS = """
import os, time
import pytest
from jzero import layout

def test_nothing():
    pass

@pytest.mark.parametrize("given", [[1], [2]], ids=["a one", "a two"])
def test_checked_is_padded(given):
    assert layout.checked(given) == [*given, 0] or given == [1]

def test_placed():
    assert layout.placed(None) == 3

def test_lives():
    if layout.crashing([]) != [0]:
        os.abort()

def test_ends():
    if layout.hanging([]) != [0]:
        time.sleep(600)
"""


@pytest.fixture
def toy(tmp_path):
    """A repository with one module, `layout`, and its tests."""
    files = {"jzero/__init__.py": "", "jzero/layout.py": LAYOUT, "tests/test_layout.py": TESTS}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def run_mutate(capsys, *argv):
    """Exit status, and per function of the toy what its row says."""
    with pytest.raises(SystemExit) as exit_info:
        mutate.main([str(arg) for arg in argv])
    rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()]
    rows = [row for row in rows if row[0].startswith("jzero/")]
    outcomes = {row[1].split("`")[-2]: row[2].strip("`") for row in rows}
    return exit_info.value.code, outcomes


def test_mutate_names_the_killer_of_each_mutant_also_where_it_crashes_or_hangs(toy, capsys):
    code, outcomes = run_mutate(capsys, "--root", toy, "--timeout", 20)
    test = "tests/test_layout.py::test_"
    assert code == 1
    assert outcomes == {
        "checked": f"{test}checked_is_padded[a two]",
        "unchecked": "**SURVIVED**",
        "crashing": f"{test}lives (crashed)",
        "hanging": f"{test}ends (no end within 20 s)",
        "placed": f"{test}placed",
    }


def test_mutate_leaves_the_repository_as_it_was(toy, capsys):
    run_mutate(capsys, "--root", toy, "--only", "jzero/layout.py:8")
    assert (toy / "jzero/layout.py").read_text() == LAYOUT
    assert {path.name for path in toy.rglob("*")} == {
        *("jzero", "__init__.py", "layout.py", "tests", "test_layout.py")
    }


def test_mutate_exits_with_0_where_the_one_mutant_is_killed(toy, capsys):
    code, outcomes = run_mutate(capsys, "--root", toy, "--only", "jzero/layout.py:8")
    assert (code, list(outcomes)) == (0, ["checked"])


def test_mutate_excuses_a_survivor_listed_as_equivalent(toy, capsys, monkeypatch):
    key = ("jzero/layout.py", "unchecked", "pad(x)")
    monkeypatch.setitem(mutate.EQUIVALENT, key, "nobody calls it")
    code, outcomes = run_mutate(capsys, "--root", toy, "--only", "jzero/layout.py:13")
    assert (code, outcomes) == (0, {"unchecked": "equivalent: nobody calls it"})


def test_mutate_refuses_tests_that_fail_without_any_mutant(toy, capsys):
    (toy / "tests/test_layout.py").write_text("def test_red():\n    assert False\n")
    code, _ = run_mutate(capsys, "--root", toy)
    assert code == (
        "error: tests/test_layout.py::test_red fails without any mutant; mend it first."
    )


def test_mutate_refuses_a_line_without_a_call_to_delete(toy, capsys):
    code, _ = run_mutate(capsys, "--root", toy, "--only", "jzero/layout.py:1")
    assert str(code).startswith("error: no call to delete in jzero/layout.py:1; --list shows")


@pytest.mark.parametrize(
    ("function", "deleted"),
    [
        ("pad", "jax.numpy.pad("),
        ("unpad", "jax.lax.slice_in_dim("),
        ("all_gather", "jax.lax.all_gather("),
        ("reduce_scatter", "jax.lax.psum_scatter("),
        ("all_reduce", "jax.lax.psum("),
        ("reduce_gradient", "all_reduce("),
        ("Stack.reduce", "reduce_scatter("),
        ("constrain.pin", "jax.lax.with_sharding_constraint("),
        ("partitioned.init", "out_shardings="),
        ("Zero.init", "out_shardings="),
    ],
)
def test_mutate_lists_the_calls_that_partition(function, deleted):
    mutants = mutate.find_mutants(ROOT, None)
    assert any(m.function == function and m.deleted.startswith(deleted) for m in mutants)


def test_every_mutant_of_the_library_is_python_that_differs_in_that_call_alone():
    for mutant in mutate.find_mutants(ROOT, None):
        source = (ROOT / mutant.file).read_bytes()
        mutated = mutant.applied(source)
        compile(mutated, mutant.file, "exec")
        assert mutated[: mutant.start] == source[: mutant.start]
        assert mutated.endswith(source[mutant.end :])
        assert mutated != source
