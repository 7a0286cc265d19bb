"""Activation patching: which activations of a clean image's run, put into a corrupted one's, restore its prediction.

Heads, blocks, MLPs and single tokens are taken from the clean run, one at a time; the effect is on a difference of two
logits (Wang 2023; Heimersheim and Nanda 2024).
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal, get_args

import torch
from jaxtyping import Float, Int
from torch import Generator, Tensor
from torch.nn import functional as F

from vitlens.analysis.attention.gradients import check_targets
from vitlens.devices import evaluating
from vitlens.errors import InputError, UnknownNameError
from vitlens.lens.intervention import HeadReplaced, Intervention, MLPReplaced, StreamPatched
from vitlens.lens.layers import Layer, layers
from vitlens.lens.replay import DEFAULT_BUDGET, Replay, replaying
from vitlens.models.model import Model
from vitlens.shapes import Heads, Images, Labels, Tokens
from vitlens.startup import import_without_compiler

Part = Literal["heads", "blocks", "mlps", "positions"]
PARTS: tuple[Part, ...] = get_args(Part)
Runs = Float[Tensor, "places pairs classes"]


def patched_runs(
    donor: Replay, receiver: Replay, *, mlps: dict[int, Tokens], tokens: Sequence[int] | None = None
) -> dict[Part, Iterator[Runs]]:
    """The receiver's logits with each part of the donor's run in it, layer by layer, run when they are asked for.

    mlps: the donor's (`mlp_outputs`), by layer; tokens: which positions (None: all; the others are NaN).
    """
    found = layers(receiver.model)
    return {
        "heads": (_patch_heads(donor, receiver, layer) for layer in found),
        "blocks": (_patch_block(donor, receiver, layer, mlps) for layer in found),
        "mlps": (_patch_mlp(receiver, layer, mlps) for layer in found),
        "positions": (_patch_tokens(donor, receiver, layer, tokens) for layer in found),
    }


def _patch_heads(donor: Replay, receiver: Replay, layer: Layer) -> Runs:
    what = heads_given(layer, donor.head_output(layer.index))
    return receiver.run([*what], replacements=what)


def heads_given(layer: Layer, outputs: Heads) -> dict[Intervention, Tensor]:
    """Every head of a layer as an intervention, with the output to put in its place."""
    return {HeadReplaced(layer.index, head, "given"): outputs[:, head] for head in range(layer.heads)}


def _patch_block(donor: Replay, receiver: Replay, layer: Layer, mlps: dict[int, Tokens]) -> Runs:
    what = heads_given(layer, donor.head_output(layer.index))
    if layer.index in mlps:
        what[MLPReplaced(layer.index, "given")] = mlps[layer.index]
    return receiver.run([tuple(what)], replacements=what)


def _patch_mlp(receiver: Replay, layer: Layer, mlps: dict[int, Tokens]) -> Runs:
    if layer.index not in mlps:
        return torch.full_like(receiver.logits.unsqueeze(0), torch.nan)
    what = MLPReplaced(layer.index, "given")
    return receiver.run([what], replacements={what: mlps[layer.index]})


def _patch_tokens(donor: Replay, receiver: Replay, layer: Layer, tokens: Sequence[int] | None) -> Runs:
    stream = donor.block_input(layer.index)
    count = stream.shape[1]
    places = range(count) if tokens is None else [place for place in tokens if place < count or not layer.index]
    what = tokens_given(layer, stream, places)
    result = receiver.logits.new_full((count, *receiver.logits.shape), torch.nan)
    if what:  # empty where merging has left fewer tokens
        result[list(places)] = receiver.run([*what], replacements=what)
    return result


def tokens_given(layer: Layer, stream: Tokens, places: Sequence[int]) -> dict[Intervention, Tensor]:
    """Every token position at a block's input as an intervention, with the residual stream to put in its place."""
    return {StreamPatched(layer.index, (place,)): stream[:, place : place + 1] for place in places}


def mlp_outputs(model: Model, images: Images) -> dict[int, Tokens]:
    """The output of each layer's MLP, (images, tokens, dim), by layer."""
    found: dict[int, Tokens] = {}
    hooks = []
    for layer in layers(model):
        if layer.mlp is not None:

            def keep(_module: object, _args: object, output: Tensor, index: int = layer.index) -> None:
                found[index] = output.flatten(1, 2) if output.dim() == 4 else output

            hooks.append(model.module.get_submodule(layer.mlp).register_forward_hook(keep))
    try:
        with evaluating(model), torch.no_grad():
            model(images)
    finally:
        for hook in hooks:
            hook.remove()
    return found


