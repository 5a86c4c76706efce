"""Deletes, one at a time, each call that cuts, pads, slices, gathers, reduces or constrains, and
says which test notices.

    python scripts/mutate.py --list
    python scripts/mutate.py --only jzero/optimizer.py
    python scripts/mutate.py --only jzero/held.py:43 --tests tests/test_parity.py

A deleted call leaves its array argument behind. Each mutant lives in a temporary copy of the
repository, where the core tests run until the first failure. Exit status 1: one survived.
"""

import argparse
import ast
import functools
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
NOT_CORE = (  # nothing is cut there
    *("cli", "config", "data", "metrics", "recipe", "runlog"),
    *("sample", "schema", "terminal", "tokens", "train"),
)
NAMES = ("layout", "mesh", "gradients", "layers", "optimizer", "zero", "one_line", "compiled")
TESTS = tuple(f"tests/test_{name}.py" for name in (*NAMES, "parity"))  # the fastest first
OBJECT = -1  # of `x.method(...)`, x is left behind
LEFT_BEHIND = {  # by the called name: the position of the argument that takes the call's place
    # JAX's and NumPy's own
    **dict.fromkeys(("all_gather", "psum_scatter", "psum", "pmean"), 0),
    **dict.fromkeys(("slice_in_dim", "dynamic_slice_in_dim", "dynamic_index_in_dim", "pad"), 0),
    **dict.fromkeys(("with_sharding_constraint", "device_put", "stop_gradient"), 0),
    # jzero's
    **dict.fromkeys(("unpad", "reduce_scatter", "all_reduce", "fetch", "read", "fold_keys"), 0),
    **dict.fromkeys(("_averaged", "_mean_or_sum", "_microbatch", "_hold_frozen"), 0),
    **dict.fromkeys(("_padded", "_place_leaf", "_view"), 0),
    **dict.fromkeys(("constrain", "with_auto_axes", "_gathered", "_on_leaves"), 1),
    "reduce_gradient": 2,
    "folded": OBJECT,
}
KEYWORDS = ("out_shardings",)  # deleted from a call; the rest of it stays
EQUIVALENT: dict[tuple[str, str, str], str] = {
    # (file, function, deleted text): why no test can tell
    ("jzero/gradients.py", "local_value_and_grad", "_microbatch(inputs, acc, 0)"): (
        "only traced for shapes and reads, which a whole batch shows as well"
    ),
    ("jzero/optimizer.py", "_logical.cut", "pad(x, leaf)"): (
        "XLA pads an uneven constraint itself; padding here only makes the slice after it local"
    ),
    (
        "jzero/optimizer.py",
        "_logical.cut",
        "meshes.constrain(partition.place.mesh, padded, partition.spec(leaf))",
    ): "XLA finds the same cut from the constraint on what leaves; this one only says it early",
    (
        "jzero/optimizer.py",
        "_at_rest.rest",
        "meshes.constrain(partition.place.mesh, pad(x, leaf), partition.spec(leaf))",
    ): "what leaves is pinned again by with_auto_axes, or by the specs of the gather",
    (
        "jzero/optimizer.py",
        "_gathered.gather",
        "meshes.constrain(place.mesh, pad(param, leaf), partition.spec(leaf))",
    ): "the specs of the gather pin the sum",
}
NOT_COPIED = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "runs", "build", "dist")
OUTCOME = re.compile(r"^(\S+?::.+?) (PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)", re.M)
STARTED = re.compile(r"^(tests/\S+?::\S+)", re.M)


@dataclass(frozen=True)
class Mutant:
    file: str  # relative to the root
    line: int
    function: str  # where the call is
    deleted: str  # on one line
    start: int  # bytes of the file that `replacement` takes the place of
    end: int
    replacement: str

    @property
    def excuse(self) -> str | None:
        """Why it may survive, where EQUIVALENT has it."""
        return EQUIVALENT.get((self.file, self.function, self.deleted))

    def applied(self, source: bytes) -> bytes:
        return source[: self.start] + self.replacement.encode() + source[self.end :]


class Finder(ast.NodeVisitor):
    """Collects the mutants of one file, in the order of its lines."""

    def __init__(self, file: str, source: bytes) -> None:
        self.file, self.source = file, source
        self.starts = [0]
        for line in source.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))
        self.names: list[str] = []
        self.mutants: list[Mutant] = []

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.ClassDef) -> None:
        self.names.append(node.name)
        self.generic_visit(node)
        self.names.pop()

    visit_ClassDef = visit_FunctionDef  # type: ignore[assignment]

    def visit_Call(self, node: ast.Call) -> None:
        kept = left_behind(node)
        if kept is not None:
            self._add(node, self._span(node), f"({self._text(*self._span(kept))})")
        for keyword in node.keywords:
            if keyword.arg in KEYWORDS:
                start, end = self._span(keyword)
                self._add(keyword, (self.source.rindex(b",", 0, start), end), "")
        self.generic_visit(node)

    def _span(self, node: ast.expr | ast.keyword) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start = self.starts[node.lineno - 1] + node.col_offset
        return start, self.starts[node.end_lineno - 1] + node.end_col_offset

    def _text(self, start: int, end: int) -> str:
        return self.source[start:end].decode()

    def _add(self, node: ast.expr | ast.keyword, span: tuple[int, int], replacement: str) -> None:
        deleted = " ".join(self._text(*self._span(node)).split())
        where = ".".join(self.names)
        self.mutants.append(Mutant(self.file, node.lineno, where, deleted, *span, replacement))


