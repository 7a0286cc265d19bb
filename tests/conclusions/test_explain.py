"""A model none of whose maps says anything; what is said of checked maps is in test_maps.py."""

import torch

from tests.kit.commands import ran, report
from tests.kit.first_page import states
from tests.kit.making import save
from vitlens import load


def test_uniform_maps_are_a_finding_and_fail(tmp_path, tiny_vit):
    model = load(str(tiny_vit))
    with torch.no_grad():
        model.module.head.weight.zero_()  # no pixel changes a logit
    save(model, tmp_path / "blind" / "model.safetensors")
    line = "--data digits --verify --no-counterfactuals --composites none --limit 20 --method relevance --no-stability"
    record = ran(tmp_path / "run", f"explain {tmp_path / 'blind'} {line}")
    document = report(record)
    assert list(states(document).values()) == ["fail"]
    assert [section.status for section in document.sections if section.status] == ["fail"]
    (uniform,) = (each for each in document.claims if each.question == "uniform maps")
    assert uniform.effect.value == 1.0
    assert [(row.constant, row.maps) for row in record.methods] == [(20, 20)]
    assert not list((tmp_path / "run").glob("figures/explain*"))
    assert any("uniform or not finite" in each.text for each in document.first.unknown)
