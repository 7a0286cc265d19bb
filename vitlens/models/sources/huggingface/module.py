"""transformers' vision models as modules from images to logits, built from a description without any file."""

import inspect
from collections.abc import Mapping
from typing import Any, Final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from vitlens.errors import ModelError, VitlensError, lacks_memory
from vitlens.models.assembly import Architecture
from vitlens.models.sources.huggingface.description import WHOLE, Description, Output, described_again
from vitlens.models.sources.huggingface.folder import first_line, quietly, transformers
from vitlens.models.tracing.anatomy import Told
from vitlens.models.weights import load_strictly
from vitlens.preprocessing import Preprocessing

_HEADS: Final = (("cls_classifier", "distillation_classifier"), ("classifier",))  # of transformers' classes
_ROOM: Final = 1 << 26  # numbers that a model may have beyond twice its weights'
_MOST: Final = 1 << 33  # numbers of a model with random weights
_HARMLESS: Final = ("position_ids", "relative_position_index", "relative_coords_table", "mask_token")  # if missing


class TransformersModule(nn.Module):
    """A model of transformers: normalised images (batch, 3, height, width) -> logits or features (batch, outputs).

    output: "logits" of a classifier; "cls", the CLS token after the last norm; "pooler", its pooler_output;
    "embedding", its image_embeds. head: on the features, of a model that was given a classifier here.
    native: (height, width) of its position embeddings, which are interpolated for images of another size.
    """

    def __init__(self, model: nn.Module, output: Output, classes: int | None = None) -> None:
        super().__init__()
        self.network = model
        self.output = output
        self.native = native_size(model.config)
        parameters = inspect.signature(model.forward).parameters
        config: Any = model.config
        self.interpolates = "interpolate_pos_encoding" in parameters or config.model_type == "clip"
        self.head: nn.Module = nn.Identity()
        if classes and output != "logits":
            self.reset_classifier(classes)

    @property
    def told(self) -> Told | None:
        """What of its structure shapes do not show: DeiT's second token is for distillation, whatever reads it."""
        config: Any = self.network.config
        return Told(prefix=("cls", "distillation")) if config.model_type == "deit" else None

    @property
    def pretrained_cfg(self) -> dict[str, tuple[str, ...]]:
        """Where its classifiers are, as timm says it."""
        if self.output != "logits":
            return {"classifier": ("head",)}
        known = next((names for names in _HEADS if hasattr(self.network, names[0])), ())
        linear = tuple(f"network.{name}" for name in known if isinstance(getattr(self.network, name), nn.Linear))
        return {"classifier": linear}

    def reset_classifier(self, classes: int) -> None:
        """A new classifier for this number of classes, with random weights."""
        for path in self.pretrained_cfg["classifier"]:
            parent, _, last = path.rpartition(".")
            old = self.get_submodule(path)
            width = old.in_features if isinstance(old, nn.Linear) else self._width()
            device = next(self.parameters()).device
            setattr(self.get_submodule(parent), last, nn.Linear(width, classes, device=device))

    def _width(self) -> int:
        """The number of features, measured."""
        device = next(self.network.parameters()).device
        with torch.no_grad():
            return int(self._features(torch.zeros(1, 3, *self.native, device=device)).shape[-1])

    def _features(self, images: Tensor) -> Tensor:
        other = self.interpolates and tuple(images.shape[-2:]) != self.native
        result: Any = self.network(pixel_values=images, **({"interpolate_pos_encoding": True} if other else {}))
        if self.output == "cls":
            tokens: Tensor = result.last_hidden_state
            return tokens[:, 0]
        names = {"logits": "logits", "pooler": "pooler_output", "embedding": "image_embeds"}
        features: Tensor = getattr(result, names[self.output])
        return features.flatten(1)  # ConvNeXt's is (batch, dim, 1, 1) in some versions

    def forward(self, images: Float[Tensor, "batch 3 height width"]) -> Float[Tensor, "batch outputs"]:
        """Logits (batch, classes) or features (batch, dim)."""
        logits: Tensor = self.head(self._features(images))
        return logits


def native_size(config: Any) -> tuple[int, int]:
    """(height, width) in pixels that a configuration is for; 224 where it says nothing."""
    size = getattr(getattr(config, "vision_config", config), "image_size", None) or 224
    height, width = (size, size) if isinstance(size, int) else (int(size[0]), int(size[1]))
    return height, width


