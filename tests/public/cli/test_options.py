"""Typed options reach the run: one case a line, with the options that differ from the defaults."""

import operator
import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.kit.commands import refusal, typed_line
from vitlens import list_attacks
from vitlens.cli.main import run
from vitlens.commands.attack.options import AttackOptions
from vitlens.commands.predict.options import PredictOptions
from vitlens.commands.profile.options import ProfileOptions
from vitlens.commands.registry import COMMANDS
from vitlens.commands.run.options import ModelOptions
from vitlens.names import BUNDLED, PRESETS

TYPED: dict[str, dict[str, Any]] = {
    "rollout timm:x --fusion max --discard 0.5 --alpha 0.25 --start-layer 2 --readout mean "
    "--method relevance,flow --target cat --layer 1 --weights w.safetensors --random-weights "
    "--arch a --image-size 32x64 --mean 0.1,0.2,0.3 --std 0.5 --classes names.txt --data d "
    "--limit 3 --batch-size 4 --device cuda:1 --precision bf16 --seed 5 --out o --overwrite "
    "--format svg,png --data-dir c --quiet --html": {
        "model": "timm:x",
        "fusion": ("max",),
        "discard": 0.5,
        "alpha": 0.25,
        "start_layer": 2,
        "readout": "mean",
        "method": ("relevance", "flow"),
        "target": "cat",
        "layer": 1,
        "data": "d",
        "model_options.weights": Path("w.safetensors"),
        "model_options.random_weights": True,
        "model_options.arch": "a",
        "model_options.image_size": (32, 64),
        "model_options.mean": (0.1, 0.2, 0.3),
        "model_options.std": (0.5, 0.5, 0.5),
        "model_options.classes": Path("names.txt"),
        "run.limit": 3,
        "run.batch_size": 4,
        "run.device": "cuda:1",
        "run.precision": "bf16",
        "run.seed": 5,
        "run.out": Path("o"),
        "run.overwrite": True,
        "run.formats": ("svg", "png"),
        "run.data_dir": Path("c"),
        "run.quiet": True,
        "run.html": True,
    },
    "predict m --images 'a cat.jpg'": {"images": ("a cat.jpg",), "run.seed": 0},
    "predict vit-digits --images a.jpg b.jpg c --seed 1": {
        "images": ("a.jpg", "b.jpg", "c"),
        "run.seed": 1,
    },
    "predict vit-digits --images=a.jpg b.jpg --seed 1": {
        "images": ("a.jpg", "b.jpg"),
        "run.seed": 1,
    },
    "predict vit-digits --images a.jpg --images b.jpg --images c": {
        "images": ("a.jpg", "b.jpg", "c")
    },
    "predict --seed 1 vit-digits --images a b --images c": {
        "model": "vit-digits",
        "images": ("a", "b", "c"),
    },
    "look a.jpg b --model m --offline --attention w.npy --image a.jpg --prefix 2": {
        "images": ("a.jpg", "b"),
        "model": "m",
        "offline": True,
        "attention": Path("w.npy"),
        "image": "a.jpg",
        "prefix": 2,
    },
    "evaluate vit-digits small=runs/a --at-least accuracy=1 --at-least accuracy/small=1 --at-most "
    "calibration_error=1": {
        "models": ("vit-digits", "small=runs/a"),
        "data": None,
        "run.at_least": ("accuracy=1", "accuracy/small=1"),
        "run.at_most": ("calibration_error=1",),
    },
    "rollout m --fusion max,,min,max": {"fusion": ("max", "min")},
    "profile m --sizes 16,,32x48,16, --batch-sizes 8,1,2,8": {
        "sizes": ((16, 16), (32, 48)),
        "batch_sizes": (1, 2, 8),
    },
    "predict m --mean 0.5 --std 0,0.25,1 --image-size 32": {
        "model_options.mean": (0.5, 0.5, 0.5),
        "model_options.std": (0.0, 0.25, 1.0),
        "model_options.image_size": (32, 32),
    },
    "stats fresh=vit-digits@random --no-renormalise": {
        "model": "fresh=vit-digits@random",
        "renormalise": False,
    },
    "stats runs/a --over-training": {"over_training": True, "renormalise": True},
    "attention m --layer 3 --query 7,8 --key 0,1": {"layer": 3, "query": (7, 8), "key": (0, 1)},
    "reversal --task sort --length 4 --heads 2 --positions fixed --steps 9": {
        "task": "sort",
        "length": 4,
        "heads": 2,
        "positions": "fixed",
        "steps": 9,
    },
    "walkthrough m --layer 3 --head 1 --images a": {"layer": 3, "head": 1, "images": ("a",)},
    "ablate m --replace mean,zero --units head,block --no-curves --greedy --pairs 3 --no-patch "
    "--clean a --corrupted b --prune 0.5 --save s --resume r --predicted": {
        "replace": ("mean", "zero"),
        "units": ("head", "block"),
        "curves": False,
        "greedy": True,
        "pairs": 3,
        "patch": False,
        "clean": Path("a"),
        "corrupted": Path("b"),
        "prune": 0.5,
        "save": Path("s"),
        "resume": Path("r"),
        "predicted": True,
    },
    "audit m --budget 3 --junit j.xml --no-cache": {
        "budget": 3.0,
        "junit": Path("j.xml"),
        "cache": False,
    },
    "profile vit-tiny timm:x --patch-size 4,8x16 --sizes 64 --batch-sizes 2,1": {
        "models": ("vit-tiny", "timm:x"),
        "patch_sizes": ((4, 4), (8, 16)),
        "sizes": ((64, 64),),
        "batch_sizes": (1, 2),
    },
    "compare a b --data d --method rollout,gradcam --target cat --panels 3 --maps 9 --no-harder "
    "--cue-conflict c --checked 4 --disturbed 5": {
        "models": ("a", "b"),
        "data": "d",
        "method": ("rollout", "gradcam"),
        "target": "cat",
        "panels": 3,
        "maps": 9,
        "harder": False,
        "cue_conflict": "c",
        "checked": 4,
        "disturbed": 5,
    },
    "explain a b --data d --method gradcam++,rise,all --target cat --show b.png,a --verify "
    "--auto --substrate mean --no-counterfactuals --composites none --composite-count 3 "
    "--other-substrates none --no-stability --refine affinity --refine-layers 1 "
    "--refine-steps 4 --views 2 --times rollout --upsample image": {
        "models": ("a", "b"),
        "data": "d",
        "method": ("gradcam++", "rise", "all"),
        "target": "cat",
        "show": ("b.png", "a"),
        "verify": True,
        "auto": True,
        "substrate": "mean",
        "counterfactuals": False,
        "composites": ("none",),
        "composite_count": 3,
        "other_substrates": ("none",),
        "stability": False,
    },
    "attack a b --data d --attack auto,patch --epsilon 0.5,8 --epsilon-l2 0.1 --steps 7 "
    "--restarts 3 --predicted --downwards --no-transfer --no-inside --no-corruptions --baseline "
    "b --patch-side 5 --patch-anywhere --self-checks few --resume runs/x": {
        "attacks": ("auto", "patch"),
        "epsilons": (0.5, 8.0),
        "epsilons_l2": (0.1,),
        "restarts": 3,
        "predicted": True,
        "downwards": True,
        "transfer": False,
        "inside": False,
        "corruptions": False,
        "baseline": "b",
        "patch_side": 5,
        "patch_anywhere": True,
        "self_checks": "few",
        "resume": Path("runs/x"),
    },
    "attack m": {
        "epsilons": (0.0, 1.0, 2.0, 4.0, 8.0),
        "linf": (1 / 255, 2 / 255, 4 / 255, 8 / 255),
    },
    "features a b --data d --k 20,1 --no-probe --bank 50 --pool cls+mean --no-norm --no-cache "
    "--tsne --perplexity 5 --thumbnails --query x.jpg --query y.jpg --show s.jpg,t.jpg "
    "--clip-templates simple --clip-templates my{} --prompt dog --objective a=self-supervised": {
        "ks": (1, 20),
        "probe": False,
        "bank": 50,
        "pool": "cls+mean",
        "norm": False,
        "cache": False,
        "tsne": True,
        "perplexity": 5.0,
        "thumbnails": True,
        "query": ("x.jpg", "y.jpg"),
        "show": ("s.jpg", "t.jpg"),
        "templates": ("simple", "my{}"),
        "prompts": ("dog",),
        "objective": ("a=self-supervised",),
    },
    "study --kind patch-size --seeds 2 --epochs 4 --data cifar10 --resume there --no-cache": {
        "models": (),
        "kind": "patch-size",
        "seeds": 2,
        "epochs": 4,
        "data": "cifar10",
        "resume": Path("there"),
        "cache": False,
    },
    "train vit-micro --epochs 3 --average 0 --patch-size 8 --depth 2 --image-size 64 --set "
    "mixup=0.8 --set flip=False --dropout 0.1 --pooling mean --keep-every 3 --compile on "
    "--recompute --check --track tensorboard": {
        "model": "vit-micro",
        "data": None,
        "resume": None,
        "keep_every": 3,
        "compiling": "on",
        "recompute": True,
        "recipe.numbers": {"epochs": 3, "average": 0.0, "mixup": 0.8, "flip": False},
        "shape.image_size": (64, 64),
        "shape.changes": {"patch_size": [8, 8], "depth": 2, "dropout": 0.1, "pooling": "mean"},
        "check": True,
        "track": ("tensorboard",),
    },
    "train timm:x --weights w.pth --freeze-backbone --cached-views 3 --layer-decay 0.75": {
        "tuning.weights": "w.pth",
        "tuning.freeze": True,
        "tuning.views": 3,
        "tuning.trained": 0,
        "recipe.numbers": {"layer_decay": 0.75},
        "teaching.teacher": None,
        "keep_every": None,
    },
    "train runs/a --train-last 2": {"tuning.last": 2, "tuning.trained": 2, "tuning.freeze": False},
    "train vit-tiny --distill-from r --distill soft --temperature 2 --distill-weight 0.3": {
        "teaching.teacher": "r",
        "teaching.kind": "soft",
        "teaching.temperature": 2.0,
        "teaching.weight": 0.3,
        "teaching.token": None,
        "tuning.trained": None,
    },
    "train vit-tiny --distill-from r --no-distill-token --beside p": {
        "teaching.teacher": "r",
        "teaching.token": False,
        "teaching.beside": "p",
    },
}


