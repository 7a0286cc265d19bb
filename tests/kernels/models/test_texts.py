"""Texts of language-image models: phrases in templates, and texts that are too long."""

import pytest
import torch

from vitlens.errors import InputError
from vitlens.models.language_image import with_phrase

pytest.importorskip("open_clip", reason="needs the extra clip: pip install open_clip_torch")

from tests.kit.models.clip import tiny
from vitlens.models.sources.open_clip import DownloadedTokenizer


@pytest.mark.parametrize(
    ("template", "phrase", "text"),
    [
        ("a photo of a {}.", "dog", "a photo of a dog."),
        ("a photo of a {}.", "a dog", "a photo of a dog."),
        ("a photo of a {}.", "The dog on An isle", "a photo of The dog on An isle."),
        ("a photo of a {}.", "another dog", "a photo of a another dog."),
        ("A {}", "an owl", "an owl"),
        ("{}", "a dog", "a dog"),
        ("no{}", "a dog", "noa dog"),
        ("the {}, not a {}", "a dog", "a dog, not a a dog"),
    ],
)
def test_the_article_of_a_phrase_replaces_that_of_a_template(template, phrase, text):
    assert with_phrase(template, phrase) == text


def test_a_tokenizer_of_transformers_counts_tokens_where_it_would_truncate():
    class Truncating:
        def __call__(self, texts):
            return torch.zeros(len(texts), 24, dtype=torch.long)

        def tokenizer(self, text):
            return {"input_ids": [0, *text.split(), 0]}

    tower = tiny().module.text
    tower.tokenizer = lambda: DownloadedTokenizer(Truncating())
    assert tower.tokens(["dog " * 22]).shape == (1, 24)
    with pytest.raises(InputError, match=r"at most 24 tokens for .*, found 25"):
        tower.tokens(["dog " * 23])
