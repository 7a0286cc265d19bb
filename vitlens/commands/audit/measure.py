"""An audit: the chapters of one model, the strongest attack that fits the budget, and the file for JUnit."""

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch

from vitlens.analysis.answers.classes import label_columns
from vitlens.analysis.answers.evaluate import evaluate
from vitlens.analysis.failures.covariates import Subject
from vitlens.attacks.algorithm import Setting, algorithm_of
from vitlens.attacks.registry import ATTACKS
from vitlens.attribution.explain import explain, methods_for, preferred_method
from vitlens.attribution.registry import ATTRIBUTIONS
from vitlens.commands.attack.options import AttackOptions
from vitlens.commands.audit.candidates import (
    CANDIDATES,
    FEWEST,
    budget_row,
    chosen,
    considered,
    pass_seconds,
    robust_shares,
)
from vitlens.commands.audit.options import AuditOptions
from vitlens.commands.audit.record import CORRUPTIONS_PART, AuditRecord, BudgetRow, CandidateRow, Part, UntestedRow
from vitlens.commands.evaluate.options import EvaluateOptions
from vitlens.commands.explain.options import ExplainOptions
from vitlens.commands.registry import COMMANDS
from vitlens.commands.run.chapter_runs import ChapterCache, ChapterImages, ChapterRunner, as_typed, cache_folder
from vitlens.commands.run.chapters import ChapterRow
from vitlens.commands.run.folder import RunFolder, settings
from vitlens.commands.run.load import load_models, load_split
from vitlens.commands.run.options import RunOptions
from vitlens.commands.run.publish import publish, read, read_folder
from vitlens.commands.run.requirements import outcomes, requirements_of
from vitlens.commands.run.resume import content_digest
from vitlens.commands.shared.failures_measure import failure_fields
from vitlens.commands.stats.options import StatsOptions
from vitlens.data.split import Split
from vitlens.errors import DataError, InputError, OutputError, UnsupportedError
from vitlens.files import read_run, write_bytes
from vitlens.models.model import Model
from vitlens.models.naming import ModelName, parse_models, require_rule
from vitlens.report.junit import junit

__all__ = ["measure"]

MAPPED: Final = 200  # images with maps for the question why the model fails
EXPLAINED: Final = 50  # images on which the methods are checked
NO_LABELS: Final = "it needs labelled images"


class AuditChapters(ChapterRunner):
    """Runs the chapters of an audit of one model; untested: those that could not be run.

    images: those of the split. To be run in the order of the methods, as the attack has the time that the others leave.
    """

    def __init__(
        self, path: Path, name: ModelName, model: Model, split: Split, images: ChapterImages, options: AuditOptions
    ) -> None:
        names = {as_typed(name): content_digest(model)}
        cache = ChapterCache(cache_folder(), names, images.digest) if options.cache else None
        super().__init__(path, options.run, cache)
        self.model, self.split, self.images, self.options = model, split, images, options
        self.name, self.alias = as_typed(name), name.alias
        self.untested: list[UntestedRow] = []

    @property
    def _common(self) -> dict[str, Any]:
        return {**self.images.options, "model_options": self.options.model_options}

    def analyse(self) -> None:
        """Accuracy, explanation, attention, and FGSM and corruptions on all images."""
        if self.images.predicted:
            self.untested.append(UntestedRow("evaluate", NO_LABELS))
        else:
            options = EvaluateOptions((self.name,), self.images.data, self.options.model_options, self.run_options)
            self.run("evaluate", self.alias, options)
        self._explain()
        self._stats()
        self._corruptions()

    def attack(self, *, others: float) -> tuple[BudgetRow, tuple[CandidateRow, ...]]:
        """Run the strongest attack that fits; returns the budget and the attacks that were considered.

        others: seconds that were spent outside the chapters.
        """
        quick = read(read_run(self.path / self.done[-1].folder))
        (timed,) = quick.attacks
        seconds, shares = pass_seconds(timed), robust_shares(quick.curves)
        budget = budget_row(self.options.budget, others + sum(row.seconds for row in self.done), seconds)
        rows = considered(
            CANDIDATES,
            images=len(self.split),
            seconds=60 * budget.left,
            one_pass=seconds,
            shares=shares,
            defined=self._is_defined,
        )
        candidate = chosen(rows)
        if candidate.attacks != FEWEST:
            self._attack(candidate)
        return budget, rows

    def _explain(self) -> None:
        methods = tuple(name for name in methods_for(self.model) if ATTRIBUTIONS[name].studied)
        if not methods:
            self._leave_out("explain", f"none of the methods that are checked is defined for {self.alias}")
            return
        options = ExplainOptions(
            (self.name,), method=methods, verify=True, counterfactuals=False, composites=("none",),
            other_substrates=("none",), stability=False, run=self.at_most(EXPLAINED), **self._common,
        )  # fmt: skip
        self.run("explain", self.alias, options)

    def _stats(self) -> None:
        reason = self.model.supports("stats")
        if reason is not None:
            self._leave_out("stats", reason.partition("; ")[0])
            return
        self.run("stats", self.alias, StatsOptions((self.name,), run=self.run_options, **self._common))

    def _corruptions(self) -> None:
        self.run("attack", self.alias, self._attack_options(FEWEST), part=CORRUPTIONS_PART)

    def _attack(self, candidate: CandidateRow) -> ChapterRow:
        attacks = (*FEWEST, *candidate.attacks)  # a single step takes no time, and the self-checks compare with it
        options = replace(
            self._attack_options(attacks), epsilons=(0.0, *candidate.epsilons), restarts=candidate.restarts,
            corruptions=False, run=replace(self.run_options, limit=candidate.images),
        )  # fmt: skip
        return self.run("attack", self.alias, options)

    def _attack_options(self, attacks: Sequence[str]) -> AttackOptions:
        return AttackOptions(
            (self.name,), attacks=tuple(attacks), inside=False, predicted=self.images.predicted, run=self.run_options,
            **self._common,
        )  # fmt: skip

    def _is_defined(self, attack: str) -> bool:
        setting = Setting(1, len(self.model.classes), self.split.size)
        try:
            algorithm_of(ATTACKS[attack], setting)
        except UnsupportedError:
            return False
        return True

    def _leave_out(self, part: Part, reason: str) -> None:
        self.untested.append(UntestedRow(part, reason))


