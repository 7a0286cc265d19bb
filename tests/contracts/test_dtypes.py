"""Modules in another precision than float32: the same answers up to its rounding, no refusal and no crash."""

import torch
from torch import nn

import vitlens
from tests.lens.tiny import images, shaken
from tests.models.handwritten import SIZE, SoftmaxViT
from vitlens.analysis.faithfulness.counterfactual import by_search
from vitlens.models.model import Model


def model_in(dtype: torch.dtype) -> Model:
    """One model, its weights rounded to a type."""
    module: nn.Module = shaken(lambda: SoftmaxViT(depth=3)).to(dtype)
    return vitlens.wrap(module, image_size=SIZE, mean=(0.5,) * 3, std=(0.5,) * 3)


BATCH = images(SIZE)
TARGETS = torch.tensor([1, 3])


def test_a_module_in_float64_has_the_maps_and_effects_of_float32() -> None:
    wide, single = model_in(torch.float64), model_in(torch.float32)
    found, expected = (vitlens.explain(model, BATCH, method="best", targets=TARGETS) for model in (wide, single))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-3)
    seen, same = vitlens.look(wide, BATCH), vitlens.look(single, BATCH)
    assert seen.names == same.names
    torch.testing.assert_close(seen.maps, same.maps, atol=1e-4, rtol=1e-3)
    torch.testing.assert_close(seen.delta_loss, same.delta_loss, atol=1e-4, rtol=1e-3)
    assert torch.equal(by_search(wide, BATCH).removed, by_search(single, BATCH).removed)


def test_contributions_of_a_module_in_bf16_sum_to_its_logit_up_to_its_rounding() -> None:
    model = model_in(torch.bfloat16)
    found = vitlens.direct_logit_attribution(model, BATCH, targets=TARGETS)
    with torch.no_grad():
        largest = float(model(BATCH).abs().max())
    assert (found.total() - found.logit).abs().max() <= 4 * torch.finfo(torch.bfloat16).eps * max(1.0, largest)
