"""Properties of images on which errors may depend, measured on each image."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from vitlens.analysis.evaluation.evaluate import Evaluation
from vitlens.analysis.failures.occlusion import outlines
from vitlens.analysis.failures.operations import luminance
from vitlens.analysis.failures.patterns import Cells, Mark, Pair, cells_of, find_mark, find_pair
from vitlens.analysis.failures.properties import PROPERTIES
from vitlens.analysis.failures.separation import FEWEST
from vitlens.analysis.faithfulness.maps import AnyMaps, map_shares
from vitlens.data.split import Split
from vitlens.models.model import Model
from vitlens.shapes import Labels, Logits, Masks

PerImage = Float[Tensor, " batch"]
Plane = Float[Tensor, "batch height width"]
_BATCH: Final = 256  # images at a time
_BLUR_WINDOW: Final = 9  # width in px of the mean filter that blurs an image again (Crete 2007)
_FEWEST_OTHERS: Final = 20  # logits are correlated over at least so many images of other classes
_ALIKE: Final = 0.01  # this part of the classes, those most like a label, resemble it
_LEAST_VARIATION: Final = 1e-6  # a property with a smaller standard deviation does not vary
_TINY: Final = 1e-12  # avoids a division by 0
_EDGE_WINDOW: Final = 5  # px; pixels within half of it around an object are not background


@dataclass(frozen=True)
class Subject:
    """One model with its images and its predictions.

    model: the model.
    split: its images.
    evaluation: its predictions on them.
    maps: attribution maps of some of the images, None without maps.
    indices: the indices of the images that have maps, None for all.
    precision, batch_size: of the model's passes over changed images.
    seed: of intervals and permutations.
    """

    model: Model
    split: Split
    evaluation: Evaluation
    maps: AnyMaps | None = None
    indices: Tensor | None = None
    precision: str = "fp32"
    batch_size: int | None = None
    seed: int = 0

    @cached_property
    def map_properties(self) -> dict[str, Tensor]:
        """Return the properties of every image's map by name, NaN for an image without a map.

        row, column: the centre of mass, as shares of the sides.
        inside: the share of the map on the object.
        half: the smallest share of the image that holds half of the map.
        outer: the share of the map outside the middle quarter of the image.
        """
        if self.maps is None:
            return {}
        with_maps = torch.arange(len(self.split)) if self.indices is None else self.indices
        grid = (self.maps.shape[-2], self.maps.shape[-1])
        masks = None if self.split.masks is None else self.split.masks[with_maps]
        shares = map_shares(self.maps, size=self.split.size, grid=grid, masks=masks)
        measured = {
            "row": shares.row,
            "column": shares.column,
            "half": shares.half,
            "outer": 1 - shares.central,
        }
        if masks is not None and shares.inside is not None:
            has_object = masks.flatten(1).any(1)
            measured["inside"] = torch.where(has_object, shares.inside, torch.nan)
        properties = dict[str, Tensor]()
        for name, values in measured.items():
            all_values = torch.full((len(self.split),), torch.nan)
            all_values[with_maps] = torch.where(shares.usable, values, torch.nan).float()
            properties[name] = all_values
        return properties

    @cached_property
    def independent(self) -> NDArray[np.intp]:
        """Return the index of one image of each source, the first."""
        groups = self.evaluation.groups
        if groups is None:
            return np.arange(len(self.split))
        _, indices_of_first = np.unique(groups.numpy(), return_index=True)
        return np.asarray(indices_of_first)

    @cached_property
    def _pixels(self) -> tuple[Mapping[str, PerImage], Cells]:
        """Return the properties of pixels and masks, and the cells for the search for a mark."""
        parts = list[dict[str, Tensor]]()
        cells = list[Cells]()
        for batch in self.split.batches(_BATCH):
            masks = self.split.masks
            if masks is not None:
                masks = masks[batch.indices.to(masks.device)].cpu()
            parts.append(_of_pixels(luminance(batch.images).cpu(), masks))
            cells.append(cells_of(batch.images).float().cpu())
        properties = dict[str, PerImage]()
        for name in parts[0]:
            properties[name] = torch.cat([part[name].float() for part in parts])
        return properties, torch.cat(cells)

    @property
    def cells(self) -> Cells:
        """Return luminance and colours of places on a grid, without the mean of each image."""
        _, cells = self._pixels
        return cells

    @cached_property
    def mark(self) -> Mark | None:
        """Return the place at which errors and correct predictions differ most.

        It is None for few errors, or few correct predictions.
        """
        if not self._has_enough_errors:
            return None
        wrong = ~self.evaluation.correct.numpy()
        return find_mark(self.cells, wrong, self.independent, self.split.size, self.seed)

    @cached_property
    def pair(self) -> Pair | None:
        """Return the two classes that are confused most; None for few errors or two classes."""
        if not self._has_enough_errors:
            return None
        labels = self.evaluation.labels
        predictions = self.evaluation.predictions
        return find_pair(labels, predictions, self.independent, len(self.evaluation.classes))

    @property
    def _has_enough_errors(self) -> bool:
        """Return True if there are enough errors and correct predictions for a comparison."""
        correct = self.evaluation.correct.numpy()[self.independent]
        return min(int(correct.sum()), int((~correct).sum())) >= FEWEST

    @cached_property
    def values(self) -> Mapping[str, PerImage]:
        """Return every property (n,) that varies over these images, NaN for unknown values.

        The property of maps is their share on the objects. If the objects are unknown, it is the
        place and the size of the map.
        """
        maps = self.map_properties
        pixel_properties, _ = self._pixels
        measured = dict(pixel_properties)
        if self.mark is not None:
            measured["mark"] = self.mark.values
        if self.pair is not None:
            measured["pair"] = self.pair.values
        if "inside" in maps:
            measured["map_on_object"] = maps["inside"]
        elif maps:
            size = self.split.size
            centres = torch.stack([maps["row"], maps["column"]], 1)
            from_middle = (centres - 0.5) * torch.tensor(size)
            measured["map_off_centre"] = from_middle.norm(dim=1) / (min(size) / 2)
            measured["map_size"] = maps["half"]
            measured["map_outer"] = maps["outer"]
        measured["look_alike"] = look_alike(self.evaluation.logits, self.evaluation.labels)
        measured["confidence"] = self.evaluation.confidence
        varying = dict[str, PerImage]()
        for name in PROPERTIES:
            if name in measured and _varies(measured[name]):
                varying[name] = measured[name]
        return varying


def _varies(values: PerImage) -> bool:
    """Return True if a property differs between images; unknown values count as 0."""
    return bool(values.nan_to_num(0.0).std(correction=0) > _LEAST_VARIATION)


def _of_pixels(planes: Plane, masks: Masks | None) -> dict[str, Tensor]:
    """Return properties of the luminance, and of the object if its mask is known."""
    # the changes to the next pixel; after the last row and column there is none, so 0 is appended
    change_down = F.pad(planes.diff(dim=1).abs(), (0, 0, 0, 1))
    change_across = F.pad(planes.diff(dim=2).abs(), (0, 1))
    edges = change_down + change_across
    properties = {"brightness": planes.mean((1, 2)), "sharpness": 1 - blur(planes)}
    if masks is None:
        properties["contrast"] = planes.flatten(1).std(1, correction=0)
        properties["clutter"] = edges.mean((1, 2))
        return properties
    inside = masks.float()
    near_object = F.max_pool2d(inside[:, None], _EDGE_WINDOW, stride=1, padding=_EDGE_WINDOW // 2)
    outside = 1 - near_object[:, 0]
    sides = torch.tensor(masks.shape[-2:])
    # in halves of the shorter side
    from_centre = (centroids(masks) - sides / 2) / (sides.min() / 2)
    contrast = _weighted_mean(planes, inside) - _weighted_mean(planes, outside)
    area = inside.mean((1, 2))
    at_top_or_bottom = masks[:, 0].any(1) | masks[:, -1].any(1)
    at_left_or_right = masks[:, :, 0].any(1) | masks[:, :, -1].any(1)
    is_at_edge = at_top_or_bottom | at_left_or_right
    properties["off_centre"] = from_centre.norm(dim=1)
    properties["size"] = torch.where(area > 0, area, torch.nan)
    properties["object_contrast"] = contrast.abs()
    properties["border"] = torch.where(area > 0, is_at_edge.float(), torch.nan)
    properties["occlusion"] = outlines(planes, masks).share
    properties["clutter"] = _weighted_mean(edges, outside)
    return properties


def blur(planes: Plane) -> PerImage:
    """Return the blur of each image, from 0 (sharp) to 1 (Crete 2007).

    An image is blurred if it changes little when it is blurred again, by a mean over 9 pixels. The
    blur along an axis is the share of the differences between neighbouring pixels that remains. The
    axis with more blur counts. An image that is constant along an axis counts as blurred along it.
    """
    by_axis = list[PerImage]()
    for along_last_axis in (planes, planes.transpose(1, 2)):
        length = along_last_axis.shape[-1]
        largest_window = 2 * ((length - 1) // 2) + 1  # odd, so that it has a middle
        window = min(_BLUR_WINDOW, largest_window)
        margin = window // 2
        padded = F.pad(along_last_axis[:, None], (margin, margin, 0, 0), mode="replicate")
        blurred_again = F.avg_pool2d(padded, (1, window), stride=1)[:, 0]
        before = along_last_axis.diff(dim=-1).abs()
        after = blurred_again.diff(dim=-1).abs()
        total = before.sum((1, 2))
        lost = (before - after).clamp_min(0).sum((1, 2))
        is_constant = total <= _LEAST_VARIATION * before[0].numel()
        remaining = 1 - lost / total.clamp_min(_TINY)
        by_axis.append(torch.where(is_constant, 1.0, remaining))
    return torch.maximum(*by_axis)


def _weighted_mean(planes: Plane, weights: Plane) -> PerImage:
    """Return the weighted mean of each image; NaN if all its weights are 0."""
    total = weights.sum((1, 2))
    mean = (planes * weights).sum((1, 2)) / total.clamp_min(_TINY)
    return torch.where(total > 0, mean, torch.nan)


def centroids(masks: Masks) -> Float[Tensor, "batch 2"]:
    """Return the mean row and column of each object's pixels, px; NaN without an object."""
    inside = masks.float()
    height, width = masks.shape[-2:]
    # pixel n reaches from n to n + 1, so its middle is at n + 0.5
    sum_of_rows = inside.sum(2) @ (torch.arange(height) + 0.5)
    sum_of_columns = inside.sum(1) @ (torch.arange(width) + 0.5)
    return torch.stack([sum_of_rows, sum_of_columns], 1) / inside.sum((1, 2))[:, None]


