"""`vitlens.choose_method`: the attribution method for a model and images, by two quick checks.

The method is chosen on one half of the images (the selection half) and judged on the other (the
report half), by two checks:

- insertion minus deletion, the area between two curves of the target's logit;
- localisation (ROC-AUC, choice_localisation.py): on the objects if the images have masks, else on
  2 x 2 mosaics of images that the model classifies confidently. A mosaic has images of one half,
  and an image in several mosaics counts as one value.

A method's score (choice_scores.py) is the mean over the checks of its mean value, each divided by a
standard deviation: that of the methods' means in the check, baselines included, on the selection
half. The report half uses the same divisors. So a score is linear in the values, and its paired
differences have intervals.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, Literal

import torch
from jaxtyping import Int
from torch import Tensor

from vitlens.analysis.evaluation.evaluate import predicted_logits
from vitlens.analysis.faithfulness.checks import ENOUGH, ChoiceMargin, ChoiceScores
from vitlens.analysis.faithfulness.defaults import BASELINES
from vitlens.analysis.faithfulness.league import compute_maps
from vitlens.analysis.faithfulness.maps import Explain
from vitlens.analysis.faithfulness.removal import faithfulness, resize_to_model
from vitlens.attribution.choice_localisation import (
    KIND,
    Values,
    localise_on_mosaics,
    localise_on_objects,
)
from vitlens.attribution.choice_scores import (
    DRAWS,
    SCORE_ROW,
    Indices,
    halves,
    score_half,
    weigh_checks,
)
from vitlens.attribution.explain import explain, methods_for, preferred_method, require_method
from vitlens.attribution.refinement import Refinement, applies, require_refinement
from vitlens.attribution.registry import ATTRIBUTIONS
from vitlens.classes import class_targets
from vitlens.data.split import Split, as_split
from vitlens.errors import InputError
from vitlens.inputs import takes_splits
from vitlens.models.model import Model
from vitlens.names import DEFAULT_SEED, Substrate
from vitlens.pixels import AnyImages, Targets
from vitlens.shapes import Labels
from vitlens.summary import Line, Summary
from vitlens.uncertainty import Estimate, Side, beyond

MOST: Final = 6  # candidates, if the caller names none
IMAGES: Final = 40  # of both halves together, at most
STEPS: Final = 6  # of the removal curves, which take most of the time
# the replacement of removed patches: not the blur by which `best` chooses its map
REPLACED: Final[Substrate] = "mean"
# candidates with which the chosen method is always compared, as with the runner-up
REFERENCES: Final = ("relevance", "gradcam")
# names of the checks and of the combined score
FAITHFULNESS = "insertion_minus_deletion"
LOCALISATION = "localisation"
SCORE: Final = "score"
# if no value of two methods differs by more, their maps are the same up to rounding
_ROUNDING: Final = 1e-4
_CONFIRMATIONS: Final[Mapping[Side, Literal["confirmed", "not confirmed", "contradicted"]]] = {
    Side.ABOVE: "confirmed",
    Side.BELOW: "contradicted",
    Side.UNDECIDED: "not confirmed",
}


@dataclass(frozen=True, repr=False)
class MethodChoice(Summary):
    """The method chosen for a model and images.

    method: the name of the chosen method.
    candidates: the methods compared.
    reason: why the method is the default and not chosen by evidence, "" if it is chosen.
    checks: the checks that decided.
    left_out: checks that could not judge, with the reason.
    localised: where localisation was scored, "objects" (masks) or a kind of composites.
    certainty: share of the bootstrap draws of the selection half in which the method wins, None
        without evidence.
    runner_up: the second on the selection half among the methods with other maps.
    alike: candidates with the same maps as the chosen method up to rounding.
    confirmation: the verdict of the report half on the lead over the runner-up (paired 95 %
        interval of the scores), None without a runner-up.
    scores: the scores of every candidate and baseline on both halves, the best of the selection
        half first.
    margins: the chosen method minus other methods, on the report half.
    selection, report: indices of the images in each half.
    seed: the seed by which the halves were drawn.
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
    batch_size: int | None = None,
    seed: int = DEFAULT_SEED,
) -> MethodChoice:
    """Choose the attribution method with the best maps on these images.

    It is chosen on one half of them, and judged on the other half.

    images: a Split, or any form that `vitlens.images` takes; at most 40 are used, drawn by the
        seed, and with fewer than 20 (or groups) the result is the model's default method, with the
        reason.
    targets: "predicted", "label", a class, or class indices (n,).
    methods: candidates (None: the first six of the registry's that the model supports).
    refinement: as for `vitlens.explain`.

    Raises UnsupportedError for a model without a classifier, and for a method that it does not
    have, InputError for fewer than two candidates.

    >>> import vitlens
    >>> vit, digits = vitlens.load("vit-digits"), vitlens.load_data("digits", limit=20)
    >>> choice = vitlens.choose_method(vit, digits, methods=["relevance", "gradcam"])
    >>> choice.method, choice.runner_up, len(choice.selection), len(choice.report)
    ('relevance', 'gradcam', 10, 10)
    """
    split = as_split(images)
    names = candidates_for(model, methods, refinement=refinement)
    classes = class_targets(targets, model, len(split), split=split)
    settings: dict[str, Any] = {
        "refinement": refinement,
        "batch_size": batch_size,
        "seed": seed,
    }

    def explain_by(name: str) -> Explain:
        # an Explain has its three arguments by position
        return lambda model, images, targets: explain(
            model, images, targets=targets, method=name, **settings
        )

    functions = {name: explain_by(name) for name in names}
    return chosen_by_evidence(model, split, classes, functions, batch_size=batch_size, seed=seed)


