"""After an observation the model is as it was: after success, after an exception anywhere, and when nested."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack

from tests.lens.tiny import images, ours, timm_model, torchvision_swin, torchvision_vit
from vitlens.analysis.attention.relevance import relevance
from vitlens.analysis.attention.rollout import rollout
from vitlens.analysis.attention.views import query_maps
from vitlens.analysis.attention.weights import attention, attention_maps
from vitlens.analysis.cost.flops import flops_by_part
from vitlens.analysis.cost.memory import inference_peak, saved_for_training
from vitlens.analysis.cost.profile import profile
from vitlens.analysis.features.features import features
from vitlens.analysis.heads.statistics import statistics
from vitlens.analysis.robustness.inside import cosines
from vitlens.attacks.attack import attack
from vitlens.lens.call import AttentionCall
from vitlens.lens.capture import capture
from vitlens.lens.intervene import intervened
from vitlens.lens.interventions import BlockRemoved, HeadReplaced, Intervention, KnockedOut, MLPReplaced, StreamPatched
from vitlens.lens.observe import observe, survey, tapped
from vitlens.lens.replay import replaying
from vitlens.models.model import Model

MODELS: dict[str, Callable[[], Model]] = {
    "ours": ours,
    "timm": lambda: timm_model("deit_tiny_distilled_patch16_224"),
    "swin": torchvision_swin,
    "multihead": torchvision_vit,
}


class BrokenError(Exception):
    """Raised in the middle of a forward pass."""


def state_of(model: Model) -> list[object]:
    """Everything that an observation might forget to put back."""
    hooks = [
        (name, len(module._forward_hooks), len(module._forward_pre_hooks), len(module._backward_hooks), module.training)
        for name, module in model.named_modules()
    ]
    parameters = [
        (name, value.requires_grad, value.grad is None, value.stride()) for name, value in model.named_parameters()
    ]
    values = [value.sum().item() for value in model.state_dict().values() if value.is_floating_point()]
    forwards = [name for name, module in model.named_modules() if "forward" in vars(module)]
    return [hooks, parameters, values, forwards, torch.is_grad_enabled(), len(_get_current_function_mode_stack())]


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> Model:
    """A model in a state worth keeping: one block in training mode, some parameters with gradients asked for."""
    made = MODELS[request.param]()
    for number, (_, module) in enumerate(made.named_modules()):
        if number % 3 == 0 and not any(True for _ in module.children()):
            module.train()
    for number, parameter in enumerate(made.parameters()):
        parameter.requires_grad_(number % 2 == 0)
    return made


USES: dict[str, Callable[[Model, Tensor], object]] = {
    "observe": lambda model, batch: observe(model, batch, lambda call: call.weights()),
    "explicit": lambda model, batch: observe(model, batch, lambda call: call.weights(), explicit=True),
    "capture": capture,
    "attention": attention,
    "attention_maps": attention_maps,
    "graph": lambda model, batch: observe(model, batch, lambda call: call.output, graph=True),
    "relevance": relevance,
    "statistics": statistics,
    "features": features,
    "query_maps": lambda model, batch: query_maps(model, batch, query=(0, 0)),
    "cosines": lambda model, batch: cosines(model, batch, {"other": batch.flip(0)}),
    "attack": lambda model, batch: attack(model, batch, "predicted", epsilon=0.1, steps=2),
    "flops": lambda model, _batch: flops_by_part(model),
    "saved_for_training": saved_for_training,
    "inference_peak": inference_peak,
    "profile": lambda model, _batch: profile(model, batch_sizes=[1]),
}


@pytest.mark.parametrize("use", USES)
def test_after_success(model, use):
    before = state_of(model)
    batch = images(model.input_size)
    USES[use](model, batch)
    assert state_of(model) == before
    assert torch.equal(batch, images(model.input_size))


def test_after_rollout():
    model = ours()
    before = state_of(model)
    rollout(model, images(model.input_size))
    assert state_of(model) == before


def test_gradients_of_weights_leave_none_on_parameters(model):
    captured = capture(model, images(model.input_size), explicit=True)
    before = state_of(model)
    torch.autograd.grad(captured.logits.sum(), captured.layers)
    assert state_of(model) == before


@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("surveyed", [False, True])
def test_after_an_exception_in_the_reducer(model, explicit, surveyed):
    batch, before = images(model.input_size), state_of(model)
    if surveyed:
        survey(model, batch)

    def reducer(call: AttentionCall) -> None:
        if call.site.layer == 1:
            raise BrokenError

    with pytest.raises(BrokenError):
        observe(model, batch, reducer, explicit=explicit)
    assert state_of(model) == before


@pytest.mark.parametrize("surveyed", [False, True])
def test_after_an_exception_in_the_model(model, surveyed):
    batch = images(model.input_size)
    if surveyed:
        survey(model, batch)
    last = [module for module in model.module.modules() if isinstance(module, nn.Linear)][-1]

    def breaks(_module: nn.Module, _inputs: object) -> None:
        raise BrokenError

    handle = last.register_forward_pre_hook(breaks)
    before = state_of(model)
    with pytest.raises(BrokenError):
        observe(model, batch, lambda _call: None)
    assert state_of(model) == before
    handle.remove()
    captured = capture(model, batch)  # and it works again
    assert captured.layers[0].shape[0] % len(batch) == 0


@pytest.mark.parametrize("explicit", [False, True])
def test_nested_observations_both_see_everything(model, explicit):
    batch = images(model.input_size)
    survey(model, batch)
    before = state_of(model)
    alone = capture(model, batch)
    outer: list[tuple[str, Tensor]] = []
    with tapped(model.module, lambda call: outer.append((call.site.module, call.weights()))):
        inner = capture(model, batch, explicit=explicit)
        torch.testing.assert_close(inner.logits.detach(), alone.logits, atol=1e-5, rtol=1e-5)
    assert [name for name, _ in outer] == [site.module for site in inner.sites] == [site.module for site in alone.sites]
    for (_, seen), also, expected in zip(outer, inner.layers, alone.layers):
        torch.testing.assert_close(seen, expected, atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(also.detach(), expected, atol=1e-6, rtol=1e-5)
    assert state_of(model) == before


def test_the_inner_of_two_observations_undoes_its_own_alone():
    model, batch = ours(), images((32, 48))
    seen: list[str] = []
    with tapped(model.module, lambda call: seen.append(call.site.module)):
        with pytest.raises(BrokenError), tapped(model.module, lambda _call: None):
            raise BrokenError
        model(batch)
    assert seen == ["blocks.0.attn", "blocks.1.attn"]


def test_another_model_can_be_observed_from_within_a_reducer():
    outside, inside = ours(), timm_model("vit_tiny_patch16_224")
    layers: list[int] = []
    observe(outside, images((32, 48)), lambda _call: layers.append(len(capture(inside, images()).layers)))
    assert layers == [2, 2]


def test_a_failed_survey_is_not_remembered():
    model, batch = ours(), images((32, 48))
    before = state_of(model)
    handle = model.module.head.register_forward_pre_hook(lambda _module, _inputs: (_ for _ in ()).throw(BrokenError))
    with pytest.raises(BrokenError):
        survey(model, batch)
    handle.remove()
    assert len(survey(model, batch)) == 2
    assert state_of(model) == before


PATCHED = StreamPatched(1, (0,))
CHANGES: tuple[Intervention, ...] = (
    HeadReplaced(0, 1),
    KnockedOut(1, (0,), (1,)),
    MLPReplaced(0),
    BlockRemoved(1),
    PATCHED,
)
DATA = {PATCHED: torch.zeros(())}


def run_replay(model: Model, batch: Tensor) -> None:
    with replaying(model, batch, chunk=2) as replay:  # one intervention a forward
        replay.run([*CHANGES, CHANGES], replacements=DATA)


def run_nested(model: Model, batch: Tensor) -> None:
    with intervened(model, CHANGES[:2]), intervened(model, CHANGES, replacements=DATA):
        model(batch)
        with replaying(model, batch, budget=0) as replay:
            replay.run(CHANGES, replacements=DATA)
        capture(model, batch)


INTERVENING: dict[str, Callable[[Model, Tensor], None]] = {"replay": run_replay, "nested": run_nested}


@pytest.mark.parametrize("use", INTERVENING)
def test_interventions_and_replays_leave_nothing(model, use):
    before, batch = state_of(model), images(model.input_size)
    plain = capture(model, batch).logits
    INTERVENING[use](model, batch)
    assert state_of(model) == before
    assert torch.equal(capture(model, batch).logits, plain)
    assert torch.equal(batch, images(model.input_size))


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
def test_interventions_and_replays_leave_nothing_after_an_exception(model, use, after, error):
    """Raised in the middle of the last MLP, at some pass or other, where every override is in force."""
    batch = images(model.input_size)
    run_replay(model, batch)  # the structure is read: what follows fails at work
    inner = [module for name, module in model.named_modules() if ".mlp." in name and isinstance(module, nn.Linear)]
    handle = inner[-1].register_forward_pre_hook(Break(error, after))
    before = state_of(model)
    with pytest.raises(error):
        INTERVENING[use](model, batch)
    assert state_of(model) == before
    handle.remove()
    INTERVENING[use](model, batch)  # and it works again


def test_the_inner_of_two_interventions_undoes_its_own_alone():
    model, batch = ours(), images((32, 48))
    with torch.no_grad(), intervened(model, HeadReplaced(0, 0)):
        outer = model(batch)
        with pytest.raises(BrokenError), intervened(model, [HeadReplaced(0, 0), HeadReplaced(0, 1)]):
            raise BrokenError
        assert torch.equal(model(batch), outer)
    assert not torch.equal(model(batch), outer)
