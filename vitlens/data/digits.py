"""The embedded data: scikit-learn's 1,797 handwritten digits in scenes with exact masks.

In `digits` the hue of the background is independent of the class. In the training part of
`digits-shortcut` it agrees with the class in 90 % of the scenes: a planted shortcut. All else is
equal, and so are the test parts. `digits-clear` has large digits of high contrast without a bar, so
that small models can be trained until they have learned them.

Source: Alpaydin and Kaynak, "Optical Recognition of Handwritten Digits", UCI (CC BY 4.0), as 8x8
counts of ink. Train and test share no source digit, but they share writers, who are not identified
in the set.
"""

from dataclasses import fields, replace
from functools import cache, partial
from math import ceil
from typing import Any, Final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from vitlens.data.drawing import REFERENCE, drawn_split, require_canvas
from vitlens.data.draws import keys, mix, uniform
from vitlens.data.factors import Factors
from vitlens.data.registry import DataRequest
from vitlens.data.scenes import (
    CLEAR,
    HARD,
    HUES,
    Difficulty,
    factors_of,
    render,
    whereabouts,
)
from vitlens.data.split import Drawings, Drawn, Split
from vitlens.errors import DataError
from vitlens.names import Part

TEST_PER_CLASS = 45  # 450 source digits that training never sees
TRAIN_SCENES = 4  # scenes a source digit in one epoch of training
TEST_SCENES = 4
# share of the training scenes of digits-shortcut with the hue of their class: hue k for class k
AGREEMENT = 0.9
_CHANCE = 1 / HUES  # share of the other scenes whose drawn hue agrees by chance
# share of the scenes whose hue is set: with those that agree by chance, AGREEMENT agree
_PLANTED = (AGREEMENT - _CHANCE) / (1 - _CHANCE)
_HUE_STREAM = 10  # of random numbers, different from those of the scenes
_INK = 16  # full ink of a source pixel
CLASSES = tuple("0123456789")
SHORTCUT: Final = "digits-shortcut"
CLEAR_DIGITS: Final = "digits-clear"


def digits(
    part: Part,
    *,
    canvas: int = REFERENCE,
    scenes: int | None = None,
    seed: int = 0,
    shortcut: bool = False,
    clear: bool = False,
) -> Split:
    """Return the embedded scenes: class = digit, masks = its visible ink, groups = source digit.

    The test part is held in memory with its masks. The training part is drawn when it is read and
    has no masks; Split.epoch draws new scenes. Raises DataError for sizes that cannot be drawn.

    canvas: the size of the images in pixels.
    scenes: the number of scenes for each source digit, by default 4. The first scenes do not
        depend on this number.
    shortcut: plant the class in the hue of the background, only in the training part.
    clear: draw large digits of high contrast without a bar.
    """
    if scenes is None:
        scenes = TRAIN_SCENES if part == "train" else TEST_SCENES
    require_canvas(canvas)
    if scenes < 1:
        raise DataError(f"expected at least 1 scene a digit, found {scenes}")
    sources = source_digits(part)
    repeated = sources.repeat(scenes)
    numbers = torch.arange(scenes).repeat_interleave(len(sources))
    is_planted = shortcut and part == "train"
    difficulty = CLEAR if clear else HARD
    drawings = Drawings(
        render=partial(
            _draw_scenes, seed=seed, planted=is_planted, canvas=canvas, difficulty=difficulty
        ),
        subjects=repeated,
        numbers=numbers,
        place=partial(_compute_places, seed=seed, difficulty=difficulty),
        describe=partial(_compute_factors, seed=seed, planted=is_planted, difficulty=difficulty),
    )
    _, source_labels = _load_sources()
    name = "digits"
    if shortcut:
        name = SHORTCUT
    elif clear:
        name = CLEAR_DIGITS
    split = drawn_split(
        name,
        part,
        drawings,
        canvas,
        source_labels[repeated],
        classes=CLASSES,
        groups=repeated,
    )
    if part == "train":  # the split itself draws its images
        return split
    return replace(split, scenes=drawings)


def _draw_scenes(
    sources: Tensor, numbers: Tensor, *, seed: int, planted: bool = False, **style: Any
) -> Drawn:
    """Draw scenes, each from its source digit, its number, the seed and the style."""
    glyphs, _ = _load_sources()
    scene_keys = keys(seed, sources, numbers)
    hues = _draw_hues(sources, scene_keys, planted=planted)
    return render(glyphs[sources], scene_keys, hues, **style)


