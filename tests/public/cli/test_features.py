"""What is typed after `vitlens features` is what the run gets."""

import inspect

import pytest

from vitlens import features
from vitlens.analysis.features.embedding import embed
from vitlens.cli.main import run
from vitlens.commands.features.options import FeaturesOptions
from vitlens.commands.run.options import RunOptions


def test_defaults(stand_in):
    calls = stand_in("features")
    assert run(["features", "vit-digits"]) == 0
    [((options,), _)] = calls
    assert options == FeaturesOptions(("vit-digits",), run=RunOptions(command="vitlens features vit-digits"))
    assert (options.ks, options.perplexity) == ((1, 5, 20), 30.0)


def test_what_functions_take_by_default_is_what_the_command_line_takes():
    functions = ((embed, "perplexity", "perplexity"), (features, "norm", "norm"))
    for function, parameter, field in functions:
        default = inspect.signature(function).parameters[parameter].default
        assert default == getattr(FeaturesOptions(("vit-digits",)), field)


def test_every_option_arrives(stand_in):
    calls = stand_in("features")
    line = (
        "features a b --data d --k 20,1 --no-probe --bank 50 --pool cls+mean --no-norm --no-cache --tsne --perplexity "
        "5 --thumbnails --query x.jpg --query y.jpg --show s.jpg,t.jpg --clip-templates simple --clip-templates my{} "
        "--prompt dog --objective a=self-supervised --seed 3"
    )
    assert run(line.split()) == 0
    [((options,), _)] = calls
    assert options == FeaturesOptions(
        ("a", "b"),
        "d",
        ks=(1, 20),
        pool="cls+mean",
        norm=False,
        bank=50,
        probe=False,
        tsne=True,
        perplexity=5.0,
        thumbnails=True,
        query=("x.jpg", "y.jpg"),
        templates=("simple", "my{}"),
        prompts=("dog",),
        cache=False,
        show=("s.jpg", "t.jpg"),
        objective=("a=self-supervised",),
        run=RunOptions(seed=3, command=options.run.command),
    )


@pytest.mark.parametrize(("typed", "says"), [("--k 0", "whole numbers from 1"), ("--pool max", "cls")])
def test_wrong_words_are_said_before_anything_is_loaded(typed, says, capsys):
    assert run(["features", "vit-digits", *typed.split()]) == 2
    assert says in capsys.readouterr().err
