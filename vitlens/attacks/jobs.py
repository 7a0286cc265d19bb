"""What an attack is to the engine: a machine that is told, image by image, what the model answered.

A job is one image at one epsilon in one try. All jobs of a batch are kept as rows of tensors; each has its own count
of reads, so that jobs which began at different times stand side by side.
"""

from dataclasses import dataclass, fields
from typing import Protocol, runtime_checkable

from jaxtyping import Bool, Float, Int
from torch import Tensor

from vitlens.attacks.norms import Norm
from vitlens.shapes import Images, Labels, Logits

State = dict[str, Tensor]  # (batch, ...) each; "points": the images that the model reads next


@dataclass(frozen=True)
class Jobs:
    """The jobs of a batch, one a row.

    rows: places among the images handed in; keys: for what is random, of seed, image, try and class aimed at; rivals:
    classes other than the label, the likeliest on the clean image first; aims: the class aimed at; restarts: which try,
    from 0; reads: how often the model has answered before, in this job.
    """

    rows: Int[Tensor, " batch"]
    keys: Int[Tensor, " batch"]
    clean: Images
    labels: Labels
    rivals: Int[Tensor, "batch rivals"]
    aims: Labels
    restarts: Int[Tensor, " batch"]
    epsilon: Float[Tensor, " batch"]
    reads: Int[Tensor, " batch"]

    def placed(self, slots: Int[Tensor, " slots"], fresh: "Jobs") -> "Jobs":
        """With these jobs in place of those in these slots."""
        pairs = ((field.name, getattr(self, field.name), getattr(fresh, field.name)) for field in fields(self))
        return Jobs(**{name: old.index_copy(0, slots, new) for name, old, new in pairs})

    def only(self, slots: Int[Tensor, " slots"]) -> "Jobs":
        """The jobs in these slots alone."""
        return Jobs(**{field.name: getattr(self, field.name)[slots] for field in fields(self)})


@dataclass(frozen=True)
class Seen:
    """What the model said of each job's points.

    logits: fp32; losses: the machine's objectives, and gradients: with respect to the points, 0 where none were asked
    for; won: whether these points are what the attack was after.
    """

    logits: Logits
    losses: Float[Tensor, "batch objectives"]
    gradients: Float[Tensor, "objectives batch 3 height width"]
    won: Bool[Tensor, " batch"]


@runtime_checkable
class Machine(Protocol):
    """One attack, for a whole batch at once; everything it remembers of a job is in the state's rows."""

    @property
    def norm(self) -> Norm:
        """In which it is bounded, or makes the change small."""
        ...

    @property
    def minimum(self) -> bool:
        """Whether it looks for the smallest change, kept in "best", its length in "nearest"; else a win ends a job."""
        ...

    @property
    def reads(self) -> int:
        """The most that a job has; the last needs no gradient."""
        ...

    @property
    def objectives(self) -> int:
        """Gradients a read; 0 where scores are enough."""
        ...

    @property
    def aims(self) -> int:
        """Classes aimed at, one after another; 0: untargeted."""
        ...

    @property
    def random(self) -> bool:
        """Whether another try can end otherwise."""
        ...

    def start(self, jobs: Jobs) -> State:
        """The state of new jobs."""
        ...

    def losses(self, logits: Logits, jobs: Jobs) -> Float[Tensor, "batch objectives"]:
        """What is to be made larger, differentiable."""
        ...

    def step(self, jobs: Jobs, state: State, seen: Seen) -> State:
        """The state after the model has answered; where a machine can end before its last read, "over" says so."""
        ...


def moved(jobs: Jobs, change: Tensor) -> Images:
    """The clean images, changed, within [0, 1]."""
    images: Tensor = (jobs.clean + change).clamp(0, 1)
    return images
