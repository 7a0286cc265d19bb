"""Training on one small batch, at the recipe's learning rate and at others where that does not fit it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import nn
from torch.nn import functional as F

from vitlens.devices import autocast
from vitlens.models.model import Model
from vitlens.shapes import Images, Labels
from vitlens.training.check.rows import FITTED, BatchLossRow, CheckRow
from vitlens.training.optimiser import Optimiser
from vitlens.training.recipe import Recipe

STEPS: Final = 100
IMAGES: Final = 8
WARMUP: Final = 5  # steps
FALLING: Final = 0.9  # of that loss, below which the loss has fallen
STEADY: Final = 0.97  # of the loss a quarter of the steps before, below which it still falls
STILL: Final = 1e-3  # relative change of the weights below which a learning rate is low rather than high
ERRATIC: Final = 1.5  # times the first loss, above which a loss on the way shows a high rate
RATES: Final = (1e-5, 1e-4, 1e-3, 1e-2)  # tried where the recipe's does not fit; both optimisers take the same


@dataclass(frozen=True)
class Trained:
    """One training on the batch. losses: nats, before each step and after the last; moved: change of the weights,
    relative to them; gradients: the parameters that had a gradient other than 0 in any step."""

    rate: float
    losses: tuple[float, ...]
    moved: float
    gradients: frozenset[str]

    @property
    def last(self) -> float:
        """The loss at the end; NaN where it was not finite."""
        return self.losses[-1]

    def rows(self) -> list[BatchLossRow]:
        """The losses that are finite, as rows."""
        return [BatchLossRow(self.rate, step, loss) for step, loss in enumerate(self.losses) if math.isfinite(loss)]


def constant_loss(labels: Labels) -> float:
    """The loss (nats) of the best prediction that is the same for every image: the entropy of the labels."""
    shares = torch.bincount(labels).float() / len(labels)
    return float(torch.special.entr(shares).sum())


def fit_batch(model: Model, images: Images, labels: Labels, recipe: Recipe, *, rate: float, steps: int) -> Trained:
    """Train on the batch from the model's present weights, which are put back; dropout is off.

    It stops when the batch is learned or the loss is not finite.
    """
    start = {name: each.detach().clone() for name, each in model.module.state_dict().items()}
    optimiser = Optimiser(
        model.module, kind=recipe.optimiser, weight_decay=recipe.weight_decay, betas=recipe.betas,
        layer_decay=recipe.layer_decay, blocks=model.anatomy.blocks,
    )  # fmt: skip
    goal, losses, seen = FITTED * constant_loss(labels), [], set()
    for step in range(steps + 1):
        model.zero_grad(set_to_none=True)
        with autocast(images.device, "fp32"):
            loss = F.cross_entropy(model(images).float(), labels)
        losses.append(loss.item())
        if step == steps or not math.isfinite(losses[-1]) or losses[-1] <= goal or not loss.requires_grad:
            break
        loss.backward()
        seen |= {name for name, each in model.module.named_parameters() if each.grad is not None and each.grad.any()}
        nn.utils.clip_grad_norm_(model.module.parameters(), recipe.clip or math.inf)
        optimiser.set_rate(rate * min(1.0, (step + 1) / WARMUP))
        optimiser.step()
    moved = _moved(model.module, start)
    with torch.no_grad():
        for name, each in model.module.state_dict().items():
            each.copy_(start[name])
    model.zero_grad(set_to_none=True)
    return Trained(rate, tuple(losses), moved, frozenset(seen))


@torch.no_grad()
def _moved(module: nn.Module, start: dict[str, torch.Tensor]) -> float:
    """The change of the trained parameters relative to them."""
    pairs = [(each, start[name]) for name, each in module.named_parameters() if each.requires_grad]
    change = math.fsum((each - before).double().square().sum().item() for each, before in pairs)
    whole = math.fsum(before.double().square().sum().item() for _, before in pairs)
    return math.sqrt(change / whole) if whole else math.inf


def without_dropout(model: Model) -> None:
    """Put layers that drop activations or branches at random into evaluation mode."""
    for module in model.modules():
        if "Drop" in type(module).__name__ or type(module).__name__ == "StochasticDepth":
            module.eval()


def trainings(model: Model, images: Images, labels: Labels, recipe: Recipe) -> tuple[Trained, ...]:
    """At the recipe's rate; where the batch is not learned, at usual rates above or below it until it is."""
    rate, constant = recipe.learning_rate, constant_loss(labels)
    first = fit_batch(model, images, labels, recipe, rate=rate, steps=STEPS)
    if fits(first, constant):
        return (first,)
    higher, lower = [each for each in RATES if each > 2 * rate], [each for each in RATES[::-1] if each < rate / 2]
    slow = first.moved < STILL or is_falling(first, constant)
    runs = [first]
    for other in (*higher, *lower) if slow else (*lower, *higher):
        runs.append(fit_batch(model, images, labels, recipe, rate=other, steps=STEPS))
        if fits(runs[-1], constant):
            break
    return tuple(runs)


