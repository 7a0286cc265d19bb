"""vitlens.choose_method: planted methods win on images, masks and mosaics; too few images are said to be too few."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import vitlens
from tests.lens.tiny import model_of, ours
from vitlens.attribution.choice import FAITHFULNESS, LOCALISATION, MOST, candidates_for, chosen_by_evidence
from vitlens.attribution.registry import ATTRIBUTIONS
from vitlens.data.split import InMemory, Split
from vitlens.errors import InputError, UnsupportedError
from vitlens.models.model import Model

SIDE, CLASSES, COUNT = 24, 12, 40
NAMES = tuple("abcdefghijkl")


class Hues(nn.Module):
    """Logits are the amounts of each class's colour, wherever it is (pixels are normalised to [-1, 1] before)."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("colours", torch.tensor(list(product((0.0, 0.5, 1.0), (0.0, 1.0), (0.0, 1.0)))))

    def nearness(self, images: Tensor) -> Tensor:
        """How near each pixel is to each class's colour (batch, classes, height, width)."""
        return (-60 * (images[:, None] - self.colours[:, :, None, None]).square().sum(2)).exp()

    def forward(self, images: Tensor) -> Tensor:
        return 40 * self.nearness(images / 2 + 0.5).mean((2, 3))


@pytest.fixture(scope="module")
def hues() -> Model:
    return model_of(Hues(), alias="hues", size=(SIDE, SIDE), classes=NAMES)


@pytest.fixture(scope="module")
def flat(hues: Model) -> Split:
    """Images of one colour each on the left two thirds, with noise on the right."""
    labels = torch.arange(COUNT) % CLASSES
    colours = hues.module.colours[labels]
    images = colours[:, :, None, None].expand(-1, -1, SIDE, SIDE).clone()
    images[..., 16:] = torch.rand(COUNT, 3, SIDE, 8, generator=torch.Generator().manual_seed(2))
    return Split("hues", "test", InMemory((images * 255).round().to(torch.uint8)), (SIDE, SIDE), hues.classes)


def near(model: Model, images: Tensor, targets: Tensor) -> Tensor:
    """The model's own evidence: the planted method."""
    return model.module.nearness(images)[torch.arange(len(images)), targets]


def dull(seed: int):
    def maps(_model: Model, images: Tensor, _targets: Tensor) -> Tensor:
        return torch.rand(len(images), 6, 6, generator=torch.Generator().manual_seed(seed))

    return maps


def test_the_planted_method_wins_on_mosaics_with_certainty_and_is_confirmed(hues, flat):
    choice = chosen_by_evidence(hues, flat, None, {"noise": dull(3), "planted": near, "more noise": dull(4)})
    assert choice.checks == (FAITHFULNESS, LOCALISATION)
    assert (choice.method, choice.certainty, choice.confirmation) == ("planted", 1.0, "confirmed")
    assert choice.scores[0].report[LOCALISATION].value > 0.9
    assert choice.scores[0].report[LOCALISATION].n <= len(choice.report)
    assert not set(choice.selection) & set(choice.report)
    assert set(choice.selection) | set(choice.report) == set(range(COUNT))


def test_noise_is_not_confirmed(hues, flat):
    choices = [
        chosen_by_evidence(hues, flat, None, {"a": dull(seed), "b": dull(seed + 1), "c": dull(seed + 2)}, seed=seed)
        for seed in (10, 20, 30)
    ]
    assert [choice.confirmation for choice in choices] == ["not confirmed"] * 3
    assert min(choice.certainty for choice in choices) < 0.8


def test_mosaics_judge_nothing_where_the_model_does_not_name_their_classes(hues, flat):
    model = model_of(Blind(), alias="blind", size=(SIDE, SIDE), classes=NAMES)
    choice = chosen_by_evidence(model, flat, None, {"a": dull(3), "b": dull(4)})
    assert choice.checks == (FAITHFULNESS,)
    assert "blind names" in choice.left_out[LOCALISATION]


class Blind(Hues):
    """Sees a colour only where it fills the left of the image, as it does in no mosaic."""

    def forward(self, images: Tensor) -> Tensor:
        return 40 * self.nearness(images[..., :16] / 2 + 0.5).amin((2, 3))


