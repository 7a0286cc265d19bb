"""Direct contributions sum to the logit, by a plain formula; the lens ends in the logits."""

from copy import deepcopy
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torchvision.models.vision_transformer import VisionTransformer as TorchvisionViT

import vitlens
from tests.kit.lens import HANDWRITTEN, of
from tests.kit.models.handwritten import half
from tests.kit.tiny import (
    FAMILIES,
    TORCHVISION_VIT,
    model_of,
    ours,
    pruned,
    shaken,
    shared_model,
    small_cnn,
    timm_model,
)
from vitlens import Model
from vitlens.errors import InputError, UnsupportedError

READ = {
    **{
        name: partial(shared_model, name)
        for name in ("deit3", "deit-distilled", "beit", "eva02", "torchvision-vit")
    },
    "ours-mean": partial(ours, pooling="mean", registers=2),
    "ours-distilled": partial(ours, distillation=True, registers=1),
    "ours-without-mlp": partial(ours, mlp=False),
    "ours-without-norm": partial(ours, norm=False),
    "vit-mean-before-norm": partial(
        timm_model, "vit_tiny_patch16_224", global_pool="avg", fc_norm=False
    ),
}
TARGETS = torch.tensor([0, 3, 4])
CLOSE = {"atol": 1e-5, "rtol": 0.0}
attributed = vitlens.direct_logit_attribution


@pytest.mark.parametrize("name", READ)
@torch.no_grad()
def test_the_parts_sum_to_the_logit_and_the_lens_ends_in_the_logits(name):
    model = READ[name]()
    batch = of(model)
    contributions = attributed(model, batch, TARGETS)
    lens = vitlens.logit_lens(model, batch)
    logits = model(batch)
    torch.testing.assert_close(contributions.logit, logits[range(3), TARGETS], **CLOSE)
    torch.testing.assert_close(contributions.total(), contributions.logit, **CLOSE)
    assert contributions.heads.shape == (3, 2, 2)
    assert contributions.heads.abs().min() > 0
    assert (contributions.mlps.abs().min() > 0) == (name != "ours-without-mlp")
    assert contributions.rest.abs().max() == 0
    torch.testing.assert_close(
        replace(contributions, heads=contributions.heads + 1).total(), contributions.total() + 4
    )
    torch.testing.assert_close(lens.logits[:, -1], logits, **CLOSE)
    assert torch.equal(lens.predictions, lens.logits.argmax(-1))
    assert lens.places == ("blocks.0.input", "blocks.0.residual", "blocks.1.residual")
    for depth, stream in enumerate(vitlens.capture(model, batch, lens.places).values()):
        # the stream put behind the last block
        with vitlens.intervene(model, {"blocks.1.residual": stream}):
            torch.testing.assert_close(lens.logits[:, depth], model(batch), atol=1e-5, rtol=1e-4)
    assert (lens.logits[:, 1:] - lens.logits[:, :-1]).abs().amax((0, 2)).min() > 1e-3


@pytest.mark.parametrize("pooling", ["cls", "mean"])
@torch.no_grad()
def test_heads_and_mlps_of_ours_by_hand(pooling):
    """Elhage 2021: what a part writes where the classifier reads, centred and scaled by the norm,
    times the head.
    """
    model = ours(pooling=pooling)
    module = model.module
    batch = of(model)
    norm = module.norm if pooling == "cls" else module.fc_norm
    head = module.head
    contributions = attributed(model, batch, TARGETS)
    places = [
        "blocks.1.residual",
        "blocks.0.input",
        "blocks.0.mlp",
        "blocks.1.mlp",
        "blocks.*.heads",
    ]
    last, before, *mlps, first, second = vitlens.capture(model, batch, places).values()

    def read(tokens: Tensor) -> Tensor:
        return tokens[:, 0] if pooling == "cls" else tokens.mean(1)

    def to_logit(part: Tensor) -> Tensor:
        scale = (read(last).var(-1, unbiased=False, keepdim=True) + norm.eps).sqrt()
        normed = (part - part.mean(-1, keepdim=True)) / scale * norm.weight
        return (normed * head.weight[TARGETS]).sum(-1)

    bias = head.bias[TARGETS] + head.weight[TARGETS] @ norm.bias
    for layer, (heads, block) in enumerate(zip((first, second), module.blocks)):
        columns = block.attn.proj.weight.split(8, 1)
        bias = bias + to_logit(block.attn.proj.bias.expand(3, -1))
        by_head = [to_logit(read(heads[:, number] @ columns[number].T)) for number in (0, 1)]
        torch.testing.assert_close(
            contributions.heads[:, layer], torch.stack(by_head, 1), atol=1e-6, rtol=1e-4
        )
        torch.testing.assert_close(
            contributions.mlps[:, layer], to_logit(read(mlps[layer])), atol=1e-6, rtol=1e-4
        )
    torch.testing.assert_close(
        contributions.embedding, to_logit(read(before)), atol=1e-6, rtol=1e-4
    )
    torch.testing.assert_close(contributions.bias, bias, atol=1e-6, rtol=1e-4)


