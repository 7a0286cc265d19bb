"""One logit is two classes in every source: -z/2 and z/2, with opposite maps."""

from functools import partial

import pytest
import timm
import torch
from torch import Tensor, nn

import vitlens
from tests.kit.models.files import one_line, written
from tests.kit.models.handwritten import ViT, half, noise, seeded, wrapped
from tests.kit.tiny import images
from vitlens.errors import InputError, ModelError, UnsupportedError

NAMES = ("healthy", "sick")
SHAPES = {
    "one column": lambda z: z,
    "squeeze(1)": lambda z: z.squeeze(1),
    "squeeze(-1)": lambda z: z.squeeze(-1),
    "squeeze()": lambda z: z.squeeze(),
    "the first column": lambda z: z[:, 0],
}


class OneLogit(ViT):
    """A ViT of one logit, in one of these shapes."""

    def __init__(self, shape: str = "one column") -> None:
        super().__init__(classes=1)
        self.shaped = SHAPES[shape]
        nn.init.constant_(self.out.bias, -9.0)  # all images are of the first class

    def forward(self, x: Tensor) -> Tensor:
        return self.shaped(super().forward(x))


def one_logit(shape: str = "one column") -> vitlens.Model:
    return wrapped(partial(OneLogit, shape), classes=NAMES)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_two_logits_are_symmetric_and_the_second_has_the_sigmoid(shape: str):
    model = one_logit(shape)
    logits = model(noise())
    z = seeded(OneLogit)((noise() - 0.5) / 0.5)
    torch.testing.assert_close(logits, torch.cat([-z / 2, z / 2], 1))
    torch.testing.assert_close(logits.softmax(1)[:, 1], z.sigmoid()[:, 0])
    assert model.classes == NAMES
    assert model(noise()[:1]).shape == (1, 2)


@pytest.mark.parametrize(
    "method", ["gradcam", "hirescam", "input-x-gradient", "integrated-gradients", "occlusion"]
)
def test_the_map_of_one_class_is_minus_that_of_the_other(method: str):
    model = one_logit("squeeze(1)")
    batch = noise()
    first = vitlens.explain(model, batch, targets="healthy", method=method)
    assert first.abs().max() > 0
    second = vitlens.explain(model, batch, targets="sick", method=method)
    torch.testing.assert_close(first, -second, atol=1e-5, rtol=1e-3)


def test_images_of_the_first_class_have_maps():
    model = one_logit()
    batch = noise()
    assert model(batch).argmax(1).tolist() == [0, 0, 0]
    for method in ("relevance", "ablationcam"):
        maps = vitlens.explain(model, batch, method=method)
        assert maps.isfinite().all()
        assert maps.abs().max() > 0


def test_an_attack_moves_images_to_the_other_class():
    model = half(nn.Sequential(nn.Flatten(), nn.Linear(3 * 24 * 32, 1)), classes=NAMES)
    labels = model(noise()).argmax(1)
    result = vitlens.attack(model, noise(), labels, method="pgd", epsilon=0.1)
    assert result.success.all()
    assert (model(result.images).argmax(1) == 1 - labels).all()


@pytest.mark.parametrize(
    "shape", [torch.sigmoid, lambda z: z.sigmoid().squeeze(1)], ids=["sigmoid", "squeezed"]
)
def test_one_probability_is_refused(shape):
    with one_line(ModelError, "found probabilities, as its last step is a sigmoid; drop it"):
        half(nn.Sequential(seeded(OneLogit), Shaped(shape)))


class Shaped(nn.Module):
    def __init__(self, shape) -> None:
        super().__init__()
        self.shape = shape

    def forward(self, x: Tensor) -> Tensor:
        return self.shape(x)


def test_one_name_is_not_enough():
    with one_line(InputError, "one logit, which counts as two classes"):
        wrapped(OneLogit, classes=("sick",))


def timm_file(folder) -> str:
    module = timm.create_model("vit_tiny_patch16_224", num_classes=1, img_size=32, depth=2)
    state = {
        key: value + 0.05 * torch.randn(value.shape) for key, value in module.state_dict().items()
    }
    deeper = timm.create_model("vit_tiny_patch16_224", num_classes=1, img_size=32).state_dict()
    torch.save(deeper | state, folder / "single.pth")
    return f"timm:vit_tiny_patch16_224@{folder / 'single.pth'}"


def test_weights_of_one_output_are_two_classes_also_after_saving(tmp_path):
    model = vitlens.load(timm_file(tmp_path), image_size=32, classes=NAMES)
    batch = images((32, 32), batch=3)
    with torch.no_grad():
        z = model.module(model.prepare(batch))
    assert z.shape == (3, 1)
    torch.testing.assert_close(model(batch), torch.cat([-z / 2, z / 2], 1))
    (tmp_path / "run").mkdir()
    again = vitlens.load(str(written(model, tmp_path / "run")))
    assert again.classes == NAMES
    torch.testing.assert_close(again(batch), model(batch))


HF = {
    "image_size": 32,
    "patch_size": 8,
    "hidden_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
FIELDS = {
    "a number": ({"num_labels": 1}, ("0", "1")),
    "a name": ({"id2label": {0: "sick"}, "label2id": {"sick": 0}}, ("not sick", "sick")),
}


def hf_folder(folder, **fields) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = transformers.ViTForImageClassification(
            transformers.ViTConfig(**HF, intermediate_size=32, **fields)
        )
    module.save_pretrained(folder)
    transformers.ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(folder)
    return module.eval()


@pytest.mark.parametrize("case", FIELDS)
def test_transformers_one_label_is_two_classes_as_in_wrap(case: str, tmp_path):
    fields, classes = FIELDS[case]
    module = hf_folder(tmp_path, **fields)
    model = vitlens.load(f"hf:{tmp_path}")
    batch = images((32, 32), batch=3)
    assert model.classes == classes
    torch.testing.assert_close(model(batch), half(module, 32)(batch), atol=1e-6, rtol=1e-5)


def test_a_regression_is_refused_as_a_folder_and_in_wrap(tmp_path):
    module = hf_folder(tmp_path, num_labels=1, problem_type="regression")
    with one_line(UnsupportedError, "regression"):
        vitlens.load(f"hf:{tmp_path}")
    with one_line(UnsupportedError, "regression"):
        half(module, 32)


def test_contributions_to_a_class_sum_to_its_half_of_the_logit(tmp_path):
    model = vitlens.load(timm_file(tmp_path), image_size=32, classes=NAMES)
    batch = images((32, 32), batch=3)
    lens = vitlens.direct_logit_attribution(model, batch, targets="sick")
    torch.testing.assert_close(lens.total(), model(batch)[:, 1], atol=1e-3, rtol=1e-3)
    assert vitlens.logit_lens(model, batch).logits.shape[-1] == 2
