"""wrap: a user's module as a Model; what is read from it, that nothing in it changes, and what is refused."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import vitlens
from tests.models.handwritten import (
    GRID,
    SIZE,
    STYLES,
    TRANSFORMERS,
    EinsumViT,
    EncoderViT,
    InlineBlock,
    InlineViT,
    MultiheadViT,
    SmallCNN,
    SoftmaxViT,
)
from vitlens.errors import InputError, ModelError, UnsupportedError
from vitlens.lens.replay import replaying
from vitlens.lens.trace import layers
from vitlens.models.model import Model

HALF = (0.5, 0.5, 0.5)


def seeded(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return build().eval()


def wrapped(build: Callable[[], nn.Module], **told: object) -> Model:
    return vitlens.wrap(seeded(build), image_size=SIZE, mean=HALF, std=HALF, **told)  # type: ignore[arg-type]


def noise(count: int = 3) -> Tensor:
    return torch.rand(count, 3, *SIZE, generator=torch.Generator().manual_seed(1))


EXPECTED = {  # blocks' container, heads, prefix, readout, output projection and MLP of the first block
    SoftmaxViT: ("encoder", 3, ("cls",), "cls", "encoder.0.sa.mix", "encoder.0.feedforward"),
    EinsumViT: ("", 2, ("cls",), "cls", "layers.0.0.to_out.0", None),
    MultiheadViT: (
        "blocks", 4, ("cls", "register", "register"), "cls", "blocks.0.attention.out_proj", "blocks.0.linear2"
    ),
    EncoderViT: ("encoder.layers", 2, (), "mean", "encoder.layers.0.self_attn.out_proj", "encoder.layers.0.linear2"),
    InlineViT: ("trunk", 2, (), "mean", "trunk.0.o", "trunk.0.down"),
}  # fmt: skip


@pytest.mark.parametrize("style", TRANSFORMERS)
def test_blocks_heads_and_tokens_are_read_from_forward_passes(style: type[nn.Module]) -> None:
    anatomy = wrapped(style).anatomy
    container, heads, prefix, readout, projection, mlp = EXPECTED[style]
    depth = 3 if style in (SoftmaxViT, InlineViT) else 2
    assert anatomy.family == "vit"
    assert anatomy.blocks == (tuple(f"{container}.{index}" for index in range(depth)) if container else ())
    assert anatomy.layout is not None
    assert (anatomy.layout.grid, anatomy.layout.patch_size, anatomy.layout.prefix) == (GRID, (8, 8), prefix)
    assert anatomy.readout == readout
    assert anatomy.attention is not None
    assert [part.heads for part in anatomy.attention] == [heads] * depth
    assert (anatomy.attention[0].projection, anatomy.attention[0].mlp) == (projection, mlp)


@pytest.mark.parametrize("style", STYLES)
def test_the_module_is_neither_changed_nor_slowed(style: type[nn.Module]) -> None:
    module = style().train()
    weights = {name: value.clone() for name, value in module.state_dict().items()}
    model = vitlens.wrap(module, image_size=SIZE, mean=HALF, std=HALF)
    assert all(torch.equal(value, weights[name]) for name, value in module.state_dict().items())
    assert all(part.training for part in module.modules())
    assert all(parameter.requires_grad and parameter.grad is None for parameter in module.parameters())
    for part in module.modules():
        assert not part._forward_hooks
        assert not part._forward_pre_hooks
        assert "forward" not in vars(part)
    module.eval()
    images = noise()
    own = module((images - 0.5) / 0.5)
    logits = own if isinstance(own, Tensor) else own[0] if isinstance(own, tuple) else own.logits
    assert torch.equal(model(images), logits)


def by_hand(style: type[nn.Module], module: nn.Module, images: Tensor) -> list[Tensor]:
    """The attention weights of each layer, by hooks on what that style happens to have."""
    kept: list[Tensor] = []

    def output(_module: nn.Module, _inputs: object, weights: Tensor) -> None:
        kept.append(weights)

    def inline(block: nn.Module, inputs: tuple[Tensor], _output: Tensor) -> None:
        y = block.a(inputs[0])  # type: ignore[operator]
        q, k = (layer(y).unflatten(-1, (block.h, -1)).transpose(1, 2) for layer in (block.q, block.k))  # type: ignore[operator]
        kept.append((q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5).softmax(-1))

    def multihead(attention: nn.MultiheadAttention, inputs: tuple[Tensor, ...], named: dict, _output: object) -> None:
        query = inputs[0] if inputs else named["query"]
        kept.append(nn.MultiheadAttention.forward(attention, query, query, query, average_attn_weights=False)[1])

    for part in module.modules():
        if isinstance(part, nn.Softmax) or (style is SoftmaxViT and isinstance(part, nn.Dropout)):
            part.register_forward_hook(output)
        elif isinstance(part, InlineBlock):
            part.register_forward_hook(inline)
        elif isinstance(part, nn.MultiheadAttention):
            part.register_forward_hook(multihead, with_kwargs=True)
    with torch.no_grad():
        module((images - 0.5) / 0.5)
    return kept


@pytest.mark.parametrize("style", TRANSFORMERS)
def test_observed_weights_are_the_modules_own(style: type[nn.Module]) -> None:
    observed = vitlens.attention(wrapped(style), noise())
    expected = by_hand(style, seeded(style), noise())
    assert len(observed) == len(expected) > 1
    for ours, own in zip(observed, expected):
        torch.testing.assert_close(ours, own, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("style", TRANSFORMERS)
def test_a_head_at_zero_is_its_columns_at_zero(style: type[nn.Module]) -> None:
    model, images = wrapped(style), noise()
    last = layers(model)[-1]
    projection = model.anatomy.parts[last.attention].projection
    assert projection is not None
    columns = slice(last.head_dim, 2 * last.head_dim)
    with replaying(model, images) as replay:
        replayed = replay.run([{f"blocks.{last.index}.head.1": "zero"}])[0]
        assert replay.exact == (style not in (EinsumViT, EncoderViT))  # no module is a block; tokens first
    cut = seeded(style)
    with torch.no_grad():
        cut.get_submodule(projection).weight[:, columns] = 0.0  # type: ignore[index]
        expected = vitlens.wrap(cut, image_size=SIZE, mean=HALF, std=HALF)(images)
    torch.testing.assert_close(replayed, expected, atol=1e-5, rtol=1e-4)
    assert (expected - model(images)).abs().max() > 1e-4  # the head matters


def test_one_logit_is_two_classes_by_its_sigmoid() -> None:
    layers = nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 1)
    model, images = wrapped(lambda: nn.Sequential(*layers), classes=("no", "yes")), noise()
    expected = model.module((images - 0.5) / 0.5).sigmoid()[:, 0]
    torch.testing.assert_close(model(images).softmax(1)[:, 1], expected)
    assert model.classes == ("no", "yes")


class Shuffled(SoftmaxViT):
    """Its patches are in an order that is not row by row."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).flatten(2).transpose(1, 2)[:, torch.randperm(12, generator=torch.Generator().manual_seed(0))]
        x = torch.cat([self.first.expand(len(x), -1, -1), x], 1) + self.places
        for block in self.encoder:
            x = block(x)
        return self.out(self.ln(x)[:, 0])


