"""Tiny language-image models: architectures of open_clip, small enough for every test."""

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import open_clip
import torch
from torch import Tensor

from vitlens.models.language_image import similarities as similarities
from vitlens.models.loading import load
from vitlens.models.model import Model
from vitlens.models.sources.open_clip import DownloadedTokenizer

_TEXT = {"context_length": 24, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 2}
_TINY: dict[str, Any] = {
    "embed_dim": 16,
    "quick_gelu": True,
    "vision_cfg": {"image_size": 32, "layers": 2, "width": 32, "head_width": 16, "patch_size": 8},
    "text_cfg": _TEXT,
}
ARCHITECTURES = {
    "tiny-clip": _TINY,
    "tiny-clip-deep": _TINY | {"vision_cfg": _TINY["vision_cfg"] | {"layers": 3}},
    # SigLIP's kind: pooling by attention, a bias on the logits
    "tiny-sigmoid": {
        "embed_dim": 64,
        "init_logit_bias": -10,
        "custom_text": True,
        "vision_cfg": {
            "image_size": 160,
            "timm_model_name": "test_vit",
            "timm_pool": "map",
            "timm_proj": "none",
        },
        "text_cfg": _TEXT | {"no_causal_mask": True, "pool_type": "last"},
    },
    "tiny-resnet": {
        "embed_dim": 16,
        "vision_cfg": {
            "image_size": 64,
            "layers": [1, 1, 1, 1],
            "width": 8,
            "head_width": 8,
            "patch_size": None,
        },
        "text_cfg": _TEXT,
    },
}


_SESSION = TemporaryDirectory(prefix="tiny-clip-")  # removed when the process ends


@cache
def registered() -> Path:
    """Return the folder of these architectures, known to open_clip from now on."""
    folder = Path(_SESSION.name)
    for name, config in ARCHITECTURES.items():
        (folder / f"{name}.json").write_text(json.dumps(config))
    open_clip.add_model_config(folder)
    return folder


def tiny(arch: str = "tiny-clip", *, seed: int = 0) -> Model:
    """Return one of them with seeded random weights."""
    registered()
    return load(f"{arch}=open-clip:{arch}@random", seed=seed)


class _Truncating:
    """A tokenizer of transformers as open_clip calls it: texts that are too long lose their end."""

    def __call__(self, texts: list[str]) -> Tensor:
        return torch.zeros(len(texts), _TEXT["context_length"], dtype=torch.long)

    def tokenizer(self, text: str) -> dict[str, list[object]]:
        return {"input_ids": [0, *text.split(), 0]}


def with_truncating_tokenizer() -> Model:
    """Return a model with a tokenizer of transformers: a token for each word, and two more."""
    model = tiny()
    tower: Any = model.module.text
    tower.tokenizer = lambda: DownloadedTokenizer(_Truncating())
    return model
