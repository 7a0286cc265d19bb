"""`vitlens.reversal`: the attention of a trained layer lies where the answer is, and without
positions it reaches no more than is possible.
"""

import pytest
import torch

import vitlens
from tests.kit.commands import report
from vitlens.cli.main import run
from vitlens.commands.run.publish import read_folder
from vitlens.errors import InputError, UnknownNameError


def test_with_positions_attention_lies_on_the_anti_diagonal():
    trained = vitlens.reversal(length=6, heads=2, steps=300)
    assert trained.loss < 0.05 < trained.uniform
    anti_diagonal = trained.weights.flip(-1).diagonal(dim1=-2, dim2=-1).mean(-1)
    torch.testing.assert_close(anti_diagonal, trained.shares.mean(-1))
    assert trained.share > 0.9
    torch.testing.assert_close(trained.weights.sum(-1), torch.ones(2, 6))


@pytest.mark.parametrize(("length", "least"), [(4, 2 / 3), (5, 4 / 5)])
def test_without_positions_no_layer_reverses_better_than_by_chance(length, least):
    trained = vitlens.reversal(length=length, heads=1, positions="none", steps=200)
    assert trained.without_positions == pytest.approx(least, abs=0.02)
    assert trained.uniform == pytest.approx(1 - 1 / length, abs=0.02)
    assert trained.loss > least - 0.02
    assert trained.share < 1.5 / length


def test_copying_needs_no_positions():
    trained = vitlens.reversal("copy", length=5, heads=1, positions="none", steps=300)
    assert trained.without_positions == 0
    assert trained.share > 0.8
    torch.testing.assert_close(
        trained.weights.diagonal(dim1=-2, dim2=-1).mean(-1), trained.shares.mean(-1)
    )


def test_one_layer_sorts_better_than_uniform_attention_and_not_exactly():
    trained = vitlens.reversal("sort", length=6, heads=1, steps=300)
    assert 0.2 * trained.uniform < trained.loss < 0.95 * trained.uniform
    assert 1.5 / 6 < trained.share < 0.9
    assert trained.weights[0].argmax(-1).tolist() == sorted(trained.weights[0].argmax(-1).tolist())


def test_what_queries_and_keys_read_is_tested_on_the_trained_layer():
    whole, places, vectors = vitlens.reversal(length=5, heads=1, steps=300).views
    assert [view.view for view in (whole, places, vectors)] == [
        "vectors and positions",
        "positions",
        "vectors",
    ]
    assert places.losses.mean() < 0.1
    assert vectors.losses.mean() > 0.5
    (alone,) = vitlens.reversal(length=4, positions="none", steps=1).views
    assert alone.view == "vectors"


# options of a run -> those of the command that its report suggests
NEXT = {
    "--task sort --length 4 --heads 2 --positions none --steps 1": (
        "--task sort --length 4 --heads 2 --positions learned --steps 5000"
    ),
    "--task sort --length 4 --steps 1200": "--task sort --length 4 --steps 6000",
    "--length 4 --heads 1 --positions none --seed 3 --steps 1": (
        "--length 4 --heads 1 --positions learned --seed 3 --steps 1"
    ),
    "--length 5 --positions fixed --steps 1": "--length 5 --positions learned --steps 1",
    "--task copy --length 4 --positions none --steps 1": (
        "--task copy --length 4 --positions none --steps 5000"
    ),
}


@pytest.mark.parametrize("typed", NEXT)
def test_the_next_step_repeats_the_run_with_what_it_tests_changed(typed, tmp_path):
    assert run(["reversal", *typed.split(), "--quiet", "--out", str(tmp_path / "out")]) == 0
    claims = report(read_folder(tmp_path / "out")).claims
    (step,) = {claim.next_step for claim in claims if claim.next_step}
    words = step.partition("`")[2].partition("`")[0].split()
    assert words[:2] == ["vitlens", "reversal"]
    expected = NEXT[typed].split()
    assert dict(zip(words[2::2], words[3::2])) == dict(zip(expected[::2], expected[1::2]))
    # as it is printed, but shorter
    shorter = [*words[1:], "--steps", "1", "--quiet", "--out", str(tmp_path / "next")]
    assert run(shorter) == 0


def test_a_seed_repeats_a_training_and_leaves_other_random_numbers_alone():
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    first, again = (vitlens.reversal(length=4, steps=5, seed=3) for _ in range(2))
    torch.testing.assert_close(torch.rand(3), expected)
    torch.testing.assert_close(first.losses, again.losses, rtol=0, atol=0)
    assert not torch.equal(first.losses, vitlens.reversal(length=4, steps=5, seed=4).losses)


def test_a_training_that_cannot_be_is_refused():
    for wrong in ({"heads": 3}, {"length": 1}, {"steps": 0}):
        with pytest.raises(InputError, match="expected"):
            vitlens.reversal(**wrong)
    with pytest.raises(UnknownNameError, match="did you mean 'reverse'"):
        vitlens.reversal("revers")
    with pytest.raises(UnknownNameError, match="learned"):
        vitlens.reversal(positions="learnt")
