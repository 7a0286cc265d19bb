"""Classification from a few training images a class, on frozen features: nearest class means over several draws."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from vitlens.analysis.features.neighbours import unit_vectors
from vitlens.errors import DataError
from vitlens.shapes import Labels


def drawn_shots(labels: Tensor, *, most: int, draws: int, seed: int = 0) -> Int[Tensor, "draws classes most"]:
    """Seeded draws of as many training images of every class, in an order: the first k of a draw are its k shots, so
    that fewer shots are a part of more. labels: (trained,). Raises DataError for a class with fewer images."""
    classes, counts = labels.unique(return_counts=True)
    if int(counts.min()) < most:
        raise DataError(
            f"expected at least {most} training images of every class for {most} shots, found {int(counts.min())}; "
            "give more images or fewer shots"
        )
    generator = torch.Generator().manual_seed(seed)
    members = [(labels == label).nonzero()[:, 0] for label in classes]
    return torch.stack([
        torch.stack([own[torch.randperm(len(own), generator=generator)[:most]] for own in members])
        for _ in range(draws)
    ])  # fmt: skip


def few_shot(
    train: Float[Tensor, "trained dim"], train_labels: Tensor, test: Float[Tensor, "tested _"], test_labels: Labels, *,
    shots: Sequence[int], draws: int, seed: int = 0,
) -> Float[Tensor, "shots draws"]:  # fmt: skip
    """The accuracy (fraction) on the test images of the nearest class mean of a few training images, by draw.

    As SimpleShot (Wang 2019): features minus the mean of the drawn images, scaled to length 1; the class whose mean has
    the highest cosine. The draws are of images alone: they say nothing about another training.
    """
    drawn, classes = drawn_shots(train_labels, most=max(shots), draws=draws, seed=seed), train_labels.unique()
    found = torch.empty(len(shots), draws, dtype=torch.float64)
    for row, count in enumerate(shots):
        for draw, chosen in enumerate(drawn[:, :, :count]):
            own = train[chosen].double()  # (classes, count, dim)
            centre = own.mean((0, 1))
            means = unit_vectors(unit_vectors(own - centre).mean(1))
            said = (unit_vectors(test.double() - centre) @ means.T).argmax(1)
            found[row, draw] = (classes[said] == test_labels).double().mean()
    return found
