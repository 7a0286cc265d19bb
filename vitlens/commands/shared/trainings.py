"""Known facts about the training of compared models, and sentences about their differences; free of
torch.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from vitlens.arrays import Digests
from vitlens.errors import InputError
from vitlens.names import BUNDLED, PRESETS
from vitlens.record import OfModel, RunRecord, col, read_run
from vitlens.report.prose import listed, say
from vitlens.training.recipe import Recipe

if TYPE_CHECKING:
    from vitlens.models.model import Model


@dataclass(frozen=True)
class Budget(OfModel):
    """The training of a model; None for what is not known.

    start: "random weights" or the model whose weights it began with.
    data: name or folder of its images.
    images: number of training images.
    epochs: passes over them.
    steps: the number of steps of the optimiser.
    batch_size: images a step.
    augmentation: in words.
    teacher: the model it was distilled from ("none").
    """

    start: str | None = col("start", default=None)
    data: str | None = col("data", default=None)
    images: int | None = col("images", default=None)
    epochs: int | None = col("epochs", default=None)
    steps: int | None = col("steps", default=None)
    batch_size: int | None = col("batch size", default=None)
    augmentation: str | None = col("augmentation", default=None)
    seed: int | None = col("seed", default=None)
    teacher: str | None = col("teacher", default=None)


@dataclass(frozen=True)
class TrainingImages:
    """Fingerprints of the images that a model was trained on.

    numbers: one for each image, computed from its content (run/unseen.py), sorted.
    """

    numbers: Digests


TRAINING_IMAGES: Final = "training_images"  # the file of TrainingImages in a run's folder
# all bundled models were trained like this (benchmarks/bundle.py), except for their data
_BUNDLED: Final = Budget(
    model="",
    start="weights of easier scenes of digits",
    data="digits",
    images=4788,
    epochs=7,
    steps=518,
    batch_size=64,
    augmentation="crop 2 px",
    seed=0,
    teacher="none",
)
# by field of Recipe, with the field's value
_AUGMENTATION: Final = {
    "crop_padding": "crop {} px",
    "flip": "flip",
    "randaugment": "RandAugment {}",
    "erasing": "erasing {}",
    "mixup": "mixup {}",
    "cutmix": "CutMix {}",
}


def differences(budgets: Sequence[Budget]) -> Mapping[str, tuple[str | int, ...]]:
    """Return the values of each field in which the trainings differ, in the order of the models.

    Fields that are not known of all models are left out.
    """
    differing = {}
    for field in fields(Budget):
        if field.name == "model":
            continue
        values = tuple(getattr(budget, field.name) for budget in budgets)
        if None not in values and len(set(values)) > 1:
            differing[field.name] = values
    return differing


def trained(budgets: Sequence[Budget]) -> Iterator[str]:
    """Yield sentences on how trainings differ, and on models of which the training is not known."""
    differences_in_words = []
    for name, values in differences(budgets).items():
        values_of_models = []
        for value, budget in zip(values, budgets):
            words = say("{{ value }} ({{ model }})", value=value, model=budget.model)
            values_of_models.append(words)
        field_title = name.replace("_", " ")
        differences_in_words.append(f"{field_title} {listed(values_of_models)}")
    if differences_in_words:
        yield (
            f"The models were trained differently: {'; '.join(differences_in_words)}. Differences "
            "between them may come from this."
        )
    # a budget of which nothing but the model is known
    unknown = [budget.model for budget in budgets if budget == Budget(budget.model)]
    if unknown and len(budgets) > 1:
        yield say(
            "It is not known how {{ names|names }} {{ 'was' if names|length == 1 else 'were' }} "
            "trained, so differences may come from training as well as from architecture.",
            names=unknown,
        )


def trainings_of(models: "Sequence[Model]") -> tuple[Budget, ...]:
    """Return the trainings of several models; nothing for a single model."""
    if len(models) < 2:
        return ()
    return tuple(budget_of(model) for model in models)


def budget_of(model: "Model") -> Budget:
    """Return the training of a model from the folder of its run, or that of a bundled model."""
    alias = model.alias
    name = model.provenance.name
    if model.provenance.weights == "random":
        return Budget(alias, start="random weights", epochs=0, steps=0)
    if name in BUNDLED:
        data = "digits-shortcut" if name.endswith("shortcut") else "digits"
        return replace(_BUNDLED, model=alias, data=data)
    run = training_run(model)
    return Budget(alias) if run is None else budget_of_run(alias, run)


def training_run(model: "Model") -> RunRecord | None:
    """Return the run of `vitlens train` that wrote the weights; None if there is none."""
    path = Path(model.provenance.name)  # of the run's folder, or of a file in it
    folder = path if path.is_dir() else path.parent
    try:
        run = read_run(folder)
    except InputError:  # the folder is not that of a run
        return None
    return run if run.command == "train" else None


def budget_of_run(alias: str, run: RunRecord) -> Budget:
    """Return the training of a run of `vitlens train`, from its config.json and results.json.

    The files may be of any version or edited by hand: entries of another type count as not known.
    """
    options = _mapping(run.config.get("options"))
    data = _mapping(run.config.get("data"))
    recipe = _mapping(run.config.get("recipe"))
    history = _mapping(run.results.get("tables")).get("history")
    epochs = _as(int, recipe.get("epochs"))  # planned
    last_epoch: Mapping[str, Any] = {}
    if isinstance(history, list) and history:
        epochs = len(history)  # done
        last_epoch = _mapping(history[-1])
    name = _as(str, options.get("model"))
    teacher = _mapping(options.get("teaching")).get("teacher")
    is_from_scratch = name in PRESETS and not _mapping(options.get("tuning")).get("weights")
    return Budget(
        alias,
        start="random weights" if is_from_scratch else name,
        data=_as(str, options.get("data")) or "digits",  # the default
        images=_as(int, data.get("images")),
        epochs=epochs,
        steps=_as(int, last_epoch.get("step")),
        batch_size=_as(int, recipe.get("batch_size")),
        augmentation=augmentation_words(recipe) if recipe else None,
        seed=_as(int, run.config.get("seed")),
        teacher=teacher if isinstance(teacher, str) else "none",
    )


def augmentation_words(recipe: Mapping[str, Any]) -> str:
    """Return the augmentation of a recipe in words: "crop 4 px, flip, CutMix 1", or "none".

    recipe: values by field of Recipe; missing fields have their default.
    """
    values = {**Recipe().numbers(), **recipe}
    words = []
    for name, template in _AUGMENTATION.items():
        if values[name]:  # 0 is off
            words.append(template.format(values[name]))
    return ", ".join(words) or "none"


def _mapping(value: object) -> Mapping[str, Any]:
    """Return a mapping unchanged, an empty one for any other value."""
    return value if isinstance(value, Mapping) else {}


def _as(expected: type, value: Any) -> Any:
    """Return a value of the expected type unchanged, None for any other."""
    is_bool = isinstance(value, bool)  # which is an int, but no number of anything
    return value if isinstance(value, expected) and not is_bool else None
