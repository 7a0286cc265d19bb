"""Score-based attacks: uniform noise, and Square (Andriushchenko 2020), a random search.

Gradient masking does not affect them.
"""

import math
from functools import cache

import torch
from jaxtyping import Float, Int
from torch import Tensor

from vitlens.attacks.algorithm import (
    Algorithm,
    Jobs,
    PointEvaluation,
    Setting,
    State,
    perturb,
    update_state,
)
from vitlens.attacks.descent import squares
from vitlens.attacks.losses import margin
from vitlens.attacks.norms import LINF, per_pixel
from vitlens.attacks.registry import QUERIES
from vitlens.data.draws import mix, uniform
from vitlens.shapes import Images

FIRST_SHARE = 0.8  # part of the image that the first square covers
# queries after which the share is halved, of 10,000; the schedule is scaled to other numbers
_HALVINGS = (10, 50, 200, 500, 1000, 2000, 4000, 6000, 8000)
_PUBLISHED_QUERIES = 10_000


class Noise(Algorithm):
    """Uniform noise within epsilon, the baseline of every attack.

    queries: the number of draws.
    """

    def start(self, jobs: Jobs) -> State:
        """Return the first draw."""
        return {"points": self._draw(jobs, jobs.keys)}

    def step(self, jobs: Jobs, state: State, _seen: PointEvaluation) -> State:
        """Return the next draw."""
        return {**state, "points": self._draw(jobs, _keys_of_query(jobs, series=1))}

    def _draw(self, jobs: Jobs, keys: Int[Tensor, " batch"]) -> Images:
        change = self.norm.draw(keys, jobs.clean) * per_pixel(jobs.epsilon)
        return perturb(jobs, self.norm.project(change, jobs.epsilon))


class SquareSearch(Algorithm):
    """Square in L∞: random squares of plus or minus 2 epsilon, kept if the margin falls.

    queries: the number of squares that are tried.

    State of a job: "top" has the points of the smallest margin so far, "least" this margin.
    """

    def start(self, jobs: Jobs) -> State:
        """Return vertical stripes of plus or minus epsilon, one sign per column and channel."""
        width = jobs.clean.shape[3]
        signs = _signs(jobs.keys, 3 * width, stream=5).view(-1, 3, 1, width).to(jobs.clean.dtype)
        points = perturb(jobs, (signs * per_pixel(jobs.epsilon)).expand_as(jobs.clean))
        return {
            "points": points,
            "top": points.clone(),
            "least": torch.full_like(jobs.epsilon, torch.inf),
        }

    def step(self, jobs: Jobs, state: State, evaluation: PointEvaluation) -> State:
        """Keep the points if their margin fell, and change one more square of the best points."""
        margins = margin(evaluation.logits, jobs.labels)
        current = {"top": state["points"], "least": margins}
        state = update_state(state, margins < state["least"], current)
        best = state["top"]
        height = int(best.shape[2])
        width = int(best.shape[3])
        sides = sides_of(self.queries, (height, width), best.device)[jobs.queries]
        keys = _keys_of_query(jobs, series=2)
        random_place = uniform(keys, 2, stream=6)
        top_edge = (random_place[:, 0] * (height - sides + 1)).long()
        left_edge = (random_place[:, 1] * (width - sides + 1)).long()
        mask = squares((height, width), top_edge, left_edge, sides)
        signs = _signs(keys, 3, stream=7).to(best.dtype)[:, :, None, None]  # one per channel
        change = best - jobs.clean + 2 * per_pixel(jobs.epsilon) * signs * mask
        return {**state, "points": perturb(jobs, self.norm.project(change, jobs.epsilon))}


def noise(setting: Setting) -> Noise:
    """Return the worst of several draws of uniform noise, one per step."""
    return Noise(norm=LINF, objectives=0, queries=setting.steps)


def square(setting: Setting) -> SquareSearch:
    """Return Square with 50 queries per step."""
    return SquareSearch(norm=LINF, objectives=0, queries=QUERIES * setting.steps)


@cache
def sides_of(queries: int, size: tuple[int, int], device: torch.device) -> Int[Tensor, " queries"]:
    """Return the side of the square in px at each query.

    The share of the image that it covers is halved on the published schedule.
    """
    height, width = size
    sides = []
    for query in range(queries):
        published_query = query * _PUBLISHED_QUERIES // queries
        halvings = sum(published_query > mark for mark in _HALVINGS)
        pixels = FIRST_SHARE / 2**halvings * height * width
        side = round(math.sqrt(pixels))
        sides.append(min(max(side, 1), height, width))
    return torch.tensor(sides, device=device)


def _keys_of_query(jobs: Jobs, *, series: int) -> Int[Tensor, " batch"]:
    """Return a different key for each query of a job.

    series: another number for each attack, so that their draws differ.
    """
    query_number = jobs.queries + (series << 24)  # queries need less than 24 bits
    keys: Tensor = mix(jobs.keys + mix(query_number))
    return keys


def _signs(keys: Int[Tensor, " batch"], count: int, *, stream: int) -> Float[Tensor, "batch count"]:
    """Draw random signs, +1 or -1."""
    return torch.where(uniform(keys, count, stream=stream) < 0.5, -1.0, 1.0)
