"""`vitlens head`: the functions' numbers, and attributes of a CSV that a head may write."""

from dataclasses import replace

import pytest
import torch
from PIL import Image
from scipy.stats import ttest_rel

import vitlens
from tests.kit.axes import texts
from tests.kit.commands import ran, refusal, report
from tests.kit.making import digits
from tests.kit.select import select_one, values_of
from vitlens import load
from vitlens.commands.head.record import PushedRow
from vitlens.uncertainty import Estimate


def test_words_and_tests_are_those_of_the_function(golden, tiny_vit):
    record = golden("head").record
    split = digits("test").limit(60)
    model = load(str(tiny_vit))
    named_heads = vitlens.name_heads(model, split, masks=split.masks, batch_size=30)
    one = select_one(named_heads.heads, layer=1, head=0)
    (attends,), (looks,), (writes,) = record.attends, record.looks, record.writes
    assert (attends.word, attends.holds, attends.share) == (
        one.attends.word,
        one.holds,
        one.attends.share,
    )
    assert {row.part: row.share.value for row in record.parts} == pytest.approx(one.attends.shares)
    assert (looks.word, looks.score, looks.moved) == (
        one.looks.word,
        one.looks.score,
        one.looks.moved,
    )
    assert (writes.word, writes.state, writes.auc, writes.p) == (
        one.writes.word,
        one.writes.state,
        one.writes.auc,
        one.writes.p,
    )
    (counts,) = record.heads
    states = values_of(named_heads.heads, "writes.state")
    assert (counts.matter, counts.correlate, counts.nothing) == tuple(
        states.count(state) for state in ("shown to matter", "correlates", "nothing")
    )
    assert counts.heads == len(named_heads.heads) == 4


def test_the_pair_and_the_map_are_those_of_the_functions(golden, tiny_vit):
    record = golden("head").record
    model = load(str(tiny_vit))
    image = torch.from_numpy(record.pair_image.pixels).float() / 255
    pair = vitlens.neurons(model, image, layer=1, head=0)
    (row,) = record.pair
    assert (row.key_patch, row.score) == (pair.key_patch, pytest.approx(pair.score, abs=1e-4))
    products = sum(each.product for each in record.dimensions)
    assert products + row.bias == pytest.approx(row.score, abs=1e-4)
    assert (row.weight, row.without) == pytest.approx((pair.weight, pair.without), abs=1e-5)
    (space,) = record.space
    assert space.after <= space.before
    assert len(record.space_maps.own) == 2 * space.tokens


def test_what_is_lost_without_the_head_is_that_of_the_ablated_model(golden, tiny_vit):
    record = golden("head").record
    split = digits("test").limit(60)
    model = load(str(tiny_vit))
    images = split.source.read(torch.arange(60)).float() / 255
    mean = vitlens.capture(model, images, "blocks.1.head.0")["blocks.1.head.0"].mean(0)
    with torch.no_grad():
        clean = model(images).log_softmax(-1)
        with vitlens.intervene(model, {"blocks.1.head.0": mean}):
            without = model(images).log_softmax(-1)
    for row in record.classes:
        of_class = split.labels == split.classes.index(row.name)
        chances = [logits[of_class, split.labels[of_class]].double() for logits in (clean, without)]
        fall = [chance - (-chance.expm1()).log() for chance in chances]  # of the log-odds
        assert row.fall.value == pytest.approx(float((fall[0] - fall[1]).mean()), abs=1e-4)
        right = [
            (logits[of_class].argmax(-1) == split.labels[of_class]).double().mean()
            for logits in (clean, without)
        ]
        assert row.lost.value == pytest.approx(100 * float(right[0] - right[1]))
    adds = values_of(record.exemplars, "adds")
    assert adds == sorted(adds, reverse=True)
    assert values_of(record.exemplars, "quantile")[::5] == [1, 0]


