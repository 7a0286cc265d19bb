"""`study --kind pretraining`: features of models that learned with and without labels."""

import json
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch

import vitlens
from tests.kit.commands import figures, gone_on, ran
from tests.kit.objectives import headless
from tests.kit.planted_study import probe_correct
from tests.kit.select import index_by, select, select_one, values_of
from tests.kit.training_runs import interrupted
from vitlens.commands.study.kinds.pretraining.record import PretrainingRecord

LINE = "study --kind pretraining --seeds 2 --epochs 1 --limit 32 --batch-size 16"
POINTS = ("random", "supervised", "mae", "dino", "clip")


@pytest.fixture(scope="module")
def done(golden) -> PretrainingRecord:
    """Return a study of five points and two seeds, with one epoch of 32 images."""
    return golden("study of pretraining").record


def shapes(part: str) -> vitlens.Split:
    return vitlens.load_data("shapes", part=part).limit(32)


def read(model: vitlens.Model, part: str) -> np.ndarray:
    """Compute features of length 1 by hand: CLS and the mean of the patches after the last norm."""
    images = next(shapes(part).batches(32)).images
    both = [vitlens.features(model, images, layer=-1, pool=pool).at(-1) for pool in ("cls", "mean")]
    vectors = torch.cat(both, 1).double().numpy()
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def trained(record: PretrainingRecord, label: str, seed: int) -> vitlens.Model:
    return vitlens.load(str(record.folder / "points" / label / f"seed-{seed}"))


def test_all_points_have_one_architecture_and_budget_and_random_weights_none(done):
    assert tuple(row.label for row in done.points) == POINTS
    assert {row.steps for row in done.points if row.label != "random"} == {2}
    random = done.points[0]
    assert (random.steps, random.epochs, random.trained, random.seconds) == (0, 0, 0, 0.0)
    assert not list((done.folder / "points" / "random").glob("*/model.safetensors"))
    names_of_points = [set(trained(done, label, 0).module.state_dict()) for label in POINTS[1:]]
    shared_names = set.intersection(*names_of_points)
    all_names = set.union(*names_of_points)
    assert all_names - shared_names <= {"head.weight", "head.bias"}
    recipes = json.loads((done.folder / "config.json").read_text())["recipes"]
    assert {recipe["batch_size"] for recipe in recipes.values()} == {16}


def test_neighbours_are_those_of_the_frozen_features(done):
    truth = shapes("test").labels.numpy()
    labels = shapes("train").labels.numpy()
    for label in POINTS[1:]:
        accuracies = []
        for seed in (0, 1):
            model = trained(done, label, seed)
            nearest = (read(model, "test") @ read(model, "train").T).argmax(1)
            accuracies.append(float((labels[nearest] == truth).mean()))
        row = select_one(done.feature_scores, label=label, measure="k-NN, k = 1")
        assert row.value.value == pytest.approx(np.mean(accuracies), abs=1e-6)


def test_the_accuracy_of_a_point_is_that_of_its_linear_probe(done):
    for row in done.points:
        probe = select_one(done.feature_scores, label=row.label, measure="linear probe")
        assert probe.value.value == pytest.approx(row.accuracy.value)


def test_scenes_of_one_digit_stay_together_where_the_probe_is_chosen():
    """Apart, they are on both sides, and another strength of regularisation seems best."""
    train = vitlens.load_data("digits", part="train")
    test = vitlens.load_data("digits", limit=100)
    train = train.pick((train.groups < 40).nonzero().flatten())
    correct, together = probe_correct(
        headless(dim=16, depth=2, heads=2, patch_size=[8, 8]), train, test
    )
    _, apart = probe_correct(
        headless(dim=16, depth=2, heads=2, patch_size=[8, 8]), replace(train, groups=None), test
    )
    assert np.array_equal(correct, together)
    assert not np.array_equal(correct, apart)


def test_every_measure_has_every_point_and_its_comparisons(done):
    assert [*dict.fromkeys(row.measure for row in done.feature_scores)] == [
        "k-NN, k = 1",
        "k-NN, k = 5",
        "k-NN, k = 20",
        "linear probe",
    ]
    for rows in (done.feature_scores, done.corrupted):
        for measure in set(values_of(rows, "measure")):
            by_label = index_by(select(rows, measure=measure), "label")
            assert tuple(by_label) == POINTS
            assert by_label["random"].over_random is by_label["supervised"].over_supervised is None
            gain = 100 * (by_label["mae"].value.value - by_label["supervised"].value.value)
            assert by_label["mae"].over_supervised.value == pytest.approx(gain, abs=1e-9)
    assert set(values_of(done.few_shot, "label", "shots")) == set(product(POINTS, (1, 2)))
    assert set(values_of(done.objectness, "label")) == {*POINTS}
    similarities = index_by(done.likeness, "label", "against")
    assert len(similarities) == 25
    for (one, other), row in similarities.items():
        assert row.cka.value == pytest.approx(similarities[other, one].cka.value)
    assert sorted(done.space.points) == [0, 1, 2, 3, 4]


def test_words_are_spread_over_wordings(done):
    (spread,) = done.zero_shot
    accuracies = values_of(done.wordings, "accuracy.value")
    assert (spread.label, spread.wordings, spread.chance) == ("clip", len(accuracies), 1 / 8)
    assert set(values_of(done.wordings, "seen")) == {True, False}
    assert spread.mean.value == pytest.approx(np.mean(accuracies))
    assert (
        spread.lowest.value
        <= min(accuracies)
        <= spread.mean.value
        <= max(accuracies)
        <= spread.highest.value
    )


def test_the_report_shows_each_measure(done):
    assert {
        "neighbours",
        "space",
        "few_shot",
        "objectness",
        "wordings",
        "likeness",
        "corrupted",
    } <= figures(done)


@pytest.mark.usefixtures("undrawn")
# a second whole study; that trainings resume is tests/public/training/test_objectives.py's
@pytest.mark.slow
def test_a_stopped_study_goes_on_and_finds_the_same(done, tmp_path):
    folder = tmp_path / "stopped"
    with interrupted(lambda training, _: training == 4, "study"):
        assert ran(folder, LINE, code=130).status == "interrupted"
    written = {path: path.stat().st_mtime_ns for path in folder.glob("points/*/*/result.npz")}
    assert len(written) in (5, 6)
    again = gone_on(folder, "study")
    assert {path: path.stat().st_mtime_ns for path in written} == written
    assert again.metrics == done.metrics
