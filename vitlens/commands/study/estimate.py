"""How long the chapters of a study take: a rough estimate before the first, corrected by those that
are done.

The estimate times one forward pass of each model and multiplies it by the number of passes that a
chapter needs. The constants are rough: chapters that are done correct the others.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from vitlens.analysis.ablation.units import units_of
from vitlens.analysis.evaluation.evaluate import predicted_logits
from vitlens.analysis.failures.disturbances import CORRUPTIONS, SEVERITIES
from vitlens.attacks.registry import ATTACKS
from vitlens.attribution.registry import ATTRIBUTIONS
from vitlens.commands.run.chapter_runs import PlannedChapter
from vitlens.data.split import Split
from vitlens.errors import VitlensError
from vitlens.models.model import Model
from vitlens.names import UNIT_KINDS

_TIMED_IMAGES: Final = 4  # images of which a forward pass is timed
_FIXED_SECONDS: Final = 6.0  # of a chapter for loading, figures and its report
_MAPS: Final = 12  # maps, of each image, that the checks of one method compute
# All that follows is in forward passes of one image.
_WITH_GRADIENT: Final = 3.0  # a forward and a backward pass together
_REMOVAL: Final = 0.6  # the removal of one unit: the layers before it are not repeated
_CHECKS: Final = 80  # the checks of one method's maps, without the maps
_CORRUPTED: Final = len(CORRUPTIONS) * len(SEVERITIES)
# chapters whose passes no option decides
_PASSES: Final[Mapping[str, float]] = {
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
    done: expected and measured seconds of each chapter that was run.
    """

    expected: Sequence[float]
    done: list[tuple[float, float]] = field(default_factory=list)

    @property
    def left(self) -> float:
        """Return the seconds that the other chapters will take.

        They are expected to exceed their estimates by the same factor as those that are done.
        """
        expected_left = sum(self.expected[len(self.done) :])
        expected_done = sum(expected for expected, _ in self.done)
        if not expected_done:  # no chapter was run, or all came from the cache
            return expected_left
        # a cached chapter is expected to take no time
        measured_done = sum(measured for expected, measured in self.done if expected)
        return expected_left * measured_done / expected_done

    def finish(self, seconds: float) -> None:
        """Note how many seconds the next chapter of the plan took."""
        expected = self.expected[len(self.done)]
        self.done.append((expected, seconds))


def clock_of(
    plan: Sequence[PlannedChapter], models: Sequence[Model], splits: Sequence[Split]
) -> StudyClock:
    """Return the clock of planned chapters.

    models, splits: of the study, each model with its images.
    """
    pass_seconds = {}
    units = {}
    for model, split in zip(models, splits):
        pass_seconds[model.alias] = _pass_seconds(model, split)
        units[model.alias] = _unit_count(model)
    images = min(map(len, splits))
    expected = []
    for chapter in plan:
        if chapter.cached:
            expected.append(0.0)
            continue
        chapter_images = min(images, chapter.options.run.limit or images)
        aliases = [chapter.alias] if chapter.alias else list(pass_seconds)
        seconds_of_image = 0.0
        for alias in aliases:
            seconds_of_image += pass_seconds[alias] * _passes(chapter, units[alias])
        expected.append(_FIXED_SECONDS + chapter_images * seconds_of_image)
    return StudyClock(expected)


def _passes(chapter: PlannedChapter, units: int) -> float:
    """Return about how many forward passes of an image a chapter takes.

    units: the number of units of its model that can be removed.
    """
    options: Any = chapter.options
    if chapter.word == "ablate":
        return _REMOVAL * units * max(1, len(options.replace))
    if chapter.word == "explain":
        entries = [ATTRIBUTIONS[name] for name in options.method]
        passes_of_maps = sum(entry.forwards + _WITH_GRADIENT * entry.backwards for entry in entries)
        return _MAPS * passes_of_maps + _CHECKS * len(entries)
    if chapter.word == "attack":
        return _attack_passes(options)
    return _PASSES.get(chapter.word, 1.0)


def _attack_passes(options: Any) -> float:
    """Return about how many forward passes the attacks and corruptions of an image take."""
    total = 0.0
    for name in options.attacks:
        for member in ATTACKS[name].parts:
            at_one_epsilon: float = member.passes(restarts=options.restarts)
            if member.gradients:
                at_one_epsilon *= _WITH_GRADIENT
            # an image that one epsilon fools is not attacked at larger ones: about half remain
            total += at_one_epsilon * len(options.epsilons_of(name)) / 2
    if options.corruptions:
        total += _CORRUPTED
    return total


def _pass_seconds(model: Model, split: Split) -> float:
    """Return the seconds of a forward pass of one image."""
    images = split.pick(torch.arange(min(_TIMED_IMAGES, len(split))))
    predicted_logits(model, images)  # the first pass also does what is done once for a model
    start = time.perf_counter()
    predicted_logits(model, images)
    return (time.perf_counter() - start) / len(images)


def _unit_count(model: Model) -> int:
    """Return the number of units that can be removed from a model, 0 where none can."""
    try:
        return len(units_of(model, kinds=UNIT_KINDS))
    except VitlensError:
        return 0
