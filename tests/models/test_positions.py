"""Fixed position embeddings: the papers' formulas, other image sizes, files, and configurations of earlier files."""

import math
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from timm.layers.pos_embed_sincos import build_sincos2d_pos_embed

import vitlens
from vitlens.errors import InputError
from vitlens.models.configs import ViTConfig
from vitlens.models.loading import untrained
from vitlens.models.positions import FIXED, fixed_positions
from vitlens.models.rebuild import for_classes
from vitlens.models.saved import save
from vitlens.models.vit import VisionTransformer
from vitlens.typed import read_as

TINY = ViTConfig(image_size=(8, 12), patch_size=(4, 2), dim=16, depth=2, heads=2, classes=5)  # 2 x 6 patches
SMALL = {"dim": 16, "heads": 2, "depth": 2}


def test_one_dimension_is_the_formula_of_vaswani():
    found = fixed_positions("sine", grid=(2, 6), prefix=1, dim=16)
    assert found.shape == (1, 13, 16)
    assert not found[0, 0].any()
    for number in range(12):
        for i in range(8):
            angle = number / 10_000 ** (2 * i / 16)
            assert float(found[0, 1 + number, 2 * i]) == pytest.approx(math.sin(angle), abs=1e-6)
            assert float(found[0, 1 + number, 2 * i + 1]) == pytest.approx(math.cos(angle), abs=1e-6)


def of_mae(dim: int, side: int) -> np.ndarray:
    """As in util/pos_embed.py of facebookresearch/mae: get_2d_sincos_pos_embed with its grid, width first."""
    grid = np.stack(np.meshgrid(np.arange(side, dtype=np.float32), np.arange(side, dtype=np.float32)), axis=0)

    def one(half: int, places: np.ndarray) -> np.ndarray:
        omega = 1.0 / 10000 ** (np.arange(half // 2, dtype=np.float64) / (half / 2.0))
        out = np.einsum("m,d->md", places.reshape(-1), omega)
        return np.concatenate([np.sin(out), np.cos(out)], axis=1)

    return np.concatenate([one(dim // 2, grid[0]), one(dim // 2, grid[1])], axis=1)


@pytest.mark.parametrize(("dim", "side"), [(16, 3), (192, 14)])
def test_two_dimensions_are_those_of_mae(dim, side):
    found = fixed_positions("sine-2d", grid=(side, side), prefix=1, dim=dim)
    np.testing.assert_allclose(found[0, 1:].numpy(), of_mae(dim, side), atol=1e-6)


@pytest.mark.parametrize("grid", [(4, 4), (2, 6)])
def test_two_dimensions_are_timms_with_rows_and_columns_exchanged(grid):
    theirs = build_sincos2d_pos_embed(list(grid), dim=32, interleave_sin_cos=True)
    rows, columns = theirs.chunk(2, dim=1)
    found = fixed_positions("sine-2d", grid=grid, prefix=0, dim=32)[0]
    torch.testing.assert_close(found, torch.cat((columns, rows), dim=1), atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", FIXED)
@pytest.mark.parametrize("parts", [{}, {"registers": 2}, {"pooling": "mean"}, {"distillation": True}])
def test_they_are_added_to_all_but_registers(kind, parts):
    torch.manual_seed(0)
    model = VisionTransformer(replace(TINY, positions=kind, **parts)).eval()
    images = torch.rand(2, 3, 8, 12)
    tokens, layout = model.tokens(images), model.layout
    added = tokens[:, len(layout.prefix) :] - model.patch_embed(images)
    expected = fixed_positions(kind, grid=(2, 6), prefix=0, dim=16).expand(2, -1, -1)
    torch.testing.assert_close(added, expected, atol=1e-6, rtol=0)
    for place in layout.positions("cls"):
        torch.testing.assert_close(tokens[:, place], model.cls_token[0].expand(2, -1))


@pytest.mark.parametrize("kind", FIXED)
def test_they_are_no_parameters_and_not_in_files(kind, tmp_path):
    model = untrained("vit-mini", classes=("a", "b"), overrides={**SMALL, "positions": kind}).eval()
    without = untrained("vit-mini", classes=("a", "b"), overrides={**SMALL, "positions": "none"})
    assert model.parameter_count() == without.parameter_count()
    assert "pos_embed" not in model.module.state_dict()
    save(model, tmp_path / "model.safetensors")
    again = vitlens.load(str(tmp_path / "model.safetensors"))
    images = torch.rand(2, 3, 32, 32)
    assert torch.equal(again(images), model(images))
    assert not torch.equal(again(images), again(images.flip(-1)))


@pytest.mark.parametrize("kind", FIXED)
def test_another_image_size_computes_them_again(kind, tmp_path):
    model = VisionTransformer(replace(TINY, positions=kind)).eval()
    for size, grid in (((16, 12), (4, 6)), ((8, 20), (2, 10)), ((4, 4), (1, 2))):
        images = torch.rand(1, 3, *size)
        added = (model.tokens(images)[:, 1:] - model.patch_embed(images))[0]
        torch.testing.assert_close(added, fixed_positions(kind, grid=grid, prefix=0, dim=16)[0], atol=1e-6, rtol=0)
    small = untrained("vit-mini", classes=("a", "b"), overrides={**SMALL, "positions": kind}).eval()
    save(small, tmp_path / "model.safetensors")
    large = vitlens.load(str(tmp_path / "model.safetensors"), image_size=(64, 32))
    adapted = for_classes(large, ("a", "b", "c"))
    assert adapted.module.config.image_size == (64, 32)
    assert "computed the position embeddings again" in " ".join(adapted.provenance.notes)
    assert "pos_embed" not in adapted.module.state_dict()
    images = torch.rand(1, 3, 64, 32)
    assert torch.equal(adapted.module.tokens(images), large.module.tokens(images))


def test_true_and_false_of_earlier_files_are_learned_and_none():
    assert ViTConfig(positions=True) == ViTConfig() == ViTConfig(positions="learned")
    assert ViTConfig(positions=False) == ViTConfig(positions="none")
    for written, positions in ((True, "learned"), (False, "none"), ("sine-2d", "sine-2d")):
        stored = asdict(ViTConfig()) | {"positions": written}
        assert read_as(ViTConfig, stored, source="a file").positions == positions
    old = untrained("vit-mini", classes=("a", "b"), overrides={**SMALL, "positions": True}, seed=3)
    new = untrained("vit-mini", classes=("a", "b"), overrides={**SMALL, "positions": "learned"}, seed=3)
    assert all(torch.equal(one, new.module.state_dict()[name]) for name, one in old.module.state_dict().items())
    assert untrained("vit-mini", classes=("a",), overrides={**SMALL, "positions": False}).module.pos_embed is None


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        (
            {"positions": "sine-2d", "dim": 18, "heads": 2},
            "dim divisible by 4 with positions 'sine-2d', found 18; try 20",
        ),
        ({"positions": "sine", "dim": 15, "heads": 3}, "dim divisible by 2 with positions 'sine', found 15; try 16"),
    ],
)
def test_refused(changes, match):
    with pytest.raises(InputError, match=match):
        ViTConfig(**changes)
    with pytest.raises(InputError, match=r"shape of vit-mini.*'sine-2d'.*found 'rotary'"):
        untrained("vit-mini", classes=("a",), overrides={"positions": "rotary"})
    with pytest.raises(InputError, match="found positions 'none'"):
        VisionTransformer(replace(TINY, positions="none")).positions((2, 6))
    with pytest.raises(InputError, match="expected fixed positions of sine or sine-2d, found 'learned'"):
        fixed_positions("learned", grid=(2, 2), prefix=0, dim=8)
