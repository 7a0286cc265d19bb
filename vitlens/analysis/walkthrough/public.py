"""`vitlens.walkthrough`: one head of one layer, step by step, on one image; and what happens
without scaling, positions and CLS, measured on the model itself.
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
from vitlens.shapes import Images, Logits
from vitlens.summary import Line, Summary

Change = Literal[
    "none", "no-positions", "unscaled", "patches-zero", "prefix-zero", "prefix-unread", "mean-read"
]
CHANGES: Final[dict[Change, str]] = {
    "none": "as it is",
    "no-positions": "patches without positions",
    "unscaled": "scores not scaled",
    "patches-zero": "last block: patches zero",
    "prefix-zero": "last block: prefix tokens zero",
    "prefix-unread": "patches do not attend to CLS",
    "mean-read": "mean of patches read as CLS",
}


@dataclass(frozen=True)
class Permutation:
    """The patches in another order, with or without positions, which stay where they are.

    difference: the largest between the permuted run's patches, after the last block, and the same
    permutation of the plain run's; logits: the largest between both runs' logits; largest: the
    largest value of the patches; permuted: the permuted run's logits.
    """

    positions: bool
    difference: float
    logits: float
    largest: float
    permuted: Logits


@dataclass(frozen=True)
class Changed:
    """The model with one change; logits: (batch, classes); difference: from the model's own, at
    most.
    """

    change: Change
    logits: Logits
    difference: float


@dataclass(frozen=True)
class Entropies:
    """Entropy of the attention weights in nats, mean over queries and images, of every head
    (layers, heads); NaN where there is none. unscaled: without the division by sqrt(head_dim).
    """

    scaled: Float[Tensor, "layers heads"]
    unscaled: Float[Tensor, "layers heads"]


@dataclass(frozen=True, repr=False)
class Walkthrough(Summary):
    """One head of one layer on one image, step by step; tensors on the CPU, without a batch axis.

    layer, head: counted from 0; layers: of the model, blocks without attention included; heads: of
    the layer; scale: what scores are multiplied by, 1/sqrt(head_dim); query: the position of the
    token that is followed, the one that the classifier reads, or the patch in the middle; key: the
    patch to which it attends most. embedding: the patch embedding, None for a model whose patches
    are not cut by one convolution; positions: what is added to it, None where that is no fixed
    vector a patch. input: the residual stream that enters the block; normed: what enters its
    attention; queries, keys, values: of the head; products: q kᵀ; scores: scaled; weights: after
    the softmax; unscaled: the weights without scaling; outputs: of the head; projected: its part of
    the output projection; head_norms: the norm of each head's part, by token; attention, mlp,
    after: outputs of the attention, the MLP and the block. checks: each step against the model's
    own; entropies: of all heads; permutations, changed: what happens without; order: of the
    permuted patches; logits: the model's own.
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
        """Yield the shapes of the steps, and how closely each equals the model's own."""
        yield Line("head", f"L{self.layer}.H{self.head}")
        for name in (
            "queries",
            "keys",
            "values",
            "scores",
            "weights",
            "outputs",
            "projected",
            "after",
        ):
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
    """Return one head's attention on one image, from patches to the residual stream, every step
    computed again by hand.

    images: one image (1, 3, height, width) in [0, 1], or any form of one that `vitlens.images`
    takes; layer, head: from 0 (None: the middle layer, the head whose weights have the least
    entropy); seed: of the permutation. Each of `.checks` holds the largest difference of a step
    from what the model itself computed; `.permutations` and `.changed` tell what happens without
    positions, scaling and CLS. Raises UnsupportedError for a model in which not all tokens attend
    to all tokens (a CNN, Swin), InputError for another number of images and for a layer or head
    that is not there.

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
    chosen = _chosen_layer(model, layer)
    if head is not None and not 0 <= head < chosen.heads:
        raise InputError(
            f"expected a head from 0 to {chosen.heads - 1} in layer {chosen.index}, found {head}"
        )
    with evaluating(model), torch.no_grad(), without_autocast(image.device):
        return _walked(model, image, chosen, head, seed)


@requirement("walkthrough")
def require_walkthrough(model: Model) -> None:
    """Raise UnsupportedError unless the tokens of one sequence attend to each other; of windows,
    say what applies.
    """
    if any(site.kind == "window" for site in survey_weights(model, probe_images(model, 1))):
        raise UnsupportedError(
            "expected layers in which every token attends to every token, found windows in "
            f"{model.alias}: there the "
            "same steps hold within each window, with a position bias on the scores and no CLS; "
            "vitlens attention shows what a patch attends to in its window"
        )
    require_token_attention(model)
    require_pre_norm(model, instead="vitlens attention shows its queries, keys, scores and weights")
    require_steps(model, _chosen_layer(model, None))


def _chosen_layer(model: Model, layer: int | None) -> Layer:
    """Return the layer of that number, by default the one in the middle. Raises InputError where
    there is none.
    """
    tokens = model.layout.tokens
    known = [each for each in layers(model) if each.queries == each.keys == tokens]
    numbers = [each.index for each in known]
    if layer is not None and layer not in numbers:
        raise InputError(
            f"expected a layer {numbers_text(numbers)} of {model.alias}, in which tokens attend to "
            "tokens, "
            f"found {layer}"
        )
    return known[len(known) // 2 if layer is None else numbers.index(layer)]


def _walked(model: Model, image: Images, layer: Layer, head: int | None, seed: int) -> Walkthrough:
    (heads, whole, scale, checks), logits = layer_steps(model, image, layer), model(image)
    embedding = patch_embedding(model, image)
    layout = model.layout
    prefix = len(model.layout.prefix)
    positions, before = before_blocks(model, image, embedding)
    if head is None:
        head = int(entropy(heads["weights"]).mean((0, 2)).argmin())
    order = torch.randperm(layout.patches, generator=torch.Generator().manual_seed(seed)).to(
        image.device
    )
    last = _last_residual(model)
    permuted: tuple[Permutation, ...] = ()
    if embedding is not None and positions is not None:
        permuted = tuple(_permutations(model, image, last, embedding.convolved, positions, order))
    of_heads, scales = _entropies(model, image)
    changes = _changes(
        model, last, embedding.convolved if embedding is not None and permuted else None, scales
    )
    tensors = {name: values[:, head] for name, values in heads.items()} | whole
    tensors["head_norms"] = heads["projected"].norm(dim=-1)
    parts = {name: values[0].float().cpu() for name, values in tensors.items()}
    middle = prefix + layout.grid[0] // 2 * layout.grid[1] + layout.grid[1] // 2
    query = next(iter(layout.positions("cls")), middle)
    return Walkthrough(
        layer=layer.index,
        head=head,
        layers=depth(model),
        heads=layer.heads,
        scale=scale,
        query=query,
        key=prefix + int(parts["weights"][query, prefix:].argmax()),
        embedding=embedding,
        positions=None if positions is None else positions.cpu(),
        checks=(*before, *checks),
        entropies=of_heads,
        order=order.cpu(),
        permutations=permuted,
        changed=tuple(_changed(model, image, logits, changes)),
        logits=logits[0].cpu(),
        **parts,
    )


def entropy(weights: Float[Tensor, "*leading key"]) -> Float[Tensor, "*leading"]:
    """Entropy of each row of weights, in nats."""
    summed: Tensor = torch.special.entr(weights).sum(-1)
    return summed


def _entropies(model: Model, images: Images) -> tuple[Entropies, dict[str, float]]:
    """Return the entropy of every head that attends from all tokens to all tokens, with and without
    scaling; and the scale of each such layer, by the place of its scores.
    """
    rows: dict[int, tuple[Tensor, Tensor]] = {}
    scales: dict[str, float] = {}

    def reducer(call: AttentionCall) -> None:
        if call.site.kind != "patch" or call.inputs is None:
            return
        scales[f"blocks.{call.site.layer}.attention.scores"] = call.inputs.scale
        pairs = []
        for _, part in call.parts():
            assert part.inputs is not None  # as the call has them
            bias = part.inputs.bias
            added: Tensor | float = 0.0 if bias is None or bias.dtype == torch.bool else bias
            raw = softmax_or_zero(
                (part.inputs.scores(slice(None)) - added) / part.inputs.scale + added
            )
            pairs.append((entropy(part.weights()).mean(-1), entropy(raw).mean(-1)))
        scaled, unscaled = (torch.cat(each).mean(0).float().cpu() for each in zip(*pairs))
        rows[call.site.layer] = (scaled, unscaled)

    observe(model, images, reducer)
    widest = max((len(scaled) for scaled, _ in rows.values()), default=0)
    table = torch.full((2, 1 + max(rows, default=-1), widest), torch.nan)
    for layer, row in rows.items():
        table[:, layer, : len(row[0])] = torch.stack(row)
    return Entropies(*table), scales


def _last_residual(model: Model) -> str:
    """Return the place of the residual stream after the last block of all tokens."""
    tokens = (model.layout.tokens,)
    return [
        place.name
        for place in model.places()
        if place.kind == "residual" and place.shape[:1] == tokens
    ][-1]


def _permutations(
    model: Model,
    images: Images,
    last: str,
    patches: Float[Tensor, "batch patches dim"],
    added: Float[Tensor, "patches dim"],
    order: Int[Tensor, " patches"],
) -> Iterator[Permutation]:
    """Embedded patches in another order, with what is added to them and without it."""
    prefix = len(model.layout.prefix)
    for positions in (True, False):
        runs = []
        for each in (patches, patches[:, order]):
            with intervene(model, {"patches": each + added if positions else each}):
                runs.append(capture(model, images, last))
        plain, permuted = runs
        expected = plain[last][:, prefix:][:, order]
        difference = float((permuted[last][:, prefix:] - expected).abs().max())
        logits = float((permuted.logits - plain.logits).abs().max())
        yield Permutation(
            positions, difference, logits, float(expected.abs().max()), permuted.logits.cpu()
        )


def _changes(
    model: Model,
    last: str,
    patches: Float[Tensor, "batch patches dim"] | None,
    scales: dict[str, float],
) -> dict[Change, Changes]:
    """Return each change that the model has the parts for; patches: without positions; scales: by
    the place of the scores.
    """
    layout = model.layout
    prefix = len(model.layout.prefix)
    found: dict[Change, Changes] = {} if patches is None else {"no-positions": {"patches": patches}}
    if scales:
        found["unscaled"] = {
            place: partial(torch.div, other=scale) for place, scale in scales.items()
        }
    found["patches-zero"] = {f"{last}[patch]": "zero"}
    if prefix:
        found["prefix-zero"] = {f"{last}[{','.join(map(str, range(prefix)))}]": "zero"}
        unread = KnockOut(keys=range(prefix), queries=range(prefix, layout.tokens))
        whole = (layout.tokens,) * 2
        places = [
            place
            for place in model.places()
            if place.kind == "weights" and place.shape[-2:] == whole
        ]
        found["prefix-unread"] = {place.name: unread for place in places}
    if layout.positions("cls") and model.anatomy.readout in ("cls", "cls+distillation"):

        def mean_read(tokens: Tensor) -> Tensor:
            changed = tokens.clone()
            changed[:, layout.positions("cls")[0]] = tokens[:, prefix:].mean(1)
            return changed

        found["mean-read"] = {last: mean_read}
    return found


def _changed(
    model: Model, images: Images, logits: Logits, changes: dict[Change, Changes]
) -> Iterator[Changed]:
    yield Changed("none", logits.cpu(), 0.0)
    for change, places in changes.items():
        with intervene(model, places):
            answer = model(images)
        yield Changed(change, answer.cpu(), float((answer - logits).abs().max()))
