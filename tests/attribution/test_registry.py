"""The contract of every attribution method, parametrised from the registry."""

import inspect
import subprocess
import sys
from typing import get_args

import pytest
import torch
from torch import Tensor, nn

from tests.attribution.models import MODELS, cnn, linear
from tests.kit.uses import Break, BrokenError, state_of
from tests.lens.tiny import images, ours, shared_model, timm_model
from vitlens.analysis.attention.registry import ATTENTION_METHODS
from vitlens.analysis.faithfulness.maps import removal_grid
from vitlens.attribution import registry as defaults
from vitlens.attribution.explain import explain, methods_for, preferred_method, require_method
from vitlens.attribution.registry import ATTRIBUTIONS, default_methods
from vitlens.attribution.target_layer import target_layer
from vitlens.errors import InputError, UnknownNameError, UnsupportedError
from vitlens.models.anatomy import Family
from vitlens.models.model import Model
from vitlens.models.support import CHECKS
from vitlens.references import resolved

CHAINED = tuple(name for name, method in ATTRIBUTIONS.items() if method.needs == "chain")
DEPTHS = tuple(name for name, method in ATTRIBUTIONS.items() if method.needs == "depths")
CAMS = tuple(name for name, method in ATTRIBUTIONS.items() if method.needs == "cam")
RANDOM = tuple(name for name, method in ATTRIBUTIONS.items() if method.random)
PACKAGED = tuple(name for name, method in ATTRIBUTIONS.items() if method.package)
# on a tiny model, whose patches are few
SLOW = tuple(
    name
    for name, method in ATTRIBUTIONS.items()
    if method.forwards + method.backwards > 20 and method.forwards != defaults.PATCHES
)
ATTENTION = tuple(name for name, method in ATTRIBUTIONS.items() if "cnn" not in method.families)
CASES = [
    (method, name)
    for method in ATTRIBUTIONS
    for name in MODELS
    if not (name == "cnn" and method in ATTENTION) and not (name == "registers" and method in SLOW)
]
TARGETS = torch.tensor([3, 0, 4])
COMBINED = "best"
ONE_SEQUENCE = (*DEPTHS, COMBINED)  # not of windows


def expected_shape(method: str, model: Model, batch: Tensor) -> tuple[int, ...]:
    if ATTRIBUTIONS[method].resolution == "pixel":
        return len(batch), *batch.shape[2:]
    if method in CAMS and model.anatomy.layout is None:
        return len(batch), 4, 6
    return len(batch), *removal_grid(model)


def test_the_registry_is_one_literal_list():
    assert all(name == method.name for name, method in ATTRIBUTIONS.items())
    assert len({method.title for method in ATTRIBUTIONS.values()}) == len(ATTRIBUTIONS)
    for method in ATTRIBUTIONS.values():
        assert method.description
        assert "\n" not in method.description
        assert method.needs is None or method.needs in CHECKS
        assert set(method.families) <= set(get_args(Family))
        assert method.forwards + method.backwards > 0
    with pytest.raises(TypeError):
        ATTRIBUTIONS["other"] = ATTRIBUTIONS["rollout"]  # type: ignore[index]


def test_the_groups_that_follow_from_the_registry():
    assert (len(CHAINED), len(CAMS), len(ATTENTION)) == (5, 8, 7)
    assert {name for name in CHAINED if name not in ATTENTION_METHODS} == {COMBINED}
    assert DEPTHS == ("legrad",)
    assert RANDOM == ("smoothgrad", "rise", "kernel-shap")
    assert PACKAGED == CAMS
    assert SLOW == ("scorecam", "ablationcam", "smoothgrad", "integrated-gradients", "rise", "kernel-shap")
    assert default_methods() == ("relevance", "rollout", "best", "gradcam", "integrated-gradients", "occlusion")
    assert {name for name, method in ATTRIBUTIONS.items() if method.studied} == {
        "relevance", "rollout", "best", "gradcam", "occlusion",
    }  # fmt: skip
    assert {name for name, method in ATTRIBUTIONS.items() if not method.needs_class} == {
        "rollout", "attention", "eigencam",
    }  # fmt: skip
    assert {name for name, method in ATTRIBUTIONS.items() if method.slow} == {
        "scorecam", "ablationcam", "occlusion", "rise", "kernel-shap",
    }  # fmt: skip


