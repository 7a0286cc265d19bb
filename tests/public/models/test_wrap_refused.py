"""wrap: attention that cannot be read is named, and modules that are no models are refused."""

from collections.abc import Callable
from functools import partial
from typing import Any

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
    EinsumViT,
    SmallCNN,
    SoftmaxViT,
    half,
    noise,
    of,
    seeded,
    wrapped,
)
from vitlens.errors import InputError, LensError, ModelError, UnsupportedError

UNSEEN = {  # and what the message names
    "heads last": (rare.styled(rare.heads_last), r"axis 2 of \(2, 13, 13, 3\) in layers\.1\.att"),
    "linear attention": (rare.styled(rare.linearised), "found none in a forward pass"),
    "a softmax for each head": (
        rare.styled(rare.one_by_one),
        r"3 attention calls side by side in layers\.0\.att",
    ),
    "a module for each head": (of(rare.HeadModules), r"heads\.1 next to layers\.0\.att\.heads\.0"),
    "one block three times": (rare.shared, r"layers\.0\.att called 3 times"),
}


@pytest.mark.parametrize("case", UNSEEN)
def test_attention_that_is_not_seen_is_said_to_be_so_and_the_rest_works(case: str):
    build, reason = UNSEEN[case]
    model = wrapped(build)
    images = noise()
    assert (model.anatomy.family, model.anatomy.attention) == ("other", ())
    with pytest.raises(UnsupportedError, match=reason):
        vitlens.attention(model, images)
    assert vitlens.explain(model, images, targets=[0, 1, 2], method="saliency").shape == (
        3,
        *plain.SIZE,
    )


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
        (vitlens.direct_logit_attribution, plain.EncoderViT, "batch.first"),
        (vitlens.features, rare.shared, r"called 3 times|found an other model"),
        (vitlens.logit_lens, rare.OptionalViT, r"layers\.0; return only the tensor"),
    ],
)
def test_what_needs_the_residual_stream_is_refused_without_one(
    function, style: plain.Build, word: str
):
    with pytest.raises(UnsupportedError, match=word):
        function(wrapped(style), noise())


class Acting(nn.Module):
    """A CNN that does something else than to return its logits."""

    def __init__(self, act: Callable[[nn.Module, Tensor], object]) -> None:
        super().__init__()
        self.net = SmallCNN()
        self.act = act

    def forward(self, x: Tensor) -> object:
        return self.act(self.net, x)


def failing(_net: nn.Module, x: Tensor) -> Tensor:
    raise ValueError(f"no\nsecond line {x.shape}")


def counting(net: nn.Module, x: Tensor) -> Tensor:
    net.features[1].num_batches_tracked += 1
    return net(x)


ACTS = {  # and what the message says was found, or what to type
    "it raises": (failing, "ValueError: no; check image_size="),
    "it changes its input": (lambda net, x: net(x.mul_(2.0)), "clone it in forward"),
    "nothing is returned": (lambda _net, _: None, "NoneType"),
    "a dict without logits": (lambda net, x: {"answer": net(x)}, "dict of 1"),
    "an empty tuple": (lambda _net, _: (), "tuple of 0"),
    "another axis": (lambda net, x: net(x)[:, None], r"\(2, 1, 3\)"),
    "an axis less for one image": (lambda net, x: net(x).squeeze(), r"\(3,\)"),
    "one row for all images": (lambda net, x: net(x).mean(0, keepdim=True), r"\(1, 3\)"),
    "whole numbers": (lambda net, x: net(x).long(), r"int64 of shape \(2, 3\)"),
    "a softmax": (lambda net, x: net(x).softmax(1), "softmax; drop it"),
    "a sigmoid": (lambda net, x: net(x).sigmoid(), r"sigmoid \(independent labels"),
    "dropout in evaluation mode": (lambda net, x: net(F.dropout(x, 0.2)), "training=self.training"),
    "statistics of the batch": (lambda net, x: net(x - x.mean(0)), "do not depend on its batch"),
    "a counter": (counting, "num_batches_tracked changed"),
}


@pytest.mark.parametrize("case", ACTS)
def test_modules_that_do_something_else_are_refused_in_one_line(case: str):
    act, words = ACTS[case]
    module = seeded(partial(Acting, act))
    with one_line(ModelError, words):
        half(module)
    assert not module.net.features[1].num_batches_tracked  # what it counted was set back


