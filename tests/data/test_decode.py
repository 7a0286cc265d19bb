"""Every kind of file that a folder may hold, good and bad."""

import io
import struct
import warnings
import zlib

import numpy as np
import pytest
import torch
from PIL import Image

from vitlens.data.decode import PIXEL_LIMIT, UnreadableError, decode_file, quiet_pillow
from vitlens.preprocessing import Preprocessing

AS_IT_IS = Preprocessing(size=(6, 8))


@pytest.fixture
def picture() -> np.ndarray:
    """(6, 8, 3): red grows to the right, green downwards."""
    image = np.zeros((6, 8, 3), np.uint8)
    image[..., 0] = np.arange(8) * 30
    image[..., 1] = np.arange(6)[:, None] * 40
    return image


def decode(path, preprocessing=AS_IT_IS):
    with quiet_pillow():
        return decode_file(path, preprocessing)


def pixels_of(path, preprocessing=AS_IT_IS):
    return decode(path, preprocessing).pixels.permute(1, 2, 0).numpy()


def test_colour_is_kept_to_the_bit(tmp_path, picture):
    Image.fromarray(picture).save(tmp_path / "a.png")
    assert np.array_equal(pixels_of(tmp_path / "a.png"), picture)
    assert decode(tmp_path / "a.png").header == ((6, 8), None)


def test_grey_becomes_three_equal_channels(tmp_path, picture):
    Image.fromarray(picture[..., 0]).save(tmp_path / "a.png")
    assert np.array_equal(pixels_of(tmp_path / "a.png"), picture[..., :1].repeat(3, 2))


@pytest.mark.parametrize("suffix", ["png", "tif"])
def test_sixteen_bit_grey_is_scaled_not_cut(tmp_path, picture, suffix):
    deep = picture[..., 0].astype(np.uint16) * 250 + 77
    Image.fromarray(deep).save(tmp_path / f"a.{suffix}")
    assert np.array_equal(pixels_of(tmp_path / f"a.{suffix}")[..., 1], np.round(deep / 65535 * 255))


def test_cmyk_is_converted(tmp_path, picture):
    Image.fromarray(picture).resize((64, 48), 0).convert("CMYK").save(tmp_path / "a.jpg", quality=100)
    difference = pixels_of(tmp_path / "a.jpg").astype(int) - picture
    assert np.abs(difference).mean() < 12


def test_transparency_is_laid_on_white(tmp_path, picture):
    alpha = np.zeros((6, 8, 1), np.uint8)
    alpha[:, 4:] = 255
    alpha[:, 3] = 128
    Image.fromarray(np.concatenate([picture, alpha], 2)).save(tmp_path / "a.png")
    found = pixels_of(tmp_path / "a.png")
    assert (found[:, :3] == 255).all()
    assert np.array_equal(found[:, 4:], picture[:, 4:])
    half = picture[:, 3] * (128 / 255) + 255 * (127 / 255)
    assert np.abs(found[:, 3] - half).max() <= 1


def test_a_transparent_palette_is_laid_on_white(tmp_path):
    image = Image.new("P", (8, 6), 1)
    image.putpalette([0, 0, 0, 10, 20, 30])
    image.putpixel((0, 0), 0)
    image.save(tmp_path / "a.png", transparency=0)
    found = pixels_of(tmp_path / "a.png")
    assert found[0, 0].tolist() == [255, 255, 255]
    assert found[1, 1].tolist() == [10, 20, 30]


def test_exif_rotation_is_applied(tmp_path, picture):
    turned = Image.fromarray(picture).transpose(Image.Transpose.ROTATE_90)
    exif = Image.Exif()
    exif[0x0112] = 6  # "turn me clockwise to see me upright"
    turned.save(tmp_path / "a.png", exif=exif)
    assert np.array_equal(pixels_of(tmp_path / "a.png"), picture)


def test_broken_exif_is_no_reason_to_refuse(tmp_path, picture):
    Image.fromarray(picture).save(tmp_path / "a.jpg", exif=b"Exif\x00\x00MM\x00*\xff\xff\xff\xffgarbage", quality=95)
    assert pixels_of(tmp_path / "a.jpg").shape == (6, 8, 3)


def test_of_an_animation_the_first_frame_is_taken_and_that_is_said(tmp_path):
    frames = [Image.new("RGB", (8, 6), colour) for colour in ("red", "blue")]
    frames[0].save(tmp_path / "a.gif", save_all=True, append_images=frames[1:])
    decoded = decode(tmp_path / "a.gif")
    assert decoded.pixels[:, 0, 0].tolist() == [255, 0, 0]
    assert "first is used" in decoded.header.note


