"""What `vitlens attack` records; free of torch. Layers and blocks count from 0.

Epsilons are in the unit of the command line: 255ths for L∞, pixel units for L2, a share of the pixels for a patch.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from vitlens.arrays import Flags, Form, Images, Indices, Pixels, Stack, Vector
from vitlens.attacks.registry import UNIT, NormName
from vitlens.record import OfModel, Record, arrays, col, table
from vitlens.uncertainty import Estimate, wilson

Counterpart: TypeAlias = Literal["adversarial", "noise", "another image"]
State: TypeAlias = Literal["passed", "inconclusive", "failed"]
JUDGED: Final = 1.0  # 255ths: the epsilon at which robustness is judged
FAR: Final = 8.0  # 255ths, at which no undefended model keeps most of its accuracy
SURVIVED: Final = 0.5  # robust accuracy there, above which stronger attacks are run on the survivors
WORST_TITLE: Final = "all attacks, with stronger ones on survivors"
WORST_CASE: Final = "worst-case-linf"  # in metrics: every L∞ attack and, on survivors, the stronger ones
AXES: Final[Mapping[NormName, str]] = {"linf": "1/255", "l2": "pixel units", "patch": "share of the pixels"}
_ROBUST: Final = "the share of all images that are classified correctly when clean and under every perturbation found"
_EPSILON: Final = "the largest change that an attack may make: of a pixel in 255ths (L∞), or the distance (L2)"


def scale_of(norm: NormName) -> float:
    """Return the factor from pixel units to the unit of the command line: 255 for L∞, else 1."""
    return UNIT if norm == "linf" else 1.0


def typed_epsilon(epsilon: float, norm: NormName) -> float:
    """Return an epsilon in pixel units as on the command line and in names of metrics: 4, 0.5."""
    return float(f"{round(epsilon * scale_of(norm), 6):g}")


def epsilon_words(epsilon: float, norm: NormName) -> str:
    """Return an epsilon in the unit of the command line, in words: "4/255", "an L2 distance of 0.5"."""
    if norm == "patch":
        return f"{100 * epsilon:.3g} % of the pixels covered"
    return f"{epsilon:g}/255" if norm == "linf" else f"an L2 distance of {epsilon:g}"


_IN_WORDS: Final = property(lambda row: epsilon_words(row.epsilon, row.norm))


@dataclass(frozen=True)
class AttackedModelRow(OfModel):
    """One model over all attacks. robust: under the strongest attack at 1/255, None where none was run; sample: the
    attack with its epsilon on a sample of the images, from which examples, transfer and changes inside are taken, and
    fooled: those of them on which it succeeds; failed: None until the self-checks have been made; halfway: the first
    block whose outputs for a clean and an adversarial image differ at least half as much as for two images; baseline:
    the model that errors under corruptions are relative to; lost: paired over images."""

    clean: Estimate = col("top-1 accuracy, clean", better="higher", metric="accuracy/{model}")
    robust: Estimate | None = col("robust accuracy at 1/255", better="higher", term=_ROBUST, default=None)
    failed: int | None = col("failed self-checks", default=0)
    sample: str = col("attack of the sample", default="")
    fooled: int = col("fooled", default=0)
    halfway: Estimate | None = col("block halfway to another image", metric="parting_block/{model}", default=None)
    mean_error: Estimate | None = col(
        "mean error under corruptions", better="lower", metric="mean_error_on_corruptions/{model}", default=None
    )
    lost: Estimate | None = col(
        "accuracy lost to corruptions",
        better="lower",
        metric="accuracy_lost_to_corruptions/{model}",
        default=None,
        term="clean accuracy minus the mean accuracy over all kinds and severities of common corruptions",
    )
    baseline: str = col("baseline", default="")
    relative_error: Estimate | None = col(
        "mean corruption error",
        better="lower",
        metric="mean_corruption_error/{model}/{baseline}",
        default=None,
        term="the errors under each corruption divided by the baseline's, mean over kinds (Hendrycks & Dietterich)",
    )


@dataclass(frozen=True)
class AttackCurveRow(OfModel):
    """Accuracy of one model under one attack at one epsilon (0: clean)."""

    attack: str = col("name")
    title: str = col("attack")
    norm: NormName = col("norm")
    epsilon: float = col("epsilon", term=_EPSILON)
    accuracy: Estimate = col(
        "robust accuracy", better="higher", metric="robust_accuracy/{model}/{attack}/{epsilon:g}", term=_ROBUST
    )
    at = at_epsilon = _IN_WORDS

    @property
    def axis(self) -> str:
        """Return the unit of epsilon, the title of a panel with all attacks of one norm."""
        return f"epsilon ({AXES[self.norm]})"

    @property
    def panel(self) -> str:
        """Return the attack with its unit, the title of a panel."""
        return f"{self.title} ({AXES[self.norm]})"


def strongest(curves: Iterable[AttackCurveRow], epsilon: float | None = None) -> AttackCurveRow | None:
    """Return the row of the lowest accuracy under an L∞ attack at an epsilon (None: at any); of equals the last, as
    FGSM is named first."""
    tried = [row for row in curves if row.norm == "linf" and row.epsilon > 0 and epsilon in (None, row.epsilon)]
    return min(reversed(tried), key=lambda row: row.accuracy.value, default=None)


@dataclass(frozen=True)
class AttackRow(OfModel):
    """One attack on one model: settings, results and cost. attack: its name in metrics; name: in the registry; right:
    images that the model classifies correctly before it; broken: those for which a perturbation was found; median: None
    where it is larger than all that were tried; forwards, backwards: images passed through the model; seconds: of all
    processes together."""

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
        default=None,
        term="over correctly classified images, in 255ths for L∞, in pixel units for L2",
    )
    forwards: int = col("images forward", default=0)
    backwards: int = col("images backward", default=0)
    seconds: float = col("seconds", default=0.0)


@dataclass(frozen=True)
class RobustPairRow:
    """Two models under one attack at one epsilon ("clean": none). only_first, only_second: images that one model alone
    classifies correctly; difference: accuracy of the first minus the second's; p: McNemar's exact test; p_holm:
    corrected for all rows."""

    attack: str = col("name")
    title: str = col("attack")
    norm: NormName = col("norm")
    epsilon: float = col("epsilon", term=_EPSILON)
    first: str = col("first")
    second: str = col("second")
    only_first: int = col("only the first right")
    only_second: int = col("only the second right")
    difference: Estimate = col("first minus second", metric="robust_difference/{first}/{second}/{attack}/{epsilon:g}")
    p: float = col("p")
    p_holm: float = col("p (Holm)")
    at = _IN_WORDS

    @property
    def test(self) -> str:
        """Return the attack with its epsilon, the label of a line."""
        return "clean" if self.attack == "clean" else f"{self.title}, {self.epsilon:g} ({AXES[self.norm]})"

    @property
    def models(self) -> str:
        """Return the two models, the name of a series."""
        return f"{self.first} − {self.second}"


@dataclass(frozen=True)
class SurvivorsRow(OfModel):
    """The images of one model that survived every L∞ attack up to an epsilon, attacked again with a margin loss (PGD on
    the difference of logits ratio) and Square. before, after: robust accuracy; margin, square: images that each broke,
    None where it was not run again."""

    epsilon: float = col("epsilon", term=_EPSILON)
    survivors: int = col("survivors")
    before: Estimate = col("robust accuracy before", better="higher")
    after: Estimate = col("after stronger attacks", better="higher", metric="survivors_accuracy/{model}/{epsilon:g}")
    margin: int | None = col("broken by a margin loss", default=None)
    square: int | None = col("broken by Square", default=None)

    @property
    def missed(self) -> int:
        """Return how many survivors the stronger attacks broke."""
        return (self.margin or 0) + (self.square or 0)

    @property
    def at(self) -> str:
        """Return the epsilon in words."""
        return epsilon_words(self.epsilon, "linf")


@dataclass(frozen=True)
class CorruptionPairRow:
    """Two models under one common corruption at one severity. difference: accuracy of the first minus the second's,
    paired by image; p: McNemar's exact test; p_holm: corrected for all rows."""

    kind: str = col("name")
    title: str = col("corruption")
    severity: int = col("severity")
    first: str = col("first")
    second: str = col("second")
    difference: Estimate = col("first minus second", metric="corruption_difference/{first}/{second}/{kind}/{severity}")
    p: float = col("p")
    p_holm: float = col("p (Holm)")

    @property
    def words(self) -> str:
        """Return the corruption with its severity, the label of a line."""
        return f"{self.title}, severity {self.severity}"

    @property
    def models(self) -> str:
        """Return the two models, the name of a series."""
        return f"{self.first} − {self.second}"


