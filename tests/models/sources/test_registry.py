"""Which source a name belongs to, by its form alone; and that the entries refer to functions that are there."""

import inspect
from pathlib import Path

import pytest

from vitlens.models.saved import WEIGHTS_FILE
from vitlens.models.sources.registry import SOURCES, describe_names, require_source, source_of
from vitlens.names import BUNDLED, PRESETS
from vitlens.references import resolved

NAMES = {
    "vit-digits": "bundled",
    "vit-micro": "preset",
    "runs/a/best.pth": "file",
    "timm:no_such_model": "timm",
    "timm:": "timm",
    "torchvision:vit_b_16": "torchvision",
    "open-clip:ViT-B-32/openai": "open-clip",
    "hf:google/vit-base-patch16-224": "hf",
    **dict.fromkeys(("my.py:vit", "a/b.py:c", "my.py"), "code"),
    **dict.fromkeys(("vit-tny", "my.pyc:vit", ".py", "runs/py"), None),
}


@pytest.mark.parametrize("name", NAMES)
def test_the_source_of_a_name(name):
    source = source_of(name)
    assert (source and source.kind) == NAMES[name]


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
    assert SOURCES["run"].glob.endswith(WEIGHTS_FILE)
    assert "timm:NAME" in describe_names()


@pytest.mark.parametrize("kind", SOURCES)
def test_every_reference_is_a_documented_function(kind):
    source = SOURCES[kind]
    for reference in filter(None, (source.build, source.load, source.restore, source.list_names)):
        assert inspect.getdoc(resolved(reference)), reference
