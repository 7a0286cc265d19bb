"""The attacks: one table, free of torch.

It has the norm, requirements, cost, defaults, self-checks and implementation of each attack.
To add one, write its file and one entry here: the public functions, the command line, estimates of
time, the self-checks and the tests read this table.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, Literal

from vitlens.errors import UnknownNameError

NormName = Literal["linf", "l2", "patch"]

ATTACK: Final = "pgd"  # of the public functions
COMMAND_ATTACKS: Final = ("fgsm", "pgd", "cw")
UNIT: Final = 255.0  # the command takes epsilons of L∞ attacks in 1/255
EPSILONS_255: Final = (0.0, 1.0, 2.0, 4.0, 8.0)  # of L∞ attacks, in 1/UNIT; 0: clean accuracy
EPSILONS_L2: Final = (0.25, 0.5, 1.0)  # of L2 attacks, pixel units
EPSILONS: Final[Mapping[str, tuple[float, ...]]] = {  # by norm, pixel units
    "linf": tuple(epsilon / UNIT for epsilon in EPSILONS_255),
    "l2": EPSILONS_L2,
}
EPSILON: Final[Mapping[str, float]] = {"linf": 8 / 255, "l2": 0.5}  # of one attack, by its norm
RESTARTS: Final = 1
STEPS: Final = 20  # of projected gradient descent, and draws of uniform noise
PRECISION: Final = "fp32"  # of the passes with gradients

# most likely other classes that targeted attacks and DeepFool consider, as published
TARGETS: Final = 9
SEARCHES: Final = 9  # binary-search steps of C&W
QUERIES: Final = 50  # of Square per step: 5,000 for the 100 steps of APGD, as in AutoAttack

_SLOW: Final = 1000  # passes per image


@dataclass(frozen=True)
class Attack:
    """One attack.

    norm: that bounds the perturbation, or "patch".
    kind: "budget" (run at each epsilon) or "minimum" (searches for the smallest perturbation,
        once).
    paper: its source.
    description: what it does, in a few words.
    function: "module:function", called as function(setting, **options), gives the algorithm.
    members: attacks that are run one after another on the images that are still robust, instead of
        a function.

    gradients: whether it needs them.
    random_start: whether another restart can give another result.
    targets: how many classes it targets in turn (0: untargeted).
    steps: their default number (0: always one step).
    iterative: whether each step depends on the ones before.
    restricted: whether its perturbations have less freedom than their norm allows.
    passes_a_step: forward passes per step and image.
    strong: whether it should succeed wherever a single-step attack or one without gradients in its
        norm does.
    stronger_than: other attacks for which that should hold, with the reason.
    examples: its rank among the attacks whose images are shown and analysed (1: first; 0: only if
        no other is run).
    """

    name: str
    title: str
    norm: NormName
    kind: Literal["budget", "minimum"]
    paper: str
    description: str
    function: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    members: tuple[str, ...] = ()
    gradients: bool = True
    random_start: bool = True
    targets: int = 0
    steps: int = STEPS
    iterative: bool = True
    restricted: bool = False
    passes_a_step: int = 1
    strong: bool = False
    stronger_than: Mapping[str, str] = field(default_factory=dict)
    examples: int = 0

    @property
    def slug(self) -> str:
        """Return its name in metrics: pgd-linf, cw-l2."""
        return self.name if self.name.endswith(self.norm) else f"{self.name}-{self.norm}"

    @property
    def parts(self) -> "tuple[Attack, ...]":
        """Return its members, or the attack itself where it has none."""
        return tuple(ATTACKS[member] for member in self.members) or (self,)

    @property
    def takes_epsilon(self) -> bool:
        """Return True if it is bounded by an epsilon; a patch is bounded by its side."""
        return self.norm != "patch"

    @property
    def slow(self) -> bool:
        """Return True if it takes more than 1,000 passes per image and epsilon."""
        return sum(part.passes() for part in self.parts) > _SLOW

    @property
    def takes_stride(self) -> bool:
        """Return True if its step, that of PGD, can be chosen."""
        return self.function in _STRIDED and "stride" not in self.options

    @property
    def takes_more_steps(self) -> bool:
        """Return True if it is checked that more steps break no more images."""
        unrestricted = not (self.restricted or self.targets or self.slow)
        return self.kind == "minimum" or (self.iterative and self.gradients and unrestricted)

    def passes(self, *, restarts: int = RESTARTS) -> int:
        """Return the largest number of passes for one image and epsilon.

        Not for an attack with members.
        """
        count = max(1, self.steps) * self.passes_a_step
        if self.kind == "minimum":
            return count
        return count * (restarts if self.random_start else 1) * max(1, self.targets)


def attack_named(name: str) -> Attack:
    """Return the attack of this name. Raises UnknownNameError."""
    if name not in ATTACKS:
        raise UnknownNameError("attack", name, ATTACKS)
    return ATTACKS[name]


def without_gradients() -> str:
    """Return the names of the attacks that need no gradients, as a message lists them."""
    return ", ".join(attack.name for attack in ATTACKS.values() if not attack.gradients)


_PGD: Final = "vitlens.attacks.descent:pgd"
_STRIDED: Final = (_PGD, "vitlens.attacks.descent:frequency", "vitlens.attacks.descent:patch")
_APGD: Final = "vitlens.attacks.apgd:apgd"
_ENTRIES: Final = (
    Attack(
        "noise",
        "uniform noise",
        "linf",
        "budget",
        "the worst of 20 draws",
        "uniform noise, the worst of several draws: the baseline",
        function="vitlens.attacks.scores:noise",
        gradients=False,
        iterative=False,
    ),
    Attack(
        "fgsm",
        "FGSM",
        "linf",
        "budget",
        "Goodfellow 2015",
        "one step along the gradient's sign",
        function="vitlens.attacks.descent:fgsm",
        random_start=False,
        steps=0,
        iterative=False,
        examples=7,
    ),
    Attack(
        "bim",
        "BIM",
        "linf",
        "budget",
        "Kurakin 2017",
        "many steps from the clean image",
        function="vitlens.attacks.descent:bim",
        random_start=False,
        strong=True,
        examples=4,
    ),
    Attack(
        "pgd",
        "PGD",
        "linf",
        "budget",
        "Madry 2018",
        "many steps from a random start",
        function=_PGD,
        strong=True,
        examples=1,
    ),
    Attack(
        "pgd-l2",
        "PGD (L2)",
        "l2",
        "budget",
        "Madry 2018",
        "many steps from a random start, in L2",
        function=_PGD,
        options={"norm": "l2"},
        examples=6,
    ),
    Attack(
        "pgd-dlr",
        "PGD with DLR",
        "linf",
        "budget",
        "Madry 2018; loss of Croce & Hein 2020",
        "PGD on the difference of logits ratio",
        function=_PGD,
        options={"loss": "dlr"},
        examples=5,
    ),
    Attack(
        "pgd-targeted",
        "targeted PGD",
        "linf",
        "budget",
        "Madry 2018; Gowal 2019",
        "PGD towards other classes in turn",
        function=_PGD,
        targets=TARGETS,
    ),
    Attack(
        "apgd-ce",
        "APGD-CE",
        "linf",
        "budget",
        "Croce & Hein 2020, algorithm 1",
        "momentum, and a step size that is halved when progress stops",
        function=_APGD,
        steps=100,
        strong=True,
        stronger_than={"pgd": "fixed step against adaptive"},
        examples=2,
    ),
    Attack(
        "apgd-dlr",
        "APGD-DLR",
        "linf",
        "budget",
        "Croce & Hein 2020, algorithm 1",
        "APGD on the difference of logits ratio",
        function=_APGD,
        options={"loss": "dlr"},
        steps=100,
        strong=True,
        examples=3,
    ),
    Attack(
        "apgd-targeted",
        "targeted APGD-DLR",
        "linf",
        "budget",
        "Croce & Hein 2020, algorithm 1",
        "APGD towards other classes in turn",
        function=_APGD,
        options={"loss": "dlr"},
        targets=TARGETS,
        steps=100,
    ),
    Attack(
        "cw",
        "C&W",
        "l2",
        "minimum",
        "Carlini & Wagner 2017",
        "searches for the smallest perturbation in tanh space",
        function="vitlens.attacks.minimum_norm:carlini_wagner",
        random_start=False,
        steps=100,
        passes_a_step=SEARCHES,
        examples=9,
    ),
    Attack(
        "deepfool",
        "DeepFool",
        "l2",
        "minimum",
        "Moosavi-Dezfooli 2016",
        "steps to the nearest class boundary, as if the model were linear",
        function="vitlens.attacks.minimum_norm:deepfool",
        random_start=False,
        steps=50,
        passes_a_step=TARGETS,
        examples=10,
    ),
    Attack(
        "square",
        "Square",
        "linf",
        "budget",
        "Andriushchenko 2020; 50 queries a step",
        "random squares, kept where the margin falls",
        function="vitlens.attacks.scores:square",
        gradients=False,
        steps=100,
        passes_a_step=QUERIES,
    ),
    Attack(
        "patch",
        "patch",
        "patch",
        "budget",
        "Brown 2017, one patch an image",
        "one square of the image, any pixels within it",
        function="vitlens.attacks.descent:patch",
        steps=50,
        restricted=True,
    ),
    Attack(
        "low-frequency",
        "low-frequency PGD",
        "linf",
        "budget",
        "Sharma 2019; up to half of Nyquist's frequency",
        "PGD within the lower half of the spectrum",
        function="vitlens.attacks.descent:frequency",
        options={"part": "low"},
        restricted=True,
    ),
    Attack(
        "high-frequency",
        "high-frequency PGD",
        "linf",
        "budget",
        "Sharma 2019; above half of Nyquist's frequency",
        "PGD within the upper half of the spectrum",
        function="vitlens.attacks.descent:frequency",
        options={"part": "high"},
        restricted=True,
    ),
    Attack(
        "auto",
        "auto (APGD-CE, targeted APGD-DLR, Square)",
        "linf",
        "budget",
        "Croce & Hein 2020, without FAB",
        "APGD-CE, targeted APGD-DLR, Square, each on the images still robust: the worst case",
        members=("apgd-ce", "apgd-targeted", "square"),
        steps=100,
        strong=True,
        stronger_than={"pgd": "one attack against the worst case of three"},
        examples=8,
    ),
)

_BY_NAME: Final = {attack.name: attack for attack in _ENTRIES}
ATTACKS: Final[Mapping[str, Attack]] = MappingProxyType(_BY_NAME)


def comparisons(names: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """Yield the pairs of these attacks of which the stronger succeeds wherever the weaker does.

    A pair is (weaker, stronger, reason): many steps and one, with and without gradients, and the
    pairs that the registry names.
    """
    entries = [attack for attack in ATTACKS.values() if attack.name in names]
    weak = [attack for attack in entries if not (attack.iterative and attack.gradients)]
    for weaker in sorted(weak, key=lambda attack: (attack.iterative, not attack.gradients)):
        reason = "without gradients against with" if weaker.iterative else "one step against many"
        for stronger in entries:
            if stronger.strong and stronger.norm == weaker.norm:
                yield weaker.name, stronger.name, reason
    for stronger in entries:
        yield from (
            (name, stronger.name, why)
            for name, why in stronger.stronger_than.items()
            if name in names
        )
