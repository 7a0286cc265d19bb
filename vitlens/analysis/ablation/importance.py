"""The importance of each unit from its effects on all images: means, intervals, tests.

The first-order estimate of a head's effect, gradient times change of output, takes one backward
pass.
"""

import dataclasses
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from vitlens.analysis.ablation.bench import Bench, ByImage, Outcomes, Unit, require_heads, units_of
from vitlens.analysis.attention.weights import require_attention
from vitlens.analysis.evaluation.evaluate import fitting_batch_size
from vitlens.analysis.evaluation.intervals import intervals, mean_test, spearman
from vitlens.analysis.evaluation.log_odds import cross_entropy
from vitlens.classes import required_labels
from vitlens.inputs import takes_images
from vitlens.lens.capture import capture
from vitlens.lens.differentiable import needing_gradients
from vitlens.models.model import Model
from vitlens.names import Replacement, UnitKind
from vitlens.pixels import AnyImages, as_parts, groups_of
from vitlens.resampling import DRAWS
from vitlens.summary import HeadBoard, Line, Table
from vitlens.uncertainty import Estimate, fewest_images, finite, half_of_constant, holm

LEVEL = 0.05  # of the tests, after Holm's correction
SATURATED = 0.05  # nats: of a model with a smaller mean loss, units that matter hardly change it

PerUnit = Float[Tensor, " units"]
PerLayer = Float[Tensor, "layers heads"]

GRAPH = 4  # divides the batch size, as a backward pass keeps the activations of all layers


@dataclass(frozen=True)
class MeanChange:
    """The mean change of a metric without each unit, with its 95 % interval over images.

    mean (units,); low, high (units,): percentile bootstrap of the paired differences, NaN for fewer
    than 2 images (or groups); p (units,): two-sided, by `mean_test`; p_holm (units,): adjusted for
    the units of the same kind. float64.
    """

    mean: PerUnit
    low: PerUnit
    high: PerUnit
    p: PerUnit
    p_holm: PerUnit

    def estimate(self, index: int, n: int, unit: str) -> Estimate:
        """Return the mean change of one unit over n images; without an interval where it is not
        defined.
        """
        low = finite(self.low[index])
        high = finite(self.high[index])
        return Estimate(
            float(self.mean[index]),
            *((None, None) if None in (low, high) else (low, high)),
            n,
            unit,
        )


