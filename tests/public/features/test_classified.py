"""`vitlens features`: votes, probes, maps, colours and matches; and zero-shot classification."""

import re

import numpy as np
import pytest
import torch
from sklearn import manifold
from sklearn.decomposition import PCA
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier
from sklearn.preprocessing import StandardScaler
from torch import Tensor

import vitlens
from tests.kit.commands import ran
from tests.kit.datasets import put
from tests.kit.making import save
from tests.kit.select import select_one, values_of
from vitlens.cli.main import run
from vitlens.commands.features.record import DepthRow, FeaturesRecord
from vitlens.commands.run.publish import read_folder
from vitlens.errors import InputError
from vitlens.names import imagenet_classes
from vitlens.uncertainty import accuracy_difference, holm, mcnemar, wilson


@pytest.fixture(scope="module")
def record(golden) -> FeaturesRecord:
    return golden("features").record


@pytest.fixture(scope="module")
def splits(record) -> tuple[vitlens.Split, vitlens.Split]:
    """Return the images, and the training images that classifiers use."""
    (sizes,) = record.sets
    return vitlens.load_data("digits", limit=sizes.test), vitlens.load_data(
        "digits", part="train", limit=sizes.bank
    )


@pytest.fixture(scope="module")
def vit(tiny_vit) -> vitlens.Model:
    return vitlens.load(str(tiny_vit))


@pytest.fixture(scope="module")
def read(vit, splits) -> list[dict[object, np.ndarray]]:
    """Return both sets' features by layer, in float64."""
    by_split = []
    for split in splits:
        features = vitlens.features(vit, split, embedding=True)
        layers = ("embedding", 1)
        by_split.append({layer: features.at(layer).double().numpy() for layer in layers})
    return by_split


def unit(values: np.ndarray) -> np.ndarray:
    return values / np.linalg.norm(values, axis=-1, keepdims=True)


def dino(similarity: np.ndarray, labels: np.ndarray, k: int) -> np.ndarray:
    """Vote as facebookresearch/dino's eval_knn: exp(similarity / 0.07), summed by class."""
    votes = np.zeros((len(similarity), 10))
    for row, nearest in enumerate(np.argsort(-similarity, axis=1, kind="stable")[:, :k]):
        np.add.at(votes[row], labels[nearest], np.exp(similarity[row, nearest] / 0.07))
    return votes.argmax(1)


@pytest.mark.parametrize("layer", ["embedding", 1])
def test_votes_of_neighbours_are_scikit_learns_and_dinos(record, splits, read, layer):
    (test, train), (queries, bank) = (
        (split.labels.numpy() for split in splits),
        (split_values[layer] for split_values in read),
    )
    similarity = unit(queries) @ unit(bank).T
    at = {"model": "a", "layer": None if layer == "embedding" else layer}
    for k in map(int, record.features[0].knn):
        model = KNeighborsClassifier(k, metric="cosine", algorithm="brute").fit(bank, train)
        for votes, answers in (
            ("majority", model.predict(queries)),
            ("dino", dino(similarity, train, k)),
        ):
            row = select_one(record.depth, classifier=f"knn-{k}", weighting=votes, **at)
            assert row.accuracy.value == (answers == test).mean()
            assert row.chance == np.bincount(test).max() / len(test)
        if layer == 1:
            nearest = np.argsort(-similarity, axis=1, kind="stable")[:, :k]
            share = (train[nearest] == test[:, None]).mean()
            assert record.features[0].precision[str(k)].value == pytest.approx(share)


def test_the_public_classifiers_are_those_of_the_command(record, splits, vit):
    test, train = splits
    queries, bank = (vitlens.features(vit, split).at(1) for split in splits)
    for k in map(int, record.features[0].knn):
        voted = vitlens.knn(bank, train.labels, queries, test.labels, k=k, groups=test.groups)
        row = select_one(record.depth, model="a", layer=1, classifier=f"knn-{k}", weighting="dino")
        assert voted.accuracy == row.accuracy
        assert torch.equal(voted.correct, voted.predictions == test.labels)
    row = select_one(record.depth, model="a", layer=1, classifier="probe")
    groups = {"train_groups": train.groups, "groups": test.groups}
    probed = vitlens.probe(bank, train.labels, queries, test.labels, **groups)
    assert (probed.accuracy, probed.c) == (row.accuracy, row.c)


