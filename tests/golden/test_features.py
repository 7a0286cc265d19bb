"""The record of `vitlens features` holds what the functions compute, with or without labels."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

import vitlens
from tests.kit.commands import figures, ran, report, said_first
from tests.kit.making import digits
from tests.kit.select import select, select_one, values_of
from vitlens import features, load, similarity
from vitlens.commands.features.record import FeaturesRecord
from vitlens.commands.features.report import REPORT

FAST = "--data digits --limit 24 --batch-size 12 --no-probe --no-tsne --bank 40 --no-cache"


def pixels() -> tuple[torch.Tensor, torch.Tensor]:
    split = digits("test").limit(24)
    return next(split.batches(24)).images, split.labels


@pytest.fixture(scope="module")
def pair(golden) -> FeaturesRecord:
    """Return one run of a ViT and a CNN with everything that needs no second run."""
    return golden("features").record


def test_two_models_are_paired_on_the_same_images_and_probes_and_queries_recorded(
    pair, tiny_vit, tiny_cnn, pictures
):
    gap = pair.metric("knn_difference/a/b/3")
    first, second = (pair.metric(f"knn_accuracy/{alias}/3").value for alias in "ab")
    assert gap.value == pytest.approx(100 * (first - second))
    assert (gap.n, gap.unit) == (24, "points")
    assert values_of(pair.pairs, "classifier") == ["knn-1", "knn-3", "probe"]
    assert values_of(pair.pairs, "difference")[1:] == [gap, pair.metric("probe_difference/a/b")]
    difference = pair.metric("head_difference/a/probe").value
    assert difference == pytest.approx(
        100 * (pair.metric("probe_accuracy/a").value - pair.metric("accuracy/a").value)
    )
    vit = features(load(str(tiny_vit)), pixels()[0], embedding=True)
    cnn = features(load(str(tiny_cnn)), pixels()[0], embedding=True)
    expected = similarity(vit, cnn)
    for row, layer in enumerate(("embedding", 0, 1)):
        for column, other in enumerate(("embedding", 0, 1, 2)):
            cka = pair.metric(f"cka/a/b/{layer}/{other}")
            assert cka.value == pytest.approx(float(expected.values[row, column]))
            assert cka.low == pytest.approx(float(expected.low[row, column]))
    last = select_one(pair.depth, model="a", classifier="probe", layer=1)
    assert pair.metric("probe_accuracy/a") == last.accuracy
    assert (last.c > 0, last.weighting) == (True, None)
    retrieved = pair.shown["a"]
    query = np.asarray(Image.open(pictures / "1.png")).transpose(2, 0, 1)
    np.testing.assert_array_equal(retrieved.queries[0], query)
    assert list(retrieved.query_names) == ["1.png"]
    row = pair.features[0]
    assert (row.among, row.searched, retrieved.near.shape[:2]) == ("training images", 40, (1, 7))
    for model in "ab":
        counts = [len(pair.shown[model].alike[at]) for at in (0, 1)]
        assert values_of(select(pair.matches, model=model), "matches") == counts


def test_pretraining_is_read_or_told(pair, tiny_vit, tiny_cnn, tmp_path):
    assert values_of(pair.features, "objective") == ["not known"] * 2
    models = [f"a={tiny_vit}", f"b={tiny_cnn}", f"c={tiny_vit}@random"]
    line = f"features {' '.join(models)} {FAST} --bank 20 --k 1 --objective b=self-supervised"
    record = ran(tmp_path / "out", line)
    assert values_of(record.features, "objective") == [
        "not known",
        "self-supervised",
        "random weights",
    ]
    assert values_of(record.features, "parameters") == [
        load(name).parameter_count() for name in models
    ]
    glance = {row[0]: row[1:4] for row in report(record).first.glance.rows}
    assert glance["pretraining"] == ("not known", "self-supervised", "random weights")
    assert tuple(record.metric(f"knn_accuracy/{alias}/1") for alias in "abc") in glance.values()


def test_maps_of_the_patches_that_enter_block_0_have_their_rows(pair):
    """A sample over all images, in their order."""
    # fewer than would be sampled
    space = pair.spaces["a"]
    count = 24 * 4 * 4
    assert tuple(space.grid) == (4, 4)
    expected = [[row, column] for _ in range(24) for row in range(4) for column in range(4)]
    np.testing.assert_array_equal(space.places, expected)
    drawn = {(row.of, row.method): row.n for row in pair.maps if row.model == "a"}
    assert drawn["embedding", "tsne"] == drawn["content", "pca"] == count
    assert not [row for row in pair.maps if row.model == "b" and row.of != "images"]  # a CNN
    images, _ = pixels()
    for index, cut in zip(space.cut[:5], space.cut_pixels[:5], strict=True):
        image, cell = divmod(int(index), 16)
        top = 8 * (cell // 4)
        left = 8 * (cell % 4)
        below = (images[image, :, top : top + 8, left : left + 8] * 255).round().byte()
        assert torch.equal(torch.from_numpy(cut)[:, ::2, ::2], below)


def test_only_the_images_asked_for_are_drawn(tiny_vit, pictures, tmp_path):
    chosen = (pictures / "2.png", pictures / "0.png")
    record = ran(
        tmp_path / "out", f"features {tiny_vit} {FAST} --k 1 --show {chosen[0]},{chosen[1]}"
    )
    images = [np.asarray(Image.open(path)).transpose(2, 0, 1) for path in chosen]
    arrays = [dict(np.load(path)) for path in (tmp_path / "out" / "arrays").glob("*.npz")]
    drawn = []
    for file in arrays:
        drawn += [array for array in file.values() if array.dtype == np.uint8]
    assert len(drawn) == 5  # the images, queries, neighbours, both sides of the matches
    pictures_drawn = set()
    for array in drawn:
        pictures_drawn |= {image.tobytes() for image in array.reshape(-1, *array.shape[-3:])}
    assert pictures_drawn == {image.tobytes() for image in images}
    np.testing.assert_array_equal(record.shown["tiny-vit"].pixels[0], images[0])
    assert record.spaces["tiny-vit"].cut_pixels is None  # patches are parts of images
    assert values_of(record.features, "among") == ["images shown"]


def test_without_labels_nothing_is_classified_and_the_rest_is_there(tiny_vit, pictures, tmp_path):
    line = f"features {tiny_vit} --images {pictures} --no-probe --no-tsne --bank 40 --no-cache"
    record = ran(tmp_path / "out", line)
    assert not record.depth
    for name in record.metrics:
        assert not name.startswith("knn")
    [row] = record.sets
    assert (row.bank, row.no_bank, row.chance) == (None, "the images have no labels", 0)
    assert {"patches", "matches", "space_patches"} <= figures(record)
    # the nearest of three images need not be near
    assert not figures(record) & {
        "depth",
        "retrieval",
    }
    retrieved = record.shown["tiny-vit"]
    assert retrieved.near.shape[:2] == (3, 2)  # of three images each has two others
    assert retrieved.same is None
    assert not report(record).claims  # of three images
    assert "no labels" in said_first(report(record))


def test_a_cache_is_used_and_a_broken_one_built_again(tiny_vit, pictures, tmp_path):
    """With five training images of ten classes, which the notes say."""
    cache = tmp_path / "kept"
    line = f"features {tiny_vit} --data digits --limit 10 --bank 5 --k 1 --no-probe --no-tsne"
    line += f" --show {pictures / '0.png'} --data-dir {cache}"  # a single image is drawn quickly
    first = ran(tmp_path / "out0", line)
    files = sorted(cache.rglob("*.npy"))
    assert len(files) == 2 * (3 + 1)  # the embedding, two layers and the logits, of test and bank
    for file in files[1:]:
        file.write_bytes(file.read_bytes()[:-8])
    second = ran(tmp_path / "out1", line)
    assert first.depth == second.depth
    before = values_of(first.notes, "note")
    after = values_of(second.notes, "note")
    assert sum("built again" in note for note in after) == 7
    assert [note.partition(": ")[2] for note in before] == [
        "5 of the 10 classes of the test images have no training image, so none of their images "
        "can be correct",
        "5 of the 10 classes of the test images have one training image",
    ]


def test_a_language_image_model_by_names_alone(tmp_path):
    pytest.importorskip("open_clip", reason="needs the extra clip: pip install open_clip_torch")
    from tests.kit.models.clip import registered

    registered()
    name = "open-clip:tiny-clip@random"
    # a set, and one
    templates = ("a photo of a {}.", "{}")
    typed = "--clip-templates photo --clip-templates {}"
    record = ran(
        tmp_path / "out", f"features clip={name} {FAST} {typed} --prompt a_five --prompt grass"
    )
    images, labels = pixels()
    both = vitlens.zero_shot(load(name), digits("test").classes, templates=templates)
    right = float((both(images).argmax(1) == labels).double().mean())
    assert record.metric("zero_shot_accuracy/clip").value == pytest.approx(right)
    # its 16 outputs are numbered like the digits, but are not digits
    assert "accuracy/clip" not in record.metrics
    ensemble, *single = record.templates
    assert values_of((ensemble, *single), "template") == ["ensemble of all", *templates]
    assert (ensemble.gain, ensemble.p) == (None, None)
    gains = [100 * (row.accuracy.value - ensemble.accuracy.value) for row in single]
    assert values_of(single, "gain.value") == pytest.approx(gains)
    assert record.shown["clip"].prompts.shape == (6, 2, 4, 4)
    assert values_of(record.prompts[:3], "image", "prompt") == [
        (0, "a_five"),
        (0, "grass"),
        (1, "a_five"),
    ]
    for row in record.prompts:
        assert abs(row.cosine) <= 1 + 1e-6
    assert {"templates", "prompts"} <= figures(record)


def test_a_model_without_an_embedding_has_its_layers(tmp_path):
    record = ran(
        tmp_path / "out",
        f"features torchvision:squeezenet1_1@random --image-size 32 {FAST} --k 1 --bank 20",
    )
    (row,) = record.features
    assert (row.embedding, row.layers > 0) == (None, True)
    assert set(values_of(record.depth, "layer")) == set(range(row.layers))
    assert set(values_of(record.patches, "layer")) == {str(row.layers - 1)}


def test_rows_are_of_the_models_and_the_layers_counted_from_0(pair, tiny_vit):
    """Votes, probes, maps of patches and their neighbours, colours and matches:
    tests/public/features.
    """
    images, labels = pixels()
    key = ("a", 1, "knn-3", "majority")
    [row] = [
        row for row in pair.depth if (row.model, row.layer, row.classifier, row.weighting) == key
    ]
    assert pair.metric("knn_majority_accuracy/a/3") == row.accuracy
    wrong = load(str(tiny_vit))(images).argmax(1) != labels
    assert pair.metric("accuracy/a").value == pytest.approx(1 - float(wrong.double().mean()))
    space = pair.spaces["a"]
    np.testing.assert_array_equal(space.wrong_images, wrong.numpy())
    assert space.points["pca_images"].shape == space.points["tsne_images"].shape == (24, 2)
    # digits have masks: background and object
    assert set(np.unique(space.labels_patches)) == {
        0,
        1,
    }
    numbered = {"block 0": 0, "block 1": 1, "stage 0": 0, "stage 1": 1, "stage 2": 2}
    assert {row.title: row.layer for row in pair.depth} == {
        "embedding": None,
        "stem": None,
        **numbered,
    }
    assert values_of(select(pair.depth, model="a", classifier="probe"), "depth") == [
        0,
        0.5,
        1,
    ]
    for majority in (True, False):  # curves are of votes weighted by similarity
        part = tuple(row for row in pair.depth if (row.weighting == "majority") == majority)
        assert ("depth" in values_of(report(replace(pair, depth=part)).figures, "name")) != majority
    assert pair.metric("patch_neighbours/a/embedding/class").n == 24 * 4 * 4
    measured = set(values_of(pair.patches, "model", "title", "share"))
    layers = [("a", "embedding"), ("a", "block 1"), ("b", "stem"), ("b", "stage 2")]
    assert measured == {
        (*layer, share) for layer in layers for share in ("position", "class", "object")
    }


def test_layers_that_do_not_vary_do_not_make_others_the_last_ones(pair):
    [section] = [part for part in REPORT.sections if "last layers" in part.about]
    last = pair.between[-1]
    [shown] = [row for row in section.rows(pair) if not row.alone]
    assert shown == last
    without = replace(pair, between=(*pair.between[:-1], replace(last, cka=None)))
    assert not [row for row in section.rows(without) if not row.alone]


def test_a_query_is_searched_for_among_a_single_image(tiny_vit, pictures, tmp_path):
    images = f"--show {pictures / '0.png'} --query {pictures / '1.png'}"
    record = ran(tmp_path / "out", f"features {tiny_vit} {FAST} {images}")
    [shown] = record.shown.values()
    assert list(shown.query_names) == ["1.png"]
    assert [list(names) for names in shown.near_names] == [["0.png"]]