@dataclass(frozen=True, repr=False)
class Importance(Table):
    """How much each unit matters: what the model loses without it (positive: the unit helps).

    n: images; replace: what replaced its output; loss: change of the mean cross-entropy, nats;
    accuracy: of accuracy, points; log_odds: the fall of the label's mean log-odds, nats, by which
    units are ranked where the mean loss is below SATURATED, else None; clean_loss, clean_accuracy:
    of the unchanged model, nats and fraction; first_order (units,): the mean estimate, nats (NaN
    where undefined), or None; rank_correlation: Spearman's, of it and the exact change of loss over
    the heads (NaN where undefined); forward_equivalents: full forward passes spent an image, a
    mean; note: a remark for a report, or "".
    """

    units: tuple[Unit, ...]
    n: int
    replace: Replacement
    loss: MeanChange
    accuracy: MeanChange
    clean_loss: float
    clean_accuracy: float
    first_order: PerUnit | None = None
    rank_correlation: float = float("nan")
    forward_equivalents: float = 0.0
    note: str = ""
    log_odds: MeanChange | None = None

    def summary(self) -> Iterator[Line]:
        """Yield what was removed, and what it changes."""
        yield Line("images", self.n)
        yield Line("replaced by", self.replace)
        yield Line("clean_loss", self.clean_loss, "nats")
        yield Line("clean_accuracy", self.clean_accuracy, "fraction")
        if self.of_kind("head"):
            yield Line("delta_loss", self.delta_loss, "nats")
            yield Line("delta_accuracy", self.delta_accuracy, "points")
        yield Line(
            "units",
            f"{len(self.units)}, {int(self.matters.sum())} with an effect after Holm's correction",
        )
        yield Line("note", self.note)

    def boards(self) -> Iterator[HeadBoard]:
        """Yield the change of the loss without each head."""
        if self.of_kind("head"):
            yield HeadBoard(
                "change of the loss without each head", self.delta_loss.tolist(), "nats"
            )

    def records(self) -> Iterator[dict[str, object]]:
        """Return a row for each unit: what it is, and what the model loses without it, with
        intervals and p-values.
        """
        columns = {
            "delta_loss": self.loss.mean,
            "delta_loss_low": self.loss.low,
            "delta_loss_high": self.loss.high,
            "p": self.loss.p,
            "p_holm": self.loss.p_holm,
            "delta_accuracy": self.accuracy.mean,
            "delta_accuracy_low": self.accuracy.low,
            "delta_accuracy_high": self.accuracy.high,
        }
        for index, unit in enumerate(self.units):
            values = {name: float(numbers[index]) for name, numbers in columns.items()}
            yield {"kind": unit.kind, "layer": unit.layer, "head": unit.head, **values}

    @property
    def matters(self) -> Bool[Tensor, " units"]:
        """Return which units change the loss, after Holm's correction among the units of their
        kind.
        """
        return self.loss.p_holm <= LEVEL

    def is_ranked(self, kind: UnitKind = "head") -> bool:
        """Return True if a unit of the kind has an effect after Holm's correction; otherwise a
        ranking orders noise.
        """
        return bool((self._ranked_by.p_holm <= LEVEL)[self.of_kind(kind)].any())

    @property
    def _ranked_by(self) -> MeanChange:
        return self.log_odds or self.loss

    @property
    def delta_loss(self) -> PerLayer:
        """Change of the mean cross-entropy without each head, nats."""
        return self.table(self.loss.mean)

    @property
    def delta_accuracy(self) -> PerLayer:
        """Points of accuracy lost without each head."""
        return self.table(self.accuracy.mean)

    @property
    def low(self) -> PerLayer:
        """Lower end of delta_loss's 95 % interval."""
        return self.table(self.loss.low)

    @property
    def high(self) -> PerLayer:
        """Upper end of delta_loss's 95 % interval."""
        return self.table(self.loss.high)

    def of_kind(self, kind: UnitKind) -> list[int]:
        """Return the indices of a kind's units in `units`."""
        return [index for index, unit in enumerate(self.units) if unit.kind == kind]

    def ranking(self, kind: UnitKind = "head") -> tuple[Unit, ...]:
        """Return the units of a kind, the most important first: by change of loss, or of log-odds
        if the loss is near 0.
        """
        mean = self._ranked_by.mean.tolist()
        return tuple(
            self.units[index]
            for index in sorted(self.of_kind(kind), key=lambda index: -mean[index])
        )

    def table(self, values: Tensor, kind: UnitKind = "head") -> PerLayer:
        """Values (units,) as (layers, heads), float64; (layers, 1) for MLPs and blocks; NaN where
        there is no unit.
        """
        own = self.of_kind(kind)
        layers = 1 + max(unit.layer for unit in self.units)
        heads = 1 + max((self.units[index].head or 0 for index in own), default=0)
        table = torch.full((layers, heads), torch.nan, dtype=torch.float64)
        for index in own:
            table[self.units[index].layer, self.units[index].head or 0] = float(values[index])
        return table


