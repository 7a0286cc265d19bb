"""The Python API: every function takes images and targets in every form."""

import copy
import inspect
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

import vitlens
from tests.kit.batches import SEEN_AT_ONCE, counted, in_small_batches
from tests.kit.select import values_of
from tests.kit.splits import split_of
from tests.kit.tiny import ours
from vitlens import Model
from vitlens.analysis.heads.registry import STATISTICS
from vitlens.attacks.registry import ATTACKS
from vitlens.attribution.adapters.registry import LIBRARIES
from vitlens.attribution.registry import ATTRIBUTIONS
from vitlens.errors import DataError, InputError, UnknownNameError
from vitlens.models.sources.registry import SOURCES

LABELS = torch.tensor([0, 1, 2])
REPORTS = Path(__file__).parents[2] / "reports"


def observed(vit: Model, source: object, _: Tensor | None) -> Tensor:
    weights: list[Tensor] = []
    vitlens.observe(vit, source, lambda call: weights.append(call.weights()))
    return torch.stack(weights)


def replayed(vit: Model, source: object, _: Tensor | None) -> Tensor:
    with vitlens.replay(vit, source) as replay:
        return replay.run([{"blocks.0.head.1": "mean"}], reference=source)


def means_of(vit: Model, source: object, _: Tensor | None) -> Tensor:
    with vitlens.intervene(vit, {"blocks.1": "mean"}, reference=source), torch.no_grad():
        return vit(torch.full((1, 3, *vit.input_size), 0.5))


Take = Callable[[Model, object, Tensor | None], Tensor]
AT_ONCE = {"batch_size": SEEN_AT_ONCE}
LABELLED: dict[str, Take] = {
    "ablate": lambda *args: vitlens.ablate(*args, replace="zero").delta_loss,
    "attack": lambda *args: vitlens.attack(*args, epsilon=0.1, steps=1).images,
    "compare": lambda vit, source, labels: (
        vitlens.compare(vit, vit, source, labels).first.confidence
    ),
    "evaluate": lambda *args: torch.stack(
        [vitlens.evaluate(*args).logits.sum(1), vitlens.evaluate(*args).correct]
    ),
    "failures": lambda *args: vitlens.failures(*args).correct,
}
STREAMED: dict[str, Take] = {  # a split is read batch by batch
    "attention": lambda vit, source, _: torch.stack(vitlens.attention(vit, source)),
    "direct_logit_attribution": lambda vit, source, _: (
        vitlens.direct_logit_attribution(vit, source).heads
    ),
    "explain": lambda vit, source, _: vitlens.explain(vit, source, method="saliency", **AT_ONCE),
    "features": lambda vit, source, _: vitlens.features(vit, source, **AT_ONCE).at(-1),
    "logit_lens": lambda vit, source, _: vitlens.logit_lens(vit, source).logits,
    "look": lambda vit, source, _: vitlens.look(vit, source, **AT_ONCE).delta_loss,
    "name_heads": lambda vit, source, _: torch.tensor(
        values_of(vitlens.name_heads(vit, source, **AT_ONCE).heads, "looks.score.value")
    ),
    "relevance": lambda vit, source, _: vitlens.relevance(vit, source),
    "rollout": lambda vit, source, _: vitlens.rollout(vit, source),
    "statistics": lambda vit, source, _: vitlens.statistics(vit, source, **AT_ONCE).distance,
}
WHOLE: dict[str, Take] = {
    "capture": lambda vit, source, _: vitlens.capture(vit, source, "blocks.0.mlp")["blocks.0.mlp"],
    "explorer": lambda vit, source, _: torch.tensor(
        vitlens.explorer(vit, source).explorer.images[0].weights
    ),
    "observe": observed,
    "patch": lambda vit, source, _: vitlens.patch(vit, source, source, "blocks.0.mlp").logits,
    "replay": replayed,
}
TAKES = LABELLED | STREAMED | WHOLE
OTHER_WAYS: dict[str, Take] = {  # in which batches are read, too
    "ablate by the mean": lambda *args: vitlens.ablate(*args, replace="mean", **AT_ONCE).delta_loss,
    "ablate by another image": lambda *args: (
        vitlens.ablate(*args, replace="resample", **AT_ONCE).delta_loss
    ),
    "attack at several epsilons": lambda vit, source, _: (
        vitlens.attack(
            vit, source, "predicted", epsilons=[0, 2 / 255, 32 / 255], **AT_ONCE
        ).distance
    ),
    "attention of CLS": lambda vit, source, _: torch.stack(
        vitlens.attention(vit, source, rows="cls")
    ),
    "attribution of targets": lambda vit, source, _: (
        vitlens.direct_logit_attribution(vit, source, torch.arange(11) % 5).heads
    ),
    "intervene": means_of,
}
# of 20 images or more, of files, of one
OTHERS = {
    "choose_method",
    "fit_sae",
    "name_latents",
    "neurons",
    "query_key_map",
    "reliance",
    "shape_bias",
    "show",
    "show_heads",
    "verify",
    "walkthrough",
}
WITH_LABELS = ("class folders", "a path of class folders", "Split")


