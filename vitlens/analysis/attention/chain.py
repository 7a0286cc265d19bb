"""The chain of attention layers: one observed pass, and the propagation of a row over its tokens.

A row has one number for each token. It is propagated from the readout back to the image. Rollout,
relevance and similar methods differ only in the step that propagates the row through one layer. The
parts that they share are here: windows, the merging of patches between the stages of a Swin, the
readout.

If the model uses the fused kernel, autograd sees only the heads' outputs. The gradient of the
weights is then ∂logit/∂output · valueᵀ. It is computed on demand, so no N x N matrix is stored for
the backward pass.
"""

import math
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from vitlens.errors import InputError, LensError, UnknownNameError, UnsupportedError, argument
from vitlens.lens.call import AttentionCall, precise, row_by_row, window_index
from vitlens.lens.differentiable import needs_gradients, require_no_steps
from vitlens.lens.libra import libra_gradients
from vitlens.lens.observe import observe, require_special_first, survey_weights
from vitlens.lens.site import KIND_WORDS, NO_PLACE, Site, Windows
from vitlens.lens.trace import probe_images, trace
from vitlens.models.hooks import watching
from vitlens.models.model import Model
from vitlens.models.requirement import requirement
from vitlens.names import READOUTS, Readout
from vitlens.shapes import Fused, Images, Labels, Logits, Maps, TokenLayout, Weights

Rules = Literal["plain", "libra"]  # of the backward pass
Vector = Float[Tensor, "batch tokens"]
# Propagates a row (batch, tokens) through one layer, towards the input. Arguments are the row, the
# weights (batch, heads, query, key), the gradient of a target with respect to them or None, and
# True if the rows of the weights sum to 1. They do not if padding is left out.
Step = Callable[[Vector, Weights, Weights | None, bool], Vector]
# Returns the weights of a pooling query with the heads fused.
Pooling = Callable[[AttentionCall], Float[Tensor, "batch keys"]]


@dataclass(frozen=True)
class Chain:
    """One forward pass.

    model: the model.
    logits: the logits of the pass.
    calls: the attention calls in order, with gradients or without.
    readout: the tokens that the classifier reads.
    seen: the output of the module that was given to `chained`, and its gradient. None without one.
    """

    model: Model
    logits: Logits
    calls: tuple[AttentionCall, ...]
    readout: Readout
    seen: tuple[Tensor, Tensor] | None = None

    def start(self, pooling: Pooling, *, alpha: float | None, start_layer: int = 0) -> Vector:
        """Return the readout as a row over the tokens of the last layer.

        - In windows, it is the mean over the patches of the last stage.
        - A pooling query (SigLIP) has all tokens as keys: its last row is the readout.
        - Class attention (CaiT) has the keys (CLS, patches), and only the row of CLS changes. The
          mass that rollout leaves on CLS has no place in the image. It is distributed over the
          patches. Rows of zeros stay zeros.
        - Otherwise it is CLS or the mean over patches, see `readout_row`.

        pooling: returns the weights of a pooling query.
        alpha: for rollout, the weight of the identity; rows are scaled to sum to 1. None for
            relevance, R ← R + Ā R.
        """
        first = self.calls[0]
        layout = self.model.anatomy.layout
        like = precise(first.rows((0,)))  # one row of weights, for its dtype and device
        if layout is None:
            last = self.calls[-1].site.windows
            assert last is not None  # require_chain accepts only windows without a layout
            patches = last.resolution[0] * last.resolution[1]
            return like.new_full((first.images, patches), 1 / patches)
        if self.readout != "pool":
            return readout_row(layout, self.readout, batch=first.images, like=like)
        return self._pooled_start(layout, pooling, alpha, start_layer)

    def _pooled_start(
        self, layout: TokenLayout, pooling: Pooling, alpha: float | None, start_layer: int
    ) -> Vector:
        """Return the readout of a model that reads its patches by attention; see `start`."""
        rows = []
        for call in self.calls:
            if call.site.kind == "class" and call.site.layer >= start_layer:
                row = pooling(call)
                if row.shape[-1] == layout.patches:  # without the prefix, which is timm's default
                    row = F.pad(row, (len(layout.prefix), 0))
                rows.append(row)
        if not rows:
            raise UnsupportedError(
                f"expected attention pooling for {argument('readout', 'pool')}, found none; "
                f"try {argument('readout', 'cls')} or {argument('readout', 'mean')}"
            )
        # (batch, tokens) of a pooling query (SigLIP), which is no token. (batch, 1 + tokens) of
        # class attention (CaiT), where CLS is the query and the first key.
        last_row = rows[-1]
        if last_row.shape[-1] == layout.tokens:
            return last_row if alpha is None else _scaled(last_row)
        return _through_class_attention(rows, alpha)

    def follow(
        self, row: Vector, step: Step, *, start_layer: int = 0
    ) -> Float[Tensor, "batch first_tokens"]:
        """Return a row over the last layer's tokens, propagated down to start_layer.

        With windows, the result is a row over the patches of the first stage.
        """
        resolution: tuple[int, int] | None = None  # of the layer after
        for call in reversed(self.calls):
            if call.site.kind == "class":
                continue
            windows = call.site.windows
            if windows is not None:
                if resolution is not None:
                    row = _unmerge(row, resolution, windows.resolution)
                resolution = windows.resolution
            if call.site.layer >= start_layer:
                row = _step(row, call, step)
        return row

    def as_map(self, row: Vector) -> Maps:
        """Return a propagated row as a map over the patches, without the prefix."""
        windows = self.calls[0].site.windows
        if self.model.anatomy.layout is not None or windows is None:
            return self.model.layout.as_map(row)
        maps: Maps = row.unflatten(-1, windows.resolution)
        return maps


