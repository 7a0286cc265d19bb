"""Our sparse autoencoders and those of overcomplete: equal numbers, and the time of a step.

    pip install overcomplete
    python -m benchmarks.dictionaries

Both get the same weights, tokens and latents. The reconstruction loss and its gradients, the share
of dead latents, the mean number of latents and the matched cosine must be equal to 1e-5. Steps of
both are timed in turns, in one thread, with the same optimiser; the median of each is printed. The
loss of dead latents is left out, as overcomplete defines another one.
"""

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import matplotlib.cm
import torch
from torch import Tensor, nn

from vitlens.analysis.dictionary.autoencoder import SparseAutoencoder, Sparsity, losses
from vitlens.analysis.dictionary.measures import matched_cosines

DIM = 192
COUNT = 8 * DIM
K = 32
TOKENS = 1024
ROUNDS = 15
TOLERANCE = 1e-5


class Encoder(nn.Module):
    """The encoder of an autoencoder in the form that overcomplete takes."""

    def __init__(self, autoencoder: SparseAutoencoder) -> None:
        super().__init__()
        self.weight = nn.Parameter(autoencoder.encoder.detach().clone())
        self.bias = nn.Parameter(autoencoder.encoder_bias.detach().clone())

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return the pre-activations before and after the ReLU."""
        before = nn.functional.linear(tokens, self.weight, self.bias)
        return before, before.relu()


def theirs(autoencoder: SparseAutoencoder) -> Any:
    """Return overcomplete's autoencoder with the same weights."""
    if not hasattr(matplotlib.cm, "get_cmap"):  # which overcomplete 0.3 reads on import
        matplotlib.cm.get_cmap = matplotlib.colormaps.__getitem__  # type: ignore[attr-defined]
    from overcomplete.sae import TopKSAE

    return TopKSAE(
        DIM,
        COUNT,
        top_k=K,
        encoder_module=Encoder(autoencoder),
        dictionary_params={"initializer": autoencoder.decoder.detach().numpy()},
    )


def our_step(autoencoder: SparseAutoencoder, tokens: Tensor) -> Tensor:
    """Return our loss, a mean over tokens, after its backward pass."""
    autoencoder.zero_grad()
    result = losses(autoencoder, autoencoder(tokens), tokens, patience=sys.maxsize)
    loss = result.reconstruction / len(tokens)
    loss.backward()
    return loss.detach()


def their_step(model: Any, tokens: Tensor) -> Tensor:
    """Return their loss after its backward pass."""
    model.zero_grad()
    _, codes = model.encode(tokens)
    loss = (tokens - model.decode(codes)).square().mean()
    loss.backward()
    return loss.detach()


def compare(ours: SparseAutoencoder, other: Any, tokens: Tensor) -> dict[str, float]:
    """Return the largest differences of losses, gradients and metrics."""
    from overcomplete import metrics

    loss = our_step(ours, tokens)
    their_loss = their_step(other, tokens)
    with torch.no_grad():
        latents = ours.codes(tokens).latents
        _, codes = other.encode(tokens)
        shuffled = ours.decoder[torch.randperm(COUNT)] + 0.05 * torch.randn(COUNT, DIM)
        distance = metrics.cosine_hungarian_loss(ours.decoder, shuffled)
    gradient = other.dictionary._weights.grad
    # ours is without the part along each direction, which its length 1 takes back
    gradient = gradient - (gradient * ours.decoder.detach()).sum(1, True) * ours.decoder.detach()
    our_l0 = float((latents > 0).double().mean())  # theirs is a share of the latents
    cosine = float(matched_cosines(ours.decoder, shuffled).mean())
    return {
        "loss": abs(float(loss - their_loss)),
        "gradient of the decoder": float((ours.decoder.grad - gradient).abs().max()),
        "gradient of the encoder": float(
            (ours.encoder.grad - other.encoder.weight.grad).abs().max()
        ),
        "latents": float((latents - codes).abs().max()),
        "L0": abs(our_l0 - float(metrics.l0(codes))),
        "dead latents": float(((latents > 0).sum(0) == 0).sum() - metrics.dead_codes(codes).sum()),
        "matched cosine": abs(cosine - (1 - distance / COUNT)),
    }


def seconds(step: Callable[[], object]) -> float:
    """Return the time of one step."""
    began = time.perf_counter()
    step()
    return time.perf_counter() - began


def main() -> None:
    """Print the differences and the times; exit with 1 if a number differs."""
    torch.manual_seed(0)
    ours = SparseAutoencoder(DIM, COUNT, Sparsity(K)).train()
    other = theirs(ours)
    tokens = torch.randn(TOKENS, DIM)
    differences = compare(ours, other, tokens)
    for name, difference in differences.items():
        print(f"{name:24} {difference:.2g}")
    our_times = []
    their_times = []
    our_optimiser = torch.optim.AdamW(ours.parameters(), lr=1e-4)
    their_optimiser = torch.optim.AdamW(other.parameters(), lr=1e-4)
    for _ in range(ROUNDS):
        our_times.append(seconds(lambda: (our_step(ours, tokens), our_optimiser.step())))
        their_times.append(seconds(lambda: (their_step(other, tokens), their_optimiser.step())))
    print(f"{'a step, ours':24} {1e3 * statistics.median(our_times):.1f} ms")
    print(f"{'a step, overcomplete':24} {1e3 * statistics.median(their_times):.1f} ms")
    if max(differences.values()) > TOLERANCE:
        sys.exit(1)


if __name__ == "__main__":
    main()
