"""The importance of each unit, from its effects on all images: means, intervals, tests.

The first-order estimate of a head's or latent's effect, gradient times change of output, takes one
backward pass.
"""

import dataclasses
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from vitlens.analysis.ablation.bench import Bench
from vitlens.analysis.ablation.outcomes import ByImage, Outcomes
from vitlens.analysis.ablation.units import Unit, require_heads, units_of
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

LEVEL = 0.05  # significance level of the tests, after Holm's correction
# A mean loss below so many nats hardly changes, even without units that matter.
SATURATED = 0.05

PerUnit = Float[Tensor, " units"]
LayersByHeads = Float[Tensor, "layers heads"]

# A backward pass keeps the activations of all layers, so batches are smaller by this factor.
GRAPH = 4


@dataclass(frozen=True)
class MeanChange:
    """The mean change of a metric without each unit, with its 95 % interval over images, float64.

    Intervals and p-values are NaN for fewer than 2 images (or groups).

    mean (units,): the mean of the paired differences.
    low, high (units,): the ends of its percentile bootstrap interval.
    p (units,): the two-sided p-value of no change, by `mean_test`.
    p_holm (units,): the p-value after Holm's correction for the units of the same kind.
    """

    mean: PerUnit
    low: PerUnit
    high: PerUnit
    p: PerUnit
    p_holm: PerUnit

    def estimate(self, index: int, n: int, unit: str) -> Estimate:
        """Return the mean change of one unit over n images, with its interval if it has one."""
        mean = float(self.mean[index])
        low = finite(self.low[index])
        high = finite(self.high[index])
        if low is None or high is None:
            return Estimate(mean, n=n, unit=unit)
        return Estimate(mean, low, high, n, unit)


