"""The course: every exercise is whole, and what follows from arithmetic is what the page says."""

import itertools
import json
import math
import re
import shlex
from pathlib import Path

import pytest
import torch

from benchmarks.course import ANSWERS, FOLDER, make
from vitlens.analysis.attention.positions import rank_correlation
from vitlens.cli.main import run
from vitlens.commands.run.reading import read
from vitlens.models.loading import load
from vitlens.models.positions import fixed_positions
from vitlens.uncertainty import Estimate

ROOT = Path(__file__).parents[2]
REPORTS = ROOT / "reports"
CHAPTERS = [  # whose commands end within two minutes on an idle machine
    f"study-digits/chapters/{name}"
    for name in (
        "features",
        "explain-vit-digits",
        "explain-cnn-digits",
        "evaluate",
        "compare",
        "attack",
    )
] + ["study-shortcut/chapters/compare"]
OF_THE_MACHINE = ("ms", "s", "images/s", "bytes")  # units that another machine changes
PAGE = (Path(__file__).parents[2] / "docs" / "course.md").read_text()
WORDS = re.sub(r"\s+", " ", PAGE)


def test_every_exercise_is_whole_and_has_a_hint():
    exercises = dict(
        re.findall(r"^### (\d\.\d) [^\n]+\n(.*?)(?=^##)", PAGE, flags=re.DOTALL | re.MULTILINE)
    )
    assert re.findall(r"^## Week (\d): ", PAGE, flags=re.MULTILINE) == [
        str(week) for week in range(1, 9)
    ]
    for week in range(1, 9):
        assert sum(number.startswith(str(week)) for number in exercises) >= 2
    hints = PAGE.partition("\n## Hints\n")[2]
    assert re.findall(r"(?:^-|\.)\s+(\d\.\d):", hints, flags=re.MULTILINE) == list(exercises)
    for number, text in exercises.items():
        goal, command, rest = re.split(r"^```(?:sh)?\n", text, flags=re.MULTILINE)
        assert goal.strip().endswith((".", "?")), number
        assert re.search(r"vitlens |python3 -c ", command), number
        parts = re.findall(r"^- \*\*([^*]+)\*\*:", rest, flags=re.MULTILINE)
        # studies also have their place next to papers
        parts = [part for part in parts if part != "Papers"]
        assert parts == ["Look for", "Right", "Mistake"]
        assert re.search(r"\d", rest.partition("**Right**")[2].partition("**Mistake**")[0]), (
            f"{number}: no number"
        )


