"""What every attribution keeps to, from the registry; attention methods are tests/public/attention's."""

from collections.abc import Callable

import pytest
import torch

import vitlens
from tests.kit.explainable import MODELS, Linear, linear
from tests.kit.tiny import images, model_of, ours, shared_model, small_cnn, timm_model
from vitlens import Model
from vitlens.analysis.attention.registry import ATTENTION_METHODS
from vitlens.attribution import registry
from vitlens.attribution.registry import ATTRIBUTIONS, default_methods
from vitlens.errors import InputError, UnsupportedError

CHAINED, DEPTHS, CAMS = (
    tuple(name for name, method in ATTRIBUTIONS.items() if method.needs == need) for need in ("chain", "depths", "cam")
)
ATTENTION = tuple(name for name, method in ATTRIBUTIONS.items() if "cnn" not in method.families)
OWN = tuple(name for name in ATTRIBUTIONS if name not in ATTENTION_METHODS)
TARGETS = torch.tensor([3, 0, 4])


def test_the_methods_that_are_run_by_default_studied_slow_or_of_no_class():
    def those(chosen: Callable[[registry.Attribution], bool]) -> str:
        return " ".join(name for name, each in ATTRIBUTIONS.items() if chosen(each))

    assert " ".join(default_methods()) == "relevance rollout best gradcam integrated-gradients occlusion"
    assert those(lambda each: each.studied) == "relevance rollout best gradcam occlusion"
    assert those(lambda each: not each.needs_class) == "rollout attention eigencam"
    assert those(lambda each: each.slow) == "scorecam ablationcam occlusion rise kernel-shap"


@pytest.mark.parametrize(
    ("method", "name"),
    [(each, name) for each in OWN for name in ("vit", "cnn") if name == "vit" or each not in ATTENTION],
)
def test_maps_are_of_their_shape_and_sign(method, name):
    model, entry = MODELS[name](), ATTRIBUTIONS[method]
    maps = vitlens.explain(model, images(model.input_size, batch=3), targets=TARGETS, method=method)
    of_patches = (4, 3) if name == "vit" else (4, 6) if method in CAMS else (8, 8)
    grid = model.input_size if entry.resolution == "pixel" else of_patches
    assert (maps.dtype, maps.shape, maps.requires_grad) == (torch.float32, (3, *grid), False)
    assert maps.flatten(1).std(1).min() > 0
    assert entry.signed or maps.min() >= -1e-6 * maps.max()


@pytest.mark.parametrize("method", OWN)
def test_the_class_the_seed_and_the_options_matter_as_the_registry_says(method):
    model, batch, entry = ours(), images((32, 48)), ATTRIBUTIONS[method]
    one, other = (vitlens.explain(model, batch, targets=target, method=method) for target in (0, 3))
    assert torch.equal(one, other) is not entry.needs_class
    defaults = {name: getattr(registry, name.upper()) for name in entry.options if hasattr(registry, name.upper())}
    assert torch.equal(other, vitlens.explain(model, batch, targets=3, method=method, **defaults))
    if entry.random:
        one, again, other = (vitlens.explain(model, batch, method=method, seed=seed) for seed in (1, 1, 2))
        assert torch.equal(one, again)
        assert not torch.equal(one, other)


def methods_of(model: Model, lacking: str) -> tuple[str, ...]:
    """The methods that a refusal names."""
    with pytest.raises(UnsupportedError) as refused:
        vitlens.explain(model, images(model.input_size), method=lacking)
    return tuple(str(refused.value).partition("it has ")[2].split(", "))


def test_a_model_has_the_methods_of_its_family_and_a_look_takes_the_first_by_preference():
    def but(*others: str) -> tuple[str, ...]:
        return tuple(name for name in ATTRIBUTIONS if name not in others)

    swin, cnn = shared_model("swin"), small_cnn()
    assert methods_of(swin, "legrad") == methods_of(swin, "best") == but(*DEPTHS, "best")
    assert methods_of(cnn, "relevance") == methods_of(cnn, "best") == but(*ATTENTION)
    assert methods_of(linear(), "gradcam") == but(*ATTENTION, *CAMS)
    assert methods_of(model_of(Linear((8, 8)), size=(8, 8)), "gradcam") == but(*ATTENTION, *CAMS)  # without patches
    channels = timm_model("xcit_nano_12_p16_224", embed_dim=64)
    assert methods_of(channels, "relevance") == but(*CHAINED, *DEPTHS)
    looks = {ours(): "best", shared_model("siglip"): "best", swin: "relevance", cnn: "gradcam", linear(): "occlusion"}
    for model, method in looks.items():
        assert vitlens.look(model, images(model.input_size, batch=1)).method == method


@pytest.mark.parametrize("name", ["siglip", "cait", "vit-mean"])
def test_best_of_other_families_does_not_depend_on_the_batch(name):
    model = shared_model(name)
    batch = images(model.input_size)
    maps = vitlens.explain(model, batch, targets=TARGETS[:2], method="best")
    assert maps.flatten(1).std(1).min() > 0
    alone = vitlens.explain(model, batch[1:], targets=TARGETS[1:2], method="best")[0]
    torch.testing.assert_close(alone, maps[1], atol=1e-3 * maps[1].abs().max().item(), rtol=0)


def test_a_class_before_the_first_is_refused():
    with pytest.raises(InputError):
        vitlens.explain(small_cnn(), images((32, 48)), method="gradcam", targets=torch.tensor([0, -1]))


def test_images_of_another_size_are_explained_at_theirs():
    model, batch = ours(), images((40, 40))
    shapes = [
        vitlens.explain(model, batch, method=name).shape
        for name in ("integrated-gradients", "rise", "gradcam", "occlusion")
    ]
    assert shapes == [(2, 40, 40), (2, 40, 40), (2, 4, 3), (2, 4, 3)]
