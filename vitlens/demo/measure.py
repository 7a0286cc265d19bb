"""Serves the page of `vitlens demo` until it is stopped."""

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from vitlens.demo.options import DemoOptions
from vitlens.demo.server import serving


def measure(options: DemoOptions) -> None:
    """Serve the page until Ctrl-C; its address is printed on stdout.

    Raises ModelError without the extra demo, InputError for a port that is taken, UnsupportedError for a model without
    a classifier.
    """
    with suppress(KeyboardInterrupt), _ended_by_signal(), serving(options) as address:
        print(address, flush=True)  # noqa: T201
        print("Ctrl-C ends it", file=sys.stderr)  # noqa: T201
        threading.Event().wait()


@contextmanager
def _ended_by_signal() -> Iterator[None]:
    """Inside, SIGTERM ends the page as Ctrl-C does, so that its files are deleted."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
