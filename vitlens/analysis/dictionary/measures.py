"""Measures of a dictionary on held-out images: reconstruction, sparsity, stability, one meaning.

An autoencoder is measured on the tokens of images that it was not trained on; groups are sources of
images that are not independent. Baselines are measured in the same way.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from vitlens.analysis.ablation.bench import ALONE
from vitlens.analysis.dictionary.autoencoder import SparseAutoencoder
from vitlens.analysis.dictionary.dictionary import Dictionary
from vitlens.analysis.dictionary.tokens import TokenSet, patches_at
from vitlens.analysis.evaluation.evaluate import predicted_logits
from vitlens.analysis.evaluation.log_odds import log_odds, loss_of
from vitlens.data.split import Split
from vitlens.lens.capture import capture
from vitlens.lens.intervene import intervene
from vitlens.names import DEFAULT_SEED
from vitlens.pixels import Parts, Streamed
from vitlens.processes import Processes
from vitlens.resampling import DRAWS, by_group, drawn_interval, enough_to_draw, resampled_means
from vitlens.uncertainty import LEVEL, Estimate, bootstrap_mean, paired_test, student_test

_TOKENS_AT_ONCE: Final = 8192
_PAIRS_AT_ONCE: Final = 256  # latents whose pairs of images are compared at once

PerImage = Float[Tensor, "images latents"]


@dataclass(frozen=True, eq=False)
class Activity:
    """The latents of an autoencoder on images.

    mean, largest (images, latents): over the kept tokens of an image.
    patch (images, latents): the index of the patch with the largest.
    frequency (latents,): share of the tokens in which each is active.
    active, tokens (images,): latents above 0 and kept tokens.
    error, variance (images,): squared error of the reconstruction, and squared distance from the
        mean token.
    """

    mean: PerImage
    largest: PerImage
    patch: Tensor
    frequency: Float[Tensor, " latents"]
    active: NDArray[np.float64]
    tokens: NDArray[np.float64]
    error: NDArray[np.float64]
    variance: NDArray[np.float64]

    @property
    def dead(self) -> float:
        """Return the share of latents that are active in no token."""
        return float((self.frequency == 0).double().mean())

    def explained_variance(self, groups: ArrayLike | None = None) -> Estimate:
        """Return 1 minus the squared error over the variance, with its bootstrap interval."""
        share = ratio_of_sums(self.error, self.variance, groups)
        low = None if share.high is None else 1 - share.high
        high = None if share.low is None else 1 - share.low
        return Estimate(1 - share.value, low, high, len(self.error), "fraction")

    def l0(self, groups: ArrayLike | None = None) -> Estimate:
        """Return the mean number of latents of a token."""
        share = ratio_of_sums(self.active, self.tokens, groups)
        return Estimate(share.value, share.low, share.high, len(self.tokens), "")


@torch.no_grad()
def activity(
    autoencoder: SparseAutoencoder,
    tokens: TokenSet,
    advance: Callable[[int], object] = lambda _: None,
) -> Activity:
    """Return the latents of an autoencoder on all images of a set of tokens."""
    device = autoencoder.mean.device
    patches = tokens.values.shape[1]
    images = max(1, _TOKENS_AT_ONCE // patches)
    mean = _mean_token(tokens)
    parts = list[_Part]()
    for rows, values, high in tokens.parts(images):
        parts.append(_part(autoencoder, values.to(device), ~high.to(device), mean.to(device)))
        advance(rows.stop - rows.start)
    total = sum(float(part.tokens.sum()) for part in parts)
    frequency = torch.stack([part.active_tokens for part in parts]).sum(0) / total
    return Activity(
        torch.cat([part.mean for part in parts]),
        torch.cat([part.largest for part in parts]),
        torch.cat([part.patch for part in parts]),
        frequency,
        *(
            torch.cat([getattr(part, name) for part in parts]).double().numpy()
            for name in ("active", "tokens", "error", "variance")
        ),
    )


@torch.no_grad()
def most_varied(
    dictionary: Dictionary,
    images: Parts,
    count: int,
    *,
    batch_size: int,
    processes: Processes = ALONE,
) -> tuple[int, ...]:
    """Return the latents whose activations vary most between images, at the same patch.

    They are those whose replacement by the mean over images moves tokens furthest, as directions
    are of length 1. Labels have no part in the choice, so that tests of the effects on them stay
    valid. images: those of all processes, of which each reads its share.
    """
    model = dictionary.model
    sums = torch.zeros(2, *_latents_shape(dictionary), dtype=torch.float64)
    for rows in torch.arange(len(images))[processes.index :: processes.count].split(batch_size):
        tokens = capture(model, images[rows].to(model.device), dictionary.patches)
        latents = dictionary.encode(tokens[dictionary.patches]).cpu()
        sums[0] += latents.sum(0)
        sums[1] += latents.square().sum(0)
    mean, square = processes.total(sums) / len(images)
    variance = (square - mean.square()).sum(0)
    order = variance.argsort(descending=True, stable=True)[:count]
    return tuple(sorted(order[variance[order] > 0].tolist()))


def _latents_shape(dictionary: Dictionary) -> tuple[int, int]:
    patches, _ = patches_at(dictionary.model, dictionary.place).place.shape
    return patches, len(dictionary)


class _Part(NamedTuple):
    """The activity on some images."""

    mean: Tensor
    largest: Tensor
    patch: Tensor
    active_tokens: Tensor
    active: Tensor
    tokens: Tensor
    error: Tensor
    variance: Tensor


def _mean_token(tokens: TokenSet) -> Float[Tensor, " dim"]:
    total = torch.zeros(tokens.values.shape[-1], dtype=torch.float64)
    for _, values, high in tokens.parts(_TOKENS_AT_ONCE):
        total += values[~high].double().sum(0)
    return (total / max(len(tokens.kept), 1)).float()


def _part(
    autoencoder: SparseAutoencoder, values: Tensor, kept: Bool[Tensor, "_ _"], mean: Tensor
) -> _Part:
    weights = kept[..., None]
    latents = autoencoder.encode(values) * weights
    error = (values - autoencoder.decode(latents)).square().sum(-1) * kept
    variance = (values - mean).square().sum(-1) * kept
    count = kept.sum(1)
    largest, patch = latents.max(1)
    is_active = latents > 0
    return _Part(
        (latents.sum(1) / count.clamp_min(1)[:, None]).cpu(),
        largest.cpu(),
        patch.cpu(),
        is_active.sum((0, 1)).double().cpu(),
        is_active.sum((1, 2)).cpu(),
        count.cpu(),
        error.double().sum(1).cpu(),
        variance.double().sum(1).cpu(),
    )


def ratio_of_sums(
    numerators: ArrayLike,
    denominators: ArrayLike,
    groups: ArrayLike | None = None,
    seed: int = DEFAULT_SEED,
) -> Estimate:
    """Return the sum of some values (n,) over the sum of others, with its bootstrap interval.

    Whole groups are drawn. There is no interval of too few groups.
    """
    pairs = np.stack((np.asarray(numerators, float), np.asarray(denominators, float)), 1)
    sums, counts = by_group(pairs, groups)
    above, below = sums.sum(0)
    value = float(above / below)
    if not enough_to_draw(counts):
        return Estimate(value, n=len(pairs), unit="")
    drawn = resampled_means(sums, counts, seed=seed, draws=DRAWS)
    low, high = drawn_interval(drawn[:, 0] / drawn[:, 1], counts)
    return Estimate(value, float(low), float(high), len(pairs), "")


@dataclass(frozen=True, eq=False)
class Spliced:
    """The model with a reconstruction in the place of its tokens.

    loss, correct (n,): of the image's label, in nats and True or False; clean_... : of the
    unchanged model; mean_...: with the mean over the images at each token in that place.
    """

    loss: NDArray[np.float64]
    correct: NDArray[np.bool_]
    clean_loss: NDArray[np.float64]
    clean_correct: NDArray[np.bool_]
    mean_loss: NDArray[np.float64]
    mean_correct: NDArray[np.bool_]

    def recovered_loss(self, groups: ArrayLike | None = None) -> Estimate | None:
        """Return the loss on the scale from mean ablation (0) to the clean model (1).

        None where mean ablation does not change the loss significantly: the scale has no length.
        """
        if student_test(self.mean_loss - self.clean_loss, groups=groups) > LEVEL:
            return None
        return ratio_of_sums(self.mean_loss - self.loss, self.mean_loss - self.clean_loss, groups)

    def recovered_accuracy(self, groups: ArrayLike | None = None) -> Estimate | None:
        """Return the accuracy on the scale from mean ablation (0) to the clean model (1).

        None where mean ablation does not change the accuracy significantly.
        """
        clean = self.clean_correct.astype(float)
        mean = self.mean_correct.astype(float)
        if paired_test(clean, mean, groups=groups) > LEVEL:
            return None
        return ratio_of_sums(self.correct - mean, clean - mean, groups)


class _Outcome(NamedTuple):
    """The loss of each image's label, and whether it is predicted."""

    loss: NDArray[np.float64]
    correct: NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Splicer:
    """Runs a model with reconstructions at a place, compared with its mean there.

    labels (n,): columns of the logits. The clean model and mean ablation are run once.
    """

    dictionary: Dictionary
    split: Split
    labels: Tensor
    batch_size: int | None
    precision: str
    clean: _Outcome
    mean: _Outcome

    @classmethod
    def on(
        cls,
        dictionary: Dictionary,
        split: Split,
        labels: Tensor,
        *,
        batch_size: int | None = None,
        precision: str = "fp32",
    ) -> "Splicer":
        """Return a splicer for the place of a dictionary, with the clean and the ablated model."""
        model = dictionary.model

        def outcome() -> _Outcome:
            return _outcome(dictionary, split, labels, batch_size, precision)

        clean = outcome()
        reference = Streamed(split, model.pixel_dtype)
        with intervene(model, {dictionary.patches: "mean"}, reference=reference):
            mean = outcome()
        return cls(dictionary, split, labels, batch_size, precision, clean, mean)

    def splice(self, autoencoder: SparseAutoencoder) -> Spliced:
        """Return the outcomes with the reconstruction of an autoencoder in the place."""
        of_place = Dictionary(self.dictionary.model, self.dictionary.place, autoencoder)
        with intervene(self.dictionary.model, of_place.splice()):
            spliced = _outcome(of_place, self.split, self.labels, self.batch_size, self.precision)
        return Spliced(*spliced, *self.clean, *self.mean)


