"""Heads made by hand come first, in their words and numbers; other models lack the finding."""

import re
from dataclasses import replace
from functools import partial
from math import exp
from pathlib import Path

import numpy as np
import pytest

from tests.kit.claims import rest_words
from tests.kit.commands import ran, report
from tests.kit.first_page import clear_effects
from tests.kit.planted_patterns import STRONG, Bench, planted, scenes
from tests.kit.planted_writers import model as writers
from tests.kit.planted_writers import pictures
from tests.kit.select import select_one, values_of
from vitlens import Model
from vitlens.commands.stats.record import (
    HeadRow,
    HeadsRow,
    LayerRow,
    StatsRecord,
    faulty_share,
)
from vitlens.commands.stats.report import REPORT
from vitlens.record import Config, Data, ModelEntry
from vitlens.report.claims import Claim
from vitlens.report.document import Document
from vitlens.uncertainty import Estimate

GRID = (6, 5)
TOKENS = 6 * 5 + 2
FAULTS = {"dead heads", "uniform heads", "fixed place", "sinks"}


def made(kind: str) -> Model:
    """Build a model of four plain heads and, last but one, a head of this kind."""
    bench = Bench(GRID, 0)
    available = bench.heads()
    forms = [available[name] for name in ("previous", "same row", "local", "similar")]
    chosen = {
        "corner": bench.places([2 + 7]),
        "uniform": available["uniform"],
        "dead": available["same column"],
    }
    if kind == "plain":
        return planted(forms, GRID)
    forms.insert(3, chosen[kind])
    return planted(forms, GRID, dead=(3,) if kind == "dead" else ())


GAINS = [(0, 40.0), (1, 40.0), (2, 40.0), (0, 0.2), (1, 0.0), (3, 40.0)]
writing = partial(writers, GAINS)
corner = partial(made, "corner")
uniform = partial(made, "uniform")
dead = partial(made, "dead")
plain = partial(made, "plain")


def found(folder: Path, kind: str, images: int = 20):
    """Return the record and the report of a model of this kind."""
    pixels = (scenes(GRID, images, 0).images.permute(0, 2, 3, 1) * 255).round().byte().numpy()
    np.savez(folder / "data.npz", images=pixels, labels=np.zeros(images, np.int64))
    model = f"{kind}={__file__}:{kind}"
    record = ran(
        folder / kind, f"stats {model} --model-file {model} --data {folder / 'data.npz'} --no-names"
    )
    return record, report(record)


def claim(document: Document, question: str) -> Claim:
    match = select_one(document.claims, question=question)
    assert match.is_shown
    return match


def test_a_head_that_attends_to_one_place_whatever_the_image(tmp_path):
    record, report = found(tmp_path, "corner")
    place = claim(report, "fixed place")
    assert place.effect.value == pytest.approx(exp(STRONG) / (exp(STRONG) + TOKENS - 1), rel=1e-3)
    assert place.effect.n == 20
    row = select_one(record.heads, label="position")
    assert (row.name, row.place, row.place_mass) == ("L0.H3", (1, 2), place.effect)
    assert row.place_chance == pytest.approx(1 / TOKENS)
    assert place.says in values_of(report.first.answer, "text")


def test_a_dead_and_a_uniform_head_are_found_and_plain_heads_have_no_fault(tmp_path):
    assert claim(found(tmp_path, "uniform")[1], "uniform heads").effect.value == pytest.approx(
        1, abs=1e-3
    )
    record, report = found(tmp_path, "dead")
    dead = claim(report, "dead heads")
    assert (dead.effect.value, dead.effect.high) == (0.0, 0.0)
    assert "L0.H3" in dead.says
    assert record.metric("dead_or_uniform_heads/dead") == Estimate(1 / 5, 1 / 5, 1 / 5, n=5)
    outputs = values_of(record.heads, "output.value")  # as shares of their mean
    assert outputs[3] == 0
    assert np.mean(outputs) == pytest.approx(1)
    record, report = found(tmp_path, "plain")
    assert not set(values_of(report.claims, "question")) & FAULTS
    assert values_of(record.heads, "place_grid") == [GRID] * 4


def test_one_image_judges_nothing(tmp_path):
    record, report = found(tmp_path, "corner", images=1)
    assert (
        record.metric("distance/corner/L0.H0").low,
        record.metric("distance/corner/L0.H0").n,
    ) == (None, 1)
    assert set(values_of(report.claims, "state")) <= {"", "inconclusive"}
    assert not clear_effects(report)


