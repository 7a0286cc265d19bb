"""`vitlens explain --verify` on a model with known effects of patches and planted maps.

Composites are made of images of one colour each.
"""

from itertools import combinations, pairwise

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn.metrics import average_precision_score, roc_auc_score
from torch import Tensor
from torch.nn import functional as F

from tests.kit import planted_colours as colours
from tests.kit import planted_games as games
from tests.kit.commands import ran
from tests.kit.planted_games import (
    BLOCKS,
    BRIGHT,
    CELLS,
    CHANGED,
    COUNT,
    FIRST,
    METHODS,
    PAIR,
    PASSES,
)
from tests.kit.planted_methods import planted_methods
from tests.kit.select import index_by, select, select_one, values_of
from vitlens import Model
from vitlens.commands.explain.record import ExplainRecord, LeagueRow
from vitlens.uncertainty import power_of

LINE = "--verify --substrate black --other-substrates mean --composites none"
Call = dict[str, Tensor]


@pytest.fixture(scope="module")
def seen() -> list[Call]:
    """Record the weights of the model at each call of one method."""
    return []


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory, seen: list[Call]) -> ExplainRecord:
    folder = tmp_path_factory.mktemp("game")

    def watched(model: Model, images: Tensor, targets: Tensor) -> Tensor:
        seen.append(
            {name: value.detach().clone() for name, value in model.module.named_parameters()}
        )
        return games.truth(model, images, targets)

    with planted_methods({**METHODS, "saliency": watched}):
        return ran(
            folder / "run", f"explain {games.write(folder)} {LINE} --method {','.join(METHODS)}"
        )


@pytest.fixture(scope="module")
def league(record) -> dict[str, LeagueRow]:
    return index_by(record.league, "method")


def maps_of(name: str, grid: tuple[int, int] | None = None) -> Tensor:
    """Return the maps of a method, as it gives them or on a grid."""
    maps = METHODS[name](
        games.game(), games.pixels(), torch.zeros(COUNT, dtype=torch.long)
    ).detach()
    return maps if grid is None else F.adaptive_avg_pool2d(maps[:, None], grid)[:, 0]


def mean_rank_correlation(first: Tensor, second: Tensor) -> float:
    pairs = zip(first.flatten(1).detach().numpy(), second.flatten(1).detach().numpy(), strict=True)
    return float(np.mean([stats.spearmanr(*pair).statistic for pair in pairs]))


def margins_by_rank(maps: Tensor, counts: list[int], *, substrate: str = "black") -> Tensor:
    """Return the margins (images, counts) without the highest patches of each map."""
    margins = torch.zeros(COUNT, len(counts))
    for image, cells in enumerate(games.brightness()):
        order = maps[image].flatten().argsort(descending=True, stable=True)
        for place, count in enumerate(counts):
            left = cells.clone()
            left[order[:count]] = 0.0 if substrate == "black" else cells.mean()
            margins[image, place] = games.margins(left, games.worth())
    return margins


def area(values: Tensor, counts: list[int]) -> float:
    """Return the area under the mean curve, by trapezoids."""
    shares = [count / CELLS**2 for count in counts]
    means = values.double().mean(0).tolist()
    steps = pairwise(zip(shares, means, strict=True))
    return (
        sum((after[0] - before[0]) * (after[1] + before[1]) / 2 for before, after in steps)
        / shares[-1]
    )


# the other maps have ties whose order matters
@pytest.mark.parametrize("method", ["saliency", "gradcam", "hirescam", "xgradcam"])
def test_curves_are_those_of_removing_one_patch_after_the_other(record, league, method):
    arrays = record.curves["game"]
    counts = [round(share * CELLS**2) for share in arrays.shares.tolist()]
    assert (counts[0], counts[-1], len(counts)) == (0, CELLS**2, 21)
    assert counts == [CELLS**2 - count for count in reversed(counts)]
    most = margins_by_rank(1 * maps_of(method), counts)
    least = margins_by_rank((-1) * maps_of(method), counts)
    place = arrays.methods.tolist().index(method)
    np.testing.assert_allclose(arrays.deletion[place], most.sigmoid().mean(0), atol=1e-5)
    np.testing.assert_allclose(arrays.insertion[place][::-1], least.sigmoid().mean(0), atol=1e-5)
    np.testing.assert_allclose(arrays.inserted[::-1], 1 - arrays.shares, atol=1e-6)
    row = league[method]
    deletion = area(most.sigmoid(), counts)
    insertion = area(least.sigmoid(), counts)
    assert row.deletion.value == pytest.approx(deletion, abs=1e-5)
    assert row.insertion.value == pytest.approx(insertion, abs=1e-5)
    assert row.gap.value == pytest.approx(insertion - deletion, abs=1e-5)
    assert row.deletion_accuracy.value == pytest.approx(area((most > 0).float(), counts), abs=1e-6)
    assert row.insertion_accuracy.value == pytest.approx(
        area((least > 0).float(), counts), abs=1e-6
    )
    assert row.relevance_gain.value == pytest.approx(
        area(least, counts) - area(most, counts), abs=1e-4
    )
    assert (row.gap.n, row.gap.low <= row.gap.value <= row.gap.high) == (COUNT, True)


