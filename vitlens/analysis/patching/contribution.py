"""Direct logit attribution and the logit lens: what each head adds to a logit directly, and the prediction by layer.

The residual stream is a sum: the embedding, every head through its columns of the output projection, every MLP. With
the final norm's scale fixed, a logit is linear in it (Elhage 2021; nostalgebraist 2020).
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from vitlens.analysis.attention.gradients import check_targets
from vitlens.analysis.patching.branch_outputs import BranchOutputs, branch_scale, watching_branches
from vitlens.analysis.patching.stream_to_logits import blocks_of, logits_from, stream_weights
from vitlens.devices import evaluating
from vitlens.errors import UnsupportedError
from vitlens.lens.hooks import Arguments, projection_of, watching
from vitlens.lens.layers import Layer, layers
from vitlens.models.model import Model
from vitlens.shapes import Images, Labels, Logits, Tokens

TOLERANCE = 1e-3  # beside the largest logit: what the parts may miss of theirs


@dataclass(frozen=True)
class Contributions:
    """What each part of a model adds directly to one logit of each image, in logits; they sum to the logit.

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


def contributions(model: Model, images: Images, *, targets: Labels | None = None) -> Contributions:
    """The direct contribution of every head and MLP to a logit, with the final norm's scale fixed at each image's own.

    targets: a class for each image (default: the prediction). Effects through later layers are not in it: a head that
    only feeds other heads shows 0. Raises UnsupportedError where the classifier does not read the residual stream
    through a norm and a linear map alone (attention pooling, CaiT), or where a block adds something else than its
    heads and its MLP (windows, norms after the branches); InputError for a class that does not exist.
    """
    outputs = BranchOutputs(_reads(model))
    with evaluating(model), torch.no_grad(), torch.autocast(model.device.type, enabled=False):
        with watching_branches(model, outputs, blocks_of(model)):
            logits: Logits = model(images)
        targets = check_targets(targets, logits)
        made = _summed(model, outputs, logits, targets)
    _check(model, made, logits.abs().max().item())
    return made


def logit_lens(model: Model, images: Images) -> Float[Tensor, "batch depths classes"]:
    """The final norm and classifier applied to the residual stream before the first block and after every block.

    depths: blocks + 1; the last is the model's own logits. Raises UnsupportedError where the classifier reads more
    than one residual stream, or reads it through attention (SigLIP, CaiT, Swin, a CNN).
    """
    streams: list[Tokens] = []
    blocks = blocks_of(model)

    def after(name: str, arguments: Arguments, output: Tokens) -> None:
        streams.extend((arguments[0], output) if name == blocks[0] else (output,))

    with evaluating(model), torch.no_grad():
        with watching(model.module, blocks, after):
            model(images)
        return torch.stack([logits_from(model, stream) for stream in streams], dim=1)


def accuracy_by_depth(lens: Float[Tensor, "batch depths classes"], labels: Labels) -> Float[Tensor, " depths"]:
    """The fraction of images whose label has the highest logit, at each depth of a logit lens."""
    return (lens.argmax(-1) == labels.to(lens.device).unsqueeze(1)).float().mean(0)


def _summed(model: Model, outputs: BranchOutputs, logits: Logits, targets: Labels) -> Contributions:
    """Every part's product with what the logit reads of the last residual stream."""
    weights = stream_weights(model, outputs.after, targets)  # (batch, tokens, dim)
    read, known = outputs.row(weights), layers(model)
    heads, biases = zip(*(_heads(model, layer, outputs.heads[layer.index], read) for layer in known))
    widest = max(layer.heads for layer in known)
    zero = torch.zeros_like(outputs.after[:1])
    parts = (
        torch.stack([F.pad(each, (0, widest - each.shape[1]), value=torch.nan) for each in heads], dim=1),
        torch.stack([_mlp(model, layer, outputs, read) for layer in known], dim=1),
        (weights * outputs.before).sum((1, 2)),
        torch.stack(biases).sum(0) + logits_from(model, zero)[0, targets],
        sum(((weights * added).sum((1, 2)) for added in outputs.others), weights.new_zeros(len(weights))),
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


def _check(model: Model, made: Contributions, largest: float) -> None:
    """The parts must sum to the logit: otherwise there are others."""
    missed = (made.total() - made.logit).abs()
    if not bool((missed <= TOLERANCE * max(1.0, largest)).all()):
        worst = int(missed.argmax())
        raise UnsupportedError(
            f"expected blocks that add heads and an MLP to one residual stream, found others in {model.alias}: the "
            f"parts of image {worst} sum to {made.total()[worst]:.4f}, its logit is {made.logit[worst]:.4f}"
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


def _mlp(model: Model, layer: Layer, outputs: BranchOutputs, weights: Tokens) -> Float[Tensor, " batch"]:
    if layer.index not in outputs.mlps:
        return weights.new_zeros(len(weights))
    scale = branch_scale(model.module.get_submodule(layer.unit), 2)
    output = outputs.mlps[layer.index]
    return (weights * (output if scale is None else output * scale)).sum((1, 2))
