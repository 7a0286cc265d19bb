"""What is typed is what the run gets."""

import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from vitlens.cli.main import run
from vitlens.cli.words import one_option_per_image
from vitlens.commands.attack.options import AttackOptions
from vitlens.commands.explain.options import ExplainOptions
from vitlens.commands.registry import COMMANDS
from vitlens.commands.rollout.options import RolloutOptions
from vitlens.commands.run.flags import typed
from vitlens.commands.run.options import ModelOptions, RunOptions
from vitlens.commands.train.options import RecipeChanges, TeacherOptions, TrainOptions, Tuning


def test_defaults_of_the_command_line_are_those_of_the_options(stand_in):
    calls = stand_in("rollout")
    assert run(["rollout", "vit-digits"]) == 0
    [((options,), _)] = calls
    assert options == RolloutOptions("vit-digits", run=RunOptions(command="vitlens rollout vit-digits"))


def test_every_shared_option_arrives(stand_in):
    line = (
        "rollout timm:x --weights w.safetensors --random-weights --arch a --image-size 32x64 --mean 0.1,0.2,0.3 "
        "--std 0.5 --classes names.txt --data d --limit 3 --batch-size 4 --device cuda:1 --precision bf16 --seed 5 "
        "--out o --overwrite --format svg,png --data-dir c --quiet --fusion max --discard 0.5 --alpha 0.25 "
        "--start-layer 2 --readout mean --method relevance,flow --target cat --layer 1"
    )
    calls = stand_in("rollout")
    assert run(line.split()) == 0
    [((options,), _)] = calls
    assert options.run == RunOptions(
        device="cuda:1",
        precision="bf16",
        seed=5,
        batch_size=4,
        limit=3,
        out=Path("o"),
        overwrite=True,
        quiet=True,
        formats=("svg", "png"),
        data_dir=Path("c"),
        command=f"vitlens {line}",
    )
    assert options.model_options == ModelOptions(
        weights=Path("w.safetensors"),
        random_weights=True,
        arch="a",
        image_size=(32, 64),
        mean=(0.1, 0.2, 0.3),
        std=(0.5, 0.5, 0.5),
        classes=Path("names.txt"),
    )
    assert options == RolloutOptions(
        "timm:x",
        data="d",
        method=("relevance", "flow"),
        target="cat",
        fusion=("max",),
        discard=0.5,
        alpha=0.25,
        start_layer=2,
        layer=1,
        readout="mean",
        model_options=options.model_options,
        run=options.run,
    )


@pytest.mark.parametrize(
    "line",
    [
        "vit-digits --images a.jpg b.jpg c --seed 1",
        "vit-digits --images a.jpg --images b.jpg --images c --seed 1",
        "--seed 1 vit-digits --images a.jpg b.jpg --images c",
    ],
)
def test_images_takes_every_word_up_to_the_next_option(line, stand_in):
    calls = stand_in("predict")
    assert run(["predict", *line.split()]) == 0
    [((options,), _)] = calls
    assert options.model == "vit-digits"
    assert options.images == ("a.jpg", "b.jpg", "c")
    assert options.run.seed == 1


def test_words_without_images_are_left_alone():
    assert list(one_option_per_image(["m", "--limit", "3", "x"])) == ["m", "--limit", "3", "x"]
    assert list(one_option_per_image(["--images=a", "m"])) == ["--images=a", "m"]


def test_the_command_line_can_be_typed_again(stand_in):
    calls = stand_in("predict")
    run(["predict", "m", "--images", "a cat.jpg"])
    [((options,), _)] = calls
    assert options.run.command == "vitlens predict m --images 'a cat.jpg'"


@pytest.mark.parametrize(
    ("word", "options"),
    [
        ("explain", ExplainOptions(
            ("a=b c", "d"), images=("x y", "z"), method=("rollout",), counterfactuals=False,
            model_options=ModelOptions(image_size=(32, 64)), run=RunOptions(limit=3),
        )),
        ("attack", AttackOptions(
            ("a",), "digits", single_epsilons={"low-frequency": 8.0}, attacks=("pgd", "low-frequency"), steps=3,
        )),
        ("train", TrainOptions("vit-micro", recipe=RecipeChanges(settings=("mixup=0.8", "flip=False")))),
    ],
)  # fmt: skip
def test_options_as_they_are_typed_are_these_options(word, options, stand_in):
    calls = stand_in(word)
    line = " ".join((word, *typed(options)))
    assert run(shlex.split(line)) == 0
    [((found,), _)] = calls
    assert found == replace(options, run=replace(options.run, command=f"vitlens {line}"))


def test_predict_prints_the_rows_it_gets(stand_in, capsys):
    stand_in("predict", result=["a.jpg 7", "b.jpg 1"])
    assert run(["predict", "m", "--images", "a.jpg"]) == 0
    assert capsys.readouterr().out == "a.jpg 7\nb.jpg 1\n"


def test_evaluate_takes_several_models(stand_in):
    calls = stand_in("evaluate")
    assert run(["evaluate", "vit-digits", "small=runs/a"]) == 0
    [((options,), _)] = calls
    assert (options.models, options.data) == (("vit-digits", "small=runs/a"), None)


