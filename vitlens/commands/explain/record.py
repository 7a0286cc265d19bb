"""The record of `vitlens explain`. Every row names its model; tables of checks are empty without
--verify.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from vitlens.analysis.faithfulness.checks import ChoiceMargin, ChoiceScores
from vitlens.arrays import (
    FlagStacks,
    IndexMatrix,
    Indices,
    Masks,
    Matrix,
    Pixels,
    Stack,
    Vector,
    Words,
)
from vitlens.commands.shared.explorer import ExplorerArrays, ExplorerRow
from vitlens.commands.shared.maps.record import MapCheckRow, OnObjectRow
from vitlens.record import Better, OfModel, Record, arrays, col, table
from vitlens.uncertainty import Estimate

SEARCH: Final = "search"  # the name of the greedy search among the orders of patches
OVERALL: Final = "shifts"  # the name of all judged disturbances together


@dataclass(frozen=True)
class MethodRow(OfModel):
    """One method on the images of one model.

    title: the title of the method in reports, as the heading of its maps.
    source: the paper, or the package that computes the maps.
    map: the size of a map, rows x columns, such as "14x14".
    signed: True if negative values are evidence against the target.
    maps, constant, not_finite: the number of maps, and of those with this fault.
    seconds: None for maps of a file.
    gain: the mean of |F(image) - F(black)| in logits, for methods whose maps sum to it.
    completeness: the error of that sum.
    matched: how maps of a file were matched with images, "name" or "order"; "" for a method.
    """

    method: str = col("method")
    title: str = col("map", unit="text")
    source: str = col("source", unit="text")
    map: str = col("size")
    signed: bool = col("signed")
    maps: int = col("maps")
    constant: int = col("uniform maps")
    not_finite: int = col("not finite")
    seconds: float | None = col("time an image", unit="s", default=None)
    gain: float | None = col("change of the logit from black", unit="logits", default=None)
    completeness: Estimate | None = col(
        "completeness error",
        term="the mean difference between the sum of a map and the change of the logit from a "
        "black image",
        better="lower",
        metric="completeness/{model}/{method}",
        default=None,
    )
    matched: str = col("matched by", default="")


@dataclass(frozen=True)
class ImageRow(OfModel):
    """One image: its prediction and target class with their probabilities, and its label.

    similarity: the cosine similarity of the image to the target, a phrase. Values are None for a
    model without a classifier, for a model without phrases, and for an image without a label.
    """

    image: str = col("image")
    prediction: str | None = col("prediction", default=None)
    probability: float | None = col("probability", unit="fraction", default=None)
    target: str | None = col("target class", default=None)
    target_probability: float | None = col("its probability", unit="fraction", default=None)
    label: str | None = col("label", default=None)
    similarity: float | None = col("similarity to the target", default=None)


def _faithful(name: str, title: str, *, better: Better = "higher", **more: Any) -> Any:
    """Return the column of a faithfulness check of LeagueRow."""
    return col(title, better=better, metric=f"faithfulness/{{model}}/{name}/{{method}}", **more)


def _localised(name: str, title: str) -> Any:
    """Return the column of a localisation score of LeagueRow."""
    return col(
        title, better="higher", metric=f"localisation/{{model}}/{name}/{{method}}", default=None
    )


def _lower(metric: str, title: str) -> Any:
    """Return another column of LeagueRow, of which lower values are better."""
    return col(title, better="lower", metric=metric, default=None)


@dataclass(frozen=True)
class LeagueRow(OfModel):
    """One method, or baseline, in every check, averaged over images.

    A field is None if a check was not run or gave no number.

    randomisation: with all weights random.
    cascade: mean over all stages.
    seconds, forwards: the cost per image.
    faults: the faults of the maps, in words.
    """

    method: str = col("method")
    baseline: bool = col("baseline")
    deletion: Estimate = _faithful("deletion", "deletion", better="lower")
    insertion: Estimate = _faithful("insertion", "insertion")
    gap: Estimate = _faithful("gap", "insertion − deletion")
    relevance_gain: Estimate = _faithful("relevance_gain", "symmetric relevance gain")
    deletion_accuracy: Estimate | None = _faithful(
        "deletion_accuracy", "deletion, predictions kept", better="lower", default=None
    )
    insertion_accuracy: Estimate | None = _faithful(
        "insertion_accuracy", "insertion, predictions kept", default=None
    )
    road: Estimate | None = _faithful("road", "ROAD", default=None)
    roc_auc: Estimate | None = _localised("roc_auc", "ROC-AUC on the object")
    average_precision: Estimate | None = _localised("average_precision", "average precision")
    iou: Estimate | None = _localised("iou", "IoU")
    pixel_accuracy: Estimate | None = _localised("pixel_accuracy", "pixel accuracy")
    mass: Estimate | None = _localised("mass", "mass on the object")
    pointing: Estimate | None = _localised("pointing", "pointing game")
    randomisation: Estimate | None = _lower("randomisation/{model}/{method}", "all weights random")
    cascade: Estimate | None = _lower("randomisation_cascade/{model}/{method}", "mean over stages")
    seconds: Estimate | None = _lower("cost/{model}/seconds/{method}", "time an image")
    forwards: Estimate | None = _lower("cost/{model}/forwards/{method}", "forward passes")
    faults: str = col("faults", default="")


@dataclass(frozen=True)
class StageRow(OfModel):
    """The maps of a method after one stage of the randomisation, which includes all stages before
    it.

    similarity: mean rank correlation with the maps of the trained model; None if undefined.
    kept: share of predictions that stay the same.
    """

    method: str = col("method")
    stage: str = col("random down to")
    similarity: Estimate | None = col("rank correlation", default=None)
    kept: float | None = col("predictions kept", unit="fraction", default=None)


@dataclass(frozen=True)
class PairRow(OfModel):
    """The similarity of the maps of two methods, averaged over images.

    spearman: rank correlation.
    top_overlap: the overlap of the highest cells.
    iou: intersection over union of the cells above the mean of each map.
    """

    first: str = col("method")
    second: str = col("other method")
    spearman: Estimate = col("rank correlation", metric="agreement/{model}/{first}/{second}")
    top_overlap: Estimate = col("overlap of the highest cells")
    iou: Estimate = col("IoU of the cells above the mean")


@dataclass(frozen=True)
class OrderRow(OfModel):
    """The patches to remove, in the order of one method's map, before the prediction changes.

    size: their share, mean over all images; None for the greedy search.
    turned: the share of all images with a set of patches whose removal changes the prediction; None
        for the greedy search.
    searched: as size, on the images of the greedy search only.
    """

    method: str = col("order of")
    size: Estimate | None = col(
        "patches to remove",
        better="lower",
        metric="counterfactual/{model}/size/{method}",
        default=None,
    )
    turned: Estimate | None = col(
        "predictions changed",
        better="higher",
        metric="counterfactual/{model}/turned/{method}",
        default=None,
    )
    searched: Estimate | None = col(
        "on the searched images",
        better="lower",
        metric="counterfactual/{model}/size_searched/{method}",
        default=None,
    )


@dataclass(frozen=True)
class SubstrateRow(OfModel):
    """Insertion minus deletion (LeRF minus MoRF) of one method, or baseline, with one replacement
    of removed patches.

    All replacements are tried on the same images.
    """

    method: str = col("method")
    baseline: bool = col("baseline")
    substrate: str = col("replacement")
    gap: Estimate = col(
        "insertion − deletion", better="higher", metric="substrates/{model}/{substrate}/{method}"
    )


@dataclass(frozen=True)
class RankingRow(OfModel):
    """The agreement of the rankings of methods, without baselines, with two replacements.

    tau: Kendall's tau. swapped: the number of pairs of methods that significantly change places.
    """

    first: str = col("replacement")
    second: str = col("and")
    tau: Estimate = col(
        "Kendall's τ",
        term="1 if two rankings are the same, -1 if one is the reverse of the other",
        metric="substrate_agreement/{model}/{first}/{second}",
    )
    methods: int = col("methods")
    swapped: int = col("pairs that change places")


@dataclass(frozen=True)
class SwappedRow(OfModel):
    """Two methods that significantly change places between two replacements.

    in_first, in_second: the mean paired difference (better minus worse) of insertion minus deletion
    with each replacement, corrected for the number of pairs.
    """

    first: str = col("first replacement")
    second: str = col("second replacement")
    better: str = col("method")
    worse: str = col("other method")
    in_first: Estimate = col("difference with the first")
    in_second: Estimate = col("with the second")


@dataclass(frozen=True)
class StabilityRow(OfModel):
    """The stability of the maps of one method when the images are shifted or flipped.

    disturbance: a name of the registry, or OVERALL.
    correlation: mean rank correlation between the map of the disturbed image and the map disturbed
        in the same way.
    jumped: share of images whose highest value moves far. Values are None without a usable map.
    """

    method: str = col("method")
    disturbance: str = col("images")
    correlation: Estimate | None = col(
        "rank correlation",
        better="higher",
        metric="stability/{model}/correlation/{disturbance}/{method}",
        default=None,
    )
    jumped: Estimate | None = col(
        "maps that jump",
        better="lower",
        metric="stability/{model}/jumped/{disturbance}/{method}",
        default=None,
    )


@dataclass(frozen=True)
class PowerRow(OfModel):
    """The power of paired comparisons of the best method with the others in one check.

    error: the median standard error of the mean difference.
    groups: independent images.
    detectable: the smallest true difference detected with a power of 80 % at the 5 % level; None if
        it exceeds every possible difference.
    """

    check: str = col("check")
    best: str = col("best method")
    error: float = col("standard error")
    groups: int = col("independent images")
    detectable: Estimate | None = col(
        "detectable difference", metric="detectable/{model}/{check}", default=None
    )


@dataclass(frozen=True)
class CompositeSetRow(OfModel):
    """The composites of one kind.

    A composite is put together of several images of different classes, such as a mosaic of four.
    One or all of its classes are explained, with a map for each. The part of the composite that
    shows the explained class is the evidence: the map should be positive there, and only there.

    kind: the name of the kind in COMPOSITE_KINDS, such as "mosaic-2".
    refused: why there are none, or "".
    labels: the origin of the classes of images, "labels" or "predictions".
    usable, classes: the number of confidently classified images, and of their classes.
    composites, maps: their number.
    chance: the mean share of the area that the evidence covers.
    recognised: the share of target classes among the most probable classes of their composite.
    guessed: the share of target classes that would be recognised by guessing.
    seen: True if recognised is significantly above guessed.
    """

    kind: str = col("composites of")
    refused: str = col("not made", unit="text")
    labels: str = col("classes from")
    usable: int = col("images")
    classes: int = col("classes")
    composites: int = col("composites")
    maps: int = col("maps")
    chance: float | None = col("evidence covers", unit="fraction", default=None)
    recognised: Estimate | None = col(
        "recognised", better="higher", metric="composites/{model}/{kind}/recognised", default=None
    )
    guessed: float = col("by guessing", unit="fraction", default=0.0)
    seen: bool = col("seen", default=False)


@dataclass(frozen=True)
class CompositeRow(OfModel):
    """One method, or baseline, on one kind of composites, averaged over its maps.

    mass, pointing, roc_auc: scores of localisation, with the evidence as the object.
    above: the baselines that its mass significantly exceeds (paired, corrected for the number of
    methods).
    """

    kind: str = col("composites of")
    method: str = col("method")
    baseline: bool = col("baseline")
    mass: Estimate = col(
        "mass on the class", better="higher", metric="composites/{model}/{kind}/mass/{method}"
    )
    pointing: Estimate = col(
        "pointing game", better="higher", metric="composites/{model}/{kind}/pointing/{method}"
    )
    roc_auc: Estimate = col(
        "ROC-AUC", better="higher", metric="composites/{model}/{kind}/roc_auc/{method}"
    )
    above: tuple[str, ...] = col("exceeds", default=())


@dataclass(frozen=True)
class ChoiceRow(OfModel):
    """The method chosen for one model.

    reason: why it is the default and not chosen by evidence, or "".
    checks: those that decided.
    left_out: checks that judged nothing, with the reason.
    localised: the parts on which localisation was scored, "objects" or a kind of composites.
    certainty: the share of bootstrap draws of the selection half in which it wins.
    alike: candidates with the same maps.
    confirmation: the result of comparing it with the runner-up on the report half.
    selection, report: the number of images in each half.
    replaced: the replacement of removed patches.
    """

    method: str = col("chosen")
    reason: str = col("not by evidence", unit="text")
    candidates: tuple[str, ...] = col("candidates")
    checks: tuple[str, ...] = col("checks")
    left_out: Mapping[str, str] = col("left out")
    localised: str = col("localised on")
    certainty: Estimate | None = col("wins", metric="choice/{model}/certainty", default=None)
    draws: int = col("bootstrap samples", default=0)
    runner_up: str | None = col("runner-up", default=None)
    alike: tuple[str, ...] = col("the same maps", default=())
    confirmation: Literal["confirmed", "not confirmed", "contradicted"] | None = col(
        "other half", default=None
    )
    selection: int = col("images that select", default=0)
    report: int = col("images that report", default=0)
    replaced: str = col("replaced by", default="")


@dataclass(frozen=True)
class ExplainArrays:
    """The drawn images of one model with their maps.

    maps: by index of the model's methods (images, rows, columns), raw.
    masks: the masks of the objects, or None.
    """

    images: Pixels
    maps: Mapping[int, Stack]
    masks: Masks | None = None


@dataclass(frozen=True)
class CurveArrays:
    """The mean removal curves of one model.

    deletion, insertion: the probability of the target (methods, steps).
    shares, inserted: the shares of patches that are removed or inserted at each step.
    """

    methods: Words
    shares: Vector
    inserted: Vector
    deletion: Matrix
    insertion: Matrix


@dataclass(frozen=True)
class SetArrays:
    """The patches whose removal changes the prediction of a few images.

    methods: the orders of patches: methods with maps, then SEARCH.
    removed: True for the removed patches (images, orders, rows, columns).
    turned: the class that is predicted without them (images, orders), an index of `classes`.
    prediction: the class that is predicted for the whole image (images,), an index of `classes`.
    """

    images: Pixels
    methods: Words
    removed: FlagStacks
    turned: IndexMatrix
    prediction: Indices
    classes: Words


@dataclass(frozen=True)
class CompositeArrays:
    """The first composites of one kind with their maps.

    images, masks: the composite and the evidence of each map; a composite is repeated for each
        class that is explained on it.
    maps: by index of `methods` (maps, rows, columns), raw.
    targets: the class that each map explains.
    """

    images: Pixels
    masks: Masks
    maps: Mapping[int, Stack]
    methods: Words
    targets: Words


@dataclass(frozen=True, kw_only=True)
class ExplainRecord(Record):
    """Attribution maps of one or several models, and the checks of the methods."""

    methods: tuple[MethodRow, ...] = table()
    shown: tuple[ImageRow, ...] = table()
    checks: tuple[MapCheckRow, ...] = table()
    league: tuple[LeagueRow, ...] = table()
    stages: tuple[StageRow, ...] = table()
    agreement: tuple[PairRow, ...] = table()
    orders: tuple[OrderRow, ...] = table()
    on_object: tuple[OnObjectRow, ...] = table()
    substrates: tuple[SubstrateRow, ...] = table()
    rankings: tuple[RankingRow, ...] = table()
    swapped: tuple[SwappedRow, ...] = table()
    stability: tuple[StabilityRow, ...] = table()
    power: tuple[PowerRow, ...] = table()
    composite_sets: tuple[CompositeSetRow, ...] = table()
    composites: tuple[CompositeRow, ...] = table()
    chosen: tuple[ChoiceRow, ...] = table()
    choice_scores: tuple[ChoiceScores, ...] = table()
    choice_margins: tuple[ChoiceMargin, ...] = table()
    explorer: tuple[ExplorerRow, ...] = table()
    maps: Mapping[str, ExplainArrays] = arrays("explain-{model}")
    curves: Mapping[str, CurveArrays] = arrays("league-{model}")
    sets: Mapping[str, SetArrays] = arrays("counterfactuals-{model}")
    composite_maps: Mapping[str, CompositeArrays] = arrays("composites-{place}")
    explorer_arrays: Mapping[str, ExplorerArrays] = arrays("explorer-{model}")
