"""What is typed after `vitlens attack` is what the run gets."""

from pathlib import Path

import pytest

from vitlens.cli.main import run
from vitlens.commands.scaffold.options import ModelOptions, RunOptions
from vitlens.runs.attack_choices import AttackChoices


def test_defaults(stand_in):
    calls = stand_in("attack")
    assert run(["attack", "vit-digits"]) == 0
    [(args, options)] = calls
    assert args == (["vit-digits"],)
    assert options == {
        "data": None,
        "images": None,
        "choices": AttackChoices(),
        "resume": None,
        "model_options": ModelOptions(),
        "options": RunOptions(command="vitlens attack vit-digits"),
    }


def test_every_option_arrives(stand_in):
    calls = stand_in("attack")
    line = (
        "attack a b --data d --attack auto,patch --epsilon 0.5,8 --epsilon-l2 0.1 --steps 7 --restarts 3 --predicted "
        "--downwards --no-transfer --no-inside --no-corruptions --baseline b --patch-side 5 --patch-anywhere "
        "--resume runs/x"
    )
    assert run(line.split()) == 0
    [(args, options)] = calls
    assert args == (["a", "b"],)
    assert options["choices"] == AttackChoices(
        attacks=("auto", "patch"), epsilons=(0.5, 8.0), epsilons_l2=(0.1,), steps=7, restarts=3, corruptions=False,
        transfer=False, inside=False, predicted=True, baseline="b", patch_side=5, patch_anywhere=True, downwards=True,
    )  # fmt: skip
    assert options["resume"] == Path("runs/x")


@pytest.mark.parametrize(
    ("text", "of_pgd", "of_cw"), [("7", 7, 7), ("pgd=20,cw=50", 20, 50), ("cw = 5", None, 5)], ids=str
)
def test_steps_can_be_said_by_attack(stand_in, text, of_pgd, of_cw):
    calls = stand_in("attack")
    assert run(["attack", "a", "--steps", text]) == 0
    [(_, options)] = calls
    assert (options["choices"].steps_for("pgd"), options["choices"].steps_for("cw")) == (of_pgd, of_cw)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("--attack pdg", "did you mean 'pgd'"),
        ("--epsilon 1,x", "expected --epsilon with numbers"),
        ("--epsilon -1", "expected --epsilon from 0 to 255"),
        ("--epsilon 256", "found 256"),
        ("--epsilon nan", "expected --epsilon"),
        ("--epsilon-l2 inf", "expected --epsilon-l2"),
        ("--steps 0", "expected --steps of at least 1, found 0"),
        ("--steps pgd=0", "expected --steps of at least 1, found 0"),
        ("--steps pgd=x", "expected --steps N or NAME=N"),
        ("--steps apgd-ce=9", "expected --steps for attacks of --attack, found apgd-ce; try fgsm, pgd, cw"),
        ("--restarts 0", "expected --restarts of at least 1"),
        ("--attack patch --patch-side 0", "expected --patch-side of at least 1 px, found 0"),
        ("--patch-side 8", "with --attack patch, found them without"),
    ],
)
def test_a_wrong_value_is_said_before_anything_is_loaded(line, says, capsys):
    assert run(["attack", "vit-digits", *line.split()]) == 2
    assert says in capsys.readouterr().err
