"""An audit: the chapters of one model, the strongest attack that fits the budget, and the file for JUnit."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from vitlens.analysis.evaluation.classes import label_columns
from vitlens.analysis.evaluation.evaluate import evaluate, predicted_logits
from vitlens.analysis.failures.covariates import Subject
from vitlens.analysis.failures.disturbances import CORRUPTIONS, SEVERITIES
from vitlens.analysis.faithfulness.checks import DISTURBANCES, STEADY_IMAGES
from vitlens.analysis.faithfulness.defaults import BASELINES
from vitlens.analysis.faithfulness.league import randomised_images
from vitlens.analysis.faithfulness.sanity import PARTS
from vitlens.attacks.algorithm import Setting, algorithm_of
from vitlens.attacks.registry import ATTACKS, Attack
from vitlens.attribution.explain import explain, methods_for, preferred_method
from vitlens.attribution.registry import ATTRIBUTIONS
from vitlens.commands.attack.options import AttackOptions
from vitlens.commands.attack.record import AttackRecord, AttackRow
from vitlens.commands.attack.sweep import CHECKED, SAMPLED, example_attack
from vitlens.commands.audit.options import AuditOptions
from vitlens.commands.audit.record import (
    CORRUPTIONS_PART,
    AuditRecord,
    BudgetRow,
    CandidateRow,
    CandidateState,
    UntestedRow,
)
from vitlens.commands.evaluate.options import EvaluateOptions
from vitlens.commands.explain.options import ExplainOptions
from vitlens.commands.registry import COMMANDS
from vitlens.commands.run.chapter_runs import ChapterCache, ChapterImages, ChapterRunner, as_typed, cache_folder
from vitlens.commands.run.chapters import ChapterRow
from vitlens.commands.run.folder import RunFolder
from vitlens.commands.run.progress import phase
from vitlens.commands.run.publish import publish, read, read_folder
from vitlens.commands.run.requirements import outcomes, requirements_of
from vitlens.commands.run.resume import content_digest
from vitlens.commands.run.run import Run
from vitlens.commands.shared.failures_measure import failure_fields
from vitlens.commands.stats.options import StatsOptions
from vitlens.data.split import Split
from vitlens.errors import DataError, InputError, OutputError, UnsupportedError
from vitlens.files import write_bytes
from vitlens.models.model import Model
from vitlens.models.naming import parse_models
from vitlens.record import read_run
from vitlens.report.claims import FEWEST as FEWEST_JUDGED
from vitlens.report.junit import junit

MAPPED: Final = 200  # images with maps for the question why the model fails
EXPLAINED: Final = (50, 20)  # images on which the methods are checked: if they fit, and in any case
EXPLAIN_SHARE: Final = 0.3  # of the budget, which the maps and their checks may take
CORRUPTED_SHARE: Final = 0.25  # of it, which the corruptions may take
_TIMED: Final = 8  # images of which a map is timed, one where it takes more than _COSTLY passes
_COSTLY: Final = 20
_REMOVALS: Final = 80  # forward passes of an image with patches removed, for each method
KEPT: Final = 0.2  # share of the budget that is kept for the attack, however long the other chapters take
_BACKWARD: Final = 3.0  # forward passes that a forward and a backward pass together take
_RUNS: Final = 8  # runs of an attack on the images of its self-checks, four of them in one with four times the steps

# 1/255 is judged; at 8/255 every undefended model falls, so an attack that does not break it there is too weak
_FULL, _JUDGED = (1.0, 2.0, 4.0, 8.0), (1.0, 8.0)
FEWEST: Final = ("fgsm",)  # run on all images in any case, with the corruptions
CANDIDATES: Final = tuple(  # the strongest first
    CandidateRow(attacks, restarts, epsilons, images, None, "too long")
    for attacks, restarts, epsilons, images in (
        (("auto",), 1, _FULL, 1000),
        (("auto",), 1, _FULL, 200),
        (("auto",), 1, _JUDGED, 100),
        (("auto",), 1, _JUDGED, 50),
        (("apgd-ce", "apgd-dlr"), 1, _FULL, 200),
        (("apgd-ce", "apgd-dlr"), 1, _JUDGED, 100),
        (("apgd-ce", "apgd-dlr"), 1, _JUDGED, 50),
        (("apgd-ce",), 1, _JUDGED, 100),
        (("apgd-ce",), 1, _JUDGED, 50),
        (("pgd",), 3, _JUDGED, 100),
        (("pgd",), 1, _JUDGED, 100),
        (("pgd",), 1, _JUDGED, 50),
    )
)


class AuditChapters(ChapterRunner):
    """Runs the chapters of an audit of one model, in the order of the methods, as the attack has the time that the
    others leave. predicted: whether the model's predictions are the labels; untested: the chapters that could not be
    run, or not whole."""

    def __init__(self, folder: RunFolder, run: Run[AuditOptions], predicted: bool) -> None:
        options = run.options
        (name,) = parse_models((options.model,))
        data = None if options.images else options.data or "digits"
        images = ChapterImages(data, options.images, data_dir=run.run.data_dir)
        cache = ChapterCache(cache_folder(), {as_typed(name): content_digest(run.model)}, images.digest)
        super().__init__(folder.path, run.run, cache if options.cache else None, on_done=self._keep)
        self.folder = folder
        self.model, self.split, self.minutes = run.model, run.split, options.budget
        self.models, self.alias, self.predicted = (as_typed(name),), name.alias, predicted
        self.common: dict[str, Any] = {**images.options, "model_options": options.model_options}
        self.untested: list[UntestedRow] = []
        self.spent = 0.0  # busy seconds of the chapters; of cached ones, the seconds when they were made

    def run(self, word: str, alias: str, options: Any, *, part: str = "") -> ChapterRow:
        """Run one chapter, and count the time that it takes."""
        start = BusyClock()
        row = super().run(word, alias, options, part=part)
        self.spent += row.seconds if row.cached else start.seconds
        return row

    def _keep(self, done: Sequence[ChapterRow]) -> None:
        """Keep what is done, for the report of an audit that is stopped."""
        self.folder.keep_tables(AuditRecord(chapters=tuple(done), untested=tuple(self.untested)))

    def analyse(self) -> None:
        """Accuracy, explanation, attention, and FGSM and corruptions on all images."""
        if self.predicted:
            self.untested.append(UntestedRow("evaluate", "it needs labelled images"))
        else:
            own = {"data": self.common["data"], "model_options": self.common["model_options"]}
            self.run("evaluate", self.alias, EvaluateOptions(self.models, run=self.run_options, **own))
        one_pass = self._explain(60 * EXPLAIN_SHARE * self.minutes)
        reason = self.model.supports("stats")
        if reason is None:
            self.run("stats", self.alias, StatsOptions(*self.models, run=self.run_options, **self.common))
        else:
            self.untested.append(UntestedRow("stats", reason.partition("; ")[0]))
        images = corrupted_images(one_pass, 60 * CORRUPTED_SHARE * self.minutes, len(self.split))
        limited = {} if images == len(self.split) else {"run": self.at_most(images)}
        self.quick = self._attack(CORRUPTIONS_PART, **limited)

    def _explain(self, seconds: float) -> float:
        """Explain by as many of the methods that are checked as take these seconds at most; the seconds of one forward
        pass of an image."""
        methods = tuple(name for name in methods_for(self.model) if ATTRIBUTIONS[name].studied)
        if not methods:
            reason = f"none of the methods that are checked is defined for {self.alias}"
            self.untested.append(UntestedRow("explain", reason))
            return map_seconds(self.model, self.split, ())[1]
        costs, one_pass = map_seconds(self.model, self.split, methods)
        kept, images = fitting_methods(costs, one_pass, seconds, len(self.split))
        left_out = [name for name in methods if name not in kept]
        if left_out:
            reason = f"the checks of {', '.join(left_out)} do not fit the budget"
            self.untested.append(UntestedRow("explain", reason))
        options = ExplainOptions(
            self.models, method=tuple(name for name in methods if name in kept), verify=True, counterfactuals=False,
            composites=("none",), other_substrates=("none",), stability=False, run=self.at_most(images), **self.common,
        )  # fmt: skip
        self.run("explain", self.alias, options)
        return one_pass

    def attack(self, *, others: float) -> tuple[BudgetRow, tuple[CandidateRow, ...]]:
        """Run the strongest attack that fits the budget; returns it and the attacks that were considered.

        others: seconds that were spent outside the chapters.
        """
        spent = (others + self.spent) / 60
        left = max(KEPT * self.minutes, self.minutes - spent)
        budget = BudgetRow(self.minutes, spent, left, pass_seconds(self.quick.attacks[0]))
        shares = {row.epsilon: row.accuracy.value for row in self.quick.curves}
        rows = considered(CANDIDATES, budget, images=len(self.split), defined=self._is_defined, shares=shares)
        (candidate,) = (row for row in rows if row.state == "chosen")
        if candidate.attacks != FEWEST:
            self._attack(
                attacks=(*FEWEST, *candidate.attacks),  # a step takes no time, and the self-checks compare with it
                epsilons=(0.0, *candidate.epsilons), restarts=candidate.restarts, corruptions=False,
                run=replace(self.run_options, limit=candidate.images),
            )  # fmt: skip
        return budget, rows

    def _attack(self, part: str = "", **changes: Any) -> AttackRecord:
        given = {"attacks": FEWEST, "run": self.run_options, **self.common, **changes}
        options = AttackOptions(self.models, inside=False, predicted=self.predicted, **given)
        record: AttackRecord = read(read_run(self.path / self.run("attack", self.alias, options, part=part).folder))
        return record

    def _is_defined(self, attack: Attack) -> bool:
        try:
            algorithm_of(attack, Setting(1, len(self.model.classes), self.split.size))
        except UnsupportedError:
            return False
        return True


@phase("Timing the maps, to fit the budget")
def map_seconds(model: Model, split: Split, methods: Sequence[str]) -> tuple[dict[str, float], float]:
    """Seconds of the map of one image by each method, the preferred one of the model's family first, then the fastest;
    and of one forward pass of one image."""

    def seconds(function: Callable[[Model, Split], Tensor], images: int) -> float:
        few = split.pick(torch.arange(min(images, len(split))))
        start = BusyClock()
        function(model, few).cpu()  # waits for an asynchronous device
        return start.seconds / len(few)

    seconds(predicted_logits, _TIMED)  # what is made once for a model is made before
    costs = {}
    for name in methods:
        passes = ATTRIBUTIONS[name].forwards + _BACKWARD * ATTRIBUTIONS[name].backwards
        costs[name] = seconds(partial(explain, method=name), 1 if passes > _COSTLY else _TIMED)
    first = preferred_method(model)
    return {name: costs[name] for name in sorted(costs, key=lambda n: (n != first, costs[n]))}, seconds(
        predicted_logits, _TIMED
    )


def fitting_methods(
    costs: Mapping[str, float], one_pass: float, seconds: float, images: int
) -> tuple[tuple[str, ...], int]:
    """The first methods of `map_seconds`, as many as fit, and the images on which all their checks take these seconds
    at most; the first method on few images in any case. images: that there are."""

    def takes(names: Sequence[str], n: int) -> float:
        maps = {
            name: n + (PARTS + 2) * min(n, randomised_images(costs[name] / one_pass))
            + len(DISTURBANCES) * min(n, STEADY_IMAGES)
            for name in names
        }  # fmt: skip
        removals = _REMOVALS * n * (len(names) + len(BASELINES))
        return sum(costs[name] * each for name, each in maps.items()) + one_pass * removals

    options = [(tuple(costs)[:count], min(most, images)) for count in range(len(costs), 0, -1) for most in EXPLAINED]
    return next((each for each in options if takes(*each) <= seconds), options[-1])


def corrupted_images(one_pass: float, seconds: float, images: int) -> int:
    """Return on how many images the corruptions take these seconds at most; at least on FEWEST_JUDGED."""
    a_image = one_pass * len(CORRUPTIONS) * len(SEVERITIES)
    fitting = int(seconds / a_image) if a_image else images
    return min(images, max(FEWEST_JUDGED, fitting))


class BusyClock:
    """The time since it was made that this process could use: on a machine that others use, too, its CPU time."""

    def __init__(self) -> None:
        self._wall = time.monotonic()
        self._processor = time.process_time()

    @property
    def seconds(self) -> float:
        """The seconds on the clock, or those of all its threads where these are fewer."""
        return min(time.monotonic() - self._wall, time.process_time() - self._processor)


def pass_seconds(row: AttackRow) -> float:
    """Seconds of one forward pass of one image in an attack that was run; 0 where it attacked nothing.

    row: its forward passes include those whose gradients it took.
    """
    passes = row.forwards + (_BACKWARD - 1) * row.backwards
    return row.seconds / passes if passes else 0.0


def considered(
    candidates: Sequence[CandidateRow],
    budget: BudgetRow,
    *,
    images: int,
    shares: Mapping[float, float],
    defined: Callable[[Attack], bool] = lambda _: True,
) -> tuple[CandidateRow, ...]:
    """All candidates in their order, and FGSM at the end; the first that fits what is left is chosen.

    images: that there are; candidates that differ in more images than these alone are one. shares: as `passes_of`;
    defined: whether the model has enough classes for an attack.
    """
    rows: list[CandidateRow] = []
    later: CandidateState = "too long"  # once one is chosen, all others are weaker
    for candidate in dict.fromkeys(replace(each, images=min(each.images, images)) for each in candidates):
        if not all(defined(member) for name in candidate.attacks for member in ATTACKS[name].parts):
            rows.append(replace(candidate, state="undefined"))
            continue
        takes = budget.pass_seconds * passes_of(candidate, shares)
        first = later == "too long" and takes <= 60 * budget.left
        rows.append(replace(candidate, minutes=takes / 60, state="chosen" if first else later))
        later = "weaker" if first else later
    last: CandidateState = "weaker" if later == "weaker" else "chosen"
    return (*rows, CandidateRow(FEWEST, 1, _FULL, images, 0.0, last))  # it has been run already


def passes_of(candidate: CandidateRow, shares: Mapping[float, float]) -> float:
    """The most forward passes that the attacks, their self-checks and the attack on a sample take.

    An image that is fooled at one epsilon is not attacked at larger ones, and by the later members of an ensemble not
    at this one. shares: epsilon in 1/255 (0: clean) -> the share of the images that a weaker attack leaves correct, so
    that no more are left here.
    """
    total = 0.0
    for name in candidate.attacks:
        checked = 0 if ATTACKS[name].slow else _RUNS * min(CHECKED, candidate.images)  # slow ones have few steps there
        checked += min(SAMPLED, candidate.images) if name == example_attack((*FEWEST, *candidate.attacks)) else 0
        for index, member in enumerate(ATTACKS[name].parts):
            swept = sum(
                shares.get(before if index == 0 else epsilon, shares.get(0.0, 1.0))
                for before, epsilon in zip((0.0, *candidate.epsilons), candidate.epsilons)
            )
            one = member.passes(restarts=candidate.restarts) * (_BACKWARD if member.gradients else 1.0)
            total += (checked + candidate.images * swept) * one
    return total


def measure(options: AuditOptions) -> Path:
    """Run all chapters, write the report and, if asked, the JUnit file; returns the report's path.

    Raises InputError (or one of its kind) before anything is written for images that cannot be audited.
    """
    requirements = requirements_of(options.run.at_least, options.run.at_most)
    _require_writable(options.junit)
    run = Run("audit", options)
    model, split = run.model, run.split
    if not len(split):
        raise DataError(f"expected images to audit {model.alias} on, found none in {split.name}; see vitlens data")
    predicted = options.predicted or split.labels is None
    if not predicted:
        label_columns(model.classes, split)  # classes that the model does not know are refused before any chapter
    with run.folder("Audit of") as writing:
        folder = writing.folder
        assert folder is not None, "one process alone audits"
        chapters = AuditChapters(folder, run, predicted)
        chapters.analyse()
        start = BusyClock()
        why: dict[str, Any] = {} if predicted else failure_fields([_mapped(run)], quiet=run.run.quiet)
        budget, tried = chapters.attack(others=start.seconds)
        folder.keep(
            AuditRecord(
                folder=folder.path, chapters=tuple(chapters.done), attacks_considered=tried, budget=(budget,),
                untested=tuple(chapters.untested), **why,
            )
        )  # fmt: skip
        path = publish(folder)
    if options.junit is not None:
        record = read_folder(folder.path)
        document, judged = COMMANDS["audit"].report(record), tuple(outcomes(requirements, record))
        write_bytes(options.junit, junit(document, judged, suite="vitlens audit", seconds=folder.seconds))
    return path


@phase("Predictions and maps, to ask why images are misclassified")
def _mapped(run: Run[AuditOptions]) -> Subject:
    """Return the model, its predictions, and maps of images drawn at random: accuracies on them are unbiased."""
    model, split, seed = run.model, run.split, run.run.seed
    evaluation = evaluate(model, split, **run.passes)
    draw = torch.randperm(len(split), generator=torch.Generator().manual_seed(seed))
    indices = draw[:MAPPED].sort().values
    method = preferred_method(model)
    maps = explain(model, split.pick(indices), method=method, batch_size=run.run.batch_size, seed=seed)
    return Subject(model, split, evaluation, maps.detach().float().cpu(), indices, **run.passes, seed=seed)


def _require_writable(file: Path | None) -> None:
    """Raise OutputError for a file in a folder that is not there, before anything is measured."""
    if file is None:
        return
    if not str(file).strip() or file.is_dir():
        raise InputError(f"expected a file for --junit, found {str(file)!r}; e.g. --junit audit.xml")
    if not file.parent.is_dir():
        raise OutputError(
            f"expected a folder that is there for --junit, found none at {file.parent}; make it, or choose another"
        )
