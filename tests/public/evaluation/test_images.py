"""`vitlens.images`: the command line's pixels from files, PIL images, arrays and tensors."""

from collections.abc import Callable
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from torch import Tensor

import vitlens
from tests.kit.commands import ran
from tests.kit.making import CLASSES, save, untrained
from vitlens import Model
from vitlens.errors import DataError

RANDOM = np.random.default_rng(0).integers(0, 256, (50, 41, 4), dtype=np.uint8)
TURNED = Image.Exif()
TURNED[0x0112] = 6  # to be shown turned by 90 degrees

PICTURES: dict[str, tuple[np.ndarray, dict[str, object]]] = {
    "colour.png": (RANDOM[..., :3], {}),
    "turned.jpg": (RANDOM[..., :3], {"exif": TURNED, "quality": 90}),
    "clear.png": (RANDOM, {}),
    "grey.png": (RANDOM[..., 0], {}),
    "deep.png": (RANDOM[..., 0].astype(np.uint16) * 200, {}),
    "palette.gif": (RANDOM[..., :3], {}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("files")
    for name, (pixels, options) in PICTURES.items():
        Image.fromarray(pixels).save(place / name, **options)
    return place


@pytest.fixture(scope="module", params=[None, 36], ids=["whole", "cropped"])
def model(request: pytest.FixtureRequest) -> Model:
    small = untrained(
        "vit-mini", classes=CLASSES, seed=1, overrides={"dim": 8, "depth": 1, "heads": 1}
    )
    small.preprocessing = replace(small.preprocessing, resize=request.param)
    return small


@pytest.fixture(scope="module")
def seen(model: Model, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    """Return what `vitlens predict` passes to the model for each file."""
    place = tmp_path_factory.mktemp("predict")
    save(model, place / "model" / "model.safetensors")
    pixels = ran(place / "out", f"predict {place / 'model'} --images {folder}").images_drawn.pixels
    return dict(zip(sorted(PICTURES), (torch.from_numpy(pixels) / 255).split(1), strict=True))


@pytest.mark.parametrize("name", PICTURES)
def test_a_file_and_a_pil_image_are_what_the_command_line_sees(folder, model, seen, name):
    with Image.open(folder / name) as opened:
        for source in (folder / name, str(folder / name), opened):
            pixels = vitlens.images(source, model)
            assert (pixels.dtype, pixels.shape) == (torch.float32, (1, 3, *model.input_size))
            assert torch.equal(pixels, seen[name])


@pytest.mark.parametrize("name", ["turned.jpg", "clear.png", "grey.png"])
def test_an_array_and_a_tensor_are_what_the_command_line_sees(folder, model, seen, name):
    with Image.open(folder / name) as opened:
        array = np.asarray(ImageOps.exif_transpose(opened))
    assert torch.equal(vitlens.images(array, model), seen[name])
    if array.ndim == 3:
        tensor = torch.from_numpy(array.copy()).permute(2, 0, 1)
        for source in (np.stack([array, array]), torch.stack([tensor] * 2), [tensor, tensor]):
            assert torch.equal(vitlens.images(source, model), seen[name].repeat(2, 1, 1, 1))


def test_many_of_all_kinds_keep_their_order(folder, model, seen):
    with Image.open(folder / "clear.png") as opened:
        pixels = vitlens.images(
            [folder / "grey.png", opened, folder, RANDOM[..., :3], folder / "deep.png"], model
        )
    parts = ["grey.png", "clear.png", *sorted(PICTURES), "colour.png", "deep.png"]
    assert torch.equal(pixels, torch.cat([seen[name] for name in parts]))


def closed(path: Path) -> Image.Image:
    with Image.open(path) as image:
        pass
    return image


WRONG: dict[str, tuple[Callable[[Path], object], str | None]] = {  # and the file that is named
    "nothing": (lambda _: [], None),
    "a number": (lambda _: 3, None),
    "bytes": (lambda _: b"cat.jpg", None),
    "an empty name": (lambda _: "", None),
    "no such file": (lambda _: "no.jpg", "no.jpg"),
    "no image": (lambda path: path / "text.png", "text.png"),
    "one of several": (lambda path: [path / "good.png", path / "cut.png"], "cut.png"),
    "a cut PIL image": (lambda path: Image.open(BytesIO((path / "cut.png").read_bytes())), None),
    "a closed PIL image": (lambda path: closed(path / "good.png"), "good.png"),
    "a strip": (lambda _: np.zeros((1, 70_000), np.uint8), None),
    "a float array": (lambda _: RANDOM[..., :3] / 255, None),
    "a float tensor": (lambda _: torch.rand(2, 3, 8, 8), None),
    "no colours": (lambda _: RANDOM[..., :2], None),
    "no pixels": (lambda _: RANDOM[:0, :, :3], None),
    "channels first": (lambda _: RANDOM.transpose(2, 0, 1), None),
    "channels last in a tensor": (lambda _: torch.from_numpy(RANDOM), None),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_no_picture_is_refused_on_one_line_and_files_by_name(tmp_path, wrong):
    Image.fromarray(RANDOM[..., :3]).save(tmp_path / "good.png")
    (tmp_path / "cut.png").write_bytes((tmp_path / "good.png").read_bytes()[:2000])
    (tmp_path / "text.png").write_text("no image")
    model, (make, message) = vitlens.load("cnn-digits"), WRONG[wrong]
    model.preprocessing = replace(model.preprocessing, resize=36)
    with pytest.raises(DataError, match=message) as raised:
        # past beartype
        getattr(vitlens.images, "__wrapped__", vitlens.images)(make(tmp_path), model)
    assert "\n" not in str(raised.value)
