"""The first page of an explanation: planted faults are named first, and what was not checked is not judged."""

import gc
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.backing import unbacked
from tests.commands.map_rows import map_check
from vitlens.analysis.faithfulness.league import Settings, league, random_maps
from vitlens.analysis.faithfulness.randomisation import Explain
from vitlens.attribution.registry import ATTRIBUTIONS
from vitlens.commands.explain.conclusions import checks_of, findings, verdicts
from vitlens.commands.explain.measure import measure
from vitlens.commands.explain.options import ExplainOptions
from vitlens.commands.explain.record import LEAGUE
from vitlens.commands.explain.report.league import leagues
from vitlens.commands.explain.report.trust import trust_section
from vitlens.commands.registry import COMMANDS
from vitlens.commands.run.options import RunOptions
from vitlens.commands.run.publish import read, read_folder
from vitlens.commands.shared.maps.findings import map_findings
from vitlens.commands.shared.maps.judged import explanation_verdict, judged_maps
from vitlens.commands.shared.maps.measured import map_checks
from vitlens.data.digits import digits
from vitlens.files import read_run
from vitlens.models.loading import load
from vitlens.models.model import Model
from vitlens.models.saved import save
from vitlens.records import Record
from vitlens.report.findings import ranked

REPORTS = Path(__file__).parents[3] / "reports"
FOLDERS = sorted(REPORTS.glob("explain-*"))
SHORT = Settings(steps=4, road=False, counterfactuals=False)


def edges(_model: Model, images: Tensor, _targets: Tensor) -> Tensor:
    """An attribution that shows the edges of the image and knows no model."""
    padded = torch.nn.functional.pad(images.mean(1), (0, 1, 0, 1))
    return (padded[:, 1:, 1:] - padded[:, :-1, :-1]).abs()


def noise_of(seed: int) -> Explain:
    """A method of noise that is another one for other weights of the head."""

    def maps(model: Model, images: Tensor, _targets: Tensor) -> Tensor:
        key = int(1e6 * float(model.module.get_parameter("head.weight")[0, 0].detach().abs()))
        return random_maps(len(images), (8, 8), seed=seed + 10_000 * key)

    return maps


def run(out: Path, model: Path | str, *, limit: int = 12, **changes: object) -> Record:
    options = RunOptions(device="cpu", quiet=True, limit=limit, out=out)
    measure(ExplainOptions((str(model),), data="digits", counterfactuals=False, run=options, **changes))  # type: ignore[arg-type]
    return read(read_run(out))


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory, tiny_vit: Path) -> Record:
    """A run of an untrained ViT with a method that ignores the weights, registered as an attribution."""
    entry = replace(
        ATTRIBUTIONS["saliency"], name="edges", title="edges", function=f"{__name__}:edges", preference=None
    )
    (known,) = (each for each in gc.get_referents(ATTRIBUTIONS) if isinstance(each, dict))  # behind the read-only view
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(known, entry.name, entry)
        return run(tmp_path_factory.mktemp("planted") / "run", tiny_vit, method=("relevance", "edges"), verify=True)


def test_a_method_that_ignores_the_weights_fails_the_check_and_is_named(planted: Record) -> None:
    (row,) = (row for row in planted.rows(LEAGUE) if row.method == "edges")
    assert row.check is not None
    assert row.check.cascade is not None
    assert (row.check.cascade.state, row.flagged) == ("fails", True)
    assert all(stage.similarity == pytest.approx(1.0) for stage in row.check.cascade.stages)
    first = ranked(findings(planted))[0]
    assert "**edges**" in first.claim.text
    assert first.effect.value == pytest.approx(1.0)
    assert row.check in first.claim.rows
    assert "relevance" not in first.claim.text


