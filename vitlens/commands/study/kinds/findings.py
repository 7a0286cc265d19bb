"""Results of the literature that a `vitlens study --kind` can repeat or contradict."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from vitlens.commands.study.kinds.kinds import Finding

# by kind of study
FINDINGS: Final[Mapping[str, tuple[Finding, ...]]] = MappingProxyType(
    {
        "architecture": (
            Finding(
                "mlp",
                "no-attention",
                "higher",
                "a block with attention is more accurate than an MLP on each patch",
                "Vaswani 2017; Dosovitskiy 2021",
                "positions and pooling let an MLP add up what each patch shows",
            ),
            Finding(
                "depth-6",
                "mlp",
                "higher",
                "a model of more blocks is more accurate than one of a single block",
                "Dosovitskiy 2021",
                "one block may suffice for ten digits",
            ),
            Finding(
                "depth-12",
                "post-norm-12",
                "higher",
                "deep models train more stably with pre-norm than with post-norm",
                "Xiong 2020",
                "width 64, a short warm-up, and Muon, whose steps have a fixed size whatever "
                "the size of the gradient",
            ),
        ),
        "patch-size": (
            Finding(
                "patch-4",
                "patch-8",
                "higher",
                "models with smaller patches are more accurate and cost more",
                "Dosovitskiy 2021; Beyer 2023",
                "at 32 px a patch of 8 px covers a quarter of the image's side",
            ),
            Finding(
                "patch-8",
                "patch-16",
                "higher",
                "models with smaller patches are more accurate and cost more",
                "Dosovitskiy 2021; Beyer 2023",
                "four patches of 16 px hold the whole image: the model is nearly an MLP on pixels",
            ),
            Finding(
                "patch-2",
                "patch-4",
                "higher",
                "models with smaller patches are more accurate and cost more",
                "Dosovitskiy 2021; Beyer 2023",
                "256 patches of 2 px hold little each, and more steps are needed to learn "
                "which belong together",
            ),
        ),
        "pooling": (
            Finding(
                "mean",
                "cls",
                "equal",
                "the mean of the patches and a CLS token are equally accurate once each has "
                "its learning rate",
                "Dosovitskiy 2021, appendix D.3",
                "one rate for both, and a short training",
            ),
        ),
        "size": (
            Finding(
                "vit-384",
                "vit-mini",
                "equal",
                "a larger ViT gains little without more data",
                "Dosovitskiy 2021, figure 4",
                "new scenes are drawn in every epoch, so that no image is seen twice",
            ),
        ),
        "data": (
            Finding(
                "cnn-5",
                "vit-5",
                "higher",
                "with few images a CNN is more accurate than a ViT",
                "Dosovitskiy 2021, figures 3 and 4",
                "hundreds of images in place of millions",
            ),
        ),
        "registers": (
            Finding(
                "registers-4",
                "registers-0",
                "equal",
                "registers clean the maps of large models and hardly change accuracy",
                "Darcet 2024",
                "0.2 M parameters and minutes of training, in which no high-norm tokens need "
                "appear",
            ),
        ),
        "positions": (
            Finding(
                "learned",
                "none",
                "higher",
                "models with position embeddings are more accurate than models without",
                "Dosovitskiy 2021, appendix D.4",
                "learned positions begin as noise and need steps to find an order",
            ),
            Finding(
                "sine-2d",
                "sine",
                "equal",
                "models with 1-D and with 2-D positions are equally accurate",
                "Dosovitskiy 2021, appendix D.4",
                "fixed sines in place of learned ones, and a grid of 8 x 8 patches",
            ),
            Finding(
                "sine",
                "learned",
                "equal",
                "models with fixed and with learned positions are equally accurate",
                "Vaswani 2017",
                "a training too short for learned positions to find the order that sines "
                "begin with",
            ),
        ),
        "swin": (
            Finding(
                "swin",
                "swin-no-shift",
                "higher",
                "a model with shifted windows is more accurate than one without the shift",
                "Liu 2021, table 4",
                "merging already joins windows: after two merges of a 16 x 16 map one window "
                "holds everything",
            ),
            Finding(
                "swin",
                "vit",
                "higher",
                "Swin is more accurate than a ViT of its size trained on the same images",
                "Liu 2021, table 1",
                "10 classes at 32 px, where global attention is cheap and patches are 4 px",
            ),
        ),
        "window": (
            Finding(
                "window-8",
                "window-2",
                "higher",
                "a model with larger windows is more accurate",
                "Liu 2022",
                "shift and merging already join the windows of so small an image",
            ),
        ),
        "recipe": (
            Finding(
                "high-rate",
                "high-rate-no-warm-up",
                "higher",
                "a high learning rate needs a warm-up",
                "Goyal 2017; Xiong 2020",
                "pre-norm needs warm-up less than post-norm, and the norm of Muon's steps is fixed",
            ),
        ),
        "distillation": (
            Finding(
                "taught",
                "alone",
                "higher",
                "a CNN as teacher makes a ViT more accurate",
                "Touvron 2021",
                "the teacher was trained on the same few images, without strong augmentation, and "
                "says little that their labels do not",
            ),
            Finding(
                "unlabelled",
                "alone",
                "higher",
                "a student that also learns from its teacher's outputs on images without labels is "
                "more accurate",
                "Hinton 2015; Beyer 2022",
                "a CNN teaches a ViT, and the images without labels are of the same kind",
            ),
        ),
    }
)
