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

from tests.attribution.models import MODELS, cnn, registers
from tests.lens.tiny import images, model_of, ours, shaken, shared_model, timm_model
from vitlens.attribution import cam as rules
from vitlens.attribution.cam import ablationcam
from vitlens.attribution.explain import explain
from vitlens.attribution.registry import ATTRIBUTIONS
from vitlens.attribution.target_layer import layer_gradients, target_layer
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


def packages(method: str, name: str, model: Model, batch: Tensor, **options: object) -> tuple[np.ndarray, np.ndarray]:
    """The package's raw map before its ReLU, and its result, from a model of its own with gradients everywhere."""
    module = copy.deepcopy(model.module).requires_grad_(True)
    layer, tokens = TARGET_LAYERS[name]

    def reshape(output: Tensor) -> Tensor:
        assert tokens is not None
        patches = output[:, tokens[0] :].reshape(len(output), tokens[1], tokens[2], -1)
        return patches.permute(0, 3, 1, 2)

    cam = getattr(pytorch_grad_cam, CLASSES[method])(module, [layer(module)], reshape if tokens else None, **options)
    raw: list[np.ndarray] = []
    original = cam.get_cam_image
    cam.get_cam_image = lambda *args, **kwargs: raw.append(original(*args, **kwargs)) or raw[-1]
    result = cam(model.prepare(batch), [ClassifierOutputTarget(int(target)) for target in TARGETS])
    return raw[0], result


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("method", CLASSES)
def test_values_equal_the_packages(method, name, capsys):
    if method == "ablationcam" and name != "cnn":
        pytest.skip("the package sets a channel of a ViT to -1e7; compared with the paper's definition below")
    model = MODELS[name]()
    batch = images(model.input_size)
    ours_raw = explain(model, batch, targets=TARGETS, method=method).numpy()
    assert capsys.readouterr().err == ""
    raw, result = packages(method, name, model, batch)
    if method == "eigencam":  # the sign of a component is arbitrary
        raw = raw * np.sign((raw * ours_raw).sum((1, 2), keepdims=True))
    if method == "ablationcam":  # divided by the logit, ours by its absolute value
        with torch.no_grad():
            logits = model(batch).gather(1, TARGETS[:, None]).numpy()
        raw = raw * np.sign(logits)[:, :, None]
    np.testing.assert_allclose(ours_raw, raw, atol=1e-5 * np.abs(raw).max(), rtol=1e-4)
    if method in ("eigencam", "ablationcam"):
        return
    size = batch.shape[3], batch.shape[2]
    scaled = scale_cam_image(scale_cam_image(np.maximum(ours_raw, 0), size))
    np.testing.assert_allclose(scaled, result, atol=1e-5)


@pytest.mark.parametrize("make", [ours, cnn])
def test_ablation_removes_channels_as_in_the_paper(make):
    """One channel after the other set to 0 in a plain loop."""
    model, batch = make(), images((32, 48))
    layer = target_layer(model)
    maps = ablationcam(model, batch, TARGETS)
    channel: list[int] = []

    def cut(_module: nn.Module, _inputs: object, output: Tensor) -> Tensor:
        changed = output.clone()
        changed.select(layer.channel_axis, channel[0]).zero_()
        return changed

    gradients = layer_gradients(model, batch, TARGETS)
    plain = gradients.logits.gather(1, TARGETS[:, None])
    expected = torch.zeros_like(maps)
    with torch.no_grad():
        handle = model.module.get_submodule(layer.module).register_forward_hook(cut)
        for number in range(gradients.activations.shape[1]):
            channel[:] = [number]
            fall = (plain - model(batch).gather(1, TARGETS[:, None])) / plain.abs()
            expected += fall[:, :, None] * gradients.activations[:, number]
        handle.remove()
    torch.testing.assert_close(maps, expected, atol=1e-4 * expected.abs().max().item(), rtol=1e-3)


EXPECTED = {
    "ours": "blocks.1.norm1",
    "deit-distilled": "blocks.1.norm1",
    "beit": "blocks.1.norm1",
    "eva02": "blocks.1.norm1",
    "dinov2-registers": "blocks.1.norm1",
    "siglip": "blocks.1.norm1",
    "cait": "blocks.1.norm1",
    "torchvision-vit": "encoder.layers.encoder_layer_1.ln_1",
    "swin": "norm",
    "torchvision-swin": "norm",
}


@pytest.mark.parametrize("name", EXPECTED)
def test_the_target_layer_of_a_model_with_tokens(name):
    model = shared_model(name)
    assert target_layer(model).module == EXPECTED[name]
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
    reading = layer_gradients(model, images(size), TARGETS)
    assert reading.activations.shape[2:] == cells


def test_at_the_last_blocks_output_the_patches_of_a_cls_model_have_no_gradient():
    """Why this is not the target layer."""
    model, batch = ours(), images((32, 48))
    outputs: list[Tensor] = []
    handle = model.module.blocks[-1].register_forward_hook(lambda _module, _inputs, output: outputs.append(output))
    logits = model(batch.requires_grad_())
    handle.remove()
    (gradient,) = torch.autograd.grad(logits[:, 1].sum(), outputs[0])
    assert gradient[:, 0].abs().max() > 0
    assert torch.equal(gradient[:, 1:], torch.zeros_like(gradient[:, 1:]))


