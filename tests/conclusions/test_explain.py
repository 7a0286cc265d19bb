"""The first page of an explanation: planted faults are named, and what was not checked is not judged."""

import gc
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.kit.commands import report
from tests.kit.contradictions import contradictions
from tests.kit.explained import explained
from tests.kit.first_page import clear_effects, states
from tests.kit.making import save
from vitlens import Model, load
from vitlens.attribution.registry import ATTRIBUTIONS
from vitlens.commands.explain.record import ExplainRecord

LINE = "--data digits --verify --no-counterfactuals --composites none"


def edges(_model: Model, images: Tensor, _targets: Tensor) -> Tensor:
    """An attribution that shows the edges of the image and knows no model."""
    padded = torch.nn.functional.pad(images.mean(1), (0, 1, 0, 1))
    return (padded[:, 1:, 1:] - padded[:, :-1, :-1]).abs()


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory, tiny_vit: Path) -> ExplainRecord:
    """A run of an untrained ViT with a method that ignores the weights, registered as an attribution."""
    own = {"name": "edges", "title": "edges", "function": f"{__name__}:edges", "preference": None}
    (known,) = (each for each in gc.get_referents(ATTRIBUTIONS) if isinstance(each, dict))  # behind the read-only view
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(known, "edges", replace(ATTRIBUTIONS["saliency"], **own))
        patch.setattr("vitlens.commands.run.flags.one_of", lambda _option, text, _known: tuple(text.split(",")))
        out = tmp_path_factory.mktemp("planted") / "run"
        return explained(out, f"{LINE} --limit 20 --method relevance,edges", tiny_vit)


def test_a_method_that_ignores_the_weights_fails_the_check_and_is_named(planted: ExplainRecord) -> None:
    kept = [row.similarity.value for row in planted.stages if row.method == "edges"]
    assert kept == [pytest.approx(1.0)] * len({row.stage for row in planted.stages})
    (row,) = (row for row in planted.checks if (row.method, row.check) == ("edges", "weights"))
    assert (row.state, row.lacks) == ("fail", ("ignores the weights",))
    (claim,) = (each for each in report(planted).claims if each.question == "maps that ignore the weights")
    assert claim.is_shown
    assert (claim.effect.value, claim.effect.n) == (pytest.approx(1.0), 20)
    assert "**edges**" in claim.says
    assert "relevance" not in claim.says


def test_one_claim_on_the_maps_and_no_contradiction(planted: ExplainRecord) -> None:
    document = report(planted)
    assert list(contradictions(document.claims)) == []
    (claim,) = (each for each in document.claims if each.question == "maps")
    assert document.title == claim.title
    assert list(states(document).values()) == [claim.state]
    assert {row[1] for row in document.first.glance.rows} == {"relevance", "edges"}
    assert [section.status for section in document.sections if section.status] == [claim.state]


@pytest.mark.parametrize("limit", [1, 12])
def test_few_images_are_inconclusive(planted: ExplainRecord, limit: int) -> None:
    data = replace(planted.config.data, images=limit)
    document = report(replace(planted, config=replace(planted.config, data=data)))
    assert list(states(document).values()) == ["inconclusive"]
    assert not clear_effects(document)
    assert document.first.answer == ()
    assert any("too few" in each.text for each in document.first.unknown)


def test_uniform_maps_are_a_finding_and_fail(tmp_path: Path, tiny_vit: Path) -> None:
    model = load(str(tiny_vit))
    with torch.no_grad():
        model.module.head.weight.zero_()  # no pixel changes a logit
    save(model, tmp_path / "blind" / "model.safetensors")
    record = explained(tmp_path / "run", f"{LINE} --limit 20 --method relevance --no-stability", tmp_path / "blind")
    document = report(record)
    assert list(states(document).values()) == ["fail"]
    (uniform,) = (each for each in document.claims if each.question == "uniform maps")
    assert uniform.effect.value == 1.0
    assert [(row.constant, row.maps) for row in record.methods] == [(20, 20)]
    assert not list((tmp_path / "run").glob("figures/explain*"))
    assert any("uniform or not finite" in each.text for each in document.first.unknown)
