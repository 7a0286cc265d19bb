import torch

from vitlens.training.erase import AREA, erase

IMAGES = torch.zeros(2000, 3, 16, 24)
KEYS = torch.arange(2000)


def test_rectangles_of_noise_of_the_right_sizes_in_a_share_of_the_images() -> None:
    erased = erase(IMAGES, KEYS, seed=0, epoch=0, chance=0.25)
    changed = (erased != 0).any(1)
    hit = changed.flatten(1).any(1)
    assert abs(hit.float().mean() - 0.25) < 0.04
    boxes = [mask.nonzero() for mask in changed[hit]]
    for box in boxes:
        tall, wide = (box.max(0).values - box.min(0).values + 1).tolist()
        assert len(box) == tall * wide  # a rectangle without holes
        assert len(box) <= AREA[1] * 16 * 24 + 16 + 24  # sides are rounded
    assert erased.min() >= 0
    assert erased.max() < 1
    assert abs(erased[erased != 0].mean() - 0.5) < 0.01


def test_a_view_is_erased_alike_however_batches_are_cut_and_the_input_stays() -> None:
    whole = erase(IMAGES, KEYS, seed=0, epoch=0, chance=0.5)
    assert torch.equal(whole[7:9], erase(IMAGES[7:9], KEYS[7:9], seed=0, epoch=0, chance=0.5))
    assert not torch.equal(whole, erase(IMAGES, KEYS, seed=0, epoch=1, chance=0.5))
    assert not IMAGES.any()
    assert torch.equal(erase(IMAGES, KEYS, seed=0, epoch=0, chance=0.0), IMAGES)
