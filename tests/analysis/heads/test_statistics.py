"""The stream of statistics: any batches, several processes, intervals over images, tables, published numbers."""

import copy
import pickle
from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

import vitlens
from tests.analysis.made import made_model, numbered, random_weights, uniform
from tests.lens.tiny import EACH_FAMILY, images, ours, shared_model, timm_model
from vitlens.analysis.heads import statistics as heads
from vitlens.analysis.heads.registry import STATISTICS, token_statistics
from vitlens.analysis.heads.statistics import Stream, layers_of, measure, statistics
from vitlens.data.split import InMemory, Split
from vitlens.errors import InputError, UnsupportedError
from vitlens.lens.capture import capture_attention
from vitlens.lens.site import Site
from vitlens.models.model import Model

MAKERS: dict[str, Callable[[], Model]] = {
    "ours": lambda: ours(registers=4),
    "swin": lambda: timm_model("swin_tiny_patch4_window7_224", img_size=(20, 28)),
    "siglip": lambda: timm_model("vit_base_patch16_siglip_224"),
}


def streamed(model: Model, batches: list[Tensor]) -> Stream:
    stream = Stream(model)
    for batch in batches:
        stream.add(batch)
    return stream


def assert_same_sums(found: Stream, expected: Stream, *, within: float) -> None:
    for one, other in ((found.moments, expected.moments), (found.overall, expected.overall)):
        assert one.count == other.count
        assert set(one.sums) == set(other.sums)
        for key in other.sums:
            torch.testing.assert_close(one.sums[key], other.sums[key], atol=within, rtol=within)
            torch.testing.assert_close(one.squares[key], other.squares[key], atol=within, rtol=within)
    for one, other in zip(found.result().offset_mass, expected.result().offset_mass):
        torch.testing.assert_close(one, other, atol=within, rtol=within)


@pytest.mark.parametrize("sizes", [[4, 5], [1] * 9])
def test_batches_change_nothing_for_the_same_weights(sizes):
    """Made weights in float64: whatever the batch, the same attention."""
    layers = [random_weights(9, 3, 17, seed=seed).double() for seed in range(2)]
    model = made_model(*layers, grid=(4, 3), prefix=5)
    batch = numbered(model, 9)
    assert_same_sums(streamed(model, list(batch.split(sizes))), streamed(model, [batch]), within=1e-12)


def test_memory_does_not_grow_with_the_images():
    stream = streamed(ours(), [images((32, 48), batch=2)])

    def held() -> int:
        return len(pickle.dumps((stream.moments, stream.overall, stream.evidence)))

    before = held()
    for seed in range(2):
        stream.add(images((32, 48), batch=8, seed=seed))
    assert held() == before
    assert stream.result().images == 18


