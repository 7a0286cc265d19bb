"""Attention sinks in reports of photographs: the rule of the statistics, and when a report says so."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from vitlens.analysis.heads.rows import outliers
from vitlens.commands.attention.report import REPORT as ATTENTION
from vitlens.commands.rollout.report import REPORT as ROLLOUT
from vitlens.commands.shared.explorer import ExplorerArrays, ExplorerRow, sink_rows
from vitlens.report.html.packing import quantised, restored

REPORTS = {"attention": ATTENTION, "rollout": ROLLOUT}


def packed(weights: np.ndarray) -> ExplorerArrays:
    """Weights (images, layers, heads, queries, keys) as an explorer's arrays, with one special token."""
    heads, most = quantised(weights, 1, 255)
    none = np.zeros((0, *weights.shape[1:2], *weights.shape[3:]), np.uint8)
    return ExplorerArrays(heads, most, none, np.zeros((*none.shape[:3], 2), np.float32), weights[:, :, 0, 0])


def test_sinks_are_the_outliers_of_the_statistics_at_most_a_tenth_of_the_patches():
    raw = np.random.default_rng(0).exponential(size=(2, 3, 2, 101, 101)).astype(np.float32)
    raw[..., 5] *= 30
    raw[:, 2, :, :, 50:80] *= 30  # too many for sinks: a region
    weights = raw / raw.sum(-1, keepdims=True)
    arrays = packed(weights)
    kept = torch.tensor(restored(arrays.heads, arrays.heads_most, 1, 255), dtype=torch.float64)
    received = kept[..., 1:, :].mean(-2)
    found = list(sink_rows(ExplorerRow("m", "", (10, 10), (10, 10), ("CLS",), 2, 2), arrays))
    for layer in (0, 1):
        own = received[:, layer]
        sinks = outliers(own)[..., 1:]
        assert sinks.sum(-1).max() <= 10
        assert found[layer].mass == pytest.approx(float((own[..., 1:] * sinks).sum(-1).mean()), rel=1e-6)
        assert found[layer].patches == pytest.approx(float(sinks.sum(-1).double().mean()))
    assert outliers(received[:, 2])[..., 1:].sum(-1).min() > 10
    assert found[2].patches == 10
    top = received[:, 2, :, 1:].topk(10).values.sum(-1).mean()
    assert found[2].mass == pytest.approx(float(top), rel=1e-6)


@pytest.mark.parametrize("word", REPORTS)
def test_a_report_of_photographs_says_so_where_much_attention_lies_on_few_patches(word, golden):
    record = golden({"rollout": "rollout of pictures"}.get(word, word)).record
    (row,), (arrays,) = record.explorer, record.explorer_arrays.values()

    def said(weights: np.ndarray) -> list[str]:
        most = np.full_like(arrays.heads_most, 0.5)
        planted = {row.model: replace(arrays, heads=weights.astype(np.uint8), heads_most=most)}
        document = REPORTS[word](replace(record, explorer_arrays=planted))
        assert document.first is not None
        return [each.text for each in document.first.answer if "attention sinks" in each.text]

    even = np.full(arrays.heads.shape, 40)
    last, first = even.copy(), even.copy()
    last[:, -1, :, :, 1 + 9] = first[:, 0, :, :, 1 + 9] = 255
    assert said(even) == said(first) == []  # of the last quarter of the layers alone
    (text,) = said(last)
    assert "layer 1" in text
    assert "1 of 16" in text


def test_similarities_of_maps_have_no_interval_beyond_1(golden):
    for row in golden("attention").record.layers:
        for each in (row.alike, row.previous):
            assert each is None or -1 <= each.low <= each.value <= each.high <= 1 + 1e-12
