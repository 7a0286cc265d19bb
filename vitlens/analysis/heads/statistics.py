"""The registered statistics of every head: of one batch, image by image, and as means and intervals
over any number; and what the labels of heads are decided by.

Every number is a mean over the queries of an image, then over images. Attention matrices are
computed for a few images at a time and not stored. The evidence for labels is sums over images,
kept apart for a few groups of images, which makes two things possible in memory that does not grow
with the number of images: what one image does at a place can be predicted from other images
(cross-validation), and every score has a jackknife interval. All information is in bits relative to
uniform attention over the keys that a query can attend to.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from vitlens.analysis.evaluation.evaluate import fitting_batch_size
from vitlens.analysis.evaluation.intervals import Key, Moments
from vitlens.analysis.heads.geometry import Geometry, geometry_of
from vitlens.analysis.heads.registry import STATISTICS, token_statistics
from vitlens.analysis.heads.rows import (
    FUNCTIONS,
    PatchRows,
    PerHead,
    PerImage,
    TokenNorms,
    ascending,
    row_statistics,
)
from vitlens.errors import InputError, NonFiniteError, UnsupportedError
from vitlens.inputs import takes_images
from vitlens.lens.attention import Tap, projection_of, tapped
from vitlens.lens.call import MASKED, MASKED_SCORE, AttentionCall, precise, row_by_row
from vitlens.lens.observe import observe, require_special_first, survey_weights
from vitlens.lens.places import Access, accesses
from vitlens.lens.site import Site
from vitlens.lens.stages import watching_stream
from vitlens.lens.trace import depth, probe_images
from vitlens.models.model import Model
from vitlens.models.requirement import requirement
from vitlens.pixels import AnyImages, as_parts, groups_of
from vitlens.shapes import Images, Tokens
from vitlens.summary import HeadBoard, Line, Table

GROUPS: Final = 16  # of images: image i belongs to group i modulo 16
# of the patches: more keys that all queries share are an object or a region, not sinks
FEW: Final = 0.1
SIMILAR: Final = 0.1  # of the patches: those nearest in colour to the query patch
OF_LAYERS: Final = (
    "object_share",
    "high_norm_share",
    "similar_chance",
    "similar_offsets",
)  # the same for all heads
_ALIKE: Final = 1e-4  # of the range of pixels: colours this near differ by rounding
_TINY: Final = 1e-30


@dataclass
class HeadEvidence:
    """Sums over the images of each group: counts (groups,); sums (groups, ..) by name and layer.

    offsets (heads, down, across): mass by offset, key minus query; received (heads, keys): mean
    mass of each key; bits (heads,): information of a row, log2 of the number of keys minus its
    entropy; sinks (heads,): see sink_bits; object (heads,), object_share (): mass on the mask, and
    that of uniform attention; sinks_off (heads,): mass on sinks (see rows.outliers) off the mask;
    similar, popular (heads,): mass on patches of similar colour, and that expected from how much
    each key receives; similar_chance (): that of uniform attention; similar_offsets (down, across):
    pairs of similar patches by offset; output (heads,): mean norm of what the head adds to the
    residual stream.
    """

    counts: Float[Tensor, " groups"] = field(
        default_factory=lambda: torch.zeros(GROUPS, dtype=torch.float64)
    )
    sums: dict[Key, Tensor] = field(default_factory=dict)

    def add(self, other: "HeadEvidence") -> None:
        """Add the sums of other images."""
        self.counts = self.counts + other.counts
        add_all(self.sums, other.sums)

    def join(self, total: Callable[[Tensor], Tensor]) -> None:
        """Combine the sums of several processes; total: the sum of a tensor over all of them."""
        self.counts = total(self.counts)
        for key in sorted(self.sums):
            self.sums[key] = total(self.sums[key])


def add_all(sums: dict[Key, Tensor], more: Mapping[Key, Tensor]) -> None:
    """Add tensors to those of the same key."""
    for key, value in more.items():
        sums[key] = sums[key] + value if key in sums else value


def by_group(
    values: Float[Tensor, "images *rest"], groups: Int[Tensor, " images"]
) -> Float[Tensor, "groups *rest"]:
    """Return sums over the images of each group, float64 on the CPU."""
    sums = torch.zeros(GROUPS, *values.shape[1:], dtype=torch.float64)
    return sums.index_add_(0, groups.cpu(), values.detach().double().cpu())


def evidence_of(
    layer: PatchRows, entropy: PerImage, similar: Tensor, mask: Tensor | None, high: Tensor | None
) -> dict[str, Tensor]:
    """Return the evidence of some images of one layer, by name (images, ..); similar: see
    similar_pairs; mask: (images, patches), the share of each patch on the object, or None; high:
    (images, patches) 1 for a patch of exceptional norm in the stream before the layer, or None.
    """
    place = layer.geometry
    got = layer.received_of_all
    on_patches = got[..., place.prefix :]
    pairs = similar.to(layer.weights)  # (images, calls, query, key)
    weights = layer.on_neighbours.unflatten(
        0, (layer.images, -1)
    )  # (images, calls, heads, query, key)
    mean_row = weights.sum(-2) / layer.real.sum(-1)[:, None, None].clamp_min(1)
    keys = place.pairs().sum(-1).add(place.prefix).clamp_min(1).to(layer.weights)
    found = {
        "received": got,
        "bits": place.uniform().keys - entropy / math.log(2),
        "sinks": sink_bits(on_patches),
        "similar": torch.einsum("ichqk,icqk->ih", weights, pairs) / layer.count,
        "popular": torch.einsum("ichk,ick->ih", mean_row, pairs.sum(-2)) / layer.count,
        "similar_chance": (pairs.sum(-1) / keys).sum((1, 2)) / layer.count,
        "similar_offsets": place.by_offset(pairs).sum(1) / layer.count,
    }
    if mask is not None:
        shares = mask.to(layer.weights)
        off = layer.sinks[..., place.prefix :] * (1 - shares[:, None])
        found["object"] = (on_patches * shares[:, None]).sum(-1)
        found["sinks_off"] = (on_patches * off).sum(-1)
        found["object_share"] = (
            place.uniform().received.to(layer.weights)[place.prefix :] * shares
        ).sum(-1)
    if high is not None:
        high = high.to(layer.weights)
        found["high_norm"] = (on_patches * high[:, None]).sum(-1)
        found["high_norm_share"] = (
            place.uniform().received.to(layer.weights)[place.prefix :] * high
        ).sum(-1)
    return found


def sink_bits(got: Float[Tensor, "images heads patches"]) -> PerImage:
    """Return how many bits it tells that a key is among the most attended ones of its image, at
    most FEW of the patches.
    """
    patches = got.shape[-1]
    mass = got.sum(-1)
    most = max(1, int(FEW * patches))
    top = ascending(got).flip(-1)[..., :most].cumsum(-1) / mass.clamp_min(_TINY)[..., None]
    share = torch.arange(1, most + 1, device=got.device, dtype=got.dtype) / patches
    return mass * bits_of_part(top, share).amax(-1)


def bits_of_part(mass: Tensor, expected: Tensor) -> Tensor:
    """Return the information in bits that a part of the keys has this share of the attention rather
    than the expected one; 0 where it has less.
    """
    inside = mass.clamp(0, 1)
    chance = torch.as_tensor(expected).clamp(1e-9, 1 - 1e-9)
    bits = torch.xlogy(inside, inside / chance) + torch.xlogy(
        1 - inside, (1 - inside) / (1 - chance)
    )
    return (bits / math.log(2)).where(inside > chance, torch.zeros_like(bits))


def on_grid(pixels: Tensor, place: Geometry) -> Float[Tensor, "images patches channels"]:
    """Return the mean of each channel over each patch of the map."""
    return F.adaptive_avg_pool2d(pixels.float(), place.map_grid).flatten(2).transpose(1, 2)


def similar_pairs(images: Images, place: Geometry) -> Bool[Tensor, "images calls query key"]:
    """For each patch, the SIMILAR share of patches nearest to it in mean colour, ties and itself
    included.
    """
    pairs = place.pairs().to(images.device)
    places = place.places().to(images.device).clamp_min(0)
    nearest = min(max(1, math.ceil(SIMILAR * place.patches)) + 1, place.patches)  # and itself
    found = []
    for colour in on_grid(images, place)[
        :, places
    ]:  # one image at a time: distances of all pairs take memory
        apart = torch.cdist(
            colour, colour, compute_mode="donot_use_mm_for_euclid_dist"
        ).masked_fill(~pairs, torch.inf)
        found.append((apart <= apart.kthvalue(nearest, -1, keepdim=True).values + _ALIKE) & pairs)
    return torch.stack(found)


def head_norms(
    output: Float[Tensor, "calls heads tokens head_dim"], projection: nn.Linear | None
) -> Tensor:
    """Return the mean norm over tokens (calls, heads) of what each head adds to the residual
    stream; of its output without a projection.
    """
    heads = output.shape[1]
    width = output.shape[-1]
    if projection is not None and projection.in_features == heads * width:
        columns = (
            precise(projection.weight).unflatten(1, (heads, width)).movedim(1, 0)
        )  # (heads, dim, head_dim)
        squares = (output @ (columns.transpose(1, 2) @ columns)).mul(output).sum(-1)
    else:
        squares = output.square().sum(-1)
    norms: Tensor = squares.clamp_min(0).sqrt().mean(-1)
    return norms


def layers_of(model: Model) -> tuple[Site, ...]:
    """Return one site for each layer, with the heads of all of its calls.

    Raises UnsupportedError where the numbers of tokens of these differ, special tokens stand behind
    patches, or there is no attention.
    """
    require_special_first(model)
    by_layer: dict[int, Site] = {}
    for site in survey_weights(model, probe_images(model, 1)):
        if site.part == 0:
            by_layer[site.layer] = site
            continue
        first = by_layer[site.layer]
        if replace(first, part=site.part, heads=site.heads) != site:
            raise UnsupportedError(
                f"expected attention calls of one shape in layer {site.layer} ({site.module}), "
                f"found {first.queries} queries and {first.keys} keys, then {site.queries} and "
                f"{site.keys}"
            )
        by_layer[site.layer] = replace(first, heads=first.heads + site.heads)
    return tuple(by_layer.values())


def allowed_keys(
    call: AttentionCall, place: Geometry | None
) -> Bool[Tensor, "calls _ _ key"] | None:
    """Return the keys that each query of an image may attend to, (calls of an image, heads or 1,
    query or 1, key).

    None where these are all keys, or are not known. Read from the mask of the first image; where a
    model in windows adds its mask itself, from the geometry, and from the weights for padding and
    the seams that it does not mask.
    """
    windows = call.site.windows
    first = call.pick(0)
    if first.inputs is not None:
        bias = first.inputs.bias
        if bias is None:
            return None
        allowed = bias if bias.dtype == torch.bool else bias > MASKED_SCORE
        allowed = allowed[(None,) * (4 - allowed.dim())]
        allowed = allowed.expand(len(first.inputs.query), -1, -1, -1)
        if windows is not None:
            allowed = row_by_row(allowed.expand(-1, -1, first.site.queries, -1), windows)
    elif windows is not None and place is not None:
        pairs = place.pairs().to(first.placed().device)
        allowed = ((first.placed() > MASKED).any(1) | pairs)[:, None]
    else:
        return None
    return None if bool(allowed.all()) else allowed


class BatchStatistics:
    """What one forward pass tells of the heads, gathered call by call, a few images at a time.
    values (images, heads): by statistic and layer, those of several calls of a layer one after
    another; evidence: the mass by offset, and where groups are given, all that labels of heads are
    decided by.
    """

    def __init__(
        self,
        model: Model,
        images: Images,
        groups: Tensor | None,
        masks: Tensor | None,
        *,
        renormalise: bool,
    ) -> None:
        self.model = model
        self.images = images
        self.masks = masks
        self.renormalise = renormalise
        self.for_labels = groups is not None
        self.groups = torch.zeros(len(images), dtype=torch.long) if groups is None else groups
        self.values: dict[Key, PerImage] = {}
        self.evidence = HeadEvidence(by_group(torch.ones(len(images)), self.groups))
        self._seen: dict[Geometry, tuple[Tensor, Tensor | None]] = {}
        self._high: Tensor | None = None  # (images, patches) of the stream after the last block
        places = accesses(model).values() if self.for_labels else ()
        self._awaited: set[str] = set()  # modules whose heads are read by `take_heads`
        self._heads = {access.module: access for access in places if access.place.kind == "heads"}

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Inside, a forward pass adds the stream after each block and the outputs of heads.

        The outputs are those that the projection reads, after changes of heads by `intervene`.
        """
        taps = [
            Tap((module,), joined=partial(self.take_heads, access))
            for module, access in self._heads.items()
        ]
        with watching_stream(self.model, self.take_norms), tapped(self.model, *taps):
            yield

    def take_heads(self, access: Access, joined: Tensor) -> Tensor:
        """Add the joined outputs of a layer's heads, which pass on."""
        layer = access.layer
        if layer is not None and access.module in self._awaited:
            outputs = joined.unflatten(-1, (access.heads, -1)).transpose(1, 2)
            with torch.autocast(self.images.device.type, enabled=False):
                self.evidence.sums["output", layer] = self._norms_of_heads(access.module, outputs)
        return joined

    def _norms_of_heads(self, module: str, outputs: Tensor) -> Tensor:
        """Return the norms of what each head adds to the residual stream, (groups, heads); outputs:
        (calls, heads, ..).
        """
        norms = head_norms(precise(outputs), projection_of(self.model, module))
        return by_group(norms.unflatten(0, (len(self.images), -1)).mean(1), self.groups)

    def take_norms(self, block: int, tokens: Tokens) -> None:
        """Add the residual stream after a block."""
        layout = self.model.anatomy.layout
        prefix = (
            len(layout.prefix) if layout is not None and tokens.shape[1] == layout.tokens else 0
        )
        self._high = None
        if len(tokens) == len(self.images) and tokens.shape[1] > max(
            prefix, 1
        ):  # neither windows nor CLS only
            norms = TokenNorms(tokens.float().norm(dim=-1), prefix)
            for name in token_statistics():
                self.values[name, block] = FUNCTIONS[name](norms)[:, None]
            self._high = norms.high[:, prefix:]

    def take(self, call: AttentionCall) -> None:
        """Add an attention call. Raises NonFiniteError naming the layer."""
        site = call.site
        place = geometry_of(call.site, self.model)
        if site.kind == "channel":  # rows of channels have no place in the image
            return
        parts: list[dict[str, PerImage]] = []
        sums: dict[Key, Tensor] = {}
        with torch.autocast(self.images.device.type, enabled=False):
            allowed = allowed_keys(call, place)
            for images, part in call.parts():
                weights = precise(part.precise().placed())
                if place is None:  # a pooling or CLS query's row, or rows over pooled keys
                    keys = None if allowed is None else allowed.repeat(part.images, 1, 1, 1)
                    rows = row_statistics(
                        weights, "CLS" if site.kind == "class" else "patches", keys
                    )
                    windows = {
                        name: each.mean(-1).unflatten(0, (part.images, -1))
                        for name, each in rows.items()
                    }
                    parts.append({name: each.mean(1) for name, each in windows.items()})
                    continue
                layer = PatchRows(
                    weights, part.images, place, renormalise=self.renormalise, allowed=allowed
                )
                parts.append(layer.statistics())
                own = self._evidence(layer, parts[-1]["entropy"], images)
                add_all(
                    sums,
                    {
                        (name, site.layer): by_group(each, self.groups[images])
                        for name, each in own.items()
                    },
                )
            if self.for_labels and place is not None and call.output is not None:
                if site.module in self._heads:
                    self._awaited.add(site.module)
                else:
                    sums["output", site.layer] = self._norms_of_heads(site.module, call.output)
        values = {
            (name, site.layer): torch.cat([part[name] for part in parts]) for name in parts[0]
        }
        if not all(value.isfinite().all() for value in values.values()):
            raise NonFiniteError(
                f"expected finite attention weights, found NaN or infinity in layer {site.layer} "
                f"({site.module}); "
                "check the weights of the model and the images, or compute in fp32"
            )
        for found, known in ((values, self.values), (sums, self.evidence.sums)):
            for key, value in found.items():
                if key not in known:
                    known[key] = value
                elif key[0] not in OF_LAYERS:  # after the heads of the layer's earlier calls
                    known[key] = torch.cat((known[key], value), 1)

    def _evidence(self, layer: PatchRows, entropy: PerImage, images: slice) -> dict[str, Tensor]:
        """Return the evidence of some images of one layer, by name (images, ..)."""
        place = layer.geometry
        if not self.for_labels:
            return {"offsets": layer.offsets}
        if (
            place not in self._seen
        ):  # which patches are of similar colour, and each patch's share on the object
            mask = (
                None
                if self.masks is None
                else on_grid(self.masks[:, None].to(self.images.device), place)[..., 0]
            )
            self._seen[place] = similar_pairs(self.images, place), mask
        similar, mask = self._seen[place]
        mask = None if mask is None else mask[images]
        high = (
            self._high[images]
            if self._high is not None and self._high.shape[1] == place.patches
            else None
        )
        return {
            "offsets": layer.offsets,
            **evidence_of(layer, entropy, similar[images], mask, high),
        }


