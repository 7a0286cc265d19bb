"""Relevance and gradient-weighted rollout against Chefer 2021, equations 5 and 6, as full matrices written out here."""

import jaxtyping
import pytest
import torch
from torch import Tensor

from tests.analysis.attention.test_gradients import close, explicit_gradients
from tests.analysis.attention.ways import gradient_rollout
from tests.lens.tiny import FAMILIES, TIMM, images, ours, timm_model
from vitlens.analysis.attention import methods
from vitlens.analysis.attention.methods import gradient_weighted, relevance, rollout
from vitlens.errors import InputError
from vitlens.models.hooks import watching
from vitlens.models.model import Model


def asked_for(model: Model, batch: Tensor, targets: Tensor | None = None) -> list[Tensor]:
    """Equation 5 for every layer, Ā = mean over heads of the positive part of ∂logit/∂A ⊙ A (batch, query, key)."""
    weights, gradients = explicit_gradients(model, batch, targets)
    found = []
    for layer, gradient in zip(weights, gradients):
        heads = [layer[:, head] * gradient[:, head] for head in range(layer.shape[1])]
        found.append(torch.stack([torch.where(one > 0, one, 0.0) for one in heads]).sum(0) / len(heads))
    return found


def among_all(fused: Tensor, tokens: int) -> Tensor:
    """A layer as a square matrix over (reader, tokens): the reader is a pooling query or a CLS that joins late."""
    whole = fused.new_zeros(len(fused), tokens + 1, tokens + 1)
    if fused.shape[1] == tokens:
        whole[:, 1:, 1:] = fused
    elif fused.shape[2] == tokens:
        whole[:, 0, 1:] = fused[:, 0]
    else:
        whole[:, 0] = fused[:, 0]
    return whole


def by_equation_six(layers: list[Tensor], tokens: int) -> Tensor:
    """R - I over (reader, tokens): R ← R + Ā R from R = I."""
    eye = torch.eye(tokens + 1, dtype=layers[0].dtype)
    product = eye.expand(len(layers[0]), -1, -1)
    for fused in layers:
        product = product + among_all(fused, tokens) @ product
    return product - eye


def by_rollout(layers: list[Tensor], tokens: int, alpha: float) -> Tensor:
    """Over (reader, tokens): the product of (1 - alpha) Ā + alpha I, rows scaled to 1."""
    eye = torch.eye(tokens + 1, dtype=layers[0].dtype)
    product = eye.expand(len(layers[0]), -1, -1)
    for fused in layers:
        mixed = (1 - alpha) * among_all(fused, tokens) + alpha * eye
        if fused.shape[1:] == (1, tokens):
            mixed[:, 0, 0] = 0  # a pooling query is no token: nothing of it is passed on
        product = (mixed / mixed.sum(-1, keepdim=True)) @ product
    return product


READER = None  # the readout is the reader's row
READOUTS = {  # the readout over the tokens by hand: prefix, then 12, 16 or another number of patches
    "cls": (lambda: ours(depth=3), [1.0] + [0.0] * 12),
    "one head": (lambda: ours(heads=1, depth=1), [1.0] + [0.0] * 12),
    "mean, prefix 0": (lambda: ours(pooling="mean", depth=3), [1 / 12] * 12),
    "mean, prefix 2": (lambda: ours(pooling="mean", registers=2, depth=3), [0.0] * 2 + [1 / 12] * 12),
    "timm distilled": (lambda: timm_model(TIMM["deit-distilled"]), [0.5, 0.5] + [0.0] * 16),
    "timm registers": (lambda: timm_model(TIMM["dinov2-registers"]), [1.0] + [0.0] * 20),
    "torchvision": (FAMILIES["torchvision-vit"], [1.0] + [0.0] * 16),
    "siglip": (lambda: timm_model(TIMM["siglip"]), READER),
    "pooling beside cls": (lambda: timm_model(TIMM["perception-encoder"]), READER),
    "cait": (lambda: timm_model(TIMM["cait"]), READER),
    "cait, not square": (lambda: timm_model(TIMM["cait"], img_size=(32, 48)), READER),
}


def read(matrix: Tensor, row: list[float] | None, model: Model) -> Tensor:
    """The readout's row of a matrix over (reader, tokens), patches alone, as a map."""
    tokens = matrix[:, 0, 1:] if row is None else torch.tensor(row, dtype=matrix.dtype) @ matrix[:, 1:, 1:]
    return tokens[:, len(model.layout.prefix) :].unflatten(1, model.layout.grid)


@pytest.fixture(scope="module", params=READOUTS)
def case(request: pytest.FixtureRequest) -> tuple[Model, Tensor, list[float] | None, list[Tensor]]:
    """A model, images, its readout by hand, and the Ā of all its layers."""
    make, row = READOUTS[request.param]
    model = make()
    batch = images(model.input_size)
    return model, batch, row, asked_for(model, batch)