def look_alike(logits: Logits, labels: Labels) -> PerImage:
    """Return 1 if the most probable class other than the label resembles the label most, else 0.

    Two classes resemble each other if their logits are correlated over images of other classes. The
    hundredth of the classes with the highest correlation counts, at least one class. The result is
    NaN for fewer than 3 classes, or fewer than 20 images of other classes.
    """
    resembles = torch.full((len(labels),), torch.nan)
    classes = logits.shape[1]
    if classes < 3:
        return resembles
    other_class_logits = logits.scatter(1, labels[:, None], -torch.inf)
    rivals = other_class_logits.argmax(1)
    count = max(1, round(_ALIKE * classes))
    for label in labels.unique().tolist():
        has_label = labels == label
        logits_of_others = logits[~has_label].double()  # (images of other classes, classes)
        if len(logits_of_others) < _FEWEST_OTHERS:
            continue
        centred = logits_of_others - logits_of_others.mean(0)
        norms = centred.square().sum(0).sqrt().clamp_min(_TINY)
        products = (centred * centred[:, label, None]).sum(0)
        correlations = products / (norms * norms[label])
        correlations[label] = -1.0  # a class is not one of the classes that resemble it
        most_similar = correlations.topk(count).indices
        resembles[has_label] = torch.isin(rivals[has_label], most_similar).float()
    return resembles
