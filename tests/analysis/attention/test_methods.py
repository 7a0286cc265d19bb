"""Every method of the registry: its name, its maps, its logits, and that it is the public function of that name."""

import inspect
from collections.abc import Callable
from functools import partial

import jaxtyping
import pytest
import torch
from torch import Tensor

import vitlens
from tests.analysis.attention.ways import flow, gradient_rollout
from tests.lens.tiny import images, ours, shared_model, timm_model
from vitlens.analysis.attention.methods import maps_in_one_pass, relevance, require_possible, rollout
from vitlens.analysis.attention.registry import ATTENTION_METHODS, MethodSettings, attention_method
from vitlens.analysis.attention.weights import attention_maps
from vitlens.attribution.explain import explain
from vitlens.errors import InputError, UnknownNameError, UnsupportedError
from vitlens.models.model import Model
from vitlens.models.support import CHECKS
from vitlens.references import resolved

PUBLIC: dict[str, Callable[[Model, Tensor, Tensor], Tensor]] = {
    "rollout": lambda model, batch, _targets: rollout(model, batch),
    "relevance": lambda model, batch, targets: relevance(model, batch, targets=targets),
    "libra-relevance": lambda model, batch, targets: explain(model, batch, targets=targets, method="libra-relevance"),
    "gradient-rollout": lambda model, batch, targets: gradient_rollout(model, batch, targets=targets),
    "attention": lambda model, batch, _targets: attention_maps(model, batch)[-1].maps.mean(1),
    "flow": lambda model, batch, _targets: flow(model, batch),
}
MODELS = ("ours", "dinov2-registers", "siglip", "cait", "torchvision-vit", "swin")
GRIDS = {"ours": (4, 3), "swin": (16, 16)}
TARGETS = torch.tensor([1, 4])


def defined(method: str, name: str) -> bool:
    return not (method == "flow" and name == "swin")


CASES = [(method, name) for method in ATTENTION_METHODS for name in MODELS if defined(method, name)]


def test_the_registry_has_every_name_and_no_other():
    assert set(PUBLIC) == set(ATTENTION_METHODS)
    for name, method in ATTENTION_METHODS.items():
        assert name == method.name
        assert method.description
        assert method.needs in CHECKS
        assert method.forwards + method.backwards > 0
    names = ["rollout-mean", *list(ATTENTION_METHODS)[1:]]  # in reports
    assert [MethodSettings(method).name for method in ATTENTION_METHODS] == names


@pytest.mark.parametrize("method", ATTENTION_METHODS)
def test_the_settings_of_a_method_are_those_of_its_function_with_the_same_defaults(method):
    options = {
        name: parameter.default
        for name, parameter in inspect.signature(resolved(attention_method(method).function)).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY
    }
    assert MethodSettings(method).settings == options


