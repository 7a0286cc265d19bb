"""USES: everything that touches a model, each as a call on a tiny model; the promises of all are tested from here.

Attributions, attacks and ways to follow attention are read from their registries; what is new in one of them is in the
table by itself.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice

import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack

from tests.attribution.models import cnn
from tests.lens.tiny import handwritten, images, ours, timm_model, torchvision_swin, torchvision_vit
from vitlens.analysis.ablation.bench import Bench, units_of
from vitlens.analysis.ablation.importance import ablate, first_order
from vitlens.analysis.attention.methods import maps_in_one_pass, relevance, rollout
from vitlens.analysis.attention.registry import ATTENTION_METHODS as ATTENTION
from vitlens.analysis.attention.registry import MethodSettings
from vitlens.analysis.attention.weights import attention, attention_maps, patch_views, window_layers
from vitlens.analysis.cost.flops import flops_by_part
from vitlens.analysis.cost.passes import inference_peak, saved_for_training
from vitlens.analysis.cost.profile import profile
from vitlens.analysis.evaluation.evaluate import evaluate
from vitlens.analysis.failures.compare import compare
from vitlens.analysis.failures.diagnosis import failures
from vitlens.analysis.faithfulness.maps import removal_grid
from vitlens.analysis.faithfulness.removal import Variants
from vitlens.analysis.faithfulness.sanity import cascade, randomised
from vitlens.analysis.features.features import features, patch_tokens
from vitlens.analysis.features.receptive_field import receptive_field
from vitlens.analysis.heads.statistics import statistics
from vitlens.analysis.patching.contribution import direct_logit_attribution, logit_lens, logits_by_depth
from vitlens.analysis.patching.patching import patch_parts
from vitlens.analysis.walkthrough.public import walkthrough
from vitlens.attacks.attack import attack
from vitlens.attacks.registry import ATTACKS
from vitlens.attacks.robustness import cosines
from vitlens.attribution.choice import choose_method
from vitlens.attribution.explain import explain
from vitlens.attribution.look import look
from vitlens.attribution.registry import ATTRIBUTIONS
from vitlens.commands.shared.explorer_measure import explorer
from vitlens.data.split import InMemory, Split
from vitlens.lens.capture import capture, capture_attention
from vitlens.lens.capture import observe as public_observe
from vitlens.lens.intervene import Change, KnockOut, intervene
from vitlens.lens.observe import observe
from vitlens.lens.places import places
from vitlens.lens.quick_passes import quick_convolutions, quick_layers
from vitlens.lens.replay import patch, replaying
from vitlens.lens.replay import replay as public_replay
from vitlens.lens.replay_pass import entry_of
from vitlens.lens.stages import stages, watching_blocks, watching_stages, watching_stream
from vitlens.models.hooks import forget
from vitlens.models.model import Model
from vitlens.training.finetune import partly_trainable
from vitlens.training.head import read_features
from vitlens.training.speed import fast_attention, gradient_checkpointing

MODELS: dict[str, Callable[[], Model]] = {
    "ours": ours,
    "timm": lambda: timm_model("deit_tiny_distilled_patch16_224"),
    "swin": torchvision_swin,
    "multihead": torchvision_vit,
    "wrapped": handwritten,
    "cnn": lambda: cnn((16, 24)),
}
ATTENTIVE = ("ours", "timm", "swin", "multihead", "wrapped")
PLAIN = ("ours", "timm", "multihead", "wrapped")  # one sequence of tokens through all blocks, read by CLS


@dataclass(frozen=True)
class Use:
    """One thing that is done with a model.

    run: on a model and images; models: names of MODELS on which it is tried; timed: whether the number of its passes
    depends on the time that they take.
    """

    name: str
    run: Callable[[Model, Tensor], object]
    models: tuple[str, ...] = ATTENTIVE
    timed: bool = False


def answers_with_half(model: Model, batch: Tensor) -> Tensor:
    """The logits with half of the patches removed."""
    grid = removal_grid(model)
    removed = torch.arange(grid[0] * grid[1]).expand(len(batch), -1) % 2 == 0
    return Variants(model, batch).logits(torch.arange(len(batch)), removed)


def split_of(model: Model, batch: Tensor) -> Split:
    """Labelled images of the model's classes."""
    pixels = (batch * 255).to(torch.uint8)
    return Split("made", "test", InMemory(pixels), model.input_size, model.classes, labels=torch.arange(len(batch)) % 5)


