"""Remove every head, MLP and block of a model, and several heads at once."""

import sys
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from vitlens.analysis.ablation.bench import replacement_for, replacement_note
from vitlens.analysis.ablation.several import head_similarity
from vitlens.analysis.ablation.units import units_of
from vitlens.analysis.dictionary.dictionary import Dictionary, load_sae
from vitlens.analysis.dictionary.latents import require_latent
from vitlens.analysis.dictionary.measures import most_varied
from vitlens.analysis.evaluation.evaluate import fitting_batch_size
from vitlens.commands.ablate.ablation_setup import AblationSetup
from vitlens.commands.ablate.effects import (
    EffectsByReplacement,
    HeadLabels,
    effect_arrays,
    measure_effects,
    model_row,
    unit_rows,
)
from vitlens.commands.ablate.inside import Fields, label_heads, measure_inside
from vitlens.commands.ablate.options import REMOVED, AblateOptions
from vitlens.commands.ablate.pruning import Pruning, prune
from vitlens.commands.ablate.record import AblateRecord
from vitlens.commands.ablate.removal import (
    REMOVAL_IMAGES,
    HeadPairs,
    RemovalCurves,
    measure_curves,
    measure_pairs,
)
from vitlens.commands.run.folder import RunFolder
from vitlens.commands.run.load import ImageRequest
from vitlens.commands.run.progress import phase
from vitlens.commands.run.resume import resumable, with_its_settings
from vitlens.commands.run.run import Run
from vitlens.commands.run.targets import labels_of, require_label_source
from vitlens.devices import autocast
from vitlens.files import require_writable, sha256
from vitlens.names import Replacement
from vitlens.pixels import Streamed


@dataclass(frozen=True)
class Measurements:
    """The measurements in which all processes share.

    labels: the labels of the heads, {} in all processes but the first.
    """

    effects: EffectsByReplacement
    curves: RemovalCurves
    pairs: HeadPairs
    labels: HeadLabels


def measure(options: AblateOptions) -> Path | None:
    """Remove every head of a model in turn, exactly, and write the report.

    Of several processes, each measures its share of the images. Returns the path of the report,
    None in all processes but the first. Raises DataError for images without labels, InputError for
    too few images, or for a model or data other than those of the run that is resumed.
    """
    run, reason = _prepare_run(options)
    options = run.options
    dictionary = None
    if options.dictionary is not None:
        dictionary = load_sae(run.model, options.dictionary)
        for latent in options.latents:
            require_latent(latent, len(dictionary))
    labels = labels_of(
        run.model, run.split, predicted=options.predicted, doing="ablate", options=run.run_options
    )
    if reason and not run.run_options.quiet:
        print(reason, file=sys.stderr)  # noqa: T201
    _ = run.shares  # raises for fewer images than processes before anything is written
    with ExitStack() as stack:
        kinds = options.units
        if dictionary is not None:
            kinds = (*kinds, "latent")
            stack.enter_context(dictionary.places(_latents_to_remove(run, dictionary)))
        units = units_of(run.model, kinds=kinds)
        dictionary_digest = None
        if options.dictionary is not None:
            dictionary_digest = sha256(options.dictionary)
        settings = {
            "replace": list(options.replace),
            "predicted": options.predicted,
            "units": list(options.units),
            "dictionary": dictionary_digest,
            "latents": list(options.latents),
        }
        writing, store = stack.enter_context(
            resumable(run, "Ablation of", options.resume, **settings)
        )
        setup = AblationSetup(run, labels, units, store, dictionary=dictionary)
        with autocast(run.model.device, run.run_options.precision):
            setup = replace(setup, means=setup.measure_means())
            measurements = _measure(setup)

        def record() -> AblateRecord:
            assert writing.folder is not None
            return _record(setup, measurements, reason, writing.folder)

        return writing.publish(record)


