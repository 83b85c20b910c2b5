"""A language model with tied embeddings, in stages: `syncline run -w 2 --stages 2 examples/pipeline_transformer.py`.

It learns the text of this file, character by character.
"""

import argparse
import json
import pathlib

import torch
from torch import nn

import syncline
from syncline.torch import DataLoader, DistributedOptimizer, Pipeline, deferred_init

LENGTH = 48


class Embedding(nn.Module):
    def __init__(self, num_tokens: int, width: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(num_tokens, width), nn.Embedding(LENGTH, width)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        return self.tokens(text) + self.places(torch.arange(LENGTH, device=text.device))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.register_buffer("mask", torch.triu(torch.ones(LENGTH, LENGTH, dtype=torch.bool), 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norms[0](x)
        x = x + self.attention(y, y, y, attn_mask=self.mask, need_weights=False)[0]
        return x + self.mlp(self.norms[1](x))


class Head(nn.Module):
    def __init__(self, embedding: Embedding, width: int) -> None:
        super().__init__()
        self.norm, self.tokens = nn.LayerNorm(width), embedding.tokens  # tied weights

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x) @ self.tokens.weight.T


def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--timeline", help="file for all forwards and backwards of the last step, as JSON")
    args = parser.parse_args()

    job = syncline.init()
    torch.manual_seed(0)
    text = torch.tensor(list(pathlib.Path(__file__).read_bytes()))
    with deferred_init():
        embedding = Embedding(128, args.width)
        blocks = [Block(args.width) for _ in range(args.blocks)]
        layers = [embedding, *blocks, Head(embedding, args.width)]
    pipe = Pipeline(stages=layers, loss_fn=loss_fn)
    opt = DistributedOptimizer(torch.optim.Adam(pipe.parameters(), lr=2e-3), model=pipe)

    pieces = text.unfold(0, LENGTH + 1, 4)
    data = torch.utils.data.TensorDataset(pieces[:, :-1].contiguous(), pieces[:, 1:].contiguous())
    loader = DataLoader(data, batch_size=32, shuffle=True)
    for epoch in loader.epochs(args.epochs):
        for x, y in loader:
            loss = pipe.step(x, y)
            opt.step()
            opt.zero_grad()
        print(f"{job.name}: epoch {epoch}, loss {loss:.3f}")
    if args.timeline and job.is_chief:
        spans = [(s.stage, s.part, s.kind, s.micro_batch, s.begin, s.end) for s in pipe.timeline()]
        pathlib.Path(args.timeline).write_text(json.dumps({"schedule": job.config.schedule, "spans": spans}))


if __name__ == "__main__":
    main()
