"""wrap: what is read of a user's module from forward passes is the module's own; nothing in it changes."""

import copy
import pickle
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import pytest
import torch
from timm.layers import Attention, AttentionRope
from timm.models.eva import Eva, EvaAttention
from timm.models.vision_transformer import ResPostBlock, VisionTransformer
from torch import Tensor, nn

import vitlens
from tests.kit.models import handwritten as plain
from tests.kit.models import handwritten_rare as rare
from tests.kit.models.handwritten import GRID, half, noise, own_weights, seeded, wrapped
from tests.kit.tiny import FAMILIES, VIT, images, model_of, shaken
from vitlens.errors import UnsupportedError, VitlensError

LABELS = torch.tensor([0, 1, 2])
RARE = ("layers.0", "layers.0.att.o", "layers.0.ff")
MULTIHEAD = ("blocks.0", "blocks.0.attention.out_proj", "blocks.0.linear2")
ENCODER = ("encoder.layers.0", "encoder.layers.0.self_attn.out_proj", "encoder.layers.0.linear2")
STYLES = {  # heads, prefix, readout; of the first layer: block, output projection and MLP
    plain.SoftmaxViT: (3, ("cls",), "cls", "encoder.0", "encoder.0.sa.mix", "encoder.0.feedforward"),
    plain.EinsumViT: (2, ("cls",), "cls", None, "layers.0.0.to_out.0", None),
    plain.MultiheadViT: (4, ("cls", "register", "register"), "cls", *MULTIHEAD),
    plain.EncoderViT: (2, (), "mean", *ENCODER),
    plain.InlineViT: (2, (), "mean", "trunk.0", "trunk.0.o", "trunk.0.down"),
    rare.MergedTwo: (2, ("cls",), "cls", *RARE),
    rare.of(rare.Merged): (3, ("cls",), "cls", *RARE),
    rare.of(rare.MergedFused): (3, ("cls",), "cls", *RARE),
    rare.of(rare.Rotary): (4, ("cls",), "cls", *RARE),
    rare.Optional: (3, ("cls",), "cls", *RARE),
    rare.QueryPooled: (3, (), "pool", *RARE),
}


@pytest.mark.parametrize("style", STYLES, ids=lambda style: style.__name__)
def test_anatomy_and_weights_are_the_modules_own_and_a_head_at_zero_is_its_columns_at_zero(style):
    heads, prefix, readout, block, projection, mlp = STYLES[style]
    model, batch, own = wrapped(style), noise(), own_weights(seeded(style), noise())
    anatomy, parts = model.anatomy, model.anatomy.attention
    assert (anatomy.family, anatomy.readout, anatomy.blocks[:1]) == ("vit", readout, (block,) if block else ())
    assert len(anatomy.blocks) == (len(own) - (readout == "pool") if block else 0)
    assert (model.layout.grid, model.layout.patch_size, model.layout.prefix) == (GRID, (8, 8), prefix)
    assert [part.heads for part in parts] == [heads] * len(own)
    assert (parts[0].projection, parts[0].mlp) == (projection, mlp)
    for ours, weights in zip(vitlens.attention(model, batch), own, strict=True):
        torch.testing.assert_close(ours, weights, atol=1e-6, rtol=1e-5)
    assert vitlens.statistics(model, batch).distance.shape == (len(own), heads)
    if readout == "pool":
        return
    with vitlens.replay(model, batch) as kept:
        assert kept.exact == (style not in (plain.EinsumViT, plain.EncoderViT))  # no module is a block; tokens first
        replayed = kept.run([{f"blocks.{layer}.head.1": "zero"} for layer in range(len(parts))])
    for part, logits in zip(parts, replayed, strict=True):
        cut = seeded(style)
        linear = cut.get_submodule(part.projection)
        columns = torch.arange(linear.in_features) // (linear.in_features // heads) == 1
        linear.register_forward_pre_hook(lambda _, inputs, columns=columns: inputs[0].masked_fill(columns, 0.0))
        with torch.no_grad():
            if "weight" in linear._parameters:  # nn.MultiheadAttention does not call its projection
                linear.weight[:, columns] = 0.0
            expected = model.read_output(cut((batch - 0.5) / 0.5))
        torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-4)
        assert (expected - model(batch)).abs().max() > 1e-4  # the head matters


KNOWN = ("ours", "torchvision-vit", "torchvision-swin", "deit-distilled", "dinov2-registers", "siglip", "beit", "swin")