UNREADABLE = [  # other wrong values: test_refusals.py
    ("rollout m --fusion", ("", "mean,mex")),
    ("predict m --mean", ("", "a", "0.5,0.5", "0.5,0.5,1.5", "nan", "-0.1", "0,0,0,0")),
    ("profile m --sizes", ("", ",", "a", "3x4x5", "0")),
    ("profile m --batch-sizes", ("", "0", "1,,2", "-1", "1.5")),
    ("predict m --image-size", ("", "0", "1x2x3", "-4", "4.5", "x", "32x", "9" * 30, "9" * 5000)),
    ("attention m --query", ("", "3", "3,", "3,4,5", "-1,3", "3;4", "a,b", "1.5,2", "3x4")),
]


@pytest.mark.parametrize(("line", "texts"), UNREADABLE)
def test_values_that_cannot_be_read_are_refused_by_the_name_of_their_option(
    line, texts, stand_in, capsys
):
    word = line.split()[0]
    option = line.split()[-1]
    calls = stand_in(word)
    for text in texts:
        assert option in refusal(capsys, f"{line}={text}")
    assert not calls


def options_of(stand_in, words: list[str]) -> Any:
    calls = stand_in(words[0], result=None)
    assert run(words) == 0
    [((options,), _)] = calls
    return options


