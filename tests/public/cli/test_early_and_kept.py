"""Refusals before a model is loaded, and what attack and attention store and draw on request."""

import errno
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.kit.commands import figures, ran, refusal
from vitlens.cli.main import run
from vitlens.commands.registry import Command

# a short attack that fools some images and saves them
ATTACK = (
    "--data digits --limit 4 --predicted --attack pgd --steps 3 --step 1.5 --epsilon 32 "
    "--no-corruptions --no-inside --self-checks few --save-images"
)


def test_a_taken_folder_is_refused_before_anything_is_loaded(tmp_path, monkeypatch, capsys):
    (tmp_path / "mine.txt").touch()
    monkeypatch.setattr(Command, "measure", property(lambda _: pytest.fail))
    assert "--overwrite" in refusal(capsys, f"stats vit-digits --out {tmp_path}")


@pytest.fixture
def read_only(tmp_path, monkeypatch) -> Path:
    """Return a folder in which no file can be made, whoever runs the tests."""
    folder = tmp_path / "read-only"
    folder.mkdir()
    os_open = os.open

    def refuse(path, flags, *arguments, **options):
        if str(path).startswith(str(folder)) and flags & (os.O_WRONLY | os.O_RDWR):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return os_open(path, flags, *arguments, **options)

    monkeypatch.setattr(os, "open", refuse)
    return folder


@pytest.mark.parametrize(
    ("option", "line"),
    [
        ("--junit", "audit timm:no_such_model --junit {place}/junit.xml"),
        ("--out", "audit timm:no_such_model --out {place}/run"),
        ("--save", "ablate timm:no_such_model --data digits --prune 0.5 --save {place}/new/pruned"),
        ("--resume", "train --resume {place}"),
        ("--share", "report {run} --share {place}/copy"),
    ],
)
def test_what_cannot_be_written_is_refused_first_and_named_by_its_option(
    option, line, read_only, golden, capsys
):
    run_folder = golden("predict").folder
    message = refusal(capsys, line.format(place=read_only, run=run_folder))
    assert option in message
    assert "--overwrite" not in message


@pytest.mark.parametrize("options", ["", "--html", "--compare {run}"])
def test_a_report_into_a_folder_that_cannot_be_written_advises_a_copy(
    options, read_only, golden, tmp_path, capsys
):
    run_folder = golden("predict").folder
    shutil.copytree(run_folder, read_only, dirs_exist_ok=True)
    message = refusal(capsys, f"report {read_only} {options.format(run=run_folder)}")
    assert "--out" not in message
    advice = message.strip().rpartition(": vitlens ")[2].replace("NEW", str(tmp_path / "copy"))
    assert run(advice.split()) == 0
    assert (tmp_path / "copy" / "report.md").is_file()


def test_a_copy_to_share_is_not_offered_an_option_that_report_lacks(golden, tmp_path, capsys):
    (tmp_path / "taken.txt").touch()
    message = refusal(capsys, f"report {golden('predict').folder} --share {tmp_path}")
    assert "--share" in message
    assert "--overwrite" not in message


def test_a_pipe_is_no_file_for_results(tmp_path, capsys):
    pipe = tmp_path / "junit.xml"
    os.mkfifo(pipe)
    assert "--junit" in refusal(capsys, f"audit timm:no_such_model --junit {pipe}")
    assert pipe.is_fifo()


@pytest.mark.parametrize("word", ["ablate", "attack", "evaluate", "study"])
def test_images_without_labels_are_refused_before_a_model_is_loaded(word, pictures, capsys):
    message = refusal(capsys, f"{word} timm:no_such_model --data {pictures}")
    assert "images without labels" in message


@pytest.mark.usefixtures("undrawn")
def test_adversarial_images_are_kept_exactly_and_as_rounded_png(sharp_vit, tmp_path):
    folder = tmp_path / "run"
    record = ran(folder, f"attack {sharp_vit} {ATTACK}")
    (arrays,) = record.adversarial.values()
    files = sorted((folder / "adversarial").rglob("*.png"))
    assert len(files) == arrays.fooled.sum() > 0
    exact = arrays.images[arrays.fooled]
    for path, image in zip(files, exact, strict=True):
        rounded = np.asarray(Image.open(path)).transpose(2, 0, 1) / 255
        np.testing.assert_allclose(rounded, image, atol=0.5 / 255 + 1e-6)


@pytest.mark.usefixtures("undrawn")
def test_attention_draws_every_image_and_the_layers_asked_for(pictures, tmp_path, capsys):
    record = ran(tmp_path / "run", "attention vit-digits --data digits --limit 8 --layers all")
    assert len(record.shown) == 8
    drawn = figures(record)
    assert {"layers", "development"} <= drawn
    assert not [name for name in drawn if "_more" in name]  # one sheet of all
    padded = ran(tmp_path / "padded", f"attention vit-digits --images {pictures} --layers 01")
    assert "layers" in figures(padded)
    message = refusal(capsys, f"attention vit-digits --images {pictures} --layers 0,9")
    assert "--layers" in message
