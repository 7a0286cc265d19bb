"""Two models on the same images: cells of errors, the paired test, classes matched by name; shape bias."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from tests.kit.attacked import made
from vitlens.analysis.evaluation.evaluate import Evaluation, evaluate
from vitlens.analysis.failures.compare import Comparison, ShapeBias, compare, compare_evaluations, shape_bias
from vitlens.data.cue_conflict import cues_of
from vitlens.data.digits import digits
from vitlens.data.shapes import CLASSES, shapes
from vitlens.data.split import Split
from vitlens.errors import DataError, InputError
from vitlens.models.loading import load

triples = st.lists(st.tuples(*[st.integers(0, 2)] * 3), min_size=1, max_size=40)


def evaluation(predictions: list[int], labels: list[int], *, alias: str, classes: tuple[str, ...] = ("a", "b", "c")):
    logits = torch.zeros(len(predictions), len(classes))
    logits[torch.arange(len(predictions)), torch.tensor(predictions)] = 2.0
    return Evaluation(alias, classes, logits, torch.tensor(labels))


@given(triples)
def test_cells_are_what_they_say_and_the_test_is_mcnemars(rows):
    labels, first, second = (list(column) for column in zip(*rows))
    found = compare_evaluations(evaluation(first, labels, alias="one"), evaluation(second, labels, alias="two"))
    assert sum(found.counts.values()) == len(rows)
    for (label, one, two), cell in zip(rows, found.cells.tolist()):
        if one == label or two == label:
            assert cell == {(True, True): 0, (False, True): 1, (True, False): 2}[one == label, two == label]
        else:
            assert cell == (3 if one == two else 4)
    only = [sum(each != label and other == label for label, each, other in rows) for rows in (rows, swapped(rows))]
    expected = stats.binomtest(min(only), sum(only), 0.5).pvalue if sum(only) else 1.0
    assert found.p == pytest.approx(expected)


def swapped(rows: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    return [(label, second, first) for label, first, second in rows]


def test_classes_are_matched_by_name():
    one = evaluation([0, 1, 2], [0, 1, 2], alias="one")
    two = evaluation([2, 1, 3], [2, 1, 0], alias="two", classes=("c", "b", "a", "d"))
    found = compare_evaluations(one, two)
    assert found.first.classes == found.second.classes == ("a", "b", "c", "d")
    assert found.second.predictions.tolist() == [0, 1, 3]
    assert torch.allclose(found.second.confidence, two.confidence)
    assert found.cells.tolist() == [0, 0, 2]


def test_evaluations_are_those_of_evaluate_and_a_model_does_not_differ_from_itself():
    vit, cnn, split = load("vit-digits"), load("cnn-digits"), digits("test").limit(60)
    found = compare(vit, cnn, split)
    for model, own in ((vit, found.first), (cnn, found.second)):
        assert torch.equal(own.predictions, evaluate(model, split).predictions)
        assert own.alias == model.alias
    one, two = found.accuracies()
    assert found.difference().value == pytest.approx(100 * (one.value - two.value))
    same: Comparison = compare(vit, vit, split)
    assert {cell for cell, count in same.counts.items() if count} <= {"both right", "both wrong, alike"}
    assert same.p == 1.0


class Knowing(torch.nn.Module):
    """A classifier that looks its answers up: images are told apart by their first pixels."""

    def __init__(self, split: Split, answers: torch.Tensor) -> None:
        super().__init__()
        pixels = split.source.read(torch.arange(len(split)))
        self.known = {tuple(image.flatten()[:64].tolist()): answer for image, answer in zip(pixels, answers.tolist())}
        self.unused = torch.nn.Conv2d(1, 1, 1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        raw = (images * 255).round().to(torch.uint8)
        answers = torch.tensor([self.known[tuple(image.flatten()[:64].tolist())] for image in raw])
        return torch.nn.functional.one_hot(answers, len(CLASSES)).float()


def bias_of(answers: torch.Tensor, split: Split) -> ShapeBias:
    return shape_bias(made(Knowing(split, answers), (32, 32), classes=CLASSES), split)


def test_the_shape_bias_of_a_classifier_of_shapes_of_textures_and_of_neither():
    split = shapes("test", cue="conflict", per_class=7)
    cues = cues_of(split)
    for answers, expected in ((cues.shape, 1.0), (cues.texture, 0.0)):
        found = bias_of(answers, split)
        assert (found.bias.value, found.bias.n) == (expected, 56)
        assert found.bias.low <= expected <= found.bias.high
        assert (found.shape.value, found.texture.value) == (expected, 1 - expected)
        assert [(one.shape, one.share) for one in found.by_class] == [(7 * int(expected), expected)] * 8
    neither = (cues.shape + 1 + (cues.texture == (cues.shape + 1) % 8).long()) % 8
    assert bias_of(neither, split).bias is None
    neither[:3], neither[3:4] = cues.shape[:3], cues.texture[3:4]
    found = bias_of(neither, split)
    assert (found.bias.value, found.bias.n, found.shape.value) == (0.75, 4, 3 / 56)


@pytest.mark.parametrize(
    ("refused", "error", "message"),
    [
        (lambda: compare(load("vit-digits"), load("cnn-digits"), shapes("test", per_class=1)), InputError,
         r"the first model does not know the data's classes: .* 'circle'"),
        (lambda: compare_evaluations(evaluation([0], [0], alias="1"), evaluation([0], [1], alias="2")), InputError,
         "both models on the same images"),
        (lambda: shape_bias(load("vit-digits"), shapes("test", per_class=2)), DataError,
         r"named shapeN-textureM .* try --data shapes-conflict"),  # shape and texture agree
        (lambda: shape_bias(load("vit-digits"), digits("test").limit(4)), DataError, "found others in digits"),
    ],
)  # fmt: skip
def test_refusals(refused, error, message):
    with pytest.raises(error, match=message):
        refused()
