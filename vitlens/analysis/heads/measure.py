"""Every registered statistic of one batch: a number for every image, layer and head.

Attention matrices are computed for a few images at a time and not stored.
"""

from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from vitlens.analysis.evaluation.intervals import Key
from vitlens.analysis.heads.evidence import Gathering, HeadEvidence
from vitlens.analysis.heads.geometry import geometry_of
from vitlens.analysis.heads.registry import head_statistics, token_statistics
from vitlens.analysis.heads.rows import PatchRows, PerImage, Rows, median, outliers
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


def layers_of(sites: list[Site]) -> list[Site]:
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
    return layers


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
    gathering = None if groups is None else Gathering(model, images, groups, masks)
    calls: list[Site] = []

    def take(call: AttentionCall) -> None:
        calls.append(call.site)
        batch.sites = layers_of(calls)
        if call.site.kind == "channel":  # rows of channels have no place in the image
            return
        with torch.autocast(images.device.type, enabled=False):
            _add_call(batch, call, model, gathering, renormalise=renormalise)

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
