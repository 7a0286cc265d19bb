"""Composites of images of one colour each: where the evidence lies, and what an ideal, a uniform and an opposite map
score there."""

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.kit.commands import ran
from tests.kit.planted_colours import SIDE, coloured, near, write
from tests.kit.planted_methods import planted_methods
from vitlens import Model
from vitlens.commands.explain.record import ExplainRecord

PARTS = {  # classes, explained ones, the share of a composite that one covers
    "mosaic-2": (4, 4, 1 / 4), "mosaic-3": (9, 9, 1 / 9), "embedded": (2, 1, 1 / 4), "pasted": (2, 1, 1 / 4)
}  # fmt: skip
COUNT = 3
LINE = f"--verify --no-counterfactuals --no-stability --other-substrates none --composite-count {COUNT}"


def uniform(_model: Model, images: Tensor, _targets: Tensor) -> Tensor:
    return torch.ones(len(images), 6, 6)


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> ExplainRecord:
    folder = tmp_path_factory.mktemp("composites")
    planted = {"saliency": near, "occlusion": lambda *given: -near(*given), "gradcam": uniform}
    with planted_methods(planted):
        line = f"{LINE} --method {','.join(planted)} --composites {','.join(PARTS)}"
        return ran(folder / "run", f"explain {write(folder)} {line}")


@pytest.mark.parametrize("kind", PARTS)
def test_the_evidence_lies_where_the_mask_says_and_another_class_everywhere_else(record, kind):
    (made,) = (row for row in record.composite_sets if row.kind == kind)
    classes, each, chance = PARTS[kind]
    assert (made.refused, made.composites, made.maps) == ("", COUNT, COUNT * each)
    assert (made.guessed, made.chance) == (pytest.approx(classes / 12, abs=1e-5), pytest.approx(chance))
    assert (made.recognised.value, made.seen, made.labels) == (1.0, kind != "mosaic-3", "predictions")
    arrays = record.composite_maps[f"{kind}-hues"]
    colours = (255 * coloured().module.colours).round().byte().numpy()
    names = "abcdefghijkl"
    for image, mask, target in zip(arrays.images, arrays.masks, arrays.targets, strict=True):
        pixels = np.asarray(image)
        pixels = pixels.transpose(1, 2, 0) if pixels.shape[0] == 3 else pixels
        own = colours[names.index(str(target))]
        assert (np.abs(pixels[mask].astype(int) - own) <= 1).all()
        away = np.abs(pixels[~mask].astype(int) - own).max(1)
        assert (away > 60).mean() > 0.9 if kind == "pasted" else (away > 60).all()
        assert len(np.unique(pixels.reshape(-1, 3), axis=0)) == classes or kind == "pasted"
    if kind.startswith("mosaic"):
        assert np.unique(arrays.masks.sum((1, 2))).tolist() == [(SIDE // int(kind[-1])) ** 2]
        assert len({str(target) for target in arrays.targets}) == len(arrays.targets)
        assert arrays.masks.sum(0).max() == 1  # cells share no pixel


@pytest.mark.parametrize("kind", PARTS)
def test_an_ideal_a_uniform_and_an_opposite_map(record, kind):
    rows = {row.method: row for row in record.composites if row.kind == kind}
    ideal, none, even = (rows[name] for name in ("saliency", "occlusion", "gradcam"))
    assert [each.value for each in (ideal.mass, ideal.pointing, ideal.roc_auc)] == pytest.approx([1, 1, 1], abs=1e-2)
    assert (none.mass.value, none.roc_auc.value) == (0, pytest.approx(0, abs=1e-2))  # negative is no mass
    assert even.roc_auc.value == 0.5
    assert even.mass.value == even.pointing.value == pytest.approx(PARTS[kind][2], abs=1e-6)  # all points tie
    assert ideal.mass.n == COUNT * PARTS[kind][1]


def test_too_few_classes_make_no_mosaic(tmp_path):
    words = write(tmp_path)
    for index in range(3, 12):
        for part in ("images", "masks"):
            (tmp_path / "data" / part / f"{index:02}.png").unlink()
    with planted_methods({"saliency": near, "gradcam": uniform}):
        found = ran(tmp_path / "run", f"explain {words} {LINE} --method saliency,gradcam --composites mosaic-2")
    assert all(row.refused and row.composites == 0 for row in found.composite_sets)
    assert found.composites == ()
