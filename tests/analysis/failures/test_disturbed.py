import pytest
import torch

from vitlens.analysis.answers.evaluate import evaluate
from vitlens.analysis.failures.disturbed import KINDS, passes, robustness
from vitlens.data.digits import digits
from vitlens.errors import UnknownNameError
from vitlens.models.loading import load


def test_the_untouched_level_is_the_clean_accuracy_and_the_hardest_is_lower():
    model, split = load("cnn-digits"), digits("test").limit(40)
    clean = evaluate(model, split).correct
    done = []
    found = robustness(model, split, kinds=("low-pass", "occlusion"), advance=done.append)
    assert [way.kind for way in found] == ["low-pass", "occlusion"]
    for way in found:
        assert way.correct.shape == (len(way.levels), 40)
        assert torch.equal(way.correct[0], clean)
        estimates = way.accuracies()
        assert estimates[0].value > estimates[-1].value + 0.3
        assert all(one.low <= one.value <= one.high for one in estimates)
    assert sum(done) == passes(split, kinds=("low-pass", "occlusion"))


def test_results_do_not_depend_on_the_batch_size():
    model, split = load("cnn-digits"), digits("test").limit(10)
    [one], [other] = (robustness(model, split, kinds=("shuffle",), batch_size=size) for size in (3, 10))
    assert torch.equal(one.correct, other.correct)


def test_an_unknown_kind_names_the_known():
    with pytest.raises(UnknownNameError, match="no disturbance 'lowpass'; did you mean 'low-pass'"):
        robustness(load("cnn-digits"), digits("test").limit(2), kinds=("lowpass",))
    assert set(KINDS) == {"low-pass", "high-pass", "shuffle", "occlusion"}
