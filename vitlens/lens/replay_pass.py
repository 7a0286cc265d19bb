"""One replayed forward: the model's own, which skips the modules before a layer and gives that layer its kept inputs.

Where the classifier reads a few tokens alone, the last block computes only these. Whether a forward pass can start at a
layer, or at the first block (`Entry`), is tested once for each model, on two images of noise.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, Final
from weakref import ref

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from vitlens.devices import evaluating
from vitlens.errors import LensError, UnsupportedError
from vitlens.lens.attention import attention_module
from vitlens.lens.change import PlaceChange, Set, in_force
from vitlens.lens.intervene import Changes, intervene, prepared
from vitlens.lens.places import accesses
from vitlens.lens.replay_plan import ReplayPlan, ReplayRecord, StopForward, make_plan, recording
from vitlens.lens.trace import Layer, layers, probe_images
from vitlens.models.anatomy import heads_of, is_known_block
from vitlens.models.hooks import Arguments, Forward, Key, arguments, as_call, once_per_model, overridden
from vitlens.models.model import Model
from vitlens.shapes import Images, Logits, Tokens

TOLERANCE: Final = 1e-4  # fp32, on logits
FirstTokens = Float[Tensor, "batch rows dim"]


@dataclass(frozen=True)
class ReplayMethod:
    """How a model is replayed.

    rows: tokens computed in the last block (None: all); exact: whether replaying gives the model's logits; note: why it
    does not, or why all tokens of the last block are computed where the classifier reads fewer.
    """

    plan: ReplayPlan
    rows: int | None
    exact: bool = True
    note: str = ""

    def kind(self, changes: Set) -> "PassKind":
        """The kind of pass that some simultaneous changes need."""
        start = min(change.access.layer or 0 for change in changes)
        again = not self.plan.starts[start].branch
        for change in changes:
            before = change.access.part not in ("output", "joined") or (
                change.access.part == "joined" and not change.is_linear
            )
            again = again or (before and change.access.layer == start)
        last = (change for change in changes if change.access.layer == len(self.plan.starts) - 1)
        return PassKind(
            start,
            again,
            whole=any(change.function is not None for change in changes),
            rows=self.rows if all(map(_fits_first_rows, last)) else None,
        )


@dataclass(frozen=True)
class PassKind:
    """The settings that sets of changes in one batch share.

    start: the first layer that is run; attention: whether its attention is run again; whole: whether all images must be
    in one forward, as a function of a place may mix them; rows: tokens computed in the last block (None: all).
    """

    start: int
    attention: bool
    whole: bool = False
    rows: int | None = None


def _fits_first_rows(change: PlaceChange) -> bool:
    """Whether a change of the last block is the same where only the first tokens are computed."""
    if change.removes or change.knocked is not None or change.access.part == "input":
        return True
    replaced = change.data is not None and change.access.tokens is None
    return replaced and change.access.place.kind in ("head", "heads", "mlp")


def replay_pass(
    model: Model, plan: ReplayPlan, record: ReplayRecord, kind: PassKind, sets: Sequence[Set], part: slice, images: int
) -> Float[Tensor, "sets part classes"]:
    """The logits of some of the images under each set of changes; images: the number of all, in the record."""
    known = layers(model)
    layer, last = known[kind.start], known[-1].index
    sets = [
        [change.of_part(part, images, kind.rows if change.access.layer == last else None) for change in each]
        for each in sets
    ]
    with ExitStack() as stack:
        if kind.rows is not None:
            stack.enter_context(_first_rows(model, kind.rows))
        if not kind.attention:
            heads = [[each for each in every if each.is_linear and each.access.layer == kind.start] for every in sets]
            sets = [[each for each in every if each not in own] for every, own in zip(sets, heads)]
            output = _branch(model, layer, record, heads, part, kind.rows if kind.start == last else None)
            attention = model.module.get_submodule(layer.attention)
            stack.enter_context(overridden(attention, _returning(output)))
        stack.enter_context(in_force(model, *sets))
        stack.enter_context(_started(model, plan, layer, record, (len(sets), part, images)))
        count = len(sets) * (part.stop - part.start)
        logits = model.run(model.mean.new_zeros(1, 3, 1, 1).expand(count, 3, *model.input_size))  # not read
    by_set: Tensor = logits.unflatten(0, (len(sets), -1))
    return by_set


def _returning(output: Any) -> Callable[[Forward], Forward]:
    return lambda _forward: lambda *_args, **_kwargs: output


def _branch(
    model: Model, layer: Layer, record: ReplayRecord, sets: Sequence[Set], part: slice, rows: int | None
) -> Any:
    """The output of the first layer's attention: the clean one plus the contribution of the replaced heads."""
    projection = attention_module(model, layer.attention).projection
    assert record.branch is not None  # the plan skips attention only where these are known
    assert record.heads is not None
    assert projection is not None
    calls = slice(part.start * layer.windows, part.stop * layer.windows)
    branch = record.branch[calls][:, :rows]
    joined = record.heads[calls][:, :rows]
    branches = []
    for changes in sets:
        given = {head: data for change in changes for head, data in _by_head(change)}
        if not given:
            branches.append(branch)
            continue
        clean = changes[0].access.whole(joined)  # (part, .., heads, tokens, head_dim)
        difference = [data.to(clean) - clean[..., head, :, :] for head, data in given.items()]
        columns = [projection.weight[:, head * layer.head_dim : (head + 1) * layer.head_dim] for head in given]
        added = F.linear(torch.cat(difference, dim=-1), torch.cat(columns, dim=1))
        branches.append(branch + added.reshape(branch.shape))
    output = branches[0] if len(branches) == 1 else torch.cat(branches)
    return output if record.rest is None else (output, *record.rest)


