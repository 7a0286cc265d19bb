"""The settings of a run in config.json: options, models, data."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from vitlens.commands.run.options import RunOptions

if TYPE_CHECKING:
    from vitlens.data.split import Split
    from vitlens.models.model import Model


def settings(
    options: Any, run: RunOptions, *, models: "Sequence[Model]" = (), split: "Split | None" = None, **more: object
) -> dict[str, object]:
    """The settings of a run for RunFolder.create(config=...), read back as `Record.config`.

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
