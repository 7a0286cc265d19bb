"""What training changed inside a model that is adapted: the attention of its heads, its features and its maps."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitlens.analysis.attention.methods import rollout
from vitlens.analysis.attention.weights import Moved, attention_maps, attention_moved
from vitlens.analysis.evaluation.evaluate import predicted_logits
from vitlens.analysis.features.features import Features, extract
from vitlens.analysis.features.probe import Probe, probe
from vitlens.analysis.features.similarity import similarity
from vitlens.analysis.heads.registry import STATISTICS
from vitlens.analysis.heads.statistics import measure as measure_heads
from vitlens.commands.study import record as rows
from vitlens.commands.study.kinds.setup import Setup
from vitlens.data.split import Split
from vitlens.models.model import Model
from vitlens.models.rebuild import untrained_like
from vitlens.models.support import meets
from vitlens.record import by
from vitlens.training.metrics import read_metrics
from vitlens.uncertainty import Estimate, accuracy_difference, bootstrap_mean, holm, student_test

REACHED: Final = 0.95  # share of the best accuracy whose time is reported
_SHOWN: Final = 64  # test images on which attention is compared
_SIMILAR: Final = 256  # test images on which CKA is measured
_MAPPED: Final = 6  # images whose maps are shown, one a class
_AT_ONCE: Final = 16  # images
_SHIFTED: Final = ("distance", "normalised_entropy", "prefix_mass")  # statistics of heads
_FULL: Final = "full"
Rows: TypeAlias = dict[str, Any]  # of the record, by field


def inside(setup: Setup, points: Mapping[str, rows.PointRow]) -> Rows:
    """Return how fast the points learned, and what changed inside the model, as fields of the record; "gains": of
    probes."""
    words = {label: row.words for label, row in points.items()}
    curves = tuple(
        rows.CurveRow(
            row.label,
            row.words,
            seed,
            epoch.epoch + 1,
            epoch.seconds,
            epoch.train_loss,
            float(epoch.test_accuracy),  # type: ignore[arg-type]  # tested after every epoch
        )
        for row in points.values()
        if row.candidate
        for seed in setup.seeds
        for epoch in read_metrics(setup.place(row.label, seed))
    )
    learned = {"curves": curves, "reached": tuple(reached(curves))}
    return learned | _attention(setup, words) | _features(setup, words) | _maps(setup)


def reached(curves: Sequence[rows.CurveRow]) -> Iterator[rows.ReachedRow]:
    """When each point's mean accuracy over seeds first reached REACHED times the best mean of all points."""
    means = {
        label: [
            (epochs, float(np.mean([row.seconds for row in same])), float(np.mean([row.accuracy for row in same])))
            for epochs, same in sorted(by(own, "epochs").items())
        ]
        for label, own in by(curves, "label").items()
    }
    words = {row.label: row.words for row in curves}
    wanted = REACHED * max(accuracy for own in means.values() for _, _, accuracy in own)
    for label, own in means.items():
        first = next(((epochs, seconds) for epochs, seconds, accuracy in own if accuracy >= wanted), (None, None))
        yield rows.ReachedRow(label, words[label], wanted, *first)


