"""Attribution maps of images by several methods, of one model or several, and the checks of the methods."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from vitlens.analysis.answers.evaluate import answers
from vitlens.analysis.attention.affinity import require_affinity
from vitlens.analysis.faithfulness.league import Settings
from vitlens.analysis.faithfulness.masking import require_substrate
from vitlens.attribution.explain import methods_for, require_method
from vitlens.attribution.refinement import Refinement, require_refinement
from vitlens.attribution.registry import ATTRIBUTIONS, default_methods
from vitlens.commands.explain.evidence_record import EVIDENCE
from vitlens.commands.explain.measure.checks import check_methods
from vitlens.commands.explain.measure.composites import composite_names, composite_rows
from vitlens.commands.explain.measure.evidence import EvidenceRows, evidence_rows
from vitlens.commands.explain.measure.maps import attribution_maps, image_rows, method_row, precision, write_maps
from vitlens.commands.explain.measure.subject import subject
from vitlens.commands.explain.options import ALL, NONE, ExplainOptions, RefineOptions
from vitlens.commands.explain.parts import composite_maps, explain_parts
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
from vitlens.commands.scaffold.describe import settings
from vitlens.commands.scaffold.expected import print_expected
from vitlens.commands.scaffold.explorer.measure import explorer_row
from vitlens.commands.scaffold.explorer.record import EXPLORER, ExplorerRow
from vitlens.commands.scaffold.folder import RunFolder
from vitlens.commands.scaffold.load import load_models, load_splits
from vitlens.commands.scaffold.progress.bar import progress
from vitlens.commands.scaffold.publish import publish
from vitlens.commands.scaffold.sheets import DRAWN, EACH, print_left_out
from vitlens.commands.scaffold.targets import chosen_targets
from vitlens.data.split import Split
from vitlens.errors import InputError, UnknownNameError
from vitlens.models.model import Model
from vitlens.names import Engine
from vitlens.shapes import Labels

__all__ = ["chosen_methods", "measure", "measured"]


def measure(options: ExplainOptions) -> Path:
    """Explain images with every chosen method and write the report; returns the report's path.

    Raises InputError (or one of its kind) before anything is written.
    """
    run = options.run
    models = load_models(options.models, command="explain", model_options=options.model_options, options=run)
    for model in models if options.verify else ():
        model.require_classifier()
    methods = chosen_methods(
        models,
        (ALL,) if options.verify and not options.method else options.method,
        engine=options.engine,
        refinement=_refinement(options.refine),
    )
    for model in models if options.verify else ():
        require_substrate(model, options.substrate)
    limit = None if options.images or options.verify else EACH
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
    _print_expected(works, options)
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
            _explain(folder, work, rows, options, drawn)
        folder.write(METHODS, rows.methods)
        folder.write(IMAGES, rows.images)
        folder.write(LEAGUE, rows.league)
        folder.write(AGREEMENTS, rows.agreements)
        folder.write(SETTINGS, rows.settings)
        for table in EVIDENCE.tables:
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


def _refinement(options: RefineOptions) -> Refinement:
    times = None if options.times == NONE else options.times
    return Refinement(options.refine, options.layers, options.steps, times, options.views, options.upsample)


def chosen_methods(
    models: Sequence[Model],
    method: Sequence[str],
    *,
    engine: Engine = "vitlens",
    refinement: Refinement | None = None,
) -> list[tuple[str, ...]]:
    """The methods of each model, in the order of `method`; without any, the default ones.

    refinement: what is done with the maps; of methods that are not named, those whose maps it does not apply to are
    left out. Raises UnknownNameError for a name that is no method, UnsupportedError for one that no model has, for a
    model that has none of them, and for a refinement that does not apply.
    """
    refinement = refinement or Refinement()
    defined = [
        tuple(name for name in methods_for(model, engine=engine) if name in method or _applies(model, name, refinement))
        for model in models
    ]
    for model in models:
        for name in methods_for(model, engine=engine) if method and ALL not in method else ():
            if name in method:
                require_refinement(model, name, refinement)
        if refinement.times is not None:
            require_method(model, refinement.times, engine=engine)
    if ALL in method:
        return defined
    names = tuple(dict.fromkeys(method or default_methods()))
    for name in names:
        if name not in ATTRIBUTIONS:
            raise UnknownNameError("method", name, (*ATTRIBUTIONS, ALL))
        if method and not any(name in own for own in defined):
            require_method(models[0], name, engine=engine)
    chosen = [tuple(name for name in names if name in own) for own in defined]
    for model, own in zip(models, chosen):
        if not own:
            require_method(model, names[0], engine=engine)
    return chosen


def _applies(model: Model, method: str, refinement: Refinement) -> bool:
    """Whether the refinement applies to the method's maps. Raises UnsupportedError where it applies to no method, and
    InputError for a layer that the model does not have."""
    if refinement.refine == "affinity":
        require_affinity(model, refinement.layers)
    try:
        require_refinement(model, method, refinement)
    except InputError:
        return False
    return True


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
    evidence: EvidenceRows = field(default_factory=dict)

    def add(self, rows: EvidenceRows) -> None:
        """Add rows of evidence to their tables."""
        for table, own in rows.items():
            self.evidence.setdefault(table, []).extend(own)


def _print_expected(works: Sequence[_Work], options: ExplainOptions) -> None:
    parts = [
        tuple(
            explain_parts(
                work.methods,
                len(work.split),
                verify=options.verify,
                counterfactuals=options.counterfactuals,
                substrates=len([name for name in options.other_substrates if name != NONE]),
                stability=options.stability,
                views=options.refine.views,
                times=_refinement(options.refine).times,
                composites=composite_maps(
                    composite_names(options.composites, has_masks=work.split.masks is not None),
                    options.composite_count,
                ),
            )
        )
        for work in works
    ]
    print_expected([(work.model, work.split, own) for work, own in zip(works, parts)], options.run)


def _explain(folder: RunFolder, work: _Work, rows: _Rows, options: ExplainOptions, drawn: int) -> None:
    """Explain one model's images, write its metrics and arrays, and add its rows. drawn: images in figures."""
    model, split, run = work.model, work.split, options.run
    refinement = _refinement(options.refine)
    logits = answers(model, split, batch_size=run.batch_size, precision=precision(run))
    classes = work.targets
    if classes is None and model.has_classifier:
        classes = logits.argmax(-1)
    with progress(f"Explaining {model.alias}", len(work.methods) * len(split), quiet=run.quiet) as advance:
        maps = [
            attribution_maps(
                model, split, classes, name, engine=options.engine, refinement=refinement, options=run, advance=advance
            )
            for name in work.methods
        ]
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
