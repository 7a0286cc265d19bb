"""`vitlens explain`: what of each image speaks for a class, by several methods, of one model or several."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from vitlens.analysis.answers.evaluate import answers
from vitlens.analysis.faithfulness.league import Settings
from vitlens.analysis.faithfulness.masking import require_substrate
from vitlens.attribution.explain import methods_for, require_method
from vitlens.attribution.registry import ATTRIBUTIONS, default_methods
from vitlens.commands.scaffold.describe import described
from vitlens.commands.scaffold.expected import say_expected
from vitlens.commands.scaffold.folder import RunFolder
from vitlens.commands.scaffold.load import load_models, load_splits
from vitlens.commands.scaffold.options import ModelOptions, RunOptions
from vitlens.commands.scaffold.progress import progress
from vitlens.commands.scaffold.sheets import DRAWN, say_left_out
from vitlens.commands.scaffold.targets import PREDICTED, chosen_targets
from vitlens.data.split import Split
from vitlens.errors import UnknownNameError
from vitlens.models.model import Model
from vitlens.names import Engine, Substrate
from vitlens.runs.explain_keep import Rows, keep_maps
from vitlens.runs.explain_maps import explained, precision
from vitlens.runs.explain_report import SHOWN, draw, tell
from vitlens.runs.explain_verify import keep_league
from vitlens.runs.planned import explain_parts
from vitlens.runs.report import publish
from vitlens.shapes import Labels

__all__ = ["draw", "explain", "tell"]

ALL = "all"


def explain(
    models: Sequence[str],
    *,
    images: Sequence[str] | None = None,
    data: str | None = None,
    method: Sequence[str] = (),
    engine: Engine = "vitlens",
    target: str = PREDICTED,
    verify: bool = False,
    substrate: Substrate = "blur",
    counterfactuals: bool = True,
    show: Sequence[str] = (),
    model_options: ModelOptions | None = None,
    options: RunOptions | None = None,
) -> Path:
    """Explain images with every method asked for and write the report; returns the path of report.md.

    method: names of the registry, "all", or none for the usual ones; of several models each takes those that it has.
    engine: "grad-cam" for the package's own maps, of the methods that it has.
    target: "predicted", "true", or a class by name or index; verify: every check on every method as well, by default
    on all methods and all images. Without it and without --limit, a few images of a data set are looked at.
    substrate: what stands where the checks remove a patch; counterfactuals: whether they look for sets of patches that
    turn the prediction, the costliest of them; show: file names of the images that figures draw (none: the first ones).
    Raises InputError (or one of its kind) before anything is written.
    """
    options = options or RunOptions()
    loaded = load_models(models, command="explain", model_options=model_options or ModelOptions(), options=options)
    for model in loaded if verify else ():
        model.require_classifier()
    chosen = chosen_methods(loaded, (ALL,) if verify and not method else method, engine=engine)
    if verify:
        for model in loaded:
            require_substrate(model, substrate)
    limit = None if images or verify else SHOWN
    splits = load_splits(loaded, options=options, data=data, images=images, limit=limit, repeat=True)
    splits = [split.led_by(show) for split in splits]
    targets = [chosen_targets(target, *pair) for pair in zip(loaded, splits)]
    aliases, split = [model.alias for model in loaded], splits[0]
    parts = [
        tuple(explain_parts(names, len(own), verify=verify, counterfactuals=counterfactuals))
        for names, own in zip(chosen, splits)
    ]
    say_expected(list(zip(loaded, splits, parts)), options)
    choices: Mapping[str, object] = {
        "method": list(method), "methods": dict(zip(aliases, chosen)), "engine": engine, "target": target,
        "verify": verify, "show": list(show), "substrate": substrate, "counterfactuals": counterfactuals,
    }  # fmt: skip
    folder = RunFolder.create(
        "explain",
        name_parts=(*aliases, split.name),
        title=f"{' and '.join(aliases)} explained on {split.title or split.name}",
        out=options.out,
        overwrite=options.overwrite,
        config=described(options, models=loaded, split=split, choices=choices),
        formats=options.formats,
    )
    settings = Settings(
        substrate=substrate, counterfactuals=counterfactuals, seed=options.seed, batch_size=options.batch_size
    )
    drawn = min(DRAWN if images else SHOWN, len(split))
    say_left_out(drawn, len(split), quiet=options.quiet, more="maps are in arrays/")
    with folder:
        tables: dict[str, Rows] = {}
        for model, own, asked, names in zip(loaded, splits, targets, chosen):
            alias = model.alias if len(loaded) > 1 else None
            one = _One(model, own, asked, names, engine, alias, options, settings if verify else None, drawn)
            for found in _kept(folder, one):
                for name, rows in found.items():
                    tables.setdefault(name, []).extend(rows)
        for name, rows in tables.items():
            folder.table(name, rows)
        return publish(folder, draw, tell)


@dataclass(frozen=True)
class _One:
    """A model, its images and what to do with them.

    asked: a class an image, or None for the predicted ones; drawn: images in figures, at most.
    """

    model: Model
    split: Split
    asked: Labels | None
    methods: tuple[str, ...]
    engine: Engine
    alias: str | None
    options: RunOptions
    checks: Settings | None
    drawn: int


def _kept(folder: RunFolder, one: _One) -> Iterator[Mapping[str, Rows]]:
    """Explains one model's images, keeps what came out, and gives the rows of its tables."""
    model, split, options = one.model, one.split, one.options
    logits = answers(model, split, batch_size=options.batch_size, precision=precision(options))
    classes = one.asked
    if classes is None and model.has_classifier:
        classes = logits.argmax(-1)
    with progress(f"Explaining {model.alias}", len(one.methods) * len(split), quiet=options.quiet) as advance:
        made = [
            explained(model, split, classes, name, engine=one.engine, options=options, advance=advance)
            for name in one.methods
        ]
    yield keep_maps(folder, model, split, logits, classes, made, drawn=one.drawn, alias=one.alias, engine=one.engine)
    if one.checks is not None:
        yield keep_league(
            folder, model, split, classes, methods=one.methods, alias=one.alias,
            made={each.method: (each.maps, each.seconds) for each in made}, settings=one.checks, options=options,
            engine=one.engine,
        )  # fmt: skip


def chosen_methods(
    models: Sequence[Model], method: Sequence[str], *, engine: Engine = "vitlens"
) -> list[tuple[str, ...]]:
    """The methods of each model, in the order asked for; none: the usual ones.

    Raises UnknownNameError for a name that is no method, UnsupportedError for one that no model has, and for a
    model that has none of those asked for.
    """
    able = [methods_for(model, engine=engine) for model in models]
    if ALL in method:
        return able
    wanted = tuple(dict.fromkeys(method or default_methods()))
    for name in wanted:
        if name not in ATTRIBUTIONS:
            raise UnknownNameError("method", name, (*ATTRIBUTIONS, ALL))
        if method and not any(name in own for own in able):
            require_method(models[0], name, engine=engine)
    found = [tuple(name for name in wanted if name in own) for own in able]
    for model, own in zip(models, found):
        if not own:
            require_method(model, wanted[0], engine=engine)
    return found