@takes_images
def ablate(
    model: Model,
    images: AnyImages,
    labels: Tensor | str | None = None,
    *,
    replace: Replacement | None = None,
    kinds: UnitKind | Sequence[UnitKind] = ("head",),
    batch_size: int | None = None,
    seed: int = 0,
) -> Importance:
    """Return how much every head (and MLP, block) matters: the exact change of loss and accuracy
    without it, with intervals.

    images: (n, 3, height, width) in [0, 1], or any form that `vitlens.images` takes, read a batch
    at a time; intervals and tests are over its groups where it is a Split that has them; labels:
    class indices (n,), or "predicted" (None: those of the Split or the class folders); replace:
    what replaces a head's output, its "mean" over the images (at least 8), "zero", or another
    image's output, "resample" (None: "mean", with 2 to 7 images "resample", with one "zero"; the
    result's `replace` and `note` say which); batch_size: images at a time (None: chosen to fit).
    Raises UnsupportedError for a model without attention or without a classifier, InputError for
    too few images.

    >>> import torch, vitlens
    >>> vit = vitlens.load("vit-digits")
    >>> effect = vitlens.ablate(vit, torch.rand(8, 3, 32, 32), torch.arange(8))
    >>> effect.delta_loss.shape == effect.low.shape  # (layers, heads), nats
    True
    """
    images = as_parts(images)
    kinds = (kinds,) if isinstance(kinds, str) else kinds
    model.require_classifier()
    if "head" in kinds:
        require_heads(model)
    else:
        require_attention(model)
    labels = required_labels(model, images, labels, batch_size or fitting_batch_size(model))
    bench = Bench(model, images, labels, replace, groups_of(images), seed, batch_size)
    effects = bench.without([(unit,) for unit in units_of(model, kinds=kinds)])
    return summarise(effects, groups=bench.groups, seed=seed)


def summarise(
    effects: Outcomes, *, groups: Tensor | None = None, first: ByImage | None = None, seed: int = 0
) -> Importance:
    """Means, intervals and tests of effects on all images.

    groups (n,): of images that share a source; whole groups are drawn and flipped; first (units,
    n): from first_order.
    """
    changes = [effects.delta_loss, effects.delta_accuracy]
    saturated = float(effects.clean_loss.mean()) < SATURATED
    if saturated:
        changes.append(effects.delta_log_odds)
    kinds = [unit.kind for unit in effects.units]
    loss, accuracy, *log_odds = mean_changes(changes, families=kinds, groups=groups, seed=seed)
    clusters, sampled = (
        (len(effects), "images") if groups is None else (len(groups.unique()), "groups of images")
    )
    accuracy = _as_points(accuracy, clusters)
    few = (
        f"no intervals and no tests: they need at least 2 {sampled}, found {clusters}"
        if clusters < 2
        else ""
    )
    never = (
        ""
        if effects.clean_correct.any()
        else (
            f"the unchanged model classifies none of the {len(effects)} images correctly, so "
            "accuracy can only rise: read the change of loss, and check that labels and classes "
            "match"
        )
    )
    notes = [
        effects.note,
        few,
        _too_few_for_holm(kinds, clusters, sampled) if clusters > 1 else "",
        never,
    ]
    if saturated:
        notes.append(
            f"the mean loss of the unchanged model, {float(effects.clean_loss.mean()):.2g} nats, "
            f"is below {SATURATED}, "
            "so units are ranked by the mean change of the label's log-odds"
        )
    estimate = None if first is None else first.mean(1)
    heads = [index for index, unit in enumerate(effects.units) if unit.kind == "head"]
    return Importance(
        effects.units,
        len(effects),
        effects.replace,
        loss,
        accuracy,
        float(effects.clean_loss.mean()),
        float(effects.clean_correct.double().mean()),
        estimate,
        float("nan")
        if estimate is None
        else spearman(estimate[heads][None], loss.mean[heads][None]).item(),
        effects.forward_equivalents,
        "; ".join(filter(None, notes)),
        log_odds[0] if saturated else None,
    )


def _too_few_for_holm(kinds: Sequence[UnitKind], clusters: int, sampled: str) -> str:
    """Return a note on the kinds of which no unit can have a significant effect with so few images,
    or "".
    """
    notes = []
    for kind in dict.fromkeys(kinds):
        count = kinds.count(kind)
        fewest = fewest_images(count)
        if clusters < fewest:
            word = {"mlp": "MLP"}.get(kind, kind)
            notes.append(
                f"with {clusters} {sampled} no {word} can have a significant effect after Holm's "
                "correction for "
                f"{count} tests: that takes at least {fewest}"
            )
    return ", and ".join(notes)


