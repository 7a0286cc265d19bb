"""The registered statistics of every head, as means and intervals over any number of images.

Every number is a mean over the queries of an image, then over images; attention matrices are not stored.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from vitlens.analysis.evaluation.evaluate import fitting_batch_size
from vitlens.analysis.evaluation.intervals import Key, Moments
from vitlens.analysis.heads.evidence import GROUPS, HeadEvidence
from vitlens.analysis.heads.geometry import Geometry, geometry_of
from vitlens.analysis.heads.measure import BatchStatistics, layers_of, measure
from vitlens.analysis.heads.registry import STATISTICS
from vitlens.analysis.heads.rows import PerHead
from vitlens.errors import InputError, UnsupportedError
from vitlens.lens.observe import survey_weights
from vitlens.lens.site import Site
from vitlens.lens.trace import probe_images
from vitlens.models.model import Model
from vitlens.models.support import require
from vitlens.pixels import AnyImages, as_parts, groups_of, takes_images
from vitlens.shapes import Images
from vitlens.summary import HeadBoard, Line, Summary

_BOARDS = ("distance", "normalised_entropy")  # statistics that a notebook shows of every head


@dataclass(frozen=True, repr=False)
class Statistics(Summary):
    """Means over images of every statistic of every head; table.entropy and so on are (layers, heads).

    Names are those of the registry; statistics of tokens have one column. NaN where a statistic is not defined for a
    layer (pooled keys have no distance, a model without CLS has no CLS row) or it has fewer heads. images: their
    number; sites: the layers; geometries: of their tokens; offset_mass: for each layer (heads, 2 rows - 1, 2 columns -
    1), the mean attention of patches by offset, key minus query, or None; renormalised: whether distances leave out the
    prefix; overall: means over all heads, by (statistic, 0); evidence: what labels of heads are decided by.
    """

    images: int
    sites: tuple[Site, ...]
    geometries: tuple[Geometry | None, ...]
    offset_mass: tuple[Tensor | None, ...]
    moments: Moments
    overall: Moments
    renormalised: bool = True
    evidence: HeadEvidence = field(default_factory=HeadEvidence)

    def __getattr__(self, name: str) -> PerHead:
        if name not in STATISTICS:
            raise AttributeError(f"no statistic {name!r}; known: {', '.join(STATISTICS)}")
        return self._table(name, self.moments.mean)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *STATISTICS})

    def summary(self) -> Iterator[Line]:
        """The number of images, and every statistic with its unit."""
        yield Line("images", self.images)
        for name, statistic in STATISTICS.items():
            yield Line(name, getattr(self, name), statistic.unit)

    def boards(self) -> Iterator[HeadBoard]:
        """The distance and the normalised entropy of every head, as far as they are defined."""
        for name in _BOARDS:
            values = getattr(self, name)
            if not bool(values.isnan().all()):
                yield HeadBoard(STATISTICS[name].title, values.tolist(), STATISTICS[name].unit)

    @property
    def heads(self) -> int:
        """The number of heads of the layer with most: columns of a table."""
        return max(site.heads for site in self.sites)

    def low(self, name: str) -> PerHead:
        """The lower end of the mean's 95 % interval (Student's t) over images, or over groups of
        images that share a source; NaN for one."""
        return self._table(name, lambda key: self.moments.mean(key) - self.moments.half_width(key))

    def high(self, name: str) -> PerHead:
        """The upper end of the mean's 95 % interval."""
        return self._table(name, lambda key: self.moments.mean(key) + self.moments.half_width(key))

    def uniform_distance(self) -> Float[Tensor, " layers"]:
        """The distance under uniform attention over patches in each layer, px; NaN where not defined."""
        pixels = [torch.nan if place is None else place.uniform_distance() for place in self.geometries]
        return torch.tensor(pixels, dtype=torch.float64)

    def _table(self, name: str, read: Callable[[tuple[str, int]], Tensor]) -> PerHead:
        rows = {layer: read((name, layer)) for known, layer in self.moments.sums if known == name}
        return per_head(rows, len(self.sites), heads=1 if STATISTICS[name].rows == "tokens" else self.heads)


def per_head(rows: Mapping[int, Tensor], layers: int, *, heads: int = 1) -> PerHead:
    """A table of rows (heads,) by layer, of at least `heads` columns; NaN where a layer has no row or fewer heads."""
    widest = max((len(row) for row in rows.values()), default=1)
    table = torch.full((layers, max(widest, heads)), torch.nan, dtype=torch.float64)
    for layer, row in rows.items():
        table[layer, : len(row)] = row
    return table


def over_heads(values: Mapping[Key, Tensor]) -> dict[Key, Tensor]:
    """The mean over all heads of all layers, (images, 1) by (statistic, 0), of values (images, heads) by layer."""
    rows: dict[str, list[Tensor]] = {}
    for (name, _), value in values.items():
        rows.setdefault(name, []).append(value)
    return {(name, 0): torch.cat(layers, 1).double().mean(1, keepdim=True) for name, layers in rows.items()}


