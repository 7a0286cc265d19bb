"""vitlens.choose_method: planted methods win on images, masks and mosaics, noise is not confirmed; the arithmetic."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import vitlens
from tests.kit.tiny import model_of, ours
from vitlens.attribution.choice import (
    FAITHFULNESS,
    LOCALISATION,
    MOST,
    SCORE,
    MethodChoice,
    candidates_for,
    choose,
    chosen_by_evidence,
    halves,
)
from vitlens.attribution.registry import ATTRIBUTIONS
from vitlens.data.split import InMemory, Split
from vitlens.errors import InputError, UnsupportedError
from vitlens.models.model import Model

SIDE, CLASSES, COUNT = 24, 12, 40
CANDIDATES, BASELINES = ("one", "relevance", "three"), ("random", "centre")
ALONE = torch.arange(COUNT)  # groups of one image


class Hues(nn.Module):
    """Logits are the amounts of each class's colour, wherever it is (pixels are normalised to [-1, 1] before)."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("colours", torch.tensor(list(product((0.0, 0.5, 1.0), (0.0, 1.0), (0.0, 1.0)))))

    def nearness(self, images: Tensor) -> Tensor:
        """How near each pixel is to each class's colour (batch, classes, height, width)."""
        return (-60 * (images[:, None] - self.colours[:, :, None, None]).square().sum(2)).exp()

    def forward(self, images: Tensor) -> Tensor:
        return 40 * self.nearness(images / 2 + 0.5).mean((2, 3))


class Blind(Hues):
    """Sees a colour only where it fills the left of the image, as it does in no mosaic."""

    def forward(self, images: Tensor) -> Tensor:
        return 40 * self.nearness(images[..., :16] / 2 + 0.5).amin((2, 3))


@pytest.fixture(scope="module")
def hues() -> Model:
    return model_of(Hues(), alias="hues", size=(SIDE, SIDE), classes=tuple("abcdefghijkl"))


@pytest.fixture(scope="module")
def flat(hues: Model) -> Split:
    """Images of one colour each on the left two thirds, with noise on the right."""
    colours = hues.module.colours[torch.arange(COUNT) % CLASSES]
    images = colours[:, :, None, None].expand(-1, -1, SIDE, SIDE).clone()
    images[..., 16:] = torch.rand(COUNT, 3, SIDE, 8, generator=torch.Generator().manual_seed(2))
    return Split("hues", "test", InMemory((images * 255).round().to(torch.uint8)), (SIDE, SIDE), hues.classes)


def near(model: Model, images: Tensor, targets: Tensor) -> Tensor:
    """The model's own evidence: the planted method."""
    return model.module.nearness(images)[torch.arange(len(images)), targets]


def dull(seed: int):
    def maps(_model: Model, images: Tensor, _targets: Tensor) -> Tensor:
        return torch.rand(len(images), 6, 6, generator=torch.Generator().manual_seed(seed))

    return maps


def test_the_planted_method_wins_on_mosaics_with_certainty_and_is_confirmed(hues, flat):
    choice = chosen_by_evidence(hues, flat, None, {"noise": dull(3), "planted": near, "more noise": dull(4)})
    assert choice.checks == (FAITHFULNESS, LOCALISATION)
    assert (choice.method, choice.certainty, choice.confirmation) == ("planted", 1.0, "confirmed")
    assert choice.scores[0].report[LOCALISATION].value > 0.9
    assert choice.scores[0].wins == 1.0
    assert all(choice.margin(base).low > 0 for base in BASELINES)
    assert choice.scores[0].report[LOCALISATION].n <= len(choice.report)
    assert sorted([*choice.selection, *choice.report]) == list(range(COUNT))


def test_mosaics_judge_nothing_where_the_model_does_not_name_their_classes(hues, flat):
    model = model_of(Blind(), alias="blind", size=(SIDE, SIDE), classes=hues.classes)
    choice = chosen_by_evidence(model, flat, None, {"a": dull(3), "b": dull(4)})
    assert choice.checks == (FAITHFULNESS,)
    assert "blind names" in choice.left_out[LOCALISATION]


