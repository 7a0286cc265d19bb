"""`vitlens train --check`: four findings on a few images, in seconds, on whether a model can be
trained by a recipe.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Final, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitlens.data.split import Split, in_turn
from vitlens.devices import autocast
from vitlens.errors import argument
from vitlens.inputs import takes_splits
from vitlens.models.model import Model
from vitlens.shapes import Images, Labels
from vitlens.training.finetune import partly_trainable
from vitlens.training.optimiser import Optimiser, copy_into, copy_of
from vitlens.training.recipe import Recipe
from vitlens.training.task import require_fitting

_READ: Final = 1000  # images of which those of the batch are chosen
_SIDES: Final = (
    (64, 16),
    (128, 8),
    (math.inf, 4),
)  # largest side in px, and images of a pass up to it
_ABOVE: Final = 1.0  # nats above ln(classes) up to which the loss of an untrained model passes
_BELOW: Final = 0.5  # nats below it, from which on a model is not untrained
_SPREAD: Final = 1e6  # largest over smallest gradient of the layers, each relative to its weights
_USUAL: Final = 0.02  # standard deviation of the initial weights of a head
_STEPS: Final = 100
_IMAGES: Final = 8  # of the one batch
_WARMUP: Final = 5  # steps
# share of the loss of a constant prediction at which the batch counts as learned
_FITTED: Final = 0.1
_FALLING: Final = 0.9  # of that loss, below which the loss has fallen
_STEADY: Final = 0.97  # of the loss a quarter of the steps before, below which it still falls
# relative change of the weights below which a learning rate is low rather than high
_STILL: Final = 1e-3
_ERRATIC: Final = 1.5  # times the first loss, above which a loss on the way shows a high rate
_RATES: Final = (
    1e-5,
    1e-4,
    1e-3,
    1e-2,
)  # tried where the recipe's does not fit; both optimisers take the same
_FALLS: Final = "a loss on one batch that falls at the recipe's rate"


@dataclass(frozen=True)
class Finding:
    """One finding: what was expected and found, what to try where it does not pass, and the number
    that was judged.
    """

    name: str
    state: Literal["pass", "warn", "fail", "inconclusive"]
    expected: str
    found: str
    advice: str = ""
    value: float | None = None

    @property
    def line(self) -> str:
        """As it is printed."""
        more = "" if self.state == "pass" else f"; expected {self.expected}. {self.advice}"
        return f"{self.state:<12}  {self.name}: {self.found}{more}"


@takes_splits
def check_training(
    model: Model,
    train: Split,
    test: Split,
    *,
    recipe: Recipe,
    seed: int = 0,
    train_last: int | None = None,
    fresh: bool = True,
    announce: Callable[[str], AbstractContextManager[None]] = lambda _: nullcontext(),
) -> tuple[Finding, ...]:
    """Return initial loss, gradient norms, one batch and learning rate; the model is as before
    afterwards.

    train_last: as in `fit`; fresh: whether the weights are random; announce: is given a name of
    each part before it begins. An earlier finding that fails can cause a later one. Raises what
    `fit` raises for data that do not fit the model.
    """
    require_fitting(model, train, test)
    images, labels = _batch(model, train, seed=seed)
    devices = [model.device] if model.device.type == "cuda" else []
    with (
        partly_trainable(model, last=train_last),
        _restored(model),
        torch.random.fork_rng(devices=devices),
    ):
        torch.manual_seed(seed)
        before = copy_of(model)
        with announce("Initial loss and gradients"):
            loss = F.cross_entropy(model(images).float(), labels)
            reaching = loss
            if _fill_zero_layers(model.module):
                reaching = F.cross_entropy(model(images).float(), labels)
            if reaching.requires_grad:  # else nothing that is trained reaches the loss
                reaching.backward()
        findings = (
            initial_loss(loss.item(), len(model.classes), fresh=fresh),
            gradient_norms(model.module),
        )
        copy_into(model, before)
        runs: list[Fitted] = []
        if loss.isfinite():
            for module in model.modules():
                if "Drop" in type(module).__name__ or type(module).__name__ == "StochasticDepth":
                    module.eval()
            runs = _trainings(model, images[:_IMAGES], labels[:_IMAGES], recipe, announce)
    if runs and runs[0].constant:
        return (*findings, one_batch(runs), learning_rate(runs))
    found = "a loss that is not finite"
    advice = "Correct the initial loss first."
    if runs:
        found = "images of one class"
        advice = "Give images of two classes."
    not_made = (("one batch", "a small batch that is learned by heart"), ("learning rate", _FALLS))
    return (
        *findings,
        *(Finding(name, "inconclusive", expected, found, advice) for name, expected in not_made),
    )


@contextmanager
def _restored(model: Model) -> Iterator[None]:
    """Without gradients inside; on exit weights, buffers and gradients as they were."""
    state = copy_of(model)
    gradients = [parameter.grad for parameter in model.parameters()]
    model.zero_grad(set_to_none=True)
    try:
        yield
    finally:
        copy_into(model, state)
        for parameter, gradient in zip(model.parameters(), gradients):
            parameter.grad = gradient


def _batch(model: Model, split: Split, *, seed: int) -> tuple[Images, Labels]:
    """Return a few images, balanced by class, on the model's device."""
    some = split.limit(_READ, seed=seed)
    assert some.labels is not None
    labels = some.labels.cpu().long()
    count = next(images for most, images in _SIDES if max(model.input_size) <= most)
    chosen = in_turn(labels, seed)[0][:count]
    (batch,) = some.pick(chosen).batches(count)
    return batch.images.to(model.device), labels[chosen].to(model.device)