def _attention(setup: Setup, words: Mapping[str, str]) -> Rows:
    """Return how far the attention of every head moved, and which statistics of it changed."""
    images = setup.test.limit(_SHOWN, seed=setup.run.seed)
    before = setup.start()
    groups = _groups(images)
    moved_rows = []
    head_rows = []
    for label in ("last-blocks", _FULL):
        after = [setup.trained(label, seed=seed) for seed in setup.seeds]
        moved = _over_seeds(attention_moved(before, after, images))
        between = _over_seeds(attention_moved(after[0], after[1:], images)) if len(after) > 1 else None
        own = [
            rows.HeadMovedRow(
                label,
                words[label],
                layer,
                head,
                bootstrap_mean(values[:, head].numpy(), groups=groups, least=0.0, most=1.0),
                None if between is None else float(between[layer][:, head].mean()),
            )
            for layer, values in enumerate(moved)
            for head in range(values.shape[1])
        ]
        overall = torch.cat(moved, 1).mean(1)
        known = [row for row in own if row.between is not None and row.moved.low is not None]
        moved_rows.append(
            rows.MovedRow(
                label,
                words[label],
                bootstrap_mean(overall.numpy(), groups=groups, least=0.0, most=1.0),
                len(own),
                float(np.mean([row.between for row in known])) if known else None,
                sum(row.moved.low > row.between for row in known) if known else None,  # type: ignore[operator]
            )
        )
        head_rows += own
    shifts = tuple(_shift_rows(before, after, images))  # of full training, the last
    return {"moved": tuple(moved_rows), "heads_moved": tuple(head_rows), "head_shifts": shifts}


def _over_seeds(by_model: Sequence[Sequence[Moved]]) -> list[Tensor]:
    """Return the mean over models, by layer (images, heads)."""
    return [torch.stack(tuple(layers)).double().mean(0) for layers in zip(*by_model, strict=True)]


def _groups(images: Split) -> NDArray[np.int64] | None:
    return None if images.groups is None else images.groups.cpu().numpy()


def _shift_rows(before: Model, after: Sequence[Model], images: Split) -> Iterator[rows.ShiftRow]:
    """Yield the change of each statistic of each head where it is defined, paired by image and averaged over seeds."""
    first = _statistics(before, images)
    groups = _groups(images)
    others = [_statistics(model, images) for model in after]
    for name in _SHIFTED:
        changes: dict[tuple[int, int], NDArray[np.floating]] = {}
        for key in [each for each in first if each[0] == name]:
            shift = torch.stack([other[key] for other in others]).double().mean(0) - first[key]
            changes |= {(key[1], head): shift[:, head].numpy() for head in range(shift.shape[1])}
        corrected = holm([student_test(change, groups=groups) for change in changes.values()])
        for ((layer, head), change), p_holm in zip(changes.items(), corrected, strict=True):
            level = float(first[name, layer][:, head].double().mean())
            unit = STATISTICS[name].unit
            most = 1.0 if unit == "fraction" else np.inf
            mean = bootstrap_mean(change, groups=groups, unit=unit, least=-most, most=most)
            yield rows.ShiftRow(name, layer, head, level, mean, p_holm)


def _statistics(model: Model, images: Split) -> Mapping[tuple[str, int], Tensor]:
    """Return each statistic of each layer, (images, heads)."""
    parts: dict[tuple[str, int], list[Tensor]] = {}
    for batch in images.batches(_AT_ONCE, device=model.device):
        for key, values in measure_heads(model, batch.images).values.items():
            if key[0] in _SHIFTED:
                parts.setdefault(key, []).append(values.cpu())
    return {key: torch.cat(values) for key, values in parts.items()}


def _features(setup: Setup, words: Mapping[str, str]) -> Rows:
    """CKA between the layers before and after, and how well a linear classifier does on each layer."""
    images = setup.test.limit(_SIMILAR, seed=setup.run.seed)
    alike = list[rows.SimilarityRow]()
    start = setup.start()
    seed = setup.seeds[0]
    before = _read(start, images)
    for label in ("last-blocks", _FULL, "scratch", "distilled"):  # the frozen point keeps all features
        found = []
        for training in setup.seeds:
            after = _read(setup.trained(label, seed=training), images)
            found.append(similarity(before, after, sources=images.groups))
        values, low, high = (
            torch.stack([each.diagonal() for each in known]).mean(0).tolist() if known else None
            for known in (
                [getattr(each, name) for each in found if getattr(each, name) is not None]
                for name in ("values", "low", "high")
            )
        )
        for place, value in enumerate(values or ()):
            if np.isfinite(value):  # a layer that does not vary has no CKA
                ends = [None if end is None else end[place] for end in (low, high)]
                cka = Estimate(value, ends[0], ends[1], len(images), unit="")
                alike.append(rows.SimilarityRow(label, words[label], _number_of(before, place), cka))
    told = {"pretrained": "pretrained", "random": "random weights", _FULL: "after full training"}
    models = start, untrained_like(start, seed=seed), setup.trained(_FULL)
    probes = list[rows.ProbeRow]()
    chance = 1 / len(setup.test.classes)
    last = dict[str, Probe]()
    for label, model in zip(told, models):
        for layer, each in _probed(setup, model):
            probes.append(rows.ProbeRow(label, told[label], layer, each.accuracy, chance))
            last[label] = each
    gains = (
        rows.ComparisonRow(
            "probe_gain",
            label,
            other,
            told[label],
            told[other],
            accuracy_difference(last[label].correct, last[other].correct, groups=_groups(setup.test), seed=seed),
        )
        for label, other in (("pretrained", "random"), (_FULL, "pretrained"))
    )
    return {"layer_similarity": tuple(alike), "probes": tuple(probes), "gains": tuple(gains)}


