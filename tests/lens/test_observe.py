"""Observation: what it hands on, what it refuses, and that its gradients are those of attention written by hand."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.kit.uses import ATTENTIVE, BrokenError, state_of, unsettled
from tests.lens.tiny import CLASSES, images, model_of, ours, timm_model, torchvision_vit
from vitlens.errors import LensError, NonFiniteError, UnsupportedError
from vitlens.lens.call import AttentionCall
from vitlens.lens.capture import capture_attention
from vitlens.lens.observe import observe, observing, survey
from vitlens.models.attention import MultiHeadSelfAttention
from vitlens.models.model import Model


@pytest.mark.parametrize("make", [ours, lambda: timm_model("deit_tiny_distilled_patch16_224"), torchvision_vit])
def test_rows_are_the_rows_of_all_weights(make):
    model = make()
    batch = images(model.input_size)
    everything = capture_attention(model, batch)
    for rows in ((0,), (3, 1)):
        few = capture_attention(model, batch, rows=rows)
        assert torch.equal(few.logits, everything.logits)
        for some, all_ in zip(few.layers, everything.layers):
            torch.testing.assert_close(some, all_[:, :, list(rows)], atol=1e-6, rtol=0)


def test_a_pooling_query_has_one_row_whatever_is_asked():
    model = timm_model("cait_xxs24_224")
    layers = capture_attention(model, images(), rows=(2,)).layers
    assert [layer.shape for layer in layers] == [(2, 2, 1, 16)] * 2 + [(2, 2, 1, 17)] * 2


def test_fused_and_unfused_show_the_same():
    fused, unfused = ours(), ours(fused=False)
    batch = images((32, 48))
    a, b = capture_attention(fused, batch), capture_attention(unfused, batch)
    torch.testing.assert_close(a.logits, b.logits, atol=1e-5, rtol=1e-5)
    for one, other in zip(a.layers, b.layers):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)


class Tampered(nn.Module):
    """Our attention by hand, with a known change added to the weights of one layer."""

    def __init__(self, attention: MultiHeadSelfAttention, change: Tensor) -> None:
        super().__init__()
        self.attention, self.change = attention, change

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        qkv = self.attention.qkv(tokens).unflatten(-1, (3, self.attention.heads, -1))
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        weights = (query @ key.mT * query.shape[-1] ** -0.5).softmax(-1) + self.change
        result: Tensor = self.attention.proj((weights @ value).transpose(1, 2).flatten(2))
        return result


@pytest.mark.parametrize("layer", [0, 1])
def test_gradients_are_those_of_attention_written_by_hand(layer):
    model, batch = ours(), images((32, 48))
    explicit = capture_attention(model, batch, explicit=True)
    gradient = torch.autograd.grad(explicit.logits[:, 2].sum(), explicit.layers[layer])[0]
    change = torch.zeros_like(gradient, requires_grad=True)
    block = model.module.blocks[layer]
    block.attn = Tampered(block.attn, change)
    expected = torch.autograd.grad(model(batch)[:, 2].sum(), change)[0]
    torch.testing.assert_close(gradient, expected, atol=1e-6, rtol=1e-4)


def test_gradients_meet_finite_differences():
    model, batch = ours().double(), images((32, 48), batch=1).double()
    explicit = capture_attention(model, batch, explicit=True)
    gradient = torch.autograd.grad(explicit.logits[0, 0], explicit.layers[0])[0]
    block = model.module.blocks[0]
    original = block.attn
    for place in ((0, 0, 0, 5), (0, 1, 7, 2), (0, 1, 12, 12)):
        sides = []
        for step in (1e-5, -1e-5):
            change = torch.zeros_like(gradient)
            change[place] = step
            block.attn = Tampered(original, change)
            sides.append(model(batch)[0, 0].item())
        assert (sides[0] - sides[1]) / 2e-5 == pytest.approx(gradient[place].item(), rel=1e-4, abs=1e-8)


def test_explicit_works_inside_no_grad_and_leaves_the_images_alone():
    model, batch = ours(), images((32, 48))
    before = batch.clone()
    with torch.no_grad():
        captured = capture_attention(model, batch, explicit=True)
    assert torch.autograd.grad(captured.logits.sum(), captured.layers[0])[0] is not None
    assert torch.equal(batch, before)
    assert not batch.requires_grad


class Linear(nn.Module):
    """Attention that no door sees: weights from a plain normalisation, not from a softmax."""

    num_heads = 2

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(16, 16)

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        scores = (tokens @ tokens.mT).square()
        result: Tensor = self.project(scores / scores.sum(-1, keepdim=True) @ tokens)
        return result


def test_a_layer_that_shows_no_weights_is_an_error():
    model = ours()
    model.module.blocks[1].attn = Linear()
    with pytest.raises(LensError, match=r"none from 1 \(first 'blocks.1.attn'\)"):
        observe(model, images((32, 48)), lambda _call: None)


def test_a_model_without_attention_is_refused():
    for model in (ours(attention=False), cnn()):
        with pytest.raises(UnsupportedError, match=r"in the forward pass of .*found none"):
            observe(model, images(model.input_size), lambda _call: None)


def cnn():
    model = nn.Sequential(nn.Conv2d(3, 5, 4), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Softmax(-1))
    return model_of(model)


class Lying(MultiHeadSelfAttention):
    """Computes something else the second time."""

    times = 0

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        self.times += 1
        return super().forward(tokens * self.times, mask)


def test_the_self_check_meets_logits_that_change():
    model = ours()
    model.module.blocks[0].attn = Lying(16, 2).eval()
    with pytest.raises(LensError, match="unchanged under observation"):
        survey(model, images((32, 48)))


class Unnormalised(MultiHeadSelfAttention):
    """A softmax over the keys of another dimension than it says: rows do not sum to 1."""

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        qkv = self.qkv(tokens).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        scores = qkv[0] @ qkv[1].mT
        scores[:, :, 0] = torch.nan
        result: Tensor = self.proj((F.softmax(scores, -1) @ qkv[2]).transpose(1, 2).flatten(2))
        return result


def test_weights_that_are_not_finite_are_an_error_that_names_the_layer():
    model = ours()
    model.module.blocks[1].attn = Unnormalised(16, 2).eval()
    with pytest.raises(NonFiniteError, match=r"layer 1 \(blocks.1.attn\)"):
        survey(model, images((32, 48)))


class Masked(MultiHeadSelfAttention):
    """Gives one token nobody to look at."""

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        mask = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool)
        mask[4] = False
        return super().forward(tokens, mask)


def test_a_masked_row_passes_the_self_check():
    model = ours()
    model.module.blocks[0].attn = Masked(16, 2).eval()
    rows = capture_attention(model, images((32, 48))).layers[0].sum(-1)
    assert (rows[:, :, 4] == 0).all()
    torch.testing.assert_close(rows[:, :, 5:], torch.ones_like(rows[:, :, 5:]))


def test_calls_come_in_order_with_the_heads_output():
    model, batch = ours(), images((32, 48))
    calls: list[AttentionCall] = []
    observe(model, batch, calls.append)
    assert [(call.site.layer, call.site.module, call.site.part) for call in calls] == [
        (0, "blocks.0.attn", 0),
        (1, "blocks.1.attn", 0),
    ]
    for call in calls:
        torch.testing.assert_close(call.weights() @ call.inputs.value, call.output, atol=1e-5, rtol=1e-5)
    # the output projection of the last layer's heads is what enters the residual stream
    seen = []
    model.module.blocks[1].attn.register_forward_hook(lambda _m, _i, output: seen.append(output))
    model(batch)
    joined = calls[1].output.transpose(1, 2).flatten(2)
    torch.testing.assert_close(model.module.blocks[1].attn.proj(joined), seen[0], atol=1e-6, rtol=1e-5)


def test_batch_of_one_one_head_one_block_and_a_constant_image():
    model = ours(heads=1, depth=1)
    captured = capture_attention(model, torch.full((1, 3, 32, 48), 0.5))
    assert [layer.shape for layer in captured.layers] == [(1, 1, 13, 13)]
    assert captured.logits.shape == (1, len(CLASSES))


@pytest.fixture(params=ATTENTIVE)
def model(request: pytest.FixtureRequest) -> Model:
    return unsettled(request.param)


def test_gradients_of_weights_leave_none_on_parameters(model):
    captured = capture_attention(model, images(model.input_size), explicit=True)
    before = state_of(model)
    torch.autograd.grad(captured.logits.sum(), captured.layers)
    assert state_of(model) == before


@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("surveyed", [False, True])
def test_after_an_exception_in_the_reducer(model, explicit, surveyed):
    batch, before = images(model.input_size), state_of(model)
    if surveyed:
        survey(model, batch)

    def reducer(call: AttentionCall) -> None:
        if call.site.layer == 1:
            raise BrokenError

    with pytest.raises(BrokenError):
        observe(model, batch, reducer, explicit=explicit)
    assert state_of(model) == before


@pytest.mark.parametrize("explicit", [False, True])
def test_nested_observations_both_see_everything(model, explicit):
    batch = images(model.input_size)
    survey(model, batch)
    before = state_of(model)
    alone = capture_attention(model, batch)
    outer: list[tuple[str, Tensor]] = []
    with observing(model, lambda call: outer.append((call.site.module, call.weights()))):
        inner = capture_attention(model, batch, explicit=explicit)
        torch.testing.assert_close(inner.logits.detach(), alone.logits, atol=1e-5, rtol=1e-5)
    assert [name for name, _ in outer] == [site.module for site in inner.sites] == [site.module for site in alone.sites]
    for (_, seen), also, expected in zip(outer, inner.layers, alone.layers):
        torch.testing.assert_close(seen, expected, atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(also.detach(), expected, atol=1e-6, rtol=1e-5)
    assert state_of(model) == before


def test_the_inner_of_two_observations_undoes_its_own_alone():
    model, batch = ours(), images((32, 48))
    seen: list[str] = []
    with observing(model, lambda call: seen.append(call.site.module)):
        with pytest.raises(BrokenError), observing(model, lambda _call: None):
            raise BrokenError
        model(batch)
    assert seen == ["blocks.0.attn", "blocks.1.attn"]


def test_another_model_can_be_observed_from_within_a_reducer():
    outside, inside = ours(), timm_model("vit_tiny_patch16_224")
    layers: list[int] = []
    observe(outside, images((32, 48)), lambda _call: layers.append(len(capture_attention(inside, images()).layers)))
    assert layers == [2, 2]


def test_a_failed_survey_is_not_remembered():
    model, batch = ours(), images((32, 48))
    before = state_of(model)
    handle = model.module.head.register_forward_pre_hook(lambda _module, _inputs: (_ for _ in ()).throw(BrokenError))
    with pytest.raises(BrokenError):
        survey(model, batch)
    handle.remove()
    assert len(survey(model, batch)) == 2
    assert state_of(model) == before