def test_the_target_layer_of_post_norm_blocks_lies_before_the_last():
    """x + norm(attention(x)): the attention reads the block before it."""
    model = timm_model("vit_base_patch16_rpn_224")
    assert target_layer(model).module == "blocks.0"
    assert layer_gradients(model, images(), TARGETS).gradients.abs().flatten(1).max(1).values.min() > 0


def no_backward(_module: nn.Module, _inputs: object, output: Tensor) -> None:
    """Raises when a backward pass reaches the module."""
    if output.requires_grad:
        output.register_hook(_stop)


def _stop(_gradient: Tensor) -> None:
    raise AssertionError("a backward pass below the target layer")


@pytest.mark.parametrize("name", MODELS)
def test_no_backward_pass_below_the_target_layer(name):
    model = MODELS[name]().requires_grad_(True)
    below = model.module.layer3[0].conv1 if name == "cnn" else model.module.blocks[0]
    handle = below.register_forward_hook(no_backward)
    batch = images(model.input_size)
    layer_gradients(model, batch, TARGETS)
    with pytest.raises(AssertionError, match="below the target layer"):
        explain(model, batch, method="saliency")
    handle.remove()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_an_in_place_layer_above_the_target_layer_gets_a_copy():
    """DenseNet's ReLU works in place on what its last norm puts out: the activations are those before it."""

    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)
            self.norm = nn.BatchNorm2d(4)
            self.head = nn.Linear(4, 5)

        def forward(self, pixels: Tensor) -> Tensor:
            return self.head(self.norm(self.conv(pixels)).relu_().mean((2, 3)))

    model, batch = model_of(shaken(InPlace)), images()
    reading = layer_gradients(model, batch, TARGETS)
    assert reading.activations.min() < 0
    with torch.no_grad():
        expected = model.module.norm(model.module.conv(model.prepare(batch)))
    torch.testing.assert_close(reading.activations, expected)


def test_a_model_without_a_map_is_refused():
    from tests.attribution.models import Linear

    with pytest.raises(UnsupportedError, match="or a map before the pooling"):
        target_layer(model_of(Linear((8, 8)), size=(8, 8)))


def test_the_largest_value_of_eigencam_is_positive():
    for make in (ours, registers, cnn):
        model = make()
        maps = explain(model, images(model.input_size, batch=4), method="eigencam").flatten(1)
        assert torch.equal(maps.amax(1), maps.abs().amax(1))


def test_every_cam_of_the_registry_is_compared():
    assert {name for name, method in ATTRIBUTIONS.items() if method.needs == "cam"} == set(CLASSES)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("method", CLASSES)
def test_the_engine_gives_the_packages_own_result(method, name):
    """Bit for bit what the package's public call gives, as its examples write it."""
    if method in ("scorecam", "ablationcam") and name == "registers":
        pytest.skip("many passes, as of the other ViT")
    model = MODELS[name]()
    batch = images(model.input_size)
    options = {"ablation_layer": pytorch_grad_cam.AblationLayerVit()} if method == "ablationcam" else {}
    _, result = packages(method, name, model, batch, **(options if name != "cnn" else {}))
    maps = explain(model, batch, targets=TARGETS, method=method, engine="grad-cam")
    np.testing.assert_array_equal(maps.numpy(), result)


@pytest.mark.parametrize("name", ["swin", "torchvision-swin"])
@pytest.mark.parametrize("method", CLASSES)
def test_the_engine_uses_the_same_target_layer_of_windowed_models(method, name):
    model = shared_model(name)
    batch = images(model.input_size)
    maps = explain(model, batch, targets=TARGETS, method=method, engine="grad-cam")
    assert maps.shape == (2, *model.input_size)
    assert torch.isfinite(maps).all()
    if method in ("eigencam", "ablationcam"):  # sign arbitrary; a removed channel has another value
        return
    raw = explain(model, batch, targets=TARGETS, method=method).numpy()
    scaled = scale_cam_image(scale_cam_image(np.maximum(raw, 0), model.input_size[::-1]))
    np.testing.assert_allclose(maps.numpy(), scaled, atol=1e-5)


@pytest.mark.parametrize("rule", ["gradcam", "gradcam_plus_plus", "layercam", "hirescam", "xgradcam"])
def test_rules_are_functions_of_tensors_that_keep_each_image_apart(rule):
    generator = torch.Generator().manual_seed(0)
    activations, gradients = torch.randn(2, 3, 7, 4, 5, generator=generator)
    maps = getattr(rules, rule)(activations, gradients)
    assert maps.shape == (3, 4, 5)
    assert maps.min() < 0
    torch.testing.assert_close(getattr(rules, rule)(activations[1:2], gradients[1:2])[0], maps[1])
    if rule != "gradcam_plus_plus":  # its weights do not scale linearly
        torch.testing.assert_close(getattr(rules, rule)(activations, 2 * gradients), 2 * maps)


def test_identities_between_the_rules():
    """One cell: GradCAM is HiResCAM. Positive gradients: LayerCAM is. XGradCAM's maps sum to what HiResCAM's do"""
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
