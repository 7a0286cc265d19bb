"""Planted facts: a head that reads less than there is, models that differ; maps that can show nothing."""

from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from tests.backing import unbacked
from vitlens.cli.main import run
from vitlens.commands.features.conclusions import findings, verdicts
from vitlens.commands.features.measure.classifiers import LastLayer, write_head_differences, write_pairs
from vitlens.commands.features.options import FeaturesOptions
from vitlens.commands.features.record import ACCURACY, DATA, HEAD_DIFFERENCES, PAIRS, PROBE_ACCURACY, RECORD
from vitlens.commands.features.record.rows import PROBE, DepthRow, FeatureDataRow, RetrievalRow, SimilarityRow, SpaceRow
from vitlens.commands.features.report.shown import retrieval_sections
from vitlens.commands.features.report.space import space_sections
from vitlens.commands.registry import COMMANDS
from vitlens.commands.run.folder import RunFolder
from vitlens.commands.run.publish import read_folder
from vitlens.data.split import InMemory, Split
from vitlens.records import Record
from vitlens.report.document import Document, Finding
from vitlens.report.findings import ranked
from vitlens.uncertainty import wilson

N = 600


def split_of(count: int) -> Split:
    return Split("made", "test", InMemory(torch.zeros(count, 3, 1, 1, dtype=torch.uint8)), (1, 1), tuple("abcde"))


def right(share: float, seed: int, count: int = N) -> torch.Tensor:
    return torch.rand(count, generator=torch.Generator().manual_seed(seed)) < share


def record_of(folder: Path, *layers: LastLayer, data: FeatureDataRow | None = None, **tables: object) -> Record:
    """A record with the tests that the command makes of these last layers."""
    config = {
        "models": [{"alias": layer.alias} for layer in layers],
        "options": asdict(FeaturesOptions(tuple(layer.alias for layer in layers), ks=(20,))),
    }
    count = len(next(iter(layers[0].classifiers.values()))) if layers[0].classifiers else N
    with RunFolder.create("features", title="planted", out=folder, config=config) as run_folder:
        for table in RECORD.tables:
            run_folder.write(table, list(tables.get(table.name, ())))  # type: ignore[call-overload]
        run_folder.write(DATA, [data or FeatureDataRow(count, 1000, "", 0.2, False)])
        for layer in layers:
            for correct, metric in ((layer.own, ACCURACY), (layer.classifiers.get(PROBE), PROBE_ACCURACY)):
                if correct is not None:
                    run_folder.metric(metric(model=layer.alias), wilson(int(correct.sum()), count))
        write_head_differences(run_folder, layers, split_of(count), seed=0)
        write_pairs(run_folder, layers, split_of(count), seed=0)
        run_folder.finish()
    return read_folder(folder)


def found_in(record: Record) -> tuple[Finding, ...]:
    return ranked(findings(record))


def test_features_that_hold_more_than_the_head_reads_come_first(tmp_path: Path) -> None:
    own = right(0.6, 0)
    record = record_of(tmp_path / "run", LastLayer("m", own, {"knn-20": own, PROBE: own | right(0.5, 1)}))
    row = next(row for row in record.rows(HEAD_DIFFERENCES) if row.classifier == PROBE)
    (first,) = found_in(record)
    assert first.claim.rows[0] == row
    assert first.effect == row.estimate
    assert 15 < row.difference < 25
    assert "hold more than its classifier reads" in first.claim.text
    verdict = next(iter(verdicts(record)))
    assert verdict.value is not None
    assert (verdict.state, verdict.value.value) == ("fail", -row.difference)
    assert list(unbacked(Document("t", (), findings=found_in(record)))) == []


def test_a_head_that_reads_as_well_is_no_finding(tmp_path: Path) -> None:
    own = right(0.8, 0)
    record = record_of(tmp_path / "run", LastLayer("m", own, {"knn-20": own, PROBE: own}))
    assert found_in(record) == ()
    assert [verdict.state for verdict in verdicts(record)] == ["pass"]


@pytest.mark.parametrize(
    ("knn", "support"), [(0.85, "two methods agree"), (0.7, "one method"), (0.5, "methods disagree")]
)
def test_the_better_features_are_named_with_their_support(tmp_path: Path, knn: float, support: str) -> None:
    same = right(0.7, 5)
    record = record_of(
        tmp_path / "run",
        LastLayer("a", None, {"knn-20": right(knn, 1), PROBE: right(0.9, 2)}),
        LastLayer("b", None, {"knn-20": right(0.7, 1) if knn == 0.7 else same, PROBE: right(0.7, 4)}),
    )
    (first,) = found_in(record)
    row = next(row for row in record.rows(PAIRS) if row.classifier == PROBE)
    assert first.effect == row.estimate
    assert first.claim.text.startswith("The last layer of **a**")
    assert (first.support, first.p) == (support, row.p_holm)


