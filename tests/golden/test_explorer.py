"""The attention explorer's data: what a run keeps is the model's attention, and its report gives it back."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import vitlens
from tests.kit.making import untrained
from vitlens import load
from vitlens.cli.main import run
from vitlens.commands.registry import COMMANDS
from vitlens.commands.run.publish import read_folder
from vitlens.commands.shared.explorer import LEVELS, Shown, explorer
from vitlens.commands.shared.explorer_measure import measured
from vitlens.report.document import Document
from vitlens.report.explorer import POOLED, Explorer, pooled, rollout_of
from vitlens.report.html.packing import quantised

EXACT = 1.01 / LEVELS  # of a row's largest weight: the error of a byte that holds a square root


def document_of(out: Path, *line: str) -> Document:
    assert run([*line, "--device", "cpu", "--quiet", "--out", str(out)]) == 0
    record = read_folder(out)
    return COMMANDS[record.command].report(record)


@pytest.fixture(scope="module")
def attended(golden) -> Path:
    return golden("attention of digits").folder


def shown_in(folder: Path) -> Explorer:
    record = read_folder(folder)
    found = COMMANDS[record.command].report(record).explorer
    assert found is not None
    return found


def test_the_report_of_attention_has_the_models_weights(tiny_vit, attended):
    shown, model = shown_in(attended), load(str(tiny_vit))
    batch = torch.stack([torch.from_numpy(image.picture).permute(2, 0, 1) for image in shown.images]).float() / 255
    assert (shown.model, shown.keys, shown.queries, shown.special) == ("tiny-vit", (4, 4), (4, 4), ("CLS",))
    weights = torch.stack(vitlens.attention(model, batch), 1).numpy()
    rollouts = vitlens.rollout(model, batch).numpy()
    for image, expected, rollout in zip(shown.images, weights, rollouts, strict=True):
        found, wanted = (
            (image.weights, expected) if image.weights is not None else (image.layer_weights, expected.mean(1))
        )
        assert (np.abs(found - wanted) / wanted.max(-1, keepdims=True)).max() <= EXACT
        np.testing.assert_allclose(image.rollout[-1, 1:].reshape(4, 4), rollout, atol=1e-3)


def test_further_images_have_the_means_over_heads_alone(attended):
    shown = shown_in(attended)
    assert [image.weights is None for image in shown.images] == [False] * 4 + [True] * 2
    assert [image.layer_weights is None for image in shown.images] == [True] * 4 + [False] * 2
    assert any("4 images every head" in note for note in shown.notes)
    for image in shown.images:  # the rollout belongs to the same weights
        means = image.layer_weights if image.weights is None else image.weights.mean(1)
        np.testing.assert_allclose(rollout_of(means, 1), image.rollout, atol=5e-3)


def test_weights_that_are_read_back_pack_to_the_same_bytes(attended):
    arrays = read_folder(attended).explorer_arrays["tiny-vit"]
    for kept, image in zip(arrays.heads, shown_in(attended).images[:4], strict=True):
        assert np.array_equal(quantised(image.weights, 1, LEVELS)[0], kept)


def test_a_folder_without_the_arrays_has_a_report_without_explorer(attended, tmp_path):
    out = Path(shutil.copytree(attended, tmp_path / "older"))
    (out / "arrays" / "explorer-tiny-vit.npz").unlink()
    record = read_folder(out)
    assert COMMANDS["attention"].report(record).explorer is None


def test_rollout_and_explain_add_their_maps_and_predictions(tiny_vit, tiny_cnn, pictures, tmp_path):
    rolled = document_of(
        tmp_path / "one", "rollout", str(tiny_vit), "--images", str(pictures), "--fusion", "mean"
    ).explorer
    assert set(rolled.images[0].maps) == {"rollout (mean)", "relevance"}
    model = load(str(tiny_vit))
    batch = vitlens.images(pictures, model)
    np.testing.assert_allclose(rolled.images[1].maps["relevance"], vitlens.relevance(model, batch)[1], rtol=1e-5)
    assert rolled.images[0].facts[0].startswith(f"{model.classes[int(model(batch)[0].argmax())]} (")
    both = ("explain", str(tiny_cnn), str(tiny_vit), "--images", str(pictures), "--method", "gradcam,relevance")
    document = document_of(tmp_path / "two", *both)
    assert document.explorer.model == "tiny-vit"
    assert set(document.explorer.images[2].maps) == {"relevance", "GradCAM"}
    reasons = [each.text for each in document.first.unknown if "no attention explorer of tiny-cnn" in each.text]
    assert len(reasons) == 1


def test_many_tokens_are_pooled_as_the_page_does():
    shape = {"dim": 16, "depth": 1, "heads": 2, "patch_size": [8, 8]}
    model = untrained("vit-mini", classes=("a", "b"), image_size=(168, 176), seed=1, overrides=shape).eval()
    batch = torch.rand(1, 3, 168, 176, generator=torch.Generator().manual_seed(0))
    row, arrays = measured(model, batch)
    assert row.keys == (21, 22)
    assert row.queries == (POOLED, POOLED)
    (layer,) = vitlens.attention(model, batch)
    expected, _ = pooled(layer[0].numpy(), 1, (21, 22))
    pixels = (batch * 255).byte().numpy()
    shown = explorer(row, arrays, Shown(pixels, ["a"]))
    error = np.abs(shown.images[0].weights[0] - expected) / expected.max(-1, keepdims=True)
    assert error.max() <= EXACT
    assert any("pooled to 14x14" in note for note in shown.notes)


def test_a_folder_keeps_as_many_images_as_stay_small(attended, tiny_vit, tmp_path, monkeypatch):
    mean = 2 * 17 * 17  # bytes of the layers' means of one image
    monkeypatch.setattr("vitlens.commands.shared.explorer_measure._BYTES", 4 * mean)
    shown = document_of(tmp_path / "out", "rollout", str(tiny_vit), "--data", "digits", "--limit", "6").explorer
    assert [image.weights is None for image in shown.images] == [False] * 2 + [True] * 4
    monkeypatch.setattr("vitlens.commands.shared.explorer_measure._BYTES", mean)
    shown = document_of(tmp_path / "less", "rollout", str(tiny_vit), "--data", "digits", "--limit", "6").explorer
    assert [image.weights is None for image in shown.images] == [False, True]  # one image at least
    assert any("first 2 of 6 images" in note for note in shown.notes)


@pytest.mark.parametrize("whole", [1, 2])
def test_the_public_explorer_is_the_same(tiny_vit, pictures, tmp_path, whole):
    model = load(str(tiny_vit))
    batch = vitlens.images(pictures, model)
    relevance = vitlens.relevance(model, batch)
    found, effect = vitlens.statistics(model, batch), vitlens.ablate(model, batch, "predicted")
    view = vitlens.explorer(model, batch, maps=relevance, statistics=found, ablation=effect, whole=whole)
    shown = view.explorer
    assert [image.weights is None for image in shown.images] == [index >= whole for index in range(3)]
    np.testing.assert_allclose(shown.importance, effect.delta_loss)
    assert (len(shown.labels), len(shown.labels[0])) == (2, 2)
    np.testing.assert_allclose(shown.images[0].maps["map"], relevance[0])
    frame = view._repr_html_()
    assert frame.startswith("<iframe")
    assert frame.count("<") == 2  # the page inside is escaped
    written = view.save(tmp_path / "page.html").read_text()
    assert "Content-Security-Policy" in written
    assert "tiny-vit" in repr(view)


WRONG = {
    "maps of other images": ({"maps": torch.zeros(2, 4, 4)}, "expected maps \\(3, rows, columns\\)"),
    "no maps": ({"maps": {"a": 3}}, "found a of int"),
    "no image whole": ({"whole": 0}, "whole of at least 1"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_does_not_fit_is_told(tiny_vit, pictures, what):
    options, message = WRONG[what]
    with pytest.raises(vitlens.errors.InputError, match=message):
        vitlens.explorer(load(str(tiny_vit)), pictures, **options)
