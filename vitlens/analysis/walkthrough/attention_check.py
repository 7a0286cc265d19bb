"""`vitlens.check_attention`: a student's attention layer compared with the reference.

The layer is run on random tokens. Its output is compared with attention that is computed by hand
from its weights: correctly, then with each of the usual mistakes (attention_variants.py). The first
variant with the same output says what the layer computes.
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

# The random tokens. Batch, heads and tokens differ in number, so that exchanged axes are noticed.
_BATCH: Final = 2
_HEADS: Final = 3  # if a function takes (batch, heads, tokens, head_dim)
_TOKENS: Final = 5
_HEAD_DIM: Final = 8  # tokens of a function, which has no weights that fix their width
_DIM: Final = 32  # tokens of a layer without linear maps that fix their width
_SPREAD: Final = 2.0  # standard deviation of scores at which variants differ clearly
_LARGEST_FACTOR: Final = 30.0  # on tokens, for layers with weights near 0
_CLOSE: Final = 1e-4  # tolerance of equal outputs, as a part of the largest value
_DRAWS: Final = 400  # passes in training mode, to see the mean effect of dropout
_ERRORS: Final = 6.0  # two means differ if they are more standard errors apart
# outputs so many times larger than without a mask come from -1e9 or so, added after the softmax
_HUGE: Final = 1e3

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
    """The result of one check.

    check: the name of the check.
    passed: None if the check could not be made.
    says: the result in a sentence.
    """

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
        output or (output, weights). It is copied and stays as it is.
    dim: the width of its tokens, if its weights do not show it.
    heads: the number of its heads, if no attribute of it gives the number.

    Raises InputError if the module cannot be called in this way.

    >>> import torch, vitlens
    >>> vitlens.check_attention(lambda q, k, v: (q @ k.mT).softmax(-1) @ v).passed
    False
    """
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        layer = _Layer(module, dim, heads)
        return AttentionCheck(tuple(_findings(layer)))


class _Layer:
    """A copy of the student's layer, its inputs, and its output for them.

    module: the copy, in evaluation mode, or the function.
    takes: "x" if it takes one tensor of tokens, "qkv" if it takes three.
    mask: the name of its argument for a mask, "" if it takes none.
    tokens_first: True if it takes (tokens, batch, dim) instead of (batch, tokens, dim).
    inputs: random tokens for queries, keys and values.
    candidates: its linear maps, once for each way to read them.
    has_weights: True if it has any parameters.
    output, weights: what it returns for the inputs, weights None if it returns none.
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
            # a function may expect heads that are already split
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
        queries = inputs[0].double() @ self.candidates[0].query.weight.T
        keys = inputs[1].double() @ self.candidates[0].key.weight.T
        spread = (queries @ keys.mT / math.sqrt(queries.shape[-1])).std()
        # scores grow with the square of the tokens, so the factor on tokens is a square root
        factor = (_SPREAD / spread.clamp_min(1e-6)).sqrt().clamp_max(_LARGEST_FACTOR)
        return [float(factor) * part for part in inputs]

    def __call__(
        self, inputs: Sequence[Tensor] | None = None, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return output and weights of the layer, weights None if it returns none.

        Raises InputError if the call fails, or if the answer contains no tensor.
        """
        arguments = list(self.inputs if inputs is None else inputs)
        if self.takes == "x":
            arguments = arguments[:1]
        if self.tokens_first:
            arguments = [part.transpose(0, 1) for part in arguments]
        shape = arguments[0].shape
        tensors = self._call(arguments, mask)
        # the output is the first tensor of the shape of the input
        output = next((part for part in tensors if part.shape == shape), tensors[0])
        weights = None
        for part in tensors:
            if part is not output and part.shape[-2:] == (_TOKENS, _TOKENS):
                weights = part
        if self.tokens_first and output.shape == shape:
            output = output.transpose(0, 1)
        return output, weights

    def _call(self, arguments: Sequence[Tensor], mask: Tensor | None) -> list[Tensor]:
        """Return all tensors in the layer's answer."""
        options = {} if mask is None else {self.mask: mask}
        try:
            answer = self.module(*arguments, **options)
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
        return tensors


