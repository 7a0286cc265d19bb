"""Reliance of models: planted cues come first, controls are matched, no claim without them."""

from dataclasses import replace
from functools import cache
from itertools import chain

import pytest
import torch
from PIL import Image
from torch import nn
from torchvision.transforms.functional import to_pil_image

import vitlens
from tests.kit.batches import SEEN_AT_ONCE, counted
from tests.kit.planted_reliance import (
    CLASSES,
    SIDE,
    images,
    labelled_by,
    reads,
    trained_on,
    wrapped,
)
from tests.kit.select import select, values_of
from vitlens.errors import InputError, UnknownNameError
from vitlens.uncertainty import LEVEL

SPLIT, FACTORS = images(120)
PLANTED = {
    "hue": "background-colour",
    "texture": "fine-detail",
    "brightness": "brightness",
    "shape": "layout",
}
# what is changed together with a cue, by construction of the images
TOGETHER = {"hue": (), "texture": ("background",), "brightness": (), "shape": ()}


@cache
def whole(cue: str):
    """Measure the reliance of a model on all cues."""
    return vitlens.reliance(reads(cue), labelled_by(cue, SPLIT, FACTORS))


def found(cue: str, **more: object):
    return vitlens.reliance(reads(cue), labelled_by(cue, SPLIT, FACTORS), **more)


@pytest.mark.parametrize("cue", PLANTED)
def test_the_planted_cue_comes_first_and_nothing_else_is_named(cue):
    assert whole(cue).relied_on() == (PLANTED[cue], *TOGETHER[cue])


@pytest.mark.parametrize("form", ["8-bit tensor", "array", "class folders"])
def test_images_in_every_form_give_the_same_rows(form, tmp_path):
    split = labelled_by("brightness", SPLIT, FACTORS).limit(24)
    (batch,) = split.batches(24)
    pixels = (255 * batch.images).round().byte()
    for index, (image, label) in enumerate(zip(pixels, batch.labels.tolist(), strict=True)):
        place = tmp_path / split.classes[label]
        place.mkdir(exist_ok=True)
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(place / f"{index:02}.png")
    forms = {
        "8-bit tensor": pixels,
        "array": pixels.permute(0, 2, 3, 1).numpy(),
        "class folders": tmp_path,
    }
    labels = None if form == "class folders" else batch.labels
    (row,) = vitlens.reliance(reads("brightness"), forms[form], labels, cues=["brightness"]).rows
    (expected,) = vitlens.reliance(reads("brightness"), split, cues=["brightness"]).rows
    assert row.n == 24
    assert row.size == pytest.approx(expected.size)
    assert (row.changed_by, row.lost, row.gained) == (
        expected.changed_by,
        expected.lost,
        expected.gained,
    )


def test_no_more_than_a_batch_of_a_split_is_read_at_once(monkeypatch):
    # of which the content decides the order
    monkeypatch.setattr("vitlens.data.identity._AT_ONCE", SEEN_AT_ONCE)
    split = counted((SIDE, SIDE), CLASSES, count=24)
    rows = vitlens.reliance(
        reads("brightness"), split, cues=["brightness"], batch_size=SEEN_AT_ONCE
    ).rows
    assert rows[0].n == 24
    assert max(split.source.requested) <= SEEN_AT_ONCE


@pytest.mark.parametrize("cue", ["hue", "texture"])
def test_a_shortcut_that_a_network_learned_comes_first(cue):
    split = labelled_by(cue, SPLIT, FACTORS)
    assert vitlens.evaluate(trained_on(cue), split).correct.float().mean() > 0.95
    assert vitlens.reliance(trained_on(cue), split).relied_on()[0] == PLANTED[cue]


def test_a_model_that_every_change_confuses_alike_relies_on_nothing():
    result = vitlens.reliance(reads("nothing"), SPLIT)
    assert result.relied_on() == ()
    assert min(row.changed_by.value for row in result.rows) > 0.3


