"""The rows of the tables of `vitlens ablate`."""

from dataclasses import dataclass
from typing import Final, Literal

from vitlens.names import Replacement, UnitKind
from vitlens.records import UntrustedName
from vitlens.schema import Text
from vitlens.uncertainty import Estimate


def unit_label(name: str) -> str:
    """A unit's name ("head/3/7", "mlp/3", "block/3") as reports show it: L3.H7, L3.MLP, L3.block."""
    kind, layer, *head = name.split("/")
    return f"L{layer}.H{head[0]}" if head else f"L{layer}.{'MLP' if kind == 'mlp' else kind}"


def unit_place(name: str) -> dict[str, str]:
    """The layer and part of a unit ("head/3/7", "mlp/3", "block/3") in the names of metrics."""
    kind, layer, *head = name.split("/")
    return {"layer": layer, "part": head[0] if head else kind}


@dataclass(frozen=True)
class AblateNoteRow:
    """A remark for the report. about: "replacement" for why another replacement than the mean was used."""

    note: Text
    about: Literal["replacement", "measurement"]


@dataclass(frozen=True)
class InsideNoteRow:
    """Why activation patching, the logit lens or the direct contributions were not computed."""

    note: Text


@dataclass(frozen=True)
class UnitRow:
    """The effect of removing one head, MLP or block, with one replacement.

    delta_loss: rise of the mean cross-entropy, nats; delta_accuracy: points of accuracy lost; p_holm, accuracy_p_holm:
    of sign flips, after Holm's correction over the units of the kind; None: not defined for fewer than two images;
    matters: whether p_holm is at most 0.05; first_order: the gradient estimate of delta_loss.
    """

    replace: Replacement
    unit: str
    kind: UnitKind
    layer: int
    head: int | None
    delta_loss: float
    delta_loss_low: float | None
    delta_loss_high: float | None
    p_holm: float | None
    matters: bool
    delta_accuracy: float
    delta_accuracy_low: float | None
    delta_accuracy_high: float | None
    accuracy_p_holm: float | None
    first_order: float | None

    @property
    def label(self) -> str:
        """L3.H7."""
        return unit_label(self.unit)

    @property
    def loss(self) -> Estimate:
        """The rise of the loss with its interval."""
        return Estimate(self.delta_loss, self.delta_loss_low, self.delta_loss_high, None, "nats")

    @property
    def accuracy(self) -> Estimate:
        """The accuracy lost with its interval."""
        return Estimate(self.delta_accuracy, self.delta_accuracy_low, self.delta_accuracy_high, None, "points")


@dataclass(frozen=True)
class ReplacementAgreementRow:
    """Spearman's correlation of two rankings of the heads, by replacement or "first-order"; None: undefined."""

    first: str
    second: str
    rank_correlation: float | None
    heads: int


@dataclass(frozen=True)
class ClassHeadRow:
    """The head without which the loss of one class rises most."""

    class_name: UntrustedName
    images: int
    head: str
    delta_loss: float
    delta_accuracy: float


@dataclass(frozen=True)
class RemovalRow:
    """Accuracy (with its interval) and mean loss (nats) once the first heads of an order are removed."""

    order: str
    removed: int
    share: float
    accuracy: float
    low: float | None
    high: float | None
    n: int
    loss: float


@dataclass(frozen=True)
class RedundancyRow:
    """The numbers of images and of heads whose outputs were compared; the similarities are arrays."""

    images: int
    heads: int


@dataclass(frozen=True)
class HeadPairRow:
    """Two heads removed at once, nats. both: rise of the loss without both; synergy: that minus the sum of the rises
    without each, with its interval; p_holm: corrected for the number of pairs; chosen: by the importance of both heads,
    or by the similarity (linear CKA) of their outputs; first_alone, second_alone: rises without each. Rows of older
    versions lack what follows n."""

    first: str
    second: str
    both: float
    synergy: float
    low: float | None
    high: float | None
    p_holm: float | None
    n: int
    chosen: Literal["importance", "similarity"] = "importance"
    similarity: float | None = None
    first_alone: float | None = None
    second_alone: float | None = None

    @property
    def label(self) -> str:
        """L3.H7 and L4.H0, by layer and head."""
        names = sorted((self.first, self.second), key=lambda name: [int(part) for part in name.split("/")[1:]])
        return " and ".join(map(unit_label, names))

    @property
    def estimate(self) -> Estimate:
        """The synergy with its interval."""
        return Estimate(self.synergy, self.low, self.high, None, "nats")

    @property
    def excludes_zero(self) -> bool:
        """Whether the interval lies on one side of 0."""
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)


@dataclass(frozen=True)
class EliminationRow:
    """One head of --top K, measured until it was separated from the boundary. rank: from 1; images: on which it was
    measured; settled: whether its interval lies on one side of the boundary; top: whether it is among the K."""

    rank: int
    unit: str
    layer: int
    head: int | None
    delta_loss: float
    low: float | None
    high: float | None
    images: int
    settled: bool
    top: bool

    @property
    def label(self) -> str:
        """L3.H7."""
        return unit_label(self.unit)

    @property
    def loss(self) -> Estimate:
        """The rise of the loss with its interval."""
        return Estimate(self.delta_loss, self.low, self.high, self.images, "nats")


CORRUPTED: Final = {"blur": "blurred", "shuffle": "tiles shuffled", "noise": "with noise"}  # a corrupted copy, in words


@dataclass(frozen=True)
class PatchingRow:
    """One clean and one corrupted image. target, other: the classes of the logit difference, whose value is given for
    each image; grid (rows, columns), prefix: the model's tokens, None where they are unknown; corruption: what was done
    to the clean image, "" where the corrupted one is another image."""

    clean: UntrustedName
    corrupted: UntrustedName
    target: UntrustedName
    other: UntrustedName
    difference_clean: float
    difference_corrupted: float
    grid: tuple[int, int] | None
    prefix: tuple[str, ...] | None
    note: Text
    corruption: str = ""


@dataclass(frozen=True)
class LensRow:
    """Accuracy of the classifier on the residual stream after `depth` blocks (0: the embedding)."""

    depth: int
    accuracy: float
    low: float | None
    high: float | None
    n: int

    @property
    def label(self) -> str:
        """The layer after which it is read: embedding, L0, L1 ..."""
        return f"L{self.depth - 1}" if self.depth else "embedding"

    @property
    def estimate(self) -> Estimate:
        """The accuracy with its interval."""
        return Estimate(self.accuracy, self.low, self.high, self.n)


@dataclass(frozen=True)
class LensClassRow:
    """A class whose probability the logit lens shows."""

    class_name: UntrustedName


@dataclass(frozen=True)
class ContributionRow:
    """Direct contributions to the label's logit, means over the images. rest: of embedding and biases; largest_gap: the
    largest difference between an image's sum of contributions and its logit."""

    images: int
    logit: float
    largest_gap: float
    rest: float


@dataclass(frozen=True)
class PrunedRow:
    """The whole or the pruned model. milliseconds, low, high: median and quartiles of a batch of `images` images;
    accuracy with its interval on n images."""

    model: Literal["whole", "pruned"]
    heads: int
    parameters: int
    milliseconds: float
    low: float
    high: float
    images: int
    accuracy: float
    accuracy_low: float | None
    accuracy_high: float | None
    n: int

    @property
    def estimate(self) -> Estimate:
        """The accuracy with its interval."""
        return Estimate(self.accuracy, self.accuracy_low, self.accuracy_high, self.n)


@dataclass(frozen=True)
class PrunedHeadsRow:
    """The heads that were pruned from one layer."""

    layer: int
    heads: tuple[int, ...]
