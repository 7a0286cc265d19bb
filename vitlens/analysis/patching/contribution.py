"""Direct logit attribution and the logit lens: each head's direct contribution to a logit, and
logits by layer.

The residual stream is the sum of the embedding and the outputs of all heads and MLPs. With the
final norm's scale fixed, a logit is linear in it (Elhage 2021; nostalgebraist 2020): the model's
own final norm, pooling and classifier are run without its blocks, which give the logits of any
stream and, by their gradient, the weights of its numbers.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from vitlens.analysis.attention.chain import check_targets
from vitlens.analysis.evaluation.evaluate import fitting_batch_size
from vitlens.devices import evaluating
from vitlens.errors import UnsupportedError, first_line
from vitlens.inputs import takes_images
from vitlens.lens.attention import projection_of
from vitlens.lens.call import AttentionCall, precise
from vitlens.lens.capture import Captured, capture
from vitlens.lens.differentiable import needs_gradients
from vitlens.lens.observe import observe
from vitlens.lens.places import accesses
from vitlens.lens.stages import stages
from vitlens.lens.trace import block_at, depth, layer_at, layers
from vitlens.lens.trace import blocks as numbered_blocks
from vitlens.models.anatomy import require_pre_norm
from vitlens.models.hooks import Arguments, ScopedMode, overridden, watching
from vitlens.models.model import Model
from vitlens.pixels import AnyImages, Targets, as_parts, as_targets
from vitlens.shapes import Images, Labels, Logits, Tokens
from vitlens.summary import Summary

TOLERANCE = 1e-3  # fp32, of the largest logit: the greatest error of the sum of the contributions
# of what a head adds to the logits: what it adds to one of them beyond that is real
ROUNDING = 1e-5


@dataclass(frozen=True, repr=False)
class LogitLens(Summary):
    """The logits that the final norm and the classifier give at each depth of the residual stream.

    logits: the last depth is the model's own; places: the name of the residual stream at each
    depth.
    """

    logits: Float[Tensor, "batch depths classes"]
    places: tuple[str, ...]

    @property
    def predictions(self) -> Int[Tensor, "batch depths"]:
        """Return the class with the highest logit at each depth."""
        return self.logits.argmax(-1)


@dataclass(frozen=True, repr=False)
class Contributions(Summary):
    """The direct contribution of each part of a model to one logit of each image, in logits; they
    sum to the logit.

    heads: by the number of the layer, NaN where it has fewer heads than the widest; mlps: 0 where a
    block has none; embedding: of patches, positions and prefix tokens; bias: of the output
    projections, the final norm and the classifier; rest: of blocks without heads, beyond their
    MLPs; logit: the model's own, of the classes in targets. All on the CPU, in fp32 at least.
    """

    heads: Float[Tensor, "batch layers heads"]
    mlps: Float[Tensor, "batch layers"]
    embedding: Float[Tensor, " batch"]
    bias: Float[Tensor, " batch"]
    rest: Float[Tensor, " batch"]
    logit: Float[Tensor, " batch"]
    targets: Int[Tensor, " batch"]

    def total(self) -> Float[Tensor, " batch"]:
        """Return the sum of all parts: the logit, up to rounding."""
        return self.heads.nansum((1, 2)) + self.mlps.sum(1) + self.embedding + self.bias + self.rest


@takes_images
def logit_lens(model: Model, images: AnyImages) -> LogitLens:
    """Return the final norm and classifier applied to the residual stream before the first block
    and after every block.

    The last depth is the model's own logits (nostalgebraist 2020). Earlier depths are read with a
    norm and a classifier that were trained on the last one. Raises UnsupportedError where the
    classifier reads more than one residual stream, or reads it through attention (SigLIP, CaiT,
    Swin, a CNN).

    >>> import torch, vitlens
    >>> lens = vitlens.logit_lens(vitlens.load("vit-digits"), torch.rand(2, 3, 32, 32))
    >>> lens.logits.shape, lens.places[0], lens.places[-1]
    (torch.Size([2, 7, 10]), 'blocks.0.input', 'blocks.5.residual')
    """
    batches = as_parts(images).split(fitting_batch_size(model))
    logits = torch.cat([logits_by_depth(model, batch.to(model.device)) for batch in batches])
    indices = {block.unit: block.index for block in numbered_blocks(model)}
    names = blocks_of(model)
    after = (f"blocks.{indices[name]}.residual" if name in indices else name for name in names)
    return LogitLens(logits, (f"blocks.{indices.get(names[0], 0)}.input", *after))


@takes_images
def direct_logit_attribution(
    model: Model, images: AnyImages, targets: Targets = "predicted"
) -> Contributions:
    """Return the direct contribution of every head and MLP to a logit, with the final norm's scale
    fixed at each image's own.

    targets: "predicted", "label", a class by name or index, or one for each image. `heads[:, 3, 7]`
    is what blocks.3.head.7 writes into the residual stream, as the classifier reads it; all parts
    sum to the logit (`total()`). Effects through later layers are not included: for these, see
    `patch`. Raises UnsupportedError where the classifier does not read the residual stream through
    a norm and a linear map (attention pooling, CaiT), or where a block adds something other than
    its heads and its MLP (windows, norms after the branches); InputError for a class that does not
    exist.

    >>> import torch, vitlens
    >>> vit = vitlens.load("vit-digits")
    >>> parts = vitlens.direct_logit_attribution(vit, torch.rand(2, 3, 32, 32))
    >>> parts.heads.shape, bool((parts.total() - parts.logit).abs().max() < 1e-3)
    (torch.Size([2, 6, 4]), True)
    """
    parts = as_parts(images)
    classes = as_targets(targets)
    size = fitting_batch_size(model)
    of_batches = []
    for start in range(0, len(parts), size):
        own = None if classes is None else classes[start : start + size].to(model.device)
        of_batches.append(_contributions(model, parts[start : start + size].to(model.device), own))
    fields = zip(*(vars(each).values() for each in of_batches), strict=True)
    return Contributions(*(torch.cat(field) for field in fields))


def head_contributions(
    model: Model, images: Images, classes: Labels
) -> Float[Tensor, "batch layers heads classes"]:
    """Return what every head adds to the logit of each of these classes, above the mean over all
    classes of the model.

    As `direct_logit_attribution` says it; exactly 0 for a head that adds the same to all classes up
    to rounding, NaN where a layer has fewer heads than the widest. images: of one batch, on the
    model's device. On the CPU.
    """
    with torch.no_grad(), torch.autocast(model.device.type, enabled=False):
        seen = _seen(model, images, mlps=False)

        def added_to(targets: Labels | Logits) -> Float[Tensor, "batch layers heads"]:
            with evaluating(model):
                weights = precise(_stream_weights(model, seen.streams[-1], targets))
            return stacked(_of_heads(model, seen, weights), depth(model)).cpu()

        added = torch.stack(
            [added_to(each.expand(len(images))) for each in classes.to(model.device)], -1
        )
        logits = seen.captured.logits
        mean = added_to(torch.full_like(logits, 1 / logits.shape[1], dtype=torch.float32))
    above = added - mean[..., None]
    largest = above.abs().amax(-1, keepdim=True)
    precision = max(ROUNDING, torch.finfo(model.mean.dtype).eps)
    rounded = largest <= precision * added.abs().amax(-1, keepdim=True)
    return above.masked_fill(rounded, 0.0)


def label_contributions(
    model: Model, images: Images, labels: Labels
) -> Float[Tensor, "batch layers heads"]:
    """Return what every head adds to the logit of each image's own label, above the mean over all
    classes.

    As `head_contributions`, of one class for each image. images: of one batch, on the model's
    device. On the CPU.
    """
    with torch.no_grad(), torch.autocast(model.device.type, enabled=False):
        seen = _seen(model, images, mlps=False)
        wanted = above_mean(labels.to(model.device), seen.captured.logits.shape[1])
        with evaluating(model):
            weights = precise(_stream_weights(model, seen.streams[-1], wanted))
        return stacked(_of_heads(model, seen, weights), depth(model)).cpu()


def above_mean(labels: Labels, classes: int) -> Logits:
    """Return the weights of logits (batch, classes) whose sum is the label's logit minus the mean
    of all classes.
    """
    wanted = torch.full((len(labels), classes), -1 / classes, device=labels.device)
    wanted[torch.arange(len(labels)), labels] += 1
    return wanted


def key_contributions(
    model: Model, images: Images, wanted: Logits, layer: int, head: int
) -> Float[Tensor, "batch keys"]:
    """Return what one head contributes to a sum of logits through each token that it attends to:
    the weight of the token times the part of its value in that sum. wanted: the weight of each
    logit; images: of one batch, on the model's device.

    On the CPU; NaN where the sum over tokens is not the head's contribution (a model that changes
    the outputs of heads before it joins them). Raises UnsupportedError as
    `direct_logit_attribution`.
    """
    calls: list[AttentionCall] = []
    with torch.no_grad(), torch.autocast(model.device.type, enabled=False):
        seen = _seen(model, images, mlps=False)
        observe(
            model,
            images,
            lambda call: calls.append(call.precise()) if call.site.layer == layer else None,
        )
        with evaluating(model):
            weights = precise(_stream_weights(model, seen.streams[-1], wanted.to(model.device)))
        whole = _of_heads(model, seen, weights)[layer][:, head].cpu()
        value = calls[0].at("values")
        read = _read_by(model, seen, weights, layer, head)
        if len(calls) > 1 or value is None or value.shape[-1] != read.shape[-1]:
            return torch.full((len(images), calls[0].site.keys), torch.nan)
        rows = calls[0].weights()[:, head]
        found = (seen.read(rows) * (read @ precise(value[:, head]).transpose(-1, -2))).sum(1).cpu()
    exact = (found.sum(1) - whole).abs() <= TOLERANCE * whole.abs().amax().clamp_min(1)
    return found.masked_fill(~exact[:, None], torch.nan)


@needs_gradients
def class_contributions(
    model: Model, images: Images, layer: int, head: int
) -> Float[Tensor, "batch classes"]:
    """Return what one head contributes to the logit of every class, as `head_contributions` for all
    of them at once. images: of one batch, on the model's device.

    On the CPU.
    """
    with torch.no_grad(), torch.autocast(model.device.type, enabled=False), evaluating(model):
        seen = _seen(model, images, mlps=False)
        of = layer_at(model, layer)
        projection = projection_of(model, of.attention)
        assert projection is not None  # as the layer has heads
        output = precise(seen.captured[f"blocks.{layer}.heads{seen.tokens}"])[:, head]
        columns = precise(projection.weight).unflatten(1, (of.heads, -1))[:, head]
        added = output @ columns.T * branch_scale(model.module.get_submodule(of.unit), 1)
        with torch.enable_grad(), _FixedScale():
            leaf = seen.streams[-1].detach().requires_grad_()
            logits = logits_from(model, leaf)
            weights = torch.zeros_like(logits, requires_grad=True)
            (slope,) = torch.autograd.grad(logits, leaf, weights, create_graph=True)
            (found,) = torch.autograd.grad(precise(seen.read(slope)), weights, added)
    return precise(found).cpu()


class _Seen(NamedTuple):
    """What one pass over a batch tells: the streams after the blocks, the outputs of heads and
    MLPs, the logits; reads, tokens: those that the classifier reads, and their suffix of a place.
    """

    streams: list[Tokens]
    captured: Captured
    reads: list[int] | None
    tokens: str

    def read(self, weights: Tokens) -> Tokens:
        """Of the tokens that the classifier reads."""
        return weights if self.reads is None else weights[:, self.reads]


def _seen(model: Model, images: Images, *, mlps: bool = True) -> _Seen:
    blocks = blocks_of(model)
    known = layers(model)
    reads = _reads(model)
    tokens = "" if reads is None else f"[{','.join(map(str, reads))}]"
    places = [f"blocks.{layer.index}.heads{tokens}" for layer in known]
    places += [f"blocks.{number}.mlp{tokens}" for number in _mlps(model) if mlps]
    with _watching_stream(model, blocks) as streams:
        captured = capture(model, images, places)
    return _Seen(streams, captured, reads, tokens)


def _mlps(model: Model) -> list[int]:
    """Return the numbers of the blocks with an MLP whose output is a place."""
    places = accesses(model)
    numbers = []
    for block in numbered_blocks(model):
        # that of a layer is known to be one place
        if block.mlp is not None and (block.attention or f"blocks.{block.index}.mlp" in places):
            numbers.append(block.index)
    return numbers


def _of_heads(
    model: Model, seen: _Seen, weights: Tokens
) -> dict[int, Float[Tensor, "batch heads"]]:
    """Return what the heads add to a logit, by the number of the layer; weights: of the stream in
    the logit.
    """
    read = seen.read(weights)
    heads = {}
    for layer in layers(model):
        projection = projection_of(model, layer.attention)
        assert projection is not None  # as the layer has heads
        scaled = read * branch_scale(model.module.get_submodule(layer.unit), 1)
        joined = (
            precise(seen.captured[f"blocks.{layer.index}.heads{seen.tokens}"])
            .transpose(1, 2)
            .flatten(2)
        )
        by_head = (scaled @ precise(projection.weight) * joined).unflatten(-1, (layer.heads, -1))
        heads[layer.index] = by_head.sum((1, 3))
    return heads


def _read_by(
    model: Model, seen: _Seen, weights: Tokens, layer: int, head: int
) -> Float[Tensor, "batch read width"]:
    """Return the weight of each number of a head's output at each token that the classifier
    reads."""
    of = layer_at(model, layer)
    projection = projection_of(model, of.attention)
    assert projection is not None  # as the layer has heads
    scaled = seen.read(weights) * branch_scale(model.module.get_submodule(of.unit), 1)
    found: Tensor = (scaled @ precise(projection.weight)).unflatten(-1, (of.heads, -1))[:, :, head]
    return found


def _contributions(model: Model, images: Images, targets: Labels | None) -> Contributions:
    blocks = blocks_of(model)
    known = layers(model)
    with torch.no_grad(), torch.autocast(model.device.type, enabled=False):
        seen = _seen(model, images)
        streams = seen.streams
        captured = seen.captured
        targets = check_targets(targets, captured.logits)
        with evaluating(model):
            weights = precise(_stream_weights(model, streams[-1], targets))  # (batch, tokens, dim)
            constant = precise(logits_from(model, torch.zeros_like(streams[-1][:1]))[0, targets])
        read = seen.read(weights)
        heads = _of_heads(model, seen, weights)
        mlps = weights.new_zeros(len(weights), depth(model))
        biases = [torch.zeros_like(constant)]
        for layer in known:
            unit = model.module.get_submodule(layer.unit)
            projection = projection_of(model, layer.attention)
            assert projection is not None  # as the layer has heads
            if projection.bias is not None:
                biases.append((read * branch_scale(unit, 1) @ precise(projection.bias)).sum(1))
        for number in _mlps(model):
            unit = model.module.get_submodule(block_at(model, number).unit)
            mlp = captured[f"blocks.{number}.mlp{seen.tokens}"]
            mlps[:, number] = (read * (precise(mlp) * branch_scale(unit, 2))).sum((1, 2))
        rest = weights.new_zeros(len(weights))
        units = {layer.unit for layer in known}
        for name, before, after in zip(blocks, streams, streams[1:]):
            if name not in units:
                rest = rest + (weights * (precise(after) - precise(before))).sum((1, 2))
        for block in numbered_blocks(model):
            if not block.attention and block.unit in blocks:
                rest = rest - mlps[:, block.index]
        parts = (
            stacked(heads, depth(model)),
            mlps,
            (weights * streams[0]).sum((1, 2)),
            torch.stack(biases).sum(0) + constant,
            rest,
            precise(captured.logits.gather(1, targets.unsqueeze(1))[:, 0]),
            targets,
        )
        allowed = _tolerance(model, weights, streams, captured.logits).cpu()
    result = Contributions(*(part.cpu() for part in parts))
    missed = (result.total() - result.logit).abs()
    if not bool((missed <= allowed).all()):
        worst = int((missed - allowed).argmax())
        raise UnsupportedError(
            "expected blocks that add heads and an MLP to one residual stream, found others in "
            f"{model.alias}: the parts of image {worst} sum to {result.total()[worst]:.4f}, its "
            f"logit is {result.logit[worst]:.4f}"
        )
    return result


def _tolerance(
    model: Model, weights: Tokens, streams: Sequence[Tokens], logits: Logits
) -> Float[Tensor, " batch"]:
    """Return how far the sum of the contributions may be from the logit: in fp32 TOLERANCE of the
    largest logit.

    A module in 16 bits rounds the two branches and the two sums of a block, each number of the
    stream s by up to u = eps / 2 of it, up or down. Of such independent errors a logit with the
    weights w has a standard deviation of at most 2u |w s| a block; the norm and the weights are
    rounded about as one more block is. Allowed are four of these deviations, and u of the largest
    logit for the logit and for the constant.
    """
    eps = torch.finfo(model.mean.dtype).eps
    largest = max(1.0, logits.abs().max().item())
    allowed = weights.new_full((len(weights),), largest * max(TOLERANCE, eps))
    if model.mean.dtype in (torch.float32, torch.float64):
        return allowed
    variances = [(weights * stream).square().sum((1, 2)) for stream in (*streams[1:], streams[-1])]
    return allowed + 4 * eps * torch.stack(variances).sum(0).sqrt()


def logits_by_depth(
    model: Model, images: Images, blocks: Sequence[str] | None = None
) -> Float[Tensor, "batch depths classes"]:
    """As logit_lens, of one batch; blocks: their names (None: all). The last of blocks + 1 depths
    is the model's own.

    Raises UnsupportedError where it is not.
    """
    blocks = blocks_of(model) if blocks is None else blocks
    if model.anatomy.attention:
        _require_batch_first(model)
    with evaluating(model), torch.no_grad():
        with _watching_stream(model, blocks) as streams:
            logits = model(images)
        lens = torch.stack([logits_from(model, stream, blocks=blocks) for stream in streams], dim=1)
    difference = (lens[:, -1] - logits).abs().max().item()
    scale = logits.abs().max().item()
    # the same norm and classifier on the same stream: in 16 bits a few roundings of the logits
    if not difference <= max(TOLERANCE, 4 * torch.finfo(model.mean.dtype).eps) * scale:
        raise UnsupportedError(
            f"expected a classifier that reads the output of the last block, {blocks[-1]}, found "
            "logits of "
            f"{model.alias} that differ by {difference:.1e}; try vitlens ablate, which needs none"
        )
    return lens


@contextmanager
def _watching_stream(model: Model, blocks: Sequence[str]) -> Iterator[list[Tokens]]:
    """Inside, a forward pass fills the list with the residual stream before the first block and
    after each one.
    """
    found: list[Tokens] = []

    def after(name: str, arguments: Arguments, output: Any) -> None:
        if not isinstance(output, Tensor):
            raise UnsupportedError(
                f"expected blocks of {model.alias} that return the residual stream, found "
                f"{type(output).__name__} of {name}; return the tensor alone"
            )
        found.extend((arguments[0], output) if name == blocks[0] else (output,))

    with watching(model.module, blocks, after):
        yield found


def branch_scale(block: nn.Module, branch: int) -> Tensor | float:
    """LayerScale of a block's first (attention) or second (MLP) branch, (dim,), under timm's names;
    1 where none is.
    """
    inside = getattr(getattr(block, f"ls{branch}", None), "gamma", None)
    scale = inside if isinstance(inside, Tensor) else getattr(block, f"gamma_{branch}", None)
    return scale if isinstance(scale, Tensor) else 1.0


def stacked(
    by_layer: Mapping[int, Float[Tensor, "batch _"]], rows: int
) -> Float[Tensor, "batch layers widest"]:
    """Return one table by the number of the layer, NaN where one has fewer numbers than the widest,
    or none.
    """
    widest = max(values.shape[1] for values in by_layer.values())
    first = next(iter(by_layer.values()))
    missing = first.new_empty(len(first), 0)
    padded = []
    for number in range(rows):
        values = by_layer.get(number, missing)
        padded.append(F.pad(values, (0, widest - values.shape[1]), value=torch.nan))
    return torch.stack(padded, dim=1)


def _reads(model: Model) -> list[int] | None:
    """Return the tokens that the classifier reads (None: all).

    Raises UnsupportedError where contributions are not defined.
    """
    require_pre_norm(
        model,
        instead="vitlens ablate and vitlens.patch measure effects, vitlens.logit_lens reads each "
        "depth",
    )
    _require_batch_first(model)
    for layer in layers(model):
        if not layer.head_dim:
            raise UnsupportedError(
                f"expected an output projection that reads the heads at layer {layer.index} of "
                f"{model.alias}, found none in {layer.attention}; contributions need one"
            )
    if model.anatomy.readout == "mean":
        return None
    return [*model.layout.positions("cls"), *model.layout.positions("distillation")]


def _require_batch_first(model: Model) -> None:
    if any(layer.tokens_first for layer in layers(model)):
        raise UnsupportedError(
            "expected blocks of (batch, tokens, width), found (tokens, batch, width) in "
            f"{model.alias}; say "
            "batch_first=True where it is built"
        )


def blocks_of(model: Model, *, pooled: bool = False) -> tuple[str, ...]:
    """Names of all blocks in forward order, including pruned ones without heads.

    pooled: also where the classifier reads the stream of the patches by attention (SigLIP, CaiT),
    without the blocks of that pooling. Raises UnsupportedError unless they are one sequence,
    otherwise read through norms and pooling alone.
    """
    anatomy = model.anatomy
    if anatomy.family == "vit" and not anatomy.blocks:
        raise UnsupportedError(
            f"expected blocks that add to one residual stream, found none in {model.alias}; put "
            "each block in a module of its own, or name them with blocks="
        )
    pooled = pooled and anatomy.family == "vit" and anatomy.readout == "pool"
    names = tuple(stage.module for stage in stages(model)) if pooled else anatomy.blocks
    parents = {name.rpartition(".")[0] for name in names}
    if (
        anatomy.family != "vit"
        or anatomy.readout is None
        or (anatomy.readout == "pool") != pooled
        or len(parents) != 1
    ):
        reader = f"blocks in {len(parents)} places"
        if anatomy.family != "vit":
            reader = f"{'an' if anatomy.family == 'other' else 'a'} {anatomy.family} model"
        elif anatomy.readout == "pool" and not pooled:
            reader = "attention pooling"
        raise UnsupportedError(
            "expected a vision transformer whose classifier reads one residual stream (CLS or "
            f"mean), found {reader} in {model.alias}; try vitlens ablate, which needs none"
        )
    parent = parents.pop()
    # not a stem or head in the same list
    with_attention = [name for name in names if name not in anatomy.without_attention]
    kinds = {type(model.module.get_submodule(name)) for name in with_attention}
    blocks = []
    for child_name, child in model.module.get_submodule(parent).named_children():
        name = f"{parent}.{child_name}" if parent else child_name
        if name in names or type(child) in kinds:
            blocks.append(name)
    return tuple(blocks)


def logits_from(model: Model, stream: Tokens, *, blocks: Sequence[str] | None = None) -> Logits:
    """Return the logits of a residual stream after the last block; the model's own blocks do not
    run.

    blocks: their names in forward order (None: blocks_of).
    """
    names = blocks_of(model) if blocks is None else blocks
    blank = stream.new_zeros(1, 3, 1, 1).expand(len(stream), 3, *model.input_size)
    with ExitStack() as stack:
        for name in names:
            block = model.module.get_submodule(name)
            stack.enter_context(
                overridden(block, lambda _forward: lambda tokens, *_args, **_kwargs: tokens)
            )
        stack.enter_context(overridden(block, lambda _forward: lambda *_args, **_kwargs: stream))
        try:
            return model.run(blank)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            # of the user's own code, which may need what its blocks compute
            raise UnsupportedError(
                "expected a classifier that reads the last residual stream alone in "
                f"{model.alias}, found a forward that fails without its blocks "
                f"({type(error).__name__}: {first_line(error)}); try "
                "vitlens ablate, which needs none"
            ) from error


@needs_gradients
def _stream_weights(model: Model, stream: Tokens, targets: Labels | Logits) -> Tokens:
    """Return the weight of each number of the last residual stream in a logit, with the final
    norm's scale fixed.

    targets: a class for each image, or the weights of a sum of logits. The logit is then the sum of
    weights times stream plus a constant.
    """
    with torch.enable_grad(), _FixedScale():
        leaf = stream.detach().requires_grad_()
        logits = logits_from(model, leaf)
        logit = (
            logits.gather(1, targets.unsqueeze(1)) if targets.ndim == 1 else logits * targets
        ).sum()
        (weights,) = torch.autograd.grad(logit, leaf)
    return weights


class _FixedScale(ScopedMode):
    """Makes the scale of norms a constant for autograd; their outputs are unchanged."""

    def intercept(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Compute norms by their formula; pass every other call on."""
        if func not in (F.layer_norm, F.rms_norm):
            return func(*args, **kwargs)
        given = inspect.signature(func).bind(*args, **kwargs)
        given.apply_defaults()
        tokens, shape, weight, *bias, eps = given.arguments.values()
        axes = tuple(range(-len(shape), 0))
        centred = tokens - tokens.mean(axes, keepdim=True) if func is F.layer_norm else tokens
        eps = torch.finfo(tokens.dtype).eps if eps is None else eps
        result = centred * (centred.detach().square().mean(axes, keepdim=True) + eps).rsqrt()
        result = result if weight is None else result * weight
        return result if bias in ([], [None]) else result + bias[0]
