"""config.json, as data: which of transformers' own classes it describes, its labels, and what is refused by name."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from vitlens.errors import ModelError, UnsupportedError
from vitlens.labels import imagenet_classes
from vitlens.models.kernels import OBSERVABLE
from vitlens.models.sources.huggingface.folder import CONFIG, Folder
from vitlens.models.sources.huggingface.library import quietly, transformers
from vitlens.models.vit_config import CLASSES
from vitlens.typed import parse_json, short

Output = Literal["logits", "cls", "pooler", "embedding"]  # what a model gives: see TransformersModule

# the classes without a classifier, by the configuration's model_type; "tower": what the whole model's configuration
# calls that of its images
_HEADLESS: Final[Mapping[str, tuple[str, Output]]] = {
    "vit": ("ViTModel", "cls"),
    "deit": ("DeiTModel", "cls"),
    "beit": ("BeitModel", "pooler"),
    "dinov2": ("Dinov2Model", "pooler"),
    "dinov2_with_registers": ("Dinov2WithRegistersModel", "pooler"),
    "dinov3_vit": ("DINOv3ViTModel", "pooler"),
    "dinov3_convnext": ("DINOv3ConvNextModel", "pooler"),
    "clip_vision_model": ("CLIPVisionModel", "pooler"),
    "siglip_vision_model": ("SiglipVisionModel", "pooler"),
    "swin": ("SwinModel", "pooler"),
    "swinv2": ("Swinv2Model", "pooler"),
    "convnext": ("ConvNextModel", "pooler"),
    "convnextv2": ("ConvNextV2Model", "pooler"),
}
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
_LAYERS: Final = 1000  # most layers of a model: a configuration of more would take minutes to build, even empty
_NUMBER: Final = 1 << 24  # most of any whole number in a configuration
_SERIALISED: Final = 4000  # characters of a configuration that a saved model carries


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

    @property
    def model_type(self) -> str:
        """Of the configuration, as transformers calls the family ("vit")."""
        return str(self.fields["model_type"])

    def config(self, *, classes: int | None = None) -> Any:
        """transformers' configuration. Raises ModelError for values that its class refuses."""
        kind = getattr(transformers(), self.class_name)
        fields = dict(self.fields) | ({} if classes is None else {"num_labels": classes})
        if classes is not None:
            fields.pop("id2label", None)
        try:
            with quietly():
                return kind.config_class.from_dict(fields)
        except Exception as error:  # validators of transformers raise many types
            raise ModelError(
                f"expected a configuration of {self.class_name}, found: {_line(error)}; check {CONFIG}"
            ) from error

    def serialised(self) -> str | None:
        """The configuration as JSON, as far as it differs from transformers' defaults and without labels, for models
        that are saved; None where it is too long for that."""
        with quietly():
            changed = self.config().to_diff_dict()
        fields = {key: value for key, value in changed.items() if key not in (*_DROPPED, "id2label", "architectures")}
        text = json.dumps(fields | {"model_type": self.model_type}, sort_keys=True, separators=(",", ":"))
        return text if len(text) <= _SERIALISED else None


def describe(folder: Folder) -> Description:
    """The description of a folder. Raises ModelError, one line, for what cannot be loaded."""
    fields = folder.read(CONFIG)
    if fields is None:
        raise ModelError(
            f"expected {CONFIG} in {folder.name}, found none; a folder of transformers' save_pretrained has it"
        )
    return describe_fields(fields, folder.name, texts=folder.has_tokenizer)


def describe_fields(fields: Mapping[str, Any], name: str, *, texts: bool = False) -> Description:
    """The description of a configuration. name: of the model, for messages; texts: whether its texts can be read."""
    kind = fields.get("model_type")
    architectures = fields.get("architectures") or []
    if not isinstance(kind, str) or not isinstance(architectures, list):
        raise ModelError(f"expected {CONFIG} of transformers in {name}, found one without a model_type")
    wanted = str(architectures[0])[:100] if architectures else ""
    _require_loadable(fields, kind, name)
    class_name, output, inner = _class_of(fields, kind, wanted, name, texts=texts)
    inner = {key: value for key, value in inner.items() if key not in _DROPPED}
    _require_bounds(inner, name)
    notes = tuple(_notes(fields, class_name, output, wanted))
    labels = _labels(fields.get("id2label"), name) if output == "logits" else ()
    return Description(class_name, inner, output, labels, notes)


