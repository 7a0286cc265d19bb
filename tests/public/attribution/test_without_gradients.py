"""Models whose forward pass has no gradient somewhere: what works, and why the rest does not."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import vitlens
from tests.kit.models.files import one_line
from tests.kit.models.handwritten import SmallCNN, SoftmaxViT, noise, wrapped
from vitlens.attribution.registry import ATTRIBUTIONS
from vitlens.errors import UnsupportedError

TARGETS = torch.tensor([0, 1, 2])
METHODS = [
    name for name, method in ATTRIBUTIONS.items() if name not in ("scorecam", "ablationcam", "rise")
]


class Probe(nn.Module):
    """A linear classifier of a backbone that is run in some way."""

    def __init__(self, run: Any) -> None:
        super().__init__()
        self.net = SoftmaxViT()
        self.fc = nn.Linear(5, 4)
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.run(self.net, x))


def under(context: Any, net: nn.Module, x: Tensor) -> Tensor:
    with context():
        return net(x)


def no_grad_stem(net: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        x = net.tokens(x)
    for layer in net.layers:
        x = layer(x)
    return net.out(net.read(net.ln(x)))


def codes(net: nn.Module, x: Tensor) -> Tensor:
    return nn.functional.one_hot(net(x).argmax(1), 5).float()


# how the backbone runs, the part of its name that the reason holds, and whether gradients end
# before the last block
RUNS: dict[str, tuple[Any, str, bool]] = {
    "no_grad": (partial(under, torch.no_grad), "switched off in net", True),
    "inference_mode": (partial(under, torch.inference_mode), "switched off in net", True),
    "detach": (lambda net, x: net(x).detach(), "input of fc is cut off", True),
    "argmax": (codes, "input of fc is cut off", True),
    "reentrant checkpoint": (
        lambda net, x: checkpoint(net, x, use_reentrant=True),
        "use_reentrant=True",
        True,
    ),
    "no_grad in the stem": (no_grad_stem, "switched off in net.stem", False),
}


def list_of_working(model: vitlens.Model, images: Tensor, words: str) -> list[str]:
    """Return the methods that give finite maps; the others must be refused with these words."""
    refusals = dict[str, UnsupportedError]()
    for method in METHODS:
        try:
            assert torch.isfinite(
                vitlens.explain(model, images, targets=TARGETS, method=method)
            ).all()
        except UnsupportedError as refusal:
            refusals[method] = refusal
    for refusal in refusals.values():
        with one_line(UnsupportedError, words):
            raise refusal
    return [method for method in METHODS if method not in refusals]


@pytest.mark.parametrize("case", RUNS)
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_what_needs_no_gradient_works_and_the_rest_says_why(case: str):
    run, words, is_cut = RUNS[case]
    model = wrapped(partial(Probe, run))
    images = noise()
    usable = list_of_working(model, images, f"{words}.*rollout")  # rollout is among what works
    assert {name for name in METHODS if not ATTRIBUTIONS[name].gradients} <= {*usable}
    assert ("relevance" in usable) == ("gradcam" in usable) == (not is_cut)
    assert vitlens.look(model, images).method in usable
    assert vitlens.ablate(model, images, TARGETS).delta_loss.shape[0]
    with one_line(UnsupportedError, words):
        vitlens.attack(model, images, "predicted", method="pgd", epsilon=4 / 255)
    if is_cut:
        for function in (vitlens.relevance, vitlens.direct_logit_attribution):
            with one_line(UnsupportedError, words):
                function(model, images)


def test_a_checkpoint_that_autograd_can_pass_changes_nothing():
    """The same maps and attack as without it, also where torch's layers are computed in another way
    for the attack.
    """
    plain = wrapped(partial(Probe, lambda net, x: net(x)))
    model = wrapped(partial(Probe, lambda net, x: checkpoint(net, x, use_reentrant=False)))
    images = noise()
    for method in ("relevance", "gradcam", "saliency"):
        actual = vitlens.explain(model, images, targets=TARGETS, method=method)
        expected = vitlens.explain(plain, images, targets=TARGETS, method=method)
        torch.testing.assert_close(actual, expected, atol=1e-6, rtol=1e-4)
    actual = vitlens.attack(model, images, "predicted", method="fgsm", epsilon=4 / 255)
    expected = vitlens.attack(plain, images, "predicted", method="fgsm", epsilon=4 / 255)
    torch.testing.assert_close(actual.images, expected.images)


class SetsGradients(SmallCNN):
    """A forward that switches gradients on or off itself, here on."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(torch.is_grad_enabled()):
            maps = self.features(x)
        return self.fc(maps.mean((2, 3)))


