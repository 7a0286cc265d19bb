"""What config.json and the image processor of a folder say, through transformers' Auto classes; refusals by name."""

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from vitlens.errors import InputError, ModelError, UnsupportedError
from vitlens.labels import imagenet_classes
from vitlens.models.kernels import OBSERVABLE
from vitlens.models.sources.huggingface.folder import CONFIG, PROCESSORS, Folder, first_line, quietly, transformers
from vitlens.models.sources.registry import ModelRequest
from vitlens.preprocessing import Interpolation, Preprocessing
from vitlens.typed import parse_json, read_as, short

Output = Literal["logits", "cls", "pooler", "embedding"]  # what a model gives: see TransformersModule

_BACKBONES: Final = (  # model types whose class without a classifier is known here
    "vit", "deit", "beit", "dinov2", "dinov2_with_registers", "dinov3_vit", "dinov3_convnext", "clip_vision_model",
    "siglip_vision_model", "swin", "swinv2", "convnext", "convnextv2",
)  # fmt: skip
CLS_ONLY: Final = ("vit", "deit")  # their learned pooler is not used, and many repositories lack it
_TOWERS: Final = {"clip": "clip_vision_model", "siglip": "siglip_vision_model"}
WHOLE: Final = ("CLIPModel", "SiglipModel")  # with a text tower
_PROJECTED: Final = "CLIPVisionModelWithProjection"
_REFUSED: Final = {
    "siglip2": "SigLIP 2 NaFlex, whose images have no fixed size; take a fixed resolution (siglip2-base-patch16-224)",
    "siglip2_vision_model": "SigLIP 2 NaFlex, whose images have no fixed size; take a fixed resolution",
    "timm_wrapper": "a model of timm; load it as timm:NAME",
    "perceiver": "a Perceiver, which has several inputs",
    "imagegpt": "ImageGPT, whose input is colour clusters",
    "shieldgemma2": "ShieldGemma 2, which takes texts as well",
}
# what would have transformers read other files, other kernels or other code than the ones chosen here
_DROPPED: Final = (
    "auto_map", "attn_implementation", "_attn_implementation", "_attn_implementation_internal", "fusion_config",
    "transformers_weights", "distributed_config", "torchscript", "return_dict", "use_return_dict", "torch_dtype",
    "dtype", "output_attentions", "output_hidden_states", "gradient_checkpointing", "_name_or_path", "name_or_path",
    "transformers_version", "_commit_hash", "label2id", "use_kernels", "kernel_config",
)  # fmt: skip
_TOO_DEEP: Final = re.compile(r'(layers|depths)": (\[[\d, ]*?)?\d{4,}')  # in a configuration: 1,000 layers or more
_SERIALISED: Final = 4000  # characters of a configuration that a saved model carries
_FEATURES: Final = {
    "cls": "the CLS token after the last norm, without the learned pooler",
    "pooler": "transformers' pooler_output",
    "embedding": "the image embedding, transformers' image_embeds",
}

# processors that only resize, crop, scale and normalise
_PLAIN: Final = ("ViT", "DeiT", "CLIP", "Siglip", "Beit", "Bit", "ConvNext", "DINOv3ViT")
_OTHER_STEPS: Final = ("do_pad", "do_flip_channel_order", "rescale_offset", "include_top", "do_color_quantize")
_RESAMPLING: Final[Mapping[int, Interpolation]] = {2: "bilinear", 3: "bicubic"}
_OTHER_RESAMPLING: Final = {0: "nearest", 1: "Lanczos", 4: "box", 5: "Hamming"}
_FULL: Final = 384  # px: ConvNeXt's processor does not crop from this size on (its crop_pct)
_ADVICE: Final = "give the preprocessing of its training with --mean, --std and --image-size"
Size = tuple[int, int]


@dataclass(frozen=True)
class Description:
    """What config.json describes: a class of transformers, its configuration, and what the model gives.

    class_name: of transformers; fields: the configuration, without what is not read; output: see TransformersModule;
    labels: of its classes, empty for features or where they are only numbered; notes: for the provenance.
    """

    class_name: str
    fields: Mapping[str, Any]
    output: Output
    labels: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def config(self, *, classes: int | None = None) -> Any:
        """transformers' configuration. Raises ModelError for values that its class refuses."""
        fields = dict(self.fields)
        if classes is not None:
            fields |= {"num_labels": classes}
            fields.pop("id2label", None)
        try:
            with quietly():
                return getattr(transformers(), self.class_name).config_class.from_dict(fields)
        except Exception as error:  # validators of transformers raise many types
            raise ModelError(
                f"expected a configuration of {self.class_name}, found: {first_line(error)}; check {CONFIG}"
            ) from error

    def serialised(self) -> str | None:
        """The configuration as JSON, as far as it differs from transformers' defaults and without labels, for models
        that are saved; None where it is too long for that."""
        with quietly():
            changed = self.config().to_diff_dict()
        fields = {key: value for key, value in changed.items() if key not in (*_DROPPED, "id2label", "architectures")}
        kind = {"model_type": self.fields["model_type"]}
        text = json.dumps(fields | kind, sort_keys=True, separators=(",", ":"))
        return text if len(text) <= _SERIALISED else None


