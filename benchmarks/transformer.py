"""A transformer as GPT-2 has it: causal attention, norms before the layers, one embedding for words in and out."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    """Attention to what came before, then two layers for each word."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm, self.inner_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.inner = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(self.attention_norm(x)).unflatten(-1, (3 * self.num_heads, -1)).transpose(1, 2)
        q, k, v = heads.chunk(3, dim=1)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        following: torch.Tensor = x + self.inner(self.inner_norm(x))
        return following


class Transformer(nn.Module):
    """From words to the scores of the word that follows each, all texts in one row after the other."""

    def __init__(self, *, num_layers: int, width: int, num_heads: int, num_words: int, length: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(num_words, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, num_heads) for _ in range(num_layers)))
        self.norm = nn.LayerNorm(width)
        for embedding in (self.words, self.places):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.words(words) + self.places.weight[: words.shape[1]]
        x = self.norm(self.blocks(x))
        return F.linear(x, self.words.weight).flatten(0, 1)
