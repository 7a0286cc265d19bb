"""Distillation: the loss of a batch by the papers' formulas, cached teachers, and refusals."""

import numpy as np
import pytest
import torch

import vitlens
from tests.kit.commands import ran, refusal
from tests.kit.making import save
from vitlens import load_data

SMALL = "--dim 16 --depth 1 --heads 2 --patch-size 8 --set drop_path=0"
STILL = (
    "--warmup 0 --set minimum=1 --average 0 --set crop_padding=0 --set randaugment=0 --set cutmix=0"
)
LINE = f"train vit-mini --limit 20 --batch-size 20 {SMALL} {STILL} --precision fp32"


def probabilities(logits: torch.Tensor, temperature: float = 1.0) -> np.ndarray:
    scaled = logits.detach().double().numpy() / temperature
    raised = np.exp(scaled - scaled.max(1, keepdims=True))
    return raised / raised.sum(1, keepdims=True)


@pytest.mark.parametrize(
    ("kind", "weight", "temperature", "token"),
    [("soft", 0.3, 2.0, True), ("soft", 0.3, 2.0, False), ("hard", 0.4, 1, True)],
)
def test_the_loss_of_a_batch_is_that_of_the_formulas(
    kind, weight, temperature, token, tiny_cnn, tmp_path
):
    """Hinton 2015; Touvron 2021, equations 2 and 3. The rate is so small that the weights stay the
    first ones; the teacher has the classes in another order than the data.
    """
    model = vitlens.load(str(tiny_cnn))
    order = torch.arange(10).roll(3)
    for parameter in model.module.fc.parameters():
        parameter.data.copy_(parameter[order].clone())
    model.classes = tuple(model.classes[number] for number in order)
    save(model, tmp_path / "teacher" / "model.safetensors")
    more = "--epochs 1 --learning-rate 1e-12 --label-smoothing 0.1"
    more += f" --distill-from {tmp_path / 'teacher'} --distill {kind}"
    more += f" --distill-weight {weight}" + (
        f" --temperature {temperature}" if kind == "soft" else ""
    )
    record = ran(tmp_path / "out", f"{LINE} {more}" + ("" if token else " --no-distill-token"))
    (row,) = record.taught
    assert (row.kind, row.weight, row.token) == (kind, weight, token)
    assert row.temperature == temperature or kind == "hard"
    split = load_data("digits", part="train", limit=20)
    student = vitlens.load(str(record.folder)).eval()
    assert student.layout.prefix == ("cls", "distillation")[: 1 + token]
    images = next(split.batches(20)).images
    labels = split.labels.numpy()
    with torch.no_grad():
        teacher = vitlens.load(str(tiny_cnn)).eval()(images)
        for_labels = for_teacher = student(images)
        if token:
            for_labels, for_teacher = student.module.forward_heads(student.prepare(images))
            assert torch.allclose((for_labels + for_teacher) / 2, student(images), atol=1e-5)
    target = 0.9 * np.eye(10)[labels] + 0.01  # smoothed
    labelled = -(target * np.log(probabilities(for_labels))).sum(1)
    taught_probabilities = probabilities(teacher, temperature)
    said = probabilities(for_teacher, temperature)
    distillation = temperature**2 * (
        taught_probabilities * np.log(taught_probabilities / said)
    ).sum(1)
    if kind == "hard":
        distillation = -np.log(said[np.arange(20), teacher.argmax(1).numpy()])
    expected = ((1 - weight) * labelled + weight * distillation).mean()
    (metrics,) = record.history
    assert metrics.train_loss == pytest.approx(expected, rel=1e-5)
    right = (student(images).argmax(1) == split.labels).float().mean().item()
    assert metrics.train_accuracy == pytest.approx(right)


@pytest.mark.parametrize(("flip", "epochs"), [("false", (1, 2)), ("true", (2, 3))])
def test_remembered_answers_of_a_teacher_train_as_its_own(flip, epochs, still, tiny_cnn, tmp_path):
    """They are worth it where each view occurs again: of images that stay, from two epochs on, or
    three if mirrored.
    """
    histories = []
    for count in epochs:
        more = f"--epochs {count} --distill-from {tiny_cnn} --set flip={flip} --data {still}"
        record = ran(tmp_path / str(count), f"{LINE} {more}")
        assert record.taught[0].forms == (0 if count == epochs[0] else 1 + (flip == "true"))
        histories.append(record.history)
    for computed, remembered in zip(*histories):
        assert remembered.train_loss == pytest.approx(computed.train_loss, rel=1e-5)


@pytest.mark.parametrize(
    "more", ["--set crop_padding=1 --data {still}", "--set cutmix=1 --data {still}", ""]
)
def test_views_that_differ_each_time_are_not_remembered(more, still, tiny_cnn, tmp_path):
    """Augmented ones, and those of digits: every epoch draws new images."""
    record = ran(
        tmp_path / "out", f"{LINE} --epochs 3 --distill-from {tiny_cnn} {more.format(still=still)}"
    )
    assert record.taught[0].forms == 0
    # of a recipe without augmentation none is shown
    assert (record.first_batch is None) == (not more)


def test_a_teacher_without_finite_answers_is_refused(tmp_path, capsys):
    model = vitlens.load("cnn-digits")
    model.module.fc.weight.data.fill_(3e38)
    save(model, tmp_path / "huge" / "model.safetensors")
    line = (
        f"{LINE} --distill-from {tmp_path / 'huge'} --epochs 1 --device cpu --out "
        f"{tmp_path / 'out'}"
    )
    assert "from the teacher huge" in refusal(capsys, line, code=1)
