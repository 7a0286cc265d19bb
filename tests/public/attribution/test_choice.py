"""vitlens.choose_method: planted methods win, noise is not confirmed; the arithmetic."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

import vitlens
from tests.kit.planted_colours import CLASSES, COUNT, SIDE, Hues, flat_images, near
from tests.kit.planted_methods import planted_methods
from tests.kit.select import values_of
from tests.kit.tiny import model_of, ours
from vitlens import Model, Split
from vitlens.attribution.registry import ATTRIBUTIONS
from vitlens.errors import InputError, UnsupportedError

FAITHFULNESS = "insertion_minus_deletion"
LOCALISATION = "localisation"
SCORE = "score"
BASELINES = ("random", "centre")
NAMES = ("occlusion", "saliency", "input-x-gradient")  # of which the functions are planted
Maps = Callable[[Model, Tensor, Tensor], Tensor]


class Blind(Hues):
    """Sees a colour only where it fills the left of the image, as it does in no mosaic."""

    def forward(self, images: Tensor) -> Tensor:
        return 40 * self.nearness(images[..., :16] / 2 + 0.5).amin((2, 3))


@pytest.fixture(scope="module")
def hues() -> Model:
    return model_of(Hues(), alias="hues", size=(SIDE, SIDE), classes=tuple("abcdefghijkl"))


@pytest.fixture(scope="module")
def flat() -> Split:
    """Draw images of one colour each on the left two thirds, with noise on the right."""
    return flat_images()


def with_masks(split: Split, which: object = slice(None), **more: object) -> Split:
    """Give these images a mask, the colour, and the others none."""
    masks = torch.zeros(COUNT, SIDE, SIDE, dtype=torch.bool)
    masks[which, :, :16] = True
    return replace(split, masks=masks, **more)


def dull(seed: int) -> Maps:
    def maps(_model: Model, images: Tensor, _targets: Tensor) -> Tensor:
        return torch.rand(len(images), 6, 6, generator=torch.Generator().manual_seed(seed))

    return maps


def chosen(model: Model, split: Split, *functions: Maps, seed: int = 0):
    """Choose between functions, under the NAMES."""
    planted = dict(zip(NAMES, functions))
    with planted_methods(planted):
        return vitlens.choose_method(model, split, methods=list(planted), seed=seed)


def test_the_planted_method_wins_on_mosaics_and_is_confirmed_and_scores_follow_from_the_checks(
    hues, flat
):
    """A score: the mean over checks of the mean value by the methods' standard deviation on the
    selection half.
    """
    choice = chosen(hues, flat, dull(3), near, dull(4))
    assert choice.checks == (FAITHFULNESS, LOCALISATION)
    assert (choice.method, choice.certainty, choice.confirmation) == ("saliency", 1.0, "confirmed")
    assert choice.scores[0].report[LOCALISATION].value > 0.9
    for base in BASELINES:
        assert choice.margin(base).low > 0
    assert choice.scores[0].report[LOCALISATION].n <= len(choice.report)
    assert sorted([*choice.selection, *choice.report]) == list(range(COUNT))
    scales = {}
    for check in choice.checks:
        scales[check] = np.std([row.selection[check].value for row in choice.scores])
    for score in choice.scores:
        for half in (score.selection, score.report):
            expected = np.mean([half[check].value / scales[check] for check in choice.checks])
            assert half[SCORE].value == pytest.approx(expected, rel=1e-6)
            assert half[SCORE].low <= half[SCORE].value <= half[SCORE].high
    order = [row.selection[SCORE].value for row in choice.scores if not row.baseline]
    assert order == sorted(order, reverse=True)
    assert [row.method for row in choice.scores if row.baseline] == list(BASELINES)
    assert (choice.scores[0].method, choice.scores[1].method) == (choice.method, choice.runner_up)
    best_report = choice.scores[0].report
    reports = {row.method: row.report for row in choice.scores}
    for margin in choice.margins:
        expected = best_report[margin.check].value - reports[margin.against][margin.check].value
        assert margin.difference.value == pytest.approx(expected, abs=1e-6)
        assert margin.difference.n == best_report[margin.check].n
    assert set(values_of(choice.margins, "against")) == {choice.runner_up, *BASELINES}
    assert values_of(choice.scores, "wins") == [1.0, 0.0, 0.0, None, None]


def test_mosaics_judge_nothing_where_the_model_does_not_name_their_classes(hues, flat):
    model = model_of(Blind(), alias="blind", size=(SIDE, SIDE), classes=hues.classes)
    choice = chosen(model, flat, dull(3), dull(4))
    assert choice.checks == (FAITHFULNESS,)
    assert "blind names" in choice.left_out[LOCALISATION]


def test_masks_are_used_where_they_are_known_and_images_without_one_count_in_the_other_check(
    hues, flat
):
    left = (torch.arange(SIDE) < 16).float().expand(1, SIDE, SIDE)
    with_mask = range(4, COUNT)
    inside = chosen(
        hues,
        with_masks(flat, with_mask),
        dull(3),
        lambda _model, images, _: left.expand(len(images), -1, -1),
    )
    assert (inside.method, inside.localised, inside.certainty) == ("saliency", "objects", 1.0)
    best = inside.scores[0]
    assert best.report[LOCALISATION].value == 1.0
    for half, indices in ((best.selection, inside.selection), (best.report, inside.report)):
        assert (half[FAITHFULNESS].n, half[LOCALISATION].n) == (
            len(indices),
            len({*with_mask} & {*indices}),
        )
    assert (
        LOCALISATION in chosen(hues, with_masks(flat, slice(31, None)), dull(3), dull(4)).left_out
    )


def test_too_few_images_leave_the_default_method(hues, flat):
    choice = vitlens.choose_method(
        hues, flat.pick(torch.arange(19)), methods=["saliency", "gradcam"]
    )
    assert choice.method == "gradcam"  # preferred to saliency
    assert (choice.certainty, choice.confirmation, choice.scores, choice.selection) == (
        None,
        None,
        (),
        (),
    )
    assert "at least 20 images" in choice.reason
    grouped = replace(flat, groups=torch.arange(COUNT) // 4)
    assert (
        "groups" in vitlens.choose_method(hues, grouped, methods=["saliency", "occlusion"]).reason
    )


def test_halves_keep_groups_together_and_follow_the_seed(hues, flat):
    grouped = replace(flat, groups=torch.arange(COUNT) // 2)
    one = chosen(hues, grouped, dull(3), dull(4), seed=0)
    again = chosen(hues, grouped, dull(3), dull(4), seed=0)
    other = chosen(hues, grouped, dull(3), dull(4), seed=1)
    assert not {place // 2 for place in one.selection} & {place // 2 for place in one.report}
    assert len(one.selection) == len(one.report) == COUNT // 2
    assert one.scores == again.scores
    assert one.selection != other.selection


def test_candidates_explain_a_class_are_not_slow_and_come_by_rank():
    ranked = {
        entry.candidate: entry for entry in ATTRIBUTIONS.values() if entry.candidate is not None
    }
    for entry in ranked.values():
        assert entry.needs_class
        assert not entry.slow
    assert sorted(ranked) == list(range(1, len(ranked) + 1))
    for model in (ours(), vitlens.load("cnn-digits")):
        names = vitlens.choose_method(model, torch.rand(2, 3, *model.input_size)).candidates
        ranks = [ATTRIBUTIONS[name].candidate for name in names]
        assert ranks == sorted(ranks)
        assert len(names) == 6


@pytest.mark.parametrize(
    ("methods", "targets", "error"),
    [
        (["saliency", "saliency"], "predicted", InputError),
        (["saliency", "rollout"], "predicted", UnsupportedError),
        (["saliency", "occlusion"], 99, InputError),
        (["saliency", "occlusion"], [0, 1], InputError),
    ],
)
def test_refusals(hues, flat, methods, targets, error):
    with pytest.raises(error):
        vitlens.choose_method(hues, flat, targets=targets, methods=methods)


def test_a_layer_that_the_model_lacks_is_no_lack_of_candidates():
    model = ours()
    batch = torch.rand(2, 3, *model.input_size)
    refinement = vitlens.Refinement(refine="affinity", layers=(99,))
    with pytest.raises(InputError) as refused:
        vitlens.explain(model, batch, method="gradcam", refinement=refinement)
    with pytest.raises(InputError) as caught:
        vitlens.choose_method(model, batch, refinement=refinement)
    assert str(caught.value) == str(refused.value)


def test_images_and_targets_are_taken_in_every_form(hues, flat, tmp_path):
    def of(images: object, targets: object) -> object:
        return vitlens.choose_method(
            hues, images, targets=targets, methods=["saliency", "input-x-gradient"]
        ).scores

    (batch,) = flat.batches(COUNT)
    for index, pixels in enumerate(flat.source.read(torch.arange(COUNT))):
        Image.fromarray(pixels.permute(1, 2, 0).numpy()).save(tmp_path / f"{index:02}.png")
    labels = torch.arange(COUNT) % CLASSES
    expected = of(batch.images, labels)
    assert of(tmp_path, labels.tolist()) == of(replace(flat, labels=labels), "label") == expected
    assert of(flat, "predicted") == expected  # it predicts every image's own colour
    assert of(flat, 2) == of(flat, "c") != expected


@pytest.mark.parametrize("times", [4, pytest.param(40, marks=pytest.mark.slow)])
def test_noise_is_chosen_with_little_certainty_and_hardly_ever_confirmed(hues, flat, times):
    choices = []
    for seed in range(times):
        noise = map(dull, range(3 * seed, 3 * seed + 3))
        choices.append(chosen(hues, flat, *noise, seed=seed))
    # 2.5 %, narrow ones
    assert values_of(choices, "confirmation").count("confirmed") <= max(1, times // 10)
    assert sum(choice.certainty for choice in choices) / times < (0.9 if times < 40 else 0.85)
    assert len(set(values_of(choices, "method"))) > (1 if times < 40 else 2)
    for choice in choices:
        assert sum(row.wins or 0.0 for row in choice.scores) == pytest.approx(1.0)


def test_a_method_that_is_good_on_the_selection_half_alone_is_contradicted(hues, flat):
    selection = set(chosen(hues, flat, dull(3), dull(4)).selection)
    (batch,) = flat.batches(COUNT)

    def good_on(half: set[int]) -> Maps:
        keys = {tuple(batch.images[index, :, 0, -1].tolist()) for index in half}

        def maps(model: Model, images: Tensor, targets: Tensor) -> Tensor:
            signs = [1.0 if tuple(image[:, 0, -1].tolist()) in keys else -1.0 for image in images]
            return torch.tensor(signs)[:, None, None] * near(model, images, targets)

        return maps

    choice = chosen(
        hues, with_masks(flat), good_on(set(range(COUNT)) - selection), good_on(selection)
    )
    assert (choice.method, choice.runner_up, choice.confirmation) == (
        "saliency",
        "occlusion",
        "contradicted",
    )
    assert choice.margin("occlusion").high < 0


def test_methods_with_the_same_maps_share_their_wins_and_are_no_runner_up(hues, flat):
    """The same but for a scale, which does not count."""
    choice = chosen(hues, flat, near, lambda *args: 1024 * near(*args), dull(3))
    assert (choice.method, choice.alike, choice.runner_up, choice.certainty) == (
        "occlusion",
        ("saliency",),
        "input-x-gradient",
        1.0,
    )
    alone = chosen(hues, flat, near, near, near)
    assert (alone.runner_up, alone.confirmation, alone.certainty) == (None, None, 1.0)


def test_intervals_are_over_groups(hues, flat):
    """Of images that are there twice, the groups' interval is wider by about the square root of
    two.
    """

    def alternating(model: Model, images: Tensor, targets: Tensor) -> Tensor:
        """Return the planted map for every other class and its opposite for the others."""
        return (1 - 2 * (targets % 2))[:, None, None] * near(model, images, targets)

    twice = torch.arange(COUNT) // 2
    widths = []
    for groups in (twice, None):
        choice = chosen(hues, with_masks(flat.pick(twice), groups=groups), dull(3), alternating)
        (estimate,) = (
            row.report[LOCALISATION] for row in choice.scores if row.method == "saliency"
        )
        widths.append(estimate.high - estimate.low)
    assert widths[0] > 1.15 * widths[1] > 0.1
