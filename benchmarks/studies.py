"""Make the committed studies of one factor: `python -m benchmarks.studies [KIND ...] [--jobs N]`.

Each KIND of `vitlens study --kind` that trains small models from scratch is trained with three
seeds (`SEEDS` names other numbers) and copied to reports/KIND-digits. A study that was stopped goes
on where it was: run the command again. VITLENS_REPORTS names the working folder, where the weights
stay (default: one in the system's temporary folder).

--jobs: studies that run at the same time (default 1). On two cores a study has one core to itself
with OMP_NUM_THREADS=1 and --jobs 2. On a GPU all of them fit at once.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from benchmarks.reports import ROOT, copy_light

# the shortest first: `size` trains a model of 14 M parameters
KINDS: Final = (
    "pooling",
    "positions",
    "registers",
    "recipe",
    "distillation",
    "data",
    "swin",
    "window",
    "patch-size",
    "architecture",
    "size",
)

# three seeds leave a gain of 29 points undecided: students of few images differ most between seeds
SEEDS: Final = {"distillation": 5}
KEPT: Final = (".md", ".json", ".png", ".csv")  # the page with embedded figures would double them


def make(kind: str, work: Path) -> float:
    """Train a study, or the rest of it, and copy its report; return the seconds that it took."""
    name = f"{kind}-digits"
    place = Path("reports") / name
    if (work / place / "config.json").is_file():
        options = ["--resume", str(place)]
    else:
        options = ["--kind", kind, "--out", str(place)]
        if kind in SEEDS:
            options += ["--seeds", str(SEEDS[kind])]
    began = time.monotonic()
    subprocess.run(
        [sys.executable, "-m", "vitlens", "study", *options, "--quiet"], cwd=work, check=True
    )
    copy_light(work / place, ROOT / "reports" / name, kept=KEPT)
    return time.monotonic() - began


def main() -> None:
    """Make the studies named on the command line, or all of them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=", ".join(KINDS))
    parser.add_argument("--jobs", type=int, default=1)
    arguments = parser.parse_args()
    default = Path(tempfile.gettempdir()) / "vitlens-reports"
    work = Path(os.environ.get("VITLENS_REPORTS", default))
    (work / "reports").mkdir(parents=True, exist_ok=True)
    kinds = arguments.kinds or KINDS
    with ThreadPoolExecutor(arguments.jobs) as pool:
        for kind, seconds in zip(kinds, pool.map(lambda kind: make(kind, work), kinds)):
            print(f"{kind}: {seconds:.0f} s", flush=True)


if __name__ == "__main__":
    main()
