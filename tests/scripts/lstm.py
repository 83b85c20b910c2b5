"""An LSTM language model: columns of text, the hidden state carried on, clipped gradients.

Its loop is a plain `range` without positions: Syncline cannot tell where a worker that starts again should go on.
"""

import argparse
import math

import probe
import torch
import torch.nn as nn

import syncline
from syncline.torch import DistributedOptimizer

ntokens = 12


class RNNModel(nn.Module):
    def __init__(self, ninp=24, nhid=32):
        super().__init__()
        self.encoder = nn.Embedding(ntokens, ninp)
        self.rnn = nn.LSTM(ninp, nhid)
        self.decoder = nn.Linear(nhid, ntokens)
        nn.init.uniform_(self.encoder.weight, -0.1, 0.1)
        self.nhid = nhid

    def forward(self, input, hidden):
        output, hidden = self.rnn(self.encoder(input), hidden)
        return self.decoder(output).view(-1, ntokens), hidden

    def init_hidden(self, bsz):
        return torch.zeros(1, bsz, self.nhid), torch.zeros(1, bsz, self.nhid)


def corpus(length, seed):
    """A walk over letters in which the last two decide about the next, but for one time in ten."""
    generator = torch.Generator().manual_seed(seed)
    surprises = torch.rand(length, generator=generator) < 0.1
    letters = [1, 2]
    for k in range(length - 2):
        letters.append(k % ntokens if surprises[k] else (letters[-1] + 2 * letters[-2] + 1) % ntokens)
    return torch.tensor(letters)


def batchify(data, bsz):
    nbatch = data.size(0) // bsz
    return data.narrow(0, 0, nbatch * bsz).view(bsz, -1).t().contiguous()


def repackage_hidden(h):
    return tuple(v.detach() for v in h)


def get_batch(source, i, bptt):
    seq_len = min(bptt, len(source) - 1 - i)
    return source[i : i + seq_len], source[i + 1 : i + 1 + seq_len].reshape(-1)


@torch.no_grad()
def evaluate(model, source, bptt, criterion):
    model.eval()
    total, hidden = 0.0, model.init_hidden(source.size(1))
    for i in range(0, source.size(0) - 1, bptt):
        data, targets = get_batch(source, i, bptt)
        output, hidden = model(data, hidden)
        total += len(data) * criterion(output, targets).item()
    return total / (len(source) - 1)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--batch-size", type=int, default=16, help="columns, of all workers together")
    parser.add_argument("--bptt", type=int, default=12)
    parser.add_argument("--clip", type=float, default=0.25)
    parser.add_argument("--lr", type=float, default=4.0)
    args = parser.parse_args()

    job = syncline.init()
    torch.manual_seed(1111)
    columns = batchify(corpus(16 * 12 * 80 + 16, 1), args.batch_size)
    train_data = columns[:, job.rank :: job.world_size]  # each worker has columns of its own
    val_data = batchify(corpus(2000, 2), 10)
    model = RNNModel()
    criterion = nn.CrossEntropyLoss()
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=args.lr), model=model)

    model.train()
    hidden = model.init_hidden(train_data.size(1))
    for step in range(args.steps):
        data, targets = get_batch(train_data, step * args.bptt % (len(train_data) - 1), args.bptt)
        hidden = repackage_hidden(hidden)
        optimizer.zero_grad()
        output, hidden = model(data, hidden)
        loss = criterion(output, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
        probe.stepped(job)
        if step % 20 == 0:
            print(f"| {step:5d} batches | loss {loss.item():5.2f} | ppl {math.exp(loss.item()):8.2f}")

    job.barrier("trained")
    optimizer.pull()
    probe.result(job, evaluate(model, val_data, args.bptt, criterion), model)


if __name__ == "__main__":
    main()
