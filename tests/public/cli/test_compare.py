"""What is typed after `vitlens compare` is what the run gets."""

import pytest

from vitlens.cli.main import run
from vitlens.commands.compare.options import CompareOptions
from vitlens.commands.run.options import RunOptions


def test_defaults(stand_in):
    calls = stand_in("compare")
    assert run(["compare", "vit-digits", "cnn-digits"]) == 0
    [((options,), _)] = calls
    run_options = RunOptions(command="vitlens compare vit-digits cnn-digits")
    assert options == CompareOptions(("vit-digits", "cnn-digits"), run=run_options)
    assert (options.data, options.method, options.target, options.cue_conflict) == (None, (), "predicted", None)
    assert (options.panels, options.maps, options.harder) == (50, 500, True)


def test_every_option_arrives(stand_in):
    calls = stand_in("compare")
    line = "compare a b --data d --method rollout,gradcam --target cat --panels 3 --maps 9 --no-harder --cue-conflict c"
    assert run(line.split()) == 0
    [((options,), _)] = calls
    assert (options.data, options.method, options.target) == ("d", ("rollout", "gradcam"), "cat")
    assert (options.panels, options.maps, options.harder, options.cue_conflict) == (3, 9, False, "c")


@pytest.mark.parametrize(
    ("method", "says"), [("relevence", "did you mean 'relevance'"), (",", "expected --method with at least one of")]
)
def test_a_wrong_method_is_said_before_anything_is_loaded(method, says, capsys):
    assert run(["compare", "vit-digits", "cnn-digits", "--method", method]) == 2
    assert says in capsys.readouterr().err