@pytest.mark.parametrize("classify", [vitlens.knn, vitlens.probe])
def test_features_and_labels_that_do_not_fit_are_refused(classify):
    values = torch.rand(8, 3)
    labels = torch.arange(8) % 2
    for wrong in (
        (values, labels[:4], values, labels),
        (values, labels, values[:, :2], labels),
        (values, labels, values, labels.float()),
        (values[None], labels, values, labels),
        (values, labels, values / 0, labels),
        (values, labels - 1, values, labels),
    ):
        with pytest.raises(InputError):
            classify(*wrong)


def test_more_neighbours_than_training_images_are_refused():
    values = torch.rand(8, 3)
    labels = torch.arange(8) % 2
    with pytest.raises(InputError):
        vitlens.knn(values, labels, values, labels, k=9)
    few = vitlens.knn(values, labels, values, labels, k=2).neighbours
    with pytest.raises(InputError):
        vitlens.knn(values, labels, values, labels, k=3, neighbours=few)


def check_probe(
    row: DepthRow, split: vitlens.Split, train: vitlens.Split, queries: np.ndarray, bank: np.ndarray
) -> None:
    """Check the probe against scikit-learn's on standardised features.

    C is the least of the best on a seeded fifth of each class's sources.
    """
    bank_labels = train.labels.numpy()
    source = np.unique(train.groups.numpy(), return_inverse=True)[1]
    order = torch.randperm(source.max() + 1, generator=torch.Generator().manual_seed(0)).numpy()
    held = np.zeros(len(bank_labels), dtype=bool)
    for label in set(bank_labels.tolist()):
        sources_of_label = order[np.isin(order, source[bank_labels == label])]
        held |= np.isin(
            source,
            sources_of_label[
                : min(max(1, round(0.2 * len(sources_of_label))), len(sources_of_label) - 1)
            ],
        )

    def right(
        c: float, fitted: np.ndarray, labels: np.ndarray, queries_of: np.ndarray, truth: np.ndarray
    ) -> float:
        scale = StandardScaler().fit(fitted)
        model = LogisticRegression(C=c, max_iter=1000).fit(scale.transform(fitted), labels)
        return (model.predict(scale.transform(queries_of)) == truth).mean()

    values = (1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0)
    tried = {
        c: right(c, bank[~held], bank_labels[~held], bank[held], bank_labels[held]) for c in values
    }
    assert row.c == min(c for c, accuracy_of in tried.items() if accuracy_of == max(tried.values()))
    expected = right(row.c, bank, bank_labels, queries, split.labels.numpy())
    assert row.accuracy.value == pytest.approx(expected, abs=1.1 / len(split))  # from another start


@pytest.mark.parametrize("layer", ["embedding", 1])
def test_the_probe_is_scikit_learns_with_the_c_that_held_out_images_choose(
    record, splits, read, layer
):
    row = select_one(
        record.depth, model="a", layer=None if layer == "embedding" else layer, classifier="probe"
    )
    check_probe(row, *splits, *(split_values[layer] for split_values in read))


def test_constant_features_say_nothing_and_a_classs_only_image_has_no_part_in_choosing_c(
    tiny_vit, splits, tmp_path
):
    model = vitlens.load(str(tiny_vit))
    with torch.no_grad():
        model.module.norm.weight[:3], model.module.norm.bias[:3] = (
            0,
            torch.tensor([0, 3.7, -1000.0]),
        )
    save(model, tmp_path / "model" / "model.safetensors")
    images = splits[0]
    train = vitlens.load_data("digits", part="train", limit=15)
    line = (
        f"features a={tmp_path / 'model'} --data digits --limit {len(images)} --bank 15 --k 1 "
        "--no-tsne --no-cache"
    )
    read_record, (queries, bank) = (
        ran(tmp_path / "out", line),
        (vitlens.features(model, split) for split in (images, train)),
    )
    row = select_one(read_record.depth, layer=1, classifier="probe")
    check_probe(row, images, train, queries.at(1).double().numpy(), bank.at(1).double().numpy())
    assert any("5 classes have a single training image" in row.note for row in read_record.notes)


