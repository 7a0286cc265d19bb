"""Counterfactuals: small sets of patches of which the removal changes the prediction.

Along a map's order: the fewest top patches; every number is tried, as the effect need not be
monotonic. By greedy search: the patch that lowers the margin most is removed next, and patches that
are not needed in the end are restored. Neither proves that no smaller set exists.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from vitlens.analysis.faithfulness.defaults import SUBSTRATE
from vitlens.analysis.faithfulness.maps import AnyMaps, removal_grid
from vitlens.analysis.faithfulness.removal import RemovalCurve, Variants, both_orders
from vitlens.models.model import Model
from vitlens.names import Substrate
from vitlens.shapes import Images, Labels

IMAGES_AT_ONCE = 64  # of which all tokens are held
# numbers of patches tried in one batch, at most: few are computed beyond the first that succeeds
LENGTHS_AT_ONCE = 8
SETS_AT_ONCE = 256  # variants of which logits are held
CANDIDATES = 16  # patches tried in a greedy step: those with the lowest margin when last tried
_UNKNOWN = -1


@dataclass(frozen=True)
class Counterfactuals:
    """The sets of patches of which the removal changes the prediction."""

    removed: Bool[Tensor, "batch rows columns"]  # none where no set was found
    prediction: Labels  # the class before
    turned: Labels  # the class after, the same where no set was found

    @property
    def found(self) -> Bool[Tensor, " batch"]:
        """Return True for images with a set that changes the prediction."""
        return self.prediction != self.turned

    @property
    def sizes(self) -> Int[Tensor, " batch"]:
        """Return the number of patches of each set.

        Where there is none, it is the number of all patches, a lower bound.
        """
        patches = self.removed.shape[1] * self.removed.shape[2]
        return torch.where(self.found, self.removed.flatten(1).sum(1), patches)


def along_map(
    model: Model,
    images: Images,
    maps: Sequence[AnyMaps],
    *,
    curves: Sequence[RemovalCurve] = (),
    substrate: Substrate = SUBSTRATE,
    seed: int = 0,
    batch_size: int | None = None,
) -> tuple[Counterfactuals, ...]:
    """Return the fewest top patches of the maps of each method of which the removal matters.

    All numbers of patches up to that are tried, several in one batch. curves: the deletion curves
    of these maps by `faithfulness` with the same arguments; their points are not computed again.
    Arguments and errors as for `faithfulness`.
    """
    grid = removal_grid(model)
    patches = grid[0] * grid[1]
    ranks = list[Tensor]()
    for method_maps in maps:
        first, _ = both_orders(method_maps.to(images.device), grid, images=len(images), seed=seed)
        ranks.append(first)
    orders = torch.stack(ranks)
    lengths = patches if substrate == "absent" else patches + 1  # with "absent" one patch stays
    answers = torch.full((*orders.shape[:2], lengths), _UNKNOWN, device=images.device)
    for method_answers, curve in zip(answers, curves):
        counts = (curve.shares * patches).round().long().to(images.device)
        method_answers[:, counts] = curve.predicted.to(images.device)
    length_parts = list[Tensor]()
    before_parts = list[Tensor]()
    after_parts = list[Tensor]()
    for batch in torch.arange(len(images), device=images.device).split(IMAGES_AT_ONCE):
        variants = Variants(model, images[batch], substrate=substrate, batch_size=batch_size)
        length, before, after = _first_changed(
            variants, orders[:, batch].flatten(0, 1), answers[:, batch].flatten(0, 1), len(batch)
        )
        length_parts.append(length.unflatten(0, (len(maps), -1)))
        before_parts.append(before.unflatten(0, (len(maps), -1)))
        after_parts.append(after.unflatten(0, (len(maps), -1)))
    length = torch.cat(length_parts, 1)
    before = torch.cat(before_parts, 1).cpu()
    after = torch.cat(after_parts, 1).cpu()
    removed = (orders < length.unsqueeze(-1)).unflatten(-1, grid).cpu()
    return tuple(
        Counterfactuals(removed[place], before[place], after[place]) for place in range(len(maps))
    )


def _first_changed(
    variants: Variants,
    ranks: Int[Tensor, "rows patches"],
    answers: Int[Tensor, "rows lengths"],
    images: int,
) -> tuple[Int[Tensor, " rows"], Int[Tensor, " rows"], Int[Tensor, " rows"]]:
    """Return the least number of patches of which the removal changes the prediction (0: none).

    Also return the class before and after. rows: of orders and images; answers: the class by number
    of removed patches, where it is known.
    """
    lengths = torch.arange(answers.shape[1], device=answers.device)
    while True:
        is_changed = (answers != answers[:, :1]) & (answers != _UNKNOWN)
        first = torch.where(is_changed.any(1), is_changed.int().argmax(1), len(lengths))
        is_next = (answers == _UNKNOWN) & (lengths < first[:, None])
        unfinished = max(1, int(is_next.any(1).sum()))
        at_once = min(LENGTHS_AT_ONCE, max(1, SETS_AT_ONCE // unfinished))
        is_next &= is_next.cumsum(1) <= at_once
        row, length = is_next.nonzero().unbind(1)
        if not len(row):
            break
        logits = variants.logits(row % images, ranks[row] < length[:, None])
        answers[row, length] = logits.argmax(-1)
    first = first.masked_fill(first == len(lengths), 0)
    return first, answers[:, 0], answers.gather(1, first[:, None]).squeeze(1)


def by_search(
    model: Model, images: Images, *, substrate: Substrate = SUBSTRATE, candidates: int = CANDIDATES
) -> Counterfactuals:
    """Return a small set of patches for each image by greedy search, of which none can be restored.

    Each step removes the patch that lowers the margin (the prediction's logit minus the next) most;
    candidates: how many are tried in a step after the first, those with the lowest margin when last
    tried. Then patches are restored, the last first, as long as the prediction stays changed.
    """
    grid = removal_grid(model)
    removed = list[Tensor]()
    before = list[Tensor]()
    after = list[Tensor]()
    for batch in images.split(IMAGES_AT_ONCE):
        variants = Variants(model, batch, substrate=substrate)
        search = _Search(variants, len(batch), grid[0] * grid[1])
        search.remove(candidates, keep_one=substrate == "absent")
        search.restore()
        is_changed = search.turned != search.prediction
        removed.append((search.removed & is_changed[:, None]).view(-1, *grid))
        before.append(search.prediction)
        after.append(search.turned)
    return Counterfactuals(
        torch.cat(removed).cpu(), torch.cat(before).cpu(), torch.cat(after).cpu()
    )


class _Search:
    """The greedy search of a few images.

    removed: the patches.
    step: in which each was removed, the number of patches for the others.
    prediction, turned: the class before and after.
    """

    def __init__(self, variants: Variants, images: int, patches: int) -> None:
        indices = torch.arange(images, device=variants.device)
        self._variants = variants
        self._patches = patches
        self.removed = torch.zeros(images, patches, dtype=torch.bool, device=variants.device)
        self.step = torch.full_like(self.removed, patches, dtype=torch.long)
        self.prediction = variants.logits(indices, self.removed).argmax(-1)
        self.turned = self.prediction.clone()

    def remove(self, candidates: int, *, keep_one: bool) -> None:
        """Remove one patch after the other from each image until its prediction changes."""
        remaining = torch.arange(len(self.turned), device=self.turned.device)
        # of each patch when last tried
        margins = torch.full_like(self.step, -torch.inf, dtype=torch.float)
        for step in range(self._patches - keep_one):
            count = min(candidates if step else self._patches, self._patches - step)
            present = margins[remaining].masked_fill(self.removed[remaining], torch.inf)
            tried = present.topk(count, dim=1, largest=False).indices
            sets = self.removed[remaining].unsqueeze(1).repeat(1, count, 1)
            sets = sets.scatter_(2, tried.unsqueeze(-1), True)
            set_margins, answers = self._try_sets(remaining, sets)
            margins[remaining[:, None], tried] = set_margins
            best = set_margins.argmin(1, keepdim=True)
            patch = tried.gather(1, best).squeeze(1)
            self.removed[remaining, patch] = True
            self.step[remaining, patch] = step
            self.turned[remaining] = answers.gather(1, best).squeeze(1)
            remaining = remaining[self.turned[remaining] == self.prediction[remaining]]
            if not len(remaining):
                break

    def _try_sets(
        self, which: Labels, removed: Bool[Tensor, "images sets patches"]
    ) -> tuple[Float[Tensor, "images sets"], Int[Tensor, "images sets"]]:
        """Return the margin without each set, and the predicted class.

        The margin is the logit of the prediction minus the greatest other one. The logits of a few
        images are held at a time.
        """
        sets = removed.shape[1]
        size = max(1, SETS_AT_ONCE // sets)
        margins = list[Tensor]()
        answers = list[Tensor]()
        for images, image_sets in zip(which.split(size), removed.split(size)):
            variants = images.repeat_interleave(sets)
            logits = self._variants.logits(variants, image_sets.flatten(0, 1))
            logits = logits.unflatten(0, (-1, sets))
            predicted = self.prediction[images][:, None, None].expand(-1, sets, 1)
            predicted_logit = logits.gather(2, predicted).squeeze(-1)
            greatest_other = logits.scatter(2, predicted, -torch.inf).amax(-1)
            margins.append(predicted_logit - greatest_other)
            answers.append(logits.argmax(-1))
        return torch.cat(margins), torch.cat(answers)

    def restore(self) -> None:
        """Restore patches one at a time as long as the prediction stays changed.

        The last patch is tried first, over and over. A patch that could not be restored is tried
        again only after another was. At first that is the last patch, without which the prediction
        was not changed.
        """
        cursor = self.step.masked_fill(~self.removed, -1).amax(1)
        is_needed = self.step == cursor[:, None]
        while True:
            has_several = (self.turned != self.prediction) & (self.removed.sum(1) > 1)
            is_open = self.removed & ~is_needed & has_several[:, None]
            images = is_open.any(1).nonzero().squeeze(1)
            if not len(images):
                return
            # from the cursor down, then from the last patch down to the cursor
            is_later = self.step >= cursor[:, None]
            priority = self.step - self._patches * is_later
            priority = priority.masked_fill(~is_open, -2 * self._patches)
            patch = priority[images].argmax(1)
            fewer = self.removed[images].scatter(1, patch[:, None], False)
            answers = self._variants.logits(images, fewer).argmax(-1)
            is_needed[images, patch] = True
            cursor[images] = self.step[images, patch]
            stays_changed = answers != self.prediction[images]
            restored = images[stays_changed]
            self.removed[restored] = fewer[stays_changed]
            self.turned[restored] = answers[stays_changed]
            is_needed[restored] = False
