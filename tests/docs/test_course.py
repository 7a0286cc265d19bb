"""The course: every exercise is whole, and what follows from arithmetic is what the page says."""

import itertools
import math
import re
from pathlib import Path

import pytest
import torch

from docs.reversal import loss_of_reversal
from vitlens.analysis.attention.positions import rank_correlation
from vitlens.models.loading import load
from vitlens.models.positions import fixed_positions

PAGE = (Path(__file__).parents[2] / "docs" / "course.md").read_text()
WORDS = re.sub(r"\s+", " ", PAGE)


def test_every_exercise_is_whole_and_has_a_hint():
    exercises = dict(
        re.findall(r"^### (\d\.\d) [^\n]+\n(.*?)(?=^##)", PAGE, flags=re.DOTALL | re.MULTILINE)
    )
    assert re.findall(r"^## Week (\d): ", PAGE, flags=re.MULTILINE) == [
        str(week) for week in range(1, 9)
    ]
    for week in range(1, 9):
        assert sum(number.startswith(str(week)) for number in exercises) >= 2
    hints = PAGE.partition("\n## Hints\n")[2]
    assert re.findall(r"(?:^-|\.)\s+(\d\.\d):", hints, flags=re.MULTILINE) == list(exercises)
    for number, text in exercises.items():
        goal, command, rest = re.split(r"^```(?:sh)?\n", text, flags=re.MULTILINE)
        assert goal.strip().endswith((".", "?")), number
        assert re.search(r"vitlens |python docs/|python3 -c ", command), number
        assert re.findall(r"^- \*\*([^*]+)\*\*:", rest, flags=re.MULTILINE) == [
            "Look for",
            "Right",
            "Mistake",
        ]
        assert re.search(r"\d", rest.partition("**Right**")[2].partition("**Mistake**")[0]), (
            f"{number}: no number"
        )


def test_numbers_that_follow_from_arithmetic():
    weights = torch.tensor([0, 0.5, 0]).softmax(0).tolist()
    assert ", ".join(f"{weight:.3f}" for weight in weights) in WORDS
    assert f"exponential of {math.log(0.52 / 0.24):.2f}" in WORDS
    *some, last = ((32 // side) ** 2 + 1 for side in (2, 4, 8, 16))
    assert f"{', '.join(map(str, some))} and {last} tokens" in WORDS
    for side, patch in ((32, 4), (224, 16)):  # the mean distance of uniform attention
        places = [
            (patch * row, patch * column)
            for row in range(side // patch)
            for column in range(side // patch)
        ]
        mean = (
            math.fsum(itertools.starmap(math.dist, itertools.product(places, repeat=2)))
            / len(places) ** 2
        )
        assert f"{mean:.2f} px at {side} px" in WORDS


def test_the_loss_of_a_reversal_without_positions_and_the_program_learns_with_them_alone():
    data = torch.randn(3200, 10, 64, generator=torch.Generator().manual_seed(0))
    error = (data.mean(1, keepdim=True) - data.flip(1)).square().mean().item()
    assert error == pytest.approx((1 - 1 / 10) ** 2 + (10 - 1) / 10**2, abs=0.005)
    assert f"all ten give {error:.2f}" in WORDS
    assert loss_of_reversal(length=5, heads=1, positions=True, steps=300) < 0.1
    assert loss_of_reversal(length=5, heads=2, positions=False, steps=300) > 0.7  # 3/4 at best


def test_parameters():
    for preset, width, depth in (("vit-mini", 128, 4), ("vit-micro", 128, 6), ("vit-tiny", 192, 6)):
        count = load(preset, random_weights=True).parameter_count()
        assert (
            count
            == 49 * width
            + 66 * width
            + depth * (12 * width**2 + 13 * width)
            + 2 * width
            + 10 * width
            + 10
        )
        assert f"{count:,}" in WORDS


@pytest.mark.parametrize(("kind", "words"), [("sine", "1-D"), ("sine-2d", "2-D")])
def test_the_order_of_fixed_positions(kind, words):
    layout = load("vit-mini", random_weights=True).layout
    placed = torch.nn.functional.normalize(
        fixed_positions(kind, grid=layout.grid, prefix=0, dim=64)[0].float(), dim=-1
    )
    order = rank_correlation(placed @ placed.T, layout)
    assert f"{words} sines {order[0]:.2f}" in WORDS
    assert (
        kind != "sine"
        or f"rows are ordered ({order[1]:.2f}), columns less ({order[2]:.2f})" in WORDS
    )
