"""The registered statistics of every head: of one batch, image by image, and as means and intervals over any number.

Every number is a mean over the queries of an image, then over images. Attention matrices are computed for a few images
at a time and not stored.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float
from torch import Tensor

from vitlens.analysis.evaluation.evaluate import fitting_batch_size
from vitlens.analysis.evaluation.intervals import Key, Moments
from vitlens.analysis.heads.evidence import GROUPS, Gathering, HeadEvidence
from vitlens.analysis.heads.geometry import Geometry, geometry_of
from vitlens.analysis.heads.registry import STATISTICS, head_statistics, token_statistics
from vitlens.analysis.heads.rows import FUNCTIONS, PatchRows, PerHead, PerImage, Rows, TokenNorms
from vitlens.errors import InputError, NonFiniteError, UnsupportedError
from vitlens.lens.call import AttentionCall, precise
from vitlens.lens.observe import observe, survey_weights
from vitlens.lens.site import Site
from vitlens.lens.stages import watching_stream
from vitlens.lens.trace import probe_images
from vitlens.models.model import Model
from vitlens.models.support import require
from vitlens.pixels import AnyImages, as_parts, groups_of, takes_images
from vitlens.shapes import Images, Tokens
from vitlens.summary import HeadBoard, Line, Summary


@dataclass
class BatchStatistics:
    """A batch of images: sites: the layers; values (images, heads) by statistic and layer; offsets: attention mass by
    offset, key minus query, summed over the images (heads, 2 rows - 1, 2 columns - 1). A layer of several attention
    calls has the heads of all of them, one after another. evidence: for the labels of heads, where it was asked for."""

    images: int
    sites: tuple[Site, ...]
    values: dict[Key, PerImage] = field(default_factory=dict)
    offsets: dict[int, Tensor] = field(default_factory=dict)
    evidence: HeadEvidence = field(default_factory=HeadEvidence)


def layers_of(sites: Sequence[Site]) -> tuple[Site, ...]:
    """One site for each layer, with the heads of all of its calls. Raises UnsupportedError where the numbers of tokens
    of these differ."""
    layers: list[Site] = []
    for site in sites:
        if site.part == 0:
            layers.append(site)
            continue
        first = layers[site.layer]
        if replace(first, part=site.part, heads=site.heads) != site:
            raise UnsupportedError(
                f"expected attention calls of one shape in layer {site.layer} ({site.module}), found {first.queries} "
                f"queries and {first.keys} keys, then {site.queries} and {site.keys}"
            )
        layers[site.layer] = replace(first, heads=first.heads + site.heads)
    return tuple(layers)


def measure(
    model: Model, images: Images, *, renormalise: bool = True, groups: Tensor | None = None, masks: Tensor | None = None
) -> BatchStatistics:
    """Every statistic of every head on these images, from one forward pass.

    renormalise: distances are of the attention on patches, scaled to sum to 1; otherwise the mass on CLS and other
    prefix tokens counts as 0 px. groups: (images,) the group of each, to gather the evidence for labels as well (None:
    statistics only); masks: (images, height, width) True on the object, where they are known. Weights are computed in
    fp32 at least, in any precision of the model. Raises NonFiniteError naming the layer, UnsupportedError for a model
    without attention.
    """
    if not len(images):
        raise InputError("expected at least one image, found none")
    # the passes of one and two images that survey the layers are not part of the batch
    batch = BatchStatistics(len(images), layers_of(survey_weights(model, images)))
    gathering = None if groups is None else Gathering(model, images, groups, masks)

    def take(call: AttentionCall) -> None:
        if call.site.kind == "channel":  # rows of channels have no place in the image
            return
        with torch.autocast(images.device.type, enabled=False):
            _add_call(batch, call, model, gathering, renormalise=renormalise)

    def take_norms(block: int, tokens: Tokens) -> None:
        layout = model.anatomy.layout
        prefix = len(layout.prefix) if layout is not None and tokens.shape[1] == layout.tokens else 0
        if len(tokens) == len(images) and tokens.shape[1] > max(prefix, 1):  # neither windows nor CLS only
            norms = TokenNorms(tokens.float().norm(dim=-1), prefix)
            for name in token_statistics():
                batch.values[name, block] = FUNCTIONS[name](norms)[:, None]

    with watching_stream(model, take_norms):
        observe(model, images, take)
    if gathering is not None:
        batch.evidence = gathering.evidence
    return batch


def _add_call(
    batch: BatchStatistics, call: AttentionCall, model: Model, gathering: Gathering | None, *, renormalise: bool
) -> None:
    """Add the statistics of one attention call, a few images at a time."""
    site, geometry = call.site, geometry_of(call.site, model)
    parts: list[dict[str, Tensor]] = []
    offsets: list[Tensor] = []
    if gathering is not None and geometry is not None:
        gathering.begin(call, geometry)
    for images, part in call.parts():
        weights = precise(part.precise().placed())
        if geometry is None:
            parts.append(_of_rows_only(weights, part))
            continue
        layer = PatchRows(weights, part.images, geometry, renormalise=renormalise)
        parts.append(layer.statistics())
        offsets.append(layer.offsets.sum(0, dtype=torch.float64).cpu())
        if gathering is not None:
            gathering.add(layer, parts[-1]["entropy"], images)
    if gathering is not None and geometry is not None:
        gathering.end(site.layer)
    values = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    if not all(value.isfinite().all() for value in values.values()):
        raise NonFiniteError(
            f"expected finite attention weights, found NaN or infinity in layer {site.layer} ({site.module}); "
            "check the weights of the model, or run with --precision fp32"
        )
    for name, value in values.items():  # after the heads of the layer's earlier calls
        known = batch.values.get((name, site.layer), value[:, :0])
        batch.values[name, site.layer] = torch.cat((known, value), 1)
    if offsets:
        known = batch.offsets.get(site.layer, offsets[0][:0])
        batch.offsets[site.layer] = torch.cat((known, sum(offsets[1:], offsets[0])))


def _of_rows_only(weights: Tensor, call: AttentionCall) -> dict[str, Tensor]:
    """The statistics of a pooling or CLS query's row, or of rows over pooled keys, which have no place in the image."""
    query_rows, rows = "CLS" if call.site.kind == "class" else "patches", Rows(weights)
    return {
        name: FUNCTIONS[statistic.function or name](rows).mean(-1).unflatten(0, (call.images, -1)).mean(1)
        for name, statistic in head_statistics().items()
        if statistic.input == "row" and statistic.rows == query_rows
    }


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
        for name in ("distance", "normalised_entropy"):
            values = getattr(self, name)
            if not bool(values.isnan().all()):
                yield HeadBoard(STATISTICS[name].title, values.tolist(), STATISTICS[name].unit)

    @property
    def heads(self) -> int:
        """The number of heads of the layer with most: columns of a table."""
        return max(site.heads for site in self.sites)

    def low(self, name: str) -> PerHead:
        """The lower end of the mean's 95 % interval (Student's t) over images, or over groups of images that share a
        source; NaN for one."""
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
        self._sites = batch.sites
        return batch

    def join(self, total: Callable[[Tensor], Tensor]) -> None:
        """Combine the sums of several processes; total: the sum of a tensor over all of them."""
        self.moments.join(total)
        self.overall.join(total)
        self.evidence.join(total)
        self.offsets = {layer: total(self.offsets[layer]) for layer in sorted(self.offsets)}

    def result(self) -> Statistics:
        """The statistics so far. Raises InputError before the first image."""
        count = self.moments.count
        if not count:
            raise InputError("expected at least one image, found none")
        geometries = tuple(geometry_of(site, self.model) for site in self._sites)
        offsets = (self.offsets.get(layer) for layer in range(len(self._sites)))
        masses = tuple(None if mass is None else mass / count for mass in offsets)
        return Statistics(
            count, self._sites, geometries, masses, self.moments, self.overall, self.renormalise, self.evidence
        )


def require_statistics(model: Model) -> None:
    """Raise UnsupportedError unless some layer has attention between tokens and the heads of a layer have one shape."""
    sites = survey_weights(model, probe_images(model, 1))
    if all(site.kind == "channel" for site in sites):
        raise UnsupportedError(
            f"expected layers in which tokens attend to tokens, found only channels that attend to channels in "
            f"{model.alias}"
        )
    layers_of(sites)


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