def _by_head(change: PlaceChange) -> Iterator[tuple[int, Tensor]]:
    """The tensors that replace single heads."""
    data, heads = change.data, change.access.heads
    assert data is not None
    if change.access.head is not None:
        yield change.access.head, data
        return
    each = data.expand(torch.broadcast_shapes(data.shape, (heads, 1, 1)))
    yield from ((head, each[..., head, :, :]) for head in range(heads))


@contextmanager
def _started(
    model: Model, plan: ReplayPlan, layer: Layer, record: ReplayRecord, batch: tuple[int, slice, int]
) -> Iterator[None]:
    """batch: copies, the images of this forward, and the number of all images."""
    copies, part, images = batch
    start, count = plan.starts[layer.index], copies * (part.stop - part.start)
    own: dict[Any, Tensor] = {}
    for key in start.batched:
        calls = len(record.arguments[key]) // images
        own[key] = record.arguments[key][part.start * calls : part.stop * calls]
        if copies > 1:
            own[key] = own[key].repeat(copies, *[1] * (own[key].dim() - 1))
    given: dict[str, dict[Any, Any]] = {layer.unit: {**record.arguments, **own}}
    for index, there, here in start.carried:
        given.setdefault(layers(model)[index].unit, {})[there] = own[here]
    with ExitStack() as stack:
        for unit, values in given.items():
            stack.enter_context(overridden(model.module.get_submodule(unit), _given(values)))
        for name, shape in start.skipped:
            blank = model.mean.new_zeros(()).expand(shape[0] * count, *shape[1:])
            stack.enter_context(overridden(model.module.get_submodule(name), _returning(blank)))
        yield


