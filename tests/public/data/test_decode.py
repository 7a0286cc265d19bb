"""Every kind of file in a folder, good and bad; and many of them, in memory or from disk."""

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

import vitlens
from tests.kit.attacked import linear
from tests.kit.datasets import fitted, limited, pixels_of
from tests.kit.select import values_of
from vitlens import load_data
from vitlens.errors import DataError

AS_IT_IS = fitted((6, 8))
PICTURE = np.zeros((6, 8, 3), np.uint8)  # red grows to the right, green downwards
PICTURE[..., 0] = np.arange(8) * 30
PICTURE[..., 1] = np.arange(6)[:, None] * 40


def read(folder: Path, preprocessing: Any = AS_IT_IS) -> np.ndarray:
    """Return the pixels of the only file of a folder."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return (
            pixels_of(load_data(str(folder), preprocessing=preprocessing))[0]
            .permute(1, 2, 0)
            .numpy()
        )


DEEP = PICTURE[..., 0].astype(np.uint16) * 250 + 77
PALETTE = Image.new("P", (8, 6), 1)
PALETTE.putpalette([0, 0, 0, 10, 20, 30])
PALETTE.putpixel((0, 0), 0)
OF_PALETTE = np.full((6, 8, 3), (10, 20, 30), np.uint8)
OF_PALETTE[0, 0] = 255
RGB = Image.fromarray(PICTURE)
TURNED = Image.Exif()
TURNED[0x0112] = 6  # "turn me clockwise to see me upright"
SCALED = np.round(DEEP / 65535 * 255)[..., None].repeat(3, 2)
GOOD: dict[str, tuple[Image.Image, str, dict[str, Any], np.ndarray]] = {
    "colour": (RGB, "png", {}, PICTURE),
    "grey": (Image.fromarray(PICTURE[..., 0]), "png", {}, PICTURE[..., :1].repeat(3, 2)),
    "16 bit": (Image.fromarray(DEEP), "png", {}, SCALED),
    "16 bit TIFF": (Image.fromarray(DEEP), "tif", {}, SCALED),
    "a transparent palette": (PALETTE, "png", {"transparency": 0}, OF_PALETTE),
    "turned": (RGB.transpose(Image.Transpose.ROTATE_90), "png", {"exif": TURNED}, PICTURE),
}


@pytest.mark.parametrize("kind", GOOD)
def test_pixels_are_kept_to_the_bit(tmp_path, kind):
    image, suffix, options, expected = GOOD[kind]
    image.save(tmp_path / f"a.{suffix}", **options)
    # not touched at the right size
    for preprocessing in (
        AS_IT_IS,
        fitted((6, 8), interpolation="bicubic"),
    ):
        assert np.array_equal(read(tmp_path, preprocessing), expected)
    pixels = vitlens.images(tmp_path / f"a.{suffix}", linear((6, 8)))
    assert np.array_equal((255 * pixels[0]).round().permute(1, 2, 0).numpy(), expected)


def test_cmyk_and_broken_exif_are_read(tmp_path):
    RGB.resize((64, 48), 0).convert("CMYK").save(tmp_path / "a.jpg", quality=100)
    assert np.abs(read(tmp_path).astype(int) - PICTURE).mean() < 12
    RGB.save(tmp_path / "a.jpg", exif=b"Exif\x00\x00MM\x00*\xff\xff\xff\xffgarbage", quality=95)
    assert np.abs(read(tmp_path).astype(int) - PICTURE).mean() < 12


def test_transparency_is_laid_on_white(tmp_path):
    alpha = np.zeros((6, 8, 1), np.uint8)
    alpha[:, 4:], alpha[:, 3] = 255, 128
    Image.fromarray(np.concatenate([PICTURE, alpha], 2)).save(tmp_path / "a.png")
    pixels = read(tmp_path)
    assert (pixels[:, :3] == 255).all()
    assert np.array_equal(pixels[:, 4:], PICTURE[:, 4:])
    assert np.abs(pixels[:, 3] - (PICTURE[:, 3] * (128 / 255) + 255 * (127 / 255))).max() <= 1


@pytest.fixture
def animation(tmp_path: Path) -> Path:
    """Write an animation of a red frame and a blue one."""
    frames = [Image.new("RGB", (8, 6), colour) for colour in ("red", "blue")]
    frames[0].save(tmp_path / "a.gif", save_all=True, append_images=frames[1:])
    return tmp_path / "a.gif"


def test_of_an_animation_the_first_frame_is_taken_and_that_is_said(animation):
    Image.new("RGB", (8, 6), "red").save(animation.with_name("b.gif"))
    split = load_data(str(animation.parent))
    assert pixels_of(split)[:, :, 0, 0].tolist() == [[255, 0, 0]] * 2
    (note,) = split.notes
    assert note.startswith("1 of 2 images")
    with limited(MEMORY_LIMIT=0):
        assert load_data(str(animation.parent)).notes == split.notes


def test_a_picture_given_open_or_closed_is_only_read(animation):
    model = linear((6, 8))
    red = [1.0, 0.0, 0.0]
    with Image.open(animation) as image:
        image.load()
        image.putpixel((0, 0), 1)
        before = image.tobytes()
        assert vitlens.images(image, model)[0, :, 5, 5].tolist() == red
        assert image.tobytes() == before
    assert vitlens.images(image, model)[0, :, 5, 5].tolist() == red


def test_a_single_pixel_becomes_one_colour_and_a_large_crop_is_filled(tmp_path):
    ways = [fitted(size, resize=10) for size in ((30, 20), (30, 8), (8, 30))]
    for side, sizes in (
        ((1, 1), (AS_IT_IS, fitted((6, 8), 10, interpolation="bicubic"))),
        ((8, 6), ways),
    ):
        Image.new("RGB", side, (9, 8, 7)).save(tmp_path / "a.png")
        for preprocessing in sizes:
            pixels = read(tmp_path, preprocessing)
            assert pixels.shape == (*preprocessing.size, 3)
            assert (pixels == (9, 8, 7)).all()


def png_header(width: int, height: int) -> bytes:
    """Return a PNG that claims a size and holds no pixels."""
    body = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunk = struct.pack(">I", 13) + body + struct.pack(">I", zlib.crc32(body))
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk
        + struct.pack(">I", 0)
        + b"IDAT"
        + struct.pack(">I", zlib.crc32(b"IDAT"))
    )


def test_what_is_no_image_is_left_out_with_the_reason_and_without_a_warning(tmp_path):
    """Now and, where pixels are decoded later, by header and end."""
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8))
    noise.save(tmp_path / "cut.jpg")
    Image.fromarray(np.full((6, 8), 0.5, np.float32)).save(tmp_path / "float.tif")
    # is not run
    postscript = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nquit\n"
    bad = {
        "text.jpg": (b"hello", "JPEG, PNG"),
        "empty.jpg": (b"", ""),
        "script.png": (postscript, "PostScript"),
    }
    # a limit of Pillow's own lies below 12,000, and another above it
    bad |= {
        f"{side}.png": (png_header(side, side), "64 megapixels")
        for side in (10_000, 12_000, 60_000)
    }
    bad |= {"cut.jpg": ((tmp_path / "cut.jpg").read_bytes()[:1500], "truncated")}
    for name, (content, _) in bad.items():
        (tmp_path / name).write_bytes(content)
    RGB.save(tmp_path / "good.png")
    with warnings.catch_warnings(record=True) as heard:
        split = load_data(str(tmp_path), preprocessing=AS_IT_IS)
        with limited(MEMORY_LIMIT=0):
            later = load_data(str(tmp_path), preprocessing=AS_IT_IS)
    assert not heard
    assert split.files == ("good.png",)
    reasons = {Path(skipped.file).name: skipped.reason for skipped in split.skipped}
    assert reasons.keys() == {*bad, "float.tif"}
    for name, (_, reason) in bad.items():
        assert reason in reasons[name]
    assert "floating point" in reasons["float.tif"]
    assert {Path(skipped.file).name for skipped in later.skipped} >= bad.keys()
    with pytest.raises(DataError, match=r"text\.jpg"):
        vitlens.images(tmp_path / "text.jpg", linear((6, 8)))


def tiff(bits: int, levels: np.ndarray) -> bytes:
    """Return a grey TIFF of one strip; levels of 12 bits are packed, two in three bytes."""
    content = levels.astype("<u2").tobytes()
    if bits == 12:
        first, second = levels.reshape(-1, 2).astype(np.uint32).T
        packed = np.stack([first >> 4, (first & 15) << 4 | second >> 8, second & 255], 1)
        content = packed.astype(np.uint8).tobytes()
    height, width = levels.shape
    # tag: width, height, bits, no compression, black is 0, offset, channels, lines, bytes
    values = (256, width), (257, height), (258, bits), (259, 1), (262, 1)
    values += (273, 8 + 2 + 9 * 12 + 4), (277, 1), (278, height), (279, len(content))
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in values)
    return struct.pack("<2sHIH", b"II", 42, 8, 9) + entries + struct.pack("<I", 0) + content


@pytest.mark.parametrize(("bits", "white"), [(12, 4095), (16, 65535)])
def test_the_range_of_deep_pixels_is_that_of_their_bits(tmp_path, bits, white):
    levels = np.linspace(0, white, 48).round().astype(np.uint16).reshape(6, 8)
    (tmp_path / "a.tif").write_bytes(tiff(bits, levels))
    expected = np.round(levels / white * 255)
    assert np.array_equal(read(tmp_path)[..., 1], expected)


@pytest.mark.parametrize("low", [-9, 0, 70_000])
def test_pixels_of_32_bits_have_no_known_range(tmp_path, low):
    picture = Image.fromarray(np.full((6, 8), low, np.int32))
    picture.save(tmp_path / "a.tif")
    with pytest.raises(DataError, match=r"range is unknown"):
        load_data(str(tmp_path), preprocessing=AS_IT_IS)
    if low:
        with pytest.raises(DataError):
            vitlens.images([picture], linear((6, 8)))


def test_a_thin_strip_is_not_blown_up_beyond_the_limit(tmp_path):
    Image.new("L", (1, 1066)).save(tmp_path / "a.png")
    with pytest.raises(DataError, match="thin strip"):
        read(tmp_path, fitted((224, 224), resize=2480))


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("size", [(300, 400), (401, 287), (288, 288), (250, 999)])
def test_resizing_and_cropping_equal_torchvisions(tmp_path, size, interpolation):
    image = Image.fromarray(np.random.default_rng(1).integers(0, 256, (*size, 3), dtype=np.uint8))
    image.save(tmp_path / "a.png")
    theirs = v2.Compose(
        [v2.Resize(248, v2.InterpolationMode(interpolation)), v2.CenterCrop(224), v2.PILToTensor()]
    )
    ours = read(tmp_path, fitted((224, 224), resize=248, interpolation=interpolation))
    assert np.array_equal(ours, theirs(image).permute(1, 2, 0).numpy())


@torch.inference_mode()
def test_the_readable_ones_are_kept_in_order_in_memory_or_on_disk(tmp_path):
    """Of 150 images of their own colour number 3 is a text, and number 130 cut off."""
    files = [tmp_path / f"{index:03}.png" for index in range(150)]
    steps = list[tuple[int, int]]()
    small = fitted((8, 8))
    noise = np.random.default_rng(0).integers(0, 9, (40, 40, 3), dtype=np.uint8)
    for index, path in enumerate(files):
        Image.fromarray(noise + np.uint8(index)).save(path)
    files[3].write_text("no image")
    files[130].write_bytes(files[130].read_bytes()[:-400])
    now = load_data(str(tmp_path), preprocessing=small, progress=lambda *done: steps.append(done))
    with limited(MEMORY_LIMIT=0):
        later = load_data(str(tmp_path), preprocessing=small)
    assert steps[-1] == (150, 150)
    assert len(steps) > 1
    readable = [index for index in range(150) if index not in (3, 130)]
    assert torch.equal(pixels_of(now), pixels_of(later))
    assert torch.allclose(
        pixels_of(now).float().mean((1, 2, 3)), torch.tensor(readable) + 4.0, atol=1.0
    )
    for loaded in (now, later):
        assert loaded.files == tuple(files[index].name for index in readable)
        assert values_of(loaded.skipped, "file") == [str(files[3]), str(files[130])]
    files[0].write_text("gone")
    assert len(pixels_of(now)) == 148
    with pytest.raises(DataError, match=r"000\.png"):
        later.source.read(torch.tensor([0]))
    for file in (files[1], files[2], *files[4:]):
        file.unlink()
    with pytest.raises(DataError, match=r"none among 2: .*000\.png"):
        load_data(str(tmp_path), preprocessing=small)
