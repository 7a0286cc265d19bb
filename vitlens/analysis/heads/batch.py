"""Statistics of every head on one batch, image by image, from one forward pass.

Attention matrices are computed for a few images at a time and not stored.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Literal

import torch
from jaxtyping import Bool
from torch import Tensor

from vitlens.analysis.evaluation.intervals import Key
from vitlens.analysis.heads.evidence import (
    OF_LAYERS,
    HeadEvidence,
    add_all,
    by_group,
    evidence_of,
    head_norms,
    on_grid,
    similar_pairs,
)
from vitlens.analysis.heads.geometry import Geometry, geometry_of
from vitlens.analysis.heads.registry import token_statistics
from vitlens.analysis.heads.rows import (
    FUNCTIONS,
    PatchRows,
    PerImage,
    TokenNorms,
    row_statistics,
)
from vitlens.errors import InputError, NonFiniteError, UnsupportedError
from vitlens.lens.access import Access
from vitlens.lens.attention import projection_of, tapped
from vitlens.lens.call import MASKED, MASKED_SCORE, AttentionCall, precise, row_by_row
from vitlens.lens.observe import observe, require_special_first, survey_weights
from vitlens.lens.places import accesses
from vitlens.lens.site import Site
from vitlens.lens.stages import watching_stream
from vitlens.lens.tap import Tap
from vitlens.lens.trace import probe_images
from vitlens.models.model import Model
from vitlens.shapes import Images, Tokens


def layers_of(model: Model) -> tuple[Site, ...]:
    """Return one site for each layer, with the heads of all of its calls.

    Raises UnsupportedError if the calls of a layer differ in their numbers of tokens. Also raises
    it if special tokens come after the patches, or if there is no attention.
    """
    require_special_first(model)
    by_layer: dict[int, Site] = {}
    for site in survey_weights(model, probe_images(model, 1)):
        if site.part == 0:
            by_layer[site.layer] = site
            continue
        # further calls of a layer may differ from its first one only in their heads
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
    call: AttentionCall, geometry: Geometry | None
) -> Bool[Tensor, "calls _ _ key"] | None:
    """Return the keys that each query of an image may attend to, or None.

    The shape is (calls of an image, heads or 1, query or 1, key). None means that all keys are
    allowed, or that the mask is unknown. The mask of the first image is read.

    If a windowed model computes attention itself, its mask is not seen. Allowed keys are then the
    pairs of the geometry, and all other keys with a weight. These may be padding, or lie across a
    seam.
    """
    first = call.pick(0)
    allowed = None
    if first.inputs is not None:
        if first.inputs.bias is not None:
            allowed = _allowed_by_bias(first, first.inputs.bias, len(first.inputs.query))
    elif call.site.windows is not None and geometry is not None:
        allowed = _allowed_by_weights(first, geometry)
    if allowed is None or bool(allowed.all()):
        return None
    return allowed


def _allowed_by_bias(
    first: AttentionCall, bias: Tensor, calls: int
) -> Bool[Tensor, "calls _ _ key"]:
    """Return the keys that the bias of an image does not mask.

    The shape is (calls, heads or 1, query or 1, key); in windows (calls, heads or 1, query, key).
    """
    allowed = bias if bias.dtype == torch.bool else bias > MASKED_SCORE
    while allowed.dim() < 4:  # a bias may leave out the axes of calls and heads
        allowed = allowed[None]
    allowed = allowed.expand(calls, -1, -1, -1)
    if first.site.windows is None:
        return allowed
    return row_by_row(allowed.expand(-1, -1, first.site.queries, -1), first.site.windows)


def _allowed_by_weights(
    first: AttentionCall, geometry: Geometry
) -> Bool[Tensor, "calls 1 query key"]:
    """Return the pairs of the geometry, and all other keys with a weight in any head."""
    has_weight = (first.placed() > MASKED).any(1)  # (calls, query, key)
    return (has_weight | geometry.pairs().to(has_weight.device))[:, None]


class BatchStatistics:
    """Statistics of heads from one forward pass, gathered call by call, a few images at a time.

    groups (images,): the group of each image, for the evidence for labels. None without labels.
    masks (images, height, width): True on the object, or None.
    values (images, heads): the values by statistic and layer. If a layer has several calls, their
        heads follow each other.
    evidence: the mass by offset. With groups also all other evidence for labels.
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
        # by geometry: similar pairs of patches, and the share of each patch on the object
        self._patch_facts: dict[Geometry, tuple[Tensor, Tensor | None]] = {}
        # (images, patches) True for tokens of high norm after the last block that ran, which is the
        # block before the next attention call
        self._high_norm_before: Tensor | None = None
        self._heads: dict[str, Access] = {}  # by module, where outputs of heads can be read
        if self.for_labels:
            for access in accesses(model).values():
                if access.place.kind == "heads":
                    self._heads[access.module] = access
        # Modules of `_heads` whose attention was seen: `take_heads` reads their outputs next. The
        # tap of a module also sees outputs of calls that `take` has no evidence for.
        self._awaiting_outputs: set[str] = set()

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Read the residual stream and the outputs of heads during a forward pass.

        The outputs are those that the projection reads, after any changes by `intervene`. In each
        layer, `take` is called with the attention, `take_heads` with the outputs of its heads, and
        `take_norms` with the stream after the block.
        """
        taps = []
        for module, access in self._heads.items():
            # called with the joined outputs of the heads
            taps.append(Tap((module,), joined=partial(self.take_heads, access=access)))
        with watching_stream(self.model, self.take_norms), tapped(self.model, *taps):
            yield

    def take_heads(self, joined: Tensor, *, access: Access) -> Tensor:
        """Add the joined outputs of a layer's heads; return them unchanged."""
        layer = access.layer
        if layer is not None and access.module in self._awaiting_outputs:
            # from (calls, tokens, heads x head_dim) to (calls, heads, tokens, head_dim)
            outputs = joined.unflatten(-1, (access.heads, -1)).transpose(1, 2)
            with torch.autocast(self.images.device.type, enabled=False):
                self.evidence.sums["output", layer] = self._norms_of_heads(access.module, outputs)
        return joined

    def _norms_of_heads(self, module: str, outputs: Tensor) -> Tensor:
        """Return the norms of what each head adds to the residual stream, (groups, heads).

        outputs (calls, heads, tokens, head_dim): the outputs of the heads.
        """
        norms = head_norms(precise(outputs), projection_of(self.model, module))
        norms_of_images = norms.unflatten(0, (len(self.images), -1)).mean(1)
        return by_group(norms_of_images, self.groups)

    def take_norms(self, block: int, tokens: Tokens) -> None:
        """Add the residual stream after a block."""
        layout = self.model.anatomy.layout
        prefix = 0
        if layout is not None and tokens.shape[1] == layout.tokens:
            prefix = len(layout.prefix)
        self._high_norm_before = None  # unknown until the end of this method
        is_windowed = len(tokens) != len(self.images)
        has_patches = tokens.shape[1] > max(prefix, 1)  # a single token is a pooled one
        if is_windowed or not has_patches:
            return
        norms = TokenNorms(tokens.float().norm(dim=-1), prefix)
        for name in token_statistics():
            self.values[name, block] = FUNCTIONS[name](norms)[:, None]
        self._high_norm_before = norms.high[:, prefix:]

    def take(self, call: AttentionCall) -> None:
        """Add an attention call. Raises NonFiniteError naming the layer."""
        site = call.site
        if site.kind == "channel":  # rows of channels have no place in the image
            return
        geometry = geometry_of(site, self.model)
        sums: dict[Key, Tensor] = {}
        with torch.autocast(self.images.device.type, enabled=False):
            allowed = allowed_keys(call, geometry)
            if geometry is None:
                parts = self._parts_of_rows(call, allowed)
            else:
                parts = self._parts_of_patches(call, geometry, allowed, sums)
            if self.for_labels and geometry is not None and call.output is not None:
                if site.module in self._heads:
                    self._awaiting_outputs.add(site.module)
                else:
                    sums["output", site.layer] = self._norms_of_heads(site.module, call.output)
        values = {}
        for name in parts[0]:
            values[name, site.layer] = torch.cat([part[name] for part in parts])
        if not all(value.isfinite().all() for value in values.values()):
            raise NonFiniteError(
                f"expected finite attention weights, found NaN or infinity in layer {site.layer} "
                f"({site.module}); check the weights of the model and the images, or compute in "
                "fp32"
            )
        _append_heads(self.values, values)
        _append_heads(self.evidence.sums, sums)

    def _parts_of_rows(
        self, call: AttentionCall, allowed: Tensor | None
    ) -> list[dict[str, PerImage]]:
        """Return the statistics of rows without places in the image, by name.

        They are the rows of a pooling or CLS query, or rows over pooled keys. The images are read
        in parts: there is one dict for each part.
        """
        kind: Literal["patches", "CLS"] = "CLS" if call.site.kind == "class" else "patches"
        parts = []
        for _, part in call.parts():
            weights = precise(part.precise().placed())
            keys = None if allowed is None else allowed.repeat(part.images, 1, 1, 1)
            values = {}
            for name, row_values in row_statistics(weights, kind, keys).items():
                # as (images, windows, heads)
                window_means = row_values.mean(-1).unflatten(0, (part.images, -1))
                values[name] = window_means.mean(1)
            parts.append(values)
        return parts

    def _parts_of_patches(
        self,
        call: AttentionCall,
        geometry: Geometry,
        allowed: Tensor | None,
        sums: dict[Key, Tensor],
    ) -> list[dict[str, PerImage]]:
        """Return the statistics of attention between patches, and add the evidence to `sums`.

        The images are read in parts: there is one dict, by statistic, for each part.
        """
        parts = []
        for images, part in call.parts():
            weights = precise(part.precise().placed())
            layer = PatchRows(
                weights, part.images, geometry, renormalise=self.renormalise, allowed=allowed
            )
            values = layer.statistics()
            parts.append(values)
            evidence = self._evidence(layer, values["entropy"], images)
            group_sums = {}
            for name, image_values in evidence.items():
                group_sums[name, call.site.layer] = by_group(image_values, self.groups[images])
            add_all(sums, group_sums)
        return parts

    def _evidence(self, layer: PatchRows, entropy: PerImage, images: slice) -> dict[str, Tensor]:
        """Return the evidence of some images of one layer, by name (images, ..)."""
        offsets = {"offsets": layer.offsets}
        if not self.for_labels:
            return offsets
        geometry = layer.geometry
        similar, mask = self._facts_of_patches(geometry)
        high = None
        high_norm = self._high_norm_before
        if high_norm is not None and high_norm.shape[1] == geometry.patches:
            high = high_norm[images]
        mask = None if mask is None else mask[images]
        return {**offsets, **evidence_of(layer, entropy, similar[images], mask, high)}

    def _facts_of_patches(self, geometry: Geometry) -> tuple[Tensor, Tensor | None]:
        """Return the similar pairs of patches by colour, and each patch's share on the object.

        The share is None without masks.
        """
        if geometry not in self._patch_facts:
            mask = None
            if self.masks is not None:
                mask = on_grid(self.masks[:, None].to(self.images.device), geometry)[..., 0]
            self._patch_facts[geometry] = similar_pairs(self.images, geometry), mask
        return self._patch_facts[geometry]


def _append_heads(values: dict[Key, Tensor], more: Mapping[Key, Tensor]) -> None:
    """Append the values of further heads to those of the layer's earlier calls."""
    for key, value in more.items():
        name, _ = key
        if key not in values:
            values[key] = value
        elif name not in OF_LAYERS:  # those are the same for all heads: the first call has them
            values[key] = torch.cat((values[key], value), 1)


def measure(
    model: Model,
    images: Images,
    *,
    renormalise: bool = True,
    groups: Tensor | None = None,
    masks: Tensor | None = None,
) -> BatchStatistics:
    """Return every statistic of every head on these images, from one forward pass.

    Numbers are in fp32 or better.

    renormalise: True if distances are of the attention on patches, scaled to sum to 1. Otherwise
        the mass on CLS and other prefix tokens counts as 0 px.
    groups (images,): the group of each image, to gather also the evidence for labels.
    masks (images, height, width): True on the object, None if unknown.
    """
    if not len(images):
        raise InputError("expected at least one image, found none")
    layers_of(model)  # survey the layers now: its passes must not count as passes of the batch
    batch = BatchStatistics(model, images, groups, masks, renormalise=renormalise)
    with batch.reading():
        observe(model, images, batch.take)
    return batch
