"""The checks in a run's record: their numbers equal those of the functions, and verdicts follow from them."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from vitlens.analysis.faithfulness.league import BASELINES, Settings, league
from vitlens.analysis.faithfulness.localisation import roc_auc
from vitlens.attribution.explain import explain
from vitlens.commands.explain.measure import measure
from vitlens.commands.explain.measure.verdict import Evidence, verdict
from vitlens.commands.explain.options import ExplainOptions
from vitlens.commands.explain.record import AGREEMENT, AGREEMENTS, CHECKS, CURVES, LEAGUE, SETTINGS, TURNED
from vitlens.commands.explain.report import report
from vitlens.commands.run.options import RunOptions
from vitlens.commands.run.publish import read
from vitlens.commands.shared.maps.on_object import OnObjectRow
from vitlens.data.digits import digits
from vitlens.errors import UnknownNameError, UnsupportedError
from vitlens.files import read_run
from vitlens.models.loading import load
from vitlens.records import Record
from vitlens.uncertainty import Estimate

RUN = RunOptions(device="cpu", quiet=True, limit=6)
METHODS = ("relevance", "attention")
BRIEF = {"composites": ("none",), "other_substrates": ("none",), "stability": False}  # those are in test_evidence.py


def run(out: Path, *models: Path, methods: tuple[str, ...] = METHODS, **changes: object) -> Record:
    options = ExplainOptions(
        tuple(map(str, models)),
        data="digits",
        method=methods,
        target="true",
        verify=True,
        run=replace(RUN, out=out),
        **changes,  # type: ignore[arg-type]
    )
    measure(options)
    return read(read_run(out))


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory, tiny_vit: Path) -> Record:
    return run(tmp_path_factory.mktemp("league") / "out", tiny_vit)


def test_numbers_are_the_functions_own(record, tiny_vit):
    model, split = load(str(tiny_vit)), digits("test").limit(6)
    (batch,) = split.batches(6)
    maps = explain(model, batch.images, targets=batch.labels, method="relevance")
    auc = record.metric(CHECKS["roc_auc"](model="tiny-vit", method="relevance"))
    assert auc.value == pytest.approx(roc_auc(maps, split.masks).mean().item(), abs=1e-6)
    assert auc.n == 6
    assert auc.low <= auc.value <= auc.high
    functions = {"relevance": lambda s, i, t: explain(s, i, targets=t, method="relevance")}
    checks, random, _ = league(model, batch.images, batch.labels, functions, masks=split.masks)
    for column, value in (("gap", checks.fidelity.gaps), ("deletion", checks.fidelity.deletion.areas)):
        metric = record.metric(CHECKS[column](model="tiny-vit", method="relevance"))
        assert metric.value == pytest.approx(value.mean().item(), abs=1e-6)
    (row,) = [row for row in record.rows(LEAGUE) if row.method == "relevance"]
    judged = (checks.road.gaps - random.road.gaps).mean().item()  # by ROAD, as no method chooses by it
    assert row.check.margin("random").difference == pytest.approx(judged, abs=1e-6)
    assert row.check.estimate.value == pytest.approx(checks.road.gaps.mean().item(), abs=1e-6)
    assert 1.5 < checks.forwards < 3  # a forward pass, and a backward pass without gradients of the weights


def test_every_method_and_baseline_is_in_the_table(record):
    rows = {row.method: row for row in record.rows(LEAGUE)}
    assert rows.keys() == {*METHODS, *BASELINES}
    scores = [row.road for row in record.rows(LEAGUE)]
    assert scores == sorted(scores, reverse=True)
    for name in METHODS:
        row = rows[name]
        assert row.verdict
        assert not row.baseline
        assert row.forwards >= 1
        for column in ("road", "size", "randomisation", "pointing"):
            estimate = record.metric(CHECKS[column](model="tiny-vit", method=name))
            assert (estimate.n, estimate.value) == (6, pytest.approx(getattr(row, column), abs=1e-6))
        assert record.metric(TURNED(model="tiny-vit", method=name)).n == 6
        assert next(iter(row.by_stage)) == "head"
        assert [*row.by_stage.values()][-1] == pytest.approx(row.randomisation, abs=1e-4)
    for name in BASELINES:
        assert rows[name].verdict == "does not depend on the model"
        assert rows[name].baseline
        assert (rows[name].randomisation, rows[name].by_stage, rows[name].forwards) == (None, None, None)
        assert CHECKS["randomisation"](model="tiny-vit", method=name) not in record.metrics
    assert record.metric(AGREEMENT(model="tiny-vit", first="relevance", second="attention")).n == 6
    assert [(row.first, row.second) for row in record.rows(AGREEMENTS)] == [("relevance", "attention")]
    assert [(row.images, row.randomised, row.substrate) for row in record.rows(SETTINGS)] == [(6, 6, "blur")]


def test_the_folder_is_complete(record):
    assert (record.folder / "report.md").read_text().count("## Limits") == 1
    titles = [section.title for section in report(record).sections]
    checks = ["Checks of the methods", "Localisation", "Randomisation check", "Agreement between methods"]
    evidence = ["What replaces a removed patch", "Stability of the maps"]
    rest = ["Counterfactuals", *evidence, "Methods and their cost", "Images"]
    assert titles == ["Which map to trust", "Maps", *checks, *rest]
    assert {path.name for path in (record.folder / "figures").iterdir()} == {
        "explain.png", "league.png", "faithfulness.png", "counterfactuals.png",
    }  # fmt: skip
    arrays = record.arrays(CURVES, model="tiny-vit")
    assert arrays.deletion.shape == (4, len(arrays.shares))


def test_two_models_stand_beside_each_other(tiny_vit, tiny_cnn, tmp_path):
    record = run(tmp_path / "out", tiny_vit, tiny_cnn, methods=("saliency",), counterfactuals=False, **BRIEF)
    assert {row.model for row in record.rows(LEAGUE)} == {"tiny-vit", "tiny-cnn"}
    for alias in ("tiny-vit", "tiny-cnn"):
        for column in ("gap", "randomisation"):
            assert CHECKS[column](model=alias, method="saliency") in record.metrics
        assert (tmp_path / "out" / "figures" / f"league_{alias}.png").is_file()


def test_maps_that_are_broken_are_flagged(tiny_vit):
    model, split = load(str(tiny_vit)), digits("test").limit(4)
    (batch,) = split.batches(4)
    functions = {
        "broken": lambda _s, i, _t: i[:, 0] / 0 * torch.tensor([1.0, 1, 1, 0])[:, None, None],
        "even": lambda _s, i, _t: torch.ones(len(i), 8, 8),
    }
    settings = Settings(steps=2, road=False, counterfactuals=False)
    checks = league(model, batch.images, batch.labels, functions, masks=split.masks, settings=settings)
    assert checks[0].faults.words.startswith("4 of 4 not finite")
    assert checks[0].randomisation is None
    assert checks[1].faults.words == "4 of 4 constant"
    assert checks[1].randomisation.flagged
    assert checks[1].scores["roc_auc"].tolist() == [0.5] * 4
    assert checks[0].road is None


def test_images_without_masks_have_no_localisation(tiny_vit):
    model, split = load(str(tiny_vit)), digits("test").limit(3)
    (batch,) = split.batches(3)
    functions = {"noise": lambda _s, i, _t: i[:, 0]}
    settings = Settings(steps=2, road=False, counterfactuals=False)
    checks = league(model, batch.images, batch.labels, functions, settings=settings)
    assert checks[0].scores == {}
    masks = split.masks.clone()
    masks[0] = False
    checks = league(model, batch.images, batch.labels, functions, masks=masks, settings=settings)
    assert len(checks[0].scores["roc_auc"]) == 2


def on_object(gain_low: float) -> OnObjectRow:
    """A ROC-AUC that exceeds that of a uniform map by 0.2, with this end of the interval."""
    return OnObjectRow(
        "vit", "own", "roc_auc", Estimate(0.7, 0.6, 0.8, 10, ""), "a uniform map", Estimate(0.5, unit=""),
        Estimate(0.2, gain_low, 0.3, 10, ""),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "more faithful than random and centre, and localises the object better than a uniform map"),
        ({"on_object": None}, "more faithful than random and centre"),
        ({"on_object": on_object(-0.01)}, "not shown to localise the object better than a uniform map"),
        ({"faithful": ("centre",)}, "not shown to be more faithful than random"),
        ({"faithful": ()}, "not shown to be more faithful than random or centre"),
        ({"flagged": True}, "flagged: its maps hardly change when the weights are randomised; more faithful"),
        ({"randomised": False}, "; the randomisation check was not run"),
        ({"usable": 7}, "; 3 of 10 maps are not usable"),
        ({"usable": 0}, "not usable: every map is constant or not finite"),
    ],
)
def test_verdicts(changes, words):
    common = {
        "usable": 10,
        "images": 10,
        "randomised": True,
        "flagged": False,
        "faithful": BASELINES,
        "on_object": on_object(0.1),
    }
    assert words in verdict(Evidence(**{**common, **changes}))


def test_refusals_come_before_any_work(tiny_vit, tiny_cnn, tmp_path):
    with pytest.raises(UnknownNameError, match="no method 'relevanse'"):
        run(tmp_path / "a", tiny_vit, methods=("relevanse",))
    with pytest.raises(UnsupportedError, match="expected a method"):
        run(tmp_path / "b", tiny_cnn, methods=("relevance",))