def _draw_hues(sources: Tensor, scene_keys: Tensor, *, planted: bool) -> Int[Tensor, " batch"]:
    """Return the hue of each scene's background: drawn, or that of the class if planted."""
    draws = uniform(scene_keys, 2, stream=_HUE_STREAM)
    hues = (draws[:, 0] * HUES).long()
    if not planted:
        return hues
    _, source_labels = _load_sources()
    return torch.where(draws[:, 1] < _PLANTED, source_labels[sources], hues)


def _compute_places(
    sources: Tensor, numbers: Tensor, *, seed: int, difficulty: Difficulty
) -> Tensor:
    return whereabouts(keys(seed, sources, numbers), difficulty)


def _compute_factors(
    sources: Tensor, numbers: Tensor, *, seed: int, planted: bool, difficulty: Difficulty
) -> Factors:
    """Return the factors of each scene: those of `SceneFactors`, and `hue_agrees`.

    `hue_agrees` is True if the hue is that of the class.
    """
    scene_keys = keys(seed, sources, numbers)
    hues = _draw_hues(sources, scene_keys, planted=planted)
    factors = factors_of(scene_keys, hues, difficulty)
    columns = {field.name: getattr(factors, field.name).numpy() for field in fields(factors)}
    _, source_labels = _load_sources()
    columns["hue_agrees"] = (hues == source_labels[sources]).numpy()
    return Factors(columns)


def load(request: DataRequest) -> Split:
    """Return the requested part.

    The test part has no more scenes than the limit needs, at most TEST_SCENES per digit.
    """
    canvas = REFERENCE if request.canvas is None else request.canvas
    shortcut = request.name == SHORTCUT
    clear = request.name == CLEAR_DIGITS
    if request.part == "test" and request.scenes is None and request.limit is not None:
        count = min(request.limit, TEST_SCENES * TEST_PER_CLASS * len(CLASSES))
        return scenes_of_digits(
            count, seed=request.seed, canvas=canvas, shortcut=shortcut, clear=clear
        )
    return digits(
        request.part,
        canvas=canvas,
        scenes=request.scenes,
        seed=request.seed,
        shortcut=shortcut,
        clear=clear,
    )


def scenes_of_digits(
    count: int,
    *,
    seed: int = 0,
    canvas: int = REFERENCE,
    shortcut: bool = False,
    clear: bool = False,
) -> Split:
    """Return `count` scenes of the test digits.

    They are a seeded subset, or several scenes per digit if there are fewer digits. The first scene
    of each digit is that of a smaller run; the last round is a class-balanced subset.
    """
    source_count = TEST_PER_CLASS * len(CLASSES)
    rounds = max(1, ceil(count / source_count))
    split = digits("test", seed=seed, canvas=canvas, shortcut=shortcut, clear=clear, scenes=rounds)
    if rounds == 1:
        return split.limit(count, seed=seed)
    scenes = f"{rounds - 1} to {rounds}" if count < len(split) else str(rounds)
    note = (
        f"There are {source_count} source digits, each in {scenes} scenes; intervals are over "
        "source digits."
    )
    return replace(split.limit(count, seed=seed), notes=(*split.notes, note))


def source_digits(part: Part) -> Int[Tensor, " sources"]:
    """Return the indices of a part among the 1,797 digits, the same for all seeds.

    The test part has 45 digits of each class.
    """
    _, labels = _load_sources()
    order = mix(torch.arange(len(labels))).argsort()
    is_test = torch.zeros(len(labels), dtype=torch.bool)
    for label in range(len(CLASSES)):
        of_class = order[labels[order] == label]
        is_test[of_class[:TEST_PER_CLASS]] = True
    is_member = is_test if part == "test" else ~is_test
    return is_member.nonzero().squeeze(1)


@cache
def _load_sources() -> tuple[Float[Tensor, "sources 8 8"], Int[Tensor, " sources"]]:
    """Return the fraction of ink in each source pixel, and the labels of the digits."""
    from sklearn.datasets import load_digits  # takes a second to import

    data = load_digits()
    return torch.from_numpy(data.images).float() / _INK, torch.from_numpy(data.target).long()
