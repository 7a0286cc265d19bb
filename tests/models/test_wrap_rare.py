"""wrap on rarer styles: the numbers are the module's own, or what was not found is said; nothing stays behind."""

import copy
import pickle
import sys
import threading
from collections.abc import Callable
from contextlib import suppress

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import vitlens
from tests.models import handwritten_rare as rare
from tests.models.handwritten import GRID, SIZE, EinsumViT, EncoderViT, SmallCNN, SoftmaxViT
from tests.models.test_wrap import HALF, noise, seeded, wrapped
from vitlens.errors import InputError, LensError, ModelError, UnsupportedError, VitlensError
from vitlens.lens.replay import replaying
from vitlens.lens.trace import layers

OBSERVED = {  # style: heads, prefix, readout; the heads of each can be removed
    "merged": (rare.of(rare.Merged), 3, ("cls",), "cls"),
    "merged, two heads": (rare.of(rare.MergedTwo), 2, ("cls",), "cls"),
    "merged, fused": (rare.of(rare.MergedFused), 3, ("cls",), "cls"),
    "five axes": (rare.of(rare.FiveAxes), 3, ("cls",), "cls"),
    "rotary": (rare.of(rare.Rotary), 3, ("cls",), "cls"),
    "grouped": (rare.of(rare.Grouped), 4, ("cls",), "cls"),
    "biased": (rare.of(rare.Biased), 3, ("cls",), "cls"),
    "parametrised": (rare.of(rare.Parametrised), 3, ("cls",), "cls"),
    "parallel": (rare.of(rare.Attention, rare.ParallelBlock), 3, ("cls",), "cls"),
    "overlapping": (rare.Overlapping, 3, ("cls",), "cls"),
    "optional": (rare.Optional, 3, ("cls",), "cls"),
    "pooled": (rare.QueryPooled, 3, (), "pool"),
}


def own_weights(module: nn.Module, images: Tensor) -> list[Tensor]:
    """The weights by each attention module's `own`, from the tokens that enter it."""
    kept: list[Tensor] = []
    parts = [part for part in module.modules() if isinstance(part, rare.Attention)]
    handles = [
        part.register_forward_hook(lambda part, inputs, _output: kept.append(part.own(inputs[0]))) for part in parts
    ]
    with torch.no_grad():
        module((images - 0.5) / 0.5)
    for handle in handles:
        handle.remove()
    return kept


@pytest.mark.parametrize("name", OBSERVED)
def test_rare_styles_give_the_modules_own_numbers_and_heads_at_zero_are_their_columns_at_zero(name: str) -> None:
    style, heads, prefix, readout = OBSERVED[name]
    model, images = wrapped(style), noise()
    anatomy = model.anatomy
    assert (anatomy.family, anatomy.readout, len(anatomy.blocks)) == ("vit", readout, 2)
    assert (model.layout.grid, model.layout.prefix) == (GRID, prefix)
    observed = vitlens.attention(model, images)
    assert len(observed) == len(layers(model))
    for ours, own in zip(observed, own_weights(seeded(style), images), strict=readout != "pool"):
        assert ours.shape[1] == heads
        torch.testing.assert_close(ours, own, atol=1e-6, rtol=1e-5)
    assert vitlens.statistics(model, images).distance.shape == (len(observed), heads)
    if readout == "pool":
        return
    with replaying(model, images) as replay:
        assert replay.exact
        replayed = replay.run([{f"blocks.{layer.index}.head.1": "zero"} for layer in layers(model)])
    for layer, logits in zip(layers(model), replayed):
        cut = seeded(style)
        columns = slice(layer.head_dim, 2 * layer.head_dim)

        def zeroed(_module: nn.Module, inputs: tuple[Tensor], columns: slice = columns) -> Tensor:
            tokens = inputs[0].clone()
            tokens[..., columns] = 0.0
            return tokens

        cut.get_submodule(anatomy.parts[layer.attention].projection or "").register_forward_pre_hook(zeroed)
        with torch.no_grad():
            expected = model.read_output(cut((images - 0.5) / 0.5))
        torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-4)
        assert (expected - model(images)).abs().max() > 1e-4


