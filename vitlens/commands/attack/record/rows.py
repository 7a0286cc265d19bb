"""The rows that `vitlens attack` writes. Layers and blocks count from 0."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from vitlens.analysis.robustness.verdict import Check
from vitlens.attacks.registry import NormName
from vitlens.records import UntrustedName
from vitlens.uncertainty import Estimate, wilson

Counterpart: TypeAlias = Literal["adversarial", "noise", "another image"]


@dataclass(frozen=True)
class AttackCurveRow:
    """Accuracy of one model under one attack at one epsilon (0: clean), in the unit of the command line."""

    model: str
    attack: str
    title: str
    norm: NormName
    epsilon: float
    accuracy: float
    low: float | None
    high: float | None
    n: int

    @property
    def estimate(self) -> Estimate:
        """The accuracy with its interval."""
        return Estimate(self.accuracy, self.low, self.high, self.n)


@dataclass(frozen=True)
class AttackRow:
    """One attack on one model: settings, results and cost.

    attack: its name in metrics; name: in the registry; source: its paper; right: images that the model classifies
    correctly before it; survived: those that are still correct at the largest epsilon; broken: those for which a
    perturbation was found; median: of the smallest perturbations (None: larger than all that were tried); forwards,
    backwards: images passed through the model; seconds: of all processes together.
    """

    model: str
    attack: str
    name: str
    title: str
    norm: NormName
    kind: Literal["budget", "minimum"]
    source: str
    gradients: bool
    steps: int
    restarts: int
    right: int
    survived: int
    broken: int
    median: float | None
    forwards: int
    backwards: int
    seconds: float


@dataclass(frozen=True)
class RobustPairRow:
    """Two models under one attack at one epsilon ("clean": none): images that one model alone classifies correctly.

    difference: accuracy of the first minus the second's, points; p: McNemar's exact test; p_holm: corrected for all
    rows of the table.
    """

    attack: str
    title: str
    norm: NormName
    epsilon: float
    first: str
    second: str
    only_first: int
    only_second: int
    difference: float
    low: float | None
    high: float | None
    p: float
    p_holm: float

    @property
    def estimate(self) -> Estimate:
        """The difference with its interval."""
        return Estimate(self.difference, self.low, self.high, unit="points")


@dataclass(frozen=True)
class RobustClassRow:
    """Accuracy of one model on the images of one class, clean and under the attack of the sample at its epsilon."""

    model: str
    class_name: UntrustedName
    n: int
    attack: str
    epsilon: float
    clean_accuracy: float
    clean_low: float | None
    clean_high: float | None
    robust_accuracy: float
    robust_low: float | None
    robust_high: float | None

    @property
    def clean(self) -> Estimate:
        """The clean accuracy with its interval."""
        return Estimate(self.clean_accuracy, self.clean_low, self.clean_high, self.n)

    @property
    def robust(self) -> Estimate:
        """The accuracy under the attack with its interval."""
        return Estimate(self.robust_accuracy, self.robust_low, self.robust_high, self.n)


@dataclass(frozen=True)
class AttackSampleRow:
    """One attack at one epsilon on a sample of n images. fooled: images on which it succeeds."""

    model: str
    attack: str
    title: str
    norm: NormName
    epsilon: float
    n: int
    fooled: int


@dataclass(frozen=True)
class TransferRow:
    """Adversarial images of one model (made_for), classified by another (shown_to).

    rate: of the n images that fool the first and that the second classifies correctly when clean, the share that
    fools the second (None: no such image); accuracy: of the second on all adversarial images of the first; clean: on
    the clean images.
    """

    made_for: str
    shown_to: str
    rate: float | None
    low: float | None
    high: float | None
    n: int | None
    accuracy: float
    clean: float

    @property
    def estimate(self) -> Estimate | None:
        """The rate with its interval."""
        return None if self.rate is None else Estimate(self.rate, self.low, self.high, self.n)


@dataclass(frozen=True)
class AttackCheckRow:
    """One self-check of an attack on one model.

    against, of: how many of so many images contradict the expectation; None where that is no count of images, and in
    folders of earlier versions.
    """

    model: str
    name: str
    attack: str
    expected: str
    found: str
    passed: bool
    conclusive: bool
    against: int | None = None
    of: int | None = None

    @property
    def share(self) -> Estimate | None:
        """The share of the images that contradicts the expectation, with its interval."""
        return None if self.against is None or not self.of else wilson(self.against, self.of)

    @property
    def check(self) -> Check:
        """The same without the model."""
        return Check(
            self.name, self.attack, self.expected, self.found, self.passed, self.conclusive, self.against, self.of
        )


@dataclass(frozen=True)
class BlockCosineRow:
    """The cosine between a block's output for a clean image and for its counterpart, mean over n images."""

    model: str
    block: int
    kind: Counterpart
    value: float
    low: float | None
    high: float | None
    n: int

    @property
    def distance(self) -> Estimate:
        """One minus the cosine, with its interval; at least 0."""
        low, high = (None if end is None else max(0.0, 1 - end) for end in (self.high, self.low))
        return Estimate(max(0.0, 1 - self.value), low, high, unit="")


@dataclass(frozen=True)
class AttentionShiftRow:
    """A statistic of one layer's attention, mean over heads and n images: before, and value: after minus before."""

    model: str
    statistic: str
    title: str
    unit: str
    layer: int
    before: float
    value: float
    low: float | None
    high: float | None
    n: int

    @property
    def estimate(self) -> Estimate:
        """The change with its interval."""
        return Estimate(self.value, self.low, self.high, self.n, self.unit)


@dataclass(frozen=True)
class CorruptionRow:
    """Accuracy of one model under one common corruption at a severity from 1 to 5."""

    model: str
    kind: str
    severity: int
    accuracy: float
    low: float | None
    high: float | None
    n: int

    @property
    def estimate(self) -> Estimate:
        """The accuracy with its interval."""
        return Estimate(self.accuracy, self.low, self.high, self.n)


@dataclass(frozen=True)
class CorruptionKindRow:
    """One common corruption. description: the unit of its strength; strengths: of severities 1 to 5."""

    kind: str
    title: str
    description: str
    strengths: tuple[float, ...]
