"""What kinds measure beside accuracies: position embeddings of every training, and one image as patches."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

import vitlens
from tests.backing import unbacked
from vitlens.analysis.attention.positions import position_similarity, rank_correlation
from vitlens.commands.run.options import RunOptions
from vitlens.commands.run.publish import read
from vitlens.commands.study.measure import measure
from vitlens.commands.study.options import StudyOptions
from vitlens.commands.study.record import (
    AGAINST_BEST,
    CUT,
    POINTS,
    POSITION_MAPS,
    POSITION_ORDER,
    DesignRow,
    PositionRow,
)
from vitlens.commands.study.report import report
from vitlens.commands.study.report.positions import position_section
from vitlens.data.digits import digits
from vitlens.files import read_run
from vitlens.report.document import Document
from vitlens.uncertainty import Estimate


def run(kind: str, out: Path, seeds: int) -> Path:
    options = RunOptions(device="cpu", limit=20, batch_size=10, quiet=True, out=out)
    measure(StudyOptions((), kind=kind, epochs=1, seeds=seeds, run=options))
    return out


def test_position_embeddings_of_every_training_are_measured(tmp_path):
    folder = run("positions", tmp_path / "positions", 2)
    record = read(read_run(folder))
    rows = record.rows(POSITION_ORDER)
    assert [(row.label, row.seed) for row in rows] == [
        (label, seed) for label in ("sine", "sine-2d", "learned") for seed in (0, 1)
    ]
    for row in rows:
        model = vitlens.load(str(folder / "points" / row.label / f"seed-{row.seed}"))
        assert (row.all, row.rows, row.columns) == pytest.approx(
            rank_correlation(position_similarity(model), model.layout)
        )
        assert (row.before == row.all) == (row.label != "learned")
    stored = record.arrays(POSITION_MAPS).similarity
    assert sorted(stored) == [1, 2, 3]
    first = vitlens.load(str(folder / "points" / "learned" / "seed-0"))
    np.testing.assert_allclose(stored[3], position_similarity(first), atol=1e-6)
    fixed, learned = (record.metrics[f"positions/{label}/rank_correlation/all"] for label in ("sine-2d", "learned"))
    assert (fixed.low, fixed.high) == (None, None)
    assert -1 <= learned.low < learned.value < learned.high <= 1
    assert learned.value == pytest.approx(np.mean([row.all for row in rows[4:]]))
    assert "](figures/position_similarity.png)" in (folder / "report.md").read_text()
    assert list(unbacked(report(record))) == []
    assert len(record.rows(AGAINST_BEST)) == 3


def test_the_image_that_is_cut_is_the_first_of_the_test_images(tmp_path):
    folder = run("patch-size", tmp_path / "patches", 1)
    record = read(read_run(folder))
    image = digits("test").limit(20).source.read(torch.arange(1)).numpy()
    assert np.array_equal(record.arrays(CUT).image, image)
    assert [(row.tokens, row.grid, row.patch) for row in record.rows(POINTS)] == [
        (1 + side * side, (side, side), (32 // side, 32 // side)) for side in (16, 8, 4, 2)
    ]
    document = report(record)
    assert [figure.name for figure in document.sections[0].figures] == ["cuts", "points"]
    table = document.sections[0].tables[0]
    assert [row[table.columns.index("tokens")] for row in table.rows] == [257, 65, 17, 5]
    assert (folder / "figures" / "cuts.png").is_file()
    assert list(unbacked(document)) == []


@dataclass
class _Record:
    """A study of one learned embedding, whose rank correlation has this estimate."""

    found: Estimate
    before: float = 0.02

    def rows(self, table) -> tuple:
        assert table is POSITION_ORDER
        return tuple(
            PositionRow("learned", "learned", seed, self.found.value, 0.5, 0.4, self.before) for seed in (0, 1)
        )

    @property
    def metrics(self) -> dict:
        return {"positions/learned/rank_correlation/all": self.found}

    def metric(self, name: str) -> Estimate:
        return self.metrics[name]


@pytest.mark.parametrize(
    ("found", "before", "words"),
    [
        (Estimate(0.6, 0.5, 0.7, 3, ""), 0.02, "nearer patches have more similar embeddings"),
        (Estimate(-0.6, -0.7, -0.5, 3, ""), 0.02, "nearer patches have less similar embeddings"),
        (Estimate(0.1, -0.2, 0.4, 3, ""), 0.02, "no order by distance is shown"),
        (Estimate(0.61, unit=""), 0.61, "fixed before training"),
        (Estimate(0.61, unit=""), 0.02, "one seed; 0.02 before training"),
    ],
)
def test_what_the_rank_correlation_means_follows_its_interval(found, before, words):
    design = DesignRow("positions", 6, 3, 1000, 10, (32, 32))
    (section,) = position_section(_Record(found, before), design)
    assert words in section.sentences[0].text
    assert section.tables[0].rows[0][1] == found
    assert section.tables[0].rows[0][4:] == (before, 2)
    assert list(unbacked(Document("t", (section,)))) == []
