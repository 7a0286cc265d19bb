"""Statistics of every head as means with intervals over any number of images.

Every number is a mean over the queries of an image, then over images.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from vitlens.analysis.evaluation.evaluate import fitting_batch_size
from vitlens.analysis.evaluation.intervals import Key, Moments
from vitlens.analysis.heads.batch import layers_of, measure
from vitlens.analysis.heads.evidence import GROUPS, HeadEvidence
from vitlens.analysis.heads.geometry import Geometry, geometry_of
from vitlens.analysis.heads.registry import STATISTICS, Statistic
from vitlens.analysis.heads.rows import PerHead
from vitlens.errors import InputError, UnsupportedError
from vitlens.inputs import takes_images
from vitlens.lens.site import Site
from vitlens.lens.trace import depth
from vitlens.models.model import Model
from vitlens.models.requirement import requirement
from vitlens.pixels import AnyImages, as_parts, groups_of
from vitlens.shapes import Images
from vitlens.summary import HeadBoard, Line, Table


@dataclass(frozen=True, repr=False)
class Statistics(Table):
    """Means over images of every statistic of every head, as (layers, heads) tables.

    A table is an attribute with the name of its statistic in the registry. A row is a block of the
    model. Statistics of tokens have one column. A value is NaN:
    - if the statistic is not defined for the layer (pooled keys have no distance, a model without
      CLS has no CLS row);
    - if the layer has fewer heads, or the block has no attention.

    images: the number of images.
    sites: the layers with attention.
    geometries: the geometry of the tokens of each layer, None without one.
    offset_mass (heads, 2 rows - 1, 2 columns - 1): for each layer, the mean attention of patches by
        offset, key minus query. None without a geometry.
    moments: the means and errors of all statistics, by (statistic, layer).
    overall: the means and errors over all heads, by (statistic, 0).
    renormalised: True if distances leave out the prefix.
    evidence: the evidence for the labels of heads.
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
        """Yield the number of images, and every statistic with its unit."""
        yield Line("images", self.images)
        for name, statistic in STATISTICS.items():
            yield Line(name, getattr(self, name), statistic.unit)

    def boards(self) -> Iterator[HeadBoard]:
        """Yield the distance and the normalised entropy of every head, if they are defined."""
        for name in ("distance", "normalised_entropy"):
            values = getattr(self, name)
            if not bool(values.isnan().all()):
                yield HeadBoard(STATISTICS[name].title, values.tolist(), STATISTICS[name].unit)

    def records(self) -> Iterator[dict[str, object]]:
        """Yield a row for each head: layer, head, and NAME, NAME_low, NAME_high of every statistic.

        The statistics of tokens are the same for all heads of a layer.
        """
        tables: dict[str, Tensor] = {}
        for name in STATISTICS:
            tables[name] = getattr(self, name)
            tables[f"{name}_low"] = self.low(name)
            tables[f"{name}_high"] = self.high(name)
        columns = {name: table.expand(-1, self.heads).tolist() for name, table in tables.items()}
        for site in self.sites:
            for head in range(site.heads):
                values = {name: rows[site.layer][head] for name, rows in columns.items()}
                yield {"layer": site.layer, "head": head, **values}

    @property
    def heads(self) -> int:
        """Return the largest number of heads of a layer, the number of columns of a table."""
        return max(site.heads for site in self.sites)

    def low(self, name: str) -> PerHead:
        """Return the lower end of the mean's 95 % interval (Student's t).

        The interval is over images, or over groups of images that share a source. It is NaN for a
        single image or group.
        """
        return self._table(name, lambda key: self._interval(key)[0])

    def high(self, name: str) -> PerHead:
        """Return the upper end of the mean's 95 % interval."""
        return self._table(name, lambda key: self._interval(key)[1])

    @property
    def depth(self) -> int:
        """Return the number of rows of a table: layers, and blocks without attention."""
        return len(self.geometries)

    @property
    def keys(self) -> int:
        """Return the largest number of keys of a layer."""
        return max(site.keys for site in self.sites)

    def _interval(self, key: Key) -> tuple[Tensor, Tensor]:
        """Return the lower and the upper ends of the intervals of a layer's heads."""
        name, layer = key
        keys_by_layer = {site.layer: site.keys for site in self.sites}
        # blocks without attention have statistics of tokens, which do not depend on keys
        keys = keys_by_layer.get(layer, self.keys)
        least, most = bounds_in(STATISTICS[name], keys, self.geometries[layer])
        return self.moments.ends(key, least=least, most=most)

    def uniform_distance(self) -> Float[Tensor, " layers"]:
        """Return the mean distance of uniform attention in each layer in px, NaN if undefined."""
        distances = torch.full((self.depth,), torch.nan, dtype=torch.float64)
        for layer, geometry in enumerate(self.geometries):
            if geometry is not None:
                distances[layer] = geometry.uniform().distance
        return distances

    def _table(self, name: str, read: Callable[[Key], Tensor]) -> PerHead:
        """Return the table of a statistic.

        read: returns the values (heads,) for a key (statistic, layer).
        """
        rows = {}
        for key in self.moments.sums:
            statistic, layer = key
            if statistic == name:
                rows[layer] = read(key)
        heads = 1 if STATISTICS[name].rows == "tokens" else self.heads
        return per_head(rows, self.depth, heads=heads)


