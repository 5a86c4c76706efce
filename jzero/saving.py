"""When a run saves, and what it does when it cannot."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jzero.checkpoint import Checkpoints
from jzero.config import CheckpointConfig
from jzero.terminal import format_bytes
from jzero.zero import Zero

NUM_LAST_TRIES = 5  # to save the last step, a second, two, four apart


class SaveError(OSError):
    """A state could not be saved; what was saved before is intact."""


class Saver:
    """Saves a run every few steps; a save that fails is told of and tried again, or ends the run.

    Args:
      settings: of [checkpoint].
      checkpoints: of this run.
      zero: of the run.
      say: prints a line.
    """

    def __init__(
        self,
        settings: CheckpointConfig,
        checkpoints: Checkpoints,
        zero: Zero,
        say: Callable[[str], None],
    ) -> None:
        self._settings, self._zero, self._say = settings, zero, say
        self._checkpoints = checkpoints
        self._retry_at: int | None = None  # step at which a failed save is tried again
        self._num_failures = 0

    def after(self, step: int, parts: Callable[[], Mapping[str, Any]], info: Any) -> None:
        """Saves where a save is due, and tells of one that failed in the background.

        Args:
          step: steps done.
          parts: makes the trees of the state.
          info: JSON values to keep beside them.

        Raises:
          SaveError: a save failed and the run is not to go on.
        """
        self._attempt(step, self._check)
        if step % self._settings.every == 0 or step == self._retry_at:
            self._attempt(step, lambda: self._save(step, parts(), info))

    def finish(self, step: int, parts: Callable[[], Mapping[str, Any]], info: Any) -> None:
        """Saves the last step, unless that is done, and waits until it is committed.

        Raises:
          SaveError: it could not be saved in several tries.
        """
        num_tries = NUM_LAST_TRIES if self._settings.on_failure == "retry" else 1
        for attempt in range(num_tries):
            try:
                self._commit(step, parts, info)
                return
            except OSError as error:
                if attempt == num_tries - 1:
                    raise SaveError(self._lost(step, error)) from error
                self._say(f"step {step}: saving failed ({error}); trying again")
                time.sleep(2**attempt)

    def close(self) -> None:
        """Ends the threads, and lets go of the directory."""
        try:
            self._checkpoints.close()
        except OSError as error:
            self._say(f"the last save failed: {error}")

    def _commit(self, step: int, parts: Callable[[], Mapping[str, Any]], info: Any) -> None:
        self._checkpoints.wait()
        if step not in self._checkpoints.steps:
            self._save(step, parts(), info)
            self._checkpoints.wait()

    def _check(self) -> None:
        self._checkpoints.check()
        if self._retry_at is None and not self._checkpoints.is_busy:
            self._num_failures = 0

    def _save(self, step: int, parts: Mapping[str, Any], info: Any) -> None:
        num_bytes = self._checkpoints.save(step, self._zero, info=info, **parts)
        self._retry_at = None
        place = self._checkpoints.directory / str(step)
        self._say(f"step {step} | saving {format_bytes(num_bytes)} to {_short(place)}")

    def _attempt(self, step: int, action: Callable[[], None]) -> None:
        try:
            action()
        except OSError as error:
            if self._settings.on_failure == "stop":
                raise SaveError(self._lost(step, error)) from error
            wait = min(2**self._num_failures, self._settings.every)
            self._num_failures, self._retry_at = self._num_failures + 1, step + wait
            self._say(
                f"step {step}: SAVING FAILED ({error}); what was saved before is intact, the run "
                f"goes on, and the next try is after step {self._retry_at}"
            )

    def _lost(self, step: int, error: OSError) -> str:
        return (
            f"step {step}: saving failed ({error}); what was saved before is intact in "
            f"{self._checkpoints.directory}. Make room or give write permission there, and run the "
            "same command again to go on from it."
        )


def _short(path: Path) -> str:
    """Relative to the current directory, where it is below that."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)