def _read(model: Model, images: Split) -> Features:
    features = extract(model, images)
    assert features is not None  # one process
    return features


def _number_of(features: Features, place: int) -> int:
    number = features.layers[place].index
    assert number is not None  # of no embedding
    return number


def _probed(setup: Setup, model: Model) -> Iterator[tuple[int, Probe]]:
    """Yield the probe of each layer, fitted on the training images, with the layer's number."""
    train = _read(model, setup.train)
    test = _read(model, setup.test)
    assert setup.train.labels is not None
    assert setup.test.labels is not None
    labels = setup.train.labels.cpu().long(), setup.test.labels.cpu().long()
    for place, (own, other) in enumerate(zip(train.values, test.values, strict=True)):
        fitted = probe(
            own,
            labels[0],
            other,
            labels[1],
            train_groups=setup.train.groups,
            groups=setup.test.groups,
            seed=setup.run.seed,
        )
        yield _number_of(train, place), fitted


def _maps(setup: Setup) -> Rows:
    """Attention maps before and after full training on the first image of each class: not chosen by what they show.

    The model before names its own classes, which may be others than the data's: attention needs no class.
    """
    images = setup.test.limit(_SHOWN, seed=setup.run.seed)
    model = setup.model
    assert model is not None
    assert images.labels is not None
    labels = images.labels.tolist()
    chosen = images.pick(torch.tensor([labels.index(label) for label in sorted(set(labels))[:_MAPPED]]))
    assert chosen.labels is not None
    files = chosen.files or tuple(f"image {number}" for number in range(len(chosen)))
    names = [chosen.classes[label] for label in chosen.labels.tolist()]
    both = [_shown_by(each, chosen) for each in (model, setup.trained(_FULL))]
    (before, after), (rollout_before, rollout_after), told = zip(*both)
    pixels = chosen.source.read(torch.arange(len(chosen))).cpu().numpy()
    return {
        "maps": tuple(rows.MapRow(*row) for row in zip(files, names, *told, strict=True)),
        "map_arrays": rows.MapArrays(pixels, before, after, rollout_before, rollout_after),
    }


def _shown_by(model: Model, images: Split) -> tuple[rows.Floats, rows.Floats | None, list[str]]:
    """Return the attention of the last layer that is a map, mean over heads, and the rollout, where there is one, as
    maps; and the most probable class of each image by the model's own names, "" for a model without a classifier."""
    batches = [batch.images for batch in images.batches(_AT_ONCE, device=model.device)]
    last = torch.cat([attention_maps(model, each)[-1].maps.mean(1).cpu() for each in batches])
    rolled = torch.cat([rollout(model, each).cpu() for each in batches]) if meets(model, "chain") else None
    best = predicted_logits(model, images).argmax(1).tolist() if model.has_classifier else []
    told = [model.classes[index] for index in best] or [""] * len(images)
    return last.float().numpy(), None if rolled is None else rolled.float().numpy(), told