def test_windows_cut_by_hand_are_observed_without_a_place_in_the_image() -> None:
    model = wrapped(rare.Windowed)
    for ours, own in zip(vitlens.attention(model, noise()), own_weights(seeded(rare.Windowed), noise()), strict=True):
        torch.testing.assert_close(ours, own)
    with pytest.raises(UnsupportedError, match="positions of the windows are not known"):
        vitlens.rollout(model, noise())


@pytest.mark.parametrize(
    ("style", "reason"),
    [
        (rare.HeadsFirst, r"found 3 on the axis of a batch of 2, in layers\.0\.att; put the batch first"),
        (rare.SixHeadsFirst, r"found \(6, 2, \.\.\) for 2 images and \(6, 3, \.\.\) for 3, in layers\.0\.att"),
    ],
)
def test_heads_before_the_batch_are_refused(style: type[nn.Module], reason: str) -> None:
    with pytest.raises(UnsupportedError, match=reason):
        wrapped(rare.of(style))


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (rare.of(rare.HeadsLast), r"found a softmax over axis 2 of \(2, 13, 13, 3\) in layers\.1\.att; attention is"),
        (rare.of(rare.KeysFirst), r"found a softmax over axis -2 of \(2, 3, 13, 13\)"),
        (rare.of(rare.Linearised), r"found none in a forward pass; attention is a softmax"),
        (rare.of(rare.Sigmoid), r"found none in a forward pass; attention is a softmax"),
        (rare.of(rare.OneByOne), r"found 3 attention calls side by side in layers\.0\.att; compute the heads"),
        (rare.of(rare.HeadModules), r"found layers\.0\.att\.heads\.1 beside layers\.0\.att\.heads\.0, with the same"),
        (rare.Shared, r"found layers\.0\.att called 3 times in a forward pass, as one layer; give each call a module"),
    ],
)
def test_attention_that_is_not_seen_is_said_to_be_so(build: Callable[[], nn.Module], reason: str) -> None:
    model, images = wrapped(build), noise()
    assert model.anatomy.family == "other"
    assert model.anatomy.attention == ()
    for function in (vitlens.attention, vitlens.rollout, vitlens.statistics):
        with pytest.raises(UnsupportedError, match=reason):
            function(model, images)
    labels = torch.tensor([0, 1, 2])
    assert vitlens.explain(model, images, targets=labels, method="saliency").shape == (3, *SIZE)
    assert vitlens.attack(model, images, labels, epsilon=8 / 255).images.shape == images.shape


def test_heads_before_the_batch_on_one_axis_are_found_by_the_self_check() -> None:
    model = wrapped(rare.of(rare.MergedHeadsFirst))
    with pytest.raises((LensError, UnsupportedError), match=r"do not depend on the others of its batch.*layers\.0"):
        vitlens.attention(model, noise())


@pytest.mark.parametrize(
    ("style", "reason"),
    [
        (rare.HeadsInside, r"no linear layer reads the heads' outputs of layers\.0\.att, concatenated head by head"),
        (rare.Adapted, r"2 linear layers read the heads' outputs .*; merge adapters into layers\.0\.att\.o\.base"),
    ],
)
def test_heads_that_cannot_be_removed_are_observed(style: type[nn.Module], reason: str) -> None:
    model = wrapped(rare.of(style))
    expected = own_weights(seeded(rare.of(style)), noise())
    for ours, own in zip(vitlens.attention(model, noise()), expected, strict=True):
        torch.testing.assert_close(ours, own, atol=1e-6, rtol=1e-5)
    with pytest.raises(UnsupportedError, match=reason):
        vitlens.ablate(model, noise(), torch.tensor([0, 1, 2]))


@pytest.mark.parametrize("style", [rare.MergedFused, rare.FiveAxes])
def test_a_knock_out_reaches_attention_with_other_axes(style: type[nn.Module]) -> None:
    model, images = wrapped(rare.of(style)), noise()
    attention = model.module.layers[0].att  # type: ignore[union-attr, index]

    def masked(x: Tensor) -> Tensor:
        q, k, v = attention.split(x)  # type: ignore[operator, union-attr]
        scores = q @ k.mT / q.shape[-1] ** 0.5
        scores[:, 2, 0, 1] = -torch.inf
        return attention.o((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))  # type: ignore[operator, union-attr]

    change = vitlens.KnockOut(keys=[1], queries=[0], heads=[2])
    with torch.no_grad():
        with vitlens.intervene(model, {"blocks.0.attention.weights": change}):
            by_place = model(images)
        clean = model(images)
        attention.forward = masked  # type: ignore[union-attr]
        expected = model(images)
    torch.testing.assert_close(by_place, expected)
    assert (expected - clean).abs().max() > 1e-4


