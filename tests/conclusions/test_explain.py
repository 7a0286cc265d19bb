"""The first page of an explanation: planted faults are named, and what was not checked is not judged."""

import gc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.kit.contradictions import contradictions
from tests.kit.explained import explained, report
from tests.kit.first_page import clear_effects, states
from tests.kit.making import digits, save
from vitlens import Model, load
from vitlens.analysis.faithfulness.league import Settings, league
from vitlens.analysis.faithfulness.localisation import random_maps
from vitlens.attribution.registry import ATTRIBUTIONS
from vitlens.commands.explain.record import ExplainRecord
from vitlens.commands.shared.maps.measure import CheckedMaps
from vitlens.commands.shared.maps.record import WEIGHTS, judged_maps
from vitlens.commands.shared.maps.report import map_claims

SHORT = Settings(steps=4, counterfactuals=False)
LINE = "--data digits --verify --no-counterfactuals"


def edges(_model: Model, images: Tensor, _targets: Tensor) -> Tensor:
    """An attribution that shows the edges of the image and knows no model."""
    padded = torch.nn.functional.pad(images.mean(1), (0, 1, 0, 1))
    return (padded[:, 1:, 1:] - padded[:, :-1, :-1]).abs()


def noise_of(seed: int) -> Callable[[Model, Tensor, Tensor], Tensor]:
    """A method of noise that is another one for other weights of the head."""

    def maps(model: Model, images: Tensor, _targets: Tensor) -> Tensor:
        key = int(1e6 * float(model.module.get_parameter("head.weight")[0, 0].detach().abs()))
        return random_maps(len(images), (8, 8), seed=seed + 10_000 * key)

    return maps


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory, tiny_vit: Path) -> ExplainRecord:
    """A run of an untrained ViT with a method that ignores the weights, registered as an attribution."""
    entry = replace(
        ATTRIBUTIONS["saliency"], name="edges", title="edges", function=f"{__name__}:edges", preference=None
    )
    (known,) = (each for each in gc.get_referents(ATTRIBUTIONS) if isinstance(each, dict))  # behind the read-only view
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(known, entry.name, entry)
        patch.setattr("vitlens.commands.run.flags.one_of", lambda _option, text, _known: tuple(text.split(",")))
        out = tmp_path_factory.mktemp("planted") / "run"
        return explained(out, f"{LINE} --limit 20 --method relevance,edges", tiny_vit)


def test_a_method_that_ignores_the_weights_fails_the_check_and_is_named(planted: ExplainRecord) -> None:
    assert [row.similarity and row.similarity.value for row in planted.stages if row.method == "edges"] == [
        pytest.approx(1.0)
    ] * len({row.stage for row in planted.stages})
    (row,) = (row for row in planted.checks if (row.method, row.check) == ("edges", WEIGHTS))
    assert row.state == "fail"
    (claim,) = (each for each in report(planted).claims if each.question == "maps that ignore the weights")
    assert claim.is_shown
    assert claim.effect is not None
    assert (claim.effect.value, claim.effect.n) == (pytest.approx(1.0), 20)
    assert "**edges**" in claim.says
    assert "relevance" not in claim.says
    judged = {each.method: each.fault for each in judged_maps(planted.checks)}
    assert judged["edges"] == "ignores the weights"


def test_one_claim_on_the_maps_and_no_contradiction(planted: ExplainRecord) -> None:
    document = report(planted)
    assert list(contradictions(document.claims)) == []
    (claim,) = (each for each in document.claims if each.question == "maps")
    assert document.title == claim.title
    assert list(states(document).values()) == [claim.state]
    assert document.first.glance is not None
    assert {row[1] for row in document.first.glance.rows} == {"relevance", "edges"}
    statuses = [section.status for section in document.sections if section.status]
    assert statuses == [claim.state]


@pytest.mark.parametrize("limit", [1, 12])
def test_few_images_are_inconclusive(tiny_vit: Path, tmp_path: Path, limit: int) -> None:
    line = f"{LINE} --limit {limit} --method relevance --composites none"
    document = report(explained(tmp_path / "run", line, tiny_vit))
    assert list(states(document).values()) == ["inconclusive"]
    assert not clear_effects(document)
    assert document.first.answer == ()
    assert any("too few" in each.text for each in document.first.unknown)


def test_uniform_maps_are_a_finding_and_fail(tmp_path: Path, tiny_vit: Path) -> None:
    model = load(str(tiny_vit))
    with torch.no_grad():
        model.module.head.weight.zero_()  # no pixel changes a logit
    save(model, tmp_path / "blind" / "model.safetensors")
    line = f"{LINE} --limit 20 --method relevance --composites none --no-stability"
    record = explained(tmp_path / "run", line, tmp_path / "blind")
    document = report(record)
    assert list(states(document).values()) == ["fail"]
    (uniform,) = (each for each in document.claims if each.question == "uniform maps")
    assert uniform.effect is not None
    assert uniform.effect.value == 1.0
    assert [(row.constant, row.maps) for row in record.methods] == [(20, 20)]
    assert not list((tmp_path / "run").glob("figures/explain*"))
    assert any("uniform or not finite" in each.text for each in document.first.unknown)
    (judged,) = judged_maps(record.checks)
    assert judged.fault == "uniform"
    assert "all its maps are uniform" in judged.lacks


@pytest.mark.slow
def test_over_twenty_seeds_noise_is_never_believed_and_edges_always_fail() -> None:
    """Eight methods of noise that depends on the weights, and edges: the best of many must not pass by chance."""
    model, split = load("vit-digits"), digits("test").limit(24)
    (batch,) = split.batches(24)
    targets = model(batch.images).argmax(-1)
    for seed in range(20):
        noise = {f"noise-{index}": noise_of(1000 * (seed + 1) + index) for index in range(8)}
        settings, functions = replace(SHORT, seed=seed), {**noise, "edges": edges}
        results = league(model, batch.images, targets, functions, settings=settings)
        found = CheckedMaps(model, batch.images, targets, functions, results, settings, quiet=True)
        claims = {each.question: each for each in map_claims("vit", list(found.rows()), images=24)}
        assert claims["maps"].state != "pass"
        assert "**edges**" in claims["maps that ignore the weights"].says
        assert "noise" not in claims["maps that ignore the weights"].says