def _outcome(
    dictionary: Dictionary,
    split: Split,
    labels: Tensor,
    batch_size: int | None,
    precision: str,
) -> _Outcome:
    logits = predicted_logits(dictionary.model, split, batch_size=batch_size, precision=precision)
    loss = loss_of(log_odds(logits, labels))
    return _Outcome(loss.numpy(), (logits.argmax(1) == labels).numpy())


@torch.no_grad()
def matched_cosines(
    first: Float[Tensor, "latents dim"], second: Float[Tensor, "others dim"]
) -> Float[Tensor, " matched"]:
    """Return the cosines of directions that are matched one to one, so that their sum is largest.

    Kuhn's Hungarian method; there are as many as the smaller set has directions.
    """
    from scipy.optimize import linear_sum_assignment

    cosines = torch.nn.functional.normalize(first.double(), dim=1).cpu() @ (
        torch.nn.functional.normalize(second.double(), dim=1).cpu().T
    )
    rows, columns = linear_sum_assignment(cosines.numpy(), maximize=True)
    return cosines[torch.from_numpy(rows), torch.from_numpy(columns)].float()


def monosemanticity(
    activations: PerImage, embeddings: Float[Tensor, "images width"]
) -> Float[Tensor, " latents"]:
    """Return the monosemanticity score of each latent (Pach 2025); NaN if it is not active.

    The mean cosine of the embeddings of all pairs of different images, weighted by the product of
    their activations, which are scaled to lie between 0 and 1. embeddings: of an encoder that is
    independent of the model.
    """
    vectors = torch.nn.functional.normalize(embeddings.double(), dim=1)
    low = activations.double().amin(0)
    span = activations.double().amax(0) - low
    scaled = (activations.double() - low) / torch.where(span > 0, span, 1.0)
    scores = []
    for weights in scaled.split(_PAIRS_AT_ONCE, dim=1):
        summed = (weights.T @ vectors).square().sum(1)
        squares = weights.square().sum(0)
        cosines = summed - squares  # without the pairs of an image with itself
        pairs = weights.sum(0).square() - squares
        scores.append(torch.where(pairs > 0, cosines / pairs, torch.nan))
    return torch.cat(scores).float()


def mean_score(scores: Float[Tensor, " latents"]) -> Estimate | None:
    """Return the mean score over the active latents; None without any."""
    finite = scores[scores.isfinite()]
    if not len(finite):
        return None
    return bootstrap_mean(finite.numpy(), unit="", least=-1.0, most=1.0)