def test_stats_takes_one_model(stand_in, capsys):
    calls = stand_in("stats", result=None)
    assert run(["stats", "fresh=vit-digits@random", "--no-renormalise"]) == 0
    [((options,), _)] = calls
    assert options.model == "fresh=vit-digits@random"
    assert options.renormalise is False
    assert capsys.readouterr().out == ""  # a process that is not the first has nothing to say


def test_stats_over_training_arrives(stand_in):
    calls = stand_in("stats")
    assert run(["stats", "runs/a", "--over-training"]) == 0
    assert run(["stats", "runs/a"]) == 0
    [((asked,), _), ((default,), _)] = calls
    assert (asked.model, asked.over_training, default.over_training) == ("runs/a", True, False)


def test_profile_takes_lists(stand_in, capsys):
    calls = stand_in("profile", result="report.md")
    line = "profile vit-tiny timm:x --patch-size 4,8x16 --sizes 64 --batch-sizes 2,1"
    assert run(line.split()) == 0
    assert run(["profile", "vit-tiny"]) == 0
    assert capsys.readouterr().out == "report.md\nreport.md\n"
    [((first,), _), ((second,), _)] = calls
    assert (first.patch_sizes, first.sizes, first.batch_sizes) == (((4, 4), (8, 16)), ((64, 64),), (1, 2))
    assert (second.patch_sizes, second.sizes, second.batch_sizes) == ((), (), ())
    assert first.models == ("vit-tiny", "timm:x")
    assert run(["profile", "vit-tiny", "--limit", "3"]) == 2
    assert "error: expected no --limit, found 3: profile measures on random pixels" in capsys.readouterr().err


def test_train_passes_on_what_was_given_alone(stand_in):
    calls = stand_in("train")
    line = "train vit-micro --epochs 3 --average 0 --patch-size 8 --depth 2 --image-size 64"
    assert run(line.split()) == 0
    [((options,), _)] = calls
    assert options.recipe.numbers == {"epochs": 3, "average": 0.0}
    assert options.shape.sides == {"patch_size": [8, 8], "depth": 2}
    assert options.shape.image_size == (64, 64)
    assert (options.model, options.data, options.resume) == ("vit-micro", None, None)


def test_train_passes_on_dropout_and_pooling(stand_in, capsys):
    calls = stand_in("train")
    assert run(["train", "vit-micro", "--dropout", "0.1", "--pooling", "mean"]) == 0
    [((options,), _)] = calls
    assert options.shape.sides == {"dropout": 0.1, "pooling": "mean"}
    assert run(["train", "vit-micro", "--pooling", "max"]) == 2
    assert "--pooling" in capsys.readouterr().err


def test_train_passes_on_what_is_tuned_and_who_teaches(stand_in, capsys):
    calls = stand_in("train")
    for line in (
        "timm:x --weights w.pth --freeze-backbone --cached-views 3 --layer-decay 0.75",
        "vit-tiny --distill-from r --distill soft --temperature 2 --distill-weight 0.3",
        "vit-tiny --distill-from r --no-distill-token --beside p",
        "runs/a --train-last 2",
    ):
        assert run(["train", *line.split()]) == 0
    tunings, teachings = ([getattr(options, name) for (options,), _ in calls] for name in ("tuning", "teaching"))
    assert tunings == [Tuning("w.pth", freeze=True, views=3), Tuning(), Tuning(), Tuning(last=2)]
    assert teachings[1:3] == [TeacherOptions("r", "soft", 0.3, 2.0), TeacherOptions("r", token=False, beside="p")]
    assert teachings[0] == teachings[3] == TeacherOptions()
    assert calls[0][0][0].recipe.numbers == {"layer_decay": 0.75}
    assert run(["train", "vit-tiny", "--distill", "soft"]) == 2
    assert "--distill-from MODEL with --distill, found --distill alone" in capsys.readouterr().err


def test_train_keeps_weights_when_asked(stand_in):
    calls = stand_in("train")
    assert run(["train", "vit-micro", "--keep-every", "3"]) == 0
    assert run(["train", "vit-micro"]) == 0
    assert [options.keep_every for (options,), _ in calls] == [3, None]


def test_attention_passes_on_the_views(stand_in, capsys):
    calls = stand_in("attention")
    assert run(["attention", "m"]) == 0
    assert run(["attention", "m", "--layer", "3", "--query", "7,8", "--key", "0,1"]) == 0
    views = [{word: getattr(options, word) for word in ("layer", "query", "key")} for (options,), _ in calls]
    assert views == [dict.fromkeys(views[0]), {"layer": 3, "query": (7, 8), "key": (0, 1)}]
    assert run(["attention", "m", "--key", "2"]) == 2
    assert "error: expected --key ROW,COL with two whole numbers from 0, found '2'" in capsys.readouterr().err
    assert len(calls) == 2


@pytest.mark.parametrize("word", COMMANDS)
def test_the_example_of_each_command_parses(word, stand_in):
    calls = stand_in(word)
    for line in COMMANDS[word].example.split(" && "):
        if line.split()[1] == word:
            assert run(line.split()[1:]) == 0
    assert calls
