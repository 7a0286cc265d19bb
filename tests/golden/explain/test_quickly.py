"""Methods inside quick passes: the same maps to rounding, of every method and of both bundled models."""

import pytest
import torch

from tests.lens.tiny import images
from vitlens import explain, load
from vitlens.attribution.explain import methods_for
from vitlens.attribution.registry import ATTRIBUTIONS
from vitlens.commands.explain.measure import quickly
from vitlens.lens import quick_passes

MODELS = {name: load(name) for name in ("vit-digits", "cnn-digits")}
# these take seconds, and by default are tried with the CNN alone; the ViT's quick layers are met by 20 other methods
BY_HAND = [("vit-digits", method) for method in ("kernel-shap", "scorecam", "ablationcam", "occlusion")]
CASES = [
    pytest.param(name, method, marks=pytest.mark.slow if (name, method) in BY_HAND else ())
    for name, model in MODELS.items()
    for method in methods_for(model)
]


@pytest.mark.parametrize(("name", "method"), CASES)
def test_the_same_maps(name, method, monkeypatch):
    model, batch, targets = MODELS[name], images((32, 32), batch=3), torch.tensor([1, 2, 3])
    options = {
        "rise": {"masks": 16},
        "kernel-shap": {"coalitions": 3 * 64},
        "smoothgrad": {"samples": 3},
        "integrated-gradients": {"steps": 4},
    }.get(method, {})
    plain = explain(model, batch, targets=targets, method=method, **options)
    monkeypatch.setattr(quick_passes, "quick_batch_size", lambda _model: 2)
    with quickly(model, method):
        found = explain(model, batch, targets=targets, method=method, **options)
    scale = float(plain.abs().max())
    tolerance = 1e-3 if ATTRIBUTIONS[method].gradients else 1e-4  # a ReLU near 0 is active in only one of the two
    torch.testing.assert_close(found, plain, atol=tolerance * scale, rtol=0)
