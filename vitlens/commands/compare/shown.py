"""The images whose maps are shown: a spread of agreements, and examples of each cell of errors."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from vitlens.analysis.evaluation.evaluate import Evaluation
from vitlens.analysis.failures.compare import Comparison
from vitlens.commands.compare.maps import MapsOfBoth
from vitlens.commands.compare.record import CELLS, ImageRow, ShownArrays
from vitlens.data.split import Split


def image_rows(
    comparison: Comparison, split: Split, maps: MapsOfBoth, examples: Sequence[Tensor], panels: int
) -> Iterator[ImageRow]:
    """Yield the panels by rising agreement of the maps, then the examples.

    examples: the indices of the examples of each cell.
    panels: the number of panels at most.
    """
    panel_of_image = _choose_panels(maps, panels)
    example_images: list[int] = []
    for indices in examples:
        example_images += indices.tolist()
    agreement = _agreement_by_image(maps)
    names = comparison.first.classes
    first_predictions = _predictions(comparison.first, names)
    second_predictions = _predictions(comparison.second, names)
    cells = list(CELLS)
    # each image once, although a panel may be an example, too
    for image in dict.fromkeys([*panel_of_image, *example_images]):
        first_prediction, first_probability = first_predictions[image]
        second_prediction, second_probability = second_predictions[image]
        file = f"{split.name} {image}"
        if split.files:
            file = split.files[image]
        yield ImageRow(
            image=image,
            file=file,
            truth=names[comparison.first.labels[image]],
            cell=cells[comparison.cells[image]],
            first_prediction=first_prediction,
            first_probability=first_probability,
            second_prediction=second_prediction,
            second_probability=second_probability,
            agreement=agreement.get(image),
            panel=panel_of_image.get(image),
            example=image in example_images,
        )


def _choose_panels(maps: MapsOfBoth, panels: int) -> dict[int, int]:
    """Return the number of the panel of each image that has one.

    The images are evenly spaced over the ranking, by agreement, of all usable sampled maps.
    """
    # positions among the mapped images
    usable = (maps.overlap.usable & maps.sampled).nonzero().flatten()
    ascending = maps.overlap.spearman[usable].argsort(stable=True)
    # indices into the split, by rising agreement
    images = maps.indices[usable[ascending]]
    count = min(panels, len(images))
    # evenly spaced positions in `images`
    ranks = torch.linspace(0, len(images) - 1, count, dtype=torch.float64).round().long()
    return {image: panel for panel, image in enumerate(images[ranks].tolist())}


def _agreement_by_image(maps: MapsOfBoth) -> dict[int, float]:
    """Return the rank correlation of the maps of each image for which both are usable."""
    usable = maps.overlap.usable
    correlations = maps.overlap.spearman[usable].tolist()
    agreement = {}
    for image, correlation in zip(maps.indices[usable].tolist(), correlations):
        agreement[image] = round(correlation, 4)
    return agreement


def _predictions(evaluation: Evaluation, names: Sequence[str]) -> list[tuple[str, float]]:
    """Return the predicted class of each image with its probability."""
    predictions = []
    for index, confidence in zip(evaluation.predictions.tolist(), evaluation.confidence.tolist()):
        predictions.append((names[index], round(confidence, 4)))
    return predictions


def shown_arrays(rows: Sequence[ImageRow], split: Split, maps: MapsOfBoth) -> ShownArrays:
    """Return the pixels of the images, and the positive part of both maps.

    Values that are not finite become 0.
    """
    images = torch.tensor([row.image for row in rows], dtype=torch.long)
    positions = torch.searchsorted(maps.indices, images)  # the indices of mapped images ascend
    first, second = maps.values
    masks = None
    if split.masks is not None:
        masks = split.masks[images].numpy()
    return ShownArrays(
        pixels=split.source.read(images).numpy(),
        first=_positive(first[positions]).numpy(),
        second=_positive(second[positions]).numpy(),
        masks=masks,
    )


def _positive(maps: Tensor) -> Tensor:
    return maps.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).clamp_min(0)
