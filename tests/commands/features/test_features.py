"""The record of `vitlens features` holds what the functions compute, for one model or two, with or without labels."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from vitlens.analysis.attention.weights import attention_maps
from vitlens.analysis.features.embedding import embed
from vitlens.analysis.features.features import features as read
from vitlens.analysis.features.features import patch_tokens
from vitlens.analysis.features.knn import knn
from vitlens.analysis.features.patch_neighbours import patch_neighbours
from vitlens.analysis.features.similarity import similarity
from vitlens.commands.features.arrays import (
    LAYER_SIMILARITY,
    MATCH_ARRAYS,
    PROMPT_ARRAYS,
    RETRIEVAL_ARRAYS,
    SHOWN_ARRAYS,
    SPACE_ARRAYS,
)
from vitlens.commands.features.measure import measure
from vitlens.commands.features.measure.shown import last_heads
from vitlens.commands.features.options import FeaturesOptions
from vitlens.commands.features.record import (
    ACCURACY,
    CKA,
    DATA,
    DEPTH,
    FEATURES,
    HEADS,
    KNN,
    KNN_DIFFERENCE,
    KNN_MAJORITY,
    MATCHES,
    NOTES,
    PAIRS,
    PATCH_NEIGHBOURS,
    PRETRAINING,
    PROBE_ACCURACY,
    PROMPTS,
    RETRIEVAL,
    SHARED,
    SIMILARITY,
    SPACE,
    TEMPLATES,
    TRUSTWORTHINESS,
    ZERO_SHOT,
)
from vitlens.commands.features.report import embedding, report
from vitlens.commands.run.options import RunOptions
from vitlens.commands.run.publish import read as typed
from vitlens.data.digits import digits
from vitlens.errors import DataError, InputError, UnsupportedError
from vitlens.files import read_arrays, read_run
from vitlens.models.loading import load
from vitlens.records import Record

RUN = RunOptions(device="cpu", limit=24, batch_size=12, quiet=True)
FAST = FeaturesOptions((), "digits", ks=(1, 3), probe=False, tsne=False, bank=40, cache=False, run=RUN)


def run(models: list[str], out: Path, options: FeaturesOptions = FAST) -> Record:
    options = replace(options, models=tuple(models), run=replace(options.run, out=out))
    assert measure(options) == out / "report.md"
    return typed(read_run(out))


def pixels(part: str, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    split = digits(part).limit(count)
    (batch,) = split.batches(count)
    return batch.images, split.labels, split.groups


@pytest.fixture(scope="module")
def pair(tiny_vit, tiny_cnn, pictures, tmp_path_factory) -> Record:
    """One run of a ViT and a CNN with everything that needs no second one."""
    out = tmp_path_factory.mktemp("features") / "out"
    options = replace(FAST, probe=True, tsne=True, perplexity=4.0, thumbnails=True, query=(str(pictures / "1.png"),))
    return run([f"a={tiny_vit}", f"b={tiny_cnn}"], out, options)


def test_numbers_are_those_of_the_functions(pair, tiny_vit):
    model = load(str(tiny_vit))
    (queries, labels, groups), (bank, bank_labels, _) = pixels("test", 24), pixels("train", 40)
    test, train = read(model, queries, embedding=True), read(model, bank, embedding=True)
    rows = [row for row in pair.rows(DEPTH) if row.model == "a"]
    for layer in (None, 0, 1):
        for weighting in ("dino", "majority"):
            place = "embedding" if layer is None else layer
            expected = knn(
                train.at(place),
                bank_labels,
                test.at(place),
                labels,
                classes=10,
                ks=(1, 3),
                weighting=weighting,
                groups=groups,
            )
            for votes in expected:
                asked = (layer, f"knn-{votes.k}", weighting)
                [row] = [row for row in rows if (row.layer, row.classifier, row.weighting) == asked]
                assert row.accuracy == pytest.approx(votes.accuracy.value)
                assert (row.low, row.n) == (pytest.approx(votes.accuracy.low), 24)
                if layer == 1:
                    metric = KNN if weighting == "dino" else KNN_MAJORITY
                    assert pair.metric(metric(model="a", k=votes.k)).value == pytest.approx(votes.accuracy.value)
    own = float((test.logits.argmax(1) == labels).double().mean())
    assert pair.metric(ACCURACY(model="a")).value == pytest.approx(own)
    np.testing.assert_allclose(pair.arrays(LAYER_SIMILARITY).cka[0], similarity(test).values.numpy(), atol=1e-9)
    space = pair.arrays(SPACE_ARRAYS, model="a")
    np.testing.assert_array_equal(space.wrong_images, (test.logits.argmax(1) != labels).numpy())
    assert space.pca_images.shape == (24, 2)
    assert set(np.unique(space.labels_patches)) == {0, 1}  # digits have masks: background and object


def test_two_models_are_paired_on_the_same_images(pair):
    gap = pair.metric(KNN_DIFFERENCE(first="a", second="b", k=3))
    first, second = (pair.metric(KNN(model=alias, k=3)).value for alias in "ab")
    assert gap.value == pytest.approx(100 * (first - second))
    assert (gap.n, gap.unit) == (24, "points")
    assert [row.classifier for row in pair.rows(PAIRS)] == ["knn-1", "knn-3", "probe"]
    assert [row.estimate for row in pair.rows(PAIRS)][1] == gap
    layers = len({row.layer for row in pair.rows(DEPTH) if row.model == "b"})  # with the stem
    [(number, row)] = [(number, row) for number, row in enumerate(pair.rows(SIMILARITY)) if row.first != row.second]
    assert row.last_last_low <= row.last_last <= row.last_last_high
    cka = pair.arrays(LAYER_SIMILARITY).cka[number]
    assert cka.shape == (1 + 2, layers)
    assert row.embedded == (True, True)
    assert pair.metric(CKA(first="a", second="b", layer=1, other=layers - 2)).value == cka[-1, -1] == row.last_last
    assert pair.metric(CKA(first="a", second="b", layer="embedding", other=0)).value == cka[0, 1]
    assert (row.first_last, row.embedding_last) == (cka[1, -1], cka[0, -1])
    layer, other = row.most_layers  # numbers of blocks and stages
    assert cka[1:, 1:][layer, other] == row.most == cka[1:, 1:].max()
    assert row.mean == pytest.approx(cka[1:, 1:].mean())


def test_a_probe_t_sne_thumbnails_and_a_query(pair, pictures):
    [last] = [row for row in pair.rows(DEPTH) if (row.model, row.classifier, row.layer) == ("a", "probe", 1)]
    assert pair.metric(PROBE_ACCURACY(model="a")).value == last.accuracy
    assert last.c > 0
    assert last.weighting is None
    assert 0 <= pair.metric(TRUSTWORTHINESS(model="a", method="tsne", of="images")).value <= 1
    space = pair.arrays(SPACE_ARRAYS, model="a")
    assert space.tsne_images.shape == (24, 2)
    assert len(space.pixels) == 24
    retrieved = pair.arrays(RETRIEVAL_ARRAYS, model="a")
    asked = np.asarray(Image.open(pictures / "1.png")).transpose(2, 0, 1)
    np.testing.assert_array_equal(retrieved.queries[0], asked)
    assert list(retrieved.query_names) == ["1.png"]
    row = pair.rows(RETRIEVAL)[0]
    assert (row.among, row.images, row.queries, row.neighbours) == ("bank", 40, 1, 7)


def test_pretraining_is_read_or_told(pair, tiny_vit, tiny_cnn, tmp_path):
    assert [row.objective for row in pair.rows(PRETRAINING)] == ["supervised"] * 2
    options = replace(FAST, objective=("b=self-supervised",), bank=20, ks=(1,))
    models = [f"a={tiny_vit}", f"b={tiny_cnn}", f"c={tiny_vit}@random"]
    record = run(models, tmp_path / "out", options)
    rows = record.rows(PRETRAINING)
    assert [row.objective for row in rows] == ["supervised", "self-supervised", "random weights"]
    assert [row.parameters for row in rows] == [load(name).parameter_count() for name in models]
    [section] = [section for section in report(record).sections if section.title == "Pretraining"]
    [table] = section.tables
    assert [line[0] for line in table.rows] == ["a", "b", "c"]
    place = table.columns.index("nearest neighbour")
    assert [line[place].value for line in table.rows] == [record.metric(KNN(model=alias, k=1)).value for alias in "abc"]


def test_layers_and_heads_count_from_0(pair):
    numbered = {"block 0": 0, "block 1": 1, "stage 0": 0, "stage 1": 1, "stage 2": 2}
    assert {row.title: row.layer for row in pair.rows(DEPTH)} == {"embedding": None, "stem": None, **numbered}
    [row] = pair.rows(HEADS)
    assert (row.model, row.layer, row.heads) == ("a", 1, 2)


def test_the_report_has_a_line_for_every_layer_and_no_number_without_its_interval(pair):
    [section] = [section for section in report(pair).sections if section.title == "Accuracy by layer"]
    weighted, majority, pairs = section.tables
    assert len(weighted.rows) == len(majority.rows) == 2 + 3 + 2  # blocks, stages, embedding and stem
    for line in (*weighted.rows, *majority.rows):
        assert all(cell.low <= cell.value <= cell.high for cell in line[3:])
    assert len(pairs.rows) == 3


def test_maps_of_the_patches_that_enter_block_0_have_their_rows(pair, tiny_vit):
    """A sample over all images, in their order; the content is what is left without the mean of each place."""
    model = load(str(tiny_vit))
    queries, _, _ = pixels("test", 24)
    tokens = patch_tokens(model, queries, layer="embedding")
    rows, columns = tokens.shape[1:3]
    space = pair.arrays(SPACE_ARRAYS, model="a")
    assert tuple(space.grid) == (rows, columns)
    count = len(queries) * rows * columns  # fewer than would be sampled
    expected = [[row, column] for _ in queries for row in range(rows) for column in range(columns)]
    np.testing.assert_array_equal(space.places, expected)
    whole = embed(tokens.flatten(0, 2), method="pca")
    np.testing.assert_allclose(space.pca_embedding, whole.points, atol=1e-4)
    content = embed((tokens - tokens.double().mean(0)).flatten(0, 2).float(), method="pca")
    np.testing.assert_allclose(space.pca_content, content.points, atol=1e-3)
    drawn = {(row.of, row.method): row.n for row in pair.rows(SPACE) if row.model == "a"}
    assert drawn["embedding", "tsne"] == drawn["content", "pca"] == count
    assert not [row for row in pair.rows(SPACE) if row.model == "b" and row.of != "images"]  # a CNN
    height, width = queries.shape[2] // rows, queries.shape[3] // columns
    for index, cut in zip(space.cut[:5], space.cut_pixels[:5], strict=True):
        image, cell = divmod(int(index), rows * columns)
        top, left = (cell // columns) * height, (cell % columns) * width
        below = (queries[image, :, top : top + height, left : left + width] * 255).round().byte()
        assert torch.equal(torch.from_numpy(cut)[:, :: 16 // height, :: 16 // width], below)


def test_neighbours_of_patches_are_counted_among_other_images(pair, tiny_vit):
    model = load(str(tiny_vit))
    queries, labels, _ = pixels("test", 24)
    tokens = patch_tokens(model, queries, layer="embedding")
    cells = tokens.shape[1] * tokens.shape[2]
    images = torch.arange(24).repeat_interleave(cells)
    near = patch_neighbours(tokens.flatten(0, 2), images)
    same = (labels[images][near.indices] == labels[images][:, None]).double().mean()
    [row] = [row for row in pair.rows(SHARED) if (row.model, row.layer, row.share) == ("a", None, "class")]
    assert row.value == pytest.approx(float(same))
    assert (row.patches, row.images, row.title) == (24 * cells, 24, "embedding")
    assert pair.metric(PATCH_NEIGHBOURS(model="a", layer="embedding", share="class")).value == row.value
    known = {(row.model, row.title, row.share) for row in pair.rows(SHARED)}
    layers = [("a", "embedding"), ("a", "block 1"), ("b", "stem"), ("b", "stage 2")]
    assert known == {(*layer, share) for layer in layers for share in ("position", "class", "object")}


def test_what_no_patches_can_share_has_no_column(pair):
    """Where every image has a class of its own, no patches of two images share one."""
    rows = pair.rows(SHARED)
    assert "of the same class" in embedding._table(rows).columns
    alone = [replace(row, value=0.0, chance=0.0) if row.share == "class" else row for row in rows]
    table = embedding._table(alone)
    assert "of the same class" not in table.columns
    assert all(len(line) == len(table.columns) for line in table.rows)


def test_only_the_images_asked_for_are_drawn(tiny_vit, pictures, tmp_path):
    shown = (str(pictures / "2.png"), str(pictures / "0.png"))
    options = replace(FAST, show=shown, ks=(1,))
    record = run([str(tiny_vit)], tmp_path / "out", options)
    images = [np.asarray(Image.open(path)).transpose(2, 0, 1) for path in shown]
    arrays = [read_arrays(path) for path in (tmp_path / "out" / "arrays").glob("*.npz")]
    drawn = [array for file in arrays for array in file.values() if array.dtype == np.uint8]
    assert len(drawn) >= 5  # colours, queries, neighbours, both sides of the matches, heads
    assert {image.tobytes() for array in drawn for image in array.reshape(-1, *array.shape[-3:])} == {
        image.tobytes() for image in images
    }
    np.testing.assert_array_equal(record.arrays(SHOWN_ARRAYS).pixels[0], images[0])
    assert record.arrays(SPACE_ARRAYS, model="tiny-vit").cut_pixels is None  # patches are parts of images
    captions = {figure.name: figure.caption for figure in report(record).figures}
    assert "pictures" not in captions["space_embedding_tiny-vit"]
    assert [row.among for row in record.rows(RETRIEVAL)] == ["shown"]
    matches = record.arrays(MATCH_ARRAYS, model="tiny-vit")
    assert [row.matches for row in record.rows(MATCHES)] == [len(matches.similarity[place]) for place in (0, 1)]
    with pytest.raises(InputError, match="found both"):
        run([str(tiny_vit)], tmp_path / "no", replace(options, thumbnails=True))
    with pytest.raises(DataError, match="leave out --show"):
        run([str(tiny_vit)], tmp_path / "no", replace(FAST, show=("seven",)))


def test_heads_are_those_of_the_cls_token_even_where_the_classifier_reads_the_mean(tiny_vit):
    model, (images, _, _) = load(str(tiny_vit)), pixels("test", 2)
    expected = attention_maps(model, images)[-1]
    assert expected.reading == "the CLS token"
    model.anatomy = replace(model.anatomy, readout="mean")
    maps, reading, layer = last_heads(model, images)
    assert (reading, layer) == ("the CLS token", 1)
    torch.testing.assert_close(maps, expected.maps)


def test_without_labels_nothing_is_classified_and_the_rest_is_there(tiny_vit, pictures, tmp_path):
    record = run([str(tiny_vit)], tmp_path / "out", replace(FAST, data=None, images=(str(pictures),)))
    assert not record.rows(DEPTH)
    assert not any(name.startswith("knn") for name in record.metrics)
    [row] = record.rows(DATA)
    assert (row.bank, row.no_bank, row.chance) == (None, "the images have no labels", 0)
    names = {figure.stem for figure in (tmp_path / "out" / "figures").glob("*.png")}
    assert {"patches", "matches_tiny-vit", "heads_tiny-vit", "space_patches_tiny-vit"} <= names
    assert not names & {"depth", "retrieval_tiny-vit"}  # the nearest of three images need not be near
    retrieved = record.arrays(RETRIEVAL_ARRAYS, model="tiny-vit")
    assert retrieved.neighbours.shape[:2] == (3, 2)  # of three images each has two others
    assert retrieved.same is None


def test_a_cache_is_used_and_a_broken_one_built_again(tiny_vit, pictures, tmp_path):
    """With five training images of ten classes, which the notes say."""
    kept = replace(RUN, data_dir=tmp_path / "kept", limit=10)
    # a single image is drawn quickly
    options = replace(FAST, cache=True, bank=5, ks=(1,), show=(str(pictures / "0.png"),), run=kept)
    first = run([str(tiny_vit)], tmp_path / "out0", options)
    files = sorted((tmp_path / "kept").rglob("*.safetensors"))
    assert len(files) == 2 * (3 + 1)  # the embedding, two layers and the logits, of test and bank
    for file in files[1:]:
        file.write_bytes(file.read_bytes()[:-8])
    second = run([str(tiny_vit)], tmp_path / "out1", options)
    assert first.rows(DEPTH) == second.rows(DEPTH)
    before, after = ([row.note for row in record.rows(NOTES)] for record in (first, second))
    assert not any("built again" in note for note in before)
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
    ],
)
def test_impossible_options_are_refused_before_a_folder_is_made(tiny_vit, tmp_path, options, message):
    with pytest.raises(InputError, match=message):
        run([str(tiny_vit)], tmp_path / "out", options)
    assert not (tmp_path / "out").exists()


def test_a_cls_token_that_is_not_there_is_refused_before_a_folder_is_made(tiny_cnn, tmp_path):
    with pytest.raises(UnsupportedError, match="CLS token"):
        run([str(tiny_cnn)], tmp_path / "out", replace(FAST, pool="cls"))
    assert not (tmp_path / "out").exists()


def test_prompts_need_a_text_tower(tiny_vit, tmp_path):
    with pytest.raises(UnsupportedError, match=r"text tower, found 'tiny-vit'.*open-clip:"):
        run([str(tiny_vit)], tmp_path / "out", replace(FAST, prompts=("a dog",)))
    assert not (tmp_path / "out").exists()


def test_a_language_image_model_by_names_alone(tmp_path):
    pytest.importorskip("open_clip", reason="needs the extra clip: pip install open_clip_torch")
    from tests.models.tiny_clip import registered
    from vitlens.analysis.features.zero_shot import zero_shot

    registered()
    options = replace(FAST, templates=("a photo of the digit {}.", "{}"), prompts=("a five", "grass"))
    record = run(["clip=open-clip:tiny-clip@random"], tmp_path / "out", options)
    images, labels, _ = pixels("test", 24)
    both = zero_shot(load("open-clip:tiny-clip@random"), digits("test").classes, templates=options.templates)
    right = float((both(images).argmax(1) == labels).double().mean())
    assert record.metric(ZERO_SHOT(model="clip")).value == pytest.approx(right)
    # its 16 outputs are numbered like the digits, but are not digits
    assert ACCURACY(model="clip") not in record.metrics
    ensemble, *single = record.rows(TEMPLATES)
    assert [row.template for row in (ensemble, *single)] == ["ensemble of all", *options.templates]
    assert (ensemble.gain, ensemble.p) == (None, None)
    assert all(row.gain == pytest.approx(100 * (row.accuracy - ensemble.accuracy)) for row in single)
    assert record.arrays(PROMPT_ARRAYS, model="clip").maps.shape == (6, 2, 4, 4)
    prompts = record.rows(PROMPTS)
    assert [(row.image, row.prompt) for row in prompts[:3]] == [(0, "a five"), (0, "grass"), (1, "a five")]
    assert all(abs(row.cosine) <= 1 + 1e-6 for row in prompts)
    names = {figure.stem for figure in (tmp_path / "out" / "figures").glob("*.png")}
    assert {"templates_clip", "prompts_clip"} <= names
    with pytest.raises(InputError, match=r"expected a template with \{\}"):
        run(["open-clip:tiny-clip@random"], tmp_path / "no", replace(FAST, templates=("a photo",)))


def test_a_model_without_an_embedding_has_its_layers_and_the_report_says_so(tiny_cnn, tmp_path, monkeypatch):
    for module in ("vitlens.commands.features.measure", "vitlens.commands.features.measure.patches"):
        monkeypatch.setattr(f"{module}.embedding_stage", lambda _model: None)
    record = run([str(tiny_cnn)], tmp_path / "out", replace(FAST, ks=(1,)))
    assert {row.layer for row in record.rows(DEPTH)} == {0, 1, 2}
    assert {row.layer for row in record.rows(SHARED)} == {2}
    [row] = record.rows(FEATURES)
    assert (row.embedding, row.layers) == (None, 3)
    assert "What enters its first block is not read" in " ".join(line.text for line in report(record).preface)
