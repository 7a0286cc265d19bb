"""`vitlens.check_attention`: a student's own attention compared with the reference.

The layer is run on random tokens and compared with attention that is computed by hand from its
weights, right and with each of the usual mistakes (attention_variants.py). The first variant with
the same output says what the layer computes.
"""

import copy
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Final, Literal

import torch
from jaxtyping import Bool
from torch import Tensor, nn

from vitlens.analysis.walkthrough.attention_variants import (
    MaskUse,
    Projections,
    Variant,
    attend,
    read_projections,
    variants,
)
from vitlens.errors import InputError, first_line

_BATCH: Final = 2
_TOKENS: Final = 5
_HEAD_DIM: Final = 8  # of a function
_DIM: Final = 32  # of a layer that does not say
_HEADS: Final = 3  # of queries, keys and values that a function takes as (batch, heads, ..)
_SPREAD: Final = 2.0  # standard deviation of scores, with which variants are told apart
_LARGEST_FACTOR: Final = 30.0  # of the tokens, to reach that spread
_CLOSE: Final = 1e-4  # of the largest value
_DRAWS: Final = 400  # passes in training mode
_ERRORS: Final = 6.0  # standard errors, beyond which two means differ
_HUGE: Final = 1e3  # times the values: the output of a mask that is added after the softmax

_SCALES: Final = {
    "none": "The scores are not divided by √{dim}: multiply q·k by 1/√{dim} before the softmax.",
    "width": "The scores are divided by √{width}, the width of the layer. Divide them by √{dim}, "
    "the width of a head.",
    "squared": "The scores are divided by {dim}, the width of a head. Divide them by its square "
    "root, √{dim}.",
    "inverse": "The scores are multiplied by √{dim}. Divide them by it.",
}
_AXES: Final = {
    "queries": "The softmax runs over the queries, so the weights of a query do not sum to 1. Use "
    "softmax(dim=-1) of scores (..., query, key).",
    "heads": "The softmax runs over the heads. Use softmax(dim=-1), over the keys.",
    "batch": "The softmax runs over the batch. Use softmax(dim=-1), over the keys.",
    "none": "There is no softmax: the scores weight the values. Use softmax(dim=-1).",
}
_SPLITS: Final = {
    "whole": "The heads are not split: one attention runs over all {width} numbers. Reshape "
    "queries, keys and values to (batch, tokens, heads, head_dim) and transpose the middle two.",
    "reshape": "The heads are cut by a reshape without the transpose, which mixes tokens. Reshape "
    "to (batch, tokens, heads, head_dim), then transpose to (batch, heads, tokens, head_dim).",
}
_MASKS: Final = {
    "after": "The mask is applied after the softmax, so the rows do not sum to 1. Set masked "
    "scores to -inf before the softmax.",
    "zero": "Masked scores are set to 0 or nearly 0, and exp(0) = 1 still has weight. Set them to "
    "-inf.",
    "queries": "The mask hides queries instead of keys: it is transposed. Rows are queries, "
    "columns are keys.",
    "weak": "A 0/1 mask is added to the scores. Set masked scores to -inf.",
    "ignored": "The mask has no effect on the output. Set masked scores to -inf before the "
    "softmax.",
}


@dataclass(frozen=True)
class Finding:
    """One check. passed: None where it could not be made; says: what was found, in a sentence."""

    check: str
    passed: bool | None
    says: str


