"""Activation patching: which activations of a clean run, put into a corrupted one, restore the logit difference.

Heads, blocks, MLPs and single tokens are patched from the clean run into the corrupted one, one at a time; the metric
is the difference of two logits (Wang 2023; Heimersheim and Nanda 2024).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from vitlens.analysis.attention.gradients import check_targets
from vitlens.devices import evaluating
from vitlens.errors import InputError, UnknownNameError
from vitlens.lens.change import reading
from vitlens.lens.layers import layers
from vitlens.lens.places import accesses
from vitlens.lens.replay import DEFAULT_BUDGET, Replay, replaying
from vitlens.models.model import Model
from vitlens.shapes import Images, Labels

Part = Literal["heads", "blocks", "mlps", "positions"]
PARTS: tuple[Part, ...] = get_args(Part)
Runs = Float[Tensor, "places pairs classes"]

SMALLEST_GAP = 1e-3  # logits: a smaller gap would be dominated by rounding, which is about a hundredth of this


@dataclass(frozen=True)
class Patching:
    """The effect of patching each part of the clean runs into the corrupted ones.

    heads, blocks, mlps, positions: change of the logit difference (logits), positive towards the clean image's; NaN
    where a layer has fewer heads or tokens than the widest, or no MLP; None: not patched. blocks: all heads and the MLP
    of a block together; positions: the residual stream at a block's input, one token. clean, corrupted (pairs,): the
    logit difference target minus other in each run; targets, others: the classes; forward_equivalents: full forward
    passes of the pairs' images spent; note: a remark for a report, or "". All on the CPU.
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

        Raises InputError for a part that was not patched.
        """
        values: Tensor | None = getattr(self, part) if part in PARTS else None
        if values is None:
            patched = [word for word in PARTS if getattr(self, word) is not None]
            raise InputError(f"expected one of the parts that were patched ({', '.join(patched)}), found {part!r}")
        return values.mean(0)

    def restored(self, part: Part) -> Float[Tensor, "layers *places"]:
        """The restored share of the gap (clean minus corrupted): 1 is all of it, 0 none.

        Of several pairs the mean, weighted by the size of their gaps.
        """
        gaps = self.clean - self.corrupted
        self.changed(part)  # raises for a part that was not patched
        signed = torch.einsum("p,p...->...", gaps.sign(), getattr(self, part))
        return signed / gaps.abs().sum()


def patch_parts(
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
    """Patch every part of each clean image's run into its corrupted partner's, one at a time, by replay.

    clean, corrupted: pairs, in the same order (`corruption.corrupt` makes corrupted images). targets, others: the
    classes whose logits are compared, by default the clean image's prediction and the corrupted one's. parts: what to
    patch; tokens: which token positions (None: all; the others are NaN); budget: bytes for the stored activations of
    both runs. Raises InputError where both runs have the same logit difference, for images that are not pairs and
    classes that do not exist; UnsupportedError for a model without attention.
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
        tables: dict[Part, Tensor] = {}
        for part in [each for each in PARTS if each in parts]:
            runs = patched_logits(donor, receiver, part, mlps=mlps, tokens=tokens)
            tables[part] = _table([_difference(logits, *chosen) - ends[1].unsqueeze(1) for logits in runs])
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
    """Raise InputError for a pair without a gap; a note on how many gaps are negative, or ""."""
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
    widest = max(values.shape[1] for values in layered)
    padded = [F.pad(values.cpu(), (0, widest - values.shape[1]), value=torch.nan) for values in layered]
    return torch.stack(padded, dim=1)


def patched_logits(
    donor: Replay, receiver: Replay, part: Part, *, mlps: dict[str, Tensor], tokens: Sequence[int] | None
) -> Iterator[Runs]:
    """The receiver's logits with one part of the donor's run patched in, layer by layer, computed when iterated.

    mlps: the donor's (`mlp_outputs`); tokens: which positions (None: all). NaN where a layer has no such part, and at
    the other positions.
    """
    nothing = torch.full_like(receiver.logits.unsqueeze(0), torch.nan)
    for layer in layers(receiver.model):
        name = f"blocks.{layer.index}"
        if part == "positions":
            stream = donor.tensor(f"{name}.tokens")
            count = stream.shape[1]
            places = range(count) if tokens is None else [each for each in tokens if each < count or not layer.index]
            result = nothing.repeat(count, 1, 1)
            if places:  # empty where patches were merged and no such token is left
                sets = [{f"{name}.tokens[{place}]": stream[:, place : place + 1]} for place in places]
                result[list(places)] = receiver.run(sets)
            yield result
        elif part == "mlps":
            yield receiver.run([{f"{name}.mlp": mlps[f"{name}.mlp"]}]) if f"{name}.mlp" in mlps else nothing
        elif part == "heads":
            heads = donor.tensor(f"{name}.heads")
            yield receiver.run([{f"{name}.head.{head}": heads.select(-3, head)} for head in range(layer.heads)])
        else:
            own = {f"{name}.mlp": mlps[f"{name}.mlp"]} if f"{name}.mlp" in mlps else {}
            yield receiver.run([{f"{name}.heads": donor.tensor(f"{name}.heads"), **own}])


def mlp_outputs(model: Model, images: Images) -> dict[str, Tensor]:
    """The output of each layer's MLP, (images, tokens, dim), by place."""
    found: dict[str, Tensor] = {}
    wanted = [access for access in accesses(model).values() if access.place.kind == "mlp"]
    with evaluating(model), torch.no_grad(), reading(model, wanted, found.__setitem__):
        model(images)
    return found
