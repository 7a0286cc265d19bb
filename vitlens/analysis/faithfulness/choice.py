"""The choice of a method by its scores on one half of the images, judged on the other half.

Each check gives a value for every method and image. A method's score is the mean over the checks of its mean value,
divided by the standard deviation of the methods' means in that check (baselines included) on the selection half. The
scales stay fixed afterwards, so that a score is linear in the values and its paired differences have intervals.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from vitlens.analysis.answers.paired import resampled_means
from vitlens.analysis.faithfulness.checks import ENOUGH, ChoiceMargin, ChoiceScores
from vitlens.errors import InputError
from vitlens.summary import Line, Summary
from vitlens.uncertainty import Estimate, Side, beyond

LEAST: Final = 2 * ENOUGH  # images (or groups) without which no method is chosen by evidence: ENOUGH in each half
SCORE: Final = "score"  # the name of the combined score beside the checks
DRAWS: Final = 2000  # of the bootstrap
_TIE: Final = 1e-9
_SAME: Final = 1e-4  # greatest difference of any value of two methods that give the same maps up to rounding

Half = Literal["selection", "report"]
Confirmation = Literal["confirmed", "not confirmed", "contradicted"]
Indices = Int[Tensor, " half"]
Table = Float[Tensor, "checks methods images"]


@dataclass(frozen=True, repr=False)
class MethodChoice(Summary):
    """The method chosen for a model and images.

    method: the chosen one; reason: why it is not chosen by evidence but is the default, "" where it is chosen;
    candidates: what it is chosen from; checks: what decided; left_out: checks that could not judge, with the reason;
    localised: where localisation was scored, "objects" (masks) or a kind of composites; certainty: share of the
    bootstrap draws of the selection half in which it wins, None without evidence; runner_up: the second of the
    selection half, among those with other maps; alike: candidates with the same maps up to rounding; confirmation:
    whether the report half shows it above the runner-up (paired 95 % interval of the scores), None without a runner-up;
    scores: of every candidate and baseline, the best of the selection half first; margins: on the report half;
    selection, report: indices of the images in each half; seed: of the halves.
    """

    method: str
    candidates: tuple[str, ...]
    reason: str = ""
    checks: tuple[str, ...] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)
    localised: str = ""
    certainty: float | None = None
    runner_up: str | None = None
    alike: tuple[str, ...] = ()
    confirmation: Confirmation | None = None
    scores: tuple[ChoiceScores, ...] = ()
    margins: tuple[ChoiceMargin, ...] = ()
    selection: tuple[int, ...] = ()
    report: tuple[int, ...] = ()
    seed: int = 0

    def margin(self, against: str, check: str = SCORE) -> Estimate | None:
        """The chosen method minus another on the report half; None where it was not compared."""
        found = (each.difference for each in self.margins if (each.against, each.check) == (against, check))
        return next(found, None)

    def summary(self) -> Iterator[Line]:
        """The choice, how sure it is, and the score of every method on the report half."""
        yield Line("method", self.method)
        if self.reason:
            yield Line("not by evidence", self.reason)
            return
        yield Line("certainty", self.certainty, f"of {DRAWS} draws")
        yield Line("runner-up", self.runner_up)
        yield Line("report half", self.confirmation)
        for each in self.margins:
            if each.check == SCORE:
                yield Line(f"score above {each.against}", each.difference)
        for scored in self.scores:
            yield Line(scored.method, {name: scored.report[name] for name in self.checks})


def halves(count: int, groups: Tensor | None = None, *, seed: int = 0) -> tuple[Indices, Indices]:
    """Two disjoint halves of count images by a seeded draw; images of one group (count,) stay together."""
    member = torch.arange(count) if groups is None else groups.cpu().unique(return_inverse=True)[1]
    total = int(member.max()) + 1
    first = torch.randperm(total, generator=torch.Generator().manual_seed(seed))[: (total + 1) // 2]
    inside = torch.isin(member, first)
    return inside.nonzero().squeeze(1), (~inside).nonzero().squeeze(1)


def groups_with(values: Tensor, part: Indices, groups: Tensor | None) -> int:
    """The number of images (or groups) of a half that have a value in a check (methods, images)."""
    present = part[values[0, part].isfinite()]
    return len(present) if groups is None else len(groups.cpu()[present].unique())


def choose(
    values: Mapping[str, Float[Tensor, "methods images"]],
    candidates: Sequence[str],
    baselines: Sequence[str],
    parts: tuple[Indices, Indices],
    *,
    references: Sequence[str] = (),
    groups: Tensor | None = None,
    seed: int = 0,
) -> MethodChoice:
    """The candidate of the highest score on the first half, and what the second half says of it.

    values: of each check, greater is better, a row a method (candidates, then baselines), NaN in all rows of an image
    without a value; references: candidates with which the chosen one is compared besides the runner-up and the
    baselines. A check in which all methods are equal decides nothing. Raises InputError for fewer than two candidates.
    """
    if len(candidates) < 2:
        raise InputError(f"expected at least 2 candidates to choose from, found {len(candidates)}")
    names, count = (*candidates, *baselines), len(candidates)
    table = torch.stack([each.double() for each in values.values()])
    weights = _weights(table[..., parts[0]])
    first, second = (_half(table, part, groups, weights, seed) for part in parts)
    order = first.means[-1, :count].argsort(descending=True, stable=True).tolist()
    best, same = order[0], [place for place in order[1:] if _alike(table, order[0], place)]
    rivals = [place for place in order[1:] if place not in same]
    scores = first.draws[:, -1, :count]
    wins = (scores >= scores.amax(1, keepdim=True) - _TIE).double().mean(0).tolist()
    others = [*rivals[:1], *(place for place in rivals if names[place] in references), *range(count, len(names))]
    rows = (*values, SCORE)
    margins = tuple(
        ChoiceMargin(against=names[other], check=check, difference=second.estimate(row, best, minus=other))
        for other in dict.fromkeys(others)
        for row, check in enumerate(rows)
    )
    return MethodChoice(
        method=names[best],
        candidates=tuple(candidates),
        checks=tuple(values),
        certainty=wins[best],
        runner_up=names[rivals[0]] if rivals else None,
        alike=tuple(names[place] for place in same),
        confirmation=_confirmation(margins[len(rows) - 1].difference) if rivals else None,
        scores=tuple(
            ChoiceScores(
                method=names[place],
                baseline=place >= count,
                selection=first.estimates(rows, place),
                report=second.estimates(rows, place),
                wins=wins[place] if place < count else None,
            )
            for place in (*order, *range(count, len(names)))
        ),
        margins=margins,
        selection=tuple(parts[0].tolist()),
        report=tuple(parts[1].tolist()),
        seed=seed,
    )


@dataclass(frozen=True)
class _Half:
    """The means of all methods on one half, the checks and then the score, with those of the bootstrap draws; counts:
    images of each row."""

    means: Float[Tensor, "rows methods"]
    draws: Float[Tensor, "draws rows methods"]
    counts: tuple[int, ...]

    def estimate(self, row: int, method: int, *, minus: int | None = None) -> Estimate:
        """A mean, or the paired difference of two, with its percentile interval."""
        value, draws = self.means[row, method], self.draws[:, row, method]
        if minus is not None:
            value, draws = value - self.means[row, minus], draws - self.draws[:, row, minus]
        low, high = draws.quantile(torch.tensor([0.025, 0.975], dtype=draws.dtype)).tolist()
        return Estimate(float(value), low, high, self.counts[row], "")

    def estimates(self, rows: Sequence[str], method: int) -> dict[str, Estimate]:
        """Every mean of a method, by the names of the rows."""
        return {check: self.estimate(row, method) for row, check in enumerate(rows)}


def _half(table: Table, part: Indices, groups: Tensor | None, weights: Tensor, seed: int) -> _Half:
    """One half. Images are drawn jointly for all checks, in whole groups; a draw without any value is left out."""
    own = table[..., part]
    checks, methods, images = own.shape
    present = own[:, :1].isfinite().double()
    filled = own.nan_to_num(0.0).reshape(-1, images)
    grouped = None if groups is None else groups.cpu()[part]
    drawn = resampled_means(torch.cat([filled, present[:, 0]]), groups=grouped, seed=seed, draws=DRAWS)
    sums, shares = drawn[:, : checks * methods].reshape(-1, checks, methods), drawn[:, checks * methods :, None]
    draws = (sums / shares)[(shares > 0).all(1).squeeze(1)]
    means = own.nanmean(2)
    return _Half(
        torch.cat([means, (weights[:, None] * means).sum(0, keepdim=True)]),
        torch.cat([draws, (weights[:, None] * draws).sum(1, keepdim=True)], 1),
        (*(int(each) for each in present.sum((1, 2))), images),
    )


def _weights(table: Table) -> Float[Tensor, " checks"]:
    """What the mean value in each check is multiplied by: 1 / the standard deviation of the methods' means / checks."""
    scales = table.nanmean(2).std(1, correction=0)
    return torch.where(scales > _TIE, 1 / scales.clamp_min(_TIE), 0.0) / len(scales)


def _alike(table: Table, first: int, second: int) -> bool:
    """Whether two methods have the same value up to rounding in every check of every image."""
    return bool(((table[:, first] - table[:, second]).abs().nan_to_num(0.0) <= _SAME).all())


def _confirmation(difference: Estimate) -> Confirmation:
    words: dict[Side, Confirmation] = {Side.ABOVE: "confirmed", Side.BELOW: "contradicted"}
    return words.get(beyond(difference, 0.0), "not confirmed")