CHANGES: dict[str, Change] = {
    "blocks.0.head.1": "zero",
    "blocks.1.attention.weights": KnockOut(queries=0, keys=1),
    "blocks.0.mlp": "zero",
    "blocks.1": "remove",
    "blocks.1.tokens[0]": torch.zeros(()),
}
EACH_CHANGE = [{place: change} for place, change in CHANGES.items()]


def run_replay(model: Model, batch: Tensor) -> None:
    """Every kind of change from a kept clean pass, each alone and all together."""
    with replaying(model, batch, chunk=2) as replay:  # one set a forward
        replay.run([*EACH_CHANGE, CHANGES])


def run_nested(model: Model, batch: Tensor) -> None:
    """Interventions within others, with a replay and an observation inside."""
    with intervene(model, EACH_CHANGE[0] | EACH_CHANGE[1]), intervene(model, CHANGES):
        model(batch)
        with replaying(model, batch, budget=0) as replay:
            replay.run(EACH_CHANGE)
        capture_attention(model, batch)


def run_places(model: Model, _batch: Tensor) -> object:
    """The places of a model that was not looked at before."""
    forget(model)
    return places(model)


def run_intervene(model: Model, batch: Tensor) -> None:
    """Every place changed at once, in a context within another, with gradients on and off; captured inside."""
    names = [place.name for place in places(model) if place.changeable]
    with intervene(model, dict.fromkeys(names, torch.clone)), intervene(model, {names[0]: "resample"}):
        capture(model, batch, names)
        leaf = batch.clone().requires_grad_()
        torch.autograd.grad(model(leaf).sum(), leaf)


def run_mean(model: Model, batch: Tensor) -> None:
    """The last block set to its mean over the images."""
    with intervene(model, {places(model).names[-2]: "mean"}, reference=batch), torch.no_grad():
        model(batch)


def run_knock_out(model: Model, batch: Tensor) -> None:
    """Keys knocked out in all layers, and a block removed."""
    changes: dict[str, Change] = {"blocks.*.attention.weights": KnockOut(keys=[0, 1], queries=2), "blocks.1": "remove"}
    with intervene(model, changes), torch.no_grad():
        model(batch)


def run_capture_graph(model: Model, batch: Tensor) -> None:
    """Every place in the autograd graph of the logits."""
    captured = capture(model, batch, places(model).names[:-1], graph=True)
    torch.autograd.grad(captured.logits.sum(), list(captured.values()))


def run_patch(model: Model, batch: Tensor) -> object:
    """Every place of the images' run patched by that of another order, each apart."""
    return patch(model, batch, batch.flip(0), places(model).names[:-1])


def run_place_replay(model: Model, batch: Tensor) -> None:
    """Changes by place from a kept clean pass, inside a changed model."""
    with intervene(model, {"blocks.0.mlp": "zero"}), public_replay(model, batch) as kept:
        kept.run([{"blocks.1.mlp": torch.neg}, {"blocks.0.head.1": "zero", "blocks.1": "remove"}])


def run_watchers(model: Model, batch: Tensor) -> None:
    """Everything that reads outputs of blocks, around one pass."""
    seen: list[object] = []
    with (
        watching_stream(model, lambda *block: seen.append(block)),
        watching_blocks(model, lambda *block: seen.append(block)),
        watching_stages(model, stages(model), lambda *stage: seen.append(stage)),
        torch.no_grad(),
    ):
        model(batch)
    assert seen


def run_quick_layers(model: Model, batch: Tensor) -> None:
    """Layers by oneDNN, without and with gradients of the pixels."""
    with quick_convolutions(model), quick_layers(model):
        with torch.no_grad():
            model(batch)
        leaf = batch.clone().requires_grad_()
        torch.autograd.grad(model(leaf).sum(), leaf)


def run_training_contexts(model: Model, batch: Tensor) -> None:
    """A model set up for training of its last block, and a backward pass of the pixels."""
    leaf = batch.clone().requires_grad_()
    with partly_trainable(model, last=1), fast_attention(model, torch.device("cpu")), gradient_checkpointing(model):
        torch.autograd.grad(model(leaf).sum(), leaf)


def choose_few(model: Model, batch: Tensor) -> object:
    """The choice of a method, on as many images as it needs."""
    return choose_method(model, batch.repeat(20, 1, 1, 1)[:20], methods=["saliency", "input-x-gradient"])


def run_randomised(model: Model, batch: Tensor) -> None:
    """A pass with the head's weights randomised."""
    with randomised(model, [*cascade(model).values()][1]), torch.no_grad():
        model(batch)


