"""The contract of every attribution method, parametrised from the registry."""

import inspect
import subprocess
import sys
from typing import get_args

import pytest
import torch
from torch import Tensor

from tests.kit.explainable import MODELS, cnn, linear
from tests.kit.tiny import images, ours, shared_model, timm_model
from tests.kit.uses import Break, BrokenError, state_of
from vitlens.analysis.attention.methods import relevance, rollout
from vitlens.analysis.attention.registry import ATTENTION_METHODS
from vitlens.analysis.attention.weights import attention_maps
from vitlens.analysis.faithfulness.maps import removal_grid
from vitlens.attribution import registry as defaults
from vitlens.attribution.explain import explain, methods_for, preferred_method, require_method
from vitlens.attribution.registry import ATTRIBUTIONS, default_methods
from vitlens.errors import InputError, UnknownNameError, UnsupportedError
from vitlens.models.anatomy import Family
from vitlens.models.model import Model
from vitlens.models.support import CHECKS
from vitlens.references import resolved

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
    return len(batch), *removal_grid(model)


def test_the_registry():
    assert all(name == method.name for name, method in ATTRIBUTIONS.items())
    assert len({method.title for method in ATTRIBUTIONS.values()}) == len(ATTRIBUTIONS)
    for method in ATTRIBUTIONS.values():
        assert method.description
        assert "\n" not in method.description
        assert method.needs is None or method.needs in CHECKS
        assert set(method.families) <= set(get_args(Family))
        assert method.forwards + method.backwards > 0
    assert (len(CHAINED), len(CAMS), len(ATTENTION)) == (5, 8, 7)
    assert {name for name in CHAINED if name not in ATTENTION_METHODS} == {"best"}
    assert (DEPTHS, RANDOM, PACKAGED) == (("legrad",), ("smoothgrad", "rise", "kernel-shap"), CAMS)
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


@pytest.mark.parametrize(("method", "name"), CASES)
def test_every_method_keeps_the_contract(method, name):
    """Finite, of the expected shape and sign, not constant, independent of the batch."""
    model = MODELS[name]()
    batch = images(model.input_size, batch=3)
    maps = explain(model, batch, targets=TARGETS, method=method)
    assert torch.equal(batch, images(model.input_size, batch=3))
    assert not maps.requires_grad
    assert (maps.dtype, maps.shape) == (torch.float32, expected_shape(method, model, batch))
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
def test_the_class_asked_for_and_the_seed_matter_where_they_should(method):
    model, batch = ours(), images((32, 48))
    one, other = (explain(model, batch, targets=torch.full((2,), target), method=method) for target in (0, 3))
    assert torch.equal(one, other) is not ATTRIBUTIONS[method].needs_class
    if method in RANDOM:
        one, again, other = (explain(model, batch, method=method, seed=seed) for seed in (1, 1, 2))
        assert torch.equal(one, again)
        assert not torch.equal(one, other)


def test_no_target_means_the_prediction():
    model, batch = cnn(), images((32, 48), batch=3)
    maps = explain(model, batch, method="gradcam", batch_size=2)
    assert torch.equal(maps, explain(model, batch, targets=model(batch).argmax(-1), method="gradcam", batch_size=2))


@pytest.mark.parametrize("name", ["ours", "dinov2-registers", "swin"])
def test_attention_methods_are_the_functions_of_their_names(name):
    model, targets = shared_model(name), TARGETS[:2]
    batch = images(model.input_size)
    expected = {
        "rollout": rollout(model, batch),
        "relevance": relevance(model, batch, targets=targets),
        "gradient-rollout": explain(model, batch, method="gradient-rollout", targets=targets),
        "attention": attention_maps(model, batch)[-1].maps.mean(1),
    }
    for method, maps in expected.items():
        explained = explain(model, batch, targets=targets, method=method)
        torch.testing.assert_close(explained, maps, atol=1e-7, rtol=1e-5)


