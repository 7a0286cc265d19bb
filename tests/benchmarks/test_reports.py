"""The committed copy of a run's folder."""

from benchmarks.reports import copy_light


def test_the_tables_of_a_chapter_that_a_report_names_are_kept(tmp_path):
    tables = tmp_path / "run" / "chapters" / "evaluate" / "tables"
    tables.mkdir(parents=True)
    for name in ("by_name", "from_outside", "by_nobody"):
        (tables / f"{name}.csv").write_text("a\n1\n")
    (tables.parent / "report.md").write_text("8 of 36 rows (all rows: tables/by_name.csv)")
    first = "Tests: `chapters/evaluate/tables/from_outside.csv`."
    (tmp_path / "run" / "report.md").write_text(first)
    copy_light(tmp_path / "run", tmp_path / "copy")
    stems = {path.stem for path in (tmp_path / "copy").rglob("*.csv")}
    assert stems == {"by_name", "from_outside"}
