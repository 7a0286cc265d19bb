"""A teacher with a memory answers as one without, and is asked about each image once."""

from dataclasses import replace

import pytest
import torch

from tests.training.test_loop import Drawn
from tests.training.tiny import CLASSES, tiny_model, tiny_recipe, tiny_split
from vitlens.data.split import InMemory
from vitlens.training import remembered
from vitlens.training.recipe import Recipe
from vitlens.training.remembered import Remembered, forms_of
from vitlens.training.teacher import Teacher

SPLIT = tiny_split("train", 30)
IMAGES = next(SPLIT.batches(30)).images
CPU = torch.device("cpu")


class Counting(Teacher):
    """Counts the images that it is asked about."""

    seen = 0

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        self.seen += len(images)
        return super().__call__(images)


def taught(*, mirrored: bool) -> tuple[Counting, Remembered]:
    teacher = Counting(tiny_model(), classes=CLASSES)
    memory = Remembered(teacher)
    memory.look(SPLIT, mirrored=mirrored, device=CPU)
    return teacher, memory


def test_known_images_are_answered_from_memory() -> None:
    teacher, memory = taught(mirrored=True)
    assert teacher.seen == 60
    order = torch.randperm(30, generator=torch.Generator().manual_seed(0))
    for images in (IMAGES[order], IMAGES[order].flip(-1)):
        assert torch.allclose(memory(images), Teacher(tiny_model(), classes=CLASSES)(images), atol=1e-6)
    assert teacher.seen == 60
    assert memory.asked == 0


def test_a_changed_pixel_makes_a_new_image() -> None:
    teacher, memory = taught(mirrored=False)
    images = IMAGES[:4].clone()
    images[2, 1, 3, 4] += 1e-7
    expected = Teacher(tiny_model(), classes=CLASSES)(images)
    assert torch.allclose(memory(images), expected, atol=1e-6)
    assert (teacher.seen, memory.asked) == (31, 1)
    assert torch.allclose(memory(IMAGES.flip(-1)), teacher(IMAGES.flip(-1)), atol=1e-6)
    assert memory.asked == 31


def test_all_images_are_told_apart() -> None:
    _, memory = taught(mirrored=True)
    assert len(memory._hashes.unique()) == 60


def test_before_it_has_looked_it_asks() -> None:
    teacher = Teacher(tiny_model(), classes=CLASSES)
    assert torch.equal(Remembered(teacher)(IMAGES), teacher(IMAGES))


@pytest.mark.parametrize(
    ("recipe", "forms"),
    [
        (Recipe(epochs=2), 1),
        (Recipe(epochs=1), 0),
        (Recipe(epochs=3, flip=True), 2),
        (Recipe(epochs=2, flip=True), 0),
        (Recipe(epochs=9, crop_padding=1), 0),
        (Recipe(epochs=9, randaugment=1), 0),
        (Recipe(epochs=9, mixup=0.8), 0),
        (Recipe(epochs=9, cutmix=1.0), 0),
        (Recipe(epochs=9, erasing=0.1), 0),
    ],
)
def test_when_it_pays(recipe: Recipe, forms: int) -> None:
    assert forms_of(recipe, SPLIT) == forms


def test_not_for_images_that_are_drawn_anew_nor_for_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = tiny_recipe(crop_padding=0, flip=False, epochs=9)
    assert isinstance(SPLIT.source, InMemory)
    assert forms_of(recipe, replace(SPLIT, source=Drawn(SPLIT.source))) == 0
    monkeypatch.setattr(remembered, "MOST", 89)
    assert forms_of(recipe, SPLIT) == 0
    monkeypatch.setattr(remembered, "MOST", 90)
    assert forms_of(recipe, SPLIT) == 1
