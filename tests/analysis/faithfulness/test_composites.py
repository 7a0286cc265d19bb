"""Composites: where the evidence lies, what ideal, uniform and opposite maps score, and that draws are seeded."""

import pytest
import torch

from vitlens.analysis.faithfulness.defaults import COMPOSITE_KINDS
from vitlens.analysis.faithfulness.localisation import (
    COMPOSITE_SCORES,
    Composites,
    confident_images,
    embedded,
    mosaics,
    pasted,
    recognised,
)
from vitlens.errors import InputError

CLASSES = 10
HEIGHT, WIDTH = 36, 48


def given(count: int = 24) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Images that are all of one value, their class in tenths; their objects are squares."""
    labels = torch.arange(count) % CLASSES
    images = (labels / CLASSES).view(-1, 1, 1, 1).expand(-1, 3, HEIGHT, WIDTH).clone()
    masks = torch.zeros(count, HEIGHT, WIDTH, dtype=torch.bool)
    masks[:, 8:20, 10:30] = True
    return images, labels, masks


def made(name: str, count: int = 6, seed: int = 0) -> Composites:
    return COMPOSITE_KINDS[name].make(*given(), count=count, seed=seed)


def scores(maps: torch.Tensor, composites: Composites) -> dict[str, list[float]]:
    return {name: score(maps, composites.masks).tolist() for name, score in COMPOSITE_SCORES.items()}


@pytest.mark.parametrize("name", COMPOSITE_KINDS)
def test_the_evidence_lies_where_the_mask_says_and_depends_on_the_seed_alone(name):
    composites, kind = made(name), COMPOSITE_KINDS[name]
    assert composites.images.shape == (6, 3, HEIGHT, WIDTH)
    assert composites.sources.shape == (6, kind.classes)
    assert len(composites) == 6 * kind.explained
    for which, target, mask in zip(composites.which, composites.targets, composites.masks):
        here = composites.images[which, 0]
        torch.testing.assert_close(here[mask], torch.full_like(here[mask], int(target) / CLASSES))
        assert (here[~mask] - int(target) / CLASSES).abs().min() > 0.05  # another class everywhere else
    few, other = made(name, 3), made(name, 6, seed=1)
    assert torch.equal(few.images, composites.images[:3])
    assert torch.equal(few.sources, composites.sources[:3])
    assert not torch.equal(other.images, composites.images)


@pytest.mark.parametrize("name", COMPOSITE_KINDS)
def test_an_ideal_a_uniform_and_an_opposite_map(name):
    composites = made(name)
    count, ideal = len(composites), composites.masks.float()
    assert scores(ideal, composites) == {key: [1.0] * count for key in COMPOSITE_SCORES}
    assert scores(-ideal, composites) == {key: [0.0] * count for key in COMPOSITE_SCORES}  # negative is no mass
    uniform, areas = scores(torch.ones(count, 6, 6), composites), composites.masks.flatten(1).float().mean(1)
    assert uniform["roc_auc"] == [0.5] * count
    assert uniform["pointing"] == pytest.approx(areas.tolist())  # all points tie
    assert uniform["mass"] == pytest.approx(areas.tolist())
    assert composites.chance == pytest.approx(float(areas.mean()))


def test_patches_in_the_cell_have_all_the_mass():
    composites = made("mosaic-2", 1)
    assert torch.equal(composites.masks.sum(0), torch.ones(HEIGHT, WIDTH).long())
    maps = torch.zeros(4, 6, 8)
    for cell in range(4):
        maps[cell, 3 * (cell // 2) : 3 * (cell // 2) + 3, 4 * (cell % 2) : 4 * (cell % 2) + 4] = 1 + cell
    found = scores(maps, composites)
    assert (found["mass"], found["pointing"]) == ([1.0] * 4, [1.0] * 4)
    assert min(found["roc_auc"]) > 0.999  # bilinear interpolation rounds the cell's corner off
    maps[0, 5, 7] = maps[0, 0, 0]  # a tie outside is a miss for its share of the highest points
    first, *others = scores(maps, composites)["pointing"]
    assert 12 / 13 <= first < 1
    assert others == [1.0] * 3
    assert scores(maps, composites)["mass"][0] == pytest.approx(12 / 13)


def test_classes_are_distinct_and_images_used_evenly_and_no_composite_is_made_twice():
    images, labels, _ = given(CLASSES * 2)
    composites = mosaics(images, labels, side=2, count=10)
    assert all(len(set(labels[row].tolist())) == 4 for row in composites.sources)
    times = composites.sources.flatten().bincount(minlength=len(labels))
    assert int(times.max() - times.min()) <= 2  # the last few may be of one class
    images, labels, _ = given(2)
    both = embedded(images, labels, count=50)  # two images, either on the other
    assert sorted(both.sources.tolist()) == [[0, 1], [1, 0]]


def test_too_few_classes_are_refused():
    images, labels, masks = given(3)
    with pytest.raises(InputError, match="at least 4 distinct classes, found 3"):
        mosaics(images, labels)
    with pytest.raises(InputError, match="at least 2 distinct classes, found 1"):
        pasted(images, labels, masks & (labels == 1)[:, None, None])


def test_confident_correct_images_and_recognised_classes():
    logits, labels = torch.tensor([[4.0, 0.0], [0.1, 0.0], [4.0, 0.0], [0.0, 4.0]]), torch.tensor([0, 0, 1, 1])
    assert confident_images(logits, labels).tolist() == [0, 1, 3]
    assert confident_images(logits, labels, least=0.9).tolist() == [0, 3]
    ranked = torch.tensor([[4.0, 3.0, 2.0, 1.0]]).expand(4, 4)
    assert recognised(ranked, torch.arange(4), 2).tolist() == [True, True, False, False]
    assert recognised(ranked, torch.arange(4), 9).all()
