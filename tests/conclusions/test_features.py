"""Planted facts about features: claims that must appear, and claims that must not.

A classifier reads less than there is, models and pretrainings differ, or nothing is comparable.
"""

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest

from tests.kit.contradictions import contradictions
from tests.kit.select import select_one
from vitlens.commands.features.record import (
    PROBE,
    BetweenRow,
    DepthRow,
    FeaturesRecord,
    FeaturesRow,
    HeadRow,
    MapRow,
    PairRow,
    PatchesRow,
    SetsRow,
)
from vitlens.commands.features.report import REPORT
from vitlens.record import Config, Data, ModelEntry
from vitlens.report.claims import Claim
from vitlens.uncertainty import Estimate, accuracy_difference, holm, mcnemar, wilson

N = 600
KNN = "knn-20"
OBJECTIVES = {"a": "language-image", "b": "self-supervised", "c": "supervised", "d": "supervised"}


def right(share: float, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).random(N) < share


def reached(correct: np.ndarray) -> Estimate:
    return wilson(int(correct.sum()), N)


def compared(pairs):
    """Yield each pair's difference, p-value, p-value after Holm, and if it is decided."""
    p = [mcnemar(int((one & ~two).sum()), int((two & ~one).sum())) for one, two in pairs]
    for (one, two), p_value, adjusted in zip(pairs, p, holm(p)):
        gap = accuracy_difference(one, two)
        yield gap, p_value, adjusted, adjusted <= 0.05 and abs(gap.value) >= 0.5


def row(alias, correct, objective) -> FeaturesRow:
    knn = {"20": reached(correct[KNN])} if KNN in correct else {}
    probe = reached(correct[PROBE]) if PROBE in correct else None
    head_accuracy = reached(correct["own"]) if "own" in correct else None
    return FeaturesRow(
        alias,
        objective,
        "X",
        "",
        "",
        "its name",
        5_000_000,
        "cls",
        "block",
        2,
        8,
        knn,
        knn,
        knn,
        accuracy=head_accuracy,
        probe=probe,
    )


def record_of(models, objectives=None, **tables) -> FeaturesRecord:
    """Return a record with the command's tests, for the classifiers "own", "knn-20" and "probe"."""
    rows = [
        row(alias, correct, (objectives or {}).get(alias, "supervised"))
        for alias, correct in models.items()
    ]
    row_keys = []
    for a, b in combinations(models, 2):
        row_keys += [(a, b, name) for name in (KNN, PROBE) if name in models[a]]
    pairs = []
    for (a, b, name), (gap, p, p_holm, clear) in zip(
        row_keys, compared([(models[a][n], models[b][n]) for a, b, n in row_keys])
    ):
        better = (a if gap.value > 0 else b) if clear else "undecided"
        both = (None, gap) if name == KNN else (gap, None)
        pairs.append(PairRow(a, b, name, 20 if name == KNN else 0, p, p_holm, better, *both))
    with_head = []
    for a, classifiers in models.items():
        if "own" in classifiers:
            with_head += [(a, name) for name in (KNN, PROBE) if name in classifiers]
    head_differences = compared([(models[a][name], models[a]["own"]) for a, name in with_head])
    heads = [
        HeadRow(a, name, gap, p, p_holm)
        for (a, name), (gap, p, p_holm, _) in zip(with_head, head_differences)
    ]
    depth = []
    for alias, correct in models.items():
        for name, answers in correct.items():
            if name != "own":
                weighting = None if name == PROBE else "dino"
                accuracy = reached(answers)
                depth.append(DepthRow(alias, "block 1", 1.0, name, accuracy, 0.2, 1, weighting))
    config = Config(
        models=tuple(ModelEntry(alias) for alias in models),
        data=Data(title="made", images=N),
        options={"ks": [20], "tsne": None, "query": []},
    )
    tables_made = {
        "sets": (SetsRow(N, 0.2, False, 1000),),
        "depth": tuple(depth),
        "features": tuple(rows),
    }
    return FeaturesRecord(
        config=config, pairs=tuple(pairs), head=tuple(heads), **tables_made | tables
    )


def claims(record: FeaturesRecord) -> dict[str, Claim]:
    document = REPORT(record)
    assert not list(contradictions(document.claims))
    return {claim.question: claim for claim in document.claims if claim.is_shown}


def test_a_classifier_that_reads_less_fails_and_what_compares_no_pretrainings_is_said():
    answers = right(0.6, 0)
    alike = record_of({"m": {"own": answers, KNN: answers, PROBE: answers}})
    assert claims(alike)["classifier"].state == "pass"
    assert "more than" not in REPORT(alike).title
    record = record_of({"m": {"own": answers, KNN: answers, PROBE: answers | right(0.5, 1)}})
    claim = claims(record)["classifier"]
    gap = select_one(record.head, classifier=PROBE).difference
    assert 15 < gap.value < 25
    assert (claim.state, claim.effect.value) == ("fail", -gap.value)
    assert REPORT(record).title == "The last layer of m holds more than its classifier reads"
    models = {alias: {PROBE: right(0.9 - 0.4 * at, at)} for at, alias in enumerate("ab")}
    said = {
        "supervised": "compare models",
        "not known": "--objective",
        "random weights": "nothing about pretraining",
    }
    for objective, words in said.items():
        unknown = REPORT(record_of(models, {"b": objective})).first.unknown
        assert words in " ".join(line.text for line in unknown)


