"""The losses and the parts of objectives without labels, by plain loops and formulas."""

import math

import numpy as np
import pytest
import torch

from tests.kit.objectives import built, clip, dino, headless, mae, pretraining, scenes
from vitlens.processes import Processes

ALONE = Processes(0, 1, torch.device("cpu"))
KEYS = torch.arange(6)


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def images(count: int = 6) -> torch.Tensor:
    return next(scenes("train").batches(count)).images


def softmax(row: np.ndarray) -> np.ndarray:
    raised = [math.exp(value - max(row)) for value in row]
    return np.array(raised) / sum(raised)


def test_the_teacher_says_the_same_in_every_pass_and_the_student_does_not():
    """In training, with stochastic depth and dropout."""
    model = headless(drop_path=0.5, dropout=0.5)
    objective = built("dino", model).train()
    crops, *_ = objective.inputs(images(), KEYS, seed=0, epoch=0)
    first = objective(crops)
    second = objective(crops)
    assert torch.equal(first.teacher, second.teacher)
    assert not torch.equal(first.student, second.student)
    with torch.no_grad():
        assert torch.equal(objective.eval()(crops).teacher, first.teacher)


def test_the_loss_of_masked_patches_is_that_of_plain_loops():
    predicted = drawn(3, 5, 4)
    target = drawn(3, 5, 4, seed=1)
    masked = torch.tensor([[1, 1, 0, 0, 1], [0, 1, 1, 1, 0], [1, 0, 0, 1, 1]]).bool()
    for image, loss in enumerate(mae.masked_error(predicted, target, masked).tolist()):
        errors = []
        for patch in range(5):
            if masked[image, patch]:
                difference = predicted[image, patch] - target[image, patch]
                errors.append(sum(value.item() ** 2 for value in difference) / 4)
        assert loss == pytest.approx(sum(errors) / len(errors), rel=1e-9)


def test_a_normalised_patch_is_itself_minus_its_mean_over_its_deviation():
    patches = drawn(2, 3, 48)
    for patch, normal in zip(
        patches.flatten(0, 1).numpy(), mae.normalised(patches).flatten(0, 1).numpy()
    ):
        assert normal == pytest.approx(
            (patch - patch.mean()) / math.sqrt(patch.var(ddof=1) + 0.1**2), rel=1e-9
        )


def test_patches_are_the_squares_of_the_image_and_back():
    model = headless()
    pixels = images()
    cut = mae.patchified(pixels, model.layout)
    # row 1, column 1 of 4 x 4
    assert torch.equal(cut[1, 5], pixels[1, :, 8:16, 8:16].permute(1, 2, 0).flatten())
    assert torch.equal(mae.unpatchified(cut, model.layout), pixels)


@pytest.mark.parametrize(("ratio", "masked"), [(0.75, 12), (0.5, 8), (0.9, 14)])
def test_exactly_so_many_patches_are_masked_and_others_in_each_image_and_epoch(ratio, masked):
    objective = built("mae", mask_ratio=ratio).eval()
    one = objective(*objective.inputs(images(), KEYS, seed=0, epoch=0)).masked
    other = objective(*objective.inputs(images(), KEYS, seed=0, epoch=1)).masked
    assert (one.sum(1) == masked).all()
    assert len({tuple(row.tolist()) for row in one}) == len(one)
    assert (one != other).any(1).all()
    alone = objective(*objective.inputs(images()[3:4], KEYS[3:4], seed=0, epoch=0)).masked
    assert torch.equal(alone[0], one[3])  # whatever else is in the batch


