"""The cues that are suspect."""

from dataclasses import replace

import vitlens
from tests.kit.cues import suspects
from tests.kit.planted_reliance import images, reads
from tests.kit.select import select_one, values_of


def test_a_cue_misleads_although_another_change_of_it_moves_more_predictions():
    reliance = vitlens.reliance(reads("hue"), images(120)[0], cues=["background-colour"])
    base = select_one(reliance.rows, intervention="greyed")
    points = replace(base.changed, value=20.0, low=15.0, high=25.0)
    greyed = replace(
        base,
        gained=points,
        changed=points,
        lost=replace(points, value=-20.0),
        p_gained_holm=0.001,
        p_lost_holm=0.001,
    )
    exchanged = replace(
        base,
        intervention="hue-exchanged",
        changed=replace(points, value=30.0),
        gained=replace(points, value=0.0),
        p_gained_holm=1.0,
    )
    (suspect,) = suspects([exchanged, greyed], base.model)
    assert suspect.misleads
    assert suspect.intervention == "greyed"
    whole_image = [replace(row, cue="colour") for row in (exchanged, greyed)]
    assert values_of(suspects(whole_image, base.model), "cue") == ["colour"]
