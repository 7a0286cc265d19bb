from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.first_page import check_first_page
from vitlens.commands.evaluate.measure import measure
from vitlens.commands.evaluate.options import EvaluateOptions
from vitlens.commands.evaluate.report import REPORT
from vitlens.commands.run.options import ModelOptions, RunOptions
from vitlens.commands.run.publish import read, report
from vitlens.data.cue_conflict import imagenet16
from vitlens.errors import InputError, ModelError, NonFiniteError
from vitlens.files import read_run
from vitlens.labels import imagenet_classes
from vitlens.models.loading import untrained
from vitlens.models.saved import save

DIGITS = tuple("0123456789")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Two untrained models of digits, as files that vitlens reads."""
    folder = tmp_path_factory.mktemp("models")
    overrides = {"vit": {"dim": 16, "depth": 2, "heads": 2}, "cnn": None}
    for alias, preset in (("vit", "vit-micro"), ("cnn", "resnet20")):
        save(untrained(preset, classes=DIGITS, overrides=overrides[alias]), folder / f"{alias}.safetensors")
    return {alias: f"{alias}={folder / alias}.safetensors" for alias in overrides}


def evaluate(models: list[str], *, options: RunOptions, **more: object) -> Path | None:
    return measure(EvaluateOptions(tuple(models), run=options, **more))  # type: ignore[arg-type]


def options(out: Path, **more: object) -> RunOptions:
    return RunOptions(device="cpu", out=out, quiet=True, limit=40, command="vitlens evaluate vit", **more)  # type: ignore[arg-type]


def test_one_model_leaves_a_complete_folder(models: dict[str, str], tmp_path: Path) -> None:
    path = evaluate([models["vit"]], data="digits", options=options(tmp_path / "run"))
    assert path == tmp_path / "run" / "report.md"
    run = read_run(tmp_path / "run")
    record = read(run)
    assert record.status == "done"
    metrics = record.metrics
    assert metrics.keys() == {
        f"{word}/vit" for word in ("accuracy", "cross_entropy", "calibration_error", "confidence_gap")
    }
    arrays = record.predictions["vit"]
    right = (arrays.prediction == arrays.label).mean()
    assert metrics["accuracy/vit"].value == right
    assert metrics["accuracy/vit"].low < right < metrics["accuracy/vit"].high
    assert metrics["accuracy/vit"].n == 40
    assert sum(row.n for row in record.per_class) == sum(row.count for row in record.confusion) == 40
    assert sum(row.count for row in record.calibration) == sum(row.n for row in record.by_prediction) == 40
    for row in record.per_class:
        own = arrays.label == list(arrays.classes).index(row.class_name)
        assert row.accuracy.value == (arrays.prediction == arrays.label)[own].mean()
    confidence = arrays.probability.astype(np.float64).mean() - right
    assert record.scores[0].confidence_gap.value == pytest.approx(confidence, abs=1e-6)
    assert record.errors == 40 - round(40 * right)
    assert run.config["command_line"] == "vitlens evaluate vit"
    assert run.config["models"][0]["sha256"]
    text = path.read_text()
    for figure in (tmp_path / "run" / "figures").iterdir():
        assert f"(figures/{figure.name})" in text
    check_first_page(REPORT(record))


def test_two_models_are_paired_and_the_report_can_be_written_again(models: dict[str, str], tmp_path: Path) -> None:
    out = tmp_path / "run"
    path = evaluate([models["vit"], models["cnn"]], data="digits", options=options(out, batch_size=7))
    record = read(read_run(out))
    assert {"accuracy/vit", "accuracy/cnn", "accuracy_difference/vit/cnn"} <= record.metrics.keys()
    (pair,) = record.pairs
    first, second = (each.prediction == each.label for each in (record.predictions["vit"], record.predictions["cnn"]))
    counts = (first & second).sum(), (first & ~second).sum(), (~first & second).sum(), (~first & ~second).sum()
    assert (pair.both_right, pair.only_first_right, pair.only_second_right, pair.both_wrong) == counts
    gap = 100 * (first.mean() - second.mean())
    assert record.metric("accuracy_difference/vit/cnn").value == pair.difference.value == pytest.approx(gap)
    assert pair.p == pair.p_holm
    check_first_page(REPORT(record))
    files = {file: file.read_bytes() for file in (path, *(out / "figures").iterdir())}
    assert len(files) >= 4
    for file in files:
        file.unlink()
    report(out)
    assert {file: file.read_bytes() for file in files} == files


def test_wrong_input_is_refused_before_anything_is_written(models: dict[str, str], tmp_path: Path) -> None:
    classes, conflicts = tmp_path / "classes.txt", tmp_path / "conflicts"
    classes.write_text("\n".join("abcdefghij"))
    conflict(conflicts / "cat" / "cat1-dog2.png")
    broken = with_weights(tmp_path / "broken.safetensors", torch.nan)
    for error, message, model, more in (
        (
            InputError,
            r"in the data: '0'.*in the model: 'a'",
            models["vit"],
            {"model_options": ModelOptions(classes=classes)},
        ),
        (InputError, r"only in the data: 'cat', 'dog'.*--classes FILE", models["vit"], {"data": str(conflicts)}),
        (ModelError, "expected finite weights", broken, {}),
    ):
        with pytest.raises(error, match=message):
            evaluate([model], options=options(tmp_path / "run"), **more)
        assert not (tmp_path / "run").exists()


def conflict(path: Path) -> None:
    path.parent.mkdir(exist_ok=True, parents=True)
    Image.new("RGB", (32, 32), (10, 20, 200)).save(path)


def with_weights(path: Path, value: float) -> str:
    """A CNN whose classifier has these weights."""
    model = untrained("resnet20", classes=DIGITS)
    state = {
        name: torch.full_like(each, value) if "fc" in name else each for name, each in model.module.state_dict().items()
    }
    save(model, path, state=state)
    return str(path)


def test_a_model_whose_logits_overflow_fails_and_says_so(tmp_path: Path) -> None:
    with pytest.raises(NonFiniteError, match=r"broken on .* of digits"):
        evaluate([with_weights(tmp_path / "broken.safetensors", 3e38)], options=options(tmp_path / "run"))
    assert read_run(tmp_path / "run").status == "failed"
    assert not (tmp_path / "run" / "report.md").exists()


def test_imagenet_answers_for_the_sixteen_of_cue_conflicts(tmp_path: Path) -> None:
    for name in ("cat/cat1-dog2", "cat/cat1-bear3", "dog/dog4-cat1"):
        conflict(tmp_path / "conflicts" / f"{name}.png")
    overrides = {"dim": 16, "depth": 2, "heads": 2}
    save(untrained("vit-micro", classes=imagenet_classes(), overrides=overrides), tmp_path / "vit.safetensors")
    path = evaluate(
        [str(tmp_path / "vit.safetensors")], data=str(tmp_path / "conflicts"), options=options(tmp_path / "run")
    )
    arrays = read_run(tmp_path / "run").arrays("predictions-vit")
    assert list(arrays["classes"][:3]) == ["bear", "cat", "dog"]
    assert set(arrays["classes"]) == set(imagenet16())
    assert arrays["label"].tolist() == [1, 1, 2]
    notes = read_run(tmp_path / "run").config["data"]["notes"]
    assert "the 16" in notes[0]
    assert any("its label is the shape" in note for note in notes)
    assert notes[0].rstrip(".") in path.read_text()