def build(
    architecture: Architecture,
    *,
    state: Mapping[str, Tensor] | None = None,
    pretrained: bool = False,  # noqa: ARG001  a saved model has its weights
) -> tuple[nn.Module, Preprocessing]:
    """The model of a file that vitlens wrote, with these weights or random ones; its preprocessing is in that file.

    overrides: "class", of transformers, and "config", its configuration as JSON.
    """
    class_name, text = architecture.overrides.get("class"), architecture.overrides.get("config")
    if not isinstance(class_name, str) or not isinstance(text, str):
        raise ModelError(
            f"expected the class and the configuration of {architecture.name}, found none; take another copy"
        )
    found = described_again(class_name, text)
    module = create(found, classes=architecture.classes)
    if state is not None:
        load_strictly(module, state, where=architecture.name)
    return module, Preprocessing(architecture.image_size or module.native)


def architecture_of(
    found: Description, name: str, classes: int, size: tuple[int, int]
) -> Architecture | dict[str, object]:
    """The architecture from which `build` makes the same model; one that is refused for a model that is not saved."""
    text = None if found.class_name in WHOLE else found.serialised()
    if text is None:
        return {"kind": "hf-unsaved", "name": name, "pruned": {}}
    return Architecture("hf", name, classes, size, {"class": found.class_name, "config": text})


def create(
    found: Description, *, classes: int | None = None, state: Mapping[str, Tensor] | None = None, name: str = ""
) -> TransformersModule:
    """The module of a description. Raises what `network` raises."""
    return TransformersModule(network(found, classes=classes, state=state, name=name), found.output, classes)


def network(
    found: Description, *, classes: int | None = None, state: Mapping[str, Tensor] | None = None, name: str = ""
) -> nn.Module:
    """transformers' model of a description, with weights as transformers stores them, or random ones.

    Raises ModelError for a configuration that cannot be built, and for weights that are missing or do not fit.
    """
    kind = getattr(transformers(), found.class_name)
    config = found.config(classes=classes if found.output == "logits" else None)
    options: dict[str, Any] = {"attn_implementation": "sdpa" if kind._supports_sdpa else "eager"}
    extra = {"add_pooling_layer": False} if found.output == "cls" else {}
    try:
        with quietly():
            _require_room(kind, config, extra, state, name)
            if state is None:
                config._attn_implementation = options["attn_implementation"]
                model, missing = kind(config, **extra).float(), ""
            else:
                model, info = kind.from_pretrained(
                    None, config=config, state_dict=dict(state), dtype=torch.float32, output_loading_info=True,
                    ignore_mismatched_sizes=True,
                    local_files_only=True, use_safetensors=True, trust_remote_code=False, **options, **extra,
                )  # fmt: skip
                missing = _misfit(info)
            if missing:
                raise ModelError(
                    f"weights do not fit {found.class_name} ({name}): {missing}; check the files of the folder"
                )
            return model  # type: ignore[no-any-return]
    except VitlensError:
        raise
    except Exception as error:  # transformers raises a dozen types for configurations and weights that do not fit
        if lacks_memory(error):
            raise
        raise ModelError(
            f"expected transformers to build {found.class_name}, found: {first_line(error)}; check config.json"
        ) from error


def _require_room(
    kind: Any, config: Any, extra: Mapping[str, Any], state: Mapping[str, Tensor] | None, name: str
) -> None:
    """Refuse a configuration whose model would need far more memory than its weights, before allocating it."""
    with torch.device("meta"):
        shapes = kind(config, **extra).state_dict()
    needed = sum(tensor.numel() for tensor in shapes.values())
    room = _MOST if state is None else 2 * sum(tensor.numel() for tensor in state.values()) + _ROOM
    if needed > room:
        raise ModelError(f"expected a model of at most {room:,} numbers for {name or 'its weights'}, found {needed:,}")


def _misfit(info: Mapping[str, Any]) -> str:
    """Which weights are missing, misshapen or damaged; transformers itself would replace them by random ones."""
    missing = sorted(key for key in info["missing_keys"] if key.rpartition(".")[2] not in _HARMLESS)
    shapes = sorted(info["mismatched_keys"], key=str)
    parts = []
    if missing:
        parts.append(f"{len(missing)} missing (first {missing[0]!r})")
    if shapes:
        parts.append(f"{len(shapes)} of another shape (first {str(shapes[0])[:120]})")
    parts += [str(message)[:160] for message in info.get("error_msgs") or ()]
    return "; ".join(parts)