def fits(run: Trained, constant: float) -> bool:
    """Whether the batch was learned."""
    return run.last <= FITTED * constant


def falls(run: Trained, constant: float) -> bool:
    """Whether the loss fell below that of a constant prediction."""
    return run.last < FALLING * min(constant, run.losses[0])


def is_falling(run: Trained, constant: float) -> bool:
    """Whether the loss fell below that of a constant prediction, or still falls at the end, without rising before."""
    if erratic(run, constant):
        return False
    quarter = len(run.losses) // 4
    earlier, later = (sum(run.losses[start:][:quarter]) for start in (-2 * quarter, -quarter))
    return falls(run, constant) or (run.last < STEADY * run.losses[0] and later < STEADY * earlier)


def erratic(run: Trained, constant: float) -> bool:
    """Whether the loss rose on the way, or was not finite."""
    return not math.isfinite(run.last) or max(run.losses) > ERRATIC * max(constant, run.losses[0])


def one_batch_check(runs: Sequence[Trained], constant: float, images: int) -> CheckRow:
    """The model learns the labels of one small batch, at one of the learning rates."""
    expected = f"a loss below {FITTED * constant:.3f} nats on {images} images within {STEPS} steps"
    if constant == 0:
        return CheckRow("one batch", "inconclusive", expected, "images of one class", "Give images of two classes.")
    best = min(runs, key=lambda run: run.last if math.isfinite(run.last) else math.inf)
    found = f"{best.losses[0]:.3f} to {best.last:.3f} in {len(best.losses) - 1} steps at {best.rate:.3g}"
    if fits(best, constant):
        return CheckRow("one batch", "pass", expected, found, value=best.last, unit="nats")
    if falls(best, constant):
        advice = "The loss falls, but more slowly than expected: train longer, and see the norms by layer."
        return CheckRow("one batch", "inconclusive", expected, found, advice, best.last, "nats")
    advice = (
        "A model that cannot learn a few images by heart learns nothing from more: correct what failed above; else "
        "check that images and labels belong together and that the loss takes the right axis."
    )
    return CheckRow("one batch", "fail", expected, found, advice, best.last, "nats")


def _largest(run: Trained) -> float:
    return max(loss for loss in run.losses if math.isfinite(loss))


def learning_rate_check(runs: Sequence[Trained], constant: float) -> CheckRow:
    """The loss on one batch falls at the recipe's learning rate, without rising on the way."""
    first = runs[0]
    expected = f"a loss that falls at the recipe's rate of {first.rate:.3g}"
    if constant == 0:
        advice = "Give images of two classes."
        return CheckRow("learning rate", "inconclusive", expected, "images of one class", advice, first.rate)
    ended = f"{first.last:.3f} nats" if math.isfinite(first.last) else "NaN or infinity"
    found = f"{first.losses[0]:.3f} to {ended} in {len(first.losses) - 1} steps"
    found += f", up to {_largest(first):.4g} on the way" if erratic(first, constant) else ""
    learned = any(fits(run, constant) for run in runs)  # else a loss may fall by the classes' frequencies alone
    steady = not erratic(first, constant) and (falls(first, constant) or (learned and is_falling(first, constant)))
    if fits(first, constant) or steady:
        return CheckRow("learning rate", "pass", expected, found, value=first.rate)
    better = [run for run in runs[1:] if falls(run, constant) and not run.last >= first.last]
    if not better:
        found += f", and no better at {', '.join(f'{run.rate:.3g}' for run in runs[1:])}" if runs[1:] else ""
        advice = "No learning rate fits, so the rate is not the cause: correct what failed above."
        return CheckRow("learning rate", "inconclusive", expected, found, advice, first.rate)
    best = min(better, key=lambda run: run.last)
    word = "low" if best.rate > first.rate else "high"
    found += f"; at {best.rate:.3g} to {best.last:.3f} in {len(best.losses) - 1}"
    advice = f"The rate is too {word}: try --learning-rate {best.rate:.1g}."
    return CheckRow("learning rate", "fail", expected, found, advice, first.rate)