def describe(folder: Folder) -> Description:
    """The description of a folder. Raises ModelError, one line, for what cannot be loaded."""
    fields = folder.read(CONFIG)
    if fields is None:
        raise ModelError(
            f"expected {CONFIG} in {folder.name}, found none; a folder of transformers' save_pretrained has it"
        )
    return _described(fields, folder.name, texts=folder.has_tokenizer)


def described_again(class_name: str, text: str) -> Description:
    """The description of a saved model. Raises ModelError for one that no vitlens wrote."""
    fields = parse_json(text, source="the description of a transformers model", error=ModelError)
    if not isinstance(fields, dict):
        raise ModelError("expected a configuration of transformers, found something else; take another copy")
    found = _described(fields | {"architectures": [class_name]}, class_name)
    if found.class_name != class_name:
        raise ModelError(
            f"expected {class_name[:60]!r} in the description, found {found.class_name}; take another copy"
        )
    return found


def _described(fields: Mapping[str, Any], name: str, *, texts: bool = False) -> Description:
    """The description of a configuration. name: of the model, for messages; texts: whether its texts can be read."""
    kind, architectures = fields.get("model_type"), fields.get("architectures") or []
    if not isinstance(kind, str) or not isinstance(architectures, list):
        raise ModelError(f"expected {CONFIG} of transformers in {name}, found one without a model_type")
    wanted = str(architectures[0])[:100] if architectures else ""
    _require_loadable(fields, kind, name)
    class_name, output, inner = _class_of(fields, kind, wanted, name, texts=texts)
    inner = {key: value for key, value in inner.items() if key not in _DROPPED}
    if inner.get("num_channels", 3) != 3:
        raise ModelError(f"expected 3 channels in {CONFIG} of {name}, found {short(str(inner['num_channels']))}")
    if found := _TOO_DEEP.search(json.dumps(inner)):  # even an empty one would take minutes to build
        raise ModelError(f"expected at most 999 layers in {CONFIG} of {name}, found {short(found[0])}")
    labels = _labels(fields.get("id2label"), name) if output == "logits" else ()
    return Description(class_name, inner, output, labels, tuple(_notes(fields, class_name, output, wanted)))


def _require_loadable(fields: Mapping[str, Any], kind: str, name: str) -> None:
    if kind in _REFUSED:
        raise UnsupportedError(f"expected a model of images of one size, found {_REFUSED[kind]} (in {name})")
    if kind not in _BACKBONES and kind not in _TOWERS and not _classifiers(kind):
        remote = "; its code (auto_map) is never run" if "auto_map" in fields else ""
        raise UnsupportedError(
            f"expected a vision model that transformers itself has, found model_type {kind[:60]!r} in {name}{remote}; "
            f"known: {', '.join((*_BACKBONES, *_TOWERS))} and transformers' image classifiers"
        )
    if fields.get("quantization_config"):
        raise UnsupportedError(f"expected weights of floating-point numbers in {name}, found quantization_config")
    if fields.get("problem_type") in ("multi_label_classification", "regression"):
        raise UnsupportedError(
            f"expected logits of classes that exclude each other, found {fields['problem_type']} in {name}"
        )


def _class_of(
    fields: Mapping[str, Any], kind: str, wanted: str, name: str, *, texts: bool
) -> tuple[str, Output, Mapping[str, Any]]:
    """The class, what its model gives, and its own configuration: as AutoModelForImageClassification and AutoModel."""
    if wanted in _classifiers(kind):
        return wanted, "logits", fields
    if texts and wanted in WHOLE:
        return wanted, "embedding", fields
    if kind in _TOWERS:
        inner = fields.get("vision_config")
        if not isinstance(inner, dict):
            raise ModelError(f"expected vision_config in {CONFIG} of {name}, found none")
        kind = _TOWERS[kind]
        fields = {**inner, "model_type": kind}
    if wanted == _PROJECTED and kind == "clip_vision_model":
        return wanted, "embedding", fields
    if kind not in _BACKBONES:
        raise UnsupportedError(
            f"expected an image classifier or the backbone of a known family in {name}, found {wanted or kind!r}"
        )
    class_name = transformers("models.auto.modeling_auto").MODEL_MAPPING_NAMES[kind]
    return class_name, "cls" if kind in CLS_ONLY else "pooler", fields