def _signature(module: nn.Module | Callable[..., Any]) -> tuple[Literal["x", "qkv"], str]:
    """Return which tokens a layer takes, and the name of its argument for a mask ("" for none)."""
    called = module.forward if isinstance(module, nn.Module) else module
    try:
        parameters = inspect.signature(called).parameters.values()
    except (TypeError, ValueError):  # a function in C, e.g. scaled_dot_product_attention
        return "qkv", "attn_mask"
    names = []
    required = []
    masks = []
    for parameter in parameters:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if "mask" in parameter.name.lower() and parameter.name != "key_padding_mask":
            masks.append(parameter.name)
        elif parameter.kind != parameter.KEYWORD_ONLY:
            names.append(parameter.name)
            if parameter.default is parameter.empty:
                required.append(parameter.name)
    if not names:
        raise InputError(
            "expected module(q, k, v[, mask]) or module(x[, mask]), found one without arguments"
        )
    # a third argument with a default may be an option of self-attention, unless the first is q
    takes_three = len(names) >= 3 and (len(required) >= 3 or names[0].lower().startswith("q"))
    return "qkv" if takes_three else "x", masks[0] if masks else ""


@dataclass(frozen=True)
class _Match:
    """The variant that has the layer's output.

    projections: the linear maps with which it has, None for a function without weights.
    weights: the variant's attention weights (batch, heads, query, key).
    """

    variant: Variant
    projections: Projections | None
    weights: Tensor


def _findings(layer: _Layer) -> Iterator[Finding]:
    """Yield the results of all checks of a layer."""
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
    match = _find_match(layer)
    if match is not None:
        yield from _describe_match(layer, match)
    else:
        yield _describe_mismatch(layer)
        yield _check_batch(layer)
        yield _check_permutation(layer)
    if layer.weights is not None:
        yield _check_rows(layer.weights)
    yield _check_mask(layer, match)
    yield _check_dropout(layer)


def _is_close(first: Tensor, second: Tensor) -> bool:
    if first.shape != second.shape or not bool(first.isfinite().all() and second.isfinite().all()):
        return False
    return float((first - second).abs().max()) <= _CLOSE * float(second.abs().max())


def _find_match(layer: _Layer) -> _Match | None:
    """Return the variant with the fewest mistakes that has the layer's output."""
    inputs = [part.double() for part in layer.inputs]
    candidates: Sequence[Projections | None] = layer.candidates
    if not layer.has_weights:
        candidates = (None,)
    for variant in variants():
        for projections in candidates:
            answer = attend(inputs, projections, variant)
            if answer is not None and _is_close(layer.output.double(), answer[0]):
                return _Match(variant, projections, answer[1])
    return None


