"""`study --kind`: the table of kinds, every point, results against the models that were trained, resuming, refusals."""

import json
from dataclasses import replace
from pathlib import Path
from shutil import copytree

import numpy as np
import pytest
import torch

import vitlens
from tests.kit.making import digits
from tests.kit.training_runs import interrupted
from vitlens.analysis.attention.positions import position_similarity, rank_correlation
from vitlens.analysis.cost.flops import vit_flops
from vitlens.analysis.cost.passes import saved_for_training
from vitlens.cli.main import run
from vitlens.commands.run.folder import RunFolder
from vitlens.commands.run.options import ModelOptions, RunOptions
from vitlens.commands.run.publish import read_folder
from vitlens.commands.study.kinds import measure as kind_measure
from vitlens.commands.study.kinds.kinds import KINDS
from vitlens.commands.study.kinds.setup import Setup
from vitlens.commands.study.measure import measure
from vitlens.commands.study.options import StudyOptions
from vitlens.errors import InputError
from vitlens.lens.trace import probe_images
from vitlens.models.vit_config import VIT_PRESETS
from vitlens.names import PRESETS
from vitlens.training.metrics import read_metrics

OPTIONS = RunOptions(device="cpu", limit=20, batch_size=10, quiet=True)
FROM_PRESETS = {name: kind for name, kind in KINDS.items() if not kind.adapts}
POINTS = {(p.preset, repr(p.shape)): (name, p) for name, kind in FROM_PRESETS.items() for p in kind.points}


def study(kind: str | None = "pooling", *, options: RunOptions = OPTIONS, **more: object) -> Path:
    settings = {"epochs": 2, "seeds": 2} if kind else {}
    return measure(StudyOptions(kind=kind, run=options, **{**settings, **more}))  # type: ignore[arg-type]


def made(folder: Path, kind: str, **more: object) -> Path:
    study(kind, options=replace(OPTIONS, out=folder), **{"epochs": 1, "seeds": 1, **more})
    return folder


@pytest.fixture(scope="module")
def done(golden) -> Path:
    return golden("study of points").folder


def results(folder: Path) -> dict:
    return json.loads((folder / "results.json").read_text())


def setup_of(kind: str, images: int, options: RunOptions = OPTIONS, *, epochs: int = 1, data: str = "digits") -> Setup:
    train, test = digits("train").limit(min(images, 40)), digits("test").limit(10)
    train = train.pick(torch.arange(images) % len(train))
    asked = StudyOptions(kind=kind, data=data, epochs=epochs, seeds=1, run=options)
    return Setup(asked, KINDS[kind].points, train, test, torch.device("cpu"))


@pytest.mark.parametrize("name", KINDS)
def test_a_kind_is_well_formed(name):
    kind = KINDS[name]
    labels = [point.label for point in kind.points]
    assert len(set(labels)) == len(labels) >= 2
    assert len({point.words for point in kind.points}) == len(labels)
    for point in kind.points:
        assert point.preset in (("",) if kind.adapts else PRESETS)
        assert point.label.replace("-", "").isalnum()  # it names a folder
        assert {*point.against, *([point.teacher] if point.teacher else [])} <= set(labels)


def test_each_point_of_the_architecture_differs_in_one_thing_from_the_one_that_it_changes():
    base, kind = VIT_PRESETS["vit-mini"], KINDS["architecture"]
    shapes = {p.label: {n: tuple(v) if isinstance(v, list) else v for n, v in p.shape.items()} for p in kind.points}
    configs = {label: replace(base, **shape) for label, shape in shapes.items()}
    changed = [
        {name for name, value in vars(configs[one]).items() if value != getattr(configs[other], name)}
        for one, other in kind.steps
    ]
    assert changed == [
        {"attention", "mlp", "heads"}, {"heads"}, {"residual"}, {"norm"}, {"mlp"}, {"norm_first"}, {"depth"}, {"depth"},
        {"depth"},
    ]  # fmt: skip
    assert kind.steps[5:7] == (("post-norm", "mlp"), ("depth-2", "mlp"))  # depth builds on the pre-norm block


@pytest.mark.parametrize(
    "key",
    [
        pytest.param(key, id=f"{kind}-{point.label}", marks=pytest.mark.slow if point.label == "vit-tiny" else ())
        for key, (kind, point) in POINTS.items()
    ],
)
def test_every_point_is_built_and_does_a_step(key, tmp_path):
    point = replace(POINTS[key][1], share=None)
    setup = replace(setup_of("pooling", 10), points=(point,))
    trial = kind_measure.run_trial(replace(setup, path=tmp_path), point, 1, seed=0)
    assert (trial.steps, len(trial.correct)) == (1, 10)
    trained = vitlens.load(str(tmp_path / "points" / point.label / "seed-0"))
    before = dict(setup.begin(point, seed=0).module.named_parameters())
    after = dict(trained.module.named_parameters())
    assert before.keys() == after.keys()
    assert any(not torch.equal(before[name], after[name]) for name in before)
    assert trial.parameters == sum(value.numel() for value in before.values())
    if point.preset in VIT_PRESETS:
        shape = {name: tuple(value) if isinstance(value, list) else value for name, value in point.shape.items()}
        assert trial.flops == sum(vit_flops(replace(VIT_PRESETS[point.preset], **shape)).values())