LAST = {  # special tokens after the patches: their kinds, what the classifier reads, whether it has blocks
    rare.RegistersLast: (("register", "register"), "mean", True),
    rare.ClassLast: (("register", "cls"), "cls", True),
    rare.SimpleLast: (("register", "register"), "mean", False),
}


def first(style: type[nn.Module]) -> vitlens.Model:
    """The same model with its special tokens first."""
    return wrapped(type(style.__name__, (style,), {"last": False}), prefix=LAST[style][0])


@pytest.mark.parametrize("style", LAST)
def test_special_tokens_may_stand_anywhere(style: type[nn.Module]) -> None:
    kinds, readout, blocks = LAST[style]
    model, twin, images, labels = wrapped(style), first(style), noise(), torch.tensor([0, 1, 2])
    assert (model.layout, model.anatomy.readout) == (twin.layout, twin.anatomy.readout)
    assert (model.layout.prefix, model.anatomy.readout) == (kinds, readout)
    assert wrapped(style, grid=GRID, prefix=kinds).layout == model.layout
    with torch.no_grad():
        torch.testing.assert_close(model(images), model.module((images - 0.5) / 0.5), atol=1e-5, rtol=1e-5)
    functions = {
        "weights": vitlens.attention,
        "relevance": lambda model, images: vitlens.relevance(model, images, targets=labels),
        "statistics": lambda model, images: vitlens.statistics(model, images).distance,
        "ablate": lambda model, images: vitlens.ablate(model, images, labels).delta_loss,
        "best": lambda model, images: vitlens.explain(model, images, targets=labels, method="best"),
        "gradcam": lambda model, images: vitlens.explain(model, images, targets=labels, method="gradcam"),
    }
    if blocks:
        functions |= {
            "contribution": lambda model, images: vitlens.direct_logit_attribution(model, images).total(),
            "features": lambda model, images: vitlens.features(model, images, layer=1, pool="mean").values[0],
        }
    for name, function in functions.items():
        own, expected = function(model, images), function(twin, images)
        torch.testing.assert_close(own, expected, atol=1e-4, rtol=1e-3, msg=lambda text, name=name: f"{name}: {text}")
    changes: dict[str, object] = {
        "blocks.1.head.2": "zero", "blocks.0.attention.weights": vitlens.KnockOut(keys=[1]),
        **({"blocks.1.input": lambda tokens: tokens * torch.arange(1, 15)[:, None]} if blocks else {}),
    }  # fmt: skip
    with torch.no_grad(), vitlens.intervene(model, changes), vitlens.intervene(twin, changes):
        torch.testing.assert_close(model(images), twin(images), atol=1e-5, rtol=1e-4)


def test_the_order_of_tokens_changes_in_its_own_run_alone() -> None:
    model, images = wrapped(rare.RegistersLast), noise()
    expected, found = model(images), []
    interval = sys.getswitchinterval()

    def again(*_: object) -> None:
        if not found:
            found.append(torch.zeros(0))
            found.append(model(images))

    handle = model.module.layers[1].register_forward_hook(again)  # type: ignore[index, union-attr]
    found.append(model(images))
    handle.remove()
    threads = [threading.Thread(target=lambda: found.extend(model(images) for _ in range(8))) for _ in range(4)]
    sys.setswitchinterval(1e-6)  # so that threads meet between any two steps of torch's calls of hooks
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert len(found) == 3 + 4 * 8
    for logits in found[1:]:
        torch.testing.assert_close(logits, expected)
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())


def test_the_order_of_tokens_cannot_change_where_attention_depends_on_it() -> None:
    model = wrapped(rare.RotaryLast)
    with pytest.raises(UnsupportedError, match=r"tokens \[12, 13\] do not depend on the image .*; put them first"):
        _ = model.layout