@dataclass(frozen=True, repr=False)
class Importance(Table):
    """The importance of each unit: the losses of the model without it.

    Losses are positive if the unit helps.

    units: the units.
    n: the number of images.
    replace: the replacement of a unit's output.
    loss: the rise of the mean cross-entropy without each unit, in nats.
    accuracy: the loss of accuracy without each unit, in points.
    clean_loss: the mean cross-entropy of the unchanged model, in nats.
    clean_accuracy: the accuracy of the unchanged model, as a fraction.
    first_order (units,): the first-order estimate of `loss`, in nats, NaN if it is undefined. None
        if it was not computed.
    rank_correlation: Spearman's correlation over heads of this estimate with `loss`, NaN if it is
        undefined.
    forward_equivalents: the cost per image, in full forward passes.
    note: a remark for a report, or "".
    log_odds: the fall of the label's mean log-odds without each unit, in nats. It ranks units if
        the mean loss is below SATURATED; else it is None.
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
        """Yield the settings, the effects of heads, and the number of units with an effect."""
        yield Line("images", self.n)
        yield Line("replaced by", self.replace)
        yield Line("clean_loss", self.clean_loss, "nats")
        yield Line("clean_accuracy", self.clean_accuracy, "fraction")
        if self.of_kind("head"):
            yield Line("delta_loss", self.delta_loss, "nats")
            yield Line("delta_accuracy", self.delta_accuracy, "points")
        effects = int(self.matters.sum())
        yield Line("units", f"{len(self.units)}, {effects} with an effect after Holm's correction")
        yield Line("note", self.note)

    def boards(self) -> Iterator[HeadBoard]:
        """Yield the change of the loss without each head."""
        if self.of_kind("head"):
            title = "change of the loss without each head"
            yield HeadBoard(title, self.delta_loss.tolist(), "nats")

    def records(self) -> Iterator[dict[str, object]]:
        """Yield a row for each unit: its place, and the losses without it, with tests."""
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
            place = {"layer": unit.layer, "head": unit.head, "latent": unit.latent}
            yield {"kind": unit.kind, **place, **values}

    @property
    def matters(self) -> Bool[Tensor, " units"]:
        """Return True for units with a significant change of the loss, corrected for their kind."""
        return self.loss.p_holm <= LEVEL

    def is_ranked(self, kind: UnitKind = "head") -> bool:
        """Return True if a unit of the kind has an effect after Holm's correction.

        Otherwise a ranking orders noise.
        """
        is_significant = self._ranked_by.p_holm <= LEVEL
        return bool(is_significant[self.of_kind(kind)].any())

    @property
    def _ranked_by(self) -> MeanChange:
        """Return the change that ranks units."""
        return self.log_odds or self.loss

    @property
    def delta_loss(self) -> LayersByHeads:
        """Return the change of the mean cross-entropy without each head, nats."""
        return self.table(self.loss.mean)

    @property
    def delta_accuracy(self) -> LayersByHeads:
        """Return the points of accuracy lost without each head."""
        return self.table(self.accuracy.mean)

    @property
    def low(self) -> LayersByHeads:
        """Return the lower end of delta_loss's 95 % interval."""
        return self.table(self.loss.low)

    @property
    def high(self) -> LayersByHeads:
        """Return the upper end of delta_loss's 95 % interval."""
        return self.table(self.loss.high)

    def of_kind(self, kind: UnitKind) -> list[int]:
        """Return the indices of a kind's units in `units`."""
        return [index for index, unit in enumerate(self.units) if unit.kind == kind]

    def ranking(self, kind: UnitKind = "head") -> tuple[Unit, ...]:
        """Return the units of a kind, the most important first.

        They are ranked by the change of the loss, or of the log-odds if the loss is near 0.
        """
        mean = self._ranked_by.mean.tolist()
        ranked = sorted(self.of_kind(kind), key=lambda index: -mean[index])
        return tuple(self.units[index] for index in ranked)

    def table(self, values: Tensor, kind: UnitKind = "head") -> LayersByHeads:
        """Return values (units,) of one kind of unit as a table (layers, heads), float64.

        It is NaN in places without a unit. MLPs and blocks have one column, latents one for each
        number.
        """
        layers = 1 + max(unit.layer for unit in self.units)
        column_of_unit = {}  # by the index of the unit
        for index in self.of_kind(kind):
            unit = self.units[index]
            column = 0
            if unit.head is not None:
                column = unit.head
            elif unit.latent is not None:
                column = unit.latent
            column_of_unit[index] = column
        columns = 1 + max(column_of_unit.values(), default=0)
        table = torch.full((layers, columns), torch.nan, dtype=torch.float64)
        for index, column in column_of_unit.items():
            table[self.units[index].layer, column] = float(values[index])
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
    """Return the exact change of loss and accuracy without each head (or MLP, block, latent).

    Changes have intervals over images, or over the groups of a Split that has them.

    images (n, 3, height, width): pixels in [0, 1], or any form that `vitlens.images` takes. They
        are read batch by batch.
    labels (n,): the class index of each image, or "predicted". None takes the labels of the Split
        or of the class folders.
    replace: the replacement of a head's output: its "mean" over the images (at least 8), "zero", or
        its output for another image, "resample". None chooses "mean", with 2 to 7 images
        "resample", with one "zero". The result's `replace` and `note` say which.
    kinds: the kinds of units: "head", "mlp", "block", or several of them; "latent" inside
        `Dictionary.places`.
    batch_size: the number of images at a time; None chooses one that fits.
    seed: the seed of resampling and of the intervals.

    Raises UnsupportedError for a model without attention or without a classifier. Raises InputError
    for too few images.

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
    elif set(kinds) != {"latent"}:
        require_attention(model)
    labels = required_labels(model, images, labels, batch_size or fitting_batch_size(model))
    bench = Bench(
        model,
        images,
        labels,
        by=replace,
        groups=groups_of(images),
        seed=seed,
        batch_size=batch_size,
    )
    effects = bench.without([(unit,) for unit in units_of(model, kinds=kinds)])
    return summarise(effects, groups=bench.groups, seed=seed)


def summarise(
    effects: Outcomes, *, groups: Tensor | None = None, first: ByImage | None = None, seed: int = 0
) -> Importance:
    """Return means, intervals and tests of the outcomes without each unit.

    groups (n,): the source of each image. The bootstrap draws whole groups, and the test flips the
        signs of whole groups.
    first (units, n): the estimates of `first_order`, if there are any.
    """
    clean_loss = float(effects.clean_loss.mean())
    is_saturated = clean_loss < SATURATED
    differences = [effects.delta_loss, effects.delta_accuracy]
    if is_saturated:
        differences.append(effects.delta_log_odds)
    kinds = [unit.kind for unit in effects.units]
    changes = mean_changes(differences, families=kinds, groups=groups, seed=seed)
    loss = changes[0]
    accuracy = changes[1]
    log_odds = changes[2] if is_saturated else None
    clusters = len(effects)
    sampled = "images"
    if groups is not None:
        clusters = len(groups.unique())
        sampled = "groups of images"
    notes = [effects.note]
    if clusters < 2:
        notes.append(f"no intervals and no tests: they need at least 2 {sampled}, found {clusters}")
    else:
        notes.append(_too_few_for_holm(kinds, clusters, sampled))
    if not effects.clean_correct.any():
        notes.append(
            f"the unchanged model classifies none of the {len(effects)} images correctly, so "
            "accuracy can only rise: read the change of loss, and check that labels and classes "
            "match"
        )
    if is_saturated:
        notes.append(
            f"the mean loss of the unchanged model, {clean_loss:.2g} nats, is below {SATURATED}, "
            "so units are ranked by the mean change of the label's log-odds"
        )
    estimate = None
    rank_correlation = float("nan")
    if first is not None:
        estimate = first.mean(1)
        heads = [index for index, kind in enumerate(kinds) if kind == "head"]
        rank_correlation = spearman(estimate[heads][None], loss.mean[heads][None]).item()
    return Importance(
        units=effects.units,
        n=len(effects),
        replace=effects.replace,
        loss=loss,
        accuracy=_as_points(accuracy, clusters),
        clean_loss=clean_loss,
        clean_accuracy=float(effects.clean_correct.double().mean()),
        first_order=estimate,
        rank_correlation=rank_correlation,
        forward_equivalents=effects.forward_equivalents,
        note="; ".join(filter(None, notes)),
        log_odds=log_odds,
    )


def _too_few_for_holm(kinds: Sequence[UnitKind], clusters: int, sampled: str) -> str:
    """Return a note on the kinds of units that can have no significant effect, or "".

    With too few images, no p-value is small enough after Holm's correction.

    clusters: the number of independent images.
    sampled: the name of what is independent, images or groups of them.
    """
    notes = []
    for kind in dict.fromkeys(kinds):
        count = kinds.count(kind)
        fewest = fewest_images(count)
        if clusters < fewest:
            word = "MLP" if kind == "mlp" else kind
            notes.append(
                f"with {clusters} {sampled} no {word} can have a significant effect after Holm's "
                f"correction for {count} tests: that takes at least {fewest}"
            )
    return ", and ".join(notes)


def _as_points(change: MeanChange, clusters: int) -> MeanChange:
    """Return changes of accuracy in points, with intervals between -100 and 100.

    The bootstrap interval has no width if all images have the same difference. It then gets that of
    a constant.

    clusters: the number of independent images.
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
    """Return the mean, interval and test of each row of the differences of some metrics.

    All metrics share the random draws. Intervals and p-values are NaN for fewer than 2 images or
    groups.

    values (cases, n): for each metric, the difference of each case at each image.
    families (cases,): the family of each case. Holm corrects within families.
    groups (n,): the source of each image.
    """
    cases = len(families)
    stacked = torch.cat([metric.double() for metric in values])  # as (metrics * cases, n)
    mean = stacked.mean(1)
    low, high = intervals(stacked, groups=groups, seed=seed)
    p = torch.full_like(low, torch.nan)
    if low.isfinite().all():
        largest = max(families.count(family) for family in set(families))
        # the smallest p-value is about 1 / draws, and Holm multiplies it by the size of the family
        draws = max(DRAWS, 4 * round(largest / LEVEL))
        p = mean_test(stacked, groups=groups, seed=seed, draws=draws)
    changes = []
    for metric in range(len(values)):
        rows = slice(metric * cases, (metric + 1) * cases)
        change = MeanChange(
            mean=mean[rows],
            low=low[rows],
            high=high[rows],
            p=p[rows],
            p_holm=_holm_within(families, p[rows]),
        )
        changes.append(change)
    return changes


