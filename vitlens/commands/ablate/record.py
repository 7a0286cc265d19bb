"""The record of `vitlens ablate`. A unit is a head (L3.H7), an MLP (L3.MLP), a block (L3.block) or
a latent of a dictionary (L3.latent70), counted from 0.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from vitlens.arrays import FlagMatrix, Flags, Image, Indices, Matrix, Pixels, Vector, Words
from vitlens.names import Replacement, UnitKind
from vitlens.record import OfModel, Record, arrays, col, table
from vitlens.report.claims import FEWEST, above
from vitlens.uncertainty import LEVEL, Estimate, widened

Effect = Literal["effect", "no effect", "undecided"]

# name of the gradient estimate among rankings and orders of removal
FIRST_ORDER: Final = "first-order"
# nats, a fall of the label's probability by 1 % (geometric mean over images)
SMALLEST_LOSS: Final = 0.01
OF_CLEAN: Final = 0.01  # share of the clean loss, for models with a high loss
REPLACED: Final[Mapping[str, str]] = {
    "mean": "its mean over the data",
    "zero": "zero",
    "resample": "its output on another image",
}


def smallest_effect(clean_loss: float) -> Estimate:
    """Return the smallest change of the mean loss that is worth reporting: the larger of
    SMALLEST_LOSS and the share OF_CLEAN of the clean loss, nats.
    """
    return Estimate(max(SMALLEST_LOSS, OF_CLEAN * clean_loss), unit="nats")


def judge_effect(loss: Estimate, p: float | None, smallest: Estimate, tests: int) -> Effect:
    """Return "effect" or "no effect" if the change of the loss is clearly above or below the
    smallest effect.

    p: the p-value of the change, after Holm's correction over the units of the kind.
    tests: number of these units, for which the interval is widened.
    """
    wide = widened(loss, tests)
    if wide.low is None or wide.high is None:
        return "undecided"
    if -smallest.value <= wide.low and wide.high <= smallest.value:
        return "no effect"
    is_outside = wide.low > smallest.value or wide.high < -smallest.value
    is_significant = p is not None and p <= LEVEL
    if is_outside and is_significant:
        return "effect"
    return "undecided"


@dataclass(frozen=True, kw_only=True)
class AblatedModelRow(OfModel):
    """The model without removal, and summaries over its units.

    rank_correlation: Spearman's, between the heads' effects with the main replacement and with
        another one, or with their "first-order" estimates, where it is defined.
    reason: for a replacement other than the mean.
    notes: remarks of the measurements.
    undone: reasons for missing patching, logit lens or contributions.
    dictionary: the place of the dictionary of latents, "" for none.
    latents: the number of its latents.
    """

    replace: Replacement = col("replaced by")
    accuracy: Estimate = col(
        "top-1 accuracy", better="higher", metric="accuracy/{model}", share=True
    )
    cross_entropy: Estimate = col("cross-entropy", better="lower", metric="cross_entropy/{model}")
    smallest: Estimate = col("smallest effect worth reporting")
    matter: Estimate | None = col(
        "heads with significant effect",
        metric="heads_that_matter/{model}",
        share=True,
        default=None,
    )
    without_effect: Estimate | None = col(
        "heads without effect", metric="heads_without_effect/{model}", share=True, default=None
    )
    rank_correlation: Mapping[str, Estimate] = col(
        "rank correlation", metric="rank_correlation/{model}/{key}"
    )
    removable: Estimate | None = col(
        "heads removable within 1 point", metric="removable_share/{model}", share=True, default=None
    )
    parameters_cut: Estimate | None = col(
        "parameters pruned", metric="parameters_cut/{model}", default=None
    )
    forwards: Mapping[str, Estimate] = col(
        "forward passes an image", metric="forward_equivalents/{model}/{key}"
    )
    reason: str = col("reason for the replacement", default="")
    notes: tuple[str, ...] = col("notes", default=())
    undone: tuple[str, ...] = col("not measured", default=())
    dictionary: str = col("dictionary of", default="")
    latents: int = col("latents of the dictionary", default=0)


@dataclass(frozen=True, kw_only=True)
class UnitRow(OfModel):
    """The effect of removing one unit.

    part: the head's number, "mlp", "block" or "latent70".
    label: what a head attends to, as in `vitlens stats`.
    p: the p-value of sign flips, after Holm's correction over the units of the kind, None for fewer
        than two images.
    log_odds, log_odds_p: the same for the label's log-odds, by which units are ranked if the mean
        loss is near 0, else None.
    effect: by `judge_effect`.
    first_order: the gradient estimate of the rise of the loss.
    other_losses, other_p, other_effects: with the other replacements, by name.
    hidden, hidden_p: the rise under resampling minus that under the mean, paired over images, if
        both were measured.
    """

    unit: str = col("unit")
    kind: UnitKind = col("kind")
    layer: int = col("layer")
    head: int | None = col("head", default=None)
    latent: int | None = col("latent", default=None)
    part: str = col("part")
    label: str | None = col("attends to", default=None)
    replace: Replacement = col("replaced by")
    loss: Estimate = col(
        "rise of the loss",
        metric="importance/{model}/delta_loss/{layer}/{part}",
        term="mean cross-entropy without the unit minus that of the unchanged model, on the same "
        "images",
    )
    p: float | None = col("p (Holm)", default=None)
    log_odds: Estimate | None = col(
        "fall of the log-odds",
        default=None,
        term="mean log-odds of the label in the unchanged model minus those without the unit",
    )
    log_odds_p: float | None = col("p of the log-odds (Holm)", default=None)
    accuracy: Estimate = col(
        "accuracy lost", metric="importance/{model}/delta_accuracy/{layer}/{part}"
    )
    effect: Effect = col("effect")
    first_order: float | None = col("first-order estimate", unit="nats", default=None)
    other_losses: Mapping[Replacement, Estimate] = col("rise of the loss, replaced by")
    other_p: Mapping[Replacement, float] = col("p (Holm), replaced by")
    other_effects: Mapping[Replacement, Effect] = col("effect, replaced by")
    hidden: Estimate | None = col("hidden by the mean", default=None)
    hidden_p: float | None = col("p of what is hidden (Holm)", default=None)

    @property
    def name(self) -> str:
        """Return the unit, for lists of names in sentences."""
        return self.unit

    @property
    def matters(self) -> bool:
        """Return True if removing the unit changes the loss significantly."""
        return self.p is not None and self.p <= LEVEL

    @property
    def losses(self) -> Mapping[Replacement, Estimate]:
        """Return the rise of the loss with every replacement, by name."""
        return {self.replace: self.loss, **self.other_losses}

    @property
    def effects(self) -> Mapping[Replacement, Effect]:
        """Return the effect with every replacement, by name."""
        return {self.replace: self.effect, **self.other_effects}

    @property
    def rank(self) -> Estimate:
        """Return the signed change by which units are ranked, nats: the fall of the log-odds, or
        else the rise of the loss.
        """
        return self.log_odds or self.loss

    @property
    def is_ranked(self) -> bool:
        """Return True if the change of `rank` is significant."""
        p = self.p if self.log_odds is None else self.log_odds_p
        return p is not None and p <= LEVEL


@dataclass(frozen=True)
class RemovalRow:
    """The accuracy and the mean loss after the first heads of an order were removed."""

    order: str = col("order")
    removed: int = col("heads removed")
    share: float = col("heads removed", unit="fraction")
    accuracy: Estimate = col("top-1 accuracy", better="higher")
    loss: float = col("cross-entropy", unit="nats")


@dataclass(frozen=True)
class HeadPairRow:
    """Two heads removed at once; the first is of the earlier layer.

    chosen: for the importance of both heads, or for the similarity of their outputs.
    first_alone, second_alone, both: rise of the loss, nats.
    synergy: the rise without both heads minus the sum of the rises without each.
    p: after Holm's correction over the pairs.
    """

    first: str = col("first")
    second: str = col("second")
    pair: str = col("pair")
    chosen: Literal["importance", "similarity"] = col("chosen by")
    first_alone: float = col("without the first", unit="nats")
    second_alone: float = col("without the second", unit="nats")
    both: float = col("without both", unit="nats")
    synergy: Estimate = col("beyond the sum")
    p: float | None = col("p (Holm)", default=None)
    similarity: float | None = col(
        "similarity", default=None, term="linear CKA of two heads' outputs, 1: alike"
    )

    @property
    def larger(self) -> float:
        """Return the larger change of the loss without one of the heads, nats."""
        return max(abs(self.first_alone), abs(self.second_alone))


@dataclass(frozen=True)
class PatchingRow:
    """A clean and a corrupted image, and the logit difference between two classes on each of them.

    target, other: the classes of the logit difference.
    corruption: applied to the clean image, "" if the corrupted one is another image.
    grid: (rows, columns).
    prefix: tokens before the patches; None if the layout is unknown.
    """

    clean: str = col("clean image")
    corrupted: str = col("corrupted image")
    target: str = col("class")
    other: str = col("other class")
    difference_clean: float = col("logit difference, clean")
    difference_corrupted: float = col("logit difference, corrupted")
    corruption: str = col("corruption", default="")
    grid: tuple[int, int] | None = col("patches (rows, columns)", default=None)
    prefix: tuple[str, ...] | None = col("prefix tokens", default=None)


@dataclass(frozen=True)
class LensRow:
    """The accuracy of the classifier on the residual stream after `depth` blocks (0: the
    embedding).
    """

    depth: int = col("blocks passed")
    accuracy: Estimate = col("accuracy of the logit lens")


@dataclass(frozen=True)
class ContributionRow:
    """The direct contribution of one part to the label's logit, a mean over images; "rest":
    embedding and biases.

    The contributions of all parts sum to the logit.
    """

    unit: str = col("unit")
    part: Literal["head", "MLP", "rest"] = col("part")
    logit: float = col("direct contribution", unit="logits")
    layer: int | None = col("layer", default=None)
    head: int | None = col("head", default=None)


@dataclass(frozen=True)
class ExemplarRow:
    """An image with a large contribution of one head to its label.

    The image with the largest contribution comes first.

    adds: direct contribution to the logit of the label, above the mean over all classes.
    picture: row of the image in the arrays.
    patch: (row, column) of the patch with the largest contribution, on the `grid` (rows, columns);
        None if it is unknown.
    """

    layer: int = col("layer")
    head: int = col("head")
    image: str = col("image")
    class_name: str = col("class")
    adds: float = col("added to the label", unit="logits")
    picture: int = col("picture")
    patch: tuple[int, int] | None = col("most through the patch (row, column)", default=None)
    grid: tuple[int, int] | None = col("patches (rows, columns)", default=None)


@dataclass(frozen=True)
class PrunedRow:
    """The whole or the pruned model.

    time: the median time of a batch, with quartiles.
    cut: the pruned heads.
    """

    model: Literal["whole", "pruned"] = col("model")
    heads: int = col("heads")
    parameters: int = col("parameters", better="lower")
    accuracy: Estimate = col("top-1 accuracy", better="higher")
    time: Estimate = col("time of a batch (quartiles)", better="lower")
    cut: tuple[str, ...] = col("heads cut", default=())


@dataclass(frozen=True)
class EffectArrays:
    """The results of every image with one replacement.

    delta_loss, correct, first_order: (units, images).
    clean_loss, clean_correct: of the unchanged model, (images,).
    labels: (images,) columns of the logits.
    """

    units: Words
    delta_loss: Matrix
    correct: FlagMatrix
    clean_loss: Vector
    clean_correct: Flags
    labels: Indices
    first_order: Matrix


@dataclass(frozen=True)
class PatchingArrays:
    """The clean and the corrupted image, and the share of the logit difference that each activation
    restores.

    heads: (layers, heads); positions: (layers, tokens); NaN where there is no head or token.
    """

    clean: Image
    corrupted: Image
    heads: Matrix
    positions: Matrix


@dataclass(frozen=True)
class ExemplarArrays:
    """The exemplars of all heads without duplicates, at most 96 px high and wide."""

    images: Pixels


@dataclass(frozen=True, kw_only=True)
class AblateRecord(Record):
    """The effects of removing units of one model, and measurements inside it."""

    ablated: tuple[AblatedModelRow, ...] = table()
    units: tuple[UnitRow, ...] = table()
    curves: tuple[RemovalRow, ...] = table()
    pairs: tuple[HeadPairRow, ...] = table()
    patching: tuple[PatchingRow, ...] = table()
    lens: tuple[LensRow, ...] = table()
    contributions: tuple[ContributionRow, ...] = table()
    exemplars: tuple[ExemplarRow, ...] = table()
    pruned: tuple[PrunedRow, ...] = table()
    effects: Mapping[str, EffectArrays] = arrays("effects-{replace}")
    patched: PatchingArrays | None = arrays("patching")
    pictures: ExemplarArrays | None = arrays("exemplars")

    @property
    def model(self) -> AblatedModelRow:
        """Return the row of the model."""
        return self.ablated[0]

    @property
    def heads(self) -> tuple[UnitRow, ...]:
        """Return the units that are heads."""
        return tuple(row for row in self.units if row.kind == "head")

    @property
    def latents(self) -> tuple[UnitRow, ...]:
        """Return the units that are latents of a dictionary."""
        return tuple(row for row in self.units if row.kind == "latent")

    @property
    def has_few_images(self) -> bool:
        """Return True if the images are too few for a claim."""
        return self.images < FEWEST


def without_effect(record: AblateRecord) -> list[UnitRow]:
    """Return the heads that have no effect with any replacement, and are not one of a redundant
    pair.
    """
    in_redundant_pairs = set()
    for pair in redundant_pairs(record):
        in_redundant_pairs |= {pair.first, pair.second}
    rows = []
    for row in record.heads:
        is_inert = set(row.effects.values()) == {"no effect"}
        if is_inert and row.unit not in in_redundant_pairs:
            rows.append(row)
    return rows


def redundant_pairs(record: AblateRecord) -> list[HeadPairRow]:
    """Return the pairs that only matter when both heads are removed, the largest synergy first."""
    smallest = record.model.smallest.value
    rows = []
    for row in record.pairs:
        is_significant = row.p is not None and row.p <= LEVEL
        is_small_alone = row.larger <= smallest
        is_large_together = above(row.synergy, smallest, len(record.pairs))
        if is_significant and is_small_alone and is_large_together:
            rows.append(row)
    return sorted(rows, key=lambda row: -row.synergy.value)
