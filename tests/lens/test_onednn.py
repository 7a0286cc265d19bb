"""Linear layers by oneDNN are linear layers."""

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack

from tests.lens.tiny import images, ours, timm_model
from vitlens.lens import onednn
from vitlens.lens.onednn import quick_linear, quick_mlps


def test_the_same_to_rounding_and_only_inside():
    model = nn.Sequential(nn.Linear(24, 40), nn.GELU(), nn.Linear(40, 7, bias=False)).eval()
    tokens = torch.randn(5, 9, 24, generator=torch.Generator().manual_seed(0)).transpose(0, 1)
    with torch.no_grad():
        plain = model(tokens)
        with quick_linear(torch.device("cpu")):
            torch.testing.assert_close(model(tokens), plain, atol=1e-6, rtol=1e-5)
            torch.testing.assert_close(model(tokens[0]), plain[0], atol=1e-6, rtol=1e-5)
        assert torch.equal(model(tokens), plain)
    assert not _get_current_function_mode_stack()


def test_gradients_and_other_precisions_are_left_alone():
    model = nn.Linear(8, 4)
    tokens = torch.randn(3, 8, requires_grad=True)
    with quick_linear(torch.device("cpu")):
        model(tokens).sum().backward()
        with torch.no_grad():
            assert model.double()(tokens.double()).dtype == torch.float64
    assert torch.equal(tokens.grad, model.weight.float().sum(0).expand(3, 8))


def test_another_device_is_left_alone():
    with quick_linear(torch.device("meta")):
        assert not _get_current_function_mode_stack()


@pytest.mark.parametrize("build", [ours, lambda: timm_model("deit_tiny_distilled_patch16_224")])
def test_an_mlp_with_its_gelu_in_one_call_is_itself(build, monkeypatch):
    model, device = build(), torch.device("cpu")
    batch = images(model.input_size)
    calls: list[str] = []
    product = onednn._product

    def counted(tokens: Tensor, weight: Tensor, bias: Tensor | None, then: str) -> Tensor:
        calls.append(then)
        return product(tokens, weight, bias, then)

    monkeypatch.setattr(onednn, "_product", counted)
    with torch.no_grad():
        plain = model(batch)
        assert not calls
        with quick_linear(device), quick_mlps(model, device):
            torch.testing.assert_close(model(batch), plain, atol=1e-5, rtol=1e-5)
        assert calls.count("gelu") == 2  # a block each
        assert torch.equal(model(batch), plain)
    with quick_mlps(model, device):
        assert model(batch.clone().requires_grad_()).grad_fn is not None


def test_an_mlp_that_somebody_listens_to_is_left_alone():
    model, heard = ours(), []
    activation = model.module.blocks[0].mlp.activation
    handle = activation.register_forward_hook(lambda _module, _inputs, output: heard.append(output.shape))
    with torch.no_grad(), quick_mlps(model, torch.device("cpu")):
        model(images(model.input_size))
    handle.remove()
    assert len(heard) == 1
    with torch.no_grad(), quick_mlps(model, torch.device("meta")):
        assert not any("forward" in vars(module) for module in model.modules())
