"""A section is declared once: its columns and templates give everything else, for a new command.

These are the record's files, metrics, table, chart, glossary, requirements, comparison, JUnit and
CSV.
"""

import csv
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import chain
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from jinja2 import nodes
from matplotlib.figure import Figure

import vitlens
from tests.kit.select import values_of
from vitlens.charts import bars, board, intervals, lines, matrix, scatter
from vitlens.cli.main import run
from vitlens.commands.registry import COMMANDS
from vitlens.commands.report.report import compared_runs
from vitlens.commands.run.folder import RunFolder
from vitlens.commands.run.options import RunOptions
from vitlens.commands.run.publish import read_folder
from vitlens.commands.run.requirements import outcomes, requirements_of
from vitlens.record import Record, col, columns, table
from vitlens.report.claims import Claim, first_page_claims, judge, title_of
from vitlens.report.help import help_of
from vitlens.report.junit import junit
from vitlens.report.prose import Marked, environment, finalize, say
from vitlens.report.sections import Chart, Glance, Report, Section, build_section
from vitlens.report.verdicts import Verdict
from vitlens.uncertainty import Estimate

REPORTING = [word for word, command in COMMANDS.items() if command.reports]


@dataclass(frozen=True)
class FurRow:
    """How furry the images of a model are."""

    model: str = col("model")
    layer: int = col("layer")
    head: int = col("head")
    fur: Estimate = col(
        "furriness",
        term="the share of fur",
        better="higher",
        metric="furriness/{model}/{layer}/{head}",
    )
    weight: float | None = col("weight", unit="kg", default=None)


@dataclass(frozen=True, kw_only=True)
class FurRecord(Record):
    """A throw-away record."""

    furs: tuple[FurRow, ...] = table()


def claims(record: FurRecord) -> Iterator[Claim]:
    for row in record.furs[:1]:
        says = say("**{{ m }}** is {{ fur }} fur.", m=row.model, fur=row.fur)
        yield replace(
            judge("fur", row.model, row.fur, "robustness", says=says, because="share of fur"),
            title=say("{{ m }} is furry", m=row.model),
            kind="answer",
        )


REPORT = Report(
    FurRecord,
    claims=claims,
    glance=(Glance("furs", "fur", question="fur"),),
    unknown=lambda _: iter(["Cats were not asked."]),
    sections=(
        Section(
            "How furry?",
            "furs",
            says="L{{ layer }}.H{{ head }} of {{ model }} is {{ fur }} fur and weighs {{ weight }} "
            "kg.",
            otherwise="L{{ layer }}.H{{ head }} of {{ model }} was not weighed.",
            columns=("model", "layer", "fur", "weight"),
            about=("fur",),
            charts=(
                Chart(
                    "furs",
                    intervals("head", "fur", of="model"),
                    "Furriness of every head.",
                    title="Fur",
                ),
            ),
        ),
        Section("Never there?", lambda _: []),
    ),
)


