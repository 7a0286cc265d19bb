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

FIRST_SHARE = 0.8  # of the image, covered by the first square
# of 10,000 queries; the schedule is scaled to fewer
_HALVINGS = (10, 50, 200, 500, 1000, 2000, 4000, 6000, 8000)
_PUBLISHED_QUERIES = 10_000


class Noise(Algorithm):
    """Uniform noise within epsilon, the baseline of every attack; queries: number of draws."""

    def start(self, jobs: Jobs) -> State:
        """Return the first draw."""
        return {"points": self._draw(jobs, jobs.keys)}

    def step(self, jobs: Jobs, state: State, _seen: PointEvaluation) -> State:
        """Return the next draw."""
        return {**state, "points": self._draw(jobs, _keys_of_query(jobs, 1))}

    def _draw(self, jobs: Jobs, keys: Int[Tensor, " batch"]) -> Images:
        change = self.norm.draw(keys, jobs.clean) * per_pixel(jobs.epsilon)
        return perturb(jobs, self.norm.project(change, jobs.epsilon))


class SquareSearch(Algorithm):
    """Square, L∞: random squares of plus or minus 2 epsilon, kept where the margin falls.

    queries: squares tried.
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
        """Keep the points whose margin fell, and change one more square of the best points."""
        margins = margin(evaluation.logits, jobs.labels)
        state = update_state(
            state, margins < state["least"], {"top": state["points"], "least": margins}
        )
        top = state["top"]
        size = (int(top.shape[2]), int(top.shape[3]))
        sides = sides_of(self.queries, size, top.device)[jobs.queries]
        keys = _keys_of_query(jobs, 2)
        position = uniform(keys, 2, stream=6)
        top_edge = (position[:, 0] * (size[0] - sides + 1)).long()
        left_edge = (position[:, 1] * (size[1] - sides + 1)).long()
        mask = squares(size, top_edge, left_edge, sides)
        signs = _signs(keys, 3, stream=7).to(top.dtype)[:, :, None, None]
        change = top - jobs.clean + 2 * per_pixel(jobs.epsilon) * signs * mask
        return {**state, "points": perturb(jobs, self.norm.project(change, jobs.epsilon))}


def noise(setting: Setting) -> Noise:
    """Return the worst of several draws of uniform noise, one per step."""
    return Noise(norm=LINF, objectives=0, queries=setting.steps)


def square(setting: Setting) -> SquareSearch:
    """Return Square with 50 queries per step."""
    return SquareSearch(norm=LINF, objectives=0, queries=QUERIES * setting.steps)


@cache
def sides_of(queries: int, size: tuple[int, int], device: torch.device) -> Int[Tensor, " queries"]:
    """Return the side of the square at each query, px.

    Its share of the image is halved on the published schedule.
    """
    sides = []
    for query in range(queries):
        halvings = sum(query * _PUBLISHED_QUERIES // queries > mark for mark in _HALVINGS)
        side = round(math.sqrt(FIRST_SHARE / 2**halvings * size[0] * size[1]))
        sides.append(min(max(side, 1), *size))
    return torch.tensor(sides, device=device)


def _keys_of_query(jobs: Jobs, stream: int) -> Int[Tensor, " batch"]:
    """Return a different key for each query of a job."""
    keys: Tensor = mix(jobs.keys + mix(jobs.queries + (stream << 24)))
    return keys


def _signs(keys: Int[Tensor, " batch"], count: int, *, stream: int) -> Float[Tensor, "batch count"]:
    return torch.where(uniform(keys, count, stream=stream) < 0.5, -1.0, 1.0)
