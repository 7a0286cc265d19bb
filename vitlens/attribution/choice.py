"""`vitlens.choose_method`: the attribution method for a model and images, by two quick checks on
the images themselves, chosen on one half of the images and judged on the other.

One check is insertion minus deletion, the other localisation (ROC-AUC): on the objects where masks
are known, else on 2 x 2 mosaics of the images, whose classes are the model's confident predictions.
Mosaics are made of images of one half alone, and the maps of an image in several mosaics count as
one value.

A method's score is the mean over the checks of its mean value, divided by the standard deviation of
the methods' means in that check (baselines included) on the selection half. The scales stay fixed
afterwards, so that a score is linear in the values and its paired differences have intervals.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from vitlens.analysis.evaluation.evaluate import accuracy, predicted_logits
from vitlens.analysis.evaluation.intervals import resampled_means
from vitlens.analysis.faithfulness.checks import ENOUGH, ChoiceMargin, ChoiceScores
from vitlens.analysis.faithfulness.defaults import BASELINES, COMPOSITE_KINDS, FEWEST
from vitlens.analysis.faithfulness.league import explained
from vitlens.analysis.faithfulness.localisation import (
    Composites,
    confident_images,
    has_edge,
    recognised,
    roc_auc,
)
from vitlens.analysis.faithfulness.maps import Explain
from vitlens.analysis.faithfulness.removal import faithfulness, resized
from vitlens.attribution.explain import explain, methods_for, preferred_method, require_method
from vitlens.attribution.refinement import Refinement, applies, require_refinement
from vitlens.attribution.registry import ATTRIBUTIONS
from vitlens.classes import class_targets
from vitlens.data.split import Split, as_split
from vitlens.devices import evaluating
from vitlens.errors import InputError
from vitlens.inputs import takes_splits
from vitlens.models.model import Model
from vitlens.names import DEFAULT_SEED, Engine, Substrate
from vitlens.pixels import AnyImages, Targets
from vitlens.shapes import Images, Labels, Logits, Maps
from vitlens.summary import Line, Summary
from vitlens.uncertainty import (
    Estimate,
    Numbers,
    Side,
    beyond,
    by_group,
    drawn_interval,
    enough_to_draw,
)

MOST: Final = 6  # candidates, where none are named
IMAGES: Final = 40  # of both halves together, at most
STEPS: Final = 6  # of the removal curves, which take most of the time
MOSAICS: Final = 12  # of each half, at most
# what removed patches become: not the blur by which `best` itself chooses
REPLACED: Final[Substrate] = "mean"
KIND: Final = "mosaic-2"  # of the composites
REFERENCES: Final = (
    "relevance",
    "gradcam",
)  # with which the chosen one is compared, too, where they are candidates
# the checks
FAITHFULNESS = "insertion_minus_deletion"
LOCALISATION = "localisation"
SCORE: Final = "score"  # the name of the combined score beside them
DRAWS: Final = 2000  # of the bootstrap
_TIE: Final = 1e-9
# greatest difference of any value of two methods that give the same maps up to rounding
_SAME: Final = 1e-4
_CONFIRMATIONS: Final = {
    Side.ABOVE: "confirmed",
    Side.BELOW: "contradicted",
    Side.UNDECIDED: "not confirmed",
}

Indices = Int[Tensor, " half"]
Values = Float[Tensor, "methods images"]


@dataclass(frozen=True, repr=False)
class MethodChoice(Summary):
    """The method chosen for a model and images.

    method: the chosen one; reason: why it is not chosen by evidence but is the default, "" where it
    is chosen; candidates: what it is chosen from; checks: what decided; left_out: checks that could
    not judge, with the reason; localised: where localisation was scored, "objects" (masks) or a
    kind of composites; certainty: share of the bootstrap draws of the selection half in which it
    wins, None without evidence; runner_up: the second of the selection half, among those with other
    maps; alike: candidates with the same maps up to rounding; confirmation: whether the report half
    shows it above the runner-up (paired 95 % interval of the scores), None without a runner-up;
    scores: of every candidate and baseline, the best of the selection half first; margins: on the
    report half; selection, report: indices of the images in each half; seed: of the halves.
    """

    method: str
    candidates: tuple[str, ...]
    reason: str = ""
    checks: tuple[str, ...] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)
    localised: str = ""
    certainty: float | None = None
    runner_up: str | None = None
    alike: tuple[str, ...] = ()
    confirmation: Literal["confirmed", "not confirmed", "contradicted"] | None = None
    scores: tuple[ChoiceScores, ...] = ()
    margins: tuple[ChoiceMargin, ...] = ()
    selection: tuple[int, ...] = ()
    report: tuple[int, ...] = ()
    seed: int = 0

    def margin(self, against: str, check: str = SCORE) -> Estimate | None:
        """Return the chosen method minus another on the report half; None where it was not
        compared.
        """
        found = (
            each.difference
            for each in self.margins
            if (each.against, each.check) == (against, check)
        )
        return next(found, None)

    def summary(self) -> Iterator[Line]:
        """Yield the choice, how sure it is, and the score of every method on the report half."""
        yield Line("method", self.method)
        if self.reason:
            yield Line("not by evidence", self.reason)
            return
        yield Line("certainty", self.certainty, f"of {DRAWS} draws")
        yield Line("runner-up", self.runner_up)
        yield Line("report half", self.confirmation)
        for each in self.margins:
            if each.check == SCORE:
                yield Line(f"score above {each.against}", each.difference)
        for scored in self.scores:
            yield Line(scored.method, {name: scored.report[name] for name in self.checks})


@takes_splits
def choose_method(
    model: Model,
    images: AnyImages,
    *,
    targets: Targets = "predicted",
    methods: Sequence[str] | None = None,
    refinement: Refinement | None = None,
    engine: Engine = "vitlens",
    batch_size: int | None = None,
    seed: int = DEFAULT_SEED,
) -> MethodChoice:
    """Return the attribution method whose maps do best on one half of these images, judged on the
    other half.

    images: a Split, or any form that `vitlens.images` takes; at most 40 are used, drawn by the
    seed, and with fewer than 20 (or groups) the result is the model's default method, with the
    reason. targets: "predicted", "label", a class, or class indices (n,); methods: candidates
    (None: the first six of the registry's that the model supports); refinement, engine: as for
    `vitlens.explain`. Raises UnsupportedError for a model without a classifier, and for a method
    that it does not have, InputError for fewer than two candidates.

    >>> import vitlens
    >>> vit, digits = vitlens.load("vit-digits"), vitlens.load_data("digits", limit=20)
    >>> choice = vitlens.choose_method(vit, digits, methods=["relevance", "gradcam"])
    >>> choice.method, choice.runner_up, len(choice.selection), len(choice.report)
    ('relevance', 'gradcam', 10, 10)
    """
    split = as_split(images)
    names = candidates_for(model, methods, refinement=refinement, engine=engine)
    classes = class_targets(targets, model, len(split), split=split)
    how: dict[str, Any] = {
        "refinement": refinement,
        "engine": engine,
        "batch_size": batch_size,
        "seed": seed,
    }

    def function(name: str) -> Explain:
        return lambda model, images, targets: explain(
            model, images, targets=targets, method=name, **how
        )

    functions = {name: function(name) for name in names}
    return chosen_by_evidence(model, split, classes, functions, batch_size=batch_size, seed=seed)


def candidates_for(
    model: Model,
    methods: Sequence[str] | None = None,
    *,
    refinement: Refinement | None = None,
    engine: Engine = "vitlens",
) -> tuple[str, ...]:
    """Return the methods to choose from. methods: their names; None: the first MOST of the
    registry's candidates that the model, the engine and the refinement support.

    Raises what `choose_method` raises.
    """
    model.require_classifier()
    refinement = refinement or Refinement()
    for name in methods or ():
        require_method(model, name, engine=engine)
        require_refinement(model, name, refinement)
    if not methods:
        ranks = {name: entry.candidate for name, entry in ATTRIBUTIONS.items() if entry.candidate}
        ranked = sorted(
            ranks.keys() & methods_for(model, engine=engine), key=lambda name: ranks[name]
        )
        methods = [name for name in ranked if applies(model, name, refinement)][:MOST]
    names = tuple(dict.fromkeys(methods))
    if len(names) < 2:
        raise InputError(
            f"expected at least 2 candidates to choose from for {model.alias}, found "
            f"{', '.join(names) or 'none'}; "
            "name two methods or more, or leave out the choice"
        )
    return names


def chosen_by_evidence(
    model: Model,
    split: Split,
    targets: Labels | None,
    functions: Mapping[str, Explain],
    *,
    batch_size: int | None = None,
    seed: int = DEFAULT_SEED,
    advance: Callable[[int], object] = lambda _: None,
) -> MethodChoice:
    """Return the choice between methods given as functions of (model, images, targets). targets:
    class indices (n,), None for the predictions; advance: called with the number of methods just
    done, in each of the two checks.
    """
    order = (
        torch.randperm(len(split), generator=torch.Generator().manual_seed(seed))[:IMAGES]
        .sort()
        .values
    )
    used = split.pick(order)
    groups = torch.arange(len(used)) if used.groups is None else used.groups.cpu()
    found = len(groups.unique())
    least = 2 * ENOUGH  # ENOUGH in each half
    if found < least:
        what = "images" if used.groups is None else "groups of images"
        reason = f"expected at least {least} {what} to choose by, found {found}"
        default = preferred_method(model)
        method = default if default in functions else next(iter(functions))
        return MethodChoice(method, tuple(functions), reason, seed=seed)
    logits = predicted_logits(model, used, batch_size=batch_size).float().cpu()
    classes = (logits.argmax(-1) if targets is None else targets.cpu()[order]).to(model.device)
    (batch,) = used.batches(len(used), device=model.device)
    maps_of = partial(explained, model, functions, seed=seed, advance=advance)
    parts = halves(groups, seed=seed)
    maps = maps_of(batch.images, classes)
    removed = [own.to(model.device) for own in maps.values()]
    curves = faithfulness(
        model,
        batch.images,
        classes,
        removed,
        substrate=REPLACED,
        steps=STEPS,
        seed=seed,
        batch_size=batch_size,
    )
    values = {FAITHFULNESS: torch.stack([each.gaps for each in curves]).cpu()}
    obstacle = ""
    if used.masks is None:
        what = "confidently classified images"
        located, obstacle = _on_mosaics(
            model, resized(model, batch.images), logits, parts, maps_of, seed
        )
    else:
        what = "images with a mask"
        masks = used.masks.cpu()
        known = has_edge(masks)
        located = torch.full((len(maps), len(used)), torch.nan)
        if bool(known.any()):
            located[:, known] = torch.stack(
                [roc_auc(own[known], masks[known]) for own in maps.values()]
            )
    fewest = min(len(groups[part[located[0, part].isfinite()]].unique()) for part in parts)
    if not obstacle and fewest < ENOUGH:
        obstacle = f"expected at least {ENOUGH} {what} in each half, found {fewest}"
    if not obstacle:
        values[LOCALISATION] = located
    return replace(
        choose(values, tuple(functions), parts, groups, seed=seed),
        left_out={LOCALISATION: obstacle} if obstacle else {},
        localised=KIND if used.masks is None else "objects",
        selection=tuple(order[parts[0]].tolist()),
        report=tuple(order[parts[1]].tolist()),
    )


def _on_mosaics(
    model: Model,
    images: Images,
    logits: Logits,
    parts: tuple[Indices, Indices],
    maps_of: Callable[[Images, Labels], Mapping[str, Maps]],
    seed: int,
) -> tuple[Values, str]:
    """ROC-AUC on the cell of each explained image, its mean over the mosaics of its half, NaN for
    an image that is in none; and why mosaics judge no maps, "" where the model names their classes
    better than by guessing.
    """
    kind = COMPOSITE_KINDS[KIND]
    nothing = torch.full((1, len(images)), torch.nan)
    mosaics: list[tuple[Indices, Composites]] = []
    for part in parts:
        labels = logits[part].argmax(-1)
        usable = confident_images(logits[part], labels)
        classes = len(labels[usable].unique())
        if classes < max(FEWEST, kind.classes):
            return nothing, (
                f"expected confidently classified images of at least {kind.classes} classes in "
                "each half, found "
                f"{len(usable)} images of {classes}"
            )
        own = images[part[usable].to(images.device)]
        mosaics.append((part[usable], kind.make(own, labels[usable], count=MOSAICS, seed=seed)))
    every = torch.cat([made.images for _, made in mosaics])
    with evaluating(model), torch.no_grad():
        found = model(every).float().cpu()
    which = torch.arange(len(every)).repeat_interleave(kind.explained)
    named = recognised(found[which], torch.cat([made.targets for _, made in mosaics]), kind.classes)
    share = accuracy(named, groups=which)
    guessed = min(1.0, kind.classes / len(model.classes))
    if beyond(share, guessed) is not Side.ABOVE:
        return nothing, (
            f"{model.alias} names {100 * share.value:.0f} % of the classes of mosaics, not "
            "significantly more than "
            f"by guessing ({100 * guessed:.0f} %)"
        )
    values = nothing
    for used, made in mosaics:
        maps = maps_of(made.images[made.which.to(made.images.device)], made.targets)
        scores = torch.stack([roc_auc(own, made.masks) for own in maps.values()])
        cells = F.one_hot(
            made.sources.flatten(), len(used)
        ).float()  # (maps, used): each cell is explained in turn
        values = values.expand(len(maps), -1).clone()
        values[:, used] = (scores @ cells) / cells.sum(0)
    return values, ""


def halves(groups: Int[Tensor, " images"], *, seed: int = 0) -> tuple[Indices, Indices]:
    """Return two disjoint halves of the images by a seeded draw; images of one group stay
    together."""
    member = groups.unique(return_inverse=True)[1]
    total = int(member.max()) + 1
    first = torch.randperm(total, generator=torch.Generator().manual_seed(seed))[: (total + 1) // 2]
    inside = torch.isin(member, first)
    return inside.nonzero().squeeze(1), (~inside).nonzero().squeeze(1)


def choose(
    values: Mapping[str, Values],
    candidates: Sequence[str],
    parts: tuple[Indices, Indices],
    groups: Int[Tensor, " images"],
    *,
    seed: int = 0,
) -> MethodChoice:
    """Return the candidate of the highest score on the first half, and what the second half says of
    it.

    values: of each check, greater is better, a row a method (candidates, then BASELINES), NaN in
    all rows of an image without a value. A check in which all methods are equal decides nothing.
    """
    names = (*candidates, *BASELINES)
    count = len(candidates)
    rows = (*values, SCORE)
    table = torch.stack([each.double() for each in values.values()])
    scales = table[..., parts[0]].nanmean(2).std(1, correction=0)
    weights = torch.where(scales > _TIE, 1 / scales.clamp_min(_TIE), 0.0) / len(scales)
    first, second = (_half(table[..., part], groups[part], weights, seed) for part in parts)
    best, *others = first.means[-1, :count].argsort(descending=True, stable=True).tolist()
    apart = (table[:, :count] - table[:, [best]]).abs().nan_to_num(0.0).amax((0, 2))
    rivals = [place for place in others if apart[place] > _SAME]
    drawn = first.draws[:, -1, :count]
    wins = (drawn >= drawn.amax(1, keepdim=True) - _TIE).double().mean(0).tolist()
    compared = [
        *rivals[:1],
        *(each for each in rivals if names[each] in REFERENCES),
        *range(count, len(names)),
    ]
    margins = tuple(
        ChoiceMargin(
            against=names[other], check=check, difference=second.estimate(row, best, minus=other)
        )
        for other in dict.fromkeys(compared)
        for row, check in enumerate(rows)
    )
    confirmation: Any = (
        _CONFIRMATIONS[beyond(margins[len(rows) - 1].difference, 0.0)] if rivals else None
    )
    scores = tuple(
        ChoiceScores(
            method=names[place],
            baseline=place >= count,
            wins=wins[place] if place < count else None,
            selection={check: first.estimate(row, place) for row, check in enumerate(rows)},
            report={check: second.estimate(row, place) for row, check in enumerate(rows)},
        )
        for place in (best, *others, *range(count, len(names)))
    )
    return MethodChoice(
        names[best],
        tuple(candidates),
        checks=tuple(values),
        certainty=wins[best],
        runner_up=names[rivals[0]] if rivals else None,
        alike=tuple(names[place] for place in others if place not in rivals),
        confirmation=confirmation,
        scores=scores,
        margins=margins,
        selection=tuple(parts[0].tolist()),
        report=tuple(parts[1].tolist()),
        seed=seed,
    )


@dataclass(frozen=True)
class _Half:
    """All methods on one half. Rows are the checks, then the score."""

    means: Float[Tensor, "rows methods"]
    draws: Float[Tensor, "draws rows methods"]  # of the bootstrap
    counts: tuple[int, ...]  # of images
    members: tuple[Numbers, ...]  # images with a value in each group

    def estimate(self, row: int, method: int, *, minus: int | None = None) -> Estimate:
        """Return a mean, or the paired difference of two, with its bootstrap interval, which few
        groups do not have.
        """
        value = self.means[row, method]
        draws = self.draws[:, row, method]
        if minus is not None:
            value = value - self.means[row, minus]
            draws = draws - self.draws[:, row, minus]
        if not enough_to_draw(self.members[row]):
            return Estimate(float(value), n=self.counts[row], unit="")
        low, high = drawn_interval(draws.numpy(), self.members[row])
        return Estimate(float(value), float(low), float(high), self.counts[row], "")


def _half(
    own: Float[Tensor, "checks methods images"], groups: Tensor, weights: Tensor, seed: int
) -> _Half:
    """Images are drawn jointly for all checks, in whole groups; a draw without any value is left
    out.
    """
    checks, methods, images = own.shape
    present = own[:, 0].isfinite().double()
    rows = torch.cat([own.nan_to_num(0.0).flatten(0, 1), present])
    drawn = resampled_means(rows, groups=groups, seed=seed, draws=DRAWS)
    sums = drawn[:, :-checks].unflatten(1, (checks, methods))
    shares = drawn[:, -checks:, None]
    draws = (sums / shares)[(shares > 0).all(1).squeeze(1)]
    means = own.nanmean(2)
    numbers = groups.cpu().numpy()
    members = [by_group(each.numpy(), numbers)[0] for each in present]
    members = [sizes[sizes > 0] for sizes in members]
    fewest = min(members, key=len)  # the score needs a value of every check
    return _Half(
        torch.cat([means, (weights[:, None] * means).sum(0, keepdim=True)]),
        torch.cat([draws, (weights[:, None] * draws).sum(1, keepdim=True)], 1),
        (*(int(each) for each in present.sum(1)), images),
        (*members, fewest),
    )