def rows(alias: str = "cat", fur: float = 0.75) -> tuple[FurRow, ...]:
    of = Estimate(fur, fur - 0.25, fur + 0.125, 50)
    return tuple(FurRow(alias, 0, head, of, 4.5 if head else None) for head in range(9))


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes the folder of a command with these parts."""
    for part in ("record", "report"):
        monkeypatch.setitem(sys.modules, f"tests.contracts.fur.{part}", sys.modules[__name__])
    command = replace(COMMANDS["stats"], word="fur", package="tests.contracts.fur")
    monkeypatch.setitem(COMMANDS, "fur", command)

    def write(alias: str = "cat", fur: float = 0.75) -> Path:
        out = tmp_path / str(fur)
        config = {"models": [{"alias": alias}], "command_line": "vitlens fur cat"}
        with RunFolder.opened("fur", RunOptions(out=out), config) as folder:
            folder.keep(FurRecord(furs=rows(alias, fur)))
            folder.record()
        assert run(["report", str(out)]) == 0
        return out

    return write


def test_a_column_says_everything(written):
    out = written()
    results = json.loads((out / "results.json").read_text())
    expected = {"value": 0.75, "low": 0.5, "high": 0.875, "n": 50, "unit": "fraction"}
    assert results["metrics"]["furriness/cat/0/3"] == expected
    assert "weight" not in results["tables"]["furs"][0]  # None is left out
    record = read_folder(out)
    assert record.furs == rows()
    assert vitlens.read(out).table("furs") == list(rows())
    text = (out / "report.md").read_text()
    for said in (
        "75.0 % (50.0 to 87.5, n = 50)",
        "| model | layer | furriness | weight |",
        "4.5 kg",
        "L0.H0 of cat was not weighed.",
        "the share of fur",
        "Verdict: **pass** – share of fur",
        "tables/furs.csv",
    ):
        assert said in text
    assert text.startswith("# cat is furry\n")
    assert "Never there?" not in text
    assert (out / "figures" / "furs.png").is_file()
    with (out / "tables" / "furs.csv").open() as file:
        listed = list(csv.DictReader(file))
    assert (len(listed), listed[1]["fur_low"], listed[1]["weight"]) == (9, "0.5", "4.5")
    judged = outcomes(requirements_of(["furriness/0/3=0.49"], ["furriness/0/3=0.5"]), record)
    assert values_of(judged, "holds") == [True, False]
    document = REPORT(record)
    suite = ElementTree.fromstring(junit(document, (), suite="fur", seconds=1.0))
    assert [case.get("name") for case in suite.iter("testcase")] == ["fur of cat"]
    assert (
        document.first.glance.rows[0][-1] == "pass: share of fur (pass from 50 %, warn from 10 %)"
    )


def test_the_first_pages_picture_draws_only_the_rows_of_its_chart():
    def draw(drawn_rows: Sequence[FurRow], _title: str) -> Figure:
        return Figure((len(drawn_rows), 1))

    chart = Chart("weights", draw, "Rows.", rows="furs", only=lambda row: row.weight is not None)
    record = FurRecord(furs=rows())
    picture = replace(REPORT, picture=chart)(record).first.picture
    assert picture is not None
    assert picture.draw().get_size_inches()[0] == 8
    none = replace(chart, only=lambda row: row.head > 8)
    assert replace(REPORT, picture=none)(record).first.picture is None


def test_a_fall_is_worse_as_the_column_says_and_a_name_is_no_markup(written):
    before = read_folder(written("cat", 0.8))
    after = read_folder(written("cat", 0.3))
    assert set(values_of(compared_runs(before, after, "").changes, "direction")) == {"worse"}
    assert set(values_of(compared_runs(after, before, "").changes, "direction")) == {"better"}
    text = (written("**bold** <b>`x`") / "report.md").read_text()
    assert "**bold** " not in text.replace(r"\*\*bold\*\*", "")
    assert "<b>" not in text.replace(r"\<b>", "")


@dataclass(frozen=True)
class CoatRow:
    """The coat of an animal."""

    animal: str = col("animal")

    @property
    def in_words(self) -> str:
        return f"{self.animal}: " + "long, thick, woolly and " * 4 + "warm"


def test_a_sentence_of_ours_in_a_table_is_not_cut_as_a_name_is():
    section = build_section(
        Section("Which coat?", "", columns=("animal", "in_words")),
        FurRecord(),
        rows=[CoatRow("y" * 100)],
    )
    ((name, words),) = section.tables[0].rows
    assert "…" in finalize(name)
    assert str(words) == CoatRow("y" * 100).in_words


def test_what_goes_into_a_sentence_is_formatted_and_escaped_there():
    abc = ["a", "b", "c"]
    assert say("{{ x }}", x=Estimate(0.25, 0.2, 0.3, 40)) == "25.0 % (20.0 to 30.0, n = 40)"
    assert say("{{ a }} {{ b|percent }} {{ none }}", a=1234, b=0.5, none=None) == "1,234 50 % –"
    assert say("{{ names|names }} {{ names|are }}", names=abc) == "**a**, **b** and **c** are"
    assert say("{{ names|names(1) }}", names=abc) == "**a** and 2 more"
    assert say("{{ x|counts }}", x={"few": 1, "many": 9}) == "9 many, 1 few"
    assert say("{{ x }}", x="*a*") != "*a*" == say("{{ x }}", x=Marked("*a*"))
    assert "…" in say("{{ x }}", x="x" * 200)
    with pytest.raises(Exception, match="undefined"):
        say("{{ forgotten }}")


def test_the_first_page_has_answers_then_faults_then_what_is_clearest():
    sure = Estimate(0.5, 0.45, 0.55, 100)
    unsure = Estimate(0.1, -0.1, 0.3, 100)
    planted = [
        Claim("clear", "x", says="clear", effect=sure),
        Claim("unclear", "x", says="unclear", effect=unsure),
        Claim("fault", "x", says="fault", verdict=Verdict("fail", "too large"), effect=sure),
        Claim("answer", "x", says="answer", kind="answer", title="Yes"),
        Claim("silent", "x", verdict=Verdict("pass", "small"), effect=sure),
    ]
    assert values_of(first_page_claims(planted), "question") == ["answer", "fault", "clear"]
    assert title_of(planted, "no title") == "Yes"
    assert title_of(planted[:1], "no title") == "no title"


def package_of(word: str) -> str:
    return COMMANDS[word].package or f"vitlens.commands.{word}"


def reports(word: str) -> tuple[Report, ...]:
    """Return all reports that a command can have."""
    every: tuple[Report, ...] = getattr(import_module(f"{package_of(word)}.report"), "REPORTS", ())
    return every or (COMMANDS[word].report,)


def templates(report: Report) -> Iterator[str]:
    for section in report.sections:
        if isinstance(section, Section):  # not of chapters, whose reports are tested themselves
            texts = (
                section.question,
                section.opening,
                section.says,
                section.otherwise,
                section.without,
            )
            yield from (text for text in texts if isinstance(text, str))
            for chart in section.charts:
                yield from (chart.title, chart.caption)


@pytest.mark.parametrize("word", REPORTING)
def test_a_template_only_looks_and_counts_and_every_command_says_how_to_read_it(word):
    """No arithmetic, and no comparison but with 0 and 1."""
    arithmetic = (nodes.Add, nodes.Sub, nodes.Mul, nodes.Div, nodes.FloorDiv, nodes.Mod, nodes.Pow)
    for text in chain.from_iterable(map(templates, reports(word))):
        tree = environment().parse(text)
        assert not list(tree.find_all(arithmetic))
        for compared in tree.find_all(nodes.Operand):
            assert compared.expr.as_const() in (0, 1), text
        said = re.sub(r"\{\{.*?\}\}|\{%.*?%\}|`[^`]*`|\([^()]*\d{4}[^()]*\)", "", text).replace(
            "95 %", ""
        )
        assert not re.search(r"(?<![\w.])\d+(?:\.\d+)?(?![\w/])", said), (
            f"a number is typed: {text}"
        )
    for declared in reports(word):
        parts = help_of(declared.package or package_of(word))
        assert {"How to read it", "Pitfalls"} <= parts.keys()
        assert all(parts.values())
    for record in COMMANDS[word].records:
        assert record().command == word
    for kind in COMMANDS[word].contents.tables.values():
        assert kind.__doc__
        for column in columns(kind).values():
            assert column.title


def test_marks_stand_where_the_numbers_are():
    heads = [
        FurRow("a", layer, head, Estimate(0.1 * layer + 0.01 * head, 0.0, 0.9, 9), 1.0 + head)
        for layer in range(3)
        for head in range(4)
    ]
    some = heads[:4]
    percent = [100 * row.fur.value for row in heads[:4]]
    (axes,) = intervals("head", "fur")(some, "").axes
    assert np.concatenate(
        [np.asarray(line.get_xdata(), float) for line in axes.lines]
    ) == pytest.approx(percent)
    assert axes.get_xlabel() == "furriness (%)"
    (axes,) = lines("head", "fur")(some, "").axes
    np.testing.assert_allclose(axes.lines[0].get_xydata(), list(enumerate(percent)))
    assert axes.collections[0].get_datalim(axes.transData).ymax == pytest.approx(90)
    (axes,) = bars("head", "weight")(some, "").axes
    assert [bar.get_width() for bar in axes.patches] == values_of(some, "weight")
    (axes,) = scatter("weight", "fur")(some, "").axes
    np.testing.assert_allclose(
        axes.lines[0].get_xydata(), list(zip(values_of(some, "weight"), percent))
    )
    for draw in (board("fur"), matrix("layer", "head", "fur")):
        drawn = np.asarray(draw(heads, "").axes[0].images[0].get_array())
        np.testing.assert_allclose(
            drawn, np.reshape([100 * row.fur.value for row in heads], (3, 4))
        )


def test_a_board_has_a_panel_for_each_column():
    heads = [FurRow("a", 0, head, Estimate(0.1 * head, n=9), 1.0 + head) for head in range(3)]
    one = len(board("fur")(heads, "").axes)
    assert one
    for count in (6, 7, 12):
        assert len(
            board(*["fur", "weight"] * (count // 2), *["fur"] * (count % 2))(heads, "").axes
        ) == (count * one)
