"""`vitlens.check_attention`: a student's attention layer compared with the reference.

The layer is run on random tokens. Its output is compared with attention that is computed by hand
from its weights: correctly, then with each of the usual mistakes (attention_variants.py). The first
variant with the same output says what the layer computes.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Final

import torch
from jaxtyping import Bool
from torch import Tensor, nn

from vitlens.analysis.walkthrough.attention_variants import (
    MaskUse,
    Projections,
    Variant,
    attend,
    variants,
)
from vitlens.analysis.walkthrough.student_layer import BATCH, TOKENS, StudentLayer
from vitlens.errors import InputError

_CLOSE: Final = 1e-4  # tolerance of equal outputs, as a part of the largest value
_DRAWS: Final = 400  # passes in training mode, to see the mean effect of dropout
_ERRORS: Final = 6.0  # two means differ if they are more standard errors apart
# outputs so many times larger than without a mask come from -1e9 or so, added after the softmax
_HUGE: Final = 1e3
_SMALLEST_ERROR: Final = 1e-9  # avoids a division by 0

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
    "reshape": "The heads are split by a reshape without the transpose, which mixes tokens. "
    "Reshape to (batch, tokens, heads, head_dim), then transpose to (batch, heads, "
    "tokens, head_dim).",
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


def _passed(check: str, says: str) -> Finding:
    return Finding(check, passed=True, says=says)


def _failed(check: str, says: str) -> Finding:
    return Finding(check, passed=False, says=says)


def _undecided(check: str, says: str) -> Finding:
    """Return the finding of a check that could not be made, or that decides nothing."""
    return Finding(check, passed=None, says=says)


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
        layer = StudentLayer(module, dim, heads)
        return AttentionCheck(tuple(_findings(layer)))


@dataclass(frozen=True)
class _Match:
    """The variant that has the layer's output.

    projections: the linear maps with which it has, None for a function without weights.
    weights: the variant's attention weights (batch, heads, query, key).
    """

    variant: Variant
    projections: Projections | None
    weights: Tensor


def _findings(layer: StudentLayer) -> Iterator[Finding]:
    """Yield the results of all checks of a layer."""
    shape = tuple(layer.inputs[2].shape)
    if tuple(layer.output.shape) != shape:
        yield _failed(
            "shape",
            f"The output has the shape {tuple(layer.output.shape)}, expected {shape}, that of the "
            "input. Join the heads, and return (batch, tokens, dim).",
        )
        return
    yield _passed("shape", f"The output has the shape of the input, {shape}.")
    again, _ = layer()
    if not torch.equal(again, layer.output):
        says = (
            "Two passes in evaluation mode differ, so nothing else is compared: dropout is active. "
            "Use nn.Dropout, or pass training=self.training to F.dropout."
        )
        yield _failed("dropout", says)
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
    """Return True if two tensors are equal except for rounding."""
    if first.shape != second.shape:
        return False
    if not bool(first.isfinite().all()) or not bool(second.isfinite().all()):
        return False
    largest_difference = float((first - second).abs().max())
    return largest_difference <= _CLOSE * float(second.abs().max())


def _find_match(layer: StudentLayer) -> _Match | None:
    """Return the variant with the fewest mistakes that has the layer's output."""
    inputs = [part.double() for part in layer.inputs]
    candidates: Sequence[Projections | None] = layer.candidates
    if not layer.has_weights:
        candidates = (None,)
    for variant in variants():
        for projections in candidates:
            output, weights = attend(inputs, projections, variant)
            if _is_close(layer.output.double(), output):
                return _Match(variant, projections, weights)
    return None


def _describe_match(layer: StudentLayer, match: _Match) -> Iterator[Finding]:
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
        yield _passed("softmax", "The softmax runs over the keys: each row sums to 1.")
    else:
        yield _failed("softmax", _AXES[variant.axis])
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
        return _passed("scale", says)
    return _failed("scale", _SCALES[variant.scale].format(**widths))


