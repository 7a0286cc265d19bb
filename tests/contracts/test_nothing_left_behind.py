"""After an observation the model is as it was: after success, after an exception anywhere, and when nested."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack

from tests.lens.tiny import images, ours, timm_specimen, torchvision_swin, torchvision_vit
from vitlens.analysis.attack_inside import cosines
from vitlens.analysis.attention import attention, attention_maps
from vitlens.analysis.features import features
from vitlens.analysis.flops import flops_by_part
from vitlens.analysis.memory import inference_peak, saved_for_training
from vitlens.analysis.profile import profile
from vitlens.analysis.relevance import relevance
from vitlens.analysis.rollout import rollout
from vitlens.analysis.stats import statistics
from vitlens.analysis.views import query_maps
from vitlens.attacks.attack import attack
from vitlens.lens.call import AttentionCall
from vitlens.lens.intervened import intervened
from vitlens.lens.intervention import (
    BlockRemoved,
    HeadReplaced,
    Intervention,
    KnockedOut,
    MLPReplaced,
    StreamPatched,
)
from vitlens.lens.observe import capture, observe, survey
from vitlens.lens.replay import replaying
from vitlens.lens.tap import tapped
from vitlens.models.specimen import Specimen

MODELS: dict[str, Callable[[], Specimen]] = {
    "ours": ours,
    "timm": lambda: timm_specimen("deit_tiny_distilled_patch16_224"),
    "swin": torchvision_swin,
    "multihead": torchvision_vit,
}


class BrokenError(Exception):
    """Raised in the middle of a forward pass."""


def state_of(specimen: Specimen) -> list[object]:
    """Everything that an observation might forget to put back."""
    hooks = [
        (name, len(module._forward_hooks), len(module._forward_pre_hooks), len(module._backward_hooks), module.training)
        for name, module in specimen.named_modules()
    ]
    parameters = [
        (name, value.requires_grad, value.grad is None, value.stride()) for name, value in specimen.named_parameters()
    ]
    values = [value.sum().item() for value in specimen.state_dict().values() if value.is_floating_point()]
    forwards = [name for name, module in specimen.named_modules() if "forward" in vars(module)]
    return [hooks, parameters, values, forwards, torch.is_grad_enabled(), len(_get_current_function_mode_stack())]


@pytest.fixture(params=MODELS)
def specimen(request: pytest.FixtureRequest) -> Specimen:
    """A model in a state worth keeping: one block in training mode, some parameters with gradients asked for."""
    made = MODELS[request.param]()
    for number, (_, module) in enumerate(made.named_modules()):
        if number % 3 == 0 and not any(True for _ in module.children()):
            module.train()
    for number, parameter in enumerate(made.parameters()):
        parameter.requires_grad_(number % 2 == 0)
    return made


USES: dict[str, Callable[[Specimen, Tensor], object]] = {
    "observe": lambda specimen, batch: observe(specimen, batch, lambda call: call.weights()),
    "explicit": lambda specimen, batch: observe(specimen, batch, lambda call: call.weights(), explicit=True),
    "capture": capture,
    "attention": attention,
    "attention_maps": attention_maps,
    "graph": lambda specimen, batch: observe(specimen, batch, lambda call: call.output, graph=True),
    "relevance": relevance,
    "statistics": statistics,
    "features": features,
    "query_maps": lambda specimen, batch: query_maps(specimen, batch, query=(0, 0)),
    "cosines": lambda specimen, batch: cosines(specimen, batch, {"other": batch.flip(0)}),
    "attack": lambda specimen, batch: attack(specimen, batch, "predicted", epsilon=0.1, steps=2),
    "flops": lambda specimen, _batch: flops_by_part(specimen),
    "saved_for_training": saved_for_training,
    "inference_peak": inference_peak,
    "profile": lambda specimen, _batch: profile(specimen, batch_sizes=[1]),
}


@pytest.mark.parametrize("use", USES)
def test_after_success(specimen, use):
    before = state_of(specimen)
    batch = images(specimen.input_size)
    USES[use](specimen, batch)
    assert state_of(specimen) == before
    assert torch.equal(batch, images(specimen.input_size))


def test_after_rollout():
    specimen = ours()
    before = state_of(specimen)
    rollout(specimen, images(specimen.input_size))
    assert state_of(specimen) == before


def test_gradients_of_weights_leave_none_on_parameters(specimen):
    captured = capture(specimen, images(specimen.input_size), explicit=True)
    before = state_of(specimen)
    torch.autograd.grad(captured.logits.sum(), captured.layers)
    assert state_of(specimen) == before


@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("surveyed", [False, True])
def test_after_an_exception_in_the_reducer(specimen, explicit, surveyed):
    batch, before = images(specimen.input_size), state_of(specimen)
    if surveyed:
        survey(specimen, batch)

    def reducer(call: AttentionCall) -> None:
        if call.site.layer == 1:
            raise BrokenError

    with pytest.raises(BrokenError):
        observe(specimen, batch, reducer, explicit=explicit)
    assert state_of(specimen) == before


@pytest.mark.parametrize("surveyed", [False, True])
def test_after_an_exception_in_the_model(specimen, surveyed):
    batch = images(specimen.input_size)
    if surveyed:
        survey(specimen, batch)
    last = [module for module in specimen.model.modules() if isinstance(module, nn.Linear)][-1]

    def breaks(_module: nn.Module, _inputs: object) -> None:
        raise BrokenError

    handle = last.register_forward_pre_hook(breaks)
    before = state_of(specimen)
    with pytest.raises(BrokenError):
        observe(specimen, batch, lambda _call: None)
    assert state_of(specimen) == before
    handle.remove()
    captured = capture(specimen, batch)  # and it works again
    assert captured.layers[0].shape[0] % len(batch) == 0


@pytest.mark.parametrize("explicit", [False, True])
def test_nested_observations_both_see_everything(specimen, explicit):
    batch = images(specimen.input_size)
    survey(specimen, batch)
    before = state_of(specimen)
    alone = capture(specimen, batch)
    outer: list[tuple[str, Tensor]] = []
    with tapped(specimen.model, lambda call: outer.append((call.site.module, call.weights()))):
        inner = capture(specimen, batch, explicit=explicit)
        torch.testing.assert_close(inner.logits.detach(), alone.logits, atol=1e-5, rtol=1e-5)
    assert [name for name, _ in outer] == [site.module for site in inner.sites] == [site.module for site in alone.sites]
    for (_, seen), also, expected in zip(outer, inner.layers, alone.layers):
        torch.testing.assert_close(seen, expected, atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(also.detach(), expected, atol=1e-6, rtol=1e-5)
    assert state_of(specimen) == before


def test_the_inner_of_two_observations_undoes_its_own_alone():
    specimen, batch = ours(), images((32, 48))
    seen: list[str] = []
    with tapped(specimen.model, lambda call: seen.append(call.site.module)):
        with pytest.raises(BrokenError), tapped(specimen.model, lambda _call: None):
            raise BrokenError
        specimen(batch)
    assert seen == ["blocks.0.attn", "blocks.1.attn"]


def test_another_model_can_be_observed_from_within_a_reducer():
    outside, inside = ours(), timm_specimen("vit_tiny_patch16_224")
    layers: list[int] = []
    observe(outside, images((32, 48)), lambda _call: layers.append(len(capture(inside, images()).layers)))
    assert layers == [2, 2]


def test_a_failed_survey_is_not_remembered():
    specimen, batch = ours(), images((32, 48))
    before = state_of(specimen)
    handle = specimen.model.head.register_forward_pre_hook(lambda _module, _inputs: (_ for _ in ()).throw(BrokenError))
    with pytest.raises(BrokenError):
        survey(specimen, batch)
    handle.remove()
    assert len(survey(specimen, batch)) == 2
    assert state_of(specimen) == before


PATCHED = StreamPatched(1, (0,))
CHANGES: tuple[Intervention, ...] = (
    HeadReplaced(0, 1),
    KnockedOut(1, (0,), (1,)),
    MLPReplaced(0),
    BlockRemoved(1),
    PATCHED,
)
DATA = {PATCHED: torch.zeros(())}


def run_replay(specimen: Specimen, batch: Tensor) -> None:
    with replaying(specimen, batch, chunk=2) as replay:  # one intervention a forward
        replay.run([*CHANGES, CHANGES], replacements=DATA)


def run_nested(specimen: Specimen, batch: Tensor) -> None:
    with intervened(specimen, CHANGES[:2]), intervened(specimen, CHANGES, replacements=DATA):
        specimen(batch)
        with replaying(specimen, batch, budget=0) as replay:
            replay.run(CHANGES, replacements=DATA)
        capture(specimen, batch)


INTERVENING: dict[str, Callable[[Specimen, Tensor], None]] = {"replay": run_replay, "nested": run_nested}


@pytest.mark.parametrize("use", INTERVENING)
def test_interventions_and_replays_leave_nothing(specimen, use):
    before, batch = state_of(specimen), images(specimen.input_size)
    plain = capture(specimen, batch).logits
    INTERVENING[use](specimen, batch)
    assert state_of(specimen) == before
    assert torch.equal(capture(specimen, batch).logits, plain)
    assert torch.equal(batch, images(specimen.input_size))


class Break:
    """A pre-hook that raises at its n-th call."""

    def __init__(self, error: type[BaseException], after: int) -> None:
        self.error, self.left = error, after

    def __call__(self, _module: nn.Module, _inputs: object) -> None:
        self.left -= 1
        if self.left == 0:
            raise self.error


@pytest.mark.parametrize("error", [BrokenError, KeyboardInterrupt])
@pytest.mark.parametrize("after", [1, 2, 5])
@pytest.mark.parametrize("use", INTERVENING)
def test_interventions_and_replays_leave_nothing_after_an_exception(specimen, use, after, error):
    """Raised in the middle of the last MLP, at some pass or other, where every override is in force."""
    batch = images(specimen.input_size)
    run_replay(specimen, batch)  # the structure is read: what follows fails at work
    inner = [module for name, module in specimen.named_modules() if ".mlp." in name and isinstance(module, nn.Linear)]
    handle = inner[-1].register_forward_pre_hook(Break(error, after))
    before = state_of(specimen)
    with pytest.raises(error):
        INTERVENING[use](specimen, batch)
    assert state_of(specimen) == before
    handle.remove()
    INTERVENING[use](specimen, batch)  # and it works again


def test_the_inner_of_two_interventions_undoes_its_own_alone():
    specimen, batch = ours(), images((32, 48))
    with torch.no_grad(), intervened(specimen, HeadReplaced(0, 0)):
        outer = specimen(batch)
        with pytest.raises(BrokenError), intervened(specimen, [HeadReplaced(0, 0), HeadReplaced(0, 1)]):
            raise BrokenError
        assert torch.equal(specimen(batch), outer)
    assert not torch.equal(specimen(batch), outer)
