"""The masked autoencoder (He 2022): masked patches are reconstructed from the visible ones.

The encoder, our ViT, sees only the visible patches. A small decoder of the same blocks sees its
outputs at their positions, and one learned token at every masked position. The mask depends only on
(seed, epoch, key of the image).
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from vitlens.errors import InputError, set_option
from vitlens.models.configs import ViTConfig
from vitlens.models.model import Model
from vitlens.models.positions import fixed_positions
from vitlens.models.vit import NORM_EPSILON, TransformerBlock, initialise
from vitlens.processes import Processes
from vitlens.shapes import Images, TokenLayout
from vitlens.training.augment import uniforms

STREAM: Final = 10  # of random numbers, different from those of other augmentations
_HEAD: Final = 32  # width of a decoder's head
# Standard deviation of noise in normalised pixels. It is added to that of each patch, because the
# noise of a patch without contrast would otherwise be reconstructed.
_NOISE: Final = 0.1

Patches = Float[Tensor, "batch patches pixels"]


class Reconstruction(NamedTuple):
    """The reconstruction of images, normalised as for the loss.

    predicted: the predicted pixels of every patch.
    target: the true pixels of every patch.
    masked: which patches are masked.
    """

    predicted: Patches
    target: Patches
    masked: Bool[Tensor, "batch patches"]


class MaskedAutoencoder(nn.Module):
    """An encoder and its decoder.

    Raises InputError for a mask_ratio that masks no or all patches. These are the settings:

    - mask_ratio: the share of the patches that are masked.
    - decoder_dim, decoder_depth: the width and the depth of the decoder.
    - normalise: whether the pixels of a patch are normalised by their mean and standard deviation.
    """

    def __init__(self, model: Model, settings: Mapping[str, Any]) -> None:
        super().__init__()
        self.model = model
        self.settings = settings
        layout = model.layout
        self.prefix_count = len(layout.prefix)
        count = layout.patches
        self.visible_count = count - round(settings["mask_ratio"] * count)
        if not 0 < self.visible_count < count:
            raise InputError(
                f"expected a mask_ratio that masks 1 to {count - 1} of {count} patches, found "
                f"{settings['mask_ratio']}; try {set_option('mask_ratio', 0.75)}"
            )
        vit: Any = model.module
        dim = settings["decoder_dim"]
        if dim < 4 or dim % 4 or settings["decoder_depth"] < 1:
            raise InputError(
                f"expected decoder_dim divisible by 4 and decoder_depth of at least 1, found {dim} "
                f"and {settings['decoder_depth']}; try {set_option('decoder_dim', 96)}"
            )
        heads = dim // _HEAD if dim % _HEAD == 0 else 1
        config = ViTConfig(dim=dim, heads=heads)
        self.embed = nn.Linear(vit.config.dim, dim)
        self.mask_token = nn.Parameter(torch.zeros(1, 1, dim))
        nn.init.normal_(self.mask_token, std=0.02)
        positions = fixed_positions("sine-2d", grid=layout.grid, prefix=0, dim=dim)
        self.register_buffer("positions", positions, persistent=False)
        self.positions: Tensor
        self.blocks = nn.Sequential(
            *(TransformerBlock(config) for _ in range(settings["decoder_depth"]))
        )
        self.norm = nn.LayerNorm(dim, eps=NORM_EPSILON)
        self.head = nn.Linear(dim, 3 * layout.patch_size[0] * layout.patch_size[1])
        for part in (self.embed, self.blocks, self.head):
            part.apply(initialise)

    def inputs(self, images: Images, keys: Tensor, *, seed: int, epoch: int) -> tuple[Tensor, ...]:
        """Return the images and a random order of the patches of each, (batch, patches)."""
        drawn = uniforms(keys, self.model.layout.patches, STREAM, seed=seed, epoch=epoch)
        return images, drawn.argsort(dim=1, stable=True)

    def forward(self, images: Images, order: Tensor) -> Reconstruction:
        """Return the reconstruction from the first patches in each image's order."""
        vit: Any = self.model.module
        prepared = self.model.prepare(images)
        visible = order[:, : self.visible_count]  # indices (batch, visible)
        tokens = vit.tokens(prepared)  # (batch, prefix + patches, dim), with positions
        prefix = tokens[:, : self.prefix_count]
        patches = tokens[:, self.prefix_count :]
        encoded = torch.cat((prefix, gather_patches(patches, visible)), 1)  # (batch, tokens, dim)
        for block in vit.blocks:
            encoded = block(encoded)
        # one of the two norms is the identity
        encoded = self.embed(vit.fc_norm(vit.norm(encoded)))
        encoded_prefix = encoded[:, : self.prefix_count]
        encoded_patches = encoded[:, self.prefix_count :]
        # mask tokens at all positions, replaced by the encoded patches at the visible ones
        mask_tokens = self.mask_token.to(encoded.dtype).expand(len(images), order.shape[1], -1)
        indices = visible[:, :, None].expand_as(encoded_patches)
        all_patches = mask_tokens.scatter(1, indices, encoded_patches) + self.positions
        decoder_input = torch.cat((encoded_prefix, all_patches), 1)
        decoded = self.norm(self.blocks(decoder_input))
        masked = torch.ones_like(order, dtype=torch.bool).scatter(1, visible, False)
        target = patchified(prepared, self.model.layout)
        if self.settings["normalise"]:
            target = normalised(target)
        return Reconstruction(self.head(decoded[:, self.prefix_count :]), target, masked)

    def losses(self, outputs: Any) -> Float[Tensor, " batch"]:
        """Return the mean squared error of each image's masked pixels."""
        return masked_error(*outputs)

    def updated(self, progress: float, processes: Processes) -> None:
        """Do nothing after an update."""

    def exported(self) -> Model:
        """Return the encoder."""
        return self.model

    def measures(self, outputs: Sequence[Any]) -> Mapping[str, float]:  # noqa: ARG002
        """Return no measures: this objective adds none."""
        return {}

    @torch.no_grad()
    def pictures(self, images: Images, order: Tensor) -> tuple[Images, Images]:
        """Return the images with their masked patches in grey, and reconstructed, in [0, 1].

        If the loss is of normalised pixels, each patch's true mean and deviation are put back, as
        in the paper.
        """
        predicted, _, masked = self(images, order)
        prepared = self.model.prepare(images)
        layout = self.model.layout
        true = patchified(prepared, layout)
        if self.settings["normalise"]:
            mean, deviation = moments(true)
            predicted = predicted * deviation + mean
        grey = (0.5 - self.model.mean) / self.model.std
        grey_patches = patchified(grey.expand_as(prepared), layout)

        def fill_masked(patches: Patches) -> Images:
            filled = torch.where(masked[:, :, None], patches.float(), true)
            pixels = unpatchified(filled, layout)
            return (pixels * self.model.std + self.model.mean).clamp(0, 1)

        return fill_masked(grey_patches), fill_masked(predicted)


