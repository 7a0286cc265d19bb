"""Class activation maps against the grad-cam package, before and after its ReLU and scaling."""

import copy
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import pytorch_grad_cam
import timm
import torch
from pytorch_grad_cam.utils.image import scale_cam_image
from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget
from torch import Tensor, nn

import vitlens
from tests.kit.explainable import MODELS
from tests.kit.tiny import images, model_of, ours, shaken, shared_model, small_cnn, timm_model
from vitlens import Model

CLASSES = {  # of the package, by our names
    "gradcam": "GradCAM",
    "gradcam++": "GradCAMPlusPlus",
    "layercam": "LayerCAM",
    "hirescam": "HiResCAM",
    "xgradcam": "XGradCAM",
    "eigencam": "EigenCAM",
    "scorecam": "ScoreCAM",
    "ablationcam": "AblationCAM",
}
# target layer and reshape by hand, as the package's examples write them
TARGET_LAYERS: dict[str, tuple[Callable[[nn.Module], nn.Module], tuple[int, int, int] | None]] = {
    "vit": (lambda model: model.blocks[-1].norm1, (1, 4, 3)),
    "registers": (lambda model: model.blocks[-1].norm1, (5, 4, 4)),
    "cnn": (lambda model: model.layer3[-1], None),
}
TARGETS = torch.tensor([1, 4])


def explained(model: Model, batch: Tensor, method: str = "gradcam", **options: object) -> Tensor:
    return vitlens.explain(model, batch, targets=TARGETS, method=method, **options)


