"""Read the features of models layer by layer, then classify, compare, map and draw them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations_with_replacement
from pathlib import Path
from typing import Any, Final

import numpy as np

from vitlens.analysis.evaluation.evaluate import accuracy, require_labels
from vitlens.analysis.features.cka import FEWEST
from vitlens.analysis.features.embedding import require_perplexity
from vitlens.analysis.features.features import (
    EMBEDDING,
    FeatureLayer,
    Features,
    extract,
    resolve_pool,
)
from vitlens.analysis.features.probe import held_out_mask
from vitlens.analysis.features.similarity import Similarity, distance_correlation, similarity
from vitlens.commands.features.classify import (
    BY_MODEL,
    Classification,
    Correct,
    classify,
    head_rows,
    pair_rows,
)
from vitlens.commands.features.drawn import draw
from vitlens.commands.features.images import Subject, load_subjects
from vitlens.commands.features.options import FeaturesOptions
from vitlens.commands.features.patches import draw_patches, patches_rows
from vitlens.commands.features.record import (
    BetweenRow,
    FeaturesRecord,
    FeaturesRow,
    LayersRow,
    NoteRow,
    SetsRow,
    neighbours_of,
)
from vitlens.commands.features.spaces import map_spaces
from vitlens.commands.features.texts import (
    classify_zero_shot,
    explain_prompts,
    require_texts,
    unknown_words_note,
)
from vitlens.commands.run.progress import progress
from vitlens.commands.run.run import Run
from vitlens.errors import InputError
from vitlens.lens.stages import embedding_stage, stages
from vitlens.models.pretraining_history import pretraining_of, stated_objectives
from vitlens.names import Objective
from vitlens.processes import share_of
from vitlens.record_files import join_records
from vitlens.uncertainty import Estimate

# images that all processes share; the others may be fewer than processes, and each reads them all
_SHARED: Final = {"test", "bank"}

FeaturesOfSplits = Mapping[str, Features]  # by the purpose of the images, as in Subject.splits
FeaturesOfModels = Sequence[FeaturesOfSplits]


def measure(options: FeaturesOptions) -> Path | None:
    """Read, classify, map and compare the features of one or several models; write the report.

    Images without labels or without a training part are mapped and compared, but not classified. Of
    several processes, each reads its share of the images, and the first does everything else.

    Returns the path of the report, None in all processes but the first. Raises InputError (or a
    subclass) before anything is written.
    """
    run = Run("features", options)
    options = replace(options, run=run.run_options)
    with run.processes.main_process_first():
        subjects = load_subjects(run.models, options)
    run = run.with_images([subject.test for subject in subjects])
    _require(run, subjects, options)
    banks = [] if subjects[0].bank is None else [subjects[0].bank]
    with run.folder("Features of", others=banks) as folder:
        features = []
        for subject in subjects:
            features_of_splits = _read(subject, run)
            if features_of_splits:  # empty in all processes but the first
                features.append(features_of_splits)
        return folder.publish(lambda: _record(subjects, features, options))


def _require(run: Run[Any], subjects: Sequence[Subject], options: FeaturesOptions) -> None:
    """Raise an error for what cannot be done, before a folder is created."""
    for subject in subjects:
        stages(subject.model)
        resolve_pool(subject.model, options.pool)
        for name, split in subject.splits.items():
            if name in _SHARED:
                share_of(split, run.processes)  # raises for fewer images than processes
        if subject.bank is not None and max(options.ks) > len(subject.bank):
            raise InputError(
                f"expected --k of at most the {len(subject.bank)} training images, found "
                f"{max(options.ks)}; give fewer, or a greater --bank"
            )
    bank = subjects[0].bank
    if bank is not None and options.probe:
        # raises if no image can be held out
        held_out_mask(require_labels(bank).cpu(), groups=bank.groups, seed=0)
    if options.tsne:
        require_perplexity(options.perplexity, len(subjects[0].test))
    stated_objectives(options.objective, run.aliases)
    require_texts(run.models, options)


def _read(subject: Subject, run: Run[Any]) -> dict[str, Features]:
    """Return the features of one model's images by their purpose.

    Returns nothing in all processes but the first.
    """
    options = subject.options
    # None for shared images in all processes but the first
    features: dict[str, Features | None] = {}
    count = sum(len(split) for split in subject.splits.values())
    with progress(f"Reading {subject.alias}", count, quiet=run.run_options.quiet) as advance:
        for name, split in subject.splits.items():
            # of shared images, the embedding is read too, as it is compared, and features are kept
            # for later runs
            more: dict[str, Any] = {}
            if name in _SHARED:
                more["embedding"] = embedding_stage(subject.model) is not None
                more["processes"] = run.processes
                if options.cache:
                    more["cache"] = run.run_options.data_dir / "features"
            features[name] = extract(
                subject.model,
                split,
                pool=options.pool,
                norm=options.norm,
                batch_size=run.run_options.batch_size,
                precision=run.run_options.precision,
                advance=advance,
                **more,
            )
    if features["test"] is None:  # another process than the first
        return {}
    return {name: part for name, part in features.items() if part is not None}


def _record(
    subjects: Sequence[Subject], features: FeaturesOfModels, options: FeaturesOptions
) -> FeaturesRecord:
    """Return the tables of all models and of their comparison."""
    first = subjects[0]
    objectives = stated_objectives(options.objective, [subject.alias for subject in subjects])
    classifications: dict[str, Classification] = {}
    for subject, features_of_splits in zip(subjects, features):
        classifications[subject.alias] = classify(subject, features_of_splits)
    records = []
    for subject, features_of_splits in zip(subjects, features):
        classification = classifications[subject.alias]
        objective = objectives.get(subject.alias)
        records.append(_record_of_model(subject, features_of_splits, classification, objective))
    correct: dict[str, Correct] = {}
    for alias, classification in classifications.items():
        correct[alias] = {
            name: is_correct.numpy() for name, is_correct in classification.correct.items()
        }
    within = []  # layers of one model
    between = []  # layers of two models
    test_features = [features_of_splits["test"] for features_of_splits in features]
    for row in _similarity_rows(first, test_features):
        if isinstance(row, BetweenRow):
            between.append(row)
        else:
            within.append(row)
    return replace(
        join_records(records),
        sets=(_sets_row(first),),
        pairs=tuple(pair_rows(correct, first)),
        head=tuple(head_rows(correct, first)),
        within=tuple(within),
        between=tuple(between),
    )


def _sets_row(subject: Subject) -> SetsRow:
    return SetsRow(
        test=len(subject.test),
        chance=subject.chance,
        masked=subject.test.masks is not None,
        bank=None if subject.bank is None else len(subject.bank),
        no_bank=subject.no_bank,
    )


def _record_of_model(
    subject: Subject,
    features: FeaturesOfSplits,
    classification: Classification,
    objective: Objective | None,
) -> FeaturesRecord:
    """Return the tables and arrays of one model.

    objective: the objective of its pretraining, from the options.
    """
    test = features["test"]
    samples = draw_patches(subject)
    classifier = _classifier_of_errors(classification)
    wrong = ~classification.correct[classifier] if classifier else None
    spaces = map_spaces(subject, test, wrong, samples)
    drawing = draw(subject, features)
    zero_shot = classify_zero_shot(subject, test)
    prompts = explain_prompts(subject)
    row = FeaturesRow(
        model=subject.alias,
        **vars(pretraining_of(subject.model, objective=objective)),
        parameters=subject.model.parameter_count(),
        pool=test.pool,
        **_layer_fields(test),
        **_accuracy_fields(subject, classification),
        **zero_shot.fields(len(subject.test.classes)),
        errors=_errors_words(subject, classifier),
        **drawing.fields,
    )
    return FeaturesRecord(
        features=(row,),
        depth=tuple(classification.depth),
        maps=spaces.rows,
        patches=tuple(patches_rows(subject, samples)),
        matches=drawing.matches,
        templates=zero_shot.rows,
        prompts=prompts.rows,
        notes=_notes(features, classification, unknown_words_note(subject)),
        spaces={subject.alias: spaces.arrays},
        shown={subject.alias: replace(drawing.arrays, prompts=prompts.maps)},
    )


def _classifier_of_errors(classification: Classification) -> str:
    """Return the classifier whose errors the maps mark, "" for none.

    It is the model, or else the most neighbours.
    """
    classifiers = list(classification.correct)
    if BY_MODEL in classifiers:
        return BY_MODEL
    by_neighbours = [name for name in classifiers if name.startswith("knn")]  # in rising order
    return by_neighbours[-1] if by_neighbours else ""


def _errors_words(subject: Subject, classifier: str) -> str:
    if classifier == BY_MODEL:
        return f"by {subject.alias} itself"
    if classifier:
        return f"by {neighbours_of(classifier)}-NN"
    return ""


def _layer_fields(test: Features) -> dict[str, Any]:
    """Return the fields of FeaturesRow about the layers that were read."""
    first = test.layers[0]
    last = test.layers[-1]
    embedding = None
    if test.embedded:
        embedding = "stem" if first.kind == "stem" else "embedding"
    return {
        "kind": "stage" if last.kind == "stage" else "block",
        "layers": len(test.layers) - test.embedded,
        "dim": last.dim,
        "norm": last.norm,
        "embedding": embedding,
    }


def _accuracy_fields(subject: Subject, classification: Classification) -> dict[str, Any]:
    """Return the fields of FeaturesRow about accuracy: on the last layer, and of the model."""
    by_similarity: dict[str, Estimate] = {}
    by_majority: dict[str, Estimate] = {}
    probe = None
    # rows of the last layer come last and replace those of the others
    for row in classification.depth:
        k = neighbours_of(row.classifier)
        if row.weighting == "dino":
            by_similarity[k] = row.accuracy
        elif row.weighting == "majority":
            by_majority[k] = row.accuracy
        else:
            probe = row.accuracy
    by_model = None
    if BY_MODEL in classification.correct:
        by_model = accuracy(classification.correct[BY_MODEL], groups=subject.test.groups)
    return {
        "accuracy": by_model,
        "probe": probe,
        "knn": by_similarity,
        "majority": by_majority,
        "precision": classification.precision,
    }


def _notes(
    features: FeaturesOfSplits, classification: Classification, note_on_words: str
) -> tuple[NoteRow, ...]:
    """Return the notes on words, features and classification, each once."""
    notes: dict[str, None] = {}
    if note_on_words:
        notes[note_on_words] = None
    for name in ("test", "bank"):
        if name in features:
            notes.update(dict.fromkeys(features[name].notes))
    notes.update(dict.fromkeys(classification.notes))
    return tuple(NoteRow(note) for note in notes)


def _similarity_rows(subject: Subject, features: Sequence[Features]) -> Iterator[LayersRow]:
    """Yield every pair of layers, of one model and of two.

    Yields nothing if CKA is not defined for so few images.
    """
    if len(features[0]) < FEWEST:
        return
    for first, second in combinations_with_replacement(features, 2):
        row_type: type[LayersRow] = BetweenRow
        other: Features | None = second
        if first is second:
            row_type = LayersRow
            other = None  # computes the similarity within one model
        cka = similarity(first, other, sources=subject.test.groups, seed=subject.seed)
        ranks = distance_correlation(first, other, seed=subject.seed).values
        for row, column in np.ndindex(tuple(cka.values.shape)):
            rank = float(ranks[row, column])
            yield row_type(
                first=first.alias,
                second=second.alias,
                layer=_layer_name(first.layers[row]),
                other=_layer_name(second.layers[column]),
                cka=_cell(cka, row, column),
                rank=rank if np.isfinite(rank) else None,
            )


def _layer_name(layer: FeatureLayer) -> str:
    return EMBEDDING if layer.index is None else str(layer.index)


def _cell(cka: Similarity, row: int, column: int) -> Estimate | None:
    """Return the similarity of two layers, None if the features of one do not vary."""
    value = float(cka.values[row, column])
    if not np.isfinite(value):
        return None
    low = None if cka.low is None else float(cka.low[row, column])
    high = None if cka.high is None else float(cka.high[row, column])
    return Estimate(value, low, high, cka.n, unit="")
