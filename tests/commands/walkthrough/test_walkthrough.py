"""`vitlens walkthrough`: its rows are the function's, its report is whole, and wrong calls are one line."""

from pathlib import Path

import numpy as np
import pytest

import vitlens
from tests.contracts.test_headless import NAME, RANDOM
from tests.whole_folder import whole_folder
from vitlens.analysis.walkthrough.registry import STEPS as KNOWN
from vitlens.cli.main import run
from vitlens.commands.scaffold.publish import read_folder
from vitlens.commands.walkthrough.record import (
    ANSWERS,
    EMBEDDING,
    ENTROPIES,
    ENTROPY,
    HEAD,
    NUMBERS,
    PERMUTATIONS,
    REVERSAL,
    REVERSED,
    STEPS,
    WALK,
)
from vitlens.commands.walkthrough.report import report
from vitlens.models.loading import load

QUIET = ("--device", "cpu", "--quiet")


@pytest.fixture(scope="module")
def walked(tiny_vit: Path, pictures: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("walked") / "out"
    line = ["walkthrough", str(tiny_vit), "--images", str(pictures / "1.png"), "--layer", "1", "--head", "1"]
    assert run([*line, *QUIET, "--out", str(out)]) == 0
    return out


def test_its_rows_and_arrays_are_what_the_function_gives(walked, tiny_vit, pictures):
    record = read_folder(walked)
    walk = vitlens.walkthrough(load(str(tiny_vit)), pictures / "1.png", layer=1, head=1)
    (row,), (numbers,) = record.rows(WALK), record.rows(NUMBERS)
    assert (row.name, row.tokens, row.patches, row.layers, row.heads, row.named) == ("L1.H1", 17, 16, 2, 2, True)
    assert (row.query, row.query_name, row.key) == (0, "CLS", walk.key)
    assert row.key_name == f"the patch in row {(walk.key - 1) // 4}, column {(walk.key - 1) % 4}"
    assert numbers.score == pytest.approx(float(walk.scores[0, walk.key]), rel=1e-4)
    assert numbers.product * numbers.scale == pytest.approx(numbers.score, rel=1e-4)
    assert numbers.weight == pytest.approx(float(walk.weights[0, walk.key]), rel=1e-4)
    assert [(each.step, each.note) for each in record.rows(STEPS)] == [(each.step, each.note) for each in walk.checks]
    arrays = record.arrays(HEAD)
    for name in ("queries", "keys", "values", "scores", "weights", "unscaled", "outputs", "projected", "head_norms"):
        np.testing.assert_allclose(getattr(arrays, name), getattr(walk, name), atol=1e-5)
    np.testing.assert_array_equal(arrays.order, walk.order)
    embedding = record.arrays(EMBEDDING)
    np.testing.assert_allclose(embedding.convolved, walk.embedding.convolved[0], atol=1e-5)
    np.testing.assert_allclose(embedding.position, walk.positions[walk.key - 1], atol=1e-5)
    strongest = int(np.abs(embedding.convolved[walk.key - 1]).argmax())
    assert embedding.numbers[0] == strongest
    assert embedding.responses[0] == embedding.convolved[walk.key - 1, strongest]
    assert [each.change for each in record.rows(ANSWERS)] == [each.change for each in walk.changed]
    assert [each.positions for each in record.rows(PERMUTATIONS)] == [True, False]


def test_what_is_said_of_all_heads_is_of_their_rows(walked):
    record = read_folder(walked)
    (entropy,), heads = record.rows(ENTROPY), record.rows(ENTROPIES)
    assert (entropy.heads, len(heads)) == (4, 4)
    assert entropy.scaled == pytest.approx(np.mean([each.scaled for each in heads]))
    assert entropy.unscaled_tokens == pytest.approx(np.exp(np.mean([each.unscaled for each in heads])))


def test_the_reversal_check_stands_in_it(walked):
    record = read_folder(walked)
    placed, without = record.rows(REVERSAL)
    assert (placed.positions, without.positions) == (True, False)
    assert placed.loss < 0.01
    assert placed.anti_diagonal > 0.95
    assert without.floor <= without.loss < 0.91
    weights = record.arrays(REVERSED).weights
    assert (weights[0].argmax(-1) == np.arange(9, -1, -1)).all()


def test_its_report_has_a_step_a_section_and_judges_the_differences(walked):
    document = report(read_folder(walked))
    steps = [section for section in document.sections if section.step]
    assert [section.title.split(".")[0] for section in steps] == [str(number) for number in range(1, 15)]
    assert all(section.figures for section in steps)
    assert document.sections[-1].tables[0].rows[0][0] == KNOWN["embedding"].title
    (verdict,) = document.verdicts
    assert verdict.state == "pass"
    page = (walked / "report.html").read_text()
    assert page.count('class="step"') == 14
    assert page.count('<form class="steps"') == 1


def test_its_folder_is_whole(walked):
    whole_folder(walked, "walkthrough")


@pytest.mark.slow
def test_without_an_image_a_model_of_digits_takes_a_digit(tiny_vit, tmp_path):
    assert run(["walkthrough", str(tiny_vit), *QUIET, "--no-html", "--out", str(tmp_path / "out")]) == 0
    (row,) = read_folder(tmp_path / "out").rows(WALK)
    assert not row.named
    assert row.layer == 1


@pytest.mark.slow
def test_of_several_images_the_first_is_taken_and_said(tiny_vit, pictures, tmp_path, capsys):
    line = ["walkthrough", str(tiny_vit), "--images", str(pictures), "--device", "cpu", "--no-html"]
    assert run([*line, "--out", str(tmp_path / "out")]) == 0
    assert "1 of the 3 images" in capsys.readouterr().err
    (row,) = read_folder(tmp_path / "out").rows(WALK)
    assert Path(row.image).name == "0.png"


@pytest.mark.slow
def test_a_headless_model_has_no_predictions_but_all_steps(pictures, tmp_path):
    out = tmp_path / "out"
    assert run(["walkthrough", NAME, *RANDOM, "--images", str(pictures / "0.png"), "--no-html", "--out", str(out)]) == 0
    record = read_folder(out)
    assert {each.prediction for each in record.rows(ANSWERS)} == {None}
    assert "answers" not in {figure.name for figure in report(record).figures}
    assert len(record.rows(STEPS)) == len(KNOWN)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--layer 2", "expected a layer from 0 to 1"),
        ("--layer -1", "expected --layer"),
        ("--layer 0 --head 2", "expected a head from 0 to 1 in layer 0"),
        ("--images nowhere.png", "found nothing"),
        ("--images x.png --data digits", "expected --images or --data"),
    ],
)
def test_wrong_calls_are_one_line(tiny_vit, tmp_path, capsys, words, said):
    assert run(["walkthrough", str(tiny_vit), *words.split(), *QUIET, "--out", str(tmp_path / "out")]) == 2
    told = capsys.readouterr().err.strip().splitlines()
    assert len(told) == 1
    assert said in told[0]
    assert not (tmp_path / "out").exists()


def test_a_cnn_is_refused_with_what_it_supports(tiny_cnn, tmp_path, capsys):
    assert run(["walkthrough", str(tiny_cnn), *QUIET, "--out", str(tmp_path / "out")]) == 2
    told = capsys.readouterr().err.strip().splitlines()
    assert len(told) == 1
    assert "expected softmax attention" in told[0]
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_deit_tiny_step_by_step(real_data, tmp_path):
    weights = real_data / "weights" / "deit_tiny_patch16_224.safetensors"
    photo = next(real_data.glob("photos/*/*.jpg"))
    line = [
        "walkthrough",
        f"timm:deit_tiny_patch16_224@{weights}",
        "--images",
        str(photo),
        "--layer",
        "3",
        "--head",
        "1",
    ]
    assert run([*line, *QUIET, "--out", str(tmp_path / "out")]) == 0
    record = read_folder(tmp_path / "out")
    assert all(row.relative is not None and row.relative < 1e-5 for row in record.rows(STEPS))
    assert record.rows(PERMUTATIONS)[1].equivariant
    assert (tmp_path / "out" / "report.html").stat().st_size < 4 << 20
