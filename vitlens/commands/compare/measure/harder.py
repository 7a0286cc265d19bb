"""Both models on disturbed images, and on images whose shape and texture belong to different classes."""

from collections.abc import Iterator, Sequence

from vitlens.analysis.failures.disturbed import DisturbedOutcomes, passes, robustness
from vitlens.analysis.failures.shape_bias import require_cues, shape_bias
from vitlens.commands.compare.record import (
    CONFLICTS,
    DISTURBED_PAIRS,
    HARDENED,
    HARDER,
    SHAPE_ANSWERS,
    SHAPE_BIAS,
    TEXTURE_ANSWERS,
    DisturbedPairRow,
    HarderRow,
    ShapeBiasRow,
)
from vitlens.commands.run.folder import RunFolder
from vitlens.commands.run.options import RunOptions
from vitlens.commands.run.progress.bar import progress
from vitlens.data.catalogue import load_data
from vitlens.data.cue_conflict import cues_of
from vitlens.data.shapes import CLASSES as SHAPES
from vitlens.data.shapes import shapes
from vitlens.data.split import Split
from vitlens.models.model import Model
from vitlens.uncertainty import accuracy_difference, holm, mcnemar


def write_harder(
    folder: RunFolder, models: Sequence[Model], splits: Sequence[Split], options: RunOptions, *, most: int
) -> None:
    """Accuracy of both models by level of every disturbance, on the same seeded, class-balanced subset of at
    most so many images, and their paired differences; empty tables without splits."""
    rows, outcomes = [], []
    for model, split in zip(models, splits):
        subset = split.limit(most, seed=options.seed)
        with progress(f"{model.alias} on disturbed images", passes(subset), quiet=options.quiet) as advance:
            disturbed = robustness(
                model,
                subset,
                batch_size=options.batch_size,
                precision=options.precision,
                seed=options.seed,
                advance=advance,
            )
        outcomes.append(disturbed)
        for disturbance in disturbed:
            for level, estimate in zip(disturbance.levels, disturbance.accuracies(seed=options.seed)):
                folder.metric(HARDENED(model=model.alias, kind=disturbance.kind, level=f"{level:g}"), estimate)
                rows.append(
                    HarderRow(
                        model.alias, disturbance.kind, level, estimate.value, estimate.low, estimate.high, estimate.n
                    )
                )  # fmt: skip
    folder.write(HARDER, rows)
    folder.write(DISTURBED_PAIRS, list(_paired(*outcomes, seed=options.seed)) if outcomes else [])


def _paired(
    first: Sequence[DisturbedOutcomes], second: Sequence[DisturbedOutcomes], *, seed: int
) -> Iterator[DisturbedPairRow]:
    """The difference of two models at every level of every disturbance, all tests corrected together (Holm)."""
    cases = [
        (one.kind, level, own, other, one.groups)
        for one, two in zip(first, second)
        for level, own, other in zip(one.levels, one.correct, two.correct)
    ]
    tests = [mcnemar(int((own & ~other).sum()), int((other & ~own).sum())) for _, _, own, other, _ in cases]
    for (kind, level, own, other, groups), p, p_holm in zip(cases, tests, holm(tests)):
        gain = accuracy_difference(own, other, groups=groups, seed=seed)
        yield DisturbedPairRow(kind, level, gain.value, gain.low, gain.high, len(own), p, p_holm)


def cue_conflicts(
    models: Sequence[Model], splits: Sequence[Split], cue_conflict: str | None, options: RunOptions
) -> list[Split]:
    """Images with cue conflicts, preprocessed for each model: those of --cue-conflict, else those of the data, else the
    embedded shapes for models of their classes, else none.

    Raises DataError where --cue-conflict names other images.
    """
    if cue_conflict is not None:
        named = [
            load_data(
                cue_conflict,
                part="test",
                preprocessing=model.preprocessing,
                data_dir=options.data_dir,
                seed=options.seed,
                whole=True,
            )
            for model in models
        ]
        for split in named:
            require_cues(split)
        return named
    cues = cues_of(splits[0])
    if cues is not None and bool(cues.conflict.any()):
        return list(splits)
    if splits[0].classes == SHAPES and all(set(SHAPES) <= set(model.classes) for model in models):
        return [shapes("test", cue="conflict", seed=options.seed, canvas=splits[0].size[0])] * len(models)
    return []


def write_shape_bias(folder: RunFolder, models: Sequence[Model], splits: Sequence[Split], options: RunOptions) -> None:
    """The shape bias of both models, overall and by class of shape; an empty table where there is no cue conflict."""
    rows = []
    for model, split in zip(models, splits):
        with progress(f"{model.alias} on cue conflicts", len(split), quiet=options.quiet) as advance:
            answers = shape_bias(
                model,
                split,
                batch_size=options.batch_size,
                precision=options.precision,
                seed=options.seed,
                advance=advance,
            )
        if answers.bias is not None:
            folder.metric(SHAPE_BIAS(model=model.alias), answers.bias)
        folder.metric(SHAPE_ANSWERS(model=model.alias), answers.shape)
        folder.metric(TEXTURE_ANSWERS(model=model.alias), answers.texture)
        data = split.title or split.name
        rows += [
            ShapeBiasRow(model.alias, of_class.name, of_class.n, of_class.shape, of_class.texture, data, answers.note)
            for of_class in answers.by_class
        ]
    folder.write(CONFLICTS, rows)
