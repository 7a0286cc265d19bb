"""Tiny models of transformers' families, of 32 px and two blocks, in folders as save_pretrained writes them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

LABELS = ("cat", "dog", "hen", "owl", "pig")
_BLOCKS = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 32, "patch_size": 8}
_MLP = _BLOCKS | {"intermediate_size": 64}
_STAGES = {"embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4, "image_size": 32, "patch_size": 4}
_CNN = {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "image_size": 32}
_NAMES = {"id2label": dict(enumerate(LABELS)), "label2id": {name: index for index, name in enumerate(LABELS)}}
_TEXTS = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "vocab_size": 64, "max_position_embeddings": 16,
}  # fmt: skip
_SQUARE = {"size": {"height": 32, "width": 32}}
_CROP = {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}}

# name -> (class, configuration class, configuration, image processor, its options)
FAMILIES: dict[str, tuple[str, str, dict[str, Any], str, dict[str, Any]]] = {
    "vit": ("ViTForImageClassification", "ViTConfig", _MLP | _NAMES, "ViTImageProcessor", _SQUARE),
    "vit-features": ("ViTModel", "ViTConfig", _MLP, "ViTImageProcessor", _SQUARE),
    "deit": ("DeiTForImageClassification", "DeiTConfig", _MLP | _NAMES, "DeiTImageProcessor", _CROP),
    "deit-distilled": ("DeiTForImageClassificationWithTeacher", "DeiTConfig", _MLP | _NAMES, "DeiTImageProcessor", _CROP),
    "beit": ("BeitForImageClassification", "BeitConfig", _MLP | _NAMES | {"use_relative_position_bias": True}, "BeitImageProcessor", _SQUARE),
    "dinov2": ("Dinov2ForImageClassification", "Dinov2Config", _BLOCKS | _NAMES, "BitImageProcessor", _CROP),
    "dinov2-features": ("Dinov2Model", "Dinov2Config", _BLOCKS, "BitImageProcessor", _CROP),
    "dinov2-registers": ("Dinov2WithRegistersForImageClassification", "Dinov2WithRegistersConfig", _BLOCKS | _NAMES | {"num_register_tokens": 2}, "BitImageProcessor", _CROP),
    "dinov3": ("DINOv3ViTModel", "DINOv3ViTConfig", _MLP | {"num_register_tokens": 4}, "DINOv3ViTImageProcessor", _SQUARE),
    "clip-vision": ("CLIPVisionModel", "CLIPVisionConfig", _MLP, "CLIPImageProcessor", _CROP),
    "clip-projected": ("CLIPVisionModelWithProjection", "CLIPVisionConfig", _MLP | {"projection_dim": 16}, "CLIPImageProcessor", _CROP),
    "clip": ("CLIPModel", "CLIPConfig", {"vision_config": _MLP, "text_config": _TEXTS, "projection_dim": 16}, "CLIPImageProcessor", _CROP),
    "clip-classifier": ("CLIPForImageClassification", "CLIPConfig", {"vision_config": _MLP, "text_config": _TEXTS, "projection_dim": 16} | _NAMES, "CLIPImageProcessor", _CROP),
    "siglip-vision": ("SiglipVisionModel", "SiglipVisionConfig", _MLP, "SiglipImageProcessor", _SQUARE),
    "siglip": ("SiglipModel", "SiglipConfig", {"vision_config": _MLP, "text_config": _TEXTS}, "SiglipImageProcessor", _SQUARE),
    "siglip-classifier": ("SiglipForImageClassification", "SiglipConfig", {"vision_config": _MLP, "text_config": _TEXTS} | _NAMES, "SiglipImageProcessor", _SQUARE),
    "swin": ("SwinForImageClassification", "SwinConfig", _STAGES | _NAMES, "ViTImageProcessor", _SQUARE),
    "swinv2": ("Swinv2ForImageClassification", "Swinv2Config", _STAGES | _NAMES, "ViTImageProcessor", _SQUARE),
    "swin-features": ("SwinModel", "SwinConfig", _STAGES, "ViTImageProcessor", _SQUARE),
    "convnext": ("ConvNextForImageClassification", "ConvNextConfig", _CNN | _NAMES, "ConvNextImageProcessor", {"size": {"shortest_edge": 32}}),
    "convnextv2": ("ConvNextV2ForImageClassification", "ConvNextV2Config", _CNN | _NAMES, "ConvNextImageProcessor", {"size": {"shortest_edge": 32}}),
}  # fmt: skip
FEATURES = {  # what the models without a classifier give, by transformers' own output
    "vit-features": lambda output: output.last_hidden_state[:, 0],
    "dinov2-features": lambda output: output.last_hidden_state[:, 0],
    "dinov3": lambda output: output.last_hidden_state[:, 0],
    "clip-vision": lambda output: output.pooler_output,
    "clip-projected": lambda output: output.image_embeds,
    "siglip-vision": lambda output: output.pooler_output,
    "swin-features": lambda output: output.pooler_output,
}
TOWERS: dict[str, Callable[[Any], Any]] = {
    "clip": lambda model: model.vision_model,
    "siglip": lambda model: model.vision_model,
}


def save_family(name: str, folder: Path) -> Any:
    """Save a tiny model and its image processor; returns the model of transformers, in evaluation mode."""
    import transformers

    class_name, config_name, fields, processor, options = FAMILIES[name]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = getattr(transformers, class_name)(getattr(transformers, config_name)(**fields)).eval()
        for parameter in model.parameters():  # so that no head and no layer scale is zero
            parameter.data += 0.05 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    getattr(transformers, processor)(**options).save_pretrained(folder)
    return model
