"""The input of the model: every image once an epoch, augmented, and the targets of mixtures."""

import multiprocessing
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, replace
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torchvision.transforms import InterpolationMode, v2

import vitlens
from tests.kit.commands import ran
from tests.kit.datasets import pixels_of
from tests.kit.trainings import (
    EnoughError,
    Showing,
    plain_recipe,
    recipe_of,
    shown,
    split_of,
    tiny_split,
    trained,
)
from tests.kit.waiting import HANGS
from vitlens import load_data
from vitlens.errors import DataError, RunError

MANY = tiny_split("train", 40)
PIXELS = MANY.source.read(torch.arange(40))


def rows(images: Tensor) -> list[int]:
    """Return the indices of these images."""
    plain = PIXELS.float() / 255
    return [(plain == image).flatten(1).all(1).nonzero().item() for image in images]


def test_an_epoch_shows_every_image_at_most_once_in_full_batches_whatever_their_size(tmp_path):
    orders = {}
    for name, size, seed in (("whole", 40, 0), ("parts", 8, 0), ("other", 8, 1)):
        images, targets = shown(MANY, tmp_path, steps=2 * 40 // size, batch_size=size, seed=seed)
        orders[name] = rows(images)
        assert targets.tolist() == [row % 3 for row in orders[name]]
    for order in orders.values():
        assert sorted(order[:40]) == sorted(order[40:]) == list(range(40))
        assert order[:40] != order[40:]  # another order in another epoch
    assert orders["whole"] == orders["parts"] != orders["other"]
    left_out, _ = shown(MANY, tmp_path, steps=5, batch_size=16)  # two batches an epoch
    assert len(set(rows(left_out)[:32])) == len(set(rows(left_out)[32:64])) == 32
    few, _ = shown(MANY.pick(torch.arange(3)), tmp_path, batch_size=8)
    assert sorted(rows(few)) == [0, 1, 2]


def test_the_views_of_an_image_are_in_one_batch_and_augmented_differently(tmp_path):
    images, _ = shown(MANY, tmp_path, steps=6, batch_size=6, views=3)
    for batch in map(rows, images.split(6)):
        assert {batch.count(row) for row in batch} == {3}
    erased, _ = shown(MANY, tmp_path, batch_size=6, views=3, erasing=1.0)
    assert len(erased.unique(dim=0)) == 6


@pytest.mark.parametrize(
    "kind", [{"crop_padding": 2, "flip": True}, {"randaugment": 2}, {"erasing": 0.5}], ids=str
)
def test_a_view_depends_on_seed_epoch_and_image_and_not_on_its_batch(kind, tmp_path):
    before = PIXELS.clone()
    at_once, _ = shown(MANY, tmp_path, steps=2, batch_size=40, **kind)
    parts, _ = shown(MANY, tmp_path, steps=8, batch_size=10, **kind)
    assert torch.equal(at_once, parts)
    same = split_of(PIXELS[:1].expand(40, -1, -1, -1))
    first, *rest = (
        shown(same, tmp_path, steps=2, batch_size=40, seed=seed, **kind)[0]
        for seed in (0, 4, 1 << 32)
    )
    by_index = len(first[:40].unique(dim=0))
    assert len(first.unique(dim=0)) > by_index > 15  # and by epoch
    for other in rest:
        assert not torch.equal(first.sort(0).values, other.sort(0).values)
    assert torch.equal(PIXELS, before)


@pytest.mark.parametrize("flip", [True, False])
def test_shifts_and_flips_are_all_equally_likely(flip, tmp_path):
    image = torch.arange(1, 8 * 12 + 1, dtype=torch.uint8).view(1, 1, 8, 12).expand(-1, 3, -1, -1)
    padded = nn.functional.pad(image[0], (1, 1, 1, 1))
    expected = torch.stack([padded[:, y : y + 8, x : x + 12] for y in range(3) for x in range(3)])
    expected = torch.cat([expected, expected.flip(3)]) if flip else expected
    images, _ = shown(
        split_of(image.expand(3000, -1, -1, -1)),
        tmp_path,
        batch_size=3000,
        crop_padding=1,
        flip=flip,
    )
    views, counts = (255 * images).round().to(torch.uint8).unique(dim=0, return_counts=True)
    assert torch.equal(views, expected.unique(dim=0))
    mean_count = 3000 / len(expected)
    assert (
        (counts - mean_count) ** 2 / mean_count
    ).sum() < 41  # chi-squared with 17 degrees: p > 0.001


@pytest.mark.parametrize("magnitude", [9, 30])
def test_randaugment_draws_torchvisions_operations_equally_often(magnitude, tmp_path):
    noise = tiny_split("train", 1, (16, 24)).source.read(torch.tensor([0]))
    theirs: Any = v2.RandAugment(fill=0)
    expected = []
    chances = []
    operations = theirs._AUGMENTATION_SPACE.items()
    for name, (values, signed) in operations:
        steps = values(31, 16, 24)
        signs = (1, -1) if signed else (1,)
        for sign in signs:
            value = 0.0 if steps is None else float(steps[magnitude]) * sign
            transformed = theirs._apply_image_or_video_transform(
                noise, name, value, InterpolationMode.NEAREST, theirs._fill
            )
            expected.append(transformed[0])
            chances.append(1 / len(operations) / len(signs))
    many = split_of(noise.expand(2500, -1, -1, -1))
    how = {"randaugment": 1, "magnitude": magnitude}
    drawn = (255 * shown(many, tmp_path, batch_size=2500, **how)[0]).round().to(torch.uint8)
    views, counts = drawn.unique(dim=0, return_counts=True)
    distinct, index = torch.stack(expected).unique(dim=0, return_inverse=True)
    assert torch.equal(views, distinct)
    mean_count = 2500 * torch.zeros(len(distinct)).index_add(0, index, torch.tensor(chances))
    assert (
        (counts - mean_count) ** 2 / mean_count
    ).sum() < 50  # chi-squared with at most 22 degrees: p > 0.0006


def test_rectangles_of_noise_of_the_right_sizes_in_a_share_of_the_images(tmp_path):
    black = split_of(torch.zeros(1500, 3, 16, 24, dtype=torch.uint8))
    erased, _ = shown(black, tmp_path, batch_size=1500, erasing=0.25)
    changed = (erased != 0).any(1)
    hit = changed.flatten(1).any(1)
    assert abs(hit.float().mean() - 0.25) < 0.05
    down = changed[hit].any(2)
    across = changed[hit].any(1)
    tall = down.sum(1)
    wide = across.sum(1)
    # a rectangle without holes
    assert torch.equal(changed[hit], down[:, :, None] & across[:, None])
    areas = tall * wide / (16 * 24)
    aspects = tall / wide
    assert 0.01 < areas.min() < 0.05
    assert 0.28 < areas.max() <= 1 / 3 + 40 / (16 * 24)  # sides are rounded
    assert abs(areas.mean() - (0.02 + 1 / 3) / 2) < 0.02
    assert aspects.min() < 0.5 < 2 < aspects.max()
    assert abs(aspects.log().mean()) < 0.2
    for side in (down, across):
        first = side.int().argmax(1)
        after = side.shape[1] - side.flip(1).int().argmax(1)
        assert torch.equal(after - first, side.sum(1))  # without gaps
        assert (first / side.shape[1]).std() > 0.1
    assert 0 <= erased.min() <= erased.max() < 1
    assert abs(erased[erased != 0].mean() - 0.5) < 0.01


@pytest.mark.parametrize("kind", ["mixup", "cutmix"])
def test_targets_are_the_shares_of_the_images_in_the_mixture(kind, tmp_path):
    """Constant images, as bright as their class: the mean of a mixture is linear in the shares, as
    its targets are.
    """
    shades = split_of(
        (100 * (torch.arange(96) % 3)).byte()[:, None, None, None].expand(-1, 3, 8, 12).contiguous()
    )
    images, targets = shown(shades, tmp_path, steps=12, batch_size=8, **{kind: 1.0})
    assert targets.sum(1).tolist() == pytest.approx([1.0] * 96)
    means = targets @ torch.tensor([0.0, 100.0, 200.0]) / 255
    assert images.mean((1, 2, 3)).tolist() == pytest.approx(means.tolist(), abs=1e-4)
    assert len(targets[:, 0].unique()) > 8
    assert torch.isin((255 * images).round(), torch.tensor([0.0, 100.0, 200.0])).all() == (
        kind == "cutmix"
    )


def test_a_batch_is_mixed_with_the_given_probability_by_one_of_two(tmp_path):
    few = tiny_split("train", 8)
    showing = Showing(120)
    recipe = plain_recipe(mixup=0.8, cutmix=1.0, mix_chance=0.5)
    with pytest.raises(EnoughError):
        trained(
            tmp_path, train=few.pick(torch.arange(8 * 120) % 8), recipe=recipe, objective=showing
        )
    pixels = few.source.read(torch.arange(8)).float() / 255
    kinds = {"whole": 0, "mixed": 0, "cut": 0}
    for images, targets in zip(showing.images, showing.targets):
        cut = torch.isin(images, pixels).all()
        kinds["whole" if targets.ndim == 1 else "cut" if cut else "mixed"] += 1
        if targets.ndim == 1:  # the labels as they are, of images as they are
            for image in images:
                assert (pixels == image).flatten(1).all(1).any()
    assert abs(kinds["whole"] - 60) < 17  # three standard deviations
    assert abs(kinds["cut"] - kinds["mixed"]) < 25
    alone, target = shown(tiny_split("train", 1), tmp_path, batch_size=1, mixup=1.0)  # one image
    assert (target.ndim, len(alone)) == (1, 1)


@dataclass(frozen=True)
class OnDisk:
    """A source of a user's own, which is read by workers."""

    pixels: Tensor
    fails: str = ""

    def __len__(self) -> int:
        return len(self.pixels)

    def read(self, indices: Tensor) -> Tensor:
        in_worker = multiprocessing.parent_process() is not None
        if self.fails and in_worker and 20 in indices:
            if self.fails == "killed":  # as by a system out of memory
                os.kill(os.getpid(), signal.SIGKILL)
            raise DataError("cannot read image 20")
        return self.pixels[indices]


def test_workers_read_the_same_pixels_in_the_same_order_and_what_they_cannot_read_is_one_line(
    tmp_path,
):
    expected, _ = shown(MANY, tmp_path, steps=10, batch_size=8)
    for source in (OnDisk(PIXELS), OnDisk(PIXELS / 255)):  # floats are rounded to 8 bits
        views, _ = shown(replace(MANY, source=source), tmp_path, steps=10, batch_size=8)
        assert torch.equal(views, expected)
    with pytest.raises(DataError, match=r"^cannot read image 20$") as caught:
        shown(replace(MANY, source=OnDisk(PIXELS, "broken")), tmp_path, steps=10, batch_size=8)
    assert caught.value.__cause__ is not None
    assert not active_children()  # ended, though the error is still held


KILLED = """
from pathlib import Path
from dataclasses import replace
from tests.public.training.test_batches import MANY, OnDisk, PIXELS, shown
shown(replace(MANY, source=OnDisk(PIXELS, "killed")), Path("{folder}"), steps=10, batch_size=8)
"""


# in a process of its own, as PyTorch's handler of the signal may raise at any later time
@pytest.mark.slow
def test_a_killed_worker_is_an_error_with_how_to_resume(tmp_path):
    command = [sys.executable, "-c", KILLED.format(folder=tmp_path)]
    root = Path(__file__).parents[3]
    done = subprocess.run(
        command, cwd=root, capture_output=True, text=True, timeout=HANGS, check=False
    )
    assert "RunError" in done.stderr
    assert "continue with resume=True" in done.stderr


def test_errors_of_a_user_are_not_changed_and_those_of_lost_workers_are(tmp_path):
    for error in (RuntimeError("of its own"), ValueError("of its own"), DataError("of its own")):
        with pytest.raises(type(error), match=r"^of its own$"):
            trained(tmp_path, objective=Showing(error=error))
    for error in (
        RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed."),
        ConnectionResetError(),
    ):
        with pytest.raises(RunError, match="resume=True"):
            trained(tmp_path, objective=Showing(error=error))


def test_each_epoch_draws_its_own_images(tmp_path):
    split = load_data("digits", part="train", limit=40)
    images, _ = shown(split, tmp_path, steps=15, batch_size=8)
    for epoch, epoch_images in enumerate((255 * images).round().byte().split(40)):
        assert {*map(bytes, epoch_images.numpy())} == {
            *map(bytes, pixels_of(split.epoch(epoch)).numpy())
        }


def test_epochs_are_tested_when_due(tmp_path):
    _, result = trained(tmp_path, recipe=plain_recipe(epochs=5, evaluate_every=2))
    tested = [metrics.epoch for metrics in result.history if metrics.test_accuracy is not None]
    assert tested == [1, 3, 4]
    assert result.best_epoch in tested


MIXED = "--set cutmix=1.0 --set mixup=0.8 --set randaugment=2 --set erasing=0.5 --set flip=true"


@pytest.mark.parametrize(
    ("size", "more", "words"),
    [
        (8, "--set flip=false", "crop 1 px"),
        (14, "--set mixup=0.8 --set views=2", "crop 1 px, flip, mixup 0.8"),
        (30, MIXED, "crop 1 px, flip, RandAugment 2, erasing 0.5, mixup 0.8, CutMix 1.0"),
    ],
)
def test_the_first_batch_of_a_report_is_what_enters_the_model(size, more, words, still, tmp_path):
    """Its first twelve images as given and as trained on, with their targets."""
    line = (
        f"train vit-mini --data {still} --epochs 1 --batch-size {size} --seed 3 --dim 16 "
        "--depth 1 --heads 2"
    )
    none = "--set crop_padding=1 --set randaugment=0 --set cutmix=0 --set mix_chance=1"
    record = ran(tmp_path / "out", f"{line} {none} {more}")
    split = load_data(str(still), part="train", seed=3)
    batch = record.first_batch
    showing = Showing()
    recipe = recipe_of({row.setting: row.value for row in record.recipe})
    with pytest.raises(EnoughError):
        trained(
            tmp_path,
            vitlens.load("vit-digits"),
            train=split,
            test=split,
            recipe=recipe,
            seed=3,
            objective=showing,
        )
    images = showing.images[0]
    targets = showing.targets[0]
    count = min(12, size)
    assert batch.trained.shape == (count, 3, 32, 32)
    assert np.array_equal(batch.trained, (255 * images[:count]).round().byte().numpy())
    shares = nn.functional.one_hot(targets, 10).float() if targets.ndim == 1 else targets
    assert batch.targets == pytest.approx(shares[:count].numpy())
    pixels = split.source.read(torch.arange(40)).numpy()
    indices = [(pixels == image).all((1, 2, 3)).nonzero()[0][0] for image in batch.given]
    assert split.labels[torch.tensor(indices)].tolist() == batch.labels.tolist()
    assert (batch.targets[range(count), batch.labels] > 0).mean() > 0.8
    (setup,) = record.setup
    assert (setup.augmentation, setup.shown) == (words, count)
    assert setup.mixed == ((batch.targets > 0).sum(1) > 1).sum()
    # mixed images say nothing of overfitting
    assert (record.scores[0].gap is None) == ("mixup" in more)