def measure(
    model: Model,
    images: Images,
    *,
    renormalise: bool = True,
    groups: Tensor | None = None,
    masks: Tensor | None = None,
) -> BatchStatistics:
    """Return every statistic of every head on these images, from one forward pass, in fp32 at
    least.

    renormalise: distances are of the attention on patches, scaled to sum to 1; otherwise the mass
    on CLS and other prefix tokens counts as 0 px. groups: (images,) the group of each, to gather
    the evidence for labels as well; masks: (images, height, width) True on the object, where they
    are known.
    """
    if not len(images):
        raise InputError("expected at least one image, found none")
    layers_of(model)  # the passes that survey the layers are not part of the batch
    batch = BatchStatistics(model, images, groups, masks, renormalise=renormalise)
    with batch.reading():
        observe(model, images, batch.take)
    return batch


@dataclass(frozen=True, repr=False)
class Statistics(Table):
    """Means over images of every statistic of every head; table.entropy and so on are (layers,
    heads).

    Rows have the numbers of blocks, names are those of the registry; statistics of tokens have one
    column. NaN where a statistic is not defined for a layer (pooled keys have no distance, a model
    without CLS has no CLS row), it has fewer heads, or its block has no attention. images: their
    number; sites: the layers with attention; geometries: of their tokens, by number of the layer;
    offset_mass: for each number (heads, 2 rows - 1, 2 columns - 1), the mean attention of patches
    by offset, key minus query, or None; renormalised: whether distances leave out the prefix;
    overall: means over all heads, by (statistic, 0); evidence: what labels of heads are decided by.
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
        """Yield the distance and the normalised entropy of every head, as far as they are
        defined."""
        for name in ("distance", "normalised_entropy"):
            values = getattr(self, name)
            if not bool(values.isnan().all()):
                yield HeadBoard(STATISTICS[name].title, values.tolist(), STATISTICS[name].unit)

    def records(self) -> Iterator[dict[str, object]]:
        """Return a row for each head: layer, head, and NAME, NAME_low and NAME_high of every
        statistic.

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
        """Return the number of heads of the layer with most: columns of a table."""
        return max(site.heads for site in self.sites)

    def low(self, name: str) -> PerHead:
        """Return the lower end of the mean's 95 % interval (Student's t) over images, or over
        groups of images that share a source; NaN for one.
        """
        return self._table(name, lambda key: self._ends(key)[0])

    def high(self, name: str) -> PerHead:
        """Return the upper end of the mean's 95 % interval."""
        return self._table(name, lambda key: self._ends(key)[1])

    @property
    def depth(self) -> int:
        """Return the number of rows of a table: layers, and blocks without attention."""
        return len(self.geometries)

    @property
    def keys(self) -> int:
        """Return the number of keys of the layer with most."""
        return max(site.keys for site in self.sites)

    def _ends(self, key: Key) -> tuple[Tensor, Tensor]:
        name, layer = key
        keys = next((site.keys for site in self.sites if site.layer == layer), self.keys)
        least, most = STATISTICS[name].bounds(keys)
        return self.moments.ends(key, least=least, most=most)

    def uniform_distance(self) -> Float[Tensor, " layers"]:
        """Return the distance under uniform attention over patches in each layer, px; NaN where not
        defined.
        """
        pixels = [
            torch.nan if place is None else place.uniform().distance for place in self.geometries
        ]
        return torch.tensor(pixels, dtype=torch.float64)

    def _table(self, name: str, read: Callable[[tuple[str, int]], Tensor]) -> PerHead:
        rows = {layer: read((name, layer)) for known, layer in self.moments.sums if known == name}
        return per_head(
            rows, self.depth, heads=1 if STATISTICS[name].rows == "tokens" else self.heads
        )