def candidates_for(
    model: Model,
    methods: Sequence[str] | None = None,
    *,
    refinement: Refinement | None = None,
) -> tuple[str, ...]:
    """Return the methods to choose from.

    methods: their names (None: the first MOST of the registry's candidates that the model and the
        refinement support).

    Raises the same errors as `choose_method`.
    """
    model.require_classifier()
    refinement = refinement or Refinement()
    for name in methods or ():
        require_method(model, name)
        require_refinement(model, name, refinement)
    if not methods:
        ranks = {name: entry.candidate for name, entry in ATTRIBUTIONS.items() if entry.candidate}
        supported = ranks.keys() & methods_for(model)
        ranked = sorted(supported, key=lambda name: ranks[name])
        methods = [name for name in ranked if applies(model, name, refinement)][:MOST]
    names = tuple(dict.fromkeys(methods))  # a name that was given twice counts once
    if len(names) < 2:
        raise InputError(
            f"expected at least 2 candidates to choose from for {model.alias}, found "
            f"{', '.join(names) or 'none'}; name two methods or more, or leave out the choice"
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
    """Return the choice between methods.

    targets: class indices (n,), None for the predictions.
    functions: the functions of the methods by name, each of (model, images, targets).
    advance: called with the number of methods just done, in each of the two checks.
    """
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randperm(len(split), generator=generator)[:IMAGES].sort().values
    used = split.pick(drawn)
    # without groups, each image is a group
    groups = torch.arange(len(used)) if used.groups is None else used.groups.cpu()
    reason = _too_few(used, groups)
    if reason:
        method = preferred_method(model)
        if method not in functions:
            method = next(iter(functions))
        return MethodChoice(method, tuple(functions), reason, seed=seed)
    logits = predicted_logits(model, used, batch_size=batch_size).float().cpu()
    classes = logits.argmax(-1) if targets is None else targets.cpu()[drawn]
    classes = classes.to(model.device)
    (batch,) = used.batches(len(used), device=model.device)  # all images in one batch
    compute_all_maps = partial(compute_maps, model, functions, seed=seed, advance=advance)
    parts = halves(groups, seed=seed)
    selection_part, report_part = parts
    maps = compute_all_maps(batch.images, classes)  # of all candidates, then of BASELINES
    # the first check: on the maps of the images
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
    # the second check: on the same maps, or on maps of mosaics, which are computed for it
    if used.masks is None:
        images = resize_to_model(model, batch.images)
        localisation = localise_on_mosaics(model, images, logits, parts, compute_all_maps, seed)
        localised = KIND
        usable_images = "confidently classified images"
    else:
        localisation = localise_on_objects(maps, used.masks.cpu())
        localised = "objects"
        usable_images = "images with a mask"
    obstacle = localisation.obstacle
    fewest = min(_groups_with_value(localisation.values, groups, part) for part in parts)
    if not obstacle and fewest < ENOUGH:
        obstacle = f"expected at least {ENOUGH} {usable_images} in each half, found {fewest}"
    left_out = {}
    if obstacle:
        left_out[LOCALISATION] = obstacle
    else:
        values[LOCALISATION] = localisation.values
    return replace(
        choose(values, tuple(functions), parts, groups, seed=seed),
        left_out=left_out,
        localised=localised,
        # `choose` numbers the images drawn; these are indices of the split
        selection=tuple(drawn[selection_part].tolist()),
        report=tuple(drawn[report_part].tolist()),
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
    has_value = values[0, part].isfinite()  # the same for all methods
    return len(groups[part[has_value]].unique())


def choose(
    values: Mapping[str, Values],
    candidates: Sequence[str],
    parts: tuple[Indices, Indices],
    groups: Int[Tensor, " images"],
    *,
    seed: int = 0,
) -> MethodChoice:
    """Return the candidate with the highest score on the selection half, judged on the report half.

    values: the values of each check, greater is better, one row per method (candidates, then
        BASELINES), NaN in all rows of an image without a value. A check in which all methods are
        equal decides nothing.
    parts: the selection half and the report half.
    """
    count = len(candidates)
    # axes: checks, methods, images
    table = torch.stack([check_values.double() for check_values in values.values()])
    selection_part, report_part = parts
    weights = weigh_checks(table[:, :, selection_part])
    selection = score_half(table[:, :, selection_part], groups[selection_part], weights, seed)
    report = score_half(table[:, :, report_part], groups[report_part], weights, seed)
    wins = selection.wins(count)

    # a method is the number of its row in the values: candidates first, then baselines
    candidate_scores = selection.means[SCORE_ROW, :count]
    ranking = candidate_scores.argsort(descending=True, stable=True).tolist()
    best, *others = ranking
    baselines = range(count, count + len(BASELINES))
    differences = (table[:, :count] - table[:, [best]]).abs().nan_to_num(0.0)
    has_other_maps = differences.amax((0, 2)) > _ROUNDING  # by candidate
    rivals = [method for method in others if has_other_maps[method]]
    alike = [method for method in others if not has_other_maps[method]]

    names = (*candidates, *BASELINES)
    references = [method for method in rivals if names[method] in REFERENCES]
    checks_and_score = (*values, SCORE)  # the rows of HalfScores: the checks, then the score
    compared = dict.fromkeys([*rivals[:1], *references, *baselines])  # a reference may be second
    margins = list[ChoiceMargin]()
    for other in compared:
        for row, check in enumerate(checks_and_score):
            difference = report.estimate(row, best, minus=other)
            margins.append(ChoiceMargin(against=names[other], check=check, difference=difference))
    scores = list[ChoiceScores]()
    for method in (*ranking, *baselines):
        selection_estimates = {}
        report_estimates = {}
        for row, check in enumerate(checks_and_score):
            selection_estimates[check] = selection.estimate(row, method)
            report_estimates[check] = report.estimate(row, method)
        is_baseline = method in baselines
        scores.append(
            ChoiceScores(
                method=names[method],
                baseline=is_baseline,
                wins=None if is_baseline else wins[method],
                selection=selection_estimates,
                report=report_estimates,
            )
        )
    runner_up = None
    confirmation = None
    if rivals:
        second = rivals[0]
        runner_up = names[second]
        lead = report.estimate(SCORE_ROW, best, minus=second)
        confirmation = _CONFIRMATIONS[beyond(lead, 0.0)]
    return MethodChoice(
        names[best],
        tuple(candidates),
        checks=tuple(values),
        certainty=wins[best],
        runner_up=runner_up,
        alike=tuple(names[method] for method in alike),
        confirmation=confirmation,
        scores=tuple(scores),
        margins=tuple(margins),
        selection=tuple(selection_part.tolist()),
        report=tuple(report_part.tolist()),
        seed=seed,
    )
