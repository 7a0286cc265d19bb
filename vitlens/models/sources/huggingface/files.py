"""The files of a transformers model, on this machine or the hub: folder, weights, processor."""

import hashlib
import logging
import math
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from torch import Tensor

from vitlens.errors import ModelError, UnsupportedError, argument, in_one_line
from vitlens.models.adapters import base_of
from vitlens.models.library_folders import ADAPTER_CONFIG, is_adapter
from vitlens.models.sources.hub import endpoint, pretrained_download
from vitlens.models.sources.registry import ModelRequest
from vitlens.models.weights import read_weights
from vitlens.preprocessing import Interpolation, Preprocessing
from vitlens.references import import_without_compiler
from vitlens.typed import read_as, short

CONFIG: Final = "config.json"
_OLDEST: Final = (5, 4)  # of pyproject.toml; earlier processors have other classes
_WEIGHTS: Final = "model.safetensors"
_WEIGHTS_PARTS: Final = "model-?????-of-?????.safetensors"  # of a larger model
_PICKLES: Final = ("pytorch_model*.bin", "*.pth", "*.pt", "*.msgpack", "*.h5")
TOKENIZERS: Final = (
    "tokenizer.json",
    "vocab.json",
    "merges.txt",
    "spiece.model",
    "tokenizer.model",
)
SETTINGS: Final = ("*config.json", *TOKENIZERS, "special_tokens_map.json")
_REPO: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9._-]+)?")

# processors that only resize, crop, scale and normalise, by the beginning of their class's name
_PLAIN: Final = (
    "ViT",
    "DeiT",
    "CLIP",
    "ChineseCLIP",
    "Siglip",
    "Beit",
    "Bit",
    "ConvNext",
    "DINOv3ViT",
    "EfficientNet",
    "Levit",
    "MobileNetV1",
    "MobileNetV2",
    "PoolFormer",
    "Pvt",
    "Segformer",
)
# settings of a processor that turn further steps on
_OTHER_STEPS: Final = (
    "do_pad",
    "do_flip_channel_order",
    "rescale_offset",
    "include_top",
    "do_color_quantize",
)
# such settings of EfficientNet, which belong to its normalisation (see `_normalisation`)
_EFFICIENTNET_STEPS: Final = ("rescale_offset", "include_top")
_RESAMPLING: Final[Mapping[int, Interpolation]] = {
    0: "nearest",
    1: "lanczos",
    2: "bilinear",
    3: "bicubic",
    4: "box",
    5: "hamming",
}
_UNCROPPED: Final = 384  # px: from this size on, ConvNeXt's processor does not crop
_LEVIT_SCALE: Final = 256 / 224  # Levit's processor resizes by this factor before its crop
_BLACK: Final = (0, 0, 0)
Size = tuple[int, int]


def transformers(part: str = "") -> Any:
    """Return the library, or one of its modules.

    Raises ModelError if it is missing or too old.
    """
    try:
        library: Any = import_without_compiler("transformers")
        major, minor = str(library.__version__).split(".")[:2]
        if (int(major), int(minor)) < _OLDEST:
            raise ImportError(f"version {library.__version__}")
        return import_without_compiler(f"transformers.{part}") if part else library
    except ImportError as error:
        oldest = ".".join(map(str, _OLDEST))
        raise ModelError(
            f"expected transformers {oldest} or newer for hf: models, found it missing ({error}); "
            "type pip install 'vitlens[hf]'"
        ) from error


@contextmanager
def quietly() -> Iterator[None]:
    """Silence transformers and the hub's client; their settings are restored."""
    log = transformers("utils.logging")
    level = log.get_verbosity()
    bars = log.is_progress_bar_enabled()
    log.set_verbosity(logging.CRITICAL)
    log.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.set_verbosity(level)
        if bars:
            log.enable_progress_bar()


def find(name: str, short_name: str, *, weights: bool) -> tuple[Path, str]:
    """Return the folder of `hf:FOLDER`, or that of `hf:REPO` from the hub or its cache.

    The second value describes the revision on the hub; it is "" for a folder. Raises ModelError for
    a name that is neither, and if the hub cannot be reached.

    short_name: the name without the prefix.
    weights: whether the weights are needed.
    """
    path = Path(short_name).expanduser()
    if short_name and path.is_dir():
        if is_adapter(path):  # its weights would be left out
            raise ModelError(
                f"expected a whole model in {name}, found {ADAPTER_CONFIG}, an adapter; write "
                f"hf:{base_of(path)}@{path}"
            )
        return path, ""
    is_path = path.exists() or short_name.startswith((".", "~", "/"))
    is_repository = _REPO.fullmatch(short_name) is not None and ".." not in short_name
    if is_path or not is_repository:
        content = "a file" if path.is_file() else "nothing there"
        raise ModelError(
            f"expected hf:FOLDER, or hf:REPO as OWNER/NAME on {endpoint()}, found {content} at "
            f"{short_name[:200]!r}"
        )
    advice = "download it where there is a network, and give its folder: hf:FOLDER"
    with quietly(), pretrained_download(name, f"{endpoint()}/{short_name}", advice=advice):
        from huggingface_hub import snapshot_download

        patterns = list(SETTINGS)
        if weights:
            patterns += [_WEIGHTS, _WEIGHTS_PARTS]
        folder = Path(snapshot_download(short_name, allow_patterns=patterns, etag_timeout=5))
    return folder, f"revision {folder.name} of {short_name} on {endpoint()}"


