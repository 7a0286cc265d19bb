"""The adaptive search on effects with known gaps, and against the exact ranking of a model."""

import pytest
import torch
from torch import Tensor

from tests.lens.tiny import images, ours, timm_model
from vitlens.analysis.ablation.ablate import ablate, units_of
from vitlens.analysis.ablation.adaptive import most_important
from vitlens.analysis.ablation.effects import Effects, Unit
from vitlens.analysis.ablation.elimination import Adaptive, Costs, Measure, eliminate
from vitlens.analysis.ablation.first_order import first_order
from vitlens.errors import InputError
from vitlens.names import REPLACEMENTS, Replacement

N, K = 400, 3
UNITS = tuple(Unit("head", layer, head) for layer in range(6) for head in range(3))
COSTS = Costs(torch.full((len(UNITS),), 0.5, dtype=torch.float64))


def draw(*shape: int, seed: int, heavy: bool = False) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(shape, generator=generator, dtype=torch.float64)
    return normal if not heavy else normal.pow(3) / 15**0.5  # kurtosis 46


def table(true: Tensor, *, seed: int, heavy: bool = False) -> Tensor:
    """Changes of the loss (units, n) whose mean over the n images is exactly the true one."""
    values = draw(len(true), N, seed=seed, heavy=heavy)
    return values - values.mean(1, keepdim=True) + true[:, None]


def measuring(values: Tensor, asked: list[tuple[tuple[Unit, ...], Tensor]] | None = None) -> Measure:
    def measure(units: tuple[Unit, ...], images: Tensor) -> Effects:
        if asked is not None:
            asked.append((units, images))
        rows = [UNITS.index(unit) for unit in units]
        n = len(images)
        loss, right = values[rows][:, images], torch.ones(len(rows), n).bool()
        return Effects(
            units, "mean", torch.zeros(n).long(), torch.zeros(n).double(), right[0], loss, right, 1 + 0.5 * len(rows)
        )

    return measure


def search(true: Tensor, *, seed: int, heavy: bool = False, **options: object) -> tuple[Adaptive, Tensor]:
    values = table(true, seed=seed, heavy=heavy)
    return eliminate(measuring(values), UNITS, N, k=K, costs=COSTS, seed=seed, **options), values


def gaps(step: float) -> Tensor:
    """True changes: three units clearly on top, in a shuffled place."""
    true = torch.zeros(len(UNITS), dtype=torch.float64)
    true[[4, 11, 7]] = torch.tensor([3.0, 2.0, 1.0], dtype=torch.float64) * step
    return true


def right(found: Adaptive) -> bool:
    return set(found.top) == {UNITS[4], UNITS[11], UNITS[7]}


def test_clear_gaps_are_found_and_certain_at_a_fraction_of_the_cost() -> None:
    for seed in range(20):
        found, _ = search(gaps(3.0), seed=seed)
        assert found.top == (UNITS[4], UNITS[11], UNITS[7])
        assert found.resolved
        assert (found.overlapping, found.note) == ((), "")
        assert found.forward_equivalents <= found.exact_cost / 3
        assert int(found.images.max()) < N / 2


@pytest.mark.parametrize("heavy", [False, True])
def test_what_is_certain_is_right_at_the_promised_confidence(heavy: bool) -> None:
    """Over 100 seeds with gaps near the noise: no more than 5 false certainties, and intervals that hold together."""
    true = gaps(0.35) + 0.05 * draw(len(UNITS), seed=77)
    best = set(true.topk(K).indices.tolist())
    wrong = missed = certain = 0
    for seed in range(100):
        found, _ = search(true, seed=seed, heavy=heavy)
        chosen = set(found.ranking[:K])
        certain += int(found.settled.sum())
        wrong += any(bool(sure) and ((index in chosen) != (index in best)) for index, sure in enumerate(found.settled))
        missed += bool(((true < found.low) | (true > found.high)).any())
    assert wrong <= 5
    assert missed <= 5
    assert certain > (20 if heavy else 50)  # it is not right by saying nothing; heavy tails leave less certain


