"""Models and recipes broken on purpose: each check names what was done, and what is healthy passes."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import vitlens
from vitlens.data.catalogue import load_data
from vitlens.data.split import InMemory, Split
from vitlens.errors import DataError
from vitlens.models.loading import untrained
from vitlens.models.model import Model
from vitlens.training.check.rows import NAMES, CheckRow, TrainingCheck
from vitlens.training.check.run import check_training
from vitlens.training.recipe import Recipe, recipe_for

SHAPE = {"dim": 16, "depth": 2, "heads": 2, "patch_size": [8, 8]}
RECIPE = replace(recipe_for("vit-micro", "digits"), learning_rate=1e-2)


@pytest.fixture(scope="module")
def images() -> Split:
    return load_data("digits", part="train").limit(120)


@pytest.fixture(scope="module")
def tested() -> Split:
    return load_data("digits", part="test").limit(60)


def tiny(**changes: object) -> Model:
    return untrained("vit-micro", classes=tuple("0123456789"), overrides={**SHAPE, **changes})


def run(model: Model, split: Split, *, recipe: Recipe = RECIPE, **more: object) -> dict[str, CheckRow]:
    result = check_training(model, split, recipe=recipe, **more)
    assert [row.name for row in result.checks] == list(NAMES)
    return {row.name: row for row in result.checks}


def failed(rows: dict[str, CheckRow]) -> list[str]:
    return [name for name, row in rows.items() if row.state == "fail"]


def test_a_healthy_model_passes_every_check(images, tested):
    rows = run(tiny(), images, test=tested)
    assert {row.state for row in rows.values()} == {"pass"}
    assert rows["initial loss"].value == pytest.approx(math.log(10), abs=0.1)
    assert rows["labels"].value == rows["gradients"].value == rows["frozen parameters"].value == 0


@pytest.mark.parametrize("preset", ["vit-micro", "vit-mini", "swin-micro", "resnet20"])
@pytest.mark.slow
def test_small_presets_pass(preset, images, tested):
    rows = run(untrained(preset, classes=images.classes), images, test=tested, recipe=recipe_for(preset, "digits"))
    assert not [row for row in rows.values() if row.state != "pass"]


# ---- broken models: what is done to a tiny one, the first check that fails, and what it names


def freeze(model: Model) -> None:
    model.module.blocks[0].mlp.fc1.requires_grad_(False)


def twice(model: Model) -> None:
    model.module.patch_embed.register_forward_pre_hook(lambda _, inputs: ((inputs[0] - 0.5) / 0.5,))


def keep_dropping(model: Model) -> None:
    model.module.blocks[1].mlp.register_forward_hook(lambda _, __, output: F.dropout(output, 0.5, training=True))


class AlwaysTraining(nn.Dropout):
    def train(self, mode: bool = True) -> "AlwaysTraining":
        return super().train(True)


def keep_training(model: Model) -> None:
    model.module.pos_drop = AlwaysTraining(0.5)


def detach_branch(model: Model) -> None:
    model.module.blocks[1].attn.register_forward_hook(lambda _, __, output: output.detach())


def cut_stream(model: Model) -> None:
    model.module.blocks[1].register_forward_pre_hook(lambda _, inputs: (inputs[0].detach(),))


def multiply_by_zero(model: Model) -> None:
    model.module.blocks[1].mlp.register_forward_hook(lambda _, __, output: output * 0)


def leave_unused(model: Model) -> None:
    model.module.spare = nn.Linear(3, 3)


def zero_head_and_features(model: Model) -> None:
    nn.init.zeros_(model.module.head.weight)
    nn.init.zeros_(model.module.norm.weight)


def enlarge_head(model: Model) -> None:
    with torch.no_grad():
        model.module.head.weight.mul_(300)


def divide_by_zero(model: Model) -> None:
    model.module.blocks[0].register_forward_hook(lambda _, __, output: output / 0)


@pytest.mark.parametrize(
    ("damage", "name", "says"),
    [
        (freeze, "frozen parameters", "frozen: blocks.0.mlp.fc1"),
        (twice, "normalisation", "multiplies by 2.00, and the module once more by 2.00"),
        (keep_dropping, "evaluation mode", "stays on in evaluation mode in blocks.1.mlp:"),
        (keep_training, "evaluation mode", "stays on in evaluation mode in pos_drop:"),
        (detach_branch, "gradients", "none for blocks.1.norm1, blocks.1.attn.qkv, blocks.1.attn.proj"),
        (cut_stream, "gradients", "look after blocks.0.mlp.fc2, before blocks.1.norm1 for .detach()"),
        (multiply_by_zero, "gradients", "always 0 for blocks.1.norm2, blocks.1.mlp.fc1, blocks.1.mlp.fc2"),
        (leave_unused, "gradients", "They take no part in the forward pass"),
        (zero_head_and_features, "activations", "The first is norm, which passes on nothing"),
        (enlarge_head, "initial loss", "confident and wrong: make the head's initial weights smaller"),
        (divide_by_zero, "activations", "look for a division by 0"),
    ],
)
def test_what_is_broken_is_named_first(damage: Callable[[Model], None], name: str, says: str, images: Split):
    model = tiny()
    damage(model)
    rows = run(model, images)
    assert failed(rows)[0] == name
    assert says in f"{rows[name].found} {rows[name].advice}"


@pytest.mark.parametrize("damage", [freeze, twice, keep_dropping, detach_branch, leave_unused, enlarge_head])
def test_and_nothing_else_is_blamed(damage: Callable[[Model], None], images: Split):
    model = tiny()
    damage(model)
    assert len(failed(run(model, images))) == 1


def test_a_head_that_starts_at_zero_is_healthy(images):
    model = tiny()
    nn.init.zeros_(model.module.head.weight)
    rows = run(model, images)
    assert failed(rows) == []
    assert rows["gradients"].state == "pass"  # those of the blocks come with the second step
    assert rows["initial loss"].found.endswith("as all logits are equal")
    assert rows["initial loss"].value == pytest.approx(math.log(10), abs=1e-6)
    assert rows["evaluation mode"].state == "inconclusive"  # equal logits could not differ


@pytest.mark.parametrize(
    ("rate", "word", "optimiser"),
    [
        (10.0, "high", "muon"),
        (1e-8, "low", "adamw"),
        pytest.param(10.0, "high", "adamw", marks=pytest.mark.slow),
        pytest.param(1e-8, "low", "muon", marks=pytest.mark.slow),
    ],
)
def test_a_wrong_learning_rate_is_the_only_fault_and_a_better_one_is_given(optimiser, rate, word, images):
    rows = run(tiny(), images, recipe=replace(RECIPE, optimiser=optimiser, learning_rate=rate))
    assert failed(rows) == ["learning rate"]
    assert rows["learning rate"].value == rate
    assert f"The rate is too {word}: try --learning-rate 0.01." in rows["learning rate"].advice
    assert rows["one batch"].state == "pass"  # at another rate


def test_a_low_rate_of_fine_tuning_at_which_the_loss_falls_is_no_fault(images):
    model = tiny(dim=32)
    nn.init.zeros_(model.module.head.weight)  # as a new head of a trained model
    rows = run(model, images, recipe=replace(RECIPE, optimiser="adamw", learning_rate=3e-4))
    assert failed(rows) == []
    assert (rows["one batch"].state, rows["learning rate"].state) == ("pass", "pass")
    assert rows["one batch"].found.endswith("at 0.01") or rows["one batch"].found.endswith("at 0.001")


@pytest.mark.slow
def test_where_no_rate_fits_the_rate_is_not_blamed(images):
    model = tiny()
    zero_head_and_features(model)
    rows = run(model, images)
    assert rows["one batch"].state == "fail"
    assert rows["learning rate"].state == "inconclusive"


# ---- broken data


@pytest.mark.parametrize(("shift", "count", "says"), [(3, 36, "outside: 10 to 12"), (-1, 12, "outside: -1")])
def test_labels_out_of_range(shift, count, says, images):
    assert images.labels is not None
    rows = run(tiny(), replace(images, labels=images.labels + shift))
    assert failed(rows)[0] == "labels"
    assert rows["labels"].value == count
    assert says in rows["labels"].found
    assert rows["one batch"].state == "pass"  # on the images whose labels are valid


def test_no_valid_label_leaves_the_rest_open(images):
    assert images.labels is not None
    rows = run(tiny(), replace(images, labels=images.labels + 100))
    assert rows["labels"].value == len(images)
    assert {rows[name].state for name in ("initial loss", "gradients", "one batch", "learning rate")} == {
        "inconclusive"
    }
    assert rows["evaluation mode"].state == "pass"


def pictures(*values: float, labels: list[int], classes: int = 2) -> Split:
    """Images 8 x 8 of noise; where a value is given, of one colour."""
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (len(labels), 3, 8, 8), generator=generator, dtype=torch.uint8)
    for index, value in enumerate(values):
        pixels[index] = int(value)
    return Split("made", "train", InMemory(pixels), (8, 8), tuple("abcdefghij"[:classes]), torch.tensor(labels))


def small() -> Model:
    return untrained("vit-micro", classes=("a", "b"), image_size=(8, 8), overrides=SHAPE)


def test_balance_constant_and_copied_images():
    rows = run(small(), pictures(labels=[0] * 60 + [1] * 4))
    assert (rows["class balance"].state, rows["class balance"].value) == ("warn", 15.0)
    assert failed(rows) == []
    rows = run(small(), pictures(labels=[0] * 4 + [1] * 4))
    assert rows["class balance"].state == "inconclusive"
    rows = run(small(), pictures(labels=[0] * 20))
    assert failed(rows) == ["class balance"]
    assert rows["class balance"].found == "no images of 1 of 2 classes (b)"
    assert rows["one batch"].state == rows["learning rate"].state == "inconclusive"
    rows = run(small(), pictures(7, 9, labels=[0, 1] * 10))
    assert (rows["constant images"].state, rows["constant images"].value) == ("warn", 0.1)
    rows = run(small(), pictures(*range(20), labels=[0, 1] * 10))
    assert rows["constant images"].state == "fail"
    rows = run(small(), pictures(5, 5, labels=[0, 1] * 10))
    assert rows["duplicate images"].state == "fail"
    assert "One image with two labels" in rows["duplicate images"].advice
    rows = run(small(), pictures(5, 5, labels=[0, 0] + [1] * 10))
    assert (rows["duplicate images"].state, rows["duplicate images"].value) == ("warn", pytest.approx(1 / 12))


def test_training_images_in_the_test_part_are_found():
    train = pictures(labels=[0, 1] * 20)
    rows = run(small(), train, test=replace(train.pick(torch.arange(3)), part="test"))
    assert rows["duplicate images"].state == "fail"
    assert "3 among 3 images of the test" in rows["duplicate images"].found


class Floats:
    """Pixels as they are given, in any range."""

    def __init__(self, pixels: torch.Tensor) -> None:
        self.pixels = pixels

    def __len__(self) -> int:
        return len(self.pixels)

    def read(self, indices: torch.Tensor) -> torch.Tensor:
        return self.pixels[indices]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda pixels: (pixels - 0.5) / 0.5, "normalised already, and the model normalises them again"),
        (lambda pixels: pixels * 255, "Divide the pixels by 255"),
        (lambda pixels: pixels / 255, "divided by 255 twice"),
    ],
)
def test_pixels_out_of_range(change, says, images):
    floats = images.source.read(torch.arange(len(images))).float() / 255
    rows = run(tiny(), replace(images, source=Floats(change(floats))))
    assert failed(rows)[0] == "pixel range"
    assert says in rows["pixel range"].advice


# ---- what enters, what stays


def test_a_module_that_normalises_alone_is_healthy(images):
    module = tiny().module
    module.patch_embed.register_forward_pre_hook(lambda _, inputs: ((inputs[0] - 0.5) / 0.5,))
    model = vitlens.wrap(module, image_size=(32, 32), mean=(0.0,) * 3, std=(1.0,) * 3, classes=images.classes)
    rows = run(model.requires_grad_(True), images)
    assert rows["normalisation"].state == "pass"
    first = images.source.read(torch.arange(16)).float() / 255
    assert rows["normalisation"].value == pytest.approx((2 * first).std((0, 2, 3)).max().item(), abs=0.1)


def test_statistics_in_255ths_are_found(images):
    model = tiny()
    model = vitlens.wrap(
        model.module, image_size=(32, 32), mean=(123.7, 116.3, 103.5), std=(58.4, 57.1, 57.4), classes=images.classes
    )
    rows = run(model.requires_grad_(True), images)
    assert rows["normalisation"].state == "fail"
    assert "0.485, not 123.7" in rows["normalisation"].advice


def test_batch_statistics_in_evaluation_mode_are_found(images):
    model = untrained("resnet20", classes=images.classes)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.track_running_stats, module.running_mean, module.running_var = False, None, None
    rows = run(model, images, recipe=recipe_for("resnet20", "digits"))
    assert rows["evaluation mode"].state == "fail"
    assert "depend on the other images" in rows["evaluation mode"].advice


def test_a_part_that_is_frozen_on_purpose_is_no_fault(images):
    model = vitlens.load("vit-digits")
    rows = run(model, images, train_last=1, fresh=False, recipe=replace(RECIPE, optimiser="adamw"))
    assert rows["frozen parameters"].state == "pass"
    assert rows["gradients"].state == "pass"
    assert failed(rows) == []
    assert rows["initial loss"].state == "inconclusive"  # it knows the digits
    assert not any(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("mode", [True, False])
def test_nothing_is_left_behind(mode, images):
    model = tiny(dropout=0.2).train(mode)
    model.module.head.weight.grad = torch.ones_like(model.module.head.weight)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.random.get_rng_state()
    run(model, images)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(part.training is mode for part in model.modules())
    assert model.module.head.weight.grad.eq(1).all()
    assert all(each.grad is None for name, each in model.module.named_parameters() if name != "head.weight")
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())
    assert torch.equal(torch.random.get_rng_state(), state)


def test_the_same_seed_finds_the_same(images):
    results: list[TrainingCheck] = [check_training(tiny(), images, recipe=RECIPE, seed=3) for _ in range(2)]
    assert results[0] == results[1]


def test_norms_by_layer_are_those_of_the_layers(images):
    model = tiny(dropout=0.0, drop_path=0.0)
    result = check_training(model, images, recipe=RECIPE)
    rows = {row.name: row for row in result.layers}
    assert {row.name for row in result.layers if row.order is None} == {"cls_token", "pos_embed"}
    assert rows["head"].weight == pytest.approx(
        math.hypot(model.module.head.weight.norm().item(), model.module.head.bias.norm().item()), rel=1e-6
    )
    assert rows["blocks.0.norm1"].activation == pytest.approx(1.0, abs=1e-3)  # a norm with weights 1 and biases 0
    assert sum(row.parameters for row in result.layers) == model.parameter_count()
    assert [row.name for row in result.layers][:3] == ["patch_embed.proj", "blocks.0.norm1", "blocks.0.attn.qkv"]


def test_images_without_labels_are_refused(images):
    with pytest.raises(DataError, match="expected labelled train images in digits, found images without labels"):
        check_training(tiny(), replace(images, labels=None), recipe=RECIPE)
