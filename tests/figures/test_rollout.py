import numpy as np
import pytest
import torch

from tests.figures.reading import cut_off, texts
from vitlens.figures.rollout import method_overlays, rollout_overlays


def test_rollout_is_in_percent_and_says_what_is_marked(images, random):
    maps = torch.from_numpy(random.dirichlet(np.ones(16), (3, 3)).reshape(3, 3, 4, 4))
    plain = rollout_overlays(images=images, maps=maps, titles=["mean", "max", "min"])
    assert len(plain.axes) == 3 * 4 + 1
    assert {"mean", "max", "min", "% of its maximum", "0", "100"} <= set(texts(plain))
    masks = np.zeros((3, 16, 16), bool)
    masks[:, 4:9, 4:9] = True
    marked = rollout_overlays(
        images=images, maps=maps, titles=["mean", "max", "min"], masks=masks, hits=np.eye(3), names=["a", "b", "c"]
    )
    said = " ".join(texts(marked)).replace("\n", " ")
    assert "outline: the object; mark: the map's highest point" in said
    assert texts(marked).count("✓ hit") == 3
    assert texts(marked).count("✗ miss") == 6
    assert not cut_off(marked)


@pytest.mark.parametrize("draw", [rollout_overlays, method_overlays])
@pytest.mark.parametrize("panels", [1, 6])
def test_a_low_figure_of_one_image_has_room_for_its_bar(draw, panels, random):
    maps = random.dirichlet(np.ones(16), (1, panels)).reshape(1, panels, 4, 4)
    figure = draw(images=random.uniform(size=(1, 3, 16, 64)), maps=maps, titles=[f"map {i}" for i in range(panels)])
    assert figure.axes[-1].get_ylabel()
    assert cut_off(figure) == []
