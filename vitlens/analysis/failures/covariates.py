"""What each image has of every property on which errors may depend, and how that separates errors from successes."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

import numpy as np
import torch
from jaxtyping import Bool, Float
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from vitlens.analysis.answers.evaluate import Evaluation, accuracy
from vitlens.analysis.answers.separation import FEWEST, area_difference, separations
from vitlens.analysis.failures.properties import PROPERTIES, CovariateRow, DifferenceRow, QuarterRow
from vitlens.analysis.faithfulness.maps import AnyMaps, map_shares
from vitlens.data.scenes import LUMINANCE
from vitlens.data.split import Split
from vitlens.models.model import Model
from vitlens.shapes import Images, Labels, Logits, Masks
from vitlens.uncertainty import holm

PerImage = Float[Tensor, " batch"]
Plane = Float[Tensor, "batch height width"]
Values = Mapping[str, PerImage]
PARTS: Final = 4  # the images are cut in quarters by a property
_EACH: Final = 5  # errors (and successes) for each property of the regression
_RIDGE: Final = 1e-4  # on standardised coefficients: keeps them finite where a property separates completely
_BATCH: Final = 256
_WINDOW: Final = 9  # px: width of the mean filter that blurs an image again (Crete 2007)
_OTHERS: Final = 20  # images of other classes from which on logits are correlated


@dataclass(frozen=True)
class Subject:
    """One model with its images and its predictions; maps: of the images at these indices (None: no maps)."""

    model: Model
    split: Split
    evaluation: Evaluation
    maps: AnyMaps | None = None
    indices: Tensor | None = None
    precision: str = "fp32"
    batch_size: int | None = None
    seed: int = 0

    @cached_property
    def mapped(self) -> dict[str, Tensor]:
        """Of every image's map, NaN where it is not known: the centre of mass (row, column), shares of the sides; the
        share on the object; the share of the image that holds half of it, and the share off the middle quarter."""
        if self.maps is None:
            return {}
        at = torch.arange(len(self.split)) if self.indices is None else self.indices
        grid = (self.maps.shape[-2], self.maps.shape[-1])
        height, width = (-(-side // cells) * cells for side, cells in zip(self.split.size, grid))
        masks = None if self.split.masks is None else self.split.masks[at]
        shares = map_shares(self.maps, size=(height, width), grid=grid, masks=masks)
        found = {"row": shares.row, "column": shares.column, "half": shares.half, "outer": 1 - shares.central}
        if masks is not None and shares.inside is not None:
            found["inside"] = torch.where(masks.flatten(1).any(1), shares.inside, torch.nan)
        for name, values in found.items():
            found[name] = torch.full((len(self.split),), torch.nan)
            found[name][at] = torch.where(shares.usable, values, torch.nan).float()
        return found


def covariates(subject: Subject) -> dict[str, PerImage]:
    """Every property (n,) that differs between these images, NaN where it is not known.

    Of maps: where the objects are known, how much of each lies on them, else the place and size of what it marks.
    """
    split, evaluation = subject.split, subject.evaluation
    parts: dict[str, list[Tensor]] = {}
    for batch in split.batches(_BATCH):
        masks = None if split.masks is None else split.masks[batch.indices.to(split.masks.device)].cpu()
        for name, values in _of_pixels(luminance(batch.images).cpu(), masks).items():
            parts.setdefault(name, []).append(values.float())
    found = {name: torch.cat(values) for name, values in parts.items()}
    maps, sides = subject.mapped, torch.tensor(split.size)
    if "inside" in maps:
        found["map_on_object"] = maps["inside"]
    elif maps:
        off = (torch.stack([maps["row"], maps["column"]], 1) - 0.5) * sides
        found |= {"map_off_centre": off.norm(dim=1) / (min(split.size) / 2)}
        found |= {"map_size": maps["half"], "map_outer": maps["outer"]}
    found["look_alike"] = look_alike(evaluation.logits, evaluation.labels)
    found["confidence"] = evaluation.confidence
    return {
        name: found[name]
        for name in PROPERTIES
        if name in found and found[name].nan_to_num(0.0).std(correction=0) > 1e-6
    }


def _of_pixels(planes: Plane, masks: Masks | None) -> dict[str, Tensor]:
    """Properties of the luminance, and of the object where its mask is known."""
    down, across = (F.pad(planes.diff(dim=axis).abs(), pad) for axis, pad in ((1, (0, 0, 0, 1)), (2, (0, 1))))
    edges = down + across
    found = {"brightness": planes.mean((1, 2)), "sharpness": 1 - blur(planes)}
    if masks is None:
        return {**found, "contrast": planes.flatten(1).std(1, correction=0), "clutter": edges.mean((1, 2))}
    inside = masks.float()
    around = 1 - F.max_pool2d(inside[:, None], 5, stride=1, padding=2)[:, 0]
    sides = torch.tensor(masks.shape[-2:])
    edge = torch.stack([masks[:, 0].any(1), masks[:, -1].any(1), masks[:, :, 0].any(1), masks[:, :, -1].any(1)])
    area = inside.mean((1, 2))
    return {
        **found,
        "off_centre": ((centroids(masks) - sides / 2) / (sides.min() / 2)).norm(dim=1),
        "size": torch.where(area > 0, area, torch.nan),
        "object_contrast": (_mean(planes, inside) - _mean(planes, around)).abs(),
        "border": torch.where(area > 0, edge.any(0).float(), torch.nan),
        "clutter": _mean(edges, around),
    }


def luminance(images: Images) -> Plane:
    """Luminance (batch, height, width) in [0, 1] of images in [0, 1], without gamma correction."""
    weights = torch.tensor(LUMINANCE, dtype=images.dtype, device=images.device)
    return torch.einsum("bchw,c->bhw", images, weights)


def blur(planes: Plane) -> PerImage:
    """How blurred an image is, 0 (sharp) to 1, by how little it changes when it is blurred again (Crete 2007).

    Along each axis: the share of the differences between neighbouring pixels that remains after a mean over 9 pixels;
    the larger of the two axes. An image that is constant along an axis counts as blurred along it.
    """
    axes = []
    for rows in (planes, planes.transpose(1, 2)):
        window = min(_WINDOW, 2 * ((rows.shape[-1] - 1) // 2) + 1)
        padded = F.pad(rows[:, None], (window // 2, window // 2, 0, 0), mode="replicate")
        again = F.avg_pool2d(padded, (1, window), stride=1)[:, 0]
        before, after = rows.diff(dim=-1).abs(), again.diff(dim=-1).abs()
        whole, lost = before.sum((1, 2)), (before - after).clamp_min(0).sum((1, 2))
        axes.append(torch.where(whole > 1e-6 * before[0].numel(), 1 - lost / whole.clamp_min(1e-12), 1.0))
    return torch.maximum(*axes)


def _mean(planes: Tensor, weights: Tensor) -> PerImage:
    """The weighted mean of each plane; NaN without weights."""
    total = weights.sum((1, 2))
    return torch.where(total > 0, (planes * weights).sum((1, 2)) / total.clamp_min(1e-9), torch.nan)


def centroids(masks: Masks) -> Float[Tensor, "batch 2"]:
    """The mean row and column of each object's pixels, px; NaN without an object."""
    inside = masks.float()
    rows, columns = (torch.arange(side) + 0.5 for side in masks.shape[-2:])
    return torch.stack([(inside.sum(2) @ rows), (inside.sum(1) @ columns)], 1) / inside.sum((1, 2))[:, None]


