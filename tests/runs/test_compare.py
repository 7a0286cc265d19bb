import json
from pathlib import Path

import pytest
import torch
from PIL import Image

from vitlens.analysis.failures.disturbances import DISTURBANCES
from vitlens.commands.scaffold.options import ModelOptions, RunOptions
from vitlens.data.shapes import CLASSES
from vitlens.errors import InputError, UnknownNameError, UnsupportedError
from vitlens.files import read_run
from vitlens.models.loading import load, untrained
from vitlens.models.saved import save
from vitlens.runs.compare import compare
from vitlens.runs.sections import metrics

IMAGES = 24
SHAPE = {"dim": 16, "depth": 2, "heads": 2, "patch_size": [8, 8]}


def options(out: Path, **more: object) -> RunOptions:
    return RunOptions(device="cpu", out=out, quiet=True, command="vitlens compare a b", **more)  # type: ignore[arg-type]


def run(out: Path, models: list[str], **choices: object) -> Path:
    limit = {"limit": choices.pop("limit")} if "limit" in choices else {}
    return compare(models, model_options=ModelOptions(), options=options(out, **limit), **choices)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_vit: Path, tiny_cnn: Path) -> Path:
    """Two untrained models on 24 scenes."""
    out = tmp_path_factory.mktemp("compare") / "run"
    run(out, [str(tiny_vit), str(tiny_cnn)], limit=IMAGES, panels=6)
    return out


