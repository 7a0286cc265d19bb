"""The recipe of a training: all its settings."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import inf
from types import MappingProxyType
from typing import Any, Final

from vitlens.errors import InputError, UnknownNameError
from vitlens.names import OPTIMISERS, PRESETS, RECIPE_NAMES

LEAST_STEPS: Final = 10  # least batches in an epoch, if the batch size comes from the recipe
# least images in a batch: with fewer, the statistics of batch normalisation are too noisy
LEAST_BATCH: Final = 8
# the settings of augmentation
_AUGMENTATION = (
    "crop_padding",
    "flip",
    "randaugment",
    "magnitude",
    "erasing",
    "mixup",
    "cutmix",
    "mix_chance",
    "views",
)
_KINDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a word",
    tuple: "two numbers: A,B",
}

# (settings separated by spaces, a function that is True for a valid value, the words for valid
# values in a message)
_VALID: Final[tuple[tuple[str, Callable[[Any], bool], str], ...]] = (
    ("epochs batch_size accumulate views evaluate_every", lambda value: value >= 1, "at least 1"),
    (
        "weight_decay clip crop_padding randaugment mixup cutmix",
        lambda value: 0 <= value < inf,
        "at least 0",
    ),
    ("warmup minimum erasing mix_chance", lambda value: 0 <= value <= 1, "a share in [0, 1]"),
    ("magnitude", lambda value: 0 <= value <= 30, "from 0 to 30"),
    ("layer_decay", lambda value: 0 < value <= 1, "a share in (0, 1]"),
    ("optimiser", lambda value: value in OPTIMISERS, " or ".join(OPTIMISERS)),
    ("label_smoothing average drop_path", lambda value: 0 <= value < 1, "a share in [0, 1)"),
    ("learning_rate", lambda value: 0 < value < inf, "above 0"),
    ("betas", lambda value: all(0 <= beta < 1 for beta in value), "shares in [0, 1)"),
)


@dataclass(frozen=True)
class Recipe:
    """The settings of a training; raises InputError for invalid ones.

    epochs: the number of passes over the training images. A pass has one view of each, newly
        rendered if the data is generated.
    batch_size: the number of images in a batch over all processes.
    accumulate: the number of parts of a batch over which gradients are accumulated.
    optimiser: "adamw" or "muon".
    learning_rate: the peak of the learning rate.
    weight_decay: the weight decay.
    betas: the betas of AdamW.
    layer_decay: the ratio of a layer's learning rate to that of the layer above.
    warmup: the share of the steps in which the learning rate rises.
    minimum: the last learning rate as a share of the peak.
    clip: the largest gradient norm, 0 for no clipping.
    label_smoothing: the share of a target that is spread over all classes.
    drop_path: the drop path of a preset's last block.
    average: the decay of the averaged weights, which are then tested and saved; 0 for no average.
    crop_padding: the pixels by which an image may be shifted.
    flip: whether images are mirrored left to right half of the time.
    randaugment: the number of RandAugment's operations on each image.
    magnitude: the strength of these operations, from 0 to 30.
    erasing: the probability of a rectangle of noise.
    mixup, cutmix: the parameter of the Beta distribution, 0 for no mixing.
    mix_chance: the probability that a batch is mixed.
    views: the number of views of an image in its batch.
    evaluate_every: the number of epochs between tests on the test images.
    source: where the numbers come from.
    """

    epochs: int = 100
    batch_size: int = 128
    accumulate: int = 1
    optimiser: str = "adamw"
    learning_rate: float = 1e-3
    weight_decay: float = 0.05
    betas: tuple[float, float] = (0.9, 0.999)
    layer_decay: float = 1.0
    warmup: float = 0.05
    minimum: float = 0.01
    clip: float = 1.0
    label_smoothing: float = 0.0
    drop_path: float = 0.0
    average: float = 0.0
    crop_padding: int = 0
    flip: bool = False
    randaugment: int = 0
    magnitude: int = 9
    erasing: float = 0.0
    mixup: float = 0.0
    cutmix: float = 0.0
    mix_chance: float = 1.0
    views: int = 1
    evaluate_every: int = 1
    source: str = ""

    def __post_init__(self) -> None:
        for names, is_valid, expected in _VALID:
            for name in names.split():
                value = getattr(self, name)
                if not is_valid(value):
                    raise InputError(
                        f"expected --{name.replace('_', '-')} {expected}, found {value}"
                    )

    def numbers(self) -> dict[str, object]:
        """Return the settings that determine the result, as JSON values."""
        values = asdict(self) | {"betas": list(self.betas)}
        return {name: value for name, value in values.items() if name != "source"}


def override(recipe: Recipe, changes: Mapping[str, object]) -> Recipe:
    """Return the recipe with some fields changed. Raises InputError for unknown fields."""
    fields = recipe.numbers()
    changed = dict[str, Any]()
    for name, value in changes.items():
        if name not in fields:
            raise InputError(
                f"expected a field of the recipe ({', '.join(fields)}), found {name!r}"
            )
        kind = type(getattr(recipe, name))
        if isinstance(value, list):
            value = tuple(value)
        is_bool = isinstance(value, bool)  # a bool is an int, too
        if kind is float and isinstance(value, int | float) and not is_bool:
            value = float(value)  # also of NumPy's floats
        is_of_kind = type(value) is kind
        if isinstance(value, tuple) and is_of_kind:
            is_of_kind = len(value) == 2 and all(type(item) in (int, float) for item in value)
        if not is_of_kind:
            raise InputError(f"expected {name} as {_KINDS[kind]}, found {value!r}")
        changed[name] = value
    return replace(recipe, **changed)


def recipe_for(preset: str, data: str, *, named: str | None = None) -> Recipe:
    """Return the recipe of a preset and a data set, else of the preset, else of fine-tuning.

    Raises UnknownNameError.

    named: the name of a recipe for any model, which is used instead.
    """
    if named is not None:
        if named not in NAMED:
            raise UnknownNameError("recipe", named, RECIPE_NAMES)
        return NAMED[named]
    return RECIPES.get(f"{preset}/{data}") or RECIPES.get(preset) or FINE_TUNING


def equal_budgets(
    presets: Sequence[str], data: str, *, epochs: int | None = None, batch_size: int | None = None
) -> Mapping[str, Mapping[str, object]]:
    """Return changes to the recipes of presets that give all of them one budget.

    The budget is the passes, batches and augmentation. The augmentation is that of the first
    preset's recipe. The passes are the most of all recipes, and the batches the smallest, with
    learning rates scaled to them. All models then see the same images in the same number of steps.
    Optimiser and regularisation are not changed, as they suit one architecture.

    epochs: the passes, in place of the most of all recipes.
    batch_size: the batch size, in place of the smallest one. It scales no learning rate.
    """
    recipes = {preset: recipe_for(preset, data) for preset in presets}
    batch_sizes = {recipe.batch_size for recipe in recipes.values()}
    most_epochs = max((recipe.epochs for recipe in recipes.values()), default=0)
    changes_by_preset: dict[str, Mapping[str, object]] = {}
    for preset, recipe in recipes.items():
        budget = {name: getattr(recipes[presets[0]], name) for name in _AUGMENTATION}
        budget["epochs"] = epochs or most_epochs
        if batch_size is not None:
            budget["batch_size"] = batch_size
        elif len(batch_sizes) > 1:
            scaled = with_batch_size(recipe, min(batch_sizes))
            budget["batch_size"] = scaled.batch_size
            budget["learning_rate"] = scaled.learning_rate
        changes_by_preset[preset] = {
            name: value for name, value in budget.items() if value != getattr(recipe, name)
        }
    return changes_by_preset


def fitted(recipe: Recipe, images: int, *, processes: int = 1, rate_given: bool = False) -> Recipe:
    """Return the recipe, with smaller batches if an epoch would have fewer than LEAST_STEPS.

    The batch size then becomes the largest power of two with which an epoch has at least
    LEAST_STEPS batches. It is at least LEAST_BATCH and one image for each process.

    images: the number of training images.
    rate_given: whether the learning rate is the user's. Otherwise, it is scaled as by
        `with_batch_size`.
    """
    if images >= LEAST_STEPS * recipe.batch_size:
        return recipe
    largest_size = max(1, images // LEAST_STEPS)
    power_of_two = 1 << (largest_size.bit_length() - 1)  # the largest one up to largest_size
    size = min(recipe.batch_size, max(LEAST_BATCH, processes, power_of_two))
    return with_batch_size(recipe, size, rate_given=rate_given)


def with_batch_size(recipe: Recipe, size: int, *, rate_given: bool = False) -> Recipe:
    """Return the recipe with batches of this size and a scaled learning rate.

    The rate is scaled by the square root of the ratio (Malladi 2022).

    rate_given: whether the learning rate is the user's, which stays the same.
    """
    if size == recipe.batch_size:
        return recipe
    rate = recipe.learning_rate
    if not rate_given:
        rate *= (size / recipe.batch_size) ** 0.5
    return replace(recipe, batch_size=size, learning_rate=float(f"{rate:.4g}"))


_SMALL_VIT = Recipe(
    batch_size=256,
    optimiser="muon",
    learning_rate=2e-3,
    crop_padding=4,
    flip=True,
    randaugment=2,
    magnitude=9,
    cutmix=1.0,
    mix_chance=0.5,
    label_smoothing=0.1,
    drop_path=0.1,
    average=0.999,
    source=(
        "DeiT's augmentation (Touvron 2021, table 9) made weaker for 2.7 M parameters at 32 px, "
        "with Muon"
    ),
)
_LARGE_VIT = Recipe(
    epochs=300,
    batch_size=1024,
    weight_decay=0.05,
    warmup=5 / 300,
    crop_padding=16,
    flip=True,
    randaugment=2,
    mixup=0.8,
    cutmix=1.0,
    erasing=0.25,
    label_smoothing=0.1,
    drop_path=0.1,
    average=0.99996,
    views=3,
    clip=0.0,
    source="Touvron 2021 (DeiT), table 9, with crops by padding for random resized ones",
)
_RESNET = Recipe(
    crop_padding=4, flip=True, learning_rate=3e-3, source="He 2016, section 4.2, with AdamW for SGD"
)
# digits are never mirrored: a mirrored 2 is not a 2
_DIGITS = Recipe(
    epochs=15,
    batch_size=64,
    optimiser="muon",
    learning_rate=2e-3,
    crop_padding=2,
    average=0.99,
    source="Muon with averaged weights and small batches, for minutes on two cores",
)
_CLEAR_DIGITS = replace(
    _DIGITS,
    epochs=8,
    batch_size=32,
    learning_rate=4e-3,
    source="as for digits, with smaller batches and a higher rate, which clear scenes allow",
)

NAMED: Final[Mapping[str, Recipe]] = MappingProxyType(
    {
        "course": Recipe(
            epochs=25,
            batch_size=128,
            learning_rate=3e-4,
            weight_decay=0.05,
            warmup=0.2,
            minimum=0.0,
            clip=0.0,
            crop_padding=4,
            flip=True,
            source="a university course's ViT from scratch on CIFAR-10",
        ),
        "short": Recipe(
            epochs=10,
            batch_size=128,
            optimiser="muon",
            learning_rate=3e-3,
            warmup=0.1,
            minimum=0.0,
            crop_padding=4,
            flip=True,
            source="Muon (Jordan 2024) with little augmentation, for some epochs on a laptop",
        ),
        "deit": _LARGE_VIT,
    }
)
FINE_TUNING: Final = Recipe(
    epochs=10,
    batch_size=64,
    learning_rate=5e-5,
    flip=True,
    label_smoothing=0.1,
    source="for timm: and torchvision:",
)
FROZEN: Final = Recipe(
    epochs=30,
    batch_size=64,
    learning_rate=1e-3,
    label_smoothing=0.1,
    source=(
        "for a head on cached features: rate and epochs from some trials with DeiT-tiny on "
        "held-out images"
    ),
)
_SMALL_PRESETS: Final = tuple(name for name in PRESETS if not name.endswith("-224"))
# the recipes by preset, or by preset/data
RECIPES: Final[Mapping[str, Recipe]] = MappingProxyType(
    {
        **dict.fromkeys(("vit-micro", "vit-mini", "vit-tiny", "swin-micro"), _SMALL_VIT),
        **dict.fromkeys(
            ("vit-tiny-224", "vit-small-224", "vit-base-224", "swin-tiny-224"), _LARGE_VIT
        ),
        **dict.fromkeys(("resnet20", "resnet18", "resnet50"), _RESNET),
        **dict.fromkeys([f"{name}/digits" for name in _SMALL_PRESETS], _DIGITS),
        **dict.fromkeys([f"{name}/digits-shortcut" for name in _SMALL_PRESETS], _DIGITS),
        **dict.fromkeys([f"{name}/digits-clear" for name in _SMALL_PRESETS], _CLEAR_DIGITS),
    }
)
