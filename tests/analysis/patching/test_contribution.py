"""Direct contributions sum to the logit and are what a plain formula says; the logit lens ends in the logits."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor
from torchvision.models.vision_transformer import VisionTransformer as TorchvisionViT

from tests.lens.tiny import FAMILIES, images, model_of, ours, shaken, shared_model, timm_model
from vitlens.analysis.patching.contribution import accuracy_by_depth, contributions, logits_by_depth
from vitlens.analysis.patching.stream_to_logits import logits_from
from vitlens.errors import InputError, UnsupportedError
from vitlens.lens.replay import replaying
from vitlens.models.model import Model
from vitlens.models.rebuild import prune_heads
from vitlens.models.resnet import build_resnet

READ = {
    **{name: partial(shared_model, name) for name in FAMILIES if name not in ("siglip", "perception-encoder", "cait")},
    "ours-mean": partial(ours, pooling="mean", registers=2),
    "ours-distilled": partial(ours, distillation=True, registers=1),
    "ours-without-mlp": partial(ours, mlp=False),
    "ours-without-norm": partial(ours, norm=False),
    "vit-mean-before-norm": partial(timm_model, "vit_tiny_patch16_224", global_pool="avg", fc_norm=False),
}
READ = {name: make for name, make in READ.items() if "swin" not in name}
TARGETS = torch.tensor([0, 3, 4])


def batch_of(model: Model) -> Tensor:
    return images(model.input_size, batch=3)


@pytest.mark.parametrize("name", READ)
def test_the_parts_sum_to_the_logit(name):
    model = READ[name]()
    batch = batch_of(model)
    found = contributions(model, batch, targets=TARGETS)
    with torch.no_grad():
        logits = model(batch)
    # nn.MultiheadAttention unobserved takes another kernel
    torch.testing.assert_close(found.logit, logits[range(3), TARGETS], atol=1e-5, rtol=0)
    torch.testing.assert_close(found.total(), found.logit, atol=1e-5, rtol=0)
    assert found.heads.shape == (3, 2, 2)
    assert found.heads.abs().min() > 0
    assert (found.mlps.abs().min() > 0) == (name != "ours-without-mlp")
    assert found.rest.abs().max() == 0
    more = replace(found, heads=found.heads + 1)
    torch.testing.assert_close(more.total(), found.total() + 4)


@pytest.mark.parametrize("pooling", ["cls", "mean"])
@torch.no_grad()
def test_heads_and_mlps_of_ours_by_hand(pooling):
    """Elhage 2021: what a part writes where the classifier reads, centred and scaled by the norm, times the head."""
    model = ours(pooling=pooling)
    module, batch = model.module, batch_of(model)
    norm = module.norm if pooling == "cls" else module.fc_norm
    found = contributions(model, batch, targets=TARGETS)

    def read(tokens: Tensor) -> Tensor:
        return tokens[:, 0] if pooling == "cls" else tokens.mean(1)

    stream = module.tokens(model.prepare(batch))
    parts, before = [], read(stream)
    with replaying(model, batch) as replay:
        for layer, block in enumerate(module.blocks):
            output, weight = replay.tensor(f"blocks.{layer}.heads"), block.attn.proj.weight
            parts += [read(output[:, head] @ weight[:, 8 * head : 8 * head + 8].T) for head in range(2)]
            stream = stream + block.attn(block.norm1(stream))
            mlp = block.mlp(block.norm2(stream))
            parts.append(read(mlp))
            stream = stream + mlp
    last = read(stream)
    scale = (last.var(-1, unbiased=False, keepdim=True) + norm.eps).sqrt()

    def to_logit(part: Tensor) -> Tensor:
        normed = (part - part.mean(-1, keepdim=True)) / scale * norm.weight
        return (normed * module.head.weight[TARGETS]).sum(-1)

    expected = torch.stack([to_logit(part) for part in parts], dim=1).unflatten(1, (2, 3))
    torch.testing.assert_close(found.heads, expected[..., :2], atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(found.mlps, expected[..., 2], atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(found.embedding, to_logit(before), atol=1e-6, rtol=1e-4)
    bias = sum(to_logit(block.attn.proj.bias.expand(3, -1)) for block in module.blocks)
    bias += module.head.bias[TARGETS] + module.head.weight[TARGETS] @ norm.bias
    torch.testing.assert_close(found.bias, bias, atol=1e-6, rtol=1e-4)


def test_the_prediction_unless_a_class_is_given():
    model = ours()
    batch = batch_of(model)
    found = contributions(model, batch)
    with torch.no_grad():
        best = model(batch).max(-1)
    assert torch.equal(found.targets, best.indices)
    torch.testing.assert_close(found.logit, best.values)
    with pytest.raises(InputError, match="expected target classes from 0 to 4, found 6"):
        contributions(model, batch, targets=TARGETS + 3)


def test_an_image_does_not_depend_on_its_batch_mates():
    model = shared_model("vit")
    batch = batch_of(model)
    together = contributions(model, batch, targets=TARGETS)
    alone = contributions(model, batch[1:2], targets=TARGETS[1:2])
    for name in ("heads", "mlps", "embedding", "bias", "logit"):
        torch.testing.assert_close(getattr(together, name)[1:2], getattr(alone, name), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", ["ours", "vit", "torchvision-vit"])
def test_blocks_that_lost_heads(name):
    whole = shared_model(name)
    batch = batch_of(whole)
    for layer, layers in ((0, 1), (1, 1)):
        model = prune_heads(whole, {layer: (0, 1)})
        found = contributions(model, batch, targets=TARGETS)
        assert found.heads.shape == (3, layers, 2)
        assert found.rest.abs().min() > 0  # the MLP and the bias of the block without heads
        torch.testing.assert_close(found.total(), found.logit, atol=1e-5, rtol=0)
        lens = logits_by_depth(model, batch)
        assert lens.shape == (3, 3, 5)
        torch.testing.assert_close(lens[:, -1], model(batch), atol=1e-5, rtol=0)
    found = contributions(prune_heads(whole, {1: (0,)}), batch, targets=TARGETS)
    assert found.heads.isnan().any(0).tolist() == [[False, False], [False, True]]
    torch.testing.assert_close(found.total(), found.logit, atol=1e-5, rtol=0)


def with_pre_logits() -> Model:
    """A hidden layer with tanh before the classifier."""
    build = partial(
        TorchvisionViT,
        image_size=32,
        patch_size=8,
        num_layers=2,
        num_heads=2,
        hidden_dim=32,
        mlp_dim=64,
        num_classes=5,
        representation_size=8,
    )
    return model_of(shaken(build, scale=0.5), alias="tanh")


ADDED = "the parts of image [012] sum to"
NOT_READ = {
    "siglip": (FAMILIES["siglip"], "found attention pooling in siglip"),
    "cait": (FAMILIES["cait"], "found attention pooling in cait"),
    "swin": (FAMILIES["swin"], "found a windowed model in swin"),
    "torchvision-swin": (FAMILIES["torchvision-swin"], "found a windowed model"),
    "cnn": (lambda: model_of(build_resnet("resnet20", classes=5, image_size=(32, 32))), "found a cnn model"),
    "norm-after-branch": (partial(timm_model, "vit_base_patch16_rpn_224", alias="rpn", class_token=False), ADDED),
    "no-residual": (partial(ours, residual=False), ADDED),
    "tanh": (with_pre_logits, ADDED),
}


@pytest.mark.parametrize("name", NOT_READ)
def test_where_it_is_not_defined(name):
    make, message = NOT_READ[name]
    model = make()
    with pytest.raises(UnsupportedError, match=message) as caught:
        contributions(model, batch_of(model), targets=TARGETS)
    assert "\n" not in str(caught.value)
    if message is not ADDED:
        with pytest.raises(UnsupportedError, match=message):
            logits_by_depth(model, batch_of(model))


@pytest.mark.parametrize("name", READ)
def test_the_lens_ends_in_the_logits(name):
    model = READ[name]()
    batch = batch_of(model)
    lens = logits_by_depth(model, batch)
    with torch.no_grad():
        torch.testing.assert_close(lens[:, -1], model(batch), atol=1e-5, rtol=0)
    assert lens.shape == (3, 3, 5)
    assert (lens[:, 1:] - lens[:, :-1]).abs().amax((0, 2)).min() > 1e-3


@torch.no_grad()
def test_the_lens_of_ours_by_hand():
    model = ours(distillation=True)
    module, batch = model.module, batch_of(model)
    stream = module.tokens(model.prepare(batch))
    expected = [module.forward_head(module.norm(stream))]
    for block in module.blocks:
        stream = block(stream)
        expected.append(module.forward_head(module.norm(stream)))
    torch.testing.assert_close(logits_by_depth(model, batch), torch.stack(expected, dim=1))


def test_the_tail_gives_any_streams_logits():
    model = shared_model("vit")
    stream = torch.randn(4, 17, 32)
    with torch.no_grad():
        expected = model.module.forward_head(model.module.norm(stream))
        torch.testing.assert_close(logits_from(model, stream), expected)


def test_accuracy_by_depth():
    lens = torch.tensor([[[1.0, 0.0], [0.0, 1.0]], [[1.0, 0.0], [1.0, 0.0]]])  # 2 images, 2 depths, 2 classes
    assert accuracy_by_depth(lens, torch.tensor([1, 0])).tolist() == [0.5, 1.0]
