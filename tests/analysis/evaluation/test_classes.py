import pytest
import torch

from vitlens.analysis.evaluation.classes import reading, require_shared
from vitlens.data.cue_conflict import imagenet16
from vitlens.errors import InputError
from vitlens.names import imagenet_classes


def test_classes_are_read_by_name():
    found = reading(("b", "a", "c"), ("a", "b"))
    assert found.classes == ("a", "b", "c")
    assert found.read(torch.tensor([[1.0, 2.0, 3.0]])).tolist() == [[2.0, 1.0, 3.0]]
    assert found.note == ""


def test_imagenet_answers_for_the_sixteen():
    data = ("cat", "knife", "dog")
    found = reading(imagenet_classes(), data)
    assert found.classes[:3] == data
    assert set(found.classes) == set(imagenet16())
    logits = torch.randn(4, 1000, generator=torch.Generator().manual_seed(0))
    expected = torch.stack([logits.softmax(1)[:, list(imagenet16()[name])].mean(1) for name in found.classes], 1)
    torch.testing.assert_close(found.read(logits).exp(), expected)
    assert "mean probability" in found.note


def test_the_model_that_does_not_know_the_classes_is_named():
    with pytest.raises(InputError, match=r"the second model .* only in the data: 'b'; only in the model: 'c'"):
        require_shared(("a", "b"), ("a", "c"), ("a", "b"))
