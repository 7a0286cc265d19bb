"""--model-file FILE.py:FUNCTION: the user's code, run only where the option names it; every error is one line."""

import json
import sys

import pytest
import torch

import vitlens
from vitlens.cli.main import run
from vitlens.errors import InputError
from vitlens.files import sha256
from vitlens.models.saved import save

CODE = """
import neighbour
import vitlens

print("to stderr")

def vit():
    return vitlens.load(neighbour.NAME)

def cnn(name="cnn-digits"):
    return vitlens.load(name)

def random():
    return vitlens.load("vit-micro@random", seed=__import__("torch").randint(1000, ()).item())

def module():
    import torch
    return torch.nn.Linear(3, 3)

def wrapped(size=32):
    own = vitlens.load("vit-digits")
    return vitlens.wrap(own.module, image_size=size, mean=(0.5,) * 3, std=(0.5,) * 3, classes=own.classes)

def headless():
    import torch
    layers = torch.nn.Conv2d(3, 4, 32), torch.nn.Flatten()
    return vitlens.wrap(torch.nn.Sequential(*layers), image_size=32, mean=(0.5,) * 3, std=(0.5,) * 3)

def small(classes=4):
    "Its head stands before its blocks, its weights are tied, and it returns a tuple."
    import torch

    class Own(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.head = torch.nn.Linear(16, classes)
            self.embed = torch.nn.Conv2d(3, 16, 8, stride=8)
            self.positions = torch.nn.Parameter(0.1 * torch.randn(16, 16))
            layer = {"nhead": 2, "dim_feedforward": 32, "batch_first": True, "dropout": 0.1}
            self.blocks = torch.nn.ModuleList(torch.nn.TransformerEncoderLayer(16, **layer) for _ in range(2))
            self.again = self.embed
        def forward(self, images):
            tokens = self.again(images).flatten(2).transpose(1, 2) + self.positions
            for block in self.blocks:
                tokens = block(tokens)
            return self.head(tokens.mean(1)), tokens

    return vitlens.wrap(Own(), image_size=32, mean=(0.5,) * 3, std=(0.5,) * 3)

def unfit():
    return wrapped(size=30)

def unknown():
    return vitlens.load("vit-dgits")

def needs(argument):
    return argument

def raises():
    raise KeyError("two\\nlines")

def exits():
    raise SystemExit(0)

number = 3
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with my.py and a module that it imports; the current folder."""
    (tmp_path / "my.py").write_text(CODE)
    (tmp_path / "neighbour.py").write_text("NAME = 'vit-digits'\n")
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.modules.pop("neighbour", None)


def load(name, **more):
    return vitlens.load(name, code_files=(name,), **more)


def test_the_function_s_model_under_its_own_name(here, capsys):
    model = load("my.py:vit")
    images = torch.rand(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(model(images), vitlens.load("vit-digits")(images))
    assert (model.alias, model.provenance.name, model.provenance.weights) == ("vit", "my.py:vit", "my.py")
    assert model.provenance.sha256 == sha256(here / "my.py")
    assert any("code was run" in note for note in model.provenance.notes)
    assert str(here) not in sys.path
    assert load("./my.py:cnn").alias == "cnn"  # the code runs once, and is read again when it changes
    assert capsys.readouterr() == ("", "to stderr\n")
    (here / "my.py").write_text(CODE + "NAME = 1\n")
    load("my.py:vit")
    assert capsys.readouterr().err == "to stderr\n"


def test_random_weights_follow_the_seed_and_the_caller_s_random_state_is_kept(here):
    state = torch.random.get_rng_state()
    first, second, again = (load("my.py:random", seed=seed).module.state_dict() for seed in (0, 1, 0))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], second[name]) for name in first)


