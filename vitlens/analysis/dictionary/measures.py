"""Measures of a dictionary on held-out images: reconstruction, sparsity, stability, one meaning.

An autoencoder is measured on the tokens of images that it was not trained on, and baselines are
measured in the same way:

- `activity`: its latents on all images, with sparsity and reconstruction error;
- `Splicer`: the model with the reconstruction in the place of its tokens;
- `matched_cosines`: the stability of its directions between two trainings;
- `monosemanticity`: the similarity of the images in which a latent is active.

Groups are sources of images that are not independent.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from vitlens.analysis.ablation.bench import ALONE
from vitlens.analysis.dictionary.autoencoder import SparseAutoencoder
from vitlens.analysis.dictionary.dictionary import Dictionary
from vitlens.analysis.dictionary.tokens import PatchTokens, TokenSet, patches_at
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

_TOKENS_AT_ONCE: Final = 8192  # tokens that are encoded at a time
_LATENTS_AT_ONCE: Final = 256  # latents whose images are compared at a time

PerImage = Float[Tensor, "images latents"]


@dataclass(frozen=True, eq=False)
class Activity:
    """The latents of an autoencoder on images. Only kept tokens count, see `TokenSet`.

    mean, largest: the mean and the largest value of each latent over the tokens of an image.
    patch: the index of the patch with the largest value.
    frequency: the share of the tokens in which each latent is active, that is above 0.
    active (images,): the number of active latents, summed over tokens.
    tokens (images,): the number of tokens.
    error (images,): the squared error of the reconstruction, summed over tokens.
    variance (images,): the squared distance from the mean token, summed over tokens.
    """

    mean: PerImage
    largest: PerImage
    patch: Int[Tensor, "images latents"]
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
        unexplained = ratio_of_sums(self.error, self.variance, groups)
        low = None if unexplained.high is None else 1 - unexplained.high
        high = None if unexplained.low is None else 1 - unexplained.low
        return Estimate(1 - unexplained.value, low, high, len(self.error), "fraction")

    def l0(self, groups: ArrayLike | None = None) -> Estimate:
        """Return the mean number of active latents of a token."""
        return ratio_of_sums(self.active, self.tokens, groups)


@torch.no_grad()
def activity(
    autoencoder: SparseAutoencoder,
    tokens: TokenSet,
    advance: Callable[[int], object] = lambda _: None,
) -> Activity:
    """Return the latents of an autoencoder on all images of a set of tokens."""
    device = autoencoder.mean.device
    mean_token = _mean_token(tokens).to(device)
    parts = list[_Part]()
    for rows, values, is_high in tokens.parts(_images_at_once(tokens)):
        is_kept = ~is_high.to(device)
        parts.append(_part(autoencoder, values.to(device), is_kept, mean_token))
        advance(rows.stop - rows.start)
    total = sum(float(part.token_count.sum()) for part in parts)
    frequency = torch.stack([part.tokens_of_latent for part in parts]).sum(0) / total
    return Activity(
        mean=torch.cat([part.mean for part in parts]),
        largest=torch.cat([part.largest for part in parts]),
        patch=torch.cat([part.patch for part in parts]),
        frequency=frequency,
        active=torch.cat([part.active_count for part in parts]).double().numpy(),
        tokens=torch.cat([part.token_count for part in parts]).double().numpy(),
        error=torch.cat([part.error for part in parts]).double().numpy(),
        variance=torch.cat([part.variance for part in parts]).double().numpy(),
    )


class _Part(NamedTuple):
    """The activity on some images; other fields are those of `Activity`.

    tokens_of_latent (latents,): the number of tokens in which each latent is active.
    active_count, token_count (images,): `Activity.active` and `Activity.tokens`.
    """

    mean: Tensor
    largest: Tensor
    patch: Tensor
    tokens_of_latent: Tensor
    active_count: Tensor
    token_count: Tensor
    error: Tensor
    variance: Tensor


def _images_at_once(tokens: TokenSet) -> int:
    """Return the number of images with about _TOKENS_AT_ONCE tokens."""
    patches = tokens.values.shape[1]
    return max(1, _TOKENS_AT_ONCE // patches)


def _mean_token(tokens: TokenSet) -> Float[Tensor, " dim"]:
    total = torch.zeros(tokens.values.shape[-1], dtype=torch.float64)
    for _, values, is_high in tokens.parts(_images_at_once(tokens)):
        total += values[~is_high].double().sum(0)
    return (total / max(len(tokens.kept), 1)).float()


def _part(
    autoencoder: SparseAutoencoder,
    values: PatchTokens,
    is_kept: Bool[Tensor, "images patches"],
    mean_token: Float[Tensor, " dim"],
) -> _Part:
    latents = autoencoder.encode(values) * is_kept[..., None]  # (images, patches, latents)
    error = (values - autoencoder.decode(latents)).square().sum(-1) * is_kept
    variance = (values - mean_token).square().sum(-1) * is_kept
    token_count = is_kept.sum(1)
    largest, patch = latents.max(1)
    is_active = latents > 0
    return _Part(
        mean=(latents.sum(1) / token_count.clamp_min(1)[:, None]).cpu(),
        largest=largest.cpu(),
        patch=patch.cpu(),
        tokens_of_latent=is_active.sum((0, 1)).double().cpu(),
        active_count=is_active.sum((1, 2)).cpu(),
        token_count=token_count.cpu(),
        error=error.double().sum(1).cpu(),
        variance=variance.double().sum(1).cpu(),
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
    valid.

    images: the images of all processes. Each process reads its share.
    count: the largest number of latents. Latents that do not vary are left out.
    """
    model = dictionary.model
    patches, _ = patches_at(model, dictionary.place).place.shape
    sums = torch.zeros(patches, len(dictionary), dtype=torch.float64)
    sums_of_squares = torch.zeros_like(sums)
    share = torch.arange(len(images))[processes.index :: processes.count]
    for indices in share.split(batch_size):
        captured = capture(model, images[indices].to(model.device), dictionary.patches)
        latents = dictionary.encode(captured[dictionary.patches]).cpu()
        sums += latents.sum(0)
        sums_of_squares += latents.square().sum(0)
    totals = processes.total(torch.stack((sums, sums_of_squares)))  # in one exchange
    mean, mean_square = totals / len(images)
    variance = (mean_square - mean.square()).sum(0)
    order = variance.argsort(descending=True, stable=True)[:count]
    return tuple(sorted(order[variance[order] > 0].tolist()))


