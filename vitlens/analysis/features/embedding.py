"""Features in two dimensions by t-SNE and PCA, seeded, with their trustworthiness; patches as colours by PCA."""

from dataclasses import dataclass
from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor

from vitlens.analysis.features.neighbours import unit_vectors
from vitlens.errors import DataError, InputError, UnknownNameError
from vitlens.names import PERPLEXITY, PROJECTIONS, Projection

NEIGHBOURS: Final = 10  # k of trustworthiness
COMPONENTS: Final = 3  # red, green, blue
_REDUCED: Final = 50  # input dimensions of t-SNE (van der Maaten and Hinton 2008, section 4.2)
_STEPS: Final = 500  # of t-SNE, half of the usual number: on 450 digits the trustworthiness is the same to 0.001

Points = Float[Tensor, "images 2"]


@dataclass(frozen=True)
class Embedding:
    """Points in two dimensions.

    points: (n, 2), float64; trustworthiness: fraction in [0, 1], how far neighbours in the embedding are neighbours in
    the features (Venna and Kaski 2001), about 0.5 for random points; neighbours: its k;
    perplexity: t-SNE's; explained: the two components' shares of the variance, PCA's.
    """

    method: Projection
    points: Points
    trustworthiness: float
    neighbours: int
    perplexity: float | None = None
    explained: Float[Tensor, " 2"] | None = None


def embed(
    values: Float[Tensor, "images dim"], *, method: Projection = "tsne", perplexity: float = PERPLEXITY, seed: int = 0
) -> Embedding:
    """Features (of images, or of patches) in two dimensions.

    Vectors are first scaled to length 1, so that t-SNE's distances order them as the cosine does; t-SNE runs on the
    first 50 principal components and starts from the first two. t-SNE shows neighbourhoods only: the sizes of clusters
    and the distances between them mean nothing. At least 4 rows; a perplexity that `require_perplexity` takes. Raises
    DataError for features that are all the same.
    """
    if method not in PROJECTIONS:
        raise UnknownNameError("projection", method, PROJECTIONS)
    units, neighbours = unit_vectors(values), min(NEIGHBOURS, (len(values) - 1) // 2)  # trust is defined below half
    scores, explained = principal(units, count=min(_REDUCED, *values.shape))
    if method == "pca":
        points = torch.nn.functional.pad(scores, (0, 2))[:, :2]  # features of rank 1 have a single column
        shares = torch.nn.functional.pad(explained, (0, 2))[:2]
        trust = trustworthiness(units, points, neighbours=neighbours)
        return Embedding("pca", points, trust, neighbours, explained=shares)
    from sklearn.manifold import TSNE  # takes a second to import

    initial = scores[:, :2] if scores.shape[1] > 1 else torch.nn.functional.pad(scores, (0, 1))
    initial = 1e-4 * initial / scores[:, 0].std()  # the scale of scikit-learn's init="pca"
    model = TSNE(
        2, perplexity=perplexity, init=initial.numpy(), learning_rate="auto", max_iter=_STEPS, random_state=seed
    )
    points = torch.from_numpy(model.fit_transform(scores.numpy())).double()
    trust = trustworthiness(units, points, neighbours=neighbours)
    return Embedding("tsne", points, trust, neighbours, perplexity=perplexity)


def require_perplexity(perplexity: float, images: int) -> None:
    """Raise InputError unless t-SNE's perplexity (the effective number of neighbours) fits this number of images."""
    most = (images - 1) / 3  # van der Maaten's own limit: t-SNE uses three times as many neighbours
    if not 1 <= perplexity <= most:
        room = f"from 1 to {most:.4g}" if most >= 1 else "with more images"
        raise InputError(
            f"expected a perplexity {room} for {images} images, found {perplexity:g}; give another, or more images"
        )


def principal(
    values: Float[Tensor, "rows dim"], *, count: int
) -> tuple[Float[Tensor, "rows count"], Float[Tensor, " count"]]:
    """Principal components: scores (rows, count) of the centred rows and their shares of the variance, float64.

    Signs are fixed: the loading of greatest absolute value of each component is positive. Raises DataError for rows all
    the same, which have no components.
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


def trustworthiness(
    values: Float[Tensor, "images dim"], points: Float[Tensor, "images plane"], *, neighbours: int
) -> float:
    """1 minus a penalty: each neighbour in the embedding that is none in the features adds its rank beyond k.

    In [0, 1]; 1 where all neighbours in the embedding are among the k nearest in the features, about 0.5 for random
    points. As scikit-learn's, but points as near as a neighbour do not add to its rank. Defined
    for a k below half of the images.
    """
    n, k = len(values), neighbours
    squared = []
    for each in (values.double(), points.double()):
        exact = each - each.mean(0)  # a large common offset would cost precision
        lengths = exact.square().sum(1)
        squared.append((lengths[:, None] + lengths - 2 * exact @ exact.T).fill_diagonal_(torch.inf))
    far, near = squared[0], squared[1].topk(k, largest=False).indices
    closer = [(far < far.gather(1, near[:, column : column + 1])).sum(1) for column in range(k)]
    penalty = sum(int((each + 1 - k).clamp_min(0).sum()) for each in closer)  # a rank is the closer points plus 1
    return 1 - 2 / (n * k * (2 * n - 3 * k - 1)) * penalty


@dataclass(frozen=True)
class PatchComponents:
    """The first three principal components of each patch.

    scores: (n, rows, columns, 3) on the principal components; explained: each component's share of the variance.
    """

    scores: Float[Tensor, "images rows columns 3"]
    explained: Float[Tensor, " 3"]

    def colours(self) -> Float[Tensor, "images rows columns 3"]:
        """Scores as red, green and blue in [0, 1]: each component from its minimum to its maximum over all images.

        A component that does not vary is 0.5.
        """
        low, high = self.scores.amin((0, 1, 2)), self.scores.amax((0, 1, 2))
        flat = high <= low
        return torch.where(flat, 0.5, (self.scores - low) / torch.where(flat, 1, high - low)).clamp(0, 1)


def patch_components(tokens: Float[Tensor, "images rows columns dim"]) -> PatchComponents:
    """The first three principal components of the patches of all images together (Oquab 2023, figure 1): patches of
    similar content have similar colours across images, because all images share one PCA.

    Raises DataError for patches that are all the same.
    """
    patches = tokens.flatten(0, 2)
    scores, explained = principal(patches, count=min(COMPONENTS, patches.shape[1]))
    missing = (0, COMPONENTS - scores.shape[1])
    padded = torch.nn.functional.pad(scores, missing).view(*tokens.shape[:3], COMPONENTS)
    return PatchComponents(padded, torch.nn.functional.pad(explained, missing))
