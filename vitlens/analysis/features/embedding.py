"""Features in two dimensions by t-SNE and PCA, and patches as colours by PCA."""

from dataclasses import dataclass
from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from vitlens.analysis.features.neighbours import unit_vectors
from vitlens.errors import DataError, InputError, UnknownNameError
from vitlens.names import PERPLEXITY, PROJECTIONS, Projection

NEIGHBOURS: Final = 10  # the number k of neighbours that trustworthiness compares
COLOURS: Final = 3  # red, green, blue
_REDUCED: Final = 50  # input dimensions of t-SNE (van der Maaten and Hinton 2008, section 4.2)
# Steps of t-SNE, half of the usual number: on 450 digits the trustworthiness is the same to 0.001.
_STEPS: Final = 500
# a smaller variance of float64 numbers, as a part of the sum of their squares, is rounding
_VARIANCE_ROUNDING: Final = 1e-20


@dataclass(frozen=True)
class Embedding:
    """Features in two dimensions.

    points (n, 2): the position of each feature vector, float64.
    trustworthiness: the degree in [0, 1] to which neighbours in the embedding are neighbours in the
        features (Venna and Kaski 2001). It is about 0.5 for random points.
    neighbours: the number k of neighbours that trustworthiness compares.
    perplexity: the perplexity of t-SNE, None for PCA.
    explained: the share of the variance in each of the two components of PCA, None for t-SNE.
    """

    points: Float[Tensor, "images 2"]
    trustworthiness: float
    neighbours: int
    perplexity: float | None = None
    explained: Float[Tensor, " 2"] | None = None


def embed(
    values: Float[Tensor, "images dim"],
    *,
    method: Projection = "tsne",
    perplexity: float = PERPLEXITY,
    seed: int = 0,
    unit: bool = True,
) -> Embedding:
    """Embed features (of images, or of patches) in two dimensions.

    t-SNE runs on the first 50 principal components and starts from the first two. It shows
    neighbourhoods only: the sizes of clusters and the distances between them mean nothing.

    values (n, dim): at least 4 feature vectors.
    perplexity: the perplexity of t-SNE, which `require_perplexity` must accept.
    seed: the seed of t-SNE.
    unit: True to scale vectors to length 1 first, so that distances order them as the cosine does.

    Raises DataError for features that are all the same.
    """
    if method not in PROJECTIONS:
        raise UnknownNameError("projection", method, PROJECTIONS)
    from sklearn.manifold import TSNE, trustworthiness  # takes a second to import

    units = unit_vectors(values) if unit else values
    # trustworthiness is defined for less than half of the points
    neighbours = min(NEIGHBOURS, (len(values) - 1) // 2)
    scores, explained = principal(units, count=min(_REDUCED, *values.shape))
    points = torch.zeros(len(scores), 2, dtype=scores.dtype)
    points[:, : scores.shape[1]] = scores[:, :2]  # features of rank 1 have a single column
    if method == "tsne":
        initial = 1e-4 * points / scores[:, 0].std()  # the scale of scikit-learn's init="pca"
        model = TSNE(
            n_components=2,
            perplexity=perplexity,
            init=initial.numpy(),
            learning_rate="auto",
            max_iter=_STEPS,
            random_state=seed,
        )
        points = torch.from_numpy(model.fit_transform(scores.numpy())).double()
    trust = trustworthiness(units.numpy(), points.numpy(), n_neighbors=neighbours)
    if method == "tsne":
        return Embedding(points, trust, neighbours, perplexity=perplexity)
    return Embedding(points, trust, neighbours, explained=pad(explained, (0, 2))[:2])


def require_perplexity(perplexity: float, images: int) -> None:
    """Raise InputError unless the perplexity of t-SNE fits this number of images.

    The perplexity is the effective number of neighbours of a point.
    """
    # the limit of van der Maaten: t-SNE uses three times as many neighbours
    most = (images - 1) / 3
    if not 1 <= perplexity <= most:
        room = f"from 1 to {most:.4g}" if most >= 1 else "with more images"
        raise InputError(
            f"expected a perplexity {room} for {images} images, found {perplexity:g}; give "
            "another, or more images"
        )


def principal(
    values: Float[Tensor, "rows dim"], *, count: int
) -> tuple[Float[Tensor, "rows count"], Float[Tensor, " count"]]:
    """Return the scores of the first principal components and their shares of the variance.

    Both are float64. The sign of a component is fixed: its loading of greatest absolute value is
    positive. Raises DataError for rows that are all the same, which have no components.
    """
    centred = values.double() - values.double().mean(0)
    covariance = centred.T @ centred  # not divided by the number of rows, which cancels below
    total = float(covariance.trace())
    rounding = _VARIANCE_ROUNDING * float(values.double().square().sum())
    if total <= rounding or total == 0:
        raise DataError("expected features that differ, found all the same; choose another layer")
    eigenvalues, eigenvectors = torch.linalg.eigh(covariance)  # ascending
    directions = eigenvectors.flip(1)[:, :count]  # as (dim, count), the strongest first
    variances = eigenvalues.flip(0)[:count].clamp_min(0)  # rounding may make them negative
    largest_loading = directions.abs().argmax(0, keepdim=True)
    directions = directions * directions.gather(0, largest_loading).sign()
    return centred @ directions, variances / total


def patch_colours(
    tokens: Float[Tensor, "images rows columns dim"],
) -> tuple[Float[Tensor, "images rows columns 3"], Float[Tensor, " 3"]]:
    """Return the patches of all images as red, green and blue in [0, 1] (Oquab 2023, figure 1).

    The colours are the first three principal components of all patches together, each scaled to
    the range from 0 to 1. A component that does not vary is 0.5. Patches of similar content have
    similar colours across images, because all images share one PCA.

    Also return the share of the variance in each component. Raises DataError for patches that are
    all the same.
    """
    patches = tokens.flatten(0, 2)
    scores, explained = principal(patches, count=min(COLOURS, patches.shape[1]))
    missing = (0, COLOURS - scores.shape[1])  # features of one or two dimensions
    scores = pad(scores, missing)
    low = scores.amin(0)
    high = scores.amax(0)
    is_constant = high <= low
    scaled = (scores - low) / torch.where(is_constant, 1, high - low)
    colours = torch.where(is_constant, 0.5, scaled).clamp(0, 1)
    return colours.view(*tokens.shape[:3], COLOURS), pad(explained, missing)