def _classifiers(kind: str) -> tuple[str, ...]:
    names = transformers("models.auto.modeling_auto").MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES.get(kind, ())
    return (names,) if isinstance(names, str) else tuple(names)


def _notes(fields: Mapping[str, Any], class_name: str, output: Output, wanted: str) -> Iterator[str]:
    if class_name in WHOLE:
        yield f"the towers of images and texts of {class_name}"
    elif output != "logits":
        yield f"{class_name} has no classifier; features: {_FEATURES[output]}"
    if wanted and wanted != class_name:
        yield f"took {class_name} from {wanted}"
    if "auto_map" in fields:
        yield "the remote code that the configuration names (auto_map) was not run; transformers' own class was used"
    kernel = fields.get("_attn_implementation") or fields.get("attn_implementation")
    if isinstance(kernel, str) and kernel not in OBSERVABLE:
        yield f"loaded with an attention that can be observed, not {short(kernel)!r}, which the configuration asks for"


def _labels(labels: object, name: str) -> tuple[str, ...]:
    """The labels in order; those of ImageNet by the names that other models have. Empty where they are only numbers."""
    if labels is None:
        return ()
    if not isinstance(labels, dict):
        raise ModelError(f"expected id2label as an object in {CONFIG} of {name}, found something else")
    try:
        texts = tuple(str(labels[str(index)]) for index in range(len(labels)))
    except KeyError as error:
        raise ModelError(
            f"expected id2label from 0 to {len(labels) - 1} in {CONFIG} of {name}, found no {error}"
        ) from error
    if all(text == f"LABEL_{index}" for index, text in enumerate(texts)):
        return ()
    # transformers has ImageNet's labels in a longer form ("tench, Tinca tinca")
    imagenet = len(texts) == 1000 and texts[0].startswith("tench") and texts[999].startswith("toilet tissue")
    return imagenet_classes() if imagenet else texts


def read_preprocessing(
    folder: Folder, kind: str, native: Size, request: ModelRequest
) -> tuple[Preprocessing, tuple[str, ...]]:
    """The preprocessing of a folder's image processor, else of the model type's own, and notes for the provenance.

    A processor that is missing or does more than resize, crop, scale and normalise is replaced by what the request
    says, if it has the mean, the deviation and the size. native: the size of the configuration. Raises ModelError and
    UnsupportedError.
    """
    stored = any((folder.path / file).is_file() for file in PROCESSORS)
    try:
        processor, name = _processor(folder, kind, stored=stored)
        preprocessing, notes = _read(processor, name, folder.name, native, request.image_size, stored=stored)
    except UnsupportedError as error:
        if not (request.mean and request.std and request.image_size):
            raise UnsupportedError(f"{error}; {_ADVICE}") from error
        preprocessing = Preprocessing(request.image_size, None, "bilinear", request.mean, request.std)
        return preprocessing, (f"preprocessing as the user gave it, with bilinear resizing assumed; {error}",)
    return preprocessing, tuple(notes)


def _processor(folder: Folder, kind: str, *, stored: bool) -> tuple[Any, str]:
    """transformers' image processor, with its name without the back end. Raises UnsupportedError for one that is not
    plain, and where there is none."""
    name = ""
    try:
        with quietly():
            if stored:
                processor: Any = transformers().AutoImageProcessor.from_pretrained(
                    str(folder.path), local_files_only=True, trust_remote_code=False
                )
                name = type(processor).__name__
            else:
                known = transformers("models.auto.image_processing_auto").IMAGE_PROCESSOR_MAPPING_NAMES
                family = known.get(kind) or known.get(kind.removesuffix("_vision_model")) or {}
                name = str(family.get("torchvision") or "")
                processor = getattr(transformers(), name)() if _is_plain(name) else None
    except Exception as error:  # transformers raises many types
        for file in PROCESSORS:
            folder.read(file)  # says what is wrong with JSON
        raise UnsupportedError(
            f"expected an image processor of transformers in {folder.name}, found: {first_line(error)}"
        ) from error
    if not _is_plain(name):
        raise UnsupportedError(
            f"expected an image processor that only resizes, crops and normalises, found {short(name) or 'none'!r} in "
            f"{folder.name}; known: {', '.join(f'{plain}ImageProcessor' for plain in _PLAIN)}"
        )
    return processor, name


