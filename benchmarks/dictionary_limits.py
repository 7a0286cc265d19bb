"""What limits the dictionary of `reports/sae-deit-tiny`: latents of a token, or photographs.

    python -m benchmarks.dictionary_limits

DeiT-tiny's residual stream after block 8, 8 latents a component, photographs and 22 crops of each,
as in the report, but 500,000 training tokens. The explained variance is that of the photographs
held out, and of as many that were trained on: over k, and over the number of training photographs.
VITLENS_DATA names the folder of weights and photographs; tokens are cached in ./data, as those of
the report are.
"""

import os
from pathlib import Path
from typing import Final

import torch

import vitlens
from vitlens.analysis.dictionary.measures import activity
from vitlens.analysis.dictionary.tokens import TokenSet, read_tokens
from vitlens.commands.sae.images import divided, with_crops
from vitlens.training.dictionary import train_dictionary

PLACE: Final = "blocks.8.residual"
CROPS: Final = 22
TOKENS: Final = 500_000
LATENTS: Final = (8, 16, 32, 64, 128)
PHOTOGRAPHS: Final = (56, 112, 225)


def main() -> None:
    """Print the explained variance over k, then over the number of training photographs."""
    data = Path(os.environ["VITLENS_DATA"])
    weights = data / "weights" / "deit_tiny_patch16_224.safetensors"
    model = vitlens.load(f"timm:deit_tiny_patch16_224@{weights}")
    photographs = vitlens.load_data(str(data / "photos"), preprocessing=model.preprocessing)
    images = divided(photographs, 0)
    crops = with_crops(images.train, CROPS, 0)
    cache = Path("data/features")
    held_out = read_tokens(model, images.test, PLACE, cache=cache)
    tokens = read_tokens(model, crops, PLACE, cache=cache)

    def measure(train: TokenSet, k: int) -> str:
        plan = vitlens.DictionaryPlan(k=k, tokens=TOKENS)
        dictionary = train_dictionary(model, train, crops, PLACE, plan)
        same = of_images(train, torch.arange(min(len(held_out), len(train))))
        shares = []
        for measured in (held_out, same):
            variance = activity(dictionary.autoencoder, measured).explained_variance()
            shares.append(f"{100 * variance.value:.1f} %")
        return " ".join(shares)

    for k in LATENTS:
        print(f"k = {k}: held out, trained on: {measure(tokens, k)}", flush=True)
    for count in PHOTOGRAPHS:
        first = torch.arange(count)  # the photographs, then their crops
        rows = torch.cat([first + crop * len(images.train) for crop in range(CROPS + 1)])
        print(f"{count} photographs: {measure(of_images(tokens, rows), 32)}", flush=True)


def of_images(tokens: TokenSet, rows: torch.Tensor) -> TokenSet:
    """Return the tokens of some images."""
    return TokenSet(tokens.place, tokens.values[rows], tokens.high[rows], tokens.prefix)


if __name__ == "__main__":
    main()
