"""`vitlens evaluate` and `predict`: records against arrays, several processes, other trainings."""

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import vitlens
from tests.kit.axes import texts
from tests.kit.commands import impatient, ran, report, said_first
from tests.kit.first_page import check_first_page
from tests.kit.making import save, untrained
from tests.kit.planted_maps import prediction
from tests.kit.select import names_in, select, values_of
from tests.kit.simulated_processes import run_in_processes
from tests.kit.waiting import HANGS
from vitlens import load
from vitlens.cli.main import run
from vitlens.commands.evaluate.record import EvaluateRecord
from vitlens.commands.predict.record import PredictRecord
from vitlens.commands.predict.report import REPORT
from vitlens.commands.registry import COMMANDS
from vitlens.commands.run.publish import read_folder
from vitlens.names import imagenet_classes
from vitlens.record import Config, ModelEntry
from vitlens.uncertainty import wilson

PAIR = ("vit-digits", "cnn-digits")
LINE = f"evaluate {' '.join(PAIR)} --data digits --limit 40 --batch-size 10"


@pytest.fixture(scope="module")
def record(golden) -> EvaluateRecord:
    """Return an evaluation of the bundled pair on 40 images, in one process."""
    return golden("evaluate").record


def test_predictions_of_the_grid_are_drawn_by_the_seed_from_right_and_wrong_ones(record, tmp_path):
    for arrays in record.predictions.values():
        right = arrays.prediction == arrays.label
        drawn = right[arrays.sampled]
        assert (drawn.sum(), (~drawn).sum()) == (min(8, right.sum()), min(8, (~right).sum()))
        assert len(set(arrays.sampled)) == len(arrays.sampled) == len(arrays.sampled_pixels)
    again = ran(tmp_path / "again", f"{LINE} --seed 0").predictions["vit-digits"]
    other = ran(tmp_path / "other", f"{LINE} --seed 1").predictions["vit-digits"]
    assert again.sampled.tolist() == record.predictions["vit-digits"].sampled.tolist()
    assert again.sampled.tolist() != other.sampled.tolist()
    (grid,) = [figure for figure in report(record).figures if figure.name == "predictions"]
    assert "seed 0" in grid.caption


def test_numbers_are_those_of_the_models_and_of_the_arrays(record):
    """Calibration, classes and confusions: tests/public/evaluation."""
    words = ("accuracy", "cross_entropy", "calibration_error", "confidence_gap")
    names = {f"{word}/{alias}" for word in words for alias in PAIR}
    of_pair = {f"{word}/vit-digits/cnn-digits" for word in ("accuracy_difference", "mcnemar_p")}
    assert record.metrics.keys() == names | of_pair
    both = []
    for score in record.scores:
        arrays = record.predictions[score.model]
        right = arrays.prediction == arrays.label
        both.append(right)
        evaluation = vitlens.evaluate(
            vitlens.load(score.model), vitlens.load_data("digits", limit=40)
        )
        assert right.tolist() == evaluation.correct.tolist()
        assert record.metric(f"accuracy/{score.model}") == score.accuracy
        assert (score.accuracy.value, score.accuracy.n) == (right.mean(), 40)
        surest = arrays.surest_errors
        assert not right[surest].any()
        assert (np.diff(arrays.probability[surest]) <= 0).all()
    (pair,), (first, second) = record.pairs, both
    assert record.errors == (~first).sum() + (~second).sum()
    counts = (
        (first & second).sum(),
        (first & ~second).sum(),
        (~first & second).sum(),
        (~first & ~second).sum(),
    )
    assert (
        pair.both_right,
        pair.only_first_right,
        pair.only_second_right,
        pair.both_wrong,
    ) == counts
    assert record.metric("accuracy_difference/vit-digits/cnn-digits").value == pair.difference.value
    assert pair.difference.value == pytest.approx(100 * (first.mean() - second.mean()))
    assert pair.p == pair.p_holm == record.metric("mcnemar_p/vit-digits/cnn-digits").value


def test_the_figures_of_the_confusion_have_the_counts_of_each_model(record):
    # errors are many
    rows = [replace(row, count=20 * row.count + at) for at, row in enumerate(record.confusion)]
    drawn = [
        figure
        for figure in report(replace(record, confusion=tuple(rows))).figures
        if "confusion" in figure.name
    ]
    assert len(drawn) == 2
    for figure, model in zip(drawn, PAIR, strict=True):
        words = set(texts(figure.draw()))
        assert {
            str(row.count) for row in rows if row.model == model and row.truth != row.prediction
        } <= words


