"""One head of a model: its labels, their tests, and the effect of its removal."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from vitlens.analysis.ablation.bench import Bench
from vitlens.analysis.ablation.several import pairwise
from vitlens.analysis.ablation.units import Unit, units_of
from vitlens.analysis.evaluation.evaluate import fitting_batch_size
from vitlens.analysis.naming.labels import HeadName, HeadNames
from vitlens.analysis.naming.logits import PRODUCTS
from vitlens.analysis.naming.rows import AttendsRow, WritesRow
from vitlens.analysis.naming.words import CORRELATES, MATTERS, NOTHING, SEVERAL
from vitlens.analysis.naming.writes import tested_concepts
from vitlens.commands.head import record as rows
from vitlens.commands.head.maps import (
    choose_exemplars,
    exemplar_maps,
    measure_placed,
    measure_pushed,
    with_largest_patch,
)
from vitlens.commands.head.options import HeadOptions
from vitlens.commands.head.query_key import measure_pair, measure_space
from vitlens.commands.run.load import ImageRequest
from vitlens.commands.run.run import Run
from vitlens.commands.shared.label_rows import NoteRow
from vitlens.commands.shared.labelling import attributes_of, heads_named
from vitlens.devices import autocast
from vitlens.errors import InputError
from vitlens.models.model import Model
from vitlens.models.numbering import is_sparse, no_layer
from vitlens.pixels import Streamed
from vitlens.record import as_row
from vitlens.uncertainty import Estimate, mean_points, student_mean

IMAGES: Final = 300  # the largest number of images without --limit
PAIRED: Final = 128  # images on which the head is removed together with another one


def measure(options: HeadOptions) -> Path | None:
    """Label a head, test the labels, remove the head, and write the report; returns its path.

    Of several processes, each measures the same, and all but the first return None. Raises
    InputError for a head that the model does not have, and for attributes that match no image.
    """
    run = Run("head", options, most=1, images=ImageRequest(limit=IMAGES))
    model = run.model
    place = head_of(options.head, model)
    attributes = attributes_of(options.attributes, run.split)
    with (
        run.folder(f"Head {options.head} of") as folder,
        autocast(model.device, run.run_options.precision),
    ):
        # all heads are labelled, because the report compares them
        names, labels = heads_named(run, run.split, attributes)
        (head,) = [name for name in names.heads if (name.layer, name.head) == place]
        partners, note_on_partners = _partners(run, head, labels)
        pushed = measure_pushed(run, head)
        placed = tuple(measure_placed(run, head, labels))
        indices, exemplars = choose_exemplars(head, run.split)
        first_exemplar = run.split.pick(torch.tensor(indices[:1]))
        pair_fields = measure_pair(run, head, first_exemplar)
        space_fields = measure_space(run, head)

        def record() -> rows.HeadRecord:
            alias = model.alias
            drawn = exemplar_maps(model, run.split, head, indices)
            exemplar_rows = exemplars
            if drawn.of_contributions:
                exemplar_rows = list(map(with_largest_patch, exemplars, drawn.arrays.maps))
            notes = [note for note in (*names.notes, note_on_partners) if note]
            return rows.HeadRecord(
                attends=(as_row(AttendsRow, head.attends),) if head.attends else (),
                parts=tuple(_parts(head)),
                looks=(head.looks,) if head.looks else (),
                placed=placed,
                writes=(as_row(WritesRow, head.writes),) if head.writes else (),
                classes=tuple(_classes(run, head, labels, attributes)),
                partners=partners,
                heads=(_counts(alias, names),),
                pushed=pushed,
                exemplars=tuple(exemplar_rows),
                notes=tuple(NoteRow(note) for note in notes),
                shown={alias: drawn.arrays},
                **pair_fields,
                **space_fields,
            )

        return folder.publish(record)


def head_of(text: str, model: Model) -> tuple[int, int]:
    """Return the layer and head of a text such as L3.H7.

    Raises InputError for another text, and for a head that the model does not have.
    """
    match = re.fullmatch(r"[lL](\d{1,4})\.[hH](\d{1,4})", text)
    if match is None:
        raise InputError(f"expected a head as L3.H7, layer and head counted from 0, found {text!r}")
    units = units_of(model, kinds=["head"])
    layer = int(match[1])
    head = int(match[2])
    if Unit("head", layer, head) not in units:
        last = units[-1]
        layers = sorted({unit.layer for unit in units})
        if layer not in layers and is_sparse(layers):  # blocks without attention lie between
            raise InputError(no_layer(layers, layer, model.alias, "a head of layer"))
        raise InputError(
            f"expected a head of {model.alias}, L{layers[0]}.H0 to L{last.layer}.H{last.head}, "
            f"found {text}"
        )
    return layer, head


def _parts(head: HeadName) -> Iterator[rows.PartRow]:
    """Yield the share of each product of query and key in the head's logits."""
    if head.attends is not None:
        for product in PRODUCTS:
            share = Estimate(head.attends.shares[product], n=head.attends.share.n)
            yield rows.PartRow(product, share)


