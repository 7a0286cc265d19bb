"""Observe: run a model once and hand each layer's attention to a reducer, after a self-check on the first image."""

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from vitlens.devices import evaluating
from vitlens.errors import LensError, NonFiniteError
from vitlens.lens.call import AttentionCall
from vitlens.lens.site import Site
from vitlens.lens.tap import Reducer, tapped
from vitlens.models.model import Model
from vitlens.shapes import Images, Logits

TOLERANCE = 1e-4  # fp32: weights @ value against the output that the model's own kernel made

_surveys: WeakKeyDictionary[Model, tuple[Site, ...]] = WeakKeyDictionary()


def observe(model: Model, images: Images, reducer: Reducer, *, explicit: bool = False, graph: bool = False) -> Logits:
    """The logits of the images, each attention layer handed to the reducer as it happens and then forgotten.

    Memory does not grow with the layers; the logits are those of the unobserved model, bit by bit (to 1e-5 for
    nn.MultiheadAttention, which takes another kernel when unobserved). explicit: attention from its matrix products, so
    that autograd sees the weights; graph: autograd follows the pass from the images on, attention fused as it is, so
    that what the reducer is given leads to the logits. The first time a model is observed, the lens checks itself on
    one image (see `survey`).
    Raises UnsupportedError where there is no attention, LensError where the lens would show less than the model has.
    """
    survey(model, images)
    with (
        evaluating(model),
        torch.enable_grad() if explicit or graph else torch.no_grad(),
        tapped(model.module, reducer, explicit=explicit, name=model.alias) as tap,
    ):
        logits: Tensor = model(images.detach().requires_grad_() if graph else images)
        tap.finish()
    return logits


def survey(model: Model, images: Images) -> tuple[Site, ...]:
    """Where a model computes attention, layer by layer, checked on the first of the images and remembered.

    The check: weights @ value is the output of the model's own kernel (1e-4), rows sum to 1, every attention module
    shows its weights, and the logits are those of the unobserved model. On the meta device, which has no numbers, every
    module must show its weights, no more. Raises LensError where one of these fails.
    """
    if model not in _surveys:
        _surveys[model] = _seen(model, images[:1]) if images.is_meta else _check(model, images[:1])
    return _surveys[model]


def _seen(model: Model, image: Images) -> tuple[Site, ...]:
    with evaluating(model), torch.no_grad(), tapped(model.module, lambda _: None, name=model.alias) as tap:
        model(image)
        tap.finish()
    return tuple(tap.sites)


def _check(model: Model, image: Images) -> tuple[Site, ...]:
    exact = torch.autocast(image.device.type, enabled=False)  # the tolerances are those of fp32
    with evaluating(model), torch.no_grad(), exact:
        plain = model(image)
        with tapped(model.module, _check_call, name=model.alias) as tap:
            observed = model(image)
            tap.finish()
    if not torch.isfinite(plain).all():
        raise NonFiniteError(f"expected finite logits of {model.alias}, found NaN or infinity; check its weights")
    largest = (plain - observed).abs().max().item()
    if largest > TOLERANCE * max(1.0, plain.abs().max().item()):
        raise LensError(
            f"expected the logits of {model.alias} unchanged under observation, found a difference of {largest:.1e}"
        )
    return tuple(tap.sites)


def _check_call(call: AttentionCall) -> None:
    weights, where = call.weights(), f"layer {call.site.layer} ({call.site.module})"
    if not torch.isfinite(weights).all():
        raise NonFiniteError(f"expected finite attention weights, found NaN or infinity in {where}")
    sums = weights.sum(-1)
    if ((sums - 1).abs() > TOLERANCE).logical_and(sums != 0).any():  # 0: a row that is masked everywhere
        raise LensError(f"expected attention rows that sum to 1, found others in {where}")
    if call.scored is None or call.output is None:
        return
    difference = (weights @ call.scored.value - call.output).abs().max().item()
    if difference > TOLERANCE * max(1.0, call.output.abs().max().item()):
        raise LensError(
            f"expected weights @ value to be the head's output, found a difference of {difference:.1e} in {where}"
        )


@dataclass(frozen=True)
class Captured:
    """logits (batch, classes); sites: one a layer; layers: weights (batch, heads, query, key) or the rows asked for."""

    logits: Tensor
    sites: tuple[Site, ...]
    layers: tuple[Tensor, ...]


def capture(model: Model, images: Images, *, rows: Sequence[int] | None = None, explicit: bool = False) -> Captured:
    """Everything the reducer would forget: the weights of every layer, or of some query rows alone.

    rows: positions of query tokens, (0,) for CLS; the cost and memory are then rows x keys. A class-attention layer has
    one query and gives that. explicit: weights stay in autograd's graph.
    """
    sites: list[Site] = []
    layers: list[Tensor] = []

    def keep(call: AttentionCall) -> None:
        sites.append(call.site)
        few = rows is not None and call.site.queries > max(rows)
        layers.append(call.rows(rows) if few and rows is not None else call.weights())

    logits = observe(model, images, keep, explicit=explicit)
    return Captured(logits, tuple(sites), tuple(layers))
