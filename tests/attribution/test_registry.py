"""What every attribution promises, whatever it is: parametrised from the registry."""

import pytest
import torch
from torch import Tensor, nn

from tests.attribution.models import MODELS, cnn, linear
from tests.contracts.uses import state_of
from tests.lens.tiny import FAMILIES, images, ours, timm_model
from vitlens.analysis.faithfulness.resampled import removal_grid
from vitlens.attribution.place import cam_place
from vitlens.attribution.registry import METHODS, explain, methods_for
from vitlens.errors import InputError, UnknownNameError, UnsupportedError
from vitlens.models.model import Model

CHAINED = ("relevance", "rollout", "gradient-rollout")
CLASSLESS = ("rollout", "attention", "eigencam")
CAMS = tuple(name for name in METHODS if name.endswith(("cam", "cam++")))
RANDOM = ("smoothgrad", "rise", "kernel-shap")
SLOW = ("scorecam", "ablationcam", "rise", "kernel-shap", "smoothgrad", "integrated-gradients")
CASES = [
    (method, name)
    for method in METHODS
    for name in MODELS
    if not (name == "cnn" and method in (*CHAINED, "attention")) and not (name == "registers" and method in SLOW)
]
TARGETS = torch.tensor([3, 0, 4])


def expected_shape(method: str, model: Model, batch: Tensor) -> tuple[int, ...]:
    if METHODS[method].resolution == "pixel":
        return len(batch), *batch.shape[2:]
    if method in CAMS and model.anatomy.layout is None:
        return len(batch), 4, 6
    return len(batch), *removal_grid(model)


def test_the_registry_is_one_literal_list():
    assert all(name == method.name for name, method in METHODS.items())
    assert len({method.title for method in METHODS.values()}) == len(METHODS)
    with pytest.raises(TypeError):
        METHODS["other"] = METHODS["rollout"]  # type: ignore[index]


@pytest.mark.parametrize(("method", "name"), CASES)
def test_every_method_keeps_the_contract(method, name):
    """Finite, of its shape, an image on its own, nothing mutated, nothing left behind."""
    model = MODELS[name]()
    for number, module in enumerate(model.modules()):
        if number % 5 == 0 and not any(True for _ in module.children()) and not isinstance(module, nn.BatchNorm2d):
            module.train()
    for number, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(number % 2 == 0)
    batch = images(model.input_size, batch=3)
    cam_place(model)
    before = state_of(model)
    maps = explain(model, batch, targets=TARGETS, method=method)
    assert state_of(model) == before
    assert torch.equal(batch, images(model.input_size, batch=3))
    assert not batch.requires_grad
    assert not maps.requires_grad
    assert maps.dtype == torch.float32
    assert maps.shape == expected_shape(method, model, batch)
    assert torch.isfinite(maps).all()
    assert maps.flatten(1).std(1).min() > 0
    if not METHODS[method].signed:
        assert maps.min() >= -1e-6 * maps.max()
    alone = explain(model, batch[1:2], targets=TARGETS[1:2], method=method)
    tolerance = 1e-3 * maps[1].abs().max().item()  # where rounding turns a ReLU, gradients jump
    torch.testing.assert_close(alone[0], maps[1], atol=tolerance, rtol=0)
    in_parts = explain(model, batch, targets=TARGETS, method=method, batch_size=2)
    torch.testing.assert_close(in_parts, maps, atol=1e-3 * maps.abs().max().item(), rtol=0)


@pytest.mark.parametrize("method", METHODS)
def test_the_class_asked_for_matters_where_it_should(method):
    model, batch = ours(), images((32, 48))
    one, other = (explain(model, batch, targets=torch.full((2,), target), method=method) for target in (0, 3))
    assert torch.equal(one, other) is (method in CLASSLESS)


def test_no_target_means_the_prediction():
    model, batch = cnn(), images((32, 48), batch=3)
    with torch.no_grad():
        predicted = model(batch).argmax(-1)
    found = explain(model, batch, method="gradcam", batch_size=2)
    assert torch.equal(found, explain(model, batch, targets=predicted, method="gradcam", batch_size=2))


@pytest.mark.parametrize("method", RANDOM)
def test_a_seed_gives_the_same_map_again_and_another_another(method):
    model, batch = ours(), images((32, 48), batch=1)
    one, again, other = (explain(model, batch, method=method, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)


def test_a_model_has_the_methods_of_its_family():
    assert methods_for(ours()) == tuple(METHODS)
    assert methods_for(FAMILIES["swin"]()) == tuple(METHODS)
    without_attention = tuple(name for name in METHODS if name not in (*CHAINED, "attention"))
    assert methods_for(cnn()) == without_attention
    assert methods_for(linear()) == tuple(name for name in without_attention if name not in CAMS)
    channels = timm_model("xcit_nano_12_p16_224", embed_dim=64)
    assert methods_for(channels) == tuple(name for name in METHODS if name not in CHAINED)


@pytest.mark.parametrize("name", ["swin", "torchvision-swin", "torchvision-vit", "siglip", "cait", "deit-distilled"])
@pytest.mark.parametrize("method", ["gradcam", "relevance", "occlusion"])
def test_other_families(name, method):
    model = FAMILIES[name]()
    maps = explain(model, images(model.input_size), method=method)
    assert torch.isfinite(maps).all()
    assert maps.flatten(1).std(1).min() > 0


def test_what_cannot_be_asked():
    model, batch = cnn(), images((32, 48))
    with pytest.raises(UnknownNameError, match="no method 'gradcm'; did you mean 'gradcam'"):
        explain(model, batch, method="gradcm")
    with pytest.raises(UnsupportedError, match=r"a method that cnn \(cnn\) has, found 'relevance'; it has gradcam, "):
        explain(model, batch, method="relevance")
    for wrong in (5, -1):
        with pytest.raises(InputError, match=f"target classes from 0 to 4, found {wrong}"):
            explain(model, batch, targets=torch.tensor([0, wrong]), method="gradcam")
    with pytest.raises(InputError, match=r"batch > 0, found \(0, 3, 32, 48\)"):
        explain(model, batch[:0], method="gradcam")


def test_images_of_another_size_are_explained_at_theirs():
    model, batch = ours(), images((40, 40))
    assert explain(model, batch, method="integrated-gradients").shape == (2, 40, 40)
    assert explain(model, batch, method="rise").shape == (2, 40, 40)
    assert explain(model, batch, method="gradcam").shape == (2, 4, 3)
    assert explain(model, batch, method="occlusion").shape == (2, 4, 3)
