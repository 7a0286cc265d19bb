"""Language-image models as models: the numbers of open_clip itself, their own settings, errors of one line."""

import sys

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
from vitlens.models.language_image import text_tower, with_prompts, zero_shot  # noqa: E402
from vitlens.models.loading import load  # noqa: E402
from vitlens.models.sources.open_clip import configuration, open_clip_names, template_sets, tokenizer  # noqa: E402

ARCHS = {  # family, prefix, readout, number of blocks
    "tiny-clip": ("vit", ("cls",), "cls", 2),
    "tiny-sigmoid": ("vit", ("cls",), "pool", 6),
    "tiny-resnet": ("cnn", None, None, 4),
}
PROMPTS = ["a photo of a cat.", "a photo of a dog.", "grass"]


@pytest.fixture(params=ARCHS)
def model(request):
    return tiny(request.param)


def pictures(model, count=2):
    return torch.rand(count, 3, *model.input_size, generator=torch.Generator().manual_seed(1))


def test_embeddings_and_logits_are_the_librarys(model):
    tower, images = text_tower(model), pictures(model)
    with torch.no_grad():
        embedded = tower.model.encode_image(model.prepare(images))
        logits, _ = tower.model.get_logits(model.prepare(images), tower.tokens(PROMPTS))
    torch.testing.assert_close(model(images), embedded)
    assert model.classes == ()  # the axes of an embedding are no classes
    found = prompted(model, PROMPTS)
    torch.testing.assert_close(found(images), logits, atol=1e-4, rtol=1e-5)
    assert found.classes == tuple(PROMPTS)
    texts = tower.embed(PROMPTS)
    torch.testing.assert_close(texts, F.normalize(texts, dim=-1))


def test_an_ensemble_of_templates_is_the_librarys(model):
    templates, classes = ("a photo of a {}.", "art of the {}.", "{}"), ("cat", "hot dog")
    tower = text_tower(model)
    expected = open_clip.build_zero_shot_classifier(tower.model, tower.tokenizer(), classes, templates)
    found = zero_shot(model, classes, templates=templates).module.prompts
    torch.testing.assert_close(found, expected.T, atol=1e-5, rtol=1e-5)


def test_the_text_tower_is_beside_the_model_and_not_in_it(model):
    visual = sum(part.numel() for part in model.module.visual.parameters())
    whole = text_tower(model).model
    assert model.parameter_count() == visual < sum(part.numel() for part in whole.parameters())
    assert not any(part.requires_grad for part in whole.parameters())


@pytest.mark.parametrize("arch", ARCHS)
def test_anatomy_and_attention(arch):
    model = tiny(arch)
    anatomy, (family, prefix, readout, blocks) = model.anatomy, ARCHS[arch]
    assert (anatomy.family, anatomy.readout, len(anatomy.blocks)) == (family, readout, blocks)
    assert (anatomy.layout.prefix if anatomy.layout else None) == prefix
    if family == "vit":
        found = capture_attention(model, pictures(model))
        assert len(found.layers) == blocks + (readout == "pool")


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


@pytest.mark.parametrize(
    ("arch", "tag", "quick", "note"),
    [
        ("ViT-B-32", "openai", True, "QuickGELU, as the weights 'openai'"),
        ("ViT-B-32", "laion2b_s34b_b79k", False, ""),
        ("ViT-B-32", None, False, ""),
        ("ViT-B-32-quickgelu", None, True, ""),
        ("ViT-B-16-SigLIP", None, False, ""),
    ],
)
def test_settings_are_the_weights_own(arch, tag, quick, note):
    found, notes = configuration(arch, tag)
    assert found["quick_gelu"] is quick
    assert len(notes) == bool(note)
    assert note in "".join(notes)
    if arch == "ViT-B-16-SigLIP":
        assert (found["resize_mode"], tuple(found["mean"])) == ("squash", (0.5, 0.5, 0.5))
    if tag == "openai":
        assert found["mean"] == pytest.approx((0.48145466, 0.4578275, 0.40821073))


def test_a_model_has_these_settings():
    model = tiny()
    assert model.preprocessing.mean == pytest.approx((0.48145466, 0.4578275, 0.40821073))
    assert (model.preprocessing.resize, model.preprocessing.interpolation) == (32, "bicubic")
    assert "preprocessing by open_clip's default" in model.provenance.notes[0]
    assert "QuickGELU" in {type(part).__name__ for part in model.modules()}
    assert "QuickGELU" not in {type(part).__name__ for part in tiny("tiny-sigmoid").modules()}