@pytest.fixture(scope="module")
def vit() -> Model:
    return ours()


@pytest.fixture(scope="module")
def pixels(vit: Model) -> Tensor:
    height, width = vit.input_size
    return torch.randint(
        256, (3, 3, height, width), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )


@pytest.fixture(scope="module")
def images(pixels: Tensor) -> Tensor:
    return pixels.float() / 255


def opened(file: Path) -> Image.Image:
    """Read, too: a process that is given none of its tests would leave the file open."""
    image = Image.open(file)
    image.load()
    return image


@pytest.fixture(scope="module")
def forms(
    vit: Model, pixels: Tensor, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, object]:
    """Return the same three images, of the first three classes, in every form except a tensor."""
    folder = tmp_path_factory.mktemp("classes")
    loose = tmp_path_factory.mktemp("loose")
    arrays = pixels.permute(0, 2, 3, 1).numpy()
    for index, name in enumerate(vit.classes):  # every class has a folder, those of the model
        if index < len(arrays):
            (folder / name).mkdir()
            Image.fromarray(arrays[index]).save(folder / name / "a.png")
            Image.fromarray(arrays[index]).save(loose / f"{index}.png")
    files = sorted(loose.iterdir())
    return {
        "class folders": str(folder),
        "a path of class folders": folder,
        "Split": split_of(pixels, LABELS, vit.classes),
        "folder": loose,
        "files": [str(file) for file in files],
        "a pattern": str(loose / "*.png"),
        "PIL images": [opened(file) for file in files],
        "an array": arrays,
        "arrays": list(arrays),
        "8-bit tensor": pixels,
    }


def functions_with(parameter: str) -> set[str]:
    functions = {name: getattr(vitlens, name) for name in vitlens.__all__}
    public = {
        name: function for name, function in functions.items() if inspect.isfunction(function)
    }
    return {
        name
        for name, function in public.items()
        if parameter in inspect.signature(function).parameters
    }


