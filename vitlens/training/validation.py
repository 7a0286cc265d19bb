"""A look at the test images while training, shared among the processes."""

import torch
from accelerate import Accelerator
from torch.nn import functional as F

from vitlens.data.split import Split
from vitlens.devices import autocast, evaluating
from vitlens.models.specimen import Specimen
from vitlens.training.feed import share
from vitlens.training.processes import agree_on_buffers, total

_BATCH = 256


def look(
    specimen: Specimen, split: Split, accelerator: Accelerator, *, device: torch.device, precision: str
) -> tuple[float, float]:
    """Mean loss (nats) and accuracy (fraction) on a labelled split; each process looks at its share of the images."""
    agree_on_buffers(accelerator, specimen)
    mine = share(torch.arange(len(split)), accelerator.process_index, accelerator.num_processes)
    sums = torch.zeros(2, dtype=torch.float64)
    with evaluating(specimen), torch.inference_mode(), autocast(device, precision):
        for batch in split.pick(mine).batches(_BATCH, device=device):
            assert batch.labels is not None
            logits = specimen(batch.images).float()
            loss = F.cross_entropy(logits, batch.labels, reduction="sum")
            correct = (logits.argmax(1) == batch.labels).sum()
            sums += torch.stack((loss.double(), correct.double())).cpu()
    loss_sum, right = total(accelerator, sums, device).tolist()
    return loss_sum / len(split), right / len(split)
