"""An observed call has attention by its definition, for every mask, layout and kind of call."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import vitlens
from tests.kit.lens import calls_of
from tests.kit.tiny import images, model_of, shaken, shared_model, timm_model
from tests.kit.windows import Pair, of_timm
from vitlens import Model
from vitlens.errors import UnsupportedError

CLOSE = {"atol": 1e-6, "rtol": 1e-5}
Options = Callable[[Tensor], dict[str, object]]  # of attention, from its tokens (batch, tokens, 32)


class Attends(nn.Module):
    """Calls scaled dot-product attention with these arguments; records inputs and outputs."""

    num_heads = 4

    def __init__(self, options: Options, layout: str, every: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(32, 96)
        self.proj = nn.Linear(32, 32)
        self.options = options
        self.layout = layout
        self.every = every

    def split(self, tokens: Tensor) -> Tensor:
        heads = tokens.unflatten(-1, (4, 8))
        if self.layout == "joined":  # (batch x heads, tokens, head_dim)
            return heads.transpose(1, 2).flatten(0, 1)
        if self.layout == "plain":
            return heads.transpose(1, 2)
        windows = heads.unflatten(1, (-1, 6))  # (batch, windows, tokens, heads, head_dim)
        return windows.permute(
            (0, 1, 3, 2, 4) if self.layout == "windows first" else (0, 3, 1, 2, 4)
        )

    def forward(self, tokens: Tensor) -> Tensor:
        if tokens.dim() == 4:  # a map
            tokens = tokens.flatten(1, 2) if tokens.shape[3] == 32 else tokens.flatten(2).mT
        query, key, value = (self.split(part) for part in self.qkv(tokens).chunk(3, -1))
        key = key[:, :: self.every]
        value = value[:, :: self.every]
        output = F.scaled_dot_product_attention(query, key, value, **self.options(tokens))
        self.seen = query, key, value, output
        return self.proj(output.reshape(len(tokens), -1, 32))


class One(nn.Module):
    """A model of one attention layer, entered by tokens or by a map."""

    def __init__(self, attn: nn.Module, entered: str) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 8, 8)
        self.attn = attn
        self.head = nn.Linear(32, 5)
        self.entered = entered

    def forward(self, pixels: Tensor) -> Tensor:
        grid = self.stem(pixels)
        layouts = {
            "tokens": grid.flatten(2).mT,
            "channels first": grid,
            "channels last": grid.permute(0, 2, 3, 1),
        }
        return self.head(self.attn(layouts[self.entered]).mean(1))


def one(attn: Callable[[], nn.Module], size: Pair = (16, 24), entered: str = "tokens") -> Model:
    return model_of(shaken(lambda: One(attn(), entered)), size=size)


def attending(
    options: Options = lambda _: {},
    *,
    layout: str = "plain",
    every: int = 1,
    size: Pair = (16, 24),
    **entered: str,
) -> Model:
    return one(lambda: Attends(options, layout, every), size, **entered)


BOOLEAN = torch.randn(6, 6, generator=torch.Generator().manual_seed(3)) > -0.5
ADDITIVE = torch.randn(1, 4, 6, 6, generator=torch.Generator().manual_seed(4))
ALL = torch.ones(6, 6, dtype=torch.bool)
SCALE = 8**-0.5
NOTHING = ALL.index_fill(0, torch.tensor(3), False)  # the fourth query attends to nothing


def by_image(tokens: Tensor) -> Tensor:
    """Return another mask for each image, in which every query has a key."""
    return (tokens[:, None, :, :6] > 0) | torch.eye(6, dtype=torch.bool)


CASES: dict[
    str, tuple[Options, object, object, float]
] = {  # options, which keys take part, bias, scale
    "none": (lambda _: {}, ALL, 0.0, SCALE),
    "boolean": (lambda _: {"attn_mask": BOOLEAN}, BOOLEAN, 0.0, SCALE),
    "boolean per image": (lambda tokens: {"attn_mask": by_image(tokens)}, by_image, 0.0, SCALE),
    "one row for all queries": (lambda _: {"attn_mask": BOOLEAN[:1]}, BOOLEAN[:1], 0.0, SCALE),
    "an empty row": (lambda _: {"attn_mask": NOTHING}, NOTHING, 0.0, SCALE),
    "an empty row of numbers": (
        lambda _: {"attn_mask": NOTHING.float().log()},
        NOTHING,
        0.0,
        SCALE,
    ),
    "additive": (lambda _: {"attn_mask": ADDITIVE}, ALL, ADDITIVE, SCALE),
    "causal": (lambda _: {"is_causal": True}, ALL.tril(), 0.0, SCALE),
    "a scale of its own": (lambda _: {"scale": 0.5}, ALL, 0.0, 0.5),
    "grouped": (lambda _: {"enable_gqa": True}, ALL, 0.0, SCALE),
}
# (batch x heads, ..), (batch, windows, heads, ..), and Hiera's (batch, heads, windows, ..)
LAYOUTS = [
    *((case, "plain") for case in CASES),
    ("none", "joined"),
    ("boolean", "joined"),
    ("none", "windows first"),
    ("boolean", "windows first"),
    ("none", "heads first"),
]


@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize(("case", "layout"), LAYOUTS)
def test_weights_are_those_of_the_definition(case, layout, explicit):
    """exp(score) over the sum of the allowed keys; zeros where there is none, with a finite
    gradient.
    """
    (options, allowed, bias, scale), rows = CASES[case], 6 if "first" in layout else 2
    model = attending(
        options, layout=layout, every=2 if case == "grouped" else 1, size=(8 * rows, 24)
    )
    batch = images(model.input_size, batch=3)
    (call,) = calls_of(model, batch, explicit=explicit)
    tokens = model.module.stem(model.prepare(batch)).flatten(2).mT
    model(batch)
    query, key, value, output = model.module.attn.seen
    if case == "grouped":  # two queries share a key, in order
        key = key.repeat_interleave(2, 1)
        value = value.repeat_interleave(2, 1)
    exponentials = (query @ key.mT * scale + bias).exp() * (
        allowed(tokens) if callable(allowed) else allowed
    )
    weights = exponentials / exponentials.sum(-1, keepdim=True).clamp_min(1e-30)
    torch.testing.assert_close(weights @ value, output, atol=1e-5, rtol=1e-5)
    weights = (weights.transpose(1, 2) if layout == "heads first" else weights).reshape(-1, 4, 6, 6)
    torch.testing.assert_close(call.weights().detach(), weights, **CLOSE)
    torch.testing.assert_close(call.rows((2, 0)).detach(), weights[..., (2, 0), :], **CLOSE)
    torch.testing.assert_close(call.pick(1).weights().detach(), weights.chunk(3)[1], **CLOSE)
    assert (call.site.heads, call.images) == (4, 3)
    leaf = batch.requires_grad_()
    logits = vitlens.capture(model, leaf, "blocks.0.attention.weights", graph=True).logits
    assert torch.isfinite(torch.autograd.grad(logits.sum(), leaf)[0]).all()


def test_the_call_of_one_image_has_its_windows_and_its_bias():
    for name in ("swin", "torchvision-swin", "ours-unfused"):
        model = shared_model(name)
        for call in calls_of(model, images(model.input_size, batch=3)):
            of_each = call.weights().unflatten(0, (3, -1))
            torch.testing.assert_close(call.pick(2).weights(), of_each[2], **CLOSE)
            parts = torch.cat([part.weights() for _, part in call.parts()])
            torch.testing.assert_close(parts, call.weights(), **CLOSE)
            if call.output is not None:
                torch.testing.assert_close(
                    call.pick(0).output, call.output.unflatten(0, (3, -1))[0], **CLOSE
                )


PVT = {"depths": (1, 1, 1, 1), "embed_dims": (16, 16, 16, 16), "num_heads": (1, 1, 1, 1)}
XCIT = {"patch_size": 16, "embed_dim": 32}


@pytest.mark.parametrize(
    ("make", "kinds"),
    [
        (partial(shared_model, "cait"), ["patch", "patch", "class", "class"]),
        (partial(shared_model, "swin"), ["window"] * 4),
        (partial(attending, entered="channels first"), ["patch"]),
        (partial(attending, entered="channels last"), ["patch"]),
        (partial(of_timm, "pvt_v2_b0", **PVT), ["pooled", "pooled", "pooled", "patch"]),
        (
            partial(timm_model, "xcit_nano_12_p16_224", **XCIT),
            ["channel", "channel", "class", "class"],
        ),
    ],
)
def test_what_attends_to_what(make, kinds):
    model = make()
    assert [call.site.kind for call in calls_of(model, images(model.input_size))] == kinds


@pytest.mark.parametrize(
    ("size", "grid"), [((32, 32), (4, 4)), ((16, 64), (2, 8)), ((64, 16), (8, 2))]
)
def test_without_a_layout_the_grid_of_a_map_follows_the_images_shape(size, grid):
    """16 patches could be 4 x 4 as well as 2 x 8; a map of the wrong shape would be wrong in
    silence.
    """
    assert vitlens.explain(attending(size=size), images(size), method="attention").shape == (
        2,
        *grid,
    )


class Multihead(nn.Module):
    """nn.MultiheadAttention with these arguments; records the weights that it returns."""

    def __init__(
        self, options: dict[str, object], mask: Tensor | None, average: bool, itself: bool
    ) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(32, 4, **options)
        self.mask = mask
        self.average = average
        # of itself, its projections are one product
        self.key = nn.Identity() if itself else nn.Linear(32, 32)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = self.mask
        if mask is not None and mask.dim() == 3:
            mask = mask.repeat(len(tokens), 1, 1)
        query, key = tokens, self.key(tokens)
        if not self.attention.batch_first:
            query, key = query.transpose(0, 1), key.transpose(0, 1)
        output, self.returned = self.attention(
            query, key, key, attn_mask=mask, average_attn_weights=self.average
        )
        return output if self.attention.batch_first else output.transpose(0, 1)


HEADS = torch.randn(4, 6, 6, generator=torch.Generator().manual_seed(3)) > 0.8


@pytest.mark.parametrize(
    ("mask", "average", "itself", "options"),
    [
        (None, False, False, {"bias": False, "batch_first": True}),
        (~BOOLEAN, True, False, {"batch_first": False}),
        (ADDITIVE[0, 0], True, True, {"bias": False, "batch_first": True}),
        (HEADS & ~torch.eye(6, dtype=torch.bool), False, True, {"batch_first": False}),
    ],
)
def test_multihead_attention_has_its_own_logits_and_weights(mask, average, itself, options):
    model, batch = one(lambda: Multihead(options, mask, average, itself)), images((16, 24), batch=3)
    plain = model(batch)
    weights = model.module.attn.returned
    (call,) = calls_of(model, batch)
    torch.testing.assert_close(model.module.attn.returned, weights, **CLOSE)
    torch.testing.assert_close(
        call.weights().mean(1) if average else call.weights(), weights, **CLOSE
    )
    torch.testing.assert_close(vitlens.observe(model, batch, lambda _: None), plain, **CLOSE)
    assert (call.site.module, call.site.heads) == ("attn.attention", 4)


class Direct(nn.MultiheadAttention):
    """Calls torch's function directly, with a boolean mask of what is left out.

    The module turns such a mask into numbers.
    """

    def forward(self, tokens: Tensor) -> Tensor:
        projections = (self.in_proj_weight, self.in_proj_bias, None, None, False, 0.0)
        out = (self.out_proj.weight, self.out_proj.bias)
        options = {"need_weights": False, "attn_mask": ~BOOLEAN}
        inputs = [tokens.transpose(0, 1)] * 3
        attended = F.multi_head_attention_forward(
            *inputs, 32, 4, *projections, *out, training=False, **options
        )
        return attended[0].transpose(0, 1)


def test_the_function_called_with_a_boolean_mask():
    (call,) = calls_of(one(lambda: Direct(32, 4)), images((16, 24)))
    weights = call.weights()
    assert (weights[..., ~BOOLEAN] == 0).all()
    assert (weights[..., BOOLEAN] > 0).all()


def test_added_keys_are_refused():
    model = one(lambda: Multihead({"add_bias_kv": True, "batch_first": True}, None, True, True))
    with pytest.raises(UnsupportedError, match="added keys"):
        calls_of(model, images((16, 24)))