@pytest.mark.parametrize("line", TYPED)
def test_every_option_arrives(line, stand_in, capsys):
    options = options_of(stand_in, shlex.split(line))
    values = {name: operator.attrgetter(name)(options) for name in TYPED[line]}
    assert values == TYPED[line]
    assert shlex.split(options.run.command) == ["vitlens", *shlex.split(line)]  # can be typed again
    assert capsys.readouterr().out == ""  # a process that is not the first has nothing to say


@pytest.mark.parametrize(
    ("word", "options"),
    [
        ("profile", ProfileOptions(("m",), patch_sizes=((4, 8), (8, 8)))),
        ("profile", ProfileOptions(("m",), sizes=((32, 48),))),
        (
            "predict",
            PredictOptions("m", model_options=ModelOptions(mean=(0.48145466, 0.4578275, 0.4082))),
        ),
        ("predict", PredictOptions("m", model_options=ModelOptions(image_size=(224, 160)))),
    ],
)
def test_options_that_are_typed_again_are_parsed_to_the_same_values(word, options, stand_in):
    _, *words = shlex.split(typed_line(word, options))
    parsed = options_of(stand_in, words)
    assert {**vars(parsed), "run": None} == {**vars(options), "run": None}


@pytest.mark.parametrize(
    "word", [word for word, command in COMMANDS.items() if command.reports and not command.serves]
)
def test_defaults_of_the_command_line_are_those_of_the_options(word, stand_in):
    parsed = options_of(stand_in, [word] if word == "reversal" else [word, "m"])
    names = {"model": "m"}
    if word == "reversal":
        names = {}
    elif word == "look":
        names = {"images": ("m",)}
    elif hasattr(parsed, "models"):
        names = {"models": ("m",)}
    expected = COMMANDS[word].options(**names)
    assert {**vars(parsed), "run": None} == {**vars(expected), "run": None}
    assert {**vars(parsed.run), "command": ""} == vars(expected.run)