def packages(method: str, name: str, model: Model, batch: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Return the package's raw map before its ReLU and its result.

    The package gets its copy of the model, with gradients everywhere.
    """
    module = copy.deepcopy(model.module).requires_grad_(True)
    layer, tokens = TARGET_LAYERS[name]

    def reshape(output: Tensor) -> Tensor:
        assert tokens is not None
        patches = output[:, tokens[0] :].reshape(len(output), tokens[1], tokens[2], -1)
        return patches.permute(0, 3, 1, 2)

    cam = getattr(pytorch_grad_cam, CLASSES[method])(
        module, [layer(module)], reshape if tokens else None
    )
    raw: list[np.ndarray] = []
    original = cam.get_cam_image
    cam.get_cam_image = lambda *args, **kwargs: raw.append(original(*args, **kwargs)) or raw[-1]
    result = cam(model.prepare(batch), [ClassifierOutputTarget(int(target)) for target in TARGETS])
    return raw[0], result


# the package sets a channel of a ViT to -1e7; AblationCAM is compared with the paper's definition
# below
CASES = [
    (method, name)
    for method in CLASSES
    for name in ("vit", "cnn")
    if (method, name) != ("ablationcam", "vit")
]


@pytest.mark.parametrize(
    ("method", "name"), [*CASES, ("gradcam", "registers"), ("eigencam", "registers")]
)
def test_values_equal_the_packages(method, name, capsys):
    model = MODELS[name]()
    batch = images(model.input_size)
    ours_raw = explained(model, batch, method).numpy()
    assert capsys.readouterr().err == ""
    raw, result = packages(method, name, model, batch)
    same = f"grad-cam:{method.replace('++', '-plus-plus')}"
    np.testing.assert_allclose(explained(model, batch, same).numpy(), result, atol=1e-5)
    # the sign of a component is arbitrary; ours makes the greatest value positive
    if method == "eigencam":
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


def read_at(module: str, model: Model, batch: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output of a module and the target's gradient there, with a plain graph."""
    outputs: list[Tensor] = []

    def keep(_module: nn.Module, _inputs: object, output: Tensor) -> Tensor:
        outputs.append(output.detach().clone().requires_grad_())
        return outputs[-1].clone()

    with model.module.get_submodule(module).register_forward_hook(keep), torch.enable_grad():
        total = model(batch).gather(1, TARGETS[:, None]).sum()
    return outputs[-1].detach(), torch.autograd.grad(total, outputs[-1])[0]


class InPlace(nn.Module):
    """DenseNet's ReLU works in place on what its last norm puts out."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 5)

    def forward(self, pixels: Tensor) -> Tensor:
        return self.head(self.norm(self.conv(pixels)).relu_().mean((2, 3)))


def timm_cnn(name: str, size: tuple[int, int]) -> Model:
    return model_of(shaken(lambda: timm.create_model(name, num_classes=5)), size=size)


# the target layer and the axis of its channels; of tokens the patches are the last
TOKENS = (
    "ours",
    "vit-mean",
    "deit-distilled",
    "beit",
    "eva02",
    "dinov2-registers",
    "siglip",
    "cait",
)
LAYERS: dict[str, tuple[Callable[[], Model], str, int]] = {
    **{name: (partial(shared_model, name), "blocks.1.norm1", 2) for name in TOKENS},
    "torchvision-vit": (
        partial(shared_model, "torchvision-vit"),
        "encoder.layers.encoder_layer_1.ln_1",
        2,
    ),
    "torchvision-swin": (partial(shared_model, "torchvision-swin"), "norm", 3),
    # x + norm(attention(x)): the attention reads the block before it
    "post-norm": (lambda: timm_model("vit_base_patch16_rpn_224"), "blocks.0", 2),
    # the last map before the pooling
    "convnext": (lambda: timm_cnn("test_convnext", (64, 96)), "norm_pre", 1),
    "efficientnet": (lambda: timm_cnn("test_efficientnet", (32, 48)), "bn2", 1),
    # the activations are those before the ReLU
    "in-place": (
        lambda: model_of(shaken(InPlace)),
        "norm",
        1,
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_the_target_layer(name):
    """GradCAM's equations there, as the paper has them."""
    build, module, axis = LAYERS[name]
    model = build()
    batch = images(model.input_size)
    output, gradient = read_at(module, model, batch)
    assert gradient.abs().amax() > 0
    if axis == 2:
        output = output[:, -model.layout.patches :]
        gradient = gradient[:, -model.layout.patches :]
    places = [place for place in range(1, output.dim()) if place != axis]
    expected = (gradient.mean(places, keepdim=True) * output).sum(axis)
    expected = expected.unflatten(1, model.layout.grid) if axis == 2 else expected
    torch.testing.assert_close(
        explained(model, batch), expected, atol=1e-5 * expected.abs().max().item(), rtol=1e-3
    )


@pytest.mark.parametrize("make", [ours, small_cnn])
def test_ablation_removes_channels_as_in_the_paper(make):
    """One channel after the other set to 0 in a plain loop."""
    model = make()
    batch = images((32, 48))
    channel = [0]
    module, axis = ("layer3.0", 1) if make is small_cnn else ("blocks.1.norm1", 2)
    output, _ = read_at(module, model, batch)
    activations = output if make is small_cnn else output[:, 1:].mT.unflatten(2, (4, 3))

    def cut(_module: nn.Module, _inputs: object, output: Tensor) -> Tensor:
        changed = output.clone()
        changed.select(axis, channel[0]).zero_()
        return changed

    maps = explained(model, batch, "ablationcam")
    plain = model(batch).gather(1, TARGETS[:, None])
    expected = torch.zeros_like(maps)
    with torch.no_grad(), model.module.get_submodule(module).register_forward_hook(cut):
        for channel[0] in range(activations.shape[1]):
            fall = (plain - model(batch).gather(1, TARGETS[:, None])) / plain.abs()
            expected += fall[:, :, None] * activations[:, channel[0]]
    torch.testing.assert_close(maps, expected, atol=1e-4 * expected.abs().max().item(), rtol=1e-3)


def test_no_backward_pass_below_the_target_layer():
    model = ours().requires_grad_(True)
    passes = list[Tensor]()

    def watch(_module: nn.Module, _inputs: object, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(passes.append)

    with model.module.blocks[0].register_forward_hook(watch):
        explained(model, images((32, 48)))
        assert not passes
        explained(model, images((32, 48)), "saliency")
        assert passes
