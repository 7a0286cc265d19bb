"""The contract of every attribution method, parametrised from the registry."""

import pytest
import torch
from torch import Tensor, nn

import vitlens
from tests.kit.explainable import MODELS, cnn, linear
from tests.kit.tiny import images, model_of, ours, shared_model, timm_model
from vitlens import Model
from vitlens.attribution.registry import ATTRIBUTIONS, default_methods
from vitlens.errors import InputError, UnknownNameError, UnsupportedError

CHAINED, DEPTHS, CAMS = (
    tuple(name for name, method in ATTRIBUTIONS.items() if method.needs == need) for need in ("chain", "depths", "cam")
)
RANDOM = tuple(name for name, method in ATTRIBUTIONS.items() if method.random)
PACKAGED = tuple(name for name, method in ATTRIBUTIONS.items() if method.package)
SLOW = ("scorecam", "ablationcam", "smoothgrad", "integrated-gradients", "rise", "kernel-shap")  # with few patches, too
ATTENTION = tuple(name for name, method in ATTRIBUTIONS.items() if "cnn" not in method.families)
CASES = [
    (method, name)
    for method in ATTRIBUTIONS
    for name in MODELS
    if not (name == "cnn" and method in ATTENTION) and not (name == "registers" and method in SLOW)
]
TARGETS = torch.tensor([3, 0, 4])


def expected_shape(method: str, model: Model, batch: Tensor) -> tuple[int, ...]:
    if ATTRIBUTIONS[method].resolution == "pixel":
        return len(batch), *batch.shape[2:]
    if method in CAMS and model.anatomy.layout is None:
        return len(batch), 4, 6
    return len(batch), *(model.layout.grid if model.anatomy.layout else (8, 8))


def test_the_methods_that_are_run_by_default_studied_slow_or_of_no_class():
    chosen = {
        "default": default_methods(),
        "studied": [name for name, method in ATTRIBUTIONS.items() if method.studied],
        "of no class": [name for name, method in ATTRIBUTIONS.items() if not method.needs_class],
        "slow": [name for name, method in ATTRIBUTIONS.items() if method.slow],
    }
    assert {what: " ".join(names) for what, names in chosen.items()} == {
        "default": "relevance rollout best gradcam integrated-gradients occlusion",
        "studied": "relevance rollout best gradcam occlusion",
        "of no class": "rollout attention eigencam",
        "slow": "scorecam ablationcam occlusion rise kernel-shap",
    }


@pytest.mark.parametrize(("method", "name"), CASES)
def test_every_method_keeps_the_contract(method, name):
    """Finite, of the expected shape and sign, not constant, independent of the batch."""
    model = MODELS[name]()
    batch = images(model.input_size, batch=3)
    maps = vitlens.explain(model, batch, targets=TARGETS, method=method)
    assert torch.equal(batch, images(model.input_size, batch=3))
    assert not maps.requires_grad
    assert (maps.dtype, maps.shape) == (torch.float32, expected_shape(method, model, batch))
    assert torch.isfinite(maps).all()
    assert maps.flatten(1).std(1).min() > 0
    if not ATTRIBUTIONS[method].signed:
        assert maps.min() >= -1e-6 * maps.max()
    alone = vitlens.explain(model, batch[1:2], targets=TARGETS[1:2], method=method)
    tolerance = 1e-3 * maps[1].abs().max().item()  # where rounding turns a ReLU, gradients jump
    torch.testing.assert_close(alone[0], maps[1], atol=tolerance, rtol=0)
    in_parts = vitlens.explain(model, batch, targets=TARGETS, method=method, batch_size=2)
    torch.testing.assert_close(in_parts, maps, atol=1e-3 * maps.abs().max().item(), rtol=0)


@pytest.mark.parametrize("method", ATTRIBUTIONS)
def test_the_class_asked_for_and_the_seed_matter_where_they_should(method):
    model, batch = ours(), images((32, 48))
    one, other = (vitlens.explain(model, batch, targets=torch.full((2,), target), method=method) for target in (0, 3))
    assert torch.equal(one, other) is not ATTRIBUTIONS[method].needs_class
    if method in RANDOM:
        one, again, other = (vitlens.explain(model, batch, method=method, seed=seed) for seed in (1, 1, 2))
        assert torch.equal(one, again)
        assert not torch.equal(one, other)


def test_no_target_means_the_prediction():
    model, batch = cnn(), images((32, 48), batch=3)
    maps = vitlens.explain(model, batch, method="gradcam", batch_size=2)
    assert torch.equal(
        maps, vitlens.explain(model, batch, targets=model(batch).argmax(-1), method="gradcam", batch_size=2)
    )


@pytest.mark.parametrize("name", ["ours", "dinov2-registers", "swin"])
def test_attention_methods_are_the_functions_of_their_names(name):
    model, targets = shared_model(name), TARGETS[:2]
    batch = images(model.input_size)
    expected = {
        "rollout": vitlens.rollout(model, batch),
        "relevance": vitlens.relevance(model, batch, targets=targets),
    }
    for method, maps in expected.items():
        explained = vitlens.explain(model, batch, targets=targets, method=method)
        torch.testing.assert_close(explained, maps, atol=1e-7, rtol=1e-5)


