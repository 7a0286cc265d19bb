"""Baselines of a dictionary: principal components, neurons and k-means, with as many latents each.

Principal components and neurons are autoencoders with fixed orthogonal directions and their
opposites: the k largest positive parts are the k components of a token with the largest magnitude.
"""

from typing import Final, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from vitlens.analysis.dictionary.autoencoder import Codes, SparseAutoencoder, Sparsity, Tokens
from vitlens.analysis.dictionary.tokens import TokenSet

Baseline = Literal["PCA", "neurons", "k-means"]
BASELINES: Final[tuple[Baseline, ...]] = ("PCA", "neurons", "k-means")
_ROUNDS: Final = 10  # most rounds of k-means
_MOST_TOKENS: Final = 20_000  # most tokens from which directions are fitted
_AT_ONCE: Final = 8192  # tokens of which distances to all centres are in memory


def fit_baseline(
    name: Baseline, tokens: TokenSet, kept: Tensor, like: SparseAutoencoder, *, seed: int
) -> SparseAutoencoder:
    """Return a baseline for tokens, with the normalisation, k and size of an autoencoder.

    PCA and neurons have two latents for each component, whatever that size. K-means has k = 1.

    kept: the indices of the tokens that directions may be fitted from.
    like: the autoencoder.
    seed: the seed of the choice of tokens and of the first centres.
    """
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(kept), generator=generator)[:_MOST_TOKENS]
    normalised = like.normalised(tokens.pick(kept[order]).to(like.mean)).cpu()
    dim = like.dim
    if name == "k-means":
        centres = k_means(normalised, min(like.count, len(normalised)), generator)
        baseline: SparseAutoencoder = NearestCentre(centres)
    else:
        axes = torch.eye(dim)
        if name == "PCA":
            axes = torch.linalg.svd(normalised.double(), full_matrices=False).Vh.float()
        directions = torch.cat((axes, -axes))
        # At most one of two opposite directions is positive. Few tokens have few axes.
        k = min(like.sparsity.k, len(axes))
        baseline = SparseAutoencoder(dim, len(directions), Sparsity(k))
        with torch.no_grad():
            baseline.decoder.copy_(directions)
            baseline.encoder.copy_(directions)
    baseline.mean.copy_(like.mean)
    baseline.scale.copy_(like.scale)
    return baseline.to(like.mean.device).eval().requires_grad_(False)


class NearestCentre(SparseAutoencoder):
    """k-means as a dictionary: a token has one latent, that of its nearest centre.

    The value of the latent is the length of the centre, so the token is reconstructed as the
    centre.

    centres (count, dim): the centres of normalised tokens.
    """

    def __init__(self, centres: Float[Tensor, "count dim"]) -> None:
        super().__init__(centres.shape[1], len(centres), Sparsity(1))
        lengths = centres.norm(dim=1).clamp_min(torch.finfo(centres.dtype).tiny)
        with torch.no_grad():
            self.decoder.copy_(centres / lengths[:, None])
            # the nearest centre c of a token x has the largest x·c - |c|² / 2
            self.encoder.copy_(centres)
            self.encoder_bias.copy_(-lengths.square() / 2)
        self.register_buffer("lengths", lengths)
        self.lengths: Tensor

    def codes(self, normalised: Tokens) -> Codes:
        """Return the length of the nearest centre for its latent."""
        # instead of pre-activations, and also below 0
        scores = normalised @ self.encoder.T + self.encoder_bias
        indices = scores.argmax(-1, keepdim=True)
        return Codes(scores, self.lengths[indices], indices)


def k_means(
    tokens: Float[Tensor, "tokens dim"], count: int, generator: torch.Generator
) -> Float[Tensor, "count dim"]:
    """Return centres by Lloyd's algorithm from random tokens; a centre without tokens stays."""
    centres = tokens[torch.randperm(len(tokens), generator=generator)[:count]].clone()
    assigned = torch.full((len(tokens),), -1)
    for _ in range(_ROUNDS):
        # the nearest centre c of a token x has the largest x·c - |c|² / 2
        half_squares = centres.square().sum(1) / 2
        nearest_parts = []
        for part in tokens.split(_AT_ONCE):
            nearest_parts.append((part @ centres.T - half_squares).argmax(1))
        nearest = torch.cat(nearest_parts)
        if bool((nearest == assigned).all()):
            break
        assigned = nearest
        sums = torch.zeros_like(centres).index_add_(0, assigned, tokens)
        counts = torch.bincount(assigned, minlength=count)
        has_tokens = counts > 0
        centres[has_tokens] = sums[has_tokens] / counts[has_tokens, None]
    return centres
