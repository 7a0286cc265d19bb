"""`[alias=]NAME[@weights]`: the names of models, what they are called in reports, and the source of each."""

import json
from pathlib import Path

import pytest

import vitlens
from vitlens.cli.main import run
from vitlens.errors import InputError
from vitlens.models.sources.registry import SOURCES, require_source, source_of
from vitlens.names import BUNDLED, PRESETS

ALIASES = {  # folders and files are those of a tiny model
    "vit-digits": "vit-digits",
    "timm:test_vit.r160_in1k@random": "test_vit.r160_in1k-random",
    "runs/vit-a/": "vit-a",
    "a.b-c_1=runs/vit-a@random": "a.b-c_1",
    "runs/lr=0.1": "lr-0.1",  # a slash before '=': no alias; and in an alias no '='
    "w/_модель.safetensors": "model",
    f"runs/{'long' * 60}": "long" * 15,
}


@pytest.mark.parametrize("text", ALIASES)
def test_a_model_is_called_by_its_alias_or_the_last_part_of_its_name(text, tiny_vit, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if "/" in text:
        place = Path(text.partition("@")[0].removeprefix("a.b-c_1="))
        place.parent.mkdir()
        place.symlink_to(tiny_vit / "model.safetensors" if place.suffix == ".safetensors" else tiny_vit)
    model = vitlens.load(text)
    assert model.alias == ALIASES[text]
    assert (model.provenance.weights == "random") == text.endswith("@random")
    monkeypatch.chdir(tiny_vit)
    assert vitlens.load(".").alias == tiny_vit.name


@pytest.mark.parametrize("text", ["", "@w.pth", "a=@w.pth", "no/alias=x", f"{'a' * 81}=vit-digits"])
def test_other_names_are_refused(text):
    with pytest.raises(InputError):
        vitlens.load(text)


@pytest.mark.parametrize(
    ("texts", "aliases"),
    [
        (["runs/a/vit", "vit", "vit-2", "vit"], ["vit", "vit-2", "vit-2-2", "vit-3"]),
        (["runs/a", "a=vit"], ["a-2", "a"]),  # a typed alias is kept whatever stands before it
    ],
)
def test_aliases_of_one_command_are_made_unique(texts, aliases, tiny_vit, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = [text.partition("=")[2] or text for text in texts]
    for name in set(names):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).symlink_to(tiny_vit)
    assert run(["evaluate", *texts, "--limit", "4", "--out", "out", "--quiet"]) == 0
    models = json.loads(Path("out/config.json").read_text())["models"]
    assert [(model["alias"], model["name"]) for model in models] == list(zip(aliases, names))


def test_an_alias_given_twice_is_refused(capsys):
    assert run(["evaluate", "a=vit-digits", "b=cnn-digits", "a=cnn-digits"]) == 2
    assert "'a' twice" in capsys.readouterr().err


KINDS = {
    "runs/a/best.pth": "file",
    "timm:no_such_model": "timm",
    "hf:google/vit-base-patch16-224": "hf",
    **dict.fromkeys(("my.py:vit", "a/b.py:c", "my.py"), "code"),
    **dict.fromkeys(("vit-tny", "my.pyc:vit", ".py", "runs/py"), None),
}


@pytest.mark.parametrize("name", KINDS)
def test_the_source_of_a_name_by_its_form_alone(name):
    source = source_of(name)
    assert (source and source.kind) == KINDS[name]


def test_a_folder_comes_before_a_preset_of_its_name_and_after_a_bundled_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("vit-micro", "vit-digits"):
        Path(name).mkdir()
    assert [require_source(name).kind for name in ("vit-micro", "vit-digits", ".")] == ["run", "bundled", "run"]


def test_names_and_kinds_in_files_stay_as_they_are():
    """`kind` is written into model.safetensors: files of earlier versions have these."""
    assert {kind for kind, source in SOURCES.items() if source.build} == {"preset", "timm", "torchvision", "hf"}
    assert SOURCES["bundled"].all_names() == list(BUNDLED)
    assert SOURCES["preset"].all_names() == list(PRESETS)