def _check_order(variant: Variant) -> Finding:
    if variant.order == "qkv":
        return _passed("order", "Queries, keys and values are used in their roles.")
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
    return _failed("order", says)


def _check_heads(variant: Variant, heads: int, widths: dict[str, int]) -> Finding:
    if variant.split in _SPLITS:
        return _failed("heads", _SPLITS[variant.split].format(**widths))
    if variant.merge == "reshape":
        says = (
            "The heads are joined without the transpose, which mixes tokens. Transpose "
            "(batch, heads, tokens, head_dim) to (batch, tokens, heads, head_dim), then flatten."
        )
        return _failed("heads", says)
    noun = "head" if heads == 1 else "heads"
    return _passed(
        "heads", f"{heads} {noun} of {widths['dim']} numbers, split and joined correctly."
    )


def _check_projection(variant: Variant) -> Finding:
    if variant.projected:
        return _passed("projection", "The output projection is applied to the joined heads.")
    says = "The layer has an output projection and does not use it. Return proj(output)."
    return _failed("projection", says)


def _check_returned_weights(weights: Tensor, expected: Tensor) -> Finding:
    """Check that the weights that a layer returns are those that it uses.

    expected: the weights that it uses, (batch, heads, query, key).
    """
    # a layer may return all heads, their mean, or (batch, query, key) if it has one head
    forms = (expected, expected.mean(1), expected[:, 0])
    if any(_is_close(weights.double(), form) for form in forms):
        return _passed("weights", "It returns the weights that it uses.")
    return _failed("weights", "It returns other weights than those that it uses.")


def _describe_mismatch(layer: StudentLayer) -> Finding:
    """Say why the values cannot be compared, or how far they are from the reference."""
    if layer.has_weights and not layer.candidates:
        return _undecided(
            "values",
            "Not compared: found no layers named query, key and value, or qkv. The "
            "following lines describe what the layer does.",
        )
    projections = layer.candidates[0] if layer.candidates else None
    reference, _ = attend([part.double() for part in layer.inputs], projections, Variant())
    difference = float((layer.output - reference).abs().max() / reference.abs().max())
    return _failed(
        "values",
        f"The output differs from softmax(q·k / √d) v by up to {difference:.2g} of its largest "
        "value, and from what the usual mistakes would give.",
    )


def _check_batch(layer: StudentLayer) -> Finding:
    """Check that the output of the first sequence does not depend on the other sequences."""
    changed = []
    for part in layer.inputs:
        other = part.clone()
        other[1:] = torch.randn_like(other[1:])
        changed.append(other)
    output, _ = layer(changed)
    if _is_close(output[:1], layer.output[:1]):
        return _passed(
            "batch", "The output of a sequence does not depend on the other sequences of its batch."
        )
    says = (
        "The output of a sequence depends on the other sequences of its batch. Do not mix "
        "sequences."
    )
    return _failed("batch", says)


def _check_permutation(layer: StudentLayer) -> Finding:
    """Check that permuted tokens give permuted outputs, as for any attention without positions."""
    order = torch.randperm(TOKENS)
    output, _ = layer([part[..., order, :] for part in layer.inputs])
    if _is_close(output, layer.output[..., order, :]):
        return _passed("tokens", "Permuted tokens give permuted outputs.")
    says = (
        "Permuting the tokens does not just permute the outputs. Either a reshape mixes "
        "tokens, or the layer has positions or a mask."
    )
    return _undecided("tokens", says)


def _check_rows(weights: Tensor) -> Finding:
    """Check that each row of the weights sums to one."""
    rows = weights.sum(-1)
    if _is_close(rows, torch.ones_like(rows)) and float(weights.min()) >= 0:
        return _passed("rows", "Each row of the weights sums to 1.")
    columns = weights.sum(-2)
    if _is_close(columns, torch.ones_like(columns)):
        says = "The columns of the weights sum to 1 and the rows do not: use softmax(dim=-1)."
    else:
        says = f"The rows of the weights sum to {float(rows.min()):.2g} to {float(rows.max()):.2g}."
    return _failed("rows", says)


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
        yield words, mask.expand(BATCH, *mask.shape)
        yield words, mask.expand(BATCH, 1, *mask.shape)


