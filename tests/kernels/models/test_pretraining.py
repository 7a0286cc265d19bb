"""The pretraining of a model from names and sources, without a guess."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import timm

import vitlens
from tests.kit.models.files import written
from tests.kit.models.transformers import folder_of
from tests.kit.tiny import timm_model
from vitlens.models.pretraining_history import (
    TRAINED,
    PretrainingHistory,
    pretraining_of,
    read_name,
)
from vitlens.training.objectives.registry import OBJECTIVES

NAMES = {  # name -> objective, recipe, data, labels afterwards
    "vit_small_patch16_224.dino": ("self-supervised", "DINO", "", ""),
    "hiera_tiny_224.mae_in1k_ft_in1k": ("self-supervised", "MAE", "ImageNet-1k", "ImageNet-1k"),
    "convnextv2_tiny.fcmae_ft_in1k": ("self-supervised", "FCMAE", "", "ImageNet-1k"),
    "beit_base_patch16_224.in22k_ft_in22k_in1k": (
        "self-supervised",
        "BEiT",
        "ImageNet-22k",
        "ImageNet-22k, ImageNet-1k",
    ),
    "vit_huge_patch14_gap_224.in1k_ijepa": ("self-supervised", "I-JEPA", "ImageNet-1k", ""),
    "vit_base_patch16_clip_224.openai": ("language-image", "CLIP", "WIT-400M", ""),
    "vit_base_patch16_clip_224.laion2b_ft_in12k_in1k": (
        "language-image",
        "CLIP",
        "LAION-2B",
        "ImageNet-12k, ImageNet-1k",
    ),
    "vit_base_patch16_siglip_224.v2_webli": ("language-image", "SigLIP 2", "WebLI", ""),
    "vit_base_patch16_224.augreg_in21k_ft_in1k": (
        "supervised",
        "labels",
        "ImageNet-21k",
        "ImageNet-1k",
    ),
    "vit_base_patch16_siglip_224.ft_in1k": ("language-image", "SigLIP", "", "ImageNet-1k"),
    "resnet50.ft_in1k": ("supervised", "labels", "ImageNet-1k", "ImageNet-1k"),
    # the optimiser, not the masks
    "vit_base_patch16_224.sam_in1k": (
        "supervised",
        "labels",
        "ImageNet-1k",
        "",
    ),
    "deit_tiny_patch16_224.fb_in1k": (
        "supervised",
        "labels, DeiT's recipe or distillation",
        "ImageNet-1k",
        "",
    ),
    "resnet50.fb_swsl_ig1b_ft_in1k": ("supervised", "hashtags", "Instagram 1B", "ImageNet-1k"),
    "vit_mae facebook/vit-mae-base": ("self-supervised", "MAE", "", ""),
    "vit_tiny_patch16_224": ("not known", "", "", ""),  # weights of the user's
    "beit3_base_patch16_224.pt": ("not known", "", "", ""),
}


@pytest.mark.parametrize("name", NAMES)
def test_names(name):
    read = read_name(name)
    assert (read.objective, read.recipe, read.data, read.labels) == NAMES[name]


def test_most_of_timms_names_are_known_and_none_of_dino_or_clip_is_called_supervised():
    objectives = {name: read_name(name).objective for name in timm.list_pretrained()}
    assert list(objectives.values()).count("not known") < 0.05 * len(objectives)
    for word, objective in (
        ("dino", "self-supervised"),
        ("clip", "language-image"),
        (".mae", "self-supervised"),
    ):
        assert {read for name, read in objectives.items() if word in name} == {objective}


def read_pretraining(
    model: vitlens.Model, name: str, weights: str = "hub", **stated: Any
) -> PretrainingHistory:
    """Describe the model as if these weights, of the hub or of a file, had been loaded."""
    model.provenance = replace(model.provenance, name=name, weights=weights)
    return pretraining_of(model, **stated)


def test_the_source_tells_and_the_user_knows_better_but_not_of_random_weights():
    digits = pretraining_of(vitlens.load("vit-digits"))
    assert (digits.objective, digits.data, digits.source) == (
        "supervised",
        "digits",
        "bundled with vitlens",
    )
    dino = timm_model("vit_small_patch14_reg4_dinov2")
    name = "timm:vit_small_patch14_reg4_dinov2"
    assert pretraining_of(dino, objective="self-supervised").objective == "random weights"
    hub = read_pretraining(dino, name)
    unstated = read_pretraining(dino, name, "mine.safetensors")
    # timm's tag of its own weights
    assert (hub.recipe, hub.data, hub.source) == (
        "DINOv2",
        "LVD-142M",
        "its name",
    )
    assert (unstated.objective, unstated.data) == ("self-supervised", "")
    assert "user's file" in unstated.source
    assert read_pretraining(dino, f"{name}.lvd142m", "mine.safetensors").data == "LVD-142M"
    assert read_pretraining(dino, "torchvision:vit_b_16").data == "ImageNet-1k"
    assert read_pretraining(dino, "torchvision:vit_b_16", "mine.pth") == (
        PretrainingHistory("not known")
    )
    plain = "timm:vit_tiny_patch16_224", "mine.safetensors"
    assert read_pretraining(dino, *plain, objective="self-supervised") == PretrainingHistory(
        "self-supervised", source="--objective"
    )
    stated = read_pretraining(dino, name, "mine.safetensors", objective="self-supervised")
    # the word agrees with the name
    assert (stated.recipe, stated.source) == (
        "DINOv2",
        "--objective",
    )
    assert read_pretraining(dino, name, "mine.safetensors", objective="supervised").recipe == ""


@pytest.mark.parametrize("name", ["vit-micro@random", "timm:test_vit@random"])
def test_weights_without_the_record_of_their_run_are_not_known(name, tmp_path):
    written(vitlens.load(name, image_size=32), tmp_path)
    for place in (tmp_path, tmp_path / "model.safetensors"):
        assert pretraining_of(vitlens.load(str(place))) == PretrainingHistory("not known")


def test_every_objective_of_training_is_a_known_pretraining():
    assert set(TRAINED) == set(OBJECTIVES)


def run_folder(folder: Path, *, parent: str, weights: str, objective: str, data: str) -> str:
    """Write a preset with the config.json of a training."""
    folder.mkdir()
    written(vitlens.load("vit-micro@random"), folder)
    config = {
        "command": "train",
        "options": {"objective": objective},
        "models": [{"name": parent, "weights": weights}],
        "data": {"name": data},
    }
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.mark.parametrize(("objective", "read"), TRAINED.items())
def test_a_run_folder_has_the_pretraining_of_its_training(objective, read, tmp_path):
    scratch = {"parent": "vit-micro", "weights": "training", "data": "shapes"}
    folder = run_folder(tmp_path / "run", objective=objective, **scratch)
    for place in (folder, f"{folder}/model.safetensors"):
        pretraining = pretraining_of(vitlens.load(place))
        assert (pretraining.objective, pretraining.recipe) == read
        assert (pretraining.data, pretraining.source) == ("shapes", "its run folder")


def test_a_fine_tuned_run_has_the_pretraining_of_the_model_that_it_started_from(tmp_path):
    scratch = {"parent": "vit-micro", "weights": "training", "data": "shapes"}
    start = run_folder(tmp_path / "dino", objective="dino", **scratch)
    tuned = {"weights": "model.safetensors", "objective": "classify", "data": "digits"}
    folder = run_folder(tmp_path / "tuned", parent=start, **tuned)
    read = pretraining_of(vitlens.load(folder))
    assert (read.objective, read.data, read.labels) == ("self-supervised", "shapes", "digits")
    bundled = run_folder(tmp_path / "more", parent="vit-digits", **tuned)
    assert pretraining_of(vitlens.load(bundled)).objective == "supervised"
    lost = run_folder(tmp_path / "lost", parent=str(tmp_path / "gone"), **tuned)
    assert pretraining_of(vitlens.load(lost)) == PretrainingHistory("not known")


def test_a_text_tower_tells():
    pytest.importorskip("open_clip", reason="needs the extra clip: pip install open_clip_torch")
    from tests.kit.models.clip import tiny

    read = read_pretraining(tiny(), "open-clip:ViT-B-32/laion2b_s34b_b79k")
    assert (read.objective, read.recipe, read.data) == ("language-image", "CLIP", "LAION-2B")
    read = read_pretraining(tiny(), "open-clip:ViT-B-16-SigLIP/webli")
    assert (read.recipe, read.data, read.source) == ("SigLIP", "WebLI", "its text tower")
    # a folder's name says nothing
    assert read_pretraining(tiny(), "runs/laion2b", "model.safetensors").data == ""


@pytest.mark.parametrize(
    ("family", "recipe"),  # "": not known, the architecture of supervised models and of DINO
    [("vit", ""), ("dinov3", "DINOv3"), ("clip", "CLIP")],
)
def test_a_folder_of_transformers_is_known_by_its_model_type(family, recipe):
    pytest.importorskip("transformers", minversion="5", reason="the extra hf is not installed")
    read = pretraining_of(vitlens.load(f"hf:{folder_of(family)[0]}"))
    assert (read.recipe, read.objective == "not known") == (recipe, not recipe)
