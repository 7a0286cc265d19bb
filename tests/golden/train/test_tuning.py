"""Fine-tuning all weights, the last blocks or the head; and learning from a teacher."""

from itertools import combinations
from pathlib import Path

import pytest
import torch
from scipy.stats import binomtest

import vitlens
from tests.kit.commands import gone_on, ran, refusal, written_digits
from tests.kit.making import save, untrained
from tests.kit.select import index_by
from tests.kit.training_runs import interrupted
from vitlens import load, load_data

LINE = "--data digits --limit 40 --batch-size 10"


def changed(before: Path, after: Path) -> set[str]:
    one = load(str(before)).module.state_dict()
    other = load(str(after)).module.state_dict()
    return {name for name in other if not torch.equal(one[name], other[name])}


def test_everything_with_positions_for_another_size(learned, tmp_path):
    record = ran(tmp_path / "out", f"train {learned} {LINE} --epochs 1 --image-size 48")
    model = load(str(record.folder))
    assert changed(learned, record.folder) == set(model.module.state_dict())
    assert model.input_size == (48, 48)
    assert model.module.get_parameter("pos_embed").shape == (1, 1 + 36, 16)
    assert "from 32x32 to 48x48 px" in record.started[0].notes


def test_weights_from_a_file(tmp_path):
    shape = {"dim": 128, "depth": 4, "heads": 4}
    torch.save(
        untrained("vit-mini", classes=("x", "y"), overrides=shape).module.state_dict(),
        tmp_path / "w.pth",
    )
    line = (
        f"train vit-mini {LINE} --limit 20 --epochs 1 --freeze-backbone --weights "
        f"{tmp_path / 'w.pth'}"
    )
    assert ran(tmp_path / "out", line).started[0].weights == "w.pth"


def test_a_folder_without_parts_is_divided_and_stays_so(tmp_path):
    """A timm model that was trained here is not tested on what it was trained on."""
    pictures = written_digits(
        tmp_path / "pictures", 20, lambda number, label: f"{'ab'[label // 5]}/{number}.png"
    )
    line = (
        f"train timm:resnet10t@random --data {pictures} --batch-size 10 --image-size 32 --epochs 1"
    )
    record = ran(tmp_path / "out", line)
    tested = ran(tmp_path / "tested", f"evaluate {tmp_path / 'out'} --data {pictures}")
    assert tested.config.data.images == record.scores[0].accuracy.n < 10
    assert load(str(tmp_path / "out")).classes == ("a", "b")


def test_the_student_has_a_token_and_numbers_are_those_of_the_models(golden, tiny_vit):
    """Of a teacher that often errs, so that agreement with it is not accuracy."""
    folder = golden("train from a teacher").folder
    record = vitlens.read(folder)
    split = load_data("digits", part="test").limit(60)
    names = ("vit-mini", "tiny-vit", "cnn-digits")
    models = [load(str(place)) for place in (folder, tiny_vit, "cnn-digits")]
    assert models[0].layout.prefix == ("cls", "distillation")
    assert tuple(model.alias for model in record.config.models) == names
    roles = index_by(record.table("scores"), "role")
    assert list(roles) == ["student", "teacher", "without a teacher"]
    assert roles["teacher"].agreement is None
    images = next(split.batches(60)).images
    answers = {name: model(images).argmax(1) for name, model in zip(names, models)}
    correct = {name: predictions == split.labels for name, predictions in answers.items()}
    for name, is_correct in correct.items():
        assert record.metrics[f"accuracy/{name}"].value == pytest.approx(
            is_correct.float().mean().item()
        )
        if name != "tiny-vit":
            same = (answers[name] == answers["tiny-vit"]).float().mean().item()
            assert record.metrics[f"agreement_with_teacher/{name}"].value == pytest.approx(same)
    pairs = index_by(record.table("pairs"), "first", "second")
    assert list(pairs) == [*combinations(names, 2)]
    for (first, second), row in pairs.items():
        gain = 100 * (correct[first].float().mean() - correct[second].float().mean()).item()
        assert record.metrics[f"accuracy_difference/{first}/{second}"].value == pytest.approx(
            gain, abs=1e-4
        )
        counts = (
            int((correct[first] & ~correct[second]).sum()),
            int((correct[second] & ~correct[first]).sum()),
        )
        assert (row.only_first_right, row.only_second_right) == counts
        assert row.p == pytest.approx(
            binomtest(counts[0], sum(counts)).pvalue if any(counts) else 1.0
        )
    (row,) = record.table("taught")
    assert (row.teacher, row.kind, row.weight, row.token) == ("tiny-vit", "hard", 0.5, True)
    assert (folder / "figures" / "beside.png").is_file()
    assert "without a teacher" in (folder / "report.md").read_text().partition("\n## ")[0]