def test_a_matrix_of_all_classes_is_not_said_to_show_some(record):
    for names, is_cut in (
        ([str(digit) for digit in range(10)], False),
        (list("abcdefghijklmno"), True),
    ):
        confusion = EvaluateRecord.contents().tables["confusion"]
        rows = [confusion(PAIR[0], name, names[0], 20) for name in names]
        per_class = [replace(record.per_class[0], model=PAIR[0], class_name=name) for name in names]
        changed = replace(record, confusion=tuple(rows), per_class=tuple(per_class))
        (figure,) = [figure for figure in report(changed).figures if "confusion" in figure.name]
        assert ("confused most" in figure.caption) == is_cut


def require_same(one: EvaluateRecord, other: EvaluateRecord, *, rel: float) -> None:
    """Check that both hold the same counts and predictions, and other floats within rel."""
    assert one.metric("accuracy/vit-digits") == other.metric("accuracy/vit-digits")
    assert one.metrics.keys() == other.metrics.keys()
    for name, metric in one.metrics.items():
        actual = asdict(other.metrics[name])
        expected = asdict(metric)
        for key, value in expected.items():
            if isinstance(value, float):
                expected[key] = pytest.approx(value, rel=rel)
        assert actual == expected
    for name, values in asdict(one.predictions["vit-digits"]).items():
        actual = getattr(other.predictions["vit-digits"], name)
        if values.dtype.kind == "f":
            np.testing.assert_allclose(actual, values, rtol=rel)
        else:
            np.testing.assert_array_equal(actual, values)


# shares of 20 fill batches of 10 as the whole does; batches of other sizes are rounded
# otherwise, by 1e-7
@pytest.mark.parametrize(("count", "rel"), [(2, 1e-9), (3, 1e-5)])
def test_several_processes_give_the_results_of_one(
    count, rel, record, tmp_path, monkeypatch, capsys
):
    with impatient():
        line = f"{LINE} --device cpu --out"
        codes = run_in_processes(
            count,
            lambda processes: run([*line.split(), str(tmp_path / str(processes.index))]),
            monkeypatch,
        )
    assert codes == [0] * count
    assert list(names_in(tmp_path)) == ["0"]
    require_same(record, read_folder(tmp_path / "0"), rel=rel)
    output = capsys.readouterr()
    assert output.out.split() == [str(tmp_path / "0" / "report.md")]  # one of them speaks
    assert len(re.findall(r"^evaluating vit\S*: (\d+) of \1 ", output.err, re.MULTILINE)) == 1


def test_a_wrong_call_ends_all_processes(tmp_path, monkeypatch, capsys):
    line = f"{LINE} --limit 2 --device cpu --out {tmp_path / 'run'}".split()
    assert run_in_processes(3, lambda _: run(line), monkeypatch) == [2, 2, 2]
    printed = capsys.readouterr()
    assert printed.out == ""
    # a busy machine also prints progress
    (said,) = {line for line in printed.err.splitlines() if line.startswith("error: ")}
    assert "an image for each of 3 processes, found 2" in said
    assert not (tmp_path / "run").exists()
    (tmp_path / "run").mkdir()
    assert all(
        run_in_processes(2, lambda _: run(f"{LINE} --out {tmp_path / 'run'}".split()), monkeypatch)
    )
    assert not any((tmp_path / "run").iterdir())


@pytest.mark.slow  # torchrun and two processes: 15 s of one core
def test_torchrun_gives_the_results_of_one(record, tmp_path):
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        "2",
        "-m",
        "vitlens",
    ]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "MPLBACKEND": "Agg",
    }
    line = [*launch, *LINE.split(), "--device", "cpu", "--out", str(tmp_path / "two")]
    place = Path(__file__).parents[2]
    two = subprocess.run(
        line, cwd=place, env=environment, timeout=HANGS, check=False, capture_output=True, text=True
    )
    assert two.returncode == 0, two.stderr
    assert two.stdout == f"{tmp_path}/two/report.md\n"
    require_same(record, read_folder(tmp_path / "two"), rel=1e-9)


