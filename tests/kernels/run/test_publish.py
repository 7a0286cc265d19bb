"""Figures and report.md depend only on a run's folder, and are the same when written again."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.contracts.throw_away import ENTRY, WORD
from tests.contracts.throw_away import report as throw_away
from tests.contracts.throw_away.record import (
    BrightnessArrays,
    BrightnessRecord,
    BrightnessRow,
    MeanRow,
)
from tests.kit.pages import page_problems
from tests.kit.saving import saved_figures
from tests.kit.select import names_in
from vitlens.commands.registry import COMMANDS
from vitlens.commands.run.folder import RunFolder
from vitlens.commands.run.options import RunOptions
from vitlens.commands.run.publish import publish, read_folder, report
from vitlens.errors import OutputError, UnknownNameError
from vitlens.record import read_run
from vitlens.uncertainty import Estimate

RECORDED = BrightnessRecord(
    images_shown=(BrightnessRow("a.png", 0.25),),
    means=(MeanRow("m", Estimate(0.25)),),
    rows={"m": BrightnessArrays(np.arange(4.0)[None])},
)
FIGURES = {f"{WORD}.{form}" for form in ("png", "svg", "pdf")}


@pytest.fixture(autouse=True)
def added(monkeypatch):
    monkeypatch.setitem(COMMANDS, WORD, ENTRY)
    with saved_figures():
        yield


def published(out: Path, *, formats: tuple[str, ...] = (), **options: object) -> Path:
    """Return the page or the text that a run writes at its end."""
    config = {"models": [{"alias": "m"}], "options": {"run": options}}
    with RunFolder.opened(WORD, RunOptions(out=out, formats=formats), config) as folder:
        folder.keep(RECORDED)
        written = publish(folder)
        assert read_run(folder.path).status == "running"
    return written


@pytest.fixture
def run(tmp_path):
    assert published(tmp_path / "run", formats=("svg", "pdf")) == tmp_path / "run" / "report.md"
    return tmp_path / "run"


def test_a_report_is_written_from_the_folder_and_written_again_it_is_the_same(run):
    contents = {
        path: path.read_bytes() for path in (run / "report.md", *(run / "figures").iterdir())
    }
    assert {path.name for path in contents} == {"report.md", *FIGURES}
    for path in contents:
        path.unlink()
    assert report(run) == run / "report.md"
    assert {path: path.read_bytes() for path in contents} == contents


def test_figures_that_are_drawn_no_more_are_removed_and_no_others(run, monkeypatch):
    figures = run / "figures"
    document = throw_away.REPORT(read_folder(run))
    (section,) = document.sections
    both = (*section.figures, replace(section.figures[0], name=f"another_{WORD}"))
    with monkeypatch.context() as patch:
        two = replace(document, sections=(replace(section, figures=both),))
        patch.setattr(throw_away, "REPORT", lambda _record: two)
        report(run)
    assert names_in(figures) == FIGURES | {f"another_{name}" for name in FIGURES}
    picture = (figures / f"another_{WORD}.png").read_bytes()
    # pictures of the folder's owner: by another program, in another format, of a name that no
    # report showed
    theirs = {
        f"another_{WORD}.svg": b"<svg/>",
        f"another_{WORD}.jpg": picture,
        "mine.png": picture,
        f"{WORD}_older.png": picture,
    }
    for name, content in theirs.items():
        (figures / name).write_bytes(content)
    with (run / "report.md").open("a") as text:
        text.write(
            "\n![mine](figures/mine.png)\n\n![outside](figures/../../kept.png)\n\n*Figure 3. "
            "Outside.*\n"
        )
    (run.parent / "kept.png").write_bytes(picture)
    assert report(run) == run / "report.md"
    assert names_in(figures) == FIGURES | {*theirs}
    assert {name: (figures / name).read_bytes() for name in theirs} == theirs
    assert (run.parent / "kept.png").is_file()


def test_a_page_is_written_where_it_is_asked_for_and_kept_up_to_date(run):
    assert not (run / "report.html").exists()
    assert report(run, html=True) == run / "report.html"
    text = (run / "report.html").read_text(encoding="utf-8")
    assert page_problems(text) == []
    assert "Mean pixel of every image." in text
    assert 'class="chart"' in text  # no image is in it, so a dark page may invert it
    assert str(run.parent) not in text
    (run / "report.html").write_text("older")
    # one that lies there would otherwise say what report.md does not
    assert report(run) == run / "report.html"
    assert (run / "report.html").read_text(encoding="utf-8") == text


@pytest.mark.parametrize(
    ("html", "by_default", "name"),
    [
        (True, False, "report.html"),
        (None, False, "report.md"),
        (None, True, "report.html"),
        (False, True, "report.md"),
    ],
)
def test_options_and_the_registry_decide_about_the_page(
    tmp_path, monkeypatch, html, by_default, name
):
    monkeypatch.setitem(COMMANDS, WORD, replace(ENTRY, html=by_default))
    assert published(tmp_path / "run", html=html) == tmp_path / "run" / name
    assert (tmp_path / "run" / "report.html").exists() == (name == "report.html")


def test_what_cannot_be_reported_is_refused(run, tmp_path):
    (run / "report.html").mkdir()
    with pytest.raises(OutputError, match=r"report\.html"):
        report(run, html=True)
    for command in ("walk", "models"):  # none of ours, and one that leaves no report
        with RunFolder.opened(command, RunOptions(out=tmp_path / command)):
            pass
        with pytest.raises(UnknownNameError, match=command):
            report(tmp_path / command)
