"""The attacks that search for the smallest perturbation, L2: DeepFool, and Carlini & Wagner's.

DeepFool (Moosavi-Dezfooli 2016) steps to the nearest class boundary of the linearised model.
Carlini & Wagner (2017) minimise distance² + c · margin in tanh space, where no pixel can leave [0,
1]; a binary search finds each image's c. Each image's search stops on its own, and the result is
the nearest of all adversarial images found on the way.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
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
from vitlens.attacks.losses import margin, rounding_error
from vitlens.attacks.norms import L2, per_pixel
from vitlens.attacks.registry import SEARCHES, TARGETS
from vitlens.shapes import Images, Logits

OVERSHOOT = 0.02  # beyond the boundary
_PUSH = 1e-4  # added to each step, so that none has length 0
FIRST_C = 1e-3
LARGEST_C = 1e10
RATE = 0.01
_SHRUNK = 1 - 1e-6  # so that black and white are finite in tanh space
_DECAY = 0.9, 0.999  # Adam's
_TINY = 1e-8  # Adam's epsilon
_CHECKS = 10  # how often a search checks whether the loss still falls
_FALL = 0.9999
# consecutive checks without a fall: a single image's loss oscillates more than the sum over a batch
_PATIENCE = 2


class DeepFool(Algorithm):
    """objectives: how many of the most likely other classes are considered."""

    def start(self, jobs: Jobs) -> State:
        """Return the clean image."""
        return {
            "points": jobs.clean.clone(),
            "total": torch.zeros_like(jobs.clean),
            "best": jobs.clean.clone(),
            "nearest": torch.full_like(jobs.epsilon, torch.inf),
            "over": torch.zeros_like(jobs.rows, dtype=torch.bool),
        }

    def losses(self, logits: Logits, jobs: Jobs) -> Float[Tensor, "batch objectives"]:
        """Return the logits of the other classes minus that of the label."""
        others = logits.gather(1, jobs.runners_up[:, : self.objectives])
        return others - logits.gather(1, jobs.labels[:, None])

    def step(self, jobs: Jobs, state: State, evaluation: PointEvaluation) -> State:
        """Return a step across the nearest linearised boundary.

        The job is over as soon as the image is adversarial.
        """
        lengths = evaluation.gradients.flatten(2).square().sum(2).sqrt().T  # batch, objectives
        tiny = torch.finfo(lengths.dtype).tiny
        gap = evaluation.losses.abs() + rounding_error(evaluation.logits)[:, None]
        distances = gap / lengths.clamp_min(tiny)
        distances = torch.where(lengths > 0, distances, torch.inf)
        nearest, chosen = distances.min(1)
        gradient = evaluation.gradients[chosen, torch.arange(len(chosen), device=chosen.device)]
        # no step where all gradients are 0
        length = torch.where(nearest.isfinite(), nearest + _PUSH, 0)
        total = state["total"] + per_pixel(length) * L2.steepest(gradient)
        here = state["points"]
        found = {"best": here, "nearest": L2.length(here - jobs.clean)}
        moved = {
            "points": perturb(jobs, (1 + OVERSHOOT) * total),
            "total": total,
            "over": evaluation.success,
        }
        return {**update_state(state, evaluation.success, found), **moved}


def deepfool(setting: Setting) -> DeepFool:
    """Return DeepFool with overshoot 0.02 over the 9 most likely other classes."""
    return DeepFool(
        norm=L2, queries=setting.steps + 1, objectives=min(TARGETS, setting.classes - 1)
    )


@dataclass(frozen=True, kw_only=True)
class CarliniWagner(Algorithm):
    """steps: of Adam in each search; searches: values of c; first_c: initial c."""

    steps: int
    searches: int
    first_c: float

    def start(self, jobs: Jobs) -> State:
        """Return the clean image in tanh space."""
        origin = torch.atanh((2 * jobs.clean - 1) * _SHRUNK)
        none = torch.full_like(jobs.epsilon, torch.inf)
        return {
            "origin": origin,
            "c": torch.full_like(none, self.first_c),
            "low": torch.zeros_like(none),
            "high": none,
            "search": torch.zeros_like(jobs.rows),
            "best": jobs.clean.clone(),
            "nearest": none.clone(),
            **_new_search(origin),
        }

    def losses(self, logits: Logits, jobs: Jobs) -> Float[Tensor, "batch 1"]:
        """Return the negative margin of the label; 0 where another class has the largest logit."""
        return -(margin(logits, jobs.labels) + rounding_error(logits)).clamp_min(0)[:, None]

    def step(self, jobs: Jobs, state: State, evaluation: PointEvaluation) -> State:
        """Keep the nearest adversarial image and take a step of Adam.

        Where a search has ended, the next one starts.
        """
        points = state["points"]
        change = state["points"] - _as_image(state["origin"])
        loss = change.flatten(1).square().sum(1) - state["c"] * evaluation.losses[:, 0]
        in_pixels = 2 * change - per_pixel(state["c"]) * evaluation.gradients[0]
        gradient = in_pixels * 2 * points * (1 - points)  # the derivative of tanh
        length = L2.length(points - jobs.clean)
        nearer = evaluation.success & (length < state["nearest"])
        state = update_state(state, nearer, {"best": points, "nearest": length})
        state = self._adam_step(
            {**state, "success": state["success"] | evaluation.success}, gradient
        )
        state = self._check_progress(state, loss)
        return self._next_search(
            state, (state["ticks"] == self.steps) | (state["still"] == _PATIENCE)
        )

    def _check_progress(self, state: State, loss: Float[Tensor, " batch"]) -> State:
        """Count the checks in a row at which the loss has not fallen; there are ten in a search."""
        check = (state["ticks"] - 1) % math.ceil(self.steps / _CHECKS) == 0
        still = torch.where(loss > _FALL * state["checked"], state["still"] + 1, 0)
        return update_state(state, check, {"still": still, "checked": loss})

    def _adam_step(self, state: State, gradient: Images) -> State:
        """Take one step of Adam (Kingma & Ba 2015)."""
        ticks = state["ticks"] + 1
        mean = _DECAY[0] * state["mean"] + (1 - _DECAY[0]) * gradient
        power = _DECAY[1] * state["power"] + (1 - _DECAY[1]) * gradient.square()
        correction = [per_pixel(1 - decay ** ticks.to(gradient.dtype)) for decay in _DECAY]
        shift = state["shift"] - RATE * (mean / correction[0]) / (
            (power / correction[1]).sqrt() + _TINY
        )
        points = _as_image(state["origin"] + shift)
        return {
            **state,
            "ticks": ticks,
            "mean": mean,
            "power": power,
            "shift": shift,
            "points": points,
        }

    def _next_search(self, state: State, end: Bool[Tensor, " batch"]) -> State:
        """Return the next c and a new search for the jobs whose search has ended."""
        c = state["c"]
        success = state["success"]
        search = state["search"] + end
        state = update_state(
            update_state(state, end & success, {"high": c}), end & ~success, {"low": c}
        )
        between = torch.where(state["high"].isinf(), c * 10, (state["low"] + state["high"]) / 2)
        # as published: the last search uses the smallest c that succeeded
        if self.searches >= SEARCHES + 1:
            between = torch.where(
                search == self.searches - 1, state["high"].clamp_max(LARGEST_C), between
            )
        return {
            **update_state(state, end, {**_new_search(state["origin"]), "c": between}),
            "search": search,
            "over": search == self.searches,
        }


def carlini_wagner(
    setting: Setting, *, searches: int = SEARCHES, first_c: float = FIRST_C
) -> CarliniWagner:
    """Return C&W's L2 attack at confidence 0, with steps of Adam for each of 9 values of c."""
    queries = setting.steps * searches
    return CarliniWagner(
        norm=L2, queries=queries, steps=setting.steps, searches=searches, first_c=first_c
    )


def _new_search(origin: Images) -> State:
    """Return the state at the start of a search: the clean image; Adam's moments are 0."""
    zeros = torch.zeros_like(origin)
    none = torch.full_like(origin[:, 0, 0, 0], torch.inf)
    return {
        "points": _as_image(origin),
        "shift": zeros,
        "mean": zeros.clone(),
        "power": zeros.clone(),
        "ticks": torch.zeros_like(none, dtype=torch.int64),
        "checked": none,
        "still": torch.zeros_like(none, dtype=torch.int64),
        "success": torch.zeros_like(none, dtype=torch.bool),
    }


def _as_image(place: Images) -> Images:
    """Map points from tanh space to [0, 1]."""
    image: Tensor = (place.tanh() + 1) / 2
    return image.clamp(0, 1)
