"""`vitlens.walkthrough`: one head of one layer on one image, step by step.

Effects of scaling, positions and CLS are measured by running the model without them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from vitlens.analysis.attention.chain import without_autocast
from vitlens.analysis.attention.tokens import require_token_attention
from vitlens.analysis.walkthrough.steps import (
    STEPS,
    Embedding,
    StepCheck,
    before_blocks,
    layer_steps,
    patch_embedding,
    require_steps,
)
from vitlens.devices import evaluating
from vitlens.errors import InputError, UnsupportedError
from vitlens.inputs import takes_images
from vitlens.lens.call import AttentionCall, softmax_or_zero
from vitlens.lens.capture import capture
from vitlens.lens.intervene import Changes, KnockOut, intervene
from vitlens.lens.observe import observe, survey_weights
from vitlens.lens.trace import Layer, depth, layers, probe_images
from vitlens.models.anatomy import require_pre_norm
from vitlens.models.model import Model
from vitlens.models.numbering import numbers_text
from vitlens.models.requirement import requirement
from vitlens.pixels import AnyImages, as_parts
from vitlens.shapes import Images, Logits, TokenLayout, Weights
from vitlens.summary import Line, Summary

ChangeName = Literal[
    "none", "no-positions", "unscaled", "patches-zero", "prefix-zero", "prefix-unread", "mean-read"
]
CHANGES: Final[dict[ChangeName, str]] = {
    "none": "as it is",
    "no-positions": "patches without positions",
    "unscaled": "scores not scaled",
    "patches-zero": "last block: patches zero",
    "prefix-zero": "last block: prefix tokens zero",
    "prefix-unread": "patches do not attend to CLS",
    "mean-read": "mean of patches read as CLS",
}


# fields of a walkthrough in its summary
_LISTED: Final = (
    "queries",
    "keys",
    "values",
    "scores",
    "weights",
    "outputs",
    "projected",
    "after",
)


@dataclass(frozen=True)
class Permutation:
    """A run with the patches in another order, compared with the run in the original order.

    Position embeddings stay in place, or are left out of both runs.

    positions: True if both runs have position embeddings.
    difference: the largest difference between the patches of both runs after the last block. The
        patches of the original run are put into the order of the permuted run.
    logits: the largest difference between the logits of both runs.
    largest: the largest value of the patches after the last block.
    permuted: the logits of the permuted run.
    """

    positions: bool
    difference: float
    logits: float
    largest: float
    permuted: Logits


@dataclass(frozen=True)
class Changed:
    """The model's logits with one change.

    difference: the largest difference from the logits of the unchanged model.
    """

    change: ChangeName
    logits: Logits
    difference: float


@dataclass(frozen=True)
class Entropies:
    """Entropy of every head's attention weights in nats, mean over queries and images.

    Both tables have NaN where there is no head. They end with the last layer in which all tokens
    attend to all tokens.

    scaled: entropy with the model's scores.
    unscaled: entropy if scores are not divided by sqrt(head_dim).
    """

    scaled: Float[Tensor, "layers heads"]
    unscaled: Float[Tensor, "layers heads"]


@dataclass(frozen=True, repr=False)
class Walkthrough(Summary):
    """One head of one layer on one image, step by step; tensors on the CPU, without a batch axis.

    layer, head: counted from 0.
    layers: the number of blocks of the model, including those without attention.
    heads: the number of heads of the layer.
    scale: the factor of the scores, 1/sqrt(head_dim).
    query: the position of the query that is followed. It is CLS, or the patch in the middle of a
        model without CLS.
    key: the position of the patch that the query attends to most.

    embedding: the patch embedding, None if the model does not cut patches by one convolution.
    positions: the position embeddings of the patches, None if they are not fixed vectors.
    input: the residual stream that enters the block.
    normed: the input of the block's attention.
    queries, keys, values: the queries, keys and values of the head.
    products: the products q kᵀ.
    scores: the scaled products.
    weights: the attention weights, after the softmax.
    unscaled: the attention weights if the products are not scaled.
    outputs: the outputs of the head.
    projected: the outputs of the head after its part of the output projection.
    head_norms: the norm of the projected output of each head, by token.
    attention, mlp, after: the outputs of the attention, the MLP and the block.

    checks: the comparison of each step with the model.
    entropies: the entropies of all heads of the model.
    order: the random order of patches in `permutations`.
    permutations: runs with the patches in that order.
    changed: runs of the model with one change each.
    logits: the logits of the unchanged model.
    """

    layer: int
    head: int
    layers: int
    heads: int
    scale: float
    query: int
    key: int
    embedding: Embedding | None
    positions: Float[Tensor, "patches dim"] | None
    input: Float[Tensor, "tokens dim"]
    normed: Float[Tensor, "tokens dim"]
    queries: Float[Tensor, "tokens head_dim"]
    keys: Float[Tensor, "tokens head_dim"]
    values: Float[Tensor, "tokens value_dim"]
    products: Float[Tensor, "query key"]
    scores: Float[Tensor, "query key"]
    weights: Float[Tensor, "query key"]
    unscaled: Float[Tensor, "query key"]
    outputs: Float[Tensor, "tokens value_dim"]
    projected: Float[Tensor, "tokens dim"]
    head_norms: Float[Tensor, "heads tokens"]
    attention: Float[Tensor, "tokens dim"]
    mlp: Float[Tensor, "tokens dim"]
    after: Float[Tensor, "tokens dim"]
    checks: tuple[StepCheck, ...]
    entropies: Entropies
    order: Int[Tensor, " patches"]
    permutations: tuple[Permutation, ...]
    changed: tuple[Changed, ...]
    logits: Float[Tensor, " classes"]

    def summary(self) -> Iterator[Line]:
        """Yield the shapes of the steps, and their largest differences from the model's."""
        yield Line("head", f"L{self.layer}.H{self.head}")
        for name in _LISTED:
            yield Line(name, getattr(self, name))
        for check in self.checks:
            if check.difference is not None:
                yield Line(f"{STEPS[check.step].title}: largest difference", check.difference)