def test_weights_of_a_file(tmp_path):
    model, images = tiny(seed=5), torch.rand(2, 3, 32, 32)
    state = text_tower(model).model.state_dict()
    save_file({key: value.contiguous() for key, value in state.items()}, tmp_path / "clip.safetensors")
    found = load(f"mine=open-clip:tiny-clip@{tmp_path / 'clip.safetensors'}")
    torch.testing.assert_close(found(images), model(images))
    assert (found.alias, found.provenance.weights) == ("mine", "clip.safetensors")
    torch.save(state, tmp_path / "clip.pt")
    again = load("open-clip:tiny-clip", weights=tmp_path / "clip.pt", classes=("cat", "dog"))
    assert again.classes == ("cat", "dog")
    torch.testing.assert_close(again(images), zero_shot(model, ("cat", "dog"))(images))
    torch.save(state | {"logit_scale": torch.tensor(float("nan"))}, tmp_path / "nan.pt")
    (tmp_path / "bad.pt").write_bytes(b"no weights")
    for name, says in {
        f"open-clip:tiny-resnet@{tmp_path / 'clip.pt'}": "do not fit open-clip:tiny-resnet",
        "open-clip:tiny-clip@no.pt": "found nothing at no.pt",
        f"open-clip:tiny-clip@{tmp_path / 'bad.pt'}": "do not fit",
        f"open-clip:tiny-clip@{tmp_path / 'nan.pt'}": "found NaN in 'logit_scale'",
    }.items():
        with pytest.raises(ModelError, match=says) as caught:
            load(name)
        assert "\n" not in str(caught.value)


def test_random_weights_are_those_of_the_seed():
    registered()
    one, two, three = (load("open-clip:tiny-clip@random", seed=seed) for seed in (1, 1, 2))
    images = torch.rand(1, 3, 32, 32)
    assert torch.equal(one(images), two(images))
    assert not torch.equal(one(images), three(images))
    assert one.provenance.weights == "random"


REFUSED = {
    "an unknown architecture": (UnknownNameError, lambda: load("open-clip:ViT-B-33/openai"), "mean .*'ViT-B-32'"),
    "unknown weights": (UnknownNameError, lambda: load("open-clip:ViT-B-32/opnai"), "did you mean 'openai'"),
    "no weights": (ModelError, lambda: load("open-clip:ViT-B-32"), r"write open-clip:ViT-B-32/TAG \(tags: .*openai"),
    "nothing like it": (UnknownNameError, lambda: load("open-clip:nothing@random"), "open_clip"),
    "no weights known": (ModelError, lambda: load("open-clip:tiny-clip/tag"), "expected known weights of"),
    "an empty text": (InputError, lambda: prompted(tiny(), ["", "dog"]), "found an empty one"),
    "a long text": (InputError, lambda: prompted(tiny(), ["dog " * 40]), "at most 24 tokens for open-clip:tiny-clip"),
    "a text twice": (InputError, lambda: prompted(tiny(), ["dog", "dog"]), "each once"),
    "no place": (InputError, lambda: zero_shot(tiny(), ["dog"], templates=["a photo"]), r"expected \{\} in a template"),
    "no classes": (InputError, lambda: zero_shot(tiny(), []), "expected templates and classes, found 1 and 0"),
    "names": (InputError, lambda: with_prompts(tiny(), ["a"], torch.zeros(2, 16)), "expected 2 names"),
    "no tower": (UnsupportedError, lambda: zero_shot(load("vit-digits"), ["a"]), "vit-digits.*open-clip:ViT-B-32/open"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    kind, call, says = REFUSED[case]
    with pytest.raises(kind, match=says) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_without_open_clip_it_is_said_what_to_type(monkeypatch):
    assert "ViT-B-32/openai" in open_clip_names()
    monkeypatch.setitem(sys.modules, "open_clip", None)
    with pytest.raises(ModelError, match=r"pip install 'vitlens\[clip\]'"):
        load("open-clip:ViT-B-32/openai")
    assert open_clip_names() == []


def test_without_a_network_it_is_one_line(monkeypatch, tmp_path):
    monkeypatch.setattr(hub, "_answers", lambda _address: False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelError, match="the tokenizer of open-clip:ViT-B-16-SigLIP") as caught:
        tokenizer("ViT-B-16-SigLIP")
    assert "\n" not in str(caught.value)


def test_the_sets_of_templates():
    sets = template_sets()
    assert (len(sets["simple"]), len(sets["openai"])) == (7, 80)
    assert all(template.count("{}") == 1 for found in sets.values() for template in found)
    assert "a photo of a {}." in sets["openai"]