@pytest.mark.parametrize(
    ("method", "name"), [(m, name) for m in PACKAGED for name in MODELS if not (name == "registers" and m in SLOW)]
)
def test_the_package_leaves_nothing_on_the_model(method, name):
    """Neither where it succeeds nor where it is stopped; the model keeps its gradients and what is asked for."""
    model = MODELS[name]()
    for number, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(number % 2 == 0)
        parameter.grad = torch.ones_like(parameter)
    batch, before = images(model.input_size), state_of(model)
    maps = explain(model, batch, targets=TARGETS[:2], method=method, engine="grad-cam")
    assert state_of(model) == before
    assert all(torch.equal(parameter.grad, torch.ones_like(parameter)) for parameter in model.parameters())
    assert (maps.shape, maps.dtype) == ((2, *model.input_size), torch.float32)
    assert 0 <= maps.min() < maps.max() <= 1
    head = model.module.fc if name == "cnn" else model.module.head
    with head.register_forward_pre_hook(Break(BrokenError, 1)):
        before = state_of(model)
        with pytest.raises(BrokenError):
            explain(model, batch, targets=TARGETS[:2], method=method, engine="grad-cam")
        assert state_of(model) == before


def test_a_model_has_the_methods_of_its_family_and_a_comparison_takes_the_first_by_preference():
    assert methods_for(ours()) == tuple(ATTRIBUTIONS)
    assert methods_for(ours(), engine="grad-cam") == PACKAGED
    assert methods_for(shared_model("swin")) == tuple(name for name in ATTRIBUTIONS if name not in (*DEPTHS, "best"))
    without_attention = tuple(name for name in ATTRIBUTIONS if name not in ATTENTION)
    assert methods_for(cnn()) == without_attention
    assert methods_for(linear()) == tuple(name for name in without_attention if name not in CAMS)
    channels = timm_model("xcit_nano_12_p16_224", embed_dim=64)
    assert methods_for(channels) == tuple(name for name in ATTRIBUTIONS if name not in (*CHAINED, *DEPTHS))
    preferred = [preferred_method(model) for model in (ours(), shared_model("swin"), cnn(), linear())]
    assert preferred == ["best", "relevance", "gradcam", "occlusion"]


@pytest.mark.parametrize("name", ["swin", "torchvision-swin", "torchvision-vit", "siglip", "cait", "deit-distilled"])
@pytest.mark.parametrize("method", ["gradcam", "relevance", "libra-relevance", "occlusion"])
def test_other_families(name, method):
    model = shared_model(name)
    maps = explain(model, images(model.input_size), method=method)
    assert torch.isfinite(maps).all()
    assert maps.flatten(1).std(1).min() > 0


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"method": "gradcm"}, UnknownNameError, "no method 'gradcm'; did you mean 'gradcam'"),
        ({"method": "relevance"}, UnsupportedError, r"that cnn \(cnn\) has, found 'relevance'; it has gradcam, "),
        ({"method": "best"}, UnsupportedError, r"found 'best'; it has gradcam, "),
        ({"method": "gradcam", "targets": torch.tensor([0, 5])}, InputError, "targets from 0 to 4, found 5"),
        ({"method": "gradcam", "targets": torch.tensor([0, -1])}, InputError, "targets from 0 to 4, found -1"),
        ({"method": "gradcam", "targets": torch.tensor([0])}, InputError, r"one target per image \(2\), found 1"),
        ({"method": "gradcam", "steps": 3}, InputError, "no option of gradcam, which has none, found 'steps'"),
        ({"method": "rise", "steps": 3}, UnknownNameError, "no option of rise 'steps'"),
        (
            {"method": "rise", "engine": "grad-cam"},
            UnsupportedError,
            r"engine grad-cam has \(gradcam, .*, ablationcam\), found 'rise'",
        ),
    ],
)
def test_refusals(options, error, message):
    with pytest.raises(error, match=message):
        explain(cnn(), images((32, 48)), **options)


def test_an_unknown_engine_is_refused(monkeypatch):
    # the runtime type checker of the tests accepts no other word
    monkeypatch.setattr("vitlens.attribution.explain.ENGINES", ("vitlens",))
    with pytest.raises(UnknownNameError, match="no engine 'grad-cam'"):
        require_method(ours(), "gradcam", engine="grad-cam")


def test_images_of_another_size_are_explained_at_theirs():
    model, batch = ours(), images((40, 40))
    shapes = [
        explain(model, batch, method=name).shape for name in ("integrated-gradients", "rise", "gradcam", "occlusion")
    ]
    assert shapes == [(2, 40, 40), (2, 40, 40), (2, 4, 3), (2, 4, 3)]