@takes_images
def walkthrough(
    model: Model,
    images: AnyImages,
    *,
    layer: int | None = None,
    head: int | None = None,
    seed: int = 0,
) -> Walkthrough:
    """Compute one head's attention on one image step by step, from patches to the residual stream.

    images: one image (1, 3, height, width) in [0, 1], or any form of one that `vitlens.images`
        takes.
    layer: the number of the layer, from 0 (None: the middle layer).
    head: the number of the head, from 0 (None: the head with the lowest mean entropy).
    seed: the seed of the permutation of patches.

    Each of `.checks` holds the largest difference of a step from the model's result.
    `.permutations` and `.changed` are results of the model without positions, scaling and CLS.

    Raises UnsupportedError for a model in which not all tokens attend to all tokens (a CNN, Swin).
    Raises InputError for another number of images, and for a layer or head that does not exist.

    >>> import torch, vitlens
    >>> vit = vitlens.load("vit-digits")
    >>> walk = vitlens.walkthrough(vit, torch.rand(1, 3, 32, 32), layer=3, head=1)
    >>> walk.scores.shape, walk.queries.shape  # 64 patches and CLS
    (torch.Size([65, 65]), torch.Size([65, 32]))
    >>> max(check.difference for check in walk.checks) < 1e-4
    True
    """
    parts = as_parts(images)
    require_walkthrough(model)
    if len(parts) != 1:
        raise InputError(f"expected one image, found {len(parts)}; give images[:1]")
    image = parts[:1].to(model.device)
    followed = _find_layer(model, layer)
    if head is not None and not 0 <= head < followed.heads:
        raise InputError(
            f"expected a head from 0 to {followed.heads - 1} in layer {followed.index}, found "
            f"{head}"
        )
    with evaluating(model), torch.no_grad(), without_autocast(image.device):
        return _walk(model, image, followed, head, seed)


@requirement("walkthrough")
def require_walkthrough(model: Model) -> None:
    """Raise UnsupportedError unless the tokens of one sequence attend to each other."""
    if any(site.kind == "window" for site in survey_weights(model, probe_images(model, 1))):
        raise UnsupportedError(
            "expected layers in which every token attends to every token, found windows in "
            f"{model.alias}: there the same steps hold within each window, with a position bias on "
            "the scores and no CLS; vitlens attention shows what a patch attends to in its window"
        )
    require_token_attention(model)
    require_pre_norm(model, instead="vitlens attention shows its queries, keys, scores and weights")
    require_steps(model, _find_layer(model, number=None))


