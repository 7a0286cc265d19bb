"""Class activation maps beside the grad-cam package's own, before and after its ReLU and scaling."""

import copy
from collections.abc import Callable

import numpy as np
import pytest
import pytorch_grad_cam
import timm
import torch
from pytorch_grad_cam.utils.image import scale_cam_image
from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget
from torch import Tensor, nn

from tests.kit.explainable import MODELS, Linear, cnn
from tests.kit.tiny import images, model_of, ours, shaken, shared_model, timm_model
from vitlens.attribution import cam as rules
from vitlens.attribution.cam import layer_gradients, target_layer
from vitlens.attribution.explain import explain
from vitlens.attribution.registry import ATTRIBUTIONS
from vitlens.errors import UnsupportedError
from vitlens.models.model import Model
from vitlens.models.resnet import build_resnet

CLASSES = {name: method.package for name, method in ATTRIBUTIONS.items() if method.package is not None}
# target layer and reshape by hand, as the package's examples write them
TARGET_LAYERS: dict[str, tuple[Callable[[nn.Module], nn.Module], tuple[int, int, int] | None]] = {
    "vit": (lambda model: model.blocks[-1].norm1, (1, 4, 3)),
    "registers": (lambda model: model.blocks[-1].norm1, (5, 4, 4)),
    "cnn": (lambda model: model.layer3[-1], None),
}
TARGETS = torch.tensor([1, 4])