def test_a_forward_that_sets_gradients_itself_has_the_same_maps():
    expected = vitlens.explain(wrapped(SmallCNN), noise(), targets=[0, 1, 2], method="gradcam")
    actual = vitlens.explain(wrapped(SetsGradients), noise(), targets=[0, 1, 2], method="gradcam")
    torch.testing.assert_close(actual, expected)


class WritesInPlace(SmallCNN):
    """A forward that autograd cannot differentiate."""

    def forward(self, x: Tensor) -> Tensor:
        maps = self.features(x).sigmoid()
        maps[:, 0] = 0
        return self.fc(maps.mean((2, 3)))


def test_a_tensor_changed_in_place_is_named_in_one_line():
    with one_line(UnsupportedError, "changed in place"):
        vitlens.explain(wrapped(WritesInPlace), noise(), targets=[0, 1, 2], method="gradcam")


def rounds_pixels(net: nn.Module, x: Tensor) -> Tensor:
    return net((x * 255).round() / 255)


def floors_pixels(net: nn.Module, x: Tensor) -> Tensor:
    return net(torch.floor(x * 16) / 16)


def divides_pixels(net: nn.Module, x: Tensor) -> Tensor:
    return net(torch.div(x, 0.1, rounding_mode="floor") * 0.1)


def signs_of_tokens(net: nn.Module, x: Tensor) -> Tensor:
    x = net.tokens(x)
    for layer in net.layers:
        x = layer(x)
    return net.out(net.read(net.ln(x.sign())))


def rounds_in_place(net: nn.Module, x: Tensor) -> Tensor:
    logits = net(x) * 100
    logits.round_()
    return logits


class Quantizer(nn.Module):
    """A run that is a module, which the reason names."""

    def forward(self, net: nn.Module, x: Tensor) -> Tensor:
        return net((x * 10).ceil() / 10)


def straight_through(net: nn.Module, x: Tensor) -> Tensor:
    return net(x + (x.round() - x).detach())


# how the backbone runs, the operation, and whether it comes after the attention
STEPS: dict[str, tuple[Any, str, bool]] = {
    "pixels": (rounds_pixels, "round in its forward", False),
    "floor": (floors_pixels, "floor in its forward", False),
    "division": (divides_pixels, "div in its forward", False),
    "floor division": (lambda net, x: net(x // 0.1 / 10), "floor_divide", False),
    "in a module": (Quantizer(), "ceil in run", False),
    "tokens": (signs_of_tokens, "sign in its forward", True),
    "in place": (rounds_in_place, "round in its forward", True),
}


@pytest.mark.parametrize("case", STEPS)
def test_an_operation_whose_gradient_is_zero_is_named_and_what_needs_no_gradient_works(case: str):
    run, words, is_after = STEPS[case]
    model = wrapped(partial(Probe, run))
    images = noise()
    usable = list_of_working(model, images, f"{words}.*rollout")
    assert {name for name in METHODS if not ATTRIBUTIONS[name].gradients} <= {*usable}
    assert not {"saliency", "smoothgrad", "integrated-gradients", "input-x-gradient", "best"} & {
        *usable
    }
    assert ("relevance" in usable) == ("gradcam" in usable) == (not is_after)
    assert vitlens.look(model, images).method in usable


def test_a_step_that_lets_the_gradient_pass_is_no_reason_to_refuse():
    model = wrapped(partial(Probe, straight_through))
    assert vitlens.explain(model, noise(), targets=TARGETS, method="saliency").any()


class Blind(SmallCNN):
    """Logits that do not depend on the image, whose gradient is zero without any step."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(0 * x)


@pytest.mark.parametrize("method", ["saliency", "input-x-gradient"])
def test_maps_of_zeros_are_not_returned_without_a_word(method: str):
    with pytest.warns(UserWarning, match="zero"):
        vitlens.explain(wrapped(Blind), noise(), targets=TARGETS, method=method)