@pytest.mark.parametrize("method", ["tsne", "pca"])
def test_maps_are_of_unit_vectors_and_as_trustworthy_as_scikit_learn_says(record, read, method):
    points = record.spaces["a"].points[f"{method}_images"]
    values = unit(read[0][1])
    row = select_one(record.maps, model="a", of="images", method=method)
    assert (row.n, row.neighbours, row.perplexity is None) == (len(values), 10, method == "pca")
    trust = manifold.trustworthiness(values, points, n_neighbors=10)
    assert row.trustworthiness.value == pytest.approx(trust, abs=1e-6)
    assert trust > 0.7
    if method == "pca":
        check_components(points, values, row.explained)


def test_four_images_are_mapped(tiny_vit, tmp_path):
    line = (
        f"features a={tiny_vit} --data digits --limit 4 --bank 10 --k 1 --no-probe --no-cache "
        "--perplexity 1"
    )
    read_record = ran(tmp_path / "out", line)
    rows = {row.method: (row.n, row.neighbours) for row in read_record.maps if row.of == "images"}
    assert rows == {"tsne": (4, 1), "pca": (4, 1)}
    assert np.isfinite(read_record.spaces["a"].points["tsne_images"]).all()


def check_components(scores: np.ndarray, values: np.ndarray, explained: float) -> None:
    """Check the first principal components, including their signs."""
    model = PCA(scores.shape[1], svd_solver="full").fit(values)
    # the greatest loading is positive
    signs = np.sign([component[np.abs(component).argmax()] for component in model.components_])
    expected = signs * model.transform(values)
    for actual, by_hand in zip(scores.T, expected.T, strict=True):
        np.testing.assert_allclose(
            actual, by_hand, atol=1e-5 * np.abs(by_hand).max() + 1e-7, rtol=1e-4
        )
    assert explained == pytest.approx(model.explained_variance_ratio_.sum(), abs=1e-5)


def patches(model: vitlens.Model, images: Tensor, *, embedding: bool = False) -> np.ndarray:
    """Return the patches after the last norm, or before the first block, on their grid."""
    module = model.module
    with torch.no_grad():
        tokens = module.tokens(model.prepare(images))
        if not embedding:
            for block in module.blocks:
                tokens = block(tokens)
            tokens = module.norm(tokens)
    return tokens[:, 1:].unflatten(1, model.layout.grid).double().numpy()


def test_patches_that_enter_block_0_are_mapped_and_their_content_is_what_is_left_without_the_place(
    record, vit, splits
):
    entering = patches(vit, vitlens.images(splits[0], vit), embedding=True)
    space = record.spaces["a"]
    content = entering - entering.mean(0)
    for of, values in (("embedding", entering), ("content", content)):
        row = select_one(record.maps, model="a", of=of, method="pca")
        flat = unit(values.reshape(-1, values.shape[-1]))
        assert row.n == len(flat)
        check_components(space.points[f"pca_{of}"], flat, row.explained)


def test_colours_are_three_components_of_the_patches_of_all_images(record, vit):
    views = record.shown["a"]
    tokens = patches(vit, torch.from_numpy(views.pixels) / 255)
    flat = tokens.reshape(-1, tokens.shape[-1])
    model = PCA(3, svd_solver="full").fit(flat)
    signed = model.transform(flat) * np.sign(
        [component[np.abs(component).argmax()] for component in model.components_]
    )
    expected = (signed - signed.min(0)) / np.ptp(signed, axis=0)
    np.testing.assert_allclose(views.colours.reshape(-1, 3), expected, atol=1e-4)
    assert record.features[0].colours == pytest.approx(
        model.explained_variance_ratio_.sum(), abs=1e-5
    )


def test_matched_patches_are_each_others_nearest(record, vit):
    views = record.shown["a"]
    for number, (first, second) in enumerate(zip(views.first, views.second, strict=True)):
        dim = vit.module.norm.weight.shape[0]
        one = patches(vit, torch.from_numpy(first)[None] / 255).reshape(-1, dim)
        other = patches(vit, torch.from_numpy(second)[None] / 255).reshape(-1, dim)
        cosines = unit(one) @ unit(other).T
        there = cosines.argmax(1)
        back = cosines.argmax(0)
        mutual = [cell for cell in range(len(one)) if back[there[cell]] == cell]
        mutual.sort(key=lambda cell: -cosines[cell, there[cell]])
        columns = vit.layout.grid[1]
        assert views.sources[number].tolist() == [list(divmod(cell, columns)) for cell in mutual]
        assert views.targets[number].tolist() == [
            list(divmod(int(there[cell]), columns)) for cell in mutual
        ]
        expected = [cosines[cell, there[cell]] for cell in mutual]
        np.testing.assert_allclose(views.alike[number], expected, atol=1e-5)