def masked_error(
    predicted: Patches, target: Patches, masked: Bool[Tensor, "batch patches"]
) -> Float[Tensor, " batch"]:
    """Return the mean squared error over each image's masked patches (He 2022, section 3)."""
    error = (predicted.to(target.dtype) - target).square().mean(2)
    return (error * masked).sum(1) / masked.sum(1)


def gather_patches(
    tokens: Float[Tensor, "batch patches dim"], indices: Tensor
) -> Float[Tensor, "batch some dim"]:
    """Return the tokens with these indices (batch, some) of each image."""
    return tokens.gather(1, indices[:, :, None].expand(-1, -1, tokens.shape[2]))


def patchified(images: Images, layout: TokenLayout) -> Patches:
    """Return the pixels of every patch, row by row: (batch, patches, height x width x 3)."""
    rows, columns = layout.grid
    height, width = layout.patch_size
    split = images.reshape(len(images), 3, rows, height, columns, width)
    # of shape (batch, rows, columns, height, width, 3)
    by_patch = split.permute(0, 2, 4, 3, 5, 1)
    return by_patch.reshape(len(images), rows * columns, -1)


def unpatchified(patches: Patches, layout: TokenLayout) -> Images:
    """Return the images of these patches: the inverse of `patchified`."""
    rows, columns = layout.grid
    height, width = layout.patch_size
    by_patch = patches.reshape(len(patches), rows, columns, height, width, 3)
    # of shape (batch, 3, rows, height, columns, width)
    split = by_patch.permute(0, 5, 1, 3, 2, 4)
    return split.reshape(len(patches), 3, rows * height, columns * width)


def moments(patches: Patches) -> tuple[Tensor, Tensor]:
    """Return the mean and the standard deviation of each patch's pixels, with added noise."""
    mean = patches.mean(2, keepdim=True)
    deviation = (patches.var(2, keepdim=True) + _NOISE**2).sqrt()
    return mean, deviation


def normalised(patches: Patches) -> Patches:
    """Return patches with mean 0 and deviation 1 (He 2022, section 3: better features)."""
    mean, deviation = moments(patches)
    return (patches - mean) / deviation
