"""Every image's loss and prediction without several units at once, by replay: the basis of all ablation."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F

from vitlens.analysis.ablation.effects import JointEffects, Unit
from vitlens.analysis.ablation.replacements import MeanOutputs, Prepared, prepared
from vitlens.analysis.attention.gradients import check_targets
from vitlens.errors import NonFiniteError
from vitlens.lens.replay import DEFAULT_BUDGET
from vitlens.models.model import Model
from vitlens.names import Replacement
from vitlens.shapes import Images, Labels

Losses = Float[Tensor, "sets batch"]
Correct = Bool[Tensor, "sets batch"]


@dataclass(frozen=True)
class BatchOutcomes:
    """The outcomes of sets of units on one batch: loss (nats) and correct (sets, batch).

    cost: multiply-adds of linear layers for measuring them, so that a resumed run can report the total cost.
    """

    loss: Losses
    correct: Correct
    cost: int


@runtime_checkable
class Memory(Protocol):
    """A store of the outcomes of a batch, from which an interrupted run resumes."""

    def recall(self, sets: Sequence[tuple[Unit, ...]]) -> BatchOutcomes | None:
        """The stored outcomes of these sets, or None."""
        ...

    def remember(self, sets: Sequence[tuple[Unit, ...]], outcomes: BatchOutcomes) -> None:
        """Store the outcomes of these sets."""
        ...


def measure_jointly(
    model: Model,
    images: Images,
    labels: Labels,
    sets: Sequence[tuple[Unit, ...]],
    *,
    replace: Replacement = "mean",
    means: MeanOutputs | None = None,
    donors: Images | None = None,
    seed: int = 0,
    offset: int = 0,
    budget: int = DEFAULT_BUDGET,
    advance: Callable[[int], object] = lambda _: None,
    memory: Memory | None = None,
) -> JointEffects:
    """As measure_effects, with several units removed at once; an empty set is the unchanged model.

    memory: of outcomes measured before, by sets whose first unit is in the same layer.
    """
    every = tuple(dict.fromkeys(unit for each in sets for unit in each))
    with prepared(
        model, images, every, replace=replace, means=means, donors=donors, seed=seed + offset, budget=budget
    ) as ready:
        truth = check_targets(labels, ready.replay.logits)
        clean_loss, clean_correct = loss_and_correct(ready.replay.logits[None], truth)
        _require_finite(clean_loss, [()], model.alias, offset)
        loss = clean_loss.new_zeros(len(sets), len(images))
        correct = clean_correct.new_zeros(loss.shape)
        recalled = 0  # the cost of the recalled outcomes in an earlier run
        for rows in _by_first_layer(sets):
            layer_sets = [sets[row] for row in rows]
            known = None if memory is None else memory.recall(layer_sets)
            outcomes = known or _measure(ready, layer_sets, replace, truth)
            loss[rows], correct[rows] = outcomes.loss, outcomes.correct
            _require_finite(loss[rows], layer_sets, model.alias, offset)
            if known is not None:
                recalled += known.cost
            elif memory is not None:
                memory.remember(layer_sets, outcomes)
            advance(len(rows))
        return JointEffects(
            tuple(sets),
            replace,
            labels.cpu(),
            clean_loss[0],
            clean_correct[0],
            loss,
            correct,
            (ready.cost + recalled) / ready.replay.forward_cost,
            ready.replay.note,
        )


def loss_and_correct(logits: Float[Tensor, "sets batch classes"], labels: Labels) -> tuple[Losses, Correct]:
    """Cross-entropy (sets, batch) in nats, float64, and whether the prediction is the label; on the CPU."""
    loss = F.cross_entropy(logits.float().flatten(0, 1), labels.repeat(len(logits)), reduction="none")
    return loss.view(logits.shape[:2]).cpu().double(), (logits.argmax(-1) == labels).cpu()


def _measure(ready: Prepared, sets: Sequence[tuple[Unit, ...]], replace: Replacement, labels: Labels) -> BatchOutcomes:
    before = ready.cost
    loss, correct = loss_and_correct(_without(ready, sets, replace), labels)
    return BatchOutcomes(loss, correct, ready.cost - before)


def _without(
    ready: Prepared, sets: Sequence[tuple[Unit, ...]], replace: Replacement
) -> Float[Tensor, "sets batch classes"]:
    tensors = ready.replacements(tuple(dict.fromkeys(unit for each in sets for unit in each)))
    interventions = [[unit.intervention(replace) for unit in each] for each in sets]
    return ready.replay.run(interventions, replacements=tensors)


def _by_first_layer(sets: Sequence[tuple[Unit, ...]]) -> list[list[int]]:
    """Rows of sets by the layer of their first unit: these are replayed together, then their tensors are released."""
    rows: dict[int, list[int]] = {}
    for row, each in enumerate(sets):
        rows.setdefault(min((unit.layer for unit in each), default=-1), []).append(row)
    return [rows[layer] for layer in sorted(rows)]


def _require_finite(loss: Losses, sets: Sequence[tuple[Unit, ...]], alias: str, offset: int) -> None:
    broken = (~loss.isfinite()).nonzero()
    if len(broken):
        row, image = broken[0].tolist()
        without = " and ".join(unit.name for unit in sets[row])
        raise NonFiniteError(
            f"expected a finite loss, found {float(loss[row, image])} from {alias} on image {offset + image}"
            + (f" without {without}" if without else "")
        )