def depth(layer: int, correct: int) -> DepthRow:
    share = wilson(correct, N)
    assert share.low is not None
    assert share.high is not None
    title = f"block {layer}"
    return DepthRow("m", layer, title, 8, None, PROBE, share.value, share.low, share.high, N, 1000, None, 1.0)


@pytest.mark.parametrize(("counts", "found"), [((200, 540, 400), True), ((200, 420, 400), False)])
def test_an_earlier_layer_that_is_read_better(tmp_path: Path, counts: tuple[int, ...], *, found: bool) -> None:
    rows = [depth(layer, correct) for layer, correct in enumerate(counts)]
    record = record_of(tmp_path / "run", LastLayer("m", None, {}), depth=rows)
    assert [each.claim.rows for each in found_in(record)] == ([(rows[1], rows[2])] if found else [])


def test_maps_and_retrieval_that_can_show_nothing_are_inconclusive(tmp_path: Path) -> None:
    """Images of one each of their classes, and a search among eight."""
    space = SpaceRow("m", "images", "pca", 300, 8, None, 10, 0.6, (0.1, 0.1))
    among = RetrievalRow("m", "shown", 8, 4, 5)
    data = FeatureDataRow(300, None, "there is no training part", 1 / 300, False)
    record = record_of(tmp_path / "few", LastLayer("m", None, {}), data=data, space=[space], retrieval=[among])
    assert [verdict.state for verdict in verdicts(record)] == ["not tested", "inconclusive", "inconclusive"]
    for sections, rows in (
        (space_sections(record, masked=False), {data, 1, 10}),
        (retrieval_sections(record), {among, 100}),
    ):
        (section,) = sections
        assert not section.figures
        assert any(rows <= set(sentence.rows) for sentence in section.sentences if sentence.says == "result")
    enough = replace(data, chance=0.1)
    many = replace(among, images=5000)
    record = record_of(tmp_path / "many", LastLayer("m", None, {}), data=enough, space=[space], retrieval=[many])
    assert [verdict.state for verdict in verdicts(record)] == ["not tested"]


def test_last_layers_that_are_less_alike(tmp_path: Path) -> None:
    row = SimilarityRow("a", "b", 500, 0.8, 0.75, 0.85, 0.2, 0.15, 0.25, 0.5, 0.5, 0.4, 0.9, (0, 0))
    layers = LastLayer("a", None, {}), LastLayer("b", None, {})
    (first,) = found_in(record_of(tmp_path / "less", *layers, similarity=[row]))
    assert first.effect.value == row.last_last
    alike = replace(row, last_last=0.8, last_last_low=0.75, last_last_high=0.85)
    assert found_in(record_of(tmp_path / "alike", *layers, similarity=[alike])) == ()


@pytest.mark.slow
def test_over_twenty_seeds_the_planted_head_is_found_and_no_other(tmp_path: Path) -> None:
    invented = 0
    for seed in range(20):
        own = right(0.6, seed)
        better = LastLayer("m", own, {PROBE: own | right(0.3, 100 + seed)})
        same = LastLayer("m", own, {PROBE: right(0.6, 200 + seed)})
        (first,) = found_in(record_of(tmp_path / f"found-{seed}", better))
        assert "hold more" in first.claim.text
        invented += bool(found_in(record_of(tmp_path / f"none-{seed}", same)))
    assert invented == 0


DAMAGED = """
import torch, vitlens


def model():
    made = vitlens.load("vit-digits")
    with torch.no_grad():
        for digit in (1, 4, 7):
            made.module.head.weight[digit] = 0
            made.module.head.bias[digit] = -100
    return made
"""


@pytest.mark.slow
def test_a_damaged_head_of_the_bundled_model_is_found(tmp_path: Path) -> None:
    file = tmp_path / "damaged.py"
    file.write_text(DAMAGED)
    words = ["--data", "digits", "--limit", "100", "--no-tsne", "--no-cache", "--k", "5", "--quiet"]
    assert run(["features", "--model-file", f"{file}:model", *words, "--out", str(tmp_path / "run")]) == 0
    report = COMMANDS["features"].report(read_folder(tmp_path / "run"))
    assert "hold more than its classifier reads" in report.findings[0].claim.text
    assert 20 < report.findings[0].effect.value < 40
    assert list(unbacked(report)) == []
