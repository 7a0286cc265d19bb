"""Counterfactuals: the smallest set of patches found whose removal changes the prediction.

Along a map's order, the shortest beginning of it that changes the prediction: every length is tried, as removing more
need not move further from the prediction. By greedy search, the patch that lowers the margin most is removed first, and
patches that turn out not to be needed are put back. Neither proves that no smaller set exists.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from vitlens.analysis.faithfulness.deletion import both_orders, removed_sets
from vitlens.analysis.faithfulness.masking import Cells, answers_without
from vitlens.analysis.faithfulness.resampled import AnyMaps, removal_grid
from vitlens.models.model import Model
from vitlens.names import Substrate
from vitlens.shapes import Images, Labels, Logits

AHEAD = 8  # lengths that are tried at once: no image is asked much beyond the one that turns it
CANDIDATES = 16  # patches that a greedy step tries: those that took most from the margin when last tried


@dataclass(frozen=True)
class Counterfactuals:
    """The sets found.

    removed: the patches (batch, rows, columns), none where nothing turned the prediction; prediction: before, turned:
    the class after (batch,), the same where it did not turn.
    """

    removed: Bool[Tensor, "batch rows columns"]
    prediction: Labels
    turned: Labels

    @property
    def found(self) -> Bool[Tensor, " batch"]:
        """Whether the prediction turned at all."""
        return self.prediction != self.turned

    @property
    def sizes(self) -> Int[Tensor, " batch"]:
        """How many patches are in each set; where none was found, all of the image's: it takes at least that."""
        patches = self.removed.shape[1] * self.removed.shape[2]
        return torch.where(self.found, self.removed.flatten(1).sum(1), patches)


def along_map(
    model: Model,
    images: Images,
    maps: AnyMaps,
    *,
    substrate: Substrate = "blur",
    grid: Cells | None = None,
    seed: int = 0,
    batch_size: int | None = None,
    advance: Callable[[int], object] = lambda _: None,
) -> Counterfactuals:
    """The shortest beginning of each map's order, most relevant first, whose removal turns the prediction.

    Exact: the first of all lengths, several of them in one batch. advance: called with the number of images done.
    Arguments and errors as for faithfulness.
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
        counts = torch.arange(first, min(first + AHEAD, most + 1), device=images.device)
        answers = variants.of(left, removed_sets(ranks[left], counts)).argmax(-1)
        other = answers != prediction[left, None]
        at = other.int().argmax(1)  # the first that turned it
        some = other.any(1)
        length[left[some]] = counts[at[some]]
        turned[left[some]] = answers[some, at[some]]
        advance(int(some.sum()))
        left, first = left[~some], first + AHEAD
    advance(len(left))
    removed = (ranks < length[:, None]).view(-1, *cells)
    return Counterfactuals(removed.cpu(), prediction.cpu(), turned.cpu())


def by_search(
    model: Model,
    images: Images,
    *,
    substrate: Substrate = "blur",
    grid: Cells | None = None,
    candidates: int | None = CANDIDATES,
    batch_size: int | None = None,
    advance: Callable[[int], object] = lambda _: None,
) -> Counterfactuals:
    """A small set of patches for each image by greedy search, from which none can be put back.

    In each step the patch goes that takes most from the margin (the prediction's logit minus the next); candidates: how
    many are looked at in a step after the first, those that took most when last tried (None: all that are left). Then
    patches are put back, the last first, as long as the prediction stays turned.
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
    while _put_back(variants, state, prediction):
        pass  # what could not go back before may now
    advance(len(images))
    found = state.turned != prediction
    removed = (state.removed & found[:, None]).view(-1, *cells)
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
    """Some images and how variants of them are answered."""

    model: Model
    images: Images
    cells: Cells
    substrate: Substrate
    batch_size: int | None

    def of(self, which: Labels, removed: Bool[Tensor, "some sets patches"]) -> Float[Tensor, "some sets classes"]:
        """The answers for several sets of each of these images."""
        some, sets = removed.shape[:2]
        logits: Logits = answers_without(
            self.model,
            self.images[which],
            torch.arange(some, device=which.device).repeat_interleave(sets),
            removed.flatten(0, 1),
            grid=self.cells,
            substrate=self.substrate,
            batch_size=self.batch_size,
        )
        return logits.view(some, sets, -1)

    def predictions(self) -> Labels:
        """What is predicted of the whole images."""
        every = torch.arange(len(self.images), device=self.images.device)
        nothing = torch.zeros(len(every), 1, self.cells[0] * self.cells[1], dtype=torch.bool, device=every.device)
        return self.of(every, nothing)[:, 0].argmax(-1)


def _one_step(
    variants: _Variants, state: _Search, left: Int[Tensor, " left"], prediction: Labels, step: int, candidates: int
) -> Int[Tensor, " fewer"]:
    """Remove one more patch of each image that is left; those that are left after it."""
    tried = state.margins[left].masked_fill(state.removed[left], torch.inf)
    count = min(candidates, state.removed.shape[1] - step)
    tried_next = tried.topk(count, dim=1, largest=False).indices  # the least margin took most
    sets = state.removed[left].unsqueeze(1).repeat(1, count, 1)
    sets.scatter_(2, tried_next.unsqueeze(-1), torch.ones_like(tried_next, dtype=torch.bool).unsqueeze(-1))
    answers = variants.of(left, sets)
    margins = _margins(answers, prediction[left])
    best = margins.argmin(1)
    state.margins[left[:, None], tried_next] = margins
    chosen = tried_next.gather(1, best[:, None]).squeeze(1)
    state.removed[left, chosen] = True
    state.when[left, chosen], state.steps = step, step + 1
    now = answers.gather(1, best[:, None, None].expand(-1, 1, answers.shape[-1])).squeeze(1).argmax(-1)
    state.turned[left] = now
    return left[now == prediction[left]]


def _put_back(variants: _Variants, state: _Search, prediction: Labels) -> bool:
    """Put patches back, one at a time from the last, wherever the prediction stays turned; whether any was."""
    any_ = False
    for step in reversed(range(state.steps)):
        has = (state.when == step) & state.removed
        some = (has.any(1) & (state.turned != prediction) & (state.removed.sum(1) > 1)).nonzero().squeeze(1)
        if not len(some):
            continue
        fewer = state.removed[some] & ~has[some]
        answers = variants.of(some, fewer.unsqueeze(1))[:, 0].argmax(-1)
        stays = answers != prediction[some]
        state.removed[some[stays]] = fewer[stays]
        state.turned[some[stays]] = answers[stays]
        any_ |= bool(stays.any())
    return any_


def _margins(answers: Float[Tensor, "some sets classes"], prediction: Labels) -> Float[Tensor, "some sets"]:
    """The prediction's logit minus the greatest other."""
    own = prediction[:, None, None].expand(-1, answers.shape[1], 1)
    others = answers.scatter(2, own, -torch.inf)
    return answers.gather(2, own).squeeze(-1) - others.amax(-1)