def ratio_of_sums(
    numerators: ArrayLike,
    denominators: ArrayLike,
    groups: ArrayLike | None = None,
    seed: int = DEFAULT_SEED,
) -> Estimate:
    """Return the sum of some values (n,) divided by that of others, with its bootstrap interval.

    Whole groups are drawn. Too few groups have no interval.
    """
    pairs = np.stack((np.asarray(numerators, float), np.asarray(denominators, float)), 1)
    sums, counts = by_group(pairs, groups)  # (groups, 2)
    numerator, denominator = sums.sum(0)
    value = float(numerator / denominator)
    if not enough_to_draw(counts):
        return Estimate(value, n=len(pairs), unit="")
    drawn = resampled_means(sums, counts, seed=seed, draws=DRAWS)
    low, high = drawn_interval(drawn[:, 0] / drawn[:, 1], counts)
    return Estimate(value, float(low), float(high), len(pairs), "")


@dataclass(frozen=True, eq=False)
class Spliced:
    """The model with a reconstruction in the place of its tokens.

    loss (n,): the loss of each image's label, in nats.
    correct (n,): True if the label is predicted.
    clean_loss, clean_correct (n,): the same for the unchanged model.
    mean_loss, mean_correct (n,): the same with the mean over the images, at each token, in the
        place of the tokens.
    """

    loss: NDArray[np.float64]
    correct: NDArray[np.bool_]
    clean_loss: NDArray[np.float64]
    clean_correct: NDArray[np.bool_]
    mean_loss: NDArray[np.float64]
    mean_correct: NDArray[np.bool_]

    def recovered_loss(self, groups: ArrayLike | None = None) -> Estimate | None:
        """Return the loss on the scale from mean ablation (0) to the clean model (1).

        It is None if mean ablation does not change the loss significantly: the scale then has no
        length.
        """
        if student_test(self.mean_loss - self.clean_loss, groups=groups) > LEVEL:
            return None
        return ratio_of_sums(self.mean_loss - self.loss, self.mean_loss - self.clean_loss, groups)

    def recovered_accuracy(self, groups: ArrayLike | None = None) -> Estimate | None:
        """Return the accuracy on the scale from mean ablation (0) to the clean model (1).

        It is None if mean ablation does not change the accuracy significantly.
        """
        clean = self.clean_correct.astype(float)
        mean = self.mean_correct.astype(float)
        if paired_test(clean, mean, groups=groups) > LEVEL:
            return None
        return ratio_of_sums(self.correct - mean, clean - mean, groups)


