"""Attribution maps of images by several methods, of one model or several, and the checks of the methods."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import torch

from vitlens.analysis.answers.evaluate import answers
from vitlens.analysis.faithfulness.league import Settings
from vitlens.analysis.faithfulness.masking import require_substrate
from vitlens.attribution.choice import IMAGES as CHOICE_IMAGES
from vitlens.attribution.refinement import Refinement
from vitlens.attribution.registry import ATTRIBUTIONS
from vitlens.commands.explain.choice_record import CHOICES
from vitlens.commands.explain.evidence_record import EVIDENCE
from vitlens.commands.explain.measure.checks import check_methods
from vitlens.commands.explain.measure.choice import chosen_method
from vitlens.commands.explain.measure.composites import composite_names, composite_rows
from vitlens.commands.explain.measure.evidence import EvidenceRows, evidence_rows
from vitlens.commands.explain.measure.maps import attribution_maps, image_rows, method_row, precision, write_maps
from vitlens.commands.explain.measure.methods import chosen_methods, methods_of, refinement_of
from vitlens.commands.explain.measure.subject import subject
from vitlens.commands.explain.options import NONE, ExplainOptions
from vitlens.commands.explain.record import (
    AGREEMENTS,
    IMAGES,
    LEAGUE,
    METHODS,
    SETTINGS,
    ExplainImageRow,
    LeagueRow,
    LeagueSettingsRow,
    MethodAgreementRow,
    MethodRow,
)
from vitlens.commands.run.describe import settings
from vitlens.commands.run.folder import RunFolder
from vitlens.commands.run.load import load_models, load_splits
from vitlens.commands.run.progress.bar import Advance, progress
from vitlens.commands.run.publish import publish
from vitlens.commands.run.targets import chosen_targets
from vitlens.commands.shared.explorer import EXPLORER, ExplorerRow
from vitlens.commands.shared.explorer_measure import explorer_row
from vitlens.commands.shared.maps.on_object import ON_OBJECT, OnObjectRow
from vitlens.commands.shared.sheets import DRAWN, EACH, print_left_out
from vitlens.data.split import Split
from vitlens.models.model import Model
from vitlens.shapes import Labels

__all__ = ["chosen_methods", "measure", "measured"]

_BACKWARD: Final = 3  # forward passes that take as long as one forward and backward pass, about


def measure(options: ExplainOptions) -> Path:
    """Explain images with every chosen method and write the report; returns the report's path.

    Raises InputError (or one of its kind) before anything is written.
    """
    run = options.run
    models = load_models(options.models, command="explain", model_options=options.model_options, options=run)
    for model in models if options.verify else ():
        model.require_classifier()
    methods = methods_of(options, models)
    for model in models if options.verify else ():
        require_substrate(model, options.substrate)
    limit = None if options.images or options.verify else CHOICE_IMAGES if options.auto else EACH
    splits = load_splits(models, options=run, data=options.data, images=options.images, limit=limit, repeat=True)
    return measured(options, models, [split.starting_with(options.show) for split in splits], methods)


def measured(
    options: ExplainOptions, models: Sequence[Model], splits: Sequence[Split], methods: Sequence[tuple[str, ...]]
) -> Path:
    """Explain images that are loaded already, a split and the methods for each model; returns the report's path."""
    run = options.run
    works = [
        _Work(model, split, chosen_targets(options.target, model, split), names)
        for model, split, names in zip(models, splits, methods)
    ]
    aliases, split = [model.alias for model in models], splits[0]
    with RunFolder.create(
        "explain",
        name_parts=(*aliases, split.name),
        title=f"{' and '.join(aliases)} explained on {split.title or split.name}",
        out=run.out,
        overwrite=run.overwrite,
        config=settings(options, run, models=models, split=split),
        formats=run.formats,
    ) as folder:
        drawn = min(DRAWN if options.images else EACH, len(split))
        print_left_out(drawn, len(split), quiet=run.quiet, more="maps are in arrays/")
        rows = _Rows()
        for work in works:
            own = _chosen(folder, work, rows, options) if options.auto else work
            _explain(folder, own, rows, options, drawn)
        folder.write(METHODS, rows.methods)
        folder.write(IMAGES, rows.images)
        folder.write(LEAGUE, rows.league)
        folder.write(AGREEMENTS, rows.agreements)
        folder.write(SETTINGS, rows.settings)
        folder.write(ON_OBJECT, rows.on_object)
        for table in (*EVIDENCE.tables, *CHOICES.tables):
            folder.write(table, rows.evidence.get(table, []))
        folder.write(EXPLORER, _explorer_rows(folder, works, drawn))
        return publish(folder)


