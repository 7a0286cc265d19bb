"""What is typed after `vitlens explain` is what the run gets."""

import pytest

from vitlens.cli.main import run
from vitlens.commands.explain.options import ExplainOptions
from vitlens.commands.run.options import RunOptions


def test_defaults(stand_in):
    calls = stand_in("explain")
    assert run(["explain", "vit-digits"]) == 0
    [((options,), _)] = calls
    assert options == ExplainOptions(("vit-digits",), run=RunOptions(command="vitlens explain vit-digits"))
    assert (options.images, options.data, options.method, options.show) == ((), None, (), ())
    assert (options.engine, options.target, options.substrate) == ("vitlens", "predicted", "blur")
    assert (options.verify, options.counterfactuals) == (False, True)


def test_every_option_arrives(stand_in):
    calls = stand_in("explain")
    line = "explain a b --data d --method gradcam++,rise,all --target cat --show b.png,a --seed 3 --engine grad-cam"
    assert run([*line.split(), "--verify", "--substrate", "mean", "--no-counterfactuals"]) == 0
    [((options,), _)] = calls
    assert options.models == ("a", "b")
    assert (options.data, options.method) == ("d", ("gradcam++", "rise", "all"))
    assert (options.substrate, options.counterfactuals) == ("mean", False)
    assert options.engine == "grad-cam"
    assert options.show == ("b.png", "a")
    assert (options.target, options.verify, options.run.seed) == ("cat", True, 3)


@pytest.mark.parametrize(
    ("method", "says"), [("gradcm", "did you mean 'gradcam'"), (",", "expected --method with at least one of")]
)
def test_a_wrong_method_is_said_before_anything_is_loaded(method, says, capsys):
    assert run(["explain", "vit-digits", "--method", method]) == 2
    assert says in capsys.readouterr().err
