"""Distillation: what the student learns, what is recorded, and what is refused."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from scipy.stats import binomtest

import vitlens
from tests.kit.making import CLASSES, save, untrained
from tests.kit.training_runs import interrupted, train
from vitlens import load, load_data
from vitlens.commands.run.options import RunOptions
from vitlens.commands.run.publish import read_folder
from vitlens.commands.train.options import TeacherOptions
from vitlens.errors import InputError

TINY = {"dim": 16, "depth": 1, "heads": 2, "patch_size": [8, 8]}
OPTIONS = RunOptions(device="cpu", limit=60, batch_size=20, quiet=True)


def taught(out: Path, teacher: str = "cnn-digits", *, epochs: int = 2, **settings: object) -> Path:
    teaching = TeacherOptions(teacher, **settings)
    train("vit-mini", recipe={"epochs": epochs}, shape=TINY, teaching=teaching, options=replace(OPTIONS, out=out))
    return out


@pytest.fixture(scope="module")
def run(golden) -> Path:
    """Of a teacher that often errs, so that agreement with it is not accuracy."""
    return golden("train from a teacher").folder


def test_the_student_has_a_token_and_numbers_are_those_of_the_models(run, tiny_vit):
    found = vitlens.read(run)
    student = vitlens.load(str(run))
    assert student.layout.prefix == ("cls", "distillation")
    assert [model.alias for model in found.config.models] == ["vit-mini", "tiny-vit", "cnn-digits"]
    rows = {row.role: row for row in found.table("scores")}
    assert list(rows) == ["student", "teacher", "without a teacher"]
    split = load_data("digits", part="test").limit(60)
    images = next(split.batches(60)).images
    models = {"vit-mini": student, "tiny-vit": vitlens.load(str(tiny_vit)), "cnn-digits": vitlens.load("cnn-digits")}
    answers = {name: model(images).argmax(1) for name, model in models.items()}
    correct = {name: own == split.labels for name, own in answers.items()}
    for name in ("vit-mini", "cnn-digits"):
        same = (answers[name] == answers["tiny-vit"]).float().mean().item()
        assert found.metrics[f"agreement_with_teacher/{name}"].value == pytest.approx(same)
    assert rows["teacher"].agreement is None
    for name, own in correct.items():
        assert found.metrics[f"accuracy/{name}"].value == pytest.approx(own.float().mean().item())
    pairs = {(row.first, row.second): row for row in found.table("pairs")}
    assert list(pairs) == [("vit-mini", "tiny-vit"), ("vit-mini", "cnn-digits"), ("tiny-vit", "cnn-digits")]
    for (first, second), row in pairs.items():
        gain = 100 * (correct[first].float().mean() - correct[second].float().mean()).item()
        assert found.metrics[f"accuracy_difference/{first}/{second}"].value == pytest.approx(gain, abs=1e-4)
        counts = int((correct[first] & ~correct[second]).sum()), int((correct[second] & ~correct[first]).sum())
        assert (row.only_first_right, row.only_second_right) == counts
        assert row.p == pytest.approx(binomtest(counts[0], sum(counts)).pvalue if any(counts) else 1.0)


def test_the_report_shows_the_distillation(run):
    text = (run / "report.md").read_text()
    (row,) = read_folder(run).taught
    assert (row.teacher, row.kind, row.weight, row.token) == ("tiny-vit", "hard", 0.5, True)
    assert "](figures/beside.png)" in text
    assert "without a teacher" in text.partition("\n## ")[0]


def test_without_the_token(tmp_path):
    out = taught(tmp_path / "out", epochs=1, kind="soft", temperature=2.0, weight=0.4, token=False)
    assert vitlens.load(str(out)).layout.prefix == ("cls",)
    (row,) = read_folder(out).taught
    assert (row.kind, row.weight, row.temperature, row.token) == ("soft", 0.4, 2.0, False)


def test_a_stopped_run_goes_on_with_its_teacher(tmp_path):
    teacher = tmp_path / "teacher"
    save(load("cnn-digits"), teacher / "model.safetensors")
    whole = taught(tmp_path / "whole", str(teacher))
    with interrupted(lambda _, progress: progress.step >= 4):
        taught(tmp_path / "cut", str(teacher))
    train(None, resume=tmp_path / "cut", options=RunOptions(device="cpu", quiet=True))
    weights = [(folder / "model.safetensors").read_bytes() for folder in (whole, tmp_path / "cut")]
    assert weights[0] == weights[1]
    with pytest.raises(InputError, match="with its teaching"):
        train(None, resume=whole, teaching=TeacherOptions("cnn-digits"), options=OPTIONS)
    # another teacher in its place is not gone on with
    model = load("cnn-digits")
    with torch.no_grad():
        model.module.get_parameter("fc.bias").add_(1.0)
    save(model, teacher / "model.safetensors")
    with pytest.raises(InputError, match=r"with its distillation\.teacher\.sha256"):
        train(None, resume=tmp_path / "cut", options=RunOptions(device="cpu", quiet=True))


def test_a_teacher_of_other_classes_is_refused(tmp_path):
    classes = (*CLASSES[:-1], "a letter")
    save(untrained("resnet20", classes=classes), tmp_path / "teacher" / "model.safetensors")
    with pytest.raises(InputError, match=r"the teacher teacher has other classes.*in the model: 'a letter'"):
        taught(tmp_path / "out", str(tmp_path / "teacher"))
    assert not (tmp_path / "out").exists()


def test_a_cnn_learns_from_a_teacher_too(tmp_path):
    options = replace(OPTIONS, out=tmp_path / "out", limit=20)
    train("resnet20", recipe={"epochs": 1}, teaching=TeacherOptions("vit-digits", "soft"), options=options)
    (row,) = read_folder(tmp_path / "out").taught
    assert not row.token
    with pytest.raises(InputError, match="add --no-distill-token"):
        train(
            "resnet20", teaching=TeacherOptions("vit-digits", token=True), options=replace(options, out=tmp_path / "no")
        )