def test_the_decoder_sees_no_masked_pixel():
    objective = built("mae", normalise=False).eval()
    pixels = images()
    _, order = objective.inputs(pixels, KEYS, seed=0, epoch=0)
    before = objective(pixels, order)
    cut = mae.patchified(pixels, objective.model.layout)
    changed = torch.where(before.masked[:, :, None], 1 - cut, cut)
    after = objective(mae.unpatchified(changed, objective.model.layout), order)
    assert torch.equal(after.predicted, before.predicted)
    assert not torch.allclose(after.target, before.target)
    seen = objective(mae.unpatchified(1 - cut, objective.model.layout), order)
    assert not torch.allclose(seen.predicted, before.predicted)


def test_the_pictures_keep_what_is_seen_and_show_grey_for_what_is_not():
    objective = built("mae").eval()
    pixels = images()
    _, order = objective.inputs(pixels, KEYS, seed=0, epoch=0)
    visible, filled = objective.pictures(pixels, order)
    masked = objective(pixels, order).masked
    for picture in (visible, filled):
        cut = mae.patchified(picture, objective.model.layout)
        assert torch.allclose(
            cut[~masked], mae.patchified(pixels, objective.model.layout)[~masked], atol=1e-6
        )
    assert torch.allclose(
        mae.patchified(visible, objective.model.layout)[masked], torch.tensor(0.5), atol=1e-6
    )


def test_the_loss_of_student_and_teacher_is_that_of_plain_loops():
    student = drawn(4, 3, 5)
    teacher = drawn(2, 3, 5, seed=1).softmax(-1)
    losses = dino.agreement(student, teacher, temperature=0.1)
    for image in range(3):
        terms = []
        for target in range(2):
            for crop in range(4):
                if crop != target:
                    said = softmax(student[crop, image].numpy() / 0.1)
                    terms.append(
                        -sum(
                            teacher[target, image, at].item() * math.log(said[at])
                            for at in range(5)
                        )
                    )
        assert losses[image].item() == pytest.approx(sum(terms) / len(terms), rel=1e-6)


def test_the_teacher_is_centred_and_sharpened():
    objective = built("dino")
    said = drawn(2, 3, 12).float()
    objective.centre.copy_(drawn(12, seed=3))
    expected = ((said - objective.centre) / 0.04).softmax(-1)
    assert torch.allclose(objective.probabilities(said), expected)
    assert torch.allclose(
        built("dino", centring=False).probabilities(said), (said / 0.04).softmax(-1)
    )


def test_teacher_and_centre_are_moving_averages():
    """The momentum rises from the setting to 1 as a cosine; the centre keeps nine tenths."""
    objective = built("dino", momentum=0.9).train()
    with torch.no_grad():
        for value in objective.student.parameters():
            value.add_(torch.randn_like(value))
    student = dict(objective.student.named_parameters())
    before = {n: v.clone() for n, v in objective.teacher.named_parameters()}
    objective.centre.copy_(torch.arange(12.0))
    outputs = objective(*objective.inputs(images(), KEYS, seed=0, epoch=0))
    objective.losses(outputs)
    objective.updated(0.5, ALONE)
    for name, value in objective.teacher.named_parameters():
        assert torch.allclose(value, 0.95 * before[name] + 0.05 * student[name], atol=1e-6)
        assert not value.requires_grad
    said = outputs.teacher.flatten(0, 1).mean(0)
    assert torch.allclose(objective.centre, 0.9 * torch.arange(12.0) + 0.1 * said, atol=1e-5)
    assert not objective.output_sum.any()


def test_crops_have_their_sizes_and_depend_on_the_image_alone():
    objective = built("dino", local_crops=3)
    pixels = images()
    crops, local = objective.inputs(pixels, KEYS, seed=0, epoch=0)
    assert (crops.shape, local.shape) == ((2, 6, 3, 32, 32), (3, 6, 3, 16, 16))
    assert 0 <= crops.min() <= crops.max() <= 1
    alone = objective.inputs(pixels[2:3], KEYS[2:3], seed=0, epoch=0)
    assert torch.allclose(alone[1][:, 0], local[:, 2], atol=1e-6)
    assert not torch.allclose(objective.inputs(pixels, KEYS, seed=0, epoch=1)[0], crops)
    assert not torch.allclose(crops[0], crops[1])


