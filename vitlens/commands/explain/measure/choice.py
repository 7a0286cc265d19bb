"""The method that `--auto` chooses for a model and its images, and its rows and metrics."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from vitlens.analysis.faithfulness.choice import DRAWS, MethodChoice
from vitlens.analysis.faithfulness.league import Settings
from vitlens.attribution.choice import REPLACED, candidates_for, chosen_by_evidence
from vitlens.attribution.refinement import Refinement
from vitlens.commands.explain.choice_record import (
    CERTAINTY,
    CHOICE,
    CHOICE_MARGINS,
    CHOICE_SCORE,
    CHOICE_SCORES,
    ChoiceMarginRow,
    ChoiceRow,
    ChoiceScoreRow,
)
from vitlens.commands.explain.measure.evidence import EvidenceRows
from vitlens.commands.explain.measure.subject import method_functions
from vitlens.commands.run.folder import RunFolder
from vitlens.commands.run.options import RunOptions
from vitlens.commands.run.progress.bar import progress
from vitlens.data.split import Split
from vitlens.models.model import Model
from vitlens.names import Engine
from vitlens.uncertainty import Estimate


def candidate_methods(
    models: Sequence[Model],
    named: Sequence[tuple[str, ...]] | None,
    *,
    engine: Engine,
    refinement: Refinement,
) -> list[tuple[str, ...]]:
    """The candidates of each model. named: those of --method that it has, None for the registry's. Raises InputError
    for fewer than two, UnsupportedError for a model without a classifier."""
    own: Sequence[tuple[str, ...] | None] = named or [None] * len(models)
    return [candidates_for(model, names, engine=engine, refinement=refinement) for model, names in zip(models, own)]


def chosen_method(
    folder: RunFolder,
    model: Model,
    split: Split,
    targets: Tensor | None,
    candidates: Sequence[str],
    *,
    engine: Engine,
    refinement: Refinement,
    options: RunOptions,
) -> tuple[str, EvidenceRows]:
    """Choose the method, and write the metrics; returns it with the rows."""
    settings = Settings(seed=options.seed, batch_size=options.batch_size)
    functions = method_functions(candidates, settings, engine, refinement)
    total = len(candidates) * (1 if split.masks is not None else 3)  # maps of the images, and of each half's mosaics
    with progress(f"Choosing a method for {model.alias}", total, unit="methods", quiet=options.quiet) as advance:
        choice = chosen_by_evidence(
            model,
            split,
            targets,
            functions,
            batch_size=options.batch_size,
            seed=options.seed,
            advance=advance,
        )
    _write(folder, model.alias, choice)
    return choice.method, _rows(model.alias, choice)


def _write(folder: RunFolder, alias: str, choice: MethodChoice) -> None:
    if choice.certainty is not None:
        folder.metric(CERTAINTY(model=alias), Estimate(choice.certainty, n=len(choice.selection)))
    for scored in choice.scores:
        for half, known in (("selection", scored.selection), ("report", scored.report)):
            for check, estimate in known.items():
                folder.metric(CHOICE_SCORE(model=alias, half=half, check=check, method=scored.method), estimate)


def _rows(alias: str, choice: MethodChoice) -> EvidenceRows:
    row = ChoiceRow(
        model=alias,
        method=choice.method,
        reason=choice.reason,
        candidates=choice.candidates,
        checks=choice.checks,
        left_out=choice.left_out,
        localised=choice.localised,
        certainty=choice.certainty,
        draws=DRAWS,
        runner_up=choice.runner_up,
        alike=choice.alike,
        confirmation=choice.confirmation,
        selection=len(choice.selection),
        report=len(choice.report),
        seed=choice.seed,
        substrate=REPLACED,
    )
    scores = [
        ChoiceScoreRow(alias, each.method, each.baseline, _values(each.selection), _values(each.report), each.wins)
        for each in choice.scores
    ]
    margins = [ChoiceMarginRow(alias, each.against, each.check, each.difference) for each in choice.margins]
    return {CHOICE: [row], CHOICE_SCORES: scores, CHOICE_MARGINS: margins}


def _values(estimates: Mapping[str, Estimate]) -> dict[str, float]:
    return {check: round(estimate.value, 6) for check, estimate in estimates.items()}
