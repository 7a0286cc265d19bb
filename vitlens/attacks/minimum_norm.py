"""Attacks that search for the smallest L2 perturbation: DeepFool, and Carlini & Wagner's (C&W).

DeepFool (Moosavi-Dezfooli 2016) steps to the nearest class boundary of the linearised model. C&W
(2017) minimise distance² + c · margin in tanh space, where no pixel can leave [0, 1]. A binary
search finds c for each image. The search of an image stops independently of the others, and its
result is the nearest of all adversarial images on the way.
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

# DeepFool
OVERSHOOT = 0.02  # steps go beyond the boundary by this part of their length
_PUSH = 1e-4  # added to each step, so that no step has length 0
# C&W, with the published values
FIRST_C = 1e-3
LARGEST_C = 1e10
_C_FACTOR = 10  # from one c to the next until one succeeds
RATE = 0.01  # learning rate
_SHRUNK = 1 - 1e-6  # factor on pixels, so that black and white are finite in tanh space
_BETA_1 = 0.9  # of Adam: the decay of the mean gradient
_BETA_2 = 0.999  # of Adam: the decay of the mean squared gradient
_TINY = 1e-8  # Adam's epsilon
_CHECKS = 10  # times in a search that the fall of the loss is checked
_FALL = 0.9999  # the loss has fallen if it is below this part of its value at the last check
# A search ends after so many checks in a row without a fall. C&W need one, but the loss of a single
# image oscillates more than their sum over a batch.
_PATIENCE = 2
_SEARCHES_WITH_LAST = 10  # from so many searches on, the last repeats the smallest c with success


class DeepFool(Algorithm):
    """Steps to the nearest class boundary of the linearised model.

    objectives: the number of most likely other classes that are considered.

    State of a job: "total" is the sum of its steps, without the overshoot.
    """

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
        # The distance to the boundary of each class if the logits were linear, (batch, objectives).
        # Gradients are (objectives, batch, 3, height, width).
        slopes = evaluation.gradients.flatten(2).square().sum(2).sqrt().T
        tiny = torch.finfo(slopes.dtype).tiny
        gaps = evaluation.losses.abs() + rounding_error(evaluation.logits)[:, None]
        distances = gaps / slopes.clamp_min(tiny)
        distances = torch.where(slopes > 0, distances, torch.inf)
        boundary_distance, boundary = distances.min(1)
        rows = torch.arange(len(boundary), device=boundary.device)
        gradient = evaluation.gradients[boundary, rows]
        # if all gradients are 0, there is no step
        length = torch.where(boundary_distance.isfinite(), boundary_distance + _PUSH, 0)
        total = state["total"] + per_pixel(length) * L2.steepest(gradient)
        points = state["points"]
        result = {"best": points, "nearest": L2.length(points - jobs.clean)}
        moved = {
            "points": perturb(jobs, (1 + OVERSHOOT) * total),
            "total": total,
            "over": evaluation.success,
        }
        return {**update_state(state, evaluation.success, result), **moved}


def deepfool(setting: Setting) -> DeepFool:
    """Return DeepFool with overshoot 0.02 over the 9 most likely other classes."""
    return DeepFool(
        norm=L2, queries=setting.steps + 1, objectives=min(TARGETS, setting.classes - 1)
    )


@dataclass(frozen=True, kw_only=True)
class CarliniWagner(Algorithm):
    """C&W's L2 attack: Adam in tanh space, and a binary search for c.

    steps: the number of steps of Adam in each search.
    searches: the number of values of c.
    first_c: the first value of c.

    The state of a job has these entries besides "points", "best" and "nearest":

    origin: the clean image in tanh space.
    shift: the change from the origin.
    c: the value of c in the current search.
    low, high: the bounds of the binary search for c.
    search: the number of finished searches.
    success: True if the current search has succeeded.
    mean, power: the first and second moment of Adam's gradients.
    ticks: the number of Adam's steps in the current search.
    checked: the loss at the last check.
    still: the number of checks in a row without a fall of the loss.
    """

    steps: int
    searches: int
    first_c: float

    def start(self, jobs: Jobs) -> State:
        """Return the clean image in tanh space."""
        origin = torch.atanh((2 * jobs.clean - 1) * _SHRUNK)
        infinite = torch.full_like(jobs.epsilon, torch.inf)
        return {
            "origin": origin,
            "c": torch.full_like(infinite, self.first_c),
            "low": torch.zeros_like(infinite),
            "high": infinite,
            "search": torch.zeros_like(jobs.rows),
            "best": jobs.clean.clone(),
            "nearest": infinite.clone(),
            **_new_search(origin),
        }

    def losses(self, logits: Logits, jobs: Jobs) -> Float[Tensor, "batch 1"]:
        """Return the negative margin of the label; 0 where another class has the largest logit."""
        lead = (margin(logits, jobs.labels) + rounding_error(logits)).clamp_min(0)
        return -lead[:, None]

    def step(self, jobs: Jobs, state: State, evaluation: PointEvaluation) -> State:
        """Keep the nearest adversarial image and take a step of Adam.

        If a search has ended, the next one starts.
        """
        points = state["points"]
        change = points - _as_image(state["origin"])
        loss = change.flatten(1).square().sum(1) - state["c"] * evaluation.losses[:, 0]
        pixel_gradient = 2 * change - per_pixel(state["c"]) * evaluation.gradients[0]
        # points = (tanh(z) + 1) / 2, with the derivative 2 points (1 - points)
        gradient = pixel_gradient * 2 * points * (1 - points)
        length = L2.length(points - jobs.clean)
        is_nearer = evaluation.success & (length < state["nearest"])
        state = update_state(state, is_nearer, {"best": points, "nearest": length})
        state = {**state, "success": state["success"] | evaluation.success}
        state = self._adam_step(state, gradient)
        state = self._check_progress(state, loss)
        has_ended = (state["ticks"] == self.steps) | (state["still"] == _PATIENCE)
        return self._next_search(state, has_ended)

    def _check_progress(self, state: State, loss: Float[Tensor, " batch"]) -> State:
        """Count the checks in a row at which the loss has not fallen; there are ten in a search."""
        steps_per_check = math.ceil(self.steps / _CHECKS)
        is_check = (state["ticks"] - 1) % steps_per_check == 0  # ticks counts this step already
        still = torch.where(loss > _FALL * state["checked"], state["still"] + 1, 0)
        return update_state(state, is_check, {"still": still, "checked": loss})

    def _adam_step(self, state: State, gradient: Images) -> State:
        """Take one step of Adam (Kingma & Ba 2015)."""
        ticks = state["ticks"] + 1
        mean = _BETA_1 * state["mean"] + (1 - _BETA_1) * gradient
        power = _BETA_2 * state["power"] + (1 - _BETA_2) * gradient.square()
        exponent = ticks.to(gradient.dtype)
        mean_correction = per_pixel(1 - _BETA_1**exponent)
        power_correction = per_pixel(1 - _BETA_2**exponent)
        root = (power / power_correction).sqrt() + _TINY
        shift = state["shift"] - RATE * (mean / mean_correction) / root
        points = _as_image(state["origin"] + shift)
        return {
            **state,
            "ticks": ticks,
            "mean": mean,
            "power": power,
            "shift": shift,
            "points": points,
        }

    def _next_search(self, state: State, has_ended: Bool[Tensor, " batch"]) -> State:
        """Return the state with the next c, and a new search, for jobs with an ended search."""
        c = state["c"]
        success = state["success"]
        search = state["search"] + has_ended
        # a c that succeeded is the new upper bound, any other the new lower one
        state = update_state(state, has_ended & success, {"high": c})
        state = update_state(state, has_ended & ~success, {"low": c})
        middle = (state["low"] + state["high"]) / 2
        next_c = torch.where(state["high"].isinf(), c * _C_FACTOR, middle)
        if self.searches >= _SEARCHES_WITH_LAST:  # as published
            smallest_success = state["high"].clamp_max(LARGEST_C)
            next_c = torch.where(search == self.searches - 1, smallest_success, next_c)
        return {
            **update_state(state, has_ended, {**_new_search(state["origin"]), "c": next_c}),
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
    """Return the state at the start of a search, at the clean image and with Adam's moments 0."""
    zeros = torch.zeros_like(origin)
    infinite = torch.full_like(origin[:, 0, 0, 0], torch.inf)  # (batch,)
    return {
        "points": _as_image(origin),
        "shift": zeros,
        "mean": zeros.clone(),
        "power": zeros.clone(),
        "ticks": torch.zeros_like(infinite, dtype=torch.int64),
        "checked": infinite,
        "still": torch.zeros_like(infinite, dtype=torch.int64),
        "success": torch.zeros_like(infinite, dtype=torch.bool),
    }


def _as_image(place: Images) -> Images:
    """Map points from tanh space to [0, 1]."""
    image: Tensor = (place.tanh() + 1) / 2
    return image.clamp(0, 1)
