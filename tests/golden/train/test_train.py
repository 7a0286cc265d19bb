"""The folder of a training: complete, loadable, resumable with equal weights, and marked where it was stopped."""

import json
import os
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

import vitlens
from tests.kit.training_runs import interrupted, train
from tests.kit.waiting import interrupt, interruptible
from vitlens import load_data
from vitlens.commands.run.folder import RunFolder
from vitlens.commands.run.options import RunOptions
from vitlens.commands.run.progress import progress_line
from vitlens.commands.run.publish import read_folder, report
from vitlens.commands.train.options import Tuning
from vitlens.errors import InputError, OutputError
from vitlens.training.metrics import Progress

TINY = {"dim": 8, "depth": 1, "heads": 2, "patch_size": [8, 8], "dropout": 0.1, "pooling": "mean"}
OPTIONS = RunOptions(device="cpu", limit=40, batch_size=10, quiet=True)


def tiny(out: Path, **changes: object) -> Path | None:
    return train("vit-micro", recipe={"epochs": 3}, shape=TINY, options=replace(OPTIONS, out=out), **changes)


@pytest.fixture(scope="module")
def trained(golden) -> Path:
    return golden("train").folder


def test_the_folder_is_whole_and_a_model_with_the_accuracy_that_it_says(trained):
    files = {str(path.relative_to(trained)) for path in trained.rglob("*") if path.is_file()}
    figures = {f"figures/{name}.png" for name in ("training", "loss", "confusion", "first_batch")}
    assert files >= {"config.json", "metrics.jsonl", "model.safetensors", "tables/history.csv", *figures}
    found, model = vitlens.read(trained), vitlens.load(str(trained))
    assert found.status == "done"
    split = load_data("digits", part="test").limit(40)
    predictions = model(split.source.read(torch.arange(len(split))).float() / 255).argmax(1)
    correct = predictions == split.labels
    assert found.metrics["accuracy/vit-micro"].value == pytest.approx(correct.float().mean().item())
    for row in found.table("per_class"):
        own = correct[split.labels == split.classes.index(row.class_name)]
        assert (row.n, row.accuracy.value) == (len(own), pytest.approx(own.float().mean().item()))
    counts = {(row.truth, row.prediction): row.count for row in found.table("confusion")}
    pairs = [(split.classes[t], model.classes[p]) for t, p in zip(split.labels, predictions)]
    assert counts == {pair: pairs.count(pair) for pair in pairs}
    assert model.parameter_count() < 10_000
    assert model.architecture["overrides"] == TINY
    assert {part.p for part in model.modules() if isinstance(part, torch.nn.Dropout)} == {0.1}


def test_metrics_are_those_of_the_epochs(trained):
    found = vitlens.read(trained)
    lines = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    assert [asdict(row) for row in found.table("history")] == lines
    assert len(lines) == 3
    tests = [line["test_accuracy"] for line in lines]
    metrics = {name.partition("/")[0]: number.value for name, number in found.metrics.items()}
    assert metrics["best_accuracy"] == max(tests)
    assert metrics["last_epochs_gain"] == pytest.approx(100 * (tests[-1] - tests[-2]))
    gap = round(lines[-1]["train_accuracy"] * 40) / 40 - metrics["accuracy"]
    assert metrics["generalisation_gap"] == pytest.approx(100 * gap)
    assert metrics["training_seconds"] >= lines[-1]["seconds"]


def test_the_first_batch_is_drawn_where_images_are_augmented(tmp_path):
    plain = {"epochs": 1, "crop_padding": 0}
    train("vit-micro", recipe=plain, shape=TINY, options=replace(OPTIONS, out=tmp_path / "plain"))
    assert not (tmp_path / "plain" / "figures" / "first_batch.png").exists()
    changes = {"epochs": 1, "cutmix": 1, "crop_padding": 4}
    train("vit-micro", recipe=changes, shape=TINY, options=replace(OPTIONS, out=tmp_path / "out"))
    record = read_folder(tmp_path / "out")
    arrays, (row,) = record.first_batch, record.setup
    assert arrays.given.shape == arrays.trained.shape == (10, 3, 32, 32)
    assert not (arrays.given == arrays.trained).all()
    assert arrays.targets.sum(axis=1) == pytest.approx(1.0)
    assert (row.augmentation, row.shown) == ("crop 4 px, CutMix 1.0", 10)
    assert row.mixed == ((arrays.targets > 0).sum(axis=1) == 2).sum()
    assert record.scores[0].gap is None  # mixed images say nothing of overfitting


