"""Position and size: each is found where a model depends on it, and only there."""

import pytest
import torch

import vitlens
from tests.kit.planted_places import bars, failing, never, off_centre, small
from tests.kit.select import values_of
from tests.kit.tiny import ours

FOUND = {off_centre: {"position"}, small: {"size"}, never: set()}
GEOMETRY = ["position", "size"]


@pytest.mark.parametrize("rule", FOUND)
def test_only_what_a_model_depends_on_is_named_of_position_and_size(rule):
    result = vitlens.reliance(failing(rule), bars(), cues=GEOMETRY)
    assert set(result.relied_on()) == FOUND[rule]


@pytest.mark.parametrize("rule", [off_centre, small])
def test_a_cause_of_errors_by_place_or_size_misleads(rule):
    result = vitlens.reliance(failing(rule), bars(), cues=GEOMETRY)
    assert {row.cue for row in result.rows if row.misleads} <= FOUND[rule]


def test_the_controls_of_position_and_size_are_matched_and_leave_a_bar_readable():
    rows = vitlens.reliance(failing(never), bars(), cues=GEOMETRY).rows
    for row in rows:
        assert row.is_matched
        assert row.errors == 0
    assert max(row.changed_by_control.value for row in rows) < 0.02


@pytest.mark.parametrize(("rule", "cue"), [(off_centre, "position"), (small, "size")])
def test_without_masks_position_and_size_are_found_too(rule, cue):
    assert cue in vitlens.reliance(failing(rule), bars(masks=False), cues=GEOMETRY).relied_on()


def test_without_masks_a_shift_that_cuts_objects_off_is_no_position():
    assert (
        "position"
        not in vitlens.reliance(failing(never), bars(masks=False), cues=GEOMETRY).relied_on()
    )


def test_images_without_masks_are_changed_as_a_whole():
    result = vitlens.reliance(failing(off_centre), bars(masks=False), cues=GEOMETRY)
    assert set(values_of(result.rows, "cue")) == set(GEOMETRY)
    assert not result.left_out
    for row in result.rows:
        assert row.is_matched


def test_a_shift_is_off_the_grid_of_patches_along_both_axes():
    """The images are black with one white pixel, which the model sees where it is shifted to."""
    model = ours(size=(56, 56), patch_size=(8, 7))
    images = torch.zeros(16, 3, 56, 56)
    images[..., 28, 28] = 1.0
    places = list[tuple[int, int]]()

    def read(_module: object, inputs: tuple[torch.Tensor, ...]) -> None:
        if len(inputs[0]) == len(images):
            brightest = inputs[0][:, 0].flatten(1).argmax(1)
            places.extend(divmod(place, 56) for place in brightest.tolist())

    with model.module.register_forward_pre_hook(read):
        vitlens.reliance(model, images, torch.zeros(16, dtype=torch.long), cues=["position"])
    shifted = [place for place in places if place != (28, 28)]
    assert len(shifted) == len(images)
    for row, column in shifted:
        assert (row - 28) % 8 != 0
        assert (column - 28) % 7 != 0