def test_controls_are_matched_by_distance():
    rows = whole("shape").rows
    for row in rows:
        assert row.is_matched
    assert len(set(values_of(rows, "cue", "intervention"))) == len(rows) > 20
    tuned = [row for row in rows if row.cue not in ("layout", "position", "size", "background")]
    for row in tuned:
        assert row.control_size == pytest.approx(row.size, rel=0.02), row.cue_and_change


def test_a_model_that_ignores_colour_never_changes_its_predictions():
    rows = vitlens.reliance(
        reads("luminance"), SPLIT, cues=["colour", "background-colour", "object-colour"]
    ).rows
    assert set(values_of(rows, "changed_by.value")) == {0.0}, (
        "greying and turning hues keep luminance"
    )
    assert set(values_of(rows, "fixed", "broken")) == {(0, 0)}
    for row in rows:
        assert not row.is_relied_on


def test_a_misleading_hue_is_named_with_what_greying_fixes():
    """The model reads the hue, which has nothing to do with the label."""
    result = vitlens.reliance(
        reads("hue"), labelled_by("shape", SPLIT, FACTORS), cues=["background-colour"]
    )
    assert result.relied_on() == ("background-colour",)
    for row in result.rows:
        moved = row.changed_by.value * row.n
        assert row.fixed + row.broken == pytest.approx(moved), "of two classes one is right"
        assert row.lost.value == pytest.approx(
            100 * (row.control_fixed - row.control_broken - row.fixed + row.broken) / row.n
        )


def test_groups_widen_intervals_and_raise_p():
    copies = SPLIT.pick(torch.arange(60).repeat_interleave(3))
    copies = replace(copies, labels=FACTORS["texture"][:60].repeat_interleave(3))
    groups = torch.arange(60).repeat_interleave(3)
    alone = vitlens.reliance(reads("texture"), copies, cues=["fine-detail"]).rows
    clustered = vitlens.reliance(reads("texture"), copies, cues=["fine-detail"], groups=groups).rows
    for one, other in zip(alone, clustered, strict=True):
        assert one.n == other.n == 180
        assert other.changed.high - other.changed.low > 1.3 * (one.changed.high - one.changed.low)
        assert other.p > one.p


def test_the_order_of_the_images_has_no_effect():
    order = torch.randperm(len(SPLIT), generator=torch.Generator().manual_seed(1))
    cues = ["background-colour", "background", "layout", "parts"]
    in_order = found("shape", cues=cues)
    mixed = vitlens.reliance(
        reads("shape"), labelled_by("shape", SPLIT, FACTORS).pick(order), cues=cues
    )
    assert mixed.rows == in_order.rows


def test_what_is_unmatched_supports_no_sentence():
    (row,) = found("brightness", cues=["brightness"]).rows
    assert row.is_relied_on
    for size in (0.4 * row.size, 2.1 * row.size):
        assert not replace(row, control_size=size).is_relied_on
        assert replace(row, control_size=size).control == "unmatched"


def test_of_two_models_the_one_that_relies_more_is_named():
    pair = [reads("hue"), reads("texture")]
    result = vitlens.reliance(
        pair, labelled_by("hue", SPLIT, FACTORS), cues=["background-colour", "fine-detail"]
    )
    assert set(result.differences) == {
        ("reads-hue", "background-colour"),
        ("reads-texture", "fine-detail"),
    }
    effects = {(row.model, row.cue, row.intervention): row.changed.value for row in result.rows}
    for row in result.pairs:
        one = effects[row.first, row.cue, row.intervention]
        other = effects[row.second, row.cue, row.intervention]
        assert row.changed.value == pytest.approx(one - other)
    same = vitlens.reliance(
        [reads("hue"), twin()], labelled_by("hue", SPLIT, FACTORS), cues=["background-colour"]
    )
    assert same.differences == ()
    assert set(values_of(same.pairs, "p")) == {1.0}


def twin():
    return wrapped(reads("hue").module, "twin")


