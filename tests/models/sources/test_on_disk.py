"""Weights in the caches of the hubs: which files are taken for timm's ViTs, and that nothing is written."""

from pathlib import Path

import pytest

from vitlens.models.sources.hub import vits_on_disk


@pytest.fixture
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Empty caches of Hugging Face's hub and of torch.hub."""
    monkeypatch.delenv("TORCH_HOME", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hf" / "hub"))
    return tmp_path / "hf" / "hub", tmp_path / "cache" / "torch" / "hub" / "checkpoints"


def cached(hub: Path, name: str, file: str = "model.safetensors", snapshot: str = "0a") -> Path:
    place = hub / f"models--timm--{name}" / "snapshots" / snapshot / file
    place.parent.mkdir(parents=True)
    place.write_bytes(b"weights")
    return place


def test_no_caches_hold_nothing(caches):
    assert vits_on_disk() == ()
    assert not caches[0].exists()
    assert not caches[1].exists()


def test_vits_of_imagenet_are_found_by_name_and_others_are_not(caches):
    hub, checkpoints = caches
    base = cached(hub, "vit_base_patch16_224.augreg2_in21k_ft_in1k")
    for name in (
        "vit_small_patch14_dinov2.lvd142m", "vit_base_patch16_clip_224.openai", "vit_base_patch16_224.augreg_in21k",
        "resnet50.a1_in1k", "swin_tiny_patch4_window7_224.ms_in1k", "vit_base_patch16_224.no_such_tag", "nonsense",
    ):  # fmt: skip
        cached(hub, name)
    cached(hub, "deit3_small_patch16_224.fb_in1k", file="config.json")  # without weights
    checkpoints.mkdir(parents=True)
    tiny = checkpoints / "deit_tiny_patch16_224-a1311bcf.pth"
    for file in (tiny, checkpoints / "resnet18-5c106cde.pth", checkpoints / "dino_deitsmall16_pretrain.pth"):
        file.write_bytes(b"weights")
    found = vits_on_disk()
    assert [(model.name, model.weights) for model in found] == [
        ("timm:deit_tiny_patch16_224", str(tiny)),
        ("timm:vit_base_patch16_224.augreg2_in21k_ft_in1k", str(base)),
    ]
    assert [model.alias for model in found] == ["deit_tiny_patch16_224", "vit_base_patch16_224.augreg2_in21k_ft_in1k"]


def test_a_link_whose_file_is_gone_is_no_weights(caches):
    gone = cached(caches[0], "deit_tiny_patch16_224.fb_in1k")
    gone.unlink()
    gone.symlink_to(gone.with_name("blob"))
    assert vits_on_disk() == ()