def look_alike(logits: Logits, labels: Labels) -> PerImage:
    """Whether the most probable class other than the label is one of those that resemble the label most, 1 or 0.

    Two classes resemble each other if their logits are correlated over the images of other classes than the label; the
    nearest hundredth of the classes counts, at least one. NaN with fewer than 3 classes or 20 other images.
    """
    found = torch.full((len(labels),), torch.nan)
    classes = logits.shape[1]
    rivals = logits.scatter(1, labels[:, None], -torch.inf).argmax(1)
    for label in labels.unique().tolist() if classes > 2 else ():
        others = logits[labels != label].double()
        if len(others) < _OTHERS:
            continue
        centred = others - others.mean(0)
        scale = centred.square().sum(0).sqrt().clamp_min(1e-12)
        likeness = (centred * centred[:, label, None]).sum(0) / (scale * scale[label])
        likeness[label] = -1.0
        own = labels == label
        found[own] = torch.isin(rivals[own], likeness.topk(max(1, round(0.01 * classes))).indices).float()
    return found


def covariate_rows(each: Sequence[tuple[Subject, Values]]) -> tuple[CovariateRow, ...]:
    """How each property separates the errors of each model, alone and given the others."""
    rows: list[CovariateRow] = []
    for subject, values in each:
        evaluation = subject.evaluation
        joint = regression(values, evaluation.correct, groups=evaluation.groups)
        rows += [
            CovariateRow(
                evaluation.alias, one.name, PROPERTIES[one.name].title, one.area, one.failures, one.median_failure,
                one.median_success, one.p, None, *joint.get(one.name, (None, None)),
            )
            for one in separations(values, evaluation.correct, groups=evaluation.groups)
        ]  # fmt: skip
    alone, joint_p = (_holm([getattr(row, name) for row in rows]) for name in ("p", "p_joint"))
    return tuple(replace(row, p_holm=one, p_joint_holm=two) for row, one, two in zip(rows, alone, joint_p))


