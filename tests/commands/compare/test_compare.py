"""The record of `vitlens compare`: its numbers agree with each other and with what was asked for."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.backing import unbacked
from vitlens.analysis.failures import errors
from vitlens.analysis.failures.disturbances import DISTURBANCES
from vitlens.analysis.failures.taxonomy import CATEGORIES, NOT_EXPLAINED, TESTED
from vitlens.commands.compare.measure import measure
from vitlens.commands.compare.measure.failures import MAPPED_FAILURES
from vitlens.commands.compare.options import CompareOptions
from vitlens.commands.compare.record import (
    ACCURACY,
    AGREEMENTS,
    BY_CLASS,
    BY_NUMBER,
    CELL_SHARE,
    CELLS,
    CONFLICTS,
    CONFUSED,
    DIFFERENCE,
    DISTURBED_PAIRS,
    HARDER,
    IMAGES,
    MAP_CHECKS,
    MAP_NUMBERS,
    MCNEMAR_P,
    METHODS,
    PANELS,
    POINTING,
    SEPARATIONS,
    SHAPE_BIAS,
    SHEETS,
    USABLE,
)
from vitlens.commands.compare.report import report
from vitlens.commands.compare.report.panels import agreement_words
from vitlens.commands.compare.report.summary import cell_names
from vitlens.commands.run.options import RunOptions
from vitlens.commands.run.publish import read
from vitlens.commands.shared.calibration import CALIBRATION_ERROR
from vitlens.commands.shared.failures.rows import FAILURE_ARRAYS, FAILURE_EXAMPLES, FAILURES, REPAIRS
from vitlens.commands.shared.failures.sections import TITLE
from vitlens.data.shapes import CLASSES
from vitlens.errors import InputError, UnknownNameError, UnsupportedError
from vitlens.files import read_run
from vitlens.models.loading import load, untrained
from vitlens.models.saved import save
from vitlens.records import Record
from vitlens.report.document import Document

COUNT = 24
SHAPE = {"dim": 16, "depth": 2, "heads": 2, "patch_size": [8, 8]}
PAIR = {"first": "tiny-vit", "second": "tiny-cnn"}


def run(out: Path, models: list[str], *, limit: int | None = None, **changes: object) -> Record:
    options = RunOptions(device="cpu", out=out, quiet=True, command="vitlens compare a b", limit=limit)
    assert measure(CompareOptions(tuple(models), run=options, **changes)) == out / "report.md"
    return read(read_run(out))


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory, tiny_vit: Path, tiny_cnn: Path) -> Record:
    """Two untrained models on 24 scenes."""
    out = tmp_path_factory.mktemp("compare") / "run"
    return run(out, [str(tiny_vit), str(tiny_cnn)], limit=COUNT, panels=6)


@pytest.fixture(scope="module")
def of_shapes(tmp_path_factory: pytest.TempPathFactory) -> Record:
    """Two untrained models of shapes on 104 of them: untrained models fail often enough to be tested."""
    root = tmp_path_factory.mktemp("shapes")
    for name, preset, overrides in (("vit", "vit-mini", SHAPE), ("cnn", "resnet20", None)):
        save(untrained(preset, classes=CLASSES, overrides=overrides), root / name / "model.safetensors")
    models = [str(root / "vit"), str(root / "cnn")]
    return run(
        root / "run", models, data="shapes", limit=104, maps=20, panels=1, method=("saliency",), target="3",
        harder=False,
    )  # fmt: skip


def test_cells_are_those_of_the_analysis():
    assert tuple(CELLS.values()) == errors.CELLS
    assert list(CELLS) == [cell.replace(",", "").replace(" ", "_") for cell in errors.CELLS]


def test_the_folder_is_whole(record):
    assert record.status == "done"
    for alias in PAIR.values():
        for metric in (ACCURACY, CALIBRATION_ERROR, MAP_NUMBERS["half"], MAP_NUMBERS["inside"], POINTING):
            assert metric(model=alias) in record.metrics
    for metric in (DIFFERENCE, MCNEMAR_P, *AGREEMENTS.values()):
        assert metric(**PAIR) in record.metrics
    assert [row.method for row in record.rows(METHODS)] == ["best", "gradcam"]
    shares = [estimate for _, estimate in record.all(CELL_SHARE)]
    assert len(shares) == len(CELLS)
    assert sum(share.value for share in shares) == pytest.approx(1)
    assert all(share.n == COUNT for share in shares)


def test_numbers_of_images_are_those_asked_for_and_said(tmp_path, tiny_vit, tiny_cnn):
    record = run(tmp_path / "run", [str(tiny_vit), str(tiny_cnn)], limit=12, panels=1, checked=4, disturbed=5)
    assert {row.images for row in record.rows(MAP_CHECKS)} == {4}
    assert {row.n for row in (*record.rows(HARDER), *record.rows(DISTURBED_PAIRS))} == {5}
    said = [sentence.text for section in report(record).sections for sentence in section.sentences]
    assert "Measured on 5 of the 12 images, drawn with the seed and balanced by class." in said


def test_panels_by_rising_agreement_and_as_single_files(record):
    panels = {row.sheet: row.images for row in record.rows(SHEETS)}[PANELS]
    rows = {row.image: row for row in record.rows(IMAGES)}
    agreement = [rows[index].agreement for index in panels]
    assert len(set(panels)) == 6
    assert agreement == sorted(agreement)
    singles = sorted((record.folder / "panels").glob("*.png"))
    assert [path.name for path in singles] == [f"{index:03}.png" for index in range(1, 7)]
    with Image.open(singles[0]) as single:
        assert single.size[0] > 300
    assert len(list((record.folder / "figures").glob("panels_*.png"))) == 1


def test_panels_one_by_one_say_and_show_what_the_rows_hold(record):
    rows = {row.image: row for row in record.rows(IMAGES)}
    shown = [rows[index] for index in {row.sheet: row.images for row in record.rows(SHEETS)}[PANELS]]
    (section,) = [section for section in report(record).sections if section.panels]
    assert [panel.tags.class_name for panel in section.panels] == [row.truth for row in shown]
    assert len({panel.tags.outcome for panel in section.panels} - set(cell_names(record.aliases))) == 0
    assert [panel.tags.agreement for panel in section.panels] == [agreement_words(row.agreement) for row in shown]
    for panel, row in zip(section.panels, shown):
        assert row.first_prediction in panel.captions[1]
        assert ("✓" in panel.captions[2]) == (row.second_prediction == row.truth)
    pixels, first, second = section.panels[0].pictures()
    assert pixels.dtype == np.uint8
    assert pixels.shape == first.shape == second.shape
    assert [figure.name for figure in section.figures if figure.sheet] == ["panels_1"]


@pytest.mark.parametrize(
    ("agreement", "words"), [(None, "not known"), (-1.0, "below 0.3"), (0.3, "0.3 to 0.6"), (0.6, "at least 0.6")]
)
def test_agreement_in_words(agreement, words):
    assert agreement_words(agreement) == words


def test_tables_agree_with_each_other(record):
    assert sum(row.n for row in record.rows(BY_CLASS)) == COUNT
    for name in {row.number for row in record.rows(BY_NUMBER)}:
        slices = [row for row in record.rows(BY_NUMBER) if row.number == name]
        assert sum(row.n for row in slices) == COUNT
        assert all(row.lowest <= row.highest for row in slices)
    for row in (*record.rows(BY_CLASS), *record.rows(BY_NUMBER)):
        assert sum(row.counts) == row.n
        assert row.first.value == pytest.approx((row.both_right + row.only_second_wrong) / row.n)
    accuracies = [record.metric(ACCURACY(model=alias)).value for alias in PAIR.values()]
    assert sum(row.first for row in record.rows(CONFUSED)) == round(COUNT * (1 - accuracies[0]))
    assert sum(row.second for row in record.rows(CONFUSED)) == round(COUNT * (1 - accuracies[1]))
    assert {row.kind for row in record.rows(HARDER)} == set(DISTURBANCES)
    levels = [row for row in record.rows(HARDER) if row.kind == "low-pass" and row.model == "tiny-vit"]
    assert levels[0].accuracy == accuracies[0]
    assert not record.rows(CONFLICTS)


@pytest.mark.slow
def test_failures_are_tested_with_one_correction(of_shapes):
    """With a single method for both models, and a class given by its number."""
    rows = of_shapes.rows(SEPARATIONS)
    assert {row.kind for row in rows} == {"image", "attention", "map"}
    assert {row.model for row in rows if row.kind == "attention"} == {"vit"}
    tested = [row for row in rows if row.p is not None]
    smallest = min(tested, key=lambda row: row.p)
    assert smallest.p_holm == pytest.approx(min(1, len(tested) * smallest.p))
    assert all(row.failures + row.successes == 104 for row in rows if row.kind == "image")
    assert [row.method for row in of_shapes.rows(METHODS)] == ["saliency", "saliency"]
    assert not of_shapes.rows(HARDER)
    assert len(of_shapes.rows(IMAGES)) >= 3


@pytest.mark.slow
def test_failures_by_category_of_both_models(of_shapes):
    """With a target of its own, so that the maps of the predicted class are computed for it."""
    rows = of_shapes.rows(FAILURES)
    assert [row.category for row in rows if row.model == "vit"] == [*CATEGORIES, NOT_EXPLAINED]
    for alias in of_shapes.aliases:
        wrong = round(104 * (1 - of_shapes.metric(ACCURACY(model=alias)).value))
        own = {row.category: row for row in rows if row.model == alias}
        assert own["small"].failures == own["look-alike"].failures == wrong
        assert own["small"].failures + own["small"].successes == 104
        assert 20 < own["elsewhere"].failures <= min(wrong, MAPPED_FAILURES), "more than in the sample of 20"
        assert own["distractor"].failures == 0, "shapes have no distractors"
        assert of_shapes.has(FAILURE_ARRAYS, model=alias)
    for row in of_shapes.rows(REPAIRS):
        assert row.n <= TESTED
        assert max(row.corrected, row.control) <= row.n
        assert row.p_holm >= row.p or row.verdict == "too few"
    shown = of_shapes.rows(FAILURE_EXAMPLES)
    assert all(row.truth != row.prediction for row in shown)
    for alias in of_shapes.aliases:
        arrays = of_shapes.arrays(FAILURE_ARRAYS, model=alias)
        count = sum(row.model == alias for row in shown)
        assert len(arrays.pixels) == len(arrays.maps) == len(arrays.changed) == len(arrays.masks) == count
    section = next(section for section in report(of_shapes).sections if section.title == TITLE)
    assert not list(unbacked(Document("", (section,))))


@pytest.mark.slow
def test_a_folder_of_before_failures_were_written_is_read(of_shapes, tmp_path):
    folder = tmp_path / "older"
    shutil.copytree(of_shapes.folder, folder)
    results = json.loads((folder / "results.json").read_text())
    for name in ("failure_categories", "causal_tests", "failure_examples"):
        del results["tables"][name]
    (folder / "results.json").write_text(json.dumps(results))
    older = read(read_run(folder))
    assert not older.rows(FAILURES)
    assert not any(section.title == TITLE for section in report(older).sections)


@pytest.mark.slow
def test_models_of_shapes_are_tested_on_cue_conflicts(of_shapes):
    assert sum(row.n for row in of_shapes.rows(CONFLICTS)) == 2 * 560
    assert {parts["model"] for parts, _ in of_shapes.all(SHAPE_BIAS)} <= {"vit", "cnn"}
    assert any(section.title == "Shape or texture" for section in report(of_shapes).sections)


def test_wrong_calls_leave_nothing(tmp_path, tiny_vit, tiny_cnn, pictures):
    pair, out = [str(tiny_vit), str(tiny_cnn)], tmp_path / "run"
    with pytest.raises(
        InputError, match=r"two models to compare, found 1; e\.g\. vitlens compare vit-digits cnn-digits"
    ):
        run(out, pair[:1])
    with pytest.raises(InputError, match=r"expected --maps of at least --panels \(9\), found 8"):
        run(out, pair, panels=9, maps=8)
    with pytest.raises(UnknownNameError, match="no method 'relevence'; did you mean 'relevance'"):
        run(out, pair, method=("relevence",))
    with pytest.raises(UnsupportedError, match=r"tiny-cnn \(cnn\) has, found 'rollout'; it has .*gradcam"):
        run(out, pair, method=("rollout",))
    with pytest.raises(InputError, match="found 3 methods"):
        run(out, pair, method=("gradcam", "gradcam", "rollout"))
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


def test_unusable_maps_are_counted(tmp_path, tiny_vit):
    """A model without any weight in its head: no gradient, no relevance."""
    dead = load(str(tiny_vit))
    with torch.no_grad():
        dead.module.head.weight.zero_()
    save(dead, tmp_path / "dead" / "model.safetensors")
    record = run(tmp_path / "run", [str(tmp_path / "dead"), str(tiny_vit)], limit=4, harder=False, panels=3)
    usable = record.metric(USABLE(model="dead"))
    assert (usable.value, usable.n) == (0, 4)
    assert MAP_NUMBERS["half"](model="dead") not in record.metrics
    assert not [row for row in record.rows(SHEETS) if row.sheet == PANELS]
    assert [model.family for model in record.models] == ["vit", "vit"]
