"""The labels of heads: planted heads found by name, and scores by hand."""

import math
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.kit.families import of_timm
from tests.kit.made import made_model, numbered
from tests.kit.marks import slow_except
from tests.kit.models.handwritten import half
from tests.kit.planted_patterns import Bench, Maker, looking_evenly, planted, scenes
from tests.kit.splits import split_of
from tests.kit.tiny import images as pictures
from tests.kit.tiny import ours, timm_model, torchvision_swin
from vitlens import Statistics, statistics
from vitlens.analysis.heads.evidence import half_width
from vitlens.analysis.heads.offsets import OFFSETS, offset_bits
from vitlens.analysis.heads.registry import LABELS, MIXED, UNLABELLED, head_words
from vitlens.analysis.heads.specialisation import RULES, label_of, specialise

GRIDS = [(6, 6), (5, 8), (8, 8)]
SWIN = "swin_tiny_patch4_window7_224"


@pytest.mark.parametrize("seed", slow_except(range(1, 23), (1,)))
def test_each_planted_head_is_found_with_its_name_and_no_other(seed):
    """Of noise any label that says that there is no pattern."""
    grid = GRIDS[seed % 3]
    forms = Bench(grid, seed).heads()
    drawn = scenes(grid, 24, seed)
    model = planted(list(forms.values()), grid, dead=(list(forms).index("dead"),), seed=seed)
    heads = specialise(statistics(model, drawn.images, masks=drawn.masks))
    for name, label in zip(forms, heads.labels[0], strict=True):
        assert label in ((MIXED, UNLABELLED) if name.startswith("noise") else (name,))
    assert set(heads.labels[0]) >= set(RULES) - {"high-norm"}  # which needs a layer before it
    for rule_scores in heads.all_scores.values():
        assert rule_scores.min() >= 0
        assert rule_scores.max() <= 1


def test_a_head_that_attends_to_patches_of_exceptional_norm():
    """The marked patches are longer than all others; before the first layer that is not known."""
    forms = Bench((6, 6), 0).heads()
    model = planted([forms["sink"], forms["object"], forms["uniform"]], (6, 6), depth=2)
    drawn = scenes((6, 6), 24, 0)
    heads = specialise(statistics(model, drawn.images, masks=drawn.masks))
    assert heads.labels[1] == ("high-norm", "object", "uniform")
    assert heads.all_scores["high-norm"][1, 0] > 0.95
    assert heads.all_scores["high-norm"][1, 1:].max() < 0.1
    assert heads.all_scores["high-norm"][0].max() == 0


def test_sinks_off_the_object_are_those_of_the_planted_head():
    """A head that attends to the red patches, none of which lies on the object."""
    drawn = scenes((6, 5), 16, 0)
    model = planted([Bench((6, 5), 0).heads()["background"]], (6, 5))
    nothing = statistics(model, drawn.images, masks=drawn.masks & False)
    tables = [
        statistics(model, drawn.images, masks=masks) for masks in (drawn.masks, drawn.masks | True)
    ]
    off, none, every = (specialise(table).sinks_off_object for table in (*tables, nothing))
    assert none.value == pytest.approx(0, abs=1e-6)
    # but for sinks in the prefix
    assert every.value == pytest.approx(float(nothing.sink_mass.mean()), abs=0.02)
    assert 0 <= off.value <= every.value + 1e-9


def test_images_of_one_group_distinguish_sinks_no_better_than_one_image():
    drawn = scenes((6, 5), 4, 0)
    model = planted([Bench((6, 5), 0).heads()["sink"]], (6, 5))
    group = split_of(drawn.images[:1].repeat(4, 1, 1, 1), groups=torch.zeros(4))
    of_group = specialise(statistics(model, group)).all_scores["sink"]
    of_image = specialise(statistics(model, drawn.images[:1])).all_scores["sink"]
    assert of_image.max() > 0.5
    torch.testing.assert_close(of_group, of_image)