def packages(method: str, name: str, model: Model, batch: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """The package's raw map before its ReLU, and its result, from a model of its own with gradients everywhere."""
    module = copy.deepcopy(model.module).requires_grad_(True)
    layer, tokens = TARGET_LAYERS[name]

    def reshape(output: Tensor) -> Tensor:
        assert tokens is not None
        patches = output[:, tokens[0] :].reshape(len(output), tokens[1], tokens[2], -1)
        return patches.permute(0, 3, 1, 2)

    cam = getattr(pytorch_grad_cam, CLASSES[method])(module, [layer(module)], reshape if tokens else None)
    raw: list[np.ndarray] = []
    original = cam.get_cam_image
    cam.get_cam_image = lambda *args, **kwargs: raw.append(original(*args, **kwargs)) or raw[-1]
    result = cam(model.prepare(batch), [ClassifierOutputTarget(int(target)) for target in TARGETS])
    return raw[0], result


# the package sets a channel of a ViT to -1e7; AblationCAM is compared with the paper's definition below
@pytest.mark.parametrize(
    ("method", "name"), [(each, name) for each in CLASSES for name in MODELS if each != "ablationcam" or name == "cnn"]
)
def test_values_equal_the_packages(method, name, capsys):
    model = MODELS[name]()
    batch = images(model.input_size)
    ours_raw = explain(model, batch, targets=TARGETS, method=method).numpy()
    assert capsys.readouterr().err == ""
    raw, result = packages(method, name, model, batch)
    packaged = explain(model, batch, targets=TARGETS, method=method, engine="grad-cam").numpy()
    np.testing.assert_allclose(packaged, result, atol=1e-5)
    if method == "eigencam":  # the sign of a component is arbitrary; ours makes the greatest value positive
        raw = raw * np.sign((raw * ours_raw).sum((1, 2), keepdims=True))
        largest = np.abs(ours_raw.reshape(2, -1)).argmax(1)
        assert (np.take_along_axis(ours_raw.reshape(2, -1), largest[:, None], 1) > 0).all()
    if method == "ablationcam":  # divided by the logit, ours by its absolute value
        logits = model(batch).detach().gather(1, TARGETS[:, None]).numpy()
        raw = raw * np.sign(logits)[:, :, None]
    np.testing.assert_allclose(ours_raw, raw, atol=1e-5 * np.abs(raw).max(), rtol=1e-4)
    if method not in ("eigencam", "ablationcam"):
        size = batch.shape[3], batch.shape[2]
        scaled = scale_cam_image(scale_cam_image(np.maximum(ours_raw, 0), size))
        np.testing.assert_allclose(scaled, result, atol=1e-5)


@pytest.mark.parametrize("make", [ours, cnn])
def test_ablation_removes_channels_as_in_the_paper(make):
    """One channel after the other set to 0 in a plain loop."""
    model, batch = make(), images((32, 48))
    layer, channel = target_layer(model), [0]

    def cut(_module: nn.Module, _inputs: object, output: Tensor) -> Tensor:
        changed = output.clone()
        changed.select(layer.channel_axis, channel[0]).zero_()
        return changed

    maps, gradients = rules.ablationcam(model, batch, TARGETS), layer_gradients(model, batch, TARGETS)
    plain, expected = gradients.logits.gather(1, TARGETS[:, None]), torch.zeros_like(maps)
    with torch.no_grad(), model.module.get_submodule(layer.module).register_forward_hook(cut):
        for channel[0] in range(gradients.activations.shape[1]):
            fall = (plain - model(batch).gather(1, TARGETS[:, None])) / plain.abs()
            expected += fall[:, :, None] * gradients.activations[:, channel[0]]
    torch.testing.assert_close(maps, expected, atol=1e-4 * expected.abs().max().item(), rtol=1e-3)


ATTENTIVE = ("ours", "deit-distilled", "beit", "eva02", "dinov2-registers", "siglip", "cait")
EXPECTED = dict.fromkeys(ATTENTIVE, "blocks.1.norm1") | {
    "torchvision-vit": "encoder.layers.encoder_layer_1.ln_1",
    "swin": "norm",
    "torchvision-swin": "norm",
}


@pytest.mark.parametrize("name", [*EXPECTED, "post-norm"])
def test_the_target_layer_of_a_model_with_tokens(name):
    """Of post-norm blocks, x + norm(attention(x)), the attention reads the block before it."""
    model = timm_model("vit_base_patch16_rpn_224") if name == "post-norm" else shared_model(name)
    assert target_layer(model).module == EXPECTED.get(name, "blocks.0")
    reading = layer_gradients(model, images(model.input_size), TARGETS)
    assert reading.gradients.abs().flatten(1).max(1).values.min() > 0
    if model.anatomy.layout is not None:
        assert reading.activations.shape[2:] == model.layout.grid


CNNS: dict[str, tuple[Callable[[], nn.Module], str, tuple[int, int], tuple[int, int]]] = {
    "resnet18": (lambda: build_resnet("resnet18", classes=5, image_size=(32, 48)), "layer4", (32, 48), (4, 6)),
    "convnext": (lambda: timm.create_model("test_convnext", num_classes=5), "norm_pre", (64, 96), (2, 3)),
    "efficientnet": (lambda: timm.create_model("test_efficientnet", num_classes=5), "bn2", (32, 48), (1, 2)),
}


@pytest.mark.parametrize("name", CNNS)
def test_the_target_layer_of_a_cnn(name):
    build, module, size, cells = CNNS[name]
    model = model_of(shaken(build), size=size)
    assert target_layer(model).module == module
    assert layer_gradients(model, images(size), TARGETS).activations.shape[2:] == cells
    with pytest.raises(UnsupportedError, match="or a map before the pooling"):
        target_layer(model_of(Linear((8, 8)), size=(8, 8)))


def _stop(_gradient: Tensor) -> None:
    raise AssertionError("a backward pass below the target layer")


def no_backward(_module: nn.Module, _inputs: object, output: Tensor) -> None:
    """Raises when a backward pass reaches the module."""
    if output.requires_grad:
        output.register_hook(_stop)


@pytest.mark.parametrize("name", MODELS)
def test_no_backward_pass_below_the_target_layer(name):
    model = MODELS[name]().requires_grad_(True)
    below, batch = model.module.layer3[0].conv1 if name == "cnn" else model.module.blocks[0], images(model.input_size)
    with below.register_forward_hook(no_backward):
        layer_gradients(model, batch, TARGETS)
        with pytest.raises(AssertionError, match="below the target layer"):
            explain(model, batch, method="saliency")
    assert all(parameter.grad is None for parameter in model.parameters())


class InPlace(nn.Module):
    """DenseNet's ReLU works in place on what its last norm puts out."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 5)

    def forward(self, pixels: Tensor) -> Tensor:
        return self.head(self.norm(self.conv(pixels)).relu_().mean((2, 3)))


def test_an_in_place_layer_above_the_target_layer_gets_a_copy():
    """The activations are those before it."""
    model, batch = model_of(shaken(InPlace)), images()
    reading = layer_gradients(model, batch, TARGETS)
    assert reading.activations.min() < 0
    expected = model.module.norm(model.module.conv(model.prepare(batch))).detach()
    torch.testing.assert_close(reading.activations, expected)


def test_identities_between_the_rules():
    """One cell: GradCAM is HiResCAM. Positive gradients: LayerCAM is. XGradCAM's maps sum to what HiResCAM's do."""
    generator = torch.Generator().manual_seed(0)
    activations, gradients = torch.rand(2, 3, 7, 4, 5, generator=generator) + 0.1
    one = rules.gradcam(activations[..., :1, :1], gradients[..., :1, :1])
    torch.testing.assert_close(one, rules.hirescam(activations[..., :1, :1], gradients[..., :1, :1]))
    torch.testing.assert_close(rules.layercam(activations, gradients), rules.hirescam(activations, gradients))
    sums = rules.xgradcam(activations, gradients).sum((1, 2))
    torch.testing.assert_close(sums, rules.hirescam(activations, gradients).sum((1, 2)))


def test_eigencam_of_one_pattern_is_that_pattern():
    pattern = torch.randn(2, 4, 5, generator=torch.Generator().manual_seed(0))
    channels = torch.tensor([1.0, -2.0, 2.0])
    maps = rules.eigencam(channels[:, None, None] * pattern[:, None] + 5)
    centred = pattern - pattern.mean((1, 2), keepdim=True)
    signs = centred.flatten(1).gather(1, centred.flatten(1).abs().argmax(1, keepdim=True)).sign()
    torch.testing.assert_close(maps, 3 * centred * signs[:, :, None])
