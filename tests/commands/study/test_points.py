"""Studies of points: the registry, every point, complete results, and resuming with equal results."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

import vitlens
from vitlens.analysis.cost.flops import vit_flops
from vitlens.analysis.cost.memory import saved_for_training
from vitlens.commands.run.options import ModelOptions, RunOptions
from vitlens.commands.run.progress.training import training_progress
from vitlens.commands.run.publish import read
from vitlens.commands.shared.receptive import FIELDS
from vitlens.commands.study.kinds import KINDS, Kind, Point
from vitlens.commands.study.measure import measure
from vitlens.commands.study.measure import trial as study_trial
from vitlens.commands.study.measure.trial import StudySetup, run_trial
from vitlens.commands.study.options import StudyOptions
from vitlens.commands.study.record import AGAINST_BEST, DESIGN, DIFFERENCE, DIFFERENCES, ComparisonRow
from vitlens.commands.study.record import POINTS as POINT_ROWS
from vitlens.commands.study.report import report
from vitlens.commands.study.report.differences import significant
from vitlens.data.digits import digits
from vitlens.errors import DataError, InputError, UnknownNameError
from vitlens.files import read_arrays, read_run
from vitlens.lens.layers import probe_images
from vitlens.models.vit_config import VIT_PRESETS
from vitlens.names import PRESETS
from vitlens.training.metrics import Progress, read_metrics

OPTIONS = RunOptions(device="cpu", limit=20, batch_size=10, quiet=True)
POINTS = {(p.preset, repr(p.shape)): (name, p) for name, kind in KINDS.items() for p in kind.points}


def study(models: Sequence[str], *, options: RunOptions, **more: object) -> Path:
    return measure(StudyOptions(tuple(models), run=options, **more))  # type: ignore[arg-type]


def pooling(**changes: object) -> Path:
    settings = {"kind": "pooling", "epochs": 2, "seeds": 2, **changes}
    return study([], **settings)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("studies") / "pooling"
    assert pooling(options=replace(OPTIONS, out=folder)) == folder / "report.html"
    return folder


def shape_of(point: Point) -> dict[str, object]:
    """A point's changes as a ViTConfig takes them."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in point.shape.items()}


def results(folder: Path) -> dict:
    return json.loads((folder / "results.json").read_text())


@pytest.mark.parametrize("name", KINDS)
def test_a_kind_is_well_formed(name):
    kind = KINDS[name]
    labels = [point.label for point in kind.points]
    assert len(set(labels)) == len(labels) >= 2
    assert len({point.words for point in kind.points}) == len(labels)
    for point in kind.points:
        assert point.preset in PRESETS
        assert point.label.replace("-", "").isalnum()  # it names a folder
        assert point.against in ("", *labels)
        assert (point.place is not None) == bool(kind.axis)


def test_each_point_of_the_architecture_differs_in_one_thing_from_the_one_that_it_changes():
    base, kind = VIT_PRESETS["vit-mini"], KINDS["architecture"]
    configs = {point.label: replace(base, **shape_of(point)) for point in kind.points}
    changed = [
        {name for name, value in vars(configs[one]).items() if value != getattr(configs[other], name)}
        for one, other in kind.changes
    ]
    assert changed == [
        {"attention", "mlp", "heads"}, {"heads"}, {"residual"}, {"norm"}, {"mlp"}, {"norm_first"}, {"depth"}, {"depth"},
        {"depth"},
    ]  # fmt: skip
    assert kind.changes[5:7] == (("post-norm", "mlp"), ("depth-2", "mlp"))  # depth builds on the pre-norm block
    assert not configs["no-attention"].attention
    assert [config.depth for config in configs.values()][5:] == [1, 1, 2, 4, 6]
    assert {config.pooling for config in configs.values()} == {"mean"}
    assert [label for label, config in configs.items() if not config.norm_first] == ["post-norm"]


def test_without_variants_each_point_changes_the_one_before():
    points = tuple(Point(label, label) for label in ("a", "b", "c"))
    assert Kind("three", points, steps=True).changes == tuple((one, other) for other, one in pairwise("abc"))
    both = (*points, replace(points[0], label="d", variant=True), replace(points[0], label="e", variant=True))
    assert Kind("five", both, steps=True).changes[2:] == (("d", "c"), ("e", "c"))


