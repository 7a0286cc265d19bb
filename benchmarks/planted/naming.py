"""What vitlens names as a cause of a model's errors: by `vitlens.failures` and by
`vitlens.reliance`, in one order.

Every name has one effect on a common scale, in percent of the images: the errors that its change
fixes minus the correct predictions that it breaks, and the same beyond its control; the smaller of
the two counts. A control that breaks predictions thus makes nothing stronger. A pair of classes,
which no change tests, has the errors among its images beyond those that the rate of errors on all
other images lets expect.

The strongest effect is named first. But a name that contains another one comes after it where that
one has at least 80 % of its effect, as within `vitlens.reliance`: a mark is a part of the border
and of the background.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import torch

import vitlens
from vitlens.analysis.evaluation.evaluate import evaluate
from vitlens.analysis.failures.covariates import Subject
from vitlens.analysis.failures.diagnosis import Diagnosis, diagnose
from vitlens.analysis.failures.rows import InterventionRow, causes
from vitlens.analysis.reliance.rows import RelianceRow, suspects
from vitlens.data.split import Split
from vitlens.models.model import Model

CONTAINED: Final[Mapping[str, tuple[str, ...]]] = {
    "background": ("mark", "clutter", "border", "background-colour"),
    "border": ("mark",),
    "fine-detail": ("clutter",),
}
_EXPLAINED: Final = 0.8  # share of an effect from which on it is that of what is contained


@dataclass(frozen=True)
class Naming:
    """effects: in percent of the images, by name, the strongest first; errors: of the model on
    these images.
    """

    effects: dict[str, float]
    errors: int

    @property
    def names(self) -> tuple[str, ...]:
        """Return what is named, the strongest first."""
        return tuple(self.effects)


def name_causes(model: Model, split: Split) -> Naming:
    """Return what is named of a model on these images, without maps."""
    evaluation = evaluate(model, split)
    diagnosis = diagnose([Subject(model, split, evaluation)])
    reliance = vitlens.reliance(model, split)
    effects: dict[str, float] = {}
    for name, images in (*_of_failures(diagnosis), *_of_reliance(reliance.rows, model.alias)):
        effects[name] = max(100 * images / len(split), effects.get(name, -100.0))
    ordered = sorted(
        effects, key=lambda name: (-_rank_of(name, effects), name in CONTAINED, -effects[name])
    )
    return Naming({name: effects[name] for name in ordered}, diagnosis.failures)


def _rank_of(name: str, effects: Mapping[str, float]) -> float:
    """Return the effect of a name, or the smallest of those contained in it that explain it."""
    inner = [effects[part] for part in CONTAINED.get(name, ()) if part in effects]
    explaining = [effect for effect in inner if effect >= _EXPLAINED * effects[name]]
    return min([effects[name], *explaining])


def _of_failures(diagnosis: Diagnosis) -> Iterator[tuple[str, float]]:
    """Yield the causes of a diagnosis, and their effects in images."""
    for cause in causes(diagnosis.alias, diagnosis.covariates, diagnosis.interventions):
        name = cause.row.covariate
        yield (
            name,
            _effect_of_pair(diagnosis, name)
            if cause.test is None
            else _effect_of_change(cause.test),
        )


def _effect_of_change(row: InterventionRow) -> float:
    return _smaller(row.mended - row.broken, row.control_mended - row.control_broken)


def _effect_of_pair(diagnosis: Diagnosis, name: str) -> float:
    in_pair = diagnosis.values[0][name] > 0
    wrong = ~diagnosis.correct
    rate_elsewhere = float(wrong[~in_pair].float().mean()) if (~in_pair).any() else 0.0
    return float(torch.count_nonzero(wrong & in_pair)) - rate_elsewhere * float(in_pair.sum())


def _of_reliance(rows: tuple[RelianceRow, ...], model: str) -> Iterator[tuple[str, float]]:
    """Yield the cues that a model should not rely on but does, and their effects in images."""
    for row in suspects(rows, model):
        yield row.cue, _smaller(row.fixed - row.broken, row.control_fixed - row.control_broken)


def _smaller(gain: int, gain_of_control: int) -> float:
    return float(min(gain, gain - gain_of_control))
