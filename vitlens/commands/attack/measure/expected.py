"""How many images a run of `vitlens attack` passes through each model, counted from its options.

Attacks stop early on images on which they succeed, and a resumed run has done some of it: counts are upper limits.
"""

from collections.abc import Iterator

from vitlens.analysis.failures.corruptions import CORRUPTIONS, SEVERITIES
from vitlens.attacks.registry import members_of
from vitlens.commands.attack.options import AttackOptions
from vitlens.commands.scaffold.expected import Part


def attack_parts(options: AttackOptions, images: int) -> Iterator[Part]:
    """Each attack at each epsilon, without early stops; and common corruptions."""
    for name in options.attacks:
        forwards = backwards = 0.0
        for member in members_of(name):
            epsilons = {"linf": len(options.linf), "l2": len(options.l2)}.get(member.norm, 1)
            passes = member.passes(options.steps_for(name), epsilons=epsilons, restarts=options.restarts)
            if member.gradients:
                backwards += passes
            else:
                forwards += passes
        yield Part(f"{name} (at most)", forwards * images, backwards * images, f"--attack without {name}, or --steps")
    if options.corruptions:
        kinds = len(CORRUPTIONS) * len(SEVERITIES)
        yield Part("common corruptions", kinds * images, 0.0, "--no-corruptions")
