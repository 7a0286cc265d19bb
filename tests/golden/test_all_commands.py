"""All commands: progress reaches its total, several processes agree, copies name no path."""

import json
import math
import os
import re
import shutil
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from tests.kit.commands import figures, quick_attacks, ran, refusal
from tests.kit.golden import LINES
from tests.kit.select import select, values_of
from tests.kit.simulated_processes import run_in_processes
from tests.kit.training_runs import kept_run
from vitlens.cli.main import run
from vitlens.commands.run.publish import read_folder

BAR = re.compile(r"^(?P<what>[^:\s][^:]*): (?P<done>[\d,]+) of (?P<total>[\d,]+) \w")
WITH_BARS = (
    "predict",
    "evaluate",
    "rollout",
    "rollout of pictures",
    "stats",
    "ablate",
    "compare",
    "explain",
    "explain verified",
    "attack",
    "features",
)


@pytest.mark.parametrize("name", WITH_BARS)
def test_every_bar_reaches_its_total(name, golden):
    steps_by_task: dict[str, list[tuple[int, int]]] = {}
    for match in filter(None, map(BAR.match, golden(name).said)):
        pair = tuple(int(match[word].replace(",", "")) for word in ("done", "total"))
        steps_by_task.setdefault(match["what"], []).append(pair)
    assert steps_by_task
    for what, steps in steps_by_task.items():
        assert steps[-1][0] == steps[-1][1], (what, steps)
        for done, total in steps:
            assert done <= total, (what, steps)
    if name == "explain":
        explaining = next(
            steps for what, steps in steps_by_task.items() if what.startswith("Explaining")
        )
        amounts = [
            after - before for (before, _), (after, _) in zip([(0, 0), *explaining], explaining)
        ]
        assert max(amounts) > 10 * min(amounts)  # occlusion is slower, and says so


PHASES = {  # besides those of every command
    "attack": ("checking the attacks on", "What changes inside the model"),
    "ablate": ("What each head attends to", "Activation patching", "Logit lens", "Pruning"),
    "attention": (
        "Attention of every layer",
        "Rollout up to each layer",
        "Attention of every head",
    ),
    "look": ("Which heads matter", "Attention of every head"),
    "walkthrough": ("Computing the head step by step",),
    "compare": ("Why images are misclassified",),
}


@pytest.mark.parametrize("name", PHASES)
def test_each_phase_is_named(name, golden):
    lines = golden(name).said
    for words in (
        "Importing libraries",
        "Loading",
        "Reading images",
        "Writing the report",
        *PHASES[name],
    ):
        assert any(line.startswith(words) for line in lines), words


SHARED = {  # evaluate: test_evaluate.py; stats: test_stats.py
    "rollout": LINES["rollout"],
    "ablate": LINES["ablate"],
    "stats over a training": "stats {kept} --data digits --limit 7 --over-training",
    "attack": "attack {vit} --data digits --limit 4 --batch-size 2 --predicted --steps 3 "
    "--no-corruptions --no-inside "
    "--attack fgsm,low-frequency --epsilon 0,4,32 --self-checks few --single-epsilon "
    "low-frequency=64",
}


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("name", SHARED)
def test_two_processes_find_what_one_finds(name, places, golden, tmp_path, monkeypatch):
    run_folder = (
        kept_run(tmp_path / "taught", saved_after=(0, 2), epochs=3) if "training" in name else None
    )
    line = SHARED[name].format(**places, kept=run_folder, beside=tmp_path)
    with quick_attacks():
        one = (
            golden(name).record if SHARED[name] == LINES.get(name) else ran(tmp_path / "one", line)
        )
        words = f"{line} --device cpu --quiet --out {tmp_path / 'two'}".split()
        assert run_in_processes(2, lambda _: run(words), monkeypatch) == [0, 0]
    two = read_folder(tmp_path / "two")
    assert two.metrics.keys() == one.metrics.keys()
    for metric, expected in one.metrics.items():
        if not metric.startswith("cost"):
            assert two.metrics[metric].value == pytest.approx(expected.value, rel=1e-4, abs=1e-6), (
                metric
            )
    if name == "rollout":
        assert (two.methods, two.shown) == (one.methods, one.shown)
        np.testing.assert_allclose(two.maps.maps, one.maps.maps, atol=1e-6)
    if name == "attack":
        first = asdict(one.attacked["tiny-vit"])
        second = asdict(two.attacked["tiny-vit"])
        np.testing.assert_equal(second, first)
        epsilons = {}
        for attack in first["distance"]:
            epsilons[attack] = values_of(select(one.curves, attack=attack), "epsilon")
        assert epsilons == {"fgsm-linf": [0.0, 4.0, 32.0], "low-frequency-linf": [0.0, 64.0]}
    for row, other in zip(
        getattr(one, "learning_heads", ()), getattr(two, "learning_heads", ()), strict=True
    ):
        assert other.statistics == pytest.approx(row.statistics, rel=1e-5)


