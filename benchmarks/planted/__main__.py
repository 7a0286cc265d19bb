"""How often a cause that was planted in a model is named first, and how often something false is named.

    python -m benchmarks.planted [CAUSE ...] [--seeds 20] [--images 450 1800] [--first-seed 0]

Every model is an oracle of drawn bars, the class of which is their direction: without a fault it makes no errors, so
that whatever is named without a cause is false. A fault depends only on the pixels, and changing them can undo
it. Every seed draws other images. A name is right, wider than the cause (neither right nor false) or false, as written
in causes.py; naming.py says what is named, and what is first.

Thresholds and rules are looked at with seeds from 1000 on, and reported with seeds from 0 on.
"""

import argparse
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from benchmarks.planted.causes import CAUSES, images_for, planted_model
from benchmarks.planted.naming import Naming, name_causes


@dataclass(frozen=True)
class Tally:
    """One cause at one number of images; namings: one for each seed; seconds: of processor time, of all seeds."""

    name: str
    images: int
    namings: tuple[Naming, ...]
    seconds: float

    @property
    def first(self) -> int:
        """The seeds in which a right answer is named first."""
        right = CAUSES[self.name].names
        return sum(naming.names[:1] != () and naming.names[0] in right for naming in self.namings)

    @property
    def named(self) -> int:
        """The seeds in which a right answer is named at all."""
        right = CAUSES[self.name].names
        return sum(any(name in right for name in naming.names) for naming in self.namings)

    @property
    def false_names(self) -> Counter[str]:
        """What is named falsely, with the number of seeds."""
        cause = CAUSES[self.name]
        allowed = {*cause.names, *cause.wider}
        return Counter(name for naming in self.namings for name in naming.names if name not in allowed)

    @property
    def false(self) -> int:
        """The seeds in which something false is named."""
        cause = CAUSES[self.name]
        allowed = {*cause.names, *cause.wider}
        return sum(any(name not in allowed for name in naming.names) for naming in self.namings)

    @property
    def row(self) -> tuple[str, ...]:
        """The cells of the table."""
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


COLUMNS = ("cause", "images", "errors", "named first", "named", "something false named", "false names, seeds")


def tally(name: str, images: int, seeds: Sequence[int]) -> Tally:
    """Measure one cause at one number of images."""
    start = time.process_time()
    model = planted_model(name)
    namings = [name_causes(model, images_for(name, seed, images)) for seed in seeds]
    return Tally(name, images, tuple(namings), time.process_time() - start)


def summary_of(tallies: Sequence[Tally]) -> list[str]:
    """Return for each number of images how often causes are named first, and anything is named of the controls."""
    lines = []
    for images in sorted({each.images for each in tallies}):
        same = [each for each in tallies if each.images == images]
        planted = [each for each in same if not CAUSES[each.name].is_control]
        controls = [each for each in same if CAUSES[each.name].is_control]
        runs = sum(len(each.namings) for each in planted)
        control_runs = sum(len(each.namings) for each in controls)
        lines.append(
            f"n = {images}: the cause named first in {sum(each.first for each in planted)} of {runs} runs, something "
            f"false in {sum(each.false for each in planted)} of them; anything named in "
            f"{sum(each.false for each in controls)} of {control_runs} runs of controls."
        )
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a row for each cause and number of images. Return 2 for an unknown cause."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planted", description=__doc__.splitlines()[0])
    parser.add_argument("causes", nargs="*", metavar="CAUSE", help=f"of: {', '.join(CAUSES)} (default: all)")
    parser.add_argument("--seeds", type=int, default=20, help="for each cause and number of images (default: 20)")
    parser.add_argument("--images", type=int, nargs="+", default=[450, 1800], help="(default: 450 1800)")
    parser.add_argument("--first-seed", type=int, default=0, help="(default: 0)")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.causes if name not in CAUSES]
    if unknown:
        print(f"expected one of {', '.join(CAUSES)}, found {unknown[0]!r}", file=sys.stderr)
        return 2
    torch.set_num_threads(1)
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}", flush=True)
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    tallies = []
    for images in options.images:
        for name in options.causes or CAUSES:
            tallies.append(tally(name, images, seeds))
            print(f"| {' | '.join(tallies[-1].row)} |", flush=True)
    print()
    for line in summary_of(tallies):
        print(line)
    print(f"Processor time: {sum(each.seconds for each in tallies) / 60:.1f} minutes, one thread.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