@dataclass(frozen=True, repr=False)
class AttentionCheck:
    """The checks of an attention layer, in plain sentences.

    >>> import torch, vitlens
    >>> check = vitlens.check_attention(torch.nn.MultiheadAttention(8, 2, batch_first=True))
    >>> check.passed
    True
    """

    findings: tuple[Finding, ...]

    @property
    def passed(self) -> bool:
        """Return True if no check failed."""
        return all(finding.passed is not False for finding in self.findings)

    def __repr__(self) -> str:
        width = max(len(finding.check) for finding in self.findings)
        lines = [f"AttentionCheck: {self._headline()}"]
        for finding in self.findings:
            lines.append(f"  {_mark(finding)}  {finding.check.ljust(width)}  {finding.says}")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td>{_mark(finding)}</td><td>{finding.check}</td>"
            f"<td>{escape(finding.says)}</td></tr>"
            for finding in self.findings
        )
        return f"<table><caption>AttentionCheck: {self._headline()}</caption>{rows}</table>"

    def _headline(self) -> str:
        failed = sum(finding.passed is False for finding in self.findings)
        return f"{failed} of {len(self.findings)} checks failed" if failed else "no check failed"


def _mark(finding: Finding) -> str:
    if finding.passed is None:
        return "-   "
    return "ok  " if finding.passed else "FAIL"


def check_attention(
    module: nn.Module | Callable[..., Any], *, dim: int | None = None, heads: int | None = None
) -> AttentionCheck:
    """Compare an attention layer or function with the reference and name the likely mistakes.

    module: takes (q, k, v[, mask]) or (x[, mask]), each (batch, tokens, dim), and returns the
        output or (output, weights).
    dim, heads: of a layer that does not say.

    The module is copied: it stays as it is.

    Raises InputError for what cannot be called so.

    >>> import torch, vitlens
    >>> vitlens.check_attention(lambda q, k, v: (q @ k.mT).softmax(-1) @ v).passed
    False
    """
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        layer = _Layer(module, dim, heads)
        return AttentionCheck(tuple(_findings(layer)))


