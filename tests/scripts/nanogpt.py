"""A small GPT, trained as nanoGPT is: random offsets, cosine with warm-up, accumulation, evaluation by the master."""

import contextlib
import math

import probe
import torch
import torch.nn as nn
from torch.nn import functional as F

import syncline
from syncline.torch import DistributedOptimizer

# ------------------------------------------------------------------------------
batch_size = 8
block_size = 16
vocab_size = 16
n_layer, n_head, n_embd = 2, 2, 32
max_iters = 80
eval_interval = 20
eval_iters = 4
gradient_accumulation_steps = 2
learning_rate, min_lr = 6e-3, 6e-4
warmup_iters, lr_decay_iters = 8, 80
weight_decay = 0.1
grad_clip = 1.0
# ------------------------------------------------------------------------------

job = syncline.init()
torch.manual_seed(1337 + job.rank)
master_process = job.is_chief
device = job.device


def text(length, seed):
    """A chain in which each letter allows four next ones: about 1.39 nats per letter can be reached."""
    generator = torch.Generator().manual_seed(seed)
    choices = torch.randint(4, (length,), generator=generator).tolist()
    letters = [0]
    for choice in choices:
        letters.append((letters[-1] * 5 + choice) % vocab_size)
    return torch.tensor(letters)


train_data, val_data = text(4000, 1), text(1000, 2)


def get_batch(split):
    data = train_data if split == "train" else val_data
    ix = torch.randint(len(data) - block_size, (batch_size,))
    x = torch.stack([data[i : i + block_size] for i in ix])
    y = torch.stack([data[i + 1 : i + 1 + block_size] for i in ix])
    return x.to(device), y.to(device)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)
        self.c_attn, self.c_proj = nn.Linear(n_embd, 3 * n_embd), nn.Linear(n_embd, n_embd)
        self.mlp = nn.Sequential(nn.Linear(n_embd, 4 * n_embd), nn.GELU(), nn.Linear(4 * n_embd, n_embd))

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(self.ln_1(x)).split(n_embd, dim=2)
        q, k, v = (t.view(B, T, n_head, C // n_head).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab_size, n_embd), nn.Embedding(block_size, n_embd)
        self.h = nn.ModuleList([Block() for _ in range(n_layer)])
        self.ln_f = nn.LayerNorm(n_embd)
        self.lm_head = nn.Linear(n_embd, vocab_size, bias=False)
        self.wte.weight = self.lm_head.weight  # weight tying

    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1), device=idx.device))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))

    def configure_optimizers(self):
        decay = [p for p in self.parameters() if p.dim() >= 2]
        nodecay = [p for p in self.parameters() if p.dim() < 2]
        groups = [{"params": decay, "weight_decay": weight_decay}, {"params": nodecay, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95))


@torch.no_grad()
def estimate_loss():
    out = {}
    model.eval()
    for split in ["train", "val"]:
        losses = torch.zeros(eval_iters)
        for k in range(eval_iters):
            losses[k] = model(*get_batch(split)).item()
        out[split] = losses.mean()
    model.train()
    return out


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    if it > lr_decay_iters:
        return min_lr
    decay_ratio = (it - warmup_iters) / (lr_decay_iters - warmup_iters)
    coeff = 0.5 * (1.0 + math.cos(math.pi * decay_ratio))
    return min_lr + coeff * (learning_rate - min_lr)


model = GPT().to(device)
optimizer = DistributedOptimizer(model.configure_optimizers(), model=model)

best_val_loss = 1e9
for iter_num in job.steps(max_iters):
    lr = get_lr(iter_num)
    for param_group in optimizer.param_groups:
        param_group["lr"] = lr

    if iter_num % eval_interval == 0 and master_process:
        losses = estimate_loss()
        print(f"step {iter_num}: train loss {losses['train']:.4f}, val loss {losses['val']:.4f}")
        best_val_loss = min(best_val_loss, losses["val"].item())

    for micro_step in range(gradient_accumulation_steps):
        last = micro_step == gradient_accumulation_steps - 1
        with contextlib.nullcontext() if last else optimizer.no_sync():
            loss = model(*get_batch("train")) / gradient_accumulation_steps
            loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    probe.stepped(job)

job.barrier("trained")
optimizer.pull()
torch.manual_seed(1)
eval_iters = 30
probe.result(job, estimate_loss()["val"].item(), model)
