"""The smallest epsilon at which an attack succeeds on each image: one pass for a whole curve.

An image that is robust at one epsilon is attacked at the next; one on which the attack succeeds counts as broken at
every larger epsilon, so that robust accuracy never rises with epsilon.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from vitlens.attacks.engine import worst_case
from vitlens.attacks.plan import AttackPlan, clean_images
from vitlens.attacks.registry import ATTACK, attack_named
from vitlens.models.model import Model
from vitlens.pixels import AnyImages, as_parts, takes_images
from vitlens.summary import Summary

PLAN = AttackPlan()


@dataclass(frozen=True, repr=False)
class Sweep(Summary):
    """The results of one attack on n images.

    epsilons: of the attack, pixel units (for a patch the share of the image covered); indices: of the images in the
    data set; clean: whether the clean image is classified correctly; broken_at: the smallest epsilon at which the
    attack succeeds, 0 where the clean image is misclassified, infinite where it is robust; distance: of the smallest
    perturbation found, in the attack's norm, infinite where there is none, 0 where the clean image is misclassified;
    rows, kept: rows and adversarial images of the first successes, on the CPU; forwards, backwards: passes through the
    model; seconds; zero_gradients: images all of whose gradients were exactly 0; notes: caveats that belong to the
    numbers.
    """

    epsilons: tuple[float, ...]
    indices: Int[Tensor, " n"]
    clean: Bool[Tensor, " n"]
    broken_at: Float[Tensor, " n"]
    distance: Float[Tensor, " n"]
    rows: Int[Tensor, " kept"]
    kept: Float[Tensor, "kept 3 height width"]
    forwards: int
    backwards: int
    seconds: float
    zero_gradients: Bool[Tensor, " n"]
    notes: tuple[str, ...] = ()

    def robust(self, epsilon: float) -> Bool[Tensor, " n"]:
        """Which images are classified correctly within this epsilon (one of `epsilons`, or slightly more)."""
        return self.clean & (self.broken_at > epsilon)


@takes_images
def sweep(
    model: Model,
    images: AnyImages,
    labels: Tensor | str | None = None,
    plan: AttackPlan = PLAN,
    *,
    attack: str = ATTACK,
    epsilons: Sequence[float] | None = None,
    indices: Sequence[int] | None = None,
    on_progress: Callable[[int], object] = lambda _: None,
) -> Sweep:
    """Attack every image at every epsilon, up to the first at which the attack succeeds.

    epsilons: in pixel units, ascending, 0 allowed (None: the defaults of the attack's norm; a patch has its own);
    indices: of the images in the data set, which seed the random draws, so that the parts of a data set give the same
    results as the whole; on_progress: called with the number of images just finished. Raises the errors of
    `vitlens.attack`.
    """
    entry = attack_named(attack)
    clean = clean_images(model, as_parts(images), labels, indices=indices, batch_size=plan.batch_size)
    axis = plan.epsilons(entry, model, clean, epsilons)
    above_0 = tuple(epsilon for epsilon in axis if epsilon > 0)  # at 0 no image changes
    start = time.perf_counter()
    levels = above_0 if entry.kind == "budget" else (1.0,)  # a search for the smallest perturbation runs once
    outcome = worst_case(model, clean, entry, replace(plan, levels=levels), advance=on_progress)
    seconds = time.perf_counter() - start
    tried = torch.tensor([*above_0, torch.inf], dtype=torch.float64)
    broken = outcome.level.where(outcome.level >= 0, len(tried) - 1)
    if entry.kind == "minimum":  # the first epsilon that is not below the distance
        broken = torch.searchsorted(tried, outcome.distance.double())
    rows, wrong = sorted(outcome.adversarial), ~clean.correct
    kept = [outcome.adversarial[row].cpu() for row in rows]
    return Sweep(
        axis, clean.indices, clean.correct, tried[broken].masked_fill(wrong, 0.0),
        outcome.distance.masked_fill(wrong, 0.0), torch.tensor(rows, dtype=torch.int64),
        torch.stack(kept) if rows else torch.empty(0, *clean.images.shape[1:]), int(outcome.forwards.sum()),
        int(outcome.backwards.sum()), seconds, outcome.zero_gradients, clean.notes(model.alias),
    )  # fmt: skip
