"""Scores of attribution methods on one half of the images, with bootstrap intervals.

A method's score is the weighted sum of its means in the checks.
"""

from dataclasses import dataclass
from typing import Final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from vitlens.analysis.evaluation.intervals import resampled_means
from vitlens.resampling import Numbers, by_group, drawn_interval, enough_to_draw
from vitlens.uncertainty import Estimate

DRAWS: Final = 2000  # number of bootstrap draws
SCORE_ROW: Final = -1  # the row of the combined score, after those of the checks
_TIE: Final = 1e-9  # scores, and standard deviations, that differ by less are equal

Indices = Int[Tensor, " half"]
CheckValues = Float[Tensor, "checks methods images"]  # NaN for images without a value


def halves(groups: Int[Tensor, " images"], *, seed: int = 0) -> tuple[Indices, Indices]:
    """Return two disjoint halves of the images by a seeded draw; groups stay together."""
    _, group_numbers = groups.unique(return_inverse=True)
    total = int(group_numbers.max()) + 1
    order = torch.randperm(total, generator=torch.Generator().manual_seed(seed))
    groups_of_first = order[: (total + 1) // 2]
    in_first = torch.isin(group_numbers, groups_of_first)
    return in_first.nonzero().squeeze(1), (~in_first).nonzero().squeeze(1)


def weigh_checks(values: CheckValues) -> Float[Tensor, " checks"]:
    """Return the weight of each check in the score.

    It is 1 / (checks x standard deviation of the methods' means), and 0 for a check in which all
    methods are equal.
    """
    means = values.nanmean(2)  # (checks, methods)
    deviations = means.std(1, correction=0)
    inverse = torch.where(deviations > _TIE, 1 / deviations.clamp_min(_TIE), 0.0)
    return inverse / len(deviations)


@dataclass(frozen=True)
class HalfScores:
    """The means and scores of all methods on one half of the images.

    The rows are the checks, then the score.

    means: the means over the images with a value.
    draws: the same means in each bootstrap draw.
    counts: the number of images with a value, by row.
    members: the number of these images in each group, by row.
    """

    means: Float[Tensor, "rows methods"]
    draws: Float[Tensor, "draws rows methods"]
    counts: tuple[int, ...]
    members: tuple[Numbers, ...]

    def wins(self, candidates: int) -> list[float]:
        """Return the share of draws in which each candidate has the highest score.

        candidates: their number; they are the first of the methods.
        """
        scores = self.draws[:, SCORE_ROW, :candidates]
        is_highest = scores >= scores.amax(1, keepdim=True) - _TIE
        shares: list[float] = is_highest.double().mean(0).tolist()
        return shares

    def estimate(self, row: int, method: int, *, minus: int | None = None) -> Estimate:
        """Return a mean, or the paired difference of two, with its bootstrap interval.

        minus: the other method of a difference. Few groups have no interval.
        """
        value = self.means[row, method]
        draws = self.draws[:, row, method]
        if minus is not None:
            value = value - self.means[row, minus]
            draws = draws - self.draws[:, row, minus]
        if not enough_to_draw(self.members[row]):
            return Estimate(float(value), n=self.counts[row], unit="")
        low, high = drawn_interval(draws.numpy(), self.members[row])
        return Estimate(float(value), float(low), float(high), self.counts[row], "")


def score_half(
    values: CheckValues, groups: Tensor, weights: Float[Tensor, " checks"], seed: int
) -> HalfScores:
    """Return the means and scores of all methods on one half.

    Images are drawn jointly for all checks, in complete groups; a draw in which a check has no
    value is left out.
    """
    checks, methods, images = values.shape
    # a mean over the images with a value is a ratio of two means over all images
    has_value = values[:, 0].isfinite().double()  # (checks, images), equal for all methods
    # rows: a value of each check and method (0 without one), then whether each check has a value
    averaged = torch.cat([values.nan_to_num(0.0).flatten(0, 1), has_value])
    # (draws, checks x methods + checks): the last `checks` columns are the means of has_value
    drawn = resampled_means(averaged, groups=groups, seed=seed, draws=DRAWS)
    mean_values = drawn[:, :-checks].unflatten(1, (checks, methods))
    shares_with_value = drawn[:, -checks:].unsqueeze(2)  # (draws, checks, 1)
    is_complete = (shares_with_value > 0).all(1).squeeze(1)
    draws = (mean_values / shares_with_value)[is_complete]
    means = values.nanmean(2)
    mean_score = (weights[:, None] * means).sum(0, keepdim=True)
    drawn_score = (weights[:, None] * draws).sum(1, keepdim=True)
    group_of_image = groups.cpu().numpy()
    members = list[Numbers]()
    for has_check_value in has_value:
        images_with_value, _ = by_group(has_check_value.numpy(), group_of_image)
        members.append(images_with_value[images_with_value > 0])
    fewest = min(members, key=len)  # the score needs a value of every check
    counts = [int(count) for count in has_value.sum(1)]
    return HalfScores(
        torch.cat([means, mean_score]),
        torch.cat([draws, drawn_score], 1),
        (*counts, images),
        (*members, fewest),
    )
