"""Signals that ask a run to stop: it saves itself first."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType

from gradus.signals import STOPS, handling


class Stopped(Exception):
    """The run was asked to stop (Ctrl-C, SIGTERM, SIGUSR1) and has saved itself."""

    def __init__(self, signal_number: int, checkpoint: Path):
        self.signal_number, self.checkpoint = signal_number, checkpoint


class Cut(Exception):
    """A signal came where there is nothing to lose."""


class StopSignals:
    """The signals that came to this process, and the one that all processes stop at."""

    def __init__(self, single_process: bool):
        self.single_process, self.asked, self.agreed, self.cuts = single_process, [], None, False

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """While this lasts signals are noted instead of obeyed; a second Ctrl-C stops at once."""
        try:
            with handling(STOPS, self._note):
                yield
        finally:
            self.asked.clear()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.asked.append(number)
        if self.cuts:
            raise Cut

    @contextlib.contextmanager
    def cutting(self) -> Iterator[None]:
        """While this lasts a signal, also one that came before, raises Cut: in a single process, where nobody waits."""
        self.cuts = self.single_process
        try:
            if self.cuts and self.asked:
                raise Cut
            yield
        finally:
            self.cuts = False

    @property
    def stop(self) -> int | None:
        """The signal to stop at, if any."""
        return self.asked[0] if self.single_process and self.asked else self.agreed

    def flags(self) -> list[int]:
        """Which of STOPS came to this process: 0 or 1 for each."""
        return [int(number in self.asked) for number in STOPS]

    def agree(self, flags: Sequence[int]) -> None:
        """flags: how many processes each of STOPS came to; the same on all of them."""
        self.agreed = self.agreed or next((int(number) for number, n in zip(STOPS, flags) if n), None)
