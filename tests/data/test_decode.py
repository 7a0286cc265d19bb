"""Every kind of file that a folder may hold, good and bad; and many of them, kept in memory or read from disk."""

import struct
import warnings
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import v2

from vitlens.data.decode import PIXEL_LIMIT, Files, Header, UnreadableError, decode, load_files, quiet_pillow
from vitlens.data.split import InMemory, Split
from vitlens.errors import DataError
from vitlens.preprocessing import Preprocessing

AS_IT_IS = Preprocessing(size=(6, 8))
SMALL = Preprocessing(size=(8, 8))
PICTURE = np.zeros((6, 8, 3), np.uint8)  # red grows to the right, green downwards
PICTURE[..., 0] = np.arange(8) * 30
PICTURE[..., 1] = np.arange(6)[:, None] * 40


def read(path: Path | Image.Image, preprocessing: Preprocessing = AS_IT_IS) -> tuple[np.ndarray, Header]:
    with quiet_pillow():
        pixels, header = decode(path, preprocessing)
    return pixels.permute(1, 2, 0).numpy(), header


def exif(orientation: int) -> Image.Exif:
    found = Image.Exif()
    found[0x0112] = orientation
    return found


DEEP = PICTURE[..., 0].astype(np.uint16) * 250 + 77
PALETTE = Image.new("P", (8, 6), 1)
PALETTE.putpalette([0, 0, 0, 10, 20, 30])
PALETTE.putpixel((0, 0), 0)
OF_PALETTE = np.full((6, 8, 3), (10, 20, 30), np.uint8)
OF_PALETTE[0, 0] = 255
RGB = Image.fromarray(PICTURE)
TURNED = {"exif": exif(6)}  # "turn me clockwise to see me upright"
GOOD: dict[str, tuple[Image.Image, str, dict[str, Any], np.ndarray]] = {
    "colour": (RGB, "png", {}, PICTURE),
    "grey": (Image.fromarray(PICTURE[..., 0]), "png", {}, PICTURE[..., :1].repeat(3, 2)),
    "16 bit": (Image.fromarray(DEEP), "png", {}, np.round(DEEP / 65535 * 255)[..., None].repeat(3, 2)),
    "16 bit TIFF": (Image.fromarray(DEEP), "tif", {}, np.round(DEEP / 65535 * 255)[..., None].repeat(3, 2)),
    "a transparent palette": (PALETTE, "png", {"transparency": 0}, OF_PALETTE),
    "turned": (RGB.transpose(Image.Transpose.ROTATE_90), "png", TURNED, PICTURE),
}


@pytest.mark.parametrize("kind", GOOD)
def test_pixels_are_kept_to_the_bit(tmp_path: Path, kind: str) -> None:
    image, suffix, options, expected = GOOD[kind]
    image.save(tmp_path / f"a.{suffix}", **options)
    for preprocessing in (AS_IT_IS, Preprocessing((6, 8), interpolation="bicubic")):  # not touched at the right size
        assert np.array_equal(read(tmp_path / f"a.{suffix}", preprocessing)[0], expected)
    assert read(tmp_path / f"a.{suffix}")[1] == ((image.height, image.width), None)


def test_cmyk_and_broken_exif_are_read(tmp_path: Path) -> None:
    RGB.resize((64, 48), 0).convert("CMYK").save(tmp_path / "a.jpg", quality=100)
    assert np.abs(read(tmp_path / "a.jpg")[0].astype(int) - PICTURE).mean() < 12
    RGB.save(tmp_path / "b.jpg", exif=b"Exif\x00\x00MM\x00*\xff\xff\xff\xffgarbage", quality=95)
    assert read(tmp_path / "b.jpg")[0].shape == (6, 8, 3)


def test_transparency_is_laid_on_white(tmp_path: Path) -> None:
    alpha = np.zeros((6, 8, 1), np.uint8)
    alpha[:, 4:], alpha[:, 3] = 255, 128
    Image.fromarray(np.concatenate([PICTURE, alpha], 2)).save(tmp_path / "a.png")
    found, _ = read(tmp_path / "a.png")
    assert (found[:, :3] == 255).all()
    assert np.array_equal(found[:, 4:], PICTURE[:, 4:])
    assert np.abs(found[:, 3] - (PICTURE[:, 3] * (128 / 255) + 255 * (127 / 255))).max() <= 1


def test_of_an_animation_the_first_frame_is_taken_and_that_is_said(tmp_path: Path) -> None:
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    frames[0].save(tmp_path / "a.gif", save_all=True, append_images=frames[1:])
    frames[0].save(tmp_path / "b.gif")
    assert read(tmp_path / "a.gif")[0][0, 0].tolist() == [255, 0, 0]
    notes = load_files([tmp_path / "a.gif", tmp_path / "b.gif"], SMALL).notes
    assert notes == ("1 of 2 images have more than one frame, of which the first is used",)


def test_a_gif_given_open_or_closed_is_only_read(tmp_path: Path) -> None:
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    frames[0].save(tmp_path / "a.gif", save_all=True, append_images=frames[1:])
    with Image.open(tmp_path / "a.gif") as image:
        image.load()
        image.putpixel((0, 0), 1)
        before = image.tobytes()
        assert read(image)[0][5, 5].tolist() == [255, 0, 0]
        assert image.tobytes() == before
    assert read(image)[0][5, 5].tolist() == [255, 0, 0]


