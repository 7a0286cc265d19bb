"""Refusals before a model is loaded, and what attack and attention store and draw on request."""

import numpy as np
import pytest
from PIL import Image

from tests.kit.commands import figures, ran, refusal
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
    message = refusal(capsys, f"attention vit-digits --images {pictures} --layers 0,9")
    assert "--layers" in message
