"""Tiny models of transformers' families, of 32 px and two blocks, saved by save_pretrained."""

import json
import shutil
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from tests.kit.tiny import images

LABELS = ("cat", "dog", "hen", "owl", "pig")
_BLOCKS = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 8,
}
_MLP = _BLOCKS | {"intermediate_size": 64}
_STAGES = {
    "embed_dim": 16,
    "depths": [2, 2],
    "num_heads": [2, 2],
    "window_size": 4,
    "image_size": 32,
    "patch_size": 2,
}
_CNN = {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "image_size": 32}
_NAMES = {
    "id2label": dict(enumerate(LABELS)),
    "label2id": {name: index for index, name in enumerate(LABELS)},
}
_TEXTS = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 16,
}
_SQUARE = {"size": {"height": 32, "width": 32}}
_CROP = {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}}

_REGISTERS = {"num_register_tokens": 4}
_TWO = {"vision_config": _MLP, "text_config": _TEXTS}
_CLASSIFIER = "ForImageClassification"

# name -> (beginning of the class, its end, configuration, image processor, its options)
FAMILIES: dict[str, tuple[str, str, dict[str, Any], str, dict[str, Any]]] = {
    "vit": ("ViT", _CLASSIFIER, _MLP | _NAMES, "ViT", _SQUARE),
    "vit-features": ("ViT", "Model", _MLP, "ViT", _SQUARE),
    "deit": ("DeiT", _CLASSIFIER, _MLP | _NAMES, "DeiT", _CROP),
    "deit-distilled": ("DeiT", f"{_CLASSIFIER}WithTeacher", _MLP | _NAMES, "DeiT", _CROP),
    "beit": (
        "Beit",
        _CLASSIFIER,
        _MLP | _NAMES | {"use_relative_position_bias": True},
        "Beit",
        _SQUARE,
    ),
    "dinov2-features": ("Dinov2", "Model", _BLOCKS, "Bit", _CROP),
    "dinov2-registers": (
        "Dinov2WithRegisters",
        _CLASSIFIER,
        _BLOCKS | _NAMES | _REGISTERS,
        "Bit",
        _CROP,
    ),
    "dinov3": ("DINOv3ViT", "Model", _MLP | _REGISTERS, "DINOv3ViT", _SQUARE),
    "clip-projected": (
        "CLIPVision",
        "ModelWithProjection",
        _MLP | {"projection_dim": 16},
        "CLIP",
        _CROP,
    ),
    "clip": ("CLIP", "Model", _TWO | {"projection_dim": 16}, "CLIP", _CROP),
    "clip-classifier": ("CLIP", _CLASSIFIER, _TWO | {"projection_dim": 16} | _NAMES, "CLIP", _CROP),
    "siglip": ("Siglip", "Model", _TWO, "Siglip", _SQUARE),
    "siglip-classifier": ("Siglip", _CLASSIFIER, _TWO | _NAMES, "Siglip", _SQUARE),
    "swin": ("Swin", _CLASSIFIER, _STAGES | _NAMES, "ViT", _SQUARE),
    "swinv2": ("Swinv2", _CLASSIFIER, _STAGES | _NAMES, "ViT", _SQUARE),
    "convnext": (
        "ConvNext",
        _CLASSIFIER,
        _CNN | _NAMES,
        "ConvNext",
        {"size": {"shortest_edge": 32}},
    ),
}
FEATURES = {  # what the models without a classifier give, by transformers' own output
    "vit-features": lambda output: output.last_hidden_state[:, 0],
    "dinov2-features": lambda output: output.last_hidden_state[:, 0],
    "dinov3": lambda output: output.last_hidden_state[:, 0],
    "clip-projected": lambda output: output.image_embeds,
}


def tower(name: str, model: Any) -> Any:
    """Return the part of a model that sees images."""
    return model.vision_model if name in ("clip", "siglip") else model


def save_family(name: str, folder: Path) -> Any:
    """Save a tiny model and its image processor; return the model in evaluation mode."""
    import transformers

    family, kind, fields, processor, options = FAMILIES[name]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = getattr(transformers, family + kind)(
            getattr(transformers, f"{family}Config")(**fields)
        ).eval()
        for parameter in model.parameters():  # so that no head and no layer scale is zero
            parameter.data += 0.05 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    getattr(transformers, f"{processor}ImageProcessor")(**options).save_pretrained(folder)
    return model


_SESSION = TemporaryDirectory(prefix="hf-")  # removed when the process ends


@cache
def folder_of(name: str) -> tuple[Path, Any]:
    """Return the folder and the model of a family, made once; nobody changes them."""
    folder = Path(_SESSION.name) / name
    return folder, save_family(name, folder)


def changed(into: Path, name: str = "vit", file: str = "config.json", **fields: Any) -> Path:
    """Return a copy of a family's folder with other fields in a JSON file; None removes one."""
    target = into / f"{name}-{len(list(into.iterdir()))}"
    shutil.copytree(folder_of(name)[0], target)
    content = json.loads((target / file).read_text()) | fields
    (target / file).write_text(
        json.dumps({key: value for key, value in content.items() if value is not None})
    )
    return target


def pixels(seed: int = 0, size: int = 32) -> torch.Tensor:
    """Return two images."""
    return images((size, size), seed=seed)