class Stream:
    """Accumulates the statistics of batches; memory does not grow with the number of images."""

    def __init__(
        self, model: Model, *, renormalise: bool = True, evidence: bool = True, groups: Tensor | None = None
    ) -> None:
        """evidence: also gather what labels of heads are decided by; groups (n,): of all images of the data, where some
        share a source: intervals are over groups."""
        self.model, self.renormalise, self.has_evidence = model, renormalise, evidence
        self.evidence = HeadEvidence()
        self.groups = None if groups is None else groups.cpu().unique(return_inverse=True)[1]
        clusters = 0 if self.groups is None else int(self.groups.max()) + 1
        self.moments, self.overall = Moments(clusters=clusters), Moments(clusters=clusters)
        self.offsets: dict[int, Tensor] = {}
        self._sites: tuple[Site, ...] = ()

    def add(self, images: Images, *, numbers: Tensor | None = None, masks: Tensor | None = None) -> BatchStatistics:
        """Measure a batch and add it; returns its statistics image by image.

        numbers: (images,) of each in the data (None: in order of their addition); masks: (images, height, width) of
        the objects, where they are known.
        """
        first = self.moments.count
        numbers = torch.arange(first, first + len(images)) if numbers is None else numbers
        own = None if self.groups is None else self.groups[numbers.cpu()]
        parts = (numbers if own is None else own) % GROUPS if self.has_evidence else None
        batch = measure(self.model, images, renormalise=self.renormalise, groups=parts, masks=masks)
        self.evidence.add(batch.evidence)
        self.moments.add(batch.values, batch.images, groups=own)
        self.overall.add(over_heads(batch.values), batch.images, groups=own)
        for layer, mass in batch.offsets.items():
            self.offsets[layer] = self.offsets[layer] + mass if layer in self.offsets else mass
        self._sites = tuple(batch.sites)
        return batch

    def join(self, total: Callable[[Tensor], Tensor]) -> None:
        """Combine the sums of several processes; total: the sum of a tensor over all of them."""
        self.moments.join(total)
        self.overall.join(total)
        self.evidence.join(total)
        self.offsets = {layer: total(self.offsets[layer]) for layer in sorted(self.offsets)}

    def result(self) -> Statistics:
        """The statistics so far. Raises InputError before the first image."""
        if not self.moments.count:
            raise InputError("expected at least one image, found none")
        return Statistics(
            self.moments.count,
            self._sites,
            tuple(geometry_of(site, self.model) for site in self._sites),
            tuple(
                self.offsets[layer] / self.moments.count if layer in self.offsets else None
                for layer in range(len(self._sites))
            ),
            self.moments,
            self.overall,
            self.renormalise,
            self.evidence,
        )


def require_statistics(model: Model) -> None:
    """Raise UnsupportedError unless some layer has attention between tokens and the heads of a layer have one shape."""
    sites = survey_weights(model, probe_images(model, 1))
    if all(site.kind == "channel" for site in sites):
        raise UnsupportedError(
            f"expected layers in which tokens attend to tokens, found only channels that attend to channels in "
            f"{model.alias}"
        )
    layers_of(list(sites))


@takes_images
def statistics(
    model: Model,
    images: AnyImages,
    *,
    renormalise: bool = True,
    batch_size: int | None = None,
    masks: Tensor | None = None,
    evidence: bool = True,
) -> Statistics:
    """Statistics of every head's attention, means over the images: distance, entropy, sparsity, mass on CLS and sinks.

    images: (n, 3, height, width) in [0, 1], or any form that `vitlens.images` takes, read batch_size at a time (None:
    chosen to fit), with intervals over its groups where it is a Split that has them; renormalise: distances are of the
    attention on patches only; masks: (n, height, width) True on the object, for the labels of heads; evidence: also
    gather what these labels are decided by, which takes longer. Raises
    UnsupportedError for a model without attention, NonFiniteError naming the layer whose weights are not finite,
    InputError for masks of another number than images.

    >>> import torch, vitlens
    >>> vit = vitlens.load("vit-digits")
    >>> table = vitlens.statistics(vit, torch.rand(4, 3, 32, 32))
    >>> table.distance.shape == table.entropy.shape  # (layers, heads), px and nats
    True
    """
    require(model, "statistics")
    size, pixels = batch_size or fitting_batch_size(model), as_parts(images)
    stream = Stream(model, renormalise=renormalise, evidence=evidence, groups=groups_of(pixels))
    if masks is not None and (masks.dim() != 3 or len(masks) != len(pixels)):
        raise InputError(f"expected masks ({len(pixels)}, height, width), found {tuple(masks.shape)}")
    for start in range(0, len(pixels), size):
        own = None if masks is None else masks[start : start + size]
        stream.add(pixels[start : start + size].to(model.device), masks=own)
    return stream.result()
