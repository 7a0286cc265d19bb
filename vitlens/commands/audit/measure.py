"""An audit: the chapters of one model, the strongest attack that fits the budget, and the file for
JUnit.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from vitlens.analysis.evaluation.evaluate import evaluate, predicted_logits
from vitlens.analysis.failures.covariates import Subject
from vitlens.analysis.failures.disturbances import CORRUPTIONS
from vitlens.analysis.failures.operations import correct_after
from vitlens.analysis.faithfulness.localisation import random_maps
from vitlens.analysis.faithfulness.maps import removal_grid
from vitlens.analysis.faithfulness.removal import faithfulness
from vitlens.analysis.reliance.measure import Plan, measure_reliance
from vitlens.attacks.algorithm import Setting, algorithm_of
from vitlens.attacks.registry import Attack
from vitlens.attribution.explain import explain, methods_for, preferred_method
from vitlens.attribution.registry import ATTRIBUTIONS
from vitlens.classes import label_columns
from vitlens.commands.attack.options import AttackOptions
from vitlens.commands.attack.record import AttackRecord
from vitlens.commands.audit.options import AuditOptions
from vitlens.commands.audit.plan import (
    CANDIDATES,
    CORRUPTED_SHARE,
    COSTLY,
    EXPLAIN_SHARE,
    EXPLAINED,
    FGSM,
    MAPPED_SHARE,
    PASSES_OF_GRADIENT,
    RELIED_SHARE,
    STATS_PASSES,
    STATS_SHARE,
    Budget,
    BusyClock,
    CorruptionCosts,
    MapCosts,
    changed_images,
    consider_candidates,
    corrupted_images,
    fitting_methods,
    mapped_images,
    pass_seconds,
    shares_left,
)
from vitlens.commands.audit.record import (
    CORRUPTIONS_PART,
    AuditRecord,
    BudgetRow,
    CandidateRow,
    Part,
    UntestedRow,
)
from vitlens.commands.evaluate.options import EvaluateOptions
from vitlens.commands.explain.options import ExplainOptions
from vitlens.commands.registry import COMMANDS
from vitlens.commands.run.chapter_runs import (
    ChapterCache,
    ChapterImages,
    ChapterRunner,
    as_typed,
    cache_folder,
)
from vitlens.commands.run.chapters import ChapterRow
from vitlens.commands.run.folder import RunFolder
from vitlens.commands.run.load import ImageRequest
from vitlens.commands.run.options import RunOptions
from vitlens.commands.run.progress import phase
from vitlens.commands.run.publish import publish, read, read_folder
from vitlens.commands.run.requirements import outcomes, requirements_of
from vitlens.commands.run.resume import content_digest
from vitlens.commands.run.run import Run
from vitlens.commands.shared.failures_measure import failure_fields
from vitlens.commands.shared.reliance_measure import plan_of, reliance_fields, viewers_of
from vitlens.commands.stats.options import StatsOptions
from vitlens.data.split import Split
from vitlens.errors import DataError, UnsupportedError
from vitlens.files import require_writable_file, write_bytes
from vitlens.models.model import Model
from vitlens.models.model_names import parse_models
from vitlens.record import read_run
from vitlens.report.claims import FEWEST as FEWEST_JUDGED
from vitlens.report.junit import junit

_TIMED: Final = 2  # images of which a map, or a forward pass, is timed
_FGSM_EPSILONS: Final = AttackOptions(models=("",)).linf  # the default ones; the name is not used


class AuditChapters(ChapterRunner):
    """The chapters of an audit of one model; each method runs one, or leaves it out.

    `measure` calls the methods in the order in which they stand here, because the attack has the
    time that the others leave.

    predicted: whether the model's predictions are the labels.
    image_options: the options of a chapter that name the images.
    untested: the chapters that could not be run, or not whole, with the reason.
    one_pass: seconds of a forward pass of one image; 0 before `evaluate`.
    quick: the record of corruptions and FGSM, None before `corruptions`.
    """

    def __init__(
        self, folder: RunFolder, run: Run[AuditOptions], predicted: bool, clock: BusyClock
    ) -> None:
        options = run.options
        (name,) = parse_models((options.model,))
        data = None
        if not options.images:
            data = options.data or "digits"
        images = ChapterImages(data, options.images, data_dir=run.run_options.data_dir)
        digest_by_model = {as_typed(name): content_digest(run.model)}
        cache = None
        if options.cache:
            cache = ChapterCache(cache_folder(), digest_by_model, images.digest)
        super().__init__(folder.path, run.run_options, cache, on_done=self._keep)
        self.folder = folder
        self.audit_run = run
        self.model = run.model
        self.split = run.split
        self.models = (as_typed(name),)
        self.alias = name.alias
        self.predicted = predicted
        self.image_options: dict[str, Any] = images.options
        self.model_options = options.model_options
        self.untested: list[UntestedRow] = []
        self.budget = Budget(options.budget, clock)
        self.one_pass = 0.0
        self.quick: AttackRecord | None = None

    def run(self, word: str, alias: str, options: Any, *, part: str = "") -> ChapterRow:
        """Run one chapter; if it is cached, count the time that it took when it was made."""
        row = super().run(word, alias, options, part=part)
        if row.cached:
            self.budget.cached += row.seconds
        return row

    def _keep(self, done: Sequence[ChapterRow]) -> None:
        """Keep what is done, for the report of an audit that is stopped."""
        self.folder.keep_tables(AuditRecord(chapters=tuple(done), untested=tuple(self.untested)))

    def _leave_out(self, part: Part, reason: str) -> None:
        self.untested.append(UntestedRow(part, reason))

    def evaluate(self) -> None:
        """Measure accuracy and calibration, and time a forward pass."""
        if self.predicted:
            self._leave_out("evaluate", "it needs labelled images")
        else:
            options = EvaluateOptions(
                self.models,
                self.image_options["data"],
                model_options=self.model_options,
                run=self.run_options,
            )
            self.run("evaluate", self.alias, options)
        self.one_pass = pass_of_an_image(self.model, self.split)

    def stats(self) -> None:
        """Describe the attention of as many images as fit, without names of heads, which no verdict
        uses.
        """
        reason = self.model.supports("stats")
        if reason is not None:
            self._leave_out("stats", reason.partition("; ")[0])  # without what to do about it
            return
        count = len(self.split)
        least = STATS_PASSES * self.one_pass * min(FEWEST_JUDGED, count)
        seconds = self.budget.share(STATS_SHARE)
        if seconds <= least:
            self._leave_out(
                "stats", self.budget.refusal("statistics of attention", least, STATS_SHARE)
            )
            return
        images = min(count, int(seconds / (STATS_PASSES * self.one_pass)))
        options = StatsOptions(
            *self.models,
            **self.image_options,
            names=False,
            model_options=self.model_options,
            run=self.limited_to(images),
        )
        self.run("stats", self.alias, options)

    def explain(self) -> bool:
        """Explain by as many of the methods that are checked, on as many images, as fit.

        Returns True if any method fits.
        """
        methods = tuple(name for name in methods_for(self.model) if ATTRIBUTIONS[name].studied)
        if not methods:
            self._leave_out(
                "explain", f"none of the methods that are checked is defined for {self.alias}"
            )
            return False
        seconds = self.budget.share(EXPLAIN_SHARE)
        if not seconds:
            self._leave_out(
                "explain", self.budget.refusal("the checks of maps", 0.0, EXPLAIN_SHARE)
            )
            return False
        costs = map_seconds(self.model, self.split, methods, self.one_pass)
        fitting, images = fitting_methods(costs, seconds, len(self.split))
        if not fitting:
            least = min(EXPLAINED[-1], len(self.split))
            cheapest = min(costs.seconds((name,), least) for name in methods)
            checks = f"the checks of one method's maps on {least} images"
            self._leave_out("explain", self.budget.refusal(checks, cheapest, EXPLAIN_SHARE))
            return False
        too_slow = [name for name in methods if name not in fitting]
        if too_slow:
            minutes = f"{self.budget.minutes:g} min"
            self._leave_out(
                "explain", f"the checks of {', '.join(too_slow)} do not fit the budget of {minutes}"
            )
        options = ExplainOptions(
            self.models,
            **self.image_options,
            method=tuple(name for name in methods if name in fitting),
            verify=True,
            counterfactuals=False,
            composites=("none",),
            other_substrates=("none",),
            stability=False,
            model_options=self.model_options,
            run=self.limited_to(images),
        )
        self.run("explain", self.alias, options)
        return True

    def corruptions(self, share: float) -> None:
        """Attack by FGSM and corrupt as many images as fit.

        share: the share of the budget that this may take.
        """
        count = len(self.split)
        seconds = 0.0
        if self.budget.left:
            seconds = corruption_seconds(self.model, self.split)
        costs = CorruptionCosts(seconds, self.one_pass, len(_FGSM_EPSILONS))
        images = corrupted_images(costs, self.budget.share(share), count)
        if not images:
            least = min(FEWEST_JUDGED, count)
            what = f"corruptions and FGSM on {least} images"
            self._leave_out("corruptions", self.budget.refusal(what, costs.seconds(least), share))
            return
        run_options = self.run_options if images == count else self.limited_to(images)
        options = self._attack_options(FGSM, run_options)
        self.quick = self._run_attack(options, part=CORRUPTIONS_PART)

    def reliance(self) -> dict[str, Any]:
        """Measure what the model relies on, on as many images as fit.

        Return fields of the record.
        """
        if self.predicted:
            return {}
        plan = plan_of([self.split], thorough=False, levels=False)
        count = len(self.split)
        images = changed_images(plan.passes, self.one_pass, self.budget.share(RELIED_SHARE), count)
        if images:
            return _reliance(self.audit_run, plan, images)
        least_seconds = min(FEWEST_JUDGED, count) * plan.passes * self.one_pass
        what = "the question what the model relies on"
        self._leave_out("reliance", self.budget.refusal(what, least_seconds, RELIED_SHARE))
        return {}

    def failures(self) -> dict[str, Any]:
        """Ask why the model fails, with maps of as many images as fit.

        Return fields of the record.
        """
        if self.predicted:
            return {}
        count = len(self.split)
        method = preferred_method(self.model)
        map_time = map_of_an_image(self.model, self.split, method, self.one_pass)
        images = mapped_images(map_time, self.one_pass, self.budget.share(MAPPED_SHARE), count)
        if images:
            subject = subject_of(self.audit_run, images)
            return failure_fields([subject], quiet=self.audit_run.run_options.quiet)
        least_seconds = count * self.one_pass + min(FEWEST_JUDGED, count) * map_time
        what = "the question why images are misclassified"
        self._leave_out("failures", self.budget.refusal(what, least_seconds, MAPPED_SHARE))
        return {}

    def attack(self) -> tuple[BudgetRow, tuple[CandidateRow, ...]]:
        """Run the strongest attack that fits what the others leave.

        Return the budget and the candidates.
        """
        budget_row = BudgetRow(
            minutes=self.budget.minutes,
            others=self.budget.spent / 60,
            left=self.budget.left / 60,
            pass_seconds=self.one_pass,
        )
        if self.quick is None:
            return budget_row, ()
        budget_row = replace(budget_row, pass_seconds=pass_seconds(self.quick.attacks[0]))
        candidates = consider_candidates(
            CANDIDATES,
            budget_row,
            images=len(self.split),
            defined=self._is_defined,
            shares=shares_left(self.quick.curves),
            attacked=self.quick.images,
        )
        (chosen,) = [row for row in candidates if row.state == "chosen"]
        if chosen.attacks == FGSM:  # it was run with the corruptions
            return budget_row, candidates
        # FGSM is run again: its one step takes little time, and self-checks compare with it
        attacks = (*FGSM, *chosen.attacks)
        options = self._attack_options(attacks, replace(self.run_options, limit=chosen.images))
        options = replace(
            options,
            epsilons=(0.0, *chosen.epsilons),
            restarts=chosen.restarts,
            corruptions=False,
        )
        self._run_attack(options)
        return budget_row, candidates

    def _attack_options(self, attacks: tuple[str, ...], run: RunOptions) -> AttackOptions:
        return AttackOptions(
            self.models,
            **self.image_options,
            attacks=attacks,
            inside=False,
            predicted=self.predicted,
            model_options=self.model_options,
            run=run,
        )

    def _run_attack(self, options: AttackOptions, *, part: str = "") -> AttackRecord:
        """Run a chapter of attack; return its record."""
        row = self.run("attack", self.alias, options, part=part)
        record: AttackRecord = read(read_run(self.path / row.folder))
        return record

    def _is_defined(self, attack: Attack) -> bool:
        try:
            setting = Setting(steps=1, classes=len(self.model.classes), size=self.split.size)
            algorithm_of(attack, setting)
        except UnsupportedError:
            return False
        return True


def seconds_of(
    function: Callable[[Model, Split], Tensor], model: Model, split: Split, images: int = 1
) -> float:
    """Return the busy seconds of one image in a function of a model and the first images."""
    first_images = split.pick(torch.arange(min(images, len(split))))
    clock = BusyClock()
    function(model, first_images).cpu()  # the copy to the CPU waits for an asynchronous device
    return clock() / len(first_images)


@phase("Timing a forward pass, to fit the budget")
def pass_of_an_image(model: Model, split: Split) -> float:
    """Return the seconds of a forward pass of one image."""
    # the first pass also does what is done once for a model, so it is not counted
    seconds_of(predicted_logits, model, split)
    return seconds_of(predicted_logits, model, split, _TIMED)


@phase("Timing the corruptions, to fit the budget")
def corruption_seconds(model: Model, split: Split) -> float:
    """Return the seconds of one image under all corruptions."""
    changes = []
    for corruption in CORRUPTIONS.values():
        for strength in corruption.levels:
            changes.append((corruption.operation, strength))

    def corrupted(model: Model, images: Split) -> Tensor:
        any_labels = torch.zeros(len(images), dtype=torch.long)
        labelled = replace(images, labels=any_labels, classes=model.classes)
        return correct_after(model, labelled, changes, keys=torch.arange(len(images)))

    return seconds_of(corrupted, model, split)


def map_of_an_image(model: Model, split: Split, method: str, one_pass: float) -> float:
    """Return the seconds of the map of one image, of costly methods by their forward passes."""
    entry = ATTRIBUTIONS[method]
    passes = entry.forwards + PASSES_OF_GRADIENT * entry.backwards
    if passes > COSTLY:
        return passes * one_pass
    return seconds_of(partial(explain, method=method), model, split, _TIMED)


@phase("Timing the maps and their checks, to fit the budget")
def map_seconds(model: Model, split: Split, methods: Sequence[str], one_pass: float) -> MapCosts:
    """Return the seconds of one image in everything that the checks of maps do."""
    costs = {name: map_of_an_image(model, split, name, one_pass) for name in methods}
    preferred = preferred_method(model)
    # False sorts before True: the preferred method comes first, then the fastest
    order = sorted(costs, key=lambda name: (name != preferred, costs[name]))

    def removal(model: Model, images: Split, **changes: Any) -> Tensor:
        (batch,) = images.batches(len(images), device=model.device)
        targets = torch.zeros(len(images), dtype=torch.long, device=model.device)
        maps = [random_maps(len(images), removal_grid(model), seed=0)]
        (plain,) = faithfulness(model, batch.images, targets, maps, **changes)
        (imputed,) = faithfulness(model, batch.images, targets, maps, substrate="imputed")
        return torch.stack([plain.gaps, imputed.gaps])

    # not counted, as in `pass_of_an_image`
    seconds_of(partial(removal, steps=1), model, split)
    removal_seconds = seconds_of(removal, model, split)
    return MapCosts({name: costs[name] for name in order}, removal_seconds, one_pass)


def measure(options: AuditOptions) -> Path:
    """Run all chapters, write the report and, if asked, the JUnit file; returns the report's path.

    Raises InputError (or one of its kind) before anything is written for images that cannot be
    audited.
    """
    clock = BusyClock()
    requirements = requirements_of(options.run.at_least, options.run.at_most)
    if options.junit is not None:
        require_writable_file(options.junit, option="--junit", example="audit.xml")
    run = Run("audit", options, images=ImageRequest(scenes=1))
    model = run.model
    split = run.split
    if not len(split):
        raise DataError(
            f"expected images to audit {model.alias} on, found none in {split.name}; see vitlens "
            "data"
        )
    predicted = options.predicted or split.labels is None
    if not predicted:
        # classes that the model does not know are refused before any chapter
        label_columns(model.classes, split)
    with run.folder("Audit of") as writing:
        folder = writing.folder
        assert folder is not None, "one process alone audits"
        chapters = AuditChapters(folder, run, predicted, clock)
        chapters.evaluate()
        chapters.stats()
        is_explained = chapters.explain()
        corrupted_share = CORRUPTED_SHARE
        if not is_explained:
            corrupted_share += EXPLAIN_SHARE
        chapters.corruptions(corrupted_share)
        reliance = chapters.reliance()
        failures = chapters.failures()
        budget, candidates = chapters.attack()
        budget = replace(budget, total=chapters.budget.spent / 60)
        folder.keep(
            AuditRecord(
                folder=folder.path,
                chapters=tuple(chapters.done),
                attacks_considered=candidates,
                budget=(budget,),
                untested=tuple(chapters.untested),
                **reliance,
                **failures,
            )
        )
        path = publish(folder)
    if options.junit is not None:
        record = read_folder(folder.path)
        document = COMMANDS["audit"].report(record)
        judged = tuple(outcomes(requirements, record))
        write_bytes(
            options.junit, junit(document, judged, suite="vitlens audit", seconds=folder.seconds)
        )
    return path


@phase("What the model relies on")
def _reliance(run: Run[AuditOptions], plan: Plan, images: int) -> dict[str, Any]:
    """Return the tables of the main cues, on a seeded, class-balanced subset of the images."""
    subset = run.split.limit(images, seed=run.run_options.seed)
    viewers = viewers_of([run.model], [subset], run.run_options.precision)
    return reliance_fields(
        measure_reliance(
            viewers, plan, batch_size=run.run_options.batch_size, seed=run.run_options.seed
        )
    )


@phase("Predictions and maps, to ask why images are misclassified")
def subject_of(run: Run[AuditOptions], images: int) -> Subject:
    """Return the model, its predictions, and maps of so many images, drawn at random for unbiased
    accuracies.
    """
    model = run.model
    split = run.split
    seed = run.run_options.seed
    evaluation = evaluate(model, split, **run.passes)
    shuffled = torch.randperm(len(split), generator=torch.Generator().manual_seed(seed))
    indices = shuffled[:images].sort().values
    method = preferred_method(model)
    maps = explain(
        model, split.pick(indices), method=method, batch_size=run.run_options.batch_size, seed=seed
    )
    return Subject(
        model=model,
        split=split,
        evaluation=evaluation,
        maps=maps.detach().float().cpu(),
        indices=indices,
        **run.passes,
        seed=seed,
    )