def test_the_map_from_every_layer_on(case):
    model, batch, row, layers = case
    for start in range(len(layers)):
        expected = read(by_equation_six(layers[start:], model.layout.tokens), row, model)
        close(relevance(model, batch, start_layer=start), expected)


def test_gradient_rollout_from_every_layer_on(case):
    model, batch, row, layers = case
    for start in range(len(layers)):
        for alpha in (0.5, 0.01):
            matrix = by_rollout(layers[start:], model.layout.tokens, alpha)
            expected = read(matrix, row, model)
            if row is READER:  # what is left on a late CLS has no place in the image: it is shared out
                expected = expected / matrix[:, 0, 1:].sum(-1)[:, None, None]
            close(gradient_rollout(model, batch, start_layer=start, alpha=alpha), expected)


def test_negative_parts_are_dropped_head_by_head():
    weights, gradient = torch.tensor([[[[0.5]], [[0.5]]]]), torch.tensor([[[[-8.0]], [[2.0]]]])
    assert gradient_weighted(weights, gradient).item() == 0.5  # of the mean over heads first, it would be 0


def test_another_readout_than_the_models_own():
    distilled, pooled = ours(distillation=True), timm_model(TIMM["siglip"])
    cases = (
        (distilled, "cls", [1.0, 0.0] + [0.0] * 12),
        (distilled, "mean", [0.0] * 2 + [1 / 12] * 12),
        (pooled, "mean", [1 / 16] * 16),
    )
    for model, readout, row in cases:
        batch = images(model.input_size)
        layers = [layer for layer in asked_for(model, batch) if layer.shape[1] > 1]
        expected = read(by_equation_six(layers, model.layout.tokens), row, model)
        close(relevance(model, batch, readout=readout), expected)


def test_targets_predicted_and_given():
    model, batch = ours(), images((32, 48), batch=4)
    with torch.no_grad():
        predicted = model(batch).argmax(-1)
    own = relevance(model, batch)
    assert torch.equal(own, relevance(model, batch, targets=predicted))
    given_targets = torch.tensor([0, 3, 1, 4])
    found = relevance(model, batch, targets=given_targets)
    expected = read(by_equation_six(asked_for(model, batch, given_targets), 13), [1.0] + [0.0] * 12, model)
    close(found, expected)
    alone = relevance(model, batch[1:2], targets=given_targets[1:2].to(torch.int32))
    close(alone, found[1:2])
    other = given_targets != predicted
    assert ((found - own).abs().amax((1, 2))[other] > 0.01 * own.max()).all()


def test_targets_go_with_their_images_through_several_batches(monkeypatch):
    model, batch, targets = ours(), images((32, 48), batch=5), torch.tensor([0, 3, 1, 4, 2])
    together = relevance(model, batch, targets=targets)
    monkeypatch.setattr(methods, "fitting_batch_size", lambda _model: 2)
    close(relevance(model, batch, targets=targets), together)
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # the tests' own check of shapes would be first
    wrong = {"one target (an|per) image": torch.zeros(4, dtype=torch.long), "from 0 to 4, found 5": 1 + targets}
    for words, given in wrong.items():
        with pytest.raises(InputError, match=words):
            relevance(model, batch, targets=given)


def without_gradient(model: Model) -> Model:
    """A classifier whose logits are the same for every image."""
    for module in model.module.modules():
        if isinstance(module, torch.nn.Linear) and module.out_features == 5:
            module.weight.zero_()
    return model


@pytest.mark.parametrize("name", ["ours", "vit-mean", "siglip", "cait", "swin"])
def test_no_gradient_gives_the_identity(name):
    model = without_gradient(FAMILIES[name]())
    batch = images(model.input_size)
    assert (relevance(model, batch) == 0).all()
    maps = gradient_rollout(model, batch)
    if model.anatomy.readout == "mean":  # every patch keeps itself
        torch.testing.assert_close(maps, torch.full_like(maps, 1 / maps[0].numel()))
    else:
        assert (maps == 0).all()


def test_passes_with_gradients_take_a_third_of_the_images(monkeypatch):
    """What is kept for the backward pass is about three times what a forward pass needs."""
    monkeypatch.setattr("vitlens.analysis.attention.methods.fitting_batch_size", lambda _model: 6)
    model, sizes = ours(), []
    batch = images((32, 48), batch=6)
    whole = relevance(model, batch)
    with watching(model.module, [""], before=lambda _, arguments: sizes.append(len(arguments[0]))):
        rollout(model, batch)
        assert sizes == [6]
        torch.testing.assert_close(relevance(model, batch), whole)
    assert sizes == [6, 2, 2, 2]
