"""REINFORCE on a corridor: no data set, each worker plays episodes of its own."""

import argparse

import probe
import torch
import torch.nn as nn
from torch.distributions import Categorical

import syncline
from syncline.torch import DistributedOptimizer


class Corridor:
    """Seven cells, the goal at one end, which end is seen at the start. Each move costs, the goal pays."""

    def reset(self):
        self.goal = 6 if torch.rand(()) < 0.5 else 0
        self.cell, self.num_moves = 3, 0
        return self._state()

    def _state(self):
        state = torch.zeros(8)
        state[self.cell] = 1.0
        state[7] = 1.0 if self.goal else -1.0
        return state

    def step(self, action):
        self.cell += 1 if action else -1
        self.num_moves += 1
        found = self.cell == self.goal
        done = found or self.cell in (0, 6) or self.num_moves >= 20
        return self._state(), (1.0 if found else -0.1), done


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.affine1 = nn.Linear(8, 32)
        self.affine2 = nn.Linear(32, 2)
        self.saved_log_probs = []
        self.rewards = []

    def forward(self, x):
        return torch.softmax(self.affine2(torch.relu(self.affine1(x))), dim=-1)


def select_action(policy, state):
    m = Categorical(policy(state))
    action = m.sample()
    policy.saved_log_probs.append(m.log_prob(action))
    return action.item()


def finish_episodes(policy, optimizer, gamma):
    returns, R = [], 0.0
    for r, is_last in reversed(policy.rewards):
        R = r if is_last else r + gamma * R
        returns.insert(0, R)
    returns = torch.tensor(returns)
    returns = (returns - returns.mean()) / (returns.std() + 1e-6)
    loss = -(torch.stack(policy.saved_log_probs) * returns).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    policy.rewards.clear()
    policy.saved_log_probs.clear()


def play(policy, env):
    state, done, total = env.reset(), False, 0.0
    while not done:
        state, reward, done = env.step(select_action(policy, state))
        policy.rewards.append((reward, done))
        total += reward
    return total


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--updates", type=int, default=60)
    parser.add_argument("--episodes", type=int, default=6, help="per update")
    parser.add_argument("--gamma", type=float, default=0.95)
    parser.add_argument("--seed", type=int, default=543)
    args = parser.parse_args()

    job = syncline.init()
    syncline.seed_everything(args.seed)
    env, policy = Corridor(), Policy()
    optimizer = DistributedOptimizer(torch.optim.Adam(policy.parameters(), lr=2e-2), model=policy)

    running_reward = 0.0
    for update in job.steps(args.updates):
        for _ in range(args.episodes):
            running_reward = 0.05 * play(policy, env) + 0.95 * running_reward
        finish_episodes(policy, optimizer, args.gamma)
        probe.stepped(job)
        if update % 20 == 0 and job.is_chief:
            print(f"Update {update}\tAverage reward: {running_reward:.2f}")

    job.barrier("trained")
    optimizer.pull()
    syncline.seed_everything(1)
    with torch.no_grad():
        rewards = [play(policy, env) for _ in range(50)]
    probe.result(job, sum(rewards) / len(rewards), policy)


if __name__ == "__main__":
    main()
