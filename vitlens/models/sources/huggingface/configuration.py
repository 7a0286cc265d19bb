"""Configurations of transformers: the class, fields, output and labels of the model described.

`describe_config` turns the fields of a config.json into a `ModelDescription`, which builds the
model. The file may be anybody's: only known fields are used, and its code is never run.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import torch
from torch import Tensor

from vitlens.errors import ModelError, UnsupportedError, in_one_line
from vitlens.models.adapters import Adapter
from vitlens.models.configs import CLASSES
from vitlens.models.fitting import fit_names
from vitlens.models.library_folders import weights_inside
from vitlens.models.rebuild import Architecture
from vitlens.models.sources.huggingface.files import CONFIG, quietly, transformers
from vitlens.models.wrap import OBSERVABLE
from vitlens.names import imagenet_classes
from vitlens.typed import short

# TransformersModule in modules.py says what each output is
Output = Literal["logits", "cls", "pooler", "embedding"]
Size = tuple[int, int]

# model types whose class without a classifier is known here
_BACKBONES: Final = (
    "vit",
    "deit",
    "beit",
    "dinov2",
    "dinov2_with_registers",
    "dinov3_vit",
    "dinov3_convnext",
    "clip_vision_model",
    "siglip_vision_model",
    "swin",
    "swinv2",
    "convnext",
    "convnextv2",
)
# their learned pooler is not used, and many repositories lack it
_CLS_ONLY: Final = ("vit", "deit")
# model type of images and texts -> that of its image tower
_TOWERS: Final = {"clip": "clip_vision_model", "siglip": "siglip_vision_model"}
# classes with a text tower
WITH_TEXTS: Final = ("CLIPModel", "SiglipModel")
_NAFLEX: Final = (
    "SigLIP 2 NaFlex, whose images have no fixed size; take a fixed resolution "
    "(siglip2-base-patch16-224)"
)
# model type -> what it is, and what to load instead
_REFUSED: Final = {
    "siglip2": _NAFLEX,
    "siglip2_vision_model": _NAFLEX,
    "timm_wrapper": "a model of timm; load it as timm:NAME",
}
# fields with which transformers would read other files, kernels or code than those chosen here
_DROPPED: Final = (
    "auto_map",
    "attn_implementation",
    "_attn_implementation",
    "_attn_implementation_internal",
    "fusion_config",
    "transformers_weights",
    "distributed_config",
    "torchscript",
    "return_dict",
    "use_return_dict",
    "torch_dtype",
    "dtype",
    "output_attentions",
    "output_hidden_states",
    "gradient_checkpointing",
    "_name_or_path",
    "name_or_path",
    "transformers_version",
    "_commit_hash",
    "label2id",
    "use_kernels",
    "kernel_config",
)
# fields of a size, or of several in a list
_SIZES: Final = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_channels",
    "image_size",
    "patch_size",
    "projection_dim",
    "embed_dim",
    "hidden_sizes",
    "num_heads",
    "window_size",
)
# matches a configuration of 1,000 layers or more
_TOO_DEEP: Final = re.compile(r'(layers|depths)": (\[[\d, ]*?)?\d{4,}')
# by output: the attribute of transformers' result, and a description
FEATURES: Final = {
    "logits": ("logits", ""),
    "cls": ("last_hidden_state", "the CLS token after the last norm, without the learned pooler"),
    "pooler": ("pooler_output", "transformers' pooler_output"),
    "embedding": ("image_embeds", "the image embedding, transformers' image_embeds"),
}
_CLASSIFIER: Final = "classifier."  # prefix of the names of its tensors
_CLASS_LENGTH: Final = 100  # characters of a class name that are read
# a model may have twice as many parameters as the file, plus these
_EXTRA_PARAMETERS: Final = 1 << 26
_MOST_PARAMETERS: Final = 1 << 33  # of a model with random weights
# tensors that a file may lack
_HARMLESS: Final = (
    "position_ids",
    "relative_position_index",
    "relative_coords_table",
    "mask_token",
)


@dataclass(frozen=True)
class ModelDescription:
    """A model that a configuration describes.

    class_name: a class of transformers.
    fields: the fields of its configuration, only those that are read.
    output: the output of the model.
    notes: for the provenance.
    """

    class_name: str
    fields: Mapping[str, Any]
    output: Output
    notes: tuple[str, ...]

    def config(self, classes: int | None = None) -> Any:
        """Return transformers' configuration, with a number of classes (None: its default)."""
        fields = dict(self.fields)
        if classes is not None and self.output == "logits":
            fields.pop("id2label", None)
            fields["num_labels"] = classes
        with in_one_line(f"a configuration of {self.class_name}", f"check {CONFIG}"), quietly():
            return getattr(transformers(), self.class_name).config_class.from_dict(fields)

    def network(
        self, state: Mapping[str, Tensor] | None, name: str, classes: int | None = None
    ) -> Any:
        """Return transformers' model with weights as transformers stores them, or random ones.

        Raises ModelError for a configuration that cannot be built, and for weights that are missing
        or do not fit: transformers itself would replace them by random ones.
        """
        network_class = getattr(transformers(), self.class_name)
        config = self.config(classes)
        # other implementations cannot be observed
        config._attn_implementation = "sdpa" if network_class._supports_sdpa else "eager"
        options = {"add_pooling_layer": False} if self.output == "cls" else {}
        with in_one_line(f"transformers to build {self.class_name}", f"check {CONFIG}"), quietly():
            with torch.device("meta"):  # before any memory is allocated
                expected = network_class(config, **options).state_dict()
            _require_size(expected, state, name)
            if state is None:
                return network_class(config, **options)
            state, _ = fit_names(state, expected)
            model, info = network_class.from_pretrained(
                None,
                config=config,
                state_dict=dict(state),
                dtype=torch.float32,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
                local_files_only=True,
                use_safetensors=True,
                trust_remote_code=False,
                **options,
            )
        faults = _loading_faults(info)
        if faults:
            raise ModelError(
                f"weights do not fit {self.class_name} ({name}): {len(faults)} faults, first: "
                f"{faults[0]}; check the files of the folder"
            )
        return model

    def with_saved(self, state: Mapping[str, Tensor], adapter: Adapter) -> Mapping[str, Tensor]:
        """Return the base model's weights with the classifier of an adapter, if it has one.

        The weights of a backbone get the prefix that they have in the class with a classifier.
        """
        classifier = {
            name: value for name, value in adapter.saved.items() if name.startswith(_CLASSIFIER)
        }
        if not classifier:
            return state
        prefix = f"{getattr(transformers(), self.class_name).base_model_prefix}."
        if not any(name.startswith(prefix) for name in state):
            state = {f"{prefix}{name}": value for name, value in state.items()}
        return {**state, **classifier}

    def labels(self) -> tuple[str, ...]:
        """Return the names of the classes, in order; () for only numbers.

        ImageNet's classes have the names that other models have.
        """
        names: Mapping[int, object] = self.config().id2label
        if sorted(names) != list(range(len(names))):
            raise ModelError(
                f"expected id2label from 0 to {len(names) - 1} in {CONFIG}, found "
                f"{short(str([*names]))}"
            )
        texts = tuple(str(names[index]) for index in range(len(names)))
        if all(text == f"LABEL_{index}" for index, text in enumerate(texts)):
            return ()
        # transformers has ImageNet's labels in a longer form ("tench, Tinca tinca")
        has_ends = texts[0].startswith("tench") and texts[-1].startswith("toilet tissue")
        if len(texts) == len(imagenet_classes()) and has_ends:
            return imagenet_classes()
        return texts

    def architecture(self, name: str, classes: int, size: Size) -> Architecture | dict[str, object]:
        """Return the architecture from which `build` makes the same model.

        It has the fields of the configuration that differ from transformers' defaults, as JSON.
        For a model with a text tower it is one that `build` refuses: such models are not saved.
        """
        if self.class_name in WITH_TEXTS:
            return {"kind": "hf-unsaved", "name": name, "pruned": {}}
        with quietly():
            changed = self.config().to_diff_dict()
        fields = {
            key: value
            for key, value in changed.items()
            if key not in (*_DROPPED, "id2label", "architectures")
        }
        fields["model_type"] = self.fields["model_type"]
        text = json.dumps(fields, sort_keys=True, separators=(",", ":"))
        return Architecture(
            kind="hf",
            name=name,
            classes=classes,
            image_size=size,
            overrides={"class": self.class_name, "config": text},
        )


