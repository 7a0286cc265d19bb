"""`vitlens models`, `data` and `profile`: lists, support and the cost of a model, but no times."""

import numpy as np
import pytest
from PIL import Image

from tests.kit.commands import few_passes, figures, ran, refusal, report, said_first
from tests.kit.select import select, values_of
from vitlens import load, load_data, profile
from vitlens.cli.main import run
from vitlens.commands.models.options import ModelsOptions
from vitlens.commands.registry import COMMANDS
from vitlens.data.registry import LAYOUTS, SETS
from vitlens.models.sources.registry import SOURCES
from vitlens.names import BUNDLED, PRESETS

ALL = [word for word, command in COMMANDS.items() if command.needs is not None]


def without(*needs: str) -> list[str]:
    """Return the commands that a model supports if it lacks only this."""
    return [word for word in ALL if not {*needs} & {*COMMANDS[word].needs}]


def untrained(words: list[str]) -> list[str]:
    return [word for word in words if COMMANDS[word].untrained]


CNN = without("attention", "maps", "chain", "statistics", "heads", "walkthrough", "patch tokens")
LISTED = {
    "timm:swin_tiny_patch4_window7_224": ("windowed,", without("walkthrough", "patch tokens")),
    "timm:mobilevit_xxs": ("other,", without("walkthrough", "chain", "maps", "patch tokens")),
    "torchvision:resnet18": ("cnn,", CNN),
    "vit-digits": ("vit,", ALL),
    "cnn-digits": ("cnn,", CNN),
    "vit-micro": ("vit,", untrained(ALL)),  # others need weights
    "resnet50": ("cnn,", untrained(CNN)),
}


def listed(capsys, line: str) -> list[str]:
    assert run(line.split()) == 0
    return capsys.readouterr().out.splitlines()


@pytest.mark.slow  # every preset is built
def test_without_a_pattern_every_own_name_and_the_hubs_are_listed(capsys):
    names = [line.split()[0] for line in listed(capsys, "models")]
    hubs = [source.usage for source in SOURCES.values() if source.prefix]
    assert names == [*BUNDLED, *PRESETS, *hubs]


@pytest.mark.parametrize("name", LISTED)
def test_the_commands_that_each_supports(name):
    family, commands = LISTED[name]
    lines = COMMANDS["models"].measure(ModelsOptions(name))  # each is made when it is asked for
    words = next(line.split() for line in lines if line.split()[0] == name)
    assert words[1] == family
    assert words[-len(commands) :] == commands
    assert not {*words[: -len(commands)]} & {*ALL}


def test_a_part_of_a_name_and_a_pattern_both_find_and_of_many_only_names_are_listed(capsys):
    for typed, name in (("vit-mic", "vit-micro"), ("torchvision:resnet1?", "torchvision:resnet18")):
        assert [line.split()[0] for line in listed(capsys, f"models {typed}")] == [name]
    names = {line.split()[0] for line in listed(capsys, "models resnet")}
    assert names >= {"resnet20", "timm:resnet18", "torchvision:resnet18"}
    lines = listed(capsys, "models timm:*")
    assert len(lines) > 500
    assert "narrower pattern" in lines[-1]


def test_every_name_of_data_is_listed_digits_are_counted_and_skipped_files_named(capsys, tmp_path):
    names = [line.split()[0] for line in listed(capsys, "data")]
    assert names == [*SETS, *(layout.usage for layout in LAYOUTS if layout.usage)]
    title, train, test = listed(capsys, "data digits")
    assert "10 classes (0, 1, 2" in title
    assert train.startswith(
        f"train: {len(load_data('digits', part='train')):,} images of 32x32 px, with labels"
    )
    assert test.startswith(f"test: {len(load_data('digits', part='test')):,} images")
    assert test.endswith("masks")
    for name in ("a.png", "b.png"):
        Image.fromarray(np.zeros((8, 12, 3), np.uint8)).save(tmp_path / name)
    (tmp_path / "broken.jpg").write_bytes(b"no image")
    title, counts, skipped = listed(capsys, f"data {tmp_path}")
    assert title.endswith("no labels")
    assert counts.startswith("all: 2 images of 8x12 px")
    assert "broken.jpg" in skipped


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("models vit-tny", "'vit-tiny'"),
        ("models zzz", "known: cnn-digits, "),
        ("data cifar1", "did you mean 'cifar10'"),
        ("data {empty}", "{empty}"),
    ],
)
def test_nothing_found_names_the_nearest(line, says, tmp_path, capsys):
    assert says.format(empty=tmp_path.name) in refusal(capsys, line.format(empty=tmp_path))


