"""Trainings against the same loop written out with torch's optimisers, also in shares."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.kit.trainings import (
    TEST,
    EnoughError,
    interrupting,
    one_of,
    plain_recipe,
    state,
    tiny_model,
    tiny_split,
    trained,
)
from vitlens.errors import InputError

FEW = tiny_split("train", 8)
IMAGES = next(FEW.batches(8)).images
STEPS = 6
PEAK = 3e-3
TOKENS = ("cls_token", "dist_token", "reg_token", "pos_embed")
TWO_HEADS = {"registers": 2, "distillation": True}


def rate(step: int, warmup: int, minimum: float) -> float:
    """Return the rate: a line up to the peak, then a cosine."""
    if step < warmup:
        return PEAK * (step + 1) / warmup
    share = (step - warmup) / max(STEPS - warmup - 1, 1)
    return PEAK * (minimum + (1 - minimum) * (1 + math.cos(math.pi * share)) / 2)


def layer(name: str) -> int:
    """Return BEiT's layer: embeddings 0, block i layer i + 1, norm and head depth + 1."""
    return (
        int(name.split(".")[1]) + 1
        if name.startswith("blocks.")
        else 3 * name.startswith(("norm", "head"))
    )


def optimisers(
    module, *, kind, betas, weight_decay, decay
) -> list[tuple[torch.optim.Optimizer, float]]:
    """Return AdamW, and Muon for the blocks' matrices, each with its share of the rate.

    Matrices decay; tokens, positions and vectors do not.
    """
    pairs: list[tuple[torch.optim.Optimizer, float]] = []
    for name, parameter in module.named_parameters():
        decay_of_weight = weight_decay if parameter.ndim > 1 and name not in TOKENS else 0.0
        if kind == "muon" and parameter.ndim == 2 and name.startswith("blocks."):
            one = torch.optim.Muon(
                [parameter],
                weight_decay=decay_of_weight,
                momentum=0.95,
                adjust_lr_fn="match_rms_adamw",
            )
        else:
            one = torch.optim.AdamW([parameter], weight_decay=decay_of_weight, betas=betas)
        pairs.append((one, decay ** (3 - layer(name))))
    return pairs


def by_hand(
    *,
    warmup=0.0,
    minimum=1.0,
    clip=0.0,
    label_smoothing=0.0,
    average=0.0,
    optimiser="adamw",
    betas=(0.9, 0.999),
    weight_decay=0.05,
    layer_decay=1.0,
    accumulate=1,
    **shape,
):
    """Return the weights after the last step, and loss, norm, rate and accuracy of each step.

    The weights are averaged if the recipe averages them.
    """
    model = tiny_model(drop_path=0.0, dropout=0.0, **shape).requires_grad_(True)
    module = model.module.train()
    rows = []
    averages = state(model)
    parts = optimisers(
        module, kind=optimiser, betas=betas, weight_decay=weight_decay, decay=layer_decay
    )
    for step in range(STEPS):
        logits = model(IMAGES)
        now = rate(step, round(warmup * STEPS), minimum)
        loss = F.cross_entropy(logits, FEW.labels, label_smoothing=label_smoothing)
        loss.backward()
        norm = (
            torch.stack([parameter.grad.norm() for parameter in module.parameters()]).norm().item()
        )
        for clipped in module.parameters() if clip else ():
            clipped.grad.mul_(min(1.0, clip / norm))
        for one, part in parts:
            one.param_groups[0]["lr"] = now * part
            one.step()
            one.zero_grad()
        keep = min(average, (1 + step) / (10 + step))
        averages = {
            name: keep * averages[name] + (1 - keep) * value for name, value in state(model).items()
        }
        rows.append(
            (loss.item(), norm, now, (logits.argmax(1) == FEW.labels).float().mean().item())
        )
    return averages, rows


def close(
    actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], *, atol: float
) -> None:
    """Check that weights are equal, except the bias of the keys, whose gradient is rounding."""
    for name, value in actual.items():
        differs = (value - expected[name]).abs()
        if name.endswith("qkv.bias"):
            differs[16:32] = 0
        assert (differs <= atol + 1e-3 * value.abs()).all(), name