def test_the_true_ones_are_found_more_often_than_by_as_many_images_of_all() -> None:
    true = gaps(0.1)
    ours_right = plain_right = 0
    for seed in range(100):
        found, values = search(true, seed=seed)
        ours_right += right(found)
        order = torch.randperm(N, generator=torch.Generator().manual_seed(seed))
        plain = values[:, order[: N // 3]].mean(1).topk(K).indices
        plain_right += set(plain.tolist()) == {4, 11, 7}
    assert ours_right >= plain_right + 5


def test_an_estimate_known_for_all_images_narrows_the_intervals() -> None:
    true = gaps(0.3)
    wide, values = search(true, seed=1)
    estimate = 2 * values + 0.5 * draw(len(UNITS), N, seed=50) + 7  # no bias or scale of it matters
    narrow = eliminate(measuring(values), UNITS, N, k=K, costs=COSTS, estimate=estimate, seed=1)
    assert (narrow.high - narrow.low).mean() < 0.5 * (wide.high - wide.low).mean()
    assert right(narrow)
    inside = (true >= narrow.low) & (true <= narrow.high)
    assert inside.all()


def test_nothing_is_uncertain_once_all_is_measured() -> None:
    values = table(0.001 * draw(len(UNITS), seed=3), seed=0)
    found = eliminate(measuring(values), UNITS, N, k=K, costs=COSTS, limit=10.0)
    assert set(found.ranking[:K]) == set(values.mean(1).topk(K).indices.tolist())
    assert found.resolved
    torch.testing.assert_close(found.low, found.high)
    torch.testing.assert_close(found.mean, values.mean(1))
    assert found.images.tolist() == [N] * len(UNITS)


def test_equal_units_overlap_and_it_says_so() -> None:
    found, _ = search(torch.zeros(len(UNITS), dtype=torch.float64), seed=0)
    assert not found.resolved
    assert len(found.overlapping) == int((~found.settled).sum()) > 3
    assert "overlap with the boundary of the 3" in found.note


def test_no_image_is_measured_twice_and_all_that_is_spent_is_counted() -> None:
    asked: list[tuple[tuple[Unit, ...], Tensor]] = []
    found = eliminate(measuring(table(gaps(0.3), seed=0), asked), UNITS, N, k=K, costs=COSTS, seed=0)
    drawn = torch.cat([rows for _, rows in asked]).tolist()
    assert len(set(drawn)) == len(drawn) < N
    assert [len(units) for units, _ in asked] == [18, 9, 4]
    spent = sum((1 + 0.5 * len(units)) * len(rows) for units, rows in asked) / N
    assert found.forward_equivalents == pytest.approx(spent)
    assert found.exact_cost == 10
    measured = {unit: sum(len(rows) for units, rows in asked if unit in units) for unit in UNITS}
    assert found.images.tolist() == [measured[unit] for unit in UNITS]
    before = eliminate(
        measuring(table(gaps(0.3), seed=0)), UNITS, N, k=K, costs=Costs(COSTS.units, before=1.0, exact=11.0), seed=0
    )
    assert before.forward_equivalents <= before.exact_cost / 3
    assert before.images.max() < found.images.max()


def test_k_of_all_or_one() -> None:
    values = table(gaps(3.0), seed=0)
    every = eliminate(measuring(values), UNITS, N, k=len(UNITS), costs=COSTS)
    assert set(every.top) == set(UNITS)
    assert every.resolved
    assert eliminate(measuring(values), UNITS, N, k=1, costs=COSTS).top == (UNITS[4],)
    for k in (0, 19):
        with pytest.raises(InputError, match="k from 1 to 18"):
            eliminate(measuring(values), UNITS, N, k=k, costs=COSTS)


@pytest.mark.parametrize("by", REPLACEMENTS)
def test_with_all_images_it_is_the_exact_ranking(by: Replacement) -> None:
    model, pictures, labels = ours(depth=3), images((32, 48), batch=10), torch.arange(10) % 5
    exact = ablate(model, pictures, labels, replace=by)
    told: list[int] = []
    found = most_important(
        model, pictures, labels, k=2, replace=by, limit=10.0, batch_size=4, seed=0, advance=told.append
    )
    assert found.top == exact.ranking()[:2]
    torch.testing.assert_close(found.mean, exact.loss.mean, atol=1e-5, rtol=0)
    assert found.replace == by
    assert sum(told) == 60
    assert found.exact_cost == pytest.approx(
        exact.forward_equivalents + (1 if by == "mean" else 0), abs=1e-6
    )  # all images in one batch need no pass for the means


def test_the_estimate_is_made_where_it_is_worth_its_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    from vitlens.analysis.ablation import adaptive

    seen: list[Tensor] = []
    real = adaptive.eliminate

    def watched(*args: object, **options: object) -> Adaptive:
        seen.append(options["estimate"])  # type: ignore[arg-type]
        return real(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(adaptive, "eliminate", watched)
    labels = torch.arange(10) % 5
    most_important(ours(), images((32, 48), batch=10), labels, k=1)
    assert seen[-1] is None
    model = timm_model("vit_tiny_patch16_224", depth=4, num_heads=8)
    pictures = images(batch=10)
    found = most_important(model, pictures, labels, k=1, limit=0.5, batch_size=8)
    units = units_of(model, kinds=("head",))
    expected = first_order(model, pictures, labels, units)  # ten images: their mean is the reference
    torch.testing.assert_close(seen[-1], expected, atol=1e-5, rtol=0)
    exact = ablate(model, pictures, labels)
    assert found.exact_cost == pytest.approx(exact.forward_equivalents + 1, abs=1e-6)
    zero = most_important(model, pictures, labels, k=1, limit=0.5, replace="zero")
    torch.testing.assert_close(seen[-1], first_order(model, pictures, labels, units, replace="zero"), atol=1e-5, rtol=0)
    assert zero.replace == "zero"


def test_what_is_no_head_is_refused() -> None:
    with pytest.raises(InputError, match="expected heads to rank"):
        most_important(ours(), images((32, 48)), torch.zeros(2).long(), k=1, units=(Unit("mlp", 0),))
    with pytest.raises(InputError, match="k from 1 to 4 units"):
        most_important(ours(), images((32, 48)), torch.zeros(2).long(), k=9)