def test_a_stopped_run_says_so_and_resumes_to_the_same_weights_with_those_that_are_kept(trained, tmp_path):
    assert not (trained / "kept").exists()
    assert read_folder(trained).setup[0].keep_every is None
    folder = tmp_path / "stopped"
    with interrupted(lambda _, progress: progress.step >= 5):
        tiny(folder, keep_every=2)
    assert read_folder(folder).status == "interrupted"
    assert not (folder / "report.md").exists()
    assert "was interrupted" in report(folder).read_text()
    with pytest.raises(InputError, match="with its keep_every, 2, found 1; leave it out"):
        train(None, resume=folder, keep_every=1, options=OPTIONS)
    # what decides the result comes from the folder, not from what is typed now
    train(None, resume=folder, options=RunOptions(device="cpu", quiet=True, seed=7))
    assert read_folder(folder).status == "done"
    assert (folder / "model.safetensors").read_bytes() == (trained / "model.safetensors").read_bytes()
    names = ["epoch-0000.safetensors", "epoch-0002.safetensors"]
    assert sorted(path.name for path in (folder / "kept").iterdir()) == names
    assert read_folder(folder).setup[0].keep_every == 2
    RunFolder.opened("train", RunOptions(out=folder, overwrite=True))
    assert not list((folder / "kept").iterdir())


NAN, FROZEN = float("nan"), {"tuning": Tuning(freeze=True)}
REFUSED = (  # what is said, in the order of the words; the model; fields of the options
    ("did you mean 'vit-micro'", "vit-mico", {}),
    ("did you mean 'digits'", "vit-micro", {"data": "digts"}),
    ("dim divisible by heads", "vit-micro", {"shape": {"heads": 3}}),
    ("--epochs at least 1", "vit-micro", {"recipe": {"epochs": 0}}),
    ("--keep-every at least 1, found 0", "vit-micro", {"keep_every": 0}),
    ("expected a preset to train, found none", None, {}),
    ("--dropout for resnet20.* found 0.1", "resnet20", {"shape": {"dropout": 0.1}}),
    ("--pooling.* resnet20", "resnet20", {"shape": {"pooling": "mean"}}),
    ("--pooling.* swin-micro", "swin-micro", {"shape": {"pooling": "cls"}}),
    ("dropout.* nan", "vit-micro", {"shape": {"dropout": NAN}}),
    ("dropout.* -0.1", "swin-micro", {"shape": {"dropout": -0.1}}),
    ("found --dropout for vit-digits; leave it out", "vit-digits", {"shape": {"dropout": 0.1}}),
    ("--train-last from 1 to 2, the blocks of learned, found 3", "{learned}", {"tuning": Tuning(last=3)}),
    ("found --dim for .*; leave it out", "{learned}", {"shape": {"dim": 8}}),
    ("'vit-mini': its weights are random", "vit-mini", FROZEN),
    ("with flip; add --cached-views 4", "{learned}", {**FROZEN, "recipe": {"flip": True}}),
    ("found both", None, {"resume": "{trained}"}),
    ("expected the folder of a run", None, {"resume": "{empty}", "options": OPTIONS}),
    ("its model, vit-micro, found vit-tiny; leave it out", "vit-tiny", {"resume": "{trained}", "options": OPTIONS}),
)


@pytest.mark.parametrize(("says", "model", "settings"), REFUSED)
def test_what_cannot_be_is_refused_in_one_line_before_anything_is_written(
    trained, learned, tmp_path, says, model, settings
):
    places = {"trained": trained, "learned": learned, "empty": tmp_path}
    given = {"options": replace(OPTIONS, out=tmp_path / "out"), "data": None if "resume" in settings else "digits"}
    given |= {name: Path(value.format(**places)) if name == "resume" else value for name, value in settings.items()}
    with pytest.raises(InputError, match=says) as caught:
        train(model and model.format(**places), **given)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_there_is_not_touched(trained):
    before = (trained / "results.json").read_bytes()
    with pytest.raises(OutputError, match="--overwrite"):
        tiny(trained)
    assert (trained / "results.json").read_bytes() == before


def test_progress_in_one_line():
    line = progress_line(Progress(2, 20, 5, 10, 0.5124, 0.841, 0.902, 1240.4, 102.2))
    assert line == "epoch 3/20, loss 0.512, accuracy 84.1 %, test 90.2 %, 1,240 images/s, 1:42 left"
    assert "test" not in progress_line(Progress(0, 1, 1, 1, 0.5, 0.5, None, 1.0, 0.0))


@pytest.mark.slow  # the status is shown above, the exit code and its line in tests/public/cli/test_main.py
@pytest.mark.skipif(sys.platform == "win32", reason="sends SIGINT, which Windows has not")
def test_ctrl_c_leaves_with_130_one_line_and_an_interrupted_folder(tmp_path):
    folder = tmp_path / "stopped"
    small = ["--dim", "16", "--depth", "1", "--heads", "1"]
    words = ["train", "vit-micro", *small, "--device", "cpu", "--epochs", "9999", "--limit", "40", "--out", str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "vitlens", *words]
    with interruptible(command, env=environment) as child:
        shown = interrupt(child, (folder / "metrics.jsonl").exists)
    assert child.returncode == 130, shown
    assert shown.splitlines()[-1].startswith("error: interrupted")
    assert "Traceback" not in shown
    assert read_folder(folder).status == "interrupted"
