import pytest
import torch
from torch import nn

from tests.lens.tiny import images, ours, torchvision_swin
from vitlens.analysis.robustness.curve import cosines, halfway_block, map_agreement
from vitlens.lens.stages import watching_blocks
from vitlens.models.loading import untrained


def hooks(module: nn.Module) -> int:
    return sum(len(part._forward_hooks) for part in module.modules())


@pytest.fixture(scope="module")
def pictures() -> torch.Tensor:
    return images((32, 48), batch=4)


@pytest.mark.parametrize(
    "build", [ours, lambda: torchvision_swin((32, 48)), lambda: untrained("resnet20", classes=("a", "b"))]
)
def test_an_image_is_like_itself_at_every_depth_and_less_like_another(build, pictures):
    model = build()
    found = cosines(model, pictures, {"same": pictures, "another": pictures.roll(1, 0)}, batch_size=3)
    assert found["same"].shape == (len(model.anatomy.blocks), 4)
    torch.testing.assert_close(found["same"], torch.ones_like(found["same"]), atol=1e-5, rtol=0)
    assert (found["another"] < 1 - 1e-4).all()
    assert hooks(model) == 0


def test_cosines_are_of_whole_outputs(pictures):
    model = ours()
    kept: list[torch.Tensor] = []
    with torch.no_grad(), watching_blocks(model, lambda _block, output: kept.append(output.flatten(1))):
        model(pictures[:2])
    expected = torch.stack([torch.dot(one[0], one[1]) / (one[0].norm() * one[1].norm()) for one in kept])
    found = cosines(model, pictures[:1], {"other": pictures[1:2]})["other"][:, 0]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def test_where_paths_part():
    another = torch.full((4, 3), 0.2)
    changed = torch.tensor([0.95, 0.7, 0.55, 0.3])[:, None].expand(4, 3)  # 0.6 is halfway
    assert halfway_block(changed, another) == 2
    assert halfway_block(torch.ones(4, 3), another) is None
    assert halfway_block(changed, torch.ones(4, 3)) is None  # nothing tells images apart


def test_agreement_of_maps():
    maps = torch.rand(3, 4, 4, generator=torch.Generator().manual_seed(0))
    same = map_agreement(maps, 3 * maps)
    assert same.usable.all()
    torch.testing.assert_close(same.spearman, torch.ones(3), atol=1e-6, rtol=0)
    torch.testing.assert_close(same.top, torch.ones(3))
    empty = map_agreement(maps, torch.cat((maps[:2], torch.zeros(1, 4, 4))))
    assert empty.usable.tolist() == [True, True, False]
    assert empty.spearman[2] == 0