def test_imagenet_answers_for_the_sixteen_of_cue_conflicts(tmp_path):
    for name in ("cat/cat1-dog2", "cat/cat1-bear3", "dog/dog4-cat1"):
        (tmp_path / "conflicts" / name).parent.mkdir(exist_ok=True, parents=True)
        Image.new("RGB", (32, 32), (10, 20, 200)).save(tmp_path / "conflicts" / f"{name}.png")
    overrides = {"dim": 16, "depth": 2, "heads": 2}
    save(
        untrained("vit-micro", classes=imagenet_classes(), overrides=overrides),
        tmp_path / "vit.safetensors",
    )
    record = ran(
        tmp_path / "run", f"evaluate {tmp_path / 'vit.safetensors'} --data {tmp_path / 'conflicts'}"
    )
    arrays = record.predictions["vit"]
    notes = record.config.data.notes
    assert len(set(arrays.classes)) == 16
    assert [arrays.classes[label] for label in arrays.label] == ["cat", "cat", "dog"]
    assert "the 16" in notes[0]
    assert "its label is the shape" in "\n".join(notes)
    assert notes[0].rstrip(".") in (tmp_path / "run" / "report.md").read_text()


# --- models that were trained differently are not compared as if they were trained alike


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, ()),
        ({"epochs": 5, "steps": 25}, ("epochs 7", "steps 518", " 5 (")),
        ({"data": "cifar10"}, ("data digits", "cifar10")),
        ({"augmentation": "flip"}, ("augmentation", "flip")),
        ({"seed": 3}, ("seed",)),
        ({"epochs": None}, ()),  # what is not known of one is no difference
    ],
)
def test_what_differs_of_two_trainings_is_said(changes, said, record):
    vit, cnn = record.training
    assert (vit.model, vit.epochs, vit.steps, cnn.model) == ("vit-digits", 7, 518, "cnn-digits")
    text = said_first(report(replace(record, training=(vit, replace(cnn, **changes)))))
    assert ("trained differently" in text) == bool(said)
    for words in said:
        assert words in text


def test_runs_of_unequal_budgets_say_so_first_and_what_nobody_knows_is_not_made_up(
    tiny_vit, tmp_path
):
    shape = "--dim 8 --depth 1 --heads 2 --patch-size 8 --set crop_padding=0"
    for name, more in (("long", "--epochs 3"), ("short", "--epochs 1 --set flip=True")):
        ran(tmp_path / name, f"train vit-micro --data digits --limit 20 {shape} {more}")
    unknown, trained = ran(
        tmp_path / "out", f"evaluate {tiny_vit} cnn-digits --data digits --limit 2"
    ).training
    assert {name: value for name, value in asdict(unknown).items() if value is not None} == {
        "model": "tiny-vit"
    }
    assert trained.epochs == 7
    record = ran(
        tmp_path / "both",
        f"evaluate {tmp_path / 'long'} {tmp_path / 'short'} --data digits --limit 20",
    )
    rows = record.training
    assert values_of(rows, "model", "epochs", "steps") == [("long", 3, 6), ("short", 1, 2)]
    assert values_of(rows, "augmentation") == ["none", "flip"]
    assert values_of(rows, "images") == [20, 20]
    said = next(
        sentence.text for sentence in report(record).first.unknown if "epochs" in sentence.text
    )
    assert "3 (long)" in said
    assert said in (tmp_path / "both" / "report.md").read_text().partition("\n## ")[0]


