"""The evidence beyond the league: rows and metrics are the functions' own, and a report says what they mean."""

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.backing import unbacked
from vitlens.analysis.faithfulness.composites import cell_mass, confident_images, mosaics
from vitlens.analysis.faithfulness.defaults import OTHER_STEPS
from vitlens.analysis.faithfulness.deletion import faithfulness
from vitlens.analysis.faithfulness.league import BASELINES
from vitlens.analysis.faithfulness.road import road
from vitlens.attribution.explain import explain
from vitlens.commands.explain.evidence_record import (
    COMPOSITE,
    COMPOSITE_MAPS,
    COMPOSITE_SETS,
    COMPOSITES,
    DETECTABLE,
    IMPUTED,
    POWER,
    RECOGNISED,
    SHIFTS,
    STABILITY,
    STEADY,
    SUBSTRATE_AGREEMENTS,
    SUBSTRATE_GAP,
    SUBSTRATES,
    SubstrateAgreementRow,
)
from vitlens.commands.explain.measure import measure
from vitlens.commands.explain.measure.composites import composite_names
from vitlens.commands.explain.options import ExplainOptions
from vitlens.commands.explain.record import CHECKS, LEAGUE
from vitlens.commands.explain.report import report
from vitlens.commands.explain.report.evidence import agreement_words
from vitlens.commands.run.options import RunOptions
from vitlens.commands.run.publish import read
from vitlens.data.digits import digits
from vitlens.files import read_run
from vitlens.models.loading import load
from vitlens.records import Record
from vitlens.uncertainty import power_of

METHODS = ("relevance", "rollout")
IMAGES = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The digits without masks: an .npz of images and labels."""
    split = digits("test").limit(IMAGES)
    path = tmp_path_factory.mktemp("data") / "digits.npz"
    pixels = split.source.read(torch.arange(IMAGES)).permute(0, 2, 3, 1).numpy()
    np.savez(path, images=pixels, labels=split.labels.numpy())
    return path


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> Record:
    return run(tmp_path_factory.mktemp("evidence") / "out", data=str(folder))


def run(out: Path, run_limit: int | None = None, **changes: object) -> Record:
    options = {"method": METHODS, "verify": True, "counterfactuals": False, "composite_count": 3, **changes}
    measure(
        ExplainOptions(("vit-digits",), run=RunOptions(device="cpu", quiet=True, limit=run_limit, out=out), **options)
    )  # type: ignore[arg-type]
    return read(read_run(out))


def sections(record: Record) -> dict[str, str]:
    """The text of each section's sentences, by title."""
    return {
        section.title: " ".join(sentence.text for sentence in section.sentences) for section in report(record).sections
    }


def test_composites_are_made_where_masks_are_not_known(record):
    rows = {row.kind: row for row in record.rows(COMPOSITE_SETS)}
    assert [(row.kind, row.composites, row.maps, row.refused) for row in rows.values()] == [
        ("mosaic-2", 3, 12, ""),
        ("embedded", 3, 3, ""),
    ]
    assert rows["mosaic-2"].chance == 0.25
    assert rows["mosaic-2"].labels == "labels"
    assert rows["mosaic-2"].guessed == pytest.approx(0.4)
    assert record.metric(RECOGNISED(model="vit-digits", kind="mosaic-2")).n == 12
    assert {row.method for row in record.rows(COMPOSITES)} == {*METHODS, *BASELINES}


