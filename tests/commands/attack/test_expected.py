"""How many images a run passes through a model, counted before it begins."""

from vitlens.analysis.failures.corruptions import CORRUPTIONS, SEVERITIES
from vitlens.commands.attack.measure.expected import attack_parts
from vitlens.commands.attack.options import AttackOptions


def test_attacks_are_counted_by_epsilons_steps_restarts_and_targets():
    options = AttackOptions(
        (), attacks=("pgd", "cw", "square"), epsilons=(0.0, 1.0, 2.0), steps={"pgd": 5}, restarts=2, corruptions=True
    )
    counts = {part.name.split(" ")[0]: (part.forwards, part.backwards) for part in attack_parts(options, 10)}
    assert counts["pgd"] == (0, 2 * 2 * 5 * 10)
    assert counts["cw"] == (0, 9 * 100 * 10)
    assert counts["square"] == (2 * 2 * 100 * 50 * 10, 0)
    assert counts["common"] == (len(CORRUPTIONS) * len(SEVERITIES) * 10, 0)
    assert all("corruptions" not in part.name for part in attack_parts(AttackOptions((), corruptions=False), 10))
