"""The residual stream that a classifier reads: its blocks, and the logits of any stream.

The model's final norm, pooling and classifier are run without its blocks. They give the logits of
any stream. Their gradient, with the final norm's scale fixed, gives the weight of each number of
the stream.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from vitlens.errors import UnsupportedError, first_line
from vitlens.lens.differentiable import needs_gradients
from vitlens.lens.stages import stages
from vitlens.lens.trace import layers
from vitlens.models.anatomy import Anatomy
from vitlens.models.hooks import Arguments, ScopedMode, overridden, watching
from vitlens.models.model import Model
from vitlens.shapes import Labels, Logits, Tokens

# largest error of logits that are computed again, in fp32 and as a part of the largest logit
TOLERANCE = 1e-3


def blocks_of(model: Model, *, pooled: bool = False) -> tuple[str, ...]:
    """Return the names of all blocks in forward order, including pruned ones without heads.

    pooled: True to accept a classifier that reads the stream of the patches by attention (SigLIP,
        CaiT). The blocks of that pooling are left out.

    Raises UnsupportedError unless the blocks are one sequence. Without `pooled`, the classifier
    must read their stream through norms and pooling only.
    """
    anatomy = model.anatomy
    if anatomy.family == "vit" and not anatomy.blocks:
        raise UnsupportedError(
            "expected blocks that add to one residual stream, found none in "
            f"{model.alias}; put each block in a separate module, or name them with "
            "blocks="
        )
    is_pooled = pooled and anatomy.family == "vit" and anatomy.readout == "pool"
    names = anatomy.blocks
    if is_pooled:
        names = tuple(stage.module for stage in stages(model))
    parents = {_parent(name) for name in names}
    # accepted of a ViT: CLS and mean always, attention pooling with `pooled`, None never
    is_pooling_refused = anatomy.readout == "pool" and not pooled
    is_readout_accepted = anatomy.readout is not None and not is_pooling_refused
    if anatomy.family != "vit" or not is_readout_accepted or len(parents) != 1:
        raise UnsupportedError(
            "expected a vision transformer whose classifier reads one residual stream (CLS or "
            f"mean), found {_reader(anatomy, len(parents), is_pooled=is_pooled)} in "
            f"{model.alias}; try vitlens ablate, which needs none"
        )
    (parent,) = parents
    # Pruned blocks have the type of other blocks. A stem or a head in the same list has another.
    with_attention = [name for name in names if name not in anatomy.without_attention]
    types_of_blocks = {type(model.module.get_submodule(name)) for name in with_attention}
    blocks = []
    for child_name, child in model.module.get_submodule(parent).named_children():
        name = f"{parent}.{child_name}" if parent else child_name
        if name in names or type(child) in types_of_blocks:
            blocks.append(name)
    return tuple(blocks)


def _parent(name: str) -> str:
    """Return the name of the module that holds a module, "" for the model itself."""
    return name.rpartition(".")[0]


def _reader(anatomy: Anatomy, parents: int, *, is_pooled: bool) -> str:
    """Describe what the classifier reads instead of one residual stream."""
    if anatomy.family != "vit":
        article = "an" if anatomy.family == "other" else "a"
        return f"{article} {anatomy.family} model"
    if anatomy.readout == "pool" and not is_pooled:
        return "attention pooling"
    if anatomy.readout is None:
        return "a classifier that reads it in another way"
    return f"blocks in {parents} places"


def require_batch_first(model: Model) -> None:
    """Raise UnsupportedError for blocks of (tokens, batch, width)."""
    if any(layer.tokens_first for layer in layers(model)):
        raise UnsupportedError(
            "expected blocks of (batch, tokens, width), found (tokens, batch, width) in "
            f"{model.alias}; pass batch_first=True where it is built"
        )


@contextmanager
def watching_residuals(model: Model, blocks: Sequence[str]) -> Iterator[list[Tokens]]:
    """Yield a list that a forward pass inside the context fills with the residual stream.

    It has the stream before the first block, then the stream after each block.
    """
    streams: list[Tokens] = []

    def keep_stream(name: str, arguments: Arguments, output: Any) -> None:
        """Keep what a block returns; called after each block."""
        if not isinstance(output, Tensor):
            raise UnsupportedError(
                f"expected blocks of {model.alias} that return the residual stream, "
                f"found {type(output).__name__} of {name}; return only the tensor"
            )
        if name == blocks[0]:
            streams.append(arguments[0])  # the stream before the first block
        streams.append(output)

    with watching(model.module, blocks, keep_stream):
        yield streams


def logits_from(model: Model, stream: Tokens, *, blocks: Sequence[str] | None = None) -> Logits:
    """Return the logits of a residual stream after the last block, without running the blocks.

    blocks: the names of the blocks in forward order (None: those of `blocks_of`).

    Raises UnsupportedError for a model that does not run without its blocks.
    """
    names = blocks_of(model) if blocks is None else blocks

    def return_stream(_forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return a block that returns the stream, whatever its tokens."""
        return lambda *_args, **_kwargs: stream

    blank_images = stream.new_zeros(1, 3, 1, 1).expand(len(stream), 3, *model.input_size)
    with ExitStack() as stack:
        for name in names:
            block = model.module.get_submodule(name)
            stack.enter_context(overridden(block, _identity))
        # this second override of the last block replaces the first: the other blocks pass on what
        # they get, and the last one returns the stream
        last = model.module.get_submodule(names[-1])
        stack.enter_context(overridden(last, return_stream))
        try:
            return model.run(blank_images)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            # the user's forward may need results of its blocks
            raise UnsupportedError(
                "expected a classifier that reads only the last residual stream in "
                f"{model.alias}, found a forward that fails without its blocks ("
                f"{type(error).__name__}: {first_line(error)}); try vitlens ablate, "
                "which needs none"
            ) from error