def with_classifier(fields: object, adapter: Adapter, name: str) -> object:
    """Return a configuration with the class and the number of classes of an adapter's classifier.

    It is unchanged if the adapter has none, or one of the same size.
    """
    weight = adapter.saved.get(f"{_CLASSIFIER}weight")
    if weight is None:
        return fields
    changed = dict(_require_fields(fields, name))
    classifiers = _classifier_classes(str(changed["model_type"]))
    named_classes = changed.get("architectures") or ()
    if classifiers and not set(named_classes) & set(classifiers):
        changed["architectures"] = [classifiers[0]]
    class_count = len(weight)
    if len(changed.get("id2label") or ()) != class_count:
        changed.pop("id2label", None)
        changed.pop("label2id", None)
        changed["num_labels"] = class_count
    return changed


def _classifier_classes(model_type: str) -> tuple[str, ...]:
    """Return the names of transformers' classes that classify images with this model type."""
    auto = transformers("models.auto.modeling_auto")
    names = auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES.get(model_type, ())
    if isinstance(names, str):
        return (names,)
    return tuple(names)


def describe_config(fields: object, name: str, *, texts: bool = False) -> ModelDescription:
    """Return the model that the fields of a configuration describe.

    There are four cases: a classifier (its logits), a model of images and texts with a tokenizer
    (its image embedding), CLIP's image tower with its projection (its embedding), and any other
    backbone or image tower (its CLS token or pooler). The class is that which
    AutoModelForImageClassification or AutoModel takes.

    name: the name of the model, for messages.
    texts: whether the folder has a tokenizer, so that texts can be embedded.

    Raises ModelError and UnsupportedError.
    """
    fields = _require_fields(fields, name)
    model_type = str(fields["model_type"])
    named_classes = fields.get("architectures") or [""]
    named_class = str(named_classes[0])[:_CLASS_LENGTH]
    classifiers = _classifier_classes(model_type)
    _require_supported(fields, name, is_classifier=bool(classifiers))

    class_name = named_class
    model_fields = fields
    output: Output
    if named_class in classifiers:
        output = "logits"
    elif texts and named_class in WITH_TEXTS:
        output = "embedding"
    else:
        model_fields = _image_tower_fields(fields, named_class, name)
        if named_class == "CLIPVisionModelWithProjection":
            output = "embedding"
        else:
            image_model_type = model_fields["model_type"]
            auto = transformers("models.auto.modeling_auto")
            class_name = auto.MODEL_MAPPING_NAMES[image_model_type]
            output = "cls" if image_model_type in _CLS_ONLY else "pooler"
    read_fields = {key: value for key, value in model_fields.items() if key not in _DROPPED}
    too_deep = _TOO_DEEP.search(json.dumps(read_fields))
    if too_deep:  # even an empty model would take minutes to build
        raise ModelError(
            f"expected at most 999 layers in {CONFIG} of {name}, found {short(too_deep[0])}"
        )
    _require_positive_sizes(read_fields, name)
    if _class_count(read_fields) > CLASSES:  # transformers makes a name for each
        raise ModelError(
            f"expected at most {CLASSES:,} classes in {CONFIG} of {name}, found num_labels of "
            f"{read_fields['num_labels']!r:.40}"
        )
    notes = _notes(fields, named_class, class_name, output)
    return ModelDescription(class_name, read_fields, output, tuple(notes))


