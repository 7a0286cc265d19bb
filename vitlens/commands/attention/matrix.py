"""The N x N scores and weights of one head on the first image."""

from dataclasses import dataclass

from vitlens.commands.attention.record import MATRIX, MATRIX_ARRAYS, MatrixArrays, MatrixRow
from vitlens.commands.scaffold.folder import RunFolder
from vitlens.errors import InputError, UnsupportedError
from vitlens.lens.layers import layer_of
from vitlens.lens.places.capture import capture
from vitlens.models.model import Model
from vitlens.shapes import Images


@dataclass(frozen=True)
class HeadMatrix:
    """What is kept of one head: its row and its arrays."""

    row: MatrixRow
    arrays: MatrixArrays


def head_matrix(model: Model, images: Images, head: tuple[int, int] | None) -> HeadMatrix | None:
    """Scores and weights of a head (layer, head) on the first image; None where no head is given.

    Raises InputError for a layer or head that is not there, UnsupportedError for a layer in which not every token
    attends to every token.
    """
    if head is None:
        return None
    layer, number = layer_of(model, head[0]), head[1]
    if not 0 <= number < layer.heads:
        raise InputError(
            f"expected --matrix LAYER,HEAD with a head from 0 to {layer.heads - 1} in layer {layer.index}, found "
            f"{number}"
        )
    name, layout = f"blocks.{layer.index}.attention", model.anatomy.layout
    if layer.windows != 1 or layer.queries != layer.keys or f"{name}.scores" not in model.places().names:
        raise UnsupportedError(
            f"expected --matrix with a layer in which every token attends to every token, found layer {layer.index} of "
            f"{model.alias} with {layer.queries} queries, {layer.keys} keys and {layer.windows} windows; try --query"
        )
    captured = capture(model, images[:1], [f"{name}.scores", f"{name}.weights"])
    scores, weights = (captured[f"{name}.{stage}"][0, number].float().cpu() for stage in ("scores", "weights"))
    received = weights.mean(0)
    prefix = layout.prefix if layout is not None and layout.tokens == len(weights) else ()
    row = MatrixRow(
        layer.index, number, len(weights), prefix, float(weights.diagonal().mean()), int(received.argmax()),
        float(received.max()), float(scores[scores.isfinite()].std()),
    )  # fmt: skip
    return HeadMatrix(row, MatrixArrays(scores.numpy(), weights.numpy()))


def write_matrix(folder: RunFolder, found: HeadMatrix | None) -> None:
    """Write the matrices of the head that was asked for."""
    folder.write(MATRIX, [] if found is None else [found.row])
    if found is not None:
        folder.save(MATRIX_ARRAYS, found.arrays)