@pytest.mark.parametrize("method", ["gradcam", "eigencam", "layercam"])
@pytest.mark.parametrize("name", ["vit", "cnn"])
def test_the_package_leaves_gradients_and_flags_alone(method, name):
    model = MODELS[name]()
    for number, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(number % 2 == 0)
        parameter.grad = torch.ones_like(parameter)
    batch = images(model.input_size)
    maps = vitlens.explain(model, batch, targets=TARGETS[:2], method=method, engine="grad-cam")
    assert (maps.shape, maps.dtype) == ((2, *model.input_size), torch.float32)
    assert 0 <= maps.min() < maps.max() <= 1
    for number, parameter in enumerate(model.parameters()):
        assert parameter.requires_grad == (number % 2 == 0)
        assert torch.equal(parameter.grad, torch.ones_like(parameter))
    assert not any(module._forward_hooks or module._backward_hooks for module in model.modules())


def methods_of(model: Model, lacking: str) -> tuple[str, ...]:
    """The methods that a refusal names."""
    with pytest.raises(UnsupportedError) as refused:
        vitlens.explain(model, images(model.input_size), method=lacking)
    return tuple(str(refused.value).partition("it has ")[2].split(", "))


def test_a_model_has_the_methods_of_its_family_and_a_look_takes_the_first_by_preference():
    assert methods_of(shared_model("swin"), "legrad") == tuple(
        name for name in ATTRIBUTIONS if name not in (*DEPTHS, "best")
    )
    without_attention = tuple(name for name in ATTRIBUTIONS if name not in ATTENTION)
    assert methods_of(cnn(), "relevance") == without_attention
    assert methods_of(linear(), "gradcam") == tuple(name for name in without_attention if name not in CAMS)
    channels = timm_model("xcit_nano_12_p16_224", embed_dim=64)
    expected = tuple(name for name in ATTRIBUTIONS if name not in (*CHAINED, *DEPTHS))
    assert methods_of(channels, "relevance") == expected
    preferred = [vitlens.look(model, images(model.input_size, batch=1)).method for model in (ours(), cnn(), linear())]
    assert preferred == ["best", "gradcam", "occlusion"]


@pytest.mark.parametrize(
    "name", ["swin", "torchvision-swin", "torchvision-vit", "siglip", "cait", "deit-distilled", "vit-mean"]
)
@pytest.mark.parametrize("method", ["gradcam", "relevance", "libra-relevance", "occlusion", "best"])
def test_other_families(name, method):
    model = shared_model(name)
    if method == "best" and "swin" in name:
        assert method not in methods_of(model, "best")
        return
    batch = images(model.input_size)
    maps = vitlens.explain(model, batch, targets=TARGETS[:2], method=method)
    assert torch.isfinite(maps).all()
    assert maps.flatten(1).std(1).min() > 0
    alone = vitlens.explain(model, batch[1:], targets=TARGETS[1:2], method=method)[0]
    torch.testing.assert_close(alone, maps[1], atol=1e-3 * maps[1].abs().max().item(), rtol=0)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"method": "gradcm"}, UnknownNameError),
        ({"method": "relevance"}, UnsupportedError),
        ({"method": "best"}, UnsupportedError),
        ({"method": "gradcam", "targets": torch.tensor([0, 5])}, InputError),
        ({"method": "gradcam", "targets": torch.tensor([0, -1])}, InputError),
        ({"method": "gradcam", "targets": torch.tensor([0])}, InputError),
        ({"method": "gradcam", "steps": 3}, InputError),
        ({"method": "rise", "steps": 3}, UnknownNameError),
        ({"method": "rise", "engine": "grad-cam"}, UnsupportedError),
    ],
)
def test_refusals(options, error):
    with pytest.raises(error):
        vitlens.explain(cnn(), images((32, 48)), **options)


def test_images_of_another_size_are_explained_at_theirs():
    model, batch = ours(), images((40, 40))
    shapes = [
        vitlens.explain(model, batch, method=name).shape
        for name in ("integrated-gradients", "rise", "gradcam", "occlusion")
    ]
    assert shapes == [(2, 40, 40), (2, 40, 40), (2, 4, 3), (2, 4, 3)]


class Unread(nn.Module):
    """A network none of whose layers runs."""

    def __init__(self) -> None:
        super().__init__()
        self.unread = nn.Conv2d(3, 3, 1)

    def forward(self, pixels: Tensor) -> Tensor:
        return pixels.mean((2, 3))


def test_a_model_whose_layers_do_not_run_is_explained():
    """Its passes have no widest layer, by which images are counted."""
    maps = vitlens.explain(
        model_of(Unread(), size=(16, 16), classes=("r", "g", "b")), images((16, 16)), method="occlusion"
    )
    assert maps.shape == (2, 8, 8)
