import pytest
import torch
from torch import Tensor, nn

from vitlens.analysis.evaluation.classes import match_classes, reading, require_shared
from vitlens.analysis.evaluation.evaluate import (
    Evaluation,
    accuracy,
    calibration,
    calibration_error,
    confusion,
    evaluate,
    fitting_batch_size,
    per_class,
    predicted_logits,
)
from vitlens.data.cue_conflict import imagenet16
from vitlens.data.split import InMemory, Split
from vitlens.errors import DataError, InputError, NonFiniteError
from vitlens.models.anatomy import Anatomy
from vitlens.models.model import Model, Provenance
from vitlens.names import imagenet_classes
from vitlens.preprocessing import Preprocessing
from vitlens.uncertainty import Estimate, wilson


class Reader(nn.Module):
    """Reads the class off the first pixel's red: red 10 is class 1, and 255 breaks it."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.classes = classes
        self.drop = nn.Dropout(0.9)  # shows when it is not in evaluation mode

    def forward(self, images: Tensor) -> Tensor:
        red = (images[:, 0, 0, 0] * 255).round()
        logits = 5.0 * nn.functional.one_hot((red / 10).long().clamp(max=self.classes - 1), self.classes)
        return self.drop(torch.where(red[:, None] == 255, torch.nan, logits))


def model(classes: tuple[str, ...] = ("a", "b", "c")) -> Model:
    return Model(
        Reader(len(classes)),
        alias="reader",
        anatomy=Anatomy("other", ()),
        preprocessing=Preprocessing((4, 6), mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0)),
        classes=classes,
        provenance=Provenance("reader", "random"),
        architecture={},
    )


def split(
    reds: list[int], labels: list[int] | None, classes: tuple[str, ...] = ("a", "b", "c"), **more: object
) -> Split:
    pixels = torch.tensor(reds, dtype=torch.uint8)[:, None, None, None].expand(-1, 3, 4, 6)
    found = None if labels is None else torch.tensor(labels)
    return Split("colours", "test", InMemory(pixels), (4, 6), classes, found, **more)  # type: ignore[arg-type]


def test_answers_come_in_order_whatever_the_batch_and_nothing_stays() -> None:
    module, images, told = model().train(), split([0, 10, 20, 10], [0, 1, 2, 0]), []
    result = evaluate(module, images, batch_size=3, advance=told.append)
    assert result.predictions.tolist() == [0, 1, 2, 1]
    assert result.correct.tolist() == [True, True, True, False]
    assert told == [3, 1]
    assert torch.equal(result.logits, evaluate(module, images).logits)
    assert module.training
    assert module.module.drop.training
    assert not result.logits.is_inference()
    assert torch.allclose(result.probabilities.sum(-1), torch.ones(4))
    assert fitting_batch_size(module) == 512


def test_classes_are_matched_by_name_or_where_they_are_only_numbered_by_position() -> None:
    shuffled = evaluate(model(("c", "a", "b")), split([0, 10, 20], [2, 0, 1]))
    assert shuffled.classes == ("a", "b", "c")
    assert shuffled.correct.all()
    some = evaluate(model(("x", "b", "y", "a")), split([30, 10], [0, 1], classes=("a", "b")))
    assert some.classes == ("a", "b", "x", "y")
    assert some.correct.all()
    assert match_classes(("0", "1"), ("cat", "dog")) == ([0, 1], ("cat", "dog"))


def test_imagenet_answers_for_the_sixteen():
    data = ("cat", "knife", "dog")
    found = reading(imagenet_classes(), data)
    assert found.classes[:3] == data
    assert set(found.classes) == set(imagenet16())
    logits = torch.randn(4, 1000, generator=torch.Generator().manual_seed(0))
    expected = torch.stack([logits.softmax(1)[:, list(imagenet16()[name])].mean(1) for name in found.classes], 1)
    torch.testing.assert_close(found.read(logits).exp(), expected)
    assert "mean probability" in found.note


REFUSED = [
    (lambda: evaluate(model(), split([0], None)), DataError, "vitlens predict"),
    (lambda: evaluate(model(), split([], [])), DataError, "no images"),
    (lambda: evaluate(model(), split([0, 10, 255], [0, 1, 2]), batch_size=2), NonFiniteError, "image 2 of colours"),
    (lambda: predicted_logits(model(), split([0, 255], None, files=("a.png", "b.png"))), NonFiniteError, r"on b\.png"),
    (lambda: require_shared(("a", "b"), ("a", "c"), ("a", "b")), InputError, "the second model .* in the data: 'b'"),
    (lambda: match_classes(("0", "1", "2"), ("cat", "dog")), InputError, "only in the data: 'cat', 'dog'"),
    (lambda: match_classes(("1", "0"), ("cat", "dog")), InputError, "only in the model: '1', '0'"),
    (lambda: match_classes(("a", "b", "c"), ("c", "eel")), InputError, "model: 'a', 'b'; .*--classes"),
    (lambda: match_classes(("a",), list("56789xy")), InputError, "'5', '6', '7', '8', '9' and 2 more"),
]


@pytest.mark.parametrize(("call", "kind", "words"), REFUSED)
def test_what_cannot_be_evaluated_is_refused(call, kind, words) -> None:
    with pytest.raises(kind, match=words):
        call()


def test_accuracy_is_wilsons_unless_images_share_a_source() -> None:
    correct = torch.tensor([True, True, False, True])
    assert accuracy(correct) == accuracy(correct, groups=torch.arange(4)) == wilson(3, 4)
    shared = accuracy(correct, groups=torch.tensor([0, 0, 1, 1]))
    assert (shared.value, shared.n, shared.low, shared.high) == (0.75, 4, 0.5, 1.0)
    everything = accuracy(torch.ones(6, dtype=torch.bool), groups=torch.tensor([0, 0, 1, 1, 2, 2]))
    assert everything == Estimate(1.0, wilson(3, 3).low, 1.0, 6)
    assert accuracy(torch.zeros(4, dtype=torch.bool), groups=torch.tensor([0, 0, 1, 1])).high == wilson(0, 2).high


def test_classes_add_up_to_the_whole() -> None:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 4, (50,), generator=generator)
    logits = torch.randn(50, 5, generator=generator)
    result = Evaluation("m", ("a", "b", "c", "d", "e"), logits, labels)
    scores = list(per_class(result, count=5))
    assert [name for name, _, _ in scores] == list("abcde")
    assert sum(n for _, n, _ in scores) == 50
    assert scores[4][2] is None
    right = sum(found.value * n for _, n, found in scores if found)
    assert right == pytest.approx(result.correct.sum().item())
    counts = confusion(result.labels, result.predictions, count=5)
    assert counts.sum() == 50
    assert counts.diagonal().sum() == result.correct.sum()
    assert counts.sum(1).tolist() == [n for _, n, _ in scores]
    assert counts[2, 3] == ((labels == 2) & (result.predictions == 3)).sum()


def test_calibration_by_a_plain_loop() -> None:
    generator = torch.Generator().manual_seed(0)
    probabilities = (3 * torch.randn(200, 4, generator=generator)).softmax(-1)
    labels = torch.randint(0, 4, (200,), generator=generator)
    _, accuracies, count = calibration(probabilities, labels)
    confidence, prediction = probabilities.double().max(-1)
    error = 0.0
    for index in range(15):
        inside = (confidence > index / 15) & (confidence <= (index + 1) / 15)
        assert count[index] == inside.sum()
        if inside.any():
            right = (prediction == labels)[inside].double().mean()
            error += inside.sum() / 200 * abs(confidence[inside].mean() - right)
            assert accuracies[index] == pytest.approx(right.item())
    assert calibration_error(probabilities, labels).value == pytest.approx(float(error))


def test_calibration_at_its_ends() -> None:
    sure, even = torch.eye(3), torch.full((4, 4), 0.25)  # argmax is 0: right one in four
    found = [
        calibration_error(sure, torch.arange(3)),
        calibration_error(sure, (torch.arange(3) + 1) % 3),
        calibration_error(even, torch.arange(4)),
    ]
    assert [each.value for each in found] == pytest.approx([0, 1, 0], abs=1e-12)
