"""wrap: facts about a user's module are read from forward passes, and nothing in it changes."""

import copy
import pickle
import threading
from contextlib import suppress
from functools import partial
from inspect import signature

import pytest
import torch
from timm.layers import AttentionRope
from timm.models.eva import Eva, EvaAttention
from timm.models.vision_transformer import ResPostBlock, VisionTransformer
from torch import Tensor, nn

import vitlens
from tests.kit.models import handwritten as plain
from tests.kit.models import handwritten_rare as rare
from tests.kit.models.handwritten import DIM, GRID, half, noise, own_weights, seeded, wrapped
from tests.kit.select import values_of
from tests.kit.tiny import FAMILIES, VIT, images, model_of, shaken
from vitlens.errors import UnsupportedError, VitlensError

LABELS = torch.tensor([0, 1, 2])
USUAL = ("layers.0", "layers.0.att.o", "layers.0.ff")
ENCODER = ("encoder.layers.0", "encoder.layers.0.self_attn.out_proj", "encoder.layers.0.linear2")
STYLES = {  # heads, prefix, readout; of the first layer: block, output projection and MLP
    "softmax": (plain.SoftmaxViT, 3, ("cls",), "cls", *USUAL),
    "einsum": (plain.EinsumViT, 2, ("cls",), "cls", None, "layers.0.0.to_out.0", None),
    "multihead": (
        plain.MultiheadViT,
        4,
        ("cls", "register", "register"),
        "cls",
        "layers.0",
        "layers.0.att.out_proj",
        "layers.0.linear2",
    ),
    "encoder": (plain.EncoderViT, 2, (), "mean", *ENCODER),
    "inline": (plain.InlineViT, 2, (), "mean", "layers.0", "layers.0.o", "layers.0.down"),
    "merged two": (rare.merged_two, 2, ("cls",), "cls", *USUAL),
    "merged fused": (rare.styled(rare.merged_fused), 3, ("cls",), "cls", *USUAL),
    "grouped": (plain.of(rare.Grouped), 4, ("cls",), "cls", *USUAL),
    "optional": (rare.OptionalViT, 3, ("cls",), "cls", *USUAL),
    "query-pooled": (rare.QueryPooled, 3, (), "pool", *USUAL),
}


@pytest.mark.parametrize("style", STYLES)
def test_anatomy_and_weights_are_the_modules_own_and_a_head_at_zero_is_its_columns_at_zero(style):
    build, heads, prefix, readout, block, projection, mlp = STYLES[style]
    model = wrapped(build)
    batch = noise()
    expected_weights = own_weights(seeded(build), noise())
    anatomy = model.anatomy
    parts = model.anatomy.attention
    assert (anatomy.family, anatomy.readout, anatomy.blocks[:1]) == (
        "vit",
        readout,
        (block,) if block else (),
    )
    assert len(anatomy.blocks) == (len(expected_weights) - (readout == "pool") if block else 0)
    assert (model.layout.grid, model.layout.patch_size, model.layout.prefix) == (
        GRID,
        (8, 8),
        prefix,
    )
    assert values_of(parts, "heads") == [heads] * len(expected_weights)
    assert (parts[0].projection, parts[0].mlp) == (projection, mlp)
    for ours, weights in zip(vitlens.attention(model, batch), expected_weights, strict=True):
        torch.testing.assert_close(ours, weights, atol=1e-6, rtol=1e-5)
    assert vitlens.statistics(model, batch).distance.shape == (len(expected_weights), heads)
    if readout == "pool":
        return
    with vitlens.replay(model, batch) as replay:
        # no module is a block; tokens first
        assert replay.exact == (style not in ("einsum", "encoder"))
        replayed = replay.run([{f"blocks.{layer}.head.1": "zero"} for layer in range(len(parts))])
    for part, logits in zip(parts, replayed, strict=True):
        cut = seeded(build)
        linear = cut.get_submodule(part.projection)
        columns = torch.arange(linear.in_features) // (linear.in_features // heads) == 1
        linear.register_forward_pre_hook(
            lambda _, inputs, columns=columns: inputs[0].masked_fill(columns, 0.0)
        )
        with torch.no_grad():
            if "weight" in linear._parameters:  # nn.MultiheadAttention does not call its projection
                linear.weight[:, columns] = 0.0
            expected = model.read_output(cut((batch - 0.5) / 0.5))
        torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-4)
        assert (expected - model(batch)).abs().max() > 1e-4  # the head matters


KNOWN = (
    "ours",
    "torchvision-vit",
    "torchvision-swin",
    "deit-distilled",
    "dinov2-registers",
    "siglip",
    "beit",
    "swin",
)


