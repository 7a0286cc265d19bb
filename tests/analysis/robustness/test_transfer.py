import torch
from vitlens.analysis.robustness.curve import Transfer

CLEAN = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 1]]).bool()
FOOLED = torch.tensor([[1, 1, 0, 0], [0, 1, 0, 0]]).bool()
OF_FIRST = torch.tensor([[0, 0, 1, 0], [1, 0, 0, 1]]).bool()  # the first's images shown to both
OF_SECOND = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 1]]).bool()


def test_rates_are_of_what_fooled_the_source_and_the_target_has_right():
    matrix = Transfer(CLEAN, [OF_FIRST, OF_SECOND], FOOLED)
    assert matrix.rate(0, 0).value == 1
    assert (matrix.rate(0, 1).value, matrix.rate(0, 1).n) == (0.5, 2)
    assert (matrix.rate(1, 0).value, matrix.rate(1, 0).n) == (0.0, 1)
    assert matrix.accuracy(0, 1).value == 0.5
    assert matrix.clean_accuracy(1).value == 0.75


def test_no_rate_where_nothing_was_fooled():
    matrix = Transfer(CLEAN, [CLEAN, OF_SECOND], torch.zeros(2, 4).bool())
    assert matrix.rate(0, 1) is None
