"""Every attention method of the registry: its maps, its settings, the classes it needs, and what it refuses."""

import inspect
import math
from functools import partial

import pytest
import torch

import vitlens
from tests.kit.tiny import images, ours, shared_model, small_cnn, timm_model
from vitlens.analysis.attention.registry import ATTENTION_METHODS, MethodSettings
from vitlens.errors import InputError, UnknownNameError, UnsupportedError

MODELS = ("ours", "dinov2-registers", "siglip", "cait", "torchvision-vit", "swin")
GRIDS = {"ours": (4, 3), "swin": (16, 16)}
METHODS = [method for method in ATTENTION_METHODS if method != "flow"]  # which the command line alone has
CASES = [(method, name) for method in METHODS for name in MODELS]


@pytest.mark.parametrize("name", ["rollout", "relevance"])
def test_the_settings_of_a_method_are_those_of_its_function_with_the_same_defaults(name):
    public = {
        option: parameter.default
        for option, parameter in inspect.signature(getattr(vitlens, name)).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY and option not in ("targets", "readout")
    }
    assert MethodSettings(name).settings == public
    batch = images((32, 48))
    torch.testing.assert_close(vitlens.explain(ours(), batch, method=name), getattr(vitlens, name)(ours(), batch))


@pytest.mark.parametrize(("method", "name"), CASES)
def test_maps_are_finite_differ_by_place_and_do_not_hang_on_the_batch(method, name):
    model = shared_model(name)
    batch, targets = images(model.input_size), torch.tensor([1, 4])
    maps = vitlens.explain(model, batch, method=method, targets=targets)
    grid = (8, 8) if (method, name) == ("attention", "swin") else GRIDS.get(name, (4, 4))  # the last stage's own
    assert maps.shape == (2, *grid)
    assert torch.isfinite(maps).all()
    assert not maps.requires_grad
    assert maps.flatten(1).std(1).min() > 0  # an even map would show nothing
    alone = vitlens.explain(model, batch[1:], method=method, targets=targets[1:])
    torch.testing.assert_close(alone, maps[1:], atol=1e-6, rtol=1e-3)


@pytest.mark.parametrize("method", METHODS)
def test_only_a_method_with_gradients_differs_by_class(method):
    one, other = (vitlens.explain(ours(), images((32, 48)), method=method, targets=target) for target in (0, 3))
    assert torch.equal(one, other) is not ATTENTION_METHODS[method].gradients


@pytest.mark.parametrize("name", ["ours", "cait", "swin"])
def test_mixed_precision_changes_a_map_by_little(name):
    model = shared_model(name)
    batch = images(model.input_size)
    for method in METHODS:
        plain = vitlens.explain(model, batch, method=method, targets=1)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = vitlens.explain(model, batch, method=method, targets=1)
        assert (found - plain).abs().max() < 0.1 * plain.max(), method
        if (method, name) == ("rollout", "swin"):  # no prefix that keeps some of the mass
            torch.testing.assert_close(found.sum((1, 2)), torch.ones(2), atol=1e-3, rtol=0)


XCIT = partial(timm_model, "xcit_nano_12_p16_224", img_size=32, patch_size=16, embed_dim=32)
REFUSED = [  # before any work
    ({"method": "attention", "layer": -1}, InputError, "--layer from 0 to 1, found -1"),
    ({"method": "attention", "layer": 2}, InputError, "--layer from 0 to 1, found 2"),
    ({"method": "rollout", "start_layer": 2}, InputError, "--start-layer .* found 2"),
    ({"method": "relevance", "start_layer": -1}, InputError, "--start-layer .* found -1"),
    ({"method": "gradient-rollout", "start_layer": 2}, InputError, "--start-layer .* found 2"),
    ({"method": "relevence"}, UnknownNameError, "did you mean 'relevance'"),
    ({"method": "rollout", "readout": "clss"}, UnknownNameError, "did you mean 'cls'"),
]


@pytest.mark.parametrize(("options", "error", "words"), REFUSED)
def test_what_a_model_does_not_have_is_refused(options, error, words, monkeypatch):
    monkeypatch.setattr("jaxtyping.config.jaxtyping_disable", True)  # the tests' own check of types would be first
    with pytest.raises(error, match=words):
        vitlens.explain(ours(), images((32, 48)), **options)


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"discard": 1.0}, InputError),
        ({"discard": -0.1}, InputError),
        ({"discard": math.nan}, InputError),
        ({"alpha": -0.1}, InputError),
        ({"alpha": 1.1}, InputError),
        ({"alpha": math.nan}, InputError),
        ({"fusion": "men"}, UnknownNameError),
    ],
)
def test_settings_out_of_their_range_are_refused(settings, error):
    with pytest.raises(error):
        vitlens.rollout(ours(), images((32, 48)), **settings)
    with pytest.raises(error):
        MethodSettings("flow", **settings)


def test_attention_of_channels_is_in_no_map():
    """XCiT's last layer is a CLS that reads the patches; those before it are channels."""
    assert vitlens.explain(XCIT(), images(), method="attention").shape == (2, 2, 2)
    with pytest.raises(UnsupportedError, match="layer 0 of tiny; choose another --layer"):
        vitlens.explain(XCIT(), images(), method="attention", layer=0)
    with pytest.raises(UnsupportedError, match="it has gradcam"):
        vitlens.explain(small_cnn(), images((32, 48)), method="attention")


def test_several_methods_from_one_pass_are_each_alone_with_their_settings(golden, places):
    """`vitlens rollout` measures all of them at once."""
    record = golden("every method").record  # --target true --alpha 0.4 --layer 0
    model, digits = vitlens.load(str(places["vit"])), vitlens.load_data("digits", limit=len(record.maps.maps))
    settings = {"rollout": {"alpha": 0.4}, "gradient-rollout": {"alpha": 0.4}, "attention": {"layer": 0}}
    for at, row in enumerate(record.methods):
        if row.method != "flow":  # tests/public/attention/test_flow.py
            given = settings.get(row.method, {}) | ({} if row.fusion is None else {"fusion": row.fusion})
            own = vitlens.explain(model, digits, targets="label", method=row.method, **given)
            found = torch.tensor(record.maps.maps[:, at])
            torch.testing.assert_close(found, own, atol=1e-6, rtol=1e-4, msg=row.method)
    assert [row.fusion for row in record.methods if row.method == "rollout"] == ["mean", "max", "min"]
