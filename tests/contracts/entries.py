"""ENTRIES: every function of a model as one call on any model and images, for tests of all.

Attributions and attacks are read from their registries: a new one is covered by itself, on each
model that its families name. Another public function of a model is one entry more, which
test_common.py asks for.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, Final

import torch
from torch import Tensor

import vitlens
from tests.kit.commands import few_passes
from tests.kit.odd import odd
from tests.kit.select import index_by, values_of
from tests.kit.tiny import images, ours, small_cnn, timm_model, torchvision_swin, torchvision_vit
from vitlens import Model
from vitlens.attacks.registry import ATTACKS
from vitlens.attribution.registry import ATTRIBUTIONS

MODELS: Final[dict[str, Callable[[], Model]]] = {
    "odd": odd,  # of a user, read from its passes
    "ours": ours,  # fused attention
    "distilled": partial(timm_model, "deit_tiny_distilled_patch16_224"),  # of timm, two readouts
    "multihead": torchvision_vit,  # nn.MultiheadAttention
    "windows": torchvision_swin,
    "cnn": partial(small_cnn, (16, 24)),
}
# one sequence of tokens through all blocks
PLAIN: Final = (
    "odd",
    "ours",
    "distilled",
    "multihead",
)
ATTENTIVE: Final = (*PLAIN, "windows")
EVERY: Final = (*ATTENTIVE, "cnn")
FAMILIES: Final = {"vit": PLAIN, "windowed": ("windows",), "cnn": ("cnn",)}
HEADLESS: Final = "timm:eva02_tiny_patch14_224"


@dataclass(frozen=True)
class Entry:
    """One function of a model.

    run: on a model and images; models: of MODELS, on which it works; read: what of its result is
    compared, one row an image where `per_image`; needs_class: whether a model without a
    classifier is refused; draws: whether its result depends on a seed and an image's place;
    exempt: the checks that it does not pass, with the reason of each; shares: for an entry of a
    registry, the module that all its entries of one kind are measured by.
    """

    name: str
    run: Callable[[Model, Tensor], Any]
    read: Callable[[Any], Tensor] | None = None
    models: tuple[str, ...] = EVERY
    per_image: bool = True
    needs_class: bool = True
    draws: bool = False
    exempt: Mapping[str, str] = field(default_factory=dict)
    shares: str = ""

    def tensor(self, model: Model, batch: Tensor) -> Tensor:
        assert self.read is not None
        return self.read(self.run(model, batch))


def labels_of(batch: Tensor) -> Tensor:
    return torch.arange(len(batch)) % 5


def evaluated(model: Model, batch: Tensor) -> Any:
    return vitlens.evaluate(model, batch, labels_of(batch))


def observed(model: Model, batch: Tensor, **how: bool) -> Tensor:
    weights: list[Tensor] = []
    vitlens.observe(model, batch, lambda call: weights.append(call.weights()), **how)
    return weights[0]


def nearest_classes(model: Model, batch: Tensor) -> Any:
    """Return the classes of the nearest neighbours, where each image is its own neighbour."""
    values = vitlens.features(model, batch).at(-1)
    return vitlens.knn(values, labels_of(batch), values, labels_of(batch), k=1)


def probed_classes(model: Model, batch: Tensor) -> Any:
    values = vitlens.features(model, batch).at(-1).repeat(4, 1)
    labels = labels_of(batch).repeat(4)
    return vitlens.probe(values, labels, values, labels)


def captured(model: Model, batch: Tensor, *, graph: bool = False) -> dict[str, Tensor]:
    """Capture every place."""
    activations = vitlens.capture(
        model, batch, vitlens.places(model).names[: -1 if graph else None], graph=graph
    )
    if graph:
        torch.autograd.grad(activations.logits.sum(), list(activations.values()))
    return {name: activations[name].detach() for name in activations}


def intervened(model: Model, batch: Tensor) -> Tensor:
    """Change all places at once, in nested contexts with and without gradients, and capture."""
    names = [place.name for place in vitlens.places(model) if place.changeable]
    with (
        vitlens.intervene(model, dict.fromkeys(names, torch.clone)),
        vitlens.intervene(model, {names[0]: torch.neg}),
    ):
        vitlens.capture(model, batch, names)
        leaf = batch.clone().requires_grad_()
        torch.autograd.grad(model(leaf).sum(), leaf)
        with torch.no_grad():
            return model(batch)


def knocked_out(model: Model, batch: Tensor) -> Tensor:
    """Knock out keys, remove a head and a block, and set the last block to its mean."""
    keys = vitlens.KnockOut(keys=[0, 1], queries=2)
    last = vitlens.places(model).names[-2]
    changes = {"blocks.*.attention.weights": keys, "blocks.0.head.1": "zero", "blocks.1": "remove"}
    with (
        vitlens.intervene(model, changes),
        vitlens.intervene(model, {last: "mean"}, reference=batch),
        torch.no_grad(),
    ):
        return model(batch)


def replayed(model: Model, batch: Tensor) -> Tensor:
    """Replay changes by place from a stored clean pass, inside a changed model."""
    with (
        vitlens.intervene(model, {"blocks.0.mlp": "zero"}),
        vitlens.replay(model, batch, chunk=2) as session,
    ):
        sets = [{"blocks.1.mlp": torch.neg}, {"blocks.0.head.1": "zero", "blocks.1": "remove"}]
        return session.run(sets).transpose(0, 1)


def patched(model: Model, batch: Tensor) -> Tensor:
    """Patch every place separately with that of another run."""
    other = batch.flip(-1) if isinstance(batch, Tensor) else batch
    return vitlens.patch(model, batch, other, vitlens.places(model).names[:-1]).logits.transpose(
        0, 1
    )


def diagnosed(model: Model, batch: Tensor) -> Any:
    return vitlens.failures(model, batch, labels_of(batch), second=model)


def profiled(model: Model, _: Tensor) -> Any:
    with few_passes():
        return vitlens.profile(model, batch_sizes=[1])


def chosen(model: Model, batch: Tensor) -> Any:
    """Choose a method on as many images as the choice needs."""
    right = isinstance(batch, Tensor) and batch.shape[1:2] == (3,) and batch.dim() == 4
    many = batch.repeat(7, 1, 1, 1)[:20] if right else batch
    return vitlens.choose_method(model, many, methods=["saliency", "input-x-gradient"])


def relied_on(model: Model, batch: Tensor) -> Any:
    """Measure reliance on as many images as it needs."""
    right = isinstance(batch, Tensor) and batch.shape[1:2] == (3,) and batch.dim() == 4
    many = batch.repeat(7, 1, 1, 1)[:20] if right else batch
    return vitlens.reliance(model, many, labels_of(many), cues=["colour", "layout"])


def gradient_map(model: Model, batch: Tensor, targets: Tensor) -> Tensor:
    """Return the gradient of the target's logit, as a function of somebody else."""
    logits = model(batch)
    (gradient,) = torch.autograd.grad(logits.gather(1, targets[:, None]).sum(), batch)
    return gradient.abs().amax(1)


