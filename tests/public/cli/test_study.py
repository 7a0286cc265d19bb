"""What `vitlens study` hands on, and what it refuses before anything heavy is imported."""

from pathlib import Path

import pytest

from vitlens.cli.build import complete_kind
from vitlens.cli.main import run
from vitlens.commands.run.options import RunOptions
from vitlens.commands.study.kinds.kinds import KINDS
from vitlens.commands.study.options import StudyOptions


def test_every_option_of_a_kind_arrives(stand_in):
    calls = stand_in("study")
    line = "study --kind patch-size --seeds 2 --epochs 4 --data cifar10 --resume there"
    assert run(line.split()) == 0
    [((options,), _)] = calls
    run_options = RunOptions(command=f"vitlens {line}")
    assert options == StudyOptions(
        data="cifar10", epochs=4, kind="patch-size", seeds=2, resume=Path("there"), run=run_options
    )


def test_nothing_said_is_nothing_asked(stand_in):
    calls = stand_in("study")
    assert run(["study", "vit-digits"]) == 0
    [((options,), _)] = calls
    assert options == StudyOptions(("vit-digits",), run=RunOptions(command="vitlens study vit-digits"))


@pytest.mark.parametrize("kind", ["whole", *KINDS])
def test_every_kind_is_taken_and_completed(kind, stand_in):
    calls = stand_in("study")
    assert run(["study", "--kind", kind]) == 0
    assert calls[0][0][0].kind == kind
    assert kind in complete_kind(kind[:2])


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("--kind poolin", "no kind of study 'poolin'; did you mean 'pooling'?"),
        (
            "--kind xyz",
            "known: architecture, data, patch-size, pooling, positions, registers, size, swin, transfer, whole",
        ),
        ("--kind size --seeds 0", "--seeds"),
        ("--kind size --epochs none", "--epochs"),
    ],
)
def test_a_wrong_call_is_one_line(line, says, stand_in, capsys):
    calls = stand_in("study")
    assert run(["study", *line.split()]) == 2
    shown = capsys.readouterr().err
    assert says in shown
    assert shown.count("\n") == 1
    assert not calls
