"""Checkpoints by step in one directory: committed whole or not at all, written in the background.

Orbax commits a step by renaming its finished folder, and deletes old ones afterwards. The arrays
are written by `jzero.arrays`, since Orbax's own handlers store the padding of uneven shards.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import json
import operator
import shutil
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from flax import nnx
from orbax.checkpoint.checkpoint_managers import LatestN

from jzero.arrays import Pieces, StoredArrays, write_arrays
from jzero.manifest import Manifest, damaged_metadata, read_manifest, write_manifest
from jzero.ownership import Owner
from jzero.restore import (
    LOSS_SCALE,
    OPT_STATE,
    PARAMS,
    as_arrays,
    belongs,
    fit,
    places_of,
    restore_state,
    state_pieces,
    stored_names,
)
from jzero.trees import named_leaves
from jzero.zero import AtRest, Zero

OTHERS = "others"  # part of a module's Variables that are no parameters
MARK_OF_STEP = "state/manifest.json"
IN_RUN = "checkpoints"  # folder of a run's steps, where it is not named
DELETED = "deleted"  # folder of steps that are not kept, until they are gone
ITEM = "state"  # folder of the arrays within that of a step


class Checkpoints:
    """Writes steps into a directory and keeps the latest few.

    Args:
      directory: made if it is missing.
      keep: how many steps to keep, at least 1; older ones are deleted once a new one is committed.
      is_async: whether `save` returns when the arrays are copied to the host, and writes them in
        the background.

    Raises:
      ValueError: `keep` below 1, or a directory that cannot be written.
    """

    def __init__(self, directory: str | Path, *, keep: int = 2, is_async: bool = True) -> None:
        if keep < 1:
            raise ValueError(f"keep is {keep}; keep at least 1 checkpoint.")
        self.directory = Path(directory).absolute()
        if self.directory.exists() and not self.directory.is_dir():
            raise ValueError(f"{self.directory} is a file; name a directory for checkpoints.")
        self.is_async, self._keep = is_async, keep
        self._writer: _Writer | None = None

    def take(self) -> None:
        """Takes the directory for writing now, and not at the first save.

        Raises:
          ValueError: another run that is alive holds it, or it cannot be written.
        """
        if self._writer is None:
            self._writer = _Writer(self.directory, self._keep)
            # Before Python ends the threads that write: else the last save would be lost.
            threading._register_atexit(self.close)  # type: ignore[attr-defined]

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()

    @property
    def steps(self) -> list[int]:
        """The steps that are committed, in order."""
        return steps_in(self.directory)

    @property
    def latest_step(self) -> int | None:
        """The last step that is committed; None where there is none yet."""
        return (self.steps or [None])[-1]

    def info(self, step: int | None = None) -> Mapping[str, Any]:
        """The `info` that a step was saved with; of the latest where none is named.

        Raises:
          ValueError: there is no such step.
        """
        return self._step(step).manifest.info

    def _step(self, step: int | None) -> Step:
        return open_step(self.directory if step is None else self.directory / str(step))

    def save(
        self, step: int, zero: Zero, *, info: Mapping[str, Any] | None = None, **parts: Any
    ) -> int:
        """Saves a state by parts; every process calls it.

        The arrays are copied to the host before it returns, so a later step may donate them. It
        waits until the save before is committed.

        Args:
          step: steps done, >= 0.
          zero: that laid out `params` and `opt_state`.
          info: JSON values to keep beside the arrays.
          **parts: trees of arrays or numbers: `params` (or a whole `nnx.Module`), `opt_state`, and
            any others, which every device holds whole.

        Returns:
          Bytes of the logical arrays.

        Raises:
          OSError: this one or the one before could not be written. What was committed is intact,
            and the same step may be saved again.
          ValueError: the step is there already, a part is not one that `zero` laid out, or another
            run that is alive writes to the directory.
        """
        _check_names(parts)
        trees = as_arrays(zero, _without_modules(parts))
        arrays = state_pieces(trees, places_of(zero, trees))
        leaves = {name: x.leaf for name, x in arrays.items()}
        manifest = Manifest(_index(step), leaves, _json(info or {}))
        self.write(manifest, arrays)
        return manifest.num_bytes

    def restore(self, zero: Zero, *, step: int | None = None, **parts: Any) -> dict[str, Any]:
        """Reads a state back, on any mesh, at any stage; each device receives only its shards.

        Args:
          zero: of the run that goes on.
          step: which one; the latest where left out.
          **parts: those that are wanted, arrays or shapes, such as
            `params=jax.eval_shape(init_fn, key)` and `opt_state=jax.eval_shape(tx.init, params)`.

        Returns:
          The parts, at rest.

        Raises:
          OSError: the step that is being written could not be.
          ValueError: there is no such step, or its arrays are others: all that are missing,
            unexpected or of another shape are named.
        """
        self.wait()
        found = self._step(step)
        trees = _without_modules(parts)
        places = places_of(zero, trees)
        arrays = found.arrays
        asked = {n: x for n, x in arrays.leaves.items() if belongs(n, trees)}
        try:
            kept = _kept_scale(trees, places, asked)
            names = fit(places, asked, fresh=kept).names
        except ValueError as error:
            raise ValueError(f"{found.path} is of another state: {error}") from error
        return _with_modules(parts, restore_state(trees, places, arrays, names))

    def write(self, manifest: Manifest, arrays: Mapping[str, Pieces]) -> None:
        """Saves arrays that are on the host, or are read while they are written; as `save`.

        Raises:
          OSError: this one or the one before could not be written. What was committed is intact,
            and the same step may be saved again.
          ValueError: the step is there already, or the directory is not to be had.
        """
        self.wait()
        if manifest.step <= (self.latest_step if self.latest_step is not None else -1):
            raise ValueError(
                f"step {manifest.step} is not after step {self.latest_step}, which is in "
                f"{self.directory} already and is the one to go on from; restore that one, remove "
                "the later steps' folders, or name another directory."
            )
        self.take()
        assert self._writer is not None
        self._writer.start(manifest, arrays)
        if not self.is_async:
            self.wait()

    def check(self) -> None:
        """Raises what the background write of the last step failed with, once; else nothing."""
        if self._writer is not None and (self._writer.has_failed or not self.is_busy):
            self.wait()

    @property
    def is_busy(self) -> bool:
        """Whether a step is still being written."""
        return self._writer is not None and self._writer.is_busy

    def wait(self) -> None:
        """Waits until the last step is committed.

        Raises:
          OSError: it could not be written.
        """
        if self._writer is not None:
            self._writer.wait()

    def close(self) -> None:
        """Waits, ends the threads, and lets go of the directory; the end of the process does, too.

        Raises:
          OSError: the last step could not be written.
        """
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()


class _Writer:
    """The directory as one that is written: its owner, and Orbax."""

    def __init__(self, directory: Path, keep: int) -> None:
        self._directory = directory
        self._owner = Owner(directory)
        self._handler = _Handler()
        options = ocp.CheckpointManagerOptions(
            preservation_policy=LatestN(keep),
            cleanup_tmp_directories=True,  # of a process that was killed while it wrote
            todelete_subdir=DELETED,  # by a rename: a step is there whole, or not at all
            async_options=ocp.options.AsyncOptions(create_directories_asynchronously=False),
        )
        self._manager = ocp.CheckpointManager(
            directory, item_handlers={ITEM: self._handler}, options=options
        )
        self._handler.purge(directory / DELETED)

    def start(self, manifest: Manifest, arrays: Mapping[str, Pieces]) -> None:
        """Starts to write a step, in the background."""
        self._owner.check()
        args = ocp.args.Composite(**{ITEM: _Write(manifest, arrays)})
        try:
            self._manager.save(manifest.step, args=args, force=True)
        except ValueError as error:  # how Orbax tells of a directory that it cannot make
            raise OSError(str(error)) from error

    @property
    def has_failed(self) -> bool:
        """Whether the last write has failed and nobody was told."""
        return self._handler.has_failed()

    @property
    def is_busy(self) -> bool:
        """Whether a step is still being written."""
        return self._manager.is_saving_in_progress()

    def wait(self) -> None:
        """Waits for the last step; cleans up after one that failed."""
        self._handler.forget()
        try:
            self._manager.wait_until_finished()
        except (OSError, ValueError) as error:
            self._manager.reload()  # else it goes on counting what it did not write
            if jax.process_index() == 0:
                for half in self._directory.glob("*.orbax-checkpoint-tmp*"):
                    shutil.rmtree(half, ignore_errors=True)  # room for the next try
            raise OSError(f"{error}") from error
        self._handler.purge(self._directory / DELETED)

    def close(self) -> None:
        """Waits, ends the threads, and lets go of the directory."""
        try:
            self.wait()
        finally:
            self._manager.close()
            self._handler.close()
            self._owner.close()


def _kept_scale(
    trees: Mapping[str, Any], places: Mapping[str, AtRest], found: Mapping[str, Any]
) -> tuple[str, ...]:
    """The loss scale where the precision changes: it starts anew, as the given state has it."""
    scale = tuple(name for name in places if name.startswith(LOSS_SCALE))
    changes = [
        (found[name].dtype, x.at_rest.dtype)
        for name, x in places.items()
        if name.startswith(PARAMS) and name in found and found[name].dtype != x.at_rest.dtype
    ]
    if not scale or not changes:
        return ()
    names = stored_names(OPT_STATE, trees[OPT_STATE])
    leaves = named_leaves(trees[OPT_STATE])[0]
    if not all(isinstance(leaves[n], jax.Array) for n, stored in names.items() if stored in scale):
        raise ValueError(
            f"parameters are {changes[0][0]} there and {changes[0][1]} here, so the loss scale "
            "starts anew, and it is not known from shapes; pass opt_state=tx.init(params), whose "
            "loss scale is kept."
        )
    return scale


def _check_names(parts: Mapping[str, Any]) -> None:
    taken = {"master", "optimizer", "loss_scale"} & set(parts)
    if isinstance(parts.get("params"), nnx.Module):
        taken |= {OTHERS} & set(parts)
    if taken:
        raise ValueError(
            f"a part cannot be called {sorted(taken)[0]}: checkpoints call a part of the optimizer "
            "state or of the module so; use another name."
        )


def _index(step: Any) -> int:
    try:
        index = operator.index(step)
    except TypeError:
        index = int(step) if getattr(step, "shape", None) == () else -1
    if index < 0:
        raise ValueError(f"step is {step!r}; give a number of steps, 0 or more.")
    return index


def _json(info: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return json.loads(json.dumps(dict(info)))
    except TypeError as error:
        raise ValueError(f"info is no JSON ({error}); give Python's own numbers.") from error


def _without_modules(parts: Mapping[str, Any]) -> dict[str, Any]:
    """A module as `params` becomes its parameters and its other Variables."""
    params = parts.get("params")
    if not isinstance(params, nnx.Module):
        return dict(parts)
    _, trained, others = nnx.split(params, nnx.Param, ...)
    return {**parts, "params": trained, OTHERS: others}


def _with_modules(parts: Mapping[str, Any], restored: dict[str, Any]) -> dict[str, Any]:
    params = parts.get("params")
    if not isinstance(params, nnx.Module):
        return restored
    graphdef = nnx.split(params, nnx.Param, ...)[0]
    module = nnx.merge(graphdef, restored["params"], restored.pop(OTHERS))
    return {**restored, "params": module}


@dataclasses.dataclass(frozen=True)
class Step:
    """A committed checkpoint, as a `Source` of all its arrays in `arrays`."""

    path: Path
    manifest: Manifest

    @property
    def arrays(self) -> StoredArrays:
        """Its arrays, of which nothing is read yet."""
        return StoredArrays(self.path / ITEM, self.manifest.leaves)


def steps_in(directory: str | Path) -> list[int]:
    """The steps committed in a directory, in order; none where there is no such directory."""
    if not Path(directory).is_dir():
        return []
    found = (path for path in Path(directory).iterdir() if path.name.isdecimal())
    return sorted(int(path.name) for path in found if (path / ITEM).is_dir())


def open_step(path: str | Path) -> Step:
    """Opens one step's folder, or the latest step of a directory of them or of a run.

    Raises:
      ValueError: there is no checkpoint; or its manifest is damaged.
    """
    path = Path(path)
    if not (path / ITEM).is_dir():
        if not steps_in(path) and steps_in(path / IN_RUN):
            path = path / IN_RUN
        steps = steps_in(path)
        if not steps:
            what = "holds no checkpoint" if path.exists() else "does not exist"
            raise ValueError(
                f"{path} {what}; name the folder of a run, of its checkpoints, or of one step."
            )
        path = path / str(steps[-1])
    return Step(path, read_manifest(path / ITEM))


def damaged(step: Step) -> list[str]:
    """Reads every byte of every array of a step and compares checksums; one line for each fault."""
    bad = damaged_metadata(step.path / ITEM, step.manifest)
    named = {line.split(":")[0] for line in bad}
    for name in step.manifest.leaves:
        if name not in named:
            bad += step.arrays.damaged(name)
    return bad


@dataclasses.dataclass
class _Write(ocp.args.CheckpointArgs):
    manifest: Manifest
    arrays: Mapping[str, Pieces]


@dataclasses.dataclass
class _Read(ocp.args.CheckpointArgs):
    pass


class _Handler(ocp.AsyncCheckpointHandler):
    """Writes arrays and manifest in a thread; Orbax commits and deletes."""

    def __init__(self) -> None:
        self._pool = concurrent.futures.ThreadPoolExecutor(1, "jzero-checkpoint")
        self._last: concurrent.futures.Future[None] | None = None

    async def async_save(self, directory: Any, args: _Write) -> Any:  # type: ignore[override]
        """Starts a write; the arrays are on the host already."""
        self._last = self._pool.submit(_write, Path(directory), args)
        return [self._last]

    def save(self, directory: Any, args: _Write) -> None:  # type: ignore[override]
        """Writes, and waits."""
        for future in asyncio.run(self.async_save(directory, args)):
            future.result()

    def restore(self, directory: Any, args: Any = None) -> Manifest:  # type: ignore[override]
        """The manifest alone; arrays are read piece by piece."""
        return read_manifest(Path(directory))

    def has_failed(self) -> bool:
        """Whether the last write has ended with an error that nobody was told of."""
        last = self._last
        return last is not None and last.done() and last.exception() is not None

    def purge(self, folder: Path) -> None:
        """Starts to delete what old steps were moved to."""
        if jax.process_index() == 0 and folder.exists():
            self._pool.submit(shutil.rmtree, folder, ignore_errors=True)

    def forget(self) -> None:
        """Takes the last write as told."""
        self._last = None

    def close(self) -> None:
        """Ends the thread."""
        self._pool.shutdown()


ocp.args.register_with_handler(_Handler, for_save=True)(_Write)
ocp.args.register_with_handler(_Handler, for_restore=True)(_Read)


def _write(directory: Path, args: _Write) -> None:
    write_arrays(directory, args.arrays)
    if jax.process_index() == 0:
        write_manifest(directory, args.manifest)
