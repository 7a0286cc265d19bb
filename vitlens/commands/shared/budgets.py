"""How compared models were trained, as far as it is known: data, epochs, augmentation."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from vitlens.commands.run.folder import RunFolder
from vitlens.commands.run.unseen import training_run
from vitlens.commands.shared.trainings import TRAINING, Budget
from vitlens.files import RunRecord
from vitlens.models.model import Model
from vitlens.names import BUNDLED, PRESETS
from vitlens.training.recipe import Recipe

# benchmarks/bundle.py, which trained the pair: both models alike
_BUNDLED: Final = Budget(
    "", "random weights", "digits", images=4788, epochs=110, steps=4070, batch_size=128, augmentation="crop 2 px",
    seed=0, teacher="none",
)  # fmt: skip


def budget_of(model: Model) -> Budget:
    """How a model was trained, from the folder of its run; for the bundled pair as benchmarks/bundle.py made it."""
    alias, name = model.alias, model.provenance.name
    if model.provenance.weights == "random":
        return Budget(alias, start="random weights", epochs=0, steps=0)
    if name in BUNDLED:
        return replace(_BUNDLED, model=alias)
    run = training_run(model)
    return Budget(alias) if run is None else budget_of_run(alias, run)


def budget_of_run(alias: str, run: RunRecord) -> Budget:
    """How the model of a run of `vitlens train` was trained, from its config.json and results.json."""
    options, data, recipe = (_mapping(run.config.get(name)) for name in ("plan", "data", "recipe"))
    tables = _mapping(run.results["tables"])
    history = tables.get("history")
    last = _mapping(history[-1]) if isinstance(history, list) and history else {}
    name, teaching = options.get("model"), _mapping(options.get("teaching"))
    weights = _mapping(options.get("tuning")).get("weights")
    scratch = name in PRESETS and not weights
    teacher = teaching.get("teacher")
    return Budget(
        alias,
        start="random weights" if scratch else name if isinstance(name, str) else None,
        data=_as(str, options.get("data")),
        images=_as(int, data.get("images")),
        epochs=len(history) if isinstance(history, list) and history else _as(int, recipe.get("epochs")),
        steps=_as(int, last.get("step")),
        batch_size=_as(int, recipe.get("batch_size")),
        augmentation=augmentation_words(recipe) if recipe else None,
        seed=_as(int, run.config.get("seed")),
        teacher=teacher if isinstance(teacher, str) else "none",
    )


def augmentation_words(recipe: Mapping[str, Any]) -> str:
    """The augmentation of a recipe's numbers in words: "crop 4 px, flip, CutMix 1"; "none"."""
    defaults, parts = Recipe().numbers(), []
    for name, template in _AUGMENTATION.items():
        value = recipe.get(name, defaults[name])
        if value:
            parts.append(template.format(value))
    return ", ".join(parts) or "none"


def write_trainings(folder: RunFolder, models: Sequence[Model]) -> None:
    """Write how the models were trained, where there are several to compare."""
    folder.write(TRAINING, trainings_of(models))


def trainings_of(models: Sequence[Model]) -> tuple[Budget, ...]:
    """How the models were trained, where there are several to compare."""
    return tuple(map(budget_of, models)) if len(models) > 1 else ()


_AUGMENTATION: Final = {
    "crop_padding": "crop {} px",
    "flip": "flip",
    "randaugment": "RandAugment {}",
    "erasing": "erasing {}",
    "mixup": "mixup {}",
    "cutmix": "CutMix {}",
}


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _as(kind: type, value: Any) -> Any:
    return value if isinstance(value, kind) and not isinstance(value, bool) else None