def test_numbers_on_composites_are_the_functions_own(record):
    model, split = load("vit-digits"), digits("test").limit(IMAGES)
    (batch,) = split.batches(IMAGES)
    with torch.no_grad():
        usable = confident_images(model(batch.images), batch.labels)
    made = mosaics(batch.images[usable], batch.labels[usable], side=2, count=3, seed=0)
    maps = explain(model, made.images[made.which], targets=made.targets, method="relevance")
    mass = record.metric(COMPOSITE(model="vit-digits", kind="mosaic-2", score="mass", method="relevance"))
    assert mass.value == pytest.approx(float(cell_mass(maps, made.masks).mean()), abs=1e-5)
    assert (mass.n, mass.low <= mass.value <= mass.high) == (12, True)
    (row,) = (row for row in record.rows(COMPOSITES) if (row.kind, row.method) == ("mosaic-2", "relevance"))
    assert row.mass == pytest.approx(mass.value, abs=1e-6)
    assert row.above == ()  # three composites show nothing
    arrays = record.arrays(COMPOSITE_MAPS, kind="mosaic-2", model="vit-digits")
    np.testing.assert_allclose(arrays.maps[0], maps[:4].numpy(), atol=1e-5)
    assert arrays.targets.tolist() == [model.classes[int(target)] for target in made.targets[:4]]


def test_composites_that_the_model_does_not_see_judge_no_map(record):
    """The bundled ViT knows digits of one size: in a mosaic it names the classes as often as by guessing."""
    (row,) = (row for row in record.rows(COMPOSITE_SETS) if row.kind == "mosaic-2")
    assert not row.seen
    text = sections(record)["Localisation on composites: 2 x 2 mosaics"]
    assert "do not judge the maps" in text
    assert "exceed" not in text
    names = {path.name for path in (record.folder / "figures").iterdir()}
    assert {"composites_mosaic-2.png", "composites_embedded.png"} <= names


@pytest.mark.slow
def test_pasted_objects_are_seen_and_found(tmp_path):
    found = run(
        tmp_path / "out", data="digits", composites=("pasted",), composite_count=12, stability=False, run_limit=40
    )
    (row,) = found.rows(COMPOSITE_SETS)
    assert (row.seen, row.maps) == (True, 12)
    (relevance,) = (each for each in found.rows(COMPOSITES) if each.method == "relevance")
    assert relevance.mass > 0.5
    assert relevance.above == BASELINES
    text = sections(found)["Localisation on composites: pasted objects"]
    assert f"{100 * relevance.mass:.1f} %" in text
    assert found.rows(STABILITY) == ()


@pytest.mark.slow
def test_too_few_images_are_refused_in_the_report(tmp_path, folder):
    found = run(tmp_path / "out", data=str(folder), run_limit=3)
    rows = found.rows(COMPOSITE_SETS)
    assert all(row.refused.startswith("expected confidently") for row in rows)
    assert found.rows(COMPOSITES) == ()
    assert sections(found)["Localisation on composites: 2 x 2 mosaics"].startswith("Not made: expected confidently")


@pytest.mark.slow
def test_predictions_stand_in_for_missing_labels(tmp_path, folder):
    unlabelled = tmp_path / "unlabelled"
    unlabelled.mkdir()
    from PIL import Image

    for index, pixels in enumerate(np.load(folder)["images"][:12]):
        Image.fromarray(pixels).save(unlabelled / f"{index}.png")
    found = run(
        tmp_path / "out",
        images=(str(unlabelled),),
        composites=("embedded",),
        other_substrates=("none",),
        stability=False,
    )
    (row,) = found.rows(COMPOSITE_SETS)
    assert (row.labels, row.refused) == ("predictions", "")
    assert "what the model predicts" in sections(found)["Localisation on composites: embedded images"]


def test_kinds_by_choice():
    assert composite_names(("auto",), has_masks=True) == ()
    assert composite_names(("auto",), has_masks=False) == ("mosaic-2", "embedded")
    assert composite_names(("none",), has_masks=False) == ()
    assert composite_names(("pasted", "mosaic-3"), has_masks=True) == ("mosaic-3", "pasted")


