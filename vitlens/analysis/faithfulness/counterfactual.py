"""Counterfactuals: small sets of patches of which the removal changes the prediction.

There are two ways to find one, and neither proves that no smaller set exists:

- `along_map` removes the top patches of a map. It tries every number of patches up to the first
  that changes the prediction, as the effect need not be monotonic.
- `by_search` is greedy. It removes the patch that lowers the margin most, again and again. Then it
  restores patches that are not needed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from vitlens.analysis.faithfulness.defaults import SUBSTRATE
from vitlens.analysis.faithfulness.maps import AnyMaps, removal_grid
from vitlens.analysis.faithfulness.removal import RemovalCurve, Variants, both_orders
from vitlens.models.model import Model
from vitlens.names import Substrate
from vitlens.shapes import Images, Labels

IMAGES_AT_ONCE = 64  # images of which all tokens are in memory
# numbers of patches tried in one batch, at most: few are computed beyond the first that succeeds
LENGTHS_AT_ONCE = 8
SETS_AT_ONCE = 256  # variants of which logits are in memory
CANDIDATES = 16  # patches tried in a greedy step: those with the lowest margin when last tried
_UNKNOWN = -1  # instead of a predicted class that is not computed yet


@dataclass(frozen=True)
class Counterfactuals:
    """The sets of patches of which the removal changes the prediction.

    removed: True for the patches of the set, of which there are none if no set was found.
    prediction: the predicted class before.
    turned: the predicted class after, the same if no set was found.
    """

    removed: Bool[Tensor, "batch rows columns"]
    prediction: Labels
    turned: Labels

    @property
    def found(self) -> Bool[Tensor, " batch"]:
        """Return True for images with a set that changes the prediction."""
        return self.prediction != self.turned

    @property
    def sizes(self) -> Int[Tensor, " batch"]:
        """Return the number of patches of each set.

        Without a set it is the number of all patches.
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

    All numbers of patches up to that are tried, several in one batch. Arguments and errors are
    those of `faithfulness`.

    curves: the deletion curves of these maps by `faithfulness` with the same arguments. The
        predictions at their points are not computed again.
    """
    grid = removal_grid(model)
    patches = grid[0] * grid[1]
    ranks_of_methods = list[Tensor]()
    for method_maps in maps:
        ranks, _ = both_orders(method_maps.to(images.device), grid, images=len(images), seed=seed)
        ranks_of_methods.append(ranks)
    all_ranks = torch.stack(ranks_of_methods)  # (methods, images, patches)
    lengths = patches if substrate == "absent" else patches + 1  # with "absent" one patch stays
    # the predicted class by method, image and number of removed patches
    answers = torch.full((*all_ranks.shape[:2], lengths), _UNKNOWN, device=images.device)
    for method_answers, curve in zip(answers, curves):
        counts = (curve.shares * patches).round().long().to(images.device)
        method_answers[:, counts] = curve.predicted.to(images.device)
    parts = list[_Changes]()  # each field is (methods, images of the batch)
    for batch in torch.arange(len(images), device=images.device).split(IMAGES_AT_ONCE):
        variants = Variants(model, images[batch], substrate=substrate, batch_size=batch_size)
        # a row for each method and image
        changes = _first_changes(
            variants,
            all_ranks[:, batch].flatten(0, 1),
            answers[:, batch].flatten(0, 1),
            images=len(batch),
        )
        shape = (len(maps), len(batch))
        parts.append(_Changes(*(rows.view(shape) for rows in changes)))
    counts = torch.cat([part.patches for part in parts], 1)  # (methods, images)
    before = torch.cat([part.before for part in parts], 1).cpu()
    after = torch.cat([part.after for part in parts], 1).cpu()
    removed = (all_ranks < counts.unsqueeze(-1)).unflatten(-1, grid).cpu()
    return tuple(
        Counterfactuals(removed=removed[method], prediction=before[method], turned=after[method])
        for method in range(len(maps))
    )


class _Changes(NamedTuple):
    """The first change of the prediction as the patches of each row are removed in order.

    patches: the least number of removed patches that changes the prediction, 0 if none does.
    before, after: the predicted class before and after.
    """

    patches: Int[Tensor, "*rows"]
    before: Int[Tensor, "*rows"]
    after: Int[Tensor, "*rows"]


def _first_changes(
    variants: Variants,
    ranks: Int[Tensor, "rows patches"],
    answers: Int[Tensor, "rows lengths"],
    *,
    images: int,
) -> _Changes:
    """Return the first change in each row. Row r belongs to the image r % images.

    answers: the predicted class by number of removed patches, or _UNKNOWN. New ones are entered.
    """
    lengths = torch.arange(answers.shape[1], device=answers.device)
    # Each round tries the next unknown numbers below the first known change of each row. It ends
    # when none is unknown below it.
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
        removed = ranks[row] < length[:, None]
        answers[row, length] = variants.logits(row % images, removed).argmax(-1)
    patches = first.masked_fill(first == len(lengths), 0)
    after = answers.gather(1, patches[:, None]).squeeze(1)
    return _Changes(patches=patches, before=answers[:, 0], after=after)


def by_search(
    model: Model, images: Images, *, substrate: Substrate = SUBSTRATE, candidates: int = CANDIDATES
) -> Counterfactuals:
    """Return a small set of patches for each image by greedy search, of which none can be restored.

    Each step removes the patch that lowers the margin most: the prediction's logit minus the
    greatest other one. Then patches are restored, the last first, as long as the prediction stays
    changed.

    candidates: the number of patches that are tried in a step after the first. They are those with
        the lowest margin when last tried.
    """
    grid = removal_grid(model)
    removed = list[Tensor]()
    before = list[Tensor]()
    after = list[Tensor]()
    for batch in images.split(IMAGES_AT_ONCE):
        variants = Variants(model, batch, substrate=substrate)
        search = _Search(variants, images=len(batch), patches=grid[0] * grid[1])
        search.remove(candidates, keep_one=substrate == "absent")
        search.restore()
        is_changed = search.turned != search.prediction
        removed.append((search.removed & is_changed[:, None]).view(-1, *grid))
        before.append(search.prediction)
        after.append(search.turned)
    return Counterfactuals(
        removed=torch.cat(removed).cpu(),
        prediction=torch.cat(before).cpu(),
        turned=torch.cat(after).cpu(),
    )


class _Search:
    """The greedy search of a few images; `remove` is called first, then `restore`.

    removed (images, patches): True for removed patches.
    step (images, patches): the step in which each was removed, the number of patches for others.
    prediction (images,): the predicted class of the complete image.
    turned (images,): the predicted class without the removed patches.
    """

    def __init__(self, variants: Variants, *, images: int, patches: int) -> None:
        indices = torch.arange(images, device=variants.device)
        self._variants = variants
        self._patches = patches
        self.removed = torch.zeros(images, patches, dtype=torch.bool, device=variants.device)
        self.step = torch.full_like(self.removed, patches, dtype=torch.long)
        self.prediction = variants.logits(indices, self.removed).argmax(-1)
        self.turned = self.prediction.clone()

    def remove(self, candidates: int, *, keep_one: bool) -> None:
        """Remove one patch after the other from each image until its prediction changes."""
        unchanged = torch.arange(len(self.turned), device=self.turned.device)
        # (images, patches): the margin without each patch when it was last tried
        margins = torch.full_like(self.step, -torch.inf, dtype=torch.float)
        for step in range(self._patches - keep_one):
            most = self._patches if step == 0 else candidates
            count = min(most, self._patches - step)
            present = margins[unchanged].masked_fill(self.removed[unchanged], torch.inf)
            tried = present.topk(count, dim=1, largest=False).indices  # (images, count)
            # (images, count, patches): the removed patches, each time with one more
            sets = self.removed[unchanged].unsqueeze(1).repeat(1, count, 1)
            sets = sets.scatter_(2, tried.unsqueeze(-1), True)
            set_margins, answers = self._try_sets(unchanged, sets)
            margins[unchanged[:, None], tried] = set_margins
            best = set_margins.argmin(1, keepdim=True)
            patch = tried.gather(1, best).squeeze(1)
            self.removed[unchanged, patch] = True
            self.step[unchanged, patch] = step
            self.turned[unchanged] = answers.gather(1, best).squeeze(1)
            unchanged = unchanged[self.turned[unchanged] == self.prediction[unchanged]]
            if not len(unchanged):
                break

    def _try_sets(
        self, indices: Int[Tensor, " images"], removed: Bool[Tensor, "images sets patches"]
    ) -> tuple[Float[Tensor, "images sets"], Int[Tensor, "images sets"]]:
        """Return the margin of the images without each set, and the predicted class.

        The logits of a few images are in memory at a time.
        """
        sets = removed.shape[1]
        size = max(1, SETS_AT_ONCE // sets)
        margins = list[Tensor]()
        answers = list[Tensor]()
        for images, image_sets in zip(indices.split(size), removed.split(size)):
            image_of_variant = images.repeat_interleave(sets)
            logits = self._variants.logits(image_of_variant, image_sets.flatten(0, 1))
            logits = logits.unflatten(0, (-1, sets))  # (images, sets, classes)
            predicted = self.prediction[images][:, None, None].expand(-1, sets, 1)
            predicted_logit = logits.gather(2, predicted).squeeze(-1)
            greatest_other = logits.scatter(2, predicted, -torch.inf).amax(-1)
            margins.append(predicted_logit - greatest_other)
            answers.append(logits.argmax(-1))
        return torch.cat(margins), torch.cat(answers)

    def restore(self) -> None:
        """Restore patches one at a time as long as the prediction stays changed.

        Patches are tried in rounds, from the one that was removed last down to the first. A patch
        that is needed is tried again only after another one was restored. The patch that was
        removed last is needed at the start: without it, the prediction did not change.
        """
        # A round goes down the steps of removal. Then the cursor returns to the last step, so
        # patches at or above it belong to the next round.
        # (images,): the step of the patch that was tried last; -1 without removed patches
        cursor = self.step.masked_fill(~self.removed, -1).amax(1)
        is_needed = self.step == cursor[:, None]
        while True:
            can_lose_one = (self.turned != self.prediction) & (self.removed.sum(1) > 1)
            is_untried = self.removed & ~is_needed & can_lose_one[:, None]
            images = is_untried.any(1).nonzero().squeeze(1)
            if not len(images):
                return
            # The patch of the largest priority is tried next: of those removed before the one at
            # the cursor, the one removed last. Steps are below self._patches, so priorities of the
            # next round are below all of these.
            is_in_next_round = self.step >= cursor[:, None]
            priority = self.step - self._patches * is_in_next_round
            priority = priority.masked_fill(~is_untried, -2 * self._patches)  # below all others
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
