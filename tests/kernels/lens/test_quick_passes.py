"""Quick passes: the same logits and gradients to rounding, and only where they fit."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack

import vitlens
from tests.kit.tiny import bare, images, model_of, ours, shaken, small_cnn, timm_model
from vitlens import Model
from vitlens.lens import quick_passes as quick
from vitlens.lens.quick_passes import (
    quick_batch_size,
    quick_convolutions,
    quick_layers,
    quick_linear,
    quick_passes,
)

CPU = torch.device("cpu")
CLOSE = {"atol": 1e-6, "rtol": 1e-4}
Product = tuple[tuple[int, ...], str]  # the shape of what is multiplied, and what follows


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[Product]:
    """Record the products that oneDNN computes."""
    computed: list[Product] = []
    product = quick._product
    monkeypatch.setattr(
        quick,
        "_product",
        lambda *args: computed.append((tuple(args[0].shape), args[3])) or product(*args),
    )
    return computed


def perceptron() -> Model:
    layers = (nn.Flatten(), nn.Linear(3 * 64, 16), nn.GELU(), nn.Linear(16, 5))
    return model_of(shaken(lambda: nn.Sequential(*layers)), size=(8, 8))


def both(
    model: Callable[[Tensor], Tensor],
    batch: Tensor,
    within: AbstractContextManager[object] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the logits and the gradient of the inputs."""
    leaf = batch.clone().requires_grad_()
    with within or nullcontext():
        logits = model(leaf)
    (gradient,) = torch.autograd.grad(logits.logsumexp(1).sum(), leaf)
    return logits.detach(), gradient


def test_the_same_to_rounding_and_only_inside(products):
    model = nn.Sequential(nn.Linear(24, 40), nn.GELU(), nn.Linear(40, 7, bias=False)).eval()
    tokens = torch.randn(5, 9, 24, generator=torch.Generator().manual_seed(0)).transpose(0, 1)
    with torch.no_grad():
        plain = model(tokens)
        with quick_linear(CPU):
            torch.testing.assert_close(model(tokens), plain, **CLOSE)
            torch.testing.assert_close(model(tokens[0]), plain[0], **CLOSE)
        assert len(products) == 4
        assert torch.equal(model(tokens), plain)
        with quick_linear(torch.device("meta")):
            assert not _get_current_function_mode_stack()
    assert not _get_current_function_mode_stack()
    assert len(products) == 4


def test_a_second_derivative_is_that_without_quick_passes(products):
    model = perceptron()
    batch = images((8, 8), batch=3)

    def second_derivative() -> Tensor:
        """Return the derivative of a squared gradient, by the scale of the logits."""
        leaf = batch.clone().requires_grad_()
        scale = torch.ones(3, 5, requires_grad=True)
        loss = (model(leaf) * scale).sum()
        (gradient,) = torch.autograd.grad(loss, leaf, create_graph=True)
        return torch.autograd.grad(gradient.square().sum(), scale)[0]

    plain = second_derivative()
    with quick_linear(CPU):
        torch.testing.assert_close(second_derivative(), plain, **CLOSE)
    assert products


@pytest.mark.parametrize(
    "make", [perceptron, lambda: ours(size=(8, 8), patch_size=(4, 4), depth=1)]
)
def test_gradients_through_frozen_weights_are_the_same_to_rounding(make, products):
    model = make()
    batch = images((8, 8), batch=3)
    torch.testing.assert_close(both(model, batch, quick_linear(CPU)), both(model, batch), **CLOSE)
    # forward and back
    assert len(products) == 2 * sum(isinstance(module, nn.Linear) for module in model.modules())


