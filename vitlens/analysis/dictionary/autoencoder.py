"""Sparse autoencoders: TopK (Gao 2024), BatchTopK (Bussmann 2024) and Matryoshka prefixes.

A token x is normalised to u = (x - mean) / scale. With the encoder W and its bias c, the decoder D
with rows of length 1, and the bias b:

    pre-activations  p = ReLU(W (u - b) + c)
    latents          z = the k largest of p; the others are 0
    reconstruction   v = z D + b, and mean + scale v in the units of the token

BatchTopK keeps the k n largest of the n tokens of a batch while it is trained. In use it keeps the
pre-activations above a threshold, the running mean of the smallest value that was kept, so that the
latents of a token do not depend on the other tokens.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from vitlens.errors import InputError, UnknownNameError, argument
from vitlens.names import AUTOENCODERS, AutoencoderKind

THRESHOLD_MOMENTUM: Final = 0.9  # momentum of the running threshold of BatchTopK
AUXILIARY_WEIGHT: Final = 1 / 32  # weight of the loss of dead latents (Gao 2024)
MOST_AUXILIARY: Final = 512  # most dead latents that reconstruct the error of a token

Tokens = Float[Tensor, "*batch dim"]
Latents = Float[Tensor, "*batch latents"]


@dataclass(frozen=True)
class Sparsity:
    """The number of latents that reconstruct a token.

    k: the number of latents of a token; the mean number for BatchTopK.
    kind: "topk" or "batch-topk".
    prefixes: the sizes of nested dictionaries, each the first latents, that must reconstruct a
        token by themselves. They rise, and the last has all latents. Empty if only the whole
        dictionary must reconstruct a token.

    Raises InputError for sizes that do not rise.
    """

    k: int = 32
    kind: AutoencoderKind = "topk"
    prefixes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in AUTOENCODERS:
            raise UnknownNameError("kind of autoencoder", self.kind, AUTOENCODERS)
        if self.k < 1:
            raise InputError(f"expected {argument('k')} of at least 1, found {self.k}")
        if list(self.prefixes) != sorted(set(self.prefixes)) or 0 in self.prefixes:
            raise InputError(f"expected sizes of prefixes that rise, found {self.prefixes}")

    def require_fitting(self, count: int) -> None:
        """Raise InputError if k or a prefix does not fit this number of latents."""
        if self.k > count:
            raise InputError(
                f"expected {argument('k')} of at most the {count} latents, found {self.k}"
            )
        if self.prefixes and self.prefixes[-1] != count:
            raise InputError(
                f"expected the last prefix to have all {count} latents, found {self.prefixes[-1]}"
            )


@dataclass(frozen=True, eq=False)
class Codes:
    """The latents of some tokens.

    There are two forms: TopK stores the k latents that are kept, and BatchTopK all latents.

    pre_activations: a number for every latent, by which those that are kept are chosen.
    values: the k values that are kept (..., k). If `indices` is None, the values of all latents
        (..., latents), 0 for those that are not kept.
    indices (..., k): the numbers of the latents that are kept, or None.
    """

    pre_activations: Latents
    values: Tensor
    indices: Tensor | None = None

    @property
    def latents(self) -> Latents:
        """Return all latents; 0 for those that are not kept."""
        if self.indices is None:
            return self.values
        return torch.zeros_like(self.pre_activations).scatter(-1, self.indices, self.values)

    def is_active(self) -> Tensor:
        """Return True for each latent (latents,) that is above 0 in a token."""
        if self.indices is None:
            return (self.values > 0).flatten(0, -2).any(0)
        count = self.pre_activations.shape[-1]
        active = self.indices[self.values > 0]
        return torch.bincount(active, minlength=count) > 0


class SparseAutoencoder(nn.Module):
    """A dictionary of directions of a layer, and the encoder that finds them in a token.

    dim: the dimension of a token.
    count: the number of latents.
    sparsity: the number of latents that reconstruct a token.

    Parameters, in the notation of the module:
    encoder, decoder (latents, dim): W and D.
    encoder_bias (latents,), bias (dim,): c and b.

    Buffers:
    mean (dim,), scale (): the mean of the tokens, and their deviation from it.
    threshold (): the threshold of BatchTopK.
    silent (latents,): the number of training tokens since each latent was active.

    Raises InputError if k or a prefix does not fit the number of latents.
    """

    mean: Tensor
    scale: Tensor
    threshold: Tensor
    silent: Tensor

    def __init__(self, dim: int, count: int, sparsity: Sparsity = Sparsity()) -> None:
        super().__init__()
        sparsity.require_fitting(count)
        self.dim = dim
        self.count = count
        self.sparsity = sparsity
        directions = F.normalize(torch.randn(count, dim), dim=1)
        self.decoder = nn.Parameter(directions)
        self.encoder = nn.Parameter(directions.clone())  # a copy: the two are trained separately
        self.encoder_bias = nn.Parameter(torch.zeros(count))
        self.bias = nn.Parameter(torch.zeros(dim))
        self.register_buffer("mean", torch.zeros(dim))
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("threshold", torch.zeros(()))
        self.register_buffer("silent", torch.zeros(count, dtype=torch.long))
        # autograd passes each gradient of the decoder through it
        self.decoder.register_hook(self._without_radial_part)

    @torch.no_grad()
    def fit_normalisation(self, parts: Iterable[Float[Tensor, "tokens dim"]]) -> None:
        """Take the mean of tokens, and their root mean square deviation from it, per component.

        parts: the tokens, some at a time.
        """
        count = 0
        total = torch.zeros(self.dim, dtype=torch.float64)
        squares = torch.zeros(self.dim, dtype=torch.float64)
        for part in parts:
            exact = part.cpu().double()
            count += len(exact)
            total += exact.sum(0)
            squares += exact.square().sum(0)
        mean = total / count
        mean_square = squares / count
        variance = float((mean_square - mean.square()).mean())
        # rounding may leave a variance just above or below 0 if all tokens are equal
        rounding = torch.finfo(torch.float32).eps ** 2
        is_constant = variance <= rounding * float(mean_square.mean())
        deviation = 0.0 if is_constant else math.sqrt(variance)
        if not math.isfinite(deviation) or deviation == 0:
            raise InputError(
                f"expected tokens that differ, found a standard deviation of {deviation}"
            )
        self.mean.copy_(mean)
        self.scale.fill_(deviation)

    def normalised(self, tokens: Tokens) -> Tokens:
        """Return tokens in the units of the dictionary."""
        return (tokens - self.mean) / self.scale

    def encode(self, tokens: Tokens) -> Latents:
        """Return the latents of tokens, in units of `scale` along each direction."""
        return self.codes(self.normalised(tokens)).latents

    def pre_activations(self, normalised: Tokens) -> Latents:
        """Return the pre-activations of normalised tokens, at least 0."""
        return F.linear(normalised - self.bias, self.encoder, self.encoder_bias).relu()

    def codes(self, normalised: Tokens) -> Codes:
        """Return the pre-activations and latents of normalised tokens."""
        pre_activations = self.pre_activations(normalised)
        if self.sparsity.kind == "topk":
            values, indices = pre_activations.topk(self.sparsity.k, dim=-1, sorted=False)
            return Codes(pre_activations, values, indices)
        if self.training:
            tokens = pre_activations.numel() // self.count
            largest = pre_activations.detach().flatten().topk(tokens * self.sparsity.k).values
            smallest_kept = largest[-1]
            self._follow_threshold(smallest_kept)
        else:
            smallest_kept = self.threshold
        return Codes(pre_activations, values=pre_activations * (pre_activations >= smallest_kept))

    def decode(self, latents: Latents) -> Tokens:
        """Return the tokens that latents reconstruct."""
        return self.restored(latents @ self.decoder + self.bias)

    def restored(self, normalised: Tokens) -> Tokens:
        """Return normalised tokens in the units of the layer."""
        return normalised * self.scale + self.mean

    def reconstruct(self, tokens: Tokens) -> Tokens:
        """Return the reconstruction of tokens."""
        return self.decode(self.encode(tokens))

    @property
    def directions(self) -> Float[Tensor, "latents dim"]:
        """Return what a latent of 1 adds to a token, in the units of the layer."""
        return self.decoder * self.scale

    def forward(self, normalised: Tokens) -> Codes:
        """Return the codes of normalised tokens; in training, also update `silent`."""
        codes = self.codes(normalised)
        if self.training:
            with torch.no_grad():
                tokens = normalised[..., 0].numel()
                self.silent.copy_(torch.where(codes.is_active(), 0, self.silent + tokens))
        return codes

    @torch.no_grad()
    def normalise_decoder(self) -> None:
        """Scale the directions to length 1."""
        self.decoder.copy_(F.normalize(self.decoder, dim=1))

    def _without_radial_part(self, gradient: Tensor) -> Tensor:
        """Return the gradient without its part along each direction, which only changes lengths."""
        radial = (gradient * self.decoder.detach()).sum(1, keepdim=True)
        return gradient - radial * self.decoder.detach()

    @torch.no_grad()
    def _follow_threshold(self, smallest_kept: Tensor) -> None:
        """Update the running mean of the smallest value that was kept."""
        if self.threshold == 0:  # the first batch
            self.threshold.copy_(smallest_kept)
        else:
            self.threshold.lerp_(smallest_kept.to(self.threshold), 1 - THRESHOLD_MOMENTUM)


def decoded(autoencoder: SparseAutoencoder, codes: Codes, size: int) -> Float[Tensor, "tokens dim"]:
    """Return normalised tokens from their codes by the first `size` latents.

    Only the rows of latents that are kept are read, which halves the time of a training step.
    """
    if codes.indices is None:
        latents = codes.values.to(autoencoder.decoder.dtype)[:, :size]
        return latents @ autoencoder.decoder[:size] + autoencoder.bias
    values = codes.values.to(autoencoder.decoder.dtype)
    if size < autoencoder.count:
        values = values * (codes.indices < size)
    summed = F.embedding_bag(
        codes.indices, autoencoder.decoder, per_sample_weights=values, mode="sum"
    )
    return summed + autoencoder.bias


class Losses(NamedTuple):
    """Losses of a batch of tokens, each a sum over the tokens.

    reconstruction: the squared error, averaged over components and prefixes.
    auxiliary: the squared error of the reconstruction of the error by dead latents, relative to the
        variance of the error, times the number of tokens.
    """

    reconstruction: Tensor
    auxiliary: Tensor

    @property
    def total(self) -> Tensor:
        """Return the loss that is minimised."""
        return self.reconstruction + AUXILIARY_WEIGHT * self.auxiliary


def losses(
    autoencoder: SparseAutoencoder,
    codes: Codes,
    normalised: Float[Tensor, "tokens dim"],
    *,
    patience: int,
) -> Losses:
    """Return the losses of normalised tokens from their codes.

    The dead latents with the largest pre-activations of a token reconstruct what is left of it
    (AuxK, Gao 2024).

    patience: a latent is dead if it was not active in so many training tokens.
    """
    dtype = autoencoder.decoder.dtype
    target = normalised.to(dtype)
    sizes = autoencoder.sparsity.prefixes
    if not sizes:
        sizes = (autoencoder.count,)
    errors = [target - decoded(autoencoder, codes, size) for size in sizes]
    reconstruction = torch.stack([error.square().mean(1).sum() for error in errors]).mean()
    is_dead = autoencoder.silent >= patience
    dead_count = int(is_dead.sum())
    if dead_count == 0:
        return Losses(reconstruction, auxiliary=reconstruction.new_zeros(()))
    error = errors[-1].detach()  # that of all latents
    activations = codes.pre_activations.to(dtype)[:, is_dead]  # (tokens, dead latents)
    count = min(dead_count, MOST_AUXILIARY, max(1, autoencoder.dim // 2))
    values, indices = activations.topk(count, dim=1, sorted=False)
    revived = torch.zeros_like(activations).scatter(1, indices, values)
    missed = (error - revived @ autoencoder.decoder[is_dead]).square().sum()
    variance = (error - error.mean(0)).square().sum().clamp_min(torch.finfo(error.dtype).tiny)
    return Losses(reconstruction, auxiliary=missed / variance * len(target))


def nested_sizes(count: int, prefixes: int) -> tuple[int, ...]:
    """Return sizes of nested dictionaries that double up to all latents; none for one prefix."""
    if prefixes <= 1:
        return ()
    smallest = count >> (prefixes - 1)  # the number of latents, halved for each further prefix
    if smallest < 1:
        raise InputError(
            f"expected {argument('prefixes')} of at most {count.bit_length()} for {count} latents, "
            f"found {prefixes}"
        )
    return tuple(count >> halvings for halvings in reversed(range(prefixes)))
