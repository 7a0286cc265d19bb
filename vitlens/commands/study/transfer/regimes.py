"""The ways of adapting a model to other data that `vitlens study --kind transfer` compares."""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Regime:
    """One way. label: in folders and metrics; words: in figures and tables; meaning: what is trained, from what."""

    label: str
    words: str
    meaning: str


FROZEN: Final = Regime("frozen", "frozen", "only a new head is trained, on features of the unchanged model")
LAST: Final = Regime("last-blocks", "last blocks", "the last blocks and a new head are trained")
FULL: Final = Regime("full", "full", "all weights are trained, from those of the model")
SCRATCH: Final = Regime("scratch", "from scratch", "the same architecture is trained from random weights")
DISTILLED: Final = Regime(
    "distilled",
    "distilled",
    "the same architecture is trained from random weights on the labels and on the outputs of the fully trained model",
)
REGIMES: Final = (FROZEN, LAST, FULL, SCRATCH, DISTILLED)
WORDS: Final = {regime.label: regime.words for regime in REGIMES}
CHANGED: Final = (LAST, FULL, SCRATCH, DISTILLED)  # their features; the frozen regime keeps all
BY_SHARE: Final = (FROZEN, FULL, SCRATCH)  # also trained on fewer images
PRETRAINED: Final = "pretrained"  # models that are not trained here
RANDOM: Final = "random"

SEEDS: Final = 3
EPOCHS: Final = 10  # without --epochs: of all regimes but the frozen one, which has cached features and more epochs
SHARES: Final = (0.2, 0.5)  # of the training images, besides all of them
LAST_PART: Final = 4  # one in so many blocks is trained by LAST, the last ones
FEWEST_TRAINED: Final = 20  # training images, below which no regime has anything to learn from
FEWEST_TESTED: Final = 10  # test images: 16 or fewer do not even separate 70 % from guessing among five classes
SHOWN: Final = 64  # test images on which attention is compared
SIMILAR: Final = 256  # test images on which CKA is measured
MAPPED: Final = 6  # images whose maps are shown, one a class
REACHED: Final = 0.95  # share of the best accuracy whose time is reported
MARGIN: Final = 5.0  # points: a regime that is at most so much below another has caught up with it
STATISTICS: Final = ("distance", "normalised_entropy", "prefix_mass")  # of the registry, whose change is reported
