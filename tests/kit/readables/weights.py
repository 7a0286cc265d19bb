"""Files of weights, by example."""

import argparse
import json
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Final

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

import vitlens
from tests.kit.readables.example import Example


@cache
def weights(prefix: str = "") -> dict[str, Tensor]:
    """Return the weights of a small ViT of ours, with a prefix of every name."""
    state = vitlens.load("vit-micro@random", seed=1).module.state_dict()
    return {f"{prefix}{name}": value for name, value in state.items()}


def _body(prefix: str = "") -> dict[str, Tensor]:
    return {
        name: value
        for name, value in weights(prefix).items()
        if not name.startswith(f"{prefix}head.")
    }


def _saved(content: Callable[[], object], name: str = "weights.pth") -> Callable[[Path], Path]:
    def make(root: Path) -> Path:
        torch.save(content(), root / name)
        return root / name

    return make


def _as_safetensors(root: Path) -> Path:
    save_file(weights(), root / "weights.pth")
    return root / "weights.pth"


def _bytes(content: bytes, name: str = "weights.pth") -> Callable[[Path], Path]:
    def make(root: Path) -> Path:
        (root / name).write_bytes(content)
        return root / name

    return make


def _arrays(root: Path) -> Path:
    np.savez(root / "weights.npz", **{"Transformer/encoder_norm/scale": np.zeros(4)})
    return root / "weights.npz"


def _folder(root: Path) -> Path:
    torch.save(weights(), root / "weights.pth")
    return root


def _options() -> argparse.Namespace:
    return argparse.Namespace(
        lr=0.1, out=Path("runs"), more=SimpleNamespace(a=1), best=np.float64(0.5)
    )


class Unknown:
    """A type of the user's own code."""


def _fc_norm() -> dict[str, Tensor]:
    renamed = {}
    for name, value in weights().items():
        renamed[f"fc_{name}" if name.startswith("norm.") else name] = value
    return renamed


