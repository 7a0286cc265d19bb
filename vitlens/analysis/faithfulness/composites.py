"""Composite images whose evidence for a class lies in a known place, so that maps can be scored without masks.

The grid pointing game (Böhle 2021): mosaics of confidently classified images of distinct classes, each class explained
in turn; the share of a map's positive mass in the right cell of k x k is 1/k² by chance. Also an image shrunk onto
another one, and an object pasted on another background. Everything is drawn from a seed, and a composite does not
depend on how many are made.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from vitlens.analysis.faithfulness.defaults import COMPOSITES, CONFIDENT
from vitlens.analysis.faithfulness.localisation import Score, has_edge, pointing_hits, roc_auc, share_of_mass
from vitlens.analysis.faithfulness.maps import AnyMaps, PerImage, Size
from vitlens.analysis.faithfulness.road import imputed
from vitlens.errors import InputError
from vitlens.shapes import Images, Labels, Logits, Masks

_RIM: Final = 32  # part of the shorter side by which an object that is imputed is widened
_TRIES: Final = 20  # draws of a composite that exists already, after which there are taken to be no further ones


@dataclass(frozen=True)
class Composites:
    """Composite images, and the classes that are explained on them."""

    images: Float[Tensor, "composites 3 height width"]
    which: Int[Tensor, " batch"]  # the composite of each map
    targets: Labels  # the class that it explains
    masks: Masks  # where the evidence for this class lies
    sources: Int[Tensor, "composites parts"]  # the given images of which each composite is made

    def __len__(self) -> int:
        return len(self.which)

    @property
    def chance(self) -> float:
        """The mean share of a composite that the evidence covers: the mass that a uniform map has there."""
        return float(self.masks.float().mean())


def cell_mass(maps: AnyMaps, masks: Masks) -> PerImage:
    """The share of each map's positive mass in its cell; 0 where it has none. Chance is the cell's area.

    The mass of a patch lies evenly on its pixels, so that a map of whole patches in the cell has 1 (bilinear
    interpolation would move mass across the cell's edge).
    """
    large = F.interpolate(maps.double().unsqueeze(1), size=masks.shape[-2:], mode="nearest-exact").flatten(1)
    return share_of_mass(large, masks.flatten(1)).float()


COMPOSITE_SCORES: Final[Mapping[str, Score]] = {"mass": cell_mass, "pointing": pointing_hits, "roc_auc": roc_auc}


def confident_images(logits: Logits, labels: Labels, *, least: float = CONFIDENT) -> Int[Tensor, " usable"]:
    """The images that are classified as their label with at least this probability, in their order."""
    found, own = logits.float().softmax(-1), labels.to(logits.device)
    sure = found.gather(1, own[:, None]).squeeze(1) >= least
    return (sure & (found.argmax(-1) == own)).nonzero().squeeze(1)


def recognised(logits: Logits, targets: Labels, parts: int) -> Bool[Tensor, " batch"]:
    """Whether each target is among the most probable classes of its composite, as many as it has parts."""
    most = logits.topk(min(parts, logits.shape[1]), dim=1).indices
    return (most == targets.to(most.device)[:, None]).any(1).cpu()


def mosaics(
    images: Images,
    labels: Labels,
    _masks: Masks | None = None,
    *,
    side: int = 2,
    count: int = COMPOSITES,
    seed: int = 0,
) -> Composites:
    """At most count mosaics of side x side images of distinct classes, in the images' size; every cell is explained.

    Raises InputError for fewer distinct classes than cells.
    """
    cells = side * side
    drawn = _drawn(labels, count, cells, seed)
    canvas = images.new_zeros(len(drawn), *images.shape[1:])
    masks = torch.zeros(cells, *images.shape[-2:], dtype=torch.bool)
    ends = ([round(extent * part / side) for part in range(side + 1)] for extent in images.shape[-2:])
    rows, columns = (list(pairwise(each)) for each in ends)  # as equal as whole pixels can be
    for cell in range(cells):
        (top, bottom), (left, right) = rows[cell // side], columns[cell % side]
        canvas[..., top:bottom, left:right] = _shrunk(images[drawn[:, cell]], (bottom - top, right - left))
        masks[cell, top:bottom, left:right] = True
    which = torch.arange(len(drawn)).repeat_interleave(cells)
    return Composites(canvas, which, labels.cpu()[drawn].flatten(), masks.repeat(len(drawn), 1, 1), drawn)


def embedded(
    images: Images, labels: Labels, _masks: Masks | None = None, *, count: int = COMPOSITES, seed: int = 0
) -> Composites:
    """At most count images, shrunk to half their sides, each at a random place on an image of another class.

    Raises InputError for fewer than two classes.
    """
    drawn = _drawn(labels, count, 2, seed)
    height, width = (int(side) for side in images.shape[-2:])
    size = max(1, round(height / 2)), max(1, round(width / 2))
    canvas, small = images[drawn[:, 1]].clone(), _shrunk(images[drawn[:, 0]], size)
    masks = torch.zeros(len(drawn), height, width, dtype=torch.bool)
    for place in range(len(drawn)):
        generator = torch.Generator().manual_seed(seed * 1_000_003 + place)
        top = int(torch.randint(height - size[0] + 1, (1,), generator=generator))
        left = int(torch.randint(width - size[1] + 1, (1,), generator=generator))
        canvas[place, :, top : top + size[0], left : left + size[1]] = small[place]
        masks[place, top : top + size[0], left : left + size[1]] = True
    return Composites(canvas, torch.arange(len(drawn)), labels.cpu()[drawn[:, 0]], masks, drawn)


def pasted(images: Images, labels: Labels, masks: Masks, *, count: int = COMPOSITES, seed: int = 0) -> Composites:
    """At most count objects, each on the background of another class, from which its own object is imputed with a rim,
    as a mask's edge leaves some of its object's outline.

    Raises InputError for fewer than two classes of images with an object and background.
    """
    known = has_edge(masks.cpu()).nonzero().squeeze(1)
    drawn = known[_drawn(labels[known.to(labels.device)], count, 2, seed)]
    objects, others = (masks.to(images.device)[drawn[:, part]] for part in (0, 1))
    reach = -(-min(masks.shape[-2:]) // _RIM)
    wide = F.max_pool2d(others.float().unsqueeze(1), 2 * reach + 1, stride=1, padding=reach) > 0
    holes = torch.where(wide.flatten(1).all(1).view(-1, 1, 1, 1), others.unsqueeze(1), wide)  # something must be left
    ground = imputed(images[drawn[:, 1]], holes, noise=0.0)
    canvas = torch.where(objects.unsqueeze(1), images[drawn[:, 0]], ground)
    return Composites(canvas, torch.arange(len(drawn)), labels.cpu()[drawn[:, 0]], objects.cpu(), drawn)


def _drawn(labels: Labels, count: int, parts: int, seed: int) -> Int[Tensor, "composites parts"]:
    """Different draws of images of distinct classes; images that were used less are drawn first.

    Raises InputError for fewer classes than parts.
    """
    classes = labels.tolist()
    if len(set(classes)) < parts:
        raise InputError(f"expected images of at least {parts} distinct classes, found {len(set(classes))}")
    generator = torch.Generator().manual_seed(seed)
    used, draws, repeats = torch.zeros(len(classes)), dict[tuple[int, ...], None](), 0
    while len(draws) < count and repeats < _TRIES:
        order = (used + torch.rand(len(classes), generator=generator)).argsort().tolist()
        by_class: dict[int, int] = {}
        for index in order:
            by_class.setdefault(classes[index], index)
        chosen = list(by_class.values())[:parts]
        shuffled = tuple(chosen[place] for place in torch.randperm(parts, generator=generator).tolist())
        repeats = repeats + 1 if shuffled in draws else 0
        draws[shuffled] = None
        used[list(shuffled)] += 1
    return torch.tensor(list(draws))


def _shrunk(images: Images, size: Size) -> Float[Tensor, "batch 3 _ _"]:
    return F.interpolate(images, size=size, mode="bilinear", antialias=True, align_corners=False).clamp(0, 1)
