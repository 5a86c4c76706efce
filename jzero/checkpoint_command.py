"""`jzero checkpoint`: what a directory of checkpoints holds, and whether it is whole."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from jzero.checkpoint import IN_RUN, Step, damaged, open_step, steps_in
from jzero.restore import PARAMS
from jzero.resume import INFO_CONFIG
from jzero.terminal import format_bytes

USAGE = """\
usage: jzero checkpoint inspect DIR    steps, sizes, arrays, configuration and versions
       jzero checkpoint verify DIR     reads every byte of every step and compares checksums

DIR is the folder of a run, of its checkpoints, or of one step. The exit status of verify is 1
where a byte differs.
"""
OK, DAMAGED = 0, 1


def prepare_checkpoint(words: Sequence[str]) -> Callable[[], int]:
    """Reads the words after `jzero checkpoint`.

    Raises:
      ValueError: the words are others, or there is no checkpoint.
    """
    if {"-h", "--help"} & set(words):
        return _help
    if len(words) != 2 or words[0] not in ("inspect", "verify"):
        raise ValueError(f"{' '.join(words) or 'nothing'} is not understood.\n\n{USAGE}")
    command, path = words
    if command == "inspect":
        step = open_step(path)
        return lambda: _inspect(path, step)
    paths = step_paths(path)
    return lambda: _verify(paths)


def step_paths(path: str | Path) -> list[Path]:
    """The folders of all steps in a directory, or the one that is named.

    Raises:
      ValueError: there is none.
    """
    path = Path(path)
    if not steps_in(path) and steps_in(path / IN_RUN):
        path = path / IN_RUN
    steps = steps_in(path)
    return [Path(path) / str(step) for step in steps] if steps else [open_step(path).path]


def _help() -> int:
    print(USAGE, end="")
    return OK


def _inspect(path: str, step: Step) -> int:
    manifest = step.manifest
    for other in step_paths(path):
        size = sum(file.stat().st_size for file in other.rglob("*") if file.is_file())
        print(f"step {other.name:>8}  {format_bytes(size):>10}  {other}")
    print(f"\narrays of step {manifest.step}, logical shapes")
    width = max(map(len, manifest.leaves), default=0)
    for name, leaf in manifest.leaves.items():
        shape = "x".join(map(str, leaf.shape)) or "scalar"
        kind = f"PRNG key {leaf.key_impl}" if leaf.key_impl else leaf.dtype
        print(f"  {name:{width}}  {shape:>16}  {kind:>9}  {format_bytes(leaf.num_bytes):>10}")
    params = [leaf for name, leaf in manifest.leaves.items() if name.startswith(PARAMS)]
    total = f"  {len(manifest.leaves)} arrays, {format_bytes(manifest.num_bytes)}; parameters: "
    print(total + format_bytes(sum(leaf.num_bytes for leaf in params)))
    for key, value in manifest.info.items():
        if key != INFO_CONFIG:
            print(f"{key}: {json.dumps(value)}")
    print(f"\nwritten by {', '.join(f'{k} {v}' for k, v in manifest.versions.items())}")
    for section, table in manifest.info.get(INFO_CONFIG, {}).items():
        print(f"\n[{section}]")
        for key, value in table.items():
            print(f"{key} = {json.dumps(value)}")
    return OK


def _verify(paths: Sequence[Path]) -> int:
    bad = []
    for path in paths:
        try:
            faults = damaged(open_step(path))
        except ValueError as error:
            faults = [str(error)]
        if faults and not path.exists():
            print(f"{path}: deleted meanwhile, by its run")
            continue
        bad += faults
        print(f"{path}: {'whole' if not faults else 'DAMAGED'}")
    for fault in bad:
        print(f"  {fault}")
    return DAMAGED if bad else OK
