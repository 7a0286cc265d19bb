"""Train one attention layer on a task and measure its attention."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np

from vitlens.analysis.walkthrough.reversal import BATCH, WIDTH, Reversal, require_exercise, reversal
from vitlens.commands.reversal.options import ReversalOptions
from vitlens.commands.reversal.record import (
    PATHS,
    HeadRow,
    LayerRow,
    LossRow,
    ReversalArrays,
    ReversalRecord,
    ViewRow,
)
from vitlens.commands.run.folder import RunFolder, settings
from vitlens.commands.run.progress import phase
from vitlens.commands.run.publish import publish
from vitlens.commands.run.run import join_run
from vitlens.devices import resolve_device
from vitlens.uncertainty import Estimate, bootstrap_mean

_POINTS: Final = 50  # points of the loss curve


def measure(options: ReversalOptions) -> Path | None:
    """Train the layer and write the report.

    Returns the report's path, None in all processes but the first. Raises InputError for heads
    that do not divide the width of a vector.
    """
    processes, run = join_run(options.run)
    if not processes.is_first:  # there is nothing to share
        return None
    exercise: dict[str, Any] = {
        "task": options.task,
        "length": options.length,
        "heads": options.heads,
        "positions": options.positions,
        "steps": options.steps,
    }
    require_exercise(**exercise)
    device = resolve_device(run.device)
    title = f"One attention layer, trained to {options.task} {options.length} vectors"
    config = settings(options, run, device=str(device))
    with RunFolder.opened(
        "reversal", run, config, name_parts=(options.task,), title=title
    ) as folder:
        with phase("Training one attention layer"):
            trained = reversal(**exercise, seed=run.seed, device=device)
        folder.keep(_record(trained, seed=run.seed))
        return publish(folder)


def _record(trained: Reversal, *, seed: int) -> ReversalRecord:
    """Return the record of a trained layer.

    seed: the seed of the intervals by bootstrap.
    """
    views = []
    for view in trained.views:
        loss = bootstrap_mean(view.losses.numpy(), seed=seed, unit="", least=0.0)
        share = bootstrap_mean(view.shares.numpy(), seed=seed, least=0.0, most=1.0)
        views.append(ViewRow(view.view, loss, share))
    whole_input = views[0]  # queries and keys computed from all of it, as in training
    return ReversalRecord(
        layer=(_layer_row(trained, whole_input),),
        losses=tuple(_loss_rows(trained)),
        by_head=tuple(_head_rows(trained, seed=seed)),
        views=tuple(views),
        maps=ReversalArrays(trained.weights.numpy()),
    )


def _layer_row(trained: Reversal, result: ViewRow) -> LayerRow:
    """Return the layer with its result on new sequences."""
    return LayerRow(
        task=trained.task,
        length=trained.length,
        heads=trained.heads,
        positions=trained.positions,
        steps=len(trained.losses),
        batch=BATCH,
        width=WIDTH,
        parameters=trained.parameters,
        place_distance=trained.place_distance,
        vector_distance=trained.vector_distance,
        uniform=trained.uniform,
        without_positions=trained.without_positions,
        loss=result.loss,
        remaining=_divided(result.loss, trained.uniform),
        share=result.share,
    )


def _divided(loss: Estimate, divisor: float) -> Estimate:
    """Return a loss and its interval as a fraction of another loss."""
    low = None if loss.low is None else loss.low / divisor
    high = None if loss.high is None else loss.high / divisor
    return Estimate(loss.value / divisor, low, high, loss.n)


def _loss_rows(trained: Reversal) -> Iterator[LossRow]:
    """Yield the loss curve; each point is the mean of equally many steps."""
    losses = trained.losses.numpy()
    points = min(_POINTS, len(losses))
    for steps in np.array_split(np.arange(len(losses)), points):
        last_step = int(steps[-1]) + 1  # counted from 1
        yield LossRow(last_step, loss=float(losses[steps].mean()), uniform=trained.uniform)


def _head_rows(trained: Reversal, *, seed: int) -> Iterator[HeadRow]:
    """Yield how far the attention of each head follows the path of the task."""
    path = np.arange(trained.length)  # the key on the path of each query
    if PATHS[trained.task] == "anti-diagonal":
        path = path[::-1]
    for head, shares in enumerate(trained.shares.numpy()):
        largest_key = trained.weights[head].numpy().argmax(-1)  # of each query
        yield HeadRow(
            task=trained.task,
            head=head,
            share=bootstrap_mean(shares, seed=seed, least=0.0, most=1.0),
            uniform=1 / trained.length,
            followed=int((largest_key == path).sum()),
        )
