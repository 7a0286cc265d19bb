"""The whole cascade counts, and a check that could not have failed is inconclusive."""

import pytest
import torch

from tests.kit.map_rows import FALLING, STAGES, STAYING
from vitlens.analysis.faithfulness.checks import Judgement, Stage, judged_cascade, middle_of
from vitlens.analysis.faithfulness.randomisation import (
    Randomisation,
    predictions_kept,
    randomisation,
    randomised,
    weight_groups,
)
from vitlens.models.loading import load
from vitlens.models.model import Model
from vitlens.uncertainty import Estimate


def judged(*means: float, half: float = 0.02, kept: float | None = None, n: int = 32) -> Judgement:
    known = [Estimate(mean, mean - half, mean + half, n, "") if n else None for mean in means]
    return judged_cascade([Stage(name, own, kept) for name, own in zip(STAGES, known)])


@pytest.mark.parametrize(
    ("means", "state"),
    [
        (FALLING, "pass"),
        (STAYING, "fail"),  # below 0.5 only in the lower half
        ((1.0, 0.4, 0.9, 0.9, 0.2, 0.0), "pass"),
        ((0.1, 0.1, 0.1, 0.1, 0.1, 0.6), "fail"),  # all weights random, and the maps are the old ones
        ((1.0,) * 6, "fail"),
        ((0.9, 0.8, 0.49, 0.1, 0.1, 0.0), "inconclusive"),  # its interval holds 0.5
        ((0.1, 0.1, 0.1, 0.1, 0.1, 0.49), "inconclusive"),
    ],
)
def test_states(means: tuple[float, ...], state: str) -> None:
    assert judged(*means).state == state


@pytest.mark.parametrize(
    ("changes", "obstacle"),
    [
        ({"n": 0}, "uniform maps"),
        ({"n": 9}, "few images"),
        ({"kept": 0.9}, "predictions unchanged"),
    ],
)
def test_what_could_not_have_failed(changes: dict[str, float], obstacle: str) -> None:
    for means in (FALLING, STAYING):
        found = judged(*means, **changes)  # type: ignore[arg-type]
        assert (found.state, found.lack) == ("inconclusive", obstacle)


def test_the_decisive_stage() -> None:
    assert judged(*STAYING).value.value == STAYING[2]  # the least down to the middle block
    assert judged(0.1, 0.1, 0.1, 0.1, 0.1, 0.6).value.value == 0.6


@pytest.mark.parametrize(
    ("names", "place"),
    [
        (("head", "blocks 9 to 11", "blocks 6 to 8", "blocks 3 to 5", "blocks 0 to 2", "embedding"), 2),
        (("head", "block 2", "block 1", "block 0", "embedding"), 2),
        (("head", "block 1", "block 0", "embedding"), 1),
        (("head", "block 0"), 1),
        (("head",), 0),
    ],
)
def test_the_middle_block(names: tuple[str, ...], place: int) -> None:
    assert middle_of(names) == place


def test_a_cascade_has_the_means_and_the_share_of_predictions_that_stay() -> None:
    correlation = torch.tensor([[0.8, 0.6, torch.nan], [0.2, 0.0, torch.nan]])
    kept = torch.tensor([[True, True, False], [False, False, True]])
    stages = Randomisation(("head", "block 0"), correlation, kept).stages()
    assert [stage.similarity.value for stage in stages] == pytest.approx([0.7, 0.1])
    assert [stage.kept for stage in stages] == pytest.approx([2 / 3, 1 / 3])
    assert stages[0].similarity.n == 2
    empty = Randomisation(("head",), torch.full((1, 2), torch.nan)).judged()
    assert (empty.value, empty.lack) == (None, "uniform maps")


def test_a_model_that_no_permutation_changes_is_inconclusive() -> None:
    """Every weight equal to those of its tensor: permuting them is the identity, so no map has to change."""
    model = load("vit-digits")
    with torch.no_grad():
        for parameter in model.module.parameters():
            parameter.fill_(parameter.mean())
    images = torch.rand(12, 3, *model.input_size, generator=torch.Generator().manual_seed(0))
    kept = predictions_kept(model, images)
    assert bool(kept.all())

    def pixels(_model: Model, batch: torch.Tensor, _targets: torch.Tensor) -> torch.Tensor:
        return batch.mean(1)

    found = randomisation(model, images, torch.zeros(12, dtype=torch.long), pixels, kept=kept).judged()
    assert (found.state, found.lack) == ("inconclusive", "predictions unchanged")


def test_predictions_kept_are_those_of_the_randomised_model_and_weights_come_back() -> None:
    model = load("vit-digits")
    images = torch.rand(6, 3, *model.input_size, generator=torch.Generator().manual_seed(0))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    kept, groups = predictions_kept(model, images, parts=2, seed=3), weight_groups(model, parts=2)
    assert kept.shape == (len(groups), 6)
    with torch.no_grad():
        own = model(images).argmax(-1)
        with randomised(model, groups[:2], seed=3):
            expected = model(images).argmax(-1) == own
    assert torch.equal(kept[1], expected)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
