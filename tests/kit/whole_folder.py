"""The folder of every command: results, settings, and a report that `report` writes again."""

import json
from contextlib import nullcontext
from pathlib import Path

from tests.kit.first_page import check_first_page
from tests.kit.saving import saved_figures
from vitlens.cli.main import run
from vitlens.commands.registry import COMMANDS
from vitlens.commands.run import consistency
from vitlens.commands.run.publish import read
from vitlens.record import SCHEMA, MetricName, Record, read_run
from vitlens.uncertainty import Estimate


def whole_folder(out: Path, command: str, *, drawn: bool = True, saved: bool = False) -> None:
    """Fail if a folder lacks something, or if its report written again differs.

    drawn: save the figures, too; a study's figures are those of other commands.
    saved: the figures are already there, as the command ran within `saved_figures`, and must be the
        same again.
    """
    check_results(json.loads((out / "results.json").read_text()), command)
    config = json.loads((out / "config.json").read_text())
    assert config["command_line"].startswith(f"vitlens {command}")
    assert config["seed"] == 0
    assert config["versions"]["vitlens"]
    check_declared(out)
    record = read(read_run(out))
    check_first_page(COMMANDS[command].report(record))
    check_consistent(record)
    assert not consistency.bare_statuses((out / "report.md").read_text())
    files = [out / "report.md"]
    if saved:
        files += (out / "figures").glob("*.png")
    contents = {path: path.read_bytes() for path in files}
    for path in contents:
        path.unlink()
    with saved_figures() if drawn else nullcontext():
        assert run(["report", str(out)]) == 0
    assert {path: path.read_bytes() for path in contents} == contents
    check_report(out, drawn=drawn)
    assert not list(out.rglob(".*")), "a temporary file stayed behind"


def check_consistent(record: Record) -> None:
    """Fail if parts of a report contradict each other."""
    assert not consistency.errors(record)


def check_results(results: dict, command: str) -> None:
    assert (results["schema"], results["command"], results["status"]) == (SCHEMA, command, "done")
    assert results["seconds"] > 0
    assert results["metrics"].keys() or results["tables"].keys()
    for verdict in results["verdicts"]:
        assert verdict["state"]
        assert verdict["because"]
    for name, metric in results["metrics"].items():
        assert isinstance(metric["value"], float | int), name
        assert metric["unit"] or metric["unit"] == "", name
        if "low" in metric and "high" in metric:
            assert metric["low"] <= metric["value"] <= metric["high"], name


def check_report(out: Path, *, drawn: bool) -> None:
    text = (out / "report.md").read_text()
    assert "## Repeat it" in text
    figures = sorted((out / "figures").glob("*.png"))
    for figure in figures:
        assert f"](figures/{figure.name})" in text
        assert figure.stat().st_size > 2000 or not drawn
    assert text.count("](figures/") == len(figures)


def check_share(name: str, estimate: Estimate, is_share: bool) -> None:
    """Fail if a metric that is declared as a share is none, or an accuracy is not declared so."""
    if is_share:
        assert estimate.unit == "fraction", name
        assert 0 <= estimate.value <= 1, name
    elif "accuracy" in name.partition("/")[0]:
        assert estimate.unit != "fraction", f"metric {name} is a share that is not declared"


def check_declared(out: Path) -> None:
    """Fail if a folder has an undeclared metric, table or array, or lacks a declared table."""
    written = read_run(out)
    record = read(written)
    contents = type(record).contents()
    for name in record.metrics:
        declarations = [metric for metric in contents.metrics if metric.parts(name) is not None]
        assert declarations, f"metric {name} is not declared"
        assert not all(metric.unknown_values(name) for metric in declarations), name
        check_share(name, record.metrics[name], any(metric.share for metric in declarations))
    assert set(written.results["tables"]) == set(contents.tables)
    for path in (out / "arrays").glob("*.npz"):
        declared = [
            pattern
            for pattern in contents.arrays
            if MetricName(pattern).parts(path.stem) is not None
        ]
        assert len(declared) == 1, f"{path.name} is declared {len(declared)} times"
