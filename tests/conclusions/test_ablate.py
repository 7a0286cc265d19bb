"""Facts planted in the weights of a model are claimed, with their numbers; without them none is."""

from dataclasses import replace
from math import exp, log1p
from pathlib import Path

import numpy as np
import pytest

from tests.kit.contradictions import contradictions
from tests.kit.marks import slow_except
from tests.kit.planted_heads import write
from tests.kit.select import index_by, select_one, values_of
from vitlens.cli.main import run
from vitlens.commands.ablate.record import (
    REPLACED,
    AblateRecord,
    judge_effect,
    smallest_effect,
    without_effect,
)
from vitlens.commands.ablate.report import REPORT, images_needed, unknown
from vitlens.commands.run.publish import read_folder
from vitlens.report.claims import Claim
from vitlens.uncertainty import Estimate

PLAIN = [("red", 2.0), ("green", 2.0)]
DEAD = [("red", 2.0), ("red", 0.0), ("green", 2.0)]
REDUNDANT = [("red", 14.0), ("green", 2.0), ("red", 14.0)]
HIDDEN_HEAD = [("red", 11.0), ("red", 25.0), ("red", 11.0), ("green", 2.0)]


def ablated(
    folder: Path, heads, *more: str, seed: int = 0
) -> tuple[AblateRecord, dict[str, Claim]]:
    """Return the record and the claims by their question."""
    typed = write(folder, heads, seed=seed)
    quick = ["--no-curves", "--no-patch", "--units", "head", *more, "--out", str(folder / "out")]
    assert run(["ablate", *typed, *quick]) == 0
    record = read_folder(folder / "out")
    claims = REPORT(record).claims
    assert not list(contradictions(claims))
    return record, index_by(claims, "question")


def reds(folder: Path) -> np.ndarray:
    """Return the red of every image, from -1 to 1."""
    return np.load(folder / "data.npz")["images"][:, 0, 0, 0] / 127.5 - 1


def check_plain(folder: Path, seed: int = 0) -> None:
    """Check that without its red head the red bit costs ln 2."""
    record, claims = ablated(folder, PLAIN, "--replace", "mean,resample", seed=seed)
    assert claims.keys() == {"most important head", "heads with an effect"}
    lead, most = claims["most important head"], max(record.heads, key=lambda row: row.loss.value)
    assert (lead.effect, lead.evidence) == (most.loss, "intervened")
    assert most.unit in lead.says
    assert most.unit in REPORT(record).title
    assert without_effect(record) == []
    clean = np.mean([log1p(exp(-2.0 * abs(value))) for value in reds(folder)])
    assert record.heads[0].loss.value == pytest.approx(np.log(2) - clean, abs=5e-3)
    assert set(values_of(record.heads, "label")) == {"uniform"}


def check_dead(folder: Path, seed: int = 0) -> None:
    record, claims = ablated(folder, DEAD, seed=seed)
    assert "(**L0.H1**)" in claims["heads with an effect"].says
    assert record.metric("heads_without_effect/planted") == Estimate(1 / 3, n=3)
    [row] = without_effect(record)
    assert (row.unit, row.loss.value, row.loss.high) == ("L0.H1", 0.0, 0.0)


def check_redundant(folder: Path, seed: int = 0) -> None:
    record, claims = ablated(folder, REDUNDANT, "--pairs", "2", seed=seed)
    claim = claims["redundant heads"]
    assert claim.is_shown
    assert "L0.H0 and L0.H2" in claim.says
    row = select_one(record.pairs, chosen="similarity")
    assert row.similarity == pytest.approx(1, abs=1e-4)
    red = reds(folder)
    left = np.log1p(
        np.exp(-np.sign(red) * 28 * red.mean())
    ).mean()  # both heads give their mean: about ln 2
    assert row.both == pytest.approx(left, abs=0.01)
    assert row.first_alone == pytest.approx(0, abs=1e-3)
    assert row.synergy.value == pytest.approx(
        row.both - row.first_alone - row.second_alone, abs=1e-6
    )
    assert claim.effect == row.synergy
    assert without_effect(record) == []  # neither of both is called dead


def check_hidden(folder: Path, seed: int = 0) -> None:
    record, claims = ablated(folder, HIDDEN_HEAD, "--replace", "mean,resample", seed=seed)
    claim, row = claims["hidden by the mean"], max(record.heads, key=lambda row: row.hidden.value)
    assert claim.is_shown
    assert row.unit == "L0.H1"
    assert row.unit in claim.says
    assert (claim.effect, claim.p) == (row.hidden, row.hidden_p)
    assert row.hidden.value == pytest.approx(
        row.other_losses["resample"].value - row.loss.value, abs=1e-6
    )
    # each is spare, as is any two
    assert values_of(without_effect(record), "unit") == [
        "L0.H0",
        "L0.H2",
    ]