def test_the_prediction_unless_a_class_is_given_also_inside_an_intervention():
    model = ours()
    batch = of(model)
    contributions = attributed(model, batch)
    with torch.no_grad():
        best = model(batch).max(-1)
    assert torch.equal(contributions.targets, best.indices)
    torch.testing.assert_close(contributions.logit, best.values)
    with pytest.raises(InputError, match="found 6"):
        attributed(model, batch, TARGETS + 3)
    with vitlens.intervene(model, {"blocks.1.mlp": "zero"}):
        assert (attributed(model, batch).mlps[:, 1] == 0).all()


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("ours", torch.bfloat16), ("eva02", torch.bfloat16), ("torchvision-vit", torch.float16)],
)
def test_a_model_in_16_bits_is_attributed_up_to_its_rounding(name, dtype):
    """As near its own logit as its number format allows: by 2 eps of the numbers that are summed;
    and near fp32.
    """
    model = deepcopy(shared_model(name))
    batch = of(model)
    exact = attributed(model, batch, TARGETS)
    contributions = attributed(model.to(dtype), batch, TARGETS)
    summed = (
        exact.heads.abs().nansum((1, 2))
        + exact.mlps.abs().sum(1)
        + exact.embedding.abs()
        + exact.bias.abs()
    )
    assert (
        (contributions.total() - contributions.logit).abs()
        <= 2 * torch.finfo(dtype).eps * summed.clamp_min(1)
    ).all()
    torch.testing.assert_close(
        contributions.heads, exact.heads, atol=8 * torch.finfo(dtype).eps, rtol=0
    )
    assert contributions.heads.dtype == torch.float32


@pytest.mark.parametrize("name", ["ours", "torchvision-vit"])
def test_blocks_that_lost_heads(name):
    full = shared_model(name)
    batch = of(full)
    for layer in (0, 1):
        model = pruned(full, {layer: (0, 1)})
        contributions = attributed(model, batch, TARGETS)
        lens = vitlens.logit_lens(model, batch).logits
        lost = contributions.heads.isnan().flatten(2).all(-1).all(0)
        assert lost.tolist() == [number == layer for number in (0, 1)]  # layers keep their numbers
        assert contributions.rest.abs().min() > 0  # the MLP and the bias of the block without heads
        torch.testing.assert_close(contributions.total(), contributions.logit, **CLOSE)
        assert lens.shape == (3, 3, 5)
        torch.testing.assert_close(lens[:, -1], model(batch), **CLOSE)
    contributions = attributed(pruned(full, {1: (0,)}), batch, TARGETS)
    assert contributions.heads.isnan().any(0).tolist() == [[False, False], [False, True]]
    torch.testing.assert_close(contributions.total(), contributions.logit, **CLOSE)


class TwoLists(nn.Module):
    """Our ViT with its blocks in two lists, one after the other."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.early = inner.blocks[:1]
        self.late = inner.blocks[1:]
        inner.blocks = nn.ModuleList()
        self.inner = inner

    def forward(self, pixels: Tensor) -> Tensor:
        tokens = self.inner.tokens(pixels)
        for block in (*self.early, *self.late):
            tokens = block(tokens)
        return self.inner.head(self.inner.norm(tokens)[:, 0])


def with_pre_logits() -> Model:
    """Build a model with a hidden layer with tanh before the classifier."""
    build = partial(TorchvisionViT, **TORCHVISION_VIT, num_classes=5, representation_size=8)
    return model_of(shaken(build, scale=0.5), alias="tanh")


ADDED = "the parts of image [012] sum to"
NOT_READ = {
    "siglip": (FAMILIES["siglip"], "found attention pooling in siglip"),
    "cait": (FAMILIES["cait"], "found attention pooling in cait"),
    "torchvision-swin": (FAMILIES["torchvision-swin"], "found a windowed model"),
    "cnn": (small_cnn, "found a cnn model"),
    "two-lists": (lambda: half(TwoLists(ours().module), (32, 48)), "found blocks in 2 places"),
    "tokens-first": (HANDWRITTEN["encoder"], r"\(tokens, batch, width\)|norm"),
    "norm-after-branch": (
        partial(timm_model, "vit_base_patch16_rpn_224", alias="rpn", class_token=False),
        ADDED,
    ),
    "no-residual": (partial(ours, residual=False), ADDED),
    "tanh": (with_pre_logits, ADDED),
}


@pytest.mark.parametrize("name", NOT_READ)
def test_where_contributions_are_not_defined_they_are_refused(name):
    """In 16 bits, too."""
    make, message = NOT_READ[name]
    for model in (make(), deepcopy(make()).to(torch.bfloat16)):
        for function in (attributed, vitlens.logit_lens)[: 1 if message is ADDED else 2]:
            with pytest.raises(UnsupportedError, match=message):
                function(model, of(model))
