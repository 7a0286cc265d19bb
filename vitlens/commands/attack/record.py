"""The record of `vitlens attack`; free of torch. Layers and blocks count from 0.

Epsilons are in the unit of the command line: see `vitlens.commands.attack.epsilon`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from vitlens.analysis.failures.disturbances import CORRUPTIONS, SEVERITIES
from vitlens.arrays import Flags, Form, Images, Indices, Pixels, Stack, Vector
from vitlens.attacks.registry import ATTACKS, NormName
from vitlens.commands.attack.epsilon import AXES, EPSILON_TERM, epsilon_words
from vitlens.commands.attack.reason_rows import CandidateRow, RobustnessGapRow, UntestedGapRow
from vitlens.record import OfModel, Record, arrays, col, table
from vitlens.uncertainty import Estimate, wilson

Counterpart: TypeAlias = Literal["adversarial", "noise", "another image"]
State: TypeAlias = Literal["passed", "inconclusive", "failed"]
JUDGED: Final = 1.0  # epsilon in 1/255 at which robustness is judged
FAR: Final = 8.0  # epsilon in 1/255 at which no undefended model keeps most of its accuracy
# robust accuracy at FAR above which stronger attacks are run on the survivors
SURVIVED: Final = 0.5
WORST_TITLE: Final = "all attacks, with stronger ones on survivors"
WORST_CASE: Final = "worst-case-linf"  # name in metrics of all L∞ attacks together
_STRONGEST: Final = "robust_accuracy/{model}/strongest/1"  # at JUDGED
_ROBUST: Final = (
    "the share of all images that are classified correctly when clean and under every "
    "perturbation found"
)


def attack_names() -> tuple[str, ...]:
    """Return the names of attacks in metrics."""
    return (*(entry.slug for entry in ATTACKS.values()), WORST_CASE)


def severities() -> tuple[str, ...]:
    """Return the severities of corruptions, as they are in metrics."""
    return tuple(map(str, SEVERITIES))


@dataclass(frozen=True)
class AttackedModelRow(OfModel):
    """One model over all attacks.

    robust: accuracy under the strongest attack at 1/255; None if none was run.
    failed: None until the self-checks have run.
    sample: the attack, with its epsilon, of the sampled images; examples, transfer and changes
        inside are measured on them.
    fooled: the number of sampled images that it breaks.
    halfway: the first block whose outputs for a clean and an adversarial image differ at least half
        as much as for two different images.
    lost: paired over images.
    baseline: the model that corruption errors are relative to.
    """

    clean: Estimate = col(
        "top-1 accuracy, clean", better="higher", metric="accuracy/{model}", share=True
    )
    robust: Estimate | None = col(
        "robust accuracy at 1/255",
        better="higher",
        metric=_STRONGEST,
        term=_ROBUST,
        share=True,
        default=None,
    )
    failed: int | None = col("failed self-checks", default=None)
    sample: str = col("attack of the sample", default="")
    fooled: int = col("fooled", default=0)
    halfway: Estimate | None = col(
        "block halfway to another image", metric="parting_block/{model}", default=None
    )
    mean_error: Estimate | None = col(
        "mean error under corruptions",
        better="lower",
        metric="mean_error_on_corruptions/{model}",
        share=True,
        default=None,
    )
    lost: Estimate | None = col(
        "accuracy lost to corruptions",
        better="lower",
        metric="accuracy_lost_to_corruptions/{model}",
        default=None,
        term="clean accuracy minus the mean accuracy over all kinds and severities of common "
        "corruptions",
    )
    baseline: str = col("baseline", default="")
    relative_error: Estimate | None = col(
        "mean corruption error",
        better="lower",
        metric="mean_corruption_error/{model}/{baseline}",
        default=None,
        term="the errors under each corruption divided by the baseline's, mean over kinds "
        "(Hendrycks & Dietterich)",
    )

    @property
    def strongest_metric(self) -> str:
        """Return the name of the metric of the strongest attack."""
        return _STRONGEST.format(model=self.model)


@dataclass(frozen=True)
class AttackCurveRow(OfModel):
    """The accuracy of one model under one attack at one epsilon (0: clean)."""

    attack: str = col("name")
    title: str = col("attack")
    norm: NormName = col("norm")
    epsilon: float = col("epsilon", term=EPSILON_TERM)
    accuracy: Estimate = col(
        "robust accuracy",
        better="higher",
        metric="robust_accuracy/{model}/{attack}/{epsilon:g}",
        values={"attack": attack_names},
        share=True,
        term=_ROBUST,
    )

    @property
    def at(self) -> str:
        """Return the epsilon in words."""
        return epsilon_words(self.epsilon, self.norm)

    @property
    def at_epsilon(self) -> str:
        """Return `at`, for a table: a property's name is the title of its column."""
        return self.at

    @property
    def axis(self) -> str:
        """Return the title of a panel with all attacks of one norm."""
        return f"epsilon ({AXES[self.norm]})"

    @property
    def panel(self) -> str:
        """Return the title of a panel with one attack."""
        return f"{self.title} ({AXES[self.norm]})"