@pytest.mark.parametrize("told", [{"prefix": 4}, {"heads": "many"}, {"grid": 4}, {"prefix": ("patch",)}, {"blocks": 2}])
def test_what_is_said_has_its_type(told: dict[str, object]) -> None:
    with pytest.raises(InputError, match=rf"expected blocks as a list .* found {next(iter(told))}=.*e\.g\. prefix="):
        wrapped(SoftmaxViT, **told)


class Transposed(rare.RareViT):
    """Sixteen patches, column by column: a square grid would be the wrong one."""

    def __init__(self) -> None:
        super().__init__()
        self.pos = nn.Parameter(torch.randn(1, 16, rare.DIM))

    def tokens(self, x: Tensor) -> Tensor:
        return self.stem(x).mT.flatten(2).mT + self.pos


def test_no_square_grid_is_assumed_for_patches_in_another_order() -> None:
    model = vitlens.wrap(seeded(Transposed), image_size=32, mean=HALF, std=HALF)
    images = torch.rand(2, 3, 32, 32)
    assert vitlens.attention(model, images)[0].shape == (2, 3, 16, 16)
    assert not torch.isfinite(vitlens.statistics(model, images).distance).any()
    with pytest.raises(UnsupportedError):
        vitlens.rollout(model, images)


def test_a_grid_can_be_said_where_a_cnn_comes_first() -> None:
    assert wrapped(rare.Hybrid, grid=GRID).layout.prefix == ("cls",)


class Sequential(nn.Sequential):
    """Stem, blocks, norm, pooling and classifier in one sequence."""

    class Patches(nn.Conv2d):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).flatten(2).mT

    class Mean(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.mean(1)

    def __init__(self) -> None:
        blocks = (rare.Block(rare.Attention) for _ in range(2))
        stem = self.Patches(3, rare.DIM, 8, 8)
        super().__init__(stem, *blocks, nn.LayerNorm(rare.DIM), self.Mean(), nn.Linear(rare.DIM, 5))


def test_the_logit_lens_leaves_stem_and_classifier_out() -> None:
    model, images = wrapped(Sequential), noise()
    lens = vitlens.logit_lens(model, images)
    assert lens.logits.shape == (3, 3, 5)
    torch.testing.assert_close(lens.logits[:, -1], model(images), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("function", "style", "reason"),
    [
        (vitlens.features, EinsumViT, r"put each block.* in a module of its own, or name them with blocks="),
        (vitlens.logit_lens, EinsumViT, r"put each block.* in a module of its own, or name them with blocks="),
        (vitlens.logit_lens, EncoderViT, r"batch.first"),
        (vitlens.direct_logit_attribution, EncoderViT, r"batch.first"),
        (vitlens.features, rare.Shared, r"found layers\.0\.att called 3 times|found an other model"),
        (vitlens.direct_logit_attribution, rare.Shared, r"found layers\.0\.att called 3 times|found an other model"),
        (vitlens.logit_lens, rare.Optional, r"found tuple of layers\.0; return the tensor alone"),
        (vitlens.direct_logit_attribution, rare.Optional, r"found tuple of layers\.0; return the tensor alone"),
    ],
)
def test_what_needs_the_residual_stream_is_refused_without_one(
    function: Callable[..., object], style: type[nn.Module], reason: str
) -> None:
    with pytest.raises(UnsupportedError, match=reason):
        function(wrapped(style), noise())


def test_a_module_in_bf16_takes_images_in_fp32() -> None:
    model, images, labels = wrapped(lambda: SoftmaxViT().bfloat16()), noise(), torch.tensor([0, 1, 2])
    assert model(images).dtype == torch.bfloat16
    assert len(vitlens.attention(model, images)) == 3
    assert vitlens.relevance(model, images, targets=labels).shape == (3, *GRID)
    assert torch.isfinite(vitlens.ablate(model, images, labels).delta_loss).all()


def test_flops_of_a_pooling_query_that_is_learned() -> None:
    model = wrapped(rare.QueryPooled)
    assert all(parameter.requires_grad for parameter in model.parameters())
    vitlens.profile(model)
    assert all(parameter.requires_grad for parameter in model.parameters())


class Random(SoftmaxViT):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.dropout(x, 0.2))


