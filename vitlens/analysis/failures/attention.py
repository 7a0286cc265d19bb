"""Attention on errors, compared with attention on correct predictions of the same class.

Some classes are harder than others, and attention differs between classes. So a difference between
all errors and all correct predictions may be a difference between classes. Here every error is
compared only with correct predictions of its class.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitlens.analysis.attention.weights import LayerMaps, attention_maps, require_maps
from vitlens.analysis.evaluation.evaluate import fitting_batch_size
from vitlens.analysis.failures.attention_rows import OutcomeAttentionRow, UntestedAttentionRow
from vitlens.analysis.failures.covariates import Subject
from vitlens.analysis.failures.separation import FEWEST, PERMUTATIONS, permutations
from vitlens.analysis.faithfulness.maps import map_shares
from vitlens.devices import autocast
from vitlens.errors import LensError, UnsupportedError
from vitlens.models.model import Model
from vitlens.resampling import by_group, student_quantile
from vitlens.shapes import Masks
from vitlens.uncertainty import Estimate, holm

Array = NDArray[np.float64]
Values = Mapping[tuple[str, int], Array]  # (n,) by quantity and layer; NaN if unknown
_TINY: Final = 1e-30  # avoids a division by 0
_ROUNDING: Final = 1e-9  # permutations with sums that differ less, as a part of them, are ties


def outcome_attention(
    subjects: Sequence[Subject],
) -> tuple[tuple[OutcomeAttentionRow, ...], tuple[UntestedAttentionRow, ...]]:
    """Return the rows of all models, and the models that could not be tested, with the reason.

    Models without attention that is a map of the image are left out.
    """
    rows: list[OutcomeAttentionRow] = []
    untested = []
    for subject in subjects:
        alias = subject.evaluation.alias
        if not _has_maps(subject.model):
            continue
        reason = _reason_not_tested(subject)
        if reason:
            untested.append(UntestedAttentionRow(alias, reason))
        else:
            rows += attention_rows(
                alias,
                attention_values(subject),
                subject.evaluation.correct.numpy(),
                subject.evaluation.labels.numpy(),
                groups=subject.evaluation.groups,
                seed=subject.seed,
            )
    return tuple(rows), tuple(untested)


def _has_maps(model: Model) -> bool:
    """Return True if the attention of some layer is a map of the image."""
    try:
        require_maps(model)
    except (UnsupportedError, LensError):
        return False
    return True


def _reason_not_tested(subject: Subject) -> str:
    """Return the reason why a model's attention on errors is not tested, "" if it is tested."""
    correct = subject.evaluation.correct.numpy()
    is_comparable = _in_class_with_both(correct, subject.evaluation.labels.numpy())
    errors = int((~correct & is_comparable).sum())
    if errors < FEWEST:
        return f"it has {errors} errors in classes that it also gets right, fewer than {FEWEST}"
    return ""


def _in_class_with_both(correct: NDArray[np.bool_], labels: Array) -> NDArray[np.bool_]:
    """Return True for images of classes with both errors and correct predictions (n,)."""
    has_error = np.isin(labels, labels[~correct])
    has_correct = np.isin(labels, labels[correct])
    both: NDArray[np.bool_] = has_error & has_correct
    return both


def attention_values(subject: Subject) -> Values:
    """Return every quantity of every layer on all images of a model, means over heads."""
    model = subject.model
    split = subject.split
    size = subject.batch_size or fitting_batch_size(model)
    parts: dict[tuple[str, int], list[Tensor]] = {}
    for batch in split.batches(size, device=model.device):
        masks = None
        if split.masks is not None:
            masks = split.masks[batch.indices.to(split.masks.device)].cpu()
        with torch.no_grad(), autocast(model.device, subject.precision):
            layers = attention_maps(model, batch.images)
        for layer in layers:
            for name, values in _of_layer(layer, masks).items():
                parts.setdefault((name, layer.site.layer), []).append(values)
    return {key: torch.cat(batches).double().numpy() for key, batches in parts.items()}


def _of_layer(layer: LayerMaps, masks: Masks | None) -> dict[str, Tensor]:
    """Return the quantities of one layer (images,)."""
    maps = layer.maps.float().cpu()  # (images, heads, rows, columns)
    prefix = layer.prefix.float().cpu()  # (images, heads, prefix tokens)
    weights = torch.cat([prefix, maps.flatten(2)], -1)  # (images, heads, tokens)
    weights = weights / weights.sum(-1, keepdim=True).clamp_min(_TINY)
    entropy = -(weights * weights.clamp_min(_TINY).log()).sum(-1)
    values = {"entropy": (entropy / math.log(weights.shape[-1])).clamp(0, 1).mean(1)}
    if prefix.shape[-1]:
        values["prefix"] = weights[..., : prefix.shape[-1]].sum(-1).mean(1)
    if masks is not None:
        head_maps = maps / maps.sum((-2, -1), keepdim=True).clamp_min(_TINY)
        size = (masks.shape[-2], masks.shape[-1])
        grid = (maps.shape[-2], maps.shape[-1])
        inside = map_shares(head_maps.mean(1), size=size, grid=grid, masks=masks).inside
        assert inside is not None  # it is None only without masks
        has_object = masks.flatten(1).any(1)
        values["object"] = torch.where(has_object, inside.double(), torch.nan)
    return values


def attention_rows(
    alias: str,
    values: Values,
    correct: NDArray[np.bool_],
    labels: Array,
    *,
    groups: Tensor | None = None,
    seed: int = 0,
) -> tuple[OutcomeAttentionRow, ...]:
    """Return a row for each quantity and layer that is known for enough errors.

    values (n,): the quantities by name and layer, NaN if unknown.
    correct (n,): True for correct predictions.
    labels (n,): the classes of the images.
    groups (n,): the source of each image, None if images are independent.
    """
    rows = list(_uncorrected(alias, values, correct, labels, groups, seed))
    corrected = holm([row.p for row in rows])
    return tuple(replace(row, p_holm=p_holm) for row, p_holm in zip(rows, corrected))


