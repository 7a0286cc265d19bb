"""A report's claims about cues are matched, corrected and large, with number and control."""

import pytest

from tests.kit.contradictions import contradictions
from tests.kit.reliance_rows import PAIR, misleading_row, pair_row, record_of, reliance_row
from tests.kit.select import select, values_of
from vitlens.commands.compare.report import REPORT

HUE = ("background-colour", "hue-exchanged")
TILES = ("layout", "tiles")


def said(*rows, **more):
    """Return the claims about reliance, by question and subject."""
    claims = REPORT(record_of(*rows, **more)).claims
    assert not list(contradictions(claims))
    return {
        (claim.question, claim.subject): claim
        for claim in claims
        if "reliance on" in claim.question
    }


@pytest.mark.parametrize(
    ("more", "is_said"),
    [
        ({}, True),
        ({"control_size": 0.04}, False),  # unmatched
        ({"control_size": 0.21}, False),
        ({"p_holm": 0.06}, False),
        ({"p_holm": None}, False),
    ],
)
def test_only_what_is_matched_and_significant_is_said(more, is_said):
    claims = said(reliance_row("vit", *HUE, 0.4, 0.06, **more))
    assert list(claims) == [("reliance on the colour of the background", "vit")] * is_said
    for claim in claims.values():
        assert claim.evidence == "intervened"
        assert claim.effect.value == pytest.approx(34)
        assert {"40.0 %", "6.0 %"} <= {f"{word} %" for word in claim.says.split()}


def test_a_small_effect_is_not_said():
    assert not said(reliance_row("vit", *HUE, 0.1, 0.06))


def test_the_largest_effects_of_each_model_come_first_and_a_part_stands_for_the_whole():
    rows = [
        reliance_row("vit", "colour", "greyed", 0.41, 0.06),
        reliance_row("vit", *HUE, 0.4, 0.06),
        reliance_row("vit", *TILES, 0.7, 0.06),
        reliance_row("cnn", "colour", "greyed", 0.41, 0.06),
    ]
    claims = said(*rows)
    assert list(claims) == [
        ("reliance on shape and layout", "vit"),
        ("reliance on the colour of the background", "vit"),
        ("reliance on colour", "cnn"),
    ]
    # a claim on another cue than the first names the first, as the section does
    for (_, model), claim in claims.items():
        assert ("layout" in claim.says and "layout" in claim.title) == (model == "vit")


def test_a_cue_that_only_misleads_is_no_claim_on_predictions_that_change():
    assert not said(misleading_row("vit", *HUE, 20.0, p_holm=0.3))


@pytest.mark.parametrize(
    ("second", "p_holm", "is_said"),
    [
        ((0.2, 0.06), 1e-6, True),
        ((0.2, 0.06), 0.2, False),  # not significant
        ((0.38, 0.06), 1e-6, False),  # too small
        ((0.55, 0.45), 1e-6, False),  # the difference is the control's
    ],
)
def test_of_two_models_the_one_that_relies_more(second, p_holm, is_said):
    rows = [reliance_row("vit", *HUE, 0.4, 0.06), reliance_row("cnn", *HUE, *second)]
    claims = said(*rows, pairs=(pair_row(*rows, p_holm),))
    key = ("difference in reliance on the colour of the background", "vit and cnn")
    assert (key in claims) == is_said
    back = tuple(reversed(rows))
    claims = said(*rows, pairs=(pair_row(*back, p_holm),))
    assert (key in claims) == is_said
    if is_said:
        assert claims[key].effect.value == pytest.approx(20)


def test_the_section_has_one_table_of_eight_rows_and_says_what_could_not_be_tested():
    rows = [reliance_row(model, *TILES, 0.4, 0.06) for model in PAIR for _ in range(6)]
    document = REPORT(record_of(*rows, left_out="background"))
    with_figure = []
    for candidate in document.sections:
        if select(candidate.figures, name="reliance"):
            with_figure.append(candidate)
    (section,) = with_figure
    (table,) = section.tables
    assert len(table.rows) == 8
    assert len(table.columns) <= 6
    assert "12" in table.caption
    assert "masks are not known" in "\n".join(values_of(document.first.unknown, "text"))
