import pytest
import torch

from vitlens.analysis.evaluation.evaluate import evaluate
from vitlens.analysis.failures.compare import compare
from vitlens.data.digits import digits
from vitlens.data.shapes import shapes
from vitlens.errors import InputError
from vitlens.models.loading import load


def test_answers_are_those_of_evaluate():
    vit, cnn, split = load("vit-digits"), load("cnn-digits"), digits("test").limit(60)
    found = compare(vit, cnn, split)
    for model, answers in ((vit, found.first), (cnn, found.second)):
        expected = evaluate(model, split)
        assert torch.equal(answers.predictions, expected.predictions)
        assert torch.equal(answers.correct, expected.correct)
        assert answers.alias == model.alias
    one, two = found.accuracies()
    assert found.difference().value == pytest.approx(100 * (one.value - two.value))
    assert sum(found.counts.values()) == 60


def test_a_model_and_itself_differ_nowhere():
    vit, split = load("vit-digits"), digits("test").limit(20)
    found = compare(vit, vit, split)
    counts = found.counts
    assert counts["only first wrong"] == counts["only second wrong"] == counts["both wrong, differently"] == 0
    assert found.p == 1.0


def test_other_classes_are_refused():
    vit, cnn = load("vit-digits"), load("cnn-digits")
    with pytest.raises(InputError, match=r"the first model does not know the data's classes: .* 'circle'"):
        compare(vit, cnn, shapes("test", per_class=1))
