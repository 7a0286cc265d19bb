"""Statistics over training are those that the functions give for each of the kept weights, on the same images."""

import json
from contextlib import nullcontext
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.kit.making import CLASSES, digits, save, untrained
from tests.kit.simulated_processes import run_in_processes
from vitlens import load, statistics
from vitlens.commands.run.options import RunOptions
from vitlens.commands.run.publish import read_folder
from vitlens.commands.stats import measure as training
from vitlens.commands.stats.options import StatsOptions
from vitlens.commands.stats.record import StatsRecord
from vitlens.errors import InputError
from vitlens.files import write_text
from vitlens.processes import Processes
from vitlens.training.checkpoint import keep_weights
from vitlens.training.metrics import METRICS_FILE, EpochMetrics

OPTIONS = RunOptions(device="cpu", limit=12, batch_size=5, quiet=True)


def taught(seed: int, *, patch_size: tuple[int, int] = (8, 8)):
    shape = {"dim": 16, "depth": 2, "heads": 2, "patch_size": list(patch_size)}
    return untrained("vit-mini", classes=CLASSES, seed=seed, overrides=shape)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that kept its weights before training and after epochs 2 and 4, of 5."""
    folder = tmp_path_factory.mktemp("runs") / "taught"
    for epochs in (0, 2, 4):
        keep_weights(folder, taught(epochs), epochs=epochs)
    save(taught(5), folder / "model.safetensors")
    lines = [EpochMetrics(epoch, epoch + 1, 8, 1e-3, 1.0, 0.5, None, None, 1.0, 8.0) for epoch in range(5)]
    write_text(folder / METRICS_FILE, "".join(json.dumps(asdict(line)) + "\n" for line in lines))
    return folder


@pytest.fixture(scope="module")
def record(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> StatsRecord:
    return run(trained, tmp_path_factory.mktemp("reports") / "out")


def run(folder: Path, out: Path, **changes: object) -> StatsRecord:
    given = {"data": "digits", "over_training": True, "run": replace(OPTIONS, out=out), **changes}
    assert training.measure(StatsOptions(str(folder), **given)) == out / "report.md"
    return read_folder(out)


def test_numbers_are_those_of_the_function_at_every_checkpoint(trained, record):
    (batch,) = digits("test").limit(12).batches(12)
    files = {epochs: trained / "kept" / f"epoch-{epochs:04}.safetensors" for epochs in (0, 2, 4)}
    files[5] = trained / "model.safetensors"
    assert [row.epochs for row in record.learning] == [0, 2, 4, 5]
    rows = {(row.epochs, row.layer, row.head): row.statistics for row in record.learning_heads}
    assert len(rows) == 4 * 2 * 2
    for epochs, file in files.items():
        table = statistics(load(str(file)), batch.images)
        for name in ("distance", "normalised_entropy", "cls_normalised_entropy"):
            expected = getattr(table, name)
            for layer, head in product(range(2), range(2)):
                assert rows[epochs, layer, head][name] == pytest.approx(expected[layer, head].item(), rel=1e-5)
            mean = record.metric(f"learning/taught/{name}/{epochs}")
            assert mean.value == pytest.approx(expected.mean().item(), rel=1e-5)
            assert mean.low < mean.value < mean.high
            assert mean.n == 12
    assert rows[0, 0, 0]["distance"] != rows[5, 0, 0]["distance"]
    drawn = {path.stem for path in (record.folder / "figures").glob("learning_*.png")}
    assert {"learning_distance", "learning_normalised_entropy"} <= drawn


def test_few_checkpoints_on_the_same_few_images(trained, monkeypatch, tmp_path):
    monkeypatch.setattr(training, "IMAGES", 4)
    monkeypatch.setattr(training, "CHECKPOINTS", 2)
    record = run(trained, tmp_path / "out")
    assert [row.epochs for row in record.learning] == [0, 5]
    (batch,) = digits("test").limit(12).limit(4).batches(4)
    table = statistics(load(str(trained)), batch.images)
    found = record.learning[1].statistics["distance"]
    assert (found.value, found.n) == (pytest.approx(table.distance.mean().item(), rel=1e-5), 4)


def test_two_processes_find_what_one_does(trained, monkeypatch):
    def work(processes: Processes) -> torch.Tensor:
        part = SimpleNamespace(
            processes=processes, run=OPTIONS, split=digits("test").limit(7), aliases=("taught",),
            numbers=lambda batch: processes.index + batch.indices * processes.count,
            progress=lambda *_: nullcontext(lambda _: None),
        )  # fmt: skip
        weights = training.kept_weights(str(trained))
        heads = training.over_training(weights, part, renormalise=True)["learning_heads"]
        return torch.tensor([row.statistics["normalised_entropy"] for row in heads])

    (alone,), (first, second) = (run_in_processes(count, work, monkeypatch) for count in (1, 2))
    torch.testing.assert_close(first, alone, rtol=1e-6, atol=1e-9)
    assert torch.equal(first, second)


def test_refusals_come_before_the_folder(trained, tiny_vit, tmp_path):
    options = StatsOptions("", "digits", run=replace(OPTIONS, out=tmp_path / "out"))
    for model, message in (
        (str(tiny_vit), "found none kept in .*; train one with vitlens train PRESET --keep-every N"),
        ("vit-digits", "found none kept in vit-digits"),
    ):
        with pytest.raises(InputError, match=message):
            training.measure(replace(options, model=model, over_training=True))
    assert not (tmp_path / "out").exists()
