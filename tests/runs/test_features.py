"""The report of features says what the functions compute, of one model or two, with labels or without."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from vitlens.analysis.attention.weights import attention_maps
from vitlens.analysis.features.features import features as read
from vitlens.analysis.features.knn import knn
from vitlens.analysis.features.similarity import similarity
from vitlens.commands.scaffold.options import ModelOptions, RunOptions
from vitlens.data.digits import digits
from vitlens.errors import DataError, InputError, UnsupportedError
from vitlens.models.loading import load
from vitlens.runs.features import features
from vitlens.runs.features_choices import FeatureChoices
from vitlens.runs.features_keep_look import _last_heads

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


@pytest.fixture(scope="module")
def pair(tiny_vit, tiny_cnn, pictures, tmp_path_factory) -> tuple[dict, Path]:
    """One run of a ViT and a CNN with everything that needs no second one."""
    out = tmp_path_factory.mktemp("features") / "out"
    choices = replace(FAST, probe=True, tsne=True, perplexity=4.0, thumbnails=True, query=(str(pictures / "1.png"),))
    return run([f"a={tiny_vit}", f"b={tiny_cnn}"], out, choices=choices), out


def test_numbers_are_those_of_the_functions(pair, tiny_vit):
    results, out = pair
    model = load(str(tiny_vit))
    (queries, labels, groups), (bank, bank_labels, _) = pixels("test", 24), pixels("train", 40)
    test, train = read(model, queries), read(model, bank)
    rows = [row for row in results["tables"]["depth"] if row["model"] == "a"]
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
                asked = (layer, f"knn-{votes.k}", weighting)
                [row] = [row for row in rows if (row["layer"], row["classifier"], row.get("weighting")) == asked]
                assert row["accuracy"] == pytest.approx(votes.accuracy.value)
                assert (row["low"], row["n"]) == (pytest.approx(votes.accuracy.low), 24)
                if layer == 1:
                    word = "knn_accuracy" if weighting == "dino" else "knn_majority_accuracy"
                    assert results["metrics"][f"{word}/a/{votes.k}"]["value"] == pytest.approx(votes.accuracy.value)
    own = float((test.logits.argmax(1) == labels).double().mean())
    assert results["metrics"]["accuracy/a"]["value"] == pytest.approx(own)
    found = np.load(out / "arrays" / "similarity.npz")
    np.testing.assert_allclose(found["cka_0_0"], similarity(test).values.numpy(), atol=1e-9)
    space = np.load(out / "arrays" / "space-a.npz")
    np.testing.assert_array_equal(space["wrong_images"], (test.logits.argmax(1) != labels).numpy())
    assert space["pca_images"].shape == (24, 2)
    assert set(np.unique(space["labels_patches"])) == {0, 1}  # digits have masks: background and object


def test_two_models_are_paired_on_the_same_images(pair):
    results, out = pair
    metrics = results["metrics"]
    gap = metrics["knn_difference/a/b/3"]
    assert gap["value"] == pytest.approx(
        100 * (metrics["knn_accuracy/a/3"]["value"] - metrics["knn_accuracy/b/3"]["value"])
    )
    assert (gap["n"], gap["unit"]) == (24, "points")
    assert [row["classifier"] for row in results["tables"]["pairs"]] == ["knn-1", "knn-3", "probe"]
    layers = len({row["layer"] for row in results["tables"]["depth"] if row["model"] == "b"})
    assert f"cka/a/b/1/{layers - 1}" in metrics
    [row] = [row for row in results["tables"]["similarity"] if row["first"] != row["second"]]
    assert row["last_last_low"] <= row["last_last"] <= row["last_last_high"]
    text = (out / "report.md").read_text()
    assert "`a` minus `b`" in text
    assert "Between `a` and `b` the last layers have a CKA of" in text
    assert "corrected for 3 tests" in text


def test_a_probe_t_sne_thumbnails_and_a_query(pair, pictures):
    results, out = pair
    [last] = [
        row
        for row in results["tables"]["depth"]
        if (row["model"], row["classifier"], row["layer"]) == ("a", "probe", 1)
    ]
    assert results["metrics"]["probe_accuracy/a"]["value"] == last["accuracy"]
    assert last["c"] > 0
    assert 0 <= results["metrics"]["trustworthiness/a/tsne/images"]["value"] <= 1
    space = np.load(out / "arrays" / "space-a.npz")
    assert space["tsne_images"].shape == (24, 2)
    assert len(space["pixels"]) == 24
    found = np.load(out / "arrays" / "retrieval-a.npz")
    asked = np.asarray(Image.open(pictures / "1.png")).transpose(2, 0, 1)
    np.testing.assert_array_equal(found["queries"][0], asked)
    assert str(found["query_names"][0]) == "1.png"


def test_the_report_has_a_line_for_every_layer_and_no_number_without_its_interval(pair):
    _, out = pair
    text = (out / "report.md").read_text()
    sections = [line.removeprefix("## ") for line in text.splitlines() if line.startswith("## ")]
    assert "Figures" not in sections  # each figure stands where it is spoken of
    lines = [line for line in text.splitlines() if line.startswith(("| a | block", "| b | stage"))]
    assert len(lines) == 2 * (2 + 3)  # weighted votes and the probe, and a vote each
    for line in lines:
        assert all(" to " in cell for cell in line.split("|")[4:-1])


def test_only_the_images_asked_for_are_drawn(tiny_vit, pictures, tmp_path):
    shown = (str(pictures / "2.png"), str(pictures / "0.png"))
    choices = replace(FAST, show=shown, ks=(1,))
    run([str(tiny_vit)], tmp_path / "out", choices=choices)
    asked = {np.asarray(Image.open(path)).transpose(2, 0, 1).tobytes() for path in shown}
    arrays = {path.stem: np.load(path) for path in (tmp_path / "out" / "arrays").glob("*.npz")}
    drawn = [array for found in arrays.values() for array in found.values() if array.dtype == np.uint8]
    assert len(drawn) >= 5  # colours, queries, neighbours, both sides of the matches, heads
    assert {one.tobytes() for array in drawn for one in array.reshape(-1, *array.shape[-3:])} == asked
    np.testing.assert_array_equal(arrays["patches"]["pixels"][0], np.asarray(Image.open(shown[0])).transpose(2, 0, 1))
    assert "named with `--show`" in (tmp_path / "out" / "report.md").read_text()
    with pytest.raises(InputError, match="found both"):
        run([str(tiny_vit)], tmp_path / "no", choices=replace(choices, thumbnails=True))
    with pytest.raises(DataError, match="leave out --show"):
        run([str(tiny_vit)], tmp_path / "no", choices=replace(FAST, show=("seven",)))


def test_heads_are_those_of_the_cls_token_even_where_the_classifier_reads_the_mean(tiny_vit):
    model, (images, _, _) = load(str(tiny_vit)), pixels("test", 2)
    expected = attention_maps(model, images)[-1]
    assert expected.reading == "the CLS token"
    model.anatomy = replace(model.anatomy, readout="mean")
    maps, reading, layer = _last_heads(model, images)
    assert (reading, layer) == ("the CLS token", 1)
    torch.testing.assert_close(maps, expected.maps)


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


def test_a_cache_is_used_and_a_broken_one_built_again(tiny_vit, pictures, tmp_path):
    """Of five training images of ten classes, which are said, too."""
    options = replace(OPTIONS, data_dir=tmp_path / "kept", limit=10)
    choices = replace(FAST, cache=True, bank=5, ks=(1,), show=(str(pictures / "0.png"),))  # one picture is soon drawn
    for number in range(2):
        if number:
            files = sorted((tmp_path / "kept").rglob("*.safetensors"))
            assert len(files) == 2 * (2 + 1)  # two layers and the logits, of test and bank
            for file in files[1:]:
                file.write_bytes(file.read_bytes()[:-8])
        out = tmp_path / f"out{number}"
        features(
            [str(tiny_vit)],
            data="digits",
            choices=choices,
            model_options=ModelOptions(),
            options=replace(options, out=out),
        )
    tables = [json.loads((tmp_path / f"out{number}" / "results.json").read_text())["tables"] for number in range(2)]
    assert tables[0]["depth"] == tables[1]["depth"]
    first, second = (" ".join(row["note"] for row in table["notes"]) for table in tables)
    assert "built again" not in first
    assert second.count("built again") == 5
    assert "built again" in (tmp_path / "out1" / "report.md").read_text()
    assert "5 of the 10 classes that are asked about have no training image" in first
    assert "5 of the 10 classes that are asked about have one training image" in first


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


def test_a_cls_token_that_is_not_there_is_refused_before_a_folder_is_made(tiny_cnn, tmp_path):
    with pytest.raises(UnsupportedError, match="CLS token"):
        run([str(tiny_cnn)], tmp_path / "out", choices=replace(FAST, pool="cls"))
    assert not (tmp_path / "out").exists()


def test_prompts_need_a_text_tower(tiny_vit, tmp_path):
    with pytest.raises(UnsupportedError, match=r"text tower, found 'tiny-vit'.*open-clip:"):
        run([str(tiny_vit)], tmp_path / "out", choices=replace(FAST, prompts=("a dog",)))
    assert not (tmp_path / "out").exists()


def test_a_language_image_model_by_names_alone(tmp_path):
    pytest.importorskip("open_clip", reason="needs the extra clip: pip install open_clip_torch")
    from tests.models.tiny_clip import registered
    from vitlens.analysis.features.zero_shot import zero_shot

    registered()
    choices = replace(FAST, templates=("a photo of the digit {}.", "{}"), prompts=("a five", "grass"))
    results = run(["clip=open-clip:tiny-clip@random"], tmp_path / "out", choices=choices)
    images, labels, _ = pixels("test", 24)
    both = zero_shot(load("open-clip:tiny-clip@random"), digits("test").classes, templates=choices.templates)
    right = float((both(images).argmax(1) == labels).double().mean())
    assert results["metrics"]["zero_shot_accuracy"]["value"] == pytest.approx(right)
    assert "accuracy" not in results["metrics"]  # its 16 outputs are numbered as the digits are, and are none
    assert [row["template"] for row in results["tables"]["templates"]] == ["ensemble of all", *choices.templates]
    found = np.load(tmp_path / "out" / "arrays" / "prompts-clip.npz")
    assert found["maps"].shape == (6, 2, 4, 4)
    assert np.abs(found["cosine"]).max() <= 1 + 1e-6
    names = {figure.stem for figure in (tmp_path / "out" / "figures").glob("*.png")}
    assert {"templates_clip", "prompts_clip"} <= names
    with pytest.raises(InputError, match=r"expected a template with \{\}"):
        run(["open-clip:tiny-clip@random"], tmp_path / "no", choices=replace(FAST, templates=("a photo",)))
