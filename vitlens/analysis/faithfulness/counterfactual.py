"""Counterfactuals: the smallest set of patches found whose removal changes the prediction.

Along a map's order: the fewest top patches whose removal changes the prediction; every number is
tried, as the effect need not be monotonic. By greedy search: the patch that lowers the margin most
is removed next, and patches that are not needed in the end are restored. Neither proves that no
smaller set exists.
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
SETS_AT_ONCE = 256  # variants whose logits are held
CANDIDATES = 16  # patches tried in a greedy step: those with the lowest margin when last tried
_UNKNOWN = -1


@dataclass(frozen=True)
class Counterfactuals:
    """The sets of patches whose removal changes the prediction."""

    removed: Bool[Tensor, "batch rows columns"]  # none where no set was found
    prediction: Labels  # the class before
    turned: Labels  # the class after, the same where no set was found

    @property
    def found(self) -> Bool[Tensor, " batch"]:
        """Return whether a set was found that changes the prediction."""
        return self.prediction != self.turned

    @property
    def sizes(self) -> Int[Tensor, " batch"]:
        """Return the number of patches of each set; where none was found, that of the image's
        patches, a lower bound.
        """
        patches = self.removed.shape[1] * self.removed.shape[2]
        return torch.where(self.found, self.removed.flatten(1).sum(1), patches)


def along_map(
    model: Model,
    images: Images,
    maps: Sequence[AnyMaps],
    *,
    known: Sequence[RemovalCurve] = (),
    substrate: Substrate = SUBSTRATE,
    seed: int = 0,
    batch_size: int | None = None,
) -> tuple[Counterfactuals, ...]:
    """Return the fewest top patches of every map of several methods whose removal changes the
    prediction, the top one first.

    Exact: all numbers of patches up to that are tried, several in one batch. known: the deletion
    curves of these maps by `faithfulness` with the same arguments, whose points are not computed
    again. Arguments and errors as for `faithfulness`.
    """
    grid = removal_grid(model)
    patches = grid[0] * grid[1]
    orders = torch.stack(
        [both_orders(own.to(images.device), grid, images=len(images), seed=seed)[0] for own in maps]
    )
    lengths = patches if substrate == "absent" else patches + 1  # with "absent" one patch stays
    answers = torch.full((*orders.shape[:2], lengths), _UNKNOWN, device=images.device)
    for own, curve in zip(answers, known):
        own[:, (curve.shares * patches).round().long().to(own.device)] = curve.predicted.to(
            own.device
        )
    parts = []
    for part in torch.arange(len(images), device=images.device).split(IMAGES_AT_ONCE):
        variants = Variants(model, images[part], substrate=substrate, batch_size=batch_size)
        found = _first_turned(
            variants, orders[:, part].flatten(0, 1), answers[:, part].flatten(0, 1), len(part)
        )
        parts.append([each.unflatten(0, (len(maps), -1)) for each in found])
    length, prediction, turned = (torch.cat(each, 1) for each in zip(*parts))
    removed = (orders < length.unsqueeze(-1)).unflatten(-1, grid)
    return tuple(
        Counterfactuals(*(each.cpu() for each in own)) for own in zip(removed, prediction, turned)
    )


def _first_turned(
    variants: Variants,
    ranks: Int[Tensor, "rows patches"],
    answers: Int[Tensor, "rows lengths"],
    images: int,
) -> tuple[Int[Tensor, " rows"], Int[Tensor, " rows"], Int[Tensor, " rows"]]:
    """Return the least number of patches whose removal changes the prediction (0: none does), the
    prediction and the class after. rows: of orders and images; answers: the class by number of
    removed patches, where it is known.
    """
    lengths = torch.arange(answers.shape[1], device=answers.device)
    while True:
        turned = (answers != answers[:, :1]) & (answers != _UNKNOWN)
        first = torch.where(turned.any(1), turned.int().argmax(1), len(lengths))
        asked = (answers == _UNKNOWN) & (lengths < first[:, None])
        asked &= asked.cumsum(1) <= min(
            LENGTHS_AT_ONCE, max(1, SETS_AT_ONCE // max(1, int(asked.any(1).sum())))
        )
        row, length = asked.nonzero().unbind(1)
        if not len(row):
            break
        answers[row, length] = variants.logits(row % images, ranks[row] < length[:, None]).argmax(
            -1
        )
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
    parts = []
    for part in images.split(IMAGES_AT_ONCE):
        search = _Search(Variants(model, part, substrate=substrate), len(part), grid[0] * grid[1])
        search.remove(candidates, keep_one=substrate == "absent")
        search.restore()
        changed = search.turned != search.prediction
        parts.append(
            ((search.removed & changed[:, None]).view(-1, *grid), search.prediction, search.turned)
        )
    return Counterfactuals(*(torch.cat(each).cpu() for each in zip(*parts)))


class _Search:
    """The greedy search of a few images. removed: the patches; when: the step in which each was
    removed, the number of patches for the others; prediction, turned: the class before and after.
    """

    def __init__(self, variants: Variants, images: int, patches: int) -> None:
        every = torch.arange(images, device=variants.device)
        self._variants = variants
        self._patches = patches
        self.removed = torch.zeros(images, patches, dtype=torch.bool, device=variants.device)
        self.when = torch.full_like(self.removed, patches, dtype=torch.long)
        self.prediction = variants.logits(every, self.removed).argmax(-1)
        self.turned = self.prediction.clone()

    def remove(self, candidates: int, *, keep_one: bool) -> None:
        """Remove one patch after the other from each image until its prediction changes."""
        left = torch.arange(len(self.turned), device=self.turned.device)
        margins = torch.full_like(
            self.when, -torch.inf, dtype=torch.float
        )  # of each patch when last tried
        for step in range(self._patches - keep_one):
            count = min(candidates if step else self._patches, self._patches - step)
            tried = (
                margins[left]
                .masked_fill(self.removed[left], torch.inf)
                .topk(count, dim=1, largest=False)
                .indices
            )
            sets = (
                self.removed[left]
                .unsqueeze(1)
                .repeat(1, count, 1)
                .scatter_(2, tried.unsqueeze(-1), True)
            )
            found, answers = self._tried(left, sets)
            margins[left[:, None], tried] = found
            best = found.argmin(1, keepdim=True)
            chosen = tried.gather(1, best).squeeze(1)
            self.removed[left, chosen], self.when[left, chosen] = True, step
            self.turned[left] = answers.gather(1, best).squeeze(1)
            left = left[self.turned[left] == self.prediction[left]]
            if not len(left):
                break

    def _tried(
        self, which: Labels, removed: Bool[Tensor, "images sets patches"]
    ) -> tuple[Float[Tensor, "images sets"], Int[Tensor, "images sets"]]:
        """Without each set the margin, the prediction's logit minus the greatest other one, and the
        predicted class; the logits of a few images are held at a time.
        """
        sets = removed.shape[1]
        parts = []
        size = max(1, SETS_AT_ONCE // sets)
        for few, gone in zip(which.split(size), removed.split(size)):
            logits = self._variants.logits(
                few.repeat_interleave(sets), gone.flatten(0, 1)
            ).unflatten(0, (-1, sets))
            own = self.prediction[few][:, None, None].expand(-1, sets, 1)
            others = logits.scatter(2, own, -torch.inf).amax(-1)
            parts.append((logits.gather(2, own).squeeze(-1) - others, logits.argmax(-1)))
        margins, answers = (torch.cat(each) for each in zip(*parts))
        return margins, answers

    def restore(self) -> None:
        """Restore patches one at a time, the last first and over and over, as long as the
        prediction stays changed.

        A patch that could not be restored is tried again only after another was; at first that is
        the last one, without which the prediction was not changed.
        """
        cursor = self.when.masked_fill(~self.removed, -1).amax(1)
        kept = self.when == cursor[:, None]
        while True:
            several = (self.turned != self.prediction) & (self.removed.sum(1) > 1)
            loose = self.removed & ~kept & several[:, None]
            images = loose.any(1).nonzero().squeeze(1)
            if not len(images):
                return
            later = self.when >= cursor[:, None]
            patch = (
                (self.when - self._patches * later)
                .masked_fill(~loose, -2 * self._patches)[images]
                .argmax(1)
            )
            fewer = self.removed[images].scatter(1, patch[:, None], False)
            answers = self._variants.logits(images, fewer).argmax(-1)
            kept[images, patch], cursor[images] = True, self.when[images, patch]
            stays = answers != self.prediction[images]
            self.removed[images[stays]], self.turned[images[stays]] = fewer[stays], answers[stays]
            kept[images[stays]] = False
