import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from vitlens.analysis.evaluation.evaluate import Evaluation
from vitlens.analysis.failures.compare import compare_evaluations
from vitlens.errors import InputError

CLASSES = ("a", "b", "c")
triples = st.lists(st.tuples(*[st.integers(0, 2)] * 3), min_size=1, max_size=40)


def evaluation(predictions: list[int], labels: list[int], *, alias: str, classes: tuple[str, ...] = CLASSES):
    """A model that gives its prediction 80 % of what two logits share."""
    logits = torch.zeros(len(predictions), len(classes))
    logits[torch.arange(len(predictions)), torch.tensor(predictions)] = 2.0
    return Evaluation(alias, classes, logits, torch.tensor(labels))


def compared(rows: list[tuple[int, int, int]]):
    labels, first, second = (list(column) for column in zip(*rows))
    return compare_evaluations(evaluation(first, labels, alias="one"), evaluation(second, labels, alias="two"))


@given(triples)
def test_cells_add_up_and_are_what_they_say(rows):
    found = compared(rows)
    assert sum(found.counts.values()) == len(rows)
    for (label, first, second), cell in zip(rows, found.cells.tolist()):
        if first == label or second == label:
            expected = {(True, True): 0, (False, True): 1, (True, False): 2}[first == label, second == label]
        else:
            expected = 3 if first == second else 4
        assert cell == expected


@given(triples)
def test_the_paired_test_is_mcnemars(rows):
    found = compared(rows)
    one = sum(first != label and second == label for label, first, second in rows)
    two = sum(first == label and second != label for label, first, second in rows)
    expected = stats.binomtest(min(one, two), one + two, 0.5).pvalue if one + two else 1.0
    assert found.p == pytest.approx(expected)


def test_classes_are_matched_by_name():
    one = evaluation([0, 1, 2], [0, 1, 2], alias="one")
    two = evaluation([2, 1, 3], [2, 1, 0], alias="two", classes=("c", "b", "a", "d"))
    found = compare_evaluations(one, two)
    assert found.first.classes == found.second.classes == ("a", "b", "c", "d")
    assert found.second.predictions.tolist() == [0, 1, 3]
    assert torch.allclose(found.second.confidence, two.confidence)
    assert found.cells.tolist() == [0, 0, 2]


def test_other_labels_are_refused():
    one, two = evaluation([0], [0], alias="one"), evaluation([0], [1], alias="two")
    with pytest.raises(InputError, match="both models on the same images"):
        compare_evaluations(one, two)