@pytest.mark.parametrize(
    "key",
    [
        pytest.param(key, id=f"{kind}-{point.label}", marks=pytest.mark.slow if point.label == "vit-tiny" else ())
        for key, (kind, point, *_) in POINTS.items()
    ],
)
def test_every_point_is_built_and_does_a_step(key, tmp_path):
    point = replace(POINTS[key][1], share=None)
    train, test = (digits(part).limit(10) for part in ("train", "test"))
    setup = StudySetup((point,), "digits", train, test, 1, None, torch.device("cpu"), OPTIONS)
    telling = training_progress("one step", quiet=True)
    trial = run_trial(setup, point, tmp_path, seed=0, resume=False, progress=telling)
    assert (trial.steps, trial.train_images, len(trial.correct)) == (1, 10, 10)
    before = dict(setup.model(point, seed=0).module.named_parameters())
    after = dict(vitlens.load(str(tmp_path)).module.named_parameters())
    assert before.keys() == after.keys()
    assert any(not torch.equal(before[name], after[name]) for name in before)
    assert trial.parameters == sum(value.numel() for value in before.values())
    if point.preset in VIT_PRESETS:
        config = replace(VIT_PRESETS[point.preset], **shape_of(point))
        assert trial.flops == sum(vit_flops(config).values())


def test_the_folder_of_a_study_is_whole(done):
    written = results(done)
    assert written["status"] == "done"
    assert [row["label"] for row in written["tables"]["points"]] == ["cls", "mean"]
    assert [(row["label"], row["seed"]) for row in written["tables"]["trials"]] == [
        ("cls", 0), ("cls", 1), ("mean", 0), ("mean", 1)
    ]  # fmt: skip
    stored = read_arrays(done / "arrays" / "correct.npz")
    correct = {"cls": stored["correct0"], "mean": stored["correct1"]}
    for label in ("cls", "mean"):
        assert correct[label].shape == (2, 20)
        assert written["metrics"][f"accuracy/{label}"]["value"] == pytest.approx(correct[label].mean())
    lost = 100 * (correct["mean"].mean() - correct["cls"].mean())
    assert written["metrics"]["difference/mean/cls"]["value"] == pytest.approx(lost)
    text = (done / "report.md").read_text()
    (design,) = read(read_run(done)).rows(DESIGN)
    assert (design.seeds, design.epochs, design.train_images) == (2, 2, 20)
    assert {row["steps"] for row in written["tables"]["points"]} == {4}
    assert "](figures/points.png)" in text


def test_a_trial_is_a_model_with_the_recorded_accuracy(done):
    model = vitlens.load(str(done / "points" / "mean" / "seed-1"))
    split = digits("test").limit(20)
    right = model(split.source.read(torch.arange(20)).float() / 255).argmax(1) == split.labels
    assert read_arrays(done / "arrays" / "correct.npz")["correct1"][1].tolist() == right.tolist()
    left = {path.name for path in (done / "points" / "mean" / "seed-1").iterdir()}
    assert left == {"metrics.jsonl", "model.safetensors", "result.npz"}  # no checkpoint, no second copy of the weights


