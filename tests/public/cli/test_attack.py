"""What is typed after `vitlens attack` is what the run gets."""

from pathlib import Path

import pytest

from vitlens.cli.main import run
from vitlens.commands.attack.options import AttackOptions
from vitlens.commands.run.options import RunOptions
from vitlens.errors import InputError


def test_defaults(stand_in):
    calls = stand_in("attack")
    assert run(["attack", "vit-digits"]) == 0
    [((options,), _)] = calls
    assert options == AttackOptions(("vit-digits",), run=RunOptions(command="vitlens attack vit-digits"))
    assert options.epsilons == (0.0, 1.0, 2.0, 4.0, 8.0)
    assert options.linf == tuple(epsilon / 255 for epsilon in (1, 2, 4, 8))


def test_every_option_arrives(stand_in):
    calls = stand_in("attack")
    line = (
        "attack a b --data d --attack auto,patch --epsilon 0.5,8 --epsilon-l2 0.1 --steps 7 --restarts 3 --predicted "
        "--downwards --no-transfer --no-inside --no-corruptions --baseline b --patch-side 5 --patch-anywhere "
        "--resume runs/x"
    )
    assert run(line.split()) == 0
    [((options,), _)] = calls
    assert options == AttackOptions(
        ("a", "b"), "d", attacks=("auto", "patch"), epsilons=(0.5, 8.0), epsilons_l2=(0.1,), steps=7, restarts=3,
        corruptions=False, transfer=False, inside=False, predicted=True, baseline="b", patch_side=5,
        patch_anywhere=True, downwards=True, resume=Path("runs/x"), run=RunOptions(command=f"vitlens {line}"),
    )  # fmt: skip


def test_an_attack_can_have_one_epsilon_alone(stand_in):
    calls = stand_in("attack")
    assert run(["attack", "a", "--single-epsilon", "pgd=2"]) == 0
    [((options,), _)] = calls
    assert options.epsilons_of("pgd") == (2 / 255,)
    assert options.epsilons_of("fgsm") == options.linf


@pytest.mark.parametrize(
    ("text", "of_pgd", "of_cw"), [("7", 7, 7), ("pgd=20,cw=50", 20, 50), ("cw = 5", None, 5)], ids=str
)
def test_steps_can_be_said_by_attack(stand_in, text, of_pgd, of_cw):
    calls = stand_in("attack")
    assert run(["attack", "a", "--steps", text]) == 0
    [((options,), _)] = calls
    assert (options.steps_for("pgd"), options.steps_for("cw")) == (of_pgd, of_cw)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("--single-epsilon 8", "expected --single-epsilon NAME=NUMBER"),
        ("--single-epsilon pgd=x", "expected --single-epsilon with numbers"),
        ("--single-epsilon pgd=256", "expected --single-epsilon from 0 to 255"),
        ("--single-epsilon pgd=0", "expected --single-epsilon above 0"),
        ("--single-epsilon cw=1", "found cw=1; try fgsm, pgd"),
        ("--single-epsilon bim=1", "found bim=1; try fgsm, pgd"),
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
        ("--attack patch --patch-side 0", "expected --patch-side of at least 1, found 0"),
        ("--patch-side 8", "with --attack patch, found them without"),
    ],
)
def test_a_wrong_value_is_said_before_anything_is_loaded(line, says, capsys):
    assert run(["attack", "vit-digits", *line.split()]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"attacks": ("pdg",)}, "no attack 'pdg'; did you mean 'pgd'"),
        ({"epsilons": (-1.0,)}, "--epsilon from 0 to 255, in 1/255, found -1"),
        ({"epsilons": (300.0,)}, "found 300"),
        ({"epsilons_l2": (-0.5,)}, "--epsilon-l2 of at least 0"),
        ({"steps": 0}, "--steps of at least 1, found 0"),
        ({"restarts": 0}, "--restarts of at least 1"),
        ({"attacks": ("pgd",), "epsilons": (0.0,)}, "a number above 0 for pgd"),
        ({"attacks": ("cw", "patch"), "downwards": True}, "several epsilons, found cw, patch; leave it out"),
        ({"attacks": ("pgd",), "epsilons": (0.0, 4.0), "downwards": True}, "several epsilons, found pgd"),
        ({"attacks": ()}, "--attack with at least one of"),
    ],
    ids=str,
)
def test_options_that_make_no_run_are_refused(values, says):
    with pytest.raises(InputError, match=says):
        AttackOptions(("vit-digits",), **values)


def test_help_shows_epsilons_as_they_are_typed(capsys):
    assert run(["attack", "--help"]) == 0
    assert "0,1,2,4,8" in capsys.readouterr().out
