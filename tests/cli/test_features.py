"""What is typed after `vitlens features` is what the run gets."""

import pytest

from vitlens.cli.main import run
from vitlens.commands.scaffold.options import ModelOptions, RunOptions
from vitlens.runs.features_choices import FeatureChoices


def test_defaults(stand_in):
    calls = stand_in("features")
    assert run(["features", "vit-digits"]) == 0
    [(args, options)] = calls
    assert args == (["vit-digits"],)
    assert options == {
        "data": None,
        "images": None,
        "choices": FeatureChoices(),
        "model_options": ModelOptions(),
        "options": RunOptions(command="vitlens features vit-digits"),
    }


def test_every_option_arrives(stand_in):
    calls = stand_in("features")
    line = (
        "features a b --data d --k 20,1 --no-probe --bank 50 --pool cls+mean --no-norm --no-cache --tsne --perplexity "
        "5 --thumbnails --query x.jpg --query y.jpg --clip-templates simple --clip-templates my{} --prompt dog --seed 3"
    )
    assert run(line.split()) == 0
    [(args, options)] = calls
    assert args == (["a", "b"],)
    assert options["choices"] == FeatureChoices(
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
    )
    assert (options["data"], options["options"].seed) == ("d", 3)


@pytest.mark.parametrize(("typed", "says"), [("--k 0", "whole numbers from 1"), ("--pool max", "cls")])
def test_wrong_words_are_said_before_anything_is_loaded(typed, says, capsys):
    assert run(["features", "vit-digits", *typed.split()]) == 2
    assert says in capsys.readouterr().err
