"""`explain --auto`: the record is what `vitlens.choose_method` gives, and the chosen method alone is drawn."""

from dataclasses import replace
from pathlib import Path

import pytest

import vitlens
from tests.backing import unbacked
from vitlens.analysis.faithfulness.choice import DRAWS, MethodChoice
from vitlens.analysis.faithfulness.league import BASELINES
from vitlens.attribution.choice import candidates_for
from vitlens.commands.explain.choice_record import CERTAINTY, CHOICE, CHOICE_MARGINS, CHOICE_SCORE, CHOICE_SCORES
from vitlens.commands.explain.measure import measure
from vitlens.commands.explain.options import ExplainOptions
from vitlens.commands.explain.record import METHODS
from vitlens.commands.explain.report import report
from vitlens.commands.run.options import RunOptions
from vitlens.commands.run.publish import read
from vitlens.data.digits import digits
from vitlens.errors import InputError
from vitlens.files import read_run
from vitlens.models.loading import load
from vitlens.records import Record

NAMES = ("relevance", "gradcam", "saliency")
COUNT = 20
RUN = RunOptions(device="cpu", quiet=True, limit=COUNT)


def run(model: Path | str, out: Path, **changes: object) -> Record:
    options = ExplainOptions((str(model),), data="digits", auto=True, run=replace(RUN, out=out))
    measure(replace(options, **changes))  # type: ignore[arg-type]
    return read(read_run(out))


@pytest.fixture(scope="module")
def record(sharp_vit: Path, tmp_path_factory: pytest.TempPathFactory) -> Record:
    return run(sharp_vit, tmp_path_factory.mktemp("auto") / "out", method=NAMES)


@pytest.fixture(scope="module")
def expected(sharp_vit: Path) -> MethodChoice:
    return vitlens.choose_method(load(str(sharp_vit)), digits("test").limit(COUNT), methods=NAMES)


def test_rows_and_metrics_are_those_of_the_function(record, expected):
    (row,) = record.rows(CHOICE)
    assert (row.method, row.runner_up, row.confirmation) == (expected.method, expected.runner_up, expected.confirmation)
    assert (row.candidates, row.checks, row.draws, row.reason) == (NAMES, expected.checks, DRAWS, "")
    assert (row.selection, row.report) == (len(expected.selection), len(expected.report)) == (COUNT // 2, COUNT // 2)
    certainty = record.metric(CERTAINTY(model="sharp-vit"))
    assert (certainty.value, certainty.n) == (pytest.approx(expected.certainty, abs=0.01), COUNT // 2)
    assert [each.method for each in record.rows(CHOICE_SCORES)] == [each.method for each in expected.scores]
    for scored in expected.scores:
        for half, known in (("selection", scored.selection), ("report", scored.report)):
            for check, estimate in known.items():
                metric = record.metric(CHOICE_SCORE(model="sharp-vit", half=half, check=check, method=scored.method))
                assert (metric.value, metric.n) == (pytest.approx(estimate.value, abs=1e-3), estimate.n)
    margins = {(each.against, each.check): each.difference for each in record.rows(CHOICE_MARGINS)}
    assert set(margins) == {(each.against, each.check) for each in expected.margins}
    assert {*BASELINES, expected.runner_up} <= {against for against, _ in margins}


def test_the_chosen_method_alone_is_drawn_and_every_number_is_backed(record):
    (row,) = record.rows(CHOICE)
    assert [each.method for each in record.rows(METHODS)] == [row.method]
    document = report(record)
    assert [section.title for section in document.sections][:2] == ["Chosen method", "Maps"]
    chosen = document.sections[0]
    assert len(chosen.tables[0].rows) == len(NAMES) + len(BASELINES)
    assert [figure.name for figure in chosen.figures] == ["choice"]
    assert not list(unbacked(document))


def test_with_few_images_the_default_is_drawn_and_said_not_to_be_chosen_by_evidence(tmp_path, sharp_vit):
    record = run(sharp_vit, tmp_path / "out", run=replace(RUN, out=tmp_path / "out", limit=5))
    (row,) = record.rows(CHOICE)
    assert (row.method, row.certainty, row.confirmation) == ("best", None, None)
    assert "at least 20" in row.reason
    assert not record.rows(CHOICE_SCORES)
    (section,) = [each for each in report(record).sections if each.title == "Chosen method"]
    assert (len(section.sentences), section.tables, section.figures) == (1, (), ())


@pytest.mark.slow
def test_verify_checks_the_chosen_method_too(tmp_path, sharp_vit):
    small = replace(RUN, out=tmp_path / "out", limit=20)
    record = run(
        sharp_vit,
        tmp_path / "out",
        run=small,
        method=NAMES[:2],
        verify=True,
        counterfactuals=False,
        other_substrates=("none",),
    )
    titles = [section.title for section in report(record).sections]
    assert titles[:2] == ["Chosen method", "Which map to trust"]


def test_a_record_without_the_option_has_no_choice(tmp_path, sharp_vit):
    record = run(
        sharp_vit, tmp_path / "out", auto=False, run=replace(RUN, out=tmp_path / "out", limit=2), method=("saliency",)
    )
    assert not record.rows(CHOICE)
    assert "Chosen method" not in [section.title for section in report(record).sections]


def test_one_candidate_is_refused_before_anything_is_written(tmp_path, sharp_vit):
    with pytest.raises(InputError, match="at least 2 candidates") as told:
        run(sharp_vit, tmp_path / "out", method=("relevance",))
    assert told.value.exit_code == 2
    assert not (tmp_path / "out").exists()


def test_candidates_of_the_package_are_those_it_has(tmp_path, sharp_vit):
    record = run(sharp_vit, tmp_path / "out", engine="grad-cam", run=replace(RUN, out=tmp_path / "out", limit=5))
    (row,) = record.rows(CHOICE)
    assert row.candidates == candidates_for(load(str(sharp_vit)), engine="grad-cam")
    assert row.method in row.candidates
