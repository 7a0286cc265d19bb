"""The record of `vitlens features` holds what the functions compute, for one model or two, with or without labels."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.kit.making import digits
from vitlens import features as read
from vitlens import load, similarity
from vitlens.analysis.evaluation.evaluate import accuracy
from vitlens.analysis.features.embedding import embed, patch_colours
from vitlens.analysis.features.features import patch_tokens
from vitlens.analysis.features.neighbours import correspond, nearest, patch_neighbours, vote
from vitlens.analysis.features.similarity import distance_correlation
from vitlens.arrays import read_arrays
from vitlens.commands.features.measure import measure
from vitlens.commands.features.options import FeaturesOptions
from vitlens.commands.features.record import FeaturesRecord
from vitlens.commands.features.report import REPORT
from vitlens.commands.run.options import RunOptions
from vitlens.commands.run.publish import read_folder
from vitlens.errors import DataError, InputError, UnsupportedError

RUN = RunOptions(device="cpu", limit=24, batch_size=12, quiet=True)
FAST = FeaturesOptions((), "digits", ks=(1, 3), probe=False, tsne=False, bank=40, cache=False, run=RUN)


def run(models: list[str], out: Path, options: FeaturesOptions = FAST) -> FeaturesRecord:
    options = replace(options, models=tuple(models), run=replace(options.run, out=out))
    assert measure(options) == out / "report.md"
    return read_folder(out)


def pixels(part: str, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    split = digits(part).limit(count)
    (batch,) = split.batches(count)
    return batch.images, split.labels, split.groups


@pytest.fixture(scope="module")
def pair(golden) -> FeaturesRecord:
    """One run of a ViT and a CNN with everything that needs no second one."""
    return golden("features").record


def test_numbers_are_those_of_the_functions(pair, tiny_vit):
    model = load(str(tiny_vit))
    (queries, labels, groups), (bank, bank_labels, _) = pixels("test", 24), pixels("train", 40)
    test, train = read(model, queries, embedding=True), read(model, bank, embedding=True)
    for layer in (None, 0, 1):
        place = "embedding" if layer is None else layer
        near = nearest(test.at(place), train.at(place), k=3)
        for weighting in ("dino", "majority"):
            for k in (1, 3):
                correct = vote(near, bank_labels, k=k, classes=10, weighting=weighting) == labels
                expected, asked = accuracy(correct, groups=groups), ("a", layer, f"knn-{k}", weighting)
                [row] = [row for row in pair.depth if (row.model, row.layer, row.classifier, row.weighting) == asked]
                assert row.accuracy == expected
                if layer == 1:
                    word = "" if weighting == "dino" else "majority_"
                    assert pair.metric(f"knn_{word}accuracy/a/{k}") == expected
    wrong = test.logits.argmax(1) != labels
    assert pair.metric("accuracy/a").value == pytest.approx(1 - float(wrong.double().mean()))
    cka, rank = similarity(test).values, distance_correlation(test).values
    layers = ["embedding", "0", "1"]
    for row in [row for row in pair.within if row.first == "a"]:
        at = layers.index(row.layer), layers.index(row.other)
        assert (row.cka.value, row.rank) == (pytest.approx(float(cka[at])), pytest.approx(float(rank[at])))
    space = pair.spaces["a"]
    np.testing.assert_array_equal(space.wrong_images, wrong.numpy())
    assert space.points["pca_images"].shape == space.points["tsne_images"].shape == (24, 2)
    assert set(np.unique(space.labels_patches)) == {0, 1}  # digits have masks: background and object
    assert len(space.pixels) == 24
    assert 0 <= pair.metric("trustworthiness/a/tsne/images").value <= 1


def test_two_models_are_paired_on_the_same_images(pair, tiny_vit, tiny_cnn):
    gap = pair.metric("knn_difference/a/b/3")
    first, second = (pair.metric(f"knn_accuracy/{alias}/3").value for alias in "ab")
    assert gap.value == pytest.approx(100 * (first - second))
    assert (gap.n, gap.unit) == (24, "points")
    assert [row.classifier for row in pair.pairs] == ["knn-1", "knn-3", "probe"]
    assert [row.difference for row in pair.pairs][1:] == [gap, pair.metric("probe_difference/a/b")]
    own = pair.metric("head_difference/a/probe").value
    assert own == pytest.approx(100 * (pair.metric("probe_accuracy/a").value - pair.metric("accuracy/a").value))
    vit, cnn = (read(load(str(model)), pixels("test", 24)[0], embedding=True) for model in (tiny_vit, tiny_cnn))
    expected, ranks = similarity(vit, cnn), distance_correlation(vit, cnn).values
    for row, layer in enumerate(("embedding", 0, 1)):
        for column, other in enumerate(("embedding", 0, 1, 2)):
            cka = pair.metric(f"cka/a/b/{layer}/{other}")
            assert cka.value == pytest.approx(float(expected.values[row, column]))
            assert cka.low == pytest.approx(float(expected.low[row, column]))
            assert pair.between[4 * row + column].rank == pytest.approx(float(ranks[row, column]))


def test_probe_and_query(pair, pictures):
    [last] = [row for row in pair.depth if (row.model, row.classifier, row.layer) == ("a", "probe", 1)]
    assert pair.metric("probe_accuracy/a") == last.accuracy
    assert (last.c > 0, last.weighting) == (True, None)
    retrieved = pair.shown["a"]
    asked = np.asarray(Image.open(pictures / "1.png")).transpose(2, 0, 1)
    np.testing.assert_array_equal(retrieved.queries[0], asked)
    assert list(retrieved.query_names) == ["1.png"]
    row = pair.features[0]
    assert (row.among, row.searched, retrieved.near.shape[:2]) == ("training images", 40, (1, 7))


def test_what_is_drawn_is_what_the_functions_give(pair, tiny_vit):
    model, shown = load(str(tiny_vit)), pair.shown["a"]
    (tokens,) = patch_tokens(model, torch.from_numpy(shown.pixels) / 255)
    np.testing.assert_allclose(shown.colours, patch_colours(tokens)[0], atol=1e-5)
    pairs = torch.from_numpy(np.stack([shown.first[0], shown.second[0]])) / 255
    matched = correspond(*patch_tokens(model, pairs)[0])
    np.testing.assert_array_equal(shown.sources[0], matched.sources)
    np.testing.assert_array_equal(shown.targets[0], matched.targets)
    assert [row.matches for row in pair.matches if row.model == "a"] == [len(shown.alike[at]) for at in (0, 1)]


def test_pretraining_is_read_or_told(pair, tiny_vit, tiny_cnn, tmp_path):
    assert [row.objective for row in pair.features] == ["supervised"] * 2
    options = replace(FAST, objective=("b=self-supervised",), bank=20, ks=(1,))
    models = [f"a={tiny_vit}", f"b={tiny_cnn}", f"c={tiny_vit}@random"]
    record = run(models, tmp_path / "out", options)
    assert [row.objective for row in record.features] == ["supervised", "self-supervised", "random weights"]
    assert [row.parameters for row in record.features] == [load(name).parameter_count() for name in models]
    glance = {line[0]: line[1:4] for line in REPORT(record).first.glance.rows}
    assert glance["pretraining"] == ("supervised", "self-supervised", "random weights")
    known = [record.metric(f"knn_accuracy/{alias}/1") for alias in "abc"]
    assert known in [list(cells) for cells in glance.values()]


def test_layers_count_from_0(pair):
    numbered = {"block 0": 0, "block 1": 1, "stage 0": 0, "stage 1": 1, "stage 2": 2}
    assert {row.title: row.layer for row in pair.depth} == {"embedding": None, "stem": None, **numbered}
    assert [row.depth for row in pair.depth if (row.model, row.classifier) == ("a", "probe")] == [0, 0.5, 1]


def test_maps_of_the_patches_that_enter_block_0_have_their_rows(pair, tiny_vit):
    """A sample over all images, in their order; the content is what is left without the mean of each place."""
    queries, _, _ = pixels("test", 24)
    (tokens,) = patch_tokens(load(str(tiny_vit)), queries, ["embedding"])
    rows, columns = tokens.shape[1:3]
    space = pair.spaces["a"]
    assert tuple(space.grid) == (rows, columns)
    count = len(queries) * rows * columns  # fewer than would be sampled
    expected = [[row, column] for _ in queries for row in range(rows) for column in range(columns)]
    np.testing.assert_array_equal(space.places, expected)
    whole = embed(tokens.flatten(0, 2), method="pca")
    np.testing.assert_allclose(space.points["pca_embedding"], whole.points, atol=1e-4)
    content = embed((tokens - tokens.double().mean(0)).flatten(0, 2).float(), method="pca")
    np.testing.assert_allclose(space.points["pca_content"], content.points, atol=1e-3)
    drawn = {(row.of, row.method): row.n for row in pair.maps if row.model == "a"}
    assert drawn["embedding", "tsne"] == drawn["content", "pca"] == count
    assert not [row for row in pair.maps if row.model == "b" and row.of != "images"]  # a CNN
    height, width = queries.shape[2] // rows, queries.shape[3] // columns
    for index, cut in zip(space.cut[:5], space.cut_pixels[:5], strict=True):
        image, cell = divmod(int(index), rows * columns)
        top, left = (cell // columns) * height, (cell % columns) * width
        below = (queries[image, :, top : top + height, left : left + width] * 255).round().byte()
        assert torch.equal(torch.from_numpy(cut)[:, :: 16 // height, :: 16 // width], below)


def test_neighbours_of_patches_are_counted_among_other_images(pair, tiny_vit):
    queries, labels, _ = pixels("test", 24)
    (tokens,) = patch_tokens(load(str(tiny_vit)), queries, ["embedding"])
    images = torch.arange(24).repeat_interleave(tokens.shape[1] * tokens.shape[2])
    near = patch_neighbours(tokens.flatten(0, 2), images)
    same = (labels[images][near.indices] == labels[images][:, None]).double().mean()
    found = pair.metric("patch_neighbours/a/embedding/class")
    assert (found.value, found.n) == (pytest.approx(float(same)), len(images))
    known = {(row.model, row.title, row.share) for row in pair.patches}
    layers = [("a", "embedding"), ("a", "block 1"), ("b", "stem"), ("b", "stage 2")]
    assert known == {(*layer, share) for layer in layers for share in ("position", "class", "object")}


def test_only_the_images_asked_for_are_drawn(tiny_vit, pictures, tmp_path):
    shown = (str(pictures / "2.png"), str(pictures / "0.png"))
    options = replace(FAST, show=shown, ks=(1,))
    record = run([str(tiny_vit)], tmp_path / "out", options)
    images = [np.asarray(Image.open(path)).transpose(2, 0, 1) for path in shown]
    arrays = [read_arrays(path) for path in (tmp_path / "out" / "arrays").glob("*.npz")]
    drawn = [array for file in arrays for array in file.values() if array.dtype == np.uint8]
    assert len(drawn) == 5  # the images, queries, neighbours, both sides of the matches
    assert {image.tobytes() for array in drawn for image in array.reshape(-1, *array.shape[-3:])} == {
        image.tobytes() for image in images
    }
    np.testing.assert_array_equal(record.shown["tiny-vit"].pixels[0], images[0])
    assert record.spaces["tiny-vit"].cut_pixels is None  # patches are parts of images
    assert [row.among for row in record.features] == ["images shown"]
    with pytest.raises(InputError, match="found both"):
        run([str(tiny_vit)], tmp_path / "no", replace(options, thumbnails=True))
    with pytest.raises(DataError, match="leave out --show"):
        run([str(tiny_vit)], tmp_path / "no", replace(FAST, show=("seven",)))


def test_without_labels_nothing_is_classified_and_the_rest_is_there(tiny_vit, pictures, tmp_path):
    record = run([str(tiny_vit)], tmp_path / "out", replace(FAST, data=None, images=(str(pictures),)))
    assert not record.depth
    assert not any(name.startswith("knn") for name in record.metrics)
    [row] = record.sets
    assert (row.bank, row.no_bank, row.chance) == (None, "the images have no labels", 0)
    names = {figure.stem for figure in (tmp_path / "out" / "figures").glob("*.png")}
    assert {"patches", "matches", "space_patches"} <= names
    assert not names & {"depth", "retrieval"}  # the nearest of three images need not be near
    retrieved = record.shown["tiny-vit"]
    assert retrieved.near.shape[:2] == (3, 2)  # of three images each has two others
    assert retrieved.same is None
    document = REPORT(record)
    assert not document.claims  # of three images
    assert "no labels" in " ".join(line.text for line in document.first.unknown)


def test_a_cache_is_used_and_a_broken_one_built_again(tiny_vit, pictures, tmp_path):
    """With five training images of ten classes, which the notes say."""
    kept = replace(RUN, data_dir=tmp_path / "kept", limit=10)
    # a single image is drawn quickly
    options = replace(FAST, cache=True, bank=5, ks=(1,), show=(str(pictures / "0.png"),), run=kept)
    first = run([str(tiny_vit)], tmp_path / "out0", options)
    files = sorted((tmp_path / "kept").rglob("*.npy"))
    assert len(files) == 2 * (3 + 1)  # the embedding, two layers and the logits, of test and bank
    for file in files[1:]:
        file.write_bytes(file.read_bytes()[:-8])
    second = run([str(tiny_vit)], tmp_path / "out1", options)
    assert first.depth == second.depth
    before, after = ([row.note for row in record.notes] for record in (first, second))
    assert sum("built again" in note for note in after) == 7
    assert [note.partition(": ")[2] for note in before] == [
        "5 of the 10 classes of the test images have no training image, so none of their images can be correct",
        "5 of the 10 classes of the test images have one training image",
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (replace(FAST, ks=(1, 41)), "expected --k of at most the 40 training images, found 41"),
        (replace(FAST, tsne=True, perplexity=30.0), "perplexity"),
        (replace(FAST, objective=("mae",)), "expected --objective ALIAS=OBJECTIVE, found 'mae'"),
        (replace(FAST, objective=("tiny-vt=supervised",)), "no model of --objective 'tiny-vt'"),
        (replace(FAST, objective=("tiny-vit=selfsupervised",)), "no objective 'selfsupervised'"),
        (replace(FAST, bank=1, ks=(1,), probe=True), "at least 2 classes"),
        (replace(FAST, prompts=("a dog",)), r"text tower, found 'tiny-vit'.*open-clip:"),
    ],
)
def test_impossible_options_are_refused_before_a_folder_is_made(tiny_vit, tmp_path, options, message):
    with pytest.raises((InputError, UnsupportedError), match=message):
        run([str(tiny_vit)], tmp_path / "out", options)
    assert not (tmp_path / "out").exists()


def test_a_cls_token_that_is_not_there_is_refused_before_a_folder_is_made(tiny_cnn, tmp_path):
    with pytest.raises(UnsupportedError, match="CLS token"):
        run([str(tiny_cnn)], tmp_path / "out", replace(FAST, pool="cls"))
    assert not (tmp_path / "out").exists()


def test_a_language_image_model_by_names_alone(tmp_path):
    pytest.importorskip("open_clip", reason="needs the extra clip: pip install open_clip_torch")
    from tests.models.tiny_clip import registered
    from vitlens import zero_shot

    registered()
    options = replace(FAST, templates=("a photo of the digit {}.", "{}"), prompts=("a five", "grass"))
    record = run(["clip=open-clip:tiny-clip@random"], tmp_path / "out", options)
    images, labels, _ = pixels("test", 24)
    both = zero_shot(load("open-clip:tiny-clip@random"), digits("test").classes, templates=options.templates)
    right = float((both(images).argmax(1) == labels).double().mean())
    assert record.metric("zero_shot_accuracy/clip").value == pytest.approx(right)
    # its 16 outputs are numbered like the digits, but are not digits
    assert "accuracy/clip" not in record.metrics
    ensemble, *single = record.templates
    assert [row.template for row in (ensemble, *single)] == ["ensemble of all", *options.templates]
    assert (ensemble.gain, ensemble.p) == (None, None)
    gains = [100 * (row.accuracy.value - ensemble.accuracy.value) for row in single]
    assert [row.gain.value for row in single] == pytest.approx(gains)
    assert record.shown["clip"].prompts.shape == (6, 2, 4, 4)
    assert [(row.image, row.prompt) for row in record.prompts[:3]] == [(0, "a five"), (0, "grass"), (1, "a five")]
    assert all(abs(row.cosine) <= 1 + 1e-6 for row in record.prompts)
    names = {figure.stem for figure in (tmp_path / "out" / "figures").glob("*.png")}
    assert {"templates", "prompts"} <= names
    with pytest.raises(InputError, match=r"expected a template with \{\}"):
        run(["open-clip:tiny-clip@random"], tmp_path / "no", replace(FAST, templates=("a photo",)))


def test_a_model_without_an_embedding_has_its_layers(tiny_cnn, tmp_path, monkeypatch):
    for module in ("vitlens.commands.features.measure", "vitlens.commands.features.drawn"):
        monkeypatch.setattr(f"{module}.embedding_stage", lambda _model: None)
    record = run([str(tiny_cnn)], tmp_path / "out", replace(FAST, ks=(1,)))
    assert {row.layer for row in record.depth} == {0, 1, 2}
    assert {row.layer for row in record.patches} == {"2"}
    assert [(row.embedding, row.layers) for row in record.features] == [(None, 3)]
