"""`vitlens predict`: a line an image, the folder that --out asks for, and what its report claims."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import vitlens
from tests.kit.first_page import check_first_page
from vitlens import load
from vitlens.cli.main import run
from vitlens.commands.predict.measure import measure
from vitlens.commands.predict.options import PredictOptions
from vitlens.commands.predict.record import PredictRecord
from vitlens.commands.predict.report import REPORT
from vitlens.commands.run.options import RunOptions
from vitlens.commands.run.publish import read_folder
from vitlens.commands.shared.predictions import PredictionRow
from vitlens.errors import InputError
from vitlens.record import Config, ModelEntry
from vitlens.uncertainty import wilson

RUN = RunOptions(device="cpu", quiet=True)


@pytest.fixture
def images(tmp_path: Path) -> tuple[str, ...]:
    paths = [tmp_path / "a.png", tmp_path / "b.png"]
    for index, path in enumerate(paths):
        Image.fromarray(np.random.default_rng(index).integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(path)
    return tuple(map(str, paths))


def test_one_line_an_image_and_a_folder_only_when_asked(tiny_vit: Path, images, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["predict", str(tiny_vit), "--images", *images, "--device", "cpu", "--quiet"]) == 0
    assert not (tmp_path / "reports").exists()
    lines = capsys.readouterr().out.splitlines()
    for name, wanted, count in (("photos", {"images": images}, 2), ("digits", {"data": "digits"}, 3)):
        rows = measure(PredictOptions(str(tiny_vit), **wanted, run=replace(RUN, out=tmp_path / name, limit=3)))
        record = read_folder(tmp_path / name)
        assert record.predictions == tuple(rows)
        assert vitlens.read(tmp_path / name).table("predictions") == rows
        assert len(record.images_drawn.pixels) == len(rows) == count
        if name == "photos":
            assert [str(row) for row in rows] == lines
            assert [row[0] for row in REPORT(record).first.glance.rows] == ["a.png", "b.png"]
            pixels = torch.from_numpy(np.array(Image.open(images[0]))).permute(2, 0, 1)[None].float() / 255
            expected = load(str(tiny_vit))(pixels).softmax(-1)[0].sort(descending=True)
            names, probabilities = zip(*rows[0].top_classes)
            assert probabilities == pytest.approx(expected.values[:5].tolist(), abs=1e-6)
            assert names == tuple(str(index) for index in expected.indices[:5].tolist())


def test_a_page_needs_a_folder(tiny_vit: Path, images: tuple[str, ...], tmp_path: Path, capsys) -> None:
    with pytest.raises(InputError, match="expected --out with --html"):
        measure(PredictOptions(str(tiny_vit), images, run=replace(RUN, html=True)))
    measure(PredictOptions(str(tiny_vit), images, run=replace(RUN, html=True, out=tmp_path / "run")))
    assert capsys.readouterr().err.splitlines()[-1] == str(tmp_path / "run" / "report.html")


@pytest.mark.parametrize(
    ("predicted", "labels", "right", "one_class"),
    [
        ("7" * 18 + "21", "70123456897012345689", wilson(2, 20), wilson(18, 20)),
        ("70123456897012345689", "70123456897012345680", wilson(19, 20), None),
        ("7" * 20, "7" * 20, wilson(20, 20), None),  # the only class there is
        ("7" * 10, "7" * 10, None, None),  # few images
        ("7", "1", None, None),  # one image
        ("7" * 21, None, None, None),  # no labels
    ],
)
def test_one_class_for_everything_comes_first(predicted: str, labels: str | None, right, one_class) -> None:
    rows = tuple(
        PredictionRow.of(f"{at % 2}/{at // 2}.png", [name, "<b>*x*</b>"], [0.6 + 0.01 * at, 0.1], labels and labels[at])
        for at, name in enumerate(predicted)
    )
    document = REPORT(PredictRecord(config=Config(models=(ModelEntry("m"),)), predictions=rows))
    effects = {claim.question: claim.effect for claim in document.claims}
    assert (effects.get("accuracy"), effects.get("one class")) == (right, one_class)
    assert (document.claims[0].question == "one class") == (one_class is not None)
    assert document.title == document.claims[0].title
    check_first_page(document)
    if len(rows) > 1:  # names that two files share are whole paths
        assert [row[0] for row in document.first.glance.rows][:3] == ["0/0.png", "1/0.png", "0/1.png"]
