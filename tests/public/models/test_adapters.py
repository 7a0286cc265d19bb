"""LoRA adapters of peft are merged into their base model, or refused in one line."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import vitlens
from tests.kit.commands import ran, refusal
from tests.kit.models.files import one_line
from tests.kit.models.transformers import folder_of, pixels
from vitlens.errors import ModelError, UnsupportedError

needs_transformers = pytest.mark.skipif(
    find_spec("transformers") is None,
    reason="the extra hf is not installed",
)
PLAIN = {"peft_type": "LORA", "r": 3, "lora_alpha": 6}
QKV = "blocks.1.attn.qkv"


def adapter(folder: Path, tensors: dict[str, torch.Tensor], **settings: Any) -> Path:
    """Write an adapter as peft does; names are those of the base model."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(PLAIN | settings))
    named = {f"base_model.model.{name}": tensor for name, tensor in tensors.items()}
    save_file(named, str(folder / "adapter_model.safetensors"))
    return folder


def factors(module: str, shape: tuple[int, int], *, rank: int = 3) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        f"{module}.lora_A.weight": torch.randn(rank, shape[1], generator=generator),
        f"{module}.lora_B.weight": torch.randn(shape[0], rank, generator=generator) / 10,
    }


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """Weights of timm's smallest ViT."""
    model = vitlens.load("timm:test_vit@random", seed=1)
    file = tmp_path_factory.mktemp("base") / "base.safetensors"
    save_file(model.module.state_dict(), str(file))
    return file


def merged(base: Path, folder: Path) -> dict[str, torch.Tensor]:
    return vitlens.load(f"timm:test_vit@{base}@{folder}").module.state_dict()


@pytest.mark.parametrize(
    ("settings", "scale"),
    [
        ({}, 2.0),
        ({"use_rslora": True}, 6 / 3**0.5),
        ({"alpha_pattern": {QKV: 9}}, 3.0),
        ({"r": 8, "rank_pattern": {"attn.qkv": 3}}, 2.0),
    ],
)
def test_a_target_becomes_w_plus_scale_b_a_and_nothing_else_changes(
    base, tmp_path, settings, scale
):
    before = load_file(str(base))
    shape = tuple(before[f"{QKV}.weight"].shape)
    tensors = factors(QKV, shape)
    state = merged(base, adapter(tmp_path / "lora", tensors, **settings))
    first, second = tensors.values()
    torch.testing.assert_close(
        state[f"{QKV}.weight"], before[f"{QKV}.weight"] + scale * second @ first, rtol=0, atol=1e-6
    )
    changed = [name for name, value in before.items() if not torch.equal(state[name], value)]
    assert changed == [f"{QKV}.weight"]


def test_weights_of_the_other_orientation_and_of_convolutions_are_merged(base, tmp_path):
    before = load_file(str(base))
    patches = before["patch_embed.proj.weight"]
    flat = (len(patches), patches[0].numel())
    tensors = factors("patch_embed.proj", flat)
    first, second = tensors.values()
    kernels = {
        "patch_embed.proj.lora_A.weight": first.reshape(3, *patches.shape[1:]),
        "patch_embed.proj.lora_B.weight": second[:, :, None, None],
    }
    state = merged(base, adapter(tmp_path / "convolution", kernels))
    expected = patches + 2 * (second @ first).reshape(patches.shape)
    torch.testing.assert_close(state["patch_embed.proj.weight"], expected, rtol=0, atol=1e-6)
    weight = before[f"{QKV}.weight"]
    tensors = factors(QKV, (weight.shape[1], weight.shape[0]))
    first, second = tensors.values()
    state = merged(base, adapter(tmp_path / "turned", tensors, fan_in_fan_out=True))
    expected = weight + 2 * (second @ first).T
    torch.testing.assert_close(state[f"{QKV}.weight"], expected, rtol=0, atol=1e-6)


def test_a_classifier_of_the_adapter_replaces_that_of_the_base_model(base, tmp_path):
    before = load_file(str(base))
    shape = tuple(before[f"{QKV}.weight"].shape)
    width = before["head.weight"].shape[1]
    saved = {
        "head.modules_to_save.weight": torch.randn(5, width),
        "head.modules_to_save.bias": torch.randn(5),
        f"{QKV}.base_layer.bias": torch.randn(shape[0]),  # bias="lora_only"
    }
    folder = adapter(tmp_path / "lora", factors(QKV, shape) | saved)
    model = vitlens.load(f"timm:test_vit@{base}@{folder}")
    state = model.module.state_dict()
    assert len(model.classes) == 5
    torch.testing.assert_close(state["head.weight"], saved["head.modules_to_save.weight"])
    torch.testing.assert_close(state[f"{QKV}.bias"], saved[f"{QKV}.base_layer.bias"])
    assert any("LoRA of rank 3 in 1 modules" in note for note in model.provenance.notes)