class BatchNormed(SmallCNN):
    def __init__(self) -> None:
        super().__init__()
        self.features[1] = nn.BatchNorm2d(8, track_running_stats=False)


class Squeezed(SoftmaxViT):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).squeeze()


class Counting(SmallCNN):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return super().forward(x)


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (Random, r"equal logits of Random in two passes .*; pass training=self\.training"),
        (BatchNormed, r"logits of BatchNormed for an image that do not depend on its batch, found a difference"),
        (Squeezed, r"expected logits \(1, classes\) from Squeezed, found float32 of shape \(5,\)"),
        (Counting, r"expected Counting to leave its buffers unchanged .* found seen changed"),
    ],
)
def test_modules_whose_logits_depend_on_chance_or_company_are_refused(
    build: Callable[[], nn.Module], reason: str
) -> None:
    module = seeded(build)
    with pytest.raises(ModelError, match=reason):
        vitlens.wrap(module, image_size=SIZE, mean=HALF, std=HALF)
    assert all(not buffer.any() for name, buffer in module.named_buffers() if name == "seen")


def test_modules_without_usable_weights_are_refused() -> None:
    with pytest.raises(ModelError, match="meta device"):
        vitlens.wrap(SmallCNN().to("meta"), image_size=SIZE, mean=HALF, std=HALF)
    with torch.inference_mode():
        module = SmallCNN()
    with pytest.raises(ModelError, match="inference_mode"):
        vitlens.wrap(module, image_size=SIZE, mean=HALF, std=HALF)


def test_it_works_in_inference_mode_without_gradients_under_autocast_and_in_a_thread() -> None:
    module, labels = seeded(rare.RareViT), torch.tensor([0, 1, 2])
    expected = vitlens.relevance(wrapped(rare.RareViT), noise(), targets=labels)
    for context in (torch.inference_mode, torch.no_grad):
        with context():
            model = vitlens.wrap(module, image_size=SIZE, mean=HALF, std=HALF)
            torch.testing.assert_close(vitlens.relevance(model, noise(), targets=labels), expected)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert wrapped(rare.RareViT).anatomy == model.anatomy
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(wrapped(rare.RareViT).anatomy))
    thread.start()
    thread.join()
    assert found == [model.anatomy]


def test_two_models_of_one_module_and_copies_agree() -> None:
    module, images = seeded(SoftmaxViT), noise()
    first, second = (vitlens.wrap(module, image_size=SIZE, mean=HALF, std=HALF) for _ in range(2))
    with vitlens.intervene(first, {"blocks.0.head.1": "zero"}):
        assert torch.equal(first(images), second(images))
    for other in (copy.deepcopy(first), pickle.loads(pickle.dumps(first))):
        assert torch.equal(other(images), first(images))
        assert torch.equal(vitlens.attention(other, images)[0], vitlens.attention(first, images)[0])


class Failing(rare.Attention):
    """Raises in one of its calls."""

    calls, last = 0, 0

    def forward(self, x: Tensor) -> Tensor:
        type(self).calls += 1
        if type(self).calls == type(self).last:
            raise ValueError("inside")
        return super().forward(x)


@pytest.mark.parametrize("last", range(1, 20, 3))
def test_nothing_stays_behind_after_an_exception_anywhere(last: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Failing, "calls", 0)
    monkeypatch.setattr(Failing, "last", last)
    module = rare.of(Failing)().train()
    state = torch.get_rng_state()
    with suppress(VitlensError, ValueError):
        vitlens.wrap(module, image_size=SIZE, mean=HALF, std=HALF)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(part.training and "forward" not in vars(part) for part in module.modules())
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in module.modules())
    assert all(parameter.requires_grad and parameter.grad is None for parameter in module.parameters())


def test_nothing_draws_from_the_global_generator() -> None:
    module, images, labels = SoftmaxViT().train(), noise(), torch.tensor([0, 1, 2])
    state = torch.get_rng_state()
    model = vitlens.wrap(module, image_size=SIZE, mean=HALF, std=HALF)
    vitlens.rollout(model, images)
    vitlens.ablate(model, images, labels)
    vitlens.explain(model, images, targets=labels, method="smoothgrad")
    vitlens.places(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(part.training for part in module.modules())
