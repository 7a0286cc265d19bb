"""Results of the literature that a `vitlens study --kind` can repeat or contradict."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from vitlens.commands.study.kinds.kinds import Finding

_SMALLER_PATCHES: Final = "models with smaller patches are more accurate and cost more"

# by kind of study
FINDINGS: Final[Mapping[str, tuple[Finding, ...]]] = MappingProxyType(
    {
        "architecture": (
            # "mlp" is a whole block: attention, then an MLP
            Finding(
                label="mlp",
                against="no-attention",
                expects="higher",
                statement="a block with attention is more accurate than an MLP on each patch",
                source="Vaswani 2017; Dosovitskiy 2021",
                caveat="positions and pooling let an MLP add up what each patch shows",
            ),
            Finding(
                label="depth-6",
                against="mlp",
                expects="higher",
                statement="a model of more blocks is more accurate than one of a single block",
                source="Dosovitskiy 2021",
                caveat="one block may suffice for ten digits",
            ),
            Finding(
                label="depth-12",
                against="post-norm-12",
                expects="higher",
                statement="deep models train more stably with pre-norm than with post-norm",
                source="Xiong 2020",
                caveat=(
                    "width 64, a short warm-up, and Muon, whose steps have a fixed size whatever "
                    "the size of the gradient"
                ),
            ),
        ),
        "patch-size": (
            Finding(
                label="patch-4",
                against="patch-8",
                expects="higher",
                statement=_SMALLER_PATCHES,
                source="Dosovitskiy 2021; Beyer 2023",
                caveat="at 32 px a patch of 8 px covers a quarter of the image's side",
            ),
            Finding(
                label="patch-8",
                against="patch-16",
                expects="higher",
                statement=_SMALLER_PATCHES,
                source="Dosovitskiy 2021; Beyer 2023",
                caveat=(
                    "four patches of 16 px hold the whole image: the model is nearly an MLP on "
                    "pixels"
                ),
            ),
            Finding(
                label="patch-2",
                against="patch-4",
                expects="higher",
                statement=_SMALLER_PATCHES,
                source="Dosovitskiy 2021; Beyer 2023",
                caveat=(
                    "256 patches of 2 px hold little each, and more steps are needed to learn "
                    "which belong together"
                ),
            ),
        ),
        "pooling": (
            Finding(
                label="mean",
                against="cls",
                expects="equal",
                statement=(
                    "the mean of the patches and a CLS token are equally accurate once each has "
                    "its learning rate"
                ),
                source="Dosovitskiy 2021, appendix D.3",
                caveat="one rate for both, and a short training",
            ),
        ),
        "size": (
            Finding(
                label="vit-384",
                against="vit-mini",
                expects="equal",
                statement="a larger ViT gains little without more data",
                source="Dosovitskiy 2021, figure 4",
                caveat="new scenes are drawn in every epoch, so that no image is seen twice",
            ),
        ),
        "data": (
            Finding(
                label="cnn-5",
                against="vit-5",
                expects="higher",
                statement="with few images a CNN is more accurate than a ViT",
                source="Dosovitskiy 2021, figures 3 and 4",
                caveat="hundreds of images in place of millions",
            ),
        ),
        "registers": (
            Finding(
                label="registers-4",
                against="registers-0",
                expects="equal",
                statement="registers clean the maps of large models and hardly change accuracy",
                source="Darcet 2024",
                caveat=(
                    "0.2 M parameters and minutes of training, in which no high-norm tokens need "
                    "appear"
                ),
            ),
        ),
        "positions": (
            Finding(
                label="learned",
                against="none",
                expects="higher",
                statement="models with position embeddings are more accurate than models without",
                source="Dosovitskiy 2021, appendix D.4",
                caveat="learned positions begin as noise and need steps to find an order",
            ),
            Finding(
                label="sine-2d",
                against="sine",
                expects="equal",
                statement="models with 1-D and with 2-D positions are equally accurate",
                source="Dosovitskiy 2021, appendix D.4",
                caveat="fixed sines in place of learned ones, and a grid of 8 x 8 patches",
            ),
            Finding(
                label="sine",
                against="learned",
                expects="equal",
                statement="models with fixed and with learned positions are equally accurate",
                source="Vaswani 2017",
                caveat=(
                    "a training too short for learned positions to find the order that sines "
                    "begin with"
                ),
            ),
        ),
        "swin": (
            Finding(
                label="swin",
                against="swin-no-shift",
                expects="higher",
                statement=(
                    "a model with shifted windows is more accurate than one without the shift"
                ),
                source="Liu 2021, table 4",
                caveat=(
                    "merging already joins windows: after two merges of a 16 x 16 map one window "
                    "holds everything"
                ),
            ),
            Finding(
                label="swin",
                against="vit",
                expects="higher",
                statement="Swin is more accurate than a ViT of its size trained on the same images",
                source="Liu 2021, table 1",
                caveat="10 classes at 32 px, where global attention is cheap and patches are 4 px",
            ),
        ),
        "window": (
            Finding(
                label="window-8",
                against="window-2",
                expects="higher",
                statement="a model with larger windows is more accurate",
                source="Liu 2022",
                caveat="shift and merging already join the windows of so small an image",
            ),
        ),
        "recipe": (
            Finding(
                label="high-rate",
                against="high-rate-no-warm-up",
                expects="higher",
                statement="a high learning rate needs a warm-up",
                source="Goyal 2017; Xiong 2020",
                caveat=(
                    "pre-norm needs warm-up less than post-norm, and the norm of Muon's steps is "
                    "fixed"
                ),
            ),
        ),
        "distillation": (
            Finding(
                label="taught",
                against="alone",
                expects="higher",
                statement="a CNN as teacher makes a ViT more accurate",
                source="Touvron 2021",
                caveat=(
                    "the teacher was trained on the same few images, without strong augmentation, "
                    "and says little that their labels do not"
                ),
            ),
            Finding(
                label="unlabelled",
                against="alone",
                expects="higher",
                statement=(
                    "a student that also learns from its teacher's outputs on images without "
                    "labels is more accurate"
                ),
                source="Hinton 2015; Beyer 2022",
                caveat="a CNN teaches a ViT, and the images without labels are of the same kind",
            ),
        ),
    }
)