@pytest.mark.parametrize(("method", "name"), CASES)
def test_maps_and_logits(method, name):
    model = shared_model(name)
    batch = images(model.input_size)
    with torch.no_grad():
        plain = model(batch)
    logits, (maps,) = maps_in_one_pass(model, batch, [MethodSettings(method)], targets=TARGETS)
    grid = (8, 8) if (method, name) == ("attention", "swin") else GRIDS.get(name, (4, 4))  # the last stage's own
    assert maps.shape == (2, *grid)
    assert torch.isfinite(maps).all()
    assert not maps.requires_grad
    assert not logits.requires_grad
    assert maps.flatten(1).std(1).min() > 0  # an even map would show nothing
    torch.testing.assert_close(logits, plain, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(maps, PUBLIC[method](model, batch, TARGETS), atol=1e-7, rtol=1e-5)


@pytest.mark.parametrize("method", ATTENTION_METHODS)
def test_only_gradients_need_a_target(method):
    model = ours()
    batch = images((32, 48))
    one, other = (
        maps_in_one_pass(model, batch, [MethodSettings(method)], targets=torch.full((2,), target))[1][0]
        for target in (0, 3)
    )
    assert torch.equal(one, other) is not ATTENTION_METHODS[method].gradients
    with torch.no_grad():
        predicted = model(batch).argmax(-1)
    (own,), (named,) = (
        maps_in_one_pass(model, batch, [MethodSettings(method)], targets=given)[1] for given in (None, predicted)
    )
    assert torch.equal(own, named)


@pytest.mark.parametrize("name", ["ours", "vit-mean", "cait", "swin"])
def test_attention_of_a_layer_is_that_layers(name):
    """Of a windowed model at the resolution of the layer's own stage."""
    model = shared_model(name)
    batch = images(model.input_size)
    layers = attention_maps(model, batch)
    for number, layer in enumerate(layers):
        (maps,) = maps_in_one_pass(model, batch, [MethodSettings("attention", layer=number)])[1]
        assert torch.equal(maps, layer.maps.mean(1))
    if "swin" in name:
        assert [layer.maps.shape[2:] for layer in layers] == [(16, 16)] * 2 + [(8, 8)] * 2
    (last,) = maps_in_one_pass(model, batch, [MethodSettings("attention")])[1]
    assert torch.equal(last, maps)


def test_several_ways_from_one_pass_are_each_alone_with_their_settings():
    model, batch = ours(depth=3, distillation=True), images((32, 48))
    ways = [
        MethodSettings("rollout", "min", 0.3, 0.2, 1),
        MethodSettings("relevance", start_layer=2),
        MethodSettings("libra-relevance"),
        MethodSettings("gradient-rollout", alpha=0.1, start_layer=1),
        MethodSettings("flow", alpha=0.2),
    ]
    for readout in ("mean", "cls"):
        expected = [
            rollout(model, batch, fusion="min", discard=0.3, alpha=0.2, start_layer=1, readout=readout),
            relevance(model, batch, start_layer=2, readout=readout),
            maps_in_one_pass(model, batch, [MethodSettings("libra-relevance")], readout=readout)[1][0],
            gradient_rollout(model, batch, alpha=0.1, start_layer=1, readout=readout),
            flow(model, batch, alpha=0.2, readout=readout),
        ]
        for maps, own in zip(maps_in_one_pass(model, batch, ways, readout=readout)[1], expected):
            torch.testing.assert_close(maps, own, atol=1e-7, rtol=1e-5)


@pytest.mark.parametrize("name", ["ours", "cait", "swin"])
def test_mixed_precision(name):
    model = shared_model(name)
    batch = images(model.input_size)
    ways = [MethodSettings(method) for method in ATTENTION_METHODS if defined(method, name)]
    plain = maps_in_one_pass(model, batch, ways, targets=TARGETS)[1]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = maps_in_one_pass(model, batch, ways, targets=TARGETS)[1]
    for way, maps, expected in zip(ways, found, plain):
        assert maps.dtype == torch.float32 or way.method == "attention"
        assert (maps - expected).abs().max() < 0.1 * expected.max(), way
    if name == "swin":  # no prefix that keeps some of the mass
        torch.testing.assert_close(found[0].sum((1, 2)), torch.ones(2), atol=1e-3, rtol=0)


XCIT = partial(timm_model, "xcit_nano_12_p16_224", img_size=32, patch_size=16, embed_dim=32)
REFUSED = [  # before any work
    (ours, {"method": "attention", "layer": -1}, InputError, "--layer from 0 to 1, found -1"),
    (ours, {"method": "attention", "layer": 2}, InputError, "--layer from 0 to 1, found 2"),
    *[
        (ours, {"method": method, "start_layer": start}, InputError, f"--start-layer of at least 0 .* found {start}")
        for method, start in (("rollout", 2), ("relevance", -1), ("gradient-rollout", 2), ("flow", 2))
    ],
    (XCIT, {"method": "rollout"}, UnsupportedError, "channels attend to channels"),
    (partial(ours, size=(136, 272)), {"method": "flow"}, UnsupportedError, "at most 256 tokens .* found 290"),
    (partial(vitlens.load, "cnn-digits"), {"method": "attention"}, UnsupportedError, "softmax attention .* found none"),
    (ours, {"method": "rollout", "discard": 1.0}, InputError, "discard in"),
    (ours, {"method": "rollout", "discard": float("nan")}, InputError, "discard in"),
    (ours, {"method": "rollout", "alpha": -0.1}, InputError, "alpha in"),
    (ours, {"method": "flow", "alpha": float("nan")}, InputError, "alpha in"),
    (ours, {"method": "relevence"}, UnknownNameError, "no method 'relevence'; did you mean 'relevance'"),
    (ours, {"method": "rollout", "fusion": "men"}, UnknownNameError, "no fusion 'men'; did you mean 'mean'"),
]


@pytest.mark.parametrize(("make", "settings", "error", "words"), REFUSED)
def test_refusals(make, settings, error, words, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # the tests' own check of types would be first
    with pytest.raises(error, match=words):
        require_possible(make(), [MethodSettings("attention"), MethodSettings(**settings)])


def test_attention_of_channels_is_in_no_map():
    """XCiT's last layer is a CLS that reads the patches; those before it are channels."""
    xcit = XCIT()
    assert maps_in_one_pass(xcit, images(), [MethodSettings("attention")])[1][0].shape == (2, 2, 2)
    with pytest.raises(UnsupportedError, match="pooled keys or channels in layer 0 of tiny; choose another --layer"):
        maps_in_one_pass(xcit, images(), [MethodSettings("attention", layer=0)])