@pytest.mark.parametrize(
    ("word", "more"),
    [
        ("attention", ""),
        ("attention", "--limit 30"),
        ("rollout", "--method rollout"),
        ("explain", "--method rollout"),
    ],
)
def test_of_many_images_the_first_are_drawn_which_is_said(
    word, more, tiny_vit, pictures, tmp_path, capsys, request
):
    """Six on a sheet. The maps of attention, which stores no others, are as many as are asked
    for."""
    if word != "explain":  # whose sheets are made here
        request.getfixturevalue("undrawn")
    (tmp_path / "many").mkdir()
    for number in range(30):
        shutil.copy(pictures / "0.png", tmp_path / "many" / f"{number:02}.png")
    line = (
        f"{word} {tiny_vit} --images {tmp_path / 'many'} {more} --device cpu --out "
        f"{tmp_path / 'out'}"
    )
    assert run(line.split()) == 0
    said = [text for text in capsys.readouterr().err.splitlines() if "of the 30 images" in text]
    record = read_folder(tmp_path / "out")
    drawn = 30 if "--limit" in more else 24
    assert ["24 of" in text for text in said] == [True] * (drawn < 30)
    maps = record.maps["tiny-vit"] if word == "explain" else record.maps
    assert len(maps.images) == drawn
    further = Counter(name.partition("_more")[0] for name in figures(record) if "_more" in name)
    assert set(further.values()) == {math.ceil(drawn / 6) - 1}


PICTURED = {  # the figure of each command that draws some of the images, and how many it draws
    "predict": ("predictions", lambda record: len(record.images_drawn.pixels)),
    "evaluate": ("surest_errors", lambda record: sum(map(len, errors_shown(record)))),
    "head": ("exemplars", lambda record: len(record.exemplars)),
    "attack": (
        "examples",
        lambda record: sum(len(example.image[:3]) for example in record.examples.values()),
    ),
    "compare": ("panels", lambda record: min(6, len(record.images_shown))),
    "features": ("patches", lambda record: len(record.shown["a"].pixels)),
}


def errors_shown(record):
    """Return the errors that are drawn of each model: at most six of each of two models."""
    return [prediction.surest_errors[:6] for prediction in record.predictions.values()]


@pytest.mark.parametrize("name", PICTURED)
def test_a_figure_of_some_images_says_how_many_of_how_many(name, golden):
    figure_name, count = PICTURED[name]
    run_of = golden(name)
    document = run_of.document
    every = [document.first.picture]
    for section in document.sections:
        every += section.figures
    (caption,) = (
        figure.caption for figure in every if figure is not None and figure.name == figure_name
    )
    numbers = re.findall(r"\d[\d,]*", caption)
    assert numbers[:2] == [str(count(run_of.record)), str(run_of.record.images)]


TEXTS = {  # what a note of a run may say, and what the copy says
    "/home/ann/photos/cat.jpg": "photos/cat.jpg",
    "/home/ann/my photos/cat 1.jpg": "my photos/cat 1.jpg",
    "vitlens look /home/ann/cat.jpg --model timm:deit@/srv/w/deit.pth --out=/tmp/x/y": (
        "vitlens look ann/cat.jpg --model timm:deit@w/deit.pth --out=x/y"
    ),
    "~/photos/2026/cat.jpg": "2026/cat.jpg",
    "C:\\Users\\ann\\photos\\cat.jpg": "photos/cat.jpg",
    **{
        text: text
        for text in (
            "https://arxiv.org/abs/2005.00928",
            "accuracy/vit/L3.H7",
            "photos/cat.jpg",
            "8/255 and 1/255",
            "insertion - deletion",
        )
    },
}


@pytest.fixture(scope="module")
def original(pictures: Path, tiny_vit: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run on photographs in a folder whose name has a space."""
    root = tmp_path_factory.mktemp("sharing")
    photos = Path(shutil.copytree(pictures, root / "my photos"))
    line = [
        "rollout",
        str(tiny_vit),
        "--images",
        str(photos),
        "--fusion",
        "mean",
        "--quiet",
        "--device",
        "cpu",
    ]
    assert run([*line, "--out", str(root / "run")]) == 0
    return root / "run"


def test_the_copy_has_the_numbers_and_no_path_and_goes_outside_into_a_new_folder(
    original, tmp_path, capsys
):
    copy = tmp_path / "copy"
    place = str(original.parent)
    assert place in (original / "config.json").read_text()
    before = (original / "config.json").read_bytes()
    assert run(["report", str(original), "--share", str(copy), "--html"]) == 0
    assert (original / "config.json").read_bytes() == before
    assert (copy / "report.md").is_file()
    assert (copy / "report.html").is_file()
    assert list((copy / "figures").iterdir())
    assert read_folder(copy).tables.keys() == read_folder(original).tables.keys()
    assert read_folder(copy).metrics == read_folder(original).metrics
    names = (place, str(Path.home()), os.sep + "tmp" + os.sep)
    for path in copy.rglob("*"):
        if path.suffix in (".json", ".md", ".html", ".csv"):
            assert not [name for name in names if name in path.read_text()], path
    assert "my photos/1.png" in (copy / "tables" / "shown.csv").read_text()
    (tmp_path / "full" / "there").mkdir(parents=True)
    assert "outside" in refusal(capsys, f"report {original} --share {original / 'copy'}")
    refusal(capsys, f"report {original} --share {tmp_path / 'full'}")
    refusal(capsys, f"report {tmp_path} --share {tmp_path / 'new'}")
    assert not (tmp_path / "new").exists()


def test_paths_are_shortened_and_nothing_else(original, tmp_path):
    changed = Path(shutil.copytree(original, tmp_path / "run"))
    config = json.loads((changed / "config.json").read_text())
    config["data"]["notes"] = list(TEXTS)
    (changed / "config.json").write_text(json.dumps(config))
    assert run(["report", str(changed), "--share", str(tmp_path / "copy")]) == 0
    notes = json.loads((tmp_path / "copy" / "config.json").read_text())["data"]["notes"]
    assert notes == list(TEXTS.values())
