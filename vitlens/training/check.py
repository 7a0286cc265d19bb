"""Check in seconds, on a few images, if a recipe can train a model (`vitlens train --check`)."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
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

_READ: Final = 1000  # images from which those of the batch are chosen
# (largest side in px, images in a forward pass)
_SIDES: Final = ((64, 16), (128, 8), (math.inf, 4))

# initial loss, in nats: an untrained model passes up to so much above ln(classes)
_ABOVE: Final = 1.0
_BELOW: Final = 0.5  # a model so much below ln(classes), in nats, is not untrained
# largest ratio of the gradients of two layers that passes, each relative to the layer's weights
_SPREAD: Final = 1e6
_HEAD_DEVIATION: Final = 0.02  # usual standard deviation of the initial weights of a head

# training on one batch
_STEPS: Final = 100
_IMAGES: Final = 8
_WARMUP: Final = 5  # steps
# the batch counts as learned below this share of the loss of a constant prediction
_FITTED: Final = 0.1
_FALLING: Final = 0.9  # the loss has fallen below this share of the loss of a constant prediction
_STEADY: Final = 0.97  # it still falls below this share of the loss a quarter of the steps before
# a smaller relative change of the weights shows that a learning rate is too low, not too high
_STILL: Final = 1e-3
# a loss of more than so many times the first one, or that of a constant prediction, shows that a
# learning rate is too high
_ERRATIC: Final = 1.5
# rates that are tried if the recipe's one does not fit; both optimisers take the same rates
_RATES: Final = (1e-5, 1e-4, 1e-3, 1e-2)
_FALLING_LOSS: Final = "a loss on one batch that falls at the recipe's rate"

Announce = Callable[[str], AbstractContextManager[None]]


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    name: the name of the check.
    state: whether it passes.
    expected: what was expected.
    found: what was found.
    advice: what to try if it does not pass.
    value: the number that was judged, or None.
    """

    name: str
    state: Literal["pass", "warn", "fail", "inconclusive"]
    expected: str
    found: str
    advice: str = ""
    value: float | None = None

    @property
    def line(self) -> str:
        """Return the finding as it is printed."""
        line = f"{self.state:<12}  {self.name}: {self.found}; expected {self.expected}"
        if self.state == "pass":
            return line
        return f"{line}. {self.advice}"


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
    announce: Announce = lambda _: nullcontext(),
) -> tuple[Finding, ...]:
    """Return the findings on initial loss, gradient norms, one batch and learning rate.

    The model is restored afterwards. An earlier finding that fails can cause a later one. Raises
    what `fit` raises for data that do not fit the model.

    train_last: as in `fit`.
    fresh: whether the weights are random.
    announce: called with the name of a check before it begins; returns a context for it.
    """
    require_fitting(model, train, test)
    images, labels = _choose_batch(model, train, seed=seed)
    devices = [model.device] if model.device.type == "cuda" else []
    with (
        partly_trainable(model, last=train_last),
        _restoring(model),
        torch.random.fork_rng(devices=devices),
    ):
        torch.manual_seed(seed)
        initial_state = copy_of(model)
        with announce("Initial loss and gradients"):
            loss = F.cross_entropy(model(images).float(), labels)
            loss_with_gradient = loss
            if _fill_zero_layers(model.module):
                loss_with_gradient = F.cross_entropy(model(images).float(), labels)
            if loss_with_gradient.requires_grad:  # else nothing that is trained reaches the loss
                loss_with_gradient.backward()
        findings = (
            initial_loss(loss.item(), len(model.classes), fresh=fresh),
            gradient_norms(model.module),
        )
        copy_into(model, initial_state)
        runs: list[BatchRun] = []
        if loss.isfinite():
            for module in model.modules():  # no dropout: the batch is to be learned by heart
                if "Drop" in type(module).__name__ or type(module).__name__ == "StochasticDepth":
                    module.eval()
            runs = _train_batch(model, images[:_IMAGES], labels[:_IMAGES], recipe, announce)
    if runs and runs[0].constant_loss:  # it is 0 if all images of the batch are of one class
        return (*findings, one_batch(runs), learning_rate(runs))
    if runs:
        observed = "images of one class"
        advice = "Give images of two classes."
    else:
        observed = "a loss that is not finite"
        advice = "Correct the initial loss first."
    return (
        *findings,
        Finding(
            "one batch", "inconclusive", "a small batch that the model memorises", observed, advice
        ),
        Finding("learning rate", "inconclusive", _FALLING_LOSS, observed, advice),
    )


