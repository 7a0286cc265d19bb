"""Public functions read a Split batch by batch, and keep its groups in every interval."""

import sys
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor

import vitlens
from vitlens.attribution.choice import IMAGES
from vitlens.data.digits import digits
from vitlens.data.split import InMemory, Split
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


def _with_means_of(vit: vitlens.Model, images: Split | Tensor) -> Tensor:
    with vitlens.intervene(vit, {"blocks.3": "mean"}, reference=images), torch.no_grad():
        return vit(torch.full((1, 3, *vit.input_size), 0.5))


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
    "attention": lambda vit, images: torch.stack(vitlens.attention(vit, images)),
    "attention of CLS": lambda vit, images: torch.stack(vitlens.attention(vit, images, rows="cls")),
    "logit_lens": lambda vit, images: vitlens.logit_lens(vit, images).logits,
    "direct_logit_attribution": lambda vit, images: (
        vitlens.direct_logit_attribution(vit, images, torch.arange(11) % 10).heads
    ),
    "attack at several epsilons": lambda vit, images: (
        vitlens.attack(vit, images, "predicted", epsilons=[0, 2 / 255, 1], batch_size=BATCH).distance
    ),
    "intervene": lambda vit, images: _with_means_of(vit, images),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_no_more_than_a_batch_of_a_split_is_read_at_once(name, vit, lazy, monkeypatch):
    for module in [known for name, known in sys.modules.items() if name.startswith("vitlens.")]:
        if hasattr(module, "fitting_batch_size"):
            monkeypatch.setattr(module, "fitting_batch_size", lambda _: BATCH)
    monkeypatch.setattr("vitlens.lens.capture._AT_ONCE", BATCH)
    found = FUNCTIONS[name](vit, lazy)
    assert max(lazy.source.asked) <= BATCH
    monkeypatch.undo()
    whole = replace(lazy, source=InMemory(lazy.source.pixels))
    torch.testing.assert_close(found, FUNCTIONS[name](vit, whole), rtol=1e-4, atol=1e-5)


WHOLE = {
    "attack": lambda vit, images: vitlens.attack(vit, images),
    "capture": lambda vit, images: vitlens.capture(vit, images, "blocks.0"),
    "explorer": vitlens.explorer,
    "observe": lambda vit, images: vitlens.observe(vit, images, lambda _: None),
    "patch": lambda vit, images: vitlens.patch(vit, images, images, "blocks.0"),
    "replay": lambda vit, images: vitlens.replay(vit, images).__enter__(),
    "walkthrough": vitlens.walkthrough,
}


@pytest.mark.parametrize("name", WHOLE)
def test_a_split_that_does_not_fit_is_refused_before_it_is_read(name, vit, lazy):
    class Endless(Counting):
        def __len__(self) -> int:
            return 10**6

    many = replace(lazy, source=Endless(lazy.source.pixels), labels=torch.zeros(10**6, dtype=torch.long))
    with pytest.raises(vitlens.errors.VitlensError, match=r"expected .* found 1000000; \w"):
        WHOLE[name](vit, many)
    assert not many.source.asked


def test_the_advice_for_a_split_that_does_not_fit_is_true(vit, lazy, monkeypatch):
    monkeypatch.setattr("vitlens.pixels.MOST_BYTES", 5 * 4 * 3 * 32 * 32)
    with pytest.raises(vitlens.errors.DataError, match=r"at most 5 images of 32x32 px at once, found 11") as refused:
        vitlens.capture(vit, lazy, "blocks.0")
    assert str(refused.value).endswith("split.limit(5)")
    assert len(vitlens.capture(vit, lazy.limit(5), "blocks.0").logits) == 5


@pytest.mark.slow
def test_choosing_a_method_reads_no_more_than_the_images_that_it_uses(vit):
    many = digits("test", scenes=1)
    source = Counting(many.source.read(torch.arange(len(many))))
    vitlens.choose_method(vit, replace(many, source=source), methods=["relevance", "gradcam"])
    assert len(many) > IMAGES >= max(source.asked)


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
