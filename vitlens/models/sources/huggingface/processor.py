"""preprocessor_config.json, as data: what transformers' image processor does with a photograph, as a Preprocessing."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from vitlens.errors import InputError, ModelError, UnsupportedError
from vitlens.models.sources.huggingface.folder import PROCESSORS, Folder
from vitlens.models.sources.huggingface.library import quietly, transformers
from vitlens.preprocessing import Interpolation, Preprocessing
from vitlens.typed import read_as, short

# processors that only resize, crop, scale and normalise
_PLAIN: Final = ("ViT", "DeiT", "CLIP", "Siglip", "Beit", "Bit", "ConvNext", "DINOv3ViT")
_OTHER_STEPS: Final = ("do_pad", "do_flip_channel_order", "rescale_offset", "include_top", "do_color_quantize")
_KEYS: Final = (
    "size", "crop_size", "resample", "image_mean", "image_std", "rescale_factor", "do_resize", "do_center_crop",
    "do_rescale", "do_normalize", "crop_pct", "default_to_square",
)  # fmt: skip
_RESAMPLING: Final[Mapping[int, Interpolation]] = {2: "bilinear", 3: "bicubic"}
_OTHER_RESAMPLING: Final = {0: "nearest", 1: "Lanczos", 4: "box", 5: "Hamming"}
_FULL: Final = 384  # px: ConvNeXt's processor does not crop from this size on (its crop_pct)
Size = tuple[int, int]


@dataclass(frozen=True)
class Read:
    """The preprocessing of a model, and notes for the provenance."""

    preprocessing: Preprocessing
    notes: tuple[str, ...] = ()


def read_processor(folder: Folder, model_type: str, native: Size | None, image_size: Size | None) -> Read:
    """The preprocessing of a folder, else of the model type's own processor.

    native: the size of the configuration; image_size: as the user asked for. Raises ModelError and UnsupportedError for
    a processor that does more than resize, crop, scale and normalise.
    """
    stored = _stored(folder)
    kind = _kind(stored, model_type, folder.name)
    values = _defaults(kind) | {key: value for key, value in (stored or {}).items() if value is not None}
    for step in _OTHER_STEPS:
        if values.get(step):
            raise UnsupportedError(
                f"expected images that are resized, cropped and normalised, found {step} in {folder.name}"
            )
    notes = [] if stored is not None else [f"no {PROCESSORS[0]}: preprocessing by transformers' {kind}"]
    try:
        size, resize, more = _sizes(kind, values, fallback=native if stored is None else None)
    except (TypeError, ValueError, ArithmeticError) as error:
        raise ModelError(f"expected sizes in pixels in {PROCESSORS[0]} of {folder.name}, found {error}") from error
    notes += more
    if not values.get("do_resize", True) and native is not None:
        size, resize = native, None
        notes.append("the configuration does not resize images; they are resized to the model's size")
    if image_size is not None and image_size != size:
        size, resize = image_size, None
    mean, std = _normalisation(values, folder.name)
    fields = {
        "size": size,
        "resize": resize,
        "interpolation": _interpolation(values, folder.name),
        "mean": mean,
        "std": std,
    }
    try:
        return Read(
            read_as(Preprocessing, fields, source=f"{PROCESSORS[0]} of {folder.name}", error=ModelError), tuple(notes)
        )
    except InputError as error:
        raise ModelError(str(error)) from error


def _stored(folder: Folder) -> Mapping[str, Any] | None:
    for file in PROCESSORS:
        content = folder.read(file)
        if content is not None:
            inner = content.get("image_processor", content)
            if isinstance(inner, dict):
                return inner
    return None


def _kind(stored: Mapping[str, Any] | None, model_type: str, name: str) -> str:
    """The processor's class, without its back end. Raises UnsupportedError for one that is not plain."""
    typed = (stored or {}).get("image_processor_type") or (stored or {}).get("feature_extractor_type")
    if isinstance(typed, str):
        kind = typed.removesuffix("Fast").removesuffix("Pil").replace("FeatureExtractor", "ImageProcessor")
    else:
        with quietly():
            known = transformers("models.auto.image_processing_auto").IMAGE_PROCESSOR_MAPPING_NAMES
        family = model_type.removesuffix("_vision_model")
        kind = str((known.get(model_type) or known.get(family) or {}).get("torchvision") or "")
    if kind.removesuffix("ImageProcessor") not in _PLAIN:
        raise UnsupportedError(
            f"expected an image processor that only resizes, crops and normalises, found {short(kind) or 'none'!r} in "
            f"{name}; known: {', '.join(f'{plain}ImageProcessor' for plain in _PLAIN)}"
        )
    return kind


