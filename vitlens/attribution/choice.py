"""`vitlens.choose_method`: the attribution method for a model and images, by two quick checks.

The method is chosen on one half of the images and judged on the other. One check is insertion minus
deletion, the other localisation (ROC-AUC): on the objects where masks are known, else on 2 x 2
mosaics of the images, of which the classes are confident predictions of the model. A mosaic is made
of images of one half, and the maps of an image in several mosaics count as one value.

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
from vitlens.analysis.faithfulness.league import compute_maps
from vitlens.analysis.faithfulness.localisation import (
    Composites,
    confident_images,
    has_edge,
    is_recognised,
    roc_auc,
)
from vitlens.analysis.faithfulness.maps import Explain
from vitlens.analysis.faithfulness.removal import faithfulness, resize_to_model
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
from vitlens.resampling import Numbers, by_group, drawn_interval, enough_to_draw
from vitlens.shapes import Images, Labels, Logits, Maps, Masks
from vitlens.summary import Line, Summary
from vitlens.uncertainty import Estimate, Side, beyond

MOST: Final = 6  # candidates, where none are named
IMAGES: Final = 40  # of both halves together, at most
STEPS: Final = 6  # of the removal curves, which take most of the time
MOSAICS: Final = 12  # of each half, at most
# the replacement of removed patches: not the blur by which `best` chooses its map
REPLACED: Final[Substrate] = "mean"
KIND: Final = "mosaic-2"  # of the composites
# with which the chosen one is compared, too, where they are candidates
REFERENCES: Final = ("relevance", "gradcam")
# the checks
FAITHFULNESS = "insertion_minus_deletion"
LOCALISATION = "localisation"
SCORE: Final = "score"  # the name of the combined score
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
    is chosen; candidates: the methods compared; checks: those that decided; left_out: checks that
    could not judge, with the reason; localised: where localisation was scored, "objects" (masks) or
    a kind of composites; certainty: share of the bootstrap draws of the selection half in which it
    wins, None without evidence; runner_up: the second of the selection half, among those with other
    maps; alike: candidates with the same maps up to rounding; confirmation: whether the report half
    confirms that it is above the runner-up (paired 95 % interval of the scores), None without a
    runner-up; scores: of every candidate and baseline, the best of the selection half first;
    margins: on the report half; selection, report: indices of the images in each half; seed: of the
    halves.
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
        """Return the chosen method minus another on the report half; None if not compared."""
        for margin in self.margins:
            if (margin.against, margin.check) == (against, check):
                return margin.difference
        return None

    def summary(self) -> Iterator[Line]:
        """Yield the choice, its certainty, and the score of every method on the report half."""
        yield Line("method", self.method)
        if self.reason:
            yield Line("not by evidence", self.reason)
            return
        yield Line("certainty", self.certainty, f"of {DRAWS} draws")
        yield Line("runner-up", self.runner_up)
        yield Line("report half", self.confirmation)
        for margin in self.margins:
            if margin.check == SCORE:
                yield Line(f"score above {margin.against}", margin.difference)
        for score in self.scores:
            yield Line(score.method, {name: score.report[name] for name in self.checks})


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
    """Choose the attribution method with the best maps on these images.

    It is chosen on one half of them, and judged on the other half. images: a Split, or any form
    that `vitlens.images` takes; at most 40 are used, drawn by the seed, and with fewer than 20 (or
    groups) the result is the model's default method, with the reason. targets: "predicted",
    "label", a class, or class indices (n,); methods: candidates (None: the first six of the
    registry's that the model supports); refinement, engine: as for `vitlens.explain`. Raises
    UnsupportedError for a model without a classifier, and for a method that it does not have,
    InputError for fewer than two candidates.

    >>> import vitlens
    >>> vit, digits = vitlens.load("vit-digits"), vitlens.load_data("digits", limit=20)
    >>> choice = vitlens.choose_method(vit, digits, methods=["relevance", "gradcam"])
    >>> choice.method, choice.runner_up, len(choice.selection), len(choice.report)
    ('relevance', 'gradcam', 10, 10)
    """
    split = as_split(images)
    names = candidates_for(model, methods, refinement=refinement, engine=engine)
    classes = class_targets(targets, model, len(split), split=split)
    settings: dict[str, Any] = {
        "refinement": refinement,
        "engine": engine,
        "batch_size": batch_size,
        "seed": seed,
    }

    def function(name: str) -> Explain:
        return lambda model, images, targets: explain(
            model, images, targets=targets, method=name, **settings
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
    """Return the methods to choose from.

    methods: their names; None: the first MOST of the registry's candidates that the model, the
    engine and the refinement support. Raises the same errors as `choose_method`.
    """
    model.require_classifier()
    refinement = refinement or Refinement()
    for name in methods or ():
        require_method(model, name, engine=engine)
        require_refinement(model, name, refinement)
    if not methods:
        ranks = {name: entry.candidate for name, entry in ATTRIBUTIONS.items() if entry.candidate}
        supported = ranks.keys() & methods_for(model, engine=engine)
        ranked = sorted(supported, key=lambda name: ranks[name])
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
    """Return the choice between methods, functions of (model, images, targets) by name.

    targets: class indices (n,), None for the predictions; advance: called with the number of
    methods just done, in each of the two checks.
    """
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(split), generator=generator)[:IMAGES].sort().values
    used = split.pick(order)
    groups = torch.arange(len(used)) if used.groups is None else used.groups.cpu()
    reason = _too_few(used, groups)
    if reason:
        default = preferred_method(model)
        method = default if default in functions else next(iter(functions))
        return MethodChoice(method, tuple(functions), reason, seed=seed)
    logits = predicted_logits(model, used, batch_size=batch_size).float().cpu()
    classes = logits.argmax(-1) if targets is None else targets.cpu()[order]
    classes = classes.to(model.device)
    (batch,) = used.batches(len(used), device=model.device)
    maps_of = partial(compute_maps, model, functions, seed=seed, advance=advance)
    parts = halves(groups, seed=seed)
    maps = maps_of(batch.images, classes)
    curves = faithfulness(
        model,
        batch.images,
        classes,
        [method_maps.to(model.device) for method_maps in maps.values()],
        substrate=REPLACED,
        steps=STEPS,
        seed=seed,
        batch_size=batch_size,
    )
    values = {FAITHFULNESS: torch.stack([curve.gaps for curve in curves]).cpu()}
    if used.masks is None:
        images = resize_to_model(model, batch.images)
        located, obstacle = _on_mosaics(model, images, logits, parts, maps_of, seed)
        what = "confidently classified images"
    else:
        located = _on_objects(maps, used.masks.cpu())
        obstacle = ""
        what = "images with a mask"
    fewest = min(_groups_with_value(located, groups, part) for part in parts)
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


def _too_few(split: Split, groups: Int[Tensor, " images"]) -> str:
    """Return why there are too few images to choose by, "" if there are enough."""
    count = len(groups.unique())
    least = 2 * ENOUGH  # ENOUGH in each half
    if count >= least:
        return ""
    what = "images" if split.groups is None else "groups of images"
    return f"expected at least {least} {what} to choose by, found {count}"


def _groups_with_value(values: Values, groups: Int[Tensor, " images"], part: Indices) -> int:
    """Return the number of groups of a half with a value."""
    has_value = values[0, part].isfinite()
    return len(groups[part[has_value]].unique())


def _on_objects(maps: Mapping[str, Maps], masks: Masks) -> Values:
    """Return the ROC-AUC on the objects, NaN for an image without an object or background."""
    usable = has_edge(masks)
    values = torch.full((len(maps), len(masks)), torch.nan)
    if bool(usable.any()):
        scores = [roc_auc(method_maps[usable], masks[usable]) for method_maps in maps.values()]
        values[:, usable] = torch.stack(scores)
    return values


def _on_mosaics(
    model: Model,
    images: Images,
    logits: Logits,
    parts: tuple[Indices, Indices],
    maps_of: Callable[[Images, Labels], Mapping[str, Maps]],
    seed: int,
) -> tuple[Values, str]:
    """Return the mean ROC-AUC of each image on its cells of mosaics, and why there is none.

    The mean is over the mosaics of its half, NaN for an image that is in none. The reason is ""
    where the model names the classes of mosaics better than by guessing.
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
                f"each half, found {len(usable)} images of {classes}"
            )
        sources = images[part[usable].to(images.device)]
        composites = kind.make(sources, labels[usable], count=MOSAICS, seed=seed)
        mosaics.append((part[usable], composites))
    pixels = torch.cat([composites.images for _, composites in mosaics])
    targets = torch.cat([composites.targets for _, composites in mosaics])
    with evaluating(model), torch.no_grad():
        mosaic_logits = model(pixels).float().cpu()
    which = torch.arange(len(pixels)).repeat_interleave(kind.explained)
    is_named = is_recognised(mosaic_logits[which], targets, kind.classes)
    share = accuracy(is_named, groups=which)
    guessed = min(1.0, kind.classes / len(model.classes))
    if beyond(share, guessed) is not Side.ABOVE:
        return nothing, (
            f"{model.alias} names {100 * share.value:.0f} % of the classes of mosaics, not "
            f"significantly more than by guessing ({100 * guessed:.0f} %)"
        )
    values = nothing
    for used, composites in mosaics:
        which_image = composites.which.to(composites.images.device)
        maps = maps_of(composites.images[which_image], composites.targets)
        scores = torch.stack(
            [roc_auc(method_maps, composites.masks) for method_maps in maps.values()]
        )
        # (maps, used): each cell is explained in turn
        cells = F.one_hot(composites.sources.flatten(), len(used)).float()
        values = values.expand(len(maps), -1).clone()
        values[:, used] = (scores @ cells) / cells.sum(0)
    return values, ""