def _is_plain(name: str) -> bool:
    return re.sub("ImageProcessor(Fast|Pil)?$", "", name) in _PLAIN


def _read(
    processor: Any, kind: str, name: str, native: Size, image_size: Size | None, *, stored: bool
) -> tuple[Preprocessing, list[str]]:
    """What a plain processor does, and notes. stored: whether the folder has it."""
    for step in _OTHER_STEPS:
        if getattr(processor, step, None):
            raise UnsupportedError(f"expected images that are resized, cropped and normalised, found {step} in {name}")
    notes = [] if stored else [f"no {PROCESSORS[0]}: preprocessing by transformers' {kind}"]
    try:
        size, resize, more = _sizes(kind, processor, fallback=None if stored else native)
    except (TypeError, ValueError, ArithmeticError) as error:
        raise ModelError(f"expected sizes in pixels in {PROCESSORS[0]} of {name}, found {error}") from error
    notes += more
    if not processor.do_resize:
        size, resize = native, None
        notes.append("the configuration does not resize images; they are resized to the model's size")
    if image_size is not None and image_size != size:
        size, resize = image_size, None
    number = processor.resample
    if number not in _RESAMPLING:
        other = _OTHER_RESAMPLING.get(number, short(str(number)))
        raise UnsupportedError(f"expected bilinear (2) or bicubic (3) resampling in {name}, found {other}")
    mean, std = _normalisation(processor, name)
    fields = {"size": size, "resize": resize, "interpolation": _RESAMPLING[number], "mean": mean, "std": std}
    try:
        return read_as(Preprocessing, fields, source=f"{PROCESSORS[0]} of {name}", error=ModelError), notes
    except InputError as error:
        raise ModelError(str(error)) from error


def _sizes(kind: str, processor: Any, *, fallback: Size | None) -> tuple[Size, int | None, list[str]]:
    """The input (height, width), the short side before the crop, and notes. fallback: the input where no file says."""
    side, whole, notes = processor.size.shortest_edge, _whole(processor.size), []
    if side is None and whole is None:
        raise ValueError(short(str(dict(processor.size))))
    crops = getattr(processor, "do_center_crop", False) and _whole(processor.crop_size)
    crop: Size
    resize: int | None
    if kind.startswith("ConvNext"):
        if side is None:
            raise ValueError("a size without shortest_edge")
        crop, resize = (side, side), None if side >= _FULL else int(side / float(processor.crop_pct))
    elif crops:
        crop, resize = crops, side if whole is None else None if whole == crops else min(whole)
        if resize is not None and resize < min(crop):
            raise ValueError(f"a crop of {crop[0]}x{crop[1]} px out of {resize} px, which would be padded")
    else:
        crop, resize = whole or (side, side), side if whole is None else None
    if fallback is not None and fallback != crop:
        resize = None if resize is None else round(resize * min(fallback) / min(crop))
        crop = fallback
    if whole is not None and resize is not None:
        notes.append(
            f"the configuration resizes to {whole[0]}x{whole[1]} px, whatever the proportions; here the short side is "
            "resized, which is the same for square images"
        )
    if whole is None and resize is not None and not kind.startswith("ConvNext") and not crops:
        notes.append("the configuration does not crop; here the centre is cropped to a square")
    return crop, resize, notes


def _whole(size: Any) -> Size | None:
    """(height, width) of transformers' SizeDict; None where it only has a short side."""
    if size is None or size.height is None or size.width is None:
        return None
    return size.height, size.width


def _normalisation(processor: Any, name: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and deviation for pixels in [0, 1]: (255 x factor - mean) / std, with the file's factor, mean and std."""
    stored = processor.rescale_factor if processor.do_rescale else 1.0
    if not isinstance(stored, int | float) or not stored > 0:
        raise ModelError(f"expected a positive rescale_factor in {PROCESSORS[0]} of {name}, found {short(str(stored))}")
    factor = 255.0 * stored
    factor = 1.0 if math.isclose(factor, 1, rel_tol=1e-9) else factor
    if not processor.do_normalize:
        return (0.0, 0.0, 0.0), (1 / factor, 1 / factor, 1 / factor)
    triples = [[value] * 3 if isinstance(value, int | float) else value
               for value in (processor.image_mean, processor.image_std)]  # fmt: skip
    try:
        mean, std = (tuple(float(number) / factor for number in triple) for triple in triples)
    except (TypeError, ValueError) as error:
        raise ModelError(
            f"expected image_mean and image_std of three numbers in {PROCESSORS[0]} of {name}, found others"
        ) from error
    return mean, std