def initial_loss(loss: float, classes: int, *, fresh: bool) -> Finding:
    """Return the loss (nats) of an untrained model is about that of equal probabilities,
    ln(classes).
    """
    chance = math.log(classes)
    expected = f"a loss of about ln({classes}) = {chance:.3f} nats, at most {chance + _ABOVE:.3f}"
    if not math.isfinite(loss):
        advice = "Look for a division by 0, a logarithm of 0, or an overflow."
        return Finding("initial loss", "fail", expected, f"{loss:.3f} nats", advice)
    if loss > chance + _ABOVE:
        state: Literal["fail", "warn"] = "fail" if fresh else "warn"
        advice = (
            "The untrained model is confident and wrong: make the head's initial weights smaller "
            "(standard deviation 0.02), or normalise what enters it."
        )
        return Finding("initial loss", state, expected, f"{loss:.3f} nats", advice, loss)
    if loss < chance - _BELOW:
        advice = (
            "Do the labels enter the model?" if fresh else "The model knows these classes already."
        )
        return Finding("initial loss", "inconclusive", expected, f"{loss:.3f} nats", advice, loss)
    return Finding("initial loss", "pass", expected, f"{loss:.3f} nats", value=loss)


def _fill_zero_layers(module: nn.Module) -> bool:
    """Give layers whose trained weights are all zero, as of a new head, usual random ones; True if
    there are some.

    A layer of zeros lets no gradient through to the layers below in the first step, which is no
    fault.
    """
    filled = False
    for parameter in module.parameters():
        if parameter.requires_grad and parameter.dim() > 1 and not bool(parameter.any()):
            nn.init.trunc_normal_(parameter, std=_USUAL)
            filled = True
    return filled