def strongest(
    curves: Iterable[AttackCurveRow], epsilon: float | None = None
) -> AttackCurveRow | None:
    """Return the row with the lowest accuracy under an L∞ attack, at one epsilon or at any (None).

    Of several such rows it is the last, because FGSM comes first.
    """
    lowest: AttackCurveRow | None = None
    for row in curves:
        if row.norm != "linf" or row.epsilon <= 0:
            continue
        if epsilon is not None and row.epsilon != epsilon:
            continue
        if lowest is None or row.accuracy.value <= lowest.accuracy.value:
            lowest = row
    return lowest


@dataclass(frozen=True)
class AttackRow(OfModel):
    """Settings, results and cost of one attack on one model.

    attack: its name in metrics.
    name: its name in the registry.
    right: images that the model classifies correctly before the attack.
    broken: those of them for which a perturbation was found.
    median: None if it exceeds every perturbation that was tried.
    forwards, backwards: images passed through the model.
    seconds: summed over processes.
    """

    attack: str = col("name in metrics")
    name: str = col("name")
    title: str = col("attack")
    norm: NormName = col("norm")
    kind: Literal["budget", "minimum"] = col("kind")
    source: str = col("source")
    steps: int = col("steps")
    restarts: int = col("restarts")
    right: int = col("correct images")
    broken: int = col("fooled")
    median: Estimate | None = col(
        "median smallest perturbation",
        better="higher",
        metric="median_distance/{model}/{attack}",
        values={"attack": attack_names},
        default=None,
        term="over correctly classified images; in 1/255 for L∞, in pixel units for L2",
    )
    forwards: int = col("images forward", default=0)
    backwards: int = col("images backward", default=0)
    seconds: float = col("seconds", default=0.0)


@dataclass(frozen=True)
class RobustPairRow:
    """Two models under one attack at one epsilon, or on clean images ("clean").

    only_first, only_second: images that only this model classifies correctly.
    difference: accuracy of the first minus that of the second.
    p: the p-value of McNemar's exact test.
    p_holm: corrected for all rows.
    """

    attack: str = col("name")
    title: str = col("attack")
    norm: NormName = col("norm")
    epsilon: float = col("epsilon", term=EPSILON_TERM)
    first: str = col("first")
    second: str = col("second")
    only_first: int = col("only the first right")
    only_second: int = col("only the second right")
    difference: Estimate = col(
        "first minus second",
        metric="robust_difference/{first}/{second}/{attack}/{epsilon:g}",
    )
    p: float = col("p")
    p_holm: float = col("p (Holm)")

    @property
    def at(self) -> str:
        """Return the epsilon in words."""
        return epsilon_words(self.epsilon, self.norm)

    @property
    def test(self) -> str:
        """Return the label of this row in a chart: the attack and its epsilon."""
        if self.attack == "clean":
            return "clean"
        return f"{self.title}, {self.epsilon:g} ({AXES[self.norm]})"

    @property
    def models(self) -> str:
        """Return the name of the series of these two models."""
        return f"{self.first} − {self.second}"