def _prepare_run(options: AblateOptions) -> tuple[Run[AblateOptions], str]:
    """Return a new or resumed run, and the reason for its replacement.

    The options of the run name its replacements. The reason is "" unless the replacement is the
    default and not the mean.
    """
    is_typed = bool(options.replace)
    options = with_its_settings(options, "ablate")  # those of the run that is resumed, if any
    if options.save is not None:
        require_writable(
            options.save, purpose="for --save", hint="make it writable, or choose another --save"
        )
    if not options.predicted and options.run.labels is None:
        require_label_source(options.data, options.images, doing="ablate")
    run = Run("ablate", options, most=1, images=ImageRequest(scenes=1))
    images = len(run.split)
    default = replacement_for(images, requested=None)
    replacements: tuple[Replacement, ...] = (default,)
    if options.replace:  # typed, or by a resumed run: those that were chosen when it began
        replacements = tuple(replacement_for(images, name) for name in options.replace)
    run.options = replace(options, replace=replacements)
    reason = ""
    # a resumed run names the replacements that it began with, so they may be the default
    is_default = not is_typed and replacements == (default,)
    if is_default and default != "mean":
        reason = replacement_note(images, default)
    return run, reason


def _latents_to_remove(run: Run[AblateOptions], dictionary: Dictionary) -> tuple[int, ...]:
    """Return the latents of --latents, else those that vary most between the images."""
    if run.options.latents:
        return run.options.latents
    return most_varied(
        dictionary,
        Streamed(run.split, run.model.pixel_dtype),
        REMOVED,
        batch_size=run.run_options.batch_size or fitting_batch_size(run.model),
        processes=run.processes,
    )


def _measure(setup: AblationSetup) -> Measurements:
    """Measure the effects of removed units, of several heads at once, and of pairs of heads."""
    options = setup.run.options
    effects = {name: measure_effects(setup, name) for name in options.replace}
    main_effects = effects[setup.replacement]  # those in the figures
    has_several_heads = len(setup.heads) > 1
    curves = RemovalCurves()
    has_ranking = has_several_heads and main_effects.importance.is_ranked("head")
    if options.curves and has_ranking:
        curves = measure_curves(setup, main_effects.ranking, main_effects.first_order)
    pairs = HeadPairs()
    if options.pairs and has_several_heads:
        with phase("How similar the outputs of heads are"):
            analysis = setup.for_replacement(setup.replacement)
            similarity = head_similarity(analysis, setup.heads, setup.first_images(REMOVAL_IMAGES))
        pairs = measure_pairs(setup, main_effects.importance, similarity)
    labels: HeadLabels = {}
    if setup.run.first and setup.heads:
        labels = label_heads(setup)
    return Measurements(effects, curves, pairs, labels)


def _record(
    setup: AblationSetup, measurements: Measurements, reason: str, folder: RunFolder
) -> AblateRecord:
    """Prune the model and measure inside it where the options say so, and return the record."""
    options = setup.run.options
    pruning = Pruning()
    if options.prune is not None:
        importance = measurements.effects[setup.replacement].importance
        pruning = prune(setup, importance, options.prune, options.save or folder.place("pruned"))
    inside: Fields = {}
    reasons_missing: tuple[str, ...] = ()  # why fields measured inside the model are missing
    if options.patch:
        inside, reasons_missing = measure_inside(setup)
    units = tuple(unit_rows(setup, measurements.effects, measurements.labels))
    row = replace(
        model_row(setup, measurements.effects, measurements.curves, units),
        parameters_cut=pruning.parameters_cut,
        reason=reason,
        undone=reasons_missing,
        notes=_notes(measurements, reason),
    )
    return AblateRecord(
        ablated=(row,),
        units=units,
        curves=measurements.curves.points,
        pairs=measurements.pairs.rows,
        pruned=pruning.rows,
        effects={name: effect_arrays(effects) for name, effects in measurements.effects.items()},
        **inside,
    )


def _notes(measurements: Measurements, reason: str) -> tuple[str, ...]:
    """Return the remarks of all measurements, without the reason for the replacement."""
    notes: list[str] = []
    for effects in measurements.effects.values():
        notes += effects.importance.note.split("; ")
    notes.append(measurements.pairs.remark)
    different_notes = dict.fromkeys(notes)  # each once, in order
    return tuple(note for note in different_notes if note not in ("", reason))