def _as_points(change: MeanChange, clusters: int) -> MeanChange:
    """Return changes of accuracy with possible intervals, of which none has no width; clusters:
    independent images.
    """
    low = change.low.clone()
    high = change.high.clone()
    for index in (low == high).nonzero()[:, 0].tolist():
        half = half_of_constant(float(change.mean[index]), clusters)
        low[index] -= half
        high[index] += half
    return dataclasses.replace(change, low=low.clamp_min(-100), high=high.clamp_max(100))


def mean_changes(
    values: Sequence[Float[Tensor, "cases batch"]],
    *,
    families: Sequence[Hashable],
    groups: Tensor | None = None,
    seed: int = 0,
) -> list[MeanChange]:
    """Return the mean, interval and test of each row of some metrics' differences, Holm within each
    family of rows.

    All metrics share their draws. Intervals and p-values are NaN for fewer than 2 images or groups.
    """
    every = torch.cat([each.double() for each in values])
    low, high = intervals(every, groups=groups, seed=seed)
    p = torch.full_like(low, torch.nan)
    if low.isfinite().all():
        largest = max(families.count(family) for family in set(families))
        draws = max(
            DRAWS, 4 * round(largest / LEVEL)
        )  # with fewer no p-value could pass Holm's correction
        p = mean_test(every, groups=groups, seed=seed, draws=draws)
    adjusted = p.clone()
    rows = [
        (number, family) for number in range(len(values)) for family in families
    ]  # of one metric and family
    for each in set(rows) if p.isfinite().all() else ():
        own = [index for index, row in enumerate(rows) if row == each]
        adjusted[own] = torch.tensor(holm(p[own].tolist()), dtype=p.dtype)
    metrics = zip(
        *(column.split(len(families)) for column in (every.mean(1), low, high, p, adjusted))
    )
    return [MeanChange(*columns) for columns in metrics]


def first_order(bench: Bench, units: Sequence[Unit]) -> ByImage:
    """Return each image's gradient of the cross-entropy with respect to a head's output ·
    (replacement - output), nats.

    (units, images), signed, float64 on the CPU; NaN for MLPs and blocks. With "zero" this is the
    estimate of Michel 2019 before the absolute value.
    """
    heads = {unit: row for row, unit in enumerate(units) if unit.kind == "head"}
    bench = bench.with_means(units)
    own = bench.share()
    model = bench.model
    estimate = torch.full((len(units), len(own)), torch.nan, dtype=torch.float64)
    size = max(1, min(bench.size, fitting_batch_size(model) // GRAPH))
    for start in range(0, len(own) if heads else 0, size):
        rows = own[start : start + size]
        images, labels = (each[rows].to(model.device) for each in (bench.images, bench.labels))
        instead = bench.changes(rows, heads)
        with needing_gradients(model):
            captured = capture(
                model, images, sorted({f"blocks.{unit.layer}.heads" for unit in heads}), graph=True
            )
            # each image's gradient is that of its own loss
            loss = cross_entropy(captured.logits, labels).sum()
            outputs = list(captured.values())
            gradients = torch.autograd.grad(
                loss, outputs, allow_unused=True, materialize_grads=True
            )
        of_layer = dict(zip(captured, zip(outputs, gradients)))
        for unit, row in heads.items():
            both = (
                each.detach().select(-3, unit.head or 0)
                for each in of_layer[f"blocks.{unit.layer}.heads"]
            )
            output, gradient = both
            change = instead[unit].new(output) - output
            estimate[row, start : start + size] = (
                (gradient * change).flatten(1).cpu().double().sum(1)
            )
    return bench.processes.gathered(estimate.T.contiguous()).T