def test_a_crop_of_the_whole_image_without_jitter_is_the_image():
    draws = torch.tensor([[0.5] * 8 + [0.0, 0.5]]).expand(6, -1)
    crop = dino.cropped(images(), draws, size=(32, 32), area=(1.0, 1.0), jitter=0.0, turn=90.0)
    assert torch.allclose(crop, images(), atol=1e-5)


@pytest.mark.parametrize(
    ("said", "entropy", "information"),
    [
        (torch.full((4, 8), 1 / 8), math.log(8), 0.0),  # all outputs equally, of every image
        (torch.eye(8)[[3, 3, 3, 3]], 0.0, 0.0),  # one output, of every image
        (torch.eye(8)[[0, 1, 2, 3]], 0.0, math.log(4)),
    ],
)
def test_what_a_teacher_says_of_all_images_alike_holds_no_information(said, entropy, information):
    objective = built("dino", outputs=8, centring=False)
    logits = 0.03 * said.clamp(min=1e-30).log()
    (measures,) = [objective.measures([dino.CropLogits(logits[None], logits[None])])]
    assert measures["teacher_entropy"] == pytest.approx(entropy, abs=1e-5)
    assert measures["teacher_information"] == pytest.approx(information, abs=1e-5)


def test_info_nce_is_that_of_plain_loops_and_symmetric():
    one = torch.nn.functional.normalize(drawn(5, 7, seed=0), dim=-1)
    other = torch.nn.functional.normalize(drawn(5, 7, seed=1), dim=-1)
    losses = clip.info_nce(one, other, 12.5)
    for pair in range(5):
        by_image = [12.5 * sum((one[pair] * other[text]).tolist()) for text in range(5)]
        by_text = [12.5 * sum((one[image] * other[pair]).tolist()) for image in range(5)]
        expected = (
            -(
                math.log(softmax(np.array(by_image))[pair])
                + math.log(softmax(np.array(by_text))[pair])
            )
            / 2
        )
        assert losses[pair].item() == pytest.approx(expected, rel=1e-6)
    assert torch.allclose(clip.info_nce(other, one, 12.5), losses)


def test_the_zero_shot_classifier_predicts_what_the_cosines_do():
    objective = built("clip", train=scenes("train")).eval()
    with torch.no_grad():
        for value in objective.parameters():
            value.add_(0.1 * torch.randn(value.shape, generator=torch.Generator().manual_seed(1)))
    model = objective.exported()
    pixels = images()
    assert model.classes == scenes("train").classes
    texts = clip.embedded(objective.text, model.classes, clip.PROMPTS).mean(0)
    cosines = torch.nn.functional.cosine_similarity(
        objective.model(pixels)[:, None], texts[None], dim=-1
    )
    logits = model(pixels)
    assert torch.equal(logits.argmax(1), cosines.argmax(1))
    ratio = logits / cosines
    # one factor an image, near the learned one
    assert torch.allclose(ratio, ratio.mean(1, keepdim=True), rtol=1e-3)
    assert ratio.mean().item() == pytest.approx(objective.logit_scale.exp().item(), rel=0.1)


def test_effective_rank_and_spread_of_planted_features():
    basis = torch.eye(8)[:4]
    assert pretraining.effective_rank(torch.cat((basis, -basis)).repeat(3, 1)) == pytest.approx(4)
    assert pretraining.effective_rank(torch.ones(6, 8)) == 1
    line = torch.linspace(-1, 1, 9)[:, None] * torch.ones(1, 8)
    assert pretraining.effective_rank(line) == pytest.approx(1, abs=1e-6)
    assert pretraining.spread(torch.ones(6, 8)) == pytest.approx(0, abs=1e-9)
    assert pretraining.spread(torch.cat((torch.eye(8), -torch.eye(8)))) == pytest.approx(1)
