"""A user's program with every public name, type-checked with mypy --strict and never run.

`assert_type` fails where a function returns Any, and where its type becomes another.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, assert_type

from torch import Tensor, nn

import vitlens
from vitlens import (
    AttentionCall,
    AttentionCheck,
    Dictionary,
    KnockOut,
    Model,
    Place,
    Refinement,
    Split,
    Statistics,
)

if TYPE_CHECKING:
    from vitlens.training.recipe import Recipe


def choose_models(module: nn.Module) -> tuple[Model, Model]:
    """Load, wrap and describe models."""
    assert_type(vitlens.__version__, str)
    assert_type(vitlens.list_models("*-digits").names, tuple[str, ...])
    names = [
        *vitlens.list_methods().names,
        *vitlens.list_attacks().names,
        *vitlens.list_statistics().names,
    ]
    assert_type(names, list[str])
    vit = vitlens.load("timm:deit_tiny_patch16_224", weights=Path("deit.safetensors"))
    mine = vitlens.wrap(module, image_size=(224, 224), mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
    assert_type(vit.supports("rollout"), str | None)
    assert_type(vit.classes, tuple[str, ...])
    assert_type(vit.input_size, tuple[int, int])
    clip = vitlens.zero_shot(vitlens.load("open-clip:ViT-B-32/openai"), ["cat", "dog"])
    assert_type(clip, Model)
    return assert_type(vit, Model), assert_type(mine, Model)


def read_data(model: Model) -> tuple[Split, Tensor]:
    """Return data with labels, and the pixels of files."""
    split = vitlens.load_data("digits", limit=40)
    assert_type(split.labels, Tensor | None)
    return assert_type(split, Split), assert_type(vitlens.images(["cat.jpg"], model), Tensor)


def train(model: Model, recipe: "Recipe") -> float | None:
    """Train a model on two parts of the embedded data."""
    training, test = vitlens.load_data("digits", part="train"), vitlens.load_data("digits")
    result = vitlens.train(model, training, test, recipe=recipe, directory=Path("runs/mine"))
    return assert_type(result.accuracy, float | None)


def look_inside(vit: Model, images: Tensor) -> Statistics:
    """Read attention, heads and tensors."""
    assert_type(vitlens.attention(vit, images), tuple[Tensor, ...])
    assert_type(vitlens.rollout(vit, images, fusion="max"), Tensor)
    assert_type(vitlens.relevance(vit, images, targets=3), Tensor)
    table = vitlens.statistics(vit, images)
    assert_type(table.low("distance"), Tensor)
    effect = vitlens.ablate(vit, images, "predicted", replace="mean", kinds=["head", "mlp"])
    assert_type(effect.delta_loss, Tensor)
    head = vitlens.name_heads(vit, images).heads[0]
    assert_type(head.attends.word if head.attends else "", str)
    walk = vitlens.walkthrough(vit, images, layer=3, head=1)
    assert_type(walk.weights, Tensor)
    assert_type(vitlens.neurons(vit, images, layer=3, head=1).products, Tensor)
    assert_type(vitlens.query_key_map(vit, images, points=60).points, Tensor)
    assert_type(vitlens.reversal("sort").share, float)
    check = vitlens.check_attention(nn.MultiheadAttention(32, 4))
    assert_type(check, AttentionCheck)
    assert_type(check.passed, bool)
    view = vitlens.explorer(vit, images, statistics=table, ablation=effect)
    view.save("explorer.html")
    vitlens.attention_explorer(vitlens.attention(vit, images)[0], images[0]).save("weights.html")
    return assert_type(table, Statistics)


def keep_heads(call: AttentionCall) -> None:
    """Reduce the attention of one layer."""
    assert_type(call.images, int)
    assert_type(call.output, Tensor | None)


def change(vit: Model, images: Tensor) -> Tensor:
    """Read, change and replay what is inside."""
    place = vitlens.places(vit)[0]
    assert_type(place, Place)
    assert_type(vitlens.observe(vit, images, keep_heads), Tensor)
    captured = vitlens.capture(vit, images, [place.name])
    assert_type(captured[place.name], Tensor)
    knock_out = KnockOut(keys="cls")
    with vitlens.intervene(vit, {"blocks.0": knock_out, "blocks.1.mlp": "zero"}) as changed:
        assert_type(changed, Model)
    with vitlens.replay(vit, images) as replay:
        assert_type(replay.logits, Tensor)
    assert_type(vitlens.patch(vit, images, captured, place.name).logits, Tensor)
    assert_type(vitlens.logit_lens(vit, images).logits, Tensor)
    assert_type(vitlens.direct_logit_attribution(vit, images).logit, Tensor)
    return captured.logits


def explain(vit: Model, images: Split) -> Mapping[str, Tensor]:
    """Compute maps and figures of them."""
    choice = vitlens.choose_method(vit, images, methods=["relevance", "gradcam"])
    assert_type(choice.method, str)
    finer = Refinement(refine="affinity", views=2)
    maps = vitlens.explain(vit, images, method=choice.method, refinement=finer)
    assert_type(maps, Tensor)
    seen = vitlens.look(vit, images)
    assert_type(seen.maps, Tensor)
    vitlens.show(images, {"mine": maps}, model=vit).savefig("maps.png")
    vitlens.show_heads(vit, images, layer=3).savefig("heads.png")
    vitlens.show_board(vitlens.statistics(vit, images), ["distance"]).savefig("board.png")
    judged = vitlens.verify(vit, images, methods={"mine": maps, "relevance": "relevance"})
    assert_type(judged.verdicts[0].because, str)
    return {choice.method: maps, "look": seen.maps}


def brightness(model: Model, images: Tensor, targets: Tensor) -> Tensor:
    """Return maps that ignore the model."""
    return images.mean(1)


def verify(vit: Model, images: Split, maps: Tensor) -> None:
    """Judge maps that vitlens did not compute."""
    verification = vitlens.verify(
        vit, images, methods={"function": brightness, "array": maps.numpy(), "ours": "rollout"}
    )
    assert_type(verification["ours"].because, str)
    assert_type(verification.maps["array"], Tensor)


def judge(vit: Model, cnn: Model, images: Split, labels: Tensor) -> None:
    """Measure errors, robustness, features and cost."""
    assert_type(vitlens.evaluate(vit, images).correct, Tensor)
    assert_type(vitlens.compare(vit, cnn, images, labels).counts, dict[str, int])
    assert_type(vitlens.failures(vit, images, second=cnn).failures, int)
    assert_type(vitlens.reliance([vit, cnn], images).relied_on(vit.alias), tuple[str, ...])
    assert_type(vitlens.shape_bias(cnn, images).shape.value, float)
    assert_type(vitlens.attack(vit, images, epsilon=4 / 255).success, Tensor)
    assert_type(vitlens.attack(vit, images, epsilons=[0.0, 0.1]).robust_accuracy, Tensor)
    first, second = vitlens.features(vit, images), vitlens.features(cnn, images)
    assert_type(vitlens.similarity(first, second).values, Tensor)
    train, test = first.at(-1), second.at(-1)
    assert_type(vitlens.knn(train, labels, test, labels, k=5).predictions, Tensor)
    assert_type(vitlens.probe(train, labels, test, labels).accuracy.low, float | None)
    assert_type(vitlens.profile(vit).flops["attention products"], int)


def find_latents(vit: Model, images: Split) -> Dictionary:
    """Train, save and test a sparse autoencoder."""
    plan = vitlens.DictionaryPlan(k=4)
    sae = vitlens.fit_sae(vit, images, "blocks.2.residual", plan)
    sae.save(Path("sae.safetensors"))
    assert_type(vitlens.load_sae(vit, "sae.safetensors"), Dictionary)
    assert_type(len(vitlens.name_latents(sae, images, tested=2).latents), int)
    return sae


def read_report(folder: Path) -> float:
    """Return a number of a report."""
    run = vitlens.read(folder)
    assert_type(run.command, str)
    return run.metrics["accuracy/vit-digits"].value