class _Layer:
    """A copy of the student's layer, and how it is called.

    takes: "x" or "qkv".
    mask: the name of its argument for a mask, "" for none.
    inputs: the inputs of queries, keys and values.
    candidates: its linear maps, as they may be meant.
    """

    def __init__(
        self, module: nn.Module | Callable[..., Any], dim: int | None, heads: int | None
    ) -> None:
        if not callable(module):
            raise InputError(
                "expected a module or function that computes attention, found "
                f"{type(module).__name__}"
            )
        self.module = module
        self.candidates: list[Projections] = []
        self.has_weights = False
        if isinstance(module, nn.Module):
            self.module = copy.deepcopy(module).float().cpu().eval()
            self.candidates = read_projections(self.module, heads)
            self.has_weights = any(True for _ in self.module.parameters())
        self.takes, self.mask = _signature(module)
        self.tokens_first = getattr(module, "batch_first", None) is False
        width = dim or self._width()
        self.inputs = self._draw_inputs((_BATCH, _TOKENS, width))
        try:
            self.output, self.weights = self()
        except InputError:
            if self.takes == "x" or isinstance(module, nn.Module):
                raise
            self.inputs = self._draw_inputs((_BATCH, _HEADS, _TOKENS, width))
            self.output, self.weights = self()

    def _width(self) -> int:
        """Return the width of the tokens that the layer takes."""
        if self.candidates:
            return self.candidates[0].query.weight.shape[1]
        if not isinstance(self.module, nn.Module):
            return _HEAD_DIM
        for part in self.module.modules():
            if isinstance(part, nn.Linear):
                return part.in_features
        return _DIM

    def _draw_inputs(self, shape: tuple[int, ...]) -> list[Tensor]:
        """Return random tokens whose scores differ enough to tell variants apart."""
        if self.takes == "x":
            inputs = [torch.randn(shape)] * 3
        else:
            inputs = [torch.randn(shape) for _ in range(3)]
        if not self.candidates:
            return inputs
        query, key = self.candidates[0].query, self.candidates[0].key
        queries = inputs[0].double() @ query.weight.T
        keys = inputs[1].double() @ key.weight.T
        spread = (queries @ keys.mT / math.sqrt(queries.shape[-1])).std()
        # scores grow with the square of the tokens
        factor = (_SPREAD / spread.clamp_min(1e-6)).sqrt().clamp_max(_LARGEST_FACTOR)
        return [float(factor) * part for part in inputs]

    def __call__(
        self, inputs: Sequence[Tensor] | None = None, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return output and weights, None where none are returned.

        Raises InputError for a call that fails and for an answer without a tensor.
        """
        arguments = list(self.inputs if inputs is None else inputs)
        if self.tokens_first:
            arguments = [part.transpose(0, 1) for part in arguments]
        options = {} if mask is None else {self.mask: mask}
        try:
            answer = self.module(*arguments[: 1 if self.takes == "x" else 3], **options)
        except Exception as error:
            raise InputError(
                "expected module(q, k, v[, mask]) or module(x[, mask]) for tokens of shape "
                f"{tuple(arguments[0].shape)}, found {type(error).__name__}: {first_line(error)}"
            ) from error
        parts = answer if isinstance(answer, tuple | list) else (answer,)
        tensors = [part for part in parts if isinstance(part, Tensor)]
        if not tensors:
            raise InputError(
                "expected an output, or (output, weights), as tensors, found "
                f"{type(answer).__name__}"
            )
        output = next((part for part in tensors if part.shape == arguments[0].shape), tensors[0])
        weights = None
        for part in tensors:
            if part is not output and part.shape[-2:] == (_TOKENS, _TOKENS):
                weights = part
        if self.tokens_first and output.shape == arguments[0].shape:
            output = output.transpose(0, 1)
        return output, weights


def _signature(module: nn.Module | Callable[..., Any]) -> tuple[Literal["x", "qkv"], str]:
    """Return what a layer takes, and the name of its argument for a mask, "" for none."""
    called = module.forward if isinstance(module, nn.Module) else module
    try:
        parameters = inspect.signature(called).parameters.values()
    except (TypeError, ValueError):  # of a function in C, such as PyTorch's own
        return "qkv", "attn_mask"
    names = []
    needed = []
    masks = []
    for parameter in parameters:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if "mask" in parameter.name.lower() and parameter.name != "key_padding_mask":
            masks.append(parameter.name)
        elif parameter.kind != parameter.KEYWORD_ONLY:
            names.append(parameter.name)
            if parameter.default is parameter.empty:
                needed.append(parameter.name)
    if not names:
        raise InputError(
            "expected module(q, k, v[, mask]) or module(x[, mask]), found one without arguments"
        )
    has_three = len(names) >= 3 and (len(needed) >= 3 or names[0].lower().startswith("q"))
    return "qkv" if has_three else "x", masks[0] if masks else ""


@dataclass(frozen=True)
class _Match:
    """The variant that has the layer's output, with its linear maps; weights: of the variant."""

    variant: Variant
    projections: Projections | None
    weights: Tensor


def _findings(layer: _Layer) -> Iterator[Finding]:
    """Yield the checks of a layer."""
    shape = tuple(layer.inputs[2].shape)
    if tuple(layer.output.shape) != shape:
        yield Finding(
            "shape",
            False,
            f"The output has the shape {tuple(layer.output.shape)}, expected {shape}, that of the "
            "input. Join the heads, and return (batch, tokens, dim).",
        )
        return
    yield Finding("shape", True, f"The output has the shape of the input, {shape}.")
    again, _ = layer()
    if not torch.equal(again, layer.output):
        says = (
            "Two passes in evaluation mode differ, so nothing else is compared: dropout is active. "
            "Use nn.Dropout, or pass training=self.training to F.dropout."
        )
        yield Finding("dropout", False, says)
        return
    match = _match(layer)
    if match is not None:
        yield from _of_match(layer, match)
    else:
        yield _describe_mismatch(layer)
        yield from _of_behaviour(layer)
    if layer.weights is not None:
        yield _rows(layer.weights)
    yield _mask(layer, match)
    yield _dropout(layer)


def _is_close(first: Tensor, second: Tensor) -> bool:
    if first.shape != second.shape or not bool(first.isfinite().all() and second.isfinite().all()):
        return False
    return float((first - second).abs().max()) <= _CLOSE * float(second.abs().max())


def _match(layer: _Layer) -> _Match | None:
    """Return the variant with the fewest mistakes that has the layer's output."""
    inputs = [part.double() for part in layer.inputs]
    readings: Sequence[Projections | None] = layer.candidates
    if not layer.has_weights:
        readings = (None,)
    for variant in variants():
        for projections in readings:
            answer = attend(inputs, projections, variant)
            if answer is not None and _is_close(layer.output.double(), answer[0]):
                return _Match(variant, projections, answer[1])
    return None


def _of_match(layer: _Layer, match: _Match) -> Iterator[Finding]:
    """Yield what the variant with the layer's output says of it."""
    variant = match.variant
    projections = match.projections
    width = layer.inputs[0].shape[-1]
    heads = 1
    if projections is not None:
        width = len(projections.query.weight)
        heads = projections.heads
    dim = width if variant.split == "whole" else width // heads
    words = {"dim": dim, "width": width}
    if variant.scale == "head":
        says = f"The scores are divided by √{dim}, the width of a head."
        yield Finding("scale", True, says)
    else:
        yield Finding("scale", False, _SCALES[variant.scale].format(**words))
    if variant.axis == "keys":
        yield Finding("softmax", True, "The softmax runs over the keys: each row sums to 1.")
    else:
        yield Finding("softmax", False, _AXES[variant.axis])
    if variant.order == "qkv":
        yield Finding("order", True, "Queries, keys and values have their places.")
    elif variant.order == "qkk":
        says = "The weights multiply the keys. Multiply them with the values."
        yield Finding("order", False, says)
    elif variant.order == "kqv":
        says = (
            "Queries and keys are exchanged: the scores are k·q. Compute q @ k.transpose(-2, -1)."
        )
        yield Finding("order", False, says)
    else:
        says = (
            f"Queries, keys and values are exchanged: they are used in the order {variant.order}."
        )
        yield Finding("order", False, says)
    if projections is not None:
        yield _heads(variant, heads, words)
        if projections.output is not None:
            yield _projection(variant)
    if layer.weights is not None:
        yield _check_returned_weights(layer.weights, match.weights)


def _heads(variant: Variant, heads: int, words: dict[str, int]) -> Finding:
    if variant.split in _SPLITS:
        return Finding("heads", False, _SPLITS[variant.split].format(**words))
    if variant.merge == "reshape":
        says = (
            "The heads are joined without the transpose, which mixes tokens. Transpose "
            "(batch, heads, tokens, head_dim) to (batch, tokens, heads, head_dim), then flatten."
        )
        return Finding("heads", False, says)
    noun = "head" if heads == 1 else "heads"
    return Finding(
        "heads", True, f"{heads} {noun} of {words['dim']} numbers, cut and joined right."
    )


def _projection(variant: Variant) -> Finding:
    if variant.projected:
        return Finding("projection", True, "The output projection is applied to the joined heads.")
    says = "The layer has an output projection and does not use it. Return proj(output)."
    return Finding("projection", False, says)


def _check_returned_weights(weights: Tensor, expected: Tensor) -> Finding:
    """Check whether the weights that a layer returns are those that it uses."""
    # per head, their mean over heads, or of one head without its axis
    forms = (expected, expected.mean(1), expected[:, 0])
    if any(_is_close(weights.double(), form) for form in forms):
        return Finding("weights", True, "The weights that it returns are those that it uses.")
    return Finding("weights", False, "The weights that it returns are not those that it uses.")


def _describe_mismatch(layer: _Layer) -> Finding:
    """Return why the values are not compared, or that they are of no variant that is known here."""
    if layer.has_weights and not layer.candidates:
        return Finding(
            "values",
            None,
            "Not compared: no layers with the names query, key and value, or qkv, were found. What "
            "follows is what the layer does.",
        )
    projections = layer.candidates[0] if layer.candidates else None
    reference = attend([part.double() for part in layer.inputs], projections, Variant())
    assert reference is not None
    difference = float((layer.output - reference[0]).abs().max() / reference[0].abs().max())
    return Finding(
        "values",
        False,
        f"The output differs from softmax(q·k / √d) v by up to {difference:.2g} of its largest "
        "value, and from what the usual mistakes would give.",
    )


def _of_behaviour(layer: _Layer) -> Iterator[Finding]:
    """Yield what must hold for attention of any weights."""
    changed = []
    for part in layer.inputs:
        other = part.clone()
        other[1:] = torch.randn_like(other[1:])
        changed.append(other)
    output, _ = layer(changed)
    if _is_close(output[:1], layer.output[:1]):
        yield Finding("batch", True, "The output of a sequence depends on no other of the batch.")
    else:
        says = "The output of a sequence depends on the others of the batch. Do not mix the batch."
        yield Finding("batch", False, says)
    order = torch.randperm(_TOKENS)
    output, _ = layer([part[..., order, :] for part in layer.inputs])
    if _is_close(output, layer.output[..., order, :]):
        yield Finding("tokens", True, "Permuted tokens give permuted outputs.")
    else:
        says = (
            "Permuted tokens do not give permuted outputs. Either a reshape mixes tokens, or the "
            "layer has positions or a mask."
        )
        yield Finding("tokens", None, says)


def _rows(weights: Tensor) -> Finding:
    """Check whether each row of the weights sums to one."""
    rows = weights.sum(-1)
    if _is_close(rows, torch.ones_like(rows)) and float(weights.min()) >= 0:
        return Finding("rows", True, "Each row of the weights sums to 1.")
    columns = weights.sum(-2)
    if _is_close(columns, torch.ones_like(columns)):
        says = "The columns of the weights sum to 1 and the rows do not: use softmax(dim=-1)."
    else:
        says = f"The rows of the weights sum to {float(rows.min()):.2g} to {float(rows.max()):.2g}."
    return Finding("rows", False, says)


def _forms(allowed: Bool[Tensor, "query key"]) -> Iterator[tuple[str, Tensor]]:
    """Yield a mask in each form that layers take, with its meaning in words."""
    added = torch.zeros(allowed.shape).masked_fill(~allowed, -torch.inf)
    forms = (
        ("True or 1 where a query may attend", allowed),
        ("1 where a query may attend", allowed.float()),
        ("0 where a query may attend, -inf elsewhere", added),
        ("True where a query may not attend", ~allowed),
    )
    for words, mask in forms:
        yield words, mask
        yield words, mask.expand(_BATCH, *mask.shape)
        yield words, mask.expand(_BATCH, 1, *mask.shape)


def _masked_outputs(
    layer: _Layer, allowed: Bool[Tensor, "query key"], inputs: Sequence[Tensor] | None = None
) -> list[tuple[str, Tensor]]:
    """Return the outputs under a mask in each form that the layer takes.

    inputs: in place of the layer's.
    """
    outputs = []
    for words, mask in _forms(allowed):
        try:
            output, _ = layer(inputs, mask)
        except InputError:
            continue
        if output.shape == layer.output.shape:
            outputs.append((words, output))
    return outputs


def _mask(layer: _Layer, match: _Match | None) -> Finding:
    """Check whether a mask hides keys, or which usual mistake has the same effect."""
    if match is not None and match.variant.causal:
        says = (
            "Later tokens are masked, though no mask was given. That is right for text and wrong "
            "for the patches of an image."
        )
        return Finding("mask", None, says)
    if not layer.mask:
        return Finding("mask", None, "Not checked: the layer takes no mask.")
    if match is not None and match.variant.axis != "keys":
        return Finding("mask", None, "Not checked: the softmax runs over another axis.")
    allowed = torch.ones(_TOKENS, _TOKENS, dtype=torch.bool).tril()
    outputs = _masked_outputs(layer, allowed)
    if not outputs:
        return Finding("mask", None, "Not checked: no mask of the usual forms was taken.")
    for words, output in outputs:
        if _is_right(layer, match, allowed, words, output):
            return Finding("mask", True, f"Masked keys have no weight; the mask is {words}.")
    uses: Sequence[MaskUse] = ("after", "zero", "queries", "weak") if match else ()
    for use in uses:
        for _, output in outputs:
            if _is_close(output.double(), _with_mask(layer, match, allowed, use)):
                return Finding("mask", False, _MASKS[use])
    if all(_is_close(output, layer.output) for _, output in outputs):
        return Finding("mask", False, _MASKS["ignored"])
    largest = float(layer.output.abs().max())
    for _, output in outputs:
        if not bool(output.isfinite().all()) or float(output.abs().max()) > _HUGE * largest:
            says = (
                "The mask is added after the softmax, which gives infinite or huge outputs. Add it "
                "to the scores, before the softmax."
            )
            return Finding("mask", False, says)
    return Finding("mask", False, "Tokens that a mask hides still change the output.")


def _is_right(
    layer: _Layer,
    match: _Match | None,
    allowed: Bool[Tensor, "query key"],
    form: str,
    output: Tensor,
) -> bool:
    """Return True if an output is that of the layer under the mask in one of its forms.

    Without a match, return True if only the first query, which attends to itself, does not depend
    on the other tokens.
    """
    if match is not None:
        return _is_close(output.double(), _with_mask(layer, match, allowed, "right"))
    changed = [part.clone() for part in layer.inputs]
    for part in changed:
        part[..., 1:, :] = torch.randn_like(part[..., 1:, :])
    # masks of one form differ in shape only, and have the same effect
    changed_output = dict(_masked_outputs(layer, allowed, changed)).get(form)
    if changed_output is None:
        return False
    first_is_equal = _is_close(changed_output[..., :1, :], output[..., :1, :])
    rest_is_equal = _is_close(changed_output[..., 1:, :], output[..., 1:, :])
    return first_is_equal and not rest_is_equal


def _with_mask(
    layer: _Layer, match: _Match | None, allowed: Bool[Tensor, "query key"], use: MaskUse
) -> Tensor:
    """Return the output of the matched variant under a mask that is used in this way."""
    assert match is not None
    inputs = [part.double() for part in layer.inputs]
    answer = attend(inputs, match.projections, match.variant, allowed, use)
    assert answer is not None
    return answer[0]


def _dropout(layer: _Layer) -> Finding:
    """Check whether dropout, which is off in evaluation, keeps the mean in training."""
    if not isinstance(layer.module, nn.Module):
        return Finding("dropout", None, "Not checked: a function has no training mode.")
    layer.module.train()
    outputs = torch.stack([layer()[0] for _ in range(2)])
    if torch.equal(outputs[0], outputs[1]):
        layer.module.eval()
        return Finding("dropout", None, "No dropout was found.")
    outputs = torch.stack([layer()[0] for _ in range(_DRAWS)]).double()
    layer.module.eval()
    error = outputs.std(0) / math.sqrt(_DRAWS)
    off = (outputs.mean(0) - layer.output).abs() / error.clamp_min(1e-9)
    if float(off.max()) > _ERRORS:
        says = (
            "The mean output in training is not that in evaluation. Apply dropout to the weights "
            "after the softmax, and divide what remains by (1 - p), as nn.Dropout does: a factor "
            "of 1/(1 - p)."
        )
        return Finding("dropout", False, says)
    says = "Off in evaluation; in training, the mean output over many passes is the same."
    return Finding("dropout", True, says)
