"""Language-image models as models: the numbers of open_clip itself, their own settings, errors of one line."""

import sys
from collections.abc import Callable

import pytest
import torch
from safetensors.torch import save_file
from torch.nn import functional as F

from vitlens.errors import InputError, ModelError, UnknownNameError, UnsupportedError
from vitlens.models.sources import hub

open_clip = pytest.importorskip("open_clip", reason="needs the extra clip: pip install open_clip_torch")

from tests.models.tiny_clip import registered, tiny  # noqa: E402
from vitlens.analysis.attention.methods import relevance  # noqa: E402
from vitlens.analysis.features.zero_shot import prompted  # noqa: E402
from vitlens.lens.capture import capture_attention  # noqa: E402
from vitlens.models.language_image import (  # noqa: E402
    text_tower,
    with_prompts,
    zero_shot,
)
from vitlens.models.loading import load  # noqa: E402
from vitlens.models.sources.open_clip import configuration, open_clip_names, template_sets, tokenizer  # noqa: E402

ARCHS = ("tiny-clip", "tiny-sigmoid", "tiny-resnet")
PROMPTS = ["a photo of a cat.", "a photo of a dog.", "grass"]


@pytest.fixture(params=ARCHS)
def model(request):
    return tiny(request.param)


def pictures(model, count=2):
    return torch.rand(count, 3, *model.input_size, generator=torch.Generator().manual_seed(1))


def refused(kind: type[Exception], call: Callable[[], object], says: str) -> None:
    with pytest.raises(kind, match=says) as caught:
        call()
    assert "\n" not in str(caught.value)


# ---- numbers


def test_without_prompts_the_answer_is_the_librarys_embedding(model):
    module, images = text_tower(model).model, pictures(model)
    with torch.no_grad():
        expected = module.encode_image(model.prepare(images))
    torch.testing.assert_close(model(images), expected)
    assert model.classes == ()  # the axes of an embedding are no classes


def test_logits_for_texts_are_the_librarys(model):
    module, images = text_tower(model).model, pictures(model)
    with torch.no_grad():
        expected, _ = module.get_logits(model.prepare(images), text_tower(model).tokens(PROMPTS))
    found = prompted(model, PROMPTS)
    torch.testing.assert_close(found(images), expected, atol=1e-4, rtol=1e-5)
    assert found.classes == tuple(PROMPTS)


def test_an_ensemble_of_templates_is_the_librarys(model):
    templates, classes = ("a photo of a {}.", "art of the {}.", "{}"), ("cat", "hot dog")
    tower = text_tower(model)
    expected = open_clip.build_zero_shot_classifier(tower.model, tower.tokenizer(), classes, templates)
    found = zero_shot(model, classes, templates=templates).module.prompts
    torch.testing.assert_close(found, expected.T, atol=1e-5, rtol=1e-5)


def test_the_text_tower_is_beside_the_model_and_not_in_it(model):
    visual = sum(part.numel() for part in model.module.visual.parameters())
    whole = sum(part.numel() for part in text_tower(model).model.parameters())
    assert model.parameter_count() == visual < whole
    assert not any(part.requires_grad for part in text_tower(model).model.parameters())


# ---- what it is made of


@pytest.mark.parametrize(
    ("arch", "family", "prefix", "readout", "blocks"),
    [
        ("tiny-clip", "vit", ("cls",), "cls", 2),
        ("tiny-sigmoid", "vit", ("cls",), "pool", 6),
        ("tiny-resnet", "cnn", None, None, 4),
    ],
)
def test_anatomy(arch, family, prefix, readout, blocks):
    anatomy = tiny(arch).anatomy
    assert (anatomy.family, anatomy.readout, len(anatomy.blocks)) == (family, readout, blocks)
    assert (anatomy.layout.prefix if anatomy.layout else None) == prefix


@pytest.mark.parametrize("arch", ["tiny-clip", "tiny-sigmoid"])
def test_the_lens_sees_every_layer(arch):
    model = tiny(arch)
    found = capture_attention(model, pictures(model))
    pooled = arch == "tiny-sigmoid"
    assert len(found.layers) == len(model.anatomy.blocks) + pooled
    for weights in found.layers:
        torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights.sum(-1)))


@pytest.mark.parametrize("arch", ["tiny-clip", "tiny-sigmoid"])
def test_relevance_for_a_text_is_that_of_its_similarity(arch):
    """The map for a text is the same whatever other texts stand beside it, and another for another text."""
    model = tiny(arch)
    images = pictures(model)
    alone = relevance(prompted(model, PROMPTS[:1]), images, targets=torch.zeros(2, dtype=torch.long))
    among = relevance(prompted(model, PROMPTS[::-1]), images, targets=torch.full((2,), 2))
    other = relevance(prompted(model, PROMPTS), images, targets=torch.ones(2, dtype=torch.long))
    torch.testing.assert_close(alone, among, atol=1e-6, rtol=1e-3)
    assert alone.isfinite().all()
    assert float(alone.max()) > 0
    assert not torch.allclose(alone, other, rtol=1e-2)


def test_quick_gelu_is_the_weights_own():
    assert configuration("ViT-B-32", "openai")[0]["quick_gelu"] is True
    assert "QuickGELU" in configuration("ViT-B-32", "openai")[1][0]
    assert configuration("ViT-B-32", "laion2b_s34b_b79k")[0]["quick_gelu"] is False
    assert configuration("ViT-B-32", None)[0]["quick_gelu"] is False
    assert configuration("ViT-B-32-quickgelu", None)[0]["quick_gelu"] is True
    kinds = {type(part).__name__ for part in tiny("tiny-clip").modules()}
    assert "QuickGELU" in kinds
    assert "QuickGELU" not in {type(part).__name__ for part in tiny("tiny-sigmoid").modules()}