def test_the_documentation_defines_every_label():
    text = (Path(__file__).parents[3] / "docs" / "stats.md").read_text()
    first = [line.split("|")[1] for line in text.splitlines() if line.startswith("| ")]
    assert set(RULES) <= {name.strip() for name in ",".join(first).split(",")}
    for label in (MIXED, UNLABELLED):
        assert f"`{label}`" in text


def table_of(grid: tuple[int, int], prefix: int, *heads: Tensor) -> Statistics:
    model = made_model(torch.stack(heads, 1), grid=grid, prefix=prefix)
    return statistics(model, numbered(model, len(heads[0])), batch_size=5)


def score(heads, rule: str, head: int = 0) -> float:
    return heads.all_scores[rule][0, head].item()


def test_made_attention_gets_its_label():
    grid = (6, 10)
    prefix = 5
    maker = Maker(grid, prefix)
    kinds = {
        "self": maker.head(torch.eye(maker.patches)),
        "same row": maker.row(),
        "uniform": maker.even(),
        "position": maker.on(prefix + 4),
        "sink": maker.own_key(),
        UNLABELLED: maker.random_keys(),
        "CLS": maker.on(0),
        "register": maker.on(2),
    }
    heads = specialise(table_of(grid, prefix, *kinds.values()))
    assert list(heads.labels[0]) == list(kinds)
    assert heads.sinks_off_object is None  # without masks
    for head, name in enumerate(kinds):
        if name in RULES:
            assert score(heads, name, head) > 0.9, name
            assert heads.head_labels[0][head].score == score(heads, name, head)
    evidence = heads.evidence[0][list(kinds).index("position")]
    assert (evidence.row, evidence.column) == divmod(4, grid[1])
    assert evidence.mass.value == pytest.approx(1)
    assert evidence.chance == pytest.approx(1 / maker.tokens)


@pytest.mark.parametrize("share", [0.2, 0.9])
@pytest.mark.parametrize("rule", ["same row", "CLS"])
def test_scores_by_hand(rule, share):
    """A share of the attention on the pattern, the rest even over all keys: two weights, both of
    the pattern.
    """
    prefix, inside = (0, 10) if rule == "same row" else (1, 1)
    maker = Maker((6, 10), prefix)
    keys = 60 + prefix
    weights = (
        share * (maker.row() if rule == "same row" else maker.on(0)) + (1 - share) * maker.even()
    )
    heads = specialise(table_of((6, 10), prefix, weights))
    high = share / inside + (1 - share) / keys
    low = (1 - share) / keys
    bits = (
        math.log2(keys) + inside * high * math.log2(high) + (keys - inside) * low * math.log2(low)
    )
    assert score(heads, rule) == pytest.approx(bits / max(1, bits), abs=1e-4)
    assert score(heads, "uniform") == pytest.approx(max(0, 1 - bits), abs=1e-4)


@pytest.mark.parametrize("name", ["previous", "same row", "within 5"])
def test_offset_bits_are_the_greatest_gain_in_likelihood(name):
    """Against a search over strengths, from all pairs."""
    maker = Maker((4, 5), 0)
    inside = OFFSETS[name](maker.down - maker.down[:, None], maker.across - maker.across[:, None])
    noise = torch.rand(20, 20, generator=torch.Generator().manual_seed(0)).double().pow(3)
    weights = maker.head(noise / noise.sum(-1, keepdim=True) + 3 * inside)
    gains = [
        float((weights[0] * ((inside * strength).softmax(-1) * 20).log2()).sum(-1).mean())
        for strength in torch.linspace(0, 12, 4001).double()
    ]
    table = table_of((4, 5), 0, weights)
    bits = offset_bits(table.offset_mass[0], table.geometries[0], name)
    assert bits.item() == pytest.approx(max(gains), abs=1e-5)