# by default each takes a third
@pytest.mark.parametrize("share", [3, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", TAKES)
def test_a_folder_files_arrays_and_a_split_give_what_a_tensor_gives(
    name, share, vit, images, forms
):
    assert functions_with("images") == TAKES.keys() | OTHERS  # none is forgotten
    expected = TAKES[name](vit, images, LABELS)
    first = [*TAKES].index(name) % share
    for form, source in [*forms.items()][first::share]:
        actual = TAKES[name](vit, source, None if form in WITH_LABELS else LABELS)
        torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True, msg=form)


@pytest.mark.parametrize("name", STREAMED | OTHER_WAYS)
def test_no_more_than_a_batch_of_a_split_is_read_at_once(name, vit):
    take = (STREAMED | OTHER_WAYS)[name]
    split = counted(vit.input_size, vit.classes)
    with pytest.MonkeyPatch.context() as patch:
        in_small_batches(patch)
        actual = take(vit, split, None)
    assert max(split.source.requested) <= SEEN_AT_ONCE
    torch.testing.assert_close(actual, take(vit, split, None), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", [*WHOLE, "attack", "walkthrough"])
def test_a_split_that_does_not_fit_is_refused_before_it_is_read_with_advice_that_is_true(
    name, vit, monkeypatch
):
    take = {"walkthrough": lambda vit, source, _: vitlens.walkthrough(vit, source), **TAKES}[name]
    many = counted(vit.input_size, vit.classes, length=10**6)
    with pytest.raises(vitlens.errors.VitlensError, match=r"found 1000000; \w"):
        take(vit, many, None)
    assert not many.source.requested
    if name == "capture":
        split = counted(vit.input_size, vit.classes)
        monkeypatch.setattr("vitlens.pixels.MOST_BYTES", 5 * 4 * 3 * 32 * 48)
        with pytest.raises(DataError, match=r"found 11.*split\.limit\(5\)$"):
            take(vit, split, None)
        assert len(take(vit, split.limit(5), None)) == 5


@pytest.mark.slow
def test_choosing_a_method_reads_no_more_than_the_images_that_it_uses(vit):
    many = counted(vit.input_size, vit.classes, count=450)
    vitlens.choose_method(vit, many, methods=["relevance", "gradcam"])
    assert max(many.source.requested) <= 200 < len(many)


@pytest.mark.parametrize("name", LABELLED)
def test_labels_are_asked_for_where_there_are_none(name, vit, images, forms):
    for source, labels in (
        (images, None),
        (forms["folder"], None),
        (images, torch.tensor([0, 1, 99])),
    ):
        with pytest.raises(InputError, match=r"label|target"):
            LABELLED[name](vit, source, labels)


def test_classes_of_folders_that_the_model_does_not_know_are_told(vit, tmp_path):
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        Image.new("RGB", (8, 8)).save(tmp_path / name / "a.png")
    assert len(vitlens.rollout(vit, tmp_path)) == 2  # needs no labels
    with pytest.raises(InputError, match="'cat', 'dog'"):
        vitlens.ablate(vit, tmp_path, replace="zero")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [("{}/no.png", "no.png"), ("{}/*.gif", "gif"), ("digits", r"vitlens\.load_data\('digits'\)")],
)
def test_what_is_no_image_is_told_in_one_line(wrong, message, vit, tmp_path):
    (tmp_path / "no.png").write_bytes(b"no image")
    with pytest.raises(DataError, match=message) as raised:
        vitlens.rollout(vit, wrong.format(tmp_path))
    assert "\n" not in str(raised.value)


TARGETED: dict[str, Callable[..., Tensor]] = {
    "explain": lambda vit, images, **options: vitlens.explain(
        vit, images, method="input-x-gradient", **options
    ),
    "relevance": vitlens.relevance,
    "direct_logit_attribution": lambda *args, **more: (
        vitlens.direct_logit_attribution(*args, **more).heads
    ),
    "gradient-rollout": lambda vit, images, **options: vitlens.explain(
        vit, images, method="gradient-rollout", **options
    ),
}


@pytest.mark.parametrize("name", TARGETED)
def test_targets_in_every_form_are_the_same(name, vit, images, forms):
    assert functions_with("targets") == {"attack", "choose_method", "verify", *TARGETED} - {
        "gradient-rollout"
    }
    maps = TARGETED[name]
    predicted = maps(vit, images, targets=vit(images).argmax(1))
    second = maps(vit, images, targets=1)
    for source, targets, expected in (
        (images, "predicted", predicted),
        (images, torch.ones(3, dtype=torch.int64), second),
        (images, vit.classes[1], second),
        (images, vit.classes[1].upper(), second),
        (images, [1, vit.classes[1], 1], second),
        (images, (1, 1, 1), second),
        (images, np.array([1, 1, 1]), second),
        (images, torch.tensor(1), second),
        (images, np.int64(1), second),
        *((forms[form], "label", maps(vit, images, targets=LABELS)) for form in WITH_LABELS),
    ):
        torch.testing.assert_close(maps(vit, source, targets=targets), expected, rtol=0, atol=0)
    torch.testing.assert_close(maps(vit, images), predicted, rtol=0, atol=0)
    assert not torch.equal(second, maps(vit, images, targets=0))
    for wrong, words in (
        ("predictd", "did you mean 'predicted'"),
        (99, "found 99"),
        ("label", "without labels"),
        ([0, 1], r"\(3\)"),
    ):
        with pytest.raises((UnknownNameError, InputError), match=words):
            maps(vit, images, targets=wrong)


def test_an_attack_is_targeted_by_name_too(vit, images):
    labels = torch.zeros(3, dtype=torch.int64)
    ones = torch.ones(3, dtype=torch.int64)
    first, *rest = (
        vitlens.attack(vit, images, labels, method="pgd-targeted", steps=2, targets=targets).images
        for targets in (ones, 1, vit.classes[1])
    )
    for other in rest:
        assert torch.equal(first, other)


def test_options_of_rollout_are_the_same_through_explain(vit, images):
    options = {"fusion": "max", "discard": 0.3, "alpha": 0.4, "start_layer": 1, "readout": "mean"}
    parameters = inspect.signature(vitlens.rollout).parameters
    assert (
        set(options)
        == set(ATTRIBUTIONS["rollout"].options)
        == set(parameters) - {"model", "images"}
    )
    maps = vitlens.explain(vit, images, method="rollout", **options)
    torch.testing.assert_close(maps, vitlens.rollout(vit, images, **options), atol=1e-7, rtol=1e-5)
    plain = vitlens.rollout(vit, images)
    for name, value in options.items():  # each changes the map by itself
        assert not torch.allclose(
            vitlens.explain(vit, images, method="rollout", **{name: value}), plain
        )
    with pytest.raises(UnknownNameError, match="did you mean 'fusion'"):
        vitlens.explain(vit, images, method="rollout", fuson="max")
    with pytest.raises(InputError):
        vitlens.explain(vit, images, method="saliency", fusion="max")


def test_lists_are_the_registries(vit, images):
    of_libraries = tuple(f"{name}:NAME" for name in LIBRARIES)
    assert vitlens.list_methods().names == (*ATTRIBUTIONS, *of_libraries)
    assert vitlens.list_methods("*cam").names == tuple(
        name for name in ATTRIBUTIONS if name.endswith("cam")
    )
    assert vitlens.list_attacks().names == tuple(ATTACKS)
    assert vitlens.list_statistics().names == tuple(STATISTICS)
    of_sources = {name for source in SOURCES.values() if not source.prefix for name in source.names}
    assert set(vitlens.list_models().names) == of_sources | {
        source.usage for source in SOURCES.values() if source.prefix
    }
    assert vitlens.list_models("timm:vit_tiny_patch16_224").names == ("timm:vit_tiny_patch16_224",)
    with pytest.raises(UnknownNameError, match="vit-digits"):
        vitlens.list_models("vit-digit5")
    for listed in (
        vitlens.list_methods(),
        vitlens.list_attacks(),
        vitlens.list_statistics(),
        vitlens.list_models(),
    ):
        for entry in listed:
            assert entry.name
            assert entry.help
            assert entry.family
        for entry in listed[:20]:
            assert entry.name in repr(listed)
        assert len(listed[:2]) == 2
        for copied in (copy.deepcopy(listed), pickle.loads(pickle.dumps(listed))):
            assert (copied, copied.title) == (listed, listed.title)
    assert set(STATISTICS) <= set(dir(vitlens.statistics(vit, images)))


def test_lists_and_reports_need_no_torch(golden):
    first = f"""
import sys, vitlens
lists = (vitlens.list_methods, vitlens.list_attacks, vitlens.list_statistics, vitlens.list_models)
[str(listed()) for listed in lists]
run = vitlens.read({str(golden("ablate").folder)!r})
repr(run), run.metrics["accuracy/tiny"].value
run.table("units"), run.arrays["effects-mean"], run.report
assert not {{"torch", "timm", "matplotlib", "pandas"}} & set(sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", first], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_what_is_shown_is_short_without_addresses_and_escaped(vit, images):
    read = vitlens.features(vit, torch.cat([images, images]))
    for result in (
        vit,
        vitlens.load_data("digits", limit=3),
        vitlens.statistics(vit, images),
        read,
        vitlens.similarity(read),
        vitlens.ablate(vit, images, LABELS, replace="zero"),
        vitlens.attack(vit, images, LABELS, steps=1),
        vitlens.attack(vit, images, LABELS, steps=1, epsilons=[0.1]),
        vitlens.evaluate(vit, images, LABELS),
        vitlens.compare(vit, vit, images, LABELS),
        vitlens.failures(vit, images, LABELS),
        vitlens.patch(vit, images, images, "blocks.0.mlp"),
        vitlens.logit_lens(vit, images),
        vitlens.direct_logit_attribution(vit, images),
        vitlens.profile(vit, batch_sizes=[1]),
        vitlens.read(REPORTS / "stats-deit-tiny"),
        vitlens.list_methods(),
    ):
        text = repr(result)
        html = result._repr_html_()
        assert not re.search(r"0x[0-9a-f]{6}|object at|tensor\(", text + html)
        assert len(text) < 6000
        assert len(text.splitlines()) <= 29
        assert max(map(len, text.splitlines())) <= 330
        assert html.startswith("<table>")


def test_names_are_escaped_and_nothing_runs_for_a_repr(monkeypatch):
    vit = ours()
    vit.classes = ("<script>alert(1)</script>", "b\x1b[31m", *vit.classes[2:])
    monkeypatch.setattr(vit.module, "forward", None)  # a forward pass would fail
    assert "<script>" not in vit._repr_html_()
    assert "&lt;script&gt;" in vit._repr_html_()
    assert "\x1b" not in repr(vit)
    for words in (f"{vit.parameter_count():,}", "2 heads"):
        assert words in repr(vit)


def test_results_become_data_frames_with_a_row_for_each_head_image_or_epsilon(vit, images):
    table = vitlens.statistics(vit, images)
    heads = table.to_pandas()
    layers, count = table.distance.shape
    assert len(heads) == layers * count
    assert {"layer", "head", *STATISTICS} <= set(heads.columns)
    last = heads[(heads["layer"] == layers - 1) & (heads["head"] == count - 1)].iloc[0]
    assert last["entropy"] == table.entropy[-1, -1]
    assert last["entropy_low"] == table.low("entropy")[-1, -1]
    effect = vitlens.ablate(vit, images, LABELS, replace="zero")
    assert effect.to_pandas()["delta_loss"].tolist() == effect.loss.mean.tolist()


def test_results_of_images_become_data_frames(vit, images):
    evaluation = vitlens.evaluate(vit, images, LABELS)
    result = vitlens.attack(vit, images, LABELS, steps=1)
    curve = vitlens.attack(vit, images, LABELS, steps=1, epsilons=[0, 0.1])
    assert evaluation.to_pandas()["correct"].tolist() == evaluation.correct.tolist()
    assert result.to_pandas()["success"].tolist() == result.success.tolist()
    assert curve.to_pandas()["robust_accuracy"].tolist() == curve.robust_accuracy.tolist()
    compared = vitlens.compare(vit, vit, images, LABELS)
    assert compared.to_pandas()["cell"].value_counts().to_dict() == {
        k: n for k, n in compared.counts.items() if n
    }
    words = vitlens.name_heads(vit, images)
    assert words.to_pandas()["looks"].tolist() == [
        head.looks and head.looks.word for head in words.heads
    ]


def test_attention_weights_are_a_tuple_of_tensors_that_is_shown_in_a_line_a_layer():
    model = ours()
    weights = vitlens.attention(model, torch.rand(2, 3, *model.input_size))
    assert isinstance(weights, tuple)
    for layer in weights:
        assert isinstance(layer, torch.Tensor)
    assert len(repr(weights).splitlines()) == 1 + len(weights)
    (listed,) = [line for line in repr(model).splitlines() if line.strip().startswith("supports")]
    assert "attention" in listed.replace(",", "").split()
