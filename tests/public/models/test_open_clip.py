"""Language-image models as models: the numbers of open_clip, its settings, errors of one line."""

import sys

import pytest
import torch
from safetensors.torch import save_file

import vitlens
from tests.kit.models.files import one_line
from vitlens.errors import InputError, ModelError, UnknownNameError, UnsupportedError
from vitlens.models.sources.registry import SOURCES

open_clip = pytest.importorskip(
    "open_clip", reason="needs the extra clip: pip install open_clip_torch"
)

from tests.kit.models.clip import registered, tiny  # noqa: E402
from tests.kit.tiny import images as noise  # noqa: E402

ARCHS = {  # family, prefix, readout, numbers of blocks and of layers with attention
    "tiny-clip": ("vit", ("cls",), "cls", 2, 2),
    "tiny-sigmoid": ("vit", ("cls",), "pool", 6, 7),
    "tiny-resnet": ("cnn", None, None, 4, 0),
}
PROMPTS = ["a photo of a cat.", "a photo of a dog.", "grass"]


def prompted(model, *texts):
    """Return a classifier with these prompts."""
    return vitlens.zero_shot(model, texts, templates=["{}"])


def pictures(model, count=2):
    return noise(model.input_size, batch=count, seed=1)


@pytest.mark.parametrize("arch", ARCHS)
def test_embeddings_logits_and_ensembles_are_the_librarys(arch):
    model = tiny(arch)
    anatomy, (family, prefix, readout, blocks, layers) = model.anatomy, ARCHS[arch]
    assert (anatomy.family, anatomy.readout, len(anatomy.blocks)) == (family, readout, blocks)
    assert (anatomy.layout.prefix if anatomy.layout else None) == prefix
    assert len(vitlens.attention(model, pictures(model)) if prefix else ()) == layers
    library = model.module.text.model
    tokenizer = open_clip.get_tokenizer(arch)
    images = pictures(model)
    with torch.no_grad():
        embedded = library.encode_image(model.prepare(images))
        logits, _ = library.get_logits(model.prepare(images), tokenizer(PROMPTS))
    torch.testing.assert_close(model(images), embedded)
    assert model.classes == ()  # the axes of an embedding are no classes
    loaded = prompted(model, *PROMPTS)
    torch.testing.assert_close(loaded(images), logits, atol=1e-4, rtol=1e-5)
    assert loaded.classes == tuple(PROMPTS)
    templates = ("a photo of a {}.", "art of the {}.", "{}")
    classes = ("cat", "hot dog")
    expected = open_clip.build_zero_shot_classifier(library, tokenizer, classes, templates)
    prompts = vitlens.zero_shot(model, ("cat", "hot_dog"), templates=templates).module.prompts
    torch.testing.assert_close(prompts, expected.T, atol=1e-5, rtol=1e-5)
    visual = sum(part.numel() for part in model.module.visual.parameters())
    assert loaded.parameter_count() == visual < sum(part.numel() for part in library.parameters())
    for part in library.parameters():
        assert not part.requires_grad


def test_relevance_for_a_text_is_that_of_its_similarity():
    """The map for a text is the same whatever other texts stand next to it, and another for another
    text.
    """
    model = tiny("tiny-sigmoid")
    images = pictures(model)
    alone = vitlens.relevance(prompted(model, *PROMPTS[:1]), images, targets=torch.full((2,), 0))
    among = vitlens.relevance(prompted(model, *PROMPTS[::-1]), images, targets=torch.full((2,), 2))
    other = vitlens.relevance(prompted(model, *PROMPTS), images, targets=torch.full((2,), 1))
    torch.testing.assert_close(alone, among, atol=1e-6, rtol=1e-3)
    assert float(alone.max()) > 0
    assert not torch.allclose(alone, other, rtol=1e-2)


@pytest.mark.parametrize(
    ("name", "quick", "note"),
    [
        ("ViT-B-32/openai", True, "QuickGELU"),
        ("ViT-B-32/laion2b_s34b_b79k", False, ""),
        ("ViT-B-32", False, ""),
        ("ViT-B-32-quickgelu", True, ""),
        ("ViT-B-16-SigLIP", False, ""),
    ],
)
def test_settings_are_the_weights_own(name, quick, note):
    with torch.device("meta"):
        model = vitlens.load(f"open-clip:{name}@random", device="meta")
    assert ("QuickGELU" in {type(part).__name__ for part in model.modules()}) == quick
    assert bool(model.provenance.notes) == bool(note)
    assert note in "".join(model.provenance.notes)
    preprocessing = model.preprocessing
    if "SigLIP" in name:
        assert (preprocessing.resize, preprocessing.mean) == (None, (0.5, 0.5, 0.5))
    else:
        assert (preprocessing.resize, preprocessing.interpolation) == (224, "bicubic")
        assert preprocessing.mean == pytest.approx((0.48145466, 0.4578275, 0.40821073))


