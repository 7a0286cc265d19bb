"""Fixed position embeddings: the papers' formulas, other image sizes, files, and configurations of earlier files."""

import math
from dataclasses import asdict, replace

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


@pytest.mark.parametrize("grid", [(4, 4), (2, 6)])
def test_two_dimensions_are_those_of_mae_which_are_timms_with_rows_and_columns_exchanged(grid):
    rows, columns = build_sincos2d_pos_embed(list(grid), dim=32, interleave_sin_cos=True).chunk(2, dim=1)
    found = fixed_positions("sine-2d", grid=grid, prefix=1, dim=32)[0, 1:]
    torch.testing.assert_close(found, torch.cat((columns, rows), dim=1), atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", FIXED)
@pytest.mark.parametrize("parts", [{"pooling": "mean"}, {"distillation": True, "registers": 2}])
def test_they_are_added_to_all_but_registers_and_computed_again_for_another_size(kind, parts):
    torch.manual_seed(0)
    model = VisionTransformer(replace(TINY, positions=kind, **parts)).eval()
    for size, grid in (((8, 12), (2, 6)), ((16, 12), (4, 6)), ((8, 20), (2, 10)), ((4, 4), (1, 2))):
        images = torch.rand(2, 3, *size)
        tokens, layout = model.tokens(images), model.layout
        added = tokens[:, len(layout.prefix) :] - model.patch_embed(images)
        expected = fixed_positions(kind, grid=grid, prefix=0, dim=16).expand(2, -1, -1)
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
    large = vitlens.load(str(tmp_path / "model.safetensors"), image_size=(64, 32))
    adapted, images = for_classes(large, ("a", "b", "c")), torch.rand(1, 3, 64, 32)
    assert adapted.module.config.image_size == (64, 32)
    assert "computed the position embeddings again" in " ".join(adapted.provenance.notes)
    assert torch.equal(adapted.module.tokens(images), large.module.tokens(images))


def test_true_and_false_of_earlier_files_are_learned_and_none():
    for written, positions in ((True, "learned"), (False, "none"), ("sine-2d", "sine-2d")):
        stored = asdict(ViTConfig()) | {"positions": written}
        assert read_as(ViTConfig, stored, source="a file") == ViTConfig(positions=positions)
    assert untrained("vit-mini", classes=("a",), overrides={**SMALL, "positions": False}).module.pos_embed is None


def test_other_kinds_are_refused():
    with pytest.raises(InputError, match=r"shape of vit-mini.*'sine-2d'.*found 'rotary'"):
        untrained("vit-mini", classes=("a",), overrides={"positions": "rotary"})
