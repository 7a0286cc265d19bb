"""Losses and gradients of a dictionary equal those of loops over tokens and latents."""

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from tests.kit.dictionary_step import Sparsity, autoencoder_of, step, tensors

DIM = 6
COUNT = 16
TOKENS = 20
WEIGHT = 1 / 32


def kept_by_loops(activations: Tensor, sparsity: Sparsity) -> Tensor:
    """Return a mask of the latents that are kept, one at a time from the largest."""
    mask = torch.zeros_like(activations)
    if sparsity.kind == "batch-topk":
        for index in activations.flatten().argsort(descending=True)[: sparsity.k * TOKENS]:
            mask.view(-1)[index] = 1
        return mask
    for token in range(TOKENS):
        for latent in activations[token].argsort(descending=True)[: sparsity.k]:
            mask[token, latent] = 1
    return mask


def reference(
    parts: Mapping[str, Tensor], tokens: Tensor, sparsity: Sparsity, dead: list[int]
) -> tuple[Tensor, Tensor]:
    """Return the two losses, summed over tokens; parts are leaves of the graph."""
    decoder = parts["decoder"] / parts["decoder"].norm(dim=1, keepdim=True)
    activations = ((tokens - parts["bias"]) @ parts["encoder"].T + parts["encoder_bias"]).relu()
    latents = activations * kept_by_loops(activations.detach(), sparsity)
    total = tokens.new_zeros(())
    left = tokens
    sizes = sparsity.prefixes or (COUNT,)
    for size in sizes:
        left = tokens - parts["bias"]
        for latent in range(size):
            left = left - latents[:, latent, None] * decoder[latent]
        total = total + left.square().mean(1).sum() / len(sizes)
    if not dead:
        return total, tokens.new_zeros(())
    error = left.detach()
    missed = error
    for token in range(TOKENS):
        order = activations.detach()[token, dead].argsort(descending=True)[: DIM // 2]
        for index in order:
            latent = dead[int(index)]
            row = torch.zeros(TOKENS, 1, dtype=tokens.dtype)
            row[token] = 1
            missed = missed - row * activations[token, latent] * decoder[latent]
    variance = (error - error.mean(0)).square().sum()
    return total, missed.square().sum() / variance * TOKENS


@pytest.mark.parametrize("dead", [[], [1, 4, 5, 9]], ids=["all alive", "some dead"])
@pytest.mark.parametrize(
    "sparsity",
    [Sparsity(3), Sparsity(3, "batch-topk"), Sparsity(3, "topk", (4, 16))],
    ids=["topk", "batch-topk", "matryoshka"],
)
def test_losses_and_gradients_are_those_of_the_definition(sparsity, dead):
    values = tensors(DIM, COUNT, seed=1)
    values["encoder"][dead] *= 0.02  # small, so that no token keeps them
    values["encoder_bias"][dead] = 0.05
    tokens = torch.randn(
        TOKENS, DIM, generator=torch.Generator().manual_seed(2), dtype=torch.float64
    )
    autoencoder = autoencoder_of(values, sparsity)
    autoencoder.silent[dead] = 10**6
    leaves = {name: value.clone().requires_grad_() for name, value in values.items()}
    reconstruction, auxiliary = reference(leaves, tokens, sparsity, dead)
    assert bool(auxiliary > 0) == bool(dead)
    (reconstruction + WEIGHT * auxiliary).backward()
    result = step(autoencoder, tokens, patience=10**5)
    assert result.reconstruction == pytest.approx(reconstruction.item(), rel=1e-5)
    assert result.auxiliary == pytest.approx(auxiliary.item(), rel=1e-5)
    for name, leaf in leaves.items():
        assert torch.allclose(result.gradients[name], leaf.grad, atol=1e-5), name
