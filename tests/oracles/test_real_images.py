"""DeiT-tiny's real weights on photographs and 56 COCO objects, against stored results.

They are logits, attention, rollout, relevance and figures, made outside this project with timm's
unfused attention and plain loops.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score
from torch import Tensor
from torch.nn import functional as F

import vitlens
from tests.kit import chefer
from tests.kit.select import index_by
from tests.oracles.test_attention import difference
from vitlens import Model, Split
from vitlens.cli.main import run
from vitlens.commands.run.publish import read_folder

# ROC-AUC, as data/README says of the stored maps
FIGURES = {
    "rollout": 0.676,
    "attention": 0.708,
    "relevance": 0.872,
}


@pytest.fixture(scope="module")
def weights(real_data: Path) -> str:
    return (
        f"timm:deit_tiny_patch16_224@{real_data / 'weights' / 'deit_tiny_patch16_224.safetensors'}"
    )


@pytest.fixture(scope="module")
def deit(weights: str) -> Model:
    return vitlens.load(weights)


@pytest.fixture(scope="module")
def reference(real_data: Path) -> dict[str, Any]:
    with np.load(real_data / "deit_tiny_reference.npz", allow_pickle=False) as stored:
        return {name: stored[name] for name in stored.files}


@pytest.fixture(scope="module")
def photos(real_data: Path, reference: dict[str, Any]) -> list[Path]:
    return [real_data / "photos" / str(name).removeprefix("photos/") for name in reference["files"]]


@pytest.fixture(scope="module")
def some(deit: Model, photos: list[Path], reference: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return ten photographs and their classes."""
    return vitlens.images(photos[::30], deit), torch.from_numpy(reference["labels"][::30])


@pytest.fixture(scope="module")
def split(real_data: Path, deit: Model) -> Split:
    return vitlens.load_data(str(real_data / "coco_masks"), preprocessing=deit.preprocessing)


@pytest.mark.parametrize("step", [60, pytest.param(1, marks=pytest.mark.slow)])
def test_stored_logits(deit, photos, reference, step):
    chosen = photos[::step]
    with torch.no_grad():
        logits = torch.cat(
            [deit(vitlens.images(chosen[at : at + 20], deit)) for at in range(0, len(chosen), 20)]
        )
    # the largest difference over all 300 photographs was 1.5e-5 where this was written
    torch.testing.assert_close(
        logits, torch.from_numpy(reference["logits"][::step]).float(), atol=1e-4, rtol=0
    )
    if step == 1:
        correct = (logits.argmax(-1) == torch.from_numpy(reference["labels"])).float().mean().item()
        assert round(100 * correct, 1) == 78.3
    assert (deit.layout.grid, deit.layout.prefix, deit.parameter_count()) == (
        (14, 14),
        ("cls",),
        5_717_416,
    )


def test_attention_is_timms_own_unfused(deit, photos):
    assert difference(deit, vitlens.images(photos[:1], deit)) < 1e-10


@pytest.mark.parametrize("truth", [False, True])
def test_direct_contributions_of_heads_and_the_rest_sum_to_the_logit(deit, some, truth):
    batch, labels = (part[:4] for part in some)
    contributions = vitlens.direct_logit_attribution(
        deit, batch, targets=labels if truth else "predicted"
    )
    assert contributions.heads.shape == (4, 12, 3)
    assert contributions.logit.abs().max() > 5
    torch.testing.assert_close(contributions.total(), contributions.logit, atol=1e-4, rtol=0)
    heads = contributions.heads.abs().mean((0, 2))
    assert heads[8:].mean() > 3 * heads[2:7].mean()  # the classifier is written in the last layers


def test_the_answer_is_made_in_the_last_layers(deit, some):
    batch, labels = some
    lens = vitlens.logit_lens(deit, batch).logits
    with torch.no_grad():
        torch.testing.assert_close(lens[:, -1], deit(batch), atol=1e-4, rtol=0)
    accuracy = (lens.argmax(-1) == labels.unsqueeze(1)).float().mean(0)
    assert accuracy[:6].max() <= 0.2
    assert accuracy[-1] >= 0.6


def test_a_folder_of_masks_is_read_whole(split, reference, real_data):
    assert split.files == tuple(sorted(Path(str(name)).name for name in reference["map_files"]))
    assert split.masks.shape == (56, 224, 224)
    assert not split.skipped
    assert split.labels[0] == 340  # a zebra
    entries = json.loads((real_data / "coco_masks" / "index.json").read_text())
    areas = dict(zip(split.files, split.masks.flatten(1).float().mean(1).tolist()))
    assert areas == pytest.approx(
        {entry["file"]: entry["mask_area"] for entry in entries}, abs=1e-4
    )