def gradient_norms(module: nn.Module) -> Finding:
    """Return the gradients of the layers, each relative to its weights, are within a few orders of
    magnitude.
    """
    expected = (
        f"gradients relative to the weights that differ by less than {_SPREAD:g} times "
        "between layers"
    )
    ratios = {}
    for name, part in module.named_modules():
        own = dict(part.named_parameters(recurse=False))
        for title, group in (
            {name: [*own.values()]} if name else {each: [own[each]] for each in own}
        ).items():
            gradient = _norm([each.grad for each in group if each.grad is not None])
            weight = _norm(group)
            if gradient and weight:
                ratios[title] = gradient / weight
    infinite = [name for name, value in ratios.items() if not math.isfinite(value)]
    if infinite:
        found = f"NaN or infinity in {len(infinite)} layers, the first of them {infinite[0]}"
        return Finding("gradient norms", "fail", expected, found, "See the initial loss.")
    trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    if len(ratios) == 1 and len({name.rpartition(".")[0] for name in trained}) == 1:
        return Finding(
            "gradient norms",
            "pass",
            expected,
            f"a gradient in the one trained layer, {next(iter(ratios))}",
        )
    if len(ratios) < 2:
        advice = "Fewer than two layers have weights and a gradient: is the loss cut off from them?"
        return Finding(
            "gradient norms", "inconclusive", expected, f"{len(ratios)} layers with both", advice
        )
    least = min(ratios, key=ratios.__getitem__)
    most = max(ratios, key=ratios.__getitem__)
    ratio = ratios[most] / ratios[least]
    found = f"{ratio:.2g} times, from {ratios[least]:.2g} ({least}) to {ratios[most]:.2g} ({most})"
    if ratio <= _SPREAD:
        return Finding("gradient norms", "pass", expected, found, value=ratio)
    advice = (
        "Gradients vanish or explode between these layers: add norms and residual "
        "connections, or a warm-up."
    )
    return Finding("gradient norms", "fail", expected, found, advice, ratio)


def _norm(tensors: Sequence[Tensor]) -> float:
    return (
        float(torch.stack([each.detach().float().norm() for each in tensors]).norm())
        if tensors
        else 0.0
    )


@dataclass(frozen=True)
class Fitted:
    """One training on the batch. losses: nats, before each step and after the last; constant: the
    loss of the best prediction that is the same for every image; moved: change of the weights,
    relative to them; images: of the batch.
    """

    rate: float
    losses: tuple[float, ...]
    constant: float
    moved: float
    images: int

    @property
    def fits(self) -> bool:
        """Return the batch was learned."""
        return self.losses[-1] <= _FITTED * self.constant

    @property
    def falls(self) -> bool:
        """Return True if the loss fell below that of a constant prediction."""
        return self.losses[-1] < _FALLING * min(self.constant, self.losses[0])

    @property
    def erratic(self) -> bool:
        """Return True if the loss rose on the way, or was not finite."""
        last = self.losses[-1]
        return not math.isfinite(last) or max(self.losses) > _ERRATIC * max(
            self.constant, self.losses[0]
        )

    @property
    def is_falling(self) -> bool:
        """Return True if the loss fell below that of a constant prediction, or still falls, without
        having risen before.
        """
        if self.erratic:
            return False
        quarter = len(self.losses) // 4
        earlier, later = (sum(self.losses[start:][:quarter]) for start in (-2 * quarter, -quarter))
        return self.falls or (
            self.losses[-1] < _STEADY * self.losses[0] and later < _STEADY * earlier
        )

    @property
    def words(self) -> str:
        """Return the first and the last loss."""
        last = f"{self.losses[-1]:.3f}" if math.isfinite(self.losses[-1]) else "NaN or infinity"
        return (
            f"{self.losses[0]:.3f} to {last} nats in {len(self.losses) - 1} steps at "
            f"{self.rate:.3g}"
        )


def _trainings(
    model: Model,
    images: Images,
    labels: Labels,
    recipe: Recipe,
    announce: Callable[[str], AbstractContextManager[None]],
) -> list[Fitted]:
    """At the recipe's rate; where the batch is not learned, at usual rates above or below it until
    it is.
    """
    rate = recipe.learning_rate
    with announce(f"Learning one batch at the rate {rate:g}"):
        runs = [_fit_batch(model, images, labels, recipe, rate=rate)]
    if not runs[0].fits:
        higher = [each for each in _RATES if each > 2 * rate]
        lower = [each for each in _RATES[::-1] if each < rate / 2]
        slow = runs[0].moved < _STILL or runs[0].is_falling
        for other in (*higher, *lower) if slow else (*lower, *higher):
            with announce(f"Learning one batch at the rate {other:g}"):
                runs.append(_fit_batch(model, images, labels, recipe, rate=other))
            if runs[-1].fits:
                break
    return runs


