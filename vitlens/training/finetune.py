"""What of a trained model is trained further: all of it, its last blocks, or its head alone."""

from collections.abc import Iterator
from contextlib import contextmanager

from vitlens.errors import InputError
from vitlens.models.model import Model, trainable
from vitlens.models.new_head import classifiers


@contextmanager
def partly_trainable(model: Model, *, last: int | None) -> Iterator[Model]:
    """The model with gradients on a part of it alone; all modes and gradient flags come back on exit.

    last: None: everything (as `trainable`); K: the last K blocks and all that comes after them; 0: the classifier
    alone. What is frozen is in evaluation mode: no dropout, and batch statistics stay. Raises InputError for more
    blocks than there are.
    """
    require_last(model, last)
    with trainable(model):
        if last is not None:
            _freeze(model, trained_names(model, last=last))
        yield model


def require_last(model: Model, last: int | None) -> None:
    """Raise InputError when the model has fewer blocks than that, or the number is negative."""
    depth = len(model.anatomy.blocks)
    if last is not None and not 0 <= last <= depth:
        raise InputError(
            f"expected --train-last from 1 to {depth}, the blocks of {model.alias}, found {last}; "
            "leave it out to train everything"
        )


def trained_names(model: Model, *, last: int) -> set[str]:
    """Names of the parameters of the last K blocks and of all that comes after them; for 0 the classifier's alone.

    What stands between two blocks goes with the one before, as layer-wise decay has it.
    """
    module, blocks = model.module, model.anatomy.blocks
    names = [name for name, _ in module.named_parameters()]
    if last == 0:
        heads = tuple(f"{name}." for name in classifiers(module))
        return {name for name in names if name.startswith(heads)}
    first = f"{blocks[len(blocks) - last]}."
    start = next((place for place, name in enumerate(names) if name.startswith(first)), len(names))
    return set(names[start:])


def trained_share(model: Model, *, last: int | None) -> tuple[int, int]:
    """How many parameters are trained, and how many there are."""
    named = dict(model.module.named_parameters())
    trained = named.keys() if last is None else trained_names(model, last=last)
    return sum(named[name].numel() for name in trained), model.parameter_count()


def _freeze(model: Model, trained: set[str]) -> None:
    """Take the gradients of all other parameters away, and put what holds them into evaluation mode."""
    for name, parameter in model.module.named_parameters():
        parameter.requires_grad_(name in trained)
    begun = False
    for module in model.modules():
        flags = {parameter.requires_grad for parameter in module.parameters()}
        begun = begun or flags == {True}
        # a module without parameters (dropout) goes with what stands before it; one of both kinds adds nothing random
        module.training = flags == {True} or (not flags and begun)


def require_learned(model: Model, *, option: str) -> None:
    """Raise InputError for a model whose weights are random: freezing them would keep nothing."""
    if model.provenance.weights in ("random", "training"):
        raise InputError(
            f"expected a trained model with {option}, found {model.alias} from scratch: there is nothing learned to "
            "freeze; give timm:NAME, torchvision:NAME, a run folder, or --weights FILE"
        )