@pytest.mark.parametrize(
    ("student", "teacher", "token"),
    [
        ("resnet20", "vit-digits", False),
        ("timm:deit_tiny_distilled_patch16_224@random --image-size 32", "cnn-digits", True),
    ],
)
def test_a_cnn_learns_from_a_teacher_too_and_a_student_of_timm_has_its_own_token(
    student, teacher, token, tmp_path
):
    record = ran(
        tmp_path / "out", f"train {student} {LINE} --limit 20 --epochs 1 --distill-from {teacher}"
    )
    assert record.taught[0].token == token
    if token:
        module = load(str(record.folder)).module
        assert not torch.equal(module.head.weight, module.head_dist.weight)  # both began at zero


def test_a_stopped_run_goes_on_with_its_part_and_its_teacher(learned, tmp_path, capsys):
    teacher = tmp_path / "teacher"
    cut = tmp_path / "cut"
    save(load("cnn-digits"), teacher / "model.safetensors")
    line = f"train {learned} {LINE} --epochs 2 --train-last 1 --distill-from {teacher}"
    record = ran(tmp_path / "whole", line)
    assert {".".join(name.split(".")[:2]) for name in changed(learned, record.folder)} == {
        "blocks.1",
        "norm.weight",
        "norm.bias",
        "head.weight",
        "head.bias",
    }
    assert record.started[0].last == 1
    assert {row.setting: row.value for row in record.recipe}[
        "flip"
    ] == "False"  # a mirrored digit is no digit
    with interrupted(lambda _, progress: progress.step >= 5):
        ran(cut, line, code=130)
    gone_on(cut, "train")
    assert (record.folder / "model.safetensors").read_bytes() == (
        cut / "model.safetensors"
    ).read_bytes()
    for typed, says in (
        ("--train-last 2", "with its tuning"),
        ("--distill-from cnn-digits", "with its teaching"),
    ):
        assert says in refusal(
            capsys, f"train --resume {record.folder} --device cpu --quiet {typed}"
        )
    # another teacher in its place is not gone on with
    model = load("cnn-digits")
    model.module.get_parameter("fc.bias").data.add_(1.0)
    save(model, teacher / "model.safetensors")
    said = refusal(capsys, f"train --resume {cut} --device cpu --quiet")
    assert "with its distillation.teacher.sha256" in said


def test_a_frozen_model_reads_views_that_are_not_drawn_anew_in_every_epoch(tmp_path):
    line = f"train vit-digits {LINE} --limit 20 --epochs 1 --freeze-backbone --cached-views 2"
    record = ran(tmp_path / "out", f"{line} --set crop_padding=2")
    assert record.setup[0].augmentation == ""


def test_a_teacher_has_one_name_where_the_student_has_the_same(tmp_path):
    line = f"train vit-mini {LINE} --limit 20 --epochs 1 --distill-from vit-mini=cnn-digits"
    record = ran(tmp_path / "out", line)
    (score,) = [score for score in record.scores if score.role == "teacher"]
    assert record.taught[0].teacher == score.model
