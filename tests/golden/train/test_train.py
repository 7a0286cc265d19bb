"""The folder of a training: complete, loadable, resumable, and marked where it was stopped."""

import json
from dataclasses import asdict

import numpy as np
import pytest
import torch
from PIL import Image

import vitlens
from tests.kit.commands import figures, gone_on, impatient, ran, refusal, written_digits
from tests.kit.training_runs import interrupted
from vitlens import load_data
from vitlens.cli.main import run

SHAPE = "--dim 8 --depth 1 --heads 2 --patch-size 8"
LINE = f"train vit-micro --data digits --limit 40 --batch-size 10 {SHAPE}"
GOLDEN = f"{LINE} --epochs 3 --dropout 0.1 --pooling mean"  # as the golden run


@pytest.fixture(scope="module")
def trained(golden):
    return golden("train").folder


def test_the_folder_is_whole_and_a_model_with_the_accuracy_that_it_says(trained):
    files = {str(path.relative_to(trained)) for path in trained.rglob("*") if path.is_file()}
    assert files >= {"config.json", "metrics.jsonl", "model.safetensors", "tables/history.csv"}
    assert not (trained / "kept").exists()
    record = vitlens.read(trained)
    model = vitlens.load(str(trained))
    assert figures(record) >= {"training", "loss", "confusion", "first_batch"}
    assert record.status == "done"
    split = load_data("digits", part="test").limit(40)
    predictions = model(next(split.batches(40)).images).argmax(1)
    correct = predictions == split.labels
    assert record.metrics["accuracy/vit-micro"].value == pytest.approx(
        correct.float().mean().item()
    )
    for row in record.table("per_class"):
        of_class = correct[split.labels == split.classes.index(row.class_name)]
        assert (row.n, row.accuracy.value) == (
            len(of_class),
            pytest.approx(of_class.float().mean().item()),
        )
    counts = {(row.truth, row.prediction): row.count for row in record.table("confusion")}
    pairs = [(split.classes[t], model.classes[p]) for t, p in zip(split.labels, predictions)]
    assert counts == {pair: pairs.count(pair) for pair in pairs}
    assert model.architecture["overrides"] == {
        "dim": 8,
        "depth": 1,
        "heads": 2,
        "patch_size": [8, 8],
        "dropout": 0.1,
        "pooling": "mean",
    }
    assert {part.p for part in model.modules() if isinstance(part, torch.nn.Dropout)} == {0.1}


def test_metrics_are_those_of_the_epochs(trained):
    record = vitlens.read(trained)
    lines = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    assert [asdict(row) for row in record.table("history")] == lines
    assert len(lines) == 3
    tests = [line["test_accuracy"] for line in lines]
    metrics = {name.partition("/")[0]: number.value for name, number in record.metrics.items()}
    assert metrics["best_accuracy"] == max(tests)
    assert metrics["last_epochs_gain"] == pytest.approx(100 * (tests[-1] - tests[-2]))
    gap = round(lines[-1]["train_accuracy"] * 40) / 40 - metrics["accuracy"]
    assert metrics["generalisation_gap"] == pytest.approx(100 * gap)
    assert metrics["training_seconds"] >= lines[-1]["seconds"]


def test_the_schedule_is_the_learning_rate_of_every_update(trained):
    record = vitlens.read(trained)
    rates = {row.epochs: row.learning_rate for row in record.table("schedule")}
    assert "schedule" in figures(record)
    history = record.table("history")
    assert len(rates) == history[-1].step
    for metrics in history:
        assert rates[metrics.epoch + 1] == pytest.approx(metrics.learning_rate)


def test_settings_that_differ_from_the_recipe_come_first(tmp_path):
    record = ran(tmp_path / "out", f"{LINE} --epochs 1 --set mixup=0.3")
    settings = [row.setting for row in record.recipe]
    assert set(settings[:3]) == {"epochs", "batch_size", "mixup"}
    assert len(settings) == len(set(settings)) > 20