@dataclass(frozen=True)
class TransferRow:
    """Adversarial images of one model (made_for), classified by another (shown_to). rate: of the images that fool the
    first and that the second classifies correctly when clean, the share that fools the second (None: no such image);
    accuracy: of the second on all adversarial images of the first; clean: on the clean images."""

    made_for: str = col("made for")
    shown_to: str = col("shown to")
    rate: Estimate | None = col(
        "fooled too",
        metric="transfer_rate/{made_for}/{shown_to}",
        default=None,
        term="of the images that fool the first and that the second has right when clean, the share that fools both",
    )
    accuracy: Estimate = col("accuracy", metric="transfer_accuracy/{made_for}/{shown_to}", default=Estimate(0.0))
    clean: Estimate = col("clean accuracy", default=Estimate(0.0))


@dataclass(frozen=True)
class AttackCheckRow(OfModel):
    """One self-check of an attack on one model. state: inconclusive where it could not have failed, as nothing was
    fooled; against, of: how many of so many images contradict the expectation, None where that is no count of
    images."""

    name: str = col("check")
    attack: str = col("attack")
    expected: str = col("expected")
    found: str = col("found")
    state: State = col("result")
    against: int | None = col("against", default=None)
    of: int | None = col("of", default=None)

    @property
    def share(self) -> Estimate | None:
        """Return the share of the images that contradicts the expectation, with its interval."""
        return None if self.against is None or not self.of else wilson(self.against, self.of)