ERRORS = {
    "none.py:vit": "found nothing at none.py",
    "my.py:vti": "it has vit",
    "my.py:number": "a function number",
    "my.py:needs": "missing a required argument: 'argument'",
    "my.py:raises": "found KeyError: 'two",
    "my.py:exits": "found SystemExit: 0",
    "my.py:module": r"found torch\.nn\.modules\.linear\.Linear; return vitlens\.wrap",
    "my.py:unfit": r"30x30 px.* \(in my\.py:unfit\)",
    "my.py:unknown": r"no model 'vit-dgits'; did you mean 'vit-digits'\?",
    "my.py": "expected FILE.py:FUNCTION",
    "my.py:a.b": "expected FILE.py:FUNCTION",
    "broken.py:vit": "found SyntaxError",
    "raising.py:vit": "found ZeroDivisionError: division by zero",
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_are_one_line(here, name):
    (here / "broken.py").write_text("def vit(:\n")
    (here / "raising.py").write_text("1 / 0\n")
    with pytest.raises(InputError, match=ERRORS[name]) as caught:
        load(name)
    assert "\n" not in str(caught.value)


def test_code_is_run_only_where_the_option_names_it_and_decides_weights_and_size(here):
    (here / "my.py").write_text("raise SystemError('run')")
    for allowed in ((), ("my.py:other",), ("your.py:vit",)):
        with pytest.raises(InputError, match="add it where you trust the file"):
            vitlens.load("my.py:vit", code_files=allowed)
    for more in ({"weights": "w.safetensors"}, {"random_weights": True}, {"image_size": (64, 64)}):
        with pytest.raises(InputError, match="leave out"):
            load("my.py:vit", **more)


def test_a_wrapped_module_has_the_attention_of_the_model_itself(here):
    model, own, images = load("my.py:wrapped"), vitlens.load("vit-digits"), torch.rand(2, 3, 32, 32)
    torch.testing.assert_close(vitlens.rollout(model, images), vitlens.rollout(own, images), rtol=1e-5, atol=1e-6)
    line = "rollout --model-file my.py:wrapped --data digits --limit 2 --out out --quiet"
    assert run(line.split()) == 0
    assert (here / "out" / "report.md").is_file()


@pytest.mark.parametrize(
    "line",
    [
        "predict --model-file my.py:vit --limit 2",
        "predict my.py:vit --model-file my.py:vit --limit 2",
        "predict vit=my.py:vit --limit 2 --model-file=my.py:vit",
    ],
)
def test_the_option_names_the_model(here, line, capsys):
    assert run([*line.split(), "--quiet"]) == 0
    assert capsys.readouterr().out.startswith("image 0: ")


def test_beside_another_model_and_recorded(here):
    line = "evaluate my.py:vit cnn-digits --model-file my.py:vit --limit 20 --out out --quiet"
    assert run(line.split()) == 0
    config = json.loads((here / "out" / "config.json").read_text())
    assert config["options"]["model_options"]["model_file"] == ["my.py:vit"]
    assert config["models"][0]["name"] == "my.py:vit"
    assert config["models"][0]["sha256"] == sha256(here / "my.py")
    assert [model["alias"] for model in config["models"]] == ["vit", "cnn-digits"]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("predict my.py:vit", "expected --model-file my.py:vit"),
        ("predict vit-digits --model-file my.py:vit", "expected MODEL my.py:vit"),
        ("predict --model-file my.py:vit --model-file my.py:cnn", "expected one MODEL, found 2"),
        ("predict", "Missing argument 'MODEL'"),
        ("train my.py:vit", "expected --model-file my.py:vit"),
        ("train --model-file my.py:headless", "expected the logits of headless to be the output of a linear layer"),
    ],
)
def test_lines_that_are_refused(here, line, says, capsys):
    assert run(line.split()) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.removeprefix("to stderr\n").count("\n") == 1


def _trained(line, here, name):
    assert run([*line.split(), "--out", name, "--quiet"]) == 0
    return vitlens.load(str(here / name), code_files=("my.py:small",))


def test_a_module_is_trained_and_its_folder_is_a_model(here, capsys):
    line = "train --model-file my.py:small --epochs 1 --limit 96 --batch-size 32"
    model, images = _trained(line, here, "run"), torch.rand(3, 3, 32, 32)
    assert (model.classes, model.anatomy.family) == (tuple("0123456789"), "vit")
    assert any("code was run" in note for note in model.provenance.notes)
    save(model, here / "again.safetensors")
    again = vitlens.load(str(here / "again.safetensors"), code_files=("elsewhere/none.py:x", "./my.py:small"))
    with torch.no_grad():
        assert torch.equal(model(images), again(images))
        assert not torch.equal(model(images), load("my.py:small")(images)[:, :1].expand(-1, 10))
    metrics = json.loads((here / "run" / "results.json").read_text())["metrics"]
    assert run(["evaluate", "run", "--model-file", "my.py:small", "--limit", "96", "--out", "judged", "--quiet"]) == 0
    judged = json.loads((here / "judged" / "results.json").read_text())["metrics"]
    assert judged["accuracy/run"]["value"] == metrics["accuracy/small"]["value"]
    capsys.readouterr()
    assert run(["evaluate", "run", "--limit", "9"]) == 2
    assert "expected --model-file with my.py:small for run" in capsys.readouterr().err
    (here / "my.py").write_text(CODE + "\n# changed\n")
    changed = vitlens.load(str(here / "run"), code_files=("my.py:small",))
    assert any("has changed since the weights were saved" in note for note in changed.provenance.notes)


@pytest.mark.parametrize("more", ["--freeze-backbone", "--train-last 1"])
def test_a_part_of_a_module_is_trained(here, more):
    line = f"train --model-file my.py:small --epochs 1 --limit 64 --batch-size 32 {more}"
    trained, given = _trained(line, here, "run").module.state_dict(), load("my.py:small").module.state_dict()
    changed = {name for name, value in trained.items() if not torch.equal(value, given.get(name, value))}
    assert not torch.equal(trained["head.weight"], torch.zeros_like(trained["head.weight"]))
    names = {"head"} if "freeze" in more else {"head", "blocks.1"}
    assert all(name.startswith(tuple(f"{word}." for word in names)) or name == "again.weight" for name in changed)


def test_a_training_of_a_module_is_resumed(here):
    whole = _trained("train --model-file my.py:small --epochs 2 --limit 64 --batch-size 32", here, "whole")
    assert run(["train", "--resume", "whole", "--model-file", "my.py:small", "--quiet"]) == 0
    again = vitlens.load(str(here / "whole"), code_files=("my.py:small",))
    states = whole.module.state_dict(), again.module.state_dict()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
