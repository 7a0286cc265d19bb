"""The embedded data: scikit-learn's 1,797 handwritten digits, each drawn into scenes with an exact
mask.

In `digits` the hue of the background is independent of the class. In the training part of
`digits-shortcut` it goes with the class in 90 % of the scenes: a planted shortcut. Everything else
is equal, and so are the test parts.

Source: Alpaydin and Kaynak, "Optical Recognition of Handwritten Digits", UCI (CC BY 4.0), as 8x8
counts of ink. Train and test share no source digit, but they share writers, who are not identified
in the set.
"""

from dataclasses import fields, replace
from functools import cache, partial
from typing import Any, Final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from vitlens.data.draws import keys, mix, uniform
from vitlens.data.factors import Factors
from vitlens.data.registry import DataRequest
from vitlens.data.scenes import (
    HUES,
    REFERENCE,
    drawn_split,
    factors_of,
    render,
    require_canvas,
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
_PLANTED = (AGREEMENT - 1 / HUES) / (
    1 - 1 / HUES
)  # share whose hue is set; of the others one in HUES agrees by chance
CLASSES = tuple("0123456789")
SHORTCUT: Final = "digits-shortcut"


def digits(
    part: Part,
    *,
    canvas: int = REFERENCE,
    scenes: int | None = None,
    seed: int = 0,
    shortcut: bool = False,
) -> Split:
    """Return the embedded scenes: class = digit, masks = its visible ink, groups = source digit.

    canvas: px; scenes: number per source digit (default 4); the first scenes do not depend on this
    number. shortcut: plant the class in the hue of the background, in the training part only. The
    test part is held in memory with its masks; the training part is drawn when read (Split.epoch
    draws new scenes) and has no masks. Raises DataError for sizes that cannot be drawn.
    """
    scenes = scenes if scenes is not None else (TRAIN_SCENES if part == "train" else TEST_SCENES)
    require_canvas(canvas)
    if scenes < 1:
        raise DataError(f"expected at least 1 scene a digit, found {scenes}")
    sources = source_digits(part)
    repeated = sources.repeat(scenes)
    numbers = torch.arange(scenes).repeat_interleave(len(sources))
    planted = shortcut and part == "train"
    drawings = Drawings(
        partial(_scenes, seed=seed, planted=planted, canvas=canvas),
        repeated,
        numbers,
        partial(_places, seed=seed),
        partial(_factors, seed=seed, planted=planted),
    )
    name = SHORTCUT if shortcut else "digits"
    split = drawn_split(
        name, part, drawings, canvas, _load()[1][repeated], classes=CLASSES, groups=repeated
    )
    return split if part == "train" else replace(split, scenes=drawings)


def _scenes(
    sources: Tensor, numbers: Tensor, *, seed: int, planted: bool = False, **style: Any
) -> Drawn:
    """Draw one scene from its source digit, its number, the seed and the style; other scenes have
    no effect.
    """
    drawn = keys(seed, sources, numbers)
    return render(_load()[0][sources], drawn, _hues(sources, drawn, planted=planted), **style)


def _hues(sources: Tensor, keys: Tensor, *, planted: bool) -> Int[Tensor, " batch"]:
    """Return the hue of each scene's background: drawn, or where it is planted that of the
    class."""
    draws = uniform(keys, 2, stream=10)
    hues = (draws[:, 0] * HUES).long()
    if not planted:
        return hues
    return torch.where(draws[:, 1] < _PLANTED, _load()[1][sources], hues)


def _places(sources: Tensor, numbers: Tensor, *, seed: int) -> Tensor:
    return whereabouts(keys(seed, sources, numbers))


def _factors(sources: Tensor, numbers: Tensor, *, seed: int, planted: bool) -> Factors:
    """Return the factors of each scene, those of `SceneFactors` and `hue_agrees`: the hue is that
    of the class.
    """
    drawn = keys(seed, sources, numbers)
    hues = _hues(sources, drawn, planted=planted)
    factors = factors_of(drawn, hues)
    columns = {field.name: getattr(factors, field.name).numpy() for field in fields(factors)}
    return Factors({**columns, "hue_agrees": (hues == _load()[1][sources]).numpy()})


def load(request: DataRequest) -> Split:
    """Return the requested part; of the test part no more scenes than the limit needs, at most
    TEST_SCENES a digit.
    """
    canvas = REFERENCE if request.canvas is None else request.canvas
    shortcut = request.name == SHORTCUT
    if request.part == "test" and request.scenes is None and request.limit is not None:
        most = TEST_SCENES * TEST_PER_CLASS * len(CLASSES)
        return scenes_of_digits(
            min(request.limit, most), seed=request.seed, canvas=canvas, shortcut=shortcut
        )
    return digits(
        request.part, canvas=canvas, scenes=request.scenes, seed=request.seed, shortcut=shortcut
    )


def scenes_of_digits(
    count: int, *, seed: int = 0, canvas: int = REFERENCE, shortcut: bool = False
) -> Split:
    """Return `count` scenes of the test digits: a seeded subset, or each digit in several scenes
    where needed.

    The first scene of each digit is the one of a smaller run; the last round is a class-balanced
    subset.
    """
    sources = TEST_PER_CLASS * len(CLASSES)
    rounds = max(1, -(-count // sources))
    split = digits("test", seed=seed, canvas=canvas, shortcut=shortcut, scenes=rounds)
    if rounds == 1:
        return split.limit(count, seed=seed)
    several = f"{rounds - 1} to {rounds}" if count < len(split) else str(rounds)
    note = (
        f"There are {sources} source digits, each in {several} scenes; intervals are over "
        "source digits."
    )
    return replace(split.limit(count, seed=seed), notes=(*split.notes, note))


def source_digits(part: Part) -> Int[Tensor, " sources"]:
    """Return the indices of a part among the 1,797 digits: the same for all seeds, 45 of each class
    for test.
    """
    _, labels = _load()
    order = mix(torch.arange(len(labels))).argsort()
    held_out = torch.zeros(len(labels), dtype=torch.bool)
    for label in range(len(CLASSES)):
        held_out[order[labels[order] == label][:TEST_PER_CLASS]] = True
    return (held_out if part == "test" else ~held_out).nonzero().squeeze(1)


@cache
def _load() -> tuple[Float[Tensor, "sources 8 8"], Int[Tensor, " sources"]]:
    """Return the fraction of ink in each source pixel, and the digits."""
    from sklearn.datasets import load_digits  # takes a second to import

    data = load_digits()
    return torch.from_numpy(data.images).float() / 16, torch.from_numpy(data.target).long()