def test_exemplars_show_what_the_head_adds_through_each_patch_and_classes_what_it_adds(
    golden, tiny_vit
):
    """By hand: weights times values, read by the classifier behind the final norm with its scale
    fixed.
    """
    record = golden("head").record
    split = digits("test").limit(60)
    model = load(str(tiny_vit))
    images = split.source.read(torch.arange(60)).float() / 255
    weights, values, stream, rows = (
        vitlens.capture(model, images, place)[place]
        for place in (
            "blocks.1.attention.weights",
            "blocks.1.attention.values",
            "blocks.1.residual",
            "blocks.1.heads",
        )
    )
    norm = model.module.norm
    classifier = model.module.head
    scaled = (
        classifier.weight
        * norm.weight
        / stream[:, 0].var(-1, correction=0).add(norm.eps).sqrt()[:, None, None]
    )
    read = scaled - scaled.mean(-1, keepdim=True)  # (images, classes, dim)
    output = model.module.blocks[1].attn.proj.weight[:, : values.shape[-1]]
    through = torch.einsum("nk,nkd,ed,nce->nck", weights[:, 0, 0], values[:, 0], output, read)
    of_all = through - through.mean(1, keepdim=True)
    total = torch.einsum("nd,ed,nce->nc", rows[:, 0, 0], output, read)
    assert torch.allclose(through.sum(-1), total, atol=1e-5)
    for row in record.pushed:
        added = of_all.sum(-1)[:, model.classes.index(row.name)].double()
        assert row.adds.value == pytest.approx(float(added.mean()), abs=1e-5)
    best = model.classes.index(record.writes[0].best)
    for row, heat_map in zip(record.exemplars, record.shown["tiny-vit"].maps, strict=True):
        added = of_all[split.names.index(row.image), best]
        assert row.adds == pytest.approx(float(added.sum()), abs=1e-5)
        assert torch.allclose(torch.from_numpy(heat_map).flatten(), added[1:], atol=1e-5)
        assert row.patch == divmod(int(added[1:].abs().argmax()), heat_map.shape[1])
        assert row.patch_adds == pytest.approx(
            float(added[1 + row.patch[0] * heat_map.shape[1] + row.patch[1]]), abs=1e-5
        )


@pytest.mark.parametrize(("classes", "drawn"), [(12, 12), (13, 12), (100, 12)])
def test_up_to_twelve_pushed_classes_are_all_drawn(golden, classes, drawn):
    record = golden("head").record
    pushed = tuple(PushedRow(f"c{index}", Estimate(float(-index))) for index in range(classes))
    document = report(replace(record, pushed=pushed))
    figure = select_one(document.figures, name="pushed").draw()
    names = {row.name for row in pushed} & set(texts(figure))
    assert len(names) == drawn
    assert {"c0", f"c{classes - 1}"} <= names


def test_attention_on_the_object_stands_beside_that_on_the_objects_of_other_images(
    golden, tiny_vit, pictures, tmp_path
):
    record = golden("head").record
    split = digits("test").limit(60)
    model = load(str(tiny_vit))
    images = split.source.read(torch.arange(60)).float() / 255
    seen = vitlens.attention(model, images)[1][:, 0, 0, 1:].double()
    seen = seen / seen.sum(1, keepdim=True)
    areas = torch.nn.functional.avg_pool2d(split.masks.double()[:, None], 8).flatten(1)
    pairs = seen @ areas.T  # on the object of each image
    elsewhere = (pairs.sum(1) - pairs.diagonal()) / 59
    (row,) = record.placed
    assert row.thing == "the object's mask"
    assert (row.on.value, row.elsewhere.value) == pytest.approx(
        (float(pairs.diagonal().mean()), float(elsewhere.mean())), abs=1e-6
    )
    test = ttest_rel(pairs.diagonal(), elsewhere)
    assert row.p == pytest.approx(test.pvalue, abs=1e-6)
    (without,) = ran(tmp_path / "out", f"head {tiny_vit} L1.H0 --images {pictures}").placed
    assert "most evidence for the class, by the map best" in without.thing


def test_columns_of_a_csv_are_attributes_that_a_head_may_write(tiny_vit, tmp_path):
    """Of sixty digits: yes and no in one column, three names in another, and numbers, which are
    none, in the third.
    """
    split = digits("test").limit(60)
    pixels = split.source.read(torch.arange(60))
    (tmp_path / "data").mkdir()
    lines = ["file,small,third,number"]
    for index, label in enumerate(split.labels.tolist()):
        name = f"{59 - index:02}.png"
        Image.fromarray(pixels[index].permute(1, 2, 0).numpy()).save(tmp_path / "data" / name)
        lines.append(f"{name},{'YES' if label < 4 else 'no'},{'abc'[label % 3]},{index}")
    (tmp_path / "table.csv").write_text("\n".join(lines))
    line = (
        f"head {tiny_vit} L1.H1 --images {tmp_path / 'data'} --attributes "
        f"{tmp_path / 'table.csv'} --predicted"
    )
    record = ran(tmp_path / "out", line)
    model = load(str(tiny_vit))
    turned = split.labels.flip(0)
    attributes = {"small": turned < 4} | {
        f"third = {name}": turned % 3 == at for at, name in enumerate("abc")
    }
    predicted = vitlens.evaluate(model, split.pick(torch.arange(60).flip(0))).logits.argmax(-1)
    expected = vitlens.name_heads(model, tmp_path / "data", predicted, attributes=attributes).heads[
        3
    ]
    (writes,) = record.writes
    assert (writes.best, writes.auc) == (expected.writes.best, expected.writes.auc)
    assert writes.best in {*attributes, *model.classes}