def test_a_map_of_the_centre_has_the_middle_patches_first(record):
    arrays = record.curves["game"]
    middle = torch.zeros(CELLS, CELLS, dtype=torch.bool)
    middle[CELLS // 4 : 3 * CELLS // 4, CELLS // 4 : 3 * CELLS // 4] = True
    at = np.round(arrays.shares * CELLS**2).tolist().index(middle.sum())
    without = torch.stack(
        [games.margins(cells * ~middle.flatten(), games.worth()) for cells in games.brightness()]
    )
    curve = arrays.deletion[arrays.methods.tolist().index("centre"), at]
    np.testing.assert_allclose(curve, without.sigmoid().mean(), atol=1e-5)


def test_what_each_patch_is_worth_is_the_best_map_and_its_opposite_the_worst(league):
    gaps = {name: row.gap.value for name, row in league.items()}
    assert max(gaps, key=gaps.__getitem__) == "saliency"
    assert min(gaps, key=gaps.__getitem__) == "gradcam"
    assert gaps["saliency"] == pytest.approx(-gaps["gradcam"], abs=1e-6)
    assert abs(gaps["random"]) < 0.15


def test_along_a_map_the_first_length_that_changes_the_prediction_is_found(record):
    arrays = record.sets["game"]
    names = arrays.methods.tolist()
    for method in ("gradcam", "hirescam", "xgradcam"):
        turned = margins_by_rank(maps_of(method), list(range(CELLS**2 + 1))) < 0
        assert turned.any(1).all()
        sizes = turned.int().argmax(1)
        row = select_one(record.orders, method=method)
        assert row.size.value == pytest.approx(float(sizes.double().mean()) / CELLS**2)
        assert (row.turned.value, row.turned.n) == (1.0, COUNT)
        assert method != "xgradcam" or sizes[1] == 1
        for image, size in enumerate(sizes[: len(arrays.removed)].tolist()):
            top = maps_of(method)[image].flatten().argsort(descending=True, stable=True)[:size]
            removed = arrays.removed[image, names.index(method)].ravel()
            assert set(np.flatnonzero(removed)) == set(top.tolist())
    assert arrays.prediction.tolist() == [0] * len(arrays.prediction)
    assert (arrays.turned == 1).all()


def test_no_patch_of_a_searched_set_can_be_put_back_and_no_order_has_a_smaller_one(record):
    """In the first image two other patches change the prediction without the one removed first."""
    arrays = record.sets["game"]
    cells = games.brightness()
    names = arrays.methods.tolist()
    removed_sets = torch.from_numpy(
        arrays.removed[:, names.index("search")].reshape(len(arrays.removed), -1)
    )
    assert removed_sets[0].nonzero().flatten().tolist() == list(PAIR) != [FIRST]
    for image, removed in enumerate(removed_sets):
        assert games.margins(cells[image] * ~removed, games.worth()) < 0
        for patch in removed.nonzero().flatten().tolist():
            fewer = removed.clone()
            fewer[patch] = False
            assert games.margins(cells[image] * ~fewer, games.worth()) >= 0
        by_map = arrays.removed[image].reshape(len(names), -1).sum(1)
        assert removed.sum() <= by_map.min()
    row = select_one(record.orders, method="search")
    assert row.searched.n == COUNT


def test_replacements_are_compared_by_the_rankings_that_they_give(record):
    gaps = {(row.substrate, row.method): row.gap for row in record.substrates}
    counts = [round(share * CELLS**2) for share in np.linspace(0, 1, 11)]
    for method in ("hirescam", "xgradcam"):
        curves = [
            margins_by_rank(sign * maps_of(method), counts, substrate="mean").sigmoid()
            for sign in (-1, 1)
        ]
        expected = area(curves[0], counts) - area(curves[1], counts)
        assert gaps["mean", method].value == pytest.approx(expected, abs=5e-3)  # of other steps
    for row in record.rankings:
        means = []
        for substrate in (row.first, row.second):
            means.append([gaps[substrate, name].value for name in METHODS])
        assert row.tau.value == pytest.approx(stats.kendalltau(*means).statistic)
        pairs = select(record.swapped, first=row.first, second=row.second)
        assert (row.methods, row.swapped) == (len(METHODS), len(pairs))
    for pair in record.swapped:
        for substrate, difference in ((pair.first, pair.in_first), (pair.second, pair.in_second)):
            value = gaps[substrate, pair.better].value - gaps[substrate, pair.worse].value
            assert difference.value == pytest.approx(value, abs=1e-6)
        assert pair.in_first.low > 0 > pair.in_second.high
    assert ("saliency", "occlusion") in {(pair.better, pair.worse) for pair in record.swapped}


def scores_by_hand(maps: Tensor, mask: Tensor) -> dict[str, float]:
    """Return the scores of one image whose map has its mask's size."""
    values = maps.flatten().double()
    inside = mask.flatten()
    above = values > values.mean()
    positive = values.clamp_min(0)
    top = values >= values.max()
    return {
        "roc_auc": roc_auc_score(inside, values),
        "average_precision": average_precision_score(inside, values),
        "iou": float((above & inside).sum() / (above | inside).sum()),
        "pixel_accuracy": float((above == inside).double().mean()),
        "mass": float((positive * inside).sum() / positive.sum()) if positive.sum() > 0 else 0.0,
        "pointing": float((top & inside).sum() / top.sum()),
    }


@pytest.mark.parametrize("method", ["saliency", "gradcam", "layercam", "smoothgrad"])
def test_localisation_is_scikit_learns_on_maps_enlarged_bilinearly(league, method):
    # the last image has no background
    maps = maps_of(method).float()
    masks = games.objects()[:-1]
    large = F.interpolate(
        maps[:, None], size=masks.shape[1:], mode="bilinear", align_corners=False
    )[:-1, 0]
    scores = [scores_by_hand(*pair) for pair in zip(large, masks, strict=True)]
    for name in scores[0]:
        estimate = getattr(league[method], name)
        assert estimate.n == COUNT - 1
        assert estimate.value == pytest.approx(
            np.mean([scores_of_image[name] for scores_of_image in scores]), abs=1e-5
        ), name
    if method == "layercam":
        for name in scores[0]:
            assert getattr(league[method], name).value == 1


def test_power_is_that_of_the_best_method_beside_each_other(record):
    masks = games.objects()[:-1]
    values = {"rise": np.full(COUNT - 1, 0.5)}
    for name in METHODS.keys() - values.keys():
        large = F.interpolate(
            maps_of(name).float()[:-1, None], size=masks.shape[1:], mode="bilinear"
        )[:, 0]
        values[name] = np.array(
            [
                roc_auc_score(mask.flatten(), heat_map.flatten())
                for heat_map, mask in zip(large, masks)
            ]
        )
    row = select_one(record.power, check="roc_auc")
    assert values[row.best].mean() == max(scores.mean() for scores in values.values())
    powers = [
        power_of(values[row.best] - scores) for name, scores in values.items() if name != row.best
    ]
    detectable = np.median(
        [power.detectable for power in powers if power is not None and power.error > 0]
    )
    assert (row.detectable.value, row.detectable.n) == (
        pytest.approx(detectable, rel=1e-3),
        COUNT - 1,
    )


def test_a_uniform_map_scores_what_chance_does(league):
    # the first map is not finite and counts as uniform, too
    area = float(games.objects()[1:-1].float().mean())
    chance = float(games.objects()[:-1].float().mean())
    row = league["rise"]
    assert (row.roc_auc.value, row.iou.value) == (0.5, 0.0)
    assert row.pixel_accuracy.value == pytest.approx(1 - chance, abs=1e-6)
    assert row.average_precision.value == row.pointing.value == pytest.approx(chance, abs=1e-6)
    assert row.mass.value == pytest.approx(area * (COUNT - 2) / (COUNT - 1), abs=1e-6)
    assert row.faults == "1 of 16 not finite, 15 of 16 constant"


def test_objects_are_compared_with_maps_that_ignore_the_image(record):
    """The best of them here: the mean mask of the other images."""
    masks = games.objects()[:-1].float()
    row = next(row for row in record.on_object if row.maps == "layercam")
    assert (row.score, row.estimate.value, row.estimate.n) == ("roc_auc", 1.0, COUNT - 1)
    assert row.baseline == "the mean mask of the other images"
    mean_of_others = [(masks.sum(0) - mask) / (len(masks) - 1) for mask in masks]
    expected = np.mean(
        [
            roc_auc_score(mask.flatten(), other.flatten())
            for mask, other in zip(masks, mean_of_others)
        ]
    )
    assert row.of_baseline.value == pytest.approx(expected, abs=1e-5)
    assert row.difference.value == pytest.approx(1 - expected, abs=1e-5)
    assert row.above


def test_weights_are_permuted_from_the_head_down_and_come_back(record, seen):
    names = (
        "head",
        "blocks 9 to 11",
        "blocks 6 to 8",
        "blocks 3 to 5",
        "blocks 0 to 2",
        "embedding",
    )
    rows = select(record.stages, method="saliency")
    assert tuple(row.stage for row in rows) == names
    model = games.game()
    original = {name: value.detach().clone() for name, value in model.module.named_parameters()}
    before = model(games.pixels()).argmax(-1)
    shares = []
    stages = []
    for call in seen:
        if not all(torch.equal(call[name], original[name]) for name in original):
            stages.append(call)
    changed = []
    for call in stages:
        changed.append({name for name in original if not torch.equal(call[name], original[name])})
    assert changed[0] == {"head.weight"}
    assert all(before <= after for before, after in pairwise(changed))
    numbers = [{int(name.split(".")[1]) for name in more if "blocks" in name} for more in changed]
    assert [
        min(more, default=BLOCKS) >= least for more, least in zip(numbers, (12, 9, 6, 3, 0, 0))
    ] == [True] * 6
    assert len(numbers[-1]) > BLOCKS - 3  # an identity may be permuted to itself
    assert ["stem.weight" in more for more in changed] == [False] * 5 + [True]
    for row, call in zip(rows, stages, strict=True):
        for name in original:
            assert torch.equal(call[name].flatten().sort()[0], original[name].flatten().sort()[0])
        # a tensor's draw is its own
        assert torch.equal(call["head.weight"], stages[0]["head.weight"])
        model.module.load_state_dict(call)
        shares.append(float((model(games.pixels()).argmax(-1) == before).double().mean()))
        expected = mean_rank_correlation(
            maps_of("saliency"), games.truth(model, games.pixels(), before)
        )
        assert row.similarity.value == pytest.approx(expected, abs=1e-5)
    assert values_of(rows, "kept") == pytest.approx(shares)
    assert min(shares) < 0.5 < max(shares)
    for name in original:
        assert torch.equal(seen[-1][name], original[name])


def test_a_method_that_knows_no_model_fails_and_one_whose_maps_are_uniform_is_not_judged(
    record, league
):
    weights = {row.method: row for row in record.checks if row.check == "weights"}
    for method in ("occlusion", "hirescam", "smoothgrad"):
        assert (weights[method].state, weights[method].lacks) == ("fail", ("ignores the weights",))
        assert (
            league[method].randomisation.value == league[method].cascade.value == pytest.approx(1.0)
        )
    assert weights["saliency"].state == "pass"
    last = values_of(select(record.stages, method="saliency"), "similarity.value")
    assert league["saliency"].randomisation.value == pytest.approx(last[-1], abs=1e-6)
    assert league["saliency"].cascade.value == pytest.approx(np.mean(last), abs=1e-6)
    assert weights["rise"].state == "inconclusive"
    assert league["rise"].randomisation is None
    assert (league["random"].randomisation, league["random"].forwards) == (None, None)


def test_maps_that_follow_their_images_stay_and_noise_jumps(record):
    rows = index_by(record.stability, "method", "disturbance")
    shifts = ("shift-quarter", "shift-half", "shift-one")
    for name in ("shifts", *shifts, "flip"):
        assert rows["occlusion", name].correlation.value == pytest.approx(1.0, abs=1e-4)
        assert (rows["occlusion", name].jumped.value, rows["occlusion", name].jumped.n) == (
            0.0,
            COUNT,
        )
    assert rows["smoothgrad", "shifts"].jumped.value > 0.9
    assert rows["smoothgrad", "shifts"].jumped.value >= max(
        rows["smoothgrad", name].jumped.value for name in shifts
    )
    assert rows["rise", "shifts"].jumped is None
    of_shifts = np.mean([rows["hirescam", name].correlation.value for name in shifts])
    assert rows["hirescam", "shifts"].correlation.value == pytest.approx(of_shifts, abs=1e-6)
    states = {row.method: row.state for row in record.checks if row.check == "shifts"}
    assert (states["occlusion"], states["smoothgrad"], states["rise"]) == (
        "pass",
        "fail",
        "inconclusive",
    )


@pytest.mark.parametrize(
    ("disturbance", "pixel"), [("shift-quarter", 0.25), ("shift-half", 0.5), ("shift-one", 1.0)]
)
def test_a_map_that_stays_is_compared_with_itself_moved_linearly(record, disturbance, pixel):
    """By half as many cells as pixels, down and to the right, the edge repeated."""
    heat_map = games.marked(CHANGED).double().numpy()
    share = pixel * CELLS / 16
    moved = (1 - share) * heat_map + share * np.concatenate([heat_map[:1], heat_map[:-1]])
    moved = (1 - share) * moved + share * np.concatenate([moved[:, :1], moved[:, :-1]], 1)
    row = select_one(record.stability, method="hirescam", disturbance=disturbance)
    assert row.correlation.value == pytest.approx(
        stats.spearmanr(heat_map.ravel(), moved.ravel()).statistic, abs=1e-5
    )


def test_a_map_that_stays_jumps_from_side_to_side_when_its_image_is_flipped_and_is_not_judged_by_it(
    record,
):
    for method, place in (("hirescam", CHANGED), ("xgradcam", BRIGHT)):
        row = select_one(record.stability, method=method, disturbance="flip")
        heat_map = games.marked(place)
        expected = stats.spearmanr(heat_map.flatten(), heat_map.flip(1).flatten()).statistic
        assert row.correlation.value == pytest.approx(expected, abs=1e-5)
        assert row.jumped.value == 1.0
        assert set(values_of(select(record.checks, check="shifts"), "state", "method")) >= {
            ("pass", method)
        }


def test_costs_are_counted_in_forward_passes_and_costly_methods_are_randomised_on_few_images(
    league,
):
    assert league["occlusion"].forwards.value == pytest.approx(PASSES)
    assert [league[name].randomisation.n for name in ("occlusion", "hirescam")] == [12, COUNT]
    assert [league[name].forwards.value for name in ("hirescam", "smoothgrad", "rise")] == [0.0] * 3


def test_methods_are_compared_pairwise_on_the_grid_of_patches(record):
    rows = index_by(record.agreement, "first", "second")
    assert rows.keys() == set(combinations(METHODS, 2))
    for pair in (("saliency", "occlusion"), ("occlusion", "smoothgrad"), ("hirescam", "xgradcam")):
        first, second = (maps_of(name, (CELLS, CELLS)).flatten(1) for name in pair)
        assert rows[pair].spearman.value == pytest.approx(
            mean_rank_correlation(first, second), abs=1e-5
        )
        above = first > first.mean(1, keepdim=True)
        other = second > second.mean(1, keepdim=True)
        shared = (above & other).sum(1) / (above | other).sum(1)
        assert rows[pair].iou.value == pytest.approx(float(shared.mean()), abs=1e-5)
        tops = [
            maps.argsort(dim=1, descending=True, stable=True)[:, :6].tolist()
            for maps in (first, second)
        ]
        overlap = np.mean([len({*one} & {*two}) / 6 for one, two in zip(*tops)])
        assert rows[pair].top_overlap.value == pytest.approx(overlap, abs=1e-6)
    assert rows["saliency", "gradcam"].spearman.value == pytest.approx(-1)


PARTS = {  # classes, explained ones, the share of a composite that one covers
    "mosaic-2": (4, 4, 1 / 4),
    "mosaic-3": (9, 9, 1 / 9),
    "embedded": (2, 1, 1 / 4),
    "pasted": (2, 1, 1 / 4),
}
MADE = 3
OF_COMPOSITES = (
    f"--verify --no-counterfactuals --no-stability --other-substrates none --composite-count {MADE}"
)


def uniform(_model: Model, images: Tensor, _targets: Tensor) -> Tensor:
    return torch.ones(len(images), 6, 6)


@pytest.fixture(scope="module")
def of_composites(tmp_path_factory: pytest.TempPathFactory) -> ExplainRecord:
    folder = tmp_path_factory.mktemp("composites")
    planted = {
        "saliency": colours.near,
        "occlusion": lambda *args: -colours.near(*args),
        "gradcam": uniform,
    }
    with planted_methods(planted):
        line = f"{OF_COMPOSITES} --method {','.join(planted)} --composites {','.join(PARTS)}"
        return ran(folder / "run", f"explain {colours.write(folder)} {line}")


@pytest.mark.parametrize("kind", PARTS)
def test_the_evidence_lies_where_the_mask_says_and_another_class_everywhere_else(
    of_composites, kind
):
    row_of_kind = select_one(of_composites.composite_sets, kind=kind)
    classes, maps_each, chance = PARTS[kind]
    assert (row_of_kind.refused, row_of_kind.composites, row_of_kind.maps) == (
        "",
        MADE,
        MADE * maps_each,
    )
    assert (row_of_kind.guessed, row_of_kind.chance) == (
        pytest.approx(classes / 12, abs=1e-5),
        pytest.approx(chance),
    )
    assert (row_of_kind.recognised.value, row_of_kind.seen, row_of_kind.labels) == (
        1.0,
        kind != "mosaic-3",
        "predictions",
    )
    arrays = of_composites.composite_maps[f"{kind}-hues"]
    colour_values = (255 * colours.coloured().module.colours).round().byte().numpy()
    names = "abcdefghijkl"
    for image, mask, target in zip(arrays.images, arrays.masks, arrays.targets, strict=True):
        pixels = np.asarray(image)
        pixels = pixels.transpose(1, 2, 0) if pixels.shape[0] == 3 else pixels
        colour = colour_values[names.index(str(target))]
        assert (np.abs(pixels[mask].astype(int) - colour) <= 1).all()
        away = np.abs(pixels[~mask].astype(int) - colour).max(1)
        assert (away > 60).mean() > 0.9 if kind == "pasted" else (away > 60).all()
        assert len(np.unique(pixels.reshape(-1, 3), axis=0)) == classes or kind == "pasted"
    if kind.startswith("mosaic"):
        assert np.unique(arrays.masks.sum((1, 2))).tolist() == [
            (colours.SIDE // int(kind[-1])) ** 2
        ]
        assert len({str(target) for target in arrays.targets}) == len(arrays.targets)
        assert arrays.masks.sum(0).max() == 1  # cells share no pixel


@pytest.mark.parametrize("kind", PARTS)
def test_an_ideal_a_uniform_and_an_opposite_map(of_composites, kind):
    rows = {row.method: row for row in of_composites.composites if row.kind == kind}
    ideal = rows["saliency"]
    none = rows["occlusion"]
    even = rows["gradcam"]
    assert values_of((ideal.mass, ideal.pointing, ideal.roc_auc), "value") == pytest.approx(
        [1, 1, 1], abs=1e-2
    )
    # negative is no mass
    assert (none.mass.value, none.roc_auc.value) == (
        0,
        pytest.approx(0, abs=1e-2),
    )
    assert even.roc_auc.value == 0.5
    # all points tie
    assert even.mass.value == even.pointing.value == pytest.approx(PARTS[kind][2], abs=1e-6)
    assert ideal.mass.n == MADE * PARTS[kind][1]


def test_too_few_classes_make_no_mosaic(tmp_path):
    words = colours.write(tmp_path)
    for index in range(3, 12):
        for part in ("images", "masks"):
            (tmp_path / "data" / part / f"{index:02}.png").unlink()
    with planted_methods({"saliency": colours.near, "gradcam": uniform}):
        refused = ran(
            tmp_path / "run",
            f"explain {words} {OF_COMPOSITES} --method saliency,gradcam --composites mosaic-2",
        )
    for row in refused.composite_sets:
        assert row.refused
        assert row.composites == 0
    assert refused.composites == ()
