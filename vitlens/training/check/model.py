"""Checks of the model before training: evaluation mode, initial loss, frozen parameters, activations, gradients."""

import math
from collections.abc import Iterator, Sequence
from typing import Final

import torch

from vitlens.devices import evaluating
from vitlens.models.model import Model
from vitlens.shapes import Images
from vitlens.training.check.inside import DropoutCalls, Pass
from vitlens.training.check.rows import CheckRow, LayerRow

ABOVE: Final = 1.0  # nats above ln(classes) up to which the loss of an untrained model passes
BELOW: Final = 0.5  # nats below it, from which on a model is not untrained
EQUAL: Final = 1e-4  # of logits, relative to their largest, up to which two passes agree
ALONE: Final = 1e-2  # the same for an image alone and in a batch, whose kernels may round differently
LARGEST: Final = 1e4  # root mean square of an activation
SPREAD: Final = 1e6  # largest over smallest gradient of the layers, each relative to its weights
_NAMED: Final = 4  # layers in a sentence


@torch.no_grad()
def evaluation_check(model: Model, images: Images) -> CheckRow:
    """In evaluation mode, logits are equal in two passes, and those of an image do not depend on its batch."""
    expected = "equal logits in two passes and alone or in a batch"
    with evaluating(model), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        with DropoutCalls(model) as dropout:
            first = model(images).float()
        second, alone = model(images).float(), model(images[:1]).float()
        training = [name for name, module in model.module.named_modules() if module.training]
    scale = first.abs().amax().item()
    if not math.isfinite(scale) or first.amax() == first.amin():
        advice = "All logits are equal, so a difference could not be seen: see the activations."
        return CheckRow("evaluation mode", "inconclusive", expected, "logits without differences", advice)
    again, apart = ((each - first[: len(each)]).abs().amax().item() / scale for each in (second, alone))
    found = f"two passes differ by {again:.2g}, alone and in a batch by {apart:.2g} (of the largest logit)"
    if again > EQUAL:
        active = list(dict.fromkeys(dropout.found)) or training
        where = f" in {_listed(active)}" if active else ""
        advice = (
            f"Something random stays on in evaluation mode{where}: use nn.Dropout, or "
            "F.dropout(x, p, training=self.training)."
        )
        return CheckRow("evaluation mode", "fail", expected, found, advice, again, "of the largest logit")
    if apart > ALONE:
        advice = (
            "An image's logits depend on the other images: batch statistics are used in evaluation mode "
            "(track_running_stats=False, or a norm that was left in training mode)."
        )
        return CheckRow("evaluation mode", "fail", expected, found, advice, apart, "of the largest logit")
    return CheckRow("evaluation mode", "pass", expected, found, value=max(again, apart), unit="of the largest logit")


def frozen_check(model: Model, expected_names: Sequence[str]) -> CheckRow:
    """Every parameter that is to be trained requires a gradient."""
    named = dict(model.module.named_parameters())
    frozen = [name for name in expected_names if not named[name].requires_grad]
    expected = f"{len(expected_names):,} parameter tensors that require a gradient"
    found = f"{len(expected_names) - len(frozen):,}"
    if not frozen:
        return CheckRow("frozen parameters", "pass", expected, found, value=0.0, unit="tensors")
    found += f"; frozen: {_listed(_modules(frozen))}"
    advice = "Set requires_grad_(True) on them; to freeze on purpose, use --train-last K or --freeze-backbone."
    return CheckRow("frozen parameters", "fail", expected, found, advice, float(len(frozen)), "tensors")


def activations_check(layers: Sequence[LayerRow]) -> CheckRow:
    """The output of every layer is finite, not zero and not very large."""
    expected = f"finite outputs with a root mean square above 0, up to {LARGEST:g}"
    known = {row.name: row.activation for row in layers if row.activation is not None}
    if not known:
        advice = "No module with parameters was called; the model's own forward pass computes everything."
        return CheckRow("activations", "inconclusive", expected, "none measured", advice)
    infinite = [name for name, value in known.items() if not math.isfinite(value)]
    dead = [name for name, value in known.items() if value == 0]
    large = [name for name, value in known.items() if math.isfinite(value) and value > LARGEST]
    finite = [value for value in known.values() if math.isfinite(value) and value > 0]
    top = max(finite, default=math.inf)
    if infinite:
        advice = f"The first is {infinite[0]}: look for a division by 0, a logarithm of 0, or an overflow before it."
        return CheckRow("activations", "fail", expected, f"NaN or infinity in {_listed(infinite)}", advice)
    if dead and _only_the_end(layers, dead):  # a head that starts at zero is common, and learns
        found = f"zero in {_listed(dead)}, the last one; {_spread(finite)} in the others"
        return CheckRow("activations", "pass", expected, found, value=top)
    if dead:
        advice = (
            f"The first is {dead[0]}, which passes on nothing: its weights are zero, or what enters it is (ReLUs that "
            "are never positive). Use the usual initialisation."
        )
        return CheckRow("activations", "fail", expected, f"zero in {_listed(dead)}", advice, 0.0)
    if large:
        advice = f"The first is {large[0]}: normalise before it, or make its initial weights smaller."
        return CheckRow("activations", "fail", expected, f"up to {top:.2g}, too large in {_listed(large)}", advice, top)
    return CheckRow("activations", "pass", expected, _spread(finite), value=top)


