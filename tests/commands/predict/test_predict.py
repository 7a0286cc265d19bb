from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from vitlens.commands.predict.measure import measure
from vitlens.commands.predict.options import PredictOptions
from vitlens.commands.predict.record import PREDICTIONS, PredictionRow
from vitlens.commands.scaffold.options import RunOptions
from vitlens.commands.scaffold.publish import read
from vitlens.errors import InputError
from vitlens.files import read_run
from vitlens.models.loading import load, untrained
from vitlens.models.saved import save

RUN = RunOptions(device="cpu", quiet=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model") / "cnn.safetensors"
    save(untrained("resnet20", classes=tuple("0123456789")), path)
    return str(path)


@pytest.fixture
def images(tmp_path: Path) -> tuple[str, ...]:
    paths = [tmp_path / "a.png", tmp_path / "b.png"]
    for index, path in enumerate(paths):
        Image.fromarray(np.random.default_rng(index).integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(path)
    return tuple(map(str, paths))


def test_one_line_an_image_in_order(model: str, images: tuple[str, ...]) -> None:
    rows = measure(PredictOptions(model, images, run=RUN))
    assert [Path(row.image).name for row in rows] == ["a.png", "b.png"]
    pixels = torch.from_numpy(np.array(Image.open(images[0]))).permute(2, 0, 1)[None].float() / 255
    expected = load(model)(pixels).softmax(-1)[0].sort(descending=True)
    names, probabilities = zip(*rows[0].top_classes)
    assert probabilities == pytest.approx(expected.values[:5].tolist(), abs=1e-6)
    assert names == tuple(str(index) for index in expected.indices[:5].tolist())
    assert "\n" not in str(rows[0])


def test_a_line_reads_well() -> None:
    assert str(PredictionRow.of("a.png", ("cat", "dog"), (0.612, 0.3))) == "a.png: cat 61.2 %, dog 30.0 %"
    assert str(PredictionRow.of("a.png", ("cat",), (1.0,), "dog")) == "a.png: cat 100.0 % (label: dog)"


def test_a_report_only_when_asked(
    model: str, images: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    measure(PredictOptions(model, images, run=RUN))
    assert not (tmp_path / "reports").exists()
    for name, wanted in (("photos", {"images": images}), ("digits", {"data": "digits"})):
        out = tmp_path / name
        rows = measure(PredictOptions(model, **wanted, run=RunOptions(device="cpu", quiet=True, out=out, limit=3)))
        record = read(read_run(out))
        assert record.status == "done"
        assert record.rows(PREDICTIONS) == tuple(rows)
        assert rows[0].class_1 in (out / "report.md").read_text()
        assert (out / "figures" / "predictions.png").exists() == (name == "digits")


def test_images_and_data_are_one_or_the_other(model: str, images: tuple[str, ...]) -> None:
    with pytest.raises(InputError, match="found both"):
        measure(PredictOptions(model, images, "digits", run=RUN))


def test_a_page_needs_a_folder(model: str, images: tuple[str, ...], tmp_path: Path, capsys) -> None:
    with pytest.raises(InputError, match="expected --out with --html"):
        measure(PredictOptions(model, images, run=replace(RUN, html=True)))
    measure(PredictOptions(model, images, run=replace(RUN, html=True, out=tmp_path / "run")))
    assert capsys.readouterr().err.splitlines()[-1] == str(tmp_path / "run" / "report.html")
    assert (tmp_path / "run" / "report.html").is_file()