def test_masks_are_used_where_they_are_known(hues, flat):
    masks = torch.zeros(COUNT, SIDE, SIDE, dtype=torch.bool)
    masks[..., :16] = True
    masks[:4] = False  # images without an object have no value
    known = replace(flat, masks=masks)
    inside = chosen_by_evidence(hues, known, None, {"noise": dull(3), "mask": lambda *_given: masks.float()})
    assert (inside.method, inside.localised, inside.certainty) == ("mask", "objects", 1.0)
    assert inside.scores[0].report[LOCALISATION].value == 1.0
    counts = [inside.scores[0].selection[LOCALISATION].n, inside.scores[0].report[LOCALISATION].n]
    assert sum(counts) == COUNT - 4
    few = replace(flat, masks=masks & (torch.arange(COUNT) > 30)[:, None, None])
    assert "with a mask" in chosen_by_evidence(hues, few, None, {"a": dull(3), "b": dull(4)}).left_out[LOCALISATION]


def test_too_few_images_leave_the_default_method(hues, flat):
    choice = vitlens.choose_method(hues, flat.pick(torch.arange(19)), methods=["saliency", "occlusion"])
    assert choice.method in ("saliency", "occlusion")
    assert (choice.certainty, choice.confirmation, choice.scores, choice.selection) == (None, None, (), ())
    assert "at least 20" in choice.reason
    grouped = replace(flat, groups=torch.arange(COUNT) // 4)
    assert "groups" in vitlens.choose_method(hues, grouped, methods=["saliency", "occlusion"]).reason


def test_halves_keep_groups_together_and_follow_the_seed(hues, flat):
    grouped = replace(flat, groups=torch.arange(COUNT) // 2)
    one, again, other = (
        vitlens.choose_method(hues, grouped, methods=["saliency", "input-x-gradient"], seed=seed) for seed in (0, 0, 1)
    )
    assert not {place // 2 for place in one.selection} & {place // 2 for place in one.report}
    assert one.scores == again.scores
    assert one.selection != other.selection
    assert "saliency" in repr(one)


def test_candidates_explain_a_class_are_not_slow_and_come_by_rank():
    ranked = {entry.candidate: entry for entry in ATTRIBUTIONS.values() if entry.candidate is not None}
    assert all(entry.needs_class and not entry.slow for entry in ranked.values())
    assert sorted(ranked) == list(range(1, len(ranked) + 1))
    for model in (ours(), vitlens.load("cnn-digits")):
        names = candidates_for(model)
        assert len(names) == MOST
        ranks = [ATTRIBUTIONS[name].candidate for name in names]
        assert ranks == sorted(ranks)
        packaged = candidates_for(model, engine="grad-cam")
        assert all(ATTRIBUTIONS[name].package for name in packaged)


def test_what_cannot_be_chosen_from_is_refused(hues, flat):
    with pytest.raises(InputError, match="at least 2 candidates"):
        vitlens.choose_method(hues, flat, methods=["saliency"])
    with pytest.raises(InputError, match="at least 2 candidates"):
        vitlens.choose_method(hues, flat, methods=["saliency", "saliency"])
    with pytest.raises(UnsupportedError):
        vitlens.choose_method(hues, flat, methods=["saliency", "rollout"])


def test_images_and_targets_are_taken_in_every_form(hues, flat, tmp_path):
    def of(images: object, targets: object) -> object:
        return vitlens.choose_method(hues, images, targets=targets, methods=["saliency", "input-x-gradient"]).scores

    (batch,) = flat.batches(COUNT)
    for index, pixels in enumerate(flat.source.read(torch.arange(COUNT))):
        Image.fromarray(pixels.permute(1, 2, 0).numpy()).save(tmp_path / f"{index:02}.png")
    labels = torch.arange(COUNT) % CLASSES
    labelled = replace(flat, labels=labels)
    expected = of(batch.images, labels)
    assert of(flat, labels) == of(tmp_path, labels.tolist()) == of(labelled, "label") == expected
    assert of(flat, "predicted") == expected  # it predicts every image's own colour
    assert of(flat, 2) == of(flat, "c") != expected
    with pytest.raises(InputError, match="found 99"):
        of(flat, 99)
    with pytest.raises(InputError, match="one target per image"):
        of(flat, [0, 1])
