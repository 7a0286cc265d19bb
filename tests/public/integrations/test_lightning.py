"""The callback for Lightning's Trainer: numbers and a sheet in its loggers, no other effect."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.kit.making import digits, little_vit
from tests.kit.select import values_of
from tests.kit.tensorboard_logs import events
from tests.kit.wandb_runs import read_run
from vitlens import statistics
from vitlens.errors import InputError

lightning = pytest.importorskip("lightning.pytorch", reason="lightning is not installed")
pytest.importorskip("tensorboard", reason="tensorboard is not installed")
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),  # of torch in Lightning
    pytest.mark.filterwarnings("ignore::UserWarning:lightning"),  # advice on workers and loggers
]

HALF = (0.5, 0.5, 0.5)


class Classifier(lightning.LightningModule):
    """A ViT of two blocks that learns digits."""

    def __init__(self) -> None:
        super().__init__()
        self.vit = little_vit()
        self.net = self.vit.module.requires_grad_(True)

    def training_step(self, batch: Any, _index: int) -> torch.Tensor:
        images, labels = batch
        return F.cross_entropy(self.net((images - 0.5) / 0.5), labels)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.parameters(), lr=0.1)


def trained(
    folder: Path, *callbacks: Any, epochs: int = 2, steps: int = -1, loggers: Any = None
) -> nn.Module:
    """Return the network after a training of four steps an epoch."""
    (batch,) = digits("test").limit(16).batches(16)
    data = torch.utils.data.TensorDataset(batch.images, batch.labels.long())
    model = Classifier()
    trainer = lightning.Trainer(
        max_epochs=epochs,
        max_steps=steps,
        accelerator="cpu",
        logger=loggers or lightning.loggers.TensorBoardLogger(str(folder), name="", version=""),
        callbacks=list(callbacks),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=4))
    return model.net


def callback(**settings: Any) -> Any:
    from vitlens.integrations.lightning import AttentionCallback

    arguments = {"image_size": 32, "mean": HALF, "std": HALF, "module": "net"} | settings
    return AttentionCallback(digits("test").limit(12), **arguments)


def test_numbers_and_sheets_are_those_of_the_model(tmp_path):
    import vitlens

    network = trained(tmp_path, callback())
    log = events(tmp_path)
    model = vitlens.wrap(network, image_size=32, mean=HALF, std=HALF)
    table = statistics(model, digits("test").limit(12))
    points = log.Scalars("attention_distance/layer_01")
    assert values_of(points, "step") == [4, 8]
    assert points[-1].value == pytest.approx(table.distance[1].mean().item(), rel=1e-5)
    assert values_of(log.Images("attention"), "step") == [4, 8]
    assert all(0 <= point.value <= 1 for point in log.Scalars("knn_accuracy"))


@pytest.mark.slow  # the services of W&B and of MLflow take seconds to start
@pytest.mark.skipif(find_spec("wandb") is None, reason="wandb is not installed")
@pytest.mark.skipif(find_spec("mlflow") is None, reason="mlflow is not installed")
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_wandb_offline_mlflow_and_tensorboard_get_the_same_numbers_and_a_sheet(
    tmp_path, monkeypatch
):
    for name, value in {
        "WANDB_MODE": "offline",
        "WANDB_SILENT": "true",
        "WANDB_CONSOLE": "off",
        "MLFLOW_ALLOW_FILE_STORE": "true",
    }.items():
        monkeypatch.setenv(name, value)
    import wandb

    kinds = lightning.loggers
    loggers = [
        kinds.TensorBoardLogger(str(tmp_path / "board"), name="", version=""),
        kinds.WandbLogger(project="p", save_dir=str(tmp_path), offline=True),
        kinds.MLFlowLogger("e", tracking_uri=(tmp_path / "mlruns").as_uri()),
    ]
    trained(tmp_path, callback(), loggers=loggers)
    wandb.finish()
    wandb.teardown()  # ends W&B's service, which writes the file
    name = "attention_distance/layer_01"
    of_board = values_of(events(tmp_path / "board").Scalars(name), "value")
    [file] = tmp_path.glob("wandb/offline-run-*/*.wandb")
    run = read_run(file)
    assert [value for _, value in run.history[name]] == pytest.approx(of_board, rel=1e-5)
    sheets = [media["filenames"] for _, media in run.of_type("images/separated")["attention"]]
    assert [(file.parent / "files" / name).is_file() for (name,) in sheets] == [True, True]
    [metric] = tmp_path.glob(f"mlruns/*/*/metrics/{name}")
    of_mlflow = [float(line.split()[1]) for line in metric.read_text().splitlines()]
    assert of_mlflow == pytest.approx(of_board, rel=1e-5)
    assert len(list(tmp_path.glob("mlruns/*/*/artifacts/images/attention*.png"))) == 2


def test_it_changes_no_bit_of_the_training(tmp_path):
    watched = trained(tmp_path / "watched", callback()).state_dict()
    plain = trained(tmp_path / "plain").state_dict()
    for name, value in plain.items():
        assert torch.equal(watched[name], value), name


def test_every_n_epochs_and_the_last_one_are_measured(tmp_path):
    trained(tmp_path, callback(every=2), epochs=4)
    assert values_of(events(tmp_path).Scalars("knn_accuracy"), "step") == [4, 12, 16]


def test_the_epoch_in_which_the_last_step_falls_is_measured(tmp_path):
    trained(tmp_path, callback(every=3), epochs=9, steps=8)
    assert values_of(events(tmp_path).Scalars("knn_accuracy"), "step") == [4, 8]


def test_a_module_that_does_not_exist_is_refused(tmp_path):
    with pytest.raises(InputError, match="expected module= one of vit, net, found 'nett'"):
        trained(tmp_path, callback(module="nett"))
