"""Of a comparison: both models on images made harder, and what they go by where shape and texture disagree."""

from collections.abc import Sequence

from vitlens.analysis.failures.disturbances import DISTURBANCES
from vitlens.analysis.failures.disturbed import passes, robustness
from vitlens.analysis.failures.shape_bias import require_cues, shape_bias
from vitlens.commands.scaffold.folder import RunFolder
from vitlens.commands.scaffold.options import RunOptions
from vitlens.commands.scaffold.progress import progress
from vitlens.data.catalogue import load_data
from vitlens.data.cue_conflict import cues_of
from vitlens.data.shapes import CLASSES as SHAPES
from vitlens.data.shapes import shapes
from vitlens.data.split import Split
from vitlens.models.model import Model

HARDENED = 500  # images that are made harder, at every level


def keep_robustness(folder: RunFolder, models: Sequence[Model], splits: Sequence[Split], options: RunOptions) -> None:
    """Accuracy of both models by level of every disturbance; the same seeded subset of images for both."""
    rows = []
    for model, split in zip(models, splits):
        some = split.limit(HARDENED, seed=options.seed)
        with progress(f"{model.alias} on harder images", passes(some), quiet=options.quiet) as advance:
            found = robustness(
                model,
                some,
                batch_size=options.batch_size,
                precision=options.precision,
                seed=options.seed,
                advance=advance,
            )
        for way in found:
            for level, estimate in zip(way.levels, way.accuracies(seed=options.seed)):
                folder.metric(f"hardened_accuracy/{model.alias}/{way.kind}/{level:g}", estimate)
                rows.append(
                    {
                        "model": model.alias, "kind": way.kind, "level": level, "accuracy": estimate.value,
                        "low": estimate.low, "high": estimate.high, "n": estimate.n,
                    }
                )  # fmt: skip
    folder.table("robustness", rows)


def conflicts(
    models: Sequence[Model], splits: Sequence[Split], cue_conflict: str | None, options: RunOptions
) -> list[Split]:
    """The cue conflicts to ask both models about, as each takes them: those named, the data's own, or the embedded
    ones for models of the embedded shapes; none where there are none.

    Raises DataError where those named are of another kind.
    """
    if cue_conflict is not None:
        found = [
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
        for split in found:
            require_cues(split)
        return found
    cues = cues_of(splits[0])
    if cues is not None and bool(cues.conflict.any()):
        return list(splits)
    if splits[0].classes == SHAPES and all(set(SHAPES) <= set(model.classes) for model in models):
        return [shapes("test", cue="conflict", seed=options.seed, canvas=splits[0].size[0])] * len(models)
    return []


def keep_shape_bias(folder: RunFolder, models: Sequence[Model], splits: Sequence[Split], options: RunOptions) -> None:
    """The shape bias of both models, overall and by class of shape; an empty table where there is no cue conflict."""
    rows: list[dict[str, object]] = []
    for model, split in zip(models, splits):
        with progress(f"{model.alias} on cue conflicts", len(split), quiet=options.quiet) as advance:
            found = shape_bias(
                model,
                split,
                batch_size=options.batch_size,
                precision=options.precision,
                seed=options.seed,
                advance=advance,
            )
        if found.bias is not None:
            folder.metric(f"shape_bias/{model.alias}", found.bias)
        folder.metric(f"shape_answers/{model.alias}", found.shape)
        folder.metric(f"texture_answers/{model.alias}", found.texture)
        rows += [
            {
                "model": model.alias, "class": one.name, "n": one.n, "shape": one.shape, "texture": one.texture,
                "data": split.title or split.name, "note": found.note,
            }
            for one in found.by_class
        ]  # fmt: skip
    folder.table("shape_bias", rows)


def level_words(kind: str, level: float) -> str:
    """A level as a figure's axis says it."""
    if kind == "shuffle":
        return f"{level:.0f}"
    if kind == "low-pass" and level > 1.4:
        return "all"
    return f"{100 * level:.0f}"


def kinds() -> tuple[str, ...]:
    """The ways to make images harder, in the order of their panels."""
    return tuple(DISTURBANCES)
