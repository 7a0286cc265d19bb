"""Activation patching: what of a clean image's run, put into a corrupted one's, brings its answer back.

Heads, blocks, MLPs and single tokens are taken from the clean run, one at a time; the effect is on a difference of two
logits (Wang 2023; Heimersheim and Nanda 2024).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from vitlens.analysis.attention.gradients import check_targets
from vitlens.analysis.patching.corruption import Corruption, corrupt
from vitlens.analysis.patching.transplant import PARTS, Part, Runs, mlp_outputs, transplants
from vitlens.errors import InputError, UnknownNameError
from vitlens.lens.replay import DEFAULT_BUDGET, replaying
from vitlens.models.model import Model
from vitlens.shapes import Images, Labels

__all__ = ["PARTS", "Corruption", "Part", "Patching", "corrupt", "patch"]

SMALLEST_GAP = 1e-3  # logits: float arithmetic alone is a hundredth of it, and would be read as a share of it


@dataclass(frozen=True)
class Patching:
    """What each part of the clean runs changed in the corrupted ones.

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
        """The share brought back, change over gap (clean minus corrupted): 1 is all of it, 0 nothing.

        Of several pairs the mean, each weighted by the size of its gap.
        """
        gaps = self.clean - self.corrupted
        self.changed(part)  # says what was not patched
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
        runs = transplants(donor, receiver, mlps=mlps, tokens=tokens)
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