_LORA: Final = "base_model.model.blocks.0.attn.qkv.lora_A.default.weight"
WEIGHTS: Final = (
    Example("a state dict of `torch.save`", _saved(weights), "read", "by name"),
    Example("safetensors, whatever the suffix", _as_safetensors, "read", "by the first bytes"),
    Example(
        "`torch.save` in a file called .safetensors",
        _saved(weights, "weights.safetensors"),
        "read",
        "by the first bytes",
    ),
    Example(
        "`model_best.pth.tar` of timm, with its options",
        _saved(
            lambda: {"state_dict": weights(), "args": _options(), "metric": np.float64(3)},
            "model_best.pth.tar",
        ),
        "read, with a note",
        "the weights; options are not made",
    ),
    Example(
        "a training file of torchvision's references",
        _saved(lambda: {"model": weights(), "optimizer": {"state": {}}, "args": _options()}),
        "read, with a note",
        "the weights",
    ),
    Example(
        "a training file of DINO",
        _saved(
            lambda: {
                "teacher": _body("module.backbone.")
                | {"module.head.mlp.0.weight": torch.zeros(2, 2)},
                "student": _body("module."),
                "args": _options(),
            }
        ),
        "read, with a note",
        "the teacher, without a classifier",
    ),
    Example(
        "averaged weights beside the last ones",
        _saved(lambda: {"state_dict": {"a": torch.zeros(1)}, "state_dict_ema": weights()}),
        "read, with a note",
        "the average",
    ),
    Example(
        "averaged weights as `net_ema`, `swa_model`, `averaged_model`",
        _saved(
            lambda: {
                "net": {"a": torch.zeros(1)},
                "net_ema": weights(),
                "optimizer": {"a": torch.zeros(1)},
            }
        ),
        "read, with a note",
        "the average",
    ),
    Example(
        "`{'ema': {'module': ...}}`",
        _saved(lambda: {"model": {"a": torch.zeros(1)}, "ema": {"module": weights()}}),
        "read, with a note",
        "the average",
    ),
    Example(
        "one state dict under another key",
        _saved(lambda: {"my_network": weights(), "epoch": 3}),
        "read, with a note",
        "that state dict",
    ),
    Example(
        "one state dict at any depth, beside an optimizer's",
        _saved(
            lambda: {"run": {"last": {"my_network": weights()}, "optimizer": {"a": torch.zeros(1)}}}
        ),
        "read, with a note",
        "that state dict",
    ),
    Example(
        "blocks that are compiled, checkpointed or sharded (`blocks.0._orig_mod.`)",
        _saved(
            lambda: {
                name.replace("blocks.0.", "blocks.0._orig_mod."): value
                for name, value in weights().items()
            }
        ),
        "read, with a note",
        "removed from the names",
    ),
    Example(
        "prefixes of all names: `module._orig_mod.model.net.`",
        _saved(lambda: weights("module._orig_mod.model.net.")),
        "read, with a note",
        "taken off",
    ),
    Example(
        "`model.*` beside `criterion.weight` (Lightning)",
        _saved(lambda: weights("model.") | {"criterion.weight": torch.ones(3)}),
        "read, with a note",
        "the rest is left out",
    ),
    Example(
        "`module.*` beside `n_averaged`",
        _saved(lambda: weights("module.") | {"n_averaged": torch.tensor(3)}),
        "read, with a note",
        "the rest is left out",
    ),
    Example(
        "`model.*` beside `ema_model.*`",
        _saved(
            lambda: (
                {name: value + 1 for name, value in weights("model.").items()}
                | weights("ema_model.")
            )
        ),
        "read, with a note",
        "the average",
    ),
    Example(
        "`base_encoder.*` beside `momentum_encoder.*` (MoCo)",
        _saved(
            lambda: (
                {name: value + 1 for name, value in _body("module.momentum_encoder.").items()}
                | _body("module.base_encoder.")
            )
        ),
        "read, with a note",
        "the base encoder",
    ),
    Example(
        "`backbone.*` beside `classifier.*`",
        _saved(
            lambda: (
                _body("backbone.")
                | {f"classifier.{name}": weights()[f"head.{name}"] for name in ("weight", "bias")}
            )
        ),
        "read, with a note",
        "with the classifier",
    ),
    Example(
        "`backbone.*` beside `head.*`",
        _saved(
            lambda: (
                _body("backbone.")
                | {f"head.{name}": weights()[f"head.{name}"] for name in ("weight", "bias")}
            )
        ),
        "read, with a note",
        "with the classifier",
    ),
    Example("no classifier", _saved(_body), "read, with a note", "features alone"),
    Example(
        "a pretraining of MAE, with decoder",
        _saved(
            lambda: {
                "model": _body()
                | {"mask_token": torch.zeros(2), "decoder_embed.weight": torch.zeros(2, 2)}
            }
        ),
        "read, with a note",
        "the encoder, features alone",
    ),
    Example(
        "`fc_norm` in place of `norm`",
        _saved(_fc_norm),
        "refused",
        "`--model-file` with global_pool='avg'",
    ),
    Example(
        "unmerged adapters (LoRA)",
        _saved(lambda: weights("base_model.model.") | {_LORA: torch.zeros(2, 2)}),
        "refused",
        "merge them first",
    ),
    Example(
        "two state dicts under other keys",
        _saved(lambda: {"first": weights(), "second": weights()}),
        "refused",
        "save only one of them",
    ),
    Example(
        "two networks of one form (an ensemble)",
        _saved(lambda: weights("models.0.") | weights("models.1.")),
        "refused",
        "save only one of them",
    ),
    Example(
        "a classifier without its bias",
        _saved(lambda: {name: value for name, value in weights().items() if name != "head.bias"}),
        "refused",
        "the whole checkpoint",
    ),
    Example(
        "arrays of NumPy in place of tensors",
        _saved(lambda: {name: value.numpy() for name, value in weights().items()}),
        "refused",
        "torch.from_numpy",
    ),
    Example(
        "int8 without scales",
        _saved(
            lambda: {
                name: value.to(torch.int8) if value.ndim == 2 else value
                for name, value in weights().items()
            }
        ),
        "refused",
        "weights before quantisation",
    ),
    Example(
        "types of your own code (OmegaConf, AttributeDict, a whole model)",
        _saved(lambda: {"state_dict": weights(), "extra": Unknown()}),
        "refused",
        "the command that converts a trusted file",
    ),
    Example(
        "a pointer of git-lfs",
        _bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"),
        "refused",
        "download it again",
    ),
    Example("a web page", _bytes(b"<!DOCTYPE html><html></html>"), "refused", "download it again"),
    Example(
        "ONNX",
        _bytes(b"\x08\x08\x12\x07pytorch" + bytes(40)),
        "refused",
        "torch.save or safetensors",
    ),
    Example(
        "HDF5 (Keras)",
        _bytes(b"\x89HDF\r\n\x1a\n" + bytes(40), "weights.h5"),
        "refused",
        "torch.save or safetensors",
    ),
    Example(
        "msgpack (Flax)",
        _bytes(b"\x81\xa6params\x81\xa1a" + bytes(40), "flax_model.msgpack"),
        "refused",
        "torch.save or safetensors",
    ),
    Example(
        "arrays of JAX (AugReg `.npz`)", _arrays, "refused", "timm's command that converts them"
    ),
    Example(
        "the index of a model in several files",
        _bytes(b'{"weight_map": {}}', "model.safetensors.index.json"),
        "refused",
        "hf:FOLDER",
    ),
    Example(
        "the beginning of a file", _bytes(b"PK\x03\x04" + bytes(99)), "refused", "download it again"
    ),
    Example(
        "an archive", _bytes(b"\x1f\x8b" + bytes(40), "weights.tar.gz"), "refused", "unpack it"
    ),
    Example("a folder", _folder, "refused", "name the file in it"),
    Example("an empty file", _bytes(b""), "refused", "take another copy"),
)


def hub_folder(root: Path, state: Mapping[str, Tensor], **config: object) -> Path:
    """Return a folder of timm's hub, with its weights' path."""
    save_file(
        {name: value.contiguous() for name, value in state.items()}, root / "model.safetensors"
    )
    content = {"architecture": "vit_tiny_patch16_224", "pretrained_cfg": config}
    (root / "config.json").write_text(json.dumps(content))
    return root / "model.safetensors"
