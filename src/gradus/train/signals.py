"""Signals that ask a run to stop: it saves itself first."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)  # ask for a stop; Slurm sends the last before a time limit


class Stopped(Exception):
    """The run was asked to stop (Ctrl-C, SIGTERM, SIGUSR1) and has saved itself."""

    def __init__(self, signal_number: int, checkpoint: Path):
        self.signal_number, self.checkpoint = signal_number, checkpoint


class Cut(Exception):
    """A signal came where there is nothing to lose."""


class StopSignals:
    """Notes the signals that come while it is entered; a second Ctrl-C stops at once. Of several processes each has its own, and all stop
    at the signal that they agreed on."""

    def __init__(self, single_process: bool):
        self.single_process = single_process
        self.asked: list[int] = []  # what came to this process
        self.agreed: int | None = None  # what all processes know of
        self._cuts = False
        self._before: dict[int, object] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self.asked.clear()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.asked.append(number)
        if self._cuts:
            raise Cut

    @property
    def stop(self) -> int | None:
        """The signal to stop at, if any."""
        if self.asked and self.single_process:
            self.agreed = self.asked[0]
        return self.agreed

    def flags(self) -> list[int]:
        """Which signals came to this process: 0 or 1 for each of SIGNALS."""
        return [int(number in self.asked) for number in SIGNALS]

    def agree(self, flags: Sequence[int]) -> None:
        """flags: how many processes got each of SIGNALS; the same on all of them."""
        came = [int(number) for number, n in zip(SIGNALS, flags) if n]
        self.agreed = self.agreed or (came[0] if came else None)

    @contextlib.contextmanager
    def cutting(self) -> Iterator[None]:
        """Where a signal, also one that came before, raises Cut at once: for one process, which leaves nobody waiting."""
        self._cuts = self.single_process
        try:
            if self._cuts and self.asked:
                raise Cut
            yield
        finally:
            self._cuts = False
