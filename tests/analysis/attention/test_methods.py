"""Every method of the registry: its name, its maps, its logits, and that it is the public function of that name."""

import inspect
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.analysis.attention.ways import flow, gradient_rollout
from tests.lens.tiny import images, model_of, ours, shared_model, timm_model
from vitlens.analysis.attention.methods import maps_in_one_pass, relevance, require_possible, rollout
from vitlens.analysis.attention.registry import ATTENTION_METHODS, MethodSettings, attention_method
from vitlens.analysis.attention.weights import attention_maps
from vitlens.attribution.explain import explain
from vitlens.errors import InputError, UnknownNameError, UnsupportedError
from vitlens.models.model import Model
from vitlens.models.resnet import build_resnet
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
MODELS = ("ours", "deit-distilled", "dinov2-registers", "beit", "siglip", "cait", "torchvision-vit", "swin")
GRIDS = {"ours": (4, 3), "swin": (16, 16)}
TARGETS = torch.tensor([1, 4])


def defined(method: str, name: str) -> bool:
    return not (method == "flow" and name == "swin")


CASES = [(method, name) for method in ATTENTION_METHODS for name in MODELS if defined(method, name)]


def test_the_registry_has_every_name_and_no_other():
    assert set(PUBLIC) == set(ATTENTION_METHODS)
    for name, method in ATTENTION_METHODS.items():
        assert attention_method(name) is method
        assert name == method.name
        assert method.description
        assert "\n" not in method.description
        assert method.needs in CHECKS
        assert method.forwards + method.backwards > 0
    with pytest.raises(TypeError):
        ATTENTION_METHODS["other"] = ATTENTION_METHODS["rollout"]  # type: ignore[index]


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
    traced = maps_in_one_pass(model, batch, [MethodSettings(method)], targets=TARGETS)
    assert torch.equal(batch, images(model.input_size))
    assert not batch.requires_grad
    (maps,) = traced.maps
    grid = (8, 8) if (method, name) == ("attention", "swin") else GRIDS.get(name, (4, 4))  # the last stage's own
    assert maps.shape == (2, *grid)
    assert torch.isfinite(maps).all()
    assert not maps.requires_grad
    assert not traced.logits.requires_grad
    assert maps.flatten(1).std(1).min() > 0  # an even map would show nothing
    if (
        ATTENTION_METHODS[method].gradients or name == "torchvision-vit"
    ):  # the latter has another kernel when unobserved
        torch.testing.assert_close(traced.logits, plain, atol=1e-5, rtol=1e-5)
    else:
        assert torch.equal(traced.logits, plain)
    torch.testing.assert_close(maps, PUBLIC[method](model, batch, TARGETS), atol=1e-7, rtol=1e-5)


@pytest.mark.parametrize("method", ATTENTION_METHODS)
def test_only_gradients_need_a_target(method):
    model = ours()
    batch = images((32, 48))
    one, other = (
        maps_in_one_pass(model, batch, [MethodSettings(method)], targets=torch.full((2,), target)).maps[0]
        for target in (0, 3)
    )
    assert torch.equal(one, other) is not ATTENTION_METHODS[method].gradients
    with torch.no_grad():
        predicted = model(batch).argmax(-1)
    (own,), (named,) = (
        maps_in_one_pass(model, batch, [MethodSettings(method)], targets=given).maps for given in (None, predicted)
    )
    assert torch.equal(own, named)


@pytest.mark.parametrize("name", ["ours", "cait", "swin"])
def test_several_ways_from_one_pass_are_each_alone(name):
    model = shared_model(name)
    batch = images(model.input_size)
    ways = [MethodSettings(method) for method in ATTENTION_METHODS if defined(method, name)]
    ways += [
        MethodSettings("rollout", "max", 0.3, 0.2, 1),
        MethodSettings("relevance", start_layer=1),
        MethodSettings("attention", layer=0),
    ]
    ways += [MethodSettings("gradient-rollout", alpha=0.1, start_layer=1)]
    together = maps_in_one_pass(model, batch, ways, targets=TARGETS)
    assert len(together.maps) == len(ways)
    for way, maps in zip(ways, together.maps):
        alone = maps_in_one_pass(model, batch, [way], targets=TARGETS)
        torch.testing.assert_close(maps, alone.maps[0], atol=1e-7, rtol=1e-5)
        torch.testing.assert_close(together.logits, alone.logits, atol=1e-5, rtol=1e-5)


def test_settings_reach_their_method():
    model, batch = ours(depth=3), images((32, 48))
    ways = [
        MethodSettings("rollout", "min", 0.3, 0.2, 1),
        MethodSettings("relevance", start_layer=2),
        MethodSettings("gradient-rollout", alpha=0.1, start_layer=1),
        MethodSettings("flow", alpha=0.2),
    ]
    expected = [
        rollout(model, batch, fusion="min", discard=0.3, alpha=0.2, start_layer=1),
        relevance(model, batch, start_layer=2),
        gradient_rollout(model, batch, alpha=0.1, start_layer=1),
        flow(model, batch, alpha=0.2),
    ]
    for maps, own in zip(maps_in_one_pass(model, batch, ways).maps, expected):
        torch.testing.assert_close(maps, own, atol=1e-7, rtol=1e-5)