@pytest.mark.parametrize("name", KNOWN)
def test_the_traced_anatomy_of_a_librarys_model_is_that_of_its_names(name: str):
    model = FAMILIES[name]()
    traced, known = half(model.module, model.input_size).anatomy, model.anatomy
    for field in ("family", "blocks", "layout", "readout"):
        assert getattr(traced, field) == getattr(known, field)
    assert {part.module: (part.heads, part.projection) for part in traced.attention} == {
        module: (known.parts[module].heads, known.parts[module].projection) for module in known.attention_modules
    }
    mlps = {part.mlp for part in traced.attention}
    assert known.family != "vit" or mlps >= {f"{block}.mlp" for block in known.blocks}


at_32 = partial(half, image_size=32)
BOTH = {"num_heads": 2, "qkv_bias": True, "gated": True, "scale_norm": True, "norm_layer": nn.LayerNorm}


def with_attention(kind: Callable[..., nn.Module], attention: Callable[..., nn.Module], **options: object) -> nn.Module:
    """A model of timm whose attention modules are of another kind, with a norm and a gate after the heads."""
    model = kind(**VIT, **options)
    for block in model.blocks:
        block.attn = attention(32, **BOTH)
    return model


EVA = partial(EvaAttention, num_prefix_tokens=1), partial(AttentionRope, num_prefix_tokens=1)
GATED: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], vitlens.Model]]] = {
    "normed": (partial(VisionTransformer, **VIT, scale_attn_norm=True), at_32),
    "gated": (partial(with_attention, VisionTransformer, Attention), model_of),
    "eva": (partial(with_attention, Eva, EVA[0], use_rot_pos_emb=True), model_of),
    "rope": (partial(with_attention, Eva, EVA[1], use_rot_pos_emb=True), at_32),
    "norms after the branches": (partial(VisionTransformer, **VIT, block_fn=ResPostBlock), model_of),
}


@pytest.mark.parametrize("name", GATED)
def test_heads_that_are_normed_or_gated_are_read_at_the_input_of_their_projection(name: str):
    build, model_from = GATED[name]
    model, batch = model_from(shaken(build)), images()
    if "after" not in name:
        parts = vitlens.direct_logit_attribution(model, batch)
        torch.testing.assert_close(parts.total(), parts.logit, atol=1e-3, rtol=1e-3)
    with torch.no_grad():
        with vitlens.intervene(model, {"blocks.1.head.1": "zero"}):
            found = model(batch)
        with vitlens.replay(model, batch) as kept:
            (replayed,) = kept.run([{"blocks.1.head.1": "zero"}])
        clean = model(batch)
        model.module.get_submodule("blocks.1.attn.proj").weight[:, 16:] = 0
        expected = model(batch)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(replayed, expected, atol=1e-5, rtol=1e-4)
    assert kept.exact
    assert (clean - expected).abs().max() > 1e-3


def is_untouched(module: nn.Module) -> bool:
    parts, parameters = list(module.modules()), list(module.parameters())
    hooked = any(part._forward_hooks or part._forward_pre_hooks or "forward" in vars(part) for part in parts)
    training = all(part.training for part in parts)
    return not hooked and training and all(each.requires_grad and each.grad is None for each in parameters)


@pytest.mark.parametrize("style", [plain.SoftmaxViT, plain.EncoderViT, plain.SmallCNN, rare.QueryPooled])
def test_wrapping_and_using_a_module_leaves_it_and_the_random_state_as_they_were(style):
    module, batch = style().train(), noise()
    weights, state = copy.deepcopy(module.state_dict()), torch.get_rng_state()
    model = half(module)
    vitlens.explain(model, batch, targets=LABELS, method="saliency")
    vitlens.profile(model, batch_sizes=(1,))
    if style is not plain.SmallCNN:
        vitlens.ablate(model, batch, LABELS)
    assert torch.equal(torch.get_rng_state(), state)
    assert is_untouched(module)
    assert all(torch.equal(value, weights[name]) for name, value in module.state_dict().items())
    assert torch.equal(model.eval()(batch), model.read_output(module((batch - 0.5) / 0.5)))


class Failing(rare.Attention):
    """Raises in one of its calls."""

    calls, last = 0, 0

    def forward(self, x: Tensor) -> Tensor:
        type(self).calls += 1
        if type(self).calls == type(self).last:
            raise ValueError("inside")
        return super().forward(x)


@pytest.mark.parametrize("last", [1, 5, 10, 14])
def test_nothing_stays_behind_after_an_exception_anywhere(last: int, monkeypatch):
    monkeypatch.setattr(Failing, "calls", 0)
    monkeypatch.setattr(Failing, "last", last)
    module = rare.of(Failing)().train()
    state = torch.get_rng_state()
    with suppress(VitlensError, ValueError):
        half(module)
    assert Failing.calls >= last
    assert torch.equal(torch.get_rng_state(), state)
    assert is_untouched(module)