@pytest.mark.parametrize(
    ("shares", "title"),
    [
        ({"a": (0.9, 0.9), "b": (0.7, 0.7), "c": (0.6, 0.6)}, "a (language-image) is ahead of"),
        ({"a": (0.8, 0.8), "b": (0.8, 0.8), "c": (0.6, 0.6)}, "no significant lead"),
        ({"a": (0.9, 0.5), "b": (0.6, 0.9), "c": (0.5, 0.4)}, "disagree"),
        ({"c": (0.9, 0.9), "d": (0.9, 0.9), "b": (0.6, 0.6)}, "(supervised) is ahead of"),
    ],
)
def test_who_is_ahead_follows_from_the_paired_tests(shares, title):
    """shares: the accuracy by probe and by neighbours of each model."""
    models = {
        alias: {PROBE: right(probe, 2 * at), KNN: right(knn, 2 * at + 1)}
        for at, (alias, (probe, knn)) in enumerate(shares.items())
    }
    record = record_of(models, OBJECTIVES)
    assert title in REPORT(record).title
    if title.startswith("a ("):
        differences = {
            (head_row.first, head_row.second, head_row.classifier): head_row.difference
            for head_row in record.pairs
        }
        claim = claims(record)["features"]
        assert claim.effect == differences["a", "b", PROBE]  # the closest
        assert "language-image (X)" in claim.says


def overlap(alias: str, layer: str, value: float) -> PatchesRow:
    estimate = Estimate(value, value - 0.02, value + 0.02, 2000)
    return PatchesRow(
        alias, layer, "block 5" if layer == "5" else layer, "object", estimate, 0.2, 100, 10, (8, 8)
    )


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ((0.9, 0.9, 0.9, 0.6), "no better than those before"),
        ((0.3, 0.7, 0.3, 0.6), "find the object best"),
        ((0.3, 0.7, 0.3, 0.69), "no pretraining is ahead"),
    ],
)
def test_objects_that_the_embedding_finds_as_well_compare_nothing(values, words):
    """Where only colour separates object and background, a random model is as good."""
    layers = [("a", "embedding"), ("a", "5"), ("b", "embedding"), ("b", "5")]
    rows = tuple(overlap(*layer, value) for layer, value in zip(layers, values))
    record = record_of({alias: {PROBE: right(0.7, 0)} for alias in "ab"}, OBJECTIVES, patches=rows)
    claim = select_one(REPORT(record).claims, question="object by patches")
    assert words in claim.says
    assert (claim.effect is not None) == ("best" in words)


@pytest.mark.parametrize(
    ("counts", "is_claimed"), [((200, 540, 400), True), ((200, 420, 400), False)]
)
def test_an_earlier_layer_that_is_read_better(counts, is_claimed):
    rows = tuple(
        DepthRow("m", f"block {at}", (at + 1) / 3, PROBE, wilson(count, N), 0.2, at)
        for at, count in enumerate(counts)
    )
    assert ("best layer" in claims(record_of({"m": {}}, depth=rows))) == is_claimed


@pytest.mark.parametrize(("last", "is_claimed"), [(0.2, True), (0.8, False)])
def test_last_layers_that_are_less_alike(last, is_claimed):
    rows = tuple(
        BetweenRow(
            "a", "b", str(at), "0", Estimate(value, value - 0.05, value + 0.05, 500, ""), 0.5
        )
        for at, value in enumerate((0.8, last))
    )
    said = claims(record_of({"a": {}, "b": {}}, between=rows))
    assert ("last layers" in said) == is_claimed
    assert not is_claimed or said["last layers"].effect.value == last


def test_maps_and_searches_that_can_show_nothing_are_not_drawn():
    """Images of one each of their classes, and a search among eight."""
    maps = (MapRow("m", "images", "pca", N, 8, Estimate(0.6, n=N, unit=""), 10, None, 0.1),)
    full = record_of(
        {"m": {}}, maps=maps, sets=(SetsRow(N, 1 / N, False, None, "there is no training part"),)
    )
    document = REPORT(
        replace(full, features=(replace(full.features[0], among="test images", searched=8),))
    )
    assert not document.figures
    said = " ".join(line.text for line in document.first.unknown)
    assert [
        part for part in ("there is no training part", "8 images", "1 image.") if part not in said
    ] == []


@pytest.mark.parametrize(
    ("second", "differing"),
    [
        ({}, set()),
        ({"data": "Y"}, {"data"}),
        ({"parameters": 50_000_000}, {"size"}),
        ({"data": "", "labels": "Z"}, {"data", "labels"}),
    ],
)
def test_only_what_differs_between_pretrainings_is_named(second, differing):
    models = {alias: {PROBE: right(0.9 - 0.4 * at, at)} for at, alias in enumerate("ab")}
    record = record_of(models, OBJECTIVES)
    rows = [replace(row, data="X") for row in record.features]
    changed = replace(record, features=(rows[0], replace(rows[1], **second)))
    lines = [line.text for line in REPORT(changed).first.unknown if "pretraining" in line.text]
    (line,) = [text for text in lines if "differ" in text]
    named = {word for word in ("data", "labels", "size") if f" {word}" in line.partition(":")[0]}
    assert named == (differing or {"data", "size"})
    assert ("the same" in line) == (not differing)
