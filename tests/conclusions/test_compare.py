"""The first page of a comparison: the paired difference first, with its numbers; nothing found where nothing is."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.kit.map_rows import STAYING, checks
from vitlens.analysis.evaluation.evaluate import Evaluation
from vitlens.analysis.failures.compare import compare_evaluations
from vitlens.commands.compare.measure import answered
from vitlens.commands.compare.record import AgreementRow, CompareRecord, DisturbedPairRow, HarderRow, MapRow
from vitlens.commands.compare.report import REPORT
from vitlens.commands.shared.maps.record import CENTRE, RANDOM, MapCheckRow
from vitlens.record import Config, Data, ModelEntry
from vitlens.report.claims import Claim, shown
from vitlens.uncertainty import Estimate, mcnemar

PAIR = ("vit", "cnn")
CLASSES = tuple("abcdefghij")
VIT, CNN = checks("vit", "relevance"), checks("cnn", "gradcam")
CHECKS = (*VIT, *CNN)
N = 1000


def logits_of(labels: Tensor, wrong: Tensor, generator: torch.Generator) -> Tensor:
    """Logits of a calibrated prediction that is the label but for the wrong images."""
    shift = torch.randint(1, len(CLASSES), labels.shape, generator=generator)
    predicted = torch.where(wrong, (labels + shift) % len(CLASSES), labels)
    return 4.0 * torch.nn.functional.one_hot(predicted, len(CLASSES)).float()


def around(value: float, half: float = 0.01, unit: str = "fraction") -> Estimate:
    return Estimate(value, value - half, value + half, 200, unit)


def recorded(
    errors: tuple[float, float],
    *,
    seed: int = 0,
    map_checks: tuple[MapCheckRow, ...] = CHECKS,
    methods: tuple[str, str] = ("relevance", "gradcam"),
    n: int = N,
) -> CompareRecord:
    """Two models of these shares of errors on n images, with the rows that the command measures."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, len(CLASSES), (n,), generator=generator)
    evaluations = []
    for alias, share in zip(PAIR, errors):
        wrong = torch.rand(n, generator=generator) < share
        evaluations.append(Evaluation(alias, CLASSES, logits_of(labels, wrong, generator), labels))
    first, second = evaluations
    return replace(
        answered(compare_evaluations(first, second), seed),
        config=Config(models=tuple(map(ModelEntry, PAIR)), data=Data(title="data", images=n, classes=10)),
        methods=tuple(MapRow(alias, name, around(1.0), around(0.2)) for alias, name in zip(PAIR, methods)),
        map_checks=map_checks,
        agreement=(AgreementRow(*PAIR, around(0.3, unit=""), around(0.4), around(0.5), around(-0.2)),),
    )


def found(record: CompareRecord) -> list[Claim]:
    """The claims of the first page but for those that no difference is shown."""
    return [claim for claim in shown(REPORT.claims(record), 9) if claim.question != "no difference"]


def states(record: CompareRecord) -> dict[str, str]:
    return {f"{claim.question} of {claim.subject}": claim.state for claim in REPORT.claims(record) if claim.state}


def test_a_vit_that_loses_to_its_cnn_comes_first():
    """Also where a fault of the maps is found."""
    record = recorded((0.20, 0.10), map_checks=(*checks("vit", "relevance", cascade=STAYING), *CNN))
    first, second = found(record)
    wrong_vit, wrong_cnn = (record.metric(f"cell/vit/cnn/only-{each}-wrong").value * N for each in ("first", "second"))
    assert first.effect.value == pytest.approx((wrong_vit - wrong_cnn) * 100 / N)
    assert first.effect.value > 0
    assert first.effect.unit == "points"
    assert first.p == pytest.approx(mcnemar(round(wrong_cnn), round(wrong_vit)))
    assert first.says.startswith("**cnn**")
    assert REPORT(record).title.startswith("cnn classifies more images correctly")
    assert (second.question, second.subject) == ("explanation", "vit")
    judged = states(record)
    assert judged["accuracy of cnn"] == "pass"
    assert judged["accuracy of vit"] == "fail"
    assert judged["explanation of vit"] == "fail"
    assert judged["explanation of cnn"] == "pass"
    assert judged["calibration of vit"] in ("pass", "warn", "fail")


def test_nothing_planted_nothing_found():
    record = recorded((0.1, 0.1), seed=1)
    assert record.metric("mcnemar_p/vit/cnn").value > 0.05
    assert not found(record)
    assert {states(record)[f"accuracy of {alias}"] for alias in PAIR} == {"pass", "inconclusive"}
    assert "no significant lead" in REPORT(record).title


def test_models_that_agree_on_everything():
    record = recorded((0.0, 0.0))
    assert not found(record)
    assert {states(record)[f"accuracy of {alias}"] for alias in PAIR} == {"pass"}


def test_few_images_are_inconclusive():
    record = recorded((0.5, 0.0), n=10, map_checks=(*checks("vit", "relevance", n=1), *checks("cnn", "gradcam", n=1)))
    assert set(states(record).values()) == {"inconclusive"}
    assert not shown(REPORT.claims(record))


@pytest.mark.parametrize(
    ("accuracies", "better", "clear"),
    [
        ((0.44, 0.29), "vit", True),
        ((0.44, 0.29), "undecided", False),
        ((0.11, 0.04), "vit", False),  # the better one is at chance
    ],
)
def test_disturbed_images(accuracies: tuple[float, float], better: str, clear: bool):
    gap = 100 * (accuracies[0] - accuracies[1])
    harder = tuple(
        HarderRow(alias, "shuffle", 4.0, Estimate(value, value - 0.03, value + 0.03, 500), 0.1)
        for alias, value in zip(PAIR, accuracies)
    )
    apart = Estimate(gap, gap - 4, gap + 4, 500, "points")
    row = DisturbedPairRow(
        *PAIR, 0, 0, 0, 0, p=1e-6, p_holm=1e-6, difference=apart, better=better, kind="shuffle", level=4.0
    )
    record = replace(recorded((0.1, 0.1), seed=1), robustness=harder, disturbed_pairs=(row,))
    named = found(record)
    assert bool(named) == clear
    if clear:
        assert (named[0].question, named[0].subject) == ("disturbed images", "vit")
        assert named[0].effect.value == pytest.approx(15.0)


def test_maps_by_two_methods_are_compared_only_where_both_are_verified():
    def compares(**how: object) -> bool:
        sections = {section.title: section for section in REPORT(recorded((0.1, 0.1), **how)).sections}
        text = " ".join(each.text for each in sections["Do both models mark the same places?"].sentences)
        return "**vit** are more concentrated" in text

    unverified = (*VIT, *checks("cnn", "gradcam", over={CENTRE: 0.0}))
    same = (*checks("vit", "saliency", over={RANDOM: 0.0}), *checks("cnn", "saliency"))
    assert compares()
    assert not compares(map_checks=unverified)
    assert compares(methods=("saliency", "saliency"), map_checks=same)


@pytest.mark.slow
def test_over_twenty_seeds_the_planted_difference_is_first_and_equal_models_are_not_told_apart():
    for seed in range(20):
        assert found(recorded((0.18, 0.10), seed=seed))[0].says.startswith("**cnn**")
        assert not found(recorded((0.1, 0.1), seed=seed))