@pytest.fixture
def folders(tmp_path):
    """Write sixty digits into ten class folders, whose files have the same names."""
    split = digits("test").limit(60)
    pixels = split.source.read(torch.arange(60))
    count = dict.fromkeys(range(10), 0)
    for image, label in zip(pixels, split.labels.tolist(), strict=True):
        folder = tmp_path / "data" / "test" / str(label)
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(folder / f"{count[label]}.png")
        count[label] += 1
    return tmp_path / "data"


@pytest.mark.parametrize("prefix", ["", "elsewhere/"])
def test_attributes_of_files_with_the_same_name_go_by_their_folders(
    prefix, folders, tiny_vit, tmp_path
):
    table = tmp_path / "table.csv"
    files = sorted(folders.rglob("*.png"))
    lines = []
    for file in files:
        answer = "yes" if file.parent.name < "4" else "no"
        lines.append(f"{prefix}{file.parent.name}/{file.name},{answer}")
    table.write_text("\n".join(["file,small", *lines]))
    record = ran(tmp_path / "out", f"head {tiny_vit} L1.H1 --data {folders} --attributes {table}")
    images = {row.name: row.images for row in record.classes}
    assert images["small"] == sum(images[name] for name in "0123")


def test_a_line_that_may_be_of_several_images_is_refused(folders, tiny_vit, tmp_path, capsys):
    table = tmp_path / "table.csv"
    line = (
        f"head {tiny_vit} L1.H1 --data {folders} --attributes {table} --out {tmp_path / 'refused'}"
    )
    names = sorted({file.name for file in folders.rglob("*.png")})
    table.write_text("\n".join(["file,small", *(f"{name},yes" for name in names)]))
    said = refusal(capsys, line)
    assert "0.png" in said
    assert "0/0.png" in said
    assert "1/0.png" in said
    table.write_text(
        "\n".join(["file,small", *(f"{name},{value}" for name in names for value in ("yes", "no"))])
    )
    assert "0/0.png" in refusal(capsys, line)


@pytest.mark.parametrize("content", ["", "\n\n", 'file,small\n0.png,"' + "x" * 200_000, "\udcff"])
def test_a_damaged_table_of_attributes_is_refused(content, pictures, tiny_vit, tmp_path, capsys):
    table = tmp_path / "table.csv"
    table.write_bytes(content.encode(errors="surrogateescape"))
    line = (
        f"head {tiny_vit} L1.H1 --images {pictures} --attributes {table} --out {tmp_path / 'none'}"
    )
    assert str(table) in refusal(capsys, line)


def test_of_a_column_of_two_values_one_is_an_attribute(folders, tiny_vit, tmp_path):
    """The other one is its opposite, which every head would separate as well."""
    table = tmp_path / "table.csv"
    files = sorted(folders.rglob("*.png"))
    lines = []
    for file in files:
        answer = "low" if file.parent.name < "4" else "high"
        lines.append(f"{file.parent.name}/{file.name},{answer}")
    # lines that end as on an old Mac
    table.write_text("\r".join(["file,size", *lines]), newline="")
    record = ran(tmp_path / "out", f"head {tiny_vit} L1.H1 --data {folders} --attributes {table}")
    assert [row.name for row in record.classes if "size" in row.name] == ["size = high"]


def test_a_csv_without_a_line_for_an_image_is_refused(tiny_vit, pictures, tmp_path, capsys):
    files = sorted(pictures.iterdir())
    table = tmp_path / "attributes.csv"
    table.write_text("file,dark,place\n" + "".join(f"{file.name},yes,in\n" for file in files))
    record = ran(
        tmp_path / "out",
        f"head {tiny_vit} L0.H1 --images {pictures} --attributes {table} --predicted",
    )
    assert record.writes == ()
    assert "50 images" in " ".join(row.note for row in record.notes)
    assert report(record).title
    record = ran(tmp_path / "unlabelled", f"head {tiny_vit} L0.H1 --images {pictures}")
    assert (record.writes, "labelled images" in record.notes[-1].note) == ((), True)
    line = f"head {tiny_vit} L0.H1 --images {pictures} --attributes"
    for text, said in (
        ("file,dark\nother.png,yes\n", "found none for 3"),
        ("file\n0.png\n", "column names"),
        ("file,size\n" + "".join(f"{file.name}\n" for file in files), "2 columns"),
    ):
        table.write_text(text)
        assert said in refusal(capsys, f"{line} {table} --out {tmp_path / 'refused'}")


@pytest.mark.parametrize(
    ("head", "said"), [("7", "L3.H7"), ("L2.H0", "L0.H0 to L1.H1"), ("L0.H9", "L0.H0 to L1.H1")]
)
def test_a_head_that_is_not_there_is_refused(tiny_vit, pictures, tmp_path, capsys, head, said):
    assert said in refusal(
        capsys, f"head {tiny_vit} {head} --images {pictures} --out {tmp_path / 'refused'}"
    )
