"""A list of the objectives of a training, one entry each.

The module is free of torch, because `vitlens train`, reports and docs read it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

from vitlens.errors import InputError, UnknownNameError, argument, set_option
from vitlens.names import FeaturePool
from vitlens.training.recipe import Recipe

# nats of information about the image in a teacher's outputs, below which they have collapsed
COLLAPSE: Final = 0.1


@dataclass(frozen=True)
class TrainingObjective:
    """One objective of a training.

    name: the name of the objective.
    title: the name in reports.
    meaning: the minimised quantity, in one sentence.
    source: the paper.
    needs: what the images need in addition to their pixels ("labels", "captions"), or "".
    recipe: the settings of the training for images of 32 px, or None for those of the preset.
    settings: the settings of the objective, which --set changes.
    module: the class of the trained `Pretrained` (objectives/pretraining.py) as "module:class", or
        "" for the model itself.
    pool: the tokens from which features are read.
    classifies: whether the saved model has a classifier.
    """

    name: str
    title: str
    meaning: str
    source: str
    needs: str = ""
    recipe: Recipe | None = None
    settings: Mapping[str, float | int | bool] = field(default_factory=dict)
    module: str = ""
    pool: FeaturePool = "cls"
    classifies: bool = False

    def changed(self, changes: Mapping[str, Any]) -> dict[str, float | int | bool]:
        """Return the settings with some changed.

        Raises InputError for an unknown setting, and for a value of another type.
        """
        settings = dict(self.settings)
        for name, value in changes.items():
            if name not in settings:
                names = ", ".join(settings) or "none"
                raise InputError(
                    f"expected a setting of {argument('objective', self.name)} ({names}), found "
                    f"{name!r}"
                )
            kind = type(settings[name])
            is_whole = isinstance(value, int) and not isinstance(value, bool)
            is_accepted = type(value) is kind or (kind is float and is_whole)
            if not is_accepted:
                raise InputError(
                    f"expected {name} as in {set_option(name, settings[name])}, found "
                    f"{str(value)!r}"
                )
            settings[name] = kind(value)
        return settings


_FROM_TRIALS: Final = (
    "from some trials on shapes at 32 px, one seed, with the augmentation of the objective itself"
)
_ENTRIES: Final = (
    TrainingObjective(
        name="classify",
        title="Classification",
        meaning="the cross-entropy of the predicted class with the label",
        source="Dosovitskiy 2021",
        needs="labels",
        classifies=True,
    ),
    TrainingObjective(
        name="mae",
        title="Masked autoencoder",
        meaning="the squared error of the pixels of masked patches, reconstructed by a small "
        "decoder from the patches that are left",
        source="He 2022",
        recipe=Recipe(
            epochs=40,
            batch_size=128,
            optimiser="muon",
            learning_rate=2e-3,
            warmup=0.1,
            source=_FROM_TRIALS,
        ),
        settings={"mask_ratio": 0.75, "decoder_dim": 96, "decoder_depth": 2, "normalise": True},
        module="vitlens.training.objectives.mae:MaskedAutoencoder",
        pool="mean",
    ),
    TrainingObjective(
        name="dino",
        title="Self-distillation",
        meaning="the cross-entropy of a student's outputs on crops of an image with its "
        "teacher's outputs on other crops; the teacher is the student's moving average",
        source="Caron 2021",
        recipe=Recipe(
            epochs=30,
            batch_size=64,
            learning_rate=2e-3,
            weight_decay=0.04,
            warmup=0.1,
            source=_FROM_TRIALS,
        ),
        settings={
            "local_crops": 4,
            "local_size": 16,
            "outputs": 128,
            "momentum": 0.98,
            "centring": True,
            "student_temperature": 0.1,
            "teacher_temperature": 0.04,
            "jitter": 0.6,
            "turn": 20.0,
        },
        module="vitlens.training.objectives.dino:SelfDistillation",
    ),
    TrainingObjective(
        name="clip",
        title="Images and captions",
        meaning="the symmetric cross-entropy (InfoNCE) of matching captions to images, and "
        "images to captions, within a batch",
        source="Radford 2021",
        needs="captions",
        recipe=Recipe(
            epochs=20,
            batch_size=128,
            optimiser="muon",
            learning_rate=2e-3,
            warmup=0.1,
            crop_padding=2,
            source=_FROM_TRIALS,
        ),
        settings={"text_dim": 64, "text_depth": 2, "text_heads": 2},
        module="vitlens.training.objectives.clip:ImagesAndCaptions",
        classifies=True,
    ),
)
OBJECTIVES: Final[Mapping[str, TrainingObjective]] = MappingProxyType(
    {entry.name: entry for entry in _ENTRIES}
)
CLASSIFY: Final = "classify"


def objective_named(name: str) -> TrainingObjective:
    """Return the objective of that name. Raises UnknownNameError."""
    if name not in OBJECTIVES:
        raise UnknownNameError("objective", name, OBJECTIVES)
    return OBJECTIVES[name]
