"""Signals that end a run: heard between steps, so that it can save first."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

WISHES = {signal.SIGTERM: "SIGTERM", signal.SIGINT: "SIGINT"}


class Stopper:
    """Notes SIGTERM and the first SIGINT instead of dying of them; a second SIGINT stops at once.

    A context manager; it listens in the main thread alone, where Python lets it.
    """

    def __init__(self) -> None:
        self.wish: str | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Stopper:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._hear) for number in WISHES}
        return self

    def __exit__(self, *exception: Any) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        name = WISHES[signal.Signals(number)]
        if name == "SIGINT" and self.wish is not None:
            raise KeyboardInterrupt
        self.wish = self.wish or name
