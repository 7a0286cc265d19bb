"""The attention report: all layers, whatever the family."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from vitlens.errors import UnsupportedError
from vitlens.models.zoo import load
from vitlens.runs.attention import attention
from vitlens.runs.options import ModelOptions, RunOptions

OPTIONS = RunOptions(device="cpu", quiet=True)


def run(model: Path | str, out: Path, **changes: object) -> dict:
    random = ModelOptions(random_weights=":" in str(model))
    attention(str(model), model_options=random, options=replace(OPTIONS, out=out), **changes)
    return json.loads((out / "results.json").read_text())


def test_the_maps_are_the_cls_rows(tiny_vit, pictures, tmp_path):
    results = run(tiny_vit, tmp_path / "out", images=[str(pictures)])
    assert [row["layer"] for row in results["tables"]["layers"]] == [0, 1]
    kept = np.load(tmp_path / "out" / "arrays" / "attention.npz")
    import vitlens

    specimen = load(str(tiny_vit))
    images = torch.from_numpy(kept["images"]).float() / 255
    for layer, weights in enumerate(vitlens.attention(specimen, images)):
        assert torch.from_numpy(kept[f"layer{layer}"]).flatten(2).allclose(weights[:, :, 0, 1:], atol=1e-6)


def test_a_windowed_model_has_a_grid_of_heads_for_each_stage(pictures, tmp_path):
    results = run("torchvision:swin_t", tmp_path / "out", images=[str(pictures / "0.png")])
    assert len(results["tables"]["layers"]) == 12
    assert {path.stem for path in (tmp_path / "out" / "figures").glob("heads*.png")} == {
        f"heads_{i}" for i in (1, 2, 3, 4)
    }


def test_a_cnn_is_refused_in_one_line(tiny_cnn, pictures, tmp_path):
    with pytest.raises(UnsupportedError, match="softmax attention"):
        run(tiny_cnn, tmp_path / "out", images=[str(pictures)])
    assert not (tmp_path / "out").exists()


def test_more_images_than_a_page_holds_are_left_out_and_said(tiny_vit, tmp_path):
    attention(
        str(tiny_vit),
        data="digits",
        model_options=ModelOptions(),
        options=replace(OPTIONS, limit=30, out=tmp_path / "out"),
    )
    kept = np.load(tmp_path / "out" / "arrays" / "attention.npz")
    assert len(kept["images"]) == 8
    assert "Only the first 8 of 30 images" in (tmp_path / "out" / "report.md").read_text()
