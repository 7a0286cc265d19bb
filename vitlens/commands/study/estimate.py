"""How long the chapters of a study take: a rough estimate before the first, corrected by those that
are done.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from vitlens.analysis.ablation.bench import units_of
from vitlens.analysis.evaluation.evaluate import predicted_logits
from vitlens.analysis.failures.disturbances import CORRUPTIONS, SEVERITIES
from vitlens.attacks.registry import ATTACKS
from vitlens.attribution.registry import ATTRIBUTIONS
from vitlens.commands.run.chapter_runs import PlannedChapter
from vitlens.data.split import Split
from vitlens.errors import VitlensError
from vitlens.models.model import Model
from vitlens.names import UNIT_KINDS

_TIMED: Final = 4  # images of which a forward pass is timed
_FIXED: Final = 6.0  # seconds of a chapter for loading, figures and its report
_BACKWARD: Final = 3.0  # forward passes that a forward and a backward pass together take
# forward passes that it takes to remove one unit: the layers before it are not repeated
_REMOVAL: Final = 0.6
_CHECKS: Final = 80  # forward passes of an image for the checks of one method's maps
_MAPS: Final = 12  # maps of an image for these checks
_CORRUPTED: Final = len(CORRUPTIONS) * len(SEVERITIES)
_PASSES: Final[
    Mapping[str, float]
] = {  # forward passes of an image, where no option of the chapter decides them
    "evaluate": 1.0,
    "attention": 8.0,
    "rollout": 6.0,
    "stats": 6.0,
    "sae": 60.0,
    "compare": 80.0,
    "features": 4.0,
    "profile": 0.0,
}


@dataclass
class StudyClock:
    """The time that a study takes.

    expected: seconds of each chapter by a rough estimate.
    done: of those that were run, their expected seconds and those that they took.
    """

    expected: Sequence[float]
    done: list[tuple[float, float]] = field(default_factory=list)

    @property
    def left(self) -> float:
        """Return the seconds that the other chapters take, as much longer than expected as those
        that are done.
        """
        rest = sum(self.expected[len(self.done) :])
        before = sum(expected for expected, _ in self.done)
        return rest * sum(taken for _, taken in self.done) / before if before else rest

    def finish(self, seconds: float) -> None:
        """Note that the next chapter has taken so many seconds."""
        self.done.append((self.expected[len(self.done)], seconds))


def clock_of(
    plan: Sequence[PlannedChapter], models: Sequence[Model], splits: Sequence[Split]
) -> StudyClock:
    """Return the clock of planned chapters.

    models, splits: of the study, each model with its images.
    """
    costs = {model.alias: _pass_seconds(model, split) for model, split in zip(models, splits)}
    units = {model.alias: _unit_count(model) for model in models}
    images = min(map(len, splits))
    expected = []
    for chapter in plan:
        if chapter.cached:
            expected.append(0.0)
            continue
        count = min(images, chapter.options.run.limit or images)
        aliases = [chapter.alias] if chapter.alias else list(costs)
        passes = sum(costs[alias] * _passes(chapter, units[alias]) for alias in aliases)
        expected.append(_FIXED + count * passes)
    return StudyClock(expected)


def _passes(chapter: PlannedChapter, units: int) -> float:
    """Return about how many forward passes of an image a chapter takes."""
    options: Any = chapter.options
    if chapter.word == "ablate":
        return _REMOVAL * units * max(1, len(options.replace))
    if chapter.word == "explain":
        entries = [ATTRIBUTIONS[name] for name in options.method]
        maps = sum(entry.forwards + _BACKWARD * entry.backwards for entry in entries)
        return _MAPS * maps + _CHECKS * len(entries)
    if chapter.word == "attack":
        steps = 0.0
        for name in options.attacks:
            for member in ATTACKS[name].parts:
                once = member.passes(restarts=options.restarts) * (
                    _BACKWARD if member.gradients else 1.0
                )
                # an image that is fooled is not attacked again
                steps += once * len(options.epsilons_of(name)) / 2
        return steps + (_CORRUPTED if options.corruptions else 0)
    return _PASSES.get(chapter.word, 1.0)


def _pass_seconds(model: Model, split: Split) -> float:
    """Return the seconds of a forward pass of one image."""
    few = split.pick(torch.arange(min(_TIMED, len(split))))
    predicted_logits(model, few)  # what is made once for a model is made before
    start = time.perf_counter()
    predicted_logits(model, few)
    return (time.perf_counter() - start) / len(few)


def _unit_count(model: Model) -> int:
    """Return the number of units that can be removed from a model, 0 where none can."""
    try:
        return len(units_of(model, kinds=UNIT_KINDS))
    except VitlensError:
        return 0