def measure(options: AuditOptions) -> Path:
    """Run all chapters, write the report and, if asked, the JUnit file; returns the report's path.

    Raises InputError (or one of its kind) before anything is written for images that cannot be audited.
    """
    run = options.run
    requirements = requirements_of(run.at_least, run.at_most)
    _require_writable(options.junit)
    require_rule((options.model,))
    (name,) = parse_models((options.model,))
    (model,) = load_models((name,), command="audit", model_options=options.model_options, options=run)
    split = load_split(model, options=run, data=options.data, images=options.images)
    if not len(split):
        raise DataError(f"expected images to audit {model.alias} on, found none in {split.name}; see vitlens data")
    predicted = options.predicted or split.labels is None
    if not predicted:
        label_columns(model.classes, split)  # classes that the model does not know are refused before any chapter
    data = None if options.images else options.data or "digits"
    images = ChapterImages(data, options.images, predicted)
    config = settings(options, run, models=(model,), split=split)
    title = f"Audit of {model.alias} on {split.title or split.name}"
    with RunFolder.opened("audit", run, config, name_parts=(model.alias, split.name), title=title) as folder:
        chapters = AuditChapters(folder.path, name, model, split, images, options)
        chapters.analyse()
        start = time.monotonic()
        why: dict[str, Any] = {} if predicted else failure_fields([_mapped(model, split, run)], quiet=run.quiet)
        budget, considered = chapters.attack(others=time.monotonic() - start)
        folder.keep(
            AuditRecord(
                folder=folder.path, chapters=tuple(chapters.done), attacks_considered=considered, budget=(budget,),
                **why,
                untested=tuple(chapters.untested),
            )
        )  # fmt: skip
        path = publish(folder)
    if options.junit is not None:
        record = read_folder(folder.path)
        document, judged = COMMANDS["audit"].report(record), tuple(outcomes(requirements, record))
        write_bytes(options.junit, junit(document, judged, suite="vitlens audit", seconds=folder.seconds))
    return path


def _mapped(model: Model, split: Split, run: RunOptions) -> Subject:
    """The model, its predictions, and maps of some images, half of them misclassified where there are so many."""
    evaluation = evaluate(model, split, batch_size=run.batch_size, precision=run.precision)
    draw = torch.randperm(len(split), generator=torch.Generator().manual_seed(run.seed))
    wrong = [int(at) for at in draw if not evaluation.correct[at]][: MAPPED // 2]
    right = [int(at) for at in draw if evaluation.correct[at]][: MAPPED - len(wrong)]
    indices = torch.tensor([*wrong, *right], dtype=torch.long)
    method = preferred_method(model)
    maps = explain(model, split.pick(indices), method=method, batch_size=run.batch_size, seed=run.seed)
    return Subject(
        model, split, evaluation, maps.detach().float().cpu(), indices,
        precision=run.precision, batch_size=run.batch_size, seed=run.seed,
    )  # fmt: skip


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
