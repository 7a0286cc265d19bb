"""What happens without scaling, without positions and without CLS: measured on the model itself."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from vitlens.analysis.walkthrough.steps import Embedding
from vitlens.lens.attention import TensorFunction
from vitlens.lens.call import AttentionCall, softmax_or_zero
from vitlens.lens.capture import capture
from vitlens.lens.intervene import Changes, KnockOut, intervene
from vitlens.lens.observe import observe
from vitlens.models.model import Model
from vitlens.shapes import Images, Logits

Change = Literal["none", "no-positions", "unscaled", "patches-zero", "prefix-zero", "prefix-unread", "mean-read"]
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
    """The patches in another order; order: which patch stands at each place.

    difference: the largest between the permuted run's patches, after the last block, and the same permutation of the
    plain run's; logits: the largest between both runs' logits; largest: the largest value of the patches.
    """

    positions: bool
    difference: float
    logits: float
    largest: float
    permuted: Logits


@dataclass(frozen=True)
class Changed:
    """The model with one change; logits: (batch, classes); difference: from the model's own, at most."""

    change: Change
    logits: Logits
    difference: float


@dataclass(frozen=True)
class Entropies:
    """Entropy of the attention weights in nats, mean over queries and images, of every head (layers, heads); NaN where
    there is none. unscaled: without the division by sqrt(head_dim)."""

    scaled: Float[Tensor, "layers heads"]
    unscaled: Float[Tensor, "layers heads"]


def entropy(weights: Float[Tensor, "*leading key"]) -> Float[Tensor, "*leading"]:
    """Entropy of each row of weights, in nats."""
    summed: Tensor = torch.special.entr(weights).sum(-1)
    return summed


def entropies(model: Model, images: Images) -> tuple[Entropies, dict[str, float]]:
    """The entropy of every head that attends from all tokens to all tokens, with and without scaling; and the scale of
    each such layer, by the place of its scores."""
    rows: list[tuple[Tensor, Tensor]] = []
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
            raw = softmax_or_zero((part.inputs.scores(slice(None)) - added) / part.inputs.scale + added)
            pairs.append((entropy(part.weights()).mean(-1), entropy(raw).mean(-1)))
        scaled, unscaled = (torch.cat(each).mean(0).float().cpu() for each in zip(*pairs))
        rows.append((scaled, unscaled))

    observe(model, images, reducer)
    table = torch.full((2, len(rows), max((len(row[0]) for row in rows), default=0)), torch.nan)
    for layer, row in enumerate(rows):
        table[:, layer, : len(row[0])] = torch.stack(row)
    return Entropies(*table), scales


def permutations(
    model: Model,
    images: Images,
    embedding: Embedding,
    added: Float[Tensor, "patches dim"],
    order: Int[Tensor, " patches"],
) -> Iterator[Permutation]:
    """The patches permuted, with positions (which stay where they are) and without them."""
    last, prefix = _last_residual(model), len(model.layout.prefix)
    for positions in (True, False):
        runs = []
        for patches in (embedding.convolved, embedding.convolved[:, order]):
            with intervene(model, {"patches": patches + added if positions else patches}):
                runs.append(capture(model, images, last))
        plain, permuted = runs
        expected = plain[last][:, prefix:][:, order]
        difference = float((permuted[last][:, prefix:] - expected).abs().max())
        logits = float((permuted.logits - plain.logits).abs().max())
        yield Permutation(positions, difference, logits, float(expected.abs().max()), permuted.logits.cpu())


def changed_models(
    model: Model, images: Images, logits: Logits, embedding: Embedding | None, scales: dict[str, float]
) -> Iterator[Changed]:
    """The model's logits under each change that it has the parts for; scales: by the place of its scores."""
    yield Changed("none", logits.cpu(), 0.0)
    last, layout = _last_residual(model), model.layout
    prefix = len(layout.prefix)
    found: dict[Change, Changes] = {}
    if embedding is not None and "patches" in model.places().names:
        found["no-positions"] = {"patches": embedding.convolved}
    if scales:
        found["unscaled"] = {place: _divided(scale) for place, scale in scales.items()}
    found["patches-zero"] = {f"{last}[patch]": "zero"}
    if prefix:
        found["prefix-zero"] = {f"{last}[{','.join(map(str, range(prefix)))}]": "zero"}
        unread = KnockOut(keys=tuple(range(prefix)), queries=tuple(range(prefix, layout.tokens)))
        whole = (layout.tokens, layout.tokens)
        places = [place for place in model.places() if place.kind == "weights" and place.shape[-2:] == whole]
        found["prefix-unread"] = {place.name: unread for place in places}
    if layout.positions("cls") and model.anatomy.readout in ("cls", "cls+distillation"):

        def mean_read(tokens: Tensor) -> Tensor:
            changed = tokens.clone()
            changed[:, layout.positions("cls")[0]] = tokens[:, prefix:].mean(1)
            return changed

        found["mean-read"] = {last: mean_read}
    for change, changes in found.items():
        with intervene(model, changes), torch.no_grad():
            answer = model(images)
        yield Changed(change, answer.cpu(), float((answer - logits).abs().max()))


def _last_residual(model: Model) -> str:
    """The place of the residual stream after the last block of all tokens."""
    tokens = (model.layout.tokens,)
    return [place.name for place in model.places() if place.kind == "residual" and place.shape[:1] == tokens][-1]


def _divided(scale: float) -> TensorFunction:
    return lambda scores: scores / scale
