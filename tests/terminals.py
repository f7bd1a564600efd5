"""Standard output on a pseudo-terminal."""

from __future__ import annotations

import fcntl
import os
import re
import struct
import termios
import threading
import time


class Terminal:
    """Standard output on a pseudo-terminal of so many columns; `text` is all that was written to it."""

    def __init__(self, columns: int):
        master, slave = os.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        self.out, self.master, self.read = os.fdopen(slave, "w"), master, []
        self.thread = threading.Thread(target=self._drain, daemon=True)
        self.thread.start()

    def _drain(self) -> None:
        try:
            while piece := os.read(self.master, 4096):
                self.read.append(piece)
        except OSError:  # the other end is closed
            pass

    def wait_for(self, pattern: str) -> None:
        end = time.monotonic() + 30
        while not re.search(pattern, b"".join(self.read).decode(errors="replace")) and time.monotonic() < end:
            time.sleep(0.01)

    def close(self) -> str:
        self.out.close()
        self.thread.join()
        os.close(self.master)
        return b"".join(self.read).decode()