def _identity(_forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a block that passes its tokens on."""
    return lambda tokens, *_args, **_kwargs: tokens


@needs_gradients
def stream_weights(model: Model, stream: Tokens, targets: Labels | Logits) -> Tokens:
    """Return the weight of each number of the last residual stream in a logit.

    With the final norm's scale fixed, the logit is the sum of weights times stream, plus a
    constant.

    targets: a class for each image, or the weights (batch, classes) of a sum of logits.
    """
    with torch.enable_grad(), FixedScale():
        leaf = stream.detach().requires_grad_()
        logits = logits_from(model, leaf)
        if targets.ndim == 1:
            total = logits.gather(1, targets.unsqueeze(1)).sum()
        else:
            total = (logits * targets).sum()
        (weights,) = torch.autograd.grad(total, leaf)
    return weights


class FixedScale(ScopedMode):
    """Mode in which the scale of norms is a constant for autograd; their outputs are unchanged."""

    def intercept(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Compute norms by their formula; pass every other call on."""
        if func not in (F.layer_norm, F.rms_norm):
            return func(*args, **kwargs)
        bound = inspect.signature(func).bind(*args, **kwargs)
        bound.apply_defaults()
        tokens: Tensor = bound.arguments["input"]
        weight: Tensor | None = bound.arguments["weight"]
        bias: Tensor | None = bound.arguments.get("bias")  # rms_norm has none
        eps: float | None = bound.arguments["eps"]
        normalised_axes = tuple(range(-len(bound.arguments["normalized_shape"]), 0))  # the last
        centred = tokens
        if func is F.layer_norm:
            centred = tokens - tokens.mean(normalised_axes, keepdim=True)
        if eps is None:  # the default of rms_norm
            eps = torch.finfo(tokens.dtype).eps
        variance = centred.detach().square().mean(normalised_axes, keepdim=True)
        result = centred * (variance + eps).rsqrt()
        if weight is not None:
            result = result * weight
        if bias is not None:
            result = result + bias
        return result
