"""Fine-tuning a trained model, all weights, the last blocks or the head; and learning from a teacher."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image
from scipy.stats import binomtest

import vitlens
from tests.kit.making import CLASSES, digits, save, untrained
from tests.kit.training_runs import interrupted, train
from vitlens import load, load_data
from vitlens.commands.run.load import load_split
from vitlens.commands.run.options import RunOptions
from vitlens.commands.run.publish import read_folder, report
from vitlens.commands.train.options import TeacherOptions, Tuning
from vitlens.errors import InputError

OPTIONS = RunOptions(device="cpu", limit=40, batch_size=10, quiet=True)
SMALL = {"dim": 16, "depth": 1, "heads": 2, "patch_size": [8, 8]}
TAUGHT = replace(OPTIONS, limit=60, batch_size=20)


def tuned(learned: Path, out: Path, tuning: Tuning = Tuning(), **settings: object) -> Path:  # noqa: B008  frozen
    recipe = {"epochs": 2, **settings.pop("recipe", {})}
    train(str(learned), data="digits", recipe=recipe, tuning=tuning, options=replace(OPTIONS, out=out), **settings)
    return out


def state(folder: Path) -> dict[str, torch.Tensor]:
    return dict(vitlens.load(str(folder)).module.state_dict())


def changed(before: Path, after: Path) -> set[str]:
    one, other = state(before), state(after)
    return {name for name in other if name not in one or not torch.equal(one[name], other[name])}


def test_the_head_alone(learned, tmp_path):
    out = tuned(learned, tmp_path / "out", Tuning(freeze=True))
    assert changed(learned, out) == {"head.weight", "head.bias"}
    assert len(vitlens.load(str(out)).classes) == 10
    text = (out / "report.md").read_text()
    (row,) = read_folder(out).started
    assert (row.last, row.trained, row.notes) == (
        0, 170, "replaced the head of 3 classes by one of the data's 10, all zeros"
    )  # fmt: skip
    assert "features computed once" in " ".join(read_folder(out).setup[0].computed)
    assert not (out / "features").exists()
    report(out)
    assert (out / "report.md").read_text() == text


def test_the_last_block(learned, tmp_path):
    out = tuned(learned, tmp_path / "out", Tuning(last=1))
    assert {name.split(".")[0] + "." + name.split(".")[1] for name in changed(learned, out)} == {
        "blocks.1", "norm.weight", "norm.bias", "head.weight", "head.bias",
    }  # fmt: skip
    assert read_folder(out).started[0].last == 1


def test_everything_with_positions_for_another_size(learned, tmp_path):
    out = tuned(learned, tmp_path / "out", image_size=(48, 48), recipe={"epochs": 1})
    model = vitlens.load(str(out))
    assert changed(learned, out) == set(state(learned))
    assert model.input_size == (48, 48)
    assert model.module.get_parameter("pos_embed").shape == (1, 1 + 36, 16)
    (row,) = read_folder(out).started
    assert "resized the position embeddings from 32x32 to 48x48 px" in row.notes


def test_weights_from_a_file(tmp_path):
    shape = {"dim": 128, "depth": 4, "heads": 4}
    torch.save(untrained("vit-mini", classes=("x", "y"), overrides=shape).module.state_dict(), tmp_path / "w.pth")
    options = replace(OPTIONS, out=tmp_path / "out", limit=20)
    train("vit-mini", data="digits", tuning=Tuning(str(tmp_path / "w.pth"), freeze=True), options=options)
    assert read_folder(tmp_path / "out").started[0].weights == "w.pth"


def test_a_folder_without_parts_is_divided_and_stays_so(tmp_path):
    """A timm model that was trained here is not tested on what it was trained on."""
    for batch in digits("test").limit(20).batches(1):
        place = tmp_path / "pictures" / "ab"[int(batch.labels[0]) // 5]
        place.mkdir(parents=True, exist_ok=True)
        picture = (batch.images[0] * 255).round().byte().permute(1, 2, 0).numpy()
        Image.fromarray(picture).save(place / f"{int(batch.indices[0])}.png")
    options = replace(OPTIONS, out=tmp_path / "out", limit=None)
    pictures = str(tmp_path / "pictures")
    train("timm:resnet10t@random", data=pictures, image_size=(32, 32), recipe={"epochs": 1}, options=options)
    tested = load_split(vitlens.load(str(tmp_path / "out")), options=options, data=pictures)
    untold = load_split(vitlens.load("timm:resnet10t@random", image_size=(32, 32)), options=options, data=pictures)
    assert len(untold) == 20
    assert len(tested) < 10
    assert read_folder(tmp_path / "out").scores[0].accuracy.n == len(tested)
    assert vitlens.load(str(tmp_path / "out")).classes == ("a", "b")


def taught(out: Path, teacher: str = "cnn-digits", *, epochs: int = 2, **settings: object) -> Path:
    teaching = TeacherOptions(teacher, **settings)
    train("vit-mini", recipe={"epochs": epochs}, shape=SMALL, teaching=teaching, options=replace(TAUGHT, out=out))
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
    (row,) = read_folder(run).taught
    assert (row.teacher, row.kind, row.weight, row.token) == ("tiny-vit", "hard", 0.5, True)
    assert (run / "figures" / "beside.png").is_file()
    assert "without a teacher" in (run / "report.md").read_text().partition("\n## ")[0]


def test_without_the_token(tmp_path):
    out = taught(tmp_path / "out", epochs=1, kind="soft", temperature=2.0, weight=0.4, token=False)
    assert vitlens.load(str(out)).layout.prefix == ("cls",)
    (row,) = read_folder(out).taught
    assert (row.kind, row.weight, row.temperature, row.token) == ("soft", 0.4, 2.0, False)


def test_a_stopped_run_goes_on_with_its_part_and_its_teacher(learned, tmp_path):
    teacher = tmp_path / "teacher"
    save(load("cnn-digits"), teacher / "model.safetensors")
    given = {"tuning": Tuning(last=1), "teaching": TeacherOptions(str(teacher))}
    whole = tuned(learned, tmp_path / "whole", **given)
    with interrupted(lambda _, progress: progress.step >= 5):
        tuned(learned, tmp_path / "cut", **given)
    plain = RunOptions(device="cpu", quiet=True)
    train(None, resume=tmp_path / "cut", options=plain)
    assert (whole / "model.safetensors").read_bytes() == (tmp_path / "cut" / "model.safetensors").read_bytes()
    for name, other in (("tuning", Tuning(last=2)), ("teaching", TeacherOptions("cnn-digits"))):
        with pytest.raises(InputError, match=f"with its {name}"):
            train(None, resume=whole, options=plain, **{name: other})
    # another teacher in its place is not gone on with
    model = load("cnn-digits")
    with torch.no_grad():
        model.module.get_parameter("fc.bias").add_(1.0)
    save(model, teacher / "model.safetensors")
    with pytest.raises(InputError, match=r"with its distillation\.teacher\.sha256"):
        train(None, resume=tmp_path / "cut", options=plain)


def test_a_teacher_of_other_classes_is_refused(tmp_path):
    classes = (*CLASSES[:-1], "a letter")
    save(untrained("resnet20", classes=classes), tmp_path / "teacher" / "model.safetensors")
    with pytest.raises(InputError, match=r"the teacher teacher has other classes.*in the model: 'a letter'"):
        taught(tmp_path / "out", str(tmp_path / "teacher"))
    assert not (tmp_path / "out").exists()


def test_a_cnn_learns_from_a_teacher_too(tmp_path):
    options = replace(TAUGHT, out=tmp_path / "out", limit=20)
    train("resnet20", recipe={"epochs": 1}, teaching=TeacherOptions("vit-digits", "soft"), options=options)
    (row,) = read_folder(tmp_path / "out").taught
    assert not row.token
    options = replace(options, out=tmp_path / "no")
    with pytest.raises(InputError, match="add --no-distill-token"):
        train("resnet20", teaching=TeacherOptions("vit-digits", token=True), options=options)