def test_registries_and_defaults_import_no_torch():
    program = (
        "import sys, vitlens.attribution.registry\n"
        "import vitlens.analysis.attention.registry\n"
        "sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@pytest.mark.parametrize("method", ATTRIBUTIONS)
def test_a_function_takes_the_options_of_its_entry(method):
    entry = ATTRIBUTIONS[method]
    parameters = list(inspect.signature(entry.maps).parameters.values())
    assert [parameter.name.lstrip("_") for parameter in parameters[:3]] == ["model", "images", "targets"]
    own = {parameter.name for parameter in parameters[3:]}
    if method in ATTENTION_METHODS:  # one function for all, which passes the options on to the method's own
        followed = inspect.signature(resolved(ATTENTION_METHODS[method].function)).parameters
        own = {"method", *list(followed)[1:]} | ({"readout"} if ATTENTION_METHODS[method].needs == "chain" else set())
        parameters = [*parameters[:3], *list(followed.values())[1:]]
    assert own == {*entry.options, *entry.arguments}
    for parameter in parameters[3:]:
        default = getattr(defaults, parameter.name.upper(), parameter.default)  # each default is defined once
        assert parameter.name in entry.arguments or parameter.default in (default, None)


def test_a_comparison_takes_the_first_by_preference_that_a_model_has():
    assert preferred_method(ours()) == "best"
    assert preferred_method(shared_model("swin")) == "relevance"
    assert preferred_method(cnn()) == "gradcam"
    assert preferred_method(linear()) == "occlusion"


@pytest.mark.parametrize(("method", "name"), CASES)
def test_every_method_keeps_the_contract(method, name):
    """Finite, of the expected shape, independent of the batch, without side effects."""
    model = MODELS[name]()
    for number, module in enumerate(model.modules()):
        if number % 5 == 0 and not any(True for _ in module.children()) and not isinstance(module, nn.BatchNorm2d):
            module.train()
    for number, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(number % 2 == 0)
    batch = images(model.input_size, batch=3)
    target_layer(model)
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
    if not ATTRIBUTIONS[method].signed:
        assert maps.min() >= -1e-6 * maps.max()
    alone = explain(model, batch[1:2], targets=TARGETS[1:2], method=method)
    tolerance = 1e-3 * maps[1].abs().max().item()  # where rounding turns a ReLU, gradients jump
    torch.testing.assert_close(alone[0], maps[1], atol=tolerance, rtol=0)
    in_parts = explain(model, batch, targets=TARGETS, method=method, batch_size=2)
    torch.testing.assert_close(in_parts, maps, atol=1e-3 * maps.abs().max().item(), rtol=0)


@pytest.mark.parametrize("method", ATTRIBUTIONS)
def test_the_class_asked_for_matters_where_it_should(method):
    model, batch = ours(), images((32, 48))
    one, other = (explain(model, batch, targets=torch.full((2,), target), method=method) for target in (0, 3))
    assert torch.equal(one, other) is not ATTRIBUTIONS[method].needs_class


def test_no_target_means_the_prediction():
    model, batch = cnn(), images((32, 48), batch=3)
    with torch.no_grad():
        predicted = model(batch).argmax(-1)
    maps = explain(model, batch, method="gradcam", batch_size=2)
    assert torch.equal(maps, explain(model, batch, targets=predicted, method="gradcam", batch_size=2))


@pytest.mark.parametrize("method", RANDOM)
def test_a_seed_gives_the_same_map_again_and_another_another(method):
    model, batch = ours(), images((32, 48), batch=1)
    one, again, other = (explain(model, batch, method=method, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("method", PACKAGED)
def test_the_package_leaves_nothing_on_the_model(method, name):
    """Neither where it succeeds nor where it is stopped; the model keeps its gradients and what is asked for."""
    if name == "registers" and method in SLOW:
        pytest.skip("many passes, as of the other ViT")
    model = MODELS[name]()
    for number, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(number % 2 == 0)
        parameter.grad = torch.ones_like(parameter)
    batch = images(model.input_size)
    before = state_of(model)
    maps = explain(model, batch, targets=TARGETS[:2], method=method, engine="grad-cam")
    assert state_of(model) == before
    assert all(torch.equal(parameter.grad, torch.ones_like(parameter)) for parameter in model.parameters())
    assert maps.shape == (2, *model.input_size)
    assert maps.dtype == torch.float32
    assert maps.min() >= 0
    assert maps.max() <= 1
    head = model.module.fc if name == "cnn" else model.module.head
    handle = head.register_forward_pre_hook(Break(BrokenError, 1))
    before = state_of(model)
    with pytest.raises(BrokenError):
        explain(model, batch, targets=TARGETS[:2], method=method, engine="grad-cam")
    assert state_of(model) == before
    handle.remove()


def test_an_engine_supports_its_own_methods(monkeypatch):
    assert methods_for(ours(), engine="grad-cam") == PACKAGED
    with pytest.raises(UnsupportedError, match=r"engine grad-cam has \(gradcam, .*, ablationcam\), found 'saliency'"):
        explain(ours(), images((32, 48)), method="saliency", engine="grad-cam")
    # the runtime type checker of the tests accepts no other word
    monkeypatch.setattr("vitlens.attribution.explain.ENGINES", ("vitlens",))
    with pytest.raises(UnknownNameError, match="no engine 'grad-cam'"):
        require_method(ours(), "gradcam", engine="grad-cam")


def test_a_model_has_the_methods_of_its_family():
    assert methods_for(ours()) == tuple(ATTRIBUTIONS)
    assert methods_for(shared_model("swin")) == tuple(name for name in ATTRIBUTIONS if name not in ONE_SEQUENCE)
    without_attention = tuple(name for name in ATTRIBUTIONS if name not in ATTENTION)
    assert methods_for(cnn()) == without_attention
    assert methods_for(linear()) == tuple(name for name in without_attention if name not in CAMS)
    channels = timm_model("xcit_nano_12_p16_224", embed_dim=64)
    assert methods_for(channels) == tuple(name for name in ATTRIBUTIONS if name not in (*CHAINED, *DEPTHS))


@pytest.mark.parametrize("name", ["swin", "torchvision-swin", "torchvision-vit", "siglip", "cait", "deit-distilled"])
@pytest.mark.parametrize("method", ["gradcam", "relevance", "libra-relevance", "occlusion"])
def test_other_families(name, method):
    model = shared_model(name)
    maps = explain(model, images(model.input_size), method=method)
    assert torch.isfinite(maps).all()
    assert maps.flatten(1).std(1).min() > 0


def test_invalid_arguments_are_refused():
    model, batch = cnn(), images((32, 48))
    with pytest.raises(UnknownNameError, match="no method 'gradcm'; did you mean 'gradcam'"):
        explain(model, batch, method="gradcm")
    with pytest.raises(UnsupportedError, match=r"a method that cnn \(cnn\) has, found 'relevance'; it has gradcam, "):
        explain(model, batch, method="relevance")
    for wrong in (5, -1):
        with pytest.raises(InputError, match=f"targets from 0 to 4, found {wrong}"):
            explain(model, batch, targets=torch.tensor([0, wrong]), method="gradcam")
    with pytest.raises(InputError, match=r"batch > 0, found \(0, 3, 32, 48\)"):
        explain(model, batch[:0], method="gradcam")


def test_images_of_another_size_are_explained_at_theirs():
    model, batch = ours(), images((40, 40))
    assert explain(model, batch, method="integrated-gradients").shape == (2, 40, 40)
    assert explain(model, batch, method="rise").shape == (2, 40, 40)
    assert explain(model, batch, method="gradcam").shape == (2, 4, 3)
    assert explain(model, batch, method="occlusion").shape == (2, 4, 3)