def test_position_is_predicted_from_other_images():
    """As many random places as groups of images: their mean has peaks at each, which tell nothing
    of another image.
    """
    maker = Maker((8, 8), 1, images=16)
    heads = specialise(table_of((8, 8), 1, maker.own_key(), maker.on(7)))
    assert score(heads, "position", 0) == 0
    assert score(heads, "sink", 0) > 0.9
    assert score(heads, "position", 1) > 0.9
    assert score(heads, "sink", 1) < 0.1


def test_one_image_cannot_tell_a_place_from_a_sink():
    heads = specialise(table_of((8, 8), 1, Maker((8, 8), 1, images=1).on(7)))
    (only,) = heads.head_labels[0]
    assert (only.label, {only.best, only.other}) == (MIXED, {"position", "sink"})
    assert math.isnan(only.low)
    assert math.isnan(only.high)


def scores(**values: float) -> dict[str, Tensor]:
    """Return scores of all labels with a little spread over 16 groups of images."""
    noise = 1e-4 * torch.randn(17, generator=torch.Generator().manual_seed(0)).double()
    return {name: values.get(name.replace(" ", "_"), 0.05) + noise for name in RULES}


@pytest.mark.parametrize(
    ("scores_by_rule", "label"),
    [
        ({"position": 0.7}, "position"),
        ({"position": 0.49}, UNLABELLED),
        ({"position": 0.4, "sink": 0.15}, MIXED),  # 0.55 together
        ({"position": 0.45, "sink": 0.08}, UNLABELLED),  # the second is next to nothing
        ({"position": 0.6, "sink": 0.55}, MIXED),
        ({"previous": 0.6, "local": 0.58}, "previous"),  # one is a case of the other
        ({"dead": 1.0, "position": 1.0}, "dead"),
        ({"dead": 0.4, "position": 0.9}, "position"),
    ],
)
def test_a_label_is_given_where_it_explains_most_and_clearly_more_than_its_rivals(
    scores_by_rule, label
):
    assert label_of(scores(**scores_by_rule)).label == label


def test_labels_that_contain_one_another_do_not_compete():
    assert label_of(scores(previous=0.9, local=0.6)).other not in ("previous", "local")
    assert label_of(scores(local=0.9, previous=0.6)).other not in ("previous", "local")
    assert label_of(scores(previous=0.9, next=0.6)).other == "next"


def test_a_margin_within_its_interval_is_not_clear():
    wide = scores(position=0.75)
    wide["position"][1:] += 0.1 * torch.randn(16, generator=torch.Generator().manual_seed(1))
    wide_label = label_of({**wide, "sink": torch.full((17,), 0.5, dtype=torch.float64)})
    assert wide_label.high - wide_label.low > 0.3
    assert wide_label.label == MIXED


def test_the_jackknife_of_a_mean_is_students_interval():
    values = torch.randn(16, generator=torch.Generator().manual_seed(0)).double()
    left = (values.sum() - values) / 15  # the means without each
    expected = 2.131449545559323 * float(values.std()) / 4  # Student's t with 15 degrees of freedom
    assert half_width(torch.cat((values.mean()[None], left))) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("name", "grid", "prefix"), [("row", (4, 6), 0), ("random_keys", (6, 4), 1)]
)
def test_what_offsets_explain_is_the_share_of_variance(name, grid, prefix):
    """R² of the mean weight at each offset over all pairs of all images."""
    maker = Maker(grid, prefix, images=4)
    weights = getattr(maker, name)()
    down = maker.down - maker.down[:, None]
    across = maker.across - maker.across[:, None]
    layer_weights = weights[:, prefix:, prefix:].double()
    left = 0.0
    for offset in set(zip(down.flatten().tolist(), across.flatten().tolist())):
        at_offset = layer_weights[:, (down == offset[0]) & (across == offset[1])]
        left += float((at_offset - at_offset.mean()).square().sum())
    expected = 1 - left / float((layer_weights - layer_weights.mean()).square().sum())
    heads = specialise(table_of(grid, prefix, weights))
    assert heads.explained[0, 0].item() == pytest.approx(expected, abs=1e-4)


