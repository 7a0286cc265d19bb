"""One training step of a dictionary: its losses, and the gradients of its tensors."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from vitlens.analysis.dictionary.autoencoder import SparseAutoencoder, Sparsity, losses


class Step(NamedTuple):
    """The losses of a batch, and the gradients of their sum by the name of the tensor."""

    reconstruction: float
    auxiliary: float
    gradients: Mapping[str, Tensor]


def autoencoder_of(tensors: Mapping[str, Tensor], sparsity: Sparsity) -> SparseAutoencoder:
    """Return an autoencoder in training mode with these tensors; others keep their first values."""
    count, dim = tensors["decoder"].shape
    autoencoder = SparseAutoencoder(dim, count, sparsity).to(tensors["decoder"].dtype)
    autoencoder.load_state_dict({**autoencoder.state_dict(), **tensors})
    return autoencoder.train()


def step(autoencoder: SparseAutoencoder, normalised: Tensor, *, patience: int) -> Step:
    """Return the losses of normalised tokens, and their gradients."""
    autoencoder.zero_grad()
    encoded = autoencoder(normalised)
    result = losses(autoencoder, encoded, normalised, patience=patience)
    result.total.backward()
    gradients = {name: value.grad for name, value in autoencoder.named_parameters()}
    return Step(result.reconstruction.item(), result.auxiliary.item(), gradients)


def tensors(dim: int, count: int, seed: int) -> dict[str, Tensor]:
    """Return random tensors of an autoencoder: encoder and decoder are different."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    decoder = draw(count, dim)
    return {
        "decoder": decoder / decoder.norm(dim=1, keepdim=True),
        "encoder": draw(count, dim),
        "encoder_bias": draw(count) / 4,
        "bias": draw(dim) / 4,
    }
