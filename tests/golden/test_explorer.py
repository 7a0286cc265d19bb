"""The explorer's data: a run stores the model's attention, and its report returns it."""

import shutil
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import vitlens
from tests.kit.commands import ran, report, said_first, small_explorer
from tests.kit.making import untrained
from tests.kit.select import select, values_of
from vitlens import load
from vitlens.commands.run.publish import read_folder

EXACT = 1.01 / 255  # of a row's largest weight: the error of a byte that holds a square root


@pytest.fixture(scope="module")
def attended(golden) -> Any:
    """Return the record of six digits, with the weights of four of them."""
    return golden("attention of digits").record


def test_the_report_of_attention_has_the_models_weights_where_the_folder_has_them(
    tiny_vit, attended, tmp_path
):
    data = report(attended).explorer
    model = load(str(tiny_vit))
    batch = (
        torch.stack(
            [torch.from_numpy(image.picture).permute(2, 0, 1) for image in data.images]
        ).float()
        / 255
    )
    assert (data.model, data.keys, data.queries, data.special) == (
        "tiny-vit",
        (4, 4),
        (4, 4),
        ("CLS",),
    )
    contents = [
        (image.weights is None, image.layer_weights is None, len(image.rollout))
        for image in data.images
    ]
    assert contents == [(False, True, 2)] * 4 + [(True, False, 2)] * 2
    assert "4 images every head" in "\n".join(data.notes)
    weights = torch.stack(vitlens.attention(model, batch), 1).numpy()
    rollouts = vitlens.rollout(model, batch).numpy()
    for image, expected, rollout in zip(data.images, weights, rollouts, strict=True):
        has_weights = image.weights is not None
        stored, exact = (
            (image.weights, expected) if has_weights else (image.layer_weights, expected.mean(1))
        )
        assert (np.abs(stored - exact) / exact.max(-1, keepdims=True)).max() <= EXACT
        np.testing.assert_allclose(image.rollout[-1, 1:].reshape(4, 4), rollout, atol=1e-3)
    out = Path(shutil.copytree(attended.folder, tmp_path / "older"))
    (out / "arrays" / "explorer-tiny-vit.npz").unlink()
    assert report(read_folder(out)).explorer is None


def test_rollout_and_explain_add_their_maps_and_predictions(
    tiny_vit, tiny_cnn, pictures, golden, tmp_path
):
    rolled = report(golden("rollout of pictures").record).explorer
    assert set(rolled.images[0].maps) == {"rollout (mean)", "relevance"}
    model = load(str(tiny_vit))
    batch = vitlens.images(pictures, model)
    np.testing.assert_allclose(
        rolled.images[1].maps["relevance"], vitlens.relevance(model, batch)[1], rtol=1e-5
    )
    assert rolled.images[0].facts[0].startswith(f"{model.classes[int(model(batch)[0].argmax())]} (")
    line = f"explain {tiny_cnn} {tiny_vit} --images {pictures} --method gradcam,relevance"
    document = report(ran(tmp_path / "two", line))
    assert document.explorer.model == "tiny-vit"
    assert set(document.explorer.images[2].maps) == {"relevance", "GradCAM"}
    assert "no attention explorer of tiny-cnn" in said_first(document)