def test_heads_that_write_a_class_are_counted_and_the_one_that_matters_most_is_named(tmp_path):
    pixels, labels = pictures(60, 0)
    np.savez(
        tmp_path / "data.npz",
        images=(pixels.permute(0, 2, 3, 1) * 255).round().byte().numpy(),
        labels=labels,
    )
    (tmp_path / "classes.txt").write_text("\n".join("01234"))
    model = f"writing={__file__}:writing"
    line = (
        f"stats {model} --model-file {model} --data {tmp_path / 'data.npz'} --classes "
        f"{tmp_path / 'classes.txt'}"
    )
    record = ran(tmp_path / "out", line)
    written = claim(report(record), "writes")
    assert values_of(record.names, "state") == ["shown to matter"] * 3 + [
        "correlates",
        "nothing",
        "nothing",
    ]
    lead = max(record.names[:3], key=lambda row: row.margin.value)
    assert (written.effect, written.evidence) == (lead.margin, "intervened")
    assert written.says.startswith("3 of 6 heads")
    assert lead.name in written.says
    assert f"images of {lead.writes} lose" in written.says


def numbers_in(text: str) -> list[str]:
    """Return the numbers of a text that are words."""
    return re.findall(r"(?<![\w.])\d+(?:\.\d+)?(?![\w.]*\w)", text)


@pytest.mark.parametrize(
    ("labels", "numbers"),
    [
        (["previous"] * 3, ["3", "3", "3"]),
        (["previous", "mixed", "mixed"], ["1", "3", "1", "2"]),
        (["mixed", "no single pattern", "mixed"], ["0", "3", "2", "1"]),
    ],
)
def test_every_head_is_counted_once_by_its_label(labels, numbers):
    heads = [
        HeadRow("m", layer=0, head=index, statistics={}, label=label)
        for index, label in enumerate(labels)
    ]
    record = StatsRecord(
        config=Config(models=(ModelEntry("m"),)),
        means=(HeadsRow("m", 3, {}, {}),),
        heads=tuple(heads),
    )
    document = REPORT(record)
    assert numbers_in(claim(document, "pattern").says) == numbers


@pytest.mark.parametrize(
    ("images", "other", "ends"),
    [
        (50, Estimate(0.4, 0.3, 0.45, 50), (0.25, 0.25)),
        (50, Estimate(0.4, 0.3, 0.6, 50), (0.25, 0.5)),  # one more may be uniform
        (1, Estimate(0.4, n=1), (None, None)),
    ],
)
def test_the_share_of_faulty_heads_has_the_interval_of_its_verdict(images, other, ends):
    heads = [
        HeadRow("m", 0, 0, {}, label="dead", best="dead", score=Estimate(0.9, 0.8, 1.0, 50)),
        HeadRow("m", 0, 1, {}, label="previous", best="previous", score=other),
        HeadRow("m", 0, 2, {}, label="no single pattern", best="uniform", score=other),
        HeadRow("m", 0, 3, {}, label="previous", best="previous", score=other),
    ]
    faulty = faulty_share(heads, images=images)
    assert (faulty.value, faulty.low, faulty.high, faulty.n) == (0.25, *ends, 4)
    record = StatsRecord(
        config=Config(models=(ModelEntry("m"),), data=Data("made", images=images)),
        means=(HeadsRow("m", 4, {}, {}, faulty=faulty),),
        heads=tuple(heads),
    )
    health = select_one(REPORT(record).claims, question="attention health")
    assert health.effect in (faulty, None)
    assert (health.state == "inconclusive") == (health.effect is None)


@pytest.mark.parametrize(
    ("greatest", "numbers"), [(24.0, ["12", "1", "0.5", "0"]), (4.0, ["2", "1"])]
)
def test_long_tokens_are_counted_in_patches_of_an_image_if_there_are_any(greatest, numbers):
    layers = []
    for layer, (norm, patches) in enumerate([(3.0, 0.5), (greatest, 0.25)]):
        statistics = {
            "token_norm": Estimate(2.0),
            "greatest_norm": Estimate(norm),
            "high_norm_patches": Estimate(patches, unit="tokens"),
        }
        layers.append(LayerRow("m", layer, "a", "self", 1, 17, statistics))
    record = StatsRecord(config=Config(models=(ModelEntry("m"),)), layers=tuple(layers))
    section = select_one(REPORT(record).sections, title="Do a few tokens stand out?")
    assert numbers_in(section.sentences[0].text) == numbers


@pytest.mark.parametrize(
    ("rest", "numbers"),
    [
        ({}, []),
        ({"several": 2, "correlates": 0}, ["2"]),
        ({"nothing": 1, "several": 3}, ["3", "1"]),
    ],
)
def test_only_results_that_occur_are_counted(rest, numbers):
    assert numbers_in(rest_words(rest)) == numbers


@pytest.mark.parametrize(("weights", "is_noted"), [("random", True), ("bundled", False)])
def test_a_report_on_random_weights_says_so(weights, is_noted):
    config = Config(models=(ModelEntry("m", "vit-digits", weights),))
    document = REPORT(replace(StatsRecord(), config=config))
    unknown = " ".join(sentence.text for sentence in document.first.unknown)
    assert ("random weights" in unknown) == is_noted
