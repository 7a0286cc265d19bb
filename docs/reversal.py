"""Train one attention layer to reverse a sequence of random vectors: exercise 1.4 of the course,
with all to change.

python docs/reversal.py --length 20 --heads 1 --no-positions
"""

import argparse

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss, scaled_dot_product_attention

WIDTH = 64


def loss_of_reversal(*, length: int, heads: int, positions: bool, steps: int) -> float:
    """Return the mean squared error of the last step; the values of the layer are the data
    themselves.
    """
    torch.manual_seed(0)
    query = nn.Linear(WIDTH, WIDTH)
    key = nn.Linear(WIDTH, WIDTH)
    place = nn.Parameter(torch.randn(length, WIDTH))
    adam = torch.optim.Adam([place, *query.parameters(), *key.parameters()], lr=1e-3)

    def split(tokens: Tensor) -> Tensor:  # (batch, tokens, dim) -> (batch, heads, tokens, head_dim)
        return tokens.unflatten(-1, (heads, -1)).transpose(1, 2)

    for _ in range(steps):
        data = torch.randn(32, length, WIDTH)
        placed = data + place if positions else data
        read = scaled_dot_product_attention(split(query(placed)), split(key(placed)), split(data))
        loss = mse_loss(read.transpose(1, 2).flatten(2), data.flip(1))
        adam.zero_grad()
        loss.backward()
        adam.step()
    return loss.item()


def main() -> None:
    """Train with what was typed, and print the loss beside the least that is possible without
    positions.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--length", type=int, default=10)
    parser.add_argument("--heads", type=int, default=4, help="a divisor of 64")
    parser.add_argument("--positions", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--steps", type=int, default=1000)
    given = parser.parse_args()
    loss = loss_of_reversal(**vars(given))
    least = (given.length - 2) / (given.length - 1)
    print(f"loss {loss:.4f}; the least without positions is {least:.4f} on average")


if __name__ == "__main__":
    main()