@dataclass(frozen=True)
class MapAgreementRow(OfModel):
    """How much the maps of the images that fool a model agree before and after the attack. maps: the name in metrics;
    spearman: rank correlation; top: share of the top tenth of one map among the top tenth of the other."""

    maps: str = col("name in metrics")
    title: str = col("maps")
    spearman: Estimate = col("rank correlation", metric="map_agreement/{model}/spearman/{maps}")
    top: Estimate = col("top tenth in common", metric="map_agreement/{model}/top/{maps}")


@dataclass(frozen=True)
class BlockDistanceRow(OfModel):
    """How far a block's output for a clean image is from that for its counterpart: 1 minus the cosine, at least 0."""

    block: int = col("block")
    kind: Counterpart = col("counterpart")
    distance: Estimate = col("1 − cosine")


@dataclass(frozen=True)
class CorruptionRow(OfModel):
    """Accuracy of one model under one common corruption at a severity from 1 to 5; strength: in the unit that
    `operation` names."""

    kind: str = col("name")
    title: str = col("corruption")
    operation: str = col("operation")
    severity: int = col("severity")
    strength: float = col("strength")
    accuracy: Estimate = col("accuracy", better="higher", metric="corruption_accuracy/{model}/{kind}/{severity}")


@dataclass(frozen=True)
class AttackedArrays:
    """One model on all images: clean (images,): whether the clean image is classified correctly; broken_at, distance:
    by attack (images,), the smallest epsilon at which the attack succeeds and the norm of the smallest perturbation
    found, in pixel units; 0 where the clean image is misclassified, infinite where none was found."""

    clean: Flags
    broken_at: Mapping[str, Vector]
    distance: Mapping[str, Vector]


@dataclass(frozen=True)
class AttackExampleArrays:
    """Some images that fooled one model: pixels, and change, the perturbation (images, 3, height, width); before,
    after: positive parts of maps (images, rows, columns); answers: predicted classes, and probability: of these, clean
    and adversarial (2, images); image: indices into the data."""

    pixels: Pixels
    change: Images
    before: Stack
    after: Stack
    answers: Annotated[NDArray[Any], Form("U", (2, None))]
    probability: Annotated[NDArray[np.floating], Form("f", (2, None))]
    image: Indices


@dataclass(frozen=True)
class AdversarialArrays:
    """The sample of one model, of --save-images: images as the attack left them (images, 3, height, width) in [0, 1],
    the clean ones where it failed; fooled: where it did not; image: indices into the data."""

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
    corruption_pairs: tuple[CorruptionPairRow, ...] = table()
    attacked: Mapping[str, AttackedArrays] = arrays("attack-{model}")
    examples: Mapping[str, AttackExampleArrays] = arrays("examples-{model}")
    adversarial: Mapping[str, AdversarialArrays] = arrays("adversarial-{model}")