def _through_class_attention(rows: Sequence[Vector], alpha: float | None) -> Vector:
    """Return the row over the patches that class attention reads, through all of its layers.

    rows: the weights of CLS over (CLS, patches) in each layer.
    alpha: see Chain.start.
    """
    # only CLS is a query: in each layer, it passes mass on to itself and to patches, which keep it
    cls = torch.ones_like(rows[-1][:, :1])  # the mass on CLS, which starts with all of it
    patches = torch.zeros_like(rows[-1][:, 1:])
    for weights in reversed(rows):
        if alpha is None:  # the row of CLS in I + A
            row_of_cls = weights.clone()
            row_of_cls[:, :1] += 1
        else:  # the row of CLS in (1 - alpha) A + alpha I, scaled to sum to 1
            row_of_cls = (1 - alpha) * weights
            row_of_cls[:, :1] += alpha
            row_of_cls = _scaled(row_of_cls)
        passed_on = cls * row_of_cls
        patches = patches + passed_on[:, 1:]
        cls = passed_on[:, :1]
    return patches if alpha is None else _scaled(patches)


@needs_gradients
def chained(
    model: Model,
    images: Images,
    *,
    targets: Labels | None = None,
    gradient: bool = False,
    rules: Rules = "plain",
    readout: Readout | None = None,
    module: str | None = None,
) -> Chain:
    """Return the chain of a batch of images.

    Queries and keys of all layers are stored (tokens x dim each, not heads x tokens²).

    targets: the target classes (None: the predicted classes).
    gradient: True for gradients of the targets' logits.
    rules: the rules of the backward pass, "libra" for LibraGrad's (lens/libra.py).
    readout: the tokens to start from (None: those that the classifier reads).
    module: the name of a module. Its output and the gradient of it are stored.

    Raises UnknownNameError for an unknown readout, and InputError for a target that is no class.
    Raises UnsupportedError for gradients of a model without a classifier, and LensError if a layer
    does not affect the logit.
    """
    resolved_readout = readout or model.anatomy.readout or "mean"
    if resolved_readout not in READOUTS:
        raise UnknownNameError("readout", resolved_readout, READOUTS)
    if model.anatomy.layout is None and resolved_readout != "mean":
        raise UnsupportedError(
            f"expected the readout mean for {model.alias}, which has no one sequence of tokens, "
            f"found {resolved_readout}"
        )
    if not gradient:
        calls: list[AttentionCall] = []
        logits = observe(model, images, calls.append)
        return Chain(model, logits, tuple(calls), resolved_readout)
    model.require_classifier()

    def compute() -> Chain:
        return _differentiated_chain(model, images, targets, rules, resolved_readout, module)

    # computes the chain, and raises if all gradients are 0, as those of a step function
    return require_no_steps(model, compute, lambda chain: [call.gradient for call in chain.calls])


