"""Every registered statistic of one batch: a number for every image, layer and head.

Attention matrices are computed for a few images at a time and not stored.
"""

from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from vitlens.analysis.evaluation.intervals import Key
from vitlens.analysis.heads.evidence import Gathering, HeadEvidence, by_group
from vitlens.analysis.heads.geometry import Geometry, geometry_of
from vitlens.analysis.heads.patch_rows import PatchRows, PerImage
from vitlens.analysis.heads.registry import head_statistics, token_statistics
from vitlens.analysis.heads.rows import Rows, median, outliers
from vitlens.errors import InputError, NonFiniteError, UnsupportedError
from vitlens.lens.call import AttentionCall, precise
from vitlens.lens.capture import watching_stream
from vitlens.lens.observe import observe, survey_weights
from vitlens.lens.site import Site
from vitlens.models.model import Model
from vitlens.references import resolved
from vitlens.shapes import Images, Tokens


@dataclass
class BatchStatistics:
    """A batch of images: values (images, heads) by statistic and layer; offsets: attention mass by offset, key minus
    query, summed over the images (heads, 2 rows - 1, 2 columns - 1); sites: the layers. A layer of several attention
    calls (ConViT's content and position, groups of heads) has the heads of all of them, one after another. evidence:
    for the labels of heads, where it was asked for."""

    images: int
    values: dict[Key, PerImage] = field(default_factory=dict)
    offsets: dict[int, Tensor] = field(default_factory=dict)
    sites: list[Site] = field(default_factory=list)
    evidence: HeadEvidence = field(default_factory=HeadEvidence)

    def place(self, site: Site) -> None:
        """Add a layer, or further heads of one. Raises UnsupportedError where their numbers of tokens differ."""
        if site.part == 0:
            self.sites.append(site)
            return
        first = self.sites[site.layer]
        if replace(first, part=site.part, heads=site.heads) != site:
            raise UnsupportedError(
                f"expected attention calls of one shape in layer {site.layer} ({site.module}), found {first.queries} "
                f"queries and {first.keys} keys, then {site.queries} and {site.keys}"
            )
        self.sites[site.layer] = replace(first, heads=first.heads + site.heads)

    def take(self, layer: int, values: dict[str, Tensor], offsets: Tensor | None) -> None:
        """Add the values of a layer, or of further heads of one."""
        for name, value in values.items():
            known = self.values.get((name, layer))
            self.values[name, layer] = value if known is None else torch.cat((known, value), 1)
        if offsets is not None:
            self.offsets[layer] = torch.cat((self.offsets[layer], offsets)) if layer in self.offsets else offsets


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
    batch = BatchStatistics(len(images))
    extra = None if groups is None else Gathering(model, images, groups, masks, batch.evidence)
    if groups is not None:
        batch.evidence.counts = by_group(torch.ones(len(images)), groups)

    def take(call: AttentionCall) -> None:
        batch.place(call.site)
        if call.site.kind == "channel":  # rows of channels have no place in the image
            return
        with torch.autocast(images.device.type, enabled=False):
            values, offsets = _of_call(call, geometry_of(call.site, model), extra, renormalise=renormalise)
        _require_finite(values, call.site)
        batch.take(call.site.layer, values, offsets)

    def take_norms(block: int, tokens: Tokens) -> None:
        layout = model.anatomy.layout
        prefix = len(layout.prefix) if layout is not None and tokens.shape[1] == layout.tokens else 0
        if len(tokens) == len(images) and tokens.shape[1] > max(prefix, 1):  # neither windows nor CLS only
            norms = TokenNorms(tokens.float().norm(dim=-1), prefix)
            for name, statistic in token_statistics().items():
                batch.values[name, block] = resolved(statistic.function)(norms)[:, None]

    survey_weights(model, images)  # its passes of one and two images are not part of the batch
    with watching_stream(model, take_norms):
        observe(model, images, take)
    return batch


def _of_call(
    call: AttentionCall, geometry: Geometry | None, extra: Gathering | None, *, renormalise: bool
) -> tuple[dict[str, PerImage], Tensor | None]:
    """The statistics of one attention call, a few images at a time."""
    parts: list[dict[str, Tensor]] = []
    total: Tensor | None = None
    if extra is not None and geometry is not None:
        extra.begin(call, geometry)
    for images, part in call.parts():
        weights = precise(part.precise().placed())
        if geometry is None:
            parts.append(_of_rows_only(weights, part))
            continue
        layer = PatchRows(weights, part.images, geometry, renormalise=renormalise)
        parts.append(layer.statistics())
        if extra is not None:
            extra.take(layer, parts[-1]["entropy"], images)
        summed = layer.offsets.sum(0, dtype=torch.float64).cpu()
        total = summed if total is None else total + summed
    if extra is not None and geometry is not None:
        extra.end(call)
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}, total


def _of_rows_only(weights: Tensor, call: AttentionCall) -> dict[str, Tensor]:
    """The statistics of a pooling or CLS query's row, or of rows over pooled keys, which have no place in the image."""
    query_rows, rows = "CLS" if call.site.kind == "class" else "patches", Rows(weights)
    return {
        name: resolved(statistic.function)(rows).mean(-1).unflatten(0, (call.images, -1)).mean(1)
        for name, statistic in head_statistics().items()
        if statistic.input == "row" and statistic.rows == query_rows
    }


@dataclass(frozen=True)
class TokenNorms:
    """Euclidean norms of the tokens of the residual stream after one block; prefix: the number of prefix tokens."""

    norms: Float[Tensor, "images tokens"]
    prefix: int

    @cached_property
    def high(self) -> Float[Tensor, "images tokens"]:
        """1 where a norm exceeds its image's median + 5 median absolute deviations, else 0."""
        return outliers(self.norms).float()


def token_norm(tokens: TokenNorms) -> Float[Tensor, " images"]:
    """The median norm."""
    return median(tokens.norms)


def greatest_norm(tokens: TokenNorms) -> Float[Tensor, " images"]:
    """The greatest norm."""
    return tokens.norms.amax(-1)


def high_norm_patches(tokens: TokenNorms) -> Float[Tensor, " images"]:
    """The number of patches of high norm."""
    return tokens.high[:, tokens.prefix :].sum(-1)


def high_norm_prefix(tokens: TokenNorms) -> Float[Tensor, " images"]:
    """The number of prefix tokens of high norm."""
    return tokens.high[:, : tokens.prefix].sum(-1)


def _require_finite(values: dict[str, PerImage], site: Site) -> None:
    wrong = [name for name, value in values.items() if not torch.isfinite(value).all()]
    if wrong:
        raise NonFiniteError(
            f"expected finite attention weights, found NaN or infinity in layer {site.layer} ({site.module}); "
            "check the weights of the model, or run with --precision fp32"
        )