__all__ = ["PARTS", "Corruption", "Part", "Patching", "corrupt", "patch"]

SMALLEST_GAP = 1e-3  # logits: float arithmetic alone is a hundredth of it, and would be read as a share of it


@dataclass(frozen=True)
class Patching:
    """The effect of each part of the clean runs in the corrupted ones.

    heads, blocks, mlps, positions: change of the logit difference (logits), positive towards the clean image's; NaN
    where a layer has fewer heads or tokens than the widest, or no MLP; None: not asked for. blocks: what a whole block
    adds to the residual stream (all its heads and its MLP); positions: the residual stream at a block's input, one
    token. clean, corrupted (pairs,): the logit difference target minus other, in either run; targets, others: the
    classes; forward_equivalents: full forwards of the pairs' images spent; note: what a report must say, or "". All on
    the CPU.
    """

    heads: Float[Tensor, "pairs layers heads"] | None
    blocks: Float[Tensor, "pairs layers"] | None
    mlps: Float[Tensor, "pairs layers"] | None
    positions: Float[Tensor, "pairs layers tokens"] | None
    clean: Float[Tensor, " pairs"]
    corrupted: Float[Tensor, " pairs"]
    targets: Int[Tensor, " pairs"]
    others: Int[Tensor, " pairs"]
    forward_equivalents: float = 0.0
    note: str = ""

    def changed(self, part: Part) -> Float[Tensor, "layers *places"]:
        """The mean change over the pairs, logits: (layers, heads), (layers,) or (layers, tokens).

        Raises InputError for a part that was not asked for.
        """
        found: Tensor | None = getattr(self, part) if part in PARTS else None
        if found is None:
            there = [word for word in PARTS if getattr(self, word) is not None]
            raise InputError(f"expected one of the parts that were patched ({', '.join(there)}), found {part!r}")
        return found.mean(0)

    def restored(self, part: Part) -> Float[Tensor, "layers *places"]:
        """The share restored, change over gap (clean minus corrupted): 1 is all of it, 0 nothing.

        Of several pairs the mean, each weighted by the size of its gap.
        """
        gaps = self.clean - self.corrupted
        self.changed(part)  # raises for a part that was not patched
        signed = torch.einsum("p,p...->...", gaps.sign(), getattr(self, part))
        return signed / gaps.abs().sum()