@pytest.fixture(scope="module")
def of_shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two untrained models of shapes on 104 of them: untrained models fail often enough to be tested."""
    root = tmp_path_factory.mktemp("shapes")
    for name, preset, overrides in (("vit", "vit-mini", SHAPE), ("cnn", "resnet20", None)):
        save(untrained(preset, classes=CLASSES, overrides=overrides), root / name / "model.safetensors")
    models = [str(root / "vit"), str(root / "cnn")]
    run(root / "run", models, data="shapes", limit=104, maps=20, panels=1, method=["saliency"], target="3",
        harder=False)  # fmt: skip
    return root / "run"


def test_the_folder_is_whole(folder):
    record = read_run(folder)
    found = metrics(record)
    assert record.status == "done"
    for name in ("accuracy", "calibration_error", "look/half", "look/inside", "localisation/pointing"):
        assert {f"{name}/tiny-vit", f"{name}/tiny-cnn"} <= found.keys()
    pair = "tiny-vit/tiny-cnn"
    for name in ("accuracy_difference", "mcnemar_p", "agreement/spearman", "agreement/top", "agreement/shared"):
        assert f"{name}/{pair}" in found
    assert record.config["options"]["method"] == ["relevance", "gradcam"]
    cells = {name: estimate for name, estimate in found.items() if name.startswith("cell/")}
    assert sum(one.value for one in cells.values()) == pytest.approx(1)
    assert all(one.n == IMAGES for one in cells.values())


def test_panels_by_rising_agreement_and_as_single_files(folder):
    record = read_run(folder)
    sheets = {row["sheet"]: row["images"] for row in record.table("sheets")}
    rows = {row["image"]: row for row in record.table("images")}
    agreement = [rows[index]["agreement"] for index in sheets["panels"]]
    assert len(set(sheets["panels"])) == 6
    assert agreement == sorted(agreement)
    singles = sorted((folder / "panels").glob("*.png"))
    assert [path.name for path in singles] == [f"{index:03}.png" for index in range(1, 7)]
    with Image.open(singles[0]) as single:
        assert single.size[0] > 300
    assert len(list((folder / "figures").glob("panels_*.png"))) == 1


def test_the_report_says_what_the_numbers_say(folder):
    text = (folder / "report.md").read_text()
    found = metrics(read_run(folder))
    assert f"{100 * found['accuracy/tiny-vit'].value:.1f} %" in text
    for words in ("Right are **tiny-vit**", "rank correlation of", "middle quarter", "McNemar", "## Limits"):
        assert words in text
    assert "## Shape or texture" not in text
    assert set(DISTURBANCES) == {row["kind"] for row in read_run(folder).table("robustness")}


def test_tables_agree_with_each_other(folder):
    record = read_run(folder)
    for table, key in (("by_class", None), ("by_number", "number")):
        rows = record.table(table)
        for name in {row[key] for row in rows} if key else {None}:
            mine = [row for row in rows if key is None or row[key] == name]
            assert sum(row["n"] for row in mine) == IMAGES
    wrong = {"first": 0, "second": 0}
    for row in record.table("confusions"):
        for model in wrong:
            wrong[model] += row[model]
    found = metrics(record)
    assert wrong["first"] == round(IMAGES * (1 - found["accuracy/tiny-vit"].value))
    assert wrong["second"] == round(IMAGES * (1 - found["accuracy/tiny-cnn"].value))
    levels = [row for row in record.table("robustness") if row["kind"] == "low-pass" and row["model"] == "tiny-vit"]
    assert levels[0]["accuracy"] == found["accuracy/tiny-vit"].value


def test_failures_are_tested_with_one_correction(of_shapes):
    """A single method serves both models, and a number is a class."""
    record = read_run(of_shapes)
    rows = record.table("separations")
    assert {row["kind"] for row in rows} == {"image", "attention", "map"}
    assert {row["model"] for row in rows if row["kind"] == "attention"} == {"vit"}
    tested = [row for row in rows if row["p"] is not None]
    smallest = min(tested, key=lambda row: row["p"])
    assert smallest["p_holm"] == pytest.approx(min(1, len(tested) * smallest["p"]))
    assert all(row["failures"] + row["successes"] == 104 for row in rows if row["kind"] == "image")
    assert record.config["options"]["method"] == ["saliency", "saliency"]
    assert "robustness" not in record.results["tables"]
    assert len(record.table("images")) >= 3


def test_models_of_shapes_are_asked_about_conflicts(of_shapes):
    assert sum(row["n"] for row in read_run(of_shapes).table("shape_bias")) == 2 * 560
    assert "## Shape or texture" in (of_shapes / "report.md").read_text()


def test_wrong_calls_leave_nothing(tmp_path, tiny_vit, tiny_cnn, pictures):
    pair, out = [str(tiny_vit), str(tiny_cnn)], tmp_path / "run"
    with pytest.raises(
        InputError, match=r"two models to compare, found 1; e\.g\. vitlens compare vit-digits cnn-digits"
    ):
        run(out, pair[:1])
    with pytest.raises(UnknownNameError, match="no method 'relevence'; did you mean 'relevance'"):
        run(out, pair, method=["relevence"])
    with pytest.raises(UnsupportedError, match=r"tiny-cnn \(cnn\) has, found 'rollout'; it has .*gradcam"):
        run(out, pair, method=["rollout"])
    with pytest.raises(InputError, match="found 3 methods"):
        run(out, pair, method=["gradcam", "gradcam", "rollout"])
    with pytest.raises(InputError, match="--target from 0 to 9, found 10"):
        run(out, pair, target="10")
    with pytest.raises(InputError, match="labelled images"):
        run(out, pair, data=str(pictures))
    with pytest.raises(InputError, match="named shapeN-textureM"):
        run(out, pair, cue_conflict="digits")
    save(untrained("resnet20", classes=("zero", "one")), tmp_path / "other" / "model.safetensors")
    with pytest.raises(InputError, match=r"the second model does not know .* only in the model: 'zero'"):
        run(out, [str(tiny_vit), str(tmp_path / "other")])
    assert not out.exists()


def test_maps_that_say_nothing_are_counted_and_two_of_one_family_are_said(tmp_path, tiny_vit):
    """A model without any weight in its head: no gradient, no relevance."""
    dead = load(str(tiny_vit))
    with torch.no_grad():
        dead.module.head.weight.zero_()
    save(dead, tmp_path / "dead" / "model.safetensors")
    path = run(tmp_path / "run", [str(tmp_path / "dead"), str(tiny_vit)], limit=8, harder=False, panels=3)
    text = path.read_text()
    assert "Both models are vision transformers: what differs here is not ViT against CNN." in text
    assert "**8 of 8 maps of dead are constant" in text
    assert "No map of relevance of dead says anything" in text
    assert json.loads((tmp_path / "run" / "results.json").read_text())["metrics"]["maps/usable/dead"]["value"] == 0