def _defaults(kind: str) -> dict[str, Any]:
    """What a processor's class does where its file says nothing."""
    with quietly():
        found = getattr(transformers(), kind)
    return {key: getattr(found, key) for key in _KEYS if getattr(found, key, None) is not None}


def _sizes(kind: str, values: Mapping[str, Any], *, fallback: Size | None) -> tuple[Size, int | None, list[str]]:
    """The input (height, width), the short side before the crop, and notes. fallback: the input where no file says."""
    square = bool(values.get("default_to_square", True))
    short_side, whole = _side_or_size(values["size"], square)
    if kind.startswith("ConvNext"):
        if short_side is None:
            raise ValueError("a size without shortest_edge")
        crop, full = (short_side, short_side), short_side >= _FULL
        resize = None if full else int(short_side / float(values.get("crop_pct", 224 / 256)))
    elif values.get("do_center_crop") and values.get("crop_size") is not None:
        _, crop_size = _side_or_size(values["crop_size"], True)
        assert crop_size is not None
        crop, resize = crop_size, short_side if whole is None else None if whole == crop_size else min(whole)
        if resize is not None and resize < min(crop):
            raise ValueError(f"a crop of {crop[0]}x{crop[1]} px out of {resize} px, which would be padded")
    elif whole is None:
        assert short_side is not None
        crop, resize = (short_side, short_side), short_side
    else:
        crop, resize = whole, None
    notes = []
    if fallback is not None and fallback != crop:
        resize = None if resize is None else round(resize * min(fallback) / min(crop))
        crop = fallback
    if whole is not None and resize is not None:
        notes.append(
            f"the configuration resizes to {whole[0]}x{whole[1]} px, whatever the proportions; here the short side is "
            "resized, which is the same for square images"
        )
    if whole is None and resize is not None and not kind.startswith("ConvNext") and not values.get("do_center_crop"):
        notes.append("the configuration does not crop; here the centre is cropped to a square")
    return crop, resize, notes


def _side_or_size(value: Any, square: bool) -> tuple[int | None, Size | None]:
    """The short side, or (height, width), of a size as transformers writes them."""
    if isinstance(value, int) and not isinstance(value, bool):
        return (None, (value, value)) if square else (value, None)
    if isinstance(value, list | tuple) and len(value) == 2:
        return None, (_whole(value[0]), _whole(value[1]))
    if isinstance(value, Mapping) or hasattr(value, "get"):
        if value.get("shortest_edge") is not None and value.get("longest_edge") is None:
            return _whole(value["shortest_edge"]), None
        if value.get("height") is not None and value.get("width") is not None:
            return None, (_whole(value["height"]), _whole(value["width"]))
    raise ValueError(short(str(value)))


def _whole(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(short(str(value)))
    return value


def _interpolation(values: Mapping[str, Any], name: str) -> Interpolation:
    number = values.get("resample")
    found = _RESAMPLING.get(number) if isinstance(number, int) else None
    if found is None:
        other = _OTHER_RESAMPLING.get(number, short(str(number))) if isinstance(number, int) else short(str(number))
        raise UnsupportedError(f"expected bilinear (2) or bicubic (3) resampling in {name}, found {other}")
    return found


def _normalisation(values: Mapping[str, Any], name: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and deviation for pixels in [0, 1]: (255 x factor - mean) / std, with the file's factor, mean and std."""
    stored = values.get("rescale_factor", 1 / 255) if values.get("do_rescale", True) else 1.0
    if isinstance(stored, bool) or not isinstance(stored, int | float) or not stored > 0:
        raise ModelError(f"expected a positive rescale_factor in {PROCESSORS[0]} of {name}, found {short(str(stored))}")
    factor = 255.0 * stored
    factor = 1.0 if math.isclose(factor, 1, rel_tol=1e-9) else factor
    normalised = values.get("do_normalize", True)
    mean = tuple(_channels(values.get("image_mean"), name)) if normalised else (0.0, 0.0, 0.0)
    std = tuple(_channels(values.get("image_std"), name)) if normalised else (1.0, 1.0, 1.0)
    return tuple(value / factor for value in mean), tuple(value / factor for value in std)


def _channels(values: Any, name: str) -> Iterator[float]:
    numbers = [values] * 3 if isinstance(values, int | float) else values
    plain = isinstance(numbers, list | tuple) and len(numbers) == 3
    if not plain or not all(isinstance(number, int | float) and not isinstance(number, bool) for number in numbers):
        raise ModelError(
            f"expected image_mean and image_std of three numbers in {PROCESSORS[0]} of {name}, found others"
        )
    yield from (float(number) for number in numbers)
