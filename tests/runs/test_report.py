import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from matplotlib.figure import Figure
from vitlens.runs import report as reports
from vitlens.runs.report import Drawn, publish, report
from vitlens.runs.sections import Section

from vitlens.commands.scaffold.folder import RunFolder
from vitlens.errors import InputError, UnknownNameError
from vitlens.files import RunRecord, read_run
from vitlens.uncertainty import Estimate


def draw(record: RunRecord) -> Iterator[Drawn]:
    figure = Figure(figsize=(1, 1))
    figure.add_subplot().plot(record.arrays("curve")["y"])
    yield Drawn("curve", figure, "A curve.")


def tell(record: RunRecord) -> list[Section]:
    return [Section("Summary", (str(record.results["metrics"]),), figures=("curve",))]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    with RunFolder.create("evaluate", out=tmp_path / "run", formats=("svg", "pdf")) as folder:
        folder.metric("accuracy", Estimate(0.25))
        folder.arrays("curve", y=np.arange(4))
        assert publish(folder, draw, tell) == tmp_path / "run" / "report.md"
        assert read_run(folder.path).status == "running"
    return tmp_path / "run"


def test_a_report_is_written_from_the_folder(run: Path) -> None:
    assert {file.name for file in (run / "figures").iterdir()} == {"curve.png", "curve.svg", "curve.pdf"}
    text = (run / "report.md").read_text()
    assert "0.25" in text
    assert "*Figure 1. A curve.*" in text
    assert "has not finished" not in text
    assert (run / "figures" / "curve.png").read_bytes()[16:24] == (200).to_bytes(4, "big") * 2  # 1 inch at 200 dpi


def test_written_again_it_is_the_same(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("vitlens_test_of_report")
    module.draw, module.tell = draw, tell  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(reports._COMMANDS, "evaluate", module.__name__)
    kept = {name: (run / name).read_bytes() for name in ("report.md", "figures/curve.png", "figures/curve.pdf")}
    for name in kept:
        (run / name).unlink()
    assert report(run) == run / "report.md"
    assert {name: (run / name).read_bytes() for name in kept} == kept


def test_a_folder_without_a_report_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="folder of a run"):
        report(tmp_path)
    with RunFolder.create("walk", out=tmp_path / "walk"):
        pass
    with pytest.raises(UnknownNameError, match="walk"):
        report(tmp_path / "walk")