def test_what_cannot_be_read_is_named_and_can_be_said() -> None:
    model = wrapped(Shuffled)
    with pytest.raises(UnsupportedError, match=r"not row by row: .*; say grid=\(rows, columns\)"):
        _ = model.layout
    assert vitlens.attention(model, noise())[0].shape == (3, 3, 13, 13)  # what needs no layout works
    assert wrapped(Shuffled, grid=GRID, prefix=("cls",)).layout.grid == GRID


@pytest.mark.parametrize(
    ("style", "told", "error", "reason"),
    [
        (SoftmaxViT, {"heads": 4}, UnsupportedError, r"expected 4 heads in encoder\.0\.sa, as heads=4 says, found 3"),
        (SoftmaxViT, {"grid": (4, 4)}, UnsupportedError, r"expected 13 tokens"),
        (SoftmaxViT, {"grid": (4, 3)}, UnsupportedError, r"1 special tokens .* grid=\(3, 4\), .* and grid=\(4, 3"),
        (SoftmaxViT, {"blocks": ("encoder.9",)}, InputError, r"names of modules in blocks=, found 'encoder\.9'"),
        (SoftmaxViT, {"blocks": ("encoder",)}, InputError, r"modules that run in blocks=, found 'encoder'"),
        (SoftmaxViT, {"blocks": ("encoder.0.sa",)}, UnsupportedError, r"residual blocks in blocks=, found 'encoder\.0"),
        (EinsumViT, {"blocks": ("layers.0.0",)}, UnsupportedError, r"residual blocks in blocks=, found 'layers\.0\.0'"),
        (SoftmaxViT, {"classes": ("a", "b")}, InputError, r"expected 5 class names for SoftmaxViT, found 2"),
    ],
)
def test_what_is_said_is_checked(style, told: dict[str, object], error: type[Exception], reason: str) -> None:
    with pytest.raises(error, match=reason):
        wrapped(style, **told)


