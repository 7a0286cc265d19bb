"""How compared models were trained, as far as it is known, and the differences in sentences; free of torch."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from vitlens.arrays import Digests
from vitlens.errors import InputError
from vitlens.names import BUNDLED, PRESETS
from vitlens.record import OfModel, RunRecord, col, read_run
from vitlens.report.prose import Marked, listed, say
from vitlens.training.recipe import Recipe

if TYPE_CHECKING:
    from vitlens.models.model import Model


@dataclass(frozen=True)
class Budget(OfModel):
    """How a model was trained; None: not known.

    start: "random weights" or the model whose weights it began with; data: the name or folder of its images; images:
    how many; epochs: passes over them; steps: of the optimiser; batch_size: images a step; augmentation: in words;
    seed; teacher: the model it was distilled from ("none").
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
    """numbers: of the images that a model was trained on, by their content (see run/unseen.py), sorted."""

    numbers: Digests


TRAINING_IMAGES: Final = "training_images"  # the file of arrays
# benchmarks/bundle.py, which trained both pairs: all models alike but for their data
_BUNDLED: Final = Budget(
    "",
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
_AUGMENTATION: Final = {
    "crop_padding": "crop {} px",
    "flip": "flip",
    "randaugment": "RandAugment {}",
    "erasing": "erasing {}",
    "mixup": "mixup {}",
    "cutmix": "CutMix {}",
}


def differences(budgets: Sequence[Budget]) -> Mapping[str, tuple[str | int, ...]]:
    """Return the fields in which the trainings differ, of those known of all of them, with their values in this
    order."""
    values = {each.name: tuple(getattr(budget, each.name) for budget in budgets) for each in fields(Budget)[1:]}
    return {name: own for name, own in values.items() if None not in own and len(set(own)) > 1}


def trained(budgets: Sequence[Budget]) -> Iterator[str]:
    """Yield in what the trainings of the models differ, and of which models that is not known."""
    parts = [
        say(
            "{{ what }} {{ values }}",
            what=Marked(name.replace("_", " ")),
            values=listed([say("{{ v }} ({{ m }})", v=v, m=b.model) for v, b in zip(values, budgets)]),
        )
        for name, values in differences(budgets).items()
    ]
    if parts:
        yield f"The models were trained differently: {'; '.join(parts)}. Differences between them may come from this."
    unknown = [budget.model for budget in budgets if budget == Budget(budget.model)]
    if unknown and len(budgets) > 1:
        yield say(
            "It is not known how {{ names|names }} {{ 'was' if names|length == 1 else 'were' }} trained, so "
            "differences may come from training as well as from architecture.",
            names=unknown,
        )


def trainings_of(models: "Sequence[Model]") -> tuple[Budget, ...]:
    """Return how the models were trained, where there are several to compare."""
    return tuple(map(budget_of, models)) if len(models) > 1 else ()


def budget_of(model: "Model") -> Budget:
    """Return how a model was trained, from the folder of its run; for the bundled pairs as benchmarks/bundle.py made
    them."""
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
    """Return the run of `vitlens train` that wrote the weights; None where there is none."""
    place = Path(model.provenance.name)
    with suppress(InputError):
        run = read_run(place if place.is_dir() else place.parent)
        return run if run.command == "train" else None
    return None


def budget_of_run(alias: str, run: RunRecord) -> Budget:
    """Return how the model of a run of `vitlens train` was trained, from its config.json and results.json."""
    options, data, recipe = (_mapping(run.config.get(name)) for name in ("options", "data", "recipe"))
    history = _mapping(run.results["tables"]).get("history")
    last = _mapping(history[-1]) if isinstance(history, list) and history else {}
    name = options.get("model")
    teacher = _mapping(options.get("teaching")).get("teacher")
    scratch = name in PRESETS and not _mapping(options.get("tuning")).get("weights")
    return Budget(
        alias,
        start="random weights" if scratch else _as(str, name),
        data=_as(str, options.get("data")) or "digits",  # the default
        images=_as(int, data.get("images")),
        epochs=len(history) if isinstance(history, list) and history else _as(int, recipe.get("epochs")),
        steps=_as(int, last.get("step")),
        batch_size=_as(int, recipe.get("batch_size")),
        augmentation=augmentation_words(recipe) if recipe else None,
        seed=_as(int, run.config.get("seed")),
        teacher=teacher if isinstance(teacher, str) else "none",
    )


def augmentation_words(recipe: Mapping[str, Any]) -> str:
    """Return the augmentation of a recipe's numbers in words: "crop 4 px, flip, CutMix 1"; "none"."""
    values = {**Recipe().numbers(), **recipe}
    return ", ".join(text.format(values[name]) for name, text in _AUGMENTATION.items() if values[name]) or "none"


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _as(kind: type, value: Any) -> Any:
    return value if isinstance(value, kind) and not isinstance(value, bool) else None
