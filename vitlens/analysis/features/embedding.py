"""Features in two dimensions by t-SNE and PCA, and patches as colours by PCA.

The results are seeded and have their trustworthiness.
"""

from dataclasses import dataclass
from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from vitlens.analysis.features.neighbours import unit_vectors
from vitlens.errors import DataError, InputError, UnknownNameError
from vitlens.names import PERPLEXITY, PROJECTIONS, Projection

NEIGHBOURS: Final = 10  # k of trustworthiness
COLOURS: Final = 3  # red, green, blue
_REDUCED: Final = 50  # input dimensions of t-SNE (van der Maaten and Hinton 2008, section 4.2)
# of t-SNE, half of the usual number: on 450 digits the trustworthiness is the same to 0.001
_STEPS: Final = 500


@dataclass(frozen=True)
class Embedding:
    """Points (n, 2), float64, in two dimensions.

    trustworthiness: fraction in [0, 1], the degree to which neighbours in the embedding are
        neighbours in the features (Venna and Kaski 2001), about 0.5 for random points.
    neighbours: its k.
    perplexity: the perplexity of t-SNE.
    explained: the shares of the variance of both components, of PCA.
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

    Vectors are first scaled to length 1, so that the distances of t-SNE order them as the cosine
    does (unit: False leaves them as they are); t-SNE runs on the first 50 principal components and
    starts from the first two. t-SNE shows neighbourhoods only: the sizes of clusters and the
    distances between them mean nothing. At least 4 rows; a perplexity that `require_perplexity`
    takes. Raises DataError for features that are all the same.
    """
    if method not in PROJECTIONS:
        raise UnknownNameError("projection", method, PROJECTIONS)
    from sklearn.manifold import TSNE, trustworthiness  # takes a second to import

    units = unit_vectors(values) if unit else values
    # trustworthiness is defined for less than half of the points
    neighbours = min(NEIGHBOURS, (len(values) - 1) // 2)
    scores, explained = principal(units, count=min(_REDUCED, *values.shape))
    points = pad(scores, (0, 2))[:, :2]  # features of rank 1 have a single column
    if method == "tsne":
        initial = 1e-4 * points / scores[:, 0].std()  # the scale of scikit-learn's init="pca"
        model = TSNE(
            2,
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

    It is the effective number of neighbours.
    """
    most = (
        images - 1
    ) / 3  # the limit of van der Maaten: t-SNE uses three times as many neighbours
    if not 1 <= perplexity <= most:
        room = f"from 1 to {most:.4g}" if most >= 1 else "with more images"
        raise InputError(
            f"expected a perplexity {room} for {images} images, found {perplexity:g}; give "
            "another, or more images"
        )


def principal(
    values: Float[Tensor, "rows dim"], *, count: int
) -> tuple[Float[Tensor, "rows count"], Float[Tensor, " count"]]:
    """Return principal components: scores (rows, count) and their shares of the variance, float64.

    Scores are of the centred rows. Signs are fixed: the loading of greatest absolute value of each
    component is positive. Raises DataError for rows all the same, which have no components.
    """
    centred = values.double() - values.double().mean(0)
    covariance = centred.T @ centred
    total = float(covariance.trace())
    if total <= 1e-20 * float(values.double().square().sum()) or not total:
        raise DataError("expected features that differ, found all the same; choose another layer")
    eigenvalues, directions = torch.linalg.eigh(covariance)  # ascending
    directions = directions.flip(1)[:, :count]
    strongest = directions.abs().argmax(0, keepdim=True)
    directions = directions * directions.gather(0, strongest).sign()
    return centred @ directions, eigenvalues.flip(0)[:count].clamp_min(0) / total


def patch_colours(
    tokens: Float[Tensor, "images rows columns dim"],
) -> tuple[Float[Tensor, "images rows columns 3"], Float[Tensor, " 3"]]:
    """Return the patches of all images as red, green and blue in [0, 1] (Oquab 2023, figure 1).

    The colours are the first three principal components of all patches together, each from its
    minimum to its maximum. Also return their shares of the variance. Patches of similar content
    have similar colours across images, because all images share one PCA. A component that does not
    vary is 0.5. Raises DataError for patches that are all the same.
    """
    patches = tokens.flatten(0, 2)
    scores, explained = principal(patches, count=min(COLOURS, patches.shape[1]))
    missing = (0, COLOURS - scores.shape[1])
    scores = pad(scores, missing)
    low = scores.amin(0)
    high = scores.amax(0)
    is_constant = high <= low
    scaled = (scores - low) / torch.where(is_constant, 1, high - low)
    colours = torch.where(is_constant, 0.5, scaled).clamp(0, 1)
    return colours.view(*tokens.shape[:3], COLOURS), pad(explained, missing)
