"""The rules of every attribution in the registry, and vitlens.look."""

from collections.abc import Callable

import pytest
import torch

import vitlens
from tests.kit.explainable import MODELS, Linear, linear
from tests.kit.select import values_of
from tests.kit.tiny import images, model_of, ours, shared_model, small_cnn, timm_model
from vitlens import Model
from vitlens.analysis.attention.registry import ATTENTION_METHODS
from vitlens.attribution import registry
from vitlens.attribution.registry import ATTRIBUTIONS, default_methods
from vitlens.errors import InputError, UnsupportedError

CHAINED = tuple(name for name, method in ATTRIBUTIONS.items() if method.needs == "chain")
DEPTHS = tuple(name for name, method in ATTRIBUTIONS.items() if method.needs == "depths")
CAMS = tuple(name for name, method in ATTRIBUTIONS.items() if method.needs == "cam")
ATTENTION = tuple(name for name, method in ATTRIBUTIONS.items() if "cnn" not in method.families)
OWN = tuple(name for name in ATTRIBUTIONS if name not in ATTENTION_METHODS)
TARGETS = torch.tensor([3, 0, 4])


def test_the_methods_that_are_run_by_default_studied_slow_or_of_no_class():
    def those(chosen: Callable[[registry.Attribution], bool]) -> str:
        return " ".join(name for name, method in ATTRIBUTIONS.items() if chosen(method))

    assert (
        " ".join(default_methods())
        == "relevance rollout best gradcam integrated-gradients occlusion"
    )
    assert those(lambda method: method.studied) == "relevance rollout best gradcam occlusion"
    assert those(lambda method: not method.needs_class) == "rollout attention eigencam"
    assert those(lambda method: method.slow) == "scorecam ablationcam occlusion rise kernel-shap"


@pytest.mark.parametrize(
    ("method", "name"),
    [
        (method, name)
        for method in OWN
        for name in ("vit", "cnn")
        if name == "vit" or method not in ATTENTION
    ],
)
def test_maps_are_of_their_shape_and_sign(method, name):
    model = MODELS[name]()
    entry = ATTRIBUTIONS[method]
    maps = vitlens.explain(model, images(model.input_size, batch=3), targets=TARGETS, method=method)
    of_patches = (4, 3) if name == "vit" else (4, 6) if method in CAMS else (8, 8)
    grid = model.input_size if entry.resolution == "pixel" else of_patches
    assert (maps.dtype, maps.shape, maps.requires_grad) == (torch.float32, (3, *grid), False)
    assert maps.flatten(1).std(1).min() > 0
    assert entry.signed or maps.min() >= -1e-6 * maps.max()


@pytest.mark.parametrize("method", OWN)
def test_the_class_the_seed_and_the_options_matter_as_the_registry_says(method):
    model = ours()
    batch = images((32, 48))
    entry = ATTRIBUTIONS[method]
    one = vitlens.explain(model, batch, targets=0, method=method)
    other = vitlens.explain(model, batch, targets=3, method=method)
    assert torch.equal(one, other) is not entry.needs_class
    defaults = {
        name: getattr(registry, name.upper())
        for name in entry.options
        if hasattr(registry, name.upper())
    }
    assert torch.equal(other, vitlens.explain(model, batch, targets=3, method=method, **defaults))
    if entry.random:
        one = vitlens.explain(model, batch, method=method, seed=1)
        again = vitlens.explain(model, batch, method=method, seed=1)
        other = vitlens.explain(model, batch, method=method, seed=2)
        assert torch.equal(one, again)
        assert not torch.equal(one, other)


def methods_of(model: Model, lacking: str) -> tuple[str, ...]:
    """Return the methods that a refusal names."""
    with pytest.raises(UnsupportedError) as refused:
        vitlens.explain(model, images(model.input_size), method=lacking)
    return tuple(str(refused.value).partition("it has ")[2].split(", "))


def test_a_model_has_the_methods_of_its_family_and_a_look_takes_the_first_by_preference():
    def but(*excluded: str) -> tuple[str, ...]:
        return tuple(name for name in ATTRIBUTIONS if name not in excluded)

    swin = shared_model("swin")
    cnn = small_cnn()
    assert methods_of(swin, "legrad") == methods_of(swin, "best") == but(*DEPTHS, "best")
    assert methods_of(cnn, "relevance") == methods_of(cnn, "best") == but(*ATTENTION)
    assert methods_of(linear(), "gradcam") == but(*ATTENTION, *CAMS)
    # without patches
    assert methods_of(model_of(Linear((8, 8)), size=(8, 8)), "gradcam") == but(*ATTENTION, *CAMS)
    channels = timm_model("xcit_nano_12_p16_224", embed_dim=64)
    assert methods_of(channels, "relevance") == but(*CHAINED, *DEPTHS)
    looks = {
        ours(): "best",
        shared_model("siglip"): "best",
        swin: "relevance",
        cnn: "gradcam",
        linear(): "occlusion",
    }
    for model, method in looks.items():
        assert vitlens.look(model, images(model.input_size, batch=1)).method == method


