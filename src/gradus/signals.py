"""Signals of this process: who handles them, and when they take effect."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)  # ask for a stop; Slurm sends the last before a time limit


@contextlib.contextmanager
def handling(numbers: Iterable[int], handler: Callable[[int, Any], Any] | signal.Handlers) -> Iterator[None]:
    """While this lasts, these signals call handler(number, frame), where this is the main thread."""
    main = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, handler) for number in numbers if main}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C takes effect at the end of this, and never in a process that is started in it: around a trace, where it
    may come in a destructor or a hook in which PyTorch drops it or aborts, and around the start of workers."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    with handling([signal.SIGINT], lambda number, frame: came.append(number)):
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # what is started here inherits it
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    if came:
        raise KeyboardInterrupt


def ended_by_sigterm() -> contextlib.AbstractContextManager[None]:
    """SIGTERM ends this process by way of every `finally`, so that what was started here is ended too."""
    return handling([signal.SIGTERM], lambda *_: sys.exit(128 + signal.SIGTERM))
