"""CLIP and SigLIP with their text towers: zero-shot logits are transformers' own logits_per_image."""

import json

import pytest
import torch

import vitlens
from tests.models.sources.huggingface.tiny import save_family
from vitlens.analysis.features.zero_shot import prompted
from vitlens.attribution.explain import preferred_method
from vitlens.errors import InputError, ModelError, UnsupportedError
from vitlens.models.language_image import has_text_tower, text_tower, zero_shot

transformers = pytest.importorskip("transformers", minversion="5", reason="the extra hf is not installed")

TEXTS = ["a cat", "a dog", "an owl"]
LETTERS = "abcdefghijklmnopqrstuvwxyz"
LETTER_IDS = {letter: index for index, letter in enumerate(LETTERS)}


def save_tokenizer(folder):
    """A tokenizer of letters with a start and an end, as CLIP's: the end has the largest id."""
    words = LETTER_IDS | {f"{letter}</w>": 26 + index for letter, index in LETTER_IDS.items()}
    words |= {"<|startoftext|>": 52, "<|endoftext|>": 53}
    (folder / "vocab.json").write_text(json.dumps(words))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    tokenizer = transformers.CLIPTokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"))
    tokenizer.save_pretrained(folder)
    return tokenizer


@pytest.fixture(scope="module", params=["clip", "siglip"])
def whole(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts") / request.param
    own = save_family(request.param, folder)
    return folder, own, save_tokenizer(folder)


def pixels():
    return torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def test_zero_shot_logits_are_transformers_own(whole):
    folder, own, tokenizer = whole
    model = vitlens.load(f"hf:{folder}")
    assert has_text_tower(model)
    assert not model.classes
    ids = tokenizer(TEXTS, padding="max_length", max_length=16, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        inputs = model.prepare(pixels())
        torch.testing.assert_close(model(pixels()), own.get_image_features(pixel_values=inputs).pooler_output)
        expected = own(input_ids=ids, pixel_values=inputs).logits_per_image
        logits = prompted(model, TEXTS)(pixels())
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_a_zero_shot_is_observed_and_explained(whole):
    model = zero_shot(vitlens.load(f"hf:{whole[0]}"), ("cat", "dog"), templates=("a {}",))
    assert model.classes == ("cat", "dog")
    assert model.layout.grid == (4, 4)
    assert vitlens.rollout(model, pixels()).shape == (2, 4, 4)
    assert preferred_method(model) == "legrad"
    assert vitlens.explain(model, pixels(), method="legrad").flatten(1).std(1).min() > 0


def test_texts_that_are_too_long_and_models_that_cannot_be_trained(whole):
    model = vitlens.load(f"hf:{whole[0]}")
    with pytest.raises(InputError, match="at most 16 tokens"):
        text_tower(model).embed(["a b c d e f g h i j k l m n o p q r s t"])
    assert text_tower(model).embed(["a b c d e f g h i j k l m n"]).shape[0] == 1  # 14, a start and an end
    assert "image tower" in str(model.supports("train"))


def test_without_a_tokenizer_the_tower_of_images_is_a_model_of_features(whole, tmp_path):
    save_family("clip", tmp_path)
    model = vitlens.load(f"hf:{tmp_path}")
    with pytest.raises(UnsupportedError, match="embeds no texts"):
        text_tower(model)
    (tmp_path / "tokenizer.json").write_text("{}")
    broken = vitlens.load(f"hf:{tmp_path}")
    with pytest.raises(ModelError, match="tokenizer's files") as caught:
        text_tower(broken).embed(["a"])
    assert "\n" not in str(caught.value)
    with (tmp_path / "tokenizer.json").open("wb") as file:
        file.truncate(2**30)  # a gigabyte of nothing
    with pytest.raises(ModelError, match="files of a tokenizer of at most"):
        text_tower(vitlens.load(f"hf:{tmp_path}")).embed(["a"])