def _holm_within(families: Sequence[Hashable], p: PerUnit) -> PerUnit:
    """Return p-values after Holm's correction within each family; NaN if they are not known."""
    adjusted = p.clone()
    if not p.isfinite().all():
        return adjusted
    for family in set(families):
        members = [index for index, other in enumerate(families) if other == family]
        adjusted[members] = torch.tensor(holm(p[members].tolist()), dtype=p.dtype)
    return adjusted


def first_order(bench: Bench, units: Sequence[Unit]) -> ByImage:
    """Return the first-order estimate of the rise of each image's loss without each unit, in nats.

    It is the gradient of the cross-entropy with respect to the output of a head or latent, times
    the change of this output (replacement - output). With the replacement "zero" it is the estimate
    of Michel 2019 before the absolute value. It is signed, float64 on the CPU, and NaN for MLPs and
    blocks.
    """
    # the row of each unit that has an estimate
    row_of_unit = {unit: row for row, unit in enumerate(units) if unit.kind in ("head", "latent")}
    bench = bench.with_means(units)
    share = bench.share()
    model = bench.model
    estimates = torch.full((len(units), len(share)), torch.nan, dtype=torch.float64)
    places = sorted({unit.output for unit in row_of_unit})
    size = max(1, min(bench.size, fitting_batch_size(model) // GRAPH))
    starts = range(0, len(share), size) if row_of_unit else ()
    for start in starts:
        indices = share[start : start + size]
        images = bench.images[indices].to(model.device)
        labels = bench.labels[indices].to(model.device)
        changes = bench.changes(indices, row_of_unit)
        with needing_gradients(model):
            captured = capture(model, images, places, graph=True)
            # images do not affect each other: the gradient of the sum is that of each image's loss
            loss = cross_entropy(captured.logits, labels).sum()
            gradients_in_order = torch.autograd.grad(
                loss, list(captured.values()), allow_unused=True, materialize_grads=True
            )
        gradients = dict(zip(captured, gradients_in_order))
        for unit, row in row_of_unit.items():
            output = unit.of_output(captured[unit.output].detach())
            gradient = unit.of_output(gradients[unit.output].detach())
            change = changes[unit].new(output) - output
            products = (gradient * change).flatten(1).cpu().double()
            estimates[row, start : start + size] = products.sum(1)
    # images must be the first axis to be joined over processes
    return bench.processes.gathered(estimates.T.contiguous()).T