def patch(
    model: Model,
    clean: Images,
    corrupted: Float[Tensor, "others 3 rows columns"],
    *,
    targets: Labels | None = None,
    others: Labels | None = None,
    parts: Sequence[str] = PARTS,
    tokens: Sequence[int] | None = None,
    budget: int = DEFAULT_BUDGET,
) -> Patching:
    """Every part of each clean image's run put into its corrupted partner's, one at a time, by replay.

    clean, corrupted: pairs, in the same order. targets, others: the classes whose logits are compared, by default the
    clean image's prediction and the corrupted one's. parts: what to patch; tokens: which token positions (None: all;
    the others are NaN); budget: bytes for what is kept of both runs. Raises InputError where clean and corrupted run
    agree on the difference, for images that are not pairs and classes that do not exist; UnsupportedError for a model
    without attention.
    """
    if clean.shape != corrupted.shape:
        shapes = tuple(clean.shape), tuple(corrupted.shape)
        raise InputError(f"expected pairs of images of one size, found clean {shapes[0]} and corrupted {shapes[1]}")
    for word in parts:
        if word not in PARTS:
            raise UnknownNameError("part to patch", word, PARTS)
    with (
        replaying(model, clean, budget=budget // 2) as donor,
        replaying(model, corrupted, budget=budget // 2) as receiver,
    ):
        chosen = check_targets(targets, donor.logits), check_targets(others, receiver.logits)
        ends = [_difference(replay.logits.unsqueeze(0), *chosen)[:, 0] for replay in (donor, receiver)]
        note = _check_gaps(model, ends[0] - ends[1], *chosen)
        mlps = mlp_outputs(model, clean) if {"blocks", "mlps"} & set(parts) else {}
        runs = patched_runs(donor, receiver, mlps=mlps, tokens=tokens)
        tables = {
            part: _table([_difference(logits, *chosen) - ends[1].unsqueeze(1) for logits in runs[part]])
            for part in PARTS
            if part in parts
        }
        notes = dict.fromkeys((note, donor.note, receiver.note))
        spent = donor.forward_equivalents + receiver.forward_equivalents + bool(mlps)
    single = {part: tables[part][..., 0] for part in ("blocks", "mlps") if part in tables}
    return Patching(
        heads=tables.get("heads"),
        blocks=single.get("blocks"),
        mlps=single.get("mlps"),
        positions=tables.get("positions"),
        clean=ends[0].cpu(),
        corrupted=ends[1].cpu(),
        targets=chosen[0].cpu(),
        others=chosen[1].cpu(),
        forward_equivalents=spent,
        note="; ".join(filter(None, notes)),
    )


def _difference(logits: Runs, targets: Labels, others: Labels) -> Float[Tensor, "pairs places"]:
    pairs = torch.arange(len(targets), device=logits.device)
    return (logits[:, pairs, targets] - logits[:, pairs, others]).T


def _check_gaps(model: Model, gaps: Float[Tensor, " pairs"], targets: Labels, others: Labels) -> str:
    """Refuse pairs with nothing to restore; say how many are the wrong way round."""
    small = (gaps.abs() < SMALLEST_GAP).nonzero()
    if len(small):
        pair = int(small[0])
        names = [model.classes[int(each[pair])] for each in (targets, others)]
        raise InputError(
            f"expected clean and corrupted runs that differ, found the same logit difference ({names[0]} - {names[1]}) "
            f"in both runs of pair {pair}; choose other images or classes, or a stronger corruption"
        )
    reversed_ = int((gaps < 0).sum())
    return f"{reversed_} of {len(gaps)} pairs: the corrupted image is nearer to the target" if reversed_ else ""


def _table(layered: list[Float[Tensor, "pairs _"]]) -> Float[Tensor, "pairs layers widest"]:
    """One table of all layers, NaN where one has fewer places than the widest."""
    widest = max(found.shape[1] for found in layered)
    return torch.stack([F.pad(found.cpu(), (0, widest - found.shape[1]), value=torch.nan) for found in layered], dim=1)


transforms = import_without_compiler("torchvision.transforms.v2.functional")

Corruption = Literal["noise", "blur", "shuffle", "mean"]  # the keys of CORRUPTIONS

NOISE = 0.5  # standard deviation, pixels in [0, 1]


def corrupt(images: Images, how: str = "noise", *, seed: int = 0) -> Images:
    """Images whose content is destroyed, in [0, 1].

    noise: Gaussian noise of standard deviation 0.5 added; blur: a Gaussian of an eighth of the shorter side; shuffle:
    cut into 4 x 4 tiles (more where 4 does not divide the sides) and laid out at random; mean: each image its own mean
    colour. seed: of noise and shuffle; an image's corruption depends on its place in the batch, not on its
    batch-mates. Raises UnknownNameError for another word.
    """
    if how not in CORRUPTIONS:
        raise UnknownNameError("corruption", how, CORRUPTIONS)
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([CORRUPTIONS[how](image, generator) for image in images]).clamp(0, 1)


def _noise(image: Tensor, generator: Generator) -> Tensor:
    return image + NOISE * torch.randn(image.shape, generator=generator).to(image)


def _blur(image: Tensor, _generator: Generator) -> Tensor:
    height, width = image.shape[-2:]
    side = min(height, width)
    size = min(2 * (side // 4) + 1, 2 * ((side - 1) // 2) + 1)  # odd; the padding must be smaller than the image
    blurred: Tensor = transforms.gaussian_blur(image, [size, size], [side / 8, side / 8])
    return blurred


def _shuffle(image: Tensor, generator: Generator) -> Tensor:
    height, width = image.shape[-2:]
    common = math.gcd(height, width)
    parts = next((count for count in range(4, common + 1) if common % count == 0), common)
    rows, columns = height // parts, width // parts
    tiles = image.unflatten(1, (parts, rows)).unflatten(3, (parts, columns)).permute(1, 3, 0, 2, 4).flatten(0, 1)
    order = torch.randperm(len(tiles), generator=generator).to(image.device)
    laid = tiles[order].unflatten(0, (parts, parts)).permute(2, 0, 3, 1, 4)  # (3, parts, rows, parts, columns)
    shuffled: Tensor = laid.reshape(image.shape)
    return shuffled


def _mean(image: Tensor, _generator: Generator) -> Tensor:
    return image.mean(dim=(1, 2), keepdim=True).expand_as(image)


CORRUPTIONS: Final[dict[str, Callable[[Tensor, Generator], Tensor]]] = {
    "noise": _noise,
    "blur": _blur,
    "shuffle": _shuffle,
    "mean": _mean,
}
