"""Heads made by hand are found first, in their words and numbers; a model without them has no such finding."""

from collections.abc import Callable
from math import exp
from pathlib import Path

import numpy as np
import pytest
from torch import Tensor

from tests.kit.first_page import clear_effects
from tests.kit.planted_patterns import STRONG, Bench, planted, scenes
from vitlens import Model, statistics
from vitlens.analysis.heads.specialisation import specialise
from vitlens.cli.main import run
from vitlens.commands.registry import COMMANDS
from vitlens.commands.run.publish import read_folder
from vitlens.commands.stats.record import StatsRecord
from vitlens.report.claims import Claim
from vitlens.report.document import Document
from vitlens.uncertainty import Estimate

GRID = (6, 5)
FAULTS = {"dead heads", "uniform heads", "fixed place", "sinks"}


def made(kind: str, seed: int) -> Model:
    """A model of four plain heads and, last but one, the head of this kind."""
    bench = Bench(GRID, seed)
    known = bench.heads()
    forms: list[Tensor] = [known[name] for name in ("previous", "same row", "local", "similar")]
    chosen = {"corner": bench.places([2]), "uniform": known["uniform"], "dead": known["same column"]}
    if kind == "plain":
        return planted(forms, GRID, seed=seed)
    forms.insert(3, chosen[kind])
    return planted(forms, GRID, dead=(3,) if kind == "dead" else (), seed=seed)


def found(folder: Path, kind: str, seed: int = 0, images: int = 20) -> tuple[StatsRecord, Document]:
    """The record and report of a model of this kind, by its name."""
    folder.mkdir(parents=True, exist_ok=True)
    pixels = (scenes(GRID, images, seed).images.permute(0, 2, 3, 1) * 255).round().byte().numpy()
    np.savez(folder / "data.npz", images=pixels, labels=np.zeros(images, np.int64))
    code = f"\n\ndef {kind}():\n    return made({kind!r}, {seed})\n"
    (folder / "hand.py").write_text(f"from tests.conclusions.test_stats import made\n{code}")
    model = f"{kind}={folder / 'hand.py'}:{kind}"
    typed = ["stats", model, "--model-file", model, "--device", "cpu"]
    assert run([*typed, "--data", str(folder / "data.npz"), "--quiet", "--out", str(folder / "out")]) == 0
    record = read_folder(folder / "out")
    return record, COMMANDS["stats"].report(record)


def claim(report: Document, question: str) -> Claim:
    [found] = [each for each in report.claims if each.question == question]
    assert found.is_shown
    return found


def check_corner(folder: Path, seed: int = 0) -> None:
    record, report = found(folder, "corner", seed=seed)
    place = claim(report, "fixed place")
    weight = exp(STRONG)
    assert place.effect.value == pytest.approx(weight / (weight + GRID[0] * GRID[1] + 1), rel=1e-3)
    assert place.effect.n == 20
    assert [row.place for row in record.heads if row.label == "position"] == [(0, 0)]
    assert place.says in {each.text for each in report.first.answer}


def check_dead(folder: Path, seed: int = 0) -> None:
    record, report = found(folder, "dead", seed=seed)
    dead = claim(report, "dead heads")
    assert (dead.effect.value, dead.effect.high) == (0.0, 0.0)
    assert "L0.H3" in dead.says
    assert record.metric("dead_or_uniform_heads/dead") == Estimate(1 / 5, n=5)


def check_uniform(folder: Path, seed: int = 0) -> None:
    _, report = found(folder, "uniform", seed=seed)
    assert claim(report, "uniform heads").effect.value == pytest.approx(1, abs=1e-3)


def check_plain(folder: Path, seed: int = 0) -> None:
    record, report = found(folder, "plain", seed=seed)
    assert not {each.question for each in report.claims} & FAULTS
    assert [row.place_grid for row in record.heads] == [GRID] * 4


CHECKS: tuple[Callable[..., None], ...] = (check_corner, check_dead, check_uniform, check_plain)


@pytest.mark.parametrize("check", CHECKS)
def test_planted_heads(check, tmp_path):
    check(tmp_path)


def test_one_image_judges_nothing(tmp_path):
    record, report = found(tmp_path, "corner", images=1)
    assert (record.metric("distance/corner/L0.H0").low, record.metric("distance/corner/L0.H0").n) == (None, 1)
    assert {each.state for each in report.claims} <= {"", "inconclusive"}
    assert not clear_effects(report)


def test_sinks_off_the_object_are_those_of_the_planted_head():
    """A head that attends to the red patches, none of which lies on the object."""
    drawn, model = scenes(GRID, 16, 0), planted([Bench(GRID, 0).heads()["background"]], GRID)
    tables = [statistics(model, drawn.images, masks=masks) for masks in (drawn.masks, drawn.masks | True, None)]
    nothing = statistics(model, drawn.images, masks=drawn.masks & False)
    off, none, unknown, every = (specialise(table).sinks_off_object for table in (*tables, nothing))
    assert unknown is None
    assert none.value == pytest.approx(0, abs=1e-6)
    assert every.value == pytest.approx(float(nothing.sink_mass.mean()), abs=0.02)  # but for sinks in the prefix
    assert 0 <= off.value <= every.value + 1e-9


def test_marks_are_the_most_attended_patch_and_the_norm():
    bench = Bench(GRID, 0)
    forms = [bench.places([2 + 7]), bench.heads()["self"]]
    [(place, dead)] = specialise(statistics(planted(forms, GRID, dead=(1,)), scenes(GRID, 16, 0).images)).marks
    assert (place.row, place.column) == (1, 2)
    assert place.chance == pytest.approx(1 / 32)
    assert (dead.output.value, np.isfinite(place.mass.value)) == (0, True)
    assert place.output.value == pytest.approx(2)  # of the mean of one head of norm and one without
