"""LoRA adapters of peft, merged into the weights of their base model without peft.

An adapter is a folder with adapter_config.json and adapter_model.safetensors. Merging adds
scale B A to each weight that it targets (Hu 2022); scale is alpha / rank, or alpha / sqrt(rank)
for rank-stabilised LoRA (Kalajdzievski 2023).
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Final, TypeVar

import torch
from torch import Tensor

from vitlens.errors import ModelError, UnsupportedError
from vitlens.files import read_json, sha256
from vitlens.models.library_folders import ADAPTER_CONFIG as CONFIG
from vitlens.models.weights import list_names, read_weights
from vitlens.typed import between, read_as, short

WEIGHTS: Final = "adapter_model.safetensors"
_PICKLE: Final = "adapter_model.bin"
_PREFIX: Final = "base_model.model."
# the names of factors, MODULE.lora_A.weight; in earlier versions of peft, the adapter's name is
# before "weight"
_FACTOR: Final = re.compile(r"(.+)\.lora_(A|B)\.(?:default\.)?weight")
# what peft adds to names: "fc.base_layer.bias" is "fc.bias" of the base model
_WRAPPERS: Final = (".base_layer", ".modules_to_save.default", ".modules_to_save")
_UNUSED: Final = ".original_module."  # in names of a module that a saved one replaces
_PLAIN: Final = re.compile(r"[\w.]+")  # a pattern of module names without special characters
_MERGE: Final = "merge it with merge_and_unload of peft, and give the merged model"
# variants that do not add scale B A to W, by the setting that turns them on
_VARIANTS: Final = {
    "use_dora": "DoRA",
    "use_qalora": "QALoRA",
    "use_bdlora": "BD-LoRA",
    "lora_bias": "biases of LoRA's B",
    "alora_invocation_tokens": "activated LoRA",
    "layer_replication": "replicated layers",
    "trainable_token_indices": "trainable tokens",
    "target_parameters": "target_parameters",
    "arrow_config": "Arrow",
    "kasa_config": "KaSA",
    "velora_config": "VeLoRA",
    "monteclora_config": "MonteCLoRA",
}
# values of init_lora_weights that leave the weights of the base model unchanged
_INITS: Final = (True, False, None, "gaussian", "orthogonal", "eva")

_Value = TypeVar("_Value", int, float)
_Number = Annotated[float, between(1e-6, 1e6)]
_Rank = Annotated[int, between(1, 1 << 16)]


@dataclass(frozen=True)
class _Settings:
    """The fields of adapter_config.json that decide how weights are merged, by their names there.

    r: the rank of the factors.
    lora_alpha: alpha, the numerator of the scale.
    use_rslora: whether the scale is that of rank-stabilised LoRA.
    fan_in_fan_out: whether the base model's weights are (in, out), not (out, in).
    rank_pattern, alpha_pattern: other ranks and alphas, by the end of a module's name.
    """

    r: _Rank
    lora_alpha: _Number
    use_rslora: bool = False
    fan_in_fan_out: bool = False
    rank_pattern: dict[str, _Rank] = field(default_factory=dict)
    alpha_pattern: dict[str, _Number] = field(default_factory=dict)

    def scale(self, module: str) -> float:
        """Return the factor of B A for a module."""
        rank = _by_pattern(self.rank_pattern, module, self.r)
        alpha = _by_pattern(self.alpha_pattern, module, self.lora_alpha)
        if self.use_rslora:
            return alpha / math.sqrt(rank)
        return alpha / rank


def _by_pattern(patterns: Mapping[str, _Value], module: str, default: _Value) -> _Value:
    """Return the value of the first pattern that is the end of a module's name."""
    for pattern, value in patterns.items():
        if f".{module}".endswith(f".{pattern}"):  # "fc" is no end of "blocks.0.attnfc"
            return value
    return default


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter, by the names of its base model's modules.

    folder: the folder of the adapter.
    settings: the settings that decide how weights are merged.
    factors: the factors A (rank, in) and B (out, rank) by module.
    saved: tensors that replace those of the base model, by name. These are a classifier
        (modules_to_save) or biases, for example.
    note: a note for the provenance.
    """

    folder: Path
    settings: _Settings
    factors: Mapping[str, tuple[Tensor, Tensor]]
    saved: Mapping[str, Tensor]
    note: str

    def fits(self, state: Mapping[str, Tensor]) -> bool:
        """Return True if the base model's weights have all targets."""
        return not self._unknown(state)

    def _unknown(self, state: Mapping[str, Tensor]) -> list[str]:
        targets = [*(f"{module}.weight" for module in self.factors), *self.saved]
        return [name for name in targets if name not in state]

    def merged(self, state: Mapping[str, Tensor], base: str) -> dict[str, Tensor]:
        """Return weights of the base model with the adapter; state is not changed.

        Raises ModelError for targets that the base model does not have, or of another shape.
        """
        unknown = self._unknown(state)
        if unknown:
            raise ModelError(
                f"expected an adapter of {base} in {self.folder}, found targets that it does not "
                f"have: {list_names(unknown)}; name the base model that it was trained on"
            )
        merged = {**state, **self.saved}
        for module, (factor_a, factor_b) in self.factors.items():
            name = f"{module}.weight"
            merged[name] = self._with_product(module, merged[name], factor_a, factor_b)
        return merged

    def _with_product(
        self, module: str, weight: Tensor, factor_a: Tensor, factor_b: Tensor
    ) -> Tensor:
        """Return W + scale B A, in the type of W.

        A convolution's weight (out, in, height, width) counts as a matrix
        (out, in x height x width).
        """
        product = factor_b.flatten(1).double() @ factor_a.flatten(1).double()
        if self.settings.fan_in_fan_out:  # W is (in, out)
            product = product.T
        rows = len(weight)
        matrix_shape = (rows, weight.numel() // max(1, rows))
        if tuple(product.shape) != matrix_shape:
            raise ModelError(
                f"expected factors of {module[:80]!r} for a weight of {tuple(weight.shape)}, found "
                f"A {tuple(factor_a.shape)} and B {tuple(factor_b.shape)} in {self.folder}; name "
                "the base model that it was trained on"
            )
        scaled = self.settings.scale(module) * product.reshape(weight.shape).to(weight.device)
        return (weight.double() + scaled).to(weight.dtype)


def read_adapter(folder: Path) -> Adapter:
    """Return the adapter in a folder.

    Raises ModelError for files that are missing or damaged, and for factors of different ranks;
    UnsupportedError for other adapters than LoRA and for its variants.
    """
    settings = _read_settings(folder)
    file = folder / WEIGHTS
    if not file.is_file():
        content = "none"
        if (folder / _PICKLE).is_file():
            content = f"only {_PICKLE}, which could run code when it is read"
        raise ModelError(
            f"expected {WEIGHTS} in {folder}, found {content}; save_pretrained of peft writes it"
        )
    factors: dict[str, dict[str, Tensor]] = {}
    saved = {}
    for name, tensor in read_weights(file).state.items():
        match = _FACTOR.fullmatch(name)
        if match:
            factors.setdefault(_base_name(match[1]), {})[match[2]] = tensor
        elif "lora_" in name:
            raise UnsupportedError(
                f"expected factors lora_A and lora_B in {file}, found {name[:80]!r}; {_MERGE}"
            )
        elif _UNUSED not in name:
            saved[_base_name(name)] = tensor
    pairs = {}
    for module, pair in factors.items():
        rank = _by_pattern(settings.rank_pattern, module, settings.r)
        pairs[module] = _paired(module, pair, rank, file)
    if not pairs:
        raise ModelError(f"expected factors lora_A and lora_B in {file}, found none")
    note = (
        f"merged the adapter {folder.name} (LoRA of rank {settings.r} in {len(pairs)} modules; "
        f"SHA-256 {sha256(file)})"
    )
    return Adapter(folder=folder, settings=settings, factors=pairs, saved=saved, note=note)


def _base_name(name: str) -> str:
    """Return the base model's name of a module or tensor, without the names that peft adds."""
    name = name.removeprefix(_PREFIX)
    for wrapper in _WRAPPERS:
        name = name.replace(f"{wrapper}.", ".").removesuffix(wrapper)
    return name


def _paired(
    module: str, pair: Mapping[str, Tensor], rank: int, file: Path
) -> tuple[Tensor, Tensor]:
    """Return A and B. Raises ModelError if one is missing, or they are not of this rank."""
    if pair.keys() != {"A", "B"}:
        (letter,) = pair
        raise ModelError(
            f"expected lora_A and lora_B of {module[:80]!r} in {file}, found only lora_{letter}"
        )
    factor_a = pair["A"]  # (rank, in)
    factor_b = pair["B"]  # (out, rank)
    are_matrices = factor_a.ndim >= 2 and factor_b.ndim >= 2
    if not are_matrices or len(factor_a) != rank or factor_b.flatten(1).shape[1] != rank:
        raise ModelError(
            f"expected factors of rank {rank} for {module[:80]!r}, as {CONFIG} says, found A "
            f"{tuple(factor_a.shape)} and B {tuple(factor_b.shape)} in {file}"
        )
    return factor_a, factor_b


def _read_settings(folder: Path) -> _Settings:
    """Return the settings of a LoRA adapter. Raises ModelError and UnsupportedError."""
    path = folder / CONFIG
    fields = read_json(path, error=ModelError, hint="save_pretrained of peft writes it")
    kind = fields.get("peft_type") if isinstance(fields, dict) else None
    if kind != "LORA":
        raise UnsupportedError(
            f"expected an adapter of peft_type LORA in {path}, found {short(str(kind))}; {_MERGE}"
        )
    for name, title in _VARIANTS.items():
        if fields.get(name):
            raise UnsupportedError(f"expected plain LoRA in {path}, found {title}; {_MERGE}")
    init = fields.get("init_lora_weights")
    if init not in _INITS or fields.get("loftq_config"):
        raise UnsupportedError(
            f"expected LoRA on unchanged weights of the base model in {path}, found "
            f"init_lora_weights {short(str(init))}, which changes them; {_MERGE}"
        )
    values = {}
    for name in _Settings.__dataclass_fields__:
        if fields.get(name) is not None:
            values[name] = fields[name]
    settings = read_as(_Settings, values, source=str(path), error=ModelError)
    for pattern in (*settings.rank_pattern, *settings.alpha_pattern):
        if not _PLAIN.fullmatch(pattern):
            raise UnsupportedError(
                "expected names of modules as rank_pattern and alpha_pattern in "
                f"{path}, found {short(pattern)}; {_MERGE}"
            )
    return settings


def base_of(folder: Path) -> str:
    """Return the base model that an adapter's configuration names, or "BASE" if it names none.

    It is only for messages: an untrusted file does not decide what is loaded.
    """
    fields = read_json(folder / CONFIG, error=ModelError)
    name = fields.get("base_model_name_or_path") if isinstance(fields, dict) else None
    return short(name) if isinstance(name, str) and name else "BASE"


@torch.no_grad()
def merge_into(module: torch.nn.Module, adapter: Adapter, base: str) -> None:
    """Merge an adapter into a module in place. Raises ModelError as `Adapter.merged`."""
    state = module.state_dict()
    for name, tensor in adapter.merged(state, base).items():
        if tensor is state[name]:  # the adapter does not target it
            continue
        if tensor.shape != state[name].shape:
            raise ModelError(
                f"expected {name[:80]!r} of shape {tuple(state[name].shape)} in "
                f"{adapter.folder}, found {tuple(tensor.shape)}"
            )
        state[name].copy_(tensor)
