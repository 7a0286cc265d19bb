"""`vitlens.images`: from files, PIL images, arrays and tensors the pixels that the command line gives the model."""

from collections.abc import Callable
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from torch import Tensor

import vitlens
from tests.lens.tiny import ours
from vitlens.cli.main import run
from vitlens.commands.run.load import load_split
from vitlens.commands.run.options import RunOptions
from vitlens.errors import DataError
from vitlens.models.model import Model
from vitlens.preprocessing import Preprocessing

RANDOM = np.random.default_rng(0).integers(0, 256, (50, 41, 4), dtype=np.uint8)
TURNED = Image.Exif()
TURNED[0x0112] = 6  # to be shown turned by 90 degrees

FILES: dict[str, Callable[[Path], None]] = {
    "colour.png": lambda path: Image.fromarray(RANDOM[..., :3]).save(path),
    "turned.jpg": lambda path: Image.fromarray(RANDOM[..., :3]).save(path, exif=TURNED, quality=90),
    "clear.png": lambda path: Image.fromarray(RANDOM).save(path),
    "grey.png": lambda path: Image.fromarray(RANDOM[..., 0]).save(path),
    "deep.png": lambda path: Image.fromarray(RANDOM[..., 0].astype(np.uint16) * 200).save(path),
    "palette.gif": lambda path: Image.fromarray(RANDOM[..., :3]).save(path),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("files")
    for name, write in FILES.items():
        write(made / name)
    return made


@pytest.fixture(scope="module", params=[None, 36], ids=["whole", "cropped"])
def model(request: pytest.FixtureRequest) -> Model:
    made = ours(size=(32, 48) if request.param is None else (32, 32))
    made.preprocessing = Preprocessing(made.input_size, request.param, "bicubic")
    return made


def loaded(model: Model, path: Path) -> Tensor:
    """What the command line gives the model for --images PATH."""
    split = load_split(model, options=RunOptions(device="cpu"), images=[str(path)])
    (batch,) = split.batches(len(split))
    return batch.images


@pytest.mark.parametrize("name", FILES)
def test_a_file_and_a_pil_image_are_what_the_command_line_sees(folder, model, name):
    expected = loaded(model, folder / name)
    assert expected.shape == (1, 3, *model.input_size)
    with Image.open(folder / name) as opened:
        for given in (folder / name, str(folder / name), opened):
            found = vitlens.images(given, model)
            assert found.dtype == torch.float32
            assert torch.equal(found, expected)


@pytest.mark.parametrize("name", ["turned.jpg", "clear.png", "grey.png"])
def test_an_array_and_a_tensor_are_what_the_command_line_sees(folder, model, name):
    expected = loaded(model, folder / name)
    with Image.open(folder / name) as opened:
        array = np.asarray(ImageOps.exif_transpose(opened))
    assert torch.equal(vitlens.images(array, model), expected)
    if array.ndim == 3:
        tensor = torch.from_numpy(array.copy()).permute(2, 0, 1)
        for given in (np.stack([array, array]), torch.stack([tensor] * 2), [tensor, tensor]):
            assert torch.equal(vitlens.images(given, model), expected.repeat(2, 1, 1, 1))


def test_many_of_all_kinds_keep_their_order(folder, model):
    with Image.open(folder / "clear.png") as opened:
        found = vitlens.images([folder / "grey.png", opened, folder, RANDOM[..., :3], folder / "deep.png"], model)
    parts = ["grey.png", "clear.png", *sorted(FILES), "colour.png", "deep.png"]
    assert torch.equal(found, torch.cat([loaded(model, folder / name) for name in parts]))


def test_the_pixels_are_those_that_predict_writes(tiny_vit, folder, tmp_path):
    assert run(["predict", str(tiny_vit), "--images", str(folder / "turned.jpg"), "--out", str(tmp_path / "p")]) == 0
    with np.load(tmp_path / "p" / "arrays" / "images.npz") as arrays:
        found = vitlens.images(folder / "turned.jpg", vitlens.load(str(tiny_vit)))
        assert torch.equal(found, torch.from_numpy(arrays["pixels"]) / 255)


WRONG: dict[str, tuple[Callable[[Path], object], str]] = {
    "nothing": (lambda _: [], "at least one picture"),
    "a number": (lambda _: 3, "PIL images or uint8 arrays, found int"),
    "bytes": (lambda _: b"cat.jpg", "PIL images or uint8 arrays, found bytes"),
    "an empty name": (lambda _: "", "found ''"),
    "no such file": (lambda _: "no.jpg", "no.jpg"),
    "no image": (lambda path: path / "text.png", "text.png"),
    "one of several": (lambda path: [path / "good.png", path / "cut.png"], "cut.png"),
    "a cut PIL image": (lambda path: Image.open(BytesIO((path / "cut.png").read_bytes())), "a picture of 41x50 px"),
    "a closed PIL image": (lambda path: closed(path / "good.png"), "good.png"),
    "a strip": (lambda _: np.zeros((1, 70_000), np.uint8), "thin strip"),
    "a float array": (lambda _: RANDOM[..., :3] / 255, "uint8.*found float64"),
    "a float tensor": (lambda _: torch.rand(2, 3, 8, 8), "uint8.*found float32"),
    "no colours": (lambda _: RANDOM[..., :2], r"found \(50, 41, 2\)"),
    "no pixels": (lambda _: RANDOM[:0, :, :3], r"found \(0, 41, 3\)"),
    "channels first": (lambda _: RANDOM.transpose(2, 0, 1), r"found \(4, 50, 41\)"),
    "channels last in a tensor": (lambda _: torch.from_numpy(RANDOM), r"found \(50, 41, 4\)"),
}


def closed(path: Path) -> Image.Image:
    with Image.open(path) as image:
        pass
    return image


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_no_picture_is_refused_on_one_line(tmp_path, wrong):
    model = ours(size=(32, 32))
    model.preprocessing = Preprocessing((32, 32), 36)
    Image.fromarray(RANDOM[..., :3]).save(tmp_path / "good.png")
    (tmp_path / "cut.png").write_bytes((tmp_path / "good.png").read_bytes()[:2000])
    (tmp_path / "text.png").write_text("no image")
    make, message = WRONG[wrong]
    with pytest.raises(DataError, match=message) as told:
        getattr(vitlens.images, "__wrapped__", vitlens.images)(make(tmp_path), model)  # past beartype, as in a notebook
    assert "\n" not in str(told.value)