def _only_the_end(layers: Sequence[LayerRow], dead: Sequence[str]) -> bool:
    """Whether the last layer alone gives zeros, with weights that are zero."""
    called = [row for row in layers if row.order is not None]
    return list(dead) == [called[-1].name] and called[-1].weight == 0


def _spread(values: Sequence[float]) -> str:
    return f"{min(values):.2g} to {max(values):.2g}"


def initial_loss_check(seen: Pass, classes: int, *, fresh: bool) -> CheckRow:
    """The loss of an untrained model is about that of equal probabilities, ln(classes)."""
    chance = math.log(classes)
    expected = f"a loss of about ln({classes}) = {chance:.3f} nats, at most {chance + ABOVE:.3f}"
    found, value = f"{seen.loss:.3f} nats", seen.loss
    if not math.isfinite(value):
        advice = "The loss is not finite before the first step: see the activations."
        return CheckRow("initial loss", "fail", expected, found, advice)
    if value > chance + ABOVE:
        advice = (
            "The untrained model is confident and wrong: make the head's initial weights smaller (standard deviation "
            "0.02), or normalise what enters it."
        )
        return CheckRow("initial loss", "fail" if fresh else "warn", expected, found, advice, value, "nats")
    if value < chance - BELOW:
        advice = "The model knows these classes already." if not fresh else "Do the labels enter the model?"
        return CheckRow("initial loss", "inconclusive", expected, found, advice, value, "nats")
    if seen.logits.numel() and seen.logits.amax() == seen.logits.amin():
        found += ", as all logits are equal"
    return CheckRow("initial loss", "pass", expected, found, value=value, unit="nats")


def gradients_check(layers: Sequence[LayerRow], missing: Sequence[str], zero: Sequence[str], trained: int) -> CheckRow:
    """Every trained parameter gets a gradient. missing: parameters without one; zero: those whose gradient stayed 0."""
    expected = f"a gradient other than 0 for {trained:,} parameter tensors"
    without = len(missing) + len(zero)
    found = f"{trained - without:,} with one"
    if not trained:
        return CheckRow("gradients", "inconclusive", expected, found, "Nothing is trained: see the frozen parameters.")
    if not without:
        return CheckRow("gradients", "pass", expected, found, value=0.0, unit="tensors")
    if missing:
        names = _modules(missing)
        found, advice = f"{found}; none for {_listed(names)}", _cut(layers, names)
    else:
        found = f"{found}; always 0 for {_listed(_modules(zero))}"
        advice = (
            "What they compute is multiplied by 0 before the loss, so they never change: look for weights that start "
            "at 0 on both sides of them, for ReLUs that are never positive, and for a factor of 0."
        )
    return CheckRow("gradients", "fail", expected, found, advice, float(without), "tensors")


def _cut(layers: Sequence[LayerRow], names: Sequence[str]) -> str:
    """Where the graph is cut, from the order of the calls."""
    called = [row.name for row in layers if row.order is not None]
    ran = [name for name in called if name in names]
    if not ran:
        return "They take no part in the forward pass: remove them, or call them."
    after = called[called.index(ran[-1]) + 1 :]
    follows = f", before {after[0]}" if after else ""
    return (
        f"They run, but what they compute is cut off from the loss: look after {ran[-1]}{follows} for .detach(), "
        ".data, torch.no_grad(), numpy or an argmax."
    )


def gradient_norms_check(layers: Sequence[LayerRow]) -> CheckRow:
    """The gradients of the layers, each relative to its weights, are within a few orders of magnitude."""
    expected = f"gradients relative to the weights that differ by less than {SPREAD:g} times between layers"
    ratios = {row.name: row.gradient / row.weight for row in layers if row.trained and row.gradient and row.weight}
    infinite = [name for name, value in ratios.items() if not math.isfinite(value)]
    if infinite:
        advice = "See the activations and the initial loss."
        return CheckRow("gradient norms", "fail", expected, f"NaN or infinity in {_listed(infinite)}", advice)
    if len(ratios) < 2:
        advice = "Fewer than two layers have weights and a gradient: see the gradients."
        return CheckRow("gradient norms", "inconclusive", expected, f"{len(ratios)} layers with both", advice)
    least, most = min(ratios, key=ratios.__getitem__), max(ratios, key=ratios.__getitem__)
    ratio = ratios[most] / ratios[least]
    found = f"{ratio:.2g} times, from {ratios[least]:.2g} ({least}) to {ratios[most]:.2g} ({most})"
    if ratio <= SPREAD:
        return CheckRow("gradient norms", "pass", expected, found, value=ratio, unit="times")
    advice = "Gradients vanish or explode between these layers: add norms and residual connections, or a warm-up."
    return CheckRow("gradient norms", "fail", expected, found, advice, ratio, "times")


def _modules(parameters: Sequence[str]) -> list[str]:
    """The modules of parameters, in order; parameters of the whole module by their own name."""
    return list(dict.fromkeys(name.rpartition(".")[0] or name for name in parameters))


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")


def trained_parameters(model: Model) -> Iterator[str]:
    """The names of the parameters that require a gradient."""
    yield from (name for name, each in model.module.named_parameters() if each.requires_grad)
