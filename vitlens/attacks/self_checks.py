"""Which self-checks an attack gets, from its entry in the registry alone; free of torch."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from vitlens.attacks.registry import ATTACKS, Attack

CheckName = Literal[
    "curve", "gradients read", "epsilon 0", "within the budget", "batch size", "more steps", "no limit", "from below"
]


@dataclass(frozen=True)
class StrengthOrder:
    """Two attacks of which the stronger should break at least what the weaker does; reason: why."""

    weaker: str
    stronger: str
    reason: str


def checks_of(attack: Attack, *, epsilons: int, downwards: bool = False) -> tuple[CheckName, ...]:
    """The self-checks of one attack, in order; epsilons: how many it is tried at; downwards: from the largest."""
    free = not (attack.restricted or attack.targets or attack.slow)
    longer = attack.kind == "minimum" or (attack.iterative and attack.gradients and free)
    planned: dict[CheckName, bool] = {
        "curve": True,
        "gradients read": attack.gradients,
        "epsilon 0": attack.kind == "budget" and attack.takes_epsilon,
        "within the budget": True,
        "batch size": True,
        "more steps": longer,
        "no limit": longer,
        "from below": downwards and attack.kind == "budget" and epsilons > 1,
    }
    return tuple(name for name, wanted in planned.items() if wanted)


def comparisons(names: Sequence[str]) -> Iterator[StrengthOrder]:
    """Which of these attacks should break at least what which others do: many steps against one, with gradients against
    without, and what the registry says of a pair."""
    asked = [attack for attack in ATTACKS.values() if attack.name in names]
    weak = [attack for attack in asked if not (attack.iterative and attack.gradients)]
    for weaker in sorted(weak, key=lambda attack: (attack.iterative, not attack.gradients)):
        reason = "without gradients against with" if weaker.iterative else "one step against many"
        for stronger in asked:
            if stronger.strong and stronger.norm == weaker.norm:
                yield StrengthOrder(weaker.name, stronger.name, reason)
    for stronger in asked:
        for name, reason in stronger.stronger_than.items():
            if name in names:
                yield StrengthOrder(name, stronger.name, reason)
