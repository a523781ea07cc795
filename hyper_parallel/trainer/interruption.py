"""A request to stop: SIGTERM or SIGINT, or a file in which the launcher of all ranks has left the signal that it got."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT)
REPEAT_SECONDS = 3.0  # schedulers signal every process of a job, and launchers hand the signal on: one request, twice


class Interruption:
    """``requested``: the number of the signal that asks this process to stop after its step, 0 while none does."""

    def __init__(self, stop_file: Path | None = None) -> None:
        self._stop_file, self._signal, self._since = stop_file, 0, 0.0

    @property
    def requested(self) -> int:
        if not self._signal and self._stop_file is not None and self._stop_file.exists():
            self._signal = int(self._stop_file.read_text() or signal.SIGTERM)
        return self._signal

    @contextlib.contextmanager
    def signals(self) -> Iterator[Interruption]:
        """Take signals as requests; one that comes seconds after the first raises KeyboardInterrupt.

        Nothing changes where a launcher takes them for all ranks, or outside the main thread, where Python allows no handlers.
        """
        if self._stop_file is not None or threading.current_thread() is not threading.main_thread():
            yield self
            return
        before = {number: signal.signal(number, self._remember) for number in SIGNALS}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        if not self._signal:
            self._signal, self._since = number, time.monotonic()
        elif time.monotonic() - self._since > REPEAT_SECONDS:
            raise KeyboardInterrupt


@contextlib.contextmanager
def blocked() -> Iterator[None]:
    """Block the signals in this thread, and in the threads and processes that it starts meanwhile."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def handed_on(stop_file: Path) -> Iterator[None]:
    """In the launcher, under ``blocked``: write the first signal to ``stop_file`` for the ranks; one that comes seconds later
    ends the launcher at once, and with it all ranks."""
    stop_file.unlink(missing_ok=True)
    done = threading.Event()

    def wait() -> None:
        since = None
        while not done.is_set():
            received = signal.sigtimedwait(SIGNALS, 0.2)
            if received is None:
                continue
            if since is None:
                since = time.monotonic()
                partial = stop_file.with_suffix(".partial")
                partial.write_text(str(received.si_signo))
                partial.rename(stop_file)
            elif time.monotonic() - since > REPEAT_SECONDS:
                os._exit(128 + received.si_signo)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
