"""Direct logit attribution and the logit lens: what each head adds directly to a logit, and the prediction by layer.

The residual stream is a sum: the embedding, every head through its columns of the output projection, every MLP. With
the final norm's scale fixed, a logit is linear in it (Elhage 2021; nostalgebraist 2020).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from vitlens.analysis.attention.gradients import check_targets
from vitlens.analysis.patching.stream_to_logits import blocks_of, logits_from, stream_weights
from vitlens.devices import evaluating
from vitlens.errors import UnsupportedError
from vitlens.lens.inside import Inside, overridden, projection_of
from vitlens.lens.layers import Layer, layers
from vitlens.models.model import Model
from vitlens.shapes import Images, Labels, Logits, Tokens

TOLERANCE = 1e-3  # beside the largest logit: what the parts may miss of theirs


@dataclass(frozen=True)
class Contributions:
    """What each part of a model adds directly to one logit of each image, in logits; the parts sum to the logit.

    heads: NaN where a layer has fewer heads than the widest; mlps: one a layer, 0 where it has none; embedding: of
    patches, positions and prefix tokens; bias: of the output projections, the final norm and the classifier; rest: of
    blocks without heads; logit: the model's own, of the classes in targets. All on the CPU.
    """

    heads: Float[Tensor, "batch layers heads"]
    mlps: Float[Tensor, "batch layers"]
    embedding: Float[Tensor, " batch"]
    bias: Float[Tensor, " batch"]
    rest: Float[Tensor, " batch"]
    logit: Float[Tensor, " batch"]
    targets: Int[Tensor, " batch"]

    def total(self) -> Float[Tensor, " batch"]:
        """All parts together: the logit, but for float arithmetic."""
        return self.heads.nansum((1, 2)) + self.mlps.sum(1) + self.embedding + self.bias + self.rest


@dataclass
class BranchOutputs:
    """Outputs of the branches of every block, kept from one forward pass.

    reads: the tokens that the classifier reads (None: all); before, after: the residual stream at either end; others:
    what blocks without heads add; heads: the input of each layer's output projection, mlps: the output of its MLP, both
    of the tokens that are read, before LayerScale.
    """

    reads: list[int] | None
    before: Tokens = field(init=False)
    after: Tokens = field(init=False)
    others: list[Tokens] = field(default_factory=list)
    heads: dict[int, Float[Tensor, "batch reads width"]] = field(default_factory=dict)
    mlps: dict[int, Float[Tensor, "batch reads dim"]] = field(default_factory=dict)

    def row(self, tokens: Tokens) -> Float[Tensor, "batch reads dim"]:
        """The tokens that are read."""
        return tokens if self.reads is None else tokens[:, self.reads]


def contributions(model: Model, images: Images, *, targets: Labels | None = None) -> Contributions:
    """The direct contribution of every head and MLP to a logit, with the final norm's scale fixed at each image's own.

    targets: a class for each image (default: the prediction). Effects through later layers are not in it: a head that
    only feeds other heads shows 0. Raises UnsupportedError where the classifier does not read the residual stream
    through a norm and a linear map alone (attention pooling, CaiT), or where a block adds something else than its
    heads and its MLP (windows, norms after the branches); InputError for a class that does not exist.
    """
    branches = BranchOutputs(_reads(model))
    with evaluating(model), torch.no_grad(), torch.autocast(model.device.type, enabled=False):
        with watching_branches(model, branches, blocks_of(model)):
            logits: Logits = model(images)
        targets = check_targets(targets, logits)
        summed = _summed(model, branches, logits, targets)
    _check(model, summed, logits.abs().max().item())
    return summed


def logit_lens(model: Model, images: Images) -> Float[Tensor, "batch depths classes"]:
    """The final norm and classifier applied to the residual stream before the first block and after every block.

    depths: blocks + 1; the last is the model's own logits. Raises UnsupportedError where the classifier reads more
    than one residual stream, or reads it through attention (SigLIP, CaiT, Swin, a CNN).
    """
    streams: list[Tokens] = []
    with evaluating(model), torch.no_grad():
        with ExitStack() as stack:
            for number, name in enumerate(blocks_of(model)):
                block = model.module.get_submodule(name)
                if not number:
                    before = block.register_forward_pre_hook(lambda _block, args: streams.append(args[0]))
                    stack.callback(before.remove)
                after = block.register_forward_hook(lambda _block, _args, output: streams.append(output))
                stack.callback(after.remove)
            model(images)
        return torch.stack([logits_from(model, stream) for stream in streams], dim=1)


def accuracy_by_depth(lens: Float[Tensor, "batch depths classes"], labels: Labels) -> Float[Tensor, " depths"]:
    """The fraction of images whose label has the highest logit, at each depth of a logit lens."""
    return (lens.argmax(-1) == labels.to(lens.device).unsqueeze(1)).float().mean(0)


def _summed(model: Model, branches: BranchOutputs, logits: Logits, targets: Labels) -> Contributions:
    """Every part's product with what the logit reads of the last residual stream."""
    weights = stream_weights(model, branches.after, targets)  # (batch, tokens, dim)
    read, found = branches.row(weights), layers(model)
    heads, biases = zip(*(_heads(model, layer, branches.heads[layer.index], read) for layer in found))
    widest = max(layer.heads for layer in found)
    nothing = torch.zeros_like(branches.after[:1])
    parts = (
        torch.stack([F.pad(each, (0, widest - each.shape[1]), value=torch.nan) for each in heads], dim=1),
        torch.stack([_mlp(model, layer, branches, read) for layer in found], dim=1),
        (weights * branches.before).sum((1, 2)),
        torch.stack(biases).sum(0) + logits_from(model, nothing)[0, targets],
        sum(((weights * added).sum((1, 2)) for added in branches.others), weights.new_zeros(len(weights))),
        logits.gather(1, targets.unsqueeze(1))[:, 0],
        targets,
    )
    return Contributions(*(part.cpu() for part in parts))