@contextmanager
def _restoring(model: Model) -> Iterator[None]:
    """Yield without gradients; weights, buffers and gradients are restored on exit."""
    state = copy_of(model)
    gradients = [parameter.grad for parameter in model.parameters()]
    model.zero_grad(set_to_none=True)
    try:
        yield
    finally:
        copy_into(model, state)
        for parameter, gradient in zip(model.parameters(), gradients):
            parameter.grad = gradient


def _choose_batch(model: Model, split: Split, *, seed: int) -> tuple[Images, Labels]:
    """Return a few images, balanced by class, on the model's device."""
    subset = split.limit(_READ, seed=seed)
    assert subset.labels is not None
    labels = subset.labels.cpu().long()
    count = _images_in_pass(max(model.input_size))
    order, _ = in_turn(labels, seed)
    chosen = order[:count]
    (batch,) = subset.pick(chosen).batches(count)
    return batch.images.to(model.device), labels[chosen].to(model.device)


def _images_in_pass(side: int) -> int:
    """Return the number of images in a forward pass, by the longer side of the images in px."""
    return next(images for largest_side, images in _SIDES if side <= largest_side)


def initial_loss(loss: float, classes: int, *, fresh: bool) -> Finding:
    """Judge the loss (nats) of an untrained model, which should be about ln(classes)."""
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
        advice = "The model knows these classes already."
        if fresh:
            advice = "Do the labels enter the model?"
        return Finding("initial loss", "inconclusive", expected, f"{loss:.3f} nats", advice, loss)
    return Finding("initial loss", "pass", expected, f"{loss:.3f} nats", value=loss)


def _fill_zero_layers(module: nn.Module) -> bool:
    """Fill trained weights that are all zero at random, and return True if there are any.

    A new head has such weights. In the first step, no gradient passes through it to the layers
    below, which is no fault.
    """
    is_any_filled = False
    for parameter in module.parameters():
        is_trained_matrix = parameter.requires_grad and parameter.dim() > 1
        if is_trained_matrix and not bool(parameter.any()):
            nn.init.trunc_normal_(parameter, std=_HEAD_DEVIATION)
            is_any_filled = True
    return is_any_filled


def gradient_norms(module: nn.Module) -> Finding:
    """Judge the spread of the layers' gradients, relative to their weights."""
    expected = (
        f"gradients relative to the weights that differ by less than {_SPREAD:g} times between "
        "layers"
    )
    ratios = _gradient_ratios(module)
    not_finite = [name for name, value in ratios.items() if not math.isfinite(value)]
    if not_finite:
        observed = f"NaN or infinity in {len(not_finite)} layers, the first of them {not_finite[0]}"
        return Finding("gradient norms", "fail", expected, observed, "See the initial loss.")
    trained_layers = set()
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            trained_layers.add(name.rpartition(".")[0])
    if len(ratios) == 1 and len(trained_layers) == 1:
        (only_layer,) = ratios
        observed = f"a gradient in the one trained layer, {only_layer}"
        return Finding("gradient norms", "pass", expected, observed)
    if len(ratios) < 2:
        observed = f"{len(ratios)} layers with both"
        advice = "Fewer than two layers have weights and a gradient: is the loss cut off from them?"
        return Finding("gradient norms", "inconclusive", expected, observed, advice)
    smallest = min(ratios, key=ratios.__getitem__)
    largest = max(ratios, key=ratios.__getitem__)
    spread = ratios[largest] / ratios[smallest]
    observed = (
        f"{spread:,.0f} times, from {ratios[smallest]:.2g} ({smallest}) to {ratios[largest]:.2g} "
        f"({largest})"
    )
    if spread <= _SPREAD:
        return Finding("gradient norms", "pass", expected, observed, value=spread)
    advice = (
        "Gradients vanish or explode between these layers: add norms and residual connections, or "
        "a warm-up."
    )
    return Finding("gradient norms", "fail", expected, observed, advice, spread)


def _gradient_ratios(module: nn.Module) -> dict[str, float]:
    """Return the norm of each layer's gradient over that of its weights, by the layer's name.

    Parameters outside any layer are separate entries. Ratios of 0, and those for weights of zero,
    are left out.
    """
    groups: dict[str, list[Tensor]] = {}
    for layer, submodule in module.named_modules():
        for name, parameter in submodule.named_parameters(recurse=False):
            # the name of the module itself is "": its parameters are outside any layer
            groups.setdefault(layer or name, []).append(parameter)
    ratios = {}
    for title, parameters in groups.items():
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        gradient_norm = _norm(gradients)
        weight_norm = _norm(parameters)
        if gradient_norm and weight_norm:
            ratios[title] = gradient_norm / weight_norm
    return ratios


