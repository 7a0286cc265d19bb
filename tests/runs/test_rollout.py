"""The rollout report says what the functions compute."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from vitlens.analysis.localisation import mask_areas, pointing_hits
from vitlens.analysis.rollout import rollout as rollout_maps
from vitlens.data.digits import digits
from vitlens.errors import InputError, UnsupportedError
from vitlens.models.zoo import load
from vitlens.runs.options import ModelOptions, RunOptions
from vitlens.runs.rollout import rollout

OPTIONS = RunOptions(device="cpu", limit=12, batch_size=5, quiet=True)


def run(model: Path | str, out: Path, **changes: object) -> dict:
    from dataclasses import replace

    written = rollout(str(model), model_options=ModelOptions(), options=replace(OPTIONS, out=out), **changes)
    assert written == out / "report.md"
    return json.loads((out / "results.json").read_text())


def test_metrics_are_the_pointing_game_on_the_masks(tiny_vit, tmp_path):
    results = run(tiny_vit, tmp_path / "out", data="digits", fusion=("max",))
    split = digits("test").limit(12)
    specimen = load(str(tiny_vit))
    maps = torch.cat([rollout_maps(specimen, batch.images, fusion="max") for batch in split.batches(7)])
    hits = pointing_hits(maps, split.masks)
    metric = results["metrics"]["localisation/pointing/rollout-max"]
    assert metric["value"] == pytest.approx(hits.float().mean().item())
    assert metric["n"] == 12
    area = results["metrics"]["localisation/pointing/mask-area"]
    assert area["value"] == pytest.approx(mask_areas(split.masks).mean().item(), abs=1e-6)
    kept = np.load(tmp_path / "out" / "arrays" / "rollout.npz")["maps"]
    assert torch.from_numpy(kept[:, 0]).allclose(maps, atol=1e-6)


def test_images_have_no_pointing_game(tiny_vit, pictures, tmp_path):
    results = run(tiny_vit, tmp_path / "out", images=[str(pictures)])
    assert not [name for name in results["metrics"] if name.startswith("localisation")]
    assert len(results["tables"]["images"]) == 3


def test_an_unreadable_image_is_counted_and_named(tiny_vit, pictures, tmp_path):
    broken = tmp_path / "broken.jpg"
    broken.write_text("no image")
    run(tiny_vit, tmp_path / "out", images=[str(pictures), str(broken)])
    text = (tmp_path / "out" / "report.md").read_text()
    assert "1 image could not be read" in text
    assert "broken.jpg" in text


def test_refusals_write_nothing(tiny_vit, tiny_cnn, pictures, tmp_path):
    for error, model, changes in (
        (UnsupportedError, tiny_cnn, {}),
        (InputError, tiny_vit, {"discard": 1.0}),
        (InputError, tiny_vit, {"start_layer": 2}),
        (InputError, tiny_vit, {"images": [str(pictures)], "data": "digits"}),
        (InputError, tmp_path / "nothing", {}),
    ):
        with pytest.raises(error):
            run(model, tmp_path / "out", **changes)
        assert not (tmp_path / "out" / "report.md").exists()