def read_state(folder: Path, name: str) -> tuple[dict[str, Tensor], str]:
    """Return the safetensors weights, and the SHA-256 of their files' contents one after another.

    Raises ModelError for a folder without them.
    """
    files = sorted(folder.glob(_WEIGHTS)) or sorted(folder.glob(_WEIGHTS_PARTS))
    if not files:
        pickles = []
        for pattern in _PICKLES:
            pickles += sorted(folder.glob(pattern))
        content = "none"
        if pickles:
            content = f"only {pickles[0].name}, which could run code when it is read"
        raise ModelError(
            f"expected {_WEIGHTS} in {name}, found {content}; model.save_pretrained(FOLDER) of "
            "transformers writes it from a model that you trust "
            f"({argument('random_weights', True)} needs none)"
        )
    state: dict[str, Tensor] = {}
    digest = hashlib.sha256()
    for file in files:
        state |= read_weights(file).state
        with file.open("rb") as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
    return state, digest.hexdigest()


def read_preprocessing(
    folder: Path, native: Size, request: ModelRequest
) -> tuple[Preprocessing, list[str]]:
    """Return the preprocessing of a folder's image processor, and notes for the provenance.

    A processor may be missing, or do more than resize, crop, scale and normalise. It is then
    replaced by the request's mean, deviation and size, if it has all of them. Raises ModelError
    and UnsupportedError.

    native: the image size in the configuration of the model.
    """
    name = request.name
    try:
        if not any(folder.glob("*processor_config.json")):
            raise UnsupportedError(
                f"expected an image processor (preprocessor_config.json) in {name}, found none"
            )
        with (
            in_one_line("an image processor of transformers", f"see {name}", UnsupportedError),
            quietly(),
        ):
            processor: Any = transformers().AutoImageProcessor.from_pretrained(
                str(folder), local_files_only=True, trust_remote_code=False
            )
        with in_one_line(
            "sizes, factors, means and deviations as numbers", f"see the image processor of {name}"
        ):
            fields, notes = _read_processor(processor)
    except UnsupportedError as error:
        if not (request.mean and request.std and request.image_size):
            names = f"{argument('mean')}, {argument('std')} and {argument('image_size')}"
            advice = f"give the preprocessing of its training with {names}"
            raise UnsupportedError(f"{error}; {advice}") from error
        preprocessing = Preprocessing(
            size=request.image_size,
            resize=None,
            interpolation="bilinear",
            mean=request.mean,
            std=request.std,
        )
        return preprocessing, [
            f"preprocessing as the user gave it, with bilinear resizing assumed; {error}"
        ]
    preprocessing = read_as(
        Preprocessing, fields, source=f"the image processor of {name}", error=ModelError
    )
    if not processor.do_resize:
        preprocessing = preprocessing.at_size(native)
        notes.append(
            "the configuration does not resize images; they are resized to the model's size"
        )
    if request.image_size not in (None, preprocessing.size):
        preprocessing = preprocessing.at_size(request.image_size)
    return preprocessing, notes


def _read_processor(processor: Any) -> tuple[dict[str, object], list[str]]:
    """Return the steps of a processor as fields of a Preprocessing, and notes.

    Raises UnsupportedError for a processor that does more than resize, crop, scale and normalise.
    """
    class_name = type(processor).__name__
    family = re.sub("ImageProcessor(Fast|Pil)?$", "", class_name)
    handled = _EFFICIENTNET_STEPS if family == "EfficientNet" else ()
    steps = [
        step for step in _OTHER_STEPS if step not in handled and getattr(processor, step, None)
    ]
    if steps or family not in _PLAIN:
        supported = ", ".join(f"{plain}ImageProcessor" for plain in _PLAIN)
        raise UnsupportedError(
            "expected an image processor that only resizes, crops and normalises, found "
            f"{' '.join((class_name, *steps))}; known: {supported}"
        )
    filter_number = processor.resample
    if filter_number not in _RESAMPLING:
        raise UnsupportedError(
            f"expected resampling by a filter of Pillow, 0 to 5, found {short(str(filter_number))}"
        )
    if processor.size.shortest_edge and processor.size.longest_edge:
        raise UnsupportedError("expected a size of one edge, found shortest_edge and longest_edge")

    fields, notes = _geometry(processor, family)
    mean, std = _normalisation(processor)
    fields["interpolation"] = _RESAMPLING[filter_number]
    fields["mean"] = mean
    fields["std"] = std
    return fields, notes


