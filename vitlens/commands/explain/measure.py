"""Attribution maps of images by several methods, of one model or several; their choice, and the checks of them."""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from vitlens.analysis.attention.affinity import require_affinity
from vitlens.analysis.evaluation.evaluate import BACKWARD, fitting_batch_size, predicted_logits
from vitlens.analysis.faithfulness.defaults import BASELINES
from vitlens.analysis.faithfulness.maps import map_faults
from vitlens.analysis.faithfulness.removal import require_substrate
from vitlens.attribution.choice import DRAWS, FAITHFULNESS, REPLACED, MethodChoice, candidates_for, chosen_by_evidence
from vitlens.attribution.choice import IMAGES as CHOICE_IMAGES
from vitlens.attribution.explain import PROVENANCE, explain, methods_for, require_method
from vitlens.attribution.gradients import logit_gain
from vitlens.attribution.refinement import Refinement, applies, require_refinement
from vitlens.attribution.registry import ATTRIBUTIONS, default_methods
from vitlens.commands.explain import record as kept
from vitlens.commands.explain.checks import check_methods
from vitlens.commands.explain.options import ALL, NONE, ExplainOptions, RefineOptions
from vitlens.commands.run.load import load_splits
from vitlens.commands.run.progress import Advance, progress
from vitlens.commands.run.run import Run
from vitlens.commands.run.targets import chosen_targets
from vitlens.commands.shared.explorer_measure import explored
from vitlens.commands.shared.maps.record import removal_check
from vitlens.commands.shared.sheets import DRAWN, EACH, file_names, left_out_words, print_left_out
from vitlens.data.split import Split
from vitlens.devices import autocast
from vitlens.errors import UnknownNameError
from vitlens.lens.quick_passes import quick_passes
from vitlens.models.model import Model
from vitlens.names import Engine
from vitlens.record import joined
from vitlens.shapes import Images, Labels
from vitlens.shapes import Maps as MapsOf
from vitlens.uncertainty import Estimate, bootstrap_mean

_BACKWARD: Final = 3  # forward passes that take as long as one forward and backward pass, about
_STORED_BYTES: Final = 32 << 20  # of a model's maps, at most, beyond the drawn ones


def measure(
    options: ExplainOptions,
    models: Sequence[Model] = (),
    splits: Sequence[Split] = (),
    methods: Sequence[tuple[str, ...]] = (),
) -> Path | None:
    """Explain images with every chosen method and write the report; returns its path.

    models, splits, methods: of each model, where they are loaded and chosen already. Raises InputError (or one of its
    kind) before anything is written.
    """
    run = Run("explain", options, images=False, load=(lambda _: tuple(models)) if models else None)
    for model in run.models if options.verify else ():
        model.require_classifier()
    methods = methods or methods_of(options, run.models)
    for model in run.models if options.verify else ():
        require_substrate(model, options.substrate)
    if not splits:
        limit = None if options.images or options.verify else CHOICE_IMAGES if options.auto else EACH
        splits = load_splits(
            run.models,
            options=run.run,
            data=options.data,
            images=options.images,
            limit=limit,
            scenes=1,
            repeat=True,
            first=options.show,
        )
    drawn = min(max(DRAWN if options.images else EACH, len(set(options.show))), len(splits[0]))
    splits = [replace(split, notes=(*split.notes, *left_out_words(drawn, len(split)))) for split in splits]
    run.splits = splits
    works = [
        Work(model, split, chosen_targets(options.target, model, split), names, options)
        for model, split, names in zip(run.models, splits, methods)
    ]
    with run.folder("Attribution maps of") as folder:
        print_left_out(drawn, len(run.split), quiet=run.run.quiet, more="maps are in arrays/")
        parts: list[kept.ExplainRecord] = []
        for work in works:
            explorer = not any(part.explorer_arrays for part in parts)  # of the first model that has one
            parts.append(work.record(drawn, explorer=explorer))
        return folder.publish(lambda: joined(parts))