def _norm(tensors: Sequence[Tensor]) -> float:
    if not tensors:
        return 0.0
    norms = [tensor.detach().float().norm() for tensor in tensors]
    return float(torch.stack(norms).norm())


@dataclass(frozen=True)
class BatchRun:
    """One training on the batch.

    rate: the learning rate.
    losses: the losses in nats, before each step and after the last.
    constant_loss: the loss of the best prediction that is the same for every image.
    weight_change: the change of all weights, relative to them.
    images: the number of images in the batch.
    """

    rate: float
    losses: tuple[float, ...]
    constant_loss: float
    weight_change: float
    images: int

    @property
    def final_loss(self) -> float:
        """Return the loss after the last step, infinity instead of NaN."""
        return self.losses[-1] if math.isfinite(self.losses[-1]) else math.inf

    @property
    def fits(self) -> bool:
        """Return True if the batch was learned."""
        return self.losses[-1] <= _FITTED * self.constant_loss

    @property
    def is_clearly_below_start(self) -> bool:
        """Return True if the loss is clearly below its start and that of a constant prediction."""
        return self.losses[-1] < _FALLING * min(self.constant_loss, self.losses[0])

    @property
    def is_erratic(self) -> bool:
        """Return True if the loss rose on the way, or was not finite."""
        limit = _ERRATIC * max(self.constant_loss, self.losses[0])
        return not math.isfinite(self.losses[-1]) or max(self.losses) > limit

    @property
    def is_falling(self) -> bool:
        """Return True if the loss did not rise on the way, and is clearly lower or still falls.

        It still falls at the end if it is below its start, and its sum over the last quarter of the
        steps is below that over the quarter before.
        """
        if self.is_erratic:
            return False
        count = len(self.losses)
        quarter = count // 4
        third_quarter = sum(self.losses[count - 2 * quarter : count - quarter])
        last_quarter = sum(self.losses[count - quarter :])
        has_fallen = self.losses[-1] < _STEADY * self.losses[0]
        still_falls = has_fallen and last_quarter < _STEADY * third_quarter
        return self.is_clearly_below_start or still_falls

    @property
    def description(self) -> str:
        """Return the first and the last loss, the steps and the rate as text."""
        last = f"{self.losses[-1]:.3f}" if math.isfinite(self.losses[-1]) else "NaN or infinity"
        return (
            f"{self.losses[0]:.3f} to {last} nats in {len(self.losses) - 1} steps at "
            f"{self.rate:.3g}"
        )

    @property
    def course(self) -> str:
        """Return the rate, the highest loss and the last one relative to the first as text."""
        words = f"at {self.rate:.3g} the loss "
        if self.losses[0] == 0:  # of confident predictions, rounded: the batch is learned already
            words += "starts at 0"
        elif math.isfinite(self.losses[-1]):
            words += f"ends at {100 * self.losses[-1] / self.losses[0]:.3g} % of its start"
        else:
            words += "becomes NaN or infinite"
        highest = max((loss for loss in self.losses if math.isfinite(loss)), default=math.nan)
        return f"{words}, and is at most {highest:.4g} nats on the way"


def _train_batch(
    model: Model, images: Images, labels: Labels, recipe: Recipe, announce: Announce
) -> list[BatchRun]:
    """Return trainings on the batch: at the recipe's rate, then at other rates until it fits."""
    rate = recipe.learning_rate
    with announce(f"Learning one batch at the rate {rate:g}"):
        first = _fit_batch(model, images, labels, recipe, rate=rate)
    runs = [first]
    if first.fits:
        return runs
    higher = [candidate for candidate in _RATES if candidate > 2 * rate]
    lower = [candidate for candidate in _RATES[::-1] if candidate < rate / 2]
    is_slow = first.weight_change < _STILL or first.is_falling
    # the more likely direction first, the nearest rate first
    candidates = [*higher, *lower] if is_slow else [*lower, *higher]
    for candidate in candidates:
        with announce(f"Learning one batch at the rate {candidate:g}"):
            runs.append(_fit_batch(model, images, labels, recipe, rate=candidate))
        if runs[-1].fits:
            break
    return runs