@dataclass(frozen=True)
class SurvivorsRow(OfModel):
    """Stronger attacks on the images that survive every L∞ attack up to an epsilon.

    These are PGD with a margin loss (difference of logits ratio) and Square.

    before, after: robust accuracy.
    margin, square: the number of images that each breaks; None if it was not run.
    """

    epsilon: float = col("epsilon", term=EPSILON_TERM)
    survivors: int = col("survivors")
    before: Estimate = col("robust accuracy before", better="higher")
    after: Estimate = col(
        "after stronger attacks",
        better="higher",
        metric="survivors_accuracy/{model}/{epsilon:g}",
        share=True,
    )
    margin: int | None = col("broken by a margin loss", default=None)
    square: int | None = col("broken by Square", default=None)

    @property
    def missed(self) -> int:
        """Return the number of survivors that the stronger attacks break."""
        return (self.margin or 0) + (self.square or 0)  # None: not run

    @property
    def attacks(self) -> str:
        """Return which of the stronger attacks were run, in words; "" for none."""
        titles = []
        if self.margin is not None:
            titles.append("a margin loss")
        if self.square is not None:
            titles.append("Square")
        return " and ".join(titles)

    @property
    def was_attacked(self) -> bool:
        """Return True if at least one of the stronger attacks was run."""
        return bool(self.attacks)

    @property
    def at(self) -> str:
        """Return the epsilon in words."""
        return epsilon_words(self.epsilon, "linf")


@dataclass(frozen=True)
class CorruptionPairRow:
    """Two models under one common corruption at one severity.

    difference: accuracy of the first minus that of the second, paired by image.
    p: the p-value of McNemar's exact test.
    p_holm: corrected for all rows.
    """

    kind: str = col("name")
    title: str = col("corruption")
    severity: int = col("severity")
    first: str = col("first")
    second: str = col("second")
    difference: Estimate = col(
        "first minus second", metric="corruption_difference/{first}/{second}/{kind}/{severity}"
    )
    p: float = col("p")
    p_holm: float = col("p (Holm)")

    @property
    def words(self) -> str:
        """Return the corruption and its severity."""
        return f"{self.title}, severity {self.severity}"

    @property
    def models(self) -> str:
        """Return the name of the series of these two models."""
        return f"{self.first} − {self.second}"


@dataclass(frozen=True)
class TransferRow:
    """Adversarial images of one model (made_for), classified by another (shown_to).

    rate: the share that also fools the second model, of the images that fool the first and that the
        second classifies correctly when clean; None if there are none.
    accuracy: the accuracy of the second model on all adversarial images of the first.
    clean: its accuracy on the clean images.
    """

    made_for: str = col("made for")
    shown_to: str = col("shown to")
    rate: Estimate | None = col(
        "fooled too",
        metric="transfer_rate/{made_for}/{shown_to}",
        share=True,
        default=None,
        term="the share that fools both models, of images that fool the first and that the second "
        "classifies correctly when clean",
    )
    # always given; these have defaults only because they follow one
    accuracy: Estimate = col(
        "accuracy",
        metric="transfer_accuracy/{made_for}/{shown_to}",
        share=True,
        default=Estimate(0.0),
    )
    clean: Estimate = col("clean accuracy", default=Estimate(0.0))


@dataclass(frozen=True)
class AttackCheckRow(OfModel):
    """One self-check of an attack on one model.

    state: inconclusive if the check could not have failed because no image was fooled.
    against, of: `against` out of `of` images contradict the expectation; None if images are not
        counted.
    """

    name: str = col("check")
    attack: str = col("attack")
    expected: str = col("expected")
    found: str = col("found")
    state: State = col("result")
    against: int | None = col("against", default=None)
    of: int | None = col("of", default=None)

    @property
    def share(self) -> Estimate | None:
        """Return the share of images that contradict the expectation, with its interval."""
        if self.against is None or not self.of:
            return None
        return wilson(self.against, self.of)