def test_weights_of_a_file(tmp_path):
    model = tiny(seed=5)
    images = torch.rand(2, 3, 32, 32)
    weights = model.module.text.model.state_dict()
    save_file(
        {key: value.contiguous() for key, value in weights.items()}, tmp_path / "clip.safetensors"
    )
    loaded = vitlens.load(f"mine=open-clip:tiny-clip@{tmp_path / 'clip.safetensors'}")
    assert torch.equal(tiny(seed=5)(images), model(images))
    assert not torch.equal(tiny()(images), model(images))
    torch.testing.assert_close(loaded(images), model(images))
    assert (loaded.alias, loaded.provenance.weights) == ("mine", "clip.safetensors")
    torch.save(weights, tmp_path / "clip.pt")
    again = vitlens.load(
        "open-clip:tiny-clip", weights=tmp_path / "clip.pt", classes=("cat", "dog")
    )
    assert again.classes == ("cat", "dog")
    torch.testing.assert_close(again(images), vitlens.zero_shot(model, ("cat", "dog"))(images))
    torch.save(weights | {"logit_scale": torch.tensor(float("nan"))}, tmp_path / "nan.pt")
    (tmp_path / "bad.pt").write_bytes(b"no weights")
    for arch, file, words in (
        ("tiny-resnet", "clip.pt", "do not fit"),
        ("tiny-clip", "no.pt", "no.pt"),
        ("tiny-clip", "bad.pt", "bad.pt"),
        ("tiny-clip", "nan.pt", "NaN in 'logit_scale'"),
    ):
        with one_line(ModelError, words):
            vitlens.load(f"open-clip:{arch}@{tmp_path / file}")


REFUSED = {
    "an unknown architecture": (
        UnknownNameError,
        lambda: vitlens.load("open-clip:ViT-B-33/openai"),
        "'ViT-B-32'",
    ),
    "unknown weights": (
        UnknownNameError,
        lambda: vitlens.load("open-clip:ViT-B-32/opnai"),
        "'openai'",
    ),
    "no weights": (
        ModelError,
        lambda: vitlens.load("open-clip:ViT-B-32"),
        "write open-clip:ViT-B-32/TAG",
    ),
    "nothing like it": (
        UnknownNameError,
        lambda: vitlens.load("open-clip:nothing@random"),
        "open_clip",
    ),
    "no weights known": (
        ModelError,
        lambda: vitlens.load("open-clip:tiny-clip/tag"),
        "weights='FILE'",
    ),
    "a patch of no image": (
        ModelError,
        lambda: vitlens.load("open-clip:tiny-clip@random", image_size=4),
        "check image_size=",
    ),
    "settings": (
        InputError,
        lambda: vitlens.load("open-clip:tiny-clip@random", mean=(0.5,) * 3),
        "mean=",
    ),
    "an empty text": (InputError, lambda: prompted(tiny(), " ", "dog"), "found an empty one"),
    "a long text": (InputError, lambda: prompted(tiny(), "dog " * 40), "24 tokens"),
    "a text twice": (InputError, lambda: prompted(tiny(), "dog", "dog"), "each once"),
    "no place": (
        InputError,
        lambda: vitlens.zero_shot(tiny(), ["dog"], templates=["a photo"]),
        r"\{\}",
    ),
    "no classes": (InputError, lambda: vitlens.zero_shot(tiny(), []), "found 1 and 0"),
    "no templates": (
        InputError,
        lambda: vitlens.zero_shot(tiny(), ["dog"], templates=()),
        "found 0 and 1",
    ),
    "no tower": (
        UnsupportedError,
        lambda: vitlens.zero_shot(vitlens.load("vit-digits"), ["a"]),
        "open-clip:ViT-B-32",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    registered()
    kind, call, words = REFUSED[case]
    with one_line(kind, words):
        call()
    # with a start and an end just 24
    assert case != "a long text" or prompted(tiny(), "dog " * 22).classes


def test_without_open_clip_it_is_said_what_to_type(monkeypatch):
    assert "open-clip:ViT-B-32/openai" in SOURCES["open-clip"].all_names()
    monkeypatch.setitem(sys.modules, "open_clip", None)
    with pytest.raises(ModelError, match=r"pip install 'vitlens\[clip\]'"):
        vitlens.load("open-clip:ViT-B-32/openai")
    assert SOURCES["open-clip"].all_names() == []
