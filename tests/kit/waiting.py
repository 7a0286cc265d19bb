"""Wait for a sign of another process, never for a time, as machines may be busy."""

import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import Any

# seconds after which a process has hung: no run of a test takes a tenth of it on a quiet machine
HANGS = 900.0


def interruptible(command: Sequence[str], **options: Any) -> "subprocess.Popen[str]":
    """Start a process that Ctrl-C interrupts, also for tests in the background of a shell.

    There the signal is ignored, which is inherited, and Python then leaves it ignored.
    """
    return subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        **options,
    )


def wait_until(sign: Callable[[], bool], child: "subprocess.Popen[str]") -> None:
    """Wait for the sign; raise an AssertionError if the process ends without it or hangs."""
    end = time.monotonic() + HANGS
    while not sign():
        assert child.poll() is None, f"ended with {child.returncode} before the sign"
        assert time.monotonic() < end, "hangs"
        time.sleep(0.05)


def interrupt(
    child: "subprocess.Popen[str]", sign: Callable[[], bool], *, by: signal.Signals = signal.SIGINT
) -> str:
    """Send Ctrl-C, or another signal, once the sign is there.

    Returns stderr from then on until the process ends.
    """
    try:
        wait_until(sign, child)
        child.send_signal(by)
        return child.communicate(timeout=HANGS)[1]
    finally:
        child.kill()
