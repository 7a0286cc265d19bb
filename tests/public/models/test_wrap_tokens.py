"""wrap: places of special tokens and patches, and hints about a module."""

import sys
import threading
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import vitlens
from tests.kit.models import handwritten as plain
from tests.kit.models import handwritten_rare as rare
from tests.kit.models.files import one_line
from tests.kit.models.handwritten import (
    DIM,
    GRID,
    PATCH,
    EinsumViT,
    SoftmaxViT,
    ViT,
    half,
    noise,
    of,
    seeded,
    wrapped,
)
from vitlens.errors import InputError, UnsupportedError

LABELS = torch.tensor([0, 1, 2])
LAST = {  # special tokens after the patches: their kinds, and what the classifier reads
    rare.RegistersLast: (("register", "register"), "mean"),
    rare.ClassLast: (("register", "cls"), "cls"),
}
FUNCTIONS = {
    "weights": vitlens.attention,
    "relevance": lambda model, images: vitlens.relevance(model, images, targets=LABELS),
    "statistics": lambda model, images: vitlens.statistics(model, images).distance,
    "ablate": lambda model, images: vitlens.ablate(model, images, LABELS).delta_loss,
    "gradcam": lambda model, images: vitlens.explain(
        model, images, targets=LABELS, method="gradcam"
    ),
    "contribution": lambda model, images: vitlens.direct_logit_attribution(model, images).total(),
    "features": lambda model, images: vitlens.features(model, images, layer=1, pool="mean").values[
        0
    ],
}


@pytest.mark.parametrize("style", LAST)
def test_special_tokens_may_stand_anywhere(style: type[nn.Module]):
    """As in the same model with its special tokens first."""
    kinds, readout = LAST[style]
    twin = wrapped(partial(style, last=False), prefix=kinds)
    model = wrapped(style)
    images = noise()
    assert (model.layout, model.anatomy.readout) == (twin.layout, twin.anatomy.readout)
    assert (model.layout.prefix, model.anatomy.readout) == (kinds, readout)
    assert wrapped(style, grid=GRID, prefix=kinds).layout == model.layout
    with torch.no_grad():
        torch.testing.assert_close(
            model(images), model.module((images - 0.5) / 0.5), atol=1e-5, rtol=1e-5
        )
    for name, function in FUNCTIONS.items():
        actual = function(model, images)
        expected = function(twin, images)
        torch.testing.assert_close(
            actual, expected, atol=1e-4, rtol=1e-3, msg=lambda text, name=name: f"{name}: {text}"
        )
    changes = {
        "blocks.1.head.2": "zero",
        "blocks.0.attention.weights": vitlens.KnockOut(keys=[1]),
        "blocks.1.input": lambda tokens: tokens * torch.arange(1, 15)[:, None],
    }
    with torch.no_grad(), vitlens.intervene(model, changes), vitlens.intervene(twin, changes):
        torch.testing.assert_close(model(images), twin(images), atol=1e-5, rtol=1e-4)


def test_logits_of_any_size_are_the_same_in_another_order():
    def loud() -> nn.Module:
        module = rare.RegistersLast()
        nn.init.normal_(module.out.weight, std=1e4)
        return module

    assert wrapped(loud).layout.prefix == ("register", "register")


def test_the_order_of_tokens_changes_in_its_own_run_alone():
    """Another run inside this one, or in another thread, has its own order."""
    model = wrapped(rare.RegistersLast)
    images = noise()
    expected = model(images)
    outputs = []
    interval = sys.getswitchinterval()

    def again(*_: object) -> None:
        if not outputs:
            outputs.append(expected)
            outputs.append(model(images))

    handle = model.module.layers[1].register_forward_hook(again)
    outputs.append(model(images))
    handle.remove()
    threads = [
        threading.Thread(target=lambda: outputs.extend(model(images) for _ in range(8)))
        for _ in range(4)
    ]
    # so that threads meet between any two steps of torch's calls of hooks
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert len(outputs) == 3 + 4 * 8
    for logits in outputs:
        torch.testing.assert_close(logits, expected)
    for part in model.modules():
        assert not part._forward_hooks
        assert not part._forward_pre_hooks


