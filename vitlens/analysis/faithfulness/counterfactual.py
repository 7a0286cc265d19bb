"""Counterfactuals: the smallest set of patches found whose removal changes the prediction.

Along a map's order: the fewest top patches whose removal changes the prediction; every number is tried, as the effect
need not be monotonic. By greedy search: the patch that lowers the margin most is removed next, and patches that are not
needed in the end are restored. Neither proves that no smaller set exists.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from vitlens.analysis.faithfulness.defaults import SUBSTRATE
from vitlens.analysis.faithfulness.deletion import both_orders, removed_sets
from vitlens.analysis.faithfulness.masking import Cells, logits_without_patches
from vitlens.analysis.faithfulness.resampled import AnyMaps, removal_grid
from vitlens.models.model import Model
from vitlens.names import Substrate
from vitlens.shapes import Images, Labels, Logits

LENGTHS_AT_ONCE = 8  # numbers of patches tried in one batch: few are computed beyond the first that succeeds
SETS_AT_ONCE = 256  # variants whose logits are held by a search
CANDIDATES = 16  # patches tried in a greedy step: those with the lowest margin when last tried


@dataclass(frozen=True)
class Counterfactuals:
    """The sets of patches whose removal changes the prediction.

    removed: the patches (batch, rows, columns), none where no set was found; prediction: the class before, turned: the
    class after (batch,), the same where no set was found.
    """

    removed: Bool[Tensor, "batch rows columns"]
    prediction: Labels
    turned: Labels

    @property
    def found(self) -> Bool[Tensor, " batch"]:
        """Whether a set was found that changes the prediction."""
        return self.prediction != self.turned

    @property
    def sizes(self) -> Int[Tensor, " batch"]:
        """The number of patches of each set; where none was found, that of the image's patches, a lower bound."""
        patches = self.removed.shape[1] * self.removed.shape[2]
        return torch.where(self.found, self.removed.flatten(1).sum(1), patches)


def along_map(
    model: Model,
    images: Images,
    maps: AnyMaps,
    *,
    substrate: Substrate = SUBSTRATE,
    grid: Cells | None = None,
    seed: int = 0,
    batch_size: int | None = None,
    advance: Callable[[int], object] = lambda _: None,
) -> Counterfactuals:
    """The fewest top patches of each map, most relevant first, whose removal changes the prediction.

    Exact: all numbers of patches are tried, several in one batch. advance: called with the number of images done.
    Arguments and errors as for `faithfulness`.
    """
    cells = grid or removal_grid(model)
    ranks, _ = both_orders(maps.to(images.device), cells, images=len(images), seed=seed)
    variants = _Variants(model, images, cells, substrate, batch_size)
    prediction = variants.predictions()
    patches = cells[0] * cells[1]
    most = patches - 1 if substrate == "absent" else patches
    length, turned = torch.zeros_like(prediction), prediction.clone()
    left, first = torch.arange(len(images), device=images.device), 1
    while len(left) and first <= most:
        counts = torch.arange(first, min(first + LENGTHS_AT_ONCE, most + 1), device=images.device)
        answers = variants.of(left, removed_sets(ranks[left], counts)).argmax(-1)
        other = answers != prediction[left, None]
        at = other.int().argmax(1)  # the first that changed the prediction
        changed = other.any(1)
        length[left[changed]] = counts[at[changed]]
        turned[left[changed]] = answers[changed, at[changed]]
        advance(int(changed.sum()))
        left, first = left[~changed], first + LENGTHS_AT_ONCE
    advance(len(left))
    removed = (ranks < length[:, None]).view(-1, *cells)
    return Counterfactuals(removed.cpu(), prediction.cpu(), turned.cpu())


def by_search(
    model: Model,
    images: Images,
    *,
    substrate: Substrate = SUBSTRATE,
    grid: Cells | None = None,
    candidates: int | None = CANDIDATES,
    batch_size: int | None = None,
    advance: Callable[[int], object] = lambda _: None,
) -> Counterfactuals:
    """A small set of patches for each image by greedy search, of which none can be restored.

    Each step removes the patch that lowers the margin (the prediction's logit minus the next) most; candidates: how
    many are tried in a step after the first, those with the lowest margin when last tried (None: all that are left).
    Then patches are restored, the last first, as long as the prediction stays changed.
    """
    cells = grid or removal_grid(model)
    variants = _Variants(model, images, cells, substrate, batch_size)
    prediction = variants.predictions()
    patches = cells[0] * cells[1]
    most = patches - 1 if substrate == "absent" else patches
    state = _Search(
        torch.zeros(len(images), patches, dtype=torch.bool, device=images.device),
        torch.full((len(images), patches), -torch.inf, device=images.device),  # margins when last tried
        torch.full((len(images), patches), patches, device=images.device),
        prediction.clone(),
    )
    left = torch.arange(len(images), device=images.device)
    for step in range(most):
        left = _one_step(variants, state, left, prediction, step, patches if step == 0 else candidates or patches)
        if not len(left):
            break
    while _restore(variants, state, prediction):
        pass  # a patch that could not be restored before may be restorable now
    advance(len(images))
    changed = state.turned != prediction
    removed = (state.removed & changed[:, None]).view(-1, *cells)
    return Counterfactuals(removed.cpu(), prediction.cpu(), state.turned.cpu())


