"""The callback for transformers' Trainer: numbers and a sheet in its loggers, no other effect."""

from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import vitlens
from tests.kit.select import values_of
from tests.kit.tensorboard_logs import events
from tests.kit.wandb_runs import read_run
from vitlens.errors import InputError

pytest.importorskip("transformers", reason="transformers is not installed")
needs_tensorboard = pytest.mark.skipif(
    find_spec("tensorboard") is None, reason="tensorboard is not installed"
)
needs_wandb = pytest.mark.skipif(find_spec("wandb") is None, reason="wandb is not installed")
needs_mlflow = pytest.mark.skipif(find_spec("mlflow") is None, reason="mlflow is not installed")
# the default of torch's loader on a machine without a GPU, and of MLflow's store of files
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*pin_memory:UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"
)

HALF = (0.5, 0.5, 0.5)


class Pairs(torch.utils.data.Dataset):
    """Normalised random images with labels, as a processor would give them."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.pixels = torch.rand(count, 3, 32, 32, generator=generator)
        self.labels = torch.arange(count) % 4

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"pixel_values": (self.pixels[index] - 0.5) / 0.5, "labels": self.labels[index]}


def little_model() -> Any:
    import transformers

    config = transformers.ViTConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        image_size=32,
        patch_size=8,
        num_labels=4,
        hidden_dropout_prob=0.1,
    )
    torch.manual_seed(0)
    return transformers.ViTForImageClassification(config)


def trained(
    folder: Path,
    *callbacks: Any,
    report_to: str = "tensorboard",
    epochs: int = 2,
    model: Any = None,
) -> Any:
    """Return the model after a training of four steps an epoch."""
    import transformers

    model = model or little_model()
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=epochs,
        per_device_train_batch_size=4,
        report_to=report_to,
        logging_steps=1,
        save_strategy="no",
        seed=0,
        use_cpu=True,
        disable_tqdm=True,
    )
    transformers.Trainer(
        model, arguments, train_dataset=Pairs(16), callbacks=list(callbacks)
    ).train()
    return model


def callback(**settings: Any) -> Any:
    from vitlens.integrations.transformers import AttentionCallback

    pairs = Pairs(12)
    arguments = {"labels": pairs.labels, "mean": HALF, "std": HALF} | settings
    return AttentionCallback(pairs.pixels, **arguments)


@needs_tensorboard
def test_numbers_and_sheet_are_those_of_the_model_next_to_the_loss(tmp_path):
    model = trained(tmp_path, callback())
    [folder] = (tmp_path / "runs").iterdir()
    log = events(folder)
    wrapped = vitlens.wrap(model, image_size=32, mean=HALF, std=HALF)
    pixels = Pairs(12).pixels
    table = vitlens.statistics(wrapped, pixels)
    for name, values in (
        ("distance", table.distance),
        ("entropy/patches", table.normalised_entropy),
    ):
        points = log.Scalars(f"attention_{name}/layer_01")
        assert values_of(points, "step") == [4, 8]
        assert points[-1].value == pytest.approx(values[1].mean().item(), rel=1e-5)
    assert "train/loss" in log.Tags()["scalars"]
    pictures = log.Images("attention")
    assert values_of(pictures, "step") == [4, 8]
    assert np.std(Image.open(BytesIO(pictures[-1].encoded_image_string))) > 10


@needs_tensorboard
def test_knn_accuracy_leaves_out_the_image_itself(tmp_path):
    """Twins of one class: a neighbour decides; an image of a class of its own is always wrong."""
    pixels = Pairs(3).pixels
    images = torch.cat((pixels[:1].repeat(6, 1, 1, 1), pixels[1:2].repeat(6, 1, 1, 1), pixels[2:]))
    labels = torch.tensor([0] * 6 + [1] * 6 + [2])
    from vitlens.integrations.transformers import AttentionCallback

    trained(tmp_path, AttentionCallback(images, labels=labels, mean=HALF, std=HALF), epochs=1)
    [folder] = (tmp_path / "runs").iterdir()
    [point] = events(folder).Scalars("knn_accuracy")
    assert point.value == pytest.approx(12 / 13)


@needs_tensorboard
def test_it_changes_no_bit_of_the_training(tmp_path):
    watched = trained(tmp_path / "watched", callback()).state_dict()
    plain = trained(tmp_path / "plain").state_dict()
    for name, value in plain.items():
        assert torch.equal(watched[name], value), name


@needs_tensorboard
def test_every_n_epochs_and_the_last_one_are_measured(tmp_path):
    trained(tmp_path, callback(every=2), epochs=4)
    [folder] = (tmp_path / "runs").iterdir()
    assert values_of(events(folder).Scalars("knn_accuracy"), "step") == [4, 12, 16]


@needs_tensorboard
def test_a_module_of_another_library_is_measured_by_the_given_preprocessing(tmp_path):
    """It has no configuration, so the size of its images must be given."""

    class Wrapped(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = little_model()

        def forward(self, pixel_values: torch.Tensor, labels: Any = None) -> dict[str, Any]:
            logits = self.net(pixel_values).logits
            if labels is None:
                return {"logits": logits}
            return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}

    trained(tmp_path / "out", callback(image_size=32), model=Wrapped(), epochs=1)
    [folder] = (tmp_path / "out" / "runs").iterdir()
    assert len(events(folder).Scalars("knn_accuracy")) == 1
    with pytest.raises(InputError, match="image_size="):
        trained(tmp_path / "none", callback(), model=Wrapped())


@needs_wandb
@pytest.mark.slow  # W&B's service takes seconds to start and to write out
def test_wandb_has_numbers_and_pictures_of_the_run(tmp_path, monkeypatch):
    import wandb

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_CONSOLE", "off")
    trained(tmp_path / "out", callback(), report_to="wandb")
    wandb.run.finish()
    wandb.teardown()  # ends W&B's service, which writes the file
    [file] = tmp_path.glob("wandb/offline-run-*/*.wandb")
    run = read_run(file)
    assert len(run.history["attention_distance/layer_01"]) == 2
    assert len(run.history["knn_accuracy"]) == 2
    for _, picture in run.of_type("image-file")["attention"]:
        assert (file.parent / "files" / picture["path"]).is_file()


@needs_mlflow
@pytest.mark.slow
def test_mlflow_has_numbers_and_pictures_of_the_run(tmp_path, monkeypatch):
    import mlflow

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    mlflow.set_tracking_uri((tmp_path / "mlruns").as_uri())
    trained(tmp_path / "out", callback(), report_to="mlflow")
    mlflow.end_run()
    [file] = tmp_path.glob("mlruns/*/*/metrics/attention_distance/layer_01")
    assert len(file.read_text().splitlines()) == 2
    assert len(list(tmp_path.glob("mlruns/*/*/artifacts/images/attention*.png"))) >= 2


def test_wrong_calls_are_refused_in_one_line(tmp_path):
    with pytest.raises(InputError, match=r"expected every of at least 1 epoch, found 0"):
        callback(every=0)
    with pytest.raises(InputError, match=r"found \['none'\]|found \[\]"):
        trained(tmp_path, callback(), report_to="none")
    with pytest.raises(InputError, match=r"expected labels of shape \(12,\), found \(3,\)"):
        trained(tmp_path, callback(labels=torch.arange(3)))
    with pytest.raises(InputError, match="give AttentionCallback mean=, std= and image_size="):
        trained(tmp_path, callback(mean=None))