def test_preprocessing_is_the_weights_own():
    shared, notes = configuration("ViT-B-16-SigLIP", None)
    assert (shared["resize_mode"], tuple(shared["mean"]), notes) == ("squash", (0.5, 0.5, 0.5), ())
    assert configuration("ViT-B-32", "openai")[0]["mean"] == pytest.approx((0.48145466, 0.4578275, 0.40821073))
    model = tiny()
    assert model.preprocessing.mean == pytest.approx((0.48145466, 0.4578275, 0.40821073))
    assert (model.preprocessing.resize, model.preprocessing.interpolation) == (32, "bicubic")
    assert "preprocessing by open_clip's default" in model.provenance.notes[0]


# ---- names, files, what is missing


def test_weights_of_a_file_through_the_door_to_all_models(tmp_path):
    model, images = tiny(seed=5), torch.rand(2, 3, 32, 32)
    file = tmp_path / "clip.safetensors"
    save_file({key: value.contiguous() for key, value in text_tower(model).model.state_dict().items()}, file)
    found = load(f"mine=open-clip:tiny-clip@{file}")
    torch.testing.assert_close(found(images), model(images))
    assert (found.alias, found.provenance.weights) == ("mine", "clip.safetensors")
    torch.save(text_tower(model).model.state_dict(), tmp_path / "clip.pt")
    again = load("open-clip:tiny-clip", weights=tmp_path / "clip.pt", classes=("cat", "dog"))
    assert again.classes == ("cat", "dog")
    torch.testing.assert_close(again(images), zero_shot(model, ("cat", "dog"))(images))
    refused(ModelError, lambda: load(f"open-clip:tiny-resnet@{file}"), "do not fit open-clip:tiny-resnet")
    refused(ModelError, lambda: load("open-clip:tiny-clip@no.pt"), "found nothing at no.pt")
    (tmp_path / "bad.pt").write_bytes(b"no weights")
    refused(ModelError, lambda: load(f"open-clip:tiny-clip@{tmp_path / 'bad.pt'}"), "do not fit")


def test_random_weights_are_those_of_the_seed():
    registered()
    one, two, three = (load("open-clip:tiny-clip@random", seed=seed) for seed in (1, 1, 2))
    images = torch.rand(1, 3, 32, 32)
    assert torch.equal(one(images), two(images))
    assert not torch.equal(one(images), three(images))
    assert one.provenance.weights == "random"


def test_names_that_are_not_there():
    refused(UnknownNameError, lambda: load("open-clip:ViT-B-33/openai"), "did you mean .*'ViT-B-32'")
    refused(UnknownNameError, lambda: load("open-clip:ViT-B-32/opnai"), "did you mean 'openai'")
    refused(ModelError, lambda: load("open-clip:ViT-B-32"), r"write open-clip:ViT-B-32/TAG \(tags: .*openai")
    assert "ViT-B-32/openai" in open_clip_names()


def test_without_open_clip_it_is_said_what_to_type(monkeypatch):
    monkeypatch.setitem(sys.modules, "open_clip", None)
    refused(ModelError, lambda: load("open-clip:ViT-B-32/openai"), r"pip install 'vitlens\[clip\]'")
    assert open_clip_names() == []


def test_without_a_network_it_is_one_line(monkeypatch, tmp_path):
    monkeypatch.setattr(hub, "_answers", lambda _address: False)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    refused(ModelError, lambda: load("open-clip:ViT-S-32/nowhere"), "no weights of|did you mean|known")
    refused(ModelError, lambda: tokenizer("ViT-B-16-SigLIP"), "the tokenizer of open-clip:ViT-B-16-SigLIP")


# ---- texts


def test_texts_that_cannot_be_read_are_refused():
    model = tiny()
    refused(InputError, lambda: prompted(model, ["", "dog"]), "found an empty one")
    refused(InputError, lambda: prompted(model, ["dog " * 40]), "at most 24 tokens for open-clip:tiny-clip")
    refused(InputError, lambda: prompted(model, ["dog", "dog"]), "each once")
    refused(InputError, lambda: zero_shot(model, ["dog"], templates=["a photo"]), r"expected \{\} in a template")
    refused(InputError, lambda: with_prompts(model, ["a"], torch.zeros(2, 16)), "expected 2 names")


def test_a_model_without_a_text_tower_is_refused_with_those_that_have_one():
    vit = load("vit-digits")
    refused(UnsupportedError, lambda: zero_shot(vit, ["a"]), "vit-digits.*open-clip:ViT-B-32/openai")


def test_embeddings_have_length_one():
    found = text_tower(tiny()).embed(PROMPTS)
    torch.testing.assert_close(found, F.normalize(found, dim=-1))


def test_the_sets_of_templates():
    sets = template_sets()
    assert (len(sets["simple"]), len(sets["openai"])) == (7, 80)
    assert all(template.count("{}") == 1 for found in sets.values() for template in found)
    assert "a photo of a {}." in sets["openai"]


def test_names_of_an_unknown_hub_model_are_unknown():
    refused(UnknownNameError, lambda: load("open-clip:nothing@random"), "open_clip")