@pytest.mark.parametrize("name", ["ours", "vit-mean", "siglip", "cait", "swin", "torchvision-swin"])
def test_attention_of_a_layer_is_that_layers(name):
    """Of a windowed model at the resolution of the layer's own stage."""
    model = shared_model(name)
    batch = images(model.input_size)
    layers = attention_maps(model, batch)
    for number, layer in enumerate(layers):
        (maps,) = maps_in_one_pass(model, batch, [MethodSettings("attention", layer=number)]).maps
        assert torch.equal(maps, layer.maps.mean(1))
    if "swin" in name:
        assert [layer.maps.shape[2:] for layer in layers] == [(16, 16)] * 2 + [(8, 8)] * 2
    (last,) = maps_in_one_pass(model, batch, [MethodSettings("attention")]).maps
    assert torch.equal(last, maps)


@pytest.mark.parametrize("readout", ["mean", "cls"])
def test_another_readout(readout):
    model, batch = ours(distillation=True), images((32, 48))
    ways = [
        MethodSettings("rollout"),
        MethodSettings("relevance"),
        MethodSettings("gradient-rollout"),
        MethodSettings("flow"),
    ]
    expected = [method(model, batch, readout=readout) for method in (rollout, relevance, gradient_rollout, flow)]
    for maps, own in zip(maps_in_one_pass(model, batch, ways, readout=readout).maps, expected):
        torch.testing.assert_close(maps, own, atol=1e-7, rtol=1e-5)


@pytest.mark.parametrize("precision", [torch.bfloat16])
def test_mixed_precision(precision):
    for name in ("ours", "cait", "swin"):
        model = shared_model(name)
        batch = images(model.input_size)
        ways = [MethodSettings(method) for method in ATTENTION_METHODS if defined(method, name)]
        plain = maps_in_one_pass(model, batch, ways, targets=TARGETS)
        with torch.autocast("cpu", dtype=precision):
            found = maps_in_one_pass(model, batch, ways, targets=TARGETS)
        for way, maps, expected in zip(ways, found.maps, plain.maps):
            assert torch.isfinite(maps).all(), way
            assert (maps - expected).abs().max() < 0.1 * expected.max(), way
        if name == "swin":  # no prefix that keeps some of the mass
            torch.testing.assert_close(found.maps[0].sum((1, 2)), torch.ones(2), atol=1e-3, rtol=0)


def test_names_in_reports():
    assert MethodSettings("rollout").name == "rollout-mean"
    assert MethodSettings("rollout", "max").name == "rollout-max"
    assert [MethodSettings(method).name for method in ATTENTION_METHODS if method != "rollout"] == [
        m for m in ATTENTION_METHODS if m != "rollout"
    ]


def check(model: Model, way: MethodSettings, error: type[Exception], message: str) -> None:
    """Before any work."""
    with pytest.raises(error, match=message):
        require_possible(model, images(model.input_size), [MethodSettings("attention"), way])


@pytest.mark.parametrize("layer", [-1, 2, 7])
def test_a_layer_that_is_not_there(layer):
    check(ours(), MethodSettings("attention", layer=layer), InputError, f"--layer from 0 to 1, found {layer}")


@pytest.mark.parametrize("method", ["rollout", "relevance", "gradient-rollout", "flow"])
def test_a_start_that_is_not_there(method):
    check(
        ours(),
        MethodSettings(method, start_layer=2),
        InputError,
        "--start-layer of at least 0 and below 2 layers, found 2",
    )


@pytest.mark.parametrize("method", [name for name, method in ATTENTION_METHODS.items() if method.needs == "chain"])
def test_a_chain_that_is_not_there(method):
    xcit = timm_model("xcit_nano_12_p16_224", img_size=32, patch_size=16, embed_dim=32)
    with pytest.raises(UnsupportedError, match="channels attend to channels"):
        require_possible(xcit, images(), [MethodSettings(method)])


def test_attention_of_channels_is_in_no_map():
    """XCiT's last layer is a CLS that reads the patches; those before it are channels."""
    xcit = timm_model("xcit_nano_12_p16_224", img_size=32, patch_size=16, embed_dim=32)
    assert maps_in_one_pass(xcit, images(), [MethodSettings("attention")]).maps[0].shape == (2, 2, 2)
    with pytest.raises(UnsupportedError, match="pooled keys or channels in layer 0 of tiny; choose another --layer"):
        maps_in_one_pass(xcit, images(), [MethodSettings("attention", layer=0)])


def test_flow_of_many_tokens_is_refused():
    check(
        ours(size=(136, 272)),
        MethodSettings("flow"),
        UnsupportedError,
        "at most 256 tokens for attention flow, found 290",
    )


@pytest.mark.parametrize("method", ATTENTION_METHODS)
def test_a_model_without_attention(method):
    cnn = model_of(build_resnet("resnet20", classes=5, image_size=(32, 32)), alias="cnn")
    with pytest.raises(UnsupportedError, match="softmax attention in the forward pass of cnn, found none"):
        require_possible(cnn, images(), [MethodSettings(method)])


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"discard": 1.0}, "discard in"), ({"alpha": -0.1}, "alpha in")],
)
def test_settings_that_cannot_be(settings, message):
    with pytest.raises(InputError, match=message):
        MethodSettings("rollout", **settings)


def test_an_unknown_method_names_the_known():
    way = MethodSettings("rollout")
    object.__setattr__(way, "method", "relevence")  # the type checker of the tests would stop it at the constructor
    with pytest.raises(UnknownNameError, match="no method 'relevence'; did you mean 'relevance'"):
        way.__post_init__()
