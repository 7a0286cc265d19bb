"""The league in a run's folder: its numbers are the analysis' own, and its verdicts follow from them."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from vitlens.analysis.faithfulness.league import BASELINES, Settings, league
from vitlens.analysis.faithfulness.localisation import roc_auc
from vitlens.attribution.explain import explain
from vitlens.commands.scaffold.describe import described
from vitlens.commands.scaffold.folder import RunFolder
from vitlens.commands.scaffold.options import RunOptions
from vitlens.data.digits import digits
from vitlens.errors import UnknownNameError, UnsupportedError
from vitlens.models.loading import load
from vitlens.runs.explain_verdict import Evidence, verdict
from vitlens.runs.explain_verify import keep_league
from vitlens.runs.explain_verify_draw import draw_league
from vitlens.runs.explain_verify_tell import tell_league
from vitlens.runs.report import publish

OPTIONS = RunOptions(device="cpu", quiet=True)
METHODS = ("relevance", "attention")
SETTINGS = Settings(steps=4)


def run(out: Path, *modules: str | Path, images: int = 6, methods: tuple[str, ...] = METHODS) -> dict:
    models = [load(str(module)) for module in modules]
    split = digits("test").limit(images)
    config = described(OPTIONS, models=models, split=split)
    with RunFolder.create("explain", out=out, config=config) as folder:
        tables: dict[str, list] = {}
        for model in models:
            alias = model.alias if len(models) > 1 else None
            found = keep_league(
                folder, model, split, split.labels, methods=methods, alias=alias, settings=SETTINGS, options=OPTIONS
            )
            for name, rows in found.items():
                tables[name] = tables.get(name, []) + rows
        for name, rows in tables.items():
            folder.table(name, rows)
        publish(folder, draw_league, tell_league)
    return json.loads((out / "results.json").read_text())


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory, tiny_vit: Path) -> Path:
    out = tmp_path_factory.mktemp("league") / "out"
    run(out, tiny_vit)
    return out


@pytest.fixture(scope="module")
def results(out: Path) -> dict:
    return json.loads((out / "results.json").read_text())


def test_numbers_are_the_functions_own(results, tiny_vit):
    model, split = load(str(tiny_vit)), digits("test").limit(6)
    (batch,) = split.batches(6)
    maps = explain(model, batch.images, targets=batch.labels, method="relevance")
    auc = results["metrics"]["localisation/roc_auc/relevance"]
    assert auc["value"] == pytest.approx(roc_auc(maps, split.masks).mean().item(), abs=1e-6)
    assert auc["n"] == 6
    assert auc["low"] <= auc["value"] <= auc["high"]
    functions = {"relevance": lambda s, i, t: explain(s, i, targets=t, method="relevance")}
    (mark, *_) = league(model, batch.images, batch.labels, functions, masks=split.masks, settings=SETTINGS)
    for name, value in (("gap", mark.fidelity.gaps), ("deletion", mark.fidelity.deletion.areas)):
        found = results["metrics"][f"faithfulness/{name}/relevance"]
        assert found["value"] == pytest.approx(value.mean().item(), abs=1e-6)
    assert 1.5 < mark.forwards < 3  # a forward, and a backward that asks for no weight of the model


def test_every_method_and_baseline_is_in_the_table(results):
    rows = {row["method"]: row for row in results["tables"]["league"]}
    assert rows.keys() == {*METHODS, *BASELINES}
    gaps = [row["gap"] for row in results["tables"]["league"]]
    assert gaps == sorted(gaps, reverse=True)
    for name in METHODS:
        assert rows[name]["verdict"]
        assert isinstance(rows[name]["flagged"], bool)
        assert rows[name]["forwards"] >= 1
        for metric in ("faithfulness/road", "counterfactual/turned", "randomisation", "localisation/pointing"):
            assert results["metrics"][f"{metric}/{name}"]["n"] == 6
    for name in BASELINES:
        assert rows[name]["verdict"] == "knows nothing of the model"
        assert f"randomisation/{name}" not in results["metrics"]
    assert results["metrics"]["agreement/relevance/attention"]["n"] == 6
    assert results["tables"]["agreement"][0]["first"] == "relevance"


def test_the_folder_is_complete(out):
    text = (out / "report.md").read_text()
    for word in ("Which map can be trusted", "On the object", "weights are randomised", "Agreement", "Counterfactuals"):
        assert word in text
    assert {path.name for path in (out / "figures").iterdir()} == {
        "league.png", "faithfulness.png", "counterfactuals.png",
    }  # fmt: skip
    arrays = np.load(out / "arrays" / "league-tiny-vit.npz")
    assert arrays["deletion"].shape == (4, len(arrays["shares"]))


def test_two_models_stand_beside_each_other(tiny_vit, tiny_cnn, tmp_path):
    results = run(tmp_path / "out", tiny_vit, tiny_cnn, methods=("saliency",))
    assert {row["model"] for row in results["tables"]["league"]} == {"tiny-vit", "tiny-cnn"}
    for alias in ("tiny-vit", "tiny-cnn"):
        assert f"faithfulness/{alias}/gap/saliency" in results["metrics"]
        assert f"randomisation/{alias}/saliency" in results["metrics"]
        assert (tmp_path / "out" / "figures" / f"league_{alias}.png").is_file()
    assert "(tiny-cnn)" in (tmp_path / "out" / "report.md").read_text()


def test_maps_that_are_broken_are_flagged(tiny_vit):
    model, split = load(str(tiny_vit)), digits("test").limit(4)
    (batch,) = split.batches(4)
    functions = {
        "broken": lambda _s, i, _t: i[:, 0] / 0 * torch.tensor([1.0, 1, 1, 0])[:, None, None],
        "even": lambda _s, i, _t: torch.ones(len(i), 8, 8),
    }
    settings = Settings(steps=2, road=False, counterfactuals=False)
    marks = league(model, batch.images, batch.labels, functions, masks=split.masks, settings=settings)
    assert marks[0].faults.words.startswith("4 of 4 not finite")
    assert marks[0].randomisation is None
    assert marks[1].faults.words == "4 of 4 constant"
    assert marks[1].randomisation.flagged
    assert marks[1].scores["roc_auc"].tolist() == [0.5] * 4
    assert marks[0].road is None


def test_images_without_masks_have_no_localisation(tiny_vit):
    model, split = load(str(tiny_vit)), digits("test").limit(3)
    (batch,) = split.batches(3)
    functions = {"noise": lambda _s, i, _t: i[:, 0]}
    settings = Settings(steps=2, road=False, counterfactuals=False)
    marks = league(model, batch.images, batch.labels, functions, settings=settings)
    assert marks[0].scores == {}
    masks = split.masks.clone()
    masks[0] = False
    marks = league(model, batch.images, batch.labels, functions, masks=masks, settings=settings)
    assert len(marks[0].scores["roc_auc"]) == 2


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "more faithful than random and centre, and lies on the object better than both"),
        ({"has_masks": False, "localised": ()}, "more faithful than random and centre"),
        ({"localised": ("random",)}, "not shown to lie on the object better than centre"),
        ({"faithful": ("centre",)}, "not shown to be more faithful than random"),
        ({"faithful": ()}, "not shown to be more faithful than random or centre"),
        ({"flagged": True}, "flagged: its maps hardly change when the weights are randomised; more faithful"),
        ({"randomised": False}, "; not put to the randomisation check"),
        ({"says_something": 7}, "; 3 of 10 maps say nothing"),
        ({"says_something": 0}, "says nothing: every map is constant or not finite"),
    ],
)
def test_verdicts(changes, words):
    common = {
        "says_something": 10,
        "images": 10,
        "randomised": True,
        "flagged": False,
        "faithful": BASELINES,
        "localised": BASELINES,
    }
    found = verdict(Evidence(**{**common, "has_masks": True, **changes}))
    assert words in found


def test_refusals_come_before_any_work(tiny_vit, tiny_cnn, tmp_path):
    with pytest.raises(UnknownNameError, match="no method 'relevanse'"):
        run(tmp_path / "a", tiny_vit, methods=("relevanse",))
    with pytest.raises(UnsupportedError, match="expected a method"):
        run(tmp_path / "b", tiny_cnn, methods=("relevance",))
