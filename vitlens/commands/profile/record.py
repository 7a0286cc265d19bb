"""The record of `vitlens profile`: parameters, FLOPs, memory, latency, and growth with tokens."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from vitlens.record import OfModel, Record, col, table
from vitlens.uncertainty import Estimate

Size: TypeAlias = tuple[int, int]
Sweep: TypeAlias = Literal["patch-size", "image-size"]
Cost: TypeAlias = Literal["latency", "flops", "products"]


@dataclass(frozen=True)
class MachineRow:
    """The machine on which latency was measured.

    threads: the number of threads of PyTorch on the CPU.
    arithmetic: fp32 or bf16.
    longest: no larger batch was tried once a pass took this many seconds, None with --batch-sizes.
    """

    name: str = col("machine")
    threads: int = col("threads")
    arithmetic: str = col("arithmetic")
    longest: float | None = col("longest pass", unit="s", default=None)
    peak: int | None = col(
        "peak memory of the process", unit="bytes", metric="process_peak", default=None
    )


@dataclass(frozen=True)
class CostRow(OfModel):
    """The cost of one model for one image of its input size (height, width).

    untrained: True if its weights are random.
    size: the input size (height, width) in px.
    tokens: the number of tokens in its sequence, or of positions of its first block.
    one_sequence: True if the number of tokens is the same in all blocks.
    by_formula: True if a formula gives the same FLOPs.
    products: FLOPs of attention products.
    crossover: number of tokens from which these exceed the FLOPs of projections and MLPs, None
        without one sequence or attention.
    """

    family: str = col("family")
    untrained: bool = col("untrained")
    size: Size = col("image (px)")
    tokens: int = col(
        "tokens",
        term="tokens of the sequence; in windowed models and CNNs, positions of the first block",
    )
    one_sequence: bool = col("one sequence")
    by_formula: bool = col("checked by formula")
    parameters: int = col("parameters", metric="parameters/{model}")
    flops: int = col(
        "FLOPs of one image",
        unit="FLOPs",
        term="operations of matrix products and convolutions, 2 for a multiplication with its "
        "addition",
        metric="flops/{model}",
    )
    products: int = col("FLOPs of attention products", unit="FLOPs")
    training_bytes: int = col(
        "stored for a backward pass, one image",
        unit="bytes",
        term="what autograd keeps from a forward pass, without parameters, gradients and optimizer "
        "state",
        metric="training_bytes/{model}",
    )
    inference_bytes: int = col(
        "peak of activations, one image",
        unit="bytes",
        term="the largest total size of the tensors alive during a forward pass without gradients",
        metric="inference_bytes/{model}",
    )
    crossover: float | None = col("tokens from which products dominate", default=None)


@dataclass(frozen=True)
class PartRow(OfModel):
    """The cost of one part of a model, and its share of the whole model."""

    part: str = col("part")
    meaning: str = col("what it is")
    parameters: int = col("parameters")
    flops: int = col("FLOPs", unit="FLOPs")
    of_parameters: float | None = col("share of parameters", unit="fraction", default=None)
    of_flops: float | None = col("share of FLOPs", unit="fraction", default=None)


@dataclass(frozen=True)
class SpeedRow(OfModel):
    """The latency and throughput of one model at one batch size, medians over passes.

    spread: ratio of the upper to the lower quartile of the latency.
    device_bytes: peak memory of the device, None on a CPU.
    """

    images: int = col("batch size")
    latency: Estimate = col("latency of a pass", metric="latency/{model}/{images}", better="lower")
    rate: Estimate = col("throughput", metric="throughput/{model}/{images}", better="higher")
    spread: float = col(
        "upper / lower quartile", term="ratio of the quartiles of the latency; disturbed above 1.5"
    )
    device_bytes: int | None = col("peak of the device", unit="bytes", default=None)


@dataclass(frozen=True)
class TokensRow(OfModel):
    """The cost of one model at one number of tokens.

    sweep: the size that varies the number of tokens.
    products: the FLOPs of attention products.
    latency: the time of a pass over `images` images.
    """

    sweep: Sweep = col("varied")
    size: Size = col("image (px)")
    tokens: int = col("tokens")
    flops: int = col("FLOPs", unit="FLOPs")
    products: int = col("of attention products", unit="FLOPs")
    images: int = col("images")
    latency: Estimate = col("latency")


@dataclass(frozen=True)
class LeftOutSizeRow(OfModel):
    """An image size at which a model does not run, with the reason."""

    sweep: Sweep = col("varied")
    size: Size = col("image (px)")
    reason: str = col("reason")


@dataclass(frozen=True)
class ExponentRow(OfModel):
    """The exponent k of cost = c · tokens^k over several sizes, with Student's 95 % interval.

    tokens_from, tokens_to: the range of the number of tokens.
    """

    sweep: Sweep = col("varied")
    cost: Cost = col("cost")
    exponent: Estimate = col(
        "exponent",
        term="k of cost = c · tokens^k over the range of tokens in the table",
        metric="exponent/{model}/{sweep}/{cost}",
    )
    tokens_from: int = col("from (tokens)")
    tokens_to: int = col("to (tokens)")

    @property
    def series(self) -> tuple[Cost, Sweep]:
        """Return the cost and the sweep, which models must share to be compared."""
        return self.cost, self.sweep


@dataclass(frozen=True, kw_only=True)
class ProfileRecord(Record):
    """The tables of `vitlens profile`."""

    machine: tuple[MachineRow, ...] = table()
    costs: tuple[CostRow, ...] = table()
    parts: tuple[PartRow, ...] = table()
    speed: tuple[SpeedRow, ...] = table()
    tokens: tuple[TokensRow, ...] = table()
    left_out: tuple[LeftOutSizeRow, ...] = table()
    exponents: tuple[ExponentRow, ...] = table()

    @property
    def hardware(self) -> str:
        """Return the device, on a CPU with the number of threads."""
        if not self.machine:
            return ""
        machine = self.machine[0]
        if self.config.device != "cpu":
            return machine.name
        plural = "" if machine.threads == 1 else "s"
        return f"{machine.name} ({machine.threads} thread{plural})"