def _explorer_rows(folder: RunFolder, works: "Sequence[_Work]", drawn: int) -> list[ExplorerRow]:
    """The explorer of the first model that has one, and why those before it have none."""
    rows: list[ExplorerRow] = []
    for work in works:
        (shown,) = work.split.pick(torch.arange(drawn)).batches(drawn, device=work.model.device)
        rows.append(explorer_row(folder, work.model, shown.images))
        if not rows[-1].reason:
            break
    return rows


@dataclass(frozen=True)
class _Work:
    """A model, its images, the target class of each (None: the predicted one), and its methods."""

    model: Model
    split: Split
    targets: Labels | None
    methods: tuple[str, ...]


@dataclass(frozen=True)
class _Rows:
    """The rows of all models, table by table."""

    methods: list[MethodRow] = field(default_factory=list)
    images: list[ExplainImageRow] = field(default_factory=list)
    league: list[LeagueRow] = field(default_factory=list)
    agreements: list[MethodAgreementRow] = field(default_factory=list)
    settings: list[LeagueSettingsRow] = field(default_factory=list)
    on_object: list[OnObjectRow] = field(default_factory=list)
    evidence: EvidenceRows = field(default_factory=dict)

    def add(self, rows: EvidenceRows) -> None:
        """Add rows of evidence to their tables."""
        for table, own in rows.items():
            self.evidence.setdefault(table, []).extend(own)


def _chosen(folder: RunFolder, work: _Work, rows: _Rows, options: ExplainOptions) -> _Work:
    """The same with the one method that is chosen among its candidates; adds the rows of the choice."""
    method, own = chosen_method(
        folder,
        work.model,
        work.split,
        work.targets,
        work.methods,
        engine=options.engine,
        refinement=refinement_of(options.refine),
        options=options.run,
    )
    rows.add(own)
    return replace(work, methods=(method,))


def _passes(method: str, refinement: Refinement) -> int:
    """The map of one image in forward passes of about the same time, the maps that it is multiplied by included."""
    entries = [ATTRIBUTIONS[name] for name in (method, refinement.times) if name is not None]
    once = sum(entry.forwards + _BACKWARD * entry.backwards for entry in entries)
    return max(1, round(refinement.views * once))


def _scaled(advance: Advance, cost: int) -> Advance:
    return lambda images: advance(images * cost)


def _explain(folder: RunFolder, work: _Work, rows: _Rows, options: ExplainOptions, drawn: int) -> None:
    """Explain one model's images, write its metrics and arrays, and add its rows. drawn: images in figures."""
    model, split, run = work.model, work.split, options.run
    refinement = refinement_of(options.refine)
    logits = answers(model, split, batch_size=run.batch_size, precision=precision(run))
    classes = work.targets
    if classes is None and model.has_classifier:
        classes = logits.argmax(-1)
    costs = {name: _passes(name, refinement) for name in work.methods}
    total = len(split) * sum(costs.values())  # images would be no measure of time: a map takes 1 pass or 500
    with progress(f"Explaining {model.alias}", total, unit="passes", quiet=run.quiet) as advance:
        maps = [
            attribution_maps(
                model, split, classes, name, engine=options.engine, refinement=refinement, options=run,
                advance=_scaled(advance, cost),
            )
            for name, cost in costs.items()
        ]  # fmt: skip
    write_maps(folder, model, split, maps, drawn=drawn)
    rows.methods.extend(method_row(model, attribution, options.engine, refinement) for attribution in maps)
    rows.images.extend(image_rows(model, split, logits, classes))
    if not options.verify:
        return
    checked = subject(
        model,
        split,
        classes,
        methods=work.methods,
        settings=Settings(
            substrate=options.substrate,
            counterfactuals=options.counterfactuals,
            seed=run.seed,
            batch_size=run.batch_size,
        ),
        engine=options.engine,
        refinement=refinement,
    )
    made = {attribution.method: (attribution.maps, attribution.seconds) for attribution in maps}
    found = check_methods(folder, checked, made=made, options=run)
    rows.league.extend(found.league)
    rows.agreements.extend(found.agreements)
    rows.settings.append(found.settings)
    rows.on_object.extend(found.on_object)
    rows.add(
        evidence_rows(
            folder,
            checked,
            found.results,
            substrates=tuple(name for name in options.other_substrates if name != NONE),
            steadiness=options.stability,
            options=run,
        )
    )
    kinds = composite_names(options.composites, has_masks=split.masks is not None)
    rows.add(composite_rows(folder, checked, kinds=kinds, count=options.composite_count, options=run))
