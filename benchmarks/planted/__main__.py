"""How often a cause that was planted in a model is named first, and how often something false is
named.

    python -m benchmarks.planted [CAUSE ...] [--seeds 20] [--images 450 1800] [--first-seed 0]
        [--results FILE]

Every model is an oracle of drawn bars, the class of which is their direction: without a fault it
makes no errors, so that whatever is named without a cause is false. A fault depends only on the
pixels, and changing them can undo it. Every seed draws other images. A name is right, wider than
the cause (neither right nor false) or false, as written in causes.py; naming.py says what is named,
and what is first.

With --results, each run is added to a file as it ends, and runs of the file are not repeated: an
interrupted command goes on where it stopped. --seeds 0 prints the table of the file.

Thresholds and rules are looked at with seeds from 1000 on, and reported with seeds from 0 on.
"""

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

import torch

from benchmarks.planted.causes import CAUSES, images_for, planted_model
from benchmarks.planted.naming import Naming, name_causes


@dataclass(frozen=True)
class Run:
    """One cause at one number of images with one seed; seconds: of processor time."""

    name: str
    images: int
    seed: int
    naming: Naming
    seconds: float

    @property
    def key(self) -> tuple[str, int, int]:
        """Return what no two runs share."""
        return self.name, self.images, self.seed


@dataclass(frozen=True)
class Tally:
    """One cause at one number of images; namings: one for each seed; seconds: of processor time, of
    all seeds.
    """

    name: str
    images: int
    namings: tuple[Naming, ...]
    seconds: float

    @property
    def first(self) -> int:
        """Return the seeds in which a right answer is named first."""
        right = CAUSES[self.name].names
        return sum(naming.names[:1] != () and naming.names[0] in right for naming in self.namings)

    @property
    def named(self) -> int:
        """Return the seeds in which a right answer is named at all."""
        right = CAUSES[self.name].names
        return sum(any(name in right for name in naming.names) for naming in self.namings)

    @property
    def false_names(self) -> Counter[str]:
        """Return what is named falsely, with the number of seeds."""
        cause = CAUSES[self.name]
        allowed = {*cause.names, *cause.wider}
        return Counter(
            name for naming in self.namings for name in naming.names if name not in allowed
        )

    @property
    def false(self) -> int:
        """Return the seeds in which something false is named."""
        cause = CAUSES[self.name]
        allowed = {*cause.names, *cause.wider}
        return sum(any(name not in allowed for name in naming.names) for naming in self.namings)

    @property
    def row(self) -> tuple[str, ...]:
        """Return the cells of the table."""
        seeds = len(self.namings)
        is_control = CAUSES[self.name].is_control
        errors = sum(naming.errors for naming in self.namings) / seeds
        listed = ", ".join(f"{name} {count}" for name, count in self.false_names.most_common())
        return (
            self.name,
            str(self.images),
            f"{errors:.0f}",
            "–" if is_control else f"{self.first} of {seeds}",
            "–" if is_control else f"{self.named} of {seeds}",
            f"{self.false} of {seeds}",
            listed or "–",
        )


COLUMNS = (
    "cause",
    "images",
    "errors",
    "named first",
    "named",
    "something false named",
    "false names, seeds",
)


def measure(name: str, images: int, seed: int) -> Run:
    """Measure one cause at one number of images with one seed."""
    start = time.process_time()
    naming = name_causes(planted_model(name), images_for(name, seed, images))
    return Run(name, images, seed, naming, time.process_time() - start)


def tally(runs: Sequence[Run]) -> Tally:
    """Return the count of runs of one cause at one number of images."""
    namings = tuple(run.naming for run in runs)
    return Tally(runs[0].name, runs[0].images, namings, sum(run.seconds for run in runs))


def read_runs(file: Path | None) -> list[Run]:
    """Return the runs of a file, none where there is none."""
    if file is None or not file.exists():
        return []
    runs = list[Run]()
    for line in file.read_text().splitlines():
        fields = json.loads(line)
        naming = Naming(**fields.pop("naming"))
        runs.append(Run(**fields, naming=naming))
    return runs


def summary_of(tallies: Sequence[Tally]) -> list[str]:
    """Return for each number of images how often causes are named first, and anything is named of
    the controls.
    """
    lines = []
    for images in sorted({each.images for each in tallies}):
        same = [each for each in tallies if each.images == images]
        planted = [each for each in same if not CAUSES[each.name].is_control]
        controls = [each for each in same if CAUSES[each.name].is_control]
        runs = sum(len(each.namings) for each in planted)
        control_runs = sum(len(each.namings) for each in controls)
        lines.append(
            f"n = {images}: the cause named first in {sum(each.first for each in planted)} of "
            f"{runs} runs, something false in {sum(each.false for each in planted)} of them; "
            f"anything named in {sum(each.false for each in controls)} of {control_runs} runs of "
            "controls."
        )
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a row for each cause and number of images. Return 2 for an unknown cause."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.planted", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "causes", nargs="*", metavar="CAUSE", help=f"of: {', '.join(CAUSES)} (default: all)"
    )
    parser.add_argument(
        "--seeds", type=int, default=20, help="for each cause and number of images (default: 20)"
    )
    parser.add_argument(
        "--images", type=int, nargs="+", default=[450, 1800], help="(default: 450 1800)"
    )
    parser.add_argument("--first-seed", type=int, default=0, help="(default: 0)")
    parser.add_argument(
        "--results", type=Path, help="a file of runs, which is continued (default: none)"
    )
    options = parser.parse_args(arguments)
    unknown = [name for name in options.causes if name not in CAUSES]
    if unknown:
        print(f"expected one of {', '.join(CAUSES)}, found {unknown[0]!r}", file=sys.stderr)
        return 2
    torch.set_num_threads(1)
    names = options.causes or list(CAUSES)
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    runs = read_runs(options.results)
    done = {run.key for run in runs}
    for seed, images, name in product(seeds, options.images, names):
        if (name, images, seed) in done:
            continue
        runs.append(measure(name, images, seed))
        if options.results is not None:
            with options.results.open("a") as file:
                file.write(json.dumps(asdict(runs[-1])) + "\n")
    tallies = list[Tally]()
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    for images, name in product(options.images, names):
        same = [run for run in runs if (run.images, run.name) == (images, name)]
        if same:
            tallies.append(tally(same))
            print(f"| {' | '.join(tallies[-1].row)} |")
    print()
    for line in summary_of(tallies):
        print(line)
    print(f"Processor time: {sum(each.seconds for each in tallies) / 60:.1f} minutes, one thread.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