def _given(values: Arguments) -> Callable[[Forward], Forward]:
    def wrap(forward: Forward) -> Forward:
        def with_values(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = as_call({**arguments(args, kwargs), **values})
            return forward(*args, **kwargs)

        return with_values

    return wrap


def rows_read(model: Model) -> int | None:
    """How many of the first tokens the classifier reads from the last block; None: all, or a block of unknown form."""
    layout, last = model.anatomy.layout, layers(model)[-1]
    if layout is None or not is_known_block(model.module.get_submodule(last.unit)):
        return None
    if model.anatomy.readout == "cls" and layout.positions("cls") == (0,):
        return 1
    read_positions = layout.positions("cls") + layout.positions("distillation")
    return 2 if model.anatomy.readout == "cls+distillation" and read_positions == (0, 1) else None


@contextmanager
def _first_rows(model: Model, rows: int) -> Iterator[None]:
    """Inside, the last block computes its first tokens alone, (batch, rows, dim), from the keys and values of all."""
    last = layers(model)[-1]
    block, attention = (model.module.get_submodule(name) for name in (last.unit, last.attention))
    with (
        overridden(block, lambda _forward: _block(block, rows)),
        overridden(attention, lambda _forward: _attention(attention, rows)),
    ):
        yield


def _block(block: nn.Module, rows: int) -> Callable[..., FirstTokens]:
    first, second = (getattr(block, name, nn.Identity()) for name in ("ls1", "ls2"))  # no drop path in evaluation

    def forward(tokens: Tokens, *_args: Any, **_kwargs: Any) -> FirstTokens:
        kept_tokens = tokens[:, :rows]
        kept_tokens = kept_tokens + first(block.attn(block.norm1(tokens)))  # type: ignore[operator]
        result: Tensor = kept_tokens + second(block.mlp(block.norm2(kept_tokens)))  # type: ignore[operator]
        return result

    return forward


def _attention(attention: Any, rows: int) -> Callable[..., FirstTokens]:
    heads, width = heads_of(attention), attention.qkv.out_features // 3
    weight, bias = attention.qkv.weight, attention.qkv.bias
    biases = (None, None) if bias is None else (bias[:width], bias[width:])
    norms = [getattr(attention, name, nn.Identity()) for name in ("q_norm", "k_norm")]

    def forward(tokens: Tokens, *_args: Any, **_kwargs: Any) -> FirstTokens:
        query = F.linear(tokens[:, :rows], weight[:width], biases[0]).unflatten(-1, (heads, -1)).transpose(1, 2)
        keys_and_values = F.linear(tokens, weight[width:], biases[1]).unflatten(-1, (2, heads, -1))
        key, value = keys_and_values.permute(2, 0, 3, 1, 4).unbind(0)  # each (batch, heads, tokens, head_dim)
        read = F.scaled_dot_product_attention(norms[0](query), norms[1](key), value)
        result: Tensor = attention.proj(read.transpose(1, 2).flatten(2))  # (batch, rows, dim)
        return result

    return forward


@once_per_model
def method_of(model: Model) -> ReplayMethod:
    """How a model is replayed: with the shortest last block that gives its logits, or by full forwards."""
    plan, why = make_plan(model), ""
    if any(layer.tokens_first for layer in layers(model)):
        note = f"{model.alias} is run by full forwards, not replayed: its blocks take (tokens, batch, width)"
        return ReplayMethod(plan, None, exact=False, note=note)
    for rows in dict.fromkeys((rows_read(model), None)):
        try:
            difference = _largest_difference(model, ReplayMethod(plan, rows))
        except (RuntimeError, TypeError, ValueError, KeyError, IndexError, AssertionError) as error:
            # a model of another structure may raise anything when its forward starts in the middle
            why = ": ".join((type(error).__name__, *str(error).splitlines()[:1]))  # a bare assert has no message
            continue
        if difference <= TOLERANCE:
            return ReplayMethod(plan, rows, note=why and f"{model.alias}'s last block is run whole: {why}")
        why = f"its logits would differ by {difference:.1e}"
    return ReplayMethod(plan, None, exact=False, note=f"{model.alias} is run by full forwards, not replayed: {why}")


def _largest_difference(model: Model, method: ReplayMethod) -> float:
    """From the model's own logits: started at every layer, and with a head set to zero in the first and the last."""
    images, known, plan = probe_images(model, 2), layers(model), method.plan
    with evaluating(model), torch.no_grad(), torch.autocast(model.device.type, enabled=False):
        with recording(model, dict.fromkeys(range(len(known)), True)) as records:
            plain: Tensor = model(images)
        scale = max(1.0, plain.abs().max().item())

        def differs(kind: PassKind, changes: Changes) -> float:
            with intervene(model, changes):
                full = model(images) if changes else plain
            sets = [prepared(model, changes)]
            ours = replay_pass(model, plan, records[kind.start], kind, sets, slice(0, 2), 2)[0]
            return float((ours - full).abs().max())

        kinds = [PassKind(index, not start.branch, rows=method.rows) for index, start in enumerate(plan.starts)]
        found = [differs(kind, {}) for kind in kinds]
        for kind in (kinds[0], kinds[-1]):
            found.append(differs(replace(kind, attention=True), {}))
            head = f"blocks.{kind.start}.head.{known[kind.start].heads - 1}"
            if head in accesses(model):
                found.append(differs(kind, {head: "zero"}))
    return max(found) / scale


@dataclass(frozen=True)
class Entry:
    """Runs a model from its first block on: tokens to logits, without the patch embedding.

    Variants of an image that differ only in some tokens are embedded once and combined before the first block.
    largest: bytes of the widest tensor of one image; only_tokens: whether the block takes tokens and nothing that
    depends on their number or positions (no rotary embedding), so that tokens can be left out.
    """

    _model: "ref[Model]"
    method: ReplayMethod
    stream: Key
    fixed: Arguments
    largest: int
    only_tokens: bool

    def tokens(self, images: Images) -> Tokens:
        """The residual stream before the first block, (batch, tokens, dim)."""
        stream: Tensor = _arguments(self._owner(), images)[self.stream]
        return stream

    def logits(self, tokens: Tokens) -> Logits:
        """The logits (batch, classes) for the stream before the first block."""
        model, record, count = self._owner(), ReplayRecord({**self.fixed, self.stream: tokens}), len(tokens)
        kind = PassKind(0, attention=True, rows=self.method.rows)
        with evaluating(model):
            return replay_pass(model, self.method.plan, record, kind, [()], slice(0, count), count)[0].float()

    def _owner(self) -> Model:
        model = self._model()
        if model is None:
            raise LensError("expected the model of this entry, found it deleted; keep a reference to the model")
        return model


@once_per_model
@torch.no_grad()
def entry_of(model: Model) -> Entry | None:
    """The entry of a model in which every patch is one token; None for a CNN, windows, or a stem that mixes patches."""
    if model.anatomy.layout is None:
        return None
    try:
        first, method = layers(model)[0], method_of(model)
    except UnsupportedError:  # a token layout, but no attention
        return None
    start = method.plan.starts[0]
    whole = method.exact and first.stream is not None and first.tokens == model.layout.tokens
    if not whole or start.batched != {first.stream} or start.carried:
        return None
    with evaluating(model), torch.autocast(model.device.type, enabled=False):
        block_arguments = _arguments(model, probe_images(model, 2))
        fixed = {key: value for key, value in block_arguments.items() if key != first.stream}
        only = not any(isinstance(value, Tensor) for value in fixed.values())
        entry = Entry(ref(model), method, first.stream, fixed, method.plan.largest, only)  # type: ignore[arg-type]
        return entry if _is_exact(model, entry) else None


def _is_exact(model: Model, entry: Entry) -> bool:
    """Whether mixing the tokens of two images gives the logits of the images mixed patch by patch."""
    first, second = probe_images(model, 2).split(1)
    rows, columns = model.layout.grid
    taken = torch.rand(rows * columns, generator=torch.Generator().manual_seed(1)).to(first.device) < 0.5
    large = taken.view(1, 1, rows, columns).float()
    pixels = F.interpolate(large, size=model.input_size, mode="nearest-exact") > 0.5
    mixed = torch.where(pixels, first, second)
    prefix = taken.new_zeros(len(model.layout.prefix))
    tokens = torch.where(torch.cat([prefix, taken])[:, None], entry.tokens(first), entry.tokens(second))
    plain: Tensor = model(mixed)
    scale = max(1.0, plain.abs().max().item())
    return (entry.logits(tokens) - plain).abs().max().item() <= TOLERANCE * scale


def _arguments(model: Model, images: Images) -> Arguments:
    """The arguments of the first block for these images."""
    with suppress(StopForward), recording(model, {0: False}, stop=True) as records:
        model(images)
    return records[0].arguments
