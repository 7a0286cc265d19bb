"""The rules of the categories of failures, on maps and masks made by hand."""

import torch

from vitlens.analysis.answers.evaluate import Evaluation
from vitlens.analysis.failures.errors import compare_answers
from vitlens.analysis.failures.rules import (
    Applied,
    cut,
    doubtful,
    elsewhere,
    half_of,
    look_alike,
    lowest,
    map_cells,
    on_distractors,
    small,
    spread,
    wrong_part,
)

GRID = (4, 4)


def masks_of(*squares: tuple[int, int, int]) -> torch.Tensor:
    """Squares (row, column, side) on images of 16 px."""
    masks = torch.zeros(len(squares), 16, 16, dtype=torch.bool)
    for mask, (row, column, side) in zip(masks, squares):
        mask[row : row + side, column : column + side] = True
    return masks


def peaks(*cells: tuple[int, int]) -> torch.Tensor:
    """Maps on 4 x 4 cells with one high cell."""
    maps = torch.full((len(cells), *GRID), 0.1)
    for values, cell in zip(maps, cells):
        values[cell] = 1.0
    return maps


def test_a_cell_with_one_pixel_of_the_object_belongs_to_it():
    cells = map_cells(peaks((0, 0)), masks_of((3, 3, 2)), grid=GRID)
    assert cells.objects.view(GRID)[:2, :2].all()
    assert cells.objects.sum() == 4
    assert torch.allclose(cells.shares.sum(1), torch.ones(1, dtype=torch.float64))


def test_elsewhere_is_a_highest_cell_off_the_object():
    maps = torch.cat([peaks((1, 1), (3, 3)), torch.zeros(1, *GRID), torch.full((1, *GRID), torch.nan)])
    own = elsewhere(map_cells(maps, masks_of(*[(4, 4, 4)] * 4), grid=GRID))
    assert own.holds.tolist() == [False, True, False, False]
    assert own.known.tolist() == [True, True, False, False]


def test_two_equally_high_cells_must_both_lie_on_the_object():
    maps = peaks((1, 1))
    maps[0, 3, 3] = 1.0
    assert elsewhere(map_cells(maps, masks_of((4, 4, 4)), grid=GRID)).holds.tolist() == [True]


def test_objects_that_are_empty_or_fill_the_image_are_not_judged():
    masks = torch.stack([torch.zeros(16, 16, dtype=torch.bool), torch.ones(16, 16, dtype=torch.bool)])
    assert not elsewhere(map_cells(peaks((0, 0), (0, 0)), masks, grid=GRID)).known.any()


def test_wrong_part_is_half_of_the_mass_on_few_cells_of_the_object():
    even = torch.full((3, *GRID), 0.1)
    even[:, :2, :2] = 1.0
    maps = torch.cat([even, 10 * peaks((0, 0)), peaks((3, 3))])
    own = wrong_part(map_cells(maps, masks_of(*[(0, 0, 8)] * 5), grid=GRID))
    assert own.holds.tolist() == [False, False, False, True, False]
    assert own.known.all()


def test_distractors_must_hold_more_of_the_map_than_of_the_image():
    cells = map_cells(peaks((3, 3), (0, 0)), masks_of((0, 0, 4), (0, 0, 4)), grid=GRID)
    changed = torch.zeros(2, 16, dtype=torch.bool)
    changed[:, [0, 15]] = True  # cell 0 belongs to the object
    own = on_distractors(cells.shares, changed, cells.objects, cells.known)
    assert own.holds.tolist() == [True, False]
    assert own.known.all()
    assert not on_distractors(cells.shares, torch.zeros_like(changed), cells.objects, cells.known).known.any()


def test_small_and_cut():
    masks = masks_of((1, 1, 2), (1, 1, 6), (1, 1, 7), (9, 8, 8), (0, 0, 0))
    assert small(masks).holds.tolist() == [True, False, False, False, False]
    assert small(masks).known.tolist() == [True, True, True, True, False]
    assert cut(masks).holds.tolist() == [False, False, False, True, False]
    assert not small(masks_of(*[(1, 1, 4)] * 5)).holds.any(), "none is small where all are equal"


def test_half_of_takes_the_fewest_cells():
    values = torch.tensor([[0.5, 0.3, 0.2], [0.3, 0.4, 0.3], [0.0, 0.0, 0.0]])
    assert half_of(values).tolist() == [[True, False, False], [True, True, False], [False, False, False]]


def test_lowest_quarter_of_what_is_known():
    values = torch.arange(8.0)
    assert lowest(values, torch.ones(8, dtype=torch.bool)).sum() == 2
    assert lowest(values, values > 3).tolist() == [False] * 4 + [True] + [False] * 3
    assert not lowest(values, torch.zeros(8, dtype=torch.bool)).any()


def test_look_alikes_have_correlated_logits_of_other_images():
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(120, 4, generator=draw)
    logits[:, 1] = logits[:, 0] + 0.1 * torch.randn(120, generator=draw)  # classes 0 and 1 look alike
    labels = torch.arange(120) % 4
    own = look_alike(logits, labels)
    rivals = logits.scatter(1, labels[:, None], -torch.inf).argmax(1)
    of_first = labels == 0
    assert own.known.all()
    assert torch.equal(own.holds[of_first], (rivals == 1)[of_first])
    assert not look_alike(logits[:, :2], labels % 2).known.any(), "two classes always resemble each other"
    assert not look_alike(logits[:9], labels[:9]).known.any()


def test_a_label_is_doubtful_where_two_models_agree_on_another_class_and_are_sure():
    labels = torch.zeros(4, dtype=torch.long)
    first = torch.tensor([[0.0, 9.0, 0.0], [0.0, 9.0, 0.0], [0.0, 1.0, 0.0], [9.0, 0.0, 0.0]])
    second = torch.tensor([[0.0, 9.0, 0.0], [0.0, 0.0, 9.0], [0.0, 9.0, 0.0], [9.0, 0.0, 0.0]])
    models = (Evaluation(name, tuple("abc"), logits, labels) for name, logits in (("a", first), ("b", second)))
    assert doubtful(compare_answers(*models)).holds.tolist() == [True, False, False, False]


def test_spread_leaves_the_others_unknown():
    own = spread(Applied(torch.tensor([True, False]), torch.tensor([True, True])), torch.tensor([3, 1]), 5)
    assert own.holds.tolist() == [False, False, False, True, False]
    assert own.known.tolist() == [False, True, False, True, False]