def test_weights_that_want_a_gradient_and_other_precisions_are_left_alone(products):
    model = perceptron().requires_grad_(True)
    batch = images((8, 8), batch=3)
    with quick_linear(CPU):
        model(batch).sum().backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
    model.requires_grad_(False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(
            both(model, batch, quick_linear(CPU)), both(model, batch), atol=0, rtol=0
        )
    model = model.double()
    batch = batch.double()
    torch.testing.assert_close(
        both(model, batch, quick_linear(CPU)), both(model, batch), atol=0, rtol=0
    )
    assert not products


@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 4), (2, 3, 2, 4)])
def test_a_model_may_change_a_layers_output_in_place(shape):
    """As timm's NaFlexViT adds its positions."""
    layer = nn.Linear(4, 5).requires_grad_(False)
    tokens = torch.rand(shape)
    plain, quickly = (
        both(lambda x: layer(x).add_(1.0).square(), tokens, w) for w in (None, quick_linear(CPU))
    )
    torch.testing.assert_close(quickly, plain, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("build", [ours, lambda: timm_model("deit_tiny_distilled_patch16_224")])
def test_an_mlp_with_its_gelu_in_one_call_is_itself_unless_somebody_listens(build, products):
    model = build()
    batch = images(model.input_size)
    heard = []
    with torch.no_grad():
        plain = model(batch)
        assert not products
        with quick_layers(model):
            torch.testing.assert_close(model(batch), plain, atol=1e-5, rtol=1e-5)
        assert [then for _, then in products].count("gelu") == 2  # a block each
        assert torch.equal(model(batch), plain)
        gelu = next(module for module in model.modules() if isinstance(module, nn.GELU))
        handle = gelu.register_forward_hook(
            lambda _module, _inputs, output: heard.append(output.shape)
        )
        products.clear()
        with quick_layers(model):
            model(batch)
        handle.remove()
    assert len(heard) == [then for _, then in products].count("gelu") == 1
    with quick_layers(model):
        assert model(batch.clone().requires_grad_()).grad_fn is not None
    with quick_layers(model.to("meta")):
        for module in model.modules():
            assert "forward" not in vars(module)


def test_convolutions_with_channels_last_are_the_same_and_their_weights_come_back():
    model = small_cnn((8, 8))
    batch = images((8, 8), batch=3)
    weights = [layer.weight for layer in model.modules() if isinstance(layer, nn.Conv2d)]
    places = [(weight.data_ptr(), weight.stride()) for weight in weights]
    plain = both(model, batch)
    with suppress(KeyError), quick_convolutions(model):
        for weight in weights:
            assert weight.is_contiguous(memory_format=torch.channels_last)
        assert any(weight.stride() != stride for weight, (_, stride) in zip(weights, places))
        torch.testing.assert_close(both(model, batch), plain, **CLOSE)
        raise KeyError
    assert [(weight.data_ptr(), weight.stride()) for weight in weights] == places
    patches = ours()  # which only cuts patches
    pointers = [weight.data_ptr() for weight in patches.parameters()]
    with quick_convolutions(patches):
        assert [weight.data_ptr() for weight in patches.parameters()] == pointers


@pytest.mark.parametrize("build", [ours, small_cnn])
def test_the_same_logits_in_parts_but_a_watched_model_gets_the_whole_batch(build, monkeypatch):
    model = build()
    batch = images(model.input_size, batch=7)
    sizes = []
    heard = []
    plain = both(model, batch)
    monkeypatch.setattr(quick, "quick_batch_size", lambda _model: 3)
    monkeypatch.setattr(
        model, "run", lambda prepared, run=model.run: sizes.append(len(prepared)) or run(prepared)
    )
    with torch.no_grad():
        with suppress(KeyError), quick_passes(model):
            torch.testing.assert_close(model(batch), plain[0], atol=1e-5, rtol=1e-5)
            raise KeyError
        assert sizes == [3, 3, 1]
        assert torch.equal(model(batch), plain[0])
        with quick_passes(model):
            handle = model.module.register_forward_hook(
                lambda _m, args, _o: heard.append(len(args[0]))
            )
            model(batch)
            handle.remove()
            with vitlens.intervene(
                model, {"blocks.0": lambda tensor: heard.append(len(tensor)) or tensor}
            ):
                model(batch)
    assert heard == [7, 7]
    torch.testing.assert_close(both(model, batch, quick_passes(model)), plain, atol=1e-5, rtol=1e-4)
    assert not _get_current_function_mode_stack()
    assert "forward" not in vars(model)


def test_the_size_follows_the_widest_activation():
    assert quick_batch_size(ours()) > quick_batch_size(ours(dim=32)) >= 1
    assert quick_batch_size(vitlens.load("vit-digits")) == (12 << 20) // (65 * 512 * 4)
    silent = nn.Flatten()
    silent.unread = nn.Linear(1, 1)
    assert quick_batch_size(bare(silent, (8, 8))) >= 1, "no layer of it runs"