@dataclass(frozen=True)
class MapAgreementRow(OfModel):
    """The agreement of maps before and after the attack, on images that fool a model.

    maps: the name in metrics.
    spearman: rank correlation.
    top: the share of the top tenth of one map that is in the top tenth of the other.
    """

    maps: str = col("name in metrics")
    title: str = col("maps")
    spearman: Estimate = col("rank correlation", metric="map_agreement/{model}/spearman/{maps}")
    top: Estimate = col("top tenth in common", metric="map_agreement/{model}/top/{maps}")


@dataclass(frozen=True)
class BlockDistanceRow(OfModel):
    """The distance (1 - cosine, at least 0) of a block's outputs for a clean image and for its
    counterpart.
    """

    block: int = col("block")
    kind: Counterpart = col("counterpart")
    distance: Estimate = col("1 − cosine")


@dataclass(frozen=True)
class CorruptionRow(OfModel):
    """The accuracy of one model under one common corruption at a severity from 1 to 5.

    strength: in the unit that `operation` names.
    """

    kind: str = col("name")
    title: str = col("corruption")
    operation: str = col("operation")
    severity: int = col("severity")
    strength: float = col("strength")
    accuracy: Estimate = col(
        "accuracy",
        better="higher",
        metric="corruption_accuracy/{model}/{kind}/{severity}",
        values={"kind": CORRUPTIONS.keys, "severity": severities},
        share=True,
    )


@dataclass(frozen=True)
class AttackedArrays:
    """The outcome of all attacks on one model, image by image.

    clean (images,): True where the clean image is classified correctly.
    broken_at (images,): by attack, the smallest epsilon at which it succeeds.
    distance (images,): by attack, the norm of the smallest perturbation.

    broken_at and distance are in pixel units, 0 for misclassified clean images and infinite if no
    perturbation was found.
    """

    clean: Flags
    broken_at: Mapping[str, Vector]
    distance: Mapping[str, Vector]


@dataclass(frozen=True)
class AttackExampleArrays:
    """Some images that fool one model.

    pixels: the clean images (images, 3, height, width).
    change: the perturbation (images, 3, height, width).
    before, after: positive parts of the maps of clean and of adversarial images (images, rows,
        columns).
    answers, probability: the predicted classes and their probabilities (2, images); row 0 is of
        clean images, row 1 of adversarial ones.
    image: indices into the data (images,).
    """

    pixels: Pixels
    change: Images
    before: Stack
    after: Stack
    answers: Annotated[NDArray[Any], Form("U", (2, None))]
    probability: Annotated[NDArray[np.floating], Form("f", (2, None))]
    image: Indices


@dataclass(frozen=True)
class AdversarialArrays:
    """The sampled images of one model, saved by --save-images.

    images: adversarial (images, 3, height, width) in [0, 1]; clean where the attack failed.
    fooled: True where it succeeded (images,).
    image: indices into the data (images,).
    """

    images: Images
    fooled: Flags
    image: Indices


@dataclass(frozen=True, kw_only=True)
class AttackRecord(Record):
    """Models under attack on the same images."""

    overall: tuple[AttackedModelRow, ...] = table()
    curves: tuple[AttackCurveRow, ...] = table()
    attacks: tuple[AttackRow, ...] = table()
    pairs: tuple[RobustPairRow, ...] = table()
    transfer: tuple[TransferRow, ...] = table()
    checks: tuple[AttackCheckRow, ...] = table()
    agreements: tuple[MapAgreementRow, ...] = table()
    blocks: tuple[BlockDistanceRow, ...] = table()
    corruptions: tuple[CorruptionRow, ...] = table()
    survivors: tuple[SurvivorsRow, ...] = table()
    robustness_gap: tuple[RobustnessGapRow, ...] = table()
    robustness_candidates: tuple[CandidateRow, ...] = table()
    robustness_untested: tuple[UntestedGapRow, ...] = table()
    corruption_pairs: tuple[CorruptionPairRow, ...] = table()
    attacked: Mapping[str, AttackedArrays] = arrays("attack-{model}")
    examples: Mapping[str, AttackExampleArrays] = arrays("examples-{model}")
    adversarial: Mapping[str, AdversarialArrays] = arrays("adversarial-{model}")