def test_numbers_that_follow_from_arithmetic():
    weights = torch.tensor([0, 0.5, 0]).softmax(0).tolist()
    assert ", ".join(f"{weight:.3f}" for weight in weights) in WORDS
    assert f"exponential of {math.log(0.52 / 0.24):.2f}" in WORDS
    *some, last = ((32 // side) ** 2 + 1 for side in (2, 4, 8, 16))
    assert f"{', '.join(map(str, some))} and {last} tokens" in WORDS
    for side, patch in ((32, 4), (224, 16)):  # the mean distance of uniform attention
        places = [
            (patch * row, patch * column)
            for row in range(side // patch)
            for column in range(side // patch)
        ]
        mean = (
            math.fsum(itertools.starmap(math.dist, itertools.product(places, repeat=2)))
            / len(places) ** 2
        )
        assert f"{mean:.2f} px at {side} px" in WORDS


def test_the_loss_of_a_reversal_with_equal_weights_on_all_vectors():
    data = torch.randn(3200, 10, 64, generator=torch.Generator().manual_seed(0))
    error = (data.mean(1, keepdim=True) - data.flip(1)).square().mean().item()
    assert error == pytest.approx((1 - 1 / 10) ** 2 + (10 - 1) / 10**2, abs=0.005)
    assert f"all ten give {error:.2f}" in WORDS


def parameters_of(width: int, depth: int) -> int:
    """Return the parameters of a ViT for 32 px in patches of 4 px and ten classes."""
    embedding = 49 * width + 66 * width
    blocks = depth * (12 * width**2 + 13 * width)
    return embedding + blocks + 2 * width + 10 * width + 10


def test_parameters():
    for preset, width, depth in (("vit-mini", 128, 4), ("vit-micro", 128, 6), ("vit-tiny", 192, 6)):
        count = load(preset, random_weights=True).parameter_count()
        assert count == parameters_of(width, depth)
        assert f"{count:,}" in WORDS
    assert f"{parameters_of(384, 8):,} parameters" in WORDS


@pytest.mark.parametrize(("kind", "words"), [("sine", "1-D"), ("sine-2d", "2-D")])
def test_the_order_of_fixed_positions(kind, words):
    layout = load("vit-mini", random_weights=True).layout
    placed = torch.nn.functional.normalize(
        fixed_positions(kind, grid=layout.grid, prefix=0, dim=64)[0].float(), dim=-1
    )
    order = rank_correlation(placed @ placed.T, layout)
    assert f"{words} sines {order[0]:.2f}" in WORDS
    assert (
        kind != "sine"
        or f"rows are ordered ({order[1]:.2f}), columns less ({order[2]:.2f})" in WORDS
    )


def test_every_answer_is_of_its_command_which_the_page_prints_with_its_time():
    assert {path.name for path in FOLDER.iterdir()} == set(ANSWERS)
    for name, answer in ANSWERS.items():
        config = read(FOLDER / name).config
        assert config.command_line.startswith(f"vitlens {answer.line} --quiet")
        assert f"vitlens {answer.line}" in PAGE


def test_every_number_of_an_exercise_is_of_a_command_that_it_prints():
    template = (ROOT / "docs" / "pages" / "course.md").read_text()
    exercises = re.findall(
        r"^### (\d\.\d) [^\n]+\n(.*?)(?=^##)", template, flags=re.DOTALL | re.MULTILINE
    )
    assert len(exercises) > 20
    for number, text in exercises:
        printed = re.findall(r"line\(([^)]+)\)", text)
        read_from = re.findall(r"\b(?:value|rows?|judged|kind)\(([^,)]+),", text)
        for report in read_from:
            of_a_chapter = any(report.startswith(f"{name[:-1]}/") for name in printed)
            assert report in printed or of_a_chapter, f"{number}: {report}"


def differing(before: Path, after: Path) -> list[str]:
    """Return the metrics of a run that are not those of an earlier run of the same command, but for
    rounding on another processor.
    """
    old = metrics_of(before)
    new = metrics_of(after)
    names = []
    for name, metric in old.items():
        if metric.unit in OF_THE_MACHINE or "latency" in name or "peak" in name:
            continue
        if name not in new or not agrees(metric, new[name]):
            names.append(name)
    return names


def metrics_of(folder: Path) -> dict[str, Estimate]:
    metrics = json.loads((folder / "results.json").read_text())["metrics"]
    return {name: Estimate(**metric) for name, metric in metrics.items()}


def agrees(metric: Estimate, other: Estimate) -> bool:
    """Return True if the second number lies in the first's interval, or equals it where it has
    none.
    """
    if metric.low is not None and metric.high is not None:
        return metric.low <= other.value <= metric.high
    return math.isclose(metric.value, other.value, rel_tol=0.02, abs_tol=1e-6)


@pytest.mark.slow  # the commands of the course
@pytest.mark.parametrize("name", ANSWERS)
def test_the_command_of_an_exercise_gives_its_numbers(name, tmp_path):
    make(name, tmp_path)
    assert differing(FOLDER / name, tmp_path / name) == []


@pytest.mark.slow  # the longer commands of the course, of which the study's report has the numbers
@pytest.mark.parametrize("chapter", CHAPTERS)
def test_the_command_of_a_chapter_gives_its_numbers(chapter, tmp_path):
    line = read(REPORTS / chapter).config.command_line.partition(" --out ")[0]
    words = [word for word in shlex.split(line)[1:] if word != "--overwrite"]
    assert run([*words, "--quiet", "--out", str(tmp_path / "out")]) == 0
    assert differing(REPORTS / chapter, tmp_path / "out") == []


@pytest.mark.slow  # a training and the checks before another
def test_the_exercises_that_only_print_print_what_the_page_says(capsys):
    assert run(["train", "vit-micro", "--check", "--device", "cpu", "--quiet"]) == 0
    states = re.findall(r"^(pass|warn|fail|inconclusive)\b", capsys.readouterr().out, re.MULTILINE)
    assert states == ["pass"] * 4
    assert "four checks" in WORDS


def test_every_question_has_an_answer_with_a_command():
    questions = re.split(
        r"^\d+\. \*", PAGE.partition("## Questions")[2].partition("## Hints")[0], flags=re.MULTILINE
    )
    assert len(questions[1:]) == 24
    for question in questions[1:]:
        title, _, answer = question.partition("?* ")
        assert "`vitlens " in answer or "the same command" in answer, title