@pytest.mark.parametrize("name", ["siglip", "cait", "vit-mean", "dinov2-registers"])
def test_best_of_other_families_does_not_depend_on_the_batch(name):
    model = shared_model(name)
    batch = images(model.input_size)
    maps = vitlens.explain(model, batch, targets=TARGETS[:2], method="best")
    assert maps.flatten(1).std(1).min() > 0
    alone = vitlens.explain(model, batch[1:], targets=TARGETS[1:2], method="best")[0]
    torch.testing.assert_close(alone, maps[1], atol=1e-3 * maps[1].abs().max().item(), rtol=0)


def test_a_class_before_the_first_is_refused():
    with pytest.raises(InputError):
        vitlens.explain(
            small_cnn(), images((32, 48)), method="gradcam", targets=torch.tensor([0, -1])
        )


def test_images_of_another_size_are_explained_at_theirs():
    model = ours()
    batch = images((40, 40))
    shapes = [
        vitlens.explain(model, batch, method=name).shape
        for name in ("integrated-gradients", "rise", "gradcam", "occlusion")
    ]
    assert shapes == [(2, 40, 40), (2, 40, 40), (2, 4, 3), (2, 4, 3)]


@pytest.fixture(scope="module")
def vit() -> Model:
    return ours()


def test_the_classes_and_maps_of_a_look_are_those_of_the_two_most_probable(vit):
    batch = images(vit.input_size, batch=3)
    seen = vitlens.look(vit, batch)
    top = vit(batch).softmax(-1).topk(5)
    assert torch.equal(seen.classes, top.indices)
    torch.testing.assert_close(seen.probabilities, top.values)
    names = [[vit.classes[place] for place in row] for row in top.indices.tolist()]
    assert seen.names == tuple(map(tuple, names))
    for rank in (0, 1):
        expected = vitlens.explain(vit, batch, targets=top.indices[:, rank], method="best")
        torch.testing.assert_close(seen.maps[:, rank], expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("count", "replaced"), [(1, "zero"), (3, "resample"), (8, "mean")])
def test_a_look_ablates_heads_as_ablate_does(vit, count, replaced):
    batch = images(vit.input_size, batch=count)
    seen = vitlens.look(vit, batch)
    assert (seen.replace, bool(seen.note)) == (replaced, replaced != "mean")
    expected = vitlens.ablate(vit, batch, "predicted", replace=replaced)
    for index, (layer, head) in enumerate(seen.places):
        assert seen.delta_loss[:, index].mean() == pytest.approx(
            float(expected.delta_loss[layer, head]), abs=1e-5
        )
    without = seen.probabilities[:, :1] * (-seen.delta_loss).exp()
    torch.testing.assert_close(seen.without, without, rtol=1e-4, atol=1e-6)


def test_the_heads_of_an_image_come_by_effect_and_are_those_of_an_intervention(vit):
    batch = images(vit.input_size, batch=1)
    seen = vitlens.look(vit, batch)
    effects = seen.heads(0, most=4)
    for head in effects:
        with vitlens.intervene(vit, {f"blocks.{head.layer}.head.{head.head}": "zero"}):
            share = float(vit(batch).softmax(-1)[0, seen.classes[0, 0]])
        assert head.probability == pytest.approx(share, abs=1e-5)
        assert head.given == seen.labels[head.layer][head.head] is not None
    rises = values_of(effects, "delta_loss")
    assert rises == sorted(rises, reverse=True)
    assert len(seen.heads(0)) == 3
    texts = seen.names[0][0], "too few for a mean", f"L{effects[0].layer}.H{effects[0].head}"
    for part in texts:
        assert part in repr(seen)


def test_a_head_whose_output_is_not_read_has_no_effect_and_a_cnn_has_no_heads():
    model = ours()
    projection = model.module.get_submodule("blocks.1.attn.proj")
    projection.weight.data[:, projection.in_features // 2 :] = 0.0  # the second of two heads
    seen = vitlens.look(model, images(model.input_size, batch=2))
    assert seen.delta_loss[:, seen.places.index((1, 1))].abs().max() < 1e-5
    assert seen.labels[1][1].label == "dead"
    of_cnn = vitlens.look(vitlens.load("cnn-digits"), torch.rand(2, 3, 32, 32))
    assert (of_cnn.method, of_cnn.places, of_cnn.heads(0), of_cnn.maps.shape) == (
        "gradcam",
        (),
        (),
        (2, 2, 8, 8),
    )