def described_again(class_name: str, text: str) -> Description:
    """The description of a saved model. Raises ModelError for one that no vitlens wrote."""
    fields = parse_json(text, source="the description of a transformers model", error=ModelError)
    if not isinstance(fields, dict):
        raise ModelError("expected a configuration of transformers, found something else; take another copy")
    found = describe_fields(fields | {"architectures": [class_name]}, class_name)
    if found.class_name != class_name:
        raise ModelError(
            f"expected {class_name[:60]!r} in the description, found {found.class_name}; take another copy"
        )
    return found


def _require_loadable(fields: Mapping[str, Any], kind: str, name: str) -> None:
    if kind in _REFUSED:
        raise UnsupportedError(f"expected a model of images of one size, found {_REFUSED[kind]} (in {name})")
    if kind not in _HEADLESS and kind not in _TOWERS and not _classifiers(kind):
        remote = "; its code (auto_map) is never run" if "auto_map" in fields else ""
        raise UnsupportedError(
            f"expected a vision model that transformers itself has, found model_type {kind[:60]!r} in {name}{remote}; "
            f"known: {', '.join((*_HEADLESS, *_TOWERS))} and transformers' image classifiers"
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
    """The class, what its model gives, and its own configuration."""
    if wanted in _classifiers(kind):
        return wanted, "logits", fields
    if texts and wanted in WHOLE:
        return wanted, "embedding", fields
    if kind in _TOWERS:
        tower, inner = _TOWERS[kind], fields.get("vision_config")
        if not isinstance(inner, dict):
            raise ModelError(f"expected vision_config in {CONFIG} of {name}, found none")
        fields, kind = {**inner, "model_type": tower}, tower
    if wanted == _PROJECTED and kind == "clip_vision_model":
        return wanted, "embedding", fields
    if kind not in _HEADLESS:
        raise UnsupportedError(
            f"expected an image classifier or the backbone of a known family in {name}, found {wanted or kind!r}"
        )
    class_name, output = _HEADLESS[kind]
    return class_name, output, fields


def _classifiers(kind: str) -> tuple[str, ...]:
    names = transformers("models.auto.modeling_auto").MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES.get(kind, ())
    return (names,) if isinstance(names, str) else tuple(names)


def _require_bounds(fields: object, name: str, key: str = "") -> None:
    """Refuse numbers of which a model could not be built in memory or in time."""
    if isinstance(fields, dict):
        for inner, value in fields.items():
            _require_bounds(value, name, str(inner))
    elif isinstance(fields, list):
        for value in fields:
            _require_bounds(value, name, key)
    elif isinstance(fields, int) and not isinstance(fields, bool):
        most = _LAYERS if re.search(r"layers|depths", key) else _NUMBER
        if abs(fields) > most or (key == "num_channels" and fields != 3):
            expected = "3 channels" if key == "num_channels" else f"numbers of at most {most:,}"
            raise ModelError(f"expected {expected} in {CONFIG} of {name}, found {short(key)} {fields:,}")


def _notes(fields: Mapping[str, Any], class_name: str, output: Output, wanted: str) -> Iterator[str]:
    texts = {
        "cls": "features: the CLS token after the last norm, without the learned pooler",
        "pooler": "features: transformers' pooler_output",
        "embedding": "features: the image embedding, transformers' image_embeds",
    }
    if class_name in WHOLE:
        yield f"the towers of images and texts of {class_name}"
    elif output != "logits":
        yield f"{class_name} has no classifier; {texts[output]}"
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
    if not isinstance(labels, dict) or not 0 < len(labels) <= CLASSES:
        raise ModelError(f"expected id2label of 1 to {CLASSES:,} labels in {CONFIG} of {name}, found something else")
    try:
        ordered = [labels[str(index)] for index in range(len(labels))]
    except KeyError as error:
        raise ModelError(
            f"expected id2label from 0 to {len(labels) - 1} in {CONFIG} of {name}, found no {error}"
        ) from error
    if not all(isinstance(label, str | int) and len(str(label)) <= 1000 for label in ordered):
        raise ModelError(f"expected labels of at most 1,000 characters in {CONFIG} of {name}, found others")
    texts = tuple(str(label) for label in ordered)
    if all(re.fullmatch(rf"LABEL_{index}", text) for index, text in enumerate(texts)):
        return ()
    return imagenet_classes() if is_imagenet(texts) else texts


def is_imagenet(labels: tuple[str, ...]) -> bool:
    """Whether labels are ImageNet-1k's in its order, in transformers' longer form ("tench, Tinca tinca")."""
    return len(labels) == 1000 and labels[0].startswith("tench") and labels[999].startswith("toilet tissue")


def _line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:160]
