"""Rows on why two models differ in robustness: the difference, and the causes that were tested."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from vitlens.commands.attack.epsilon import EPSILON_TERM, epsilon_words
from vitlens.record import col
from vitlens.uncertainty import LEVEL, Estimate, Side, beyond


@dataclass(frozen=True)
class RobustnessGapRow:
    """The difference in robust accuracy of two models, on images that both classify correctly.

    difference: first minus second. p: of McNemar's exact test.
    """

    first: str = col("first")
    second: str = col("second")
    attack: str = col("attack")
    epsilon: float = col("epsilon", term=EPSILON_TERM)
    difference: Estimate = col(
        "difference in robust accuracy", metric="robustness_gap/{first}/{second}"
    )
    robust_first: float = col("robust accuracy of the first", unit="fraction")
    robust_second: float = col("robust accuracy of the second", unit="fraction")
    p: float = col("p")

    @property
    def at(self) -> str:
        """Return the epsilon in words."""
        return epsilon_words(self.epsilon, "linf")

    @property
    def differs(self) -> bool:
        """Return True if the models are shown to differ."""
        return self.p <= LEVEL and beyond(self.difference, 0.0) is not Side.UNDECIDED

    @property
    def better(self) -> str:
        """Return the model with the higher robust accuracy."""
        return self.first if self.difference.value >= 0 else self.second

    @property
    def worse(self) -> str:
        """Return the model with the lower robust accuracy."""
        return self.second if self.difference.value >= 0 else self.first


@dataclass(frozen=True)
class Candidate:
    """A property that may account for a difference in robustness.

    title: its name in sentences.
    measures: what is measured of each model.
    change: what the intervention does to the attack.
    control: what its control does.
    """

    title: str
    measures: str
    change: str
    control: str


CANDIDATES: Final[Mapping[str, Candidate]] = {
    "frequency": Candidate(
        title="frequency content",
        measures="share of the energy of perturbations in fine detail",
        change="without the higher half of the energy of perturbations",
        control="without a random half of it",
    ),
    "patch-grid": Candidate(
        title="the patch grid",
        measures="steps of perturbations between patches, relative to steps inside",
        change="with attacked images shifted by half a patch",
        control="with attacked images shifted by a whole patch",
    ),
    "gradient": Candidate(
        title="gradient size",
        measures="change of the margin for 1/255, to first order, in spreads of the logits",
        change="with budgets matched to the gradients",
        control="with the same budget for both",
    ),
    "margin": Candidate(
        title="the margin",
        measures="margin of clean images, in spreads of the logits",
        change="with budgets matched to the margins",
        control="with the same budget for both",
    ),
    "distance": Candidate(
        title="margin and gradient together",
        measures="margin divided by its gradient, in 1/255",
        change="with budgets matched to margin and gradient",
        control="with the same budget for both",
    ),
}


@dataclass(frozen=True)
class CandidateRow:
    """One candidate cause of a difference in robustness, tested by an intervention.

    value_first, value_second: what the candidate measures of each model.
    control, after: robust accuracy of the more robust model minus that of the other, under the
        control and under the intervention.
    accounted: control minus after, paired by image.
    p_holm: corrected for all candidates.
    """

    first: str = col("first")
    second: str = col("second")
    candidate: str = col("candidate")
    value_first: float = col("of the first")
    value_second: float = col("of the second")
    control: Estimate = col("difference under the control")
    after: Estimate = col("difference under the change")
    accounted: Estimate = col(
        "points accounted for",
        metric="robustness_accounted/{first}/{second}/{candidate}",
        term="how much smaller a difference in robust accuracy is under a change of the attack "
        "than under its control",
    )
    p: float = col("p")
    p_holm: float = col("p (Holm)", default=1.0)

    @property
    def definition(self) -> Candidate:
        """Return the definition of the candidate."""
        return CANDIDATES[self.candidate]

    @property
    def title(self) -> str:
        """Return the name of the candidate."""
        return self.definition.title

    @property
    def possible_cause(self) -> str:
        """Return the title, for a table: a property's name is the title of its column."""
        return self.title

    @property
    def measured(self) -> str:
        """Return what is measured, with the values of both models."""
        values = f"{self.value_first:.2g} and {self.value_second:.2g}"
        return f"{self.definition.measures}: {values}"

    @property
    def accounts(self) -> bool:
        """Return True if the candidate is shown to account for a part of the difference."""
        return self.p_holm <= LEVEL and beyond(self.accounted, 0.0) is Side.ABOVE


@dataclass(frozen=True)
class UntestedGapRow:
    """Two models whose difference in robustness was not explained, and the reason."""

    first: str = col("first")
    second: str = col("second")
    reason: str = col("reason", unit="text")