def test_the_order_of_tokens_cannot_change_where_attention_depends_on_it():
    with pytest.raises(UnsupportedError, match=r"tokens \[12, 13\].*; put them first"):
        _ = wrapped(partial(rare.RegistersLast, rare.Grouped)).layout


class Arranged(ViT):
    """Sixteen patches in another order, from a map that is changed before it is flattened."""

    def __init__(self, arrange: Callable[[Tensor], Tensor]) -> None:
        super().__init__(prefix=0)
        self.pos = nn.Parameter(torch.randn(1, 16, DIM))
        self.arrange = arrange

    def patches(self, x: Tensor) -> Tensor:
        return self.arrange(self.stem(x)).flatten(2).mT


def snake(x: Tensor) -> Tensor:
    rows = list(x.unbind(2))
    rows[1::2] = [row.flip(-1) for row in rows[1::2]]
    return torch.stack(rows, 2)


ORDERS = {  # and the words of the reason
    "column by column": (lambda x: x.mT, "column by column"),
    "mirrored": (lambda x: x.flip(-1), "from the right"),
    "upside down": (lambda x: x.flip(-2), "from the bottom"),
    "reversed": (lambda x: x.flip(-1, -2), "from the last to the first"),
    "a snake": (snake, "not row by row"),
    "a permutation": (
        lambda x: x.flatten(2)[:, :, [*range(1, 16, 2), *range(0, 16, 2)]].view_as(x),
        "not row by row",
    ),
}


@pytest.mark.parametrize("order", ORDERS)
def test_patches_in_another_order_have_no_layout_and_no_grid_that_is_said(order: str):
    """Each refusal says why, and what to do."""
    arrange, words = ORDERS[order]
    build = partial(Arranged, arrange)
    model = half(seeded(build), 32)
    images = torch.rand(2, 3, 32, 32)
    calls = {
        "layout": lambda: model.layout,
        "rollout": lambda: vitlens.rollout(model, images),
        "explain": lambda: vitlens.explain(model, images, method="relevance"),
        "the grid that is said": lambda: half(seeded(build), 32, grid=(4, 4), prefix=()),
    }
    for call in calls.values():
        with one_line(UnsupportedError, f"{words}.*row by row in forward"):
            call()
    assert vitlens.attention(model, images)[0].shape == (2, 3, 16, 16)  # what needs no layout works
    assert not torch.isfinite(vitlens.statistics(model, images).distance).any()


def cut(kernel: int, stride: int, padding: int, patches: int) -> plain.Build:
    """Build a ViT whose patches are cut by such a convolution."""

    def build() -> nn.Module:
        module = ViT()
        module.stem = nn.Conv2d(3, DIM, kernel, stride, padding)
        module.pos = nn.Parameter(torch.randn(1, 1 + patches, DIM))
        return module

    return build


CUTS = {  # the image, how it is cut, the grid and the pixels from patch to patch
    "a rest that no patch reads": ((46, 60), (14, 14, 0), (3, 4), (14, 14)),
    "overlapping": ((40, 56), (16, 8, 0), (4, 6), (8, 8)),
    "overlapping and padded": ((32, 48), (7, 4, 3), (8, 12), (4, 4)),
    "smaller than their stride": ((40, 60), (8, 10, 0), (4, 6), (10, 10)),
}


@pytest.mark.parametrize("case", CUTS)
def test_patches_need_not_tile_the_image(case: str):
    size, how, grid, pitch = CUTS[case]
    model = half(seeded(cut(*how, grid[0] * grid[1])), size)
    assert (model.layout.grid, model.layout.patch_size, model.layout.prefix) == (
        grid,
        pitch,
        ("cls",),
    )
    assert vitlens.rollout(model, torch.rand(2, 3, *size)).shape == (2, *grid)


class Padded(ViT):
    """An image padded to whole patches, as timm's dynamic_img_pad does."""

    def tokens(self, x: Tensor) -> Tensor:
        return super().tokens(F.pad(x, (0, -x.shape[3] % PATCH, 0, -x.shape[2] % PATCH)))