def test_the_command_line_takes_base_and_adapter(base, tmp_path):
    shape = tuple(load_file(str(base))[f"{QKV}.weight"].shape)
    folder = adapter(tmp_path / "lora", factors(QKV, shape))
    model = vitlens.load(f"timm:test_vit@{base}@{folder}")
    images = vitlens.load_data("digits", limit=2, preprocessing=model.preprocessing)
    record = ran(
        tmp_path / "out", f"stats timm:test_vit@{base}@{folder} --data digits --limit 2 --no-names"
    )
    table = vitlens.statistics(model, images)
    first = record.heads[0].statistics["entropy"].value
    assert first == pytest.approx(table.entropy[0, 0].item(), rel=1e-4)


def faulty(case: str, base: Path, folder: Path) -> str:
    """Write an adapter with a fault and return the name of the model with it."""
    before = load_file(str(base))
    shape = tuple(before[f"{QKV}.weight"].shape)
    tensors = factors(QKV, shape)
    settings: dict[str, Any] = {}
    if case == "shape":
        tensors = factors(QKV, (shape[0], shape[1] + 1))
    elif case == "rank":
        settings = {"r": 4}
    elif case == "targets":
        tensors = factors("vit.encoder.query", shape)
    elif case == "half a pair":
        tensors.popitem()
    elif case == "not finite":
        tensors[f"{QKV}.lora_A.weight"][0, 0] = torch.nan
    elif case in ("IA3", "ADALORA"):
        settings = {"peft_type": case}
    elif case == "DoRA":
        settings = {"use_dora": True}
    elif case == "pissa":
        settings = {"init_lora_weights": "pissa"}
    elif case == "pattern":
        settings = {"alpha_pattern": {"(a+)+b": 2}}
    elif case == "alpha":
        settings = {"lora_alpha": "6"}
    path = adapter(folder, tensors, **settings)
    if case == "pickle":
        (path / "adapter_model.safetensors").rename(path / "adapter_model.bin")
    elif case == "empty":
        (path / "adapter_config.json").write_text("[]")
    return f"timm:test_vit@{base}@{path}"


FAULTS = {
    "shape": (ModelError, "name the base model"),
    "rank": (ModelError, "expected factors of rank 4"),
    "targets": (ModelError, "does not have: 'vit.encoder.query.weight'"),
    "half a pair": (ModelError, "found only lora_A"),
    "not finite": (ModelError, "NaN"),
    "IA3": (UnsupportedError, "found IA3; merge it with merge_and_unload"),
    "ADALORA": (UnsupportedError, "found ADALORA"),
    "DoRA": (UnsupportedError, "found DoRA"),
    "pissa": (UnsupportedError, "found init_lora_weights pissa"),
    "pattern": (UnsupportedError, "expected names of modules"),
    "alpha": (ModelError, "lora_alpha"),
    "pickle": (ModelError, "could run code"),
    "empty": (UnsupportedError, "found None"),
}


@pytest.mark.parametrize("case", FAULTS)
def test_adapters_that_are_refused(base, tmp_path, case):
    kind, words = FAULTS[case]
    name = faulty(case, base, tmp_path / "lora")
    with one_line(kind, words):
        vitlens.load(name)


def test_models_that_take_no_adapter_and_an_adapter_without_its_base(base, tmp_path, capsys):
    folder = adapter(tmp_path / "lora", factors(QKV, (8, 8)), base_model_name_or_path="owner/vit")
    assert "with the LoRA adapter" in refusal(
        capsys, f"predict vit-digits@{folder} --data digits --limit 2"
    )
    assert "found both" in refusal(
        capsys, f"predict timm:test_vit@{folder} --random-weights --data digits --limit 2"
    )
    with one_line(ModelError, f"write hf:owner/vit@{folder}"):
        vitlens.load(f"hf:{folder}")


@needs_transformers
@pytest.mark.filterwarnings("ignore::FutureWarning")  # of peft about transformers
@pytest.mark.parametrize("name", ["vit", "vit-features"])
def test_peft_merges_to_the_same_outputs(tmp_path, name):
    """With a classifier of seven classes, on a classifier of five and on a backbone."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    import transformers

    folder, _ = folder_of(name)
    network = transformers.AutoModelForImageClassification.from_pretrained(
        folder, num_labels=7, ignore_mismatched_sizes=True
    )
    targets = [n for n, m in network.named_modules() if isinstance(m, torch.nn.Linear)]
    targets = [n for n in targets if "classifier" not in n]
    config = peft.LoraConfig(
        r=4,
        lora_alpha=10,
        use_rslora=True,
        target_modules=targets,
        modules_to_save=["classifier"],
        init_lora_weights=False,
        bias="all",
    )
    torch.manual_seed(0)
    tuned = peft.get_peft_model(network, config)
    for part in tuned.parameters():
        if part.requires_grad:
            part.data += 0.1 * torch.randn_like(part)
    tuned.save_pretrained(str(tmp_path / "lora"))
    whole = tuned.merge_and_unload().eval()
    model = vitlens.load(f"hf:{folder}@{tmp_path / 'lora'}")
    images = pixels()
    normalised = (images - model.mean) / model.std
    with torch.no_grad():
        expected = whole(pixel_values=normalised).logits
        torch.testing.assert_close(model(images), expected, rtol=1e-5, atol=1e-5)
    state = dict(whole.named_parameters())
    for module_name, parameter in model.module.network.named_parameters():
        torch.testing.assert_close(parameter, state[module_name], rtol=0, atol=1e-6)