def _find_layer(model: Model, number: int | None) -> Layer:
    """Return the layer of that number, by default the one in the middle.

    Raises InputError for a layer in which not all tokens attend to all tokens. Another one exists,
    as `require_token_attention` has checked.
    """
    tokens = model.layout.tokens
    possible = {}
    for layer in layers(model):
        if layer.queries == layer.keys == tokens:
            possible[layer.index] = layer
    numbers = list(possible)
    if number is None:
        number = numbers[len(numbers) // 2]
    if number not in possible:
        raise InputError(
            f"expected a layer {numbers_text(numbers)} of {model.alias}, in which tokens attend to "
            f"tokens, found {number}"
        )
    return possible[number]


def _walk(model: Model, image: Images, layer: Layer, head: int | None, seed: int) -> Walkthrough:
    steps = layer_steps(model, image, layer)
    logits = model(image)
    embedding = patch_embedding(model, image)
    positions, checks_before = before_blocks(model, image, embedding)
    if head is None:
        head = int(entropy(steps.heads["weights"]).mean((0, 2)).argmin())
    layout = model.layout
    order = torch.randperm(layout.patches, generator=torch.Generator().manual_seed(seed))
    order = order.to(image.device)
    last = _last_residual(model)
    permutations: tuple[Permutation, ...] = ()
    bare_patches = None  # patches without positions
    if embedding is not None and positions is not None:
        bare_patches = embedding.convolved
        permutations = tuple(_permutations(model, image, last, bare_patches, positions, order))
    entropies, scales = _entropies(model, image)
    changes = _changes(model, last, bare_patches, scales)
    # the tensor fields of `Walkthrough`, by name; all still with a batch axis of one image. Their
    # names and axes are those of `LayerSteps`.
    tensors = {name: all_heads[:, head] for name, all_heads in steps.heads.items()}
    tensors.update(steps.tokens)
    tensors["head_norms"] = steps.heads["projected"].norm(dim=-1)
    fields = {name: tensor[0].float().cpu() for name, tensor in tensors.items()}
    query = _followed_token(layout)
    prefix = len(layout.prefix)
    return Walkthrough(
        layer=layer.index,
        head=head,
        layers=depth(model),
        heads=layer.heads,
        scale=steps.scale,
        query=query,
        key=prefix + int(fields["weights"][query, prefix:].argmax()),
        embedding=embedding,
        positions=None if positions is None else positions.cpu(),
        checks=(*checks_before, *steps.checks),
        entropies=entropies,
        order=order.cpu(),
        permutations=permutations,
        changed=tuple(_run_changes(model, image, logits, changes)),
        logits=logits[0].cpu(),
        **fields,
    )


def _followed_token(layout: TokenLayout) -> int:
    """Return the position of CLS, or of the patch in the middle."""
    cls = layout.positions("cls")
    if cls:
        return cls[0]
    rows, columns = layout.grid
    middle_patch = rows // 2 * columns + columns // 2
    return len(layout.prefix) + middle_patch


def entropy(weights: Float[Tensor, "*leading key"]) -> Float[Tensor, "*leading"]:
    """Return the entropy of each row of weights, in nats."""
    entropies: Tensor = torch.special.entr(weights).sum(-1)
    return entropies


def _entropies(model: Model, images: Images) -> tuple[Entropies, dict[str, float]]:
    """Return the entropies of every head, and the scale of scores by the name of their place.

    Only layers in which all tokens attend to all tokens are included.
    """
    scaled: dict[int, Tensor] = {}
    unscaled: dict[int, Tensor] = {}
    scales: dict[str, float] = {}

    def take(call: AttentionCall) -> None:
        """Add the entropies of one layer; called for each attention call of a pass."""
        if call.site.kind != "patch" or call.inputs is None:
            return
        layer = call.site.layer
        scales[f"blocks.{layer}.attention.scores"] = call.inputs.scale
        scaled_parts = []  # (images, heads), for a few images at a time
        unscaled_parts = []
        for _, part in call.parts():
            scaled_parts.append(entropy(part.weights()).mean(-1))
            unscaled_parts.append(entropy(_unscaled_weights(part)).mean(-1))
        scaled[layer] = torch.cat(scaled_parts).mean(0).float().cpu()
        unscaled[layer] = torch.cat(unscaled_parts).mean(0).float().cpu()

    observe(model, images, take)
    return Entropies(_entropy_table(scaled), _entropy_table(unscaled)), scales


def _unscaled_weights(call: AttentionCall) -> Weights:
    """Return the weights of a call without the scaling of its scores."""
    inputs = call.inputs
    assert inputs is not None  # _entropies skips other calls
    bias: Tensor | float = 0.0
    if inputs.bias is not None and inputs.bias.dtype != torch.bool:
        bias = inputs.bias
    # scores are q·k * scale + bias; the bias itself is not scaled. A bias of -inf masks a key, and
    # -inf - -inf would be NaN: a masked score remains -inf.
    scores = inputs.scores(slice(None))
    products = (scores - bias) / inputs.scale
    unscaled = (products + bias).where(scores.isfinite(), scores)
    return softmax_or_zero(unscaled)


def _entropy_table(by_layer: dict[int, Tensor]) -> Float[Tensor, "layers heads"]:
    """Return one table up to the last layer; NaN fills up layers with fewer heads, or none."""
    most_heads = max(map(len, by_layer.values()), default=0)
    table = torch.full((1 + max(by_layer, default=-1), most_heads), torch.nan)
    for layer, entropies in by_layer.items():
        table[layer, : len(entropies)] = entropies
    return table


def _last_residual(model: Model) -> str:
    """Return the name of the residual stream after the last block that passes on all tokens."""
    tokens = (model.layout.tokens,)
    places = []
    for place in model.places():
        if place.kind == "residual" and place.shape[:1] == tokens:
            places.append(place.name)
    return places[-1]


def _permutations(
    model: Model,
    images: Images,
    last: str,
    patches: Float[Tensor, "batch patches dim"],
    positions: Float[Tensor, "patches dim"],
    order: Int[Tensor, " patches"],
) -> Iterator[Permutation]:
    """Yield the results of embedded patches in another order, with positions and without.

    last: the name of the residual stream after the last block.
    patches: the embedded patches, without positions.
    positions: the position embeddings of the patches.
    """
    prefix = len(model.layout.prefix)
    for with_positions in (True, False):
        offset = positions if with_positions else torch.zeros_like(positions)
        with intervene(model, {"patches": patches + offset}):
            original = capture(model, images, last)
        with intervene(model, {"patches": patches[:, order] + offset}):
            permuted = capture(model, images, last)
        original_patches = original[last][:, prefix:]
        permuted_patches = permuted[last][:, prefix:]
        expected = original_patches[:, order]
        yield Permutation(
            positions=with_positions,
            difference=float((permuted_patches - expected).abs().max()),
            logits=float((permuted.logits - original.logits).abs().max()),
            largest=float(expected.abs().max()),
            permuted=permuted.logits.cpu(),
        )


def _changes(
    model: Model,
    last: str,
    patches: Float[Tensor, "batch patches dim"] | None,
    scales: dict[str, float],
) -> dict[ChangeName, Changes]:
    """Return the changes that this model allows, each as changes of places.

    patches: the embedded patches without positions, None if the positions are unknown.
    scales: the factor of the scores, by the name of their place.
    """
    layout = model.layout
    prefix = len(layout.prefix)
    changes: dict[ChangeName, Changes] = {}
    if patches is not None:
        changes["no-positions"] = {"patches": patches}
    if scales:
        divisions = {place: partial(torch.div, other=scale) for place, scale in scales.items()}
        changes["unscaled"] = divisions
    changes["patches-zero"] = {f"{last}[patch]": "zero"}
    if prefix:
        prefix_places = ",".join(map(str, range(prefix)))
        changes["prefix-zero"] = {f"{last}[{prefix_places}]": "zero"}
        unread = KnockOut(keys=range(prefix), queries=range(prefix, layout.tokens))
        all_pairs = (layout.tokens, layout.tokens)
        without_prefix: dict[str, KnockOut] = {}
        for place in model.places():
            if place.kind == "weights" and place.shape[-2:] == all_pairs:
                without_prefix[place.name] = unread
        changes["prefix-unread"] = without_prefix
    cls = layout.positions("cls")
    if cls and model.anatomy.readout in ("cls", "cls+distillation"):
        changes["mean-read"] = {last: partial(_put_mean_in_cls, cls=cls[0], prefix=prefix)}
    return changes


def _put_mean_in_cls(tokens: Tensor, *, cls: int, prefix: int) -> Tensor:
    """Return the tokens with the mean of the patches in place of CLS."""
    changed = tokens.clone()
    changed[:, cls] = tokens[:, prefix:].mean(1)
    return changed


def _run_changes(
    model: Model, images: Images, logits: Logits, changes: dict[ChangeName, Changes]
) -> Iterator[Changed]:
    yield Changed("none", logits.cpu(), 0.0)
    for change, places in changes.items():
        with intervene(model, places):
            changed = model(images)
        yield Changed(change, changed.cpu(), float((changed - logits).abs().max()))