def test_an_image_that_is_padded_to_whole_patches_is_refused_with_the_size_that_is_not():
    model = half(seeded(Padded), (20, 30))
    with one_line(UnsupportedError, r"3x4 patches of 8x8 px.*image_size=\(24, 32\)"):
        vitlens.rollout(model, torch.rand(1, 3, 20, 30))
    assert half(seeded(Padded), (24, 32)).layout.grid == GRID


class ImageDependentClass(ViT):
    """CLS is the mean of the patches, as its first value."""

    def tokens(self, x: Tensor) -> Tensor:
        patches = self.patches(x)
        return torch.cat([patches.mean(1, keepdim=True), patches], 1) + self.pos


def test_a_class_token_that_depends_on_the_image_is_said():
    """Following the refusal's advice, the model is read."""
    with one_line(UnsupportedError, r"say grid=\(3, 4\) and prefix=\('cls',\)"):
        vitlens.rollout(wrapped(ImageDependentClass), noise())
    model = wrapped(ImageDependentClass, grid=(3, 4), prefix=("cls",))
    assert vitlens.rollout(model, noise()).shape == (3, *GRID)
    with pytest.raises(UnsupportedError, match="row by row in grid="):
        wrapped(ImageDependentClass, grid=(4, 3), prefix=("cls",))


@pytest.mark.parametrize("hints", [{}, {"grid": GRID}], ids=str)
def test_patches_cut_from_the_map_of_a_cnn_are_in_its_grid(hints):
    """Each depends on most of the image: the grid is that of the last map, or the one that is
    said."""
    layout = wrapped(rare.hybrid, **hints).layout
    assert (layout.grid, layout.prefix, layout.patch_size) == (GRID, ("cls",), (8, 8))


@pytest.mark.parametrize("grid", [(3, 1), (1, 3), (1, 1)])
def test_one_column_or_row_of_patches_is_a_grid(grid):
    def narrow() -> nn.Module:
        module = ViT()
        module.pos = nn.Parameter(torch.randn(1, 1 + grid[0] * grid[1], DIM))
        return module

    layout = half(seeded(narrow), (8 * grid[0], 8 * grid[1])).layout
    assert (layout.grid, layout.prefix) == (grid, ("cls",))


def test_windows_cut_by_hand_are_observed_without_a_place_in_the_image():
    build = of(rare.Halves, prefix=0)
    model = wrapped(build)
    by_module = plain.own_weights(seeded(build), noise())
    for ours, expected in zip(vitlens.attention(model, noise()), by_module, strict=True):
        torch.testing.assert_close(ours, expected)
    with pytest.raises(UnsupportedError):
        vitlens.rollout(model, noise())


LINEAR = rare.styled(rare.linearised)
SAID = [  # what is said, the error, and the word that its message holds
    (SoftmaxViT, {"heads": 4}, UnsupportedError, r"layers\.0\.att"),
    (SoftmaxViT, {"grid": (4, 4)}, UnsupportedError, "13 tokens"),
    (SoftmaxViT, {"grid": (4, 3)}, UnsupportedError, r"grid=\(3, 4\)"),
    (SoftmaxViT, {"prefix": ("cls", "register")}, UnsupportedError, "say grid="),
    (SoftmaxViT, {"blocks": ("layers.9",)}, InputError, "layers.9"),
    (SoftmaxViT, {"blocks": ("layers",)}, InputError, "layers"),  # a list, which is not called
    (SoftmaxViT, {"blocks": ("layers.0.att",)}, UnsupportedError, "layers.0.att"),
    (EinsumViT, {"blocks": ("layers.0.0",)}, UnsupportedError, "layers.0.0"),
    (LINEAR, {"heads": 3}, UnsupportedError, "heads="),
    (LINEAR, {"grid": GRID}, UnsupportedError, "grid="),
    (SoftmaxViT, {"classes": ("a", "b")}, InputError, "5 class names"),
    *(
        (SoftmaxViT, hints, InputError, rf"found {next(iter(hints))}=.*e\.g\. prefix=")
        for hints in (
            {"prefix": 4},
            {"heads": "many"},
            {"grid": 4},
            {"prefix": ("patch",)},
            {"blocks": 2},
        )
    ),
]


