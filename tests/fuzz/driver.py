"""Many command lines in one process: JSON lines in (words, folder, patience), JSON lines out (code, streams, seconds).

A process of its own, as tests are run with checks of shapes and with warnings as errors, and a user's are not.
"""

import contextlib
import io
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Iterator
from types import FrameType

_MEMORY = 16 << 30  # bytes of addresses; torch alone takes about a third


class HangsError(BaseException):
    """A run took longer than it may; no `except Exception` of the tool's catches it."""


def main() -> None:
    """Serve until the input ends."""
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8", errors="surrogateescape")
    os.dup2(2, 1)  # what writes past Python's streams must not mix with the answers
    for line in sys.stdin:
        asked = json.loads(line)
        os.chdir(asked["folder"])
        answers.write(json.dumps(run(asked["words"], asked["patience"])) + "\n")
        answers.flush()


def run(words: list[str], patience: float) -> dict[str, object]:
    """One command line; its code is None where it hung."""
    from vitlens.cli import main as cli

    out, err, code, start = io.StringIO(), io.StringIO(), None, time.monotonic()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            with _alarm(patience):
                code = cli.run(words)
        except HangsError:
            pass
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"code": code, "out": out.getvalue(), "err": err.getvalue(), "seconds": time.monotonic() - start, "mb": peak}


@contextlib.contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    def ring(_number: int, _frame: FrameType | None) -> None:
        raise HangsError

    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds, 5)  # again, where something swallowed the first
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


if __name__ == "__main__":
    main()