def per_head(rows: Mapping[int, Tensor], layers: int, *, heads: int) -> PerHead:
    """Return a table of rows (heads,) by layer, of at least `heads` columns; NaN where a layer has
    no row or fewer heads.
    """
    table = torch.full(
        (layers, max(heads, *map(len, rows.values()), 0)), torch.nan, dtype=torch.float64
    )
    for layer, row in rows.items():
        table[layer, : len(row)] = row
    return table


class Stream:
    """Accumulates the statistics of batches; memory does not grow with the number of images."""

    def __init__(
        self,
        model: Model,
        *,
        renormalise: bool = True,
        evidence: bool = True,
        groups: Tensor | None = None,
    ) -> None:
        """evidence: also gather what labels of heads are decided by; groups (n,): of all images of
        the data, where some share a source: intervals are over groups.
        """
        self.model = model
        self.renormalise = renormalise
        self.has_evidence = evidence
        self.evidence = HeadEvidence()
        self.groups = None if groups is None else groups.cpu().unique(return_inverse=True)[1]
        clusters = 0 if self.groups is None else int(self.groups.max()) + 1
        self.moments = Moments(clusters=clusters)
        self.overall = Moments(clusters=clusters)

    def add(
        self, images: Images, *, numbers: Tensor | None = None, masks: Tensor | None = None
    ) -> None:
        """Measure a batch and add it; numbers: (images,) of each in the data (None: in order of
        their addition).
        """
        first = self.moments.count
        numbers = torch.arange(first, first + len(images)) if numbers is None else numbers
        own = None if self.groups is None else self.groups[numbers.cpu()]
        parts = (numbers if own is None else own) % GROUPS if self.has_evidence else None
        batch = measure(self.model, images, renormalise=self.renormalise, groups=parts, masks=masks)
        self.evidence.add(batch.evidence)
        self.moments.add(batch.values, len(images), groups=own)
        rows: dict[str, list[Tensor]] = {}  # of all layers: heads weigh alike, not layers
        for (name, _), value in batch.values.items():
            rows.setdefault(name, []).append(value)
        means = {
            (name, 0): torch.cat(layers, 1).double().mean(1, keepdim=True)
            for name, layers in rows.items()
        }
        self.overall.add(means, len(images), groups=own)

    def join(self, total: Callable[[Tensor], Tensor]) -> None:
        """Combine the sums of several processes; total: the sum of a tensor over all of them."""
        self.moments.join(total)
        self.overall.join(total)
        self.evidence.join(total)

    def result(self) -> Statistics:
        """Return the statistics so far. Raises InputError before the first image."""
        count = self.moments.count
        sites = layers_of(self.model)
        if not count:
            raise InputError("expected at least one image, found none")
        rows = depth(self.model)
        geometries: list[Geometry | None] = [None] * rows
        offset_mass: list[Tensor | None] = [None] * rows
        for site in sites:
            geometries[site.layer] = geometry_of(site, self.model)
            mass = self.evidence.sums.get(("offsets", site.layer))
            offset_mass[site.layer] = None if mass is None else mass.sum(0) / count
        return Statistics(
            count,
            sites,
            tuple(geometries),
            tuple(offset_mass),
            self.moments,
            self.overall,
            self.renormalise,
            self.evidence,
        )


@requirement("statistics")
def require_statistics(model: Model) -> None:
    """Raise UnsupportedError unless some layer has attention between tokens and the heads of a
    layer have one shape.
    """
    if all(site.kind == "channel" for site in layers_of(model)):
        raise UnsupportedError(
            "expected layers in which tokens attend to tokens, found only channels that attend to "
            "channels in "
            f"{model.alias}"
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
    """Statistics of every head's attention, means over the images: distance, entropy, sparsity,
    mass on CLS and sinks.

    images: (n, 3, height, width) in [0, 1], or any form that `vitlens.images` takes, read
    batch_size at a time (None: chosen to fit), with intervals over its groups where it is a Split
    that has them; renormalise: distances are of the attention on patches only; masks: (n, height,
    width) True on the object, for the labels of heads; evidence: also gather what these labels are
    decided by, which takes longer. Raises UnsupportedError for a model without attention,
    NonFiniteError naming the layer whose weights are not finite, InputError for masks of another
    number than images.

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
        own = None if masks is None else masks[start : start + size]
        stream.add(pixels[start : start + size].to(model.device), masks=own)
    return stream.result()