@pytest.mark.parametrize(
    ("changes", "shape"),
    [
        ({"betas": (0.8, 0.9), "weight_decay": 3.0, "label_smoothing": 0.2}, TWO_HEADS),
        ({"warmup": 0.5, "minimum": 0.1, "clip": 0.05}, {}),
        ({"optimiser": "muon", "weight_decay": 20.0, "accumulate": 3}, {}),
        ({"optimiser": "muon", "layer_decay": 0.5}, {}),
        ({"average": 0.3, "accumulate": 100}, {}),  # no more parts than images
        ({"average": 0.99, "layer_decay": 0.5}, {}),
    ],
    ids=str,
)
def test_a_training_is_the_loop_written_out(changes, shape, tmp_path):
    """One batch of all images, so that their order does not matter."""
    recipe = plain_recipe(epochs=STEPS, batch_size=8, learning_rate=PEAK, **changes)
    model, result = trained(
        tmp_path,
        tiny_model(drop_path=0.0, dropout=0.0, **shape),
        train=FEW,
        recipe=recipe,
        precision="fp32",
        compiling="off",
        recompute=bool(shape),
    )
    assert result.notes == ("precision fp32 (given)", "compile off (given)")
    expected, rows = by_hand(**changes, **shape)
    for metrics, (loss, norm, rate, right) in zip(result.history, rows, strict=True):
        assert metrics.train_loss == pytest.approx(loss, rel=1e-4)
        assert metrics.gradient_norm == pytest.approx(norm, rel=1e-3)
        assert (metrics.learning_rate, metrics.train_accuracy) == pytest.approx((rate, right))
    if "optimiser" not in changes:
        close(state(model), expected, atol=2e-5)
    for name, value in state(tiny_model(**shape)).items():  # Muon computes in bf16
        change = state(model)[name] - value
        expected_change = expected[name] - value
        assert (change - expected_change).norm() < 0.1 * expected_change.norm(), name
    with torch.no_grad():
        logits = model.eval()(next(TEST.batches(12)).images)
    last = result.history[-1]
    assert last.test_loss == pytest.approx(F.cross_entropy(logits, TEST.labels).item(), rel=1e-4)
    assert last.test_accuracy == pytest.approx(
        (logits.argmax(1) == TEST.labels).float().mean().item()
    )


def kept(folder, **how: bool) -> tuple[int, dict[str, torch.Tensor]]:
    """Count the numbers stored for the backward passes, and return the weights after them."""
    saved: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: saved.append(tensor.numel()) or tensor, lambda tensor: tensor
    ):
        model, _ = trained(folder, precision="fp32", recipe=plain_recipe(epochs=1), **how)
    return sum(saved), state(model)


def test_recomputed_blocks_drop_the_same_and_keep_fewer_tensors(tmp_path):
    (few, again), (many, weights) = kept(tmp_path, recompute=True), kept(tmp_path)
    assert few < many / 2
    for name, value in weights.items():
        assert torch.allclose(again[name], value, atol=1e-5)


@pytest.mark.usefixtures("progress_every_step")
@pytest.mark.parametrize(
    ("epochs", "compiler", "compiled"),
    [(400, "g++", 1), (400, "clang++", 1), (399, "g++", 0), (400, "", 0)],
)
def test_long_trainings_are_compiled_where_there_is_a_compiler(
    epochs, compiler, compiled, tmp_path, monkeypatch
):
    compiled_modules: list[nn.Module] = []
    monkeypatch.setattr("shutil.which", lambda name: name if name == compiler else None)
    monkeypatch.setattr(torch, "compile", lambda module: compiled_modules.append(module) or module)
    # of five steps an epoch, and of 2,000 from which it is worth it
    with pytest.raises(EnoughError):
        trained(tmp_path, recipe=plain_recipe(epochs=epochs), on_progress=interrupting(1))
    assert len(compiled_modules) == compiled


def test_a_batch_has_an_image_for_each_process(tmp_path):
    with one_of(3, 0, tiny_model()), pytest.raises(InputError, match="batch_size= of at least 3"):
        trained(tmp_path, recipe=plain_recipe(batch_size=2))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("processes", "accumulate"), [(3, 2), (7, 1)])
def test_averaged_gradients_of_shares_are_that_of_the_whole_batch(processes, accumulate, tmp_path):
    collected = []
    losses = []
    for count, index in ((1, 0), *((processes, index) for index in range(processes))):
        recipe = plain_recipe(
            epochs=1, batch_size=7, accumulate=accumulate if count > 1 else 1, label_smoothing=0.1
        )
        model = tiny_model(drop_path=0.0, dropout=0.0)
        with one_of(count, index, model) as gradients:
            _, result = trained(
                tmp_path, model, train=tiny_split("train", 7), recipe=recipe, precision="fp32"
            )
        collected.append(dict(gradients))
        losses.append(result.history[0].train_loss * len(range(index, 7, count)))
    full, *parts = collected
    for name, expected in full.items():
        mean = torch.stack([part[name] for part in parts]).mean(0)
        assert torch.allclose(mean, expected, rtol=1e-4, atol=1e-6), name
    assert sum(losses[1:]) == pytest.approx(losses[0], rel=1e-5)
