"""How much each command will ask of a model: images passed through it, counted from what was asked for.

Attacks stop early on images that break, and a resumed run has done a part already: these counts are upper limits.
"""

from collections.abc import Iterator

from vitlens.analysis.failures.corruptions import CORRUPTIONS, SEVERITIES
from vitlens.attacks.registry import members_of
from vitlens.commands.scaffold.expected import Part
from vitlens.runs.attack_choices import AttackChoices


def attack_parts(choices: AttackChoices, images: int) -> Iterator[Part]:
    """Each attack at each epsilon, on images of which none breaks early; and common corruptions."""
    for name in choices.attacks:
        forwards = backwards = 0.0
        for member in members_of(name):
            epsilons = {"linf": len(choices.linf), "l2": len(choices.l2)}.get(member.norm, 1)
            spent = member.passes(choices.steps_for(name), epsilons=epsilons, restarts=choices.restarts)
            if member.gradients:
                backwards += spent
            else:
                forwards += spent
        yield Part(f"{name} (at most)", forwards * images, backwards * images, f"--attack without {name}, or --steps")
    if choices.corruptions and not choices.predicted:
        kinds = len(CORRUPTIONS) * len(SEVERITIES)
        yield Part("common corruptions", kinds * images, 0.0, "--no-corruptions")