def _geometry(processor: Any, family: str) -> tuple[dict[str, object], list[str]]:
    """Return a processor's resizing and cropping as fields of a Preprocessing, and notes.

    A processor resizes to a short side or to a full size. It may then crop the centre.

    family: the beginning of the name of the processor's class, such as "ConvNext".
    """
    # a processor has one of the two; the other one is None
    short_side = processor.size.shortest_edge
    full_size = _height_and_width(processor.size)
    crop = None
    if getattr(processor, "do_center_crop", False):
        crop = _height_and_width(processor.crop_size)
    notes = []
    if family == "ConvNext":
        # a size is that of the crop: from 384 px on, the image is squashed to it
        crop = (short_side, short_side)
        if short_side >= _UNCROPPED:
            full_size = crop
        else:
            short_side = int(short_side / float(processor.crop_pct))
    elif family == "Levit" and short_side:
        # the short side is enlarged by a fixed factor, then cropped
        short_side = int(_LEVIT_SCALE * short_side)
    elif family == "PoolFormer" and processor.crop_pct is not None:
        # a size is that of the crop: the image is resized to more
        short_side, full_size = _scaled_size(short_side, full_size, float(processor.crop_pct))
    if crop is None and full_size:  # the whole resized image
        crop = full_size
    elif crop is None:
        crop = (short_side, short_side)
        notes.append("the configuration does not crop; here the centre is cropped to a square")
    if full_size == crop:  # nothing is cut off
        return {"size": crop}, notes

    fields: dict[str, object] = {"size": crop, "crop_offset": "floor"}
    if full_size:
        fields |= {"box": full_size, "crop_mode": "squash"}
    else:
        fields["resize"] = short_side
    # of the size after resizing: of all images, a square one becomes smallest
    smallest_resized = full_size or (short_side, short_side)
    if None not in smallest_resized and min(smallest_resized) < max(crop):
        fields["fill"] = _BLACK  # around an image that is smaller than the crop
    return fields, notes


def _scaled_size(
    short_side: int | None, full_size: Size | None, crop_fraction: float
) -> tuple[int | None, Size | None]:
    """Return PoolFormer's short side, or the full size, before its crop.

    A square size counts as a short side.
    """
    if short_side:
        return int(short_side / crop_fraction), None
    assert full_size is not None
    height, width = full_size
    if height == width:
        return int(height / crop_fraction), None
    return None, (int(height / crop_fraction), int(width / crop_fraction))


def _normalisation(processor: Any) -> tuple[list[float], list[float]]:
    """Return the mean and the deviation for pixels in [0, 1], per channel.

    A processor computes (255 x factor - offset - mean) / std, with its factor, mean and std.
    """
    factor = 255.0
    offset = 0.0
    if processor.do_rescale:
        factor *= processor.rescale_factor
        if getattr(processor, "rescale_offset", None):
            offset = 1.0
    if math.isclose(factor, 1, rel_tol=1e-9):  # the processor's factor is a rounded 1/255
        factor = 1.0
    means = [0.0] * 3
    deviations = [1.0] * 3
    if processor.do_normalize:
        means = _triple(processor.image_mean)
        deviations = _triple(processor.image_std)
    if getattr(processor, "include_top", None):  # EfficientNet divides by the deviation once more
        top_deviations = _triple(processor.image_std)
        deviations = [std * top_std for std, top_std in zip(deviations, top_deviations)]
    # (factor x - offset - mean) / std = (x - (mean + offset) / factor) / (std / factor)
    mean = [(channel + offset) / factor for channel in means]
    return mean, [channel / factor for channel in deviations]


def _triple(numbers: Any) -> list[float]:
    """Return one number for each channel, from three or from one for all."""
    if isinstance(numbers, int | float):
        return [float(numbers)] * 3
    return [float(number) for number in numbers]


def _height_and_width(size: Any) -> Size | None:
    """Return (height, width) of transformers' SizeDict; None if it only has a short side."""
    if size is None or size.height is None or size.width is None:
        return None
    return size.height, size.width
