"""The self-checks that apply to an attack, from its entry in the registry; free of torch."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from vitlens.attacks.registry import ATTACKS, Attack

CheckName = Literal[
    "curve", "gradients read", "epsilon 0", "within the budget", "batch size", "more steps", "no limit", "from below"
]


@dataclass(frozen=True)
class StrengthOrder:
    """Two attacks of which the stronger should succeed wherever the weaker does; reason: why."""

    weaker: str
    stronger: str
    reason: str


def checks_of(attack: Attack, *, epsilons: int, downwards: bool = False) -> tuple[CheckName, ...]:
    """The self-checks of one attack, in order; epsilons: their number; downwards: from the largest."""
    unrestricted = not (attack.restricted or attack.targets or attack.slow)
    more_steps = attack.kind == "minimum" or (attack.iterative and attack.gradients and unrestricted)
    applies: dict[CheckName, bool] = {
        "curve": True,
        "gradients read": attack.gradients,
        "epsilon 0": attack.kind == "budget" and attack.takes_epsilon,
        "within the budget": True,
        "batch size": True,
        "more steps": more_steps,
        "no limit": more_steps,
        "from below": downwards and attack.kind == "budget" and epsilons > 1,
    }
    return tuple(name for name, applicable in applies.items() if applicable)


def comparisons(names: Sequence[str]) -> Iterator[StrengthOrder]:
    """The pairs of these attacks of which one should be at least as strong: many steps and one, with and without
    gradients, and those that the registry names."""
    entries = [attack for attack in ATTACKS.values() if attack.name in names]
    weak = [attack for attack in entries if not (attack.iterative and attack.gradients)]
    for weaker in sorted(weak, key=lambda attack: (attack.iterative, not attack.gradients)):
        reason = "without gradients against with" if weaker.iterative else "one step against many"
        for stronger in entries:
            if stronger.strong and stronger.norm == weaker.norm:
                yield StrengthOrder(weaker.name, stronger.name, reason)
    for stronger in entries:
        for name, reason in stronger.stronger_than.items():
            if name in names:
                yield StrengthOrder(name, stronger.name, reason)
