"""What an attack is to the engine: an algorithm that is told, image by image, what the model answered.

A job is one image at one epsilon in one try. All jobs of a batch are kept as rows of tensors; each has its own count
of queries, so that jobs which began at different times stand side by side.
"""

from dataclasses import dataclass, fields
from typing import Protocol, runtime_checkable

from jaxtyping import Bool, Float, Int
from torch import Tensor

from vitlens.attacks.losses import FEWEST_CLASSES
from vitlens.attacks.norms import Norm
from vitlens.attacks.registry import Attack
from vitlens.errors import InputError, UnsupportedError
from vitlens.references import resolved
from vitlens.shapes import Images, Labels, Logits

State = dict[str, Tensor]  # (batch, ...) each; "points": the images that the model is asked about next


@dataclass(frozen=True)
class Jobs:
    """The jobs of a batch, one a row.

    rows: places among the images handed in; keys: for what is random, of seed, image, try and target; runners_up:
    classes other than the label, the likeliest on the clean image first; targets: the class aimed at; restarts: which
    try, from 0; queries: how often the model has answered before, in this job.
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

    def placed(self, slots: Int[Tensor, " slots"], fresh: "Jobs") -> "Jobs":
        """With these jobs in place of those in these slots."""
        pairs = ((field.name, getattr(self, field.name), getattr(fresh, field.name)) for field in fields(self))
        return Jobs(**{name: old.index_copy(0, slots, new) for name, old, new in pairs})

    def only(self, slots: Int[Tensor, " slots"]) -> "Jobs":
        """The jobs in these slots alone."""
        return Jobs(**{field.name: getattr(self, field.name)[slots] for field in fields(self)})


@dataclass(frozen=True)
class PointEvaluation:
    """What the model answers on each job's points.

    logits: fp32; losses: the algorithm's objectives, and gradients: with respect to the points, 0 where none were asked
    for; success: whether these points are adversarial (where targets were handed in: are taken for the target).
    """

    logits: Logits
    losses: Float[Tensor, "batch objectives"]
    gradients: Float[Tensor, "objectives batch 3 height width"]
    success: Bool[Tensor, " batch"]


@runtime_checkable
class Algorithm(Protocol):
    """One attack, for a whole batch at once; everything it remembers of a job is in the state's rows."""

    @property
    def norm(self) -> Norm:
        """In which it is bounded, or makes the perturbation small."""
        ...

    @property
    def minimum(self) -> bool:
        """Whether it searches for the smallest perturbation, kept in "best", its length in "nearest".

        Otherwise a job ends with its first success.
        """
        ...

    @property
    def queries(self) -> int:
        """The most that a job makes; the last needs no gradient."""
        ...

    @property
    def objectives(self) -> int:
        """Gradients a query; 0 where scores are enough."""
        ...

    @property
    def targets(self) -> int:
        """Classes aimed at, one after another; 0: untargeted."""
        ...

    @property
    def random(self) -> bool:
        """Whether another restart can end otherwise."""
        ...

    def start(self, jobs: Jobs) -> State:
        """The state of new jobs."""
        ...

    def losses(self, logits: Logits, jobs: Jobs) -> Float[Tensor, "batch objectives"]:
        """What is to be made larger, differentiable."""
        ...

    def step(self, jobs: Jobs, state: State, seen: PointEvaluation) -> State:
        """The state after the model has answered; where an algorithm can end before its last query, "over" says so."""
        ...


@dataclass(frozen=True)
class Setting:
    """What an algorithm is made for.

    steps: at least 1; classes: of the model; size: of the images, px; token: px (down, across) of a ViT's patch on
    these images, None without; side: px of the patch attack's square (None: a quarter of the shorter side); aligned:
    whether it lies on tokens (without tokens: on a grid of its own side); maps: by which its place is chosen, or None.
    """

    steps: int
    classes: int
    size: tuple[int, int]
    token: tuple[int, int] | None = None
    side: int | None = None
    aligned: bool = True
    maps: Float[Tensor, "batch rows columns"] | None = None

    @property
    def square_side(self) -> int:
        """The side of the patch attack's square, px. Raises InputError where it does not fit the image."""
        side = max(1, min(self.size) // 4) if self.side is None else self.side
        if not 1 <= side <= min(self.size):
            raise InputError(f"expected a patch of 1 to {min(self.size)} px, found {side}")
        return side


def algorithm_of(attack: Attack, setting: Setting) -> Algorithm:
    """The algorithm of an attack without members.

    Raises UnsupportedError where the model has too few classes for its loss.
    """
    targets = {"targets": attack.targets} if attack.targets else {}
    algorithm: Algorithm = resolved(attack.function)(setting, **targets, **attack.options)
    needed = FEWEST_CLASSES.get(getattr(algorithm, "loss", None), 2)  # type: ignore[arg-type]
    if setting.classes < needed:
        raise UnsupportedError(
            f"expected a model of at least {needed} classes for {attack.name}, found {setting.classes}; "
            "try apgd-ce and square"
        )
    return algorithm


def moved(jobs: Jobs, change: Tensor) -> Images:
    """The clean images, perturbed, within [0, 1]."""
    images: Tensor = (jobs.clean + change).clamp(0, 1)
    return images
