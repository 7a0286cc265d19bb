"""One head of a model: the words for it, their tests, and what breaks without it."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from vitlens.analysis.ablation.bench import Bench, Unit, units_of
from vitlens.analysis.ablation.several import pairwise
from vitlens.analysis.evaluation.evaluate import fitting_batch_size
from vitlens.analysis.heads.geometry import geometry_of
from vitlens.analysis.naming.logits import PRODUCTS
from vitlens.analysis.naming.names import HeadName, HeadNames
from vitlens.analysis.naming.words import CORRELATES, MATTERS, NOTHING, SEVERAL
from vitlens.analysis.naming.writes import things_of
from vitlens.analysis.patching.contribution import above_mean, class_contributions, key_contributions
from vitlens.attribution.explain import explain, preferred_method
from vitlens.commands.head import record as rows
from vitlens.commands.head.options import HeadOptions
from vitlens.commands.run.progress import phase
from vitlens.commands.run.run import Run
from vitlens.commands.shared.names import NoteRow
from vitlens.commands.shared.naming import attributes_of, heads_named
from vitlens.data.split import Split
from vitlens.devices import autocast
from vitlens.errors import InputError
from vitlens.lens.call import AttentionCall
from vitlens.lens.observe import observe
from vitlens.models.model import Model
from vitlens.models.numbering import is_sparse, no_layer
from vitlens.pixels import Streamed, Targets
from vitlens.shapes import Images
from vitlens.uncertainty import Estimate, mean_points, student_mean, student_test

IMAGES: Final = 300  # at most, where --limit says nothing
QUANTILES: Final = (1.0, 0.95, 0.75, 0.5, 0.25, 0.0)  # of the exemplars
PUSHED: Final = 64  # images of what it adds to every class
PLACED: Final = 64  # images on which it is measured where the head attends
EVIDENCE: Final = 0.25  # of the patches: those with most evidence, where there is no mask
PAIRED: Final = 128  # images on which the head is removed together with another one


def measure(options: HeadOptions) -> Path | None:
    """Name a head, test the words, remove it, and write the report; returns its path.

    Of several processes each measures the same; all but the first return None. Raises InputError for a head that the
    model does not have, and for attributes that match no image.
    """
    run = Run("head", options, most=1, limit=IMAGES)
    model = run.model
    split = run.split
    layer, head = head_of(options.head, model)
    attributes = attributes_of(options.attributes, split)
    with run.folder(f"Head {options.head} of") as folder, autocast(model.device, run.run.precision):
        names, labels = heads_named(run, split, attributes)
        (one,) = (each for each in names.heads if (each.layer, each.head) == (layer, head))
        partners, remark = _partners(run, one, labels)
        pushed = _pushed(run, one)
        placed = tuple(_placed(run, one, labels))

        def record() -> rows.HeadRecord:
            alias = run.aliases[0]
            exemplars = _exemplars(one, split)
            shown = torch.tensor([index for index, _ in exemplars])
            drawn, through = _arrays(model, split, one, shown)
            return rows.HeadRecord(
                attends=tuple(_attends(alias, one)),
                parts=tuple(_parts(one)),
                looks=tuple(_looks(alias, one)),
                placed=placed,
                writes=tuple(_writes(alias, one)),
                classes=tuple(_classes(model, one, labels, attributes, split)),
                partners=partners,
                heads=(_counts(alias, names),),
                pushed=pushed,
                exemplars=tuple(
                    _through(row, each) if through else row for (_, row), each in zip(exemplars, drawn.maps)
                ),
                notes=tuple(map(NoteRow, filter(None, (*names.notes, remark)))),
                shown={alias: drawn},
            )

        return folder.publish(record)


def head_of(text: str, model: Model) -> tuple[int, int]:
    """Return the layer and head of a text as L3.H7. Raises InputError for another text, and a head that is not
    there."""
    found = re.fullmatch(r"[lL](\d{1,4})\.[hH](\d{1,4})", text)
    if found is None:
        raise InputError(f"expected a head as L3.H7, layer and head counted from 0, found {text!r}")
    units = units_of(model, kinds=["head"])
    layer = int(found[1])
    head = int(found[2])
    if Unit("head", layer, head) not in units:
        last = units[-1]
        numbers = sorted({unit.layer for unit in units})
        if layer not in numbers and is_sparse(numbers):
            raise InputError(no_layer(numbers, layer, model.alias, "a head of layer"))
        raise InputError(
            f"expected a head of {model.alias}, L{numbers[0]}.H0 to L{last.layer}.H{last.head}, found {text}"
        )
    return layer, head


def _attends(alias: str, one: HeadName) -> Iterator[rows.AttendsRow]:
    if (each := one.attends) is not None:
        stays = min(each.sides.values(), key=lambda side: side.value, default=None)
        yield rows.AttendsRow(
            model=alias,
            layer=one.layer,
            head=one.head,
            word=each.word,
            best=each.best,
            share=each.share,
            next=each.other,
            next_share=each.other_share,
            spread=each.spread,
            stays=stays,
            holds=one.holds,
        )


def _parts(one: HeadName) -> Iterator[rows.PartRow]:
    if one.attends is not None:
        for name in PRODUCTS:
            yield rows.PartRow(name, Estimate(one.attends.shares[name], n=one.attends.share.n))


def _looks(alias: str, one: HeadName) -> Iterator[rows.LooksRow]:
    if (each := one.looks) is not None:
        yield rows.LooksRow(
            model=alias,
            layer=one.layer,
            head=one.head,
            word=each.word,
            score=each.score,
            moved=each.moved,
            holds=each.holds,
        )


def _writes(alias: str, one: HeadName) -> Iterator[rows.WritesRow]:
    if (each := one.writes) is not None:
        yield rows.WritesRow(
            model=alias,
            layer=one.layer,
            head=one.head,
            word=each.word,
            best=each.best,
            auc=each.auc,
            control=each.control,
            state=each.state,
            lost=each.lost,
            others_lost=each.others_lost,
            margin=each.margin,
            p=each.p,
            alike=each.alike,
        )


def _classes(
    model: Model, one: HeadName, labels: Tensor | None, attributes: Mapping[str, Tensor], split: Split
) -> Iterator[rows.ClassRow]:
    """Yield what the images of each class and attribute lose, the most first."""
    if one.writes is None or labels is None:
        return
    tested = things_of(labels, model.classes, attributes, split.groups)
    things = {model.classes[number]: labels == number for number in tested.classes}
    found = []
    for name, own in (things | {name: attributes[name] for name in tested.attributes}).items():
        groups = None if split.groups is None else split.groups[own]
        lost = mean_points(one.writes.points[own], groups=groups)
        fall = student_mean(one.writes.falls[own], groups=groups, unit="nats")
        found.append(rows.ClassRow(name, int(own.sum()), lost, fall))
    yield from sorted(found, key=lambda row: -row.fall.value)


def _partners(run: Run[HeadOptions], one: HeadName, labels: Tensor | None) -> tuple[tuple[rows.PartnerRow, ...], str]:
    """Return what is lost without this head and each other one, the largest synergy first, and a remark."""
    if labels is None or one.writes is None:
        return (), ""
    model = run.model
    own = Unit("head", one.layer, one.head)
    others = [unit for unit in units_of(model, kinds=["head"]) if unit != own]
    if not others:
        return (), ""
    bench = Bench(
        model,
        Streamed(run.split, model.pixel_dtype),
        labels,
        "mean",
        run.split.groups,
        run.run.seed,
        run.run.batch_size or fitting_batch_size(model),
        progress=run.progress,
    )
    first = torch.arange(min(PAIRED, len(labels)))
    units = [own, *others]
    change, _, _, note = pairwise(bench, units, [(0, at) for at in range(1, len(units))], first, what="Removing pairs")
    found = [
        rows.PartnerRow(
            f"L{unit.layer}.H{unit.head}", change.estimate(at, len(first), "nats"), float(change.p_holm[at])
        )
        for at, unit in enumerate(others)
    ]
    return tuple(sorted(found, key=lambda row: -abs(row.synergy.value))), note


def _counts(alias: str, names: HeadNames) -> rows.ModelRow:
    held = [each.holds for each in names.heads if each.holds is not None]
    seen = [each.looks.holds for each in names.heads if each.looks is not None and each.looks.holds is not None]
    states = [each.writes.state for each in names.heads if each.writes is not None]
    return rows.ModelRow(
        model=alias,
        heads=len(names.heads),
        attends=len(held),
        attends_hold=sum(held),
        looks=len(seen),
        looks_hold=sum(seen),
        matter=states.count(MATTERS),
        correlate=states.count(CORRELATES),
        nothing=states.count(NOTHING),
        several=states.count(SEVERAL),
    )


def _exemplars(one: HeadName, split: Split) -> list[tuple[int, rows.ExemplarRow]]:
    """Images at the quantiles of what the head adds to its class; without one, the first images."""
    count = len(split)
    if one.writes is None:
        order = list(range(min(len(QUANTILES), count)))
        scores = None
        quantiles = [0.0] * len(order)
    else:
        scores = one.writes.scores
        ranked = scores.argsort(stable=True).tolist()
        chosen = dict.fromkeys(round(quantile * (count - 1)) for quantile in QUANTILES)
        order = [ranked[at] for at in chosen]
        quantiles = [at / max(1, count - 1) for at in chosen]
    found = []
    for index, quantile in zip(order, quantiles):
        label = None if split.labels is None else split.classes[int(split.labels[index])]
        adds = 0.0 if scores is None else float(scores[index])
        found.append((index, rows.ExemplarRow(split.names[index], label, adds, quantile)))
    return found


def _through(row: rows.ExemplarRow, values: NDArray[np.float32]) -> rows.ExemplarRow:
    """Return the row with the patch through which the head adds most; values: its map."""
    at = divmod(int(np.abs(values).argmax()), values.shape[1])
    return replace(row, patch=at, patch_adds=float(values[at]))


@phase("What the head adds to each class")
def _pushed(run: Run[HeadOptions], one: HeadName) -> tuple[rows.PushedRow, ...]:
    """Return what the head adds to the logit of every class, the largest first, on the first images."""
    if one.writes is None:
        return ()
    model = run.model
    split = run.split.pick(torch.arange(min(PUSHED, len(run.split))))
    found = torch.cat(
        [
            class_contributions(model, batch.images, one.layer, one.head)
            for batch in split.batches(run.run.batch_size or fitting_batch_size(model), device=model.device)
        ]
    ).double()
    found = found - found.mean(1, keepdim=True)
    each = [
        rows.PushedRow(name, student_mean(found[:, at], groups=split.groups, unit=""))
        for at, name in enumerate(model.classes)
    ]
    return tuple(sorted(each, key=lambda row: -row.adds.value))


def _arrays(model: Model, split: Split, one: HeadName, shown: Tensor) -> tuple[rows.HeadArrays, bool]:
    """Return the exemplars with what the head adds to its class, above the mean of the classes, through each patch; or
    with its attention on their patches.

    And whether it is the former.
    """
    (batch,) = split.pick(shown).batches(len(shown), device=model.device)
    pixels = (batch.images.float().cpu() * 255).round().byte().numpy()
    layout = model.layout
    if one.writes is not None and one.writes.best in model.classes:
        best = torch.full((len(shown),), model.classes.index(one.writes.best))
        wanted = above_mean(best, len(model.classes))
        added = key_contributions(model, batch.images, wanted, one.layer, one.head)
        if added.shape[1] == layout.tokens and bool(added.isfinite().all()):
            maps = added[:, len(layout.prefix) :].unflatten(1, layout.grid)
            return rows.HeadArrays(pixels, maps.numpy().astype(np.float32)), True
    seen = _attention(model, batch.images, one)
    found = np.full((len(shown), 1, 1), np.nan) if seen is None else seen.numpy()
    return rows.HeadArrays(pixels, found.astype(np.float32)), False


def _attention(model: Model, images: Images, one: HeadName) -> Tensor | None:
    """Return the head's attention on patches (batch, rows, columns), from CLS, or a mean over the patches; None in
    windows."""
    seen: list[Tensor] = []

    def take(call: AttentionCall) -> None:
        place = geometry_of(call.site, model)
        if call.site.layer != one.layer or place is None or place.windows is not None or call.site.part:
            return
        weights = call.precise().weights()[:, one.head]
        row = weights[:, place.cls[0]] if place.cls else weights[:, place.prefix :].mean(1)
        seen.append(row[:, place.prefix :].unflatten(1, place.grid).cpu())

    observe(model, images, take)
    return seen[0] if seen else None


def _placed(run: Run[HeadOptions], one: HeadName, labels: Tensor | None) -> Iterator[rows.PlacedRow]:
    """Yield how much of the head's attention lies on the object's mask; without masks on the patches with most evidence
    for the class.

    Of the first images.
    """
    model = run.model
    split = run.split.pick(torch.arange(min(PLACED, len(run.split))))
    if len(split) < 2 or (split.masks is None and not model.has_classifier):
        return
    parts = []
    size = run.run.batch_size or fitting_batch_size(model)
    with run.progress("Where the head attends", len(split)) as advance:
        for batch in split.batches(size, device=model.device):
            part = _attention(model, batch.images, one)
            if part is None:
                return
            parts.append(part)
            advance(len(part))
    seen = torch.cat(parts).double()
    seen = seen / seen.sum((1, 2), keepdim=True).clamp_min(1e-30)
    if split.masks is not None:
        thing = "the object's mask"
        areas = split.masks.double()
    else:
        method = preferred_method(model)
        thing = f"the quarter of its patches with most evidence for the class, by the map {method}"
        targets: Targets = "predicted" if labels is None else labels[: len(split)]
        maps = explain(model, Streamed(split, model.pixel_dtype), targets=targets, method=method, batch_size=size).cpu()
        flat = maps.double().flatten(1)
        areas = (flat >= flat.quantile(1 - EVIDENCE, dim=1, keepdim=True)).double().view_as(maps)
    areas = F.adaptive_avg_pool2d(areas[:, None], (seen.shape[1], seen.shape[2]))[:, 0]
    on = (seen * areas).sum((1, 2))
    elsewhere = ((seen * areas.sum(0)).sum((1, 2)) - on) / (len(split) - 1)
    groups = split.groups
    yield rows.PlacedRow(
        model=model.alias,
        layer=one.layer,
        head=one.head,
        thing=thing,
        on=student_mean(on, groups=groups, least=0.0, most=1.0),
        elsewhere=student_mean(elsewhere, groups=groups, least=0.0, most=1.0),
        difference=student_mean(100 * (on - elsewhere), groups=groups, unit="points", least=-100.0, most=100.0),
        p=student_test(on - elsewhere, groups=groups),
    )
