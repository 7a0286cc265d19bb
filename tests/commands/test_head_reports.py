"""The reports of attention, rollout, stats and ablate: true words also for poor input."""

from pathlib import Path

import pytest

from tests.backing import unbacked
from vitlens.cli.main import run
from vitlens.commands.registry import COMMANDS
from vitlens.commands.run.publish import read_folder
from vitlens.models.loading import load
from vitlens.models.saved import save
from vitlens.report.document import Document
from vitlens.report.layout import METHODS

WORDS = ("ablate",)  # whose sentences name the rows that back them


@pytest.fixture(scope="module")
def uniform_vit(tiny_vit: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ViT whose queries are all zero, so that every head attends uniformly."""
    model = load(str(tiny_vit))
    for block in model.module.blocks:
        width = block.attn.qkv.weight.shape[1]
        block.attn.qkv.weight.data[:width] = 0
        block.attn.qkv.bias.data[:width] = 0
    folder = tmp_path_factory.mktemp("uniform") / "uniform-vit"
    save(model, folder / "model.safetensors")
    return folder


def made(word: str, model: Path, folder: Path, *more: str) -> Document:
    """The report of a run, checked: sentences backed, at most five limits, an answer at the head of every section."""
    assert run([word, str(model), "--device", "cpu", "--quiet", *more, "--out", str(folder)]) == 0
    return checked(folder)


def checked(folder: Path) -> Document:
    record = read_folder(folder)
    document = COMMANDS[record.command].report(record)
    assert list(unbacked(document)) == []
    assert len(document.limits) <= 5
    for section in document.sections:
        if section.sentences and section.title != METHODS:
            assert section.leading, section.title
            assert section.sentences[0].says in ("result", "filled"), section.title
    for verdict in document.verdicts:
        assert verdict.because
    return document


@pytest.mark.parametrize("word", WORDS)
def test_reports_of_a_small_model_are_backed(word: str, tiny_vit: Path, tmp_path: Path) -> None:
    more = ["--replace", "mean,resample,zero", "--prune", "0.25"]
    made(word, tiny_vit, tmp_path / "out", "--data", "digits", "--limit", "8", *more)


@pytest.mark.parametrize("word", WORDS)
def test_one_image_without_label_or_mask(word: str, tiny_vit: Path, pictures: Path, tmp_path: Path) -> None:
    """Nothing is concluded from it but what is true of a single image."""
    more = ["--predicted"] if word == "ablate" else []
    document = made(word, tiny_vit, tmp_path / "out", "--images", str(pictures / "0.png"), *more)
    assert document.findings == ()
    assert {verdict.state for verdict in document.verdicts} <= {"inconclusive", "not tested"}


@pytest.mark.parametrize("word", ["attention", "rollout", "stats"])
def test_a_model_whose_heads_are_all_uniform(word: str, uniform_vit: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    line = [word, str(uniform_vit), "--device", "cpu", "--quiet", "--data", "digits", "--limit", "24"]
    assert run([*line, "--out", str(out)]) == 0
    document = COMMANDS[word].report(read_folder(out))
    assert document.first is not None
    claims = " ".join(each.text for each in document.first.answer)
    assert {"attention": "are uniform", "rollout": "nearly uniform", "stats": "attend uniformly"}[word] in claims
    assert "fixed place" not in claims
    assert "same for every image" not in claims