def _fit_batch(
    model: Model, images: Images, labels: Labels, recipe: Recipe, *, rate: float
) -> Fitted:
    """Train on the batch, until it is learned or the loss is not finite; the weights are put
    back."""
    start = copy_of(model.module)
    optimiser = Optimiser(model.module, recipe, blocks=model.anatomy.blocks)
    constant = float(torch.special.entr(torch.bincount(labels).float() / len(labels)).sum())
    losses: list[float] = []
    for step in range(_STEPS + 1):
        model.zero_grad(set_to_none=True)
        with autocast(images.device, "fp32"):
            loss = F.cross_entropy(model(images).float(), labels)
        losses.append(loss.item())
        stuck = not (math.isfinite(losses[-1]) and loss.requires_grad)
        if step == _STEPS or stuck or losses[-1] <= _FITTED * constant:
            break
        loss.backward()
        nn.utils.clip_grad_norm_(model.module.parameters(), recipe.clip or math.inf)
        optimiser.set_rate(rate * min(1.0, (step + 1) / _WARMUP))
        optimiser.step()
    trained = {
        name: each.detach() for name, each in model.module.named_parameters() if each.requires_grad
    }
    change = math.fsum(
        (each - start[name]).double().square().sum().item() for name, each in trained.items()
    )
    whole = math.fsum(start[name].double().square().sum().item() for name in trained)
    copy_into(model.module, start)
    return Fitted(
        rate, tuple(losses), constant, math.sqrt(change / whole) if whole else math.inf, len(images)
    )


def one_batch(runs: Sequence[Fitted]) -> Finding:
    """Return the model learns the labels of one small batch, at one of the learning rates."""
    expected = (
        f"a loss below {_FITTED * runs[0].constant:.3f} nats on {runs[0].images} images "
        f"within {_STEPS} steps"
    )
    best = min(runs, key=lambda run: run.losses[-1] if math.isfinite(run.losses[-1]) else math.inf)
    if best.fits:
        return Finding("one batch", "pass", expected, best.words, value=best.losses[-1])
    if best.falls:
        advice = (
            "The loss falls, but more slowly than expected: train longer, and see the "
            "gradient norms."
        )
        return Finding("one batch", "inconclusive", expected, best.words, advice, best.losses[-1])
    advice = (
        "A model that cannot learn a few images by heart learns nothing from more: correct what "
        "failed above; else check that images and labels belong together and that the loss takes "
        "the right axis."
    )
    return Finding("one batch", "fail", expected, best.words, advice, best.losses[-1])


def learning_rate(runs: Sequence[Fitted]) -> Finding:
    """Return the loss on one batch falls at the recipe's learning rate, without rising on the
    way."""
    first = runs[0]
    found = runs[0].words
    if first.erratic:
        found += (
            f", up to {max(loss for loss in first.losses if math.isfinite(loss)):.4g} on the way"
        )
    learned = any(
        run.fits for run in runs
    )  # else a loss may fall by the classes' frequencies alone
    steady = not first.erratic and (first.falls or (learned and first.is_falling))
    if first.fits or steady:
        return Finding("learning rate", "pass", _FALLS, found, value=first.rate)
    better = [run for run in runs[1:] if run.falls and not run.losses[-1] >= first.losses[-1]]
    if not better:
        advice = "No learning rate fits, so the rate is not the cause: correct what failed above."
        return Finding("learning rate", "inconclusive", _FALLS, found, advice, first.rate)
    best = min(better, key=lambda run: run.losses[-1])
    word = "low" if best.rate > first.rate else "high"
    advice = f"The rate is too {word}: try {argument('learning_rate', float(f'{best.rate:.1g}'))}."
    return Finding("learning rate", "fail", _FALLS, f"{found}; {best.words}", advice, first.rate)