def test_many_tokens_are_pooled_to_means_of_queries():
    shape = {"dim": 16, "depth": 1, "heads": 2, "patch_size": [8, 8]}
    model = untrained(
        "vit-mini", classes=("a", "b"), image_size=(224, 224), seed=1, overrides=shape
    ).eval()
    batch = torch.rand(1, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    data = vitlens.explorer(model, batch).explorer
    assert (data.keys, data.queries) == ((28, 28), (14, 14))
    (layer,) = vitlens.attention(model, batch)
    patches = layer[0, :, 1:].reshape(2, 14, 2, 14, 2, -1).mean((2, 4)).reshape(2, 14 * 14, -1)
    expected = torch.cat([layer[0, :, :1], patches], 1).numpy()
    pooled = data.images[0].weights[0]
    assert (np.abs(pooled - expected) / expected.max(-1, keepdims=True)).max() <= EXACT
    assert "pooled to 14x14" in "\n".join(data.notes)


@pytest.mark.parametrize(("means", "with_weights"), [(4, 2), (1, 1)])
def test_a_folder_keeps_as_many_images_as_stay_small(means, with_weights, tiny_vit, tmp_path):
    """Room for so many means over heads, and as many bytes for every head; one image at least."""
    with small_explorer(means * 2 * 17 * 17):
        line = f"rollout {tiny_vit} --data digits --limit 6 --fusion mean --method rollout"
        data = report(ran(tmp_path / "out", line)).explorer
    assert [image.weights is None for image in data.images] == [False] * with_weights + [
        True
    ] * means
    assert (f"first {with_weights + means} of 6 images" in "\n".join(data.notes)) == (
        with_weights + means < 6
    )


def test_the_public_explorer_is_the_same(tiny_vit, pictures, tmp_path):
    model = load(str(tiny_vit))
    batch = vitlens.images(pictures, model)
    relevance = vitlens.relevance(model, batch)
    table = vitlens.statistics(model, batch)
    effect = vitlens.ablate(model, batch, "predicted")
    view = vitlens.explorer(
        model, batch, maps=relevance, statistics=table, ablation=effect, whole=1
    )
    data = view.explorer
    assert [image.weights is None for image in data.images] == [False, True, True]
    names = vitlens.name_heads(model, batch)
    with_names = vitlens.explorer(model, batch, names=names)
    words = list(chain.from_iterable(with_names.explorer.words))
    assert words == values_of(names.heads, "words")
    assert names.heads[0].words in with_names.save(tmp_path / "named.html").read_text()
    with pytest.raises(
        vitlens.errors.InputError, match="names of 2 layers and 2 heads, found 1 and 2"
    ):
        vitlens.explorer(model, batch, names=replace(names, heads=names.heads[:2]))
    np.testing.assert_allclose(data.importance, effect.delta_loss)
    assert (len(data.labels), len(data.labels[0])) == (2, 2)
    np.testing.assert_allclose(data.images[0].maps["map"], relevance[0])
    frame = view._repr_html_()
    assert frame.startswith("<iframe")
    assert frame.count("<") == 2  # the page inside is escaped
    assert "Content-Security-Policy" in view.save(tmp_path / "page.html").read_text()
    assert "tiny-vit" in repr(view)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "maps of other images": (
        {"maps": torch.zeros(2, 4, 4)},
        "expected maps \\(3, rows, columns\\)",
    ),
    "no maps": ({"maps": {"a": 3}}, "found a of int"),
    "no image whole": ({"whole": 0}, "whole of at least 1"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_does_not_fit_is_told(tiny_vit, pictures, what):
    options, message = WRONG[what]
    with pytest.raises(vitlens.errors.InputError, match=message):
        vitlens.explorer(load(str(tiny_vit)), pictures, **options)


# --- attention sinks: patches that much attention of the last layers lies on


@pytest.mark.parametrize("name", ["attention", "rollout of pictures", "look"])
def test_a_report_of_photographs_says_where_much_attention_lies_on_few_patches(name, golden):
    record = golden(name).record
    (row,), (arrays,) = record.explorer, record.explorer_arrays.values()

    def said(weights: np.ndarray) -> list[str]:
        most = np.full_like(arrays.heads_most, 0.5)
        planted = {row.model: replace(arrays, heads=weights.astype(np.uint8), heads_most=most)}
        claims = report(replace(record, explorer_arrays=planted)).claims
        return values_of(select(claims, question="attention sinks"), "says")

    even = np.full(arrays.heads.shape, 40)
    last = even.copy()
    first = even.copy()
    region = even.copy()
    last[:, -1, :, :, 1 + 9] = first[:, 0, :, :, 1 + 9] = 255
    assert said(even) == said(first) == []  # only of the last quarter of the layers
    region[:, -1, :, :, 5:11] = 255 - 8 * np.arange(6)
    # at most a tenth of the patches are sinks
    assert not any("1 of 16" not in text for text in said(region))
    (text,) = said(last)
    for words in ("layer 1", "1 of 16", " 50 %"):
        assert words in text