@pytest.mark.parametrize("name", KNOWN)
def test_the_traced_anatomy_of_a_librarys_model_is_that_of_its_names(name: str):
    model = FAMILIES[name]()
    traced = half(model.module, model.input_size).anatomy
    anatomy = model.anatomy
    for field in ("family", "blocks", "layout", "readout"):
        assert getattr(traced, field) == getattr(anatomy, field)
    assert {part.module: (part.heads, part.projection) for part in traced.attention} == {
        module: (anatomy.parts[module].heads, anatomy.parts[module].projection)
        for module in anatomy.attention_modules
    }
    mlps = set(values_of(traced.attention, "mlp"))
    assert anatomy.family != "vit" or mlps >= {f"{block}.mlp" for block in anatomy.blocks}


def eva(kind: type[nn.Module]) -> nn.Module:
    """Build a model of timm with a norm and a gate after the heads."""
    if "gated" not in signature(kind).parameters:
        pytest.skip("attention of this timm has no gate")
    model = Eva(**VIT, use_rot_pos_emb=True)
    for block in model.blocks:
        block.attn = kind(
            32,
            num_heads=2,
            qkv_bias=True,
            gated=True,
            scale_norm=True,
            norm_layer=nn.LayerNorm,
            num_prefix_tokens=1,
        )
    return model


at_32 = partial(half, image_size=32)
GATED = {  # and whether the anatomy is traced, or known by the names
    "normed": (partial(VisionTransformer, **VIT, scale_attn_norm=True), at_32),
    "eva": (partial(eva, EvaAttention), model_of),
    "rope": (partial(eva, AttentionRope), at_32),
    "norms after the branches": (
        partial(VisionTransformer, **VIT, block_fn=ResPostBlock),
        model_of,
    ),
}


@pytest.mark.parametrize("name", GATED)
def test_heads_that_are_normed_or_gated_are_read_at_the_input_of_their_projection(name: str):
    build, model_from = GATED[name]
    model = model_from(shaken(build))
    batch = images()
    if "after" not in name:
        parts = vitlens.direct_logit_attribution(model, batch)
        torch.testing.assert_close(parts.total(), parts.logit, atol=1e-3, rtol=1e-3)
    with torch.no_grad():
        with vitlens.intervene(model, {"blocks.1.head.1": "zero"}):
            logits = model(batch)
        with vitlens.replay(model, batch) as replay:
            (replayed,) = replay.run([{"blocks.1.head.1": "zero"}])
        clean = model(batch)
        model.module.get_submodule("blocks.1.attn.proj").weight[:, 16:] = 0
        expected = model(batch)
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(replayed, expected, atol=1e-5, rtol=1e-4)
    assert replay.exact
    assert (clean - expected).abs().max() > 1e-3


def is_untouched(module: nn.Module) -> bool:
    parts = list(module.modules())
    parameters = list(module.parameters())
    hooked = any(
        part._forward_hooks or part._forward_pre_hooks or "forward" in vars(part) for part in parts
    )
    training = all(part.training for part in parts)
    return (
        not hooked
        and training
        and all(parameter.requires_grad and parameter.grad is None for parameter in parameters)
    )


@pytest.mark.parametrize("style", [plain.EncoderViT, plain.SmallCNN])
def test_wrapping_and_using_a_module_leaves_it_and_the_random_state_as_they_were(style):
    module = style().train()
    batch = noise()
    weights = copy.deepcopy(module.state_dict())
    state = torch.get_rng_state()
    model = half(module)
    vitlens.explain(model, batch, targets=LABELS, method="saliency")
    assert torch.equal(torch.get_rng_state(), state)
    assert is_untouched(module)
    for name, value in module.state_dict().items():
        assert torch.equal(value, weights[name])
    assert torch.equal(model.eval()(batch), model.read_output(module((batch - 0.5) / 0.5)))


@pytest.mark.parametrize("last", [1, 5, 10, 14])
def test_nothing_stays_behind_after_an_exception_anywhere(last: int):
    calls: list[int] = []

    def failing(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) == last:
            raise ValueError("inside")
        return plain.fused(q, k, v)

    module = rare.styled(failing)().train()
    state = torch.get_rng_state()
    with suppress(VitlensError, ValueError):
        half(module)
    assert len(calls) >= last
    assert torch.equal(torch.get_rng_state(), state)
    assert is_untouched(module)


def test_it_works_in_inference_mode_without_gradients_under_autocast_and_in_a_thread():
    module = seeded(plain.ViT)
    model = wrapped(plain.ViT)
    expected = vitlens.relevance(model, noise(), targets=LABELS)
    for context in (torch.inference_mode, torch.no_grad):
        with context():
            maps = vitlens.relevance(half(module), noise(), targets=LABELS)
            torch.testing.assert_close(maps, expected)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        anatomies = [wrapped(plain.ViT).anatomy]
    thread = threading.Thread(target=lambda: anatomies.append(wrapped(plain.ViT).anatomy))
    thread.start()
    thread.join()
    assert anatomies == [model.anatomy] * 2


def test_two_models_of_one_module_copies_and_pickles_agree():
    module = seeded(plain.SoftmaxViT)
    batch = noise()
    first = half(module)
    second = half(module)
    with vitlens.intervene(first, {"blocks.0.head.1": "zero"}):
        assert torch.equal(first(batch), second(batch))
    for other in (copy.deepcopy(first), pickle.loads(pickle.dumps(first))):
        assert torch.equal(other(batch), first(batch))
        assert torch.equal(vitlens.attention(other, batch)[0], vitlens.attention(first, batch)[0])


