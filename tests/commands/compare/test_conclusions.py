"""The first page of a comparison: the paired difference first, with its numbers; nothing found where nothing is."""

from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import Tensor

from tests.backing import unbacked
from tests.commands.map_rows import STAYING, map_check
from vitlens.analysis.answers.evaluate import Evaluation
from vitlens.analysis.failures.errors import compare_answers
from vitlens.commands.compare.conclusions import findings, verdicts
from vitlens.commands.compare.measure import measure
from vitlens.commands.compare.measure.answers import write_answers
from vitlens.commands.compare.options import CompareOptions
from vitlens.commands.compare.record import (
    DISTURBED_PAIRS,
    HARDER,
    MAP_CHECKS,
    METHODS,
    RECORD,
    DisturbedPairRow,
    HarderRow,
    MapMethodRow,
)
from vitlens.commands.registry import COMMANDS
from vitlens.commands.run.folder import RunFolder
from vitlens.commands.run.options import RunOptions
from vitlens.commands.run.publish import read
from vitlens.commands.shared.maps.rows import MapCheck
from vitlens.files import read_run
from vitlens.models.loading import untrained
from vitlens.models.saved import save
from vitlens.records import Record
from vitlens.uncertainty import mcnemar

REPORTS = Path(__file__).parents[3] / "reports"
PAIR = ("vit", "cnn")
CLASSES = tuple("abcdefghij")
CHECKS = (map_check("vit", "relevance"), map_check("cnn", "gradcam"))
N = 1000


def logits_of(labels: Tensor, wrong: Tensor, generator: torch.Generator) -> Tensor:
    """Logits of a calibrated prediction that is the label but for the wrong images."""
    shift = torch.randint(1, len(CLASSES), labels.shape, generator=generator)
    predicted = torch.where(wrong, (labels + shift) % len(CLASSES), labels)
    return 4.0 * torch.nn.functional.one_hot(predicted, len(CLASSES)).float()