def run_entry(model: Model, batch: Tensor) -> None:
    """The model entered at its first block."""
    entry = entry_of(model)
    assert entry is not None
    with torch.no_grad():
        entry.logits(model, entry.tokens(model, batch))


def run_patch_parts(model: Model, batch: Tensor) -> None:
    """Activation patching between two orders of the images."""
    first, second = (torch.full((len(batch),), label) for label in (0, 1))
    patch_parts(model, batch, batch.roll(1, 0), targets=first, others=second)


def run_first_order(model: Model, batch: Tensor) -> object:
    """The slope of the loss towards every head's removal."""
    return first_order(Bench(model, batch, torch.arange(len(batch)) % 5, "zero"), units_of(model, kinds=("head",)))


def run_way(model: Model, batch: Tensor, *, method: str) -> None:
    """Attention followed to the image in one way."""
    maps_in_one_pass(model, batch, [MethodSettings(method)])


def run_explain(model: Model, batch: Tensor, *, method: str) -> object:
    """An attribution of the predictions."""
    return explain(model, batch, method=method)


def run_attack(model: Model, batch: Tensor, *, method: str) -> object:
    """One step of an attack that starts from the predictions."""
    return attack(model, batch, "predicted", method=method, steps=1)


def run_failures(model: Model, batch: Tensor) -> object:
    """Maps, and causal tests on objects that cover a corner."""
    masks = torch.zeros(len(batch), *batch.shape[-2:], dtype=torch.bool)
    masks[:, : batch.shape[-2] // 2, : batch.shape[-1] // 3] = True
    return failures(model, replace(split_of(model, batch), masks=masks), second=model)


EVERYWHERE = tuple(MODELS)
# public functions of a model that are in no use of their own
ELSEWHERE = {
    "images": "reads the model's input size alone",
    "shape_bias": "runs evaluate, on scenes of shapes and textures",
    "train": "changes the model: tests/public/training/test_loop.py",
    "zero_shot": "needs open_clip: tests/analysis/features/test_zero_shot.py",
}
_LISTED = (
    Use("observe", lambda model, batch: observe(model, batch, lambda call: call.weights())),
    Use("observe-explicit", lambda model, batch: observe(model, batch, lambda call: call.weights(), explicit=True)),
    Use("observe-graph", lambda model, batch: observe(model, batch, lambda call: call.output, graph=True)),
    Use("capture-attention", capture_attention),
    Use("places", run_places, EVERYWHERE),
    Use("capture", lambda model, batch: capture(model, batch, places(model).names), EVERYWHERE),
    Use("capture-graph", run_capture_graph, EVERYWHERE),
    Use("intervene", run_intervene, EVERYWHERE),
    Use("intervene-mean", run_mean, EVERYWHERE),
    Use("knock-out", run_knock_out),
    Use("patch", run_patch, EVERYWHERE),
    Use("public-observe", lambda model, batch: public_observe(model, batch, lambda call: call.weights())),
    Use("replay", run_place_replay),
    Use("replaying", run_replay),
    Use("interventions", run_nested),
    Use("watchers", run_watchers, EVERYWHERE),
    Use("quick-layers", run_quick_layers, EVERYWHERE),
    Use("entry", run_entry, PLAIN),
    Use("attention", attention),
    Use("attention-maps", attention_maps),
    Use("query-maps", lambda model, batch: patch_views(model, batch, side="query", patch=(0, 0))),
    Use("key-maps", lambda model, batch: patch_views(model, batch, side="key", patch=(0, 0))),
    Use("rollout", rollout, PLAIN),
    Use("relevance", relevance),
    Use("gradient-rollout", partial(explain, method="gradient-rollout")),
    Use("statistics", statistics),
    Use("features", features, EVERYWHERE),
    Use("patch-tokens", patch_tokens, PLAIN),
    Use("embedding", lambda model, batch: features(model, batch, embedding=True), EVERYWHERE),
    Use("cosines", lambda model, batch: cosines(model, batch, {"other": batch.flip(0)}), EVERYWHERE),
    Use("answers-without", answers_with_half, EVERYWHERE),
    Use("randomised", run_randomised, EVERYWHERE),
    Use("direct_logit_attribution", direct_logit_attribution, PLAIN),
    Use("logit_lens", logit_lens, PLAIN),
    Use("logits-by-depth", logits_by_depth, PLAIN),
    Use("patch-parts", run_patch_parts, PLAIN),
    Use("first-order", run_first_order),
    Use("walkthrough", lambda model, batch: walkthrough(model, batch[:1]), PLAIN),
    Use("ablate", lambda model, batch: ablate(model, batch, torch.arange(len(batch)) % 5)),
    Use("look", look, EVERYWHERE),
    Use("choose_method", choose_few, EVERYWHERE),
    Use("explorer", explorer, PLAIN),
    Use("compare", lambda model, batch: compare(model, model, split_of(model, batch)), EVERYWHERE),
    Use("evaluate", lambda model, batch: evaluate(model, split_of(model, batch)), EVERYWHERE),
    Use("failures", run_failures, EVERYWHERE),
    Use("flops", lambda model, _batch: flops_by_part(model), EVERYWHERE),
    Use("saved-for-training", saved_for_training, EVERYWHERE),
    Use("inference-peak", inference_peak, EVERYWHERE),
    Use("profile", lambda model, _batch: profile(model, batch_sizes=[1]), ("ours", "cnn"), timed=True),
    Use("read-features", read_features, ("ours", "multihead", "cnn")),
    Use("window-layers", window_layers, ("swin",)),
    Use("receptive-field", receptive_field, EVERYWHERE),
    Use("training", run_training_contexts, PLAIN),  # batch statistics and stochastic depth are the training's own
)


def _attention_ways() -> Iterator[Use]:
    for name in ATTENTION:
        yield Use(f"attention/{name}", partial(run_way, method=name), PLAIN)


def _attributions() -> Iterator[Use]:
    for name, method in ATTRIBUTIONS.items():
        # one model with gradients and attention, one without attention: the mechanisms are the same for the others
        models = tuple(model for model in ("ours", "cnn") if MODELS[model]().anatomy.family in method.families)
        yield Use(f"explain/{name}", partial(run_explain, method=name), models)


def _attacks() -> Iterator[Use]:
    for name in ATTACKS:
        yield Use(f"attack/{name}", partial(run_attack, method=name), ("ours", "cnn"))


USES: dict[str, Use] = {use.name: use for use in (*_LISTED, *_attention_ways(), *_attributions(), *_attacks())}


def _default(number: int, models: tuple[str, ...], *, method: bool) -> set[str]:
    """The models on which the use of this number is tried by default: the first, the CNN and, in turn, another.

    What is put back is put back by code that the models share: each mechanism meets each of them in a few uses. The
    methods of a registry share theirs too: one model each, in turn; on the first each is tried within another use.
    """
    if method:
        return {models[number % len(models)]}
    others = [model for model in models[1:] if model != "cnn"]
    return {models[0], *(model for model in models if model == "cnn"), *others[number % (len(others) or 1) :][:1]}


CASES = [
    (use.name, model, model in _default(number, use.models, method="/" in use.name))
    for number, use in enumerate(USES.values())
    for model in use.models
]
ONCE = [(use.name, use.models[0]) for use in USES.values()]


class BrokenError(Exception):
    """Raised in the middle of a forward or backward pass."""


class Break:
    """A pre-hook that raises at its n-th call; counts its calls."""

    def __init__(self, error: type[BaseException], after: int) -> None:
        self.error, self.after, self.calls = error, after, 0

    def __call__(self, _module: nn.Module, _inputs: object) -> None:
        self.calls += 1
        if self.calls == self.after:
            raise self.error


def unsettled(model: str) -> Model:
    """A model in a state worth keeping: parts in training mode, some gradients asked for, one gradient there."""
    made = MODELS[model]()
    leaves = (module for module in made.modules() if not any(True for _ in module.children()))
    for module in islice(leaves, 0, None, 3):
        module.training = not isinstance(module, nn.BatchNorm2d)
    for number, parameter in enumerate(made.parameters()):
        parameter.requires_grad_(number % 2 == 0)
    first = next(made.parameters())
    first.grad = torch.ones_like(first)
    return made


def batch_of(model: Model) -> Tensor:
    """Three images of the model's size, the same at every call."""
    return images(model.input_size, batch=3)


def state_of(model: Model) -> list[object]:
    """Everything that a use of a model might forget to put back, in the model and in torch."""
    hooks = [
        (name, *(list(kept) for kept in (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)))
        for name, module in model.named_modules()
    ]
    modes = [(name, module.training, vars(module).get("forward")) for name, module in model.named_modules()]
    parameters = [
        (name, value.requires_grad, value.stride(), None if value.grad is None else value.grad.sum().item())
        for name, value in model.named_parameters()
    ]
    values = [value.sum().item() for value in model.state_dict().values() if value.is_floating_point()]
    flags = [torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.backends.mha.get_fastpath_enabled()]
    return [hooks, modes, parameters, values, flags, len(_get_current_function_mode_stack())]
