"""The interface between an attack and the engine: an algorithm that chooses the next points.

A job is one image at one epsilon in one restart. All jobs of a batch are rows of tensors. Each job
counts its queries, so jobs that began at different times share a batch.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from vitlens.attacks.losses import FEWEST_CLASSES, Loss
from vitlens.attacks.norms import Norm
from vitlens.attacks.registry import Attack
from vitlens.errors import InputError, UnsupportedError
from vitlens.references import resolved
from vitlens.shapes import Images, Labels, Logits

# tensors (batch, ...) by name; "points": the images on which the model is evaluated next
State = dict[str, Tensor]


@dataclass(frozen=True)
class Jobs:
    """The jobs of a batch, one per row.

    rows: the indices of the images that are attacked.
    keys: the keys of random draws, made from seed, image, restart and target.
    clean: the clean images.
    labels: the labels of the images.
    runners_up: the classes other than the label, the most likely on the clean image first.
    targets: the target classes.
    restarts: the numbers of the restarts, from 0.
    epsilon: the budgets.
    queries: the number of forward passes of each job so far.
    """

    rows: Int[Tensor, " batch"]
    keys: Int[Tensor, " batch"]
    clean: Images
    labels: Labels
    runners_up: Int[Tensor, "batch others"]
    targets: Labels
    restarts: Int[Tensor, " batch"]
    epsilon: Float[Tensor, " batch"]
    queries: Int[Tensor, " batch"]

    def replaced(self, slots: Int[Tensor, " slots"], new: "Jobs") -> "Jobs":
        """Return the batch with new jobs in these slots."""
        fields = {}
        for name, values in vars(self).items():
            fields[name] = values.index_copy(0, slots, getattr(new, name))
        return Jobs(**fields)

    def select(self, slots: Int[Tensor, " slots"]) -> "Jobs":
        """Return the jobs in these slots."""
        return Jobs(**{name: values[slots] for name, values in vars(self).items()})


@dataclass(frozen=True)
class PointEvaluation:
    """The model's outputs on each job's points.

    logits: the logits in fp32.
    losses: the algorithm's objectives.
    gradients: the gradients of the losses with respect to the points, 0 if they are not computed.
    success: True for points that are adversarial (in a targeted attack: that are predicted as the
        target).
    """

    logits: Logits
    losses: Float[Tensor, "batch objectives"]
    gradients: Float[Tensor, "objectives batch 3 height width"]
    success: Bool[Tensor, " batch"]


@dataclass(frozen=True, kw_only=True)
class Algorithm(ABC):
    """One attack on a whole batch at once. What it remembers of a job is in its row of the state.

    The engine calls `start` for new jobs. Then, in turn, it evaluates the model on the points of
    the state and calls `step` for the next state.

    A job ends with its first success. Only a search for the smallest perturbation goes on: its
    state has "best", the nearest adversarial image so far, and "nearest", the length of that
    perturbation.

    norm: the norm that bounds the perturbation, or is minimised.
    queries: the largest number of queries of a job. The last one needs no gradient.
    loss: the objective that is maximised. None without gradients, or if `losses` has others.
    objectives: the number of gradients per query.
    """

    norm: Norm
    queries: int
    loss: Loss | None = None
    objectives: int = 1

    @abstractmethod
    def start(self, jobs: Jobs) -> State:
        """Return the state of new jobs."""

    def losses(self, logits: Logits, jobs: Jobs) -> Float[Tensor, "batch objectives"]:
        """Return the objectives to maximise, differentiable."""
        if self.loss is None:
            return logits.new_empty(len(logits), 0)
        return self.loss(logits, jobs.labels, jobs.targets)[:, None]

    @abstractmethod
    def step(self, jobs: Jobs, state: State, evaluation: PointEvaluation) -> State:
        """Return the next state from the model's outputs.

        State "over" marks jobs that end before their last query.
        """


@dataclass(frozen=True)
class Setting:
    """The settings from which an algorithm is built.

    steps: the number of steps, at least 1.
    classes: the number of classes of the model.
    size: the size of the images in px.
    token: the size (height, width) of a ViT's patch on these images in px, None for other models.
    side: the side of the patch attack's square in px (None: a quarter of the shorter side).
    aligned: True if the square lies on whole tokens (without tokens: on a grid of squares).
    maps: attribution maps that choose the position of the square, or None.
    stride: the length of all steps of PGD together in epsilons (None: its default).
    """

    steps: int
    classes: int
    size: tuple[int, int]
    token: tuple[int, int] | None = None
    side: int | None = None
    aligned: bool = True
    maps: Float[Tensor, "batch rows columns"] | None = None
    stride: float | None = None

    @property
    def square_side(self) -> int:
        """Return the side of the patch attack's square in px.

        Raises InputError for a side that does not fit into the image.
        """
        side = self.side
        if side is None:
            side = max(1, min(self.size) // 4)
        if not 1 <= side <= min(self.size):
            raise InputError(f"expected a patch of 1 to {min(self.size)} px, found {side}")
        return side


def algorithm_of(attack: Attack, setting: Setting) -> Algorithm:
    """Return the algorithm of an attack without members.

    Raises UnsupportedError for a model with too few classes for its loss.
    """
    options = dict(attack.options)
    if attack.targets:
        options["targets"] = attack.targets
    algorithm: Algorithm = resolved(attack.function)(setting, **options)
    fewest = 2
    if algorithm.loss is not None:
        fewest = FEWEST_CLASSES.get(algorithm.loss, fewest)
    if setting.classes < fewest:
        raise UnsupportedError(
            f"expected a model of at least {fewest} classes for {attack.name}, found "
            f"{setting.classes}; try apgd-ce and square"
        )
    return algorithm


def perturb(jobs: Jobs, change: Tensor) -> Images:
    """Return the clean images plus the change, clamped to [0, 1]."""
    images: Tensor = (jobs.clean + change).clamp(0, 1)
    return images


def update_state(state: State, is_updated: Bool[Tensor, " batch"], new: State) -> State:
    """Return the state with these new values for some of the jobs."""
    result = dict(state)
    for name, values in new.items():
        mask = is_updated.view(-1, *[1] * (values.dim() - 1))  # (batch, 1, ...)
        result[name] = torch.where(mask, values, state[name])
    return result