def verified(model: Model, batch: Tensor) -> Any:
    """Judge a method of vitlens, a function and fixed maps."""
    fixed = torch.rand(len(batch), 64, 64, generator=torch.Generator().manual_seed(0))
    methods = {"saliency": "saliency", "mine": gradient_map, "fixed": fixed}
    return vitlens.verify(model, batch, methods=methods).checks


def measured(table: Any) -> Tensor:
    """Return one statistic of every head and the output norms, which decide the labels."""
    norms = [total for (name, _), total in table.evidence.sums.items() if name == "output"]
    return torch.cat([table.distance.flatten(), *(norm.flatten() for norm in norms)])


def looked_at(names: Any) -> Tensor:
    return torch.tensor([head.looks.score.value for head in names.heads if head.looks is not None])


_CALLER: Final = "its caller runs the model, in the caller's mode"
# in place of the defaults of many passes
_FEW: Final = {
    "masks": 8,
    "coalitions": 200,
    "samples": 2,
    "steps": 3,
}
_OWN: Final = (
    Entry(
        "ablate",
        lambda model, batch: vitlens.ablate(model, batch, labels_of(batch)),
        lambda result: result.delta_loss,
        models=ATTENTIVE,
        per_image=False,
    ),
    Entry("attention", vitlens.attention, lambda result: result[0], ATTENTIVE, needs_class=False),
    Entry("capture", captured, lambda result: next(iter(result.values())), needs_class=False),
    Entry("capture/graph", partial(captured, graph=True), needs_class=False),
    Entry(
        "choose_method",
        chosen,
        lambda result: torch.tensor(len(result.candidates)),
        per_image=False,
    ),
    Entry(
        "compare",
        lambda model, batch: vitlens.compare(model, model, batch, labels_of(batch)),
        lambda result: result.first.confidence,
    ),
    Entry(
        "direct_logit_attribution",
        vitlens.direct_logit_attribution,
        lambda result: result.heads,
        PLAIN,
        needs_class=False,
    ),
    Entry("evaluate", evaluated, lambda result: result.logits),
    Entry(
        "explorer",
        vitlens.explorer,
        lambda result: torch.from_numpy(result.explorer.images[0].weights),
        PLAIN,
        per_image=False,
        needs_class=False,
    ),
    Entry("failures", diagnosed, lambda result: result.correct),
    Entry("features", vitlens.features, lambda result: result.at(-1), needs_class=False),
    Entry(
        "features/knn",
        nearest_classes,
        lambda result: result.predictions,
        per_image=False,
        needs_class=False,
    ),
    Entry(
        "features/probe",
        probed_classes,
        lambda result: result.predictions,
        PLAIN,
        per_image=False,
        needs_class=False,
    ),
    Entry(
        "features/embedding",
        partial(vitlens.features, embedding=True),
        models=ATTENTIVE,
        needs_class=False,
    ),
    Entry("intervene", intervened, needs_class=False, exempt={"repeated": _CALLER}),
    Entry(
        "intervene/knock-out",
        knocked_out,
        models=PLAIN,
        needs_class=False,
        exempt={"repeated": _CALLER},
    ),
    Entry("logit_lens", vitlens.logit_lens, lambda result: result.logits, PLAIN, needs_class=False),
    Entry("look", vitlens.look, lambda result: result.probabilities),
    Entry(
        "name_heads", vitlens.name_heads, looked_at, ATTENTIVE, per_image=False, needs_class=False
    ),
    Entry(
        "neurons",
        lambda model, batch: vitlens.neurons(model, batch[:1], layer=0, head=0),
        models=PLAIN[1:],
        needs_class=False,
    ),
    Entry("observe", observed, lambda result: result, ATTENTIVE, needs_class=False),
    Entry(
        "observe/explicit", partial(observed, explicit=True), models=ATTENTIVE, needs_class=False
    ),
    Entry("observe/graph", partial(observed, graph=True), models=ATTENTIVE, needs_class=False),
    Entry("patch", patched, lambda result: result, needs_class=False),
    Entry(
        "places",
        lambda model, _: vitlens.places(model),
        needs_class=False,
        exempt={"refused pixels": "it takes no images"},
    ),
    Entry(
        "profile",
        profiled,
        needs_class=False,
        exempt={"repeated": "it measures times", "refused pixels": "it draws its own images"},
    ),
    Entry(
        "query_key_map",
        partial(vitlens.query_key_map, points=160),
        models=PLAIN[1:],
        per_image=False,
        needs_class=False,
    ),
    Entry("relevance", vitlens.relevance, lambda result: result, ATTENTIVE),
    Entry(
        "reliance",
        relied_on,
        lambda result: torch.tensor(values_of(result.rows, "changed_by.value")),
        per_image=False,
    ),
    Entry("replay", replayed, lambda result: result, PLAIN, needs_class=False),
    Entry("rollout", vitlens.rollout, lambda result: result, ATTENTIVE, needs_class=False),
    Entry(
        "statistics", vitlens.statistics, measured, ATTENTIVE, per_image=False, needs_class=False
    ),
    Entry(
        "verify",
        verified,
        lambda rows: torch.tensor([row.value.value for row in rows if row.value is not None]),
        per_image=False,
    ),
    Entry(
        "walkthrough",
        lambda model, batch: vitlens.walkthrough(model, batch[:1]),
        models=PLAIN[1:],
        needs_class=False,
    ),
)
# public functions of a model that are no entry
ELSEWHERE: Final = {
    "fit_sae": "trains on images: tests/public/dictionary",
    "images": "reads the model's input size alone",
    "load_sae": "reads a file: tests/public/dictionary",
    "shape_bias": "runs evaluate, on scenes of shapes and textures: tests/public/failures",
    "show_heads": "draws: tests/public/test_notebook.py",
    "show": "draws: tests/public/test_notebook.py",
    "train": "changes the model: tests/public/training",
    "zero_shot": "needs open_clip: tests/public/features",
}