def left_behind(node: ast.Call) -> ast.expr | None:
    """The expression that takes a call's place, or None where the call is not one to delete."""
    callee = node.func
    name = getattr(callee, "attr", getattr(callee, "id", None))
    position = LEFT_BEHIND.get(name) if isinstance(name, str) else None
    if position == OBJECT and isinstance(callee, ast.Attribute):
        return callee.value
    if position is None or len(node.args) <= max(position, 0):
        return None
    return node.args[max(position, 0)]


def find_mutants(root: Path, only: str | None) -> list[Mutant]:
    """All mutants of the core modules, or those of `only`, a file or file:line.

    Raises:
      ValueError: where there are none.
    """
    mutants: list[Mutant] = []
    for path in sorted((root / "jzero").glob("*.py")):
        if path.stem not in NOT_CORE:
            source = path.read_bytes()
            finder = Finder(f"jzero/{path.name}", source)
            finder.visit(ast.parse(source))
            mutants += sorted(finder.mutants, key=lambda m: m.start)
    if only is not None:
        mutants = [m for m in mutants if only in (m.file, f"{m.file}:{m.line}")]
    if not mutants:
        raise ValueError(
            f"no call to delete in {only or 'jzero/'}; --list shows the files and lines there are."
        )
    return mutants


def run_tests(
    root: Path, tests: Sequence[str], timeout: float, mutant: Mutant | None
) -> str | None:
    """Runs the tests in a copy of the repository; returns the first to fail, None if none does."""
    command = [sys.executable, "-m", "pytest", "-x", "-v", "-p", "no:cacheprovider"]
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        copy = Path(folder) / "repository"
        shutil.copytree(root, copy, ignore=NOT_COPIED)
        if mutant is not None:
            path = copy / mutant.file
            path.write_bytes(mutant.applied(path.read_bytes()))
        env = os.environ | {"PYTHONDONTWRITEBYTECODE": "1", "PYTEST_ADDOPTS": ""}
        run = subprocess.Popen(
            [*command, "-o", "addopts=", *tests],
            cwd=copy,
            env=env,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        try:
            output, how = run.communicate(timeout=timeout)[0], "crashed"
        except subprocess.TimeoutExpired:
            run.kill()
            output, how = run.communicate()[0], f"no end within {timeout:g} s"
    return None if run.returncode == 0 else first_failure(output, how)


def first_failure(output: str, how: str) -> str:
    """The test that failed; of a process that died, the test it was in and `how` it died."""
    outcomes = OUTCOME.findall(output)
    for name, outcome in outcomes:
        if outcome in ("FAILED", "ERROR"):
            return name
    if collected := re.search(r"^ERROR (\S+)", output, re.M):
        return f"{collected[1]} (cannot be imported)"
    started = STARTED.findall(output)
    if len(started) > len(outcomes):
        return f"{started[len(outcomes)]} ({how})"
    raise RuntimeError(f"pytest failed, but named no test:\n{output[-2000:]}")


def describe(mutant: Mutant, killer: str | None) -> str:
    deleted = mutant.deleted if len(mutant.deleted) <= 70 else mutant.deleted[:67] + "..."
    outcome = f"`{killer}`" if killer else "**SURVIVED**"
    if killer is None and mutant.excuse is not None:
        outcome = f"equivalent: {mutant.excuse}"
    return f"| {mutant.file}:{mutant.line} | `{deleted}` in `{mutant.function}` | {outcome} |"


def mutate(args: argparse.Namespace) -> int:
    """Runs what the arguments ask for and prints the table; returns how many survived."""
    if args.list:
        mutants = find_mutants(args.root, args.only)
        print("\n".join(f"{m.file}:{m.line}  {m.deleted}  in {m.function}" for m in mutants))
        return 0
    with tempfile.TemporaryDirectory(prefix="mutate-") as folder:
        snapshot = Path(folder) / "repository"  # edits during the run do not reach it
        shutil.copytree(args.root, snapshot, ignore=NOT_COPIED)
        return kill_all(snapshot, find_mutants(snapshot, args.only), args)


def kill_all(root: Path, mutants: Sequence[Mutant], args: argparse.Namespace) -> int:
    tests = args.tests or [test for test in TESTS if (root / test).exists()]
    run = functools.partial(run_tests, root, tests, args.timeout)
    if not tests or (failed := run(None)):
        raise ValueError(
            f"{failed} fails without any mutant; mend it first."
            if tests
            else "no tests; use --tests."
        )
    print("| where | call deleted | killed by |\n|---|---|---|", flush=True)
    num_survived = 0
    with ThreadPoolExecutor(args.jobs) as pool:
        for mutant, killer in zip(mutants, pool.map(run, mutants), strict=True):
            print(describe(mutant, killer), flush=True)
            num_survived += killer is None and mutant.excuse is None
    print(f"\n{len(mutants)} deleted, {num_survived} survived.")
    return num_survived


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--list", action="store_true", help="print the calls, run nothing")
    parser.add_argument("--only", metavar="FILE[:LINE]", help="as --list prints them")
    parser.add_argument("--tests", nargs="+", help="test files or ids in place of the core tests")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time")
    parser.add_argument("--timeout", type=float, default=900, help="seconds for one mutant")
    parser.add_argument("--root", type=Path, default=ROOT, help="the repository")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    try:
        sys.exit(1 if mutate(parse_args(argv)) else 0)
    except ValueError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