def test_accuracies_are_those_of_the_trained_models(done):
    record = read_folder(done)
    assert (record.status, [row.label for row in record.points]) == ("done", ["cls", "mean"])
    assert [(row.label, row.seed) for row in record.trials] == [("cls", 0), ("cls", 1), ("mean", 0), ("mean", 1)]
    cls, mean = (record.correct.correct[at] for at in (0, 1))
    assert cls.shape == mean.shape == (2, 20)
    assert [row.accuracy.value for row in record.points] == pytest.approx([cls.mean(), mean.mean()])
    assert record.metric("difference/mean/cls").value == pytest.approx(100 * (mean.mean() - cls.mean()))
    for row in record.points:
        model = vitlens.load(str(done / "points" / row.label / "seed-0"))
        assert row.training_bytes == saved_for_training(model, probe_images(model, 2)) // 2
    design = record.design[0]
    assert (design.seeds, design.epochs, design.train_images, design.image_size) == (2, 2, 20, (32, 32))
    assert {row.steps for row in record.points} == {4}
    split, folder = digits("test").limit(20), done / "points" / "mean" / "seed-1"
    right = vitlens.load(str(folder))(split.source.read(torch.arange(20)).float() / 255).argmax(1) == split.labels
    assert mean[1].tolist() == right.tolist()
    left = {path.name for path in folder.iterdir()}
    assert left == {"metrics.jsonl", "model.safetensors", "result.npz"}  # no checkpoint, no second copy of the weights
    assert "](figures/points.png)" in (done / "report.md").read_text()


def test_a_stopped_study_goes_on_and_finds_the_same(done, tmp_path):
    folder = tmp_path / "stopped"
    with interrupted(lambda training, progress: (training, progress.epoch) == (3, 1), kind_measure):
        study(options=replace(OPTIONS, out=folder))
    assert results(folder)["status"] == "interrupted"
    stopped, before = folder / "points" / "mean" / "seed-0", folder / "points" / "cls" / "seed-1" / "result.npz"
    assert read_metrics(stopped)  # an epoch was through
    assert not (stopped / "result.npz").exists()
    (stopped / ".model-0123abcd.safetensors").touch()  # as a kill while writing leaves it
    earlier = before.stat().st_mtime_ns
    study(None, resume=folder, options=RunOptions(device="cpu", quiet=True, seed=7))
    assert before.stat().st_mtime_ns == earlier
    assert not list(folder.rglob(".*"))
    for name in ("arrays/correct.npz", "points/mean/seed-0/model.safetensors"):
        assert (folder / name).read_bytes() == (done / name).read_bytes()
    assert results(folder)["metrics"] == results(done)["metrics"]
    trained = {path: path.stat().st_mtime_ns for path in folder.glob("points/*/*/*")}
    assert study(None, resume=folder, options=OPTIONS) == folder / "report.html"
    assert {path: path.stat().st_mtime_ns for path in trained} == trained  # a whole study is not trained again


def test_shares_are_of_the_data_and_steps_are_equal():
    setup = setup_of("data", 40, epochs=2)
    point = next(point for point in setup.points if point.label == "vit-25")
    images = setup.images(point, seed=0)
    assert (len(images), setup.images_of(point), len(set(images.labels.tolist()))) == (40, 10, 10)


@pytest.mark.parametrize(
    ("images", "batch_size", "expected"),
    [
        (10_000, None, {"vit": (128, 1.414e-3), "cnn": (128, 3e-3)}),  # the CNN's own size: the ViT's recipe has 256
        (10_000, 64, {"vit": (64, 2e-3), "cnn": (64, 3e-3)}),  # of the user: the learning rates stay
        (200, None, {"vit": (16, 5e-4), "cnn": (16, 1.061e-3)}),  # 10 steps an epoch, from 256 and from 128
    ],
)
def test_all_points_have_one_batch_size_though_their_presets_differ(images, batch_size, expected):
    setup = setup_of("swin", images, replace(OPTIONS, batch_size=batch_size), epochs=8, data="elsewhere")
    recipes = {point.label: setup.recipe(point) for point in setup.points}
    assert {recipe.batch_size for recipe in recipes.values()} == {expected["vit"][0]}
    for label, (size, rate) in expected.items():
        assert (recipes[label].batch_size, recipes[label].learning_rate) == (size, pytest.approx(rate, rel=1e-3))
    assert recipes["swin"] == recipes["swin-no-shift"]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"kind": "poolin"}, "did you mean 'pooling'"),
        ({"epochs": 0}, "--epochs at least 1"),
        ({"data": "digts"}, "did you mean 'digits'"),
        ({"model_options": ModelOptions(weights=Path("w.pth"))}, "no --weights with --kind pooling"),
        ({"kind": "patch-size", "model_options": ModelOptions(image_size=(36, 36))}, "found 36 and 8 px"),
        ({"kind": "data"}, "an image of each of 10 classes in 5%"),
        ({"models": ("vit-tiny",)}, "no MODEL with --kind pooling"),
        ({"kind": None, "seeds": 2}, "--kind with --seeds 2"),
    ],
)
def test_wrong_calls_are_refused_before_anything_is_written(tmp_path, changes, says):
    with pytest.raises(InputError, match=says):
        study(options=replace(OPTIONS, out=tmp_path / "out"), **changes)
    assert not (tmp_path / "out").exists()