def bounds_in(statistic: Statistic, keys: int, geometry: Geometry | None) -> tuple[float, float]:
    """Return the least and the largest possible value of a statistic in a layer."""
    if geometry is None:
        return statistic.bounds(keys)
    return statistic.bounds(keys, patches=math.prod(geometry.map_grid), prefix=geometry.prefix)


def per_head(rows: Mapping[int, Tensor], layers: int, *, heads: int) -> PerHead:
    """Return a table of rows (heads,) by layer, with at least `heads` columns.

    NaN fills up layers with fewer heads or without a row.
    """
    columns = max(heads, *map(len, rows.values()), 0)
    table = torch.full((layers, columns), torch.nan, dtype=torch.float64)
    for layer, row in rows.items():
        table[layer, : len(row)] = row
    return table


class Stream:
    """Accumulates the statistics of batches; memory does not grow with the number of images.

    moments: sums of each statistic of each layer, over all images so far.
    overall: sums of the means over all heads, by (statistic, 0).
    evidence: the evidence for labels of heads, of all images so far.
    groups (n,): the number of each image's source, None if images are independent.
    """

    def __init__(
        self,
        model: Model,
        *,
        renormalise: bool = True,
        evidence: bool = True,
        groups: Tensor | None = None,
    ) -> None:
        """Start without images.

        renormalise: True if distances are of the attention on patches only.
        evidence: True to gather also the evidence for labels of heads.
        groups (n,): the source of each image of the data, if some share one. Intervals are then
            over sources.
        """
        self.model = model
        self.renormalise = renormalise
        self.has_evidence = evidence
        self.evidence = HeadEvidence()
        self.groups: Tensor | None = None
        clusters = 0
        if groups is not None:
            distinct, self.groups = groups.cpu().unique(return_inverse=True)
            clusters = len(distinct)
        self.moments = Moments(clusters=clusters)
        self.overall = Moments(clusters=clusters)

    def add(
        self, images: Images, *, numbers: Tensor | None = None, masks: Tensor | None = None
    ) -> None:
        """Measure a batch and add it.

        numbers (images,): the index of each image in the data (None: images are added in order).
        masks (images, height, width): True on the object.
        """
        if numbers is None:
            first = self.moments.count
            numbers = torch.arange(first, first + len(images))
        groups = None if self.groups is None else self.groups[numbers.cpu()]
        evidence_groups = None
        if self.has_evidence:
            sources = numbers if groups is None else groups
            evidence_groups = sources % GROUPS
        batch = measure(
            self.model,
            images,
            renormalise=self.renormalise,
            groups=evidence_groups,
            masks=masks,
        )
        self.evidence.add(batch.evidence)
        self.moments.add(batch.values, len(images), groups=groups)
        by_name: dict[str, list[Tensor]] = {}
        for (name, _), values in batch.values.items():
            by_name.setdefault(name, []).append(values)
        means = {}
        for name, values_by_layer in by_name.items():
            # (images, heads of all layers): equal weight for heads, not for layers
            all_heads = torch.cat(values_by_layer, 1).double()
            means[name, 0] = all_heads.mean(1, keepdim=True)
        self.overall.add(means, len(images), groups=groups)

    def join(self, total: Callable[[Tensor], Tensor]) -> None:
        """Combine the sums of several processes.

        total: returns the sum of a tensor over all processes.
        """
        self.moments.join(total)
        self.overall.join(total)
        self.evidence.join(total)

    def result(self) -> Statistics:
        """Return the statistics so far. Raises InputError before the first image."""
        images = self.moments.count
        sites = layers_of(self.model)
        if not images:
            raise InputError("expected at least one image, found none")
        layers = depth(self.model)
        geometries: list[Geometry | None] = [None] * layers
        offset_mass: list[Tensor | None] = [None] * layers
        for site in sites:
            geometries[site.layer] = geometry_of(site, self.model)
            mass = self.evidence.sums.get(("offsets", site.layer))
            offset_mass[site.layer] = None if mass is None else mass.sum(0) / images
        return Statistics(
            images=images,
            sites=sites,
            geometries=tuple(geometries),
            offset_mass=tuple(offset_mass),
            moments=self.moments,
            overall=self.overall,
            renormalised=self.renormalise,
            evidence=self.evidence,
        )


