"""GRPO: the model generates answers between its steps, and is trained on their rewards.

python examples/grpo.py                under zero3
python examples/grpo.py ddp            under another plan

Each prompt gets several answers; an answer's advantage is its reward less the mean of its group,
over the group's deviation (Shao et al., arXiv 2402.03300, section 4.1). Under `zero3` all ranks
take part in each pass of `generate()`, whatever the length of their own answers.
"""

import sys
from typing import Any

import torch
from torch import Tensor, nn

import shardwise as sw

ROUNDS, UPDATES, PROMPTS, GROUP, PROMPT, NEW, WORDS = 6, 2, 4, 4, 3, 6, 16


def build() -> Any:
    """A small Llama with random weights."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=PROMPT + NEW,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    return AutoModelForCausalLM.from_config(config)


def likelihoods(model: nn.Module, tokens: Tensor) -> Tensor:
    """The log of the probability of each token of the answers [rows, NEW]."""
    logits = model(input_ids=tokens, use_cache=False).logits[:, PROMPT - 1 : -1]
    return logits.log_softmax(-1).gather(-1, tokens[:, PROMPT:, None]).squeeze(-1)


def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The clipped objective: the mean over the tokens of all answers."""
    ratio = (likelihoods(model, batch["tokens"]) - batch["before"]).exp()
    gained = batch["advantages"][:, None]
    return -torch.minimum(ratio * gained, ratio.clamp(0.8, 1.2) * gained).mean()


@torch.no_grad()
def answers(model: Any, step: int, prompts: range) -> dict[str, Tensor]:
    """GROUP answers to each of these prompts, with the likelihoods and the advantages of each."""
    model.eval()
    tokens: list[Tensor] = []
    for number in prompts:
        torch.manual_seed(1000 * step + number)  # the same answers on any number of ranks
        start = (torch.arange(PROMPT) + number)[None] % WORDS
        same = {"max_new_tokens": NEW, "do_sample": True, "num_return_sequences": GROUP}
        tokens.append(model.generate(start, attention_mask=torch.ones_like(start), **same))
    model.train()
    found = torch.cat(tokens)
    rewards = (found[:, PROMPT:] < WORDS // 2).float().mean(1)  # small numbers are good
    group = rewards.view(-1, GROUP)
    advantages = (group - group.mean(1, keepdim=True)) / (group.std(1, keepdim=True) + 1e-4)
    own = {"advantages": advantages.flatten(), "rewards": rewards}
    return {"tokens": found, "before": likelihoods(model, found), **own}


def train(plan: str) -> list[float]:
    """Generate and train on all ranks of the world; one minus the mean reward of each round."""
    world = sw.init()
    engine = sw.parallelize(build(), plan, world, optimizer=sw.AdamW(lr=1e-2), loss=loss_fn)
    each = PROMPTS // engine.data_ranks
    mine = range(each * engine.data_rank, each * (engine.data_rank + 1))
    missed: list[float] = []
    for step in range(ROUNDS):
        batch = answers(engine.model, step, mine)
        missed.append(1 - float(engine.gather(batch["rewards"]).mean()))
        for _ in range(UPDATES):
            engine.step(batch)
    world.close()
    return missed


if __name__ == "__main__":
    plan = sys.argv[1] if len(sys.argv) > 1 else "zero3"
    alone = sw.spawn(train, ranks=1, args=("fp32",))[0]
    ranks = sw.spawn(train, ranks=2, args=(plan,))[0]
    for step, (one, two) in enumerate(zip(alone, ranks, strict=True), start=1):
        print(f"round {step}, reward missed: one process {one:.6f}, two ranks {two:.6f}")
