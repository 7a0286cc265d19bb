"""Whether a model can be replayed: tried on two images of noise, once, and remembered."""

from dataclasses import replace
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from vitlens.devices import evaluating
from vitlens.lens.changes import Change
from vitlens.lens.first_rows import rows_read
from vitlens.lens.intervened import intervened
from vitlens.lens.intervention import HeadReplaced
from vitlens.lens.layers import Layer, layers, probe_images
from vitlens.lens.recording import Record, recording
from vitlens.lens.replay_pass import Kind, Method, Pass, replay_pass
from vitlens.lens.replay_plan import make_plan
from vitlens.models.model import Model
from vitlens.shapes import Images

TOLERANCE = 1e-4  # fp32, on logits

_methods: WeakKeyDictionary[Model, Method] = WeakKeyDictionary()


def method_of(model: Model) -> Method:
    """How a model is replayed: with the shortest last block that gives its logits, or by full forwards."""
    if model not in _methods:
        _methods[model] = _find(model)
    return _methods[model]


def _find(model: Model) -> Method:
    plan, rows, why = make_plan(model), rows_read(model), ""
    for found in dict.fromkeys((rows, None)):
        method = Method(plan, found)
        try:
            difference = _largest_difference(model, method)
        except (RuntimeError, TypeError, ValueError, KeyError, IndexError, AssertionError) as error:
            # a model that is built in another way may fail anywhere when it is cut in two
            why = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            continue
        if difference <= TOLERANCE:
            return method if not why else replace(method, note=f"{model.alias}'s last block is run whole: {why}")
        why = f"its logits would differ by {difference:.1e}"
    return Method(plan, None, exact=False, note=f"{model.alias} is run by full forwards, not replayed: {why}")


def _largest_difference(model: Model, method: Method) -> float:
    """Against the model itself: unchanged from every layer on, and with a head set to zero in the first and last."""
    images, known = probe_images(model, 2), layers(model)
    records: dict[int, Record] = {}
    with evaluating(model), torch.no_grad(), torch.autocast(model.device.type, enabled=False):
        with recording(model, records, which=range(len(known))):
            plain: Tensor = model(images)
        scale = max(1.0, plain.abs().max().item())
        pairs = [(_from(model, method, records, layer), plain) for layer in known]
        for layer in (known[0], known[-1]):
            pairs.append((_from(model, method, records, layer, attention=True), plain))
            if layer.head_dim:
                zero = HeadReplaced(layer.index, layer.heads - 1)
                pairs.append((_from(model, method, records, layer, zero), _changed(model, images, zero)))
        return max((ours - full).abs().max().item() for ours, full in pairs) / scale


def _from(
    model: Model,
    method: Method,
    records: dict[int, Record],
    layer: Layer,
    *changes: HeadReplaced,
    attention: bool = False,
) -> Tensor:
    kind = Kind(layer.index, attention or not method.plan.starts[layer.index].branch, whole=False)
    what = Pass(kind, tuple(map(Change, changes)), 1, slice(0, 2), 2)
    return replay_pass(model, method, records[layer.index], what)[0]


def _changed(model: Model, images: Images, change: HeadReplaced) -> Tensor:
    with intervened(model, change):
        logits: Tensor = model(images)
    return logits