def _classes(
    run: Run[HeadOptions],
    head: HeadName,
    labels: Tensor | None,
    attributes: Mapping[str, Tensor],
) -> Iterator[rows.ClassRow]:
    """Yield the losses without the head of each class and attribute, the largest first."""
    if head.writes is None or labels is None:
        return
    classes = run.model.classes
    groups = run.split.groups
    tested = tested_concepts(labels, classes, attributes, groups)
    # by name, (n,), True for the images of the class or with the attribute
    members = {classes[index]: labels == index for index in tested.classes}
    for name in tested.attributes:
        members[name] = attributes[name]
    class_rows = []
    for name, is_member in members.items():
        member_groups = None if groups is None else groups[is_member]
        lost = mean_points(head.writes.points[is_member], groups=member_groups)
        fall = student_mean(head.writes.falls[is_member], groups=member_groups, unit="nats")
        row = rows.ClassRow(name, images=int(is_member.sum()), lost=lost, fall=fall)
        class_rows.append(row)
    yield from sorted(class_rows, key=lambda row: -row.fall.value)


def _partners(
    run: Run[HeadOptions], head: HeadName, labels: Tensor | None
) -> tuple[tuple[rows.PartnerRow, ...], str]:
    """Return the loss without this head and each other one, the largest synergy first.

    Returns a note about the measurement, too, "" for none.
    """
    if labels is None or head.writes is None:
        return (), ""
    model = run.model
    unit = Unit("head", head.layer, head.head)
    other_heads = [other for other in units_of(model, kinds=["head"]) if other != unit]
    if not other_heads:
        return (), ""
    bench = Bench(
        model,
        Streamed(run.split, model.pixel_dtype),
        labels,
        by="mean",
        groups=run.split.groups,
        seed=run.run_options.seed,
        batch_size=run.run_options.batch_size or fitting_batch_size(model),
        progress=run.progress,
    )
    images = torch.arange(min(PAIRED, len(labels)))
    # indices into all units: this head is the first, and is paired with each other one
    pairs = [(0, index) for index in range(1, len(other_heads) + 1)]
    effects = pairwise(bench, [unit, *other_heads], pairs, images, what="Removing pairs")
    partners = []
    for pair_index, other in enumerate(other_heads):
        name = f"L{other.layer}.H{other.head}"
        synergy = effects.synergy.estimate(pair_index, len(images), "nats")
        p = float(effects.synergy.p_holm[pair_index])
        partners.append(rows.PartnerRow(name, synergy, p))
    partners.sort(key=lambda row: -abs(row.synergy.value))
    return tuple(partners), effects.note


def _counts(alias: str, names: HeadNames) -> rows.ModelRow:
    """Return for how many heads of the model each label was tested, and survived its test."""
    attends = []
    looks = []
    states = []
    for head in names.heads:
        if head.holds is not None:
            attends.append(head.holds)
        if head.looks is not None and head.looks.holds is not None:
            looks.append(head.looks.holds)
        if head.writes is not None:
            states.append(head.writes.state)
    return rows.ModelRow(
        model=alias,
        heads=len(names.heads),
        attends=len(attends),
        attends_hold=sum(attends),
        looks=len(looks),
        looks_hold=sum(looks),
        matter=states.count(MATTERS),
        correlate=states.count(CORRELATES),
        nothing=states.count(NOTHING),
        several=states.count(SEVERAL),
    )
