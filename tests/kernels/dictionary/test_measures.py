"""Measures and baselines of dictionaries on sets of tokens."""

from collections.abc import Iterator
from typing import Any, ClassVar

import torch

from vitlens.analysis.dictionary.autoencoder import SparseAutoencoder, Sparsity
from vitlens.analysis.dictionary.baselines import fit_baseline
from vitlens.analysis.dictionary.measures import activity
from vitlens.analysis.dictionary.tokens import TokenSet

PLACE = "blocks.0.residual"


class CountedTokens(TokenSet):
    """Tokens that record how many of them are read at a time."""

    counts: ClassVar[list[int]] = []

    def parts(self, images: int) -> Iterator[Any]:
        for rows, values, is_high in super().parts(images):
            self.counts.append(is_high.numel())
            yield rows, values, is_high


def test_the_tokens_of_many_images_are_read_in_parts():
    is_high = torch.zeros(5000, 16, dtype=torch.bool)
    autoencoder = SparseAutoencoder(8, 16, Sparsity(4))
    activity(autoencoder, CountedTokens(PLACE, torch.randn(5000, 16, 8), is_high, 1))
    assert max(CountedTokens.counts) <= 8192


def test_principal_components_of_few_tokens_are_fewer():
    autoencoder = SparseAutoencoder(32, 64, Sparsity(30))
    tokens = TokenSet(PLACE, torch.randn(1, 10, 32), torch.zeros(1, 10, dtype=torch.bool), 0)
    components = fit_baseline("PCA", tokens, tokens.kept, autoencoder, seed=0)
    assert (components.count, components.sparsity.k) == (20, 10)
    restored = components.decode(components.encode(tokens.values))
    torch.testing.assert_close(restored, tokens.values, atol=1e-4, rtol=1e-4)