def test_a_single_pixel_becomes_one_colour(tmp_path):
    Image.new("RGB", (1, 1), (9, 8, 7)).save(tmp_path / "a.png")
    for preprocessing in (AS_IT_IS, Preprocessing((6, 8), resize=10, interpolation="bicubic")):
        found = pixels_of(tmp_path / "a.png", preprocessing)
        assert found.shape == (6, 8, 3)
        assert (found == (9, 8, 7)).all()


def test_a_truncated_jpeg_is_refused(tmp_path):
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "a.jpg")
    whole = (tmp_path / "a.jpg").read_bytes()
    (tmp_path / "a.jpg").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UnreadableError, match="truncated"):
        decode(tmp_path / "a.jpg")


def test_a_text_called_jpg_is_refused(tmp_path):
    (tmp_path / "a.jpg").write_text("hello")
    with pytest.raises(UnreadableError, match=r"expected an image .*, found something else"):
        decode(tmp_path / "a.jpg")


def test_an_empty_file_and_a_missing_one_are_refused(tmp_path):
    (tmp_path / "a.jpg").touch()
    with pytest.raises(UnreadableError):
        decode(tmp_path / "a.jpg")
    with pytest.raises(UnreadableError, match="found nothing there"):
        decode(tmp_path / "b.jpg")


def test_postscript_is_not_run(tmp_path):
    (tmp_path / "a.png").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nquit\n")
    with pytest.raises(UnreadableError, match="something else"):
        decode(tmp_path / "a.png")


def test_floating_point_pixels_are_refused(tmp_path):
    Image.fromarray(np.full((6, 8), 0.5, np.float32)).save(tmp_path / "a.tif")
    with pytest.raises(UnreadableError, match="floating point"):
        decode(tmp_path / "a.tif")


@pytest.mark.parametrize("side", [10_000, 12_000, 60_000])
def test_a_hundred_megapixels_are_refused_by_the_header_alone(tmp_path, side):
    """Below and above the limits at which Pillow itself warns and refuses."""
    (tmp_path / "a.png").write_bytes(png_header(side, side))
    with warnings.catch_warnings(record=True) as heard, pytest.raises(UnreadableError, match="at most 64 megapixels"):
        decode(tmp_path / "a.png")
    assert not heard


def test_a_thin_strip_may_not_blow_up(tmp_path):
    Image.new("L", (1, PIXEL_LIMIT // 60_000)).save(tmp_path / "a.png")
    with pytest.raises(UnreadableError, match="thin strip"):
        decode(tmp_path / "a.png", Preprocessing((224, 224), resize=2480))


def png_header(width: int, height: int) -> bytes:
    """A PNG that claims a size and holds no pixels."""
    body = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunk = struct.pack(">I", 13) + body + struct.pack(">I", zlib.crc32(body))
    return b"\x89PNG\r\n\x1a\n" + chunk + struct.pack(">I", 0) + b"IDAT" + struct.pack(">I", zlib.crc32(b"IDAT"))


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("size", [(300, 400), (401, 287), (288, 288), (250, 999)])
def test_resizing_and_cropping_equal_torchvisions(tmp_path, size, interpolation):
    from torchvision.transforms import v2

    noise = np.random.default_rng(1).integers(0, 256, (*size, 3), dtype=np.uint8)
    image = Image.fromarray(noise)
    image.save(tmp_path / "a.png")
    theirs = v2.Compose([v2.Resize(248, v2.InterpolationMode(interpolation)), v2.CenterCrop(224), v2.PILToTensor()])
    ours = decode(tmp_path / "a.png", Preprocessing((224, 224), resize=248, interpolation=interpolation))
    assert torch.equal(ours.pixels, theirs(image))


def test_a_crop_larger_than_the_resize_is_filled(tmp_path, picture):
    Image.fromarray(picture).save(tmp_path / "a.png")
    assert pixels_of(tmp_path / "a.png", Preprocessing((30, 20), resize=10)).shape == (30, 20, 3)


def test_an_image_of_the_right_size_is_not_touched(tmp_path, picture):
    buffer = io.BytesIO()
    Image.fromarray(picture).save(buffer, "PNG")
    (tmp_path / "a.png").write_bytes(buffer.getvalue())
    assert np.array_equal(pixels_of(tmp_path / "a.png", Preprocessing((6, 8), interpolation="bicubic")), picture)
