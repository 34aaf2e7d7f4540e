"""The time of a layer of experts as their number grows, at two experts a token.

    python examples/expert_growth.py            8,192 tokens
    python examples/expert_growth.py 32768

Forward and backward in fp32 with one thread. The numbers of experts take turns, and a ratio is the
median of the ratios within a round.
"""

import statistics
import sys
import time

import torch

import shardwise as sw

WIDTH, HIDDEN, ROUNDS = 256, 512, 7
EXPERTS = (4, 16, 64)


def main() -> None:
    """Print the time of each number of experts, and its ratio to the first."""
    torch.set_num_threads(1)
    tokens = int(sys.argv[1]) if len(sys.argv) > 1 else 8192
    x = torch.randn(tokens, WIDTH, requires_grad=True)
    layers = [sw.MoE(WIDTH, HIDDEN, sw.Gate("topk", experts=count, k=2)) for count in EXPERTS]
    times = [[timed(layer, x) for layer in layers] for _ in range(ROUNDS + 1)][1:]
    for number, count in enumerate(EXPERTS):
        ratio = statistics.median(row[number] / row[0] for row in times)
        step_s = statistics.median(row[number] for row in times)
        print(f"{count:3} experts  {step_s * 1e3:7.1f} ms  {ratio:.2f}")


def timed(layer: sw.MoE, x: torch.Tensor) -> float:
    """The seconds of a forward and a backward pass."""
    layer.zero_grad(set_to_none=True)
    began = time.perf_counter()
    y, _ = layer(x)  # and the routing
    y.square().mean().backward()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