def _reads(model: Model) -> list[int] | None:
    """The tokens that the classifier reads, None: all. Raises UnsupportedError where it reads something else."""
    blocks_of(model)
    for layer in layers(model):
        if not layer.head_dim:
            raise UnsupportedError(
                f"expected an output projection that reads the heads at layer {layer.index} of {model.alias}, found "
                f"none in {layer.attention}; contributions need one"
            )
    if model.anatomy.readout == "mean":
        return None
    return [*model.layout.positions("cls"), *model.layout.positions("distillation")]


def _check(model: Model, summed: Contributions, largest: float) -> None:
    """The parts must sum to the logit: otherwise there are others."""
    missed = (summed.total() - summed.logit).abs()
    if not bool((missed <= TOLERANCE * max(1.0, largest)).all()):
        worst = int(missed.argmax())
        raise UnsupportedError(
            f"expected blocks that add heads and an MLP to one residual stream, found others in {model.alias}: the "
            f"parts of image {worst} sum to {summed.total()[worst]:.4f}, its logit is {summed.logit[worst]:.4f}"
        )


def _heads(
    model: Model, layer: Layer, joined: Tensor, weights: Tokens
) -> tuple[Float[Tensor, "batch heads"], Float[Tensor, " batch"]]:
    """What each head adds to the logit, and the projection's bias."""
    projection = projection_of(model.module.get_submodule(layer.attention))
    assert projection is not None
    scale = branch_scale(model.module.get_submodule(layer.unit), 1)
    scaled = weights if scale is None else weights * scale
    parts = (scaled @ projection.weight * joined).unflatten(-1, (layer.heads, -1)).sum((1, 3))
    bias = scaled.new_zeros(len(scaled)) if projection.bias is None else (scaled @ projection.bias).sum(1)
    return parts, bias


def _mlp(model: Model, layer: Layer, branches: BranchOutputs, weights: Tokens) -> Float[Tensor, " batch"]:
    if layer.index not in branches.mlps:
        return weights.new_zeros(len(weights))
    scale = branch_scale(model.module.get_submodule(layer.unit), 2)
    output = branches.mlps[layer.index]
    return (weights * (output if scale is None else output * scale)).sum((1, 2))


@contextmanager
def watching_branches(model: Model, branches: BranchOutputs, blocks: Sequence[str]) -> Iterator[None]:
    """Fill `branches` during a forward pass; blocks: names of all blocks in forward order."""
    with ExitStack() as stack:
        for name in blocks:
            hook = model.module.get_submodule(name).register_forward_hook(_see_block(model, branches, name, blocks))
            stack.callback(hook.remove)
        for layer in layers(model):
            attention = model.module.get_submodule(layer.attention)
            stack.enter_context(overridden(attention, _see_heads(attention, layer, branches)))
            if layer.mlp is not None:
                hook = model.module.get_submodule(layer.mlp).register_forward_hook(_see_mlp(layer, branches))
                stack.callback(hook.remove)
        yield


def _see_block(
    model: Model, branches: BranchOutputs, name: str, blocks: Sequence[str]
) -> Callable[[nn.Module, Any, Tokens], None]:
    headless = name not in {layer.unit for layer in layers(model)}

    def see(_block: nn.Module, args: Any, output: Tokens) -> None:
        if name == blocks[0]:
            branches.before = args[0]
        if name == blocks[-1]:
            branches.after = output
        if headless:
            branches.others.append(output - args[0])

    return see


def _see_mlp(layer: Layer, branches: BranchOutputs) -> Callable[[nn.Module, Any, Tokens], None]:
    def see(_mlp: nn.Module, _args: Any, output: Tokens) -> None:
        branches.mlps[layer.index] = branches.row(output)

    return see


def _see_heads(attention: nn.Module, layer: Layer, branches: BranchOutputs) -> Callable[..., Any]:
    def joined(outputs: Tensor) -> Tensor:
        branches.heads[layer.index] = branches.row(outputs)
        return outputs

    def wrap(forward: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            with Inside(attention, joined=joined):
                return forward(*args, **kwargs)

        return watched

    return wrap


def branch_scale(block: nn.Module, branch: int) -> Tensor | None:
    """LayerScale of a block's first (attention) or second (MLP) branch, (dim,), or None: as timm names it."""
    inside = getattr(getattr(block, f"ls{branch}", None), "gamma", None)
    found = inside if isinstance(inside, Tensor) else getattr(block, f"gamma_{branch}", None)
    return found if isinstance(found, Tensor) else None
