"""`vitlens.features`: the classifier's input, pooling, norm, layers; and receptive fields."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import vitlens
from tests.kit.commands import ran
from tests.kit.making import CLASSES, save, untrained
from tests.kit.select import values_of
from tests.kit.tiny import EACH_FAMILY, images, model_of, ours, shared_model
from vitlens import Model
from vitlens.commands.attention.record import AttentionRecord
from vitlens.errors import InputError, NonFiniteError, UnsupportedError

# their classifier reads an attention pooling, which is no layer
POOLED = (
    "siglip",
    "perception-encoder",
    "cait",
)


def cnn() -> Model:
    return vitlens.load("cnn-digits")


def entering(model: Model, module: str, batch: Tensor) -> Tensor:
    """Return the input of a module, by a hook of plain torch."""
    entered: list[Tensor] = []
    hook = model.module.get_submodule(module).register_forward_pre_hook(
        lambda _module, inputs: entered.append(inputs[0].clone())
    )
    with torch.no_grad():
        model(batch)
    hook.remove()
    return entered[0]


def model_named(name: str) -> Model:
    if not name.startswith("tiny-"):
        return cnn() if name == "cnn-digits" else shared_model(name)
    pytest.importorskip("open_clip", reason="needs the extra clip: pip install open_clip_torch")
    from tests.kit.models.clip import tiny

    return tiny(name)


@pytest.mark.parametrize(
    "name", [*EACH_FAMILY, "cnn-digits", "tiny-clip", "tiny-sigmoid", "tiny-resnet"]
)
def test_the_first_features_enter_block_0_and_the_last_the_classifier(name):
    model = model_named(name)
    batch = images(model.input_size, batch=3)
    layout = model.anatomy.layout
    features = vitlens.features(model, batch, embedding=True)
    tokens = entering(model, model.anatomy.blocks[0], batch)
    if name in ("tiny-resnet", "cnn-digits"):  # channels first
        patches = tokens.flatten(2).mT
    else:
        patches = tokens.flatten(1, -2) if layout is None else tokens[:, -layout.patches :]
    torch.testing.assert_close(features.at("embedding"), patches.mean(1), atol=1e-6, rtol=1e-5)
    if name in POOLED or name.startswith("tiny-"):
        return
    outputs = {
        module: getattr(submodule, "out_features", 0)
        for module, submodule in model.module.named_modules()
    }
    head = next(module for module, width in outputs.items() if width == len(model.classes))
    torch.testing.assert_close(features.at(-1), entering(model, head, batch), atol=1e-5, rtol=1e-5)
    parts = vitlens.features(model, batch, batch_size=2)
    torch.testing.assert_close(parts.at(-1), features.at(-1), atol=1e-5, rtol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(features.logits, model(batch), atol=1e-5, rtol=1e-5)


def by_hand(model: Model, batch: Tensor) -> list[Tensor]:
    """Return our ViT's stream after each block."""
    module = model.module
    pooled = []
    with torch.no_grad():
        tokens = module.tokens(model.prepare(batch))
        for block in module.blocks:
            tokens = block(tokens)
            pooled.append(tokens)
    return pooled


@pytest.mark.parametrize(("pool", "norm"), [("cls", True), ("mean", False), ("cls+mean", True)])
def test_every_pooling_before_and_after_the_norm(pool, norm):
    model = ours(registers=3)
    batch = images(model.input_size, batch=3)
    features = vitlens.features(model, batch, pool=pool, norm=norm, embedding=True)
    assert features.pool == pool
    for layer, values, tokens in zip(
        features.layers[1:], features.values[1:], by_hand(model, batch), strict=True
    ):
        read = model.module.norm(tokens) if norm else tokens
        parts = {"cls": read[:, 0], "mean": read[:, 4:].mean(1)}  # CLS, three registers, patches
        expected = torch.cat([parts[word] for word in pool.split("+")], 1)
        torch.testing.assert_close(values, expected, atol=1e-6, rtol=1e-5)
        assert (layer.dim, layer.norm) == (values.shape[1], "norm" if norm else None)
    # its CLS token is the same for all images
    embedding = entering(model, "blocks.0", batch)[:, 4:].mean(1)
    torch.testing.assert_close(features.at("embedding"), embedding)
    assert (features.layers[0].dim, features.layers[0].norm) == (16, None)


def test_a_norm_of_the_pooled_vector_comes_after_the_mean():
    model = ours(pooling="mean")
    batch = images(model.input_size, batch=3)
    first = vitlens.features(model, batch).values[0]
    tokens = by_hand(model, batch)[0]
    torch.testing.assert_close(first, model.module.fc_norm(tokens.mean(1)), atol=1e-6, rtol=1e-5)
    assert not torch.allclose(first, model.module.fc_norm(tokens).mean(1), atol=1e-3)


TITLES = {
    "vit": ["embedding", "block 0", "block 1"],
    "cnn": ["stem", "stage 0", "stage 1", "stage 2"],
}


@pytest.mark.parametrize("family", TITLES)
def test_layers_can_be_chosen_and_keep_their_numbers(family):
    model = ours() if family == "vit" else cnn()
    batch = images(model.input_size, batch=5)
    complete = vitlens.features(model, batch)
    with_it = vitlens.features(model, batch, embedding=True)
    last = vitlens.features(model, batch, layer=-1)
    assert values_of(last.layers, "index") == [len(complete.layers) - 1]
    assert torch.equal(last.at(), complete.at())
    some = vitlens.features(model, batch, layer=[1, 0, 1])
    assert values_of(some.layers, "index") == [0, 1]
    assert torch.equal(some.at(1), complete.at(1))
    assert values_of(with_it.layers, "title") == TITLES[family]
    assert (complete.embedded, with_it.embedded, len(complete)) == (False, True, 5)
    assert with_it.layers[1:] == complete.layers
    for one, other in zip(with_it.values[1:], complete.values, strict=True):
        assert torch.equal(one, other)


