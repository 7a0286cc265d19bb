"""Defaults of the attacks, shared by the public functions and the command; free of torch."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

ATTACK: Final = "pgd"  # of the public functions
COMMAND_ATTACKS: Final = ("fgsm", "pgd", "cw")
UNIT: Final = 255.0  # the command takes epsilons of L∞ attacks in 1/255
EPSILONS_255: Final = (0.0, 1.0, 2.0, 4.0, 8.0)  # of L∞ attacks, in 1/UNIT; 0: clean accuracy
EPSILONS_LINF: Final = tuple(epsilon / UNIT for epsilon in EPSILONS_255)  # the same in pixel units
EPSILONS_L2: Final = (0.25, 0.5, 1.0)  # of L2 attacks, pixel units
EPSILON: Final[Mapping[str, float]] = MappingProxyType({"linf": 8 / 255, "l2": 0.5})  # of one attack, by its norm
RESTARTS: Final = 1
STEPS: Final = 20  # of projected gradient descent, and draws of uniform noise
PRECISION: Final = "fp32"  # of the passes with gradients

TARGETS: Final = 9  # most likely other classes that targeted attacks and DeepFool consider, as published
SEARCHES: Final = 9  # binary-search steps of C&W
QUERIES: Final = 50  # of Square per step: 5,000 for the 100 steps of APGD, as in AutoAttack
