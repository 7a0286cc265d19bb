"""Observation: what it passes on, and what it refuses."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import count

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import vitlens
from tests.kit.lens import changed, module_paths, of
from tests.kit.models.handwritten import half
from tests.kit.tiny import images, model_of, ours, shared_model, timm_model, with_kernel
from vitlens import AttentionCall, Model
from vitlens.errors import LensError, NonFiniteError, UnsupportedError


class Weighs(type(ours().module.blocks[0].attn)):
    """Our attention with weights that are made of the scores in another way."""

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        query, key, value = (
            self.qkv(tokens).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        )
        weights = self.weigh(query @ key.mT * query.shape[-1] ** -0.5)
        return self.proj((weights @ value).transpose(1, 2).flatten(2))


def weighing(weigh: Callable[[Tensor], Tensor]) -> Model:
    model = ours()
    attention = model.module.blocks[1].attn
    attention.__class__ = Weighs
    attention.weigh = weigh
    return model


SPELLED = {
    "a method": lambda scores: scores.softmax(-1),
    "a method, the axis by name": lambda scores: scores.softmax(dim=3),
    "of torch": lambda scores: torch.softmax(scores, 3),
    "a function": lambda scores: F.softmax(scores, -1),
    "a module": nn.Softmax(dim=-1),
}


@pytest.mark.parametrize("softmax", SPELLED)
def test_a_softmax_is_seen_however_it_is_spelled(softmax):
    layers = vitlens.attention(weighing(SPELLED[softmax]), images((32, 48)))
    for layer, expected in zip(layers, vitlens.attention(ours(), images((32, 48))), strict=True):
        torch.testing.assert_close(layer, expected, atol=1e-6, rtol=1e-5)


def other_each_time(scores: Tensor, times: Iterator[int] = count()) -> Tensor:  # noqa: B008  it counts all calls
    return (scores * next(times)).softmax(-1)


def infinite(scores: Tensor) -> Tensor:
    return scores.masked_fill(scores == scores.max(), torch.nan).softmax(-1)


CNN = (nn.Conv2d(3, 5, 4), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Softmax(-1))


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            partial(weighing, lambda scores: F.normalize(scores.abs(), p=1, dim=-1)),
            LensError,
            "blocks.1.attn",
        ),
        (partial(weighing, other_each_time), LensError, "unchanged under observation"),
        (partial(weighing, infinite), NonFiniteError, r"layer 1 \(blocks.1.attn\)"),
        (
            partial(weighing, lambda scores: (scores + scores.flip(0)).softmax(-1)),
            LensError,
            "others of its batch",
        ),
        (partial(ours, attention=False), UnsupportedError, "found none"),
        (lambda: model_of(nn.Sequential(*CNN)), UnsupportedError, "found none"),
    ],
)
def test_the_self_check_refuses(make, error, message):
    with pytest.raises(error, match=message):
        vitlens.observe(model := make(), of(model), lambda _call: None)


def test_calls_come_in_order_with_the_heads_output():
    model = ours()
    batch = images((32, 48))
    calls: list[AttentionCall] = []
    logits = vitlens.observe(model, batch, calls.append)
    assert torch.equal(logits, changed(model, batch, {}))
    sites = [(call.site.layer, call.site.module, call.site.part, call.site.kind) for call in calls]
    assert sites == [(0, "blocks.0.attn", 0, "patch"), (1, "blocks.1.attn", 0, "patch")]
    entered = vitlens.capture(model, batch, "blocks.*.attention").values()
    for call, block, output in zip(calls, model.module.blocks, entered):
        torch.testing.assert_close(
            call.weights() @ call.inputs.value, call.output, atol=1e-5, rtol=1e-5
        )
        joined = call.output.transpose(1, 2).flatten(2)
        torch.testing.assert_close(block.attn.proj(joined), output, atol=1e-6, rtol=1e-5)


def test_another_model_can_be_observed_from_within_a_reducer():
    outside = ours()
    inside = shared_model("vit")
    counts: list[int] = []
    vitlens.observe(
        outside,
        images((32, 48)),
        lambda _call: counts.append(len(vitlens.attention(inside, images()))),
    )
    assert counts == [2, 2]


READ = {
    "attention": vitlens.attention,
    "observe": lambda model, batch: vitlens.observe(model, batch, lambda _: None),
    "relevance": vitlens.relevance,
    "explorer": vitlens.explorer,
    "statistics": vitlens.statistics,
    "best": lambda model, batch: vitlens.explain(model, batch, method="best"),
    "legrad": lambda model, batch: vitlens.explain(model, batch, method="legrad"),
    "walkthrough": lambda model, batch: vitlens.walkthrough(model, batch[:1]),
}
DIFFERENTIAL = {  # tiny ViTs of two blocks, each of whose heads subtracts one softmax from another
    "sequential": partial(timm_model, "vit_dwee_patch16_reg1_gap_256"),
    "parallel": partial(timm_model, "vit_dpwee_patch16_reg1_gap_256"),
}
# adds two, by content and by position, two calls in a layer; CLS comes in later
CONVIT = {"convit": partial(timm_model, "convit_tiny", local_up_to_layer=1)}


@pytest.mark.parametrize(
    ("read", "blocks", "fused", "wrapped"),
    [
        *((read, "sequential", True, False) for read in READ),
        ("attention", "convit", True, False),
        ("attention", "sequential", False, True),
        ("attention", "sequential", True, True),
        ("attention", "parallel", True, False),
        ("attention", "parallel", False, True),
    ],
)
def test_a_difference_of_softmaxes_is_not_read_as_either(read, blocks, fused, wrapped):
    model = with_kernel((DIFFERENTIAL | CONVIT)[blocks](), fused=fused)
    with pytest.raises(UnsupportedError, match=r"one softmax|side by side|has, found"):
        READ[read](half(model.module, 32) if wrapped else model, images())


@pytest.mark.parametrize("blocks", DIFFERENTIAL)
def test_heads_of_a_difference_are_those_that_the_projection_reads(blocks):
    """Replaced by zero, a head is as if its columns were zero; of the four softmaxes of two heads,
    none is a head.
    """
    model = with_kernel(DIFFERENTIAL[blocks](), fused=True)
    batch = images()
    projection = model.module.get_submodule(module_paths(model, 1)[1])
    logits = changed(model, batch, {"blocks.1.head.1": "zero"})
    projection.weight[:, projection.in_features // 2 :] = 0
    torch.testing.assert_close(logits, changed(model, batch, {}))
    with pytest.raises(UnsupportedError, match="expected heads"):
        vitlens.ablate(with_kernel(DIFFERENTIAL[blocks](), fused=False), batch, "predicted")


def test_a_reader_may_run_the_model_again():
    model = ours()
    pixels = images((32, 48))
    inner = []
    outer = []

    def read(call: AttentionCall) -> None:
        inner.append(vitlens.attention(model, pixels))
        outer.append(call.weights())

    vitlens.observe(model, pixels, read)
    for weights in (outer, *inner):
        assert all(map(torch.equal, weights, vitlens.attention(model, pixels)))
    assert len(outer) == len(inner) == len(inner[0])
