"""A report on misleading cues: misled models, the heads that carry the cue, and its maps."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.kit.contradictions import contradictions
from tests.kit.cues import suspects
from tests.kit.reliance_rows import (
    PAIR,
    examples_of,
    head_row,
    map_row,
    misleading_row,
    record_of,
    reliance_row,
)
from tests.kit.select import select, select_one, values_of
from vitlens.commands.audit.report import REPORT as AUDITED
from vitlens.commands.compare.report import REPORT
from vitlens.commands.run.publish import read_folder

AUDIT = Path(__file__).parents[2] / "reports" / "audit-vit-shortcut"
HUE = ("background-colour", "hue-exchanged")
BACKGROUND = ("background", "exchanged")
FIGURES = {"cue_examples", "cue_maps", "cue_heads"}


def said(record, question):
    """Return the claims about one question, by subject."""
    claims = REPORT(record).claims
    assert not list(contradictions(claims))
    return {claim.subject: claim for claim in claims if claim.question == question}


def shown(record):
    """Return the sections of the figures about misleading cues, by the figure's name."""
    sections = {}
    for section in REPORT(record).sections:
        sections |= {figure.name: section for figure in section.figures if figure.name in FIGURES}
    return sections


def test_two_models_that_one_cue_misleads_are_one_claim_that_fails():
    rows = [
        misleading_row(PAIR[0], *HUE, 20.0),
        misleading_row(PAIR[1], *HUE, 30.0, fixed=63, errors=111),
    ]
    claims = said(record_of(*rows), "shortcut")
    ((subject, claim),) = claims.items()
    assert set(subject.split(" and ")) == set(PAIR)
    assert claim.state == "fail"
    assert claim.evidence == "intervened"
    assert claim.effect.value == pytest.approx(30)  # the larger gain
    assert {"171", "200", "63", "111"} <= set(claim.says.split())
    for alias in PAIR:
        assert alias not in claim.title


def test_of_two_models_only_the_one_that_is_misled_is_named():
    record = record_of(misleading_row("vit", *HUE, 20.0), reliance_row("cnn", *HUE, 0.4, 0.06))
    claims = said(record, "shortcut")
    assert list(claims) == ["vit"]
    assert "vit" in claims["vit"].title
    assert "cnn" not in claims["vit"].says


@pytest.mark.parametrize(
    "more",
    [
        {"p_gained_holm": 0.06},
        {"p_lost_holm": 0.06},  # the control gains as much
        {"control_size": 0.04},
    ],
)
def test_a_gain_that_is_not_shown_beyond_a_matched_control_misleads_nobody(more):
    record = record_of(misleading_row("vit", *HUE, 20.0, **more))
    assert not said(record, "shortcut")
    assert not shown(record)


def test_what_misleads_is_suspected_before_what_a_model_relies_on_more():
    rows = [
        reliance_row("vit", *BACKGROUND, 0.9, 0.06),
        misleading_row("vit", "position", "shifted", 20.0),
    ]
    assert values_of(suspects(rows, "vit"), "cue") == ["position", "background"]


def test_a_small_gain_misleads_nobody():
    assert not said(record_of(misleading_row("vit", *HUE, 4.0)), "shortcut")


def test_heads_are_named_that_carry_more_of_the_cue_than_of_the_control():
    row = misleading_row("vit", *HUE, 20.0)
    heads = (
        head_row(row, 0, 0.50, 0.48),  # of any change
        head_row(row, 1, 0.30, 0.05),
        head_row(row, 2, 0.40, 0.05, p_holm=0.2),
    )
    record = record_of(row, cue_heads=heads)
    claim = said(record, "heads of the shortcut")["vit"]
    assert "L3.H1" in claim.says
    assert not {"L3.H0", "L3.H2"} & set(claim.says.replace(",", "").split())
    assert claim.effect.value == pytest.approx(0.30)
    assert claim.evidence == "intervened"
    (table,) = shown(record)["cue_heads"].tables
    assert table.rows[0][1] == "L3.H1"


def test_without_a_head_that_carries_the_cue_none_is_named():
    row = misleading_row("vit", *HUE, 20.0)
    assert not said(
        record_of(row, cue_heads=(head_row(row, 0, 0.5, 0.48),)), "heads of the shortcut"
    )


@pytest.mark.parametrize(("p_holm", "is_shown"), [(1e-6, True), (0.3, False)])
def test_the_best_map_is_named_where_it_shows_the_cue(p_holm, is_shown):
    row = misleading_row("vit", *HUE, 20.0)
    judged = (map_row(row, "saliency", 0.55, 0.9), map_row(row, "relevance", 0.75, p_holm))
    record = record_of(row, cue_maps=judged)
    claim = said(record, "map of the shortcut")["vit"]
    assert ("relevance" in claim.says) == is_shown
    assert ("saliency" in claim.says) == is_shown  # as one that does not show it
    assert claim.evidence == "attributed"
    assert claim.effect.value == pytest.approx(0.75)
    assert "cue_maps" in shown(record)


def test_heads_and_maps_of_another_cue_are_not_those_of_the_cue_that_misleads():
    misled = misleading_row("vit", *HUE, 20.0)
    other = reliance_row("vit", *BACKGROUND, 0.9, 0.06)
    examples, pictures = examples_of(other)
    record = record_of(
        misled,
        other,
        cue_heads=(head_row(other, 1, 0.3, 0.05),),
        cue_maps=(map_row(other, "relevance", 0.75),),
        cue_examples=examples,
        cue_pictures={"vit": pictures},
    )
    assert said(record, "shortcut")
    assert not said(record, "heads of the shortcut")
    assert not said(record, "map of the shortcut")
    assert not shown(record)


def test_images_that_a_cue_misleads_are_drawn_with_and_without_it():
    row = misleading_row("vit", *HUE, 20.0)
    examples, pictures = examples_of(row)
    record = record_of(
        row,
        cue_maps=(map_row(row, "relevance", 0.75),),
        cue_examples=examples,
        cue_pictures={"vit": pictures},
    )
    section = shown(record)["cue_examples"]
    (figure,) = section.figures
    drawn = figure.draw()
    assert len([axes for axes in drawn.axes if axes.images]) >= 3 * len(examples)


def test_without_a_cue_that_misleads_there_is_no_section_on_one():
    row = reliance_row("vit", *BACKGROUND, 0.9, 0.06)
    record = record_of(
        row, cue_heads=(head_row(row, 1, 0.3, 0.05),), cue_maps=(map_row(row, "relevance", 0.75),)
    )
    assert not shown(record)
    for question in ("shortcut", "heads of the shortcut", "map of the shortcut"):
        assert not said(record, question)


def test_an_audit_fails_a_model_that_a_cue_misleads():
    record = replace(read_folder(AUDIT), chapters=())
    (alias,) = record.aliases
    document = AUDITED(replace(record, reliance=(misleading_row(alias, *HUE, 20.0),)))
    release, claim, *_ = document.claims
    assert (claim.question, claim.state) == ("shortcut", "fail")
    assert "shortcut" in release.says
    assert document.first.glance.rows[0][0] == "shortcut"
    section = select_one(document.sections, status=claim.verdict)
    assert section.tables[0].rows[0][0] == alias
    unread = AUDITED(replace(record, reliance=()))
    assert not select(unread.claims, question="shortcut")