@pytest.mark.parametrize(
    ("style", "hints", "error", "word"), SAID, ids=lambda value: str(value)[:40]
)
def test_what_is_said_is_checked(style, hints, error, word):
    with pytest.raises(error, match=word):
        wrapped(style, **hints)


def test_blocks_that_are_said_are_the_blocks():
    model = wrapped(SoftmaxViT, blocks=("layers.1", "layers.2"), heads=3, prefix=("register",))
    assert (model.anatomy.blocks, model.layout.prefix) == (("layers.1", "layers.2"), ("register",))
    assert vitlens.features(model, noise()).values[0].shape[0] == 3


class Pooled(ViT):
    """Special tokens before the patches; the classifier reads what `pool` makes of all tokens."""

    def __init__(
        self, special: int, pool: Callable[[Tensor], Tensor], *, frozen: bool = False
    ) -> None:
        super().__init__(prefix=special)
        self.pool = pool
        self.frozen = frozen
        self.out = nn.Linear(2 * DIM if pool is cls_and_mean else DIM, 5)

    def read(self, x: Tensor) -> Tensor:
        return self.pool(x)

    def forward(self, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.frozen):
            return super().forward(x)


def cls_and_mean(x: Tensor) -> Tensor:
    return torch.cat([x[:, 0], x[:, 2:].mean(1)], 1)


REGISTERS = ("register",) * 4
POOLINGS = {
    "the mean of the patches": (4, lambda x: x[:, 4:].mean(1), REGISTERS, "mean"),
    "the mean of all tokens": (4, lambda x: x.mean(1), REGISTERS, "mean"),
    "the mean of all, two special": (2, lambda x: x.mean(1), REGISTERS[:2], "mean"),
    "the maximum of all tokens": (2, lambda x: x.amax(1), REGISTERS[:2], "mean"),
    "an unused first token": (1, lambda x: x[:, 1:].mean(1), REGISTERS[:1], "mean"),
    "the first token": (4, lambda x: x[:, 0], ("cls", *REGISTERS[1:]), "cls"),
    "the last of the special ones": (3, lambda x: x[:, 2], ("register", "register", "cls"), "cls"),
    "two tokens": (2, lambda x: x[:, :2].mean(1), ("cls", "distillation"), "cls+distillation"),
    "the first token and the mean": (2, cls_and_mean, ("cls", "register"), "cls"),
}


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("case", POOLINGS)
def test_a_special_token_is_cls_only_where_the_classifier_reads_it(case: str, frozen: bool):
    special, pool, prefix, readout = POOLINGS[case]
    model = wrapped(partial(Pooled, special, pool, frozen=frozen))
    assert (model.layout.prefix, model.anatomy.readout) == (prefix, readout)


def test_the_user_may_call_an_unread_token_cls():
    model = wrapped(partial(Pooled, 1, lambda x: x[:, 1:].mean(1)), prefix=("cls",))
    assert (model.layout.prefix, model.anatomy.readout) == (("cls",), "mean")


class OnItsGrid(plain.Attention):
    """Keys of the patches, which come first, are scaled by position: other orders change logits."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scale = torch.linspace(0.5, 2, 12)[:, None]
        return super().mix(q, torch.cat([k[:, :, :12] * scale, k[:, :, 12:]], 2), v)


@pytest.mark.parametrize("hints", [{}, {"prefix": ("register",) * 2}])
def test_registers_behind_the_patches_that_cannot_be_moved_are_refused_everywhere(hints):
    model = wrapped(partial(rare.RegistersLast, OnItsGrid), **hints)
    questions = (vitlens.statistics, vitlens.rollout, vitlens.relevance, vitlens.name_heads)
    for question in questions:
        with one_line(
            UnsupportedError,
            r"tokens \[12, 13\] do not depend on the image and are not the first ones",
        ):
            question(model, noise())
