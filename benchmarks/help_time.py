"""The time of `vitlens --help` over that of the `--help` of a bare Typer program: the ratio must be
at most 1.5.

    python benchmarks/help_time.py

Both run in fresh interpreters, alternating, ten times each after one warm-up; the medians are
compared.
"""

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPEATS = 10
LIMIT = 1.5
BARE = """import typer
app = typer.Typer()
@app.command()
def one(name: str = "x") -> None:
    "One command."
@app.command()
def two(name: str = "y") -> None:
    "Another."
app()
"""


def seconds(command: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "bare.py"
        program.write_text(BARE)
        bare = [sys.executable, str(program), "--help"]
        ours = [sys.executable, "-m", "vitlens", "--help"]
        seconds(bare), seconds(ours)
        pairs = [(seconds(bare), seconds(ours)) for _ in range(REPEATS)]
    bare_time, our_time = (statistics.median(column) for column in zip(*pairs))
    ratio = our_time / bare_time
    print(
        f"bare Typer {bare_time:.3f} s, vitlens {our_time:.3f} s, ratio {ratio:.2f} (at most "
        f"{LIMIT}), n = {REPEATS}"
    )
    return int(ratio > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