@pytest.mark.parametrize("count", [4, pytest.param(56, marks=pytest.mark.slow)])
def test_our_maps_are_the_stored_ones(split, reference, deit, count):
    names = [Path(str(name)).name for name in reference["map_files"]]
    chosen = split.pick(torch.arange(0, 56, 56 // count))
    order = [names.index(name) for name in chosen.files]
    for place, method in enumerate(FIGURES):
        expected = torch.from_numpy(reference["maps"][order, place]).float()
        maps = vitlens.explain(deit, chosen, targets="label", method=method).flatten(1)
        assert expected.std(-1).min() > 1e-5  # a map of even numbers would not pass
        torch.testing.assert_close(maps, expected, atol=1e-4, rtol=0)
        # some are small: relative to their largest too, image by image
        assert ((maps - expected).abs().amax(1) < 1e-3 * expected.amax(1)).all()


def test_a_script_by_chefers_formula_gives_the_stored_relevance(split, reference, deit):
    """The script that makes maps elsewhere, for the test below and that of vit-digits."""
    chosen = split.pick(torch.tensor([0, 30]))
    (batch,) = chosen.batches(2)
    state = {name: value.detach() for name, value in deit.module.state_dict().items()}
    maps = chefer.relevance(
        state, heads=3, pixels=deit.prepare(batch.images), targets=chosen.labels
    )
    names = [Path(str(name)).name for name in reference["map_files"]]
    expected = reference["maps"][[names.index(name) for name in chosen.files], 2]
    torch.testing.assert_close(
        maps.flatten(1), torch.from_numpy(expected).float(), atol=1e-5, rtol=1e-3
    )


@pytest.mark.slow
def test_maps_made_elsewhere_are_judged_rightly(weights, split, reference, real_data, tmp_path):
    """The stored relevance, noise, and the mean mask, in files with other orders of images."""
    names = np.array([Path(str(name)).name for name in reference["map_files"]])
    noise = torch.rand(56, 14, 14, generator=torch.Generator().manual_seed(3))
    files = {
        "chefer": torch.from_numpy(reference["maps"][:, 2]).float().unflatten(1, (14, 14)),
        "noise": noise,
        "mean-mask": split.masks.float().mean(0).expand(56, -1, -1),
    }
    line = f"explain deit={weights} --data {real_data / 'coco_masks'} --target true --limit 20"
    line += " --verify --no-counterfactuals --substrate mean --other-substrates none"
    line += f" --method attention --device cpu --quiet --out {tmp_path / 'out'}"
    for name, maps in files.items():
        path = chefer.save(tmp_path / f"{name}.npz", maps.flip(0), files=names[::-1])
        line += f" --maps {path}"
    assert run(line.split()) == 0
    record = read_folder(tmp_path / "out")
    checks = index_by(record.checks, "method", "check")
    for check in ("imputed", "mean"):
        assert checks["chefer", check].state == "pass"
        assert "random" in checks["noise", check].lacks
        assert checks["mean-mask", check].lacks == ("one map",)
    assert checks["chefer", "object"].state == "pass"
    league = index_by(record.league, "method")
    assert league["chefer"].roc_auc.value > league["mean-mask"].roc_auc.value


@pytest.mark.slow
@pytest.mark.parametrize(("start", "readout", "auc"), [(0, "cls", 0.846), (8, "mean", 0.855)])
def test_legrad_finds_objects_as_well_as_was_measured_apart(split, deit, start, readout, auc):
    maps = vitlens.explain(
        deit, split, targets="label", method="legrad", start_layer=start, readout=readout
    )
    large = F.interpolate(maps[:, None], size=split.masks.shape[1:], mode="bilinear")
    scores = [
        roc_auc_score(mask.flatten(), heat_map.flatten())
        for mask, heat_map in zip(split.masks, large, strict=True)
    ]
    assert np.mean(scores) == pytest.approx(auc, abs=3e-3)


@pytest.mark.slow
def test_the_command_has_the_stored_figures(weights, real_data, tmp_path):
    line = [
        "explain",
        f"deit={weights}",
        "--data",
        str(real_data / "coco_masks"),
        "--method",
        ",".join(FIGURES),
    ]
    assert (
        run(
            [
                *line,
                "--target",
                "true",
                "--device",
                "cpu",
                "--quiet",
                "--out",
                str(tmp_path / "out"),
            ]
        )
        == 0
    )
    metrics = vitlens.read(tmp_path / "out").metrics
    for method, auc in FIGURES.items():
        [score] = [
            metric.value
            for name, metric in metrics.items()
            if "roc_auc" in name and name.endswith(method)
        ]
        assert score == pytest.approx(auc, abs=6e-4), method