def stop_in(trial: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Stop the trial of that number (from 1) in its second epoch; the list counts the trainings that were begun."""
    fit, begun = study_trial.fit, []

    def interrupted(*args: object, on_progress: Callable[[Progress], None], **options: object) -> object:
        begun.append(1)

        def tell(progress: Progress) -> None:
            if len(begun) == trial and progress.epoch == 1:
                raise KeyboardInterrupt
            on_progress(progress)

        return fit(*args, on_progress=tell, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(study_trial, "fit", interrupted)
    return begun


@pytest.mark.slow
def test_a_stopped_study_goes_on_and_finds_the_same(done, tmp_path, monkeypatch):
    folder = tmp_path / "stopped"
    with monkeypatch.context() as patch:
        stop_in(3, patch)
        with pytest.raises(KeyboardInterrupt):
            pooling(options=replace(OPTIONS, out=folder))
    assert results(folder)["status"] == "interrupted"
    assert not (folder / "report.md").exists()
    stopped = folder / "points" / "mean" / "seed-0"
    assert read_metrics(stopped)  # an epoch was through
    assert (stopped / "checkpoint").is_dir()
    assert not (stopped / "result.npz").exists()
    (stopped / ".model-0123abcd.safetensors").touch()  # as a kill while writing leaves it
    earlier = (folder / "points" / "cls" / "seed-1" / "result.npz").stat().st_mtime_ns
    begun = stop_in(99, monkeypatch)
    study([], resume=folder, options=RunOptions(device="cpu", quiet=True, seed=7))
    assert len(begun) == 2  # the stopped one and the one that had not begun
    assert (folder / "points" / "cls" / "seed-1" / "result.npz").stat().st_mtime_ns == earlier
    assert results(folder)["status"] == "done"
    assert not list(folder.rglob(".*"))
    for name in ("arrays/correct.npz", "points/mean/seed-0/model.safetensors"):
        assert (folder / name).read_bytes() == (done / name).read_bytes()
    for name, metric in results(done)["metrics"].items():
        assert results(folder)["metrics"][name] == metric


def test_a_whole_study_is_not_trained_again(done, monkeypatch):
    before = (done / "arrays" / "correct.npz").read_bytes()
    begun = stop_in(99, monkeypatch)
    assert study([], resume=done, options=OPTIONS) == done / "report.html"
    assert not begun
    assert (done / "arrays" / "correct.npz").read_bytes() == before


def test_overwriting_takes_earlier_results_away(done, tmp_path):
    folder = tmp_path / "again"
    pooling(epochs=1, seeds=1, options=replace(OPTIONS, out=folder))
    assert read(read_run(folder)).rows(DESIGN)[0].seeds == 1
    from vitlens.commands.run.folder import RunFolder

    RunFolder.create("study", out=folder, overwrite=True)
    assert not [path for path in folder.glob("points/**/*") if path.is_file()]


def test_shares_are_of_the_data_and_steps_are_equal(tmp_path):
    point = next(point for point in KINDS["data"].points if point.label == "vit-25")
    train, test = digits("train").limit(40), digits("test").limit(10)
    setup = StudySetup(KINDS["data"].points, "digits", train, test, 2, None, torch.device("cpu"), OPTIONS)
    progress = training_progress("a share", quiet=True)
    trial = run_trial(setup, point, tmp_path, seed=0, resume=False, progress=progress)
    assert (trial.steps, trial.train_images) == (8, 10)


@pytest.mark.parametrize(
    ("images", "batch_size", "expected"),
    [
        (10_000, None, {"vit": (128, 1.414e-3), "cnn": (128, 3e-3)}),  # the CNN's own size: the ViT's recipe has 256
        (10_000, 64, {"vit": (64, 2e-3), "cnn": (64, 3e-3)}),  # of the user: the learning rates stay
        (2_000, None, {"vit": (128, 1.414e-3), "cnn": (128, 3e-3)}),
        (200, None, {"vit": (16, 5e-4), "cnn": (16, 1.061e-3)}),  # 10 steps an epoch, from 256 and from 128
    ],
)
def test_all_points_have_one_batch_size_though_their_presets_differ(images, batch_size, expected):
    train, test = (digits(part).limit(10) for part in ("train", "test"))
    several = train.pick(torch.arange(images) % len(train))
    options = replace(OPTIONS, batch_size=batch_size)
    setup = StudySetup(KINDS["swin"].points, "elsewhere", several, test, 8, None, torch.device("cpu"), options)
    recipes = {point.label: setup.recipe(point) for point in KINDS["swin"].points}
    assert {recipe.batch_size for recipe in recipes.values()} == {expected["vit"][0]}
    for label, (size, rate) in expected.items():
        assert (recipes[label].batch_size, recipes[label].learning_rate) == (size, pytest.approx(rate, rel=1e-3))
    assert recipes["swin"] == recipes["swin-no-shift"]


def refuses(match: str, error: type[Exception] = InputError, **changes: object) -> None:
    out = changes["options"].out if "options" in changes else None  # type: ignore[attr-defined]
    with pytest.raises(error, match=match):
        pooling(**{"options": OPTIONS, **changes})
    assert out is None or not out.exists()


def test_wrong_calls_are_refused_before_anything_is_written(tmp_path, done):
    out = replace(OPTIONS, out=tmp_path / "out")
    refuses("did you mean 'pooling'", UnknownNameError, kind="poolin", options=out)
    refuses("--seeds of at least 1, found 0", seeds=0, options=out)
    refuses("--epochs at least 1", epochs=0, options=out)
    refuses("did you mean 'digits'", UnknownNameError, data="digts", options=out)
    refuses("expected no --weights with --kind pooling", model_options=ModelOptions(weights=Path("w.pth")), options=out)
    sized = ModelOptions(image_size=(36, 36))
    refuses("'patch 8 px' cannot be built: .* found 36 and 8 px", kind="patch-size", model_options=sized, options=out)
    refuses("an image of each of 10 classes in 5%", DataError, kind="data", options=out)
    with pytest.raises(
        InputError, match="expected no MODEL with --kind pooling, whose points are fixed, found vit-tiny"
    ):
        study(["vit-tiny"], kind="pooling", options=out)
    with pytest.raises(InputError, match="expected --kind with --seeds 2"):
        study([], seeds=2, options=out)
    refuses("found both", resume=done, options=out)
    refuses("with its kind, pooling, found size; leave it out", resume=done, kind="size")
    refuses("with its epochs, 2, found 5; leave it out", resume=done, epochs=5)
    refuses("expected the folder of a run", resume=tmp_path)


def test_another_study_is_not_resumed_as_one_of_points(done, tmp_path, monkeypatch):
    from vitlens.commands.run.folder import RunFolder

    whole = tmp_path / "whole"
    RunFolder.create("study", out=whole, config={"plan": {}})
    refuses("folder of vitlens study --kind to resume", resume=whole)
    config = json.loads((done / "config.json").read_text())
    other = tmp_path / "other"
    RunFolder.create("study", out=other, config={**config, "points": config["points"][:1]})
    refuses("expected the points that", resume=other)
    old = tmp_path / "old"
    recipes = {name: {**recipe, "batch_size": 7} for name, recipe in config["recipes"].items()}
    RunFolder.create("study", out=old, config={**config, "recipes": recipes})
    refuses("expected the recipes that the run began with", resume=old)


def test_results_about_other_images_are_refused(done, tmp_path):
    train, test = (digits(part).limit(10) for part in ("train", "test"))
    setup = StudySetup(KINDS["pooling"].points, "digits", train, test, 1, None, torch.device("cpu"), OPTIONS)
    with pytest.raises(InputError, match=r"expected the 20 test images of .* found 10"):
        run_trial(
            setup, KINDS["pooling"].points[0], done / "points" / "cls" / "seed-0", seed=0, resume=True,
            progress=training_progress("none", quiet=True),
        )  # fmt: skip
    assert np.isfinite(results(done)["seconds"])


@pytest.mark.parametrize(
    ("p", "sure"), [((0.42,), 0), ((0.04,), 1), ((0.42, 0.06), 0), ((0.42, 0.001), 1), ((0.05, 0.05), 2)]
)
def test_a_comparison_is_significant_by_its_corrected_p_alone(p, sure):
    rows = [ComparisonRow(str(index), "first", value, value) for index, value in enumerate(p)]
    assert [row.p_holm for row in significant(rows)] == [value for value in p if value <= 0.05]
    assert len(significant(rows)) == sure


def test_the_sentence_on_a_difference_agrees_with_its_p(done):
    record = read(read_run(done))
    (row,) = record.rows(DIFFERENCES)
    assert record.metric(DIFFERENCE(model=row.label, against=row.against)).unit == "points"
    [section] = [section for section in report(record).sections if section.title == "Differences"]
    assert section.sentences[0].rows == (row,)
    assert section.sentences[0].text.startswith("1 of 1" if significant([row]) else "None of 1")


@pytest.mark.slow
def test_the_kind_of_windows_compares_equal_sizes_and_shows_how_far_they_see(tmp_path):
    out = tmp_path / "swin"
    study([], options=replace(OPTIONS, out=out), kind="swin", epochs=1, seeds=1)
    record = read(read_run(out))
    points = {row.label: row for row in record.rows(POINT_ROWS)}
    assert list(points) == ["vit", "swin", "swin-no-shift", "cnn"]
    parameters = [row.parameters for row in points.values()]
    assert max(parameters) < 1.04 * min(parameters)
    assert points["swin"].parameters == points["swin-no-shift"].parameters
    assert points["swin"].flops == points["swin-no-shift"].flops
    for row in points.values():
        model = vitlens.load(str(out / "points" / row.label / "seed-0"))
        assert row.training_bytes == saved_for_training(model, probe_images(model, 2)) // 2
    (design,) = record.rows(DESIGN)
    assert design.image_size == (32, 32)
    assert len(record.rows(AGAINST_BEST)) == 3
    seen = {label: [row.seen for row in record.rows(FIELDS) if row.model == label] for label in points}
    assert seen["vit"] == [1.0] * 4
    assert seen["swin"][:2] == [8 * 8 / 32**2, 16 * 16 / 32**2]
    assert seen["swin-no-shift"][:2] == [8 * 8 / 32**2] * 2
    assert report(record).sections[1].title == "Recommendation"
