"""Records of attention and rollout with planted facts, and numbers of maps by definition."""

from dataclasses import replace

import numpy as np
import torch
from torch.nn import functional

from tests.kit.commands import report
from tests.kit.contradictions import contradictions
from vitlens.commands.attention.record import AttentionRecord, LayerRow, LayoutRow
from vitlens.commands.rollout.record import ImageRow, PairRow, RolloutRecord, RolloutRow
from vitlens.commands.shared.maps.record import ATTENTION, OnObjectRow
from vitlens.commands.shared.predictions import PredictionRow
from vitlens.record import Config, Data, ModelEntry, Record
from vitlens.uncertainty import Estimate


def enlarged(maps: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Interpolate maps (batch, rows, columns) bilinearly between the centres of their cells."""
    large = functional.interpolate(
        torch.from_numpy(maps)[:, None].float(), size=size, mode="bilinear"
    )
    return large[:, 0].numpy()


def on_highest(maps: np.ndarray, masks: np.ndarray) -> np.ndarray:
    """Return the share of each map's highest points that lie on its mask.

    Masks are (batch, height, width), and points tie up to rounding. Maps (batch, rows, columns) are
    interpolated bilinearly between the centres of their cells.
    """
    large = enlarged(maps, masks.shape[1:]).reshape(len(maps), -1)
    highest = np.isclose(large, large.max(1, keepdims=True), rtol=1e-6)
    return (highest & masks.reshape(len(maps), -1)).sum(1) / highest.sum(1)


def config(images: int) -> Config:
    return Config(models=(ModelEntry("vit", "vit"),), data=Data("scenes", images=images))


def attention(images: int = 40, **changes: object) -> AttentionRecord:
    """Return a record of three layers, of which the second attends to the object.

    changes: of the last two layers' rows.
    """

    def layer(number: int) -> LayerRow:
        row = LayerRow(
            model="vit",
            maps=str(number),
            layer=number,
            module=f"blocks.{number}",
            kind="patch",
            heads=2,
            map=(4, 4),
            reading="the CLS token",
            prefix_mass=0.1,
            alike=Estimate(0.3, 0.2, 0.4, images, ""),
            information=Estimate(2.0 + number / 10, 1.9, 2.3, images, "bits"),
            by_place=Estimate(0.3, 0.2, 0.4, images),
            previous=Estimate(0.5, 0.4, 0.6, images, "") if number else None,
        )
        return replace(row, **changes) if number else row

    def mass(number: int) -> OnObjectRow:
        gain = 20.0 if number == 1 else 0.0
        return OnObjectRow(
            "vit",
            ATTENTION,
            "mass",
            Estimate(0.3 + gain / 100, 0.2, 0.6, images),
            "a map of the centre",
            Estimate(0.3),
            Estimate(gain, gain - 8, gain + 8, images, "points"),
            number,
        )

    layout = LayoutRow("vit", (4, 4), ("cls",), (8, 8), (32, 32), Estimate(0.05, n=16, unit=""))
    return AttentionRecord(
        config=config(images),
        layers=tuple(map(layer, range(3))),
        on_object=tuple(map(mass, range(3))),
        layout=(layout,),
    )


def rollout(images: int = 40, **changes: object) -> RolloutRecord:
    """Return a record of two fusions and relevance, and only relevance finds the object.

    changes: of the mean fusion's row.
    """

    def row(name: str, method: str, fusion: str | None, gain: float) -> RolloutRow:
        return RolloutRow(
            model="vit",
            maps=name,
            name=name,
            method=method,
            zero=0,
            fusion=fusion,
            information=Estimate(2.0, 1.8, 2.2, images, "bits"),
            by_place=Estimate(0.3, 0.2, 0.4, images),
            pointing=Estimate(0.5 + gain / 100, 0.4, 0.6, images),
            baseline="a map of the centre",
            of_baseline=Estimate(0.5),
            difference=Estimate(gain, gain - 10, gain + 10, images, "points"),
        )

    rows = (
        replace(row("mean-map", "rollout", "mean", 0.0), **changes),
        row("max-map", "rollout", "max", 1.0),
        row("relevance", "relevance", None, 40.0),
    )
    pairs = (PairRow("mean-map", "max-map", Estimate(0.1, 0.05, 0.15, images, "")),)
    return RolloutRecord(config=config(images), methods=rows, pairs=pairs, shown=(ImageRow("a"),))


def said(record: Record) -> dict[str, str]:
    """Return the claims of its report by question, after a check for contradictions."""
    claims = report(record).claims
    assert not list(contradictions(claims))
    return {claim.question: claim.says for claim in claims if claim.is_shown}


def prediction(image: str, name: str, probability: float, label: str | None) -> PredictionRow:
    """Return a prediction, with a second class whose name is markup."""
    return PredictionRow.of(image, [name, "<b>*x*</b>"], [probability, 0.1], label)