def _fit_batch(
    model: Model, images: Images, labels: Labels, recipe: Recipe, *, rate: float
) -> BatchRun:
    """Train on the batch until it is learned or the loss is not finite; restore the weights."""
    initial_state = copy_of(model.module)
    optimiser = Optimiser(model.module, recipe, blocks=model.anatomy.blocks)
    # the best constant prediction is the frequency of each class; its loss is their entropy
    class_shares = torch.bincount(labels).float() / len(labels)
    constant_loss = float(torch.special.entr(class_shares).sum())
    losses: list[float] = []
    for step in range(_STEPS + 1):
        model.zero_grad(set_to_none=True)
        with autocast(images.device, "fp32"):
            loss = F.cross_entropy(model(images).float(), labels)
        losses.append(loss.item())
        can_continue = math.isfinite(losses[-1]) and loss.requires_grad
        is_learned = losses[-1] <= _FITTED * constant_loss
        if step == _STEPS or is_learned or not can_continue:
            break
        loss.backward()
        nn.utils.clip_grad_norm_(model.module.parameters(), recipe.clip or math.inf)
        optimiser.set_rate(rate * min(1.0, (step + 1) / _WARMUP))
        optimiser.step()
    weight_change = _relative_change(model.module, initial_state)
    copy_into(model.module, initial_state)
    return BatchRun(rate, tuple(losses), constant_loss, weight_change, len(images))


def _relative_change(module: nn.Module, initial_state: Mapping[str, Tensor]) -> float:
    """Return the norm of the change of the trained weights, relative to their initial norm."""
    squared_changes = []
    squared_weights = []
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            initial = initial_state[name]
            squared_changes.append((parameter.detach() - initial).double().square().sum().item())
            squared_weights.append(initial.double().square().sum().item())
    squared_norm = math.fsum(squared_weights)
    if not squared_norm:
        return math.inf
    return math.sqrt(math.fsum(squared_changes) / squared_norm)


def one_batch(runs: Sequence[BatchRun]) -> Finding:
    """Judge if the model learns the labels of one small batch, at any of the learning rates.

    runs: the trainings on the batch, that at the recipe's rate first.
    """
    expected = (
        f"a loss below {_FITTED * runs[0].constant_loss:.3f} nats on {runs[0].images} images "
        f"within {_STEPS} steps"
    )
    best = min(runs, key=lambda run: run.final_loss)
    loss = best.losses[-1]
    if best.fits:
        return Finding("one batch", "pass", expected, best.description, value=loss)
    if best.is_clearly_below_start:
        advice = (
            "The loss falls, but more slowly than expected: train longer, and look at "
            "the gradient norms."
        )
        return Finding("one batch", "inconclusive", expected, best.description, advice, loss)
    advice = (
        "A model that cannot memorise a few images learns nothing from more. Correct "
        "what failed above; otherwise check that images and labels match and that the "
        "loss uses the right axis."
    )
    return Finding("one batch", "fail", expected, best.description, advice, loss)


def learning_rate(runs: Sequence[BatchRun]) -> Finding:
    """Judge if the loss on one batch falls at the recipe's learning rate, without rising.

    runs: the trainings on the batch, that at the recipe's rate first.
    """
    first = runs[0]
    observed = first.course
    # Without a run that fits, a slow fall may only be that of a model that learns how frequent each
    # class is. Then the loss must also be clearly below that of the class frequencies.
    is_any_fitting = any(run.fits for run in runs)
    is_steady = not first.is_erratic and (
        first.is_clearly_below_start or (is_any_fitting and first.is_falling)
    )
    if first.fits or is_steady:
        return Finding("learning rate", "pass", _FALLING_LOSS, observed, value=first.rate)
    better = []
    for run in runs[1:]:
        is_worse = run.losses[-1] >= first.losses[-1]  # False if the first loss is NaN
        if run.is_clearly_below_start and not is_worse:
            better.append(run)
    if not better:
        advice = "No learning rate fits, so the rate is not the cause: correct what failed above."
        return Finding("learning rate", "inconclusive", _FALLING_LOSS, observed, advice, first.rate)
    best = min(better, key=lambda run: run.losses[-1])
    word = "low" if best.rate > first.rate else "high"
    advice = f"The rate is too {word}: try {argument('learning_rate', float(f'{best.rate:.1g}'))}."
    observed = f"{observed}; {best.course}"
    return Finding("learning rate", "fail", _FALLING_LOSS, observed, advice, first.rate)
