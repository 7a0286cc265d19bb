import pytest
import torch

from vitlens.data.digits import TEST_PER_CLASS, DigitScenes, _load, digits, source_digits
from vitlens.data.draws import keys, mix, uniform
from vitlens.data.scenes import LUMINANCE, SceneStyle, render
from vitlens.data.split import InMemory
from vitlens.errors import DataError


def scenes_of(count: int, *, canvas: int = 32, seed: int = 0) -> DigitScenes:
    return DigitScenes(torch.arange(count), torch.zeros(count, dtype=torch.long), seed, SceneStyle(canvas))


def luminance(pixels):
    return (pixels.float() / 255 * torch.tensor(LUMINANCE).view(3, 1, 1)).sum(1)


def test_no_source_digit_is_in_both_parts_and_none_is_lost():
    train, test = source_digits("train"), source_digits("test")
    assert sorted(torch.cat([train, test]).tolist()) == list(range(1797))


def test_the_test_part_holds_equally_many_of_each_digit():
    test = digits("test")
    assert len(test) >= 450
    assert test.labels.bincount().tolist() == [TEST_PER_CLASS] * 10
    assert torch.equal(test.groups, source_digits("test"))


def test_labels_are_those_of_the_source_digits():
    train = digits("train", scenes=2)
    assert torch.equal(train.labels, _load()[1][train.groups])


def test_a_scene_does_not_depend_on_its_batch_mates():
    scenes = scenes_of(300)
    together = scenes.draw(torch.arange(300))
    for index in (0, 1, 17, 299):
        alone = scenes.draw(torch.tensor([index]))
        assert torch.equal(alone.pixels[0], together.pixels[index])
        assert torch.equal(alone.masks[0], together.masks[index])


def test_drawing_in_chunks_changes_nothing(monkeypatch):
    scenes = scenes_of(20)
    whole = scenes.draw(torch.arange(20))
    monkeypatch.setattr("vitlens.data.scenes._CHUNK", 32 * 32 * 3)
    assert torch.equal(scenes.draw(torch.arange(20)).pixels, whole.pixels)


def test_a_scene_does_not_depend_on_how_many_rounds_follow():
    one, three = digits("test"), digits("test", scenes=3)
    assert len(three) == 3 * len(one)
    first = torch.arange(len(one))
    assert torch.equal(three.source.read(first), one.source.read(first))
    assert torch.equal(three.groups[len(one) : 2 * len(one)], one.groups)


def test_same_seed_same_scenes_and_another_seed_others():
    indices = torch.arange(5)
    assert torch.equal(scenes_of(5, seed=3).read(indices), scenes_of(5, seed=3).read(indices))
    assert not torch.equal(scenes_of(5, seed=3).read(indices), scenes_of(5, seed=4).read(indices))


def test_epochs_share_no_scene_and_the_first_is_the_split_itself():
    train = digits("train", scenes=2)
    pairs = [
        (source, repetition)
        for number in range(3)
        for source, repetition in zip(
            train.epoch(number).subset.source.sources.tolist(), train.epoch(number).subset.source.repetitions.tolist()
        )
    ]
    assert len(set(pairs)) == len(pairs)
    indices = torch.arange(4)
    assert torch.equal(train.epoch(0).source.read(indices), train.source.read(indices))
    assert not torch.equal(train.epoch(1).source.read(indices), train.source.read(indices))


def test_a_limited_split_is_renewed_as_well():
    limited = digits("train").limit(20)
    indices = torch.arange(20)
    assert not torch.equal(limited.epoch(1).source.read(indices), limited.source.read(indices))
    assert torch.equal(limited.epoch(1).labels, limited.labels)


def test_the_test_part_is_the_same_in_every_epoch():
    test = digits("test")
    assert isinstance(test.source, InMemory)
    assert test.epoch(5) is test


@pytest.mark.parametrize("canvas", [32, 64])
def test_ink_and_ground_differ_in_luminance_on_every_scene(canvas):
    drawn = scenes_of(400, canvas=canvas).draw(torch.arange(400))
    light = luminance(drawn.pixels)
    for values, mask in zip(light, drawn.masks):
        ink, ground = values[mask].median(), values[~mask].median()
        assert abs(ink - ground) > 0.25