def _describe_match(layer: _Layer, match: _Match) -> Iterator[Finding]:
    """Yield a finding for each step of attention, right or wrong as in the matched variant."""
    variant = match.variant
    projections = match.projections
    width = layer.inputs[0].shape[-1]
    heads = 1
    if projections is not None:
        width = len(projections.query.weight)
        heads = projections.heads
    widths = {"dim": width if variant.split == "whole" else width // heads, "width": width}
    yield _check_scale(variant, widths)
    if variant.axis == "keys":
        yield Finding("softmax", True, "The softmax runs over the keys: each row sums to 1.")
    else:
        yield Finding("softmax", False, _AXES[variant.axis])
    yield _check_order(variant)
    if projections is not None:
        yield _check_heads(variant, heads, widths)
        if projections.output is not None:
            yield _check_projection(variant)
    if layer.weights is not None:
        yield _check_returned_weights(layer.weights, match.weights)


def _check_scale(variant: Variant, widths: dict[str, int]) -> Finding:
    if variant.scale == "head":
        says = f"The scores are divided by √{widths['dim']}, the width of a head."
        return Finding("scale", True, says)
    return Finding("scale", False, _SCALES[variant.scale].format(**widths))


def _check_order(variant: Variant) -> Finding:
    if variant.order == "qkv":
        return Finding("order", True, "Queries, keys and values have their places.")
    if variant.order == "qkk":
        says = "The weights multiply the keys. Multiply them with the values."
    elif variant.order == "kqv":
        says = (
            "Queries and keys are exchanged: the scores are k·q. Compute q @ k.transpose(-2, -1)."
        )
    else:
        says = (
            f"Queries, keys and values are exchanged: they are used in the order {variant.order}."
        )
    return Finding("order", False, says)


def _check_heads(variant: Variant, heads: int, widths: dict[str, int]) -> Finding:
    if variant.split in _SPLITS:
        return Finding("heads", False, _SPLITS[variant.split].format(**widths))
    if variant.merge == "reshape":
        says = (
            "The heads are joined without the transpose, which mixes tokens. Transpose "
            "(batch, heads, tokens, head_dim) to (batch, tokens, heads, head_dim), then flatten."
        )
        return Finding("heads", False, says)
    noun = "head" if heads == 1 else "heads"
    return Finding(
        "heads", True, f"{heads} {noun} of {widths['dim']} numbers, cut and joined right."
    )


def _check_projection(variant: Variant) -> Finding:
    if variant.projected:
        return Finding("projection", True, "The output projection is applied to the joined heads.")
    says = "The layer has an output projection and does not use it. Return proj(output)."
    return Finding("projection", False, says)


def _check_returned_weights(weights: Tensor, expected: Tensor) -> Finding:
    """Check that the weights that a layer returns are those that it uses.

    expected: the weights that it uses, (batch, heads, query, key).
    """
    # a layer may return all heads, their mean, or (batch, query, key) if it has one head
    forms = (expected, expected.mean(1), expected[:, 0])
    if any(_is_close(weights.double(), form) for form in forms):
        return Finding("weights", True, "The weights that it returns are those that it uses.")
    return Finding("weights", False, "The weights that it returns are not those that it uses.")


def _describe_mismatch(layer: _Layer) -> Finding:
    """Say why the values cannot be compared, or how far they are from the reference."""
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


def _check_batch(layer: _Layer) -> Finding:
    """Check that the output of the first sequence does not depend on the other sequences."""
    changed = []
    for part in layer.inputs:
        other = part.clone()
        other[1:] = torch.randn_like(other[1:])
        changed.append(other)
    output, _ = layer(changed)
    if _is_close(output[:1], layer.output[:1]):
        return Finding("batch", True, "The output of a sequence depends on no other of the batch.")
    says = "The output of a sequence depends on the others of the batch. Do not mix the batch."
    return Finding("batch", False, says)


def _check_permutation(layer: _Layer) -> Finding:
    """Check that permuted tokens give permuted outputs, as for any attention without positions."""
    order = torch.randperm(_TOKENS)
    output, _ = layer([part[..., order, :] for part in layer.inputs])
    if _is_close(output, layer.output[..., order, :]):
        return Finding("tokens", True, "Permuted tokens give permuted outputs.")
    says = (
        "Permuted tokens do not give permuted outputs. Either a reshape mixes tokens, or the "
        "layer has positions or a mask."
    )
    return Finding("tokens", None, says)


def _check_rows(weights: Tensor) -> Finding:
    """Check that each row of the weights sums to one."""
    rows = weights.sum(-1)
    if _is_close(rows, torch.ones_like(rows)) and float(weights.min()) >= 0:
        return Finding("rows", True, "Each row of the weights sums to 1.")
    columns = weights.sum(-2)
    if _is_close(columns, torch.ones_like(columns)):
        says = "The columns of the weights sum to 1 and the rows do not: use softmax(dim=-1)."
    else:
        says = f"The rows of the weights sum to {float(rows.min()):.2g} to {float(rows.max()):.2g}."
    return Finding("rows", False, says)


@dataclass(frozen=True)
class _Masked:
    """A mask in one form that the layer takes, with the layer's output under it.

    words: the meaning of the mask's values.
    """

    words: str
    mask: Tensor
    output: Tensor


def _mask_forms(allowed: Bool[Tensor, "query key"]) -> Iterator[tuple[str, Tensor]]:
    """Yield a mask in each form that layers take, with its meaning in words."""
    added = torch.zeros(allowed.shape).masked_fill(~allowed, -torch.inf)
    forms = (
        ("True or 1 where a query may attend", allowed),
        ("1 where a query may attend", allowed.float()),
        ("0 where a query may attend, -inf elsewhere", added),
        ("True where a query may not attend", ~allowed),
    )
    for words, mask in forms:
        # for the scores of all sequences, (batch, query, key) or (batch, heads, query, key)
        yield words, mask
        yield words, mask.expand(_BATCH, *mask.shape)
        yield words, mask.expand(_BATCH, 1, *mask.shape)


def _masked_outputs(layer: _Layer, allowed: Bool[Tensor, "query key"]) -> list[_Masked]:
    """Return the outputs under a mask, one for each form of it that the layer takes."""
    results = []
    for words, mask in _mask_forms(allowed):
        try:
            output, _ = layer(mask=mask)
        except InputError:
            continue
        if output.shape == layer.output.shape:
            results.append(_Masked(words, mask, output))
    return results


def _check_mask(layer: _Layer, match: _Match | None) -> Finding:
    """Check that a mask hides keys, or name the mistake that has the same effect."""
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
    for masked in outputs:
        if match is None:
            is_right = _hides_later_tokens(layer, masked)
        else:
            is_right = _is_close(masked.output.double(), _with_mask(layer, match, allowed, "right"))
        if is_right:
            return Finding("mask", True, f"Masked keys have no weight; the mask is {masked.words}.")
    return _name_mask_mistake(layer, match, allowed, outputs)


def _name_mask_mistake(
    layer: _Layer,
    match: _Match | None,
    allowed: Bool[Tensor, "query key"],
    outputs: Sequence[_Masked],
) -> Finding:
    """Say which mistake explains the outputs under masks, none of which is right."""
    mistakes: Sequence[MaskUse] = ("after", "zero", "queries", "weak")
    if match is not None:
        for mistake in mistakes:
            expected = _with_mask(layer, match, allowed, mistake)
            if any(_is_close(masked.output.double(), expected) for masked in outputs):
                return Finding("mask", False, _MASKS[mistake])
    if all(_is_close(masked.output, layer.output) for masked in outputs):
        return Finding("mask", False, _MASKS["ignored"])
    largest = float(layer.output.abs().max())
    for masked in outputs:
        output = masked.output
        if not bool(output.isfinite().all()) or float(output.abs().max()) > _HUGE * largest:
            says = (
                "The mask is added after the softmax, which gives infinite or huge outputs. Add it "
                "to the scores, before the softmax."
            )
            return Finding("mask", False, says)
    return Finding("mask", False, "Tokens that a mask hides still change the output.")


def _hides_later_tokens(layer: _Layer, masked: _Masked) -> bool:
    """Return True if the first token's output does not depend on later tokens under the mask.

    The mask lets the first query attend to itself only. The outputs of later tokens must change.
    """
    changed = [part.clone() for part in layer.inputs]
    for part in changed:
        part[..., 1:, :] = torch.randn_like(part[..., 1:, :])
    output, _ = layer(changed, masked.mask)
    is_first_equal = _is_close(output[..., :1, :], masked.output[..., :1, :])
    are_others_equal = _is_close(output[..., 1:, :], masked.output[..., 1:, :])
    return is_first_equal and not are_others_equal


def _with_mask(
    layer: _Layer, match: _Match, allowed: Bool[Tensor, "query key"], use: MaskUse
) -> Tensor:
    """Return the output of the matched variant under a mask that is used in this way."""
    inputs = [part.double() for part in layer.inputs]
    answer = attend(inputs, match.projections, match.variant, allowed, use)
    assert answer is not None  # as the variant matched without a mask
    return answer[0]


def _check_dropout(layer: _Layer) -> Finding:
    """Check that dropout, which is off in evaluation, keeps the mean in training."""
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
    deviation_in_errors = (outputs.mean(0) - layer.output).abs() / error.clamp_min(1e-9)
    if float(deviation_in_errors.max()) > _ERRORS:
        says = (
            "The mean output in training is not that in evaluation. Apply dropout to the weights "
            "after the softmax, and divide what remains by (1 - p), as nn.Dropout does: a factor "
            "of 1/(1 - p)."
        )
        return Finding("dropout", False, says)
    says = "Off in evaluation; in training, the mean output over many passes is the same."
    return Finding("dropout", True, says)
