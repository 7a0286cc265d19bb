"""`--self-checks few`: three checks a model in place of all: what masked gradients or a short attack would fail."""

from dataclasses import replace

from vitlens.commands.attack.measure import measure
from vitlens.commands.attack.options import AttackOptions
from vitlens.commands.attack.record import CHECKS
from vitlens.commands.scaffold.options import RunOptions
from vitlens.commands.scaffold.publish import read
from vitlens.files import read_run

RUN = RunOptions(device="cpu", limit=12, quiet=True, command="vitlens attack")


def test_few_checks_are_three_a_model_and_look_at_the_strongest_attack(tiny_vit, tmp_path):
    options = AttackOptions(
        (str(tiny_vit),), attacks=("fgsm", "pgd"), epsilons=(1.0, 4.0), steps={"pgd": 3}, corruptions=False,
        transfer=False, inside=False, self_checks="few",
    )  # fmt: skip
    found = {}
    for kind in ("few", "all"):
        out = tmp_path / kind
        measure(replace(options, self_checks=kind, run=replace(RUN, out=out)))
        found[kind] = {(row.name, row.attack): row for row in read(read_run(out)).rows(CHECKS)}
    assert len(found["few"]) == 3
    assert {name for name, _ in found["few"]} == {"gradients", "more steps", "one step against many"}
    assert all("pgd" in attack for name, attack in found["few"] if name != "gradients")
    assert found["few"].items() <= found["all"].items()  # the same checks with the same outcomes
