"""report/layout.py: what stands in the body and what in the appendix."""

from vitlens.report.document import Document, FigureSpec, Finding, Section, Sentence, Table
from vitlens.report.layout import FIGURES, METHODS, ROWS, laid_out
from vitlens.uncertainty import Estimate


def _figure(name: str) -> FigureSpec:
    return FigureSpec(name, name, lambda: None)  # type: ignore[arg-type, return-value]


def _table(name: str, rows: int) -> Table:
    return Table(name, ("row",), tuple((index,) for index in range(rows)))


def test_long_sections_go_to_the_appendix_and_nothing_is_lost() -> None:
    figures, tables = tuple(map(_figure, "abc")), (_table("long", ROWS + 5), _table("second", 1))
    result, method = Sentence("A result.", (1,)), Sentence("A definition.", says="method")
    document = laid_out(Document("t", (Section("S", (method, result), tables, figures), Section("M", (method,)))))
    body, methods = document.sections
    assert (body.title, methods.title) == ("S", METHODS)
    assert body.sentences == (result,)
    assert methods.sentences == (method,)
    assert len(body.figures) == FIGURES
    assert [len(table.rows) for table in body.tables] == [ROWS]
    (more,) = document.appendix
    assert [table.rows for table in more.tables] == [table.rows for table in tables]
    assert more.figures == figures[2:]
    assert document.figures == figures


def test_a_short_document_stays_as_it_is() -> None:
    section = Section("S", (Sentence("A result.", (1,)),), (_table("short", ROWS),), (_figure("a"),))
    document = Document("t", (section,), appendix=(section,))
    assert laid_out(document) == document


def test_a_finding_on_a_figure_of_several_sheets_names_the_first() -> None:
    figures = tuple(map(_figure, ("maps_1", "maps_2", "curve")))
    found = tuple(Finding(Sentence("A fact."), Estimate(1.0), figure=name) for name in ("maps", "curve", ""))
    document = laid_out(Document("t", (Section("S", figures=figures),), findings=found))
    assert [each.figure for each in document.findings] == ["maps_1", "curve", ""]