def test_substrates_are_the_functions_own(record, folder):
    rows = record.rows(SUBSTRATES)
    assert {row.substrate for row in rows} == {"blur", "mean", "absent", IMPUTED}
    model, split = load("vit-digits"), digits("test").limit(IMAGES)
    (batch,) = split.batches(IMAGES)
    with torch.no_grad():
        targets = model(batch.images).argmax(-1)
    maps = explain(model, batch.images, targets=targets, method="rollout")
    (own,) = faithfulness(model, batch.images, targets, [maps], substrate="absent", steps=OTHER_STEPS)
    gap = record.metric(SUBSTRATE_GAP(model="vit-digits", substrate="absent", method="rollout"))
    assert gap.value == pytest.approx(float(own.gaps.mean()), abs=1e-4)
    for substrate, column in (("blur", "gap"), (IMPUTED, "road")):
        for method in (*METHODS, *BASELINES):
            expected = record.metric(CHECKS[column](model="vit-digits", method=method)).value
            found = record.metric(SUBSTRATE_GAP(model="vit-digits", substrate=substrate, method=method)).value
            assert found == pytest.approx(expected, abs=1e-6)
    agreements = record.rows(SUBSTRATE_AGREEMENTS)
    assert len(agreements) == 6
    assert all(row.tau in (-1.0, 1.0) and row.methods == 2 for row in agreements)  # one pair of methods


@pytest.mark.parametrize(
    ("methods", "tau", "said"),
    [
        (5, -0.2, "the rankings agree least with blur and mean: Kendall's τ -0.20"),
        (2, 1.0, "their order is the same with every replacement"),
        (2, -1.0, "the mean of one is higher with blur, of the other with mean"),  # τ of two methods says no more
    ],
)
def test_the_agreement_of_two_methods_is_said_without_a_correlation(methods, tau, said):
    assert agreement_words(SubstrateAgreementRow("vit", "blur", "mean", tau, methods, 0, 40)) == said


def test_stability_and_the_cascade_are_recorded(record):
    rows = {(row.method, row.disturbance): row for row in record.rows(STABILITY)}
    assert {disturbance for _, disturbance in rows} == {SHIFTS, "shift-quarter", "shift-half", "shift-one", "flip"}
    for (method, disturbance), row in rows.items():
        for score in ("correlation", "jumped"):
            metric = record.metric(STEADY(model="vit-digits", score=score, disturbance=disturbance, method=method))
            assert metric.value == pytest.approx(getattr(row, score), abs=1e-4)
    for row in record.rows(LEAGUE):
        for column in ("relevance_gain", "cascade"):
            metric = record.metrics.get(CHECKS[column](model="vit-digits", method=row.method))
            assert (metric is None) == (row.baseline and column == "cascade")
            assert metric is None or metric.value == pytest.approx(getattr(row, column), abs=1e-6)
        if not row.baseline:
            assert row.cascade == pytest.approx(np.mean(list(row.by_stage.values())), abs=1e-3)
    assert record.metric(CHECKS["relevance_gain"](model="vit-digits", method="relevance")).unit == "logits"


def test_power_is_that_of_the_paired_differences(record):
    rows = {row.check: row for row in record.rows(POWER)}
    assert set(rows) == {"road"}  # no masks, so no localisation
    row = rows["road"]
    assert record.metric(DETECTABLE(model="vit-digits", check="road")).value == pytest.approx(row.detectable)
    model, split = load("vit-digits"), digits("test").limit(IMAGES)
    (batch,) = split.batches(IMAGES)
    with torch.no_grad():
        targets = model(batch.images).argmax(-1)
    maps = [explain(model, batch.images, targets=targets, method=name) for name in METHODS]
    first, second = road(model, batch.images, targets, maps)
    expected = power_of((first.gaps - second.gaps).numpy())
    assert row.detectable == pytest.approx(expected.detectable, rel=1e-3)
    assert row.n == IMAGES
    assert f"under {row.detectable:.2f} in ROAD score" in sections(record)["Which map to trust"]


def test_every_number_of_the_report_is_backed(record):
    assert not list(unbacked(report(record)))
