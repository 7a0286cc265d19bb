"""What the first page of predictions says: one class for everything, images without labels, one image."""

from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from tests.backing import unbacked
from vitlens.commands.predict.options import PredictOptions
from vitlens.commands.predict.record import IMAGES, PREDICTIONS, FirstImages, PredictionRow
from vitlens.commands.predict.report import report
from vitlens.commands.scaffold.folder import RunFolder
from vitlens.commands.scaffold.publish import read_folder
from vitlens.report.document import Document
from vitlens.uncertainty import wilson


def reported(folder: Path, predicted: str, labels: str | None) -> Document:
    """The report of predictions of one-letter classes; labels: None without."""
    rows = [
        PredictionRow.of(f"{place}.png", [name, "<b>other</b>"], [0.6 + 0.01 * place, 0.1], labels and labels[place])
        for place, name in enumerate(predicted)
    ]
    config = {"models": [{"alias": "m"}], "options": asdict(PredictOptions("m"))}
    with RunFolder.create("predict", title="planted", out=folder, config=config) as run_folder:
        run_folder.write(PREDICTIONS, rows)
        run_folder.save(IMAGES, FirstImages(np.zeros((len(rows), 3, 4, 4), np.uint8)))
        run_folder.finish()
    document = report(read_folder(folder))
    assert list(unbacked(document)) == []
    return document


def test_one_class_for_everything_comes_first(tmp_path: Path) -> None:
    document = reported(tmp_path / "run", "7" * 18 + "21", "70123456897012345689")
    (found,) = document.findings
    assert found.effect == wilson(18, 20)
    assert "predicts class 7 for 18 of 20 images, of which 2 have" in found.claim.text


@pytest.mark.parametrize(
    ("predicted", "labels", "value"),
    [
        ("70123456897012345689", "70123456897012345689", wilson(20, 20)),
        ("7777777777", "7777777777", wilson(10, 10)),  # one class
        ("7", "1", wilson(0, 1)),  # one image
        ("77777777777", None, None),  # no labels
    ],
)
def test_nothing_planted_nothing_found(tmp_path: Path, predicted: str, labels: str | None, value: object) -> None:
    document = reported(tmp_path / "run", predicted, labels)
    assert document.findings == ()
    assert [(verdict.state, verdict.value) for verdict in document.verdicts] == [("not tested", value)]