@pytest.mark.parametrize("seed", slow_except(range(21), (0,)))
@pytest.mark.parametrize("check", [check_plain, check_dead, check_redundant, check_hidden])
def test_planted_facts(check, seed, tmp_path):
    check(tmp_path, seed)


@pytest.mark.parametrize(
    ("low", "high", "p", "looks", "effect"),
    [
        (0.0005, 0.0015, 0.001, 1, "no effect"),  # significant, and too small to report
        (0.011, 0.02, 0.001, 1, "effect"),
        (0.011, 0.02, 0.001, 100, "undecided"),  # not for a hundred looks
        (-0.02, 0.02, 0.9, 1, "undecided"),
        (-0.03, -0.02, 0.001, 1, "effect"),
    ],
)
def test_an_effect_is_judged_against_the_smallest_worth_reporting(low, high, p, looks, effect):
    assert [smallest_effect(loss).value for loss in (0.2, 3.0)] == [0.01, 0.03]
    assert (
        judge_effect(
            Estimate((low + high) / 2, low, high, unit="nats"), p, smallest_effect(0.2), looks
        )
        == effect
    )


def test_the_forecast_of_images_does_not_follow_the_sample(tmp_path):
    record, _ = ablated(tmp_path, PLAIN, "--limit", "20")
    forecasts = []
    for images in (25, 100, 1600):
        half_width = 0.1 / images**0.5  # as in a sample of that size
        loss = Estimate(0.0, -half_width, half_width, unit="nats")
        row = replace(record.heads[0], loss=loss)
        needed = images_needed([row], Estimate(0.01, unit="nats"), images, tests=1)
        forecasts.append(needed.value)
    assert forecasts == [100, 100, 100]


def test_the_forecast_of_images_is_enough_for_the_judgement(tmp_path):
    """Also if the intervals are widened for many heads."""
    record, _ = ablated(tmp_path, PLAIN, "--limit", "20")
    smallest = Estimate(0.01, unit="nats")

    def loss(images: float) -> Estimate:
        half_width = 0.1 / images**0.5
        return Estimate(0.0, -half_width, half_width, unit="nats")

    row = replace(record.heads[0], loss=loss(25))
    needed = images_needed([row], smallest, 25, tests=144).value
    assert judge_effect(loss(1.05 * needed), 1.0, smallest, 144) == "no effect"
    assert judge_effect(loss(0.9 * needed), 1.0, smallest, 144) == "undecided"


@pytest.mark.parametrize("images", [1, 19])
def test_too_few_images_claim_nothing(images, tmp_path):
    """Also where effects are significant."""
    record, claims = ablated(tmp_path, PLAIN, "--limit", str(images))
    assert not claims
    document = REPORT(record)
    assert not document.first.answer
    assert document.title != record.config.title
    assert str(images) in document.title
    wide = replace(record.heads[0], loss=Estimate(0.0, -0.02, 0.02, unit="nats"))
    # half the width, four times as many
    assert images_needed([wide], Estimate(0.01, unit="nats"), 100, tests=1).value == 400


def test_what_the_mean_hides_does_not_depend_on_the_replacement_of_the_figures(tmp_path):
    claims = {}
    for replacements in ("mean,resample", "zero,mean,resample", "resample,mean"):
        _, by_question = ablated(
            tmp_path / replacements, HIDDEN_HEAD, "--replace", replacements, seed=0
        )
        claim = by_question["hidden by the mean"]
        claims[replacements] = (claim.says, claim.effect, claim.p)
    assert len(set(claims.values())) == 1, claims


def test_a_head_that_is_undecided_under_resampling_is_not_without_effect(tmp_path):
    record, _ = ablated(tmp_path, DEAD)
    units = [replace(row, other_effects={"resample": "undecided"}) for row in record.units]
    assert values_of(without_effect(record), "unit") == ["L0.H1"]
    assert without_effect(replace(record, units=tuple(units))) == []


def test_the_latent_with_the_largest_effect_may_lower_the_loss(tmp_path):
    record, _ = ablated(tmp_path, PLAIN)
    first, second = record.units
    rising = replace(
        first,
        kind="latent",
        latent=1,
        loss=Estimate(0.001, 0.0005, 0.0015, unit="nats"),
        effect="no effect",
    )
    falling = replace(
        second, kind="latent", latent=2, loss=Estimate(-0.5, -0.6, -0.4, unit="nats"), p=0.001
    )
    claims = index_by(REPORT(replace(record, units=(rising, falling))).claims, "question")
    claim = claims["latents with an effect"]
    assert (claim.effect, claim.p) == (falling.loss, falling.p)


def test_every_replacement_is_named_where_resampling_is_missing(tmp_path):
    record, _ = ablated(tmp_path, PLAIN, "--replace", "mean,zero")
    [note] = [note for note in unknown(record) if "--replace mean,resample" in note]
    assert REPLACED["mean"] in note
    assert REPLACED["zero"] in note