def recorded(
    out: Path, errors: tuple[float, float], *, seed: int = 0, checks: tuple[MapCheck, ...] = CHECKS, n: int = N
) -> Record:
    """Two models of these shares of errors on n images, with the answers as the command writes them."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, len(CLASSES), (n,), generator=generator)
    evaluations = []
    for alias, share in zip(PAIR, errors):
        wrong = torch.rand(n, generator=generator) < share
        evaluations.append(Evaluation(alias, CLASSES, logits_of(labels, wrong, generator), labels))
    config = {
        "models": [{"alias": alias} for alias in PAIR],
        "options": asdict(CompareOptions(PAIR)),
        "data": {"name": "data", "title": "data", "part": "test", "images": n, "size": [32, 32], "classes": 10},
    }
    first, second = evaluations
    with RunFolder.create("compare", out=out, config=config) as folder:
        write_answers(folder, compare_answers(first, second), evaluations, seed=seed)
        folder.write(METHODS, [MapMethodRow("vit", "relevance"), MapMethodRow("cnn", "gradcam")])
        folder.write(MAP_CHECKS, checks)
        return Record(folder.record(), RECORD)


def test_a_vit_that_loses_to_its_cnn_comes_first(tmp_path: Path) -> None:
    """Also where a fault of the maps has the higher rank."""
    checks = (map_check("vit", "relevance", cascade=STAYING, half=0.001), CHECKS[1])
    record = recorded(tmp_path / "run", (0.16, 0.10), checks=checks)
    first, second = findings(record)
    (wrong_vit, wrong_cnn) = (
        record.metrics[f"cell/vit/cnn/only-{each}-wrong"].value * N for each in ("first", "second")
    )
    assert first.effect.value == pytest.approx((wrong_vit - wrong_cnn) * 100 / N)
    assert first.effect.value > 0
    assert first.effect.unit == "points"
    assert first.p == pytest.approx(mcnemar(round(wrong_cnn), round(wrong_vit)))
    assert first.claim.text.startswith("**cnn**")
    assert second.rank == pytest.approx(15.0)  # the highest of its kind
    assert "**relevance**" in second.claim.text
    states = {verdict.subject: verdict.state for verdict in verdicts(record)}
    assert states["accuracy of cnn"] == "pass"
    assert states["accuracy of vit"] == "fail"
    assert states["explanation of vit"] == "fail"
    assert states["explanation of cnn"] == "pass"
    assert states["calibration of vit"] in ("pass", "warn", "fail")


def test_nothing_planted_nothing_found(tmp_path: Path) -> None:
    record = recorded(tmp_path / "run", (0.1, 0.1), seed=1)
    assert record.metrics["mcnemar_p/vit/cnn"].value > 0.05
    assert findings(record) == ()


def test_models_that_agree_on_everything(tmp_path: Path) -> None:
    record = recorded(tmp_path / "run", (0.0, 0.0))
    assert findings(record) == ()
    states = [verdict.state for verdict in verdicts(record) if verdict.subject.startswith("accuracy")]
    assert states == ["pass", "pass"]


def test_few_images_are_inconclusive(tmp_path: Path) -> None:
    record = recorded(tmp_path / "run", (0.5, 0.0), n=1, checks=tuple(replace(each, images=1) for each in CHECKS))
    states = {verdict.subject: verdict.state for verdict in verdicts(record)}
    assert states["calibration of vit"] == "inconclusive"
    assert {states[f"explanation of {alias}"] for alias in PAIR} == {"inconclusive"}
    assert findings(record) == ()


def disturbed(record: Record, accuracies: tuple[float, float], *, p: float = 1e-6) -> Record:
    """The record with one level of a disturbance."""
    gap = 100 * (accuracies[0] - accuracies[1])
    rows = tuple(
        HarderRow(alias, "shuffle", 4.0, value, value - 0.03, value + 0.03, 500)
        for alias, value in zip(PAIR, accuracies)
    )
    record._tables[HARDER.name] = rows
    record._tables[DISTURBED_PAIRS.name] = (DisturbedPairRow("shuffle", 4.0, gap, gap - 4, gap + 4, 500, p, p),)
    return record


@pytest.mark.parametrize(
    ("accuracies", "p", "found"),
    [
        ((0.44, 0.29), 1e-6, True),
        ((0.44, 0.29), 0.2, False),
        ((0.11, 0.04), 1e-6, False),  # the better one is at chance
    ],
)
def test_disturbed_images(accuracies: tuple[float, float], p: float, found: bool, tmp_path: Path) -> None:
    record = disturbed(recorded(tmp_path / "run", (0.1, 0.1), seed=1), accuracies, p=p)
    named = findings(record)
    assert bool(named) == found
    if found:
        assert named[0].claim.text.startswith("On disturbed images, **vit**")
        assert named[0].effect.value == pytest.approx(15.0)


def test_findings_of_other_sections_join_and_the_difference_stays_first(tmp_path: Path) -> None:
    record = recorded(tmp_path / "run", (0.16, 0.10))
    other = replace(findings(record)[0], rank=15.0, support="two methods agree")
    assert [each.support for each in findings(record, [other, None])] == ["one method", "two methods agree"]


def run(out: Path, models: tuple[str, ...], **changes: object) -> Record:
    options = RunOptions(device="cpu", quiet=True, out=out, **changes)
    measure(CompareOptions(models, panels=1, maps=12, harder=False, run=options, data=str(out.parent / "data")))
    return read(read_run(out))


@pytest.fixture
def odd(tmp_path: Path) -> tuple[str, str]:
    """Two models and test images of one class, whose name is markup."""
    classes = ("<b>**x**</b> `1`", "[a](b)")
    place = tmp_path / "data" / "test" / classes[1]
    place.mkdir(parents=True)
    (tmp_path / "data" / "test" / "_").mkdir()
    generator = torch.Generator().manual_seed(0)
    for index in range(12):
        pixels = torch.randint(0, 255, (32, 32, 3), dtype=torch.uint8, generator=generator)
        Image.fromarray(pixels.numpy()).save(place / f"{index}.png")
    shape = {"dim": 16, "depth": 2, "heads": 2, "patch_size": [8, 8]}
    for name, preset, overrides in (("vit", "vit-mini", shape), ("cnn", "resnet20", None)):
        save(untrained(preset, classes=classes, seed=1, overrides=overrides), tmp_path / name / "model.safetensors")
    return str(tmp_path / "vit"), str(tmp_path / "cnn")


@pytest.mark.slow
def test_one_class_whose_name_is_markup(odd: tuple[str, str], tmp_path: Path) -> None:
    record = run(tmp_path / "run", odd)
    document = COMMANDS["compare"].report(record)
    assert list(unbacked(document)) == []
    assert len(document.limits) <= 5
    assert len(document.verdicts) == 6
    assert "[a](b)" not in (tmp_path / "run" / "report.md").read_text()


def test_a_model_beside_itself_and_one_image(odd: tuple[str, str], tmp_path: Path) -> None:
    record = run(tmp_path / "run", (f"a={odd[0]}", f"b={odd[0]}"), limit=1)
    document = COMMANDS["compare"].report(record)
    assert list(unbacked(document)) == []
    assert not document.findings
    states = {verdict.subject: verdict.state for verdict in document.verdicts}
    assert {states["accuracy of a"], states["accuracy of b"]} == {"pass"}
    assert {states["calibration of a"], states["explanation of a"]} == {"inconclusive"}


@pytest.mark.slow
def test_over_twenty_seeds_the_planted_difference_is_first_and_equal_models_are_not_told_apart(
    tmp_path: Path,
) -> None:
    invented = 0
    for seed in range(20):
        lost = recorded(tmp_path / f"lost-{seed}", (0.18, 0.10), seed=seed)
        assert findings(lost)[0].claim.text.startswith("**cnn**")
        equal = recorded(tmp_path / f"equal-{seed}", (0.1, 0.1), seed=seed)
        invented += bool(findings(equal))
    assert invented == 0