def test_masks_hold_the_whole_digit_and_nothing_at_the_border_of_most():
    masks = digits("test").masks
    area = masks.flatten(1).float().mean(1)
    assert area.min() > 0.04
    assert area.max() < 0.45
    rows, columns = masks.any(2).sum(1), masks.any(1).sum(1)
    assert rows.float().mean() > 14  # px of 32: large enough to read
    assert (rows <= 32).all()
    assert (columns >= 3).all()


def test_pixels_inside_the_mask_are_one_colour():
    """The mask is exact: away from the soft outline only the ink's grain is seen, never ground or stroke."""
    drawn = scenes_of(50, canvas=128).draw(torch.arange(50))
    for pixels, mask in zip(drawn.pixels.float() / 255, drawn.masks):
        inner = -torch.nn.functional.max_pool2d(-mask[None, None].float(), 9, 1, 4)[0, 0] > 0
        ink = pixels[:, inner]
        assert (ink.amax(1) - ink.amin(1) <= 0.06 + 2 / 255).all()


def test_no_stroke_touches_the_ink(monkeypatch):
    """Strokes that covered the whole canvas would still leave the digit, and a margin around it, as it is."""
    pictures = []
    for cover in (torch.zeros, torch.ones):
        monkeypatch.setattr(
            "vitlens.data.scenes._stroke", lambda draws, canvas, make=cover: make(len(draws), canvas, canvas)
        )
        pictures.append(scenes_of(20, canvas=128).draw(torch.arange(20)))
    near = torch.nn.functional.max_pool2d(pictures[0].masks[:, None].float(), 3, 1, 1) > 0
    changed = (pictures[0].pixels != pictures[1].pixels).any(1, keepdim=True)
    assert not (changed & near).any()
    assert changed.any()


def test_the_digit_is_the_source_digit():
    """A nearest-mean classifier on the masks, cropped to the ink, tells most digits: labels and drawings agree."""
    crops = []
    for split in (digits("train", scenes=1), digits("test")):
        drawn = split.masks if split.masks is not None else split.source.draw(torch.arange(len(split))).masks
        boxes = [mask[mask.any(1)][:, mask.any(0)][None, None].float() for mask in drawn]
        crops.append(
            torch.cat([torch.nn.functional.interpolate(box, (8, 8), mode="bilinear") for box in boxes]).flatten(1)
        )
    train_labels, test_labels = digits("train", scenes=1).labels, digits("test").labels
    means = torch.stack([crops[0][train_labels == label].mean(0) for label in range(10)])
    found = torch.cdist(crops[1], means).argmin(1)
    assert (found == test_labels).float().mean() > 0.7


def test_other_canvases():
    split = digits("test", canvas=64).limit(30)
    assert split.size == (64, 64)
    heights = split.masks.any(2).sum(1)
    assert 0.4 * 64 < heights.min() <= heights.max() <= 64


@pytest.mark.parametrize("options", [{"canvas": 8}, {"canvas": 4096}, {"scenes": 0}])
def test_what_cannot_be_drawn_is_refused(options):
    with pytest.raises(DataError, match="expected"):
        digits("test", **options)


def test_an_empty_batch_is_an_empty_batch():
    drawn = render(torch.zeros(0, 8, 8), torch.zeros(0, dtype=torch.long), SceneStyle())
    assert drawn.pixels.shape == (0, 3, 32, 32)
    assert drawn.masks.shape == (0, 32, 32)


def test_mixing_is_one_to_one_and_draws_are_uniform():
    words = torch.arange(1 << 16)
    assert len(mix(words).unique()) == len(words)
    draws = uniform(keys(7, words[:4000]), 50)
    assert draws.min() >= 0
    assert draws.max() < 1
    assert abs(draws.mean() - 0.5) < 0.005
    assert abs(draws.var() - 1 / 12) < 0.002
    correlation = torch.corrcoef(draws.T) - torch.eye(50)
    assert correlation.abs().max() < 0.09  # 5.7 standard errors of 4,000 independent pairs