def test_no_seed_is_refused(tmp_path, capsys):
    assert run(["study", "--kind", "pooling", "--seeds", "0", "--out", str(tmp_path / "out")]) == 2
    assert "--seeds" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_another_study_is_not_resumed(done, tmp_path):
    config = json.loads((done / "config.json").read_text())
    recipes = {name: {**recipe, "batch_size": 7} for name, recipe in config["recipes"].items()}
    for name, own in (("points", {"points": config["points"][:1]}), ("recipes", {"recipes": recipes})):
        RunFolder.opened("study", RunOptions(out=tmp_path / name), {**config, **own})
    RunFolder.opened("study", RunOptions(out=tmp_path / "whole"), {"options": {}})
    for changes, says in (
        ({"resume": done, "options": replace(OPTIONS, out=tmp_path / "out")}, "found both"),
        ({"resume": done, "kind": "size"}, "with its kind, pooling, found size; leave it out"),
        ({"resume": done, "epochs": 5}, "with its epochs, 2, found 5; leave it out"),
        ({"resume": tmp_path}, "expected the folder of a run"),
        ({"resume": tmp_path / "whole", "kind": None}, "folder of vitlens study --kind to resume"),
        ({"resume": tmp_path / "points"}, "expected the points that the run began with"),
        ({"resume": tmp_path / "recipes"}, "expected the recipes that the run began with"),
    ):
        with pytest.raises(InputError, match=says):
            study(**changes)


def test_results_about_other_images_are_refused(done, tmp_path):
    folder = copytree(done, tmp_path / "other")
    config = json.loads((folder / "config.json").read_text())
    config["options"]["run"]["limit"] = 10
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=r"expected the 20 test images of .* found 10"):
        study(None, resume=folder, options=RunOptions(device="cpu", quiet=True))


def test_position_embeddings_of_every_training_are_measured(tmp_path):
    folder = made(tmp_path / "positions", "positions", seeds=2)
    record = read_folder(folder)
    assert [row.label for row in record.position_order] == ["sine", "sine-2d", "learned"]
    for row in record.position_order:
        models = [vitlens.load(str(folder / "points" / row.label / f"seed-{seed}")) for seed in (0, 1)]
        found = [rank_correlation(position_similarity(model), model.layout) for model in models]
        expected = np.mean(np.array(found), 0)
        assert (row.all.value, row.rows.value, row.columns.value) == pytest.approx(expected)
        assert (row.before == row.all.value) == (row.label != "learned")
        assert (row.all.low is None) == (row.label != "learned")  # fixed ones are those of every seed
    assert record.metric("positions/learned/rank_correlation/all") == record.position_order[2].all
    stored = record.position_similarity.similarity
    assert sorted(stored) == [1, 2, 3]
    first = vitlens.load(str(folder / "points" / "learned" / "seed-0"))
    np.testing.assert_allclose(stored[3], position_similarity(first), atol=1e-6)
    assert "](figures/position_similarity.png)" in (folder / "report.md").read_text()


def test_the_image_that_is_cut_is_the_first_of_the_test_images(golden):
    run = golden("study along an axis")
    record = run.record
    image = digits("test").limit(20).source.read(torch.arange(1)).numpy()
    assert np.array_equal(record.cut.image, image)
    assert [(row.tokens, row.grid, row.patch) for row in record.points] == [
        (1 + side * side, (side, side), (32 // side, 32 // side)) for side in (16, 8, 4, 2)
    ]
    assert (run.folder / "figures" / "cuts.png").is_file()


@pytest.mark.slow
def test_the_kind_of_windows_compares_equal_sizes_and_shows_how_far_they_see(tmp_path):
    record = read_folder(made(tmp_path / "swin", "swin"))
    points = {row.label: row for row in record.points}
    assert list(points) == ["vit", "swin", "swin-no-shift", "cnn"]
    parameters = [row.parameters for row in points.values()]
    assert max(parameters) < 1.04 * min(parameters)
    assert points["swin"].flops == points["swin-no-shift"].flops
    seen = {label: [row.seen for row in record.receptive_fields if row.model == label] for label in points}
    assert seen["vit"] == [1.0] * 4
    assert seen["swin"][:2] == [8 * 8 / 32**2, 16 * 16 / 32**2]
    assert seen["swin-no-shift"][:2] == [8 * 8 / 32**2] * 2