def test_ratios_by_hand():
    """Mean weight at an offset over that of uniform attention; self attention: patches times as
    much on itself.
    """
    maker = Maker((3, 4), 0)
    itself, neighbours = specialise(
        table_of((3, 4), 0, maker.head(torch.eye(12)), maker.beside())
    ).ratios[0]
    assert itself.shape == (5, 7)
    assert itself[2, 3].item() == itself.sum().item() == pytest.approx(12)
    # each pair that is side by side has all of its row
    assert neighbours[2, 4].item() == pytest.approx(12)
    # a quarter of the patches has no neighbour
    assert neighbours[2, 3].item() == pytest.approx(12 * 1 / 4)


@pytest.mark.parametrize(("grid", "prefix"), [((1, 7), 0), ((7, 1), 1), ((1, 1), 0), ((2, 1), 5)])
def test_grids_of_one_row_column_or_patch(grid, prefix):
    maker = Maker(grid, prefix)
    heads = specialise(
        table_of(grid, prefix, maker.even(), maker.head(torch.eye(maker.patches)), maker.beside())
    )
    assert set(heads.labels[0]) <= set(LABELS)
    for rule in RULES:
        assert torch.isfinite(heads.all_scores[rule]).all()
    assert heads.labels[0][0] == "uniform"
    if maker.patches > 2:
        assert heads.labels[0][1:] == ("self", "next" if grid[1] > 1 else "self")
    if grid[0] == 1 and not prefix:  # all keys are in one row
        assert heads.all_scores["same row"][0].abs().max() < 1e-5


@pytest.mark.parametrize(
    "build",
    [partial(ours, registers=4), partial(timm_model, SWIN, img_size=(32, 48)), torchvision_swin],
)
def test_uniform_attention_is_chance_in_windows_too(build):
    """Also where a shifted window is cut in parts, so that some patches see fewer than others."""
    model = looking_evenly(build())
    table = statistics(model, pictures(model.input_size))
    heads = specialise(table)
    for layer, site in enumerate(table.sites):
        assert set(heads.labels[layer]) <= {"uniform", "dead"}  # ours are without values, too
        assert heads.all_scores["uniform"][layer, : site.heads].min() > 1 - 1e-4
        uniform_distance = table.uniform_distance()[layer].expand(site.heads)
        torch.testing.assert_close(
            table.distance[layer, : site.heads], uniform_distance, atol=0, rtol=1e-5
        )
        for rule in set(RULES) - {"uniform", "dead"}:
            assert heads.all_scores[rule][layer, : site.heads].abs().max() < 1e-5, rule
        torch.testing.assert_close(
            heads.ratios[layer], torch.ones_like(heads.ratios[layer]), atol=1e-5, rtol=0
        )


def test_windows_of_swin_that_all_look_aside():
    """Made by the bias that Swin adds at each offset of a window."""
    model = looking_evenly(timm_model(SWIN))
    with torch.no_grad():
        for name, parameter in model.module.named_parameters():
            if name.endswith("relative_position_bias_table"):
                parameter.view(7, 7, -1)[3, 4] = 40  # timm counts query minus key
    heads = specialise(statistics(model, pictures()))
    for layer in range(4):  # whole windows, and shifted ones
        assert set(heads.labels[layer]) == {"previous"}
        assert min(one.score for one in heads.head_labels[layer]) > 0.9


def test_layers_of_pooled_keys_have_no_ratios():
    table = statistics(half(of_timm("pvt_v2_b0"), 64), pictures((64, 64)))
    assert [ratio is None for ratio in specialise(table).ratios] == [True] * 6 + [False] * 2


def test_a_head_in_words():
    assert head_words("self", "self", None, 0.9) == "self: a patch attends to itself"
    assert head_words(MIXED, "sink", "position", 0.5) == "mixed: sink and position"
    assert [head_words(UNLABELLED, "sink", None, share) for share in (0.2, 0.19)] == [
        f"{UNLABELLED}, partly sink",
        UNLABELLED,
    ]
