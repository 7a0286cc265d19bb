"""Facts read from trial passes: also with weights of zero, and not after weights have changed."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import vitlens
from tests.kit.tiny import images
from vitlens import Model

HALF = (0.5, 0.5, 0.5)
SIZE = 32


class Block(nn.Module):
    """Pre-norm, with a factor on each branch that may be zero (ReZero, LayerScale)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(24)
        self.norm2 = nn.LayerNorm(24)
        self.attn = nn.MultiheadAttention(24, 3, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(24, 48), nn.GELU(), nn.Linear(48, 24))
        self.gamma = nn.Parameter(torch.ones(24))

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm1(x)
        x = x + self.gamma * self.attn(normed, normed, normed, need_weights=False)[0]
        return x + self.gamma * self.mlp(self.norm2(x))


class Pooled(nn.Module):
    """Patches of 8 px, CLS first; the classifier reads what `pool` says.

    stem: "patches", or "mixing" for a convolution across the patches' edges, which mixes tokens.
    """

    def __init__(self, pool: str = "mean", stem: str = "patches") -> None:
        super().__init__()
        layers = [nn.Conv2d(3, 24, 8, 8)] if stem == "patches" else [nn.Conv2d(3, 24, 15, 8, 7)]
        self.stem = nn.Sequential(*layers)
        self.pool = pool
        self.cls = nn.Parameter(torch.randn(1, 1, 24))
        self.places = nn.Parameter(torch.randn(1, 17, 24))
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(24)
        self.head = nn.Linear(24, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], 1) + self.places
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return self.head(x[:, 0] if self.pool == "cls" else x[:, 1:].mean(1))


def built(pool: str = "mean", stem: str = "patches") -> Pooled:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Pooled(pool, stem).eval()


def wrapped(module: nn.Module) -> Model:
    return vitlens.wrap(module, image_size=SIZE, mean=HALF, std=HALF)


def zeroed(*parameters: Tensor, scale: float = 0.0) -> None:
    with torch.no_grad():
        for parameter in parameters:
            parameter.mul_(scale)


ZEROS: dict[str, Callable[[Pooled], None]] = {
    "head": lambda net: zeroed(net.head.weight, net.head.bias),
    "head but its bias": lambda net: zeroed(net.head.weight),
    "head nearly": lambda net: zeroed(net.head.weight, scale=1e-6),
    "branches": lambda net: zeroed(*(block.gamma for block in net.blocks)),
    "projections": lambda net: zeroed(*(block.attn.out_proj.weight for block in net.blocks)),
    "everything": lambda net: zeroed(net.head.weight, *(block.gamma for block in net.blocks)),
}


@pytest.mark.parametrize("zeros", ZEROS)
@pytest.mark.parametrize("pool", ["mean", "cls"])
def test_weights_of_zeros_do_not_hide_what_the_classifier_reads(pool, zeros):
    net = built(pool)
    expected = wrapped(net).anatomy
    ZEROS[zeros](net)
    before = copy.deepcopy(net.state_dict())
    anatomy = wrapped(net).anatomy
    assert anatomy.readout == pool
    assert anatomy == expected
    for name, value in net.state_dict().items():
        assert torch.equal(value, before[name])


def optimised(net: Pooled, state: dict[str, Tensor]) -> None:
    """Make one step, which sets the weights to those of the state."""
    for name, parameter in net.named_parameters():
        parameter.grad = parameter.detach() - state[name]
    torch.optim.SGD(net.parameters(), lr=1.0).step()
    net.zero_grad()


def assigned(net: Pooled, state: dict[str, Tensor]) -> None:
    for name, parameter in net.named_parameters():
        parameter.data = state[name].clone()


def copied(net: Pooled, state: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            parameter.copy_(state[name])


def exchanged(net: Pooled, state: dict[str, Tensor]) -> None:
    other = built(net.pool, "mixing" if len(net.stem[0].weight[0, 0]) > 8 else "patches")
    other.load_state_dict(state)
    net.blocks = other.blocks
    net.head = other.head


CHANGES: dict[str, Callable[[Pooled, dict[str, Tensor]], object]] = {
    "loaded": lambda net, state: net.load_state_dict(state),
    "loaded by assignment": lambda net, state: net.load_state_dict(state, assign=True),
    "an optimiser's step": optimised,
    "data assigned": assigned,
    "data copied": lambda net, state: [
        value.data.copy_(state[name]) for name, value in net.named_parameters()
    ],
    "copied": copied,
    "modules exchanged": exchanged,
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("stem", ["patches", "mixing"])
def test_what_was_tried_with_zeros_is_not_believed_of_other_weights(stem, change):
    """Occlusion, which mixes tokens where a trial allows it, and the replay, are those of a new
    wrap.
    """
    net = built(stem=stem)
    state = copy.deepcopy(net.state_dict())
    ZEROS["everything"](net)
    model = wrapped(net)
    batch = images((SIZE, SIZE))
    labels = torch.tensor([0, 1])
    results = []
    for current in (model, None):
        if current is None:
            current = wrapped(net)
        else:
            vitlens.explain(current, batch, method="occlusion", targets=labels)
            vitlens.ablate(current, batch, labels, replace="zero")
            with pytest.warns(UserWarning, match="zero"):
                vitlens.explain(current, batch, method="integrated-gradients", targets=labels)
            CHANGES[change](net, state)
        results.append(
            (
                vitlens.explain(current, batch, method="occlusion", targets=labels),
                vitlens.ablate(current, batch, labels, replace="zero").delta_loss,
                vitlens.explain(current, batch, method="integrated-gradients", targets=labels),
            )
        )
    for result, expected in zip(*results):
        assert expected.abs().max() > 1e-4
        torch.testing.assert_close(result, expected)


@pytest.mark.parametrize("change", CHANGES)
def test_what_was_tried_with_some_weights_is_not_believed_of_others(change):
    """A convolution that reaches over the patches' edges with weights of zeros there, which is no
    weight of zeros.
    """
    net = built(stem="mixing")
    state = copy.deepcopy(net.state_dict())
    with torch.no_grad():
        kernel = net.stem[0].weight
        kernel[:, :, :7] = 0
        kernel[..., :7] = 0
    model = wrapped(net)
    batch = images((SIZE, SIZE))
    labels = torch.tensor([0, 1])
    vitlens.explain(model, batch, method="occlusion", targets=labels)
    if change == "modules exchanged":
        net.stem = built(stem="mixing").stem
    else:
        CHANGES[change](net, state)
    maps = vitlens.explain(model, batch, method="occlusion", targets=labels)
    expected = vitlens.explain(wrapped(net), batch, method="occlusion", targets=labels)
    torch.testing.assert_close(maps, expected)


def test_logits_that_never_depend_on_the_image_are_said():
    class Constant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scores = nn.Parameter(torch.randn(5))

        def forward(self, x: Tensor) -> Tensor:
            return self.scores.expand(len(x), -1)

    model = wrapped(Constant())
    assert "do not depend on the image" in "\n".join(model.provenance.notes)
    assert not wrapped(built()).provenance.notes