@dataclass
class _Search:
    """removed: the patches; margins: of each patch when last tried; when: the step in which it was removed."""

    removed: Bool[Tensor, "batch patches"]
    margins: Float[Tensor, "batch patches"]
    when: Int[Tensor, "batch patches"]
    turned: Labels
    steps: int = 0


@dataclass(frozen=True)
class _Variants:
    """Images, and the logits of their variants without given patches."""

    model: Model
    images: Images
    cells: Cells
    substrate: Substrate
    batch_size: int | None

    def of(self, which: Labels, removed: Bool[Tensor, "images sets patches"]) -> Float[Tensor, "images sets classes"]:
        """The logits without several sets of patches of each of these images."""
        count, sets = removed.shape[:2]
        logits: Logits = logits_without_patches(
            self.model,
            self.images[which],
            torch.arange(count, device=which.device).repeat_interleave(sets),
            removed.flatten(0, 1),
            grid=self.cells,
            substrate=self.substrate,
            batch_size=self.batch_size,
        )
        return logits.view(count, sets, -1)

    def margins(
        self, which: Labels, removed: Bool[Tensor, "images sets patches"], prediction: Labels
    ) -> tuple[Float[Tensor, "images sets"], Int[Tensor, "images sets"]]:
        """The margin and the predicted class without each set; the logits of a few images are held at a time."""
        size = max(1, SETS_AT_ONCE // removed.shape[1])
        parts = []
        for few, sets, own in zip(which.split(size), removed.split(size), prediction.split(size)):
            logits = self.of(few, sets).float()
            parts.append((_margins(logits, own), logits.argmax(-1)))
        margins, classes = zip(*parts)
        return torch.cat(margins), torch.cat(classes)

    def predictions(self) -> Labels:
        """The predictions for the whole images."""
        every = torch.arange(len(self.images), device=self.images.device)
        nothing = torch.zeros(len(every), 1, self.cells[0] * self.cells[1], dtype=torch.bool, device=every.device)
        return self.of(every, nothing)[:, 0].argmax(-1)


def _one_step(
    variants: _Variants, state: _Search, left: Int[Tensor, " left"], prediction: Labels, step: int, candidates: int
) -> Int[Tensor, " fewer"]:
    """Remove one more patch of each of the remaining images; returns the images that remain after it."""
    tried = state.margins[left].masked_fill(state.removed[left], torch.inf)
    count = min(candidates, state.removed.shape[1] - step)
    tried_next = tried.topk(count, dim=1, largest=False).indices  # those with the lowest margins
    sets = state.removed[left].unsqueeze(1).repeat(1, count, 1)
    sets.scatter_(2, tried_next.unsqueeze(-1), torch.ones_like(tried_next, dtype=torch.bool).unsqueeze(-1))
    margins, predicted = variants.margins(left, sets, prediction[left])
    best = margins.argmin(1)
    state.margins[left[:, None], tried_next] = margins
    chosen = tried_next.gather(1, best[:, None]).squeeze(1)
    state.removed[left, chosen] = True
    state.when[left, chosen], state.steps = step, step + 1
    now = predicted.gather(1, best[:, None]).squeeze(1)
    state.turned[left] = now
    return left[now == prediction[left]]


def _restore(variants: _Variants, state: _Search, prediction: Labels) -> bool:
    """Restore patches, one at a time from the last, where the prediction stays changed; whether any was restored."""
    restored = False
    for step in reversed(range(state.steps)):
        has = (state.when == step) & state.removed
        images = (has.any(1) & (state.turned != prediction) & (state.removed.sum(1) > 1)).nonzero().squeeze(1)
        if not len(images):
            continue
        fewer = state.removed[images] & ~has[images]
        answers = variants.of(images, fewer.unsqueeze(1))[:, 0].argmax(-1)
        stays = answers != prediction[images]
        state.removed[images[stays]] = fewer[stays]
        state.turned[images[stays]] = answers[stays]
        restored |= bool(stays.any())
    return restored


def _margins(answers: Float[Tensor, "images sets classes"], prediction: Labels) -> Float[Tensor, "images sets"]:
    """The prediction's logit minus the greatest other logit."""
    own = prediction[:, None, None].expand(-1, answers.shape[1], 1)
    others = answers.scatter(2, own, -torch.inf)
    return answers.gather(2, own).squeeze(-1) - others.amax(-1)