def test_grey_images_are_left_out_and_counted():
    grey, _ = images(60, grey=True)
    mixed = SPLIT.pick(torch.arange(80))
    batches = chain(mixed.batches(len(mixed)), grey.batches(len(grey)))
    pixels = torch.cat([batch.images for batch in batches])
    masks = torch.cat([mixed.masks, grey.masks])
    labels = torch.cat([FACTORS["hue"][:80], FACTORS["hue"][:60]])
    result = vitlens.reliance(reads("hue"), pixels, labels, masks=masks, cues=["colour"])
    assert set(values_of(result.rows, "n", "unchanged")) == {(80, 60)}
    assert result.relied_on() == ("colour",)


def test_what_cannot_be_changed_is_one_line_and_the_others_go_on():
    grey, factors = images(120, grey=True)
    split = replace(labelled_by("texture", grey, factors), masks=None)
    result = vitlens.reliance(reads("texture"), split)
    assert set(values_of(result.left_out, "cue")) == {
        "colour",
        "background-colour",
        "object-colour",
        "background",
    }
    assert "fine-detail" in result.relied_on()
    assert len(select(result.left_out, cue="colour")) == 3, "one for each intervention"
    few = vitlens.reliance(
        reads("texture"), split.pick(torch.arange(7)), cues=["brightness", "contrast"]
    )
    assert not few.rows
    assert set(values_of(few.left_out, "cue")) == {"brightness", "contrast"}


def test_masks_that_do_not_fit_are_one_line_and_the_others_go_on():
    pixels = next(iter(SPLIT.batches(40))).images
    masks = torch.ones(39, 8, 8, dtype=torch.bool)
    cues = ["background", "object-colour", "brightness"]
    result = vitlens.reliance(
        reads("brightness"), pixels, FACTORS["brightness"][:40], masks=masks, cues=cues
    )
    assert set(values_of(result.left_out, "cue")) == {"background", "object-colour"}
    for row in result.left_out:
        assert "(39, 8, 8)" in row.reason
    assert values_of(result.rows, "cue") == ["brightness"]


@pytest.mark.parametrize("sizes", [(8, 16), (16, 8)])
def test_masks_that_fit_only_one_of_two_models_are_used_for_neither(sizes):
    generator = torch.Generator().manual_seed(0)
    pictures = []
    for pixels in torch.rand(24, 3, 16, 16, generator=generator):
        pictures.append(to_pil_image(pixels))
    models = []
    for size in sizes:
        module = nn.Sequential(nn.Conv2d(3, 2, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()).eval()
        models.append(
            vitlens.wrap(
                module,
                image_size=size,
                mean=(0.0,) * 3,
                std=(1.0,) * 3,
                classes=("a", "b"),
                alias=f"px{size}",
            )
        )
    masks = torch.zeros(24, 8, 8, dtype=torch.bool)
    masks[:, 2:5, 2:5] = True
    labels = torch.arange(24) % 2
    cues = ["background", "brightness"]
    result = vitlens.reliance(models, pictures, labels, masks=masks, cues=cues)
    (row,) = result.left_out
    assert row.cue == "background"
    assert "(24, 16, 16)" in row.reason
    assert values_of(result.rows, "cue") == ["brightness", "brightness"]


def test_wrong_cues_and_groups_are_refused():
    with pytest.raises(UnknownNameError, match="did you mean 'colour'"):
        found("hue", cues=["color"])
    with pytest.raises(InputError, match="expected groups of shape"):
        found("hue", groups=torch.zeros(3))
    with pytest.raises(InputError, match="different aliases"):
        vitlens.reliance([reads("hue"), reads("hue")], SPLIT)
    with pytest.raises(InputError, match="expected at least one model"):
        vitlens.reliance([], SPLIT)


def test_the_table_has_a_row_for_each_intervention():
    result = found("hue", cues=["background-colour", "brightness"])
    table = result.to_pandas()
    assert table["cue"].tolist() == ["background-colour"] * 3 + ["brightness"]
    assert table["relied_on"].tolist() == [True, True, True, False]
    assert (table["changed_low"] <= table["changed"]).all()
    assert {row.p_holm <= LEVEL for row in result.rows if row.cue == "background-colour"} == {True}
    assert "reads-hue relies on" in repr(result)