@requirement("statistics")
def require_statistics(model: Model) -> None:
    """Raise UnsupportedError unless the model has attention between tokens.

    All heads of a layer must have the same numbers of queries and keys.
    """
    if all(site.kind == "channel" for site in layers_of(model)):
        raise UnsupportedError(
            "expected layers in which tokens attend to tokens, found only channels that attend to "
            f"channels in {model.alias}"
        )


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
    """Return statistics of every head's attention, means over images: distance, entropy, sparsity.

    Further statistics are the mass on CLS, on registers and on sinks, and norms of tokens.

    images: (n, 3, height, width) in [0, 1], or any form that `vitlens.images` takes. If it is a
        Split with groups of images, intervals are over groups.
    renormalise: True if distances are of the attention on patches only.
    batch_size: the number of images at a time (None: chosen to fit into memory).
    masks: (n, height, width) True on the object, for the labels of heads.
    evidence: True to gather also the evidence for these labels, which takes longer.

    Raises UnsupportedError for a model without attention. Raises NonFiniteError, with the name of
    the layer, for weights that are not finite. Raises InputError if masks are not as many as
    images.

    >>> import torch, vitlens
    >>> vit = vitlens.load("vit-digits")
    >>> table = vitlens.statistics(vit, torch.rand(4, 3, 32, 32))
    >>> table.distance.shape == table.entropy.shape  # (layers, heads), px and nats
    True
    """
    require_statistics(model)
    size = batch_size or fitting_batch_size(model)
    pixels = as_parts(images)
    stream = Stream(model, renormalise=renormalise, evidence=evidence, groups=groups_of(pixels))
    if masks is not None and (masks.dim() != 3 or len(masks) != len(pixels)):
        raise InputError(
            f"expected masks ({len(pixels)}, height, width), found {tuple(masks.shape)}"
        )
    for start in range(0, len(pixels), size):
        batch = slice(start, start + size)
        batch_masks = None if masks is None else masks[batch]
        stream.add(pixels[batch].to(model.device), masks=batch_masks)
    return stream.result()
