"""The effective receptive field of `vitlens attention`: exact zeros where nothing is seen, numbers of its own map."""

from pathlib import Path

import numpy as np
import pytest
import torch

import vitlens
from tests.kit.commands import ran
from tests.kit.making import CLASSES, save, untrained
from vitlens.commands.attention.record import AttentionRecord


@pytest.fixture(scope="module", params=[False, True], ids=["still", "shifted"])
def measured(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, AttentionRecord]:
    """A Swin of two stages, 4 x 4 patches of 2 x 4 px in a window, on one image."""
    shape = {"dim": 16, "depths": [2, 2], "heads": [2, 2], "patch_size": [2, 4], "shift": request.param}
    folder = tmp_path_factory.mktemp("swin")
    save(untrained("swin-micro", classes=CLASSES, overrides=shape), folder / "model" / "model.safetensors")
    return folder / "model", ran(folder / "out", f"attention {folder / 'model'} --data digits --limit 1")


def test_windows_without_shift_see_one_window_and_with_shift_more(measured: tuple[Path, AttentionRecord]) -> None:
    fields, shifted = measured[1].receptive_fields, vitlens.load(str(measured[0])).module.config.shift
    seen = [8 * 16 / 32**2, (16 * 32 if shifted else 8 * 16) / 32**2, 16 * 32 / 32**2]  # a shifted one touches four
    assert [row.seen for row in fields][:2] == seen[:2]
    if not shifted:
        assert [row.seen for row in fields][2:] == seen[2:] * 2  # merged patches are twice as large
        field = measured[1].field_maps.field[0]
        assert (field[16:24, 16:32] > 0).all()  # the window of the patch in the middle
    assert [row.layer for row in fields] == [0, 1, 2, 3]


def test_numbers_are_those_of_the_map(measured: tuple[Path, AttentionRecord]) -> None:
    """Of one image the map is its norms."""
    for index, row in enumerate(measured[1].receptive_fields):
        field = measured[1].field_maps.field[index].astype(np.float64)
        grid = ((16, 8), (16, 8), (8, 4), (8, 4))[index]
        down, across = (np.arange(32) + 0.5 - (side // 2 + 0.5) * 32 / side for side in grid)
        apart = np.hypot(down[:, None], across)
        assert row.distance.value == pytest.approx((field * apart).sum() / field.sum(), rel=1e-4)
        assert row.uniform == pytest.approx(apart.mean(), rel=1e-6)
        held = np.sort(field.ravel())[::-1].cumsum()
        assert row.half.value == pytest.approx(((held < field.sum() / 2).sum() + 1) / 1024, abs=2 / 1024)
        assert row.seen == (field > 0).mean()
        assert (row.distance.n, row.distance.low) == (1, None)


def test_the_map_is_the_norm_of_the_gradients_of_the_middle_patch(measured: tuple[Path, AttentionRecord]) -> None:
    """Up to the noise of four random directions, which falls with a mean over pixels."""
    model, (image,) = vitlens.load(str(measured[0])), vitlens.load_data("digits", limit=1).batches(1)
    pixels, kept = image.images.clone().requires_grad_(), []
    block = model.module.get_submodule(model.anatomy.blocks[0])
    hook = block.register_forward_hook(lambda _module, _inputs, tokens: kept.append(tokens))
    model(pixels)
    hook.remove()
    tokens = kept[0].flatten(1, -2)[0, 8 * 8 + 4]  # row 8 and column 4 of 16 x 8
    gradients = [torch.autograd.grad(each, pixels, retain_graph=True)[0][0] for each in tokens]
    exact = torch.stack(gradients).square().sum((0, 1)).sqrt().numpy()
    found = measured[1].field_maps.field[0]
    assert ((found > 0) == (exact > 0)).all()
    assert found.sum() == pytest.approx(exact.sum(), rel=0.25)
    inside = exact > 0
    assert np.corrcoef(found[inside], exact[inside])[0, 1] > 0.8