@pytest.mark.parametrize("kind", ["photos", "digits"])
def test_one_line_an_image_and_a_folder_only_when_asked(
    kind, tiny_vit, pictures, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    images = f"--images {pictures}" if kind == "photos" else "--data digits --limit 3"
    line = f"predict {tiny_vit} {images} --device cpu --quiet"
    assert run(line.split()) == 0
    assert not list(tmp_path.iterdir())
    lines = capsys.readouterr().out.splitlines()
    assert run([*line.split(), "--html", "--out", "out"]) == 0
    printed = capsys.readouterr()
    assert printed.out.splitlines() == lines
    assert printed.err.splitlines()[-1] == str(Path("out") / "report.html")
    folder = read_folder(tmp_path / "out")
    rows = folder.predictions
    assert [str(row) for row in rows] == lines
    assert len(folder.images_drawn.pixels) == len(rows) == 3
    if kind == "photos":
        assert [row[0] for row in REPORT(folder).first.glance.rows] == ["0.png", "1.png", "2.png"]
        pixels = (
            torch.from_numpy(np.array(Image.open(pictures / "0.png")))
            .permute(2, 0, 1)[None]
            .float()
            / 255
        )
        expected = load(str(tiny_vit))(pixels).softmax(-1)[0].sort(descending=True)
        names, probabilities = zip(*rows[0].top_classes)
        assert probabilities == pytest.approx(expected.values[:5].tolist(), abs=1e-6)
        assert names == tuple(str(index) for index in expected.indices[:5].tolist())


@pytest.mark.parametrize(
    ("predicted", "labels", "right", "one_class"),
    [
        ("7" * 18 + "21", "70123456897012345689", wilson(2, 20), wilson(18, 20)),
        ("70123456897012345689", "70123456897012345680", wilson(19, 20), None),
        ("7" * 20, "7" * 20, wilson(20, 20), None),  # the only class there is
        ("7" * 10, "7" * 10, None, None),  # few images
        ("7", "1", None, None),  # one image
        ("7" * 21, None, None, None),  # no labels
    ],
)
def test_one_class_for_everything_comes_first(
    predicted: str, labels: str | None, right, one_class
) -> None:
    rows = tuple(
        prediction(f"{at % 2}/{at // 2}.png", name, 0.6 + 0.01 * at, labels and labels[at])
        for at, name in enumerate(predicted)
    )
    document = REPORT(PredictRecord(config=Config(models=(ModelEntry("m"),)), predictions=rows))
    effects = {claim.question: claim.effect for claim in document.claims}
    assert (effects.get("accuracy"), effects.get("one class")) == (right, one_class)
    assert (document.claims[0].question == "one class") == (one_class is not None)
    assert document.title == document.claims[0].title
    check_first_page(document)
    if len(rows) > 1:  # names that two files share are whole paths
        assert [row[0] for row in document.first.glance.rows][:3] == [
            "0/0.png",
            "1/0.png",
            "0/1.png",
        ]


def test_more_scenes_are_drawn_where_errors_are_too_few_and_never_more_than_asked_for(
    tiny_vit, tmp_path
):
    default = len(vitlens.load_data("digits"))
    with pytest.MonkeyPatch.context() as patch:
        # so that any model is saturated
        patch.setattr("vitlens.commands.shared.saturation.FEWEST_ERRORS", 10**6)
        patch.setattr("vitlens.commands.evaluate.measure.MOST_SCENES", default + 20)
        patch.setattr("vitlens.commands.evaluate.measure.SATURATION_SAMPLE", 20)
        more = ran(tmp_path / "more", f"evaluate {tiny_vit} --data digits")
        limited = ran(tmp_path / "limited", f"evaluate {tiny_vit} --data digits --limit 30")
    assert (more.images, limited.images) == (default + 20, 30)


def test_calibration_by_class_and_confusions_need_errors(record):
    """The bundled pair makes hardly an error on 40 images: one line says what is left out."""
    wrong = [row for row in record.confusion if row.truth != row.prediction]
    errors = {}
    for alias in PAIR:
        errors[alias] = sum(row.count for row in select(wrong, model=alias))
    assert max(errors.values()) < 30
    document = COMMANDS["evaluate"].report(record)
    titles = values_of(document.sections, "title")
    assert not [title for title in titles if "confused" in title or "confidence" in title]
    (line,) = [sentence.text for sentence in document.first.unknown if "Left out" in sentence.text]
    for alias, count in errors.items():
        assert f"**{alias}** {count}" in line
    more = EvaluateRecord.contents().tables["confusion"](PAIR[0], "3", "8", 30)
    scores = tuple(
        replace(row, cross_entropy=replace(row.cross_entropy, value=0.3)) for row in record.scores
    )
    explained = COMMANDS["evaluate"].report(
        replace(record, confusion=(*record.confusion, more), scores=scores)
    )
    assert [section.title for section in explained.sections if "confused" in section.title]


def test_what_is_missing_from_the_files_of_a_training_is_not_known(golden, tmp_path):
    folder = shutil.copytree(golden("train").folder, tmp_path / "edited")
    for name, edit in (
        ("results.json", lambda values: values["tables"].pop("history")),
        ("config.json", lambda values: values["options"].update(model=["b"])),
    ):
        values = json.loads((folder / name).read_text())
        edit(values)
        (folder / name).write_text(json.dumps(values))
    edited, _ = ran(
        tmp_path / "out", f"evaluate {folder} cnn-digits --data digits --limit 2"
    ).training
    assert (edited.start, edited.steps, edited.epochs) == (None, None, 3)