def test_what_neighbours_of_patches_share_is_counted_among_other_images(record, vit, splits):
    labels = splits[0].labels.numpy()
    masks = splits[0].masks
    entering = patches(vit, vitlens.images(splits[0], vit), embedding=True)
    rows, columns = entering.shape[1:3]
    flat = unit(entering.reshape(-1, entering.shape[-1]))
    image, cell = np.divmod(np.arange(len(flat)), rows * columns)
    cosines = (flat @ flat.T).round(12)
    cosines[image[:, None] == image] = -2
    nearest = np.argsort(-cosines, axis=1, kind="stable")[:, :10]
    place = np.stack(np.divmod(cell, columns), 1) / (rows, columns)
    near = np.linalg.norm(place[nearest] - place[:, None], axis=-1) <= 0.125 + 1e-9
    by_share = {
        row.share: row for row in record.patches if (row.model, row.layer) == ("a", "embedding")
    }
    assert by_share["position"].value.value == pytest.approx(near.mean())
    assert by_share["position"].chance == pytest.approx(1 / (rows * columns))
    same = labels[image][nearest] == labels[image][:, None]
    assert by_share["class"].value.value == pytest.approx(same.mean())
    alike = (labels[:, None] == labels).sum(1) - 1
    assert by_share["class"].chance == pytest.approx(alike.mean() / (len(labels) - 1))
    share = torch.nn.functional.adaptive_avg_pool2d(masks.float()[:, None], (rows, columns))
    on_object = (share > 0.5).flatten().numpy()
    weights = np.exp(np.take_along_axis(cosines, nearest, 1) / 0.07)
    voted = (weights * on_object[nearest]).sum(1) > weights.sum(1) / 2
    overlap = (voted & on_object).sum() / (voted | on_object).sum()
    assert by_share["object"].value.value == pytest.approx(overlap)
    assert by_share["object"].chance == pytest.approx(on_object.mean())


# --- only by names, with a language-image model

TEMPLATES = ("a photo of the digit {}.", "{}", "a {} in the dark")
CLIP = "open-clip:tiny-clip@random"


@pytest.fixture
def clip() -> vitlens.Model:
    pytest.importorskip("open_clip", reason="needs the extra clip: pip install open_clip_torch")
    from tests.kit.models.clip import registered

    registered()
    return vitlens.load(CLIP)


def test_every_template_is_the_classifier_of_its_prompts(clip, tmp_path):
    split = vitlens.load_data("digits", limit=40)
    line = (
        f"features clip={CLIP} --data digits --limit 40 --bank 10 --k 1 --no-probe --no-tsne "
        "--no-cache --quiet"
    )
    templates = [word for template in TEMPLATES for word in ("--clip-templates", template)]
    assert run([*line.split(), *templates, "--device", "cpu", "--out", str(tmp_path / "out")]) == 0
    record = read_folder(tmp_path / "out")
    images = vitlens.images(split, clip)
    template_sets = [TEMPLATES, *((template,) for template in TEMPLATES)]
    classifiers = [
        vitlens.zero_shot(clip, split.classes, templates=templates) for templates in template_sets
    ]
    ensemble_right, *singles = [
        (model(images).argmax(1) == split.labels).numpy() for model in classifiers
    ]
    ensemble, *rows = record.templates
    assert values_of(rows, "template") == list(TEMPLATES)
    assert (ensemble.gain, ensemble.p) == (None, None)
    assert record.metric("zero_shot_accuracy/clip") == ensemble.accuracy
    groups = split.groups.numpy()
    p = []
    for row, right in zip((ensemble, *rows), (ensemble_right, *singles), strict=True):
        assert row.accuracy == wilson(int(right.sum()), 40)  # each of a source of its own
        if row is not ensemble:
            p.append(
                mcnemar(int((right & ~ensemble_right).sum()), int((ensemble_right & ~right).sum()))
            )
            assert row.gain == accuracy_difference(right, ensemble_right, groups=groups, seed=0)
    assert values_of(rows, "p") == p
    assert values_of(rows, "p_holm") == holm(p)