def _uncorrected(
    alias: str,
    values: Values,
    correct: NDArray[np.bool_],
    labels: Array,
    groups: Tensor | None,
    seed: int,
) -> Iterator[OutcomeAttentionRow]:
    """Yield the rows of `attention_rows`, which correct p-values over all of them."""
    for (quantity, layer), numbers in values.items():
        usable = np.isfinite(numbers)
        # of the images with a value, those in classes with both errors and correct predictions
        usable[usable] = _in_class_with_both(correct[usable], labels[usable])
        wrong = ~correct[usable]
        if int(wrong.sum()) < FEWEST:
            continue
        usable_groups = None if groups is None else groups[torch.from_numpy(usable)]
        result = stratified_difference(
            numbers[usable], wrong, labels[usable], groups=usable_groups, seed=seed
        )
        yield OutcomeAttentionRow(
            model=alias,
            quantity=quantity,
            layer=layer,
            failed=result.failed,
            passed=result.passed,
            difference=result.difference,
            errors=int(wrong.sum()),
            correct=int((~wrong).sum()),
            classes=len(np.unique(labels[usable])),
            p=result.p,
        )


@dataclass(frozen=True)
class Stratified:
    """A difference of means within strata.

    difference: the mean over failures minus that over successes, in points.
    failed, passed: both means, as fractions.
    p: the two-sided p-value of no difference.
    """

    difference: Estimate
    failed: float
    passed: float
    p: float


def stratified_difference(
    numbers: Array,
    wrong: NDArray[np.bool_],
    strata: Array,
    *,
    groups: Tensor | None = None,
    seed: int = 0,
) -> Stratified:
    """Return the mean over failures minus that over successes of the same stratum.

    Strata are weighted by failures x successes / images, as in a regression with an effect for
    each stratum. The interval is Student's, with the error clustered by group. The two-sided
    p-value is from permutations of failures within strata. Images that share a source stay
    together. Every stratum must have failures and successes.

    numbers, wrong, strata (n,): the value, True for a failure, and the stratum of each image.
    """
    _, stratum = np.unique(strata, return_inverse=True)
    stratum = stratum.ravel()  # the number of each image's stratum
    # The difference is the slope of the regression of numbers on outcomes, both centred by stratum.
    outcome = _centre_by_stratum(wrong.astype(np.float64), stratum)
    centred = _centre_by_stratum(numbers, stratum)
    sum_of_squares = float((outcome**2).sum())
    slope = float((outcome * centred).sum()) / sum_of_squares
    # the variance of the slope, clustered by group: the sum of squares of each group's influence
    influences = outcome * (centred - slope * outcome)
    sources = None if groups is None else groups.numpy()
    sums, counts = by_group(influences, sources)
    parameters = int(stratum.max()) + 2  # the means of the strata, and the slope
    freedom = max(len(sums) - parameters, 1)
    error = math.sqrt(len(sums) / freedom * float((sums**2).sum())) / sum_of_squares
    half = student_quantile(counts) * error
    failed, passed = _weighted_means(numbers, wrong, stratum)
    low = max(slope - half, -1.0)
    high = min(slope + half, 1.0)
    difference = Estimate(100 * slope, 100 * low, 100 * high, len(numbers), "points")
    p = _p_within(centred, wrong, stratum, groups, seed)
    return Stratified(difference, failed, passed, p)


def _centre_by_stratum(values: Array, stratum: NDArray[np.intp]) -> Array:
    """Return the values minus the mean of their stratum."""
    means = np.bincount(stratum, weights=values) / np.bincount(stratum)
    centred: Array = values - means[stratum]
    return centred


def _weighted_means(
    numbers: Array, wrong: NDArray[np.bool_], stratum: NDArray[np.intp]
) -> tuple[float, float]:
    """Return the means over failures and over successes, strata weighted as in the difference."""
    failures = np.bincount(stratum, weights=wrong)
    successes = np.bincount(stratum, weights=~wrong)
    weights = failures * successes / (failures + successes)
    failure_means = np.bincount(stratum, weights=numbers * wrong) / failures
    success_means = np.bincount(stratum, weights=numbers * ~wrong) / successes
    failed = float((weights * failure_means).sum() / weights.sum())
    passed = float((weights * success_means).sum() / weights.sum())
    return failed, passed


def _p_within(
    centred: Array,
    wrong: NDArray[np.bool_],
    stratum: NDArray[np.intp],
    groups: Tensor | None,
    seed: int,
) -> float:
    """Return the two-sided p-value by permutations of failures within strata.

    centred: the numbers minus the mean of their stratum.
    """
    observed = abs(float(centred[wrong].sum()))
    sums = np.zeros(PERMUTATIONS)  # the sum over the failures of all strata in each permutation
    for number in range(int(stratum.max()) + 1):
        members = np.flatnonzero(stratum == number)
        groups_of_members = None if groups is None else groups[torch.from_numpy(members)]
        failures = wrong[members].astype(np.float64)
        # draw i of all strata together is permutation i, so the sums of the strata add up
        start = 0
        for permuted in permutations(
            failures, groups_of_members, draws=PERMUTATIONS, seed=seed + number
        ):
            sums[start : start + len(permuted)] += permuted @ centred[members]
            start += len(permuted)
    reached = int((np.abs(sums) >= observed * (1 - _ROUNDING)).sum())
    return (1 + reached) / (1 + PERMUTATIONS)
