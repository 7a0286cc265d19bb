"""The report of features says what the functions compute, of one model or two, with labels or without."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from vitlens.analysis.features import features as read
from vitlens.analysis.similarity import similarity
from vitlens.analysis.votes import knn
from vitlens.data.digits import digits
from vitlens.errors import InputError, UnsupportedError
from vitlens.models.zoo import load
from vitlens.runs.features import features
from vitlens.runs.features_choices import FeatureChoices
from vitlens.runs.options import ModelOptions, RunOptions

OPTIONS = RunOptions(device="cpu", limit=24, batch_size=12, quiet=True)
FAST = FeatureChoices(ks=(1, 3), probe=False, tsne=False, bank=40, cache=False)


def run(models: list[str], out: Path, *, choices: FeatureChoices = FAST, **changes: object) -> dict:
    options = replace(OPTIONS, out=out)
    asked = {"data": "digits", **changes}
    written = features(models, choices=choices, model_options=ModelOptions(), options=options, **asked)
    assert written == out / "report.md"
    return json.loads((out / "results.json").read_text())


def pixels(part: str, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    split = digits(part).limit(count)
    (batch,) = split.batches(count)
    return batch.images, split.labels, split.groups


def test_numbers_are_those_of_the_functions(tiny_vit, tmp_path):
    results = run([str(tiny_vit)], tmp_path / "out")
    specimen = load(str(tiny_vit))
    (queries, labels, groups), (bank, bank_labels, _) = pixels("test", 24), pixels("train", 40)
    test, train = read(specimen, queries), read(specimen, bank)
    for layer in (0, 1):
        for weighting in ("dino", "majority"):
            expected = knn(
                train.at(layer),
                bank_labels,
                test.at(layer),
                labels,
                classes=10,
                ks=(1, 3),
                weighting=weighting,
                groups=groups,
            )
            for votes in expected:
                [row] = [
                    row
                    for row in results["tables"]["depth"]
                    if (row["layer"], row["classifier"], row.get("weighting")) == (layer, f"knn-{votes.k}", weighting)
                ]
                assert row["accuracy"] == pytest.approx(votes.accuracy.value)
                assert (row["low"], row["n"]) == (pytest.approx(votes.accuracy.low), 24)
                if layer == 1:
                    word = "knn_accuracy" if weighting == "dino" else "knn_majority_accuracy"
                    assert results["metrics"][f"{word}/{votes.k}"]["value"] == pytest.approx(votes.accuracy.value)
    own = float((test.logits.argmax(1) == labels).double().mean())
    assert results["metrics"]["accuracy"]["value"] == pytest.approx(own)
    found = np.load(tmp_path / "out" / "arrays" / "similarity.npz")
    np.testing.assert_allclose(found["cka_0_0"], similarity(test).values.numpy(), atol=1e-9)
    space = np.load(tmp_path / "out" / "arrays" / "space-tiny-vit.npz")
    np.testing.assert_array_equal(space["wrong_images"], (test.logits.argmax(1) != labels).numpy())
    assert space["pca_images"].shape == (24, 2)
    assert set(np.unique(space["labels_patches"])) == {0, 1}  # digits have masks: background and object


def test_two_models_are_paired_on_the_same_images(tiny_vit, tiny_cnn, tmp_path):
    results = run([f"a={tiny_vit}", f"b={tiny_cnn}"], tmp_path / "out")
    metrics = results["metrics"]
    gap = metrics["knn_difference/a/b/3"]
    assert gap["value"] == pytest.approx(
        100 * (metrics["knn_accuracy/a/3"]["value"] - metrics["knn_accuracy/b/3"]["value"])
    )
    assert (gap["n"], gap["unit"]) == (24, "points")
    assert {row["classifier"] for row in results["tables"]["pairs"]} == {"knn-1", "knn-3"}
    layers = len({row["layer"] for row in results["tables"]["depth"] if row["model"] == "b"})
    assert f"cka/a/b/1/{layers - 1}" in metrics
    text = (tmp_path / "out" / "report.md").read_text()
    assert "`a` minus `b`" in text
    assert "Between `a` and `b` the mean CKA" in text


def test_without_labels_nothing_is_classified_and_the_rest_is_there(tiny_vit, pictures, tmp_path):
    results = run([str(tiny_vit)], tmp_path / "out", data=None, images=[str(pictures)])
    assert "depth" not in results["tables"]
    assert not any(name.startswith("knn") for name in results["metrics"])
    text = (tmp_path / "out" / "report.md").read_text()
    assert "There are no k-NN and no probe: the images have no labels." in text
    names = {figure.stem for figure in (tmp_path / "out" / "figures").glob("*.png")}
    assert {"patches", "retrieval_tiny-vit", "matches_tiny-vit", "heads_tiny-vit", "space_patches_tiny-vit"} <= names
    assert "depth" not in names
    found = np.load(tmp_path / "out" / "arrays" / "retrieval-tiny-vit.npz")
    assert found["neighbours"].shape[:2] == (3, 2)  # of three images each has two others
    assert "same" not in found


def test_a_probe_t_sne_thumbnails_and_a_query(tiny_vit, pictures, tmp_path):
    choices = FeatureChoices(
        ks=(1,), bank=40, tsne=True, perplexity=4.0, thumbnails=True, query=(str(pictures / "1.png"),), cache=False
    )
    results = run([str(tiny_vit)], tmp_path / "out", choices=choices)
    [last] = [row for row in results["tables"]["depth"] if (row["classifier"], row["layer"]) == ("probe", 1)]
    assert results["metrics"]["probe_accuracy"]["value"] == last["accuracy"]
    assert last["c"] > 0
    assert 0 <= results["metrics"]["trustworthiness/tsne/images"]["value"] <= 1
    space = np.load(tmp_path / "out" / "arrays" / "space-tiny-vit.npz")
    assert space["tsne_images"].shape == (24, 2)
    assert len(space["pixels"]) == 24
    found = np.load(tmp_path / "out" / "arrays" / "retrieval-tiny-vit.npz")
    asked = np.asarray(Image.open(pictures / "1.png")).transpose(2, 0, 1)
    np.testing.assert_array_equal(found["queries"][0], asked)
    assert str(found["query_names"][0]) == "1.png"


def test_a_cache_is_used_and_a_broken_one_built_again(tiny_vit, tmp_path):
    options = replace(OPTIONS, data_dir=tmp_path / "kept")
    choices = replace(FAST, cache=True)
    for number in range(3):
        if number == 2:
            files = sorted((tmp_path / "kept").rglob("*.safetensors"))
            assert files
            for file in files:
                file.write_bytes(file.read_bytes()[:-8])
        out = tmp_path / f"out{number}"
        features(
            [str(tiny_vit)],
            data="digits",
            choices=choices,
            model_options=ModelOptions(),
            options=replace(options, out=out),
        )
    tables = [json.loads((tmp_path / f"out{number}" / "results.json").read_text())["tables"] for number in range(3)]
    assert tables[0]["depth"] == tables[1]["depth"] == tables[2]["depth"]
    assert tables[0]["notes"] == tables[1]["notes"] == []
    assert any("built again" in note["note"] for note in tables[2]["notes"])
    assert "built again" in (tmp_path / "out2" / "report.md").read_text()


@pytest.mark.parametrize(
    ("choices", "says"),
    [
        (replace(FAST, ks=(1, 41)), "expected --k of at most the 40 training images, found 41"),
        (replace(FAST, tsne=True, perplexity=30.0), "perplexity"),
        (replace(FAST, bank=1, ks=(1,), probe=True), "at least 2 classes"),
    ],
)
def test_what_cannot_be_is_refused_before_a_folder_is_made(tiny_vit, tmp_path, choices, says):
    with pytest.raises(InputError, match=says):
        run([str(tiny_vit)], tmp_path / "out", choices=choices)
    assert not (tmp_path / "out").exists()


def test_prompts_need_a_text_tower(tiny_vit, tmp_path):
    with pytest.raises(UnsupportedError, match=r"text tower, found 'tiny-vit'.*open-clip:"):
        run([str(tiny_vit)], tmp_path / "out", choices=replace(FAST, prompts=("a dog",)))
    assert not (tmp_path / "out").exists()


def test_classes_with_one_image_or_none_are_said(tiny_vit, tmp_path):
    results = run([str(tiny_vit)], tmp_path / "out", choices=replace(FAST, bank=5, ks=(1,)))
    notes = " ".join(row["note"] for row in results["tables"]["notes"])
    assert "5 of the 10 classes that are asked about have no training image" in notes
    assert "5 of the 10 classes that are asked about have one training image" in notes


def test_a_language_image_model_by_names_alone(tmp_path):
    pytest.importorskip("open_clip", reason="needs the extra clip: pip install open_clip_torch")
    from tests.models.tiny_clip import registered
    from vitlens.analysis.zero_shot import zero_shot

    registered()
    choices = replace(FAST, templates=("a photo of the digit {}.", "{}"), prompts=("a five", "grass"))
    results = run(["clip=open-clip:tiny-clip@random"], tmp_path / "out", choices=choices)
    images, labels, _ = pixels("test", 24)
    both = zero_shot(load("open-clip:tiny-clip@random"), digits("test").classes, templates=choices.templates)
    right = float((both(images).argmax(1) == labels).double().mean())
    assert results["metrics"]["zero_shot_accuracy"]["value"] == pytest.approx(right)
    assert [row["template"] for row in results["tables"]["templates"]] == ["ensemble of all", *choices.templates]
    found = np.load(tmp_path / "out" / "arrays" / "prompts-clip.npz")
    assert found["maps"].shape == (6, 2, 4, 4)
    assert np.abs(found["cosine"]).max() <= 1 + 1e-6
    names = {figure.stem for figure in (tmp_path / "out" / "figures").glob("*.png")}
    assert {"templates_clip", "prompts_clip"} <= names
    with pytest.raises(InputError, match=r"expected a template with \{\}"):
        run(["open-clip:tiny-clip@random"], tmp_path / "no", choices=replace(FAST, templates=("a photo",)))