def _explained(model: Model, batch: Tensor, *, method: str) -> Tensor:
    options = {name: value for name, value in _FEW.items() if name in ATTRIBUTIONS[method].options}
    return vitlens.explain(model, batch, method=method, **options)


def _attributions() -> Iterator[Entry]:
    for name, method in ATTRIBUTIONS.items():
        models = tuple(model for family in method.families for model in FAMILIES.get(family, ()))
        yield Entry(
            f"explain/{name}",
            partial(_explained, method=name),
            lambda maps: maps,
            models,
            needs_class=method.needs_class,
            draws=method.random,
            shares=f"{method.function.partition(':')[0]} {method.arguments.get('method')}",
        )


def _attacks() -> Iterator[Entry]:
    for name, method in ATTACKS.items():
        run = partial(vitlens.attack, labels="predicted", method=name, steps=1)
        module = method.function.partition(":")[0]
        yield Entry(
            f"attack/{name}",
            run,
            lambda result: result.images,
            draws=method.random_start,
            shares=module or name,
        )


ENTRIES: Final = index_by((*_OWN, *_attributions(), *_attacks()), "name")


def cover() -> Iterator[tuple[str, str, bool]]:
    """Return (entry, model, by default), so that each entry and each kind of model is covered.

    The models share the code that restores them: each entry meets its first model, the CNN where
    it applies and, in turn, another. Methods of a registry share code too: one model each, in turn.
    """
    for number, entry in enumerate(ENTRIES.values()):
        first, *rest = entry.models
        turn = [model for model in rest if model != "cnn"] or [first]
        quick = {first, turn[number % len(turn)], *({"cnn"} & {*rest})}
        if entry.shares:
            quick = {entry.models[number % len(entry.models)]}
        for model in entry.models:
            yield entry.name, model, model in quick


@cache
def shared(name: str) -> Model:
    """Return a model that no test changes."""
    return MODELS[name]()


def batch_of(model: Model) -> Tensor:
    return images(model.input_size, batch=3)


@cache
def headless() -> Model:
    """Load a model that has no classes in its timm configuration."""
    return vitlens.load(HEADLESS, random_weights=True, image_size=(28, 28))