def plain() -> Model:
    return model_of(
        nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 900, 5)).eval(), alias="plain"
    )


def broken() -> Model:
    model = ours()
    with torch.no_grad():
        model.module.blocks[1].mlp.fc2.bias.fill_(torch.inf)
    return model


REFUSED = {
    "the CLS of a CNN": (cnn, {"pool": "cls"}, UnsupportedError, "try the pooling 'mean'"),
    "a layer too many": (cnn, {"layer": 3}, InputError, "from 0 to 2"),
    "a layer too few": (cnn, {"layer": -4}, InputError, "from 0 to 2"),
    "an embedding without blocks": (plain, {"embedding": True}, UnsupportedError, None),
    "a model that breaks": (broken, {"norm": False}, NonFiniteError, "block 1"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_read_is_said(case):
    make, options, error, words = REFUSED[case]
    model = make()
    with pytest.raises(error, match=words):
        vitlens.features(model, images(model.input_size), **options)


def test_a_layer_that_was_not_read_is_said():
    with pytest.raises(InputError, match=r"\[1\]"):
        vitlens.features(cnn(), images(), layer=1).at(0)
    with pytest.raises(InputError, match=r"\[0, 1, 2\]"):
        vitlens.features(cnn(), images()).at("embedding")


# --- the effective receptive field of `vitlens attention`


@pytest.fixture(scope="module", params=[False, True], ids=["still", "shifted"])
def measured(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, AttentionRecord]:
    """Measure a Swin of two stages on one image: windows of 4 x 4 patches of 2 x 4 px."""
    shape = {
        "dim": 16,
        "depths": [2, 2],
        "heads": [2, 2],
        "patch_size": [2, 4],
        "shift": request.param,
    }
    folder = tmp_path_factory.mktemp("swin")
    save(
        untrained("swin-micro", classes=CLASSES, overrides=shape),
        folder / "model" / "model.safetensors",
    )
    return folder / "model", ran(
        folder / "out", f"attention {folder / 'model'} --data digits --limit 1"
    )


def test_windows_without_shift_see_one_window_and_with_shift_more(
    measured: tuple[Path, AttentionRecord],
) -> None:
    fields = measured[1].receptive_fields
    shifted = vitlens.load(str(measured[0])).module.config.shift
    # a shifted one touches four
    seen = [
        8 * 16 / 32**2,
        (16 * 32 if shifted else 8 * 16) / 32**2,
        16 * 32 / 32**2,
    ]
    assert values_of(fields, "seen")[:2] == seen[:2]
    if not shifted:
        assert values_of(fields, "seen")[2:] == seen[2:] * 2  # merged patches are twice as large
        field = measured[1].field_maps.field[0]
        assert (field[16:24, 16:32] > 0).all()  # the window of the patch in the middle
    assert values_of(fields, "layer") == [0, 1, 2, 3]


def test_numbers_are_those_of_the_map(measured: tuple[Path, AttentionRecord]) -> None:
    """Of one image the map is its norms."""
    for index, row in enumerate(measured[1].receptive_fields):
        field = measured[1].field_maps.field[index].astype(np.float64)
        grid = ((16, 8), (16, 8), (8, 4), (8, 4))[index]
        down, across = (np.arange(32) + 0.5 - (side // 2 + 0.5) * 32 / side for side in grid)
        apart = np.hypot(down[:, None], across)
        assert row.distance.value == pytest.approx((field * apart).sum() / field.sum(), rel=1e-4)
        assert row.uniform == pytest.approx(apart.mean(), rel=1e-6)
        held = np.sort(field.ravel())[::-1].cumsum()
        assert row.half.value == pytest.approx(
            ((held < field.sum() / 2).sum() + 1) / 1024, abs=2 / 1024
        )
        assert row.seen == (field > 0).mean()
        assert (row.distance.n, row.distance.low) == (1, None)


def test_the_map_is_the_norm_of_the_gradients_of_the_middle_patch(
    measured: tuple[Path, AttentionRecord],
) -> None:
    """Up to the noise of four random directions, which falls with a mean over pixels."""
    model, (image,) = (
        vitlens.load(str(measured[0])),
        vitlens.load_data("digits", limit=1).batches(1),
    )
    pixels = image.images.clone().requires_grad_()
    outputs = []
    block = model.module.get_submodule(model.anatomy.blocks[0])
    hook = block.register_forward_hook(lambda _module, _inputs, tokens: outputs.append(tokens))
    model(pixels)
    hook.remove()
    tokens = outputs[0].flatten(1, -2)[0, 8 * 8 + 4]  # row 8 and column 4 of 16 x 8
    gradients = [torch.autograd.grad(value, pixels, retain_graph=True)[0][0] for value in tokens]
    exact = torch.stack(gradients).square().sum((0, 1)).sqrt().numpy()
    field = measured[1].field_maps.field[0]
    assert ((field > 0) == (exact > 0)).all()
    assert field.sum() == pytest.approx(exact.sum(), rel=0.25)
    inside = exact > 0
    assert np.corrcoef(field[inside], exact[inside])[0, 1] > 0.8
