"""Every attack by name: what it is bounded by, what it needs, where it is defined, and the machine that runs it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal

from jaxtyping import Float
from torch import Tensor

from vitlens.attacks.apgd import apgd
from vitlens.attacks.carlini_wagner import carlini_wagner
from vitlens.attacks.clean import RIVALS
from vitlens.attacks.deepfool import deepfool
from vitlens.attacks.descent import bim, fgsm, pgd, within
from vitlens.attacks.jobs import Machine
from vitlens.attacks.losses import FEWEST_CLASSES
from vitlens.attacks.norms import L2, NormName
from vitlens.attacks.regions import Band, Square, ranked_places
from vitlens.attacks.scores import noise, square
from vitlens.errors import InputError, UnknownNameError, UnsupportedError


@dataclass(frozen=True)
class Setting:
    """What a machine is made for.

    steps: at least 1; classes: of the model; size: of the images, px; token: px (down, across) of a ViT's patch on
    these images, None without; side: px of the square (None: a quarter of the shorter side); aligned: whether it lies
    on tokens (without tokens: on a grid of its own side); maps: by which its place is chosen, or None.
    """

    steps: int
    classes: int
    size: tuple[int, int]
    token: tuple[int, int] | None = None
    side: int | None = None
    aligned: bool = True
    maps: Float[Tensor, "batch rows columns"] | None = None


@dataclass(frozen=True)
class Attack:
    """One attack.

    norm: in which it is bounded ("linf", "l2"), or "patch"; kind: "budget" (tried at each epsilon) or "minimum" (looks
    for the smallest change, once); gradients: whether it needs them; random: whether restarts mean anything; targeted:
    whether it aims at classes; steps: where none are asked for (0: it has one alone); members: attacks that are run one
    after another on what is left; build: its machine.
    """

    name: str
    title: str
    norm: NormName
    kind: Literal["budget", "minimum"]
    gradients: bool
    random: bool
    targeted: bool
    steps: int
    source: str
    build: Callable[[Setting], Machine] | None = None
    members: tuple[str, ...] = ()

    @property
    def slug(self) -> str:
        """How metrics name it: pgd-linf, cw-l2."""
        return self.name if self.name.endswith(self.norm) else f"{self.name}-{self.norm}"


def _patch(setting: Setting) -> Machine:
    """PGD within one square, at random places or at those that the maps rank."""
    side = side_of(setting)
    step = (setting.token or (side, side)) if setting.aligned else (1, 1)
    ranked = None if setting.maps is None else ranked_places(setting.maps, setting.size, side=side, step=step)
    return within(Square(side, step, ranked), steps=setting.steps)


def side_of(setting: Setting) -> int:
    """The side of the square, px. Raises InputError where it does not fit the image."""
    side = max(1, min(setting.size) // 4) if setting.side is None else setting.side
    if not 1 <= side <= min(setting.size):
        raise InputError(f"expected a patch of 1 to {min(setting.size)} px, found {side}")
    return side


_RANDOM, _ONCE = True, False
_LIST: Final = (
    Attack(
        "noise", "uniform noise", "linf", "budget", False, _RANDOM, False, 20, "the worst of so many draws",
        lambda setting: noise(steps=setting.steps),
    ),
    Attack("fgsm", "FGSM", "linf", "budget", True, _ONCE, False, 0, "Goodfellow 2015", lambda _: fgsm()),
    Attack(
        "bim", "BIM", "linf", "budget", True, _ONCE, False, 20, "Kurakin 2017",
        lambda setting: bim(steps=setting.steps),
    ),
    Attack(
        "pgd", "PGD", "linf", "budget", True, _RANDOM, False, 20, "Madry 2018",
        lambda setting: pgd(steps=setting.steps),
    ),
    Attack(
        "pgd-l2", "PGD (L2)", "l2", "budget", True, _RANDOM, False, 20, "Madry 2018",
        lambda setting: pgd(steps=setting.steps, norm=L2),
    ),
    Attack(
        "pgd-dlr", "PGD with DLR", "linf", "budget", True, _RANDOM, False, 20, "Madry 2018; loss of Croce & Hein 2020",
        lambda setting: pgd(steps=setting.steps, loss="dlr"),
    ),
    Attack(
        "pgd-targeted", "targeted PGD", "linf", "budget", True, _RANDOM, True, 20, "Madry 2018; Gowal 2019",
        lambda setting: pgd(steps=setting.steps, aims=RIVALS),
    ),
    Attack(
        "apgd-ce", "APGD-CE", "linf", "budget", True, _RANDOM, False, 100, "Croce & Hein 2020, algorithm 1",
        lambda setting: apgd(steps=setting.steps),
    ),
    Attack(
        "apgd-dlr", "APGD-DLR", "linf", "budget", True, _RANDOM, False, 100, "Croce & Hein 2020, algorithm 1",
        lambda setting: apgd(steps=setting.steps, loss="dlr"),
    ),
    Attack(
        "apgd-targeted", "targeted APGD-DLR", "linf", "budget", True, _RANDOM, True, 100,
        "Croce & Hein 2020, algorithm 1", lambda setting: apgd(steps=setting.steps, loss="dlr", aims=RIVALS),
    ),
    Attack(
        "cw", "C&W", "l2", "minimum", True, _ONCE, False, 100, "Carlini & Wagner 2017",
        lambda setting: carlini_wagner(steps=setting.steps),
    ),
    Attack(
        "deepfool", "DeepFool", "l2", "minimum", True, _ONCE, False, 50, "Moosavi-Dezfooli 2016",
        lambda setting: deepfool(steps=setting.steps, candidates=min(RIVALS, setting.classes - 1)),
    ),
    Attack(
        "square", "Square", "linf", "budget", False, _RANDOM, False, 100, "Andriushchenko 2020; 50 queries a step",
        lambda setting: square(steps=setting.steps),
    ),
    Attack("patch", "patch", "patch", "budget", True, _RANDOM, False, 50, "Brown 2017, one patch an image", _patch),
    Attack(
        "low-frequency", "low-frequency PGD", "linf", "budget", True, _RANDOM, False, 20,
        "Sharma 2019; up to half of Nyquist's frequency",
        lambda setting: within(Band("low"), steps=setting.steps),
    ),
    Attack(
        "high-frequency", "high-frequency PGD", "linf", "budget", True, _RANDOM, False, 20,
        "Sharma 2019; above half of Nyquist's frequency",
        lambda setting: within(Band("high"), steps=setting.steps),
    ),
    Attack(
        "auto", "auto (APGD-CE, targeted APGD-DLR, Square)", "linf", "budget", True, _RANDOM, False, 100,
        "Croce & Hein 2020, without FAB", members=("apgd-ce", "apgd-targeted", "square"),
    ),
)  # fmt: skip

ATTACKS: Final[Mapping[str, Attack]] = MappingProxyType({attack.name: attack for attack in _LIST})


def members_of(name: str) -> tuple[Attack, ...]:
    """The attack of this name, or those that it consists of. Raises UnknownNameError."""
    if name not in ATTACKS:
        raise UnknownNameError("attack", name, ATTACKS)
    attack = ATTACKS[name]
    return tuple(ATTACKS[member] for member in attack.members) or (attack,)


def machine_of(attack: Attack, setting: Setting) -> Machine:
    """The machine that runs an attack. Raises UnsupportedError where the model has too few classes for its loss."""
    assert attack.build is not None, attack.name
    machine = attack.build(setting)
    needed = FEWEST_CLASSES.get(getattr(machine, "loss", None), 2)  # type: ignore[arg-type]
    if setting.classes < needed:
        raise UnsupportedError(
            f"expected a model of at least {needed} classes for {attack.name}, found {setting.classes}; "
            "try apgd-ce and square"
        )
    return machine
