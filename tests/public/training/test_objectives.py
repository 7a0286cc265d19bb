"""`train --objective mae|dino|clip`: files, resuming, reports, captions, and refusals."""

import csv
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import vitlens
from tests.kit.commands import ran, refusal, report
from tests.kit.objectives import (
    NAMES,
    captions_of,
    headless,
    pretrained,
    scenes,
    text_classifier,
    with_prompts_of_training,
)
from tests.kit.select import select_one, values_of
from tests.kit.trainings import (
    EnoughError,
    interrupting,
    one_of,
    plain_recipe,
    same,
    state,
    timeless,
)
from vitlens.errors import InputError
from vitlens.training.objectives.registry import COLLAPSE, OBJECTIVES

pytestmark = pytest.mark.usefixtures("progress_every_step")
STATE = "checkpoint/state.safetensors"
SHAPE = "--dim 16 --depth 2 --heads 2 --patch-size 8"
LINE = f"train vit-mini --data shapes --limit 24 --batch-size 8 --epochs 2 {SHAPE} --precision fp32"
SMALL = {"mae": "--set decoder_dim=8", "dino": "--set outputs=12", "clip": "--set text_dim=8"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Return a run of each objective."""
    return {
        name: ran(
            tmp_path_factory.mktemp("runs") / name, f"{LINE} --objective {name} {SMALL[name]}"
        )
        for name in NAMES
    }


@pytest.mark.parametrize("name", NAMES)
def test_a_resumed_run_ends_with_the_same_bits(name, tmp_path):
    """Also those of the decoder, of the teacher and its centre, of the text tower."""
    recipe = plain_recipe(epochs=3, average=0.0 if name == "dino" else 0.9, crop_padding=1)
    cut = tmp_path / "cut"
    uninterrupted, _ = pretrained(name, tmp_path / "whole", recipe=recipe)
    torch.manual_seed(5)  # on which nothing depends
    with pytest.raises(EnoughError):
        pretrained(name, cut, recipe=recipe, checkpoint_every=1, on_progress=interrupting(4))
    resumed, _ = pretrained(
        name, cut, headless(seed=7), recipe=recipe, checkpoint_every=1, resume=True
    )
    assert same(state(resumed), state(uninterrupted))
    for file in (STATE, "model.safetensors", *(["text.safetensors"] if name == "clip" else [])):
        assert same(load_file(cut / file), load_file(tmp_path / "whole" / file)), file
    assert timeless(cut) == timeless(tmp_path / "whole")


def test_the_parts_beside_the_model_are_in_the_checkpoint(folders):
    names = {name: set(load_file(folders[name].folder / STATE)) for name in NAMES}
    assert {"model/mask_token", "model/head.weight"} < names["mae"]
    assert {"model/centre", "model/teacher.last.weight", "model/student.last.weight"} < names[
        "dino"
    ]
    assert {"model/logit_scale", "model/text.embed.weight"} < names["clip"]


@pytest.mark.parametrize("name", NAMES)
def test_a_run_folder_is_a_model_and_its_report_says_what_was_measured(name, folders):
    record = folders[name]
    model = vitlens.load(str(record.folder))
    assert model.has_classifier == OBJECTIVES[name].classifies
    read = vitlens.features(model, next(scenes("test").batches(4)).images)
    assert read.at(-1).shape == (4, 16)
    (row,) = record.pretraining
    assert (row.objective, row.knn.n, row.bank) == (name, 24, 24)
    assert values_of(record.by_epoch, "epochs") == [0, 1, 2]
    assert all(row.rank >= 1 and 0 <= row.knn <= 1 for row in record.by_epoch)
    assert record.metrics["knn/vit-mini"].value == record.by_epoch[-1].knn
    assert values_of(record.history, "train_accuracy") == [None, None]
    document = report(record)
    questions = set(values_of(document.claims, "question"))
    assert "features" in questions
    assert ("collapse" in questions) == (name == "dino")
    titles = values_of(document.sections, "title")
    assert ("What does it reconstruct?" in titles) == (name == "mae")


@pytest.mark.slow  # three more commands on folders that other tests read
def test_features_of_a_run_without_classes_are_read_and_it_is_fine_tuned(folders, tmp_path):
    record = ran(
        tmp_path / "f", f"features {folders['mae'].folder} --data shapes --limit 24 --bank 24 --k 5"
    )
    assert record.aliases == ("mae",)
    line = f"train {folders['dino'].folder} --data shapes --limit 24 --epochs 1 --freeze-backbone"
    tuned = vitlens.load(str(ran(tmp_path / "t", line).folder))
    assert tuned.classes == scenes("train").classes
    backbone = vitlens.load(str(folders["dino"].folder))
    assert torch.equal(
        tuned.module.blocks[0].mlp.fc1.weight, backbone.module.blocks[0].mlp.fc1.weight
    )


def test_the_classifier_of_a_run_is_that_of_its_texts(folders):
    """On images, and in each wording of its own."""
    folder = folders["clip"].folder
    model = vitlens.load(str(folder))
    images = next(scenes("test").batches(24)).images
    texts = text_classifier(folder, model.classes)
    assert texts.norm(dim=-1) == pytest.approx(1, abs=1e-5)
    cosines = vitlens.features(model, images).at(-1) @ texts.mean(0).T
    assert torch.equal(model(images).argmax(1), cosines.argmax(1))
    two = text_classifier(
        folder, ("ring", "a ring and words that nobody wrote"), ("a photo of a {}",)
    )
    assert two.shape == (1, 2, 16)
    (score,) = folders["clip"].scores
    assert (score.role, score.accuracy.n) == ("zero-shot", 24)


def test_features_compares_objectives_and_reads_any_wording_with_the_text_tower(folders, tmp_path):
    clip, mae = (folders[name].folder for name in ("clip", "mae"))
    templates = tmp_path / "templates.txt"
    templates.write_text("an etching of a {}\n")
    wordings = f"--prompt star --clip-templates {templates}"
    options = "--data shapes --limit 24 --bank 24 --k 5 --no-tsne"
    record = ran(tmp_path / "f", f"features {clip} {mae} {options} {wordings}")
    pretrainings = {row.model: row.objective for row in record.features}
    assert pretrainings == {"clip": "language-image", "mae": "self-supervised"}
    ensemble, etching = record.templates
    assert ensemble.accuracy.value == etching.accuracy.value
    assert {row.prompt for row in record.prompts} == {"star"}
    assert all(-1 <= row.cosine <= 1 for row in record.prompts)
    assert any("etching" in row.note for row in record.notes)


def test_the_text_tower_of_a_run_classifies_as_its_own_classifier_does(folders):
    model = vitlens.load(str(folders["clip"].folder))
    images = next(scenes("test").batches(24)).images
    zero_shot = with_prompts_of_training(model)
    assert torch.equal(zero_shot(images).argmax(1), model(images).argmax(1))
    star_classifier = vitlens.zero_shot(model, ("a ring", "a star"))
    assert star_classifier(images).shape == (24, 2)
    assert vitlens.relevance(star_classifier, images[:2]).shape[0] == 2


def test_a_text_longer_than_any_caption_is_refused(folders):
    model = vitlens.load(str(folders["clip"].folder))
    with pytest.raises(InputError, match=r"expected texts of at most \d+ tokens"):
        vitlens.zero_shot(model, ("star",), templates=("a star " * 40 + "{}",))


def test_a_teacher_that_is_not_centred_collapses_and_the_report_says_so(tmp_path):
    line = (
        LINE.replace("--epochs 2", "--epochs 12")
        + " --objective dino --set outputs=12 --learning-rate 0.01"
    )
    record = ran(tmp_path / "out", f"{line} --set centring=false --set momentum=0.5 --warmup 0")
    (row,) = record.pretraining
    assert row.information.value < COLLAPSE
    claim = select_one(report(record).claims, question="collapse")
    assert claim.state == "fail"
    assert claim.says.count("collapsed") == 1


def test_two_processes_train_on_gradients_whose_mean_is_that_of_one(tmp_path):
    """Of MAE, whose images do not depend on each other."""

    def gradients(processes: int, index: int) -> dict[str, torch.Tensor]:
        model = headless()
        folder = tmp_path / f"{processes}-{index}"
        with one_of(processes, index, model) as gradient_values:  # one step
            pretrained("mae", folder, model, recipe=plain_recipe(batch_size=24, epochs=1))
        return gradient_values

    full_gradients = gradients(1, 0)
    parts = [gradients(2, index) for index in (0, 1)]
    assert full_gradients
    for name, value in full_gradients.items():
        assert torch.allclose((parts[0][name] + parts[1][name]) / 2, value, atol=1e-6), name


def test_a_process_without_test_images_tests_none(tmp_path):
    model = headless()
    with one_of(2, 1, model):
        _, result = pretrained(
            "mae",
            tmp_path,
            model,
            test=scenes("test", 1),
            recipe=plain_recipe(batch_size=24, epochs=1),
        )
    assert result.history[-1].test_loss == 0


@pytest.mark.parametrize("data", ["digits", "shapes"])
def test_captions_name_the_class_and_are_the_same_again(data):
    train = scenes("train", data=data)
    keys = torch.arange(24)
    captions = captions_of(train)(keys, 0)
    for label, text in zip(train.labels.tolist(), captions):
        assert train.classes[label] in text.split()
    assert len(set(captions)) > 12
    assert captions_of(train)(keys.flip(0), 0) == captions[::-1]
    assert captions_of(train)(keys, 1) != captions
    assert captions_of(train.pick(torch.tensor([3])))(torch.tensor([0]), 0) == [captions[3]]


def test_captions_say_where_the_object_is():
    test = scenes("test", 560)
    # crosses and squares, whose middle is their centre
    test = test.pick((test.labels % 4 == 1).nonzero()[:, 0])
    said = captions_of(test)(torch.arange(len(test)), 0)
    rows, columns = torch.meshgrid(torch.arange(32.0), torch.arange(32.0), indexing="ij")
    area = test.masks.sum((1, 2))
    down = (test.masks * rows).sum((1, 2)) / area
    across = (test.masks * columns).sum((1, 2)) / area
    for words, place in (("top", down), ("left", across)):
        other = "bottom" if words == "top" else "right"
        low = [place[at].item() for at, text in enumerate(said) if words in text.split()]
        high = [place[at].item() for at, text in enumerate(said) if other in text.split()]
        assert len(low) > 5
        assert max(low) < 15.5 < min(high)


def images_in(folder: Path, count: int = 8) -> list[str]:
    """Write image files of two classes into train/ and test/, and return their names."""
    names = []
    for part in ("train", "test"):
        for at in range(count):
            name = f"{part}/{'ab'[at % 2]}/{at}.png"
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.full((32, 32, 3), 20 * at, dtype=np.uint8)).save(folder / name)
            names.append(name)
    return names


def test_captions_of_a_folder_are_read_from_its_file(tmp_path, capsys):
    names = images_in(tmp_path / "data")
    line = (
        f"train vit-mini --data {tmp_path / 'data'} --objective clip --epochs 1 --batch-size 4 "
        f"{SHAPE}"
    )
    assert "captions.csv" in refusal(capsys, f"{line} --out {tmp_path / 'none'}")
    rows = [[name, f"a grey square of {at % 8}"] for at, name in enumerate(names)]
    with (tmp_path / "data" / "captions.csv").open("w", newline="") as file:
        csv.writer(file).writerows(rows[:-1])
    assert names[-1] in refusal(capsys, f"{line} --out {tmp_path / 'one'}")
    with (tmp_path / "data" / "captions.csv").open("w", newline="") as file:
        csv.writer(file, lineterminator="\r").writerows(rows)  # as on an old Mac
    record = ran(tmp_path / "out", line)
    assert text_classifier(record.folder, ("square",), ("a {} of 3", "grey {}")).shape == (2, 1, 16)


REFUSED = """
train vit-mini --objective dinno | did you mean
train resnet20 --objective mae | expected a ViT with --objective mae, found resnet20
train swin-micro --objective dino | expected a ViT with --objective dino, found swin-micro
train vit-digits --objective clip | expected a preset to train from scratch
train vit-mini --objective dino --freeze-backbone | without --freeze-backbone, found both
train vit-mini --objective mae --train-last 1 | without --train-last, found both
train vit-mini --objective mae --distill-from vit-digits | without --distill-from, found both
train vit-mini --objective mae --check | without --check, found both
train vit-mini --objective clip --batch-size 1 --limit 20 | batches of at least 2 images
train vit-mini --objective clip --batch-size 4 --set accumulate=4 --limit 20 | batches of at least 2 images
train vit-mini --objective dino --set local_size=18 --limit 20 | found 18 px; try --set local_size=16
train vit-mini --objective dino --set local_size=2 --limit 20 | try --set local_size=4
train vit-mini --objective mae --set local_size=16 --limit 20 | expected a field of the recipe
train vit-mini --objective mae --set mask_ratio=1.0 --limit 20 | masks 1 to 63 of 64 patches
train vit-mini --objective mae --set mask_ratio=half --limit 20 | expected mask_ratio as in --set mask_ratio=0.75
train vit-mini --objective mae --set mixup=0.5 --limit 20 | mixup 0 with --objective mae
train vit-mini --set mask_ratio=0.5 --limit 20 | expected a field of the recipe
"""  # noqa: E501 - one case a line


@pytest.mark.parametrize("line", REFUSED.strip().splitlines())
def test_what_an_objective_cannot_do_is_refused_in_one_line(line, tmp_path, capsys):
    words, _, said = line.partition(" | ")
    assert said in refusal(capsys, f"{words} --out {tmp_path / 'out'}", unexpected=False)


def test_a_run_is_resumed_under_its_own_objective_alone(folders, tmp_path, capsys):
    folder = folders["mae"].folder
    assert "objective, mae, found dino" in refusal(
        capsys, f"train --resume {folder} --objective dino"
    )
    pretrained("mae", tmp_path)
    with pytest.raises(InputError, match=r"objective\.\w+ = "):
        pretrained("dino", tmp_path, resume=True)


@pytest.mark.parametrize("shape", [{"norm_first": False}, {"norm": False}])
def test_a_model_without_a_last_norm_is_refused_before_it_is_trained_on_captions_with_labels(
    shape, tmp_path
):
    with pytest.raises(InputError, match="norms before its branches"):
        pretrained("clip", tmp_path, headless(**shape), recipe=plain_recipe(epochs=1))
    assert not list(tmp_path.iterdir())