class Failing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise ValueError(f"no\nsecond line {x.shape}")


class Mutating(SmallCNN):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mul_(2.0))


class Returning(nn.Module):
    def __init__(self, value: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.net, self.value = SmallCNN(), value

    def forward(self, x: Tensor) -> object:
        return self.value(self.net(x))


class Central(nn.Module):
    """All attention in the outermost forward."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.qkv, self.out = nn.Conv2d(3, 8, 8, 8), nn.Linear(8, 24), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).flatten(2).transpose(1, 2)
        for _ in range(2):
            q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
            x = x + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return self.out(x.mean(1))


@pytest.mark.parametrize(
    ("build", "error", "reason"),
    [
        (Failing, ModelError, r"it raises ValueError: no; check image_size="),
        (Mutating, ModelError, r"leave its input unchanged"),
        (lambda: Returning(lambda _: None), ModelError, r"expected a tensor, a tuple .*found NoneType"),
        (lambda: Returning(lambda y: {"answer": y}), ModelError, r"found dict of 1"),
        (lambda: Returning(lambda y: y[:, None]), ModelError, r"found float32 of shape \(2, 1, 3\)"),
        (lambda: Returning(lambda y: y.argmax(1)), ModelError, r"found int64 of shape \(2,\)"),
        (lambda: Returning(lambda y: y.softmax(1)), ModelError, r"found probabilities, as its last step is a softmax"),
        (lambda: Returning(torch.sigmoid), ModelError, r"last step is a sigmoid \(independent labels"),
        (lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten()), ModelError, r"3 channels, found a first .* of 1;"),
        (Central, UnsupportedError, r"expected a submodule for each attention layer"),
    ],
)  # fmt: skip
def test_modules_that_cannot_be_wrapped_are_refused_in_one_line(
    build: Callable[[], nn.Module], error: type[Exception], reason: str
) -> None:
    with pytest.raises(error, match=reason) as refused:
        wrapped(build)
    assert "\n" not in str(refused.value)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_scripted_and_compiled_modules_are_refused() -> None:
    cnn = SmallCNN().eval()
    with pytest.raises(ModelError, match="scripted or traced"):
        vitlens.wrap(torch.jit.trace(cnn, torch.rand(1, 3, *SIZE)), image_size=SIZE, mean=HALF, std=HALF)
    cnn._orig_mod = cnn.fc  # as torch.compile leaves it
    with pytest.raises(ModelError, match=r"not compiled"):
        vitlens.wrap(cnn, image_size=SIZE, mean=HALF, std=HALF)
    with pytest.raises(ModelError, match=r"torch\.nn\.Module, found function"):
        vitlens.wrap(seeded, image_size=SIZE, mean=HALF, std=HALF)  # type: ignore[arg-type]