@dataclass(frozen=True)
class Work:
    """A model, its images, the target class of each (None: the predicted one), and its methods, with --auto the
    candidates."""

    model: Model
    split: Split
    targets: Labels | None
    methods: tuple[str, ...]
    options: ExplainOptions

    def record(self, drawn: int, *, explorer: bool) -> kept.ExplainRecord:
        """Return the record of this model. drawn: images in figures; explorer: whether to keep its attention."""
        model = self.model
        split = self.split
        run = self.options.run
        choice = self._choice() if self.options.auto else None
        names = self.methods if choice is None else (choice.method,)
        precision = "bf16" if run.precision == "bf16" else "fp32"  # attributions are differences of large numbers
        logits = predicted_logits(model, split, batch_size=run.batch_size, precision=precision)
        classes = logits.argmax(-1) if self.targets is None and model.has_classifier else self.targets
        costs = {name: self._passes(name) for name in names}
        total = len(split) * sum(costs.values())  # images would be no measure of time: a map takes 1 pass or 500
        with progress(f"Explaining {model.alias}", total, unit="passes", quiet=run.quiet) as advance:
            made = {
                name: self._explained(name, classes, precision, lambda images, cost=cost: advance(images * cost))  # type: ignore[misc]
                for name, cost in costs.items()
            }
        rows: dict[str, object] = {} if choice is None else choice_rows(model.alias, choice)
        if self.options.verify and classes is not None:
            functions = {name: as_function(name, self.options) for name in names}
            known = {name: (maps, row.seconds) for name, (row, maps) in made.items()}
            rows |= check_methods(model, split, classes, functions, known, self.options)
        (shown,) = split.pick(torch.arange(drawn)).batches(drawn, device=model.device)
        return kept.ExplainRecord(
            methods=tuple(row for row, _ in made.values()),
            shown=tuple(image_rows(model, split, logits, classes)),
            maps={model.alias: self._arrays([maps for _, maps in made.values()], drawn)},
            **(explored(model, shown.images) if explorer else {}),
            **rows,  # type: ignore[arg-type]
        )

    def _choice(self) -> MethodChoice:
        """Return the method that quick checks choose."""
        model = self.model
        split = self.split
        run = self.options.run
        functions = {name: as_function(name, self.options) for name in self.methods}
        total = len(functions) * (1 if split.masks is not None else 3)  # maps of images, and of each half's mosaics
        with progress(f"Choosing a method for {model.alias}", total, unit="methods", quiet=run.quiet) as advance:
            return chosen_by_evidence(
                model, split, self.targets, functions, batch_size=run.batch_size, seed=run.seed, advance=advance
            )

    def _passes(self, method: str) -> int:
        """Return the map of one image in forward passes of about the same time, the maps that it is multiplied by
        included."""
        refinement = refinement_of(self.options.refine)
        entries = [ATTRIBUTIONS[name] for name in (method, refinement.times) if name is not None]
        return max(1, round(refinement.views * sum(each.forwards + _BACKWARD * each.backwards for each in entries)))

    def _explained(
        self, name: str, targets: Labels | None, precision: str, advance: Advance
    ) -> tuple[kept.MethodRow, Tensor]:
        """Return one method on every image: what was done with its maps, their faults, cost and completeness; and the
        maps (n, rows, columns) on the CPU, raw."""
        model = self.model
        split = self.split
        options = self.options
        method = ATTRIBUTIONS[name]
        refinement = refinement_of(options.refine)
        own = options.engine == "vitlens"
        size = options.run.batch_size or max(1, fitting_batch_size(model) // BACKWARD)
        function = as_function(name, replace(options, run=replace(options.run, batch_size=size)))
        parts = []
        gains = []
        seconds = 0.0
        complete = method.complete and not refinement.changes  # a refined map sums to less
        for batch in split.batches(size, device=model.device):
            classes = None if targets is None else targets[batch.indices].to(model.device)
            with autocast(model.device, precision):
                start = time.perf_counter()
                parts.append(function(model, batch.images, classes).cpu())  # waits for an asynchronous device
                seconds += time.perf_counter() - start
                if complete and classes is not None:
                    gains.append(logit_gain(model, batch.images, classes).cpu())
            advance(len(batch.images))
        maps = torch.cat(parts)
        gain = torch.cat(gains) if gains else None
        completeness = None
        faults = map_faults(maps)
        groups = None if split.groups is None else split.groups.numpy()
        if gain is not None and bool(maps.isfinite().all()):
            differences = (maps.sum((1, 2)) - gain).abs().numpy()
            completeness = bootstrap_mean(differences, groups=groups, unit="logits", least=0.0)
        title = method.title if own else f"{method.title} (grad-cam package)"
        done = refinement.words
        row = kept.MethodRow(
            model.alias,
            name,
            f"{title}, {done}" if done else title,
            method.paper if own else PROVENANCE,
            "x".join(str(side) for side in maps.shape[1:]),
            method.signed and own and refinement.times is None,
            len(maps),
            int(faults.constant.sum()),
            int(faults.not_finite.sum()),
            seconds / len(split),
            None if gain is None else float(gain.abs().mean()),
            completeness,
        )
        return row, maps

    def _arrays(self, maps: Sequence[Tensor], drawn: int) -> kept.ExplainArrays:
        """Return the drawn images with their maps, and as many further maps as are small enough."""
        split = self.split
        shown = torch.arange(min(drawn, len(self.split)))
        stored = max(drawn, _STORED_BYTES // sum(4 * each[0].numel() for each in maps))
        return kept.ExplainArrays(
            split.source.read(shown).numpy(),
            {index: each[:stored].numpy() for index, each in enumerate(maps)},
            None if split.masks is None else split.masks[shown].numpy(),
        )


def image_rows(model: Model, split: Split, logits: Tensor, targets: Tensor | None) -> list[kept.ImageRow]:
    """Return the prediction of each image, and the class that is explained; None where the model has no classifier."""
    labels = [None] * len(split) if split.labels is None else [split.classes[int(label)] for label in split.labels]
    names = file_names(split.names)
    if targets is None:
        return [kept.ImageRow(model.alias, name, label=label) for name, label in zip(names, labels)]
    shares = logits.softmax(-1)
    return [
        kept.ImageRow(
            model.alias,
            name,
            model.classes[int(own.argmax())],
            round(float(own.max()), 4),
            model.classes[int(target)],
            round(float(own[int(target)]), 4),
            label,
        )
        for name, own, target, label in zip(names, shares, targets, labels)
    ]


def choice_rows(alias: str, choice: MethodChoice) -> dict[str, object]:
    """Return the tables of the choice; of the chosen method, what its check says in the table of checks."""
    margins = {name: choice.margin(name, FAITHFULNESS) for name in BASELINES}
    known = {name: margin for name, margin in margins.items() if margin is not None}
    value = next((each.report.get(FAITHFULNESS) for each in choice.scores if each.method == choice.method), None)
    row = kept.ChoiceRow(
        alias,
        choice.method,
        choice.reason,
        choice.candidates,
        choice.checks,
        choice.left_out,
        choice.localised,
        None if choice.certainty is None else Estimate(choice.certainty, n=len(choice.selection)),
        DRAWS,
        choice.runner_up,
        choice.alike,
        choice.confirmation,
        len(choice.selection),
        len(choice.report),
        REPLACED,
    )
    return {
        "chosen": (row,),
        "choice_scores": tuple(replace(each, model=alias) for each in choice.scores),
        "choice_margins": tuple(replace(each, model=alias) for each in choice.margins),
        "checks": (removal_check(alias, choice.method, REPLACED, value, known, usable=1),) if value and known else (),
    }


def methods_of(options: ExplainOptions, models: Sequence[Model]) -> list[tuple[str, ...]]:
    """Return the methods of each model, with --auto the candidates.

    Raises as `chosen_methods`, and InputError for fewer than two candidates.
    """
    how: dict[str, Any] = {"refinement": refinement_of(options.refine), "engine": options.engine}
    if not options.auto:
        return chosen_methods(models, options.method or ((ALL,) if options.verify else ()), **how)
    named = chosen_methods(models, options.method, **how) if options.method else [None] * len(models)
    return [candidates_for(model, own, **how) for model, own in zip(models, named)]


def refinement_of(options: RefineOptions) -> Refinement:
    """Return what is done with every map."""
    times = None if options.times == NONE else options.times
    return Refinement(options.refine, options.layers, options.steps, times, options.views, options.upsample)


def chosen_methods(
    models: Sequence[Model], method: Sequence[str], *, engine: Engine = "vitlens", refinement: Refinement | None = None
) -> list[tuple[str, ...]]:
    """Return the methods of each model, in the order of `method`; without any, the default ones.

    refinement: what is done with the maps; of methods that are not named, those whose maps it does not apply to are
    left out. Raises UnknownNameError for a name that is no method, UnsupportedError for one that no model has, for a
    model that has none of them, and for a refinement that does not apply.
    """
    refinement = refinement or Refinement()
    for model in models if refinement.refine == "affinity" else ():
        require_affinity(model, refinement.layers)
    defined = [
        tuple(name for name in methods_for(model, engine=engine) if name in method or applies(model, name, refinement))
        for model in models
    ]
    for model, own in zip(models, defined):
        for name in own if ALL not in method else ():
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


def as_function(name: str, options: ExplainOptions) -> Callable[[Model, Images, Labels | None], MapsOf]:
    """Return a method as a function of (model, images, targets), refined as the options say."""
    refinement = refinement_of(options.refine)
    engine = options.engine
    run = options.run

    def maps(model: Model, images: Images, targets: Labels | None) -> MapsOf:
        # the package takes a copy of the model, which would call its quick layers
        passes = quickly(model, name) if engine == "vitlens" else nullcontext()
        with passes:
            return explain(
                model,
                images,
                targets=targets,
                method=name,
                refinement=refinement,
                engine=engine,
                batch_size=run.batch_size,
                seed=run.seed,
            )

    return maps


def quickly(model: Model, method: str) -> AbstractContextManager[object]:
    """Inside, the passes of a method that does not observe attention are quick ones."""
    return quick_passes(model) if ATTRIBUTIONS[method].needs in (None, "cam") else nullcontext()
