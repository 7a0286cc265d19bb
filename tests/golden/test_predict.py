"""`vitlens predict`: a line an image, the folder that --out asks for, and what its report claims."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.kit.first_page import check_first_page
from tests.kit.planted_maps import prediction
from vitlens import load
from vitlens.cli.main import run
from vitlens.commands.predict.record import PredictRecord
from vitlens.commands.predict.report import REPORT
from vitlens.commands.run.publish import read_folder
from vitlens.record import Config, ModelEntry
from vitlens.uncertainty import wilson


@pytest.mark.parametrize("kind", ["photos", "digits"])
def test_one_line_an_image_and_a_folder_only_when_asked(kind, tiny_vit, pictures, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    given = f"--images {pictures}" if kind == "photos" else "--data digits --limit 3"
    line = f"predict {tiny_vit} {given} --device cpu --quiet"
    assert run(line.split()) == 0
    assert not list(tmp_path.iterdir())
    lines = capsys.readouterr().out.splitlines()
    assert run([*line.split(), "--html", "--out", "out"]) == 0
    printed = capsys.readouterr()
    assert printed.out.splitlines() == lines
    assert printed.err.splitlines()[-1] == str(Path("out") / "report.html")
    found = read_folder(tmp_path / "out")
    rows = found.predictions
    assert [str(row) for row in rows] == lines
    assert len(found.images_drawn.pixels) == len(rows) == 3
    if kind == "photos":
        assert [row[0] for row in REPORT(found).first.glance.rows] == ["0.png", "1.png", "2.png"]
        pixels = torch.from_numpy(np.array(Image.open(pictures / "0.png"))).permute(2, 0, 1)[None].float() / 255
        expected = load(str(tiny_vit))(pixels).softmax(-1)[0].sort(descending=True)
        names, probabilities = zip(*rows[0].top_classes)
        assert probabilities == pytest.approx(expected.values[:5].tolist(), abs=1e-6)
        assert names == tuple(str(index) for index in expected.indices[:5].tolist())


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
        prediction(f"{at % 2}/{at // 2}.png", name, 0.6 + 0.01 * at, labels and labels[at])
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
