"""Attribution maps by several methods, of one or several models; the choice of a method, and checks
of the maps.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from vitlens.analysis.evaluation.evaluate import BACKWARD, fitting_batch_size, predicted_logits
from vitlens.analysis.faithfulness.defaults import BASELINES
from vitlens.analysis.faithfulness.maps import map_faults
from vitlens.analysis.faithfulness.removal import require_substrate
from vitlens.attribution.choice import (
    FAITHFULNESS,
    REPLACED,
    MethodChoice,
    chosen_by_evidence,
)
from vitlens.attribution.choice import IMAGES as CHOICE_IMAGES
from vitlens.attribution.choice_scores import DRAWS
from vitlens.attribution.gradients import logit_gain
from vitlens.attribution.registry import attribution
from vitlens.commands.explain.checks import check_methods
from vitlens.commands.explain.external import (
    ExternalMaps,
    MapsFile,
    match_maps,
    read_maps_files,
    targets_of,
)
from vitlens.commands.explain.methods import MethodFunction, as_function, methods_of, refinement_of
from vitlens.commands.explain.options import ExplainOptions
from vitlens.commands.explain.phrases import load_by_phrase, require_phrase_targets
from vitlens.commands.explain.record import (
    ChoiceRow,
    ExplainArrays,
    ExplainRecord,
    ImageRow,
    MethodRow,
)
from vitlens.commands.run.load import ImageRequest
from vitlens.commands.run.options import RunOptions
from vitlens.commands.run.progress import Advance, progress
from vitlens.commands.run.run import Run
from vitlens.commands.run.targets import chosen_targets
from vitlens.commands.shared.explorer_measure import explored
from vitlens.commands.shared.maps.record import MapCheckRow, removal_check
from vitlens.commands.shared.methods import print_notes
from vitlens.commands.shared.sheets import DRAWN, EACH, file_names, left_out_words, print_left_out
from vitlens.data.split import Split
from vitlens.devices import autocast
from vitlens.errors import InputError
from vitlens.models.language_image import class_scores, has_prompts, similarities
from vitlens.models.model import Model
from vitlens.record_files import join_records
from vitlens.shapes import Labels
from vitlens.uncertainty import Estimate, bootstrap_mean

# forward passes that take about as long as one forward and backward pass
_PASSES_OF_GRADIENT: Final = 3
# size of the stored maps of a model, at most; the maps that are drawn are stored at any size
_STORED_BYTES: Final = 32 << 20
_BYTES_PER_VALUE: Final = 4  # of fp32


def measure(
    options: ExplainOptions, models: Sequence[Model] = (), splits: Sequence[Split] = ()
) -> Path | None:
    """Explain images by every chosen method, write the report and return its path.

    models, splits: if they are loaded already. Raises InputError (or a subclass) before anything is
    written.
    """
    files = _maps_files(options)
    is_by_phrase = bool(options.model_options.text) and not models
    if is_by_phrase:
        require_phrase_targets(options)
    run = Run("explain", options, images=_request(options), load=_loader(options, models))
    methods = _checked_methods(options, run.models)
    if splits:
        run = run.with_images(splits)
    drawn = _drawn_images(options, len(run.split))
    left_out = tuple(left_out_words(drawn, len(run.split)))
    run = _with_notes(run, left_out)
    explainers = []
    for model, split, names in zip(run.models, run.splits, methods):
        external = tuple(match_maps(file, model, split, run.run_options.limit) for file in files)
        targets: Labels | None
        if is_by_phrase:
            targets = torch.zeros(len(split), dtype=torch.long)  # the phrase is class 0
        else:
            targets = chosen_targets(options.target, model, split)
        explainer = Explainer(
            model=model,
            split=split,
            # the classes that files of maps say, else the chosen ones
            targets=targets_of(external, targets, split),
            methods=names,
            options=options,
            external=external,
        )
        explainers.append(explainer)
    with run.folder("Attribution maps of") as folder:
        print_left_out(left_out, quiet=run.run_options.quiet, more="maps are in arrays/")
        parts: list[ExplainRecord] = []
        for explainer in explainers:
            # the report has one explorer: that of the first model for which there can be one
            has_explorer = any(part.explorer_arrays for part in parts)
            parts.append(explainer.record(drawn, explorer=not has_explorer))
        return folder.publish(lambda: join_records(parts))


def _with_notes(run: Run[ExplainOptions], notes: Sequence[str]) -> Run[ExplainOptions]:
    """Return the run with further notes on its images."""
    splits = [replace(split, notes=(*split.notes, *notes)) for split in run.splits]
    return run.with_images(splits)


def _loader(
    options: ExplainOptions, models: Sequence[Model]
) -> Callable[[RunOptions], tuple[Model, ...]]:
    """Return a function that returns these models, or without any loads the named ones."""
    if models:
        return lambda _run: tuple(models)
    return partial(load_by_phrase, options)


def _maps_files(options: ExplainOptions) -> tuple[MapsFile, ...]:
    """Return the files of --maps.

    Raises InputError for options that do not fit them.
    """
    if not options.maps:
        return ()
    if len(options.models) > 1:
        raise InputError(
            f"expected one model with --maps, found {len(options.models)}; run vitlens explain "
            "for each"
        )
    if len(options.model_options.text) > 1:
        raise InputError(
            f"expected one --text with --maps, found {len(options.model_options.text)}; run "
            "vitlens explain for each"
        )
    if options.auto:
        raise InputError("expected --auto or --maps, found both; leave one out")
    return read_maps_files(options.maps)


def _checked_methods(options: ExplainOptions, models: Sequence[Model]) -> list[tuple[str, ...]]:
    """Return the methods of each model; with --verify, check that its maps can be checked."""
    if options.verify:
        for model in models:
            model.require_classifier()
    methods = methods_of(options, models)
    names = dict.fromkeys(chain.from_iterable(methods))
    print_notes(names, quiet=options.run.quiet)
    if options.verify:
        for model in models:
            require_substrate(model, options.substrate)
    return methods


def _request(options: ExplainOptions) -> ImageRequest:
    """Return which images are loaded: all named files, all for checks, or a few of a data set."""
    needs_all = bool(options.images or options.verify or options.maps)
    limit = None
    if not needs_all:
        limit = EACH
        if options.auto:
            limit = CHOICE_IMAGES
    return ImageRequest(limit=limit, scenes=1, repeat=True, first=options.show)


def _drawn_images(options: ExplainOptions, images: int) -> int:
    """Return the number of images in figures."""
    default = EACH
    if options.images:
        default = DRAWN
    return min(max(default, len(set(options.show))), images)


class _Explained(NamedTuple):
    """The maps of one method, and its row.

    maps: (n, rows, columns), raw, on the CPU.
    """

    row: MethodRow
    maps: Tensor


@dataclass(frozen=True)
class Explainer:
    """The images of one model, with the methods by which they are explained.

    targets: the target class of each image (None: the predicted one).
    methods: with --auto, the candidates.
    external: maps that were made elsewhere.
    """

    model: Model
    split: Split
    targets: Labels | None
    methods: tuple[str, ...]
    options: ExplainOptions
    external: tuple[ExternalMaps, ...] = ()

    def record(self, drawn: int, *, explorer: bool) -> ExplainRecord:
        """Return the record of this model.

        drawn: the number of images in figures.
        explorer: True to add the attention between all patches of these images.
        """
        model = self.model
        split = self.split
        fields: dict[str, Any] = {}
        names = self.methods
        if self.options.auto:
            choice = self._choose()
            names = (choice.method,)
            fields |= choice_tables(model.alias, choice)
        logits = predicted_logits(
            model,
            split,
            batch_size=self.options.run.batch_size,
            precision=self._precision,
        )
        explained_classes = self.targets
        if explained_classes is None and model.has_classifier:
            explained_classes = logits.argmax(-1)
        explained = self._explain_all(names, explained_classes)
        for external in self.external:
            explained[external.name] = _Explained(self._external_row(external), external.maps)
        if self.options.verify and explained_classes is not None:
            fields |= self._checks(explained_classes, explained)
        if explorer:
            drawn_split = split.pick(torch.arange(drawn))
            (batch,) = drawn_split.batches(drawn, device=model.device)  # one batch has all of them
            fields |= explored(model, batch.images)
        all_maps = [result.maps for result in explained.values()]
        return ExplainRecord(
            methods=tuple(result.row for result in explained.values()),
            shown=tuple(image_rows(model, split, logits, explained_classes)),
            maps={model.alias: self._arrays(all_maps, drawn)},
            **fields,
        )

    @property
    def _precision(self) -> str:
        """Return bf16 if it was asked for, else fp32, because attributions are differences of large
        numbers.
        """
        return "bf16" if self.options.run.precision == "bf16" else "fp32"

    def _choose(self) -> MethodChoice:
        """Return the method that quick checks choose."""
        run = self.options.run
        functions = self._functions(self.methods)
        # every method makes maps of the images; without masks, also of the mosaics of each half
        rounds = 1
        if self.split.masks is None:
            rounds = 3
        total = len(functions) * rounds
        title = f"Choosing a method for {self.model.alias}"
        with progress(title, total, unit="methods", quiet=run.quiet) as advance:
            return chosen_by_evidence(
                self.model,
                self.split,
                self.targets,
                functions,
                batch_size=run.batch_size,
                seed=run.seed,
                advance=advance,
            )

    def _explain_all(self, names: Sequence[str], classes: Labels | None) -> dict[str, _Explained]:
        """Return the row and the maps of each method, by name.

        Progress counts passes, because a map takes from one pass to hundreds.
        """
        costs = {name: self._passes(name) for name in names}
        total = len(self.split) * sum(costs.values())
        title = f"Explaining {self.model.alias}"
        explained = {}
        with progress(title, total, unit="passes", quiet=self.options.run.quiet) as advance:
            for name in names:
                explained[name] = self._explain(
                    name, classes, _advance_by_cost(advance, costs[name])
                )
        return explained

    def _passes(self, method: str) -> int:
        """Return the time of a map in forward passes, with the map that it is multiplied by."""
        refinement = refinement_of(self.options.refine)
        passes = 0.0
        for name in (method, refinement.times):
            if name is not None:
                entry = attribution(name)
                passes += entry.forwards + _PASSES_OF_GRADIENT * entry.backwards
        return max(1, round(refinement.views * passes))

    def _explain(self, name: str, targets: Labels | None, advance: Advance) -> _Explained:
        """Return the row of one method, and its maps of all images."""
        split = self.split
        device = self.model.device
        # a backward pass takes BACKWARD times the memory of a forward pass
        fitting = max(1, fitting_batch_size(self.model) // BACKWARD)
        batch_size = self.options.run.batch_size or fitting
        function = as_function(name, self.options, batch_size=batch_size)
        # a refined map sums to less
        sums_to_gain = attribution(name).complete and not refinement_of(self.options.refine).changes
        parts = []
        gains = []
        seconds = 0.0
        for batch in split.batches(batch_size, device=device):
            classes = None
            if targets is not None:
                classes = targets[batch.indices].to(device)
            with autocast(device, self._precision):
                start = time.perf_counter()
                # the copy to the CPU waits for an asynchronous device
                parts.append(function(self.model, batch.images, classes).cpu())
                seconds += time.perf_counter() - start
                if sums_to_gain and classes is not None:
                    gains.append(logit_gain(self.model, batch.images, classes).cpu())
            advance(len(batch.images))
        maps = torch.cat(parts)
        row = self._method_row(name, maps, seconds / len(split))
        if gains:
            gain = torch.cat(gains)
            row = replace(
                row, gain=float(gain.abs().mean()), completeness=self._completeness(maps, gain)
            )
        return _Explained(row, maps)

    def _method_row(self, name: str, maps: Tensor, seconds: float) -> MethodRow:
        """Return the row of one method without its completeness.

        seconds: the time per image.
        """
        method = attribution(name)
        refinement = refinement_of(self.options.refine)
        title = method.title
        if refinement.words:
            title = f"{title}, {refinement.words}"
        # a product is of the positive parts of two maps
        signed = method.signed and refinement.times is None
        faults = map_faults(maps)
        rows, columns = maps.shape[1:]
        return MethodRow(
            model=self.model.alias,
            method=name,
            title=title,
            source=method.paper,
            map=f"{rows}x{columns}",
            signed=signed,
            maps=len(maps),
            constant=int(faults.constant.sum()),
            not_finite=int(faults.not_finite.sum()),
            seconds=seconds,
        )

    def _external_row(self, external: ExternalMaps) -> MethodRow:
        """Return the row of maps that were made elsewhere."""
        maps = external.maps
        rows, columns = maps.shape[1:]
        matched = "name" if external.by_name else "order"
        return MethodRow(
            model=self.model.alias,
            method=external.name,
            title=f"{external.name} (from a file)",
            source=external.source,
            map=f"{rows}x{columns}",
            signed=bool((maps < 0).any()),
            maps=len(maps),
            constant=int(map_faults(maps).constant.sum()),
            not_finite=0,
            seconds=None,
            matched=matched,
        )

    def _completeness(self, maps: Tensor, gain: Tensor) -> Estimate | None:
        """Return the mean error of the sums of maps.

        Returns None if a map is not finite. gain: of each image, in logits.
        """
        if not bool(maps.isfinite().all()):
            return None
        errors = (maps.sum((1, 2)) - gain).abs()
        groups = None
        if self.split.groups is not None:
            groups = self.split.groups.numpy()
        return bootstrap_mean(
            errors.numpy(), groups=groups, seed=self.options.run.seed, unit="logits", least=0.0
        )

    def _checks(self, classes: Labels, explained: Mapping[str, _Explained]) -> dict[str, object]:
        """Return the tables and arrays of all checks."""
        computed = {name: (result.maps, result.row.seconds) for name, result in explained.items()}
        fixed = {external.name for external in self.external}
        functions = self._functions(name for name in explained if name not in fixed)
        return check_methods(self.model, self.split, classes, functions, computed, self.options)

    def _functions(self, names: Iterable[str]) -> dict[str, MethodFunction]:
        """Return methods as functions, by name."""
        batch_size = self.options.run.batch_size
        return {name: as_function(name, self.options, batch_size=batch_size) for name in names}

    def _arrays(self, maps: Sequence[Tensor], drawn: int) -> ExplainArrays:
        """Return the drawn images with their maps, and as many further maps as are small enough."""
        split = self.split
        indices = torch.arange(min(drawn, len(split)))
        bytes_per_image = 0
        for values in maps:
            bytes_per_image += _BYTES_PER_VALUE * values[0].numel()
        stored = max(drawn, _STORED_BYTES // bytes_per_image)
        masks = None
        if split.masks is not None:
            masks = split.masks[indices].numpy()
        return ExplainArrays(
            images=split.source.read(indices).numpy(),
            maps={index: values[:stored].numpy() for index, values in enumerate(maps)},
            masks=masks,
        )


def _advance_by_cost(advance: Advance, cost: int) -> Advance:
    """Return a function that advances by the cost of each image."""
    return lambda images: advance(images * cost)


def image_rows(
    model: Model, split: Split, logits: Tensor, targets: Tensor | None
) -> Iterator[ImageRow]:
    """Yield the prediction and the target class of each image; None without a classifier.

    For a model of texts, targets are phrases with a similarity. A single phrase has no probability.
    """
    scores = class_scores(model, logits)
    cosines = similarities(model, logits) if has_prompts(model) else None
    are_probabilities = len(model.classes) > 1
    for index, name in enumerate(file_names(split.names)):
        row = ImageRow(model=model.alias, image=name)
        if split.labels is not None:
            row = replace(row, label=split.classes[int(split.labels[index])])
        if targets is not None:
            prediction = int(scores[index].argmax())
            target = int(targets[index])
            row = replace(row, target=model.classes[target])
            if cosines is not None:
                row = replace(row, similarity=round(float(cosines[index, target]), 4))
            if are_probabilities:
                row = replace(
                    row,
                    prediction=model.classes[prediction],
                    probability=round(float(scores[index, prediction]), 4),
                    target_probability=round(float(scores[index, target]), 4),
                )
        yield row


def choice_tables(alias: str, choice: MethodChoice) -> dict[str, object]:
    """Return the tables of a choice.

    The table of checks has the removal check of the chosen method.
    """
    selection = len(choice.selection)
    certainty = None
    if choice.certainty is not None:
        certainty = Estimate(choice.certainty, n=selection)
    row = ChoiceRow(
        model=alias,
        method=choice.method,
        reason=choice.reason,
        candidates=choice.candidates,
        checks=choice.checks,
        left_out=choice.left_out,
        localised=choice.localised,
        certainty=certainty,
        draws=DRAWS,
        runner_up=choice.runner_up,
        alike=choice.alike,
        confirmation=choice.confirmation,
        selection=selection,
        report=len(choice.report),
        replaced=REPLACED,
    )
    return {
        "chosen": (row,),
        "choice_scores": tuple(replace(score, model=alias) for score in choice.scores),
        "choice_margins": tuple(replace(margin, model=alias) for margin in choice.margins),
        "checks": tuple(_chosen_check(alias, choice)),
    }


def _chosen_check(alias: str, choice: MethodChoice) -> Iterator[MapCheckRow]:
    """Yield the removal check of the chosen method on the report half.

    Yields nothing if it was not compared.
    """
    margins = {}
    for baseline in BASELINES:
        margin = choice.margin(baseline, FAITHFULNESS)
        if margin is not None:
            margins[baseline] = margin
    reports = {score.method: score.report for score in choice.scores}
    value = None
    if choice.method in reports:
        value = reports[choice.method].get(FAITHFULNESS)
    if value is not None and margins:
        yield removal_check(
            model=alias,
            method=choice.method,
            substrate=REPLACED,
            value=value,
            margins=margins,
            usable=1,  # any number above 0, which only says that there are usable maps
        )
