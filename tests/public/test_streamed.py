"""Public functions read a Split batch by batch."""

import pytest
import torch
from torch import Tensor

import vitlens
from tests.kit.batches import SEEN_AT_ONCE, counted, in_small_batches
from tests.kit.tiny import ours
from vitlens import Split


@pytest.fixture(scope="module")
def vit() -> vitlens.Model:
    return ours(size=(32, 32), classes=10)


def with_means_of(vit: vitlens.Model, images: Split) -> Tensor:
    with vitlens.intervene(vit, {"blocks.1": "mean"}, reference=images), torch.no_grad():
        return vit(torch.full((1, 3, *vit.input_size), 0.5))


AT_ONCE = {"batch_size": SEEN_AT_ONCE}
FUNCTIONS = {
    "ablate": lambda vit, images: vitlens.ablate(vit, images, **AT_ONCE).delta_loss,
    "ablate by another image": lambda vit, images: (
        vitlens.ablate(vit, images, replace="resample", **AT_ONCE).delta_loss
    ),
    "statistics": lambda vit, images: vitlens.statistics(vit, images, **AT_ONCE).distance,
    "rollout": vitlens.rollout,
    "relevance": vitlens.relevance,
    "explain": lambda vit, images: vitlens.explain(vit, images, method="gradcam", **AT_ONCE),
    "features": lambda vit, images: vitlens.features(vit, images, **AT_ONCE).at(-1),
    "look": lambda vit, images: vitlens.look(vit, images, **AT_ONCE).maps,
    "attention": lambda vit, images: torch.stack(vitlens.attention(vit, images)),
    "attention of CLS": lambda vit, images: torch.stack(vitlens.attention(vit, images, rows="cls")),
    "logit_lens": lambda vit, images: vitlens.logit_lens(vit, images).logits,
    "direct_logit_attribution": lambda vit, images: (
        vitlens.direct_logit_attribution(vit, images, torch.arange(11) % 10).heads
    ),
    "attack at several epsilons": lambda vit, images: (
        vitlens.attack(vit, images, "predicted", epsilons=[0, 2 / 255, 1], **AT_ONCE).distance
    ),
    "intervene": with_means_of,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_no_more_than_a_batch_of_a_split_is_read_at_once(name, vit):
    split = counted(vit.input_size, vit.classes)
    with pytest.MonkeyPatch.context() as patch:
        in_small_batches(patch)
        found = FUNCTIONS[name](vit, split)
    assert max(split.source.asked) <= SEEN_AT_ONCE
    torch.testing.assert_close(found, FUNCTIONS[name](vit, split), rtol=1e-4, atol=1e-5)


WHOLE = {
    "attack": vitlens.attack,
    "capture": lambda vit, images: vitlens.capture(vit, images, "blocks.0"),
    "explorer": vitlens.explorer,
    "observe": lambda vit, images: vitlens.observe(vit, images, lambda _: None),
    "patch": lambda vit, images: vitlens.patch(vit, images, images, "blocks.0"),
    "replay": lambda vit, images: vitlens.replay(vit, images).__enter__(),
    "walkthrough": vitlens.walkthrough,
}


@pytest.mark.parametrize("name", WHOLE)
def test_a_split_that_does_not_fit_is_refused_before_it_is_read(name, vit):
    many = counted(vit.input_size, vit.classes, length=10**6)
    with pytest.raises(vitlens.errors.VitlensError, match=r"found 1000000; \w"):
        WHOLE[name](vit, many)
    assert not many.source.asked


def test_the_advice_for_a_split_that_does_not_fit_is_true(vit, monkeypatch):
    split = counted(vit.input_size, vit.classes)
    monkeypatch.setattr("vitlens.pixels.MOST_BYTES", 5 * 4 * 3 * 32 * 32)
    with pytest.raises(vitlens.errors.DataError, match=r"found 11") as refused:
        vitlens.capture(vit, split, "blocks.0")
    assert str(refused.value).endswith("split.limit(5)")
    assert len(vitlens.capture(vit, split.limit(5), "blocks.0").logits) == 5


@pytest.mark.slow
def test_choosing_a_method_reads_no_more_than_the_images_that_it_uses(vit):
    many = counted(vit.input_size, vit.classes, count=450)
    vitlens.choose_method(vit, many, methods=["relevance", "gradcam"])
    assert max(many.source.asked) <= 200 < len(many)