class Central(plain.Attention):
    """All attention in the outermost forward."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, DIM, 8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.stem(x).flatten(2).mT).mean(1)


def compiled() -> nn.Module:
    cnn = SmallCNN()
    cnn._orig_mod = cnn.fc  # as torch.compile leaves it
    return cnn


def compiled_in_place(*parts: str) -> nn.Module:
    vit = SoftmaxViT()
    for part in parts:
        vit.get_submodule(part).compile(backend="eager")
    return vit


def replace_part(model: vitlens.Model, name: str) -> None:
    owner, _, last = name.rpartition(".")
    setattr(
        model.get_submodule(owner), last, torch.compile(model.get_submodule(name), backend="eager")
    )


def replace_forward(model: vitlens.Model) -> None:
    model.module.forward = torch.compile(model.module.forward, backend="eager")


IN_PLACE = {  # what is compiled after the model was made
    "the module": lambda model: model.module.compile(backend="eager"),
    "a block": lambda model: model.module.layers[1].compile(backend="eager"),
    "the model": lambda model: model.compile(backend="eager"),
}
REPLACED = {
    "a module": lambda model: replace_part(model, "module"),
    "a block": lambda model: replace_part(model, "module.layers.0"),
    "a forward": replace_forward,
}


@pytest.mark.parametrize("what", IN_PLACE)
@pytest.mark.parametrize("is_used", [False, True])
def test_what_is_compiled_in_place_after_wrapping_changes_nothing(what, is_used):
    model = wrapped(SoftmaxViT)
    plain = wrapped(SoftmaxViT)
    if is_used:
        vitlens.attention(model, noise())
    IN_PLACE[what](model)
    for function in (
        vitlens.relevance,
        partial(vitlens.explain, targets=[0, 1, 2], method="gradcam"),
    ):
        torch.testing.assert_close(function(model, noise()), function(plain, noise()))
    assert len(vitlens.attention(model, noise())) == len(vitlens.attention(plain, noise()))
    # outside it stays compiled
    assert any(part._compiled_call_impl is not None for part in model.modules())


@pytest.mark.parametrize("what", REPLACED)
def test_what_torch_compile_replaced_after_wrapping_is_named(what):
    model = wrapped(SoftmaxViT)
    REPLACED[what](model)
    for function in (vitlens.attention, vitlens.relevance):
        with one_line(ModelError, "_orig_mod"):
            function(model, noise())


class CompiledForward(SmallCNN):
    """By the decorator."""

    @torch.compile(backend="eager")
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


def exported() -> nn.Module:
    return torch.export.export(
        nn.Sequential(nn.Flatten(), nn.Linear(3 * 24 * 32, 3)).eval(), (noise(),)
    ).module()


def inferred() -> nn.Module:
    with torch.inference_mode():
        return SmallCNN()


MODULES = {
    "the meta device": (lambda: SmallCNN().to("meta"), ModelError, "to_empty"),
    "weights made for inference": (inferred, ModelError, "inference_mode"),
    "a traced module": (
        lambda: torch.jit.trace(seeded(SmallCNN), noise()),
        ModelError,
        "scripted or traced",
    ),
    "a compiled module": (compiled, ModelError, "_orig_mod"),
    "a compiled forward": (CompiledForward, ModelError, "build the model again"),
    "attention of no module": (Central, UnsupportedError, "submodule for each attention layer"),
}


@pytest.mark.parametrize("case", MODULES)
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_modules_whose_inside_cannot_be_read_are_refused_in_one_line(case: str):
    build, error, words = MODULES[case]
    with one_line(error, words):
        wrapped(build)


@pytest.mark.parametrize("parts", [("",), ("layers.0", "layers.1")], ids=["whole", "blocks"])
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_a_module_compiled_in_place_is_observed_and_changed_as_one_that_is_not(parts):
    torch.manual_seed(0)
    module = compiled_in_place(*parts)
    plain = SoftmaxViT()
    plain.load_state_dict(module.state_dict())
    model, expected = wrapped(lambda: module), wrapped(lambda: plain)
    for layer, same in zip(
        vitlens.attention(model, noise()), vitlens.attention(expected, noise()), strict=True
    ):
        torch.testing.assert_close(layer, same)
    logits = []
    for candidate in (model, expected):
        with vitlens.intervene(candidate, {"blocks.0.attention": "zero"}), torch.no_grad():
            logits.append(candidate(noise()))
    torch.testing.assert_close(*logits)
    # still compiled
    for part in parts:
        assert module.get_submodule(part)._compiled_call_impl is not None


def test_an_exported_module_is_refused_in_one_line():
    with one_line(ModelError, "the module that was exported"):
        half(exported())


def test_a_function_is_refused():
    with pytest.raises(ModelError, match="found function"):
        half(seeded)


class NaNBuffer(SmallCNN):
    """A module whose buffer is NaN until the first forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.tensor(torch.nan))

    def forward(self, images: Tensor) -> Tensor:
        self.seen.fill_(1.0)
        return super().forward(images)


def test_a_buffer_that_was_nan_is_restored_and_refused():
    module = seeded(NaNBuffer)
    with one_line(ModelError, "found seen changed"):
        half(module)
    assert module.seen.isnan()


@pytest.mark.parametrize(
    "changes",
    [
        {"image_size": (32.5, 32)},
        {"image_size": 0},
        {"image_size": (32, -1)},
        {"std": (0.5, 0, 0.5)},
        {"mean": (0.5, float("nan"), 0.5)},
    ],
    ids=str,
)
def test_sizes_and_normalisations_that_are_none_are_refused(changes: dict[str, Any]):
    arguments = {"image_size": 32, "mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}
    (name,) = changes
    with one_line(InputError, name.removeprefix("image_")):
        vitlens.wrap(seeded(SmallCNN), **(arguments | changes))
