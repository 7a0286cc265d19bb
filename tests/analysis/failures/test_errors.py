import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from vitlens.analysis.answers.evaluate import Evaluation
from vitlens.analysis.failures.errors import by_class, compare_answers, confusions, taxonomy
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
    return compare_answers(evaluation(first, labels, alias="one"), evaluation(second, labels, alias="two"))


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
def test_slices_add_up_to_all_images(rows):
    found = compared(rows)
    slices = by_class(found)
    assert sum(part.n for part in slices) == len(rows)
    for part in slices:
        own = [row for row in rows if found.classes[row[0]] == part.name]
        assert part.first.value == pytest.approx(sum(first == label for label, first, _ in own) / part.n)
        assert part.second.value == pytest.approx(sum(second == label for label, _, second in own) / part.n)


@given(triples)
def test_the_paired_test_is_mcnemars(rows):
    found = compared(rows)
    one = sum(first != label and second == label for label, first, second in rows)
    two = sum(first == label and second != label for label, first, second in rows)
    expected = stats.binomtest(min(one, two), one + two, 0.5).pvalue if one + two else 1.0
    assert found.p == pytest.approx(expected)


def test_confusions_are_counted_for_each_model():
    found = confusions(compared([(0, 1, 0), (0, 1, 1), (0, 1, 2), (1, 1, 0), (2, 2, 2)]))
    listed = [(pair.truth, pair.prediction, pair.first, pair.second) for pair in found]
    assert listed == [("a", "b", 3, 1), ("a", "c", 0, 1), ("b", "a", 0, 1)]


def test_classes_are_matched_by_name():
    one = evaluation([0, 1, 2], [0, 1, 2], alias="one")
    two = evaluation([2, 1, 3], [2, 1, 0], alias="two", classes=("c", "b", "a", "d"))
    found = compare_answers(one, two)
    assert found.classes == ("a", "b", "c", "d")
    assert found.second.prediction.tolist() == [0, 1, 3]
    assert found.cells.tolist() == [0, 0, 2]


def test_margin_is_the_distance_to_the_second():
    found = compared([(0, 0, 1)])
    high = torch.tensor([2.0, 0.0, 0.0]).softmax(0)
    assert found.first.confidence.item() == pytest.approx(high[0].item())
    assert found.first.margin.item() == pytest.approx((high[0] - high[1]).item())


def test_other_labels_are_refused():
    one, two = evaluation([0], [0], alias="one"), evaluation([0], [1], alias="two")
    with pytest.raises(InputError, match="both models on the same images"):
        compare_answers(one, two)


def test_taxonomy_of_single_images():
    labels = torch.zeros(5, dtype=torch.long)
    found = taxonomy(labels, torch.tensor([0, 1, 0, 1, 1]), torch.tensor([0, 0, 1, 1, 2]))
    assert found.tolist() == [0, 1, 2, 3, 4]
