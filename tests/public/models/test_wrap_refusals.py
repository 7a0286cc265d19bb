"""wrap: attention that cannot be read is said to be so, and modules that are no models are refused in one line."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import vitlens
from tests.kit.models import handwritten_rare as rare
from tests.kit.models.handwritten import SIZE, Build, EinsumViT, EncoderViT, SmallCNN, half, noise, of, seeded, wrapped
from vitlens.errors import LensError, ModelError, UnsupportedError

Act = Callable[[nn.Module, Tensor], object]
UNSEEN = {  # and what the message names
    "heads last": (rare.styled(rare.heads_last), r"axis 2 of \(2, 13, 13, 3\) in layers\.1\.att"),
    "linear attention": (rare.styled(rare.linearised), "found none in a forward pass"),
    "a softmax for each head": (rare.styled(rare.one_by_one), r"3 attention calls side by side in layers\.0\.att"),
    "a module for each head": (of(rare.HeadModules), r"heads\.1 beside layers\.0\.att\.heads\.0"),
    "one block three times": (rare.shared, r"layers\.0\.att called 3 times"),
}


@pytest.mark.parametrize("case", UNSEEN)
def test_attention_that_is_not_seen_is_said_to_be_so_and_the_rest_works(case: str):
    build, reason = UNSEEN[case]
    model, images = wrapped(build), noise()
    assert (model.anatomy.family, model.anatomy.attention) == ("other", ())
    with pytest.raises(UnsupportedError, match=reason):
        vitlens.attention(model, images)
    assert vitlens.explain(model, images, targets=[0, 1, 2], method="saliency").shape == (3, *SIZE)


@pytest.mark.parametrize("heads", [3, 6])  # 6: three times a batch of two, and twice one of three
def test_heads_before_the_batch_are_refused(heads: int):
    with pytest.raises(UnsupportedError, match=r"layers\.0\.att; put the batch first"):
        wrapped(rare.styled(rare.heads_first, heads))


def test_heads_before_the_batch_on_one_axis_are_found_by_the_self_check():
    with pytest.raises((LensError, UnsupportedError), match=r"layers\.0"):
        vitlens.attention(wrapped(of(rare.MergedHeadsFirst)), noise())


@pytest.mark.parametrize(
    ("function", "style", "word"),
    [
        (vitlens.features, EinsumViT, "blocks="),
        (vitlens.logit_lens, EinsumViT, "blocks="),
        (vitlens.direct_logit_attribution, EncoderViT, "batch.first"),
        (vitlens.features, rare.shared, r"called 3 times|found an other model"),
        (vitlens.logit_lens, rare.OptionalViT, r"layers\.0; return the tensor alone"),
    ],
)
def test_what_needs_the_residual_stream_is_refused_without_one(function, style: Build, word: str):
    with pytest.raises(UnsupportedError, match=word):
        function(wrapped(style), noise())


class Acting(nn.Module):
    """A CNN that does something else than to return its logits."""

    def __init__(self, act: Act) -> None:
        super().__init__()
        self.net, self.act = SmallCNN(), act

    def forward(self, x: Tensor) -> object:
        return self.act(self.net, x)


def acting(act: Act) -> Build:
    return lambda: Acting(act)


def failing(_net: nn.Module, x: Tensor) -> Tensor:
    raise ValueError(f"no\nsecond line {x.shape}")


def counting(net: nn.Module, x: Tensor) -> Tensor:
    net.features[1].num_batches_tracked += 1
    return net(x)


class Central(nn.Module):
    """All attention in the outermost forward."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.qkv, self.out = nn.Conv2d(3, 8, 8, 8), nn.Linear(8, 24), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).flatten(2).transpose(1, 2)
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        return self.out((x + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)).mean(1))


def traced() -> nn.Module:
    return torch.jit.trace(seeded(SmallCNN), torch.rand(1, 3, *SIZE))


def compiled() -> nn.Module:
    cnn = SmallCNN()
    cnn._orig_mod = cnn.fc  # as torch.compile leaves it
    return cnn


def inferred() -> nn.Module:
    with torch.inference_mode():
        return SmallCNN()


REFUSED = {  # and what the message says was found, or what to type
    "it raises": (acting(failing), "ValueError: no; check image_size="),
    "it changes its input": (acting(lambda net, x: net(x.mul_(2.0))), "clone it in forward"),
    "nothing is returned": (acting(lambda _net, _: None), "NoneType"),
    "a dict without logits": (acting(lambda net, x: {"answer": net(x)}), "dict of 1"),
    "an empty tuple": (acting(lambda _net, _: ()), "tuple of 0"),
    "another axis": (acting(lambda net, x: net(x)[:, None]), r"\(2, 1, 3\)"),
    "an axis less for one image": (acting(lambda net, x: net(x).squeeze()), r"\(3,\)"),
    "one row for all images": (acting(lambda net, x: net(x).mean(0, keepdim=True)), r"\(1, 3\)"),
    "whole numbers": (acting(lambda net, x: net(x).long()), r"int64 of shape \(2, 3\)"),
    "a softmax": (acting(lambda net, x: net(x).softmax(1)), "softmax; drop it"),
    "a sigmoid": (acting(lambda net, x: net(x).sigmoid()), r"sigmoid \(independent labels"),
    "grey images": (lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten()), "3 channels"),
    "dropout in evaluation mode": (acting(lambda net, x: net(F.dropout(x, 0.2))), "training=self.training"),
    "statistics of the batch": (acting(lambda net, x: net(x - x.mean(0))), "do not depend on its batch"),
    "a counter": (acting(counting), "num_batches_tracked changed"),
    "the meta device": (lambda: SmallCNN().to("meta"), "to_empty"),
    "weights made for inference": (inferred, "inference_mode"),
    "a traced module": (traced, "scripted or traced"),
    "a compiled module": (compiled, "_orig_mod"),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_modules_that_are_no_models_are_refused_in_one_line(case: str):
    build, words = REFUSED[case]
    module = seeded(build)
    with pytest.raises(ModelError, match=words) as refused:
        half(module)
    assert "\n" not in str(refused.value)
    assert case != "a counter" or not module.net.features[1].num_batches_tracked  # it was set back


def test_a_function_and_attention_of_no_module_are_refused():
    with pytest.raises(ModelError, match="found function"):
        half(seeded)
    with pytest.raises(UnsupportedError, match="submodule for each attention layer"):
        wrapped(Central)