def test_it_works_in_inference_mode_without_gradients_under_autocast_and_in_a_thread():
    module, model = seeded(rare.RareViT), wrapped(rare.RareViT)
    expected = vitlens.relevance(model, noise(), targets=LABELS)
    for context in (torch.inference_mode, torch.no_grad):
        with context():
            found = vitlens.relevance(half(module), noise(), targets=LABELS)
            torch.testing.assert_close(found, expected)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        anatomies = [wrapped(rare.RareViT).anatomy]
    thread = threading.Thread(target=lambda: anatomies.append(wrapped(rare.RareViT).anatomy))
    thread.start()
    thread.join()
    assert anatomies == [model.anatomy] * 2


def test_two_models_of_one_module_copies_and_pickles_agree():
    module, batch = seeded(plain.SoftmaxViT), noise()
    first, second = half(module), half(module)
    with vitlens.intervene(first, {"blocks.0.head.1": "zero"}):
        assert torch.equal(first(batch), second(batch))
    for other in (copy.deepcopy(first), pickle.loads(pickle.dumps(first))):
        assert torch.equal(other(batch), first(batch))
        assert torch.equal(vitlens.attention(other, batch)[0], vitlens.attention(first, batch)[0])


def test_a_module_in_bf16_takes_images_in_fp32():
    model, batch = wrapped(lambda: plain.SoftmaxViT().bfloat16()), noise()
    assert model(batch).dtype == torch.bfloat16
    assert vitlens.relevance(model, batch, targets=LABELS).shape == (3, *GRID)
    assert torch.isfinite(vitlens.ablate(model, batch, LABELS).delta_loss).all()


def test_one_logit_is_two_classes_by_its_sigmoid():
    layers = nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 1)
    model, batch = wrapped(lambda: nn.Sequential(*layers), classes=("no", "yes")), noise()
    torch.testing.assert_close(model(batch).softmax(1)[:, 1], model.module((batch - 0.5) / 0.5).sigmoid()[:, 0])
    assert (model.classes, model.anatomy.family) == (("no", "yes"), "cnn")


class Sequence(nn.Sequential):
    """Stem, blocks, norm, pooling and classifier in one sequence."""

    class Step(nn.Module):
        """A module of a function."""

        def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
            super().__init__()
            self.forward = function

    def __init__(self) -> None:
        stem = nn.Sequential(nn.Conv2d(3, rare.DIM, 8, 8), self.Step(lambda x: x.flatten(2).mT))
        blocks = (rare.Block(rare.Attention) for _ in range(2))
        super().__init__(stem, *blocks, nn.LayerNorm(rare.DIM), self.Step(lambda x: x.mean(1)), nn.Linear(rare.DIM, 5))


def test_the_logit_lens_leaves_stem_and_classifier_out():
    model = wrapped(Sequence)
    lens = vitlens.logit_lens(model, noise())
    assert lens.logits.shape == (3, 3, 5)
    torch.testing.assert_close(lens.logits[:, -1], model(noise()), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("style", [rare.MergedFused, rare.FiveAxes])
def test_a_knock_out_reaches_attention_with_other_axes(style, monkeypatch):
    model, batch = wrapped(rare.of(style)), noise()
    with torch.no_grad():
        with vitlens.intervene(
            model, {"blocks.0.attention.weights": vitlens.KnockOut(keys=[1], queries=[0], heads=[2])}
        ):
            by_place = model(batch)
        clean, mask = model(batch), torch.zeros(3, 13, 13)
        mask[2, 0, 1] = -torch.inf
        monkeypatch.setattr(
            model.module.layers[0].att, "mix", lambda q, k, v: (q @ k.mT / q.shape[-1] ** 0.5 + mask).softmax(-1) @ v
        )
        torch.testing.assert_close(by_place, model(batch))
    assert (by_place - clean).abs().max() > 1e-4


@pytest.mark.parametrize("build", [rare.of(rare.HeadsInside), rare.of(rare.Adapted)])
def test_heads_that_cannot_be_removed_are_observed(build: Callable[[], nn.Module]):
    model, expected = wrapped(build), own_weights(seeded(build), noise())
    for ours, own in zip(vitlens.attention(model, noise()), expected, strict=True):
        torch.testing.assert_close(ours, own, atol=1e-6, rtol=1e-5)
    with pytest.raises(UnsupportedError, match=r"layers\.0\.att"):
        vitlens.ablate(model, noise(), LABELS)