def _masked_outputs(layer: StudentLayer, allowed: Bool[Tensor, "query key"]) -> list[_Masked]:
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


def _check_mask(layer: StudentLayer, match: _Match | None) -> Finding:
    """Check that a mask hides keys, or name the mistake that has the same effect."""
    if match is not None and match.variant.causal:
        says = (
            "Later tokens are masked, though no mask was given. That is right for text and wrong "
            "for the patches of an image."
        )
        return _undecided("mask", says)
    if not layer.mask:
        return _undecided("mask", "Not checked: the layer takes no mask.")
    if match is not None and match.variant.axis != "keys":
        return _undecided("mask", "Not checked: the softmax runs over another axis.")
    allowed = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
    outputs = _masked_outputs(layer, allowed)
    if not outputs:
        return _undecided("mask", "Not checked: the layer accepts no mask of the usual forms.")
    for masked in outputs:
        if match is None:
            is_right = _hides_later_tokens(layer, masked)
        else:
            is_right = _is_close(masked.output.double(), _with_mask(layer, match, allowed, "right"))
        if is_right:
            return _passed("mask", f"Masked keys have no weight; the mask is {masked.words}.")
    return _name_mask_mistake(layer, match, allowed, outputs)


def _name_mask_mistake(
    layer: StudentLayer,
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
                return _failed("mask", _MASKS[mistake])
    if all(_is_close(masked.output, layer.output) for masked in outputs):
        return _failed("mask", _MASKS["ignored"])
    largest = float(layer.output.abs().max())
    for masked in outputs:
        output = masked.output
        if not bool(output.isfinite().all()) or float(output.abs().max()) > _HUGE * largest:
            says = (
                "The mask is added after the softmax, which gives infinite or huge outputs. Add it "
                "to the scores, before the softmax."
            )
            return _failed("mask", says)
    return _failed("mask", "Tokens that a mask hides still change the output.")


def _hides_later_tokens(layer: StudentLayer, masked: _Masked) -> bool:
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
    layer: StudentLayer, match: _Match, allowed: Bool[Tensor, "query key"], use: MaskUse
) -> Tensor:
    """Return the output of the matched variant under a mask that is used in this way."""
    inputs = [part.double() for part in layer.inputs]
    output, _ = attend(inputs, match.projections, match.variant, allowed, use)
    return output


def _check_dropout(layer: StudentLayer) -> Finding:
    """Check that dropout, which is off in evaluation, keeps the mean in training."""
    if not isinstance(layer.module, nn.Module):
        return _undecided("dropout", "Not checked: a function has no training mode.")
    layer.module.train()
    first_output, _ = layer()
    second_output, _ = layer()
    if torch.equal(first_output, second_output):
        layer.module.eval()
        return _undecided("dropout", "No dropout was found.")
    outputs = []
    for _ in range(_DRAWS):
        output, _ = layer()
        outputs.append(output)
    layer.module.eval()
    draws = torch.stack(outputs).double()
    error = draws.std(0) / math.sqrt(_DRAWS)
    deviation = (draws.mean(0) - layer.output).abs()
    deviation_in_errors = deviation / error.clamp_min(_SMALLEST_ERROR)
    if float(deviation_in_errors.max()) > _ERRORS:
        says = (
            "The mean output in training differs from that in evaluation. Apply dropout "
            "to the weights after the softmax, and divide what remains by (1 - p), as "
            "nn.Dropout does: a factor of 1/(1 - p)."
        )
        return _failed("dropout", says)
    says = "Off in evaluation; in training, the mean output over many passes is the same."
    return _passed("dropout", says)