def _holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Corrected for those that are known."""
    adjusted = iter(holm([p for p in p_values if p is not None]))
    return [None if p is None else next(adjusted) for p in p_values]


def regression(
    values: Values, correct: Bool[Tensor, " batch"], *, groups: Tensor | None = None
) -> dict[str, tuple[float, float]]:
    """Of a logistic regression of errors on the properties that no prediction decides: the likelihood ratio without
    each, and its p. Only those that are known of all images, the strongest alone, one for every five errors; of images
    that share a source, one. Nothing with fewer than 10 errors or successes."""
    from scipy import stats

    kept = np.arange(len(correct)) if groups is None else np.unique(groups.cpu().numpy(), return_index=True)[1]
    wrong = ~correct.cpu().numpy()[kept]
    few = int(min(wrong.sum(), (~wrong).sum()))
    if few < FEWEST:
        return {}
    usable = {name: one for name, one in values.items() if not PROPERTIES[name].outcome and bool(one.isfinite().all())}
    alone = sorted(separations(usable, correct, groups=groups), key=lambda one: 1.0 if one.p is None else one.p)
    names = [one.name for one in alone][: few // _EACH]
    columns = np.stack([values[name].double().cpu().numpy()[kept] for name in names], 1)
    columns = (columns - columns.mean(0)) / np.maximum(columns.std(0), 1e-12)
    whole = deviance(columns, wrong)
    found = {}
    for at, name in enumerate(names):
        ratio = max(0.0, deviance(np.delete(columns, at, 1), wrong) - whole)
        found[name] = ratio, float(stats.chi2.sf(ratio, 1))
    return found


def deviance(columns: NDArray[np.float64], wrong: NDArray[np.bool_]) -> float:
    """Minus twice the log likelihood of the logistic regression of `wrong` on standardised columns and a constant."""
    design = np.concatenate([np.ones((len(columns), 1)), columns], 1)
    penalty = np.diag([0.0] + [_RIDGE] * columns.shape[1])
    weights = np.zeros(design.shape[1])

    def loss(at: NDArray[np.float64]) -> float:
        scores = design @ at
        return float(np.logaddexp(0, scores).sum() - scores[wrong].sum() + at @ penalty @ at / 2)

    for _ in range(100):  # Newton's method, each step halved until it descends
        chance = 1 / (1 + np.exp(-np.clip(design @ weights, -500, 500)))
        slope = design.T @ (chance - wrong) + penalty @ weights
        curve = (design * (chance * (1 - chance))[:, None]).T @ design + penalty + 1e-12 * np.eye(len(weights))
        step, before, length = np.linalg.solve(curve, slope), loss(weights), 1.0
        while loss(weights - length * step) > before and length > 1e-6:
            length /= 2
        weights = weights - length * step
        if before - loss(weights) < 1e-10:
            break
    return 2 * (loss(weights) - float(weights @ penalty @ weights) / 2)


def difference_rows(each: Sequence[tuple[Subject, Values]]) -> tuple[DifferenceRow, ...]:
    """For two models, how much better each property separates the errors of the first."""
    if len(each) != 2:
        return ()
    (first, own), (second, others) = ((subject.evaluation, values) for subject, values in each)
    found = {
        name: area_difference(own[name], others[name], first.correct, second.correct, groups=first.groups)
        for name in own
        if name in others
    }
    known = {name: gap_and_p for name, gap_and_p in found.items() if gap_and_p is not None}
    return tuple(
        DifferenceRow(first.alias, second.alias, name, PROPERTIES[name].title, gap, p)
        for (name, (gap, _)), p in zip(known.items(), holm([p for _, p in known.values()]))
    )


def quarter_rows(each: Sequence[tuple[Subject, Values]]) -> Iterator[QuarterRow]:
    """The accuracy in each quarter of the images by every property; equal values are never separated."""
    inner = torch.linspace(0, 1, PARTS + 1, dtype=torch.float64)[1:-1]
    for subject, values in each:
        evaluation = subject.evaluation
        for name, own in values.items():
            known = own.isfinite()
            edges = torch.quantile(own[known].double(), inner).unique()
            member = torch.where(known, torch.bucketize(own.double(), edges), -1)
            for number, part in enumerate(member[known].unique(), 1):
                inside = member == part
                groups = None if evaluation.groups is None else evaluation.groups[inside]
                right = accuracy(evaluation.correct[inside], groups=groups, seed=subject.seed)
                ends = float(own[inside].amin()), float(own[inside].amax())
                yield QuarterRow(evaluation.alias, name, PROPERTIES[name].title, number, *ends, right)