def test_masks_are_used_where_they_are_known(hues, flat):
    masks = torch.zeros(COUNT, SIDE, SIDE, dtype=torch.bool)
    masks[4:, :, :16] = True  # the first images are without an object, and have no value
    known = replace(flat, masks=masks)
    inside = chosen_by_evidence(hues, known, None, {"noise": dull(3), "mask": lambda *_given: masks.float()})
    assert (inside.method, inside.localised, inside.certainty) == ("mask", "objects", 1.0)
    assert inside.scores[0].report[LOCALISATION].value == 1.0
    counts = [inside.scores[0].selection[LOCALISATION].n, inside.scores[0].report[LOCALISATION].n]
    assert sum(counts) == COUNT - 4
    few = replace(flat, masks=masks & (torch.arange(COUNT) > 30)[:, None, None])
    assert "with a mask" in chosen_by_evidence(hues, few, None, {"a": dull(3), "b": dull(4)}).left_out[LOCALISATION]


def test_too_few_images_leave_the_default_method(hues, flat):
    choice = vitlens.choose_method(hues, flat.pick(torch.arange(19)), methods=["saliency", "occlusion"])
    assert choice.method == "occlusion"  # preferred to saliency
    assert (choice.certainty, choice.confirmation, choice.scores, choice.selection) == (None, None, (), ())
    assert "at least 20 images" in choice.reason
    grouped = replace(flat, groups=torch.arange(COUNT) // 4)
    assert "groups" in vitlens.choose_method(hues, grouped, methods=["saliency", "occlusion"]).reason


def test_halves_keep_groups_together_and_follow_the_seed(hues, flat):
    grouped = replace(flat, groups=torch.arange(COUNT) // 2)
    one, again, other = (
        vitlens.choose_method(hues, grouped, methods=["saliency", "input-x-gradient"], seed=seed) for seed in (0, 0, 1)
    )
    assert not {place // 2 for place in one.selection} & {place // 2 for place in one.report}
    assert len(one.selection) == len(one.report) == COUNT // 2
    assert one.scores == again.scores
    assert one.selection != other.selection
    assert "saliency" in repr(one)


def test_candidates_explain_a_class_are_not_slow_and_come_by_rank():
    ranked = {entry.candidate: entry for entry in ATTRIBUTIONS.values() if entry.candidate is not None}
    assert all(entry.needs_class and not entry.slow for entry in ranked.values())
    assert sorted(ranked) == list(range(1, len(ranked) + 1))
    for model in (ours(), vitlens.load("cnn-digits")):
        names = candidates_for(model)
        ranks = [ATTRIBUTIONS[name].candidate for name in names]
        assert (len(names), ranks) == (MOST, sorted(ranks))
        assert all(ATTRIBUTIONS[name].package for name in candidates_for(model, engine="grad-cam"))


@pytest.mark.parametrize(
    ("methods", "targets", "error", "message"),
    [
        (["saliency"], "predicted", InputError, "at least 2 candidates"),
        (["saliency", "saliency"], "predicted", InputError, "at least 2 candidates"),
        (["saliency", "rollout"], "predicted", UnsupportedError, "rollout"),
        (["saliency", "occlusion"], 99, InputError, "found 99"),
        (["saliency", "occlusion"], [0, 1], InputError, "one target per image"),
    ],
)
def test_refusals(hues, flat, methods, targets, error, message):
    with pytest.raises(error, match=message):
        vitlens.choose_method(hues, flat, targets=targets, methods=methods)


def test_images_and_targets_are_taken_in_every_form(hues, flat, tmp_path):
    def of(images: object, targets: object) -> object:
        return vitlens.choose_method(hues, images, targets=targets, methods=["saliency", "input-x-gradient"]).scores

    (batch,) = flat.batches(COUNT)
    for index, pixels in enumerate(flat.source.read(torch.arange(COUNT))):
        Image.fromarray(pixels.permute(1, 2, 0).numpy()).save(tmp_path / f"{index:02}.png")
    labels = torch.arange(COUNT) % CLASSES
    expected = of(batch.images, labels)
    assert of(tmp_path, labels.tolist()) == of(replace(flat, labels=labels), "label") == expected
    assert of(flat, "predicted") == expected  # it predicts every image's own colour
    assert of(flat, 2) == of(flat, "c") != expected


def noise(seed: int = 0, *, lift: float = 0.0) -> Tensor:
    """A check of all methods (5, images), the first one lifted."""
    values = torch.randn(5, COUNT, generator=torch.Generator().manual_seed(seed))
    values[0] += lift
    return values


def judged(values: dict[str, Tensor], *, seed: int = 0) -> MethodChoice:
    return choose(values, CANDIDATES, halves(ALONE, seed=seed), ALONE, seed=seed)


def test_noise_is_chosen_with_little_certainty_and_hardly_ever_confirmed():
    choices = [judged({"first": noise(seed), "second": noise(seed + 1000)}, seed=seed) for seed in range(40)]
    assert [choice.confirmation for choice in choices].count("confirmed") <= 4  # 2.5 %, of narrow intervals
    assert sum(choice.certainty for choice in choices) / len(choices) < 0.85
    assert {choice.method for choice in choices} == set(CANDIDATES)


def test_a_method_that_is_good_on_the_selection_half_alone_is_contradicted():
    first, second = halves(ALONE)
    values = 0.1 * noise()
    values[0, first] += 5.0
    values[1, second] += 5.0
    choice = judged({"check": values})
    assert (choice.method, choice.runner_up) == ("one", choice.scores[1].method)
    rivals = judged({"check": values[[0, 1, 1, 3, 4]]})  # the runner-up is certain to be good on the other half
    assert (rivals.method, rivals.confirmation) == ("one", "contradicted")


def test_scores_margins_and_scales_are_the_formulas():
    values = {"first": noise(3), "second": 100 * noise(4)}
    choice, (first, second) = judged(values), halves(ALONE)
    means = [torch.stack([check[:, part].double().mean(1) for check in values.values()]) for part in (first, second)]
    scales = means[0].std(1, correction=0)
    scores = [(half / scales[:, None]).mean(0) for half in means]
    best, names = int(scores[0][:3].argmax()), (*CANDIDATES, *BASELINES)
    assert choice.method == CANDIDATES[best]
    for scored in choice.scores:
        place = names.index(scored.method)
        assert scored.selection[SCORE].value == pytest.approx(float(scores[0][place]))
        assert scored.report[SCORE].value == pytest.approx(float(scores[1][place]))
        assert scored.report["second"].value == pytest.approx(float(means[1][1, place]))
    for margin in choice.margins:
        of = scores[1] if margin.check == SCORE else means[1][list(values).index(margin.check)]
        assert margin.difference.value == pytest.approx(float(of[best] - of[names.index(margin.against)]))
        assert margin.difference.n == len(second)
    assert {margin.against for margin in choice.margins} >= {choice.runner_up, *BASELINES} | (
        {"relevance"} - {choice.method}
    )
    assert sum(scored.wins or 0.0 for scored in choice.scores) == pytest.approx(1.0)
    assert choice.selection == tuple(first.tolist())
    scaled = judged({"first": 1000 * values["first"] + 7, "second": values["second"]})  # units change nothing
    assert (scaled.method, scaled.certainty) == (choice.method, choice.certainty)
    assert scaled.margin("random").value == pytest.approx(choice.margin("random").value)


def test_methods_with_the_same_maps_share_their_wins_and_are_no_runner_up():
    values = noise(7, lift=5.0)
    values[1] = values[0]
    choice = judged({"check": values})
    assert (choice.method, choice.alike, choice.runner_up, choice.certainty) == ("one", ("relevance",), "three", 1.0)
    values[2] = values[0]
    alone = judged({"check": values})
    assert (alone.runner_up, alone.confirmation, alone.certainty) == (None, None, 1.0)


def test_images_without_a_value_in_one_check_count_in_the_other_and_an_even_check_decides_nothing():
    located = noise(8)
    located[:, ::2] = torch.nan
    choice = judged({"first": noise(9), "second": located})
    place, report, scored = CANDIDATES.index(choice.method), torch.tensor(choice.report), choice.scores[0].report
    assert (scored["first"].n, scored["second"].n) == (len(report), int((report % 2).sum()))
    assert scored["second"].value == pytest.approx(float(located[place, report].nanmean()))
    one, other = judged({"first": noise(5)}), judged({"first": noise(5), "second": torch.ones(5, COUNT)})
    assert (one.method, one.certainty) == (other.method, other.certainty)


def test_intervals_are_over_groups():
    groups = ALONE // 4
    parts = halves(groups)
    values = {"check": noise(3)[:, ::4].repeat_interleave(4, 1)}  # images of a group are equal
    wide, narrow = (choose(values, CANDIDATES, parts, own).margin("random") for own in (groups, ALONE))
    assert wide.high - wide.low > 1.5 * (narrow.high - narrow.low)