@pytest.fixture(autouse=True)
def _few_passes():
    with few_passes():
        yield


def test_numbers_are_those_of_the_functions(golden, tiny_vit, tiny_cnn):
    record = golden("profile").record
    vit, cnn = record.costs
    for row, place in ((vit, tiny_vit), (cnn, tiny_cnn)):
        model = load(str(place))
        again = profile(model, batch_sizes=())
        assert record.metric(f"parameters/{row.model}").value == model.parameter_count()
        parts = select(record.parts, model=row.model)
        for name in ("parameters", "flops"):
            parameters = {part: value for part, value in getattr(again, name).items() if value}
            assert {
                part.part: getattr(part, name) for part in parts if getattr(part, name)
            } == parameters
        metric = record.metric(f"flops/{row.model}")
        assert (metric.value, metric.unit) == (sum(again.flops.values()), "FLOPs")
        for name in ("by_formula", "tokens", "training_bytes", "inference_bytes"):
            assert getattr(row, name) == getattr(again, name)
        assert values_of(select(record.speed, model=row.model), "images") == [1, 2]
    for row in record.speed:
        assert row.latency.low <= row.latency.value <= row.latency.high
        assert (row.latency.unit, row.spread >= 1) == ("ms", True)
        assert row.rate.value == pytest.approx(1000 * row.images / row.latency.value)
        assert row.rate.low == pytest.approx(1000 * row.images / row.latency.high)
    # 4 N² d in each of two blocks
    assert (vit.products, vit.untrained) == (
        2 * 4 * 17**2 * 16,
        False,
    )
    assert (vit.by_formula, cnn.by_formula) == (True, False)


@pytest.mark.usefixtures("undrawn")
def test_exponents_are_those_of_the_points(tmp_path):
    """tests/public/cost has the exponent of all FLOPs of a ViT."""
    record = ran(
        tmp_path / "out", "profile vit-micro resnet20 swin-micro --batch-sizes 1 --sizes 32,64,96"
    )
    assert values_of(select(record.tokens, model="vit-micro"), "tokens") == [65, 257, 577]
    assert record.metric("exponent/resnet20/image-size/flops").value == pytest.approx(1, abs=1e-3)
    assert "exponent/resnet20/image-size/products" not in record.metrics
    # exact, with intervals without width
    for model, power in (
        ("vit-micro", 2.0),
        ("swin-micro", 1.0),
    ):
        exponent = record.metric(f"exponent/{model}/image-size/products")
        assert (exponent.value, exponent.low, exponent.high) == pytest.approx(
            (power,) * 3, abs=1e-6
        )
    both = select(report(record).claims, subject="vit-micro and swin-micro")
    [claim] = [claim for claim in both if "products" in claim.question]
    assert claim.effect == record.metric("exponent/vit-micro/image-size/products")
    vit = record.costs[0]
    assert (vit.untrained, vit.crossover) == (True, pytest.approx(768))  # 2 d + h
    assert record.metric("parameters/vit-micro").value == 1_205_898


def test_patch_sizes_stand_side_by_side_and_a_size_that_does_not_run_is_said(tmp_path):
    record = ran(
        tmp_path / "out", "profile vit-mini resnet20 --patch-size 4,8,8x16 --batch-sizes 1"
    )
    assert values_of(record.costs, "model", "tokens") == [
        ("vit-mini-p4", 65),
        ("vit-mini-p8", 17),
        ("vit-mini-p8x16", 9),
        ("resnet20", 1024),
    ]
    for row in record.costs:
        assert row.untrained
    sweeps = set(values_of(record.tokens, "model", "sweep"))
    assert sweeps == {("vit-mini", "patch-size"), ("resnet20", "image-size")}
    assert record.metric("exponent/vit-mini/patch-size/products").value == pytest.approx(2)
    assert "growth_patch-size" in figures(record)
    record = ran(
        tmp_path / "small", "profile torchvision:squeezenet1_1 --image-size 32 --batch-sizes 1"
    )
    (left,) = record.left_out
    assert (left.size, left.sweep) == ((16, 16), "image-size")
    assert values_of(record.tokens, "size") == [(side, side) for side in (24, 32, 48, 64)]
    assert "16x16" in said_first(report(record))