@pytest.mark.parametrize("word", COMMANDS)
def test_the_example_of_each_command_parses(word, stand_in):
    calls = stand_in(word)
    for line in COMMANDS[word].example.split(" && "):
        if line.split()[1] == word:
            assert run(line.split()[1:]) == 0
    assert calls


@pytest.mark.parametrize(
    ("text", "of_pgd", "of_cw"), [("7", 7, 7), ("pgd=20,cw=50", 20, 50), ("cw = 5", None, 5)]
)
def test_steps_can_be_said_by_attack(stand_in, text, of_pgd, of_cw):
    options = options_of(stand_in, ["attack", "a", "--steps", text])
    assert (options.steps_for("pgd"), options.steps_for("cw")) == (of_pgd, of_cw)


def test_an_attack_can_have_one_epsilon_alone():
    options = AttackOptions(("a",), single_epsilons={"pgd": 2.0})
    assert options.epsilons_of("pgd") == (2 / 255,)
    assert options.epsilons_of("fgsm") == options.linf
    assert set(options.attacks) <= set(list_attacks().names)


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        (
            "vitlens predict ",
            {*PRESETS, *BUNDLED, "timm:", "torchvision:", "open-clip:", "hf:", "runs/a"},
        ),
        ("vitlens predict resnet", {"resnet20", "resnet18", "resnet50"}),
        ("vitlens predict runs", {"runs/a"}),
        ("vitlens predict m --data dig", {"digits", "digits-shortcut", "digits-clear"}),
        ("vitlens predict m --data sc", {"scenes.npz"}),
        ("vitlens study --kind po", {"pooling", "positions"}),
        ("vitlens study --kind wh", {"whole"}),
    ],
)
def test_a_shell_is_offered_names_and_what_lies_here(typed, offered, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("runs/a/model.safetensors", "scenes.npz", "runs/unfinished/config.json"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).touch()
    monkeypatch.setenv("_VITLENS_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", typed)
    monkeypatch.setenv("COMP_CWORD", str(len(typed.split(" ")) - 1))
    run([])
    assert set(capsys.readouterr().out.split()) == offered
