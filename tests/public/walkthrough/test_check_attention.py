"""`vitlens.check_attention` passes right attention of every usual form, and names each planted
mistake.
"""

import math
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import vitlens
from vitlens.errors import InputError

DIM = 24


def plain(q, k, v, mask=None, *, scale=None, axis=-1):
    """Scaled dot-product attention as a student writes it; mask: True where a query may attend."""
    scores = q @ k.transpose(-2, -1)
    scores = scores / math.sqrt(q.shape[-1]) if scale is None else scores * scale(q.shape[-1])
    if mask is not None:
        scores = scores.masked_fill(~mask, -1e9)
    return scores.softmax(axis) @ v


def with_weights(q, k, v):
    weights = (q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])).softmax(-1)
    return weights @ v, weights


class Layer(nn.Module):
    """Self-attention with heads; the keywords plant mistakes."""

    def __init__(self, heads=3, *, wrong="", dropout=0.0):
        super().__init__()
        self.num_heads = heads
        self.wrong = wrong
        self.qkv = nn.Linear(DIM, 3 * DIM)
        self.proj = nn.Linear(DIM, DIM)
        self.dropout = nn.Dropout(dropout)

    def split(self, tokens):
        batch, count, width = tokens.shape
        if self.wrong == "no transpose":
            return tokens.reshape(batch, self.num_heads, count, width // self.num_heads)
        if self.wrong == "not split":
            return tokens[:, None]
        return tokens.reshape(batch, count, self.num_heads, -1).transpose(1, 2)

    def masked(self, scores, mask):
        if mask is None or self.wrong in ("mask ignored", "mask after"):
            return scores
        if self.wrong == "mask of zeros":
            return scores * mask
        if self.wrong == "mask of queries":
            mask = mask.transpose(-2, -1)
        return scores.masked_fill(mask == 0, float("-inf"))

    def forward(self, x, mask=None):
        q, k, v = map(self.split, self.qkv(x).chunk(3, dim=-1))
        if self.wrong == "exchanged":
            q, k = k, q
        width = DIM if self.wrong == "width" else q.shape[-1]
        scores = q @ k.transpose(-2, -1) * (1 if self.wrong == "no scale" else width**-0.5)
        weights = self.masked(scores, mask).softmax(
            {"queries": -2, "heads": 1, "batch": 0}.get(self.wrong, -1)
        )
        if self.wrong == "mask after" and mask is not None:
            weights = weights * mask
        if self.wrong == "dropout on":
            weights = F.dropout(weights, 0.3)
        elif self.wrong == "dropout not rescaled":
            keep = torch.rand_like(weights) > 0.3 if self.training else 1
            weights = weights * keep
        else:
            weights = self.dropout(weights)
        output = weights @ v
        if self.wrong != "not merged":
            output = output.transpose(1, 2)
        output = output.reshape(x.shape)
        return output if self.wrong == "no projection" else self.proj(output)


class HeadsOfTheirOwn(nn.Module):
    """A list of heads, joined, in which no query sees a later token."""

    class Head(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.query = nn.Linear(DIM, width, bias=False)
            self.key = nn.Linear(DIM, width, bias=False)
            self.value = nn.Linear(DIM, width, bias=False)

        def forward(self, x):
            scores = self.query(x) @ self.key(x).transpose(-2, -1) / math.sqrt(8)
            hidden = torch.ones(x.shape[1], x.shape[1]).triu(1).bool()
            return scores.masked_fill(hidden, float("-inf")).softmax(-1) @ self.value(x)

    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleList([self.Head(8) for _ in range(3)])
        self.proj = nn.Linear(DIM, DIM)

    def forward(self, x):
        return self.proj(torch.cat([head(x) for head in self.heads], dim=-1))


class GroupedByHead(nn.Module):
    """Queries, keys and values of a head next to each other in one projection; returns weights."""

    def __init__(self):
        super().__init__()
        self.n_heads = 3
        self.qkv_proj = nn.Linear(DIM, 3 * DIM)
        self.o_proj = nn.Linear(DIM, DIM)

    def forward(self, x, mask=None):
        parts = self.qkv_proj(x).reshape(*x.shape[:2], self.n_heads, -1).transpose(1, 2)
        q, k, v = parts.chunk(3, dim=-1)
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        if mask is not None:
            scores = scores + mask
        weights = scores.softmax(-1)
        return self.o_proj((weights @ v).transpose(1, 2).flatten(2)), weights


class NamedInFull(Layer):
    """A layer with a long name for its projection to queries, keys and values."""

    def __init__(self):
        super().__init__()
        self.query_key_value = self.qkv
        del self.qkv

    def forward(self, x, mask=None):
        q, k, v = map(self.split, self.query_key_value(x).chunk(3, dim=-1))
        return self.proj(plain(q, k, v, mask).transpose(1, 2).flatten(2))


def failed(checked):
    return {finding.check for finding in checked.findings if finding.passed is False}


RIGHT = {
    "a function": plain,
    "PyTorch's function": F.scaled_dot_product_attention,
    "a function that returns weights": with_weights,
    "heads": Layer(),
    "one head": Layer(1),
    "dropout": Layer(dropout=0.3),
    "a list of heads": HeadsOfTheirOwn(),
    "grouped by head": GroupedByHead(),
    "named in full": NamedInFull(),
    "PyTorch's layer": nn.MultiheadAttention(DIM, 3, batch_first=True),
    "PyTorch's layer, tokens first": nn.MultiheadAttention(DIM, 3, dropout=0.2),
}


@pytest.mark.parametrize("name", RIGHT)
def test_right_attention_passes(name):
    checked = vitlens.check_attention(RIGHT[name])
    assert checked.passed, checked
    assert {"shape", "scale", "softmax"} <= {each.check for each in checked.findings if each.passed}


def test_attention_of_models_passes():
    vit = vitlens.load("vit-digits").module
    (first, *_) = (
        part for part in vit.modules() if type(part).__name__ == "MultiHeadSelfAttention"
    )
    assert vitlens.check_attention(first).passed


WRONG = {  # the planted mistake -> the check that fails, and a word that its sentence names
    "no scale": ("scale", "√8"),
    "width": ("scale", "√24"),
    "queries": ("softmax", "queries"),
    "heads": ("softmax", "heads"),
    "batch": ("softmax", "batch"),
    "no transpose": ("heads", "transpose"),
    "not split": ("heads", "not split"),
    "not merged": ("heads", "transpose"),
    "exchanged": ("order", "exchanged"),
    "no projection": ("projection", "proj"),
    "mask ignored": ("mask", "no effect"),
    "mask after": ("mask", "after the softmax"),
    "mask of zeros": ("mask", "set to 0"),
    "mask of queries": ("mask", "queries"),
    "dropout on": ("dropout", "evaluation"),
    "dropout not rescaled": ("dropout", "1/(1 - p)"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_each_planted_mistake_is_named(wrong):
    torch.manual_seed(0)
    checked = vitlens.check_attention(Layer(wrong=wrong))
    check, word = WRONG[wrong]
    assert failed(checked) == {check}
    assert not checked.passed
    (says,) = (each.says for each in checked.findings if each.check == check)
    assert word in says
    assert f"FAIL  {check}" in repr(checked)


def mask_added_late(q, k, v, mask=None):
    weights = (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1)
    return (weights if mask is None else weights.masked_fill(~mask, -1e9)) @ v


MISTAKES = {
    "mask": mask_added_late,
    "scale": partial(plain, scale=lambda _: 1),
    "softmax": partial(plain, axis=-2),
    "values": lambda q, k, v: torch.sigmoid(q @ k.transpose(-2, -1)) @ v,
    "order": lambda q, k, v: plain(q, k, k) + 0 * v,
    "shape": lambda q, k, v: plain(q, k, v).transpose(-2, -1),
}


@pytest.mark.parametrize("check", MISTAKES)
def test_a_wrong_function_fails_the_check_of_its_mistake(check):
    assert check in failed(vitlens.check_attention(MISTAKES[check]))


def test_mistakes_add_up():
    def wrong(q, k, v):
        return (q @ k.transpose(-2, -1)).softmax(-2) @ v

    assert failed(vitlens.check_attention(wrong)) >= {"scale", "softmax"}


def test_layers_that_cannot_be_read_are_checked_by_what_they_do():
    class Unnamed(nn.Module):
        def __init__(self, leak):
            super().__init__()
            self.leak = leak
            self.one, self.two, self.three = (nn.Linear(DIM, DIM) for _ in range(3))

        def forward(self, x):
            output = plain(self.one(x), self.two(x), self.three(x))
            return output + x.mean(0) if self.leak else output

    right = vitlens.check_attention(Unnamed(leak=False))
    assert right.passed
    assert [each.passed for each in right.findings if each.check == "values"] == [None]
    assert "batch" in failed(vitlens.check_attention(Unnamed(leak=True)))


def test_a_module_stays_as_it_was():
    layer = Layer(dropout=0.5).train()
    torch.manual_seed(3)
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    expected = torch.rand(2)
    torch.manual_seed(3)
    vitlens.check_attention(layer)
    torch.testing.assert_close(torch.rand(2), expected)
    assert layer.training
    assert layer.dropout.training
    torch.testing.assert_close(layer.state_dict(), before)


def test_what_is_no_attention_is_refused():
    with pytest.raises(InputError, match=r"module\(q, k, v"):
        vitlens.check_attention(lambda: 1)
    with pytest.raises(InputError, match="found Tensor"):
        vitlens.check_attention(torch.rand(3))
    with pytest.raises(InputError, match="by zero"):
        vitlens.check_attention(lambda q, k, v: q @ k.mT @ v / (1 // 0))
