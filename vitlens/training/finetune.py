"""Fine-tuning of a part of a model: its last blocks, or only its head."""

from collections.abc import Iterator
from contextlib import contextmanager

from vitlens.errors import InputError, UnsupportedError, argument
from vitlens.models.derived import classifiers
from vitlens.models.model import Model, trainable


@contextmanager
def partly_trainable(model: Model, *, last: int | None) -> Iterator[Model]:
    """Yield the model with only a part of it trainable; modes and gradient flags are restored.

    Frozen modules are in evaluation mode: without dropout, with fixed batch statistics. Raises
    InputError for more blocks than the model has.

    last: the number of last blocks that are trained, with all layers after them. 0 means only the
        classifier, None means everything (as `trainable`).
    """
    require_last(model, last)
    with trainable(model):
        if last is not None:
            trained = trained_names(model, last=last)
            for name, parameter in model.module.named_parameters():
                parameter.requires_grad_(name in trained)
            _set_modes(model)
        yield model


def _set_modes(model: Model) -> None:
    """Set trained modules to training mode, and frozen ones to evaluation mode.

    A container with a frozen part counts as frozen. A module without parameters, such as dropout,
    is trained inside a trained module, or if it is defined after one and after all frozen layers.
    """
    modules = list(model.modules())  # a container comes before its parts
    flags_of_modules = []
    for module in modules:
        flags_of_modules.append({parameter.requires_grad for parameter in module.parameters()})
        module.training = False
    last_frozen = max(
        (index for index, flags in enumerate(flags_of_modules) if False in flags), default=-1
    )
    is_after_trained = False
    for index, (module, flags) in enumerate(zip(modules, flags_of_modules)):
        if flags == {True}:
            for part in module.modules():
                part.training = True
            # a user's module may define its head before the frozen blocks
            is_after_trained = index > last_frozen
        elif not flags and is_after_trained:
            module.training = True


def require_last(model: Model, last: int | None) -> None:
    """Raise InputError for a number of blocks that is negative or larger than the model's."""
    depth = len(model.anatomy.blocks)
    if last is not None and not 0 <= last <= depth:
        raise InputError(
            f"expected {argument('train_last')} from 0 to {depth}, the blocks of {model.alias}, "
            f"found {last}; leave it out to train everything"
        )


def trained_names(model: Model, *, last: int) -> set[str]:
    """Return the names of the parameters of the last blocks and of all layers after them.

    Parameters between two blocks belong to the block before, as in layer-wise learning-rate decay.

    last: the number of blocks; 0 means only the classifier.
    """
    blocks = model.anatomy.blocks
    names = [name for name, _ in model.module.named_parameters()]
    # the classifier is always trained; a user's module may define it before the blocks
    try:
        heads = tuple(f"{name}." for name in classifiers(model))
    except UnsupportedError:  # a model without a linear layer
        if last == 0:
            raise
        heads = ()
    trained = {name for name in names if name.startswith(heads)}
    if last:
        first_block = f"{blocks[len(blocks) - last]}."
        has_reached_block = False
        for name in names:
            has_reached_block = has_reached_block or name.startswith(first_block)
            if has_reached_block:
                trained.add(name)
    return trained


def trained_share(model: Model, *, last: int | None) -> tuple[int, int]:
    """Return the number of trained parameters, and the number of all parameters."""
    if last is None:
        return model.parameter_count(), model.parameter_count()
    parameters = dict(model.module.named_parameters())
    trained = sum(parameters[name].numel() for name in trained_names(model, last=last))
    return trained, model.parameter_count()


def require_learned(model: Model, *, option: str) -> None:
    """Raise InputError for a model with random weights, which are not worth freezing."""
    if model.provenance.weights in ("random", "training"):
        raise InputError(
            f"expected a trained model with {option}, found {model.alias} with random weights; "
            "give timm:NAME, torchvision:NAME, a run folder, or "
            f"{argument('weights', flag='weights FILE')}"
        )