@pytest.mark.parametrize("name", MAKERS)
def test_intervals_are_students_over_images(name):
    model = MAKERS[name]()
    batch = images(model.input_size, batch=6)
    table = statistics(model, batch, batch_size=6)
    values = measure(model, batch).values
    for (statistic, layer), value in values.items():
        each = value.double().numpy()
        heads = each.shape[1]
        mean, error = each.mean(0), stats.sem(each)
        np.testing.assert_allclose(getattr(table, statistic)[layer, :heads].numpy(), mean, rtol=1e-9, atol=1e-12)
        factor = stats.t.ppf(0.975, 5)
        low, high = table.low(statistic)[layer, :heads], table.high(statistic)[layer, :heads]
        np.testing.assert_allclose(low.numpy(), mean - factor * error, rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(high.numpy(), mean + factor * error, rtol=1e-6, atol=1e-6)


def test_intervals_of_a_split_with_groups_are_over_groups():
    """Students over the means of groups: three scenes of two images each, of which one pair is alike."""
    model, batch = ours(), images((32, 48), batch=6)
    batch[1] = batch[0]
    groups = torch.tensor([4, 4, 7, 7, 9, 9])
    split = Split("made", "test", InMemory((255 * batch).round().to(torch.uint8)), (32, 48), (), groups=groups)
    alone, grouped = statistics(model, vitlens.images(split, model)), statistics(model, split, batch_size=4)
    values = measure(model, vitlens.images(split, model)).values["entropy", 1].double().numpy()
    means = values.reshape(3, 2, -1).mean(1)
    half = stats.t.ppf(0.975, 2) * stats.sem(means)
    torch.testing.assert_close(grouped.entropy, alone.entropy, atol=1e-7, rtol=1e-6)
    found = (grouped.high("entropy") - grouped.entropy)[1]
    np.testing.assert_allclose(found.numpy(), half, rtol=1e-4)


def test_means_over_heads_are_of_all_layers():
    model = ours()
    batch = images((32, 48), batch=4)
    table, values = statistics(model, batch), measure(model, batch).values
    for statistic in ("distance", "entropy"):
        each = torch.cat([values[statistic, 0], values[statistic, 1]], 1).double().mean(1)
        torch.testing.assert_close(table.overall.mean((statistic, 0)), each.mean()[None])
        low, high = stats.t.interval(0.95, 3, loc=each.mean(), scale=stats.sem(each.numpy()))
        assert table.overall.half_width((statistic, 0)).item() == pytest.approx((high - low) / 2)


def joined(parts: list[Stream]) -> list[Stream]:
    """Streams joined as processes join: each says its tensors in order, and hears the sum of all at that moment."""
    said: list[list[Tensor]] = []
    for part in parts:
        spoken: list[Tensor] = []
        speaker = Stream(part.model)
        speaker.moments, speaker.overall, speaker.evidence = copy.deepcopy((part.moments, part.overall, part.evidence))
        speaker.join(lambda tensor, spoken=spoken: spoken.append(tensor) or tensor)
        said.append(spoken)
    assert len({len(spoken) for spoken in said}) == 1
    sums = [sum(tensors) for tensors in zip(*said)]
    for part in parts:
        heard = iter(sums)
        part.join(lambda _tensor, heard=heard: next(heard))
    return parts


@pytest.mark.parametrize("shares", [[1, 8], [3, 3, 3]])
def test_streams_joined_are_one_stream(shares):
    layers = [random_weights(9, 2, 13, seed=seed).double() for seed in range(2)]
    model = made_model(*layers, grid=(4, 3), prefix=1)
    batch = numbered(model, 9)
    parts = joined([streamed(model, [share]) for share in batch.split(shares)])
    whole = streamed(model, [batch])
    for part in parts:
        assert_same_sums(part, whole, within=1e-12)
        torch.testing.assert_close(part.result().low("entropy"), whole.result().low("entropy"), atol=0, rtol=1e-9)
        torch.testing.assert_close(part.result().offset_mass[1], whole.result().offset_mass[1], atol=0, rtol=1e-12)


@pytest.mark.parametrize(
    ("size", "patch", "expected"),
    [(224, 16, 116.492), (224, 32, 115.503), (224, 14, 116.565), (384, 16, 200.048), (32, 4, 16.546)],
)
def test_a_model_that_looks_evenly_has_the_published_distance(size, patch, expected):
    grid = (size // patch, size // patch)
    model = made_model(uniform(1, 1, grid[0] ** 2 + 1), grid=grid, prefix=1, patch_size=(patch, patch))
    table = statistics(model, numbered(model, 1))
    assert table.distance.item() == pytest.approx(expected, abs=1e-3)
    assert table.uniform_distance().item() == pytest.approx(expected, abs=5e-4)
    assert table.normalised_entropy.item() == pytest.approx(1, abs=1e-5)
    assert table.hoyer.item() == pytest.approx(0, abs=1e-6)
    assert table.low("distance").isnan().all()  # one image has no interval
    if (size, patch) == (224, 16):
        assert [table.entropy.item(), table.cls_entropy.item()] == pytest.approx([5.2832] * 2, abs=5e-5)
        assert table.effective_keys.item() == pytest.approx(197, rel=1e-5)


@pytest.mark.parametrize("name", EACH_FAMILY)
def test_every_family_has_tables_of_layers_and_heads(name):
    model = shared_model(name)
    batch = images(model.input_size)
    table, sites = statistics(model, batch), capture_attention(model, batch).sites
    assert table.sites == sites
    widest = max(site.heads for site in sites)
    names = {statistic for statistic, _ in table.moments.sums}
    assert names <= set(STATISTICS)
    assert {"distance", "entropy", "hoyer", "gini", "sinks", "self_mass", "token_norm"} <= names
    for statistic in names:
        values = getattr(table, statistic)
        assert values.shape == (len(sites), 1 if statistic in token_statistics() else widest)
        for site in sites:
            measured = (statistic, site.layer) in table.moments.sums
            assert values[site.layer, : site.heads].isfinite().all() == measured
            assert values[site.layer, site.heads :].isnan().all()
    for site, place, mass in zip(table.sites, table.geometries, table.offset_mass):
        assert (place is None) == (mass is None) == (site.kind == "class")
        if mass is not None:
            assert mass.shape == (site.heads, 2 * place.grid[0] - 1, 2 * place.grid[1] - 1)
            assert table.uniform_distance()[site.layer] > 0
            assert (table.distance[site.layer, : site.heads] >= 0).all()
        else:
            assert table.uniform_distance()[site.layer].isnan()
    for fraction in names & {
        "normalised_entropy",
        "hoyer",
        "gini",
        "self_mass",
        "neighbour_mass",
        "cls_mass",
        "sink_mass",
    }:
        values = getattr(table, fraction)
        assert ((values >= -1e-6) & (values <= 1 + 1e-5) | values.isnan()).all(), fraction


def test_an_unknown_statistic_names_the_known():
    table = statistics(ours(), images((32, 48)))
    with pytest.raises(AttributeError, match=r"no statistic 'distanc'; known: distance, entropy.*high_norm_prefix"):
        _ = table.distanc
    assert not hasattr(table, "__array__")
    assert statistics(ours(pooling="mean"), images((32, 48))).cls_entropy.isnan().all()  # known, and not there


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: Stream(ours()).result(), "at least one image, found none"),
        (lambda: measure(ours(), images((32, 48), batch=0)), "at least one image, found none"),
        (lambda: statistics(ours(), images((32, 48)), masks=torch.zeros(3, 32, 48)), r"masks \(2, height, width\)"),
    ],
)
def test_refusals(call, words):
    with pytest.raises(InputError, match=words):
        call()


def test_channels_alone_are_refused(monkeypatch):
    monkeypatch.setattr(heads, "survey_weights", lambda *_: (Site(0, "attn", 0, "channel", 2, 8, 8),))
    with pytest.raises(UnsupportedError, match="only channels that attend to channels in ours"):
        statistics(ours(), images((32, 48)))


def test_calls_of_one_layer_have_all_heads_or_are_refused(monkeypatch):
    """The parts of a layer (EdgeNeXt) one after another; those that look at different things have no row together."""
    sites = [Site(0, "attn", 0, "patch", 2, 12, 12), Site(0, "attn", 1, "patch", 3, 12, 12)]
    monkeypatch.setattr(heads, "survey_weights", lambda *_: tuple(sites))
    assert layers_of(ours()) == (Site(0, "attn", 0, "patch", 5, 12, 12),)
    sites.append(Site(0, "attn", 2, "pooled", 2, 12, 3))
    with pytest.raises(UnsupportedError, match="12 queries and 12 keys, then 12 and 3"):
        layers_of(ours())