def halves(groups: Int[Tensor, " images"], *, seed: int = 0) -> tuple[Indices, Indices]:
    """Return two disjoint halves of the images by a seeded draw; groups stay together."""
    member = groups.unique(return_inverse=True)[1]
    total = int(member.max()) + 1
    order = torch.randperm(total, generator=torch.Generator().manual_seed(seed))
    in_first = torch.isin(member, order[: (total + 1) // 2])
    return in_first.nonzero().squeeze(1), (~in_first).nonzero().squeeze(1)


def choose(
    values: Mapping[str, Values],
    candidates: Sequence[str],
    parts: tuple[Indices, Indices],
    groups: Int[Tensor, " images"],
    *,
    seed: int = 0,
) -> MethodChoice:
    """Return the candidate of the highest score on the first half, judged on the second half.

    values: of each check, greater is better, a row a method (candidates, then BASELINES), NaN in
    all rows of an image without a value. A check in which all methods are equal decides nothing.
    """
    names = (*candidates, *BASELINES)
    count = len(candidates)
    baselines = range(count, len(names))
    rows = (*values, SCORE)
    table = torch.stack([check_values.double() for check_values in values.values()])
    scales = table[..., parts[0]].nanmean(2).std(1, correction=0)
    weights = torch.where(scales > _TIE, 1 / scales.clamp_min(_TIE), 0.0) / len(scales)
    selection = _half(table[..., parts[0]], groups[parts[0]], weights, seed)
    report = _half(table[..., parts[1]], groups[parts[1]], weights, seed)
    best, *others = selection.means[-1, :count].argsort(descending=True, stable=True).tolist()
    apart = (table[:, :count] - table[:, [best]]).abs().nan_to_num(0.0).amax((0, 2))
    rivals = [place for place in others if apart[place] > _SAME]
    wins = selection.wins(count)
    references = [place for place in rivals if names[place] in REFERENCES]
    margins = list[ChoiceMargin]()
    for other in dict.fromkeys([*rivals[:1], *references, *baselines]):
        for row, check in enumerate(rows):
            difference = report.estimate(row, best, minus=other)
            margins.append(ChoiceMargin(against=names[other], check=check, difference=difference))
    confirmation: Any = None
    if rivals:
        score_margin = margins[len(rows) - 1]  # over the runner-up
        confirmation = _CONFIRMATIONS[beyond(score_margin.difference, 0.0)]
    scores = list[ChoiceScores]()
    for place in (best, *others, *baselines):
        scores.append(
            ChoiceScores(
                method=names[place],
                baseline=place >= count,
                wins=wins[place] if place < count else None,
                selection={check: selection.estimate(row, place) for row, check in enumerate(rows)},
                report={check: report.estimate(row, place) for row, check in enumerate(rows)},
            )
        )
    return MethodChoice(
        names[best],
        tuple(candidates),
        checks=tuple(values),
        certainty=wins[best],
        runner_up=names[rivals[0]] if rivals else None,
        alike=tuple(names[place] for place in others if place not in rivals),
        confirmation=confirmation,
        scores=tuple(scores),
        margins=tuple(margins),
        selection=tuple(parts[0].tolist()),
        report=tuple(parts[1].tolist()),
        seed=seed,
    )


@dataclass(frozen=True)
class _Half:
    """All methods on one half of the images. Rows are the checks, then the score.

    draws: of the bootstrap; counts: of images; members: images with a value in each group.
    """

    means: Float[Tensor, "rows methods"]
    draws: Float[Tensor, "draws rows methods"]
    counts: tuple[int, ...]
    members: tuple[Numbers, ...]

    def wins(self, count: int) -> list[float]:
        """Return the share of draws in which each of the first methods has the highest score."""
        scores = self.draws[:, -1, :count]
        is_highest = scores >= scores.amax(1, keepdim=True) - _TIE
        shares: list[float] = is_highest.double().mean(0).tolist()
        return shares

    def estimate(self, row: int, method: int, *, minus: int | None = None) -> Estimate:
        """Return a mean, or the paired difference of two, with its bootstrap interval.

        Few groups have no interval.
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
    values: Float[Tensor, "checks methods images"], groups: Tensor, weights: Tensor, seed: int
) -> _Half:
    """Return all methods on one half.

    Images are drawn jointly for all checks, in complete groups; a draw without any value is left
    out.
    """
    checks, methods, images = values.shape
    has_value = values[:, 0].isfinite().double()
    rows = torch.cat([values.nan_to_num(0.0).flatten(0, 1), has_value])
    drawn = resampled_means(rows, groups=groups, seed=seed, draws=DRAWS)
    sums = drawn[:, :-checks].unflatten(1, (checks, methods))
    shares = drawn[:, -checks:, None]
    draws = (sums / shares)[(shares > 0).all(1).squeeze(1)]
    means = values.nanmean(2)
    mean_score = (weights[:, None] * means).sum(0, keepdim=True)
    drawn_score = (weights[:, None] * draws).sum(1, keepdim=True)
    numbers = groups.cpu().numpy()
    members = list[Numbers]()
    for row in has_value:
        sizes = by_group(row.numpy(), numbers)[0]
        members.append(sizes[sizes > 0])
    fewest = min(members, key=len)  # the score needs a value of every check
    counts = [int(count) for count in has_value.sum(1)]
    return _Half(
        torch.cat([means, mean_score]),
        torch.cat([draws, drawn_score], 1),
        (*counts, images),
        (*members, fewest),
    )