def _differentiated_chain(
    model: Model,
    images: Images,
    targets: Labels | None,
    rules: Rules,
    readout: Readout,
    module: str | None,
) -> Chain:
    """Return a chain with gradients; the arguments are those of `chained`."""
    calls: list[AttentionCall] = []
    outputs: list[Tensor] = []  # of the module, if one is given
    modules = [] if module is None else [module]
    watched = watching(model.module, modules, lambda _name, _, output: outputs.append(output))
    backward_rules = libra_gradients(model) if rules == "libra" else nullcontext()
    with backward_rules, watched:
        logits = observe(model, images, calls.append, graph=True)
    with torch.enable_grad():
        total = logits.gather(1, check_targets(targets, logits)[:, None]).sum()
    seen = None
    if outputs:
        gradients = torch.autograd.grad(total, outputs, retain_graph=True)
        seen = (outputs[0].detach(), gradients[0])
    return Chain(
        model,
        logits=logits.detach(),
        calls=differentiate_calls(total, calls),
        readout=readout,
        seen=seen,
    )


def differentiate_calls(total: Tensor, calls: Sequence[AttentionCall]) -> tuple[AttentionCall, ...]:
    """Return the calls, detached, with the gradients of a number with respect to them.

    Raises LensError if a call does not affect the number.
    """
    traced = []
    for call in calls:
        # without inputs the model computed the weights itself, so autograd sees them
        traced.append(call.computed if call.inputs is None else call.output)
    gradients = torch.autograd.grad(total, traced, allow_unused=True)  # type: ignore[arg-type]
    with_gradients = []
    for call, gradient in zip(calls, gradients):
        if gradient is None:
            raise LensError(
                f"expected a gradient in every attention layer, found none in {call.site.module!r}"
            )
        with_gradients.append(replace(call.detach(), gradient=gradient, output=None))
    return tuple(with_gradients)


def check_targets(targets: Labels | None, logits: Logits) -> Labels:
    """Return the targets, or the predicted classes if there are none.

    Raises InputError unless there is an existing class for each image.
    """
    if targets is None:
        return logits.argmax(-1)
    classes = logits.shape[-1]
    if len(targets) != len(logits):
        raise InputError(f"expected one target per image ({len(logits)}), found {len(targets)}")
    # waits once for a GPU, not once for each image
    wrong = targets[(targets < 0) | (targets >= classes)]
    if len(wrong):
        raise InputError(f"expected target classes from 0 to {classes - 1}, found {int(wrong[0])}")
    return targets.to(logits.device)


def readout_row(layout: TokenLayout, readout: Readout, *, batch: int, like: Tensor) -> Vector:
    """Return the readout as a row over the tokens that sums to 1.

    It is on CLS, on CLS and the distillation token, or on all patches.
    """
    row = torch.zeros(batch, layout.tokens, dtype=like.dtype, device=like.device)
    if readout == "mean":
        row[:, len(layout.prefix) :] = 1 / layout.patches
        return row
    positions = layout.positions("cls")
    expected = 1
    if readout == "cls+distillation":
        positions += layout.positions("distillation")
        expected = 2
    if len(positions) < expected:
        raise UnsupportedError(
            f"expected a {readout} token for this readout, found prefix {layout.prefix}; "
            f"try {argument('readout', 'mean')}"
        )
    row[:, list(positions)] = 1 / len(positions)
    return row


def _scaled(row: Float[Tensor, "batch any"]) -> Float[Tensor, "batch any"]:
    """Return rows scaled to sum to 1; rows of zeros stay zeros."""
    return row / row.sum(-1, keepdim=True).clamp_min(torch.finfo(row.dtype).tiny)


def mean_of_heads(call: AttentionCall) -> Fused:
    """Return the weights of a call, the mean over heads."""
    return precise(call.precise().weights()).mean(1)


def without_autocast(device: torch.device) -> torch.autocast:
    """Disable mixed precision, with which rows would not sum to 1."""
    return torch.autocast(device.type, enabled=False)


@requirement("chain")
def require_chain(model: Model) -> None:
    """Raise UnsupportedError for a model without a chain of attention from readout to image."""
    require_special_first(model)
    layout = model.anatomy.layout
    sites = survey_weights(model, probe_images(model, 1))
    misfits = [site for site in sites if not _fits_chain(site, layout)]
    if misfits and layout is None and model.anatomy.unread:
        raise UnsupportedError(
            "expected layers over one sequence of patches in a known order, found none "
            f"that can be read in {model.alias}: {model.anatomy.unread}"
        )
    if misfits:
        # The message names the most informative layer: one with pooled keys, channels or windows
        # rather than one with the tokens of another stage.
        site = min(misfits, key=lambda site: site.kind in ("patch", "class"))
        detail = ""
        if site.kind == "patch":
            detail = f", but in a stage with a different number of tokens ({site.keys})"
        elif site.kind == "window":
            detail = f", and {NO_PLACE['window']}"
        raise UnsupportedError(
            "expected layers over one sequence of tokens, or windows that can be put back into the "
            f"image (Swin), found {site.module!r} of {model.alias}: "
            f"{KIND_WORDS[site.kind]}{detail}"
        )
    if layout is None:
        _require_no_convolution(model, {site.module for site in sites})
    resolutions = [site.windows.resolution for site in sites if site.windows is not None]
    for fine, coarse in reversed(list(pairwise(resolutions))):
        merged = tuple(math.ceil(side / 2) for side in fine)
        if coarse not in (fine, merged):
            raise UnsupportedError(
                f"expected stages that merge 2x2 patches, found {fine} before {coarse} in "
                f"{model.alias}"
            )


