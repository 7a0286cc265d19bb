"""What the check of a training finds, as rows; free of torch."""

from dataclasses import dataclass
from typing import Final, Literal

from vitlens.record import col

State = Literal["pass", "warn", "fail", "inconclusive"]
Group = Literal["data", "model", "training"]

FITTED: Final = 0.1  # share of the loss of a constant prediction, at which a batch counts as learned

# in the order of causes: what fails first can make the later ones fail
NAMES: Final[dict[str, Group]] = {
    "labels": "data",
    "class balance": "data",
    "constant images": "data",
    "duplicate images": "data",
    "pixel range": "data",
    "normalisation": "model",
    "evaluation mode": "model",
    "frozen parameters": "model",
    "activations": "model",
    "initial loss": "model",
    "gradients": "model",
    "gradient norms": "model",
    "one batch": "training",
    "learning rate": "training",
}


@dataclass(frozen=True)
class CheckRow:
    """One check: its state, what was expected and found in words, and what to try where it does not pass.

    value: the number that was judged, None where it is no number; unit: of it.
    """

    name: str = col("check", unit="text")
    state: State = col("state")
    expected: str = col("expected", unit="text")
    found: str = col("found", unit="text")
    advice: str = col("what to try", unit="text", default="")
    value: float | None = col("value", default=None)
    unit: str = col("unit", default="")

    @property
    def group(self) -> Group:
        """What it checks."""
        return NAMES[self.name]


@dataclass(frozen=True)
class LayerRow:
    """One module with parameters of its own, before training, on one batch; order: of its first call, from 0.

    activation: root mean square of its output; gradient, weight: norms of its parameters' gradient and of the
    parameters; trained: whether any of them requires a gradient. None: not measured, as it was not called, or has no
    gradient.
    """

    name: str
    order: int | None
    parameters: int
    activation: float | None
    gradient: float | None
    weight: float
    trained: bool


@dataclass(frozen=True)
class BatchLossRow:
    """The loss (nats) on the one batch before step `step` (from 0), trained at a learning rate."""

    learning_rate: float
    step: int
    loss: float


@dataclass(frozen=True)
class TrainingCheck:
    """All checks in the order of NAMES; layers: in the order of their calls; losses: of all trainings on one batch;
    images: of the pass; constant: the loss (nats) of the best constant prediction on the one batch, None without."""

    checks: tuple[CheckRow, ...]
    layers: tuple[LayerRow, ...]
    losses: tuple[BatchLossRow, ...]
    images: int
    constant: float | None = None

    @property
    def failed(self) -> tuple[CheckRow, ...]:
        """The checks that failed."""
        return tuple(row for row in self.checks if row.state == "fail")