@pytest.mark.parametrize("count", [2, 3])
def test_a_zero_shot_report_says_among_how_many_classes_and_what_chance_is(clip, tmp_path, count):
    """Folders of some of ImageNet's classes: these are the candidates, not its 1,000."""
    wnids = ("n01440764", "n01443537", "n01484850")[:count]
    for wnid in wnids:
        for number in range(60):
            put(tmp_path / "data" / wnid, f"{number}.png", value=10 * number)
    names = tmp_path / "names.txt"
    names.write_text("\n".join(imagenet_classes()[:count]))
    common = ["--data", str(tmp_path / "data"), "--device", "cpu", "--quiet"]
    less = ["--no-probe", "--no-tsne", "--no-cache", "--k", "1"]
    assert (
        run(["features", f"clip={CLIP}", *common, *less, "--out", str(tmp_path / "features")]) == 0
    )
    assert (
        run(
            [
                "evaluate",
                f"clip={CLIP}",
                *common,
                "--classes",
                str(names),
                "--out",
                str(tmp_path / "evaluate"),
            ]
        )
        == 0
    )
    for folder in ("features", "evaluate"):
        report = (tmp_path / folder / "report.md").read_text()
        assert f"{count} classes" in report
        assert re.search(rf"{100 / count:.1f} ?%", report.replace("\u00a0", " "))


def test_an_ensemble_is_the_mean_of_its_templates_and_names_are_said_as_one_says_them(clip):
    images = torch.rand(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    one = vitlens.zero_shot(clip, ["hot_dog", "cat"], templates=["{}"])
    same = vitlens.zero_shot(clip, ["0", "1"], names=["hot dog", "cat"], templates=["{}", "{}"])
    torch.testing.assert_close(one(images), same(images))
    assert one.classes == ("hot_dog", "cat")
    several = vitlens.zero_shot(clip, ["hot_dog", "cat"], templates=["{}", "a drawing of a {}"])
    assert not torch.allclose(several(images), one(images))


def test_imagenets_names_are_unambiguous_in_prompts(clip):
    """Two classes are called crane, two maillot: by their names the logits would be equal."""
    images = torch.rand(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    logits = vitlens.zero_shot(clip, imagenet_classes(), templates=["{}"])(images)[0]
    assert len(logits.unique()) > 990


def tried_splits(
    monkeypatch: pytest.MonkeyPatch, labels: list[int], groups: list[int]
) -> list[tuple[set[float], set[int], list[float]]]:
    """Return the images fitted, their classes, and the images held out, for 6 seeds.

    The only feature of an image is the number of its group.
    """
    seen = []
    fit = LogisticRegression.fit
    predict = LogisticRegression.predict

    def seen_fit(self, values, classes):
        seen.append((set(values[:, 0].tolist()), set(classes.tolist())))
        return fit(self, values, classes)

    def seen_predict(self, values):
        seen.append(values[:, 0].tolist())
        return predict(self, values)

    monkeypatch.setattr(LogisticRegression, "fit", seen_fit)
    monkeypatch.setattr(LogisticRegression, "predict", seen_predict)
    features = torch.tensor(groups)[:, None].float()
    splits = []
    for seed in range(6):
        seen.clear()
        vitlens.probe(
            features,
            torch.tensor(labels),
            features,
            torch.tensor(labels),
            train_groups=torch.tensor(groups),
            seed=seed,
        )
        (fitted, classes), held_out = seen[:2]
        splits.append((fitted, classes, held_out))
    return splits


def test_a_group_is_held_out_whole_also_with_images_of_several_classes(monkeypatch):
    groups = [*range(10), *range(5, 10)]
    for fitted, classes, held_out in tried_splits(monkeypatch, [0] * 10 + [1] * 5, groups):
        assert fitted.isdisjoint(held_out)
        assert classes == {0, 1}


def test_the_last_image_of_a_class_stays_in_the_fit(monkeypatch):
    splits = tried_splits(monkeypatch, [0, 1, 0, 0, 0], [0, 0, 1, 2, 3])
    for fitted, classes, held_out in splits:
        assert fitted.isdisjoint(held_out)
        assert classes == {0, 1}
        assert len(held_out) == 1
