"""`vitlens predict`: a line an image, the folder that --out asks for, and what its report claims."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import vitlens
from tests.first_page import check_first_page
from vitlens.cli.main import run
from vitlens.commands.predict.measure import measure
from vitlens.commands.predict.options import PredictOptions
from vitlens.commands.predict.record import PredictRecord
from vitlens.commands.predict.report import REPORT
from vitlens.commands.run.options import RunOptions
from vitlens.commands.run.publish import read_folder
from vitlens.commands.shared.predictions import PredictionRow
from vitlens.errors import InputError
from vitlens.models.loading import load
from vitlens.recorded import Config, ModelEntry
from vitlens.uncertainty import wilson

RUN = RunOptions(device="cpu", quiet=True)


@pytest.fixture
def images(tmp_path: Path) -> tuple[str, ...]:
    paths = [tmp_path / "a.png", tmp_path / "b.png"]
    for index, path in enumerate(paths):
        Image.fromarray(np.random.default_rng(index).integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(path)
    return tuple(map(str, paths))


def test_one_line_an_image_in_order(tiny_vit: Path, images: tuple[str, ...]) -> None:
    rows = measure(PredictOptions(str(tiny_vit), images, run=RUN))
    assert [Path(row.image).name for row in rows] == ["a.png", "b.png"]
    pixels = torch.from_numpy(np.array(Image.open(images[0]))).permute(2, 0, 1)[None].float() / 255
    expected = load(str(tiny_vit))(pixels).softmax(-1)[0].sort(descending=True)
    names, probabilities = zip(*rows[0].top_classes)
    assert probabilities == pytest.approx(expected.values[:5].tolist(), abs=1e-6)
    assert names == tuple(str(index) for index in expected.indices[:5].tolist())
    assert "\n" not in str(rows[0])


def test_a_line_reads_well() -> None:
    assert str(PredictionRow.of("a.png", ("cat", "dog"), (0.612, 0.3))) == "a.png: cat 61.2 %, dog 30.0 %"
    assert str(PredictionRow.of("a.png", ("cat",), (1.0,), "dog")) == "a.png: cat 100.0 % (label: dog)"


def test_a_folder_only_when_asked(tiny_vit: Path, images, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["predict", str(tiny_vit), "--images", images[0], "--device", "cpu", "--quiet"]) == 0
    assert not (tmp_path / "reports").exists()
    line = capsys.readouterr().out.strip()
    for name, wanted, count in (("photos", {"images": images}, 2), ("digits", {"data": "digits"}, 3)):
        out = tmp_path / name
        rows = measure(PredictOptions(str(tiny_vit), **wanted, run=replace(RUN, out=out, limit=3)))
        record = read_folder(out)
        assert record.predictions == tuple(rows)
        assert vitlens.read(out).table("predictions") == rows
        assert len(record.images_drawn.pixels) == len(rows) == count
        assert (out / "figures" / "predictions.png").is_file()
        assert (name != "photos") or str(rows[0]) == line
        check_first_page(REPORT(record))


def test_wrong_calls(tiny_vit: Path, images: tuple[str, ...], tmp_path: Path, capsys) -> None:
    with pytest.raises(InputError, match="found both"):
        measure(PredictOptions(str(tiny_vit), images, "digits", run=RUN))
    with pytest.raises(InputError, match="expected --out with --html"):
        measure(PredictOptions(str(tiny_vit), images, run=replace(RUN, html=True)))
    measure(PredictOptions(str(tiny_vit), images, run=replace(RUN, html=True, out=tmp_path / "run")))
    assert capsys.readouterr().err.splitlines()[-1] == str(tmp_path / "run" / "report.html")
    assert (tmp_path / "run" / "report.html").is_file()


def planted(predicted: str, labels: str | None) -> PredictRecord:
    """Predictions of one-letter classes; labels: None without."""
    rows = tuple(
        PredictionRow.of(f"{at}.png", [name, "<b>*other*</b>"], [0.6 + 0.01 * at, 0.1], labels and labels[at])
        for at, name in enumerate(predicted)
    )
    return PredictRecord(config=Config(models=(ModelEntry("m"),)), predictions=rows)


def test_one_class_for_everything_comes_first() -> None:
    document = REPORT(planted("7" * 18 + "21", "70123456897012345689"))
    first = document.claims[0]
    assert (first.question, first.effect) == ("one class", wilson(18, 20))
    assert document.title == first.title
    check_first_page(document)


@pytest.mark.parametrize(
    ("predicted", "labels", "right"),
    [
        ("70123456897012345689", "70123456897012345689", wilson(20, 20)),
        ("7" * 20, "7" * 20, wilson(20, 20)),  # one class
        ("70123456897012345689", "70123456897012345680", wilson(19, 20)),
        ("7" * 10, "7" * 10, None),  # few images
        ("7", "1", None),  # one image
        ("7" * 21, None, None),  # no labels
    ],
)
def test_nothing_planted_nothing_found(predicted: str, labels: str | None, right: object) -> None:
    document = REPORT(planted(predicted, labels))
    claims = {claim.question: claim for claim in document.claims}
    assert "one class" not in claims
    assert (claims["accuracy"].effect if "accuracy" in claims else None) == right
    assert not document.verdicts
    check_first_page(document)