class _Outcome(NamedTuple):
    """The loss of each image's label, and True for images with their label predicted."""

    loss: NDArray[np.float64]
    correct: NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Splicer:
    """Runs a model with reconstructions in the place of its tokens.

    The results are compared with those of the clean model and of mean ablation, which are run once.

    dictionary: gives the model and the place; its autoencoder is not used.
    split: the images.
    labels (n,): the classes of the images, as columns of the logits.
    batch_size, precision: of the passes.
    clean: the outcomes of the clean model.
    mean: the outcomes with the mean over the images in the place of the tokens.
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
        """Return a splicer for the place of a dictionary; run the clean and the ablated model."""
        model = dictionary.model

        def outcome() -> _Outcome:
            return _outcome(dictionary, split, labels, batch_size, precision)

        clean = outcome()
        reference = Streamed(split, model.pixel_dtype)
        with intervene(model, {dictionary.patches: "mean"}, reference=reference):
            mean = outcome()
        return cls(
            dictionary=dictionary,
            split=split,
            labels=labels,
            batch_size=batch_size,
            precision=precision,
            clean=clean,
            mean=mean,
        )

    def splice(self, autoencoder: SparseAutoencoder) -> Spliced:
        """Return the outcomes with the reconstruction of an autoencoder in the place."""
        at_place = Dictionary(self.dictionary.model, self.dictionary.place, autoencoder)
        with intervene(self.dictionary.model, at_place.splice()):
            spliced = _outcome(at_place, self.split, self.labels, self.batch_size, self.precision)
        return Spliced(
            loss=spliced.loss,
            correct=spliced.correct,
            clean_loss=self.clean.loss,
            clean_correct=self.clean.correct,
            mean_loss=self.mean.loss,
            mean_correct=self.mean.correct,
        )


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

    The matching is by Kuhn's Hungarian method. There are as many cosines as the smaller set has
    directions.
    """
    from scipy.optimize import linear_sum_assignment

    first_units = torch.nn.functional.normalize(first.double(), dim=1).cpu()
    second_units = torch.nn.functional.normalize(second.double(), dim=1).cpu()
    cosines = first_units @ second_units.T
    rows, columns = linear_sum_assignment(cosines.numpy(), maximize=True)
    return cosines[torch.from_numpy(rows), torch.from_numpy(columns)].float()


def monosemanticity(
    activations: PerImage, embeddings: Float[Tensor, "images width"]
) -> Float[Tensor, " latents"]:
    """Return the monosemanticity score of each latent (Pach 2025); NaN if it is not active.

    It is the mean cosine of the embeddings of all pairs of different images. A pair is weighted by
    the product of its activations, which are scaled to lie between 0 and 1.

    embeddings: embeddings of the images by an encoder that is independent of the model.
    """
    vectors = torch.nn.functional.normalize(embeddings.double(), dim=1)
    low = activations.double().amin(0)
    span = activations.double().amax(0) - low
    scaled = (activations.double() - low) / torch.where(span > 0, span, 1.0)
    scores = []
    for weights in scaled.split(_LATENTS_AT_ONCE, dim=1):  # (images, some latents)
        # for weights w and vectors x, |sum of w_i x_i|² is the sum over all pairs of
        # w_i w_j cos(x_i, x_j); the pair of an image with itself adds w_i²
        all_pairs = (weights.T @ vectors).square().sum(1)
        same_image = weights.square().sum(0)
        weighted_cosines = all_pairs - same_image
        pair_weights = weights.sum(0).square() - same_image
        score = torch.where(pair_weights > 0, weighted_cosines / pair_weights, torch.nan)
        scores.append(score)
    return torch.cat(scores).float()


def mean_score(scores: Float[Tensor, " latents"]) -> Estimate | None:
    """Return the mean score over the active latents; None without any."""
    finite = scores[scores.isfinite()]
    if not len(finite):
        return None
    return bootstrap_mean(finite.numpy(), unit="", least=-1.0, most=1.0)