def test_a_single_pixel_becomes_one_colour_and_a_large_crop_is_filled(tmp_path: Path) -> None:
    Image.new("RGB", (1, 1), (9, 8, 7)).save(tmp_path / "a.png")
    for preprocessing in (AS_IT_IS, Preprocessing((6, 8), resize=10, interpolation="bicubic")):
        found, _ = read(tmp_path / "a.png", preprocessing)
        assert found.shape == (6, 8, 3)
        assert (found == (9, 8, 7)).all()
    Image.new("RGB", (8, 6), (9, 8, 7)).save(tmp_path / "b.png")
    for size in ((30, 20), (30, 8), (8, 30)):
        found, _ = read(tmp_path / "b.png", Preprocessing(size, resize=10))
        assert found.shape == (*size, 3)
        assert (found == (9, 8, 7)).all()


def png_header(width: int, height: int) -> bytes:
    """A PNG that claims a size and holds no pixels."""
    body = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunk = struct.pack(">I", 13) + body + struct.pack(">I", zlib.crc32(body))
    return b"\x89PNG\r\n\x1a\n" + chunk + struct.pack(">I", 0) + b"IDAT" + struct.pack(">I", zlib.crc32(b"IDAT"))


POSTSCRIPT = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nquit\n"
BAD = [  # a limit of Pillow's own lies below 12,000, and another above it
    ("a.jpg", b"hello", r"expected an image .*, found something else"),
    ("a.jpg", b"", "."),
    ("a.png", POSTSCRIPT, "something else"),  # is not run
    *(("a.png", png_header(side, side), "at most 64 megapixels") for side in (10_000, 12_000, 60_000)),
    ("a.jpg", None, "found nothing there"),
]


@pytest.mark.parametrize(("name", "content", "match"), BAD, ids=[str(number) for number in range(len(BAD))])
def test_what_is_no_image_is_refused_without_a_warning(
    tmp_path: Path, name: str, content: bytes | None, match: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with warnings.catch_warnings(record=True) as heard, pytest.raises(UnreadableError, match=match):
        read(tmp_path / name)
    assert not heard


def test_truncated_floating_and_thin_images_are_refused(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "a.jpg")
    whole = (tmp_path / "a.jpg").read_bytes()
    (tmp_path / "a.jpg").write_bytes(whole[: len(whole) // 2])
    Image.fromarray(np.full((6, 8), 0.5, np.float32)).save(tmp_path / "b.tif")
    Image.new("L", (1, PIXEL_LIMIT // 60_000)).save(tmp_path / "c.png")
    blown_up = Preprocessing((224, 224), resize=2480)
    for name, how, match in (
        ("a.jpg", AS_IT_IS, "truncated"), ("b.tif", AS_IT_IS, "floating point"), ("c.png", blown_up, "thin strip"),
    ):  # fmt: skip
        with pytest.raises(UnreadableError, match=match):
            read(tmp_path / name, how)


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("size", [(300, 400), (401, 287), (288, 288), (250, 999)])
def test_resizing_and_cropping_equal_torchvisions(tmp_path: Path, size: tuple[int, int], interpolation: Any) -> None:
    image = Image.fromarray(np.random.default_rng(1).integers(0, 256, (*size, 3), dtype=np.uint8))
    image.save(tmp_path / "a.png")
    theirs = v2.Compose([v2.Resize(248, v2.InterpolationMode(interpolation)), v2.CenterCrop(224), v2.PILToTensor()])
    ours, _ = decode(tmp_path / "a.png", Preprocessing((224, 224), resize=248, interpolation=interpolation))
    assert torch.equal(ours, theirs(image))


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """200 images of their own colour, of which number 3 is a text and number 150 is cut off."""
    noise = np.random.default_rng(0).integers(0, 9, (40, 40, 3), dtype=np.uint8)
    paths = [tmp_path / f"{index:03}.png" for index in range(200)]
    for index, path in enumerate(paths):
        Image.fromarray(noise + np.uint8(index)).save(path)
    paths[3].write_text("no image")
    paths[150].write_bytes(paths[150].read_bytes()[:-400])
    return paths


def load_later(files: list[Path]) -> Split:
    """As where they do not fit in memory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vitlens.data.decode.MEMORY_LIMIT", 0)
        return load_files(files, SMALL)


@torch.inference_mode()
def test_the_readable_ones_are_kept_in_order_and_the_others_named(files: list[Path]) -> None:
    told: list[tuple[int, int]] = []
    now, later = load_files(files, SMALL, progress=lambda *done: told.append(done)), load_later(files)
    assert told[-1] == (200, 200)
    assert isinstance(now.source, InMemory)
    assert isinstance(later.source, Files)
    readable = [index for index in range(200) if index not in (3, 150)]
    every = torch.arange(198)
    assert torch.equal(now.source.read(every), later.source.read(every))
    brightness = now.source.read(every).float().mean((1, 2, 3))
    assert torch.allclose(brightness, torch.tensor(readable) + 4.0, atol=1.0)
    for loaded in (now, later):
        assert loaded.files == tuple(str(files[index]) for index in readable)
        assert [skipped.file for skipped in loaded.skipped] == [str(files[3]), str(files[150])]
        assert all(skipped.reason for skipped in loaded.skipped)


def test_files_that_cannot_be_read_now_or_later_are_named(files: list[Path]) -> None:
    later = load_later(files[:3])
    files[0].write_text("gone")
    with pytest.raises(DataError, match=r"cannot read .*000\.png: expected an image"):
        later.source.read(torch.tensor([0]))
    with pytest.raises(DataError, match=r"none among 1: .*003\.png: expected an image"):
        load_files(files[3:4], SMALL)