def _image_tower_fields(fields: dict[str, Any], named_class: str, name: str) -> dict[str, Any]:
    """Return the configuration of the image tower, or of a model of images as it is.

    Raises UnsupportedError for a family that is not known.

    named_class: the class that the configuration names, "" for none.
    name: the name of the model, for messages.
    """
    model_type = str(fields["model_type"])
    image_model_type = _TOWERS.get(model_type, model_type)
    if image_model_type not in _BACKBONES:
        raise UnsupportedError(
            f"expected an image classifier or the backbone of a known family in {name}, found "
            f"{named_class or model_type!r}"
        )
    if model_type not in _TOWERS:
        return fields
    return {**(fields.get("vision_config") or {}), "model_type": image_model_type}


def _require_positive_sizes(fields: Mapping[str, Any], name: str) -> None:
    """Raise ModelError for a size that is no positive whole number.

    Libraries would raise errors of other words for it, or build a model without weights.
    """
    for key in _SIZES:
        value = fields.get(key)
        numbers = value if isinstance(value, list) else [value]
        for number in numbers:
            is_size = isinstance(number, int) and not isinstance(number, bool) and number > 0
            if number is not None and not is_size:
                raise ModelError(
                    f"expected positive whole numbers as {key} in {CONFIG} of {name}, found "
                    f"{short(repr(value))}"
                )


def _class_count(fields: Mapping[str, Any]) -> float:
    """Return the number of classes that a configuration asks for; infinity if it is no number."""
    count = fields.get("num_labels", 0)
    if count is None:
        return 0
    return count if isinstance(count, int | float) else math.inf