def test_a_stopped_run_says_so_and_resumes_to_the_same_weights_with_those_that_are_kept(
    trained, tmp_path, capsys
):
    folder = tmp_path / "stopped"
    with interrupted(lambda _, progress: progress.step >= 5):
        assert ran(folder, f"{GOLDEN} --keep-every 2", code=130).status == "interrupted"
    assert not (folder / "report.md").exists()
    assert run(["report", str(folder)]) == 0
    assert "was interrupted" in (folder / "report.md").read_text()
    again = f"--resume {folder} --device cpu --quiet"
    assert "with its keep_every, 2, found 1" in refusal(capsys, f"train {again} --keep-every 1")
    assert "found both" in refusal(capsys, f"train {again} --out {tmp_path}")
    assert "its model, vit-micro, found vit-tiny" in refusal(capsys, f"train vit-tiny {again}")
    # what decides the result comes from the folder, not from what is typed now
    record = gone_on(folder, "train --seed 7")
    assert (record.status, record.setup[0].keep_every) == ("done", 2)
    assert (folder / "model.safetensors").read_bytes() == (
        trained / "model.safetensors"
    ).read_bytes()
    names = ["epoch-0000.safetensors", "epoch-0002.safetensors"]
    assert sorted(path.name for path in (folder / "kept").iterdir()) == names
    ran(folder, f"{GOLDEN} --overwrite --epochs 1")
    assert not [*folder.glob("kept/*")]


@pytest.mark.parametrize("part", ["train", "test"])
def test_a_run_is_not_resumed_on_other_images_and_its_record_of_them_only_grows(
    part, tmp_path, capsys
):
    data = tmp_path / "data"
    folder = tmp_path / "stopped"
    places = ("train", "train", "test")
    written_digits(data, 60, lambda number, label: f"{places[number % 3]}/{label % 2}/{number}.png")
    with interrupted(lambda _, progress: progress.step >= 5):
        ran(folder, f"train vit-micro --data {data} --batch-size 5 --epochs 3 {SHAPE}", code=130)
    before = np.load(folder / "arrays" / "training_images.npz")["numbers"]
    assert vitlens.read(folder, unfinished=True).config.fingerprints.keys() >= {
        "train",
        "test",
        "train labels",
    }
    (changed, *_) = sorted((data / part).rglob("*.png"))
    content = changed.read_bytes()
    Image.new("RGB", (32, 32), "red").save(changed)
    again = f"train --resume {folder} --device cpu --quiet"
    assert f"the {part} images that the run in" in refusal(capsys, again)
    assert np.array_equal(np.load(folder / "arrays" / "training_images.npz")["numbers"], before)
    config = json.loads((folder / "config.json").read_text())
    # of an earlier version
    (folder / "config.json").write_text(json.dumps({**config, "fingerprints": {}}))
    assert f"the {part} images that the training in" in refusal(capsys, again)
    numbers = np.load(folder / "arrays" / "training_images.npz")["numbers"]
    assert np.isin(before, numbers).all()
    assert len(numbers) == len(before) + (part == "train")
    (folder / "config.json").write_text(json.dumps(config))
    changed.write_bytes(content)
    assert gone_on(folder, "train").status == "done"


def test_progress_is_told_by_epochs(tmp_path, capsys):
    with impatient():
        assert run([*f"{LINE} --epochs 2 --device cpu --out".split(), str(tmp_path / "out")]) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if "loss" in line]
    assert "epoch 1/2" in lines[0]
    for word in ("epoch 2/2", "test", "0:00 left"):
        assert word in lines[-1]


@pytest.mark.parametrize(("rate", "code"), [("0.01", 0), ("10", 1)])
def test_a_check_is_four_lines_and_an_exit_code(rate, code, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    line = (
        "train vit-micro --check --dim 16 --depth 2 --heads 2 --patch-size 8 --limit 100 "
        "--device cpu --quiet"
    )
    assert run([*line.split(), "--learning-rate", rate]) == code
    lines = capsys.readouterr().out.splitlines()
    names = [line.partition(":")[0][14:] for line in lines]
    assert names == ["initial loss", "gradient norms", "one batch", "learning rate"]
    assert {line.split()[0] for line in lines[:3]} == {"pass"}
    assert ("try --learning-rate 0.01" in lines[3]) == bool(code)
    assert not list(tmp_path.iterdir())


def test_only_the_head_of_a_trained_model_is_checked(capsys):
    line = "train vit-digits --check --freeze-backbone --limit 100 --device cpu --quiet"
    assert run(line.split()) == 0
    assert "gradient norms: a gradient in the one trained layer" in capsys.readouterr().out