def test_a_module_in_bf16_takes_images_in_fp32():
    model, batch = wrapped(lambda: plain.SoftmaxViT().bfloat16()), noise()
    assert model(batch).dtype == torch.bfloat16
    assert vitlens.relevance(model, batch, targets=LABELS).shape == (3, *GRID)


IN_16_BITS = {
    "forward": lambda model, images: model(images),
    "capture": lambda model, images: vitlens.capture(model, images, places=["blocks.0.residual"]),
    "saliency": lambda model, images: vitlens.explain(
        model, images, method="saliency", targets=LABELS
    ),
    "features": lambda model, images: vitlens.features(model, images),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("function", IN_16_BITS)
def test_a_module_in_16_bits_sees_fp32_pixels_that_are_normalised_before_they_are_rounded(
    function, dtype
):
    mean = (0.485, 0.456, 0.406)
    std = (0.229, 0.224, 0.225)
    module = plain.SoftmaxViT().eval().to(dtype)
    batch = noise()
    model = vitlens.wrap(module, image_size=tuple(batch.shape[2:]), mean=mean, std=std)
    expected = ((batch - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)).to(
        dtype
    )
    seen: list[Tensor] = []
    with module.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].detach())):
        IN_16_BITS[function](model, batch)
    assert torch.equal(seen[-1], expected)  # the first ones are trials on noise


def test_one_logit_is_two_classes_by_its_sigmoid():
    layers = nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 1)
    model, batch = wrapped(lambda: nn.Sequential(*layers), classes=("no", "yes")), noise()
    torch.testing.assert_close(
        model(batch).softmax(1)[:, 1], model.module((batch - 0.5) / 0.5).sigmoid()[:, 0]
    )
    assert (model.classes, model.anatomy.family) == (("no", "yes"), "cnn")


def in_one_sequence() -> nn.Module:
    transposed = nn.Identity()
    mean = nn.Identity()
    transposed.forward, mean.forward = (lambda x: x.mT), (lambda x: x.mean(1))
    tokens = nn.Sequential(nn.Conv2d(3, DIM, 8, 8), nn.Flatten(2), transposed)
    return nn.Sequential(
        tokens, plain.Block(), plain.Block(), nn.LayerNorm(DIM), mean, nn.Linear(DIM, 5)
    )


def test_the_logit_lens_leaves_stem_and_classifier_out():
    model = wrapped(in_one_sequence)
    lens = vitlens.logit_lens(model, noise())
    assert lens.logits.shape == (3, 3, 5)
    torch.testing.assert_close(lens.logits[:, -1], model(noise()), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("style", [rare.merged_fused, rare.five_axes])
def test_a_knock_out_reaches_attention_with_other_axes(style, monkeypatch):
    model = wrapped(rare.styled(style))
    batch = noise()
    knocked = vitlens.KnockOut(keys=[1], queries=[0], heads=[2])
    mask = torch.zeros(3, 13, 13)
    mask[2, 0, 1] = -torch.inf
    with torch.no_grad():
        with vitlens.intervene(model, {"blocks.0.attention.weights": knocked}):
            by_place = model(batch)
        clean = model(batch)
        by_hand = lambda q, k, v: (q @ k.mT / q.shape[-1] ** 0.5 + mask).softmax(-1) @ v  # noqa: E731
        monkeypatch.setattr(model.module.layers[0].att, "style", by_hand)
        torch.testing.assert_close(by_place, model(batch))
    assert (by_place - clean).abs().max() > 1e-4


@pytest.mark.parametrize("attention", [rare.HeadsInside, rare.Adapted])
def test_heads_that_cannot_be_removed_are_observed(attention):
    build = plain.of(attention)
    model = wrapped(build)
    expected = own_weights(seeded(build), noise())
    for ours, expected_weights in zip(vitlens.attention(model, noise()), expected, strict=True):
        torch.testing.assert_close(ours, expected_weights, atol=1e-6, rtol=1e-5)
    with pytest.raises(UnsupportedError, match=r"layers\.0\.att"):
        vitlens.ablate(model, noise(), LABELS)


def test_a_part_whose_error_is_caught_is_not_taken_to_run_on():
    class Catches(nn.Module):
        def __init__(self, other: nn.Module) -> None:
            super().__init__()
            self.part = nn.Linear(DIM + 1, DIM)
            self.other = other

        def forward(self, tokens: Tensor) -> Tensor:
            try:
                return self.part(tokens)
            except RuntimeError:
                return self.other(tokens)

    def catching() -> nn.Module:
        module = plain.SoftmaxViT()
        for layer in module.layers:
            layer.ff = Catches(layer.ff)
        return module

    assert wrapped(catching).anatomy == wrapped(plain.SoftmaxViT).anatomy