def test_what_is_above_the_centre_and_was_not_decided_is_not_called_below_it(planted: Record) -> None:
    checks = [
        map_check(method="occlusion", over_centre=-0.1),
        map_check(method="best", over_centre=0.3, randomised=5),
    ]
    league = replace(next(leagues(planted)), judged=judged_maps(checks))
    assert [each.state for each in league.judged] == ["warn", "inconclusive"]
    said = " ".join(sentence.text for sentence in trust_section(league).sentences)
    assert "none that passes the randomisation check" in said
    assert "best exceeds both baselines" in said


def test_every_sentence_of_a_run_is_backed(planted: Record) -> None:
    document = COMMANDS["explain"].report(planted)
    assert list(unbacked(document)) == []
    assert document.sections[0].title == "Which map to trust"
    assert len(document.limits) <= 5


def test_the_whole_cascade_of_rollout_of_deit_counts() -> None:
    record = read_folder(REPORTS / "explain-deit-tiny")
    first = ranked(findings(record))[0]
    assert "**rollout**" in first.claim.text
    assert first.effect.value == pytest.approx(0.918, abs=0.001)
    assert first.effect.n == 32
    states = {check.method: check.cascade and check.cascade.state for check in checks_of(record, "deit-tiny")}
    assert {name for name, state in states.items() if state == "fails"} == {"rollout", "saliency"}
    assert [verdict.state for verdict in verdicts(record)] == ["pass"]


def test_without_checks_nothing_is_judged(tiny_vit: Path, pictures: Path, tmp_path: Path) -> None:
    """No labels, three images."""
    options = RunOptions(device="cpu", quiet=True, out=tmp_path / "run")
    measure(ExplainOptions((str(tiny_vit),), images=(str(pictures),), method=("gradcam",), run=options))
    record = read(read_run(tmp_path / "run"))
    document = COMMANDS["explain"].report(record)
    assert [(each.state, each.value) for each in document.verdicts] == [("not tested", None)]
    assert "--verify" in document.verdicts[0].because
    assert not document.findings
    assert list(unbacked(document)) == []


def test_one_image_is_inconclusive(tiny_vit: Path, tmp_path: Path) -> None:
    record = run(tmp_path / "run", tiny_vit, limit=1, method=("relevance",), verify=True)
    document = COMMANDS["explain"].report(record)
    assert [each.state for each in document.verdicts] == ["inconclusive"]
    assert not document.findings
    assert list(unbacked(document)) == []


def test_uniform_maps_are_a_finding_and_fail(tmp_path: Path, tiny_vit: Path) -> None:
    model = load(str(tiny_vit))
    with torch.no_grad():
        model.module.head.weight.zero_()  # no pixel changes a logit
    save(model, tmp_path / "blind" / "model.safetensors")
    record = run(
        tmp_path / "run", tmp_path / "blind", method=("relevance",), verify=True, composites=("none",), stability=False
    )
    document = COMMANDS["explain"].report(record)
    assert [each.state for each in document.verdicts] == ["fail"]
    assert document.findings[0].effect.value == 1.0
    (check,) = checks_of(record, "blind")
    assert check.cascade is not None
    assert (check.cascade.state, check.cascade.obstacle) == ("inconclusive", "uniform maps")
    assert list(unbacked(document)) == []


@pytest.mark.slow
def test_over_twenty_seeds_noise_is_never_trusted_and_edges_always_fail() -> None:
    """Eight methods of noise that depends on the weights, and edges: the best of many must not pass by chance."""
    model, split = load("vit-digits"), digits("test").limit(24)
    (batch,) = split.batches(24)
    targets = model(batch.images).argmax(-1)
    for seed in range(20):
        noise = {f"noise-{index}": noise_of(1000 * (seed + 1) + index) for index in range(8)}
        settings = replace(SHORT, seed=seed)
        checked = league(model, batch.images, targets, {**noise, "edges": edges}, settings=settings)
        checks = tuple(map_checks(checked, "vit", seed=seed).values())
        assert explanation_verdict("vit", checks, untested="").state != "pass"
        named = " ".join(found.claim.text for found in ranked(map_findings("vit", checks)))
        assert "**edges** fails" in named
        assert "noise" not in named.partition("rank correlation")[0]
