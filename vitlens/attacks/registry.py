"""The attacks: one table, free of torch.

It has the norm, requirements, cost, defaults, self-checks and implementation of each attack. To add
one, write its function and one entry here. The public functions, the command line, estimates of
time, the self-checks and the tests read this table.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, Literal

from vitlens.errors import UnknownNameError

NormName = Literal["linf", "l2", "patch"]

ATTACK: Final = "pgd"  # default of the public functions
COMMAND_ATTACKS: Final = ("fgsm", "pgd", "cw")  # defaults of the command
UNIT: Final = 255.0  # the command takes epsilons of L∞ attacks in 1/255
EPSILONS_255: Final = (0.0, 1.0, 2.0, 4.0, 8.0)  # of L∞ attacks, in 1/UNIT; 0: clean accuracy
EPSILONS_L2: Final = (0.25, 0.5, 1.0)  # of L2 attacks, in pixel units
EPSILONS: Final[Mapping[str, tuple[float, ...]]] = {  # default epsilons by norm, in pixel units
    "linf": tuple(epsilon / UNIT for epsilon in EPSILONS_255),
    "l2": EPSILONS_L2,
}
EPSILON: Final[Mapping[str, float]] = {"linf": 8 / 255, "l2": 0.5}  # default single epsilon by norm
RESTARTS: Final = 1
STEPS: Final = 20  # steps of projected gradient descent, and draws of uniform noise
PRECISION: Final = "fp32"  # of the passes with gradients

# number of most likely other classes that targeted attacks and DeepFool consider, as published
TARGETS: Final = 9
SEARCHES: Final = 9  # values of c that C&W's binary search tries
# queries of Square per step: 5,000 for as many steps as APGD has (100), as in AutoAttack
QUERIES: Final = 50

_SLOW: Final = 1000  # an attack with more passes per image is slow


@dataclass(frozen=True)
class Attack:
    """One attack.

    name: the name under which it is called.
    title: its name in tables and figures.
    norm: the norm that bounds the perturbation, or "patch".
    kind: "budget" if it is run at each epsilon, "minimum" if it searches once for the smallest
        perturbation.
    paper: the paper, and how this attack differs from it.
    description: the idea of the attack in a few words.
    function: "module:function". It is called as function(setting, **options) and returns the
        algorithm.
    options: keyword arguments of the function.
    members: the attacks that are run one after another, instead of a function. Each is run on the
        images that are still robust.

    gradients: True if it needs gradients.
    random_start: True if another restart can give another result.
    targets: the number of classes that it targets in turn (0: untargeted).
    steps: the default number of steps (0: always one step).
    iterative: True if each step depends on the steps before.
    restricted: True if its perturbations have less freedom than their norm allows.
    passes_a_step: the number of forward passes per step and image, or of backward passes if these
        are more (DeepFool has one for each class).
    strong: True if it should break every image that a weaker attack in its norm breaks. Weaker are
        attacks with a single step or without gradients.
    stronger_than: other weaker attacks, each with the reason why it is weaker.
    examples: its rank when one attack's images are shown and analysed (1: first; 0: only if no
        other is run).
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
        """Return its members, or the attack itself if it has none."""
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
        """Return True if the user can choose its stride, as for PGD."""
        return self.function in _STRIDED and "stride" not in self.options

    @property
    def takes_more_steps(self) -> bool:
        """Return True if a self-check runs it with more steps, to see if they break more images."""
        if self.kind == "minimum":
            return True
        has_gradient_steps = self.iterative and self.gradients
        return has_gradient_steps and not (self.restricted or self.targets or self.slow)

    def passes(self, *, restarts: int = RESTARTS) -> int:
        """Return the largest number of passes for one image and epsilon.

        It is undefined for an attack with members.
        """
        count = max(1, self.steps) * self.passes_a_step
        if self.kind == "minimum":
            return count
        if self.random_start:
            count *= restarts
        return count * max(1, self.targets)


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
        name="noise",
        title="uniform noise",
        norm="linf",
        kind="budget",
        paper="the worst of 20 draws",
        description="uniform noise, the worst of several draws: the baseline",
        function="vitlens.attacks.scores:noise",
        gradients=False,
        iterative=False,
    ),
    Attack(
        name="fgsm",
        title="FGSM",
        norm="linf",
        kind="budget",
        paper="Goodfellow 2015",
        description="one step along the gradient's sign",
        function="vitlens.attacks.descent:fgsm",
        random_start=False,
        steps=0,
        iterative=False,
        examples=7,
    ),
    Attack(
        name="bim",
        title="BIM",
        norm="linf",
        kind="budget",
        paper="Kurakin 2017",
        description="many steps from the clean image",
        function="vitlens.attacks.descent:bim",
        random_start=False,
        strong=True,
        examples=4,
    ),
    Attack(
        name="pgd",
        title="PGD",
        norm="linf",
        kind="budget",
        paper="Madry 2018",
        description="many steps from a random start",
        function=_PGD,
        strong=True,
        examples=1,
    ),
    Attack(
        name="pgd-l2",
        title="PGD (L2)",
        norm="l2",
        kind="budget",
        paper="Madry 2018",
        description="many steps from a random start, in L2",
        function=_PGD,
        options={"norm": "l2"},
        examples=6,
    ),
    Attack(
        name="pgd-dlr",
        title="PGD with DLR",
        norm="linf",
        kind="budget",
        paper="Madry 2018; loss of Croce & Hein 2020",
        description="PGD on the difference of logits ratio",
        function=_PGD,
        options={"loss": "dlr"},
        examples=5,
    ),
    Attack(
        name="pgd-targeted",
        title="targeted PGD",
        norm="linf",
        kind="budget",
        paper="Madry 2018; Gowal 2019",
        description="PGD towards other classes in turn",
        function=_PGD,
        targets=TARGETS,
    ),
    Attack(
        name="apgd-ce",
        title="APGD-CE",
        norm="linf",
        kind="budget",
        paper="Croce & Hein 2020, algorithm 1",
        description="momentum, and a step size that is halved when progress stops",
        function=_APGD,
        steps=100,
        strong=True,
        stronger_than={"pgd": "fixed step against adaptive"},
        examples=2,
    ),
    Attack(
        name="apgd-dlr",
        title="APGD-DLR",
        norm="linf",
        kind="budget",
        paper="Croce & Hein 2020, algorithm 1",
        description="APGD on the difference of logits ratio",
        function=_APGD,
        options={"loss": "dlr"},
        steps=100,
        strong=True,
        examples=3,
    ),
    Attack(
        name="apgd-targeted",
        title="targeted APGD-DLR",
        norm="linf",
        kind="budget",
        paper="Croce & Hein 2020, algorithm 1",
        description="APGD towards other classes in turn",
        function=_APGD,
        options={"loss": "dlr"},
        targets=TARGETS,
        steps=100,
    ),
    Attack(
        name="cw",
        title="C&W",
        norm="l2",
        kind="minimum",
        paper="Carlini & Wagner 2017",
        description="searches for the smallest perturbation in tanh space",
        function="vitlens.attacks.minimum_norm:carlini_wagner",
        random_start=False,
        steps=100,
        passes_a_step=SEARCHES,
        examples=9,
    ),
    Attack(
        name="deepfool",
        title="DeepFool",
        norm="l2",
        kind="minimum",
        paper="Moosavi-Dezfooli 2016",
        description="steps to the nearest class boundary, as if the model were linear",
        function="vitlens.attacks.minimum_norm:deepfool",
        random_start=False,
        steps=50,
        passes_a_step=TARGETS,
        examples=10,
    ),
    Attack(
        name="square",
        title="Square",
        norm="linf",
        kind="budget",
        paper="Andriushchenko 2020; 50 queries a step",
        description="random squares, kept where the margin falls",
        function="vitlens.attacks.scores:square",
        gradients=False,
        steps=100,
        passes_a_step=QUERIES,
    ),
    Attack(
        name="patch",
        title="patch",
        norm="patch",
        kind="budget",
        paper="Brown 2017, one patch an image",
        description="one square of the image, any pixels within it",
        function="vitlens.attacks.descent:patch",
        steps=50,
        restricted=True,
    ),
    Attack(
        name="low-frequency",
        title="low-frequency PGD",
        norm="linf",
        kind="budget",
        paper="Sharma 2019; up to half of Nyquist's frequency",
        description="PGD within the lower half of the spectrum",
        function="vitlens.attacks.descent:frequency",
        options={"part": "low"},
        restricted=True,
    ),
    Attack(
        name="high-frequency",
        title="high-frequency PGD",
        norm="linf",
        kind="budget",
        paper="Sharma 2019; above half of Nyquist's frequency",
        description="PGD within the upper half of the spectrum",
        function="vitlens.attacks.descent:frequency",
        options={"part": "high"},
        restricted=True,
    ),
    Attack(
        name="auto",
        title="auto (APGD-CE, targeted APGD-DLR, Square)",
        norm="linf",
        kind="budget",
        paper="Croce & Hein 2020, without FAB",
        description="APGD-CE, targeted APGD-DLR, Square, each on the images still robust: the "
        "worst case",
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
    """Yield (weaker, stronger, reason) for pairs of these attacks.

    The stronger attack should break every image that the weaker one breaks. It has many steps
    against one, or gradients against none, or the registry names the pair.
    """
    entries = [attack for attack in ATTACKS.values() if attack.name in names]
    weak = [attack for attack in entries if not (attack.iterative and attack.gradients)]
    # first attacks with one step, with gradients and then without; then those with many steps
    for weaker in sorted(weak, key=lambda attack: (attack.iterative, not attack.gradients)):
        reason = "without gradients against with" if weaker.iterative else "one step against many"
        for stronger in entries:
            if stronger.strong and stronger.norm == weaker.norm:
                yield weaker.name, stronger.name, reason
    for stronger in entries:
        for weaker_name, reason in stronger.stronger_than.items():
            if weaker_name in names:
                yield weaker_name, stronger.name, reason