def _require_fields(fields: object, name: str) -> dict[str, Any]:
    """Return the fields of a configuration. Raises ModelError for one of timm or another form."""
    without_type = f"expected {CONFIG} of transformers in {name}, found one without a model_type"
    if not isinstance(fields, dict):
        raise ModelError(without_type)
    model_type = fields.get("model_type")
    if model_type is None and {"architecture", "pretrained_cfg"} <= fields.keys():
        folder = Path(name.removeprefix("hf:"))
        weights = folder / (weights_inside(folder) or "model.safetensors")
        raise ModelError(
            f"expected {CONFIG} of transformers in {name}, found one of timm; write "
            f"timm:{str(fields['architecture'])[:200]}@{weights}"
        )
    if not isinstance(model_type, str):
        raise ModelError(without_type)
    for key, form in (("architectures", list), ("vision_config", dict)):
        if not isinstance(fields.get(key) or form(), form):
            raise ModelError(
                f"expected a {form.__name__} as {key} in {CONFIG} of {name}, found "
                f"{short(str(fields[key]))}"
            )
    return fields


def _require_supported(fields: Mapping[str, Any], name: str, *, is_classifier: bool) -> None:
    """Raise UnsupportedError for a model type or a setting that is not supported.

    is_classifier: whether transformers has an image classifier of this model type.
    """
    model_type = str(fields["model_type"])
    if model_type in _REFUSED:
        raise UnsupportedError(
            f"expected a model of images of one size, found {_REFUSED[model_type]} (in {name})"
        )
    is_known = model_type in _BACKBONES or model_type in _TOWERS
    if not is_known and not is_classifier:
        known = ", ".join((*_BACKBONES, *_TOWERS))
        remote = "; its code (auto_map) is never run" if "auto_map" in fields else ""
        raise UnsupportedError(
            "expected a vision model that transformers itself has, found model_type "
            f"{model_type[:60]!r} in {name}{remote}; known: {known} and transformers' image "
            "classifiers"
        )
    if fields.get("quantization_config"):
        raise UnsupportedError(
            f"expected weights of floating-point numbers in {name}, found quantization_config"
        )
    if fields.get("problem_type") in ("multi_label_classification", "regression"):
        raise UnsupportedError(
            f"expected classes that exclude each other, found {fields['problem_type']} in {name}"
        )


def _notes(
    fields: Mapping[str, Any], named_class: str, class_name: str, output: Output
) -> list[str]:
    """Return notes for the provenance: the class, its output, and settings that are not used."""
    notes = []
    if class_name in WITH_TEXTS:
        notes.append(f"the towers of images and texts of {class_name}")
    elif output != "logits":
        _, description = FEATURES[output]
        notes.append(f"{class_name} has no classifier; features: {description}")
    if named_class not in ("", class_name):
        notes.append(f"took {class_name} from {named_class}")
    if "auto_map" in fields:
        notes.append(
            "the remote code that the configuration names (auto_map) was not run; transformers' "
            "own was used"
        )
    kernel = fields.get("_attn_implementation") or fields.get("attn_implementation")
    if isinstance(kernel, str) and kernel not in OBSERVABLE:
        notes.append(
            f"loaded with an attention that can be observed, not {short(kernel)!r}, as the "
            "configuration says"
        )
    return notes


def _require_size(
    expected: Mapping[str, Tensor], state: Mapping[str, Tensor] | None, name: str
) -> None:
    """Raise ModelError for a model that is much larger than its weights, or than any known one."""
    count = _count_elements(expected)
    largest = _MOST_PARAMETERS
    if state is not None:
        largest = 2 * _count_elements(state) + _EXTRA_PARAMETERS
    if count > largest:
        raise ModelError(
            f"expected a model of at most {largest:,} numbers for {name}, found {count:,}"
        )


def _count_elements(state: Mapping[str, Tensor]) -> int:
    return sum(tensor.numel() for tensor in state.values())


def _loading_faults(info: Mapping[str, Any]) -> list[str]:
    """Return what transformers reports of weights that it did not load."""
    faults = []
    for key in sorted(info["missing_keys"]):
        if key.rpartition(".")[2] not in _HARMLESS:
            faults.append(f"{key} is missing")
    # (name, shape in the file, shape in the model), as text
    for mismatch in sorted(map(str, info["mismatched_keys"])):
        faults.append(f"{mismatch[:120]} is of another shape")
    for message in info.get("error_msgs") or ():
        faults.append(str(message)[:160])
    return faults
