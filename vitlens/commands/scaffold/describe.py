"""The settings of a run in config.json (options, models, data), and a report's sentences about the data."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from vitlens.commands.scaffold.options import RunOptions
from vitlens.recorded import Data
from vitlens.records import Record
from vitlens.report.document import Sentence

if TYPE_CHECKING:
    from vitlens.data.split import Split
    from vitlens.models.model import Model


def settings(
    options: Any, run: RunOptions, *, models: "Sequence[Model]" = (), split: "Split | None" = None, **more: object
) -> dict[str, object]:
    """The settings of a run for RunFolder.create(config=...), read back by `Record.options` and `Record.config`.

    options: the dataclass that the command took; run: its run options as they hold in this process; more: further
    entries of config.json.
    """
    content: dict[str, object] = {
        "command_line": run.command,
        "seed": run.seed,
        "precision": run.precision,
        "device": str(models[0].device) if models else run.device,
        "options": asdict(options),
        "models": [_model(model) for model in models],
        **more,
    }
    return content if split is None else {**content, "data": _split(split)}


def _model(model: "Model") -> dict[str, object]:
    return {
        "alias": model.alias,
        **asdict(model.provenance),
        "family": model.anatomy.family,
        "architecture": model.architecture,
        "parameters": model.parameter_count(),
        "preprocessing": asdict(model.preprocessing),
        "classes": len(model.classes),
    }


def _split(split: "Split") -> dict[str, object]:
    return {
        "name": split.name,
        "title": split.title or split.name,
        "part": split.part,
        "images": len(split),
        "size": list(split.size),
        "classes": len(split.classes),
        "skipped": [asdict(skipped) for skipped in split.skipped],
        "notes": list(split.notes),
    }


def data_sentences(record: Record) -> tuple[Sentence, ...]:
    """The images of a run: how many of which data set, how they were processed, which were left out."""
    data = record.config.data
    return () if data is None else (Sentence(" ".join(_data_words(data)), (data,), "setting"),)


def _data_words(data: Data) -> Iterator[str]:
    unnamed = data.title == "images"  # files named by --images, of no data set
    yield f"{data.images:,} image{'s' if data.images != 1 else ''}{'' if unnamed else ' of ' + data.title}."
    for note in data.notes:
        yield f"{note[:1].upper()}{note[1:].rstrip('.')}."
    if data.skipped:
        files = "; ".join(f"{skipped.file}: {skipped.reason}" for skipped in data.skipped[:10])
        more = f"; and {len(data.skipped) - 10} more in config.json" if len(data.skipped) > 10 else ""
        were = "images were" if len(data.skipped) > 1 else "image was"
        yield f"{len(data.skipped)} {were} left out ({files}{more})."


def predicted_sentences(predicted: bool) -> Iterator[Sentence]:
    """What clean accuracy means where the model's predictions were used as labels (--predicted)."""
    if predicted:
        yield Sentence(
            "The model's own predictions are used as labels (--predicted): clean accuracy is 100 % by definition; a "
            "lower one is the share of predictions that stay the same.",
            says="setting",
        )
