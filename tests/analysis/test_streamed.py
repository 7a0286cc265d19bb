"""Public functions read a Split batch by batch, and keep its groups in every interval."""

from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor

import vitlens
from vitlens.data.digits import digits
from vitlens.data.split import Split
from vitlens.uncertainty import student_mean

BATCH = 4


@dataclass
class Counting:
    """A source that keeps how many images it was asked for at once."""

    pixels: Tensor
    asked: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.pixels)

    def read(self, indices: Tensor) -> Tensor:
        self.asked.append(len(indices))
        return self.pixels[indices]


@pytest.fixture
def lazy(vit) -> Split:
    drawn = torch.rand(11, 3, *vit.input_size, generator=torch.Generator().manual_seed(0))
    pixels = (255 * drawn).byte()
    return Split("lazy", "test", Counting(pixels), vit.input_size, vit.classes, labels=torch.arange(11) % 10)


@pytest.fixture(scope="module")
def vit() -> vitlens.Model:
    return vitlens.load("vit-digits")


FUNCTIONS = {
    "ablate": lambda vit, images: vitlens.ablate(vit, images, batch_size=BATCH).delta_loss,
    "ablate by another image": lambda vit, images: (
        vitlens.ablate(vit, images, replace="resample", batch_size=BATCH).delta_loss
    ),
    "statistics": lambda vit, images: vitlens.statistics(vit, images, batch_size=BATCH).distance,
    "rollout": vitlens.rollout,
    "relevance": vitlens.relevance,
    "explain": lambda vit, images: vitlens.explain(vit, images, method="gradcam", batch_size=BATCH),
    "features": lambda vit, images: vitlens.features(vit, images, batch_size=BATCH).at(-1),
    "look": lambda vit, images: vitlens.look(vit, images, batch_size=BATCH).maps,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_no_more_than_a_batch_of_a_split_is_read_at_once(name, vit, lazy, monkeypatch):
    monkeypatch.setattr("vitlens.analysis.attention.chain.fitting_batch_size", lambda _: BATCH)
    FUNCTIONS[name](vit, lazy)  # that its result is that of a tensor, a contract test says
    assert max(lazy.source.asked) <= BATCH


@pytest.fixture(scope="module")
def clustered() -> Split:
    """Four scenes of each of twelve digits."""
    return digits("test", scenes=4).pick(torch.cat([torch.arange(12) + 450 * scene for scene in range(4)]))


def test_intervals_of_statistics_are_over_the_groups_of_a_split(vit, clustered):
    clustered = clustered.pick(torch.arange(24))  # two scenes each
    table = vitlens.statistics(vit, clustered, evidence=False, batch_size=20)
    single = [
        vitlens.statistics(vit, clustered.pick(torch.tensor([index])), evidence=False).distance
        for index in range(len(clustered))
    ]
    values = torch.stack(single).flatten(1).double().numpy()
    for head, (low, high) in enumerate(zip(table.low("distance").flatten(), table.high("distance").flatten())):
        expected = student_mean(values[:, head], groups=clustered.groups.numpy())
        assert (float(low), float(high)) == pytest.approx((expected.low, expected.high), rel=1e-4)


def test_intervals_of_ablate_are_over_the_groups_of_a_split(vit, clustered):
    """Each of 12 images four times: the intervals of 48 independent images would be twice too narrow."""
    repeated = clustered.pick(torch.arange(12).repeat(4))
    grouped = vitlens.ablate(vit, repeated)
    alone = vitlens.ablate(vit, replace(repeated, groups=None))
    assert torch.equal(grouped.delta_loss, alone.delta_loss)
    ratio = (grouped.high - grouped.low) / (alone.high - alone.low)
    assert float(ratio.median()) == pytest.approx(4**0.5, rel=0.25)