def _fits_chain(site: Site, layout: TokenLayout | None) -> bool:
    """Return True for a layer in windows, or over the one sequence of tokens."""
    if layout is None:
        return site.windows is not None
    if site.kind == "class":
        return True
    return site.kind == "patch" and site.part == 0 and site.keys == layout.tokens


def _require_no_convolution(model: Model, attention: Collection[str]) -> None:
    """Raise UnsupportedError if convolutions mix patches between attention modules (MaxViT)."""
    mixing = set()
    for name, module in model.module.named_modules():
        if isinstance(module, nn.Conv2d):
            sides = zip(module.kernel_size, module.stride)
            if any(kernel > stride for kernel, stride in sides):
                mixing.add(name)
    relevant = {*mixing, *attention}
    order = [call.module for call in trace(model, 1).calls if call.module in relevant]
    attention_places = [place for place, name in enumerate(order) if name in attention]
    first_to_last = order[attention_places[0] : attention_places[-1]]
    between = [name for name in first_to_last if name not in attention]
    if between:
        raise UnsupportedError(
            "expected attention layers with nothing between them that mixes patches, found "
            f"{len(between)} convolutions in {model.alias} (first {between[0]!r}); try "
            f"{argument('method', 'attention')}, or vitlens attention, stats or ablate"
        )


def _unmerge(
    row: Float[Tensor, "batch merged"], coarse: tuple[int, int], fine: tuple[int, int]
) -> Float[Tensor, "batch unmerged"]:
    """Return a row over merged patches as a row over the patches before merging.

    Merging concatenates 2x2 patches and projects them, so they share the mass equally. At the end
    of an odd side, fewer patches are merged.
    """
    if coarse == fine:
        return row
    rows, columns = fine
    padding = (0, 2 * coarse[1] - columns, 0, 2 * coarse[0] - rows)
    is_patch = F.pad(row.new_ones(1, 1, rows, columns), padding)
    merged_patches = F.avg_pool2d(is_patch, 2) * 4  # the number of patches in each merged one
    mass_of_patch = row.unflatten(-1, coarse).unsqueeze(1) / merged_patches
    enlarged = F.interpolate(mass_of_patch, scale_factor=2, mode="nearest")
    return enlarged[:, 0, :rows, :columns].flatten(1)


def _step(row: Vector, call: AttentionCall, step: Step) -> Vector:
    """Propagate a row through one layer, a few images at a time, or window by window."""
    windows = call.site.windows
    rows = []
    for images, part in call.parts():
        exact = part.precise()
        weights = precise(exact.placed())
        gradient = exact.weight_gradient()
        if gradient is not None:
            # placed() has the keys of windows row by row already; the gradient has not
            gradient = row_by_row(gradient, windows)
        if windows is None:
            propagated = step(row[images], weights, gradient, True)  # rows of the weights sum to 1
        else:
            propagated = _step_in_windows(row[images], weights, gradient, windows, step)
        rows.append(propagated)
    return torch.cat(rows)


def _step_in_windows(
    row: Vector, weights: Weights, gradient: Weights | None, windows: Windows, step: Step
) -> Vector:
    """Propagate a row over the map through a layer of windows, each with its part of the row."""
    images, patches = row.shape
    index = window_index(windows).to(row.device)  # (windows, tokens): patches, -1 for padding
    is_patch = index >= 0
    places = index.masked_fill(~is_patch, patches)  # padding is in an extra column
    inside = F.pad(row, (0, 1))[:, places].flatten(0, 1)  # (images x windows, tokens of a window)
    visible = weights.unflatten(0, (images, -1)) * is_patch[:, None, None]
    sums_to_1 = bool(is_patch.all())  # without padding
    moved = step(inside, visible.flatten(0, 1), gradient, sums_to_1)
    full = F.pad(torch.zeros_like(row), (0, 1))
    full[:, places.flatten()] = moved.view(images, -1)
    return full[:, :-1]
