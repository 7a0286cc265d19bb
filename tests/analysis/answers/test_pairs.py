import pytest
import torch

from vitlens.analysis.answers.evaluate import Evaluation
from vitlens.analysis.answers.pairs import Pair, pairs
from vitlens.errors import InputError

LABELS = torch.tensor([0, 0, 0, 0, 0, 0, 1, 1, 1, 1])


def answering(alias: str, right: list[int], labels: torch.Tensor = LABELS) -> Evaluation:
    said = torch.where(torch.tensor([index in right for index in range(10)]), labels, 1 - labels)
    return Evaluation(alias, ("a", "b"), torch.nn.functional.one_hot(said, 2).float(), labels)


def test_counts_and_exact_p_by_hand() -> None:
    one, other = answering("one", [0, 1, 2, 3, 4, 5, 6]), answering("other", [0, 7])
    (found,) = pairs([one, other])
    # 6 against 1 of 7: p = 2 (1 + 7) / 2^7
    assert found == Pair("one", "other", 1, 6, 1, 2, 0.125, 0.125)


def test_many_pairs_are_corrected_for_their_number() -> None:
    found = pairs([answering("a", list(range(10))), answering("b", []), answering("c", [0])])
    assert [(pair.first, pair.second) for pair in found] == [("a", "b"), ("a", "c"), ("b", "c")]
    assert found[0].p == pytest.approx(2 / 2**10)
    assert found[0].p_holm == pytest.approx(3 * 2 / 2**10)
    assert found[2].p_holm == found[2].p == 1.0


def test_other_images_are_refused() -> None:
    with pytest.raises(InputError, match="found different labels"):
        pairs([answering("a", []), answering("b", [], 1 - LABELS)])
