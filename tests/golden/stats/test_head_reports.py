"""The reports of attention, rollout, stats and ablate: true words also for poor input."""

from pathlib import Path

import pytest

from tests.kit.first_page import check_first_page, clear_effects, states
from tests.kit.making import save
from vitlens import load
from vitlens.cli.main import run
from vitlens.commands.registry import COMMANDS
from vitlens.commands.run.publish import read_folder
from vitlens.report.document import Document


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
    """The report of a run, checked."""
    assert run([word, str(model), "--device", "cpu", "--quiet", *more, "--out", str(folder)]) == 0
    document: Document = COMMANDS[word].report(read_folder(folder))
    check_first_page(document)
    return document


def test_of_one_image_without_label_or_mask_nothing_is_concluded(
    tiny_vit: Path, pictures: Path, tmp_path: Path
) -> None:
    document = made("ablate", tiny_vit, tmp_path / "out", "--images", str(pictures / "0.png"), "--predicted")
    assert not clear_effects(document)
    assert set(states(document).values()) <= {"inconclusive", "not tested"}


@pytest.mark.parametrize("word", ["attention", "rollout", "stats"])
def test_a_model_whose_heads_are_all_uniform(word: str, uniform_vit: Path, tmp_path: Path) -> None:
    document = made(word, uniform_vit, tmp_path / "out", "--data", "digits", "--limit", "24")
    claims = " ".join(each.text for each in document.first.answer)
    assert {"attention": "are uniform", "rollout": "nearly uniform", "stats": "(4 uniform)"}[word] in claims
    assert "fixed place" not in claims
    assert "same for every image" not in claims
