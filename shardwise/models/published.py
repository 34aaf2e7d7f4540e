"""Models by the sizes that were published: `llama:70b`, `mixtral:8x7b`, `gpt:7b`.

Each is the decoder of gpt.py or moe.py, which has the same layers: RMSNorm, rotary positions,
grouped heads, SwiGLU, no biases. So the number of parameters is the published one, exactly.
Weights are random, and only made if this host has room: the models answer what a plan costs
(`shardwise predict`, `table`).

    gpt:1b         1.1e9 parameters   TinyLlama, arXiv 2401.02385, section 2
    gpt:7b         6.7e9              LLaMA 7B, arXiv 2302.13971, table 2
    llama:8b       8.0e9              Llama 3 8B, arXiv 2407.21783, table 3
    llama:70b     70.6e9              Llama 3 70B, the same
    mixtral:8x7b  46.7e9              Mixtral 8x7B, arXiv 2401.04088, table 1

A row of a batch has as many positions as a sequence of the published training.
"""

from typing import Final

from shardwise.models.gpt import GPTConfig
from shardwise.models.moe import MoEConfig
from shardwise.techniques.expert.gate import Gate

PUBLISHED: Final[dict[str, GPTConfig | MoEConfig]] = {
    "gpt:1b": GPTConfig(32_000, 22, 2048, heads=32, kv_heads=4, hidden=5632, sequence=2048),
    "gpt:7b": GPTConfig(32_000, 32, 4096, heads=32, kv_heads=32, hidden=11_008, sequence=2048),
    "llama:8b": GPTConfig(128_256, 32, 4096, heads=32, kv_heads=8, hidden=14_336, sequence=8192),
    "llama:70b": GPTConfig(128_256, 80, 8192, heads=64, kv_heads=8, hidden=28_672, sequence=8192),
    "mixtral:8x7b": MoEConfig(
        GPTConfig(32_000, 32, 4096, heads=32, kv_heads=8, hidden=14_336, sequence=32_768),
        Gate("topk-renormalised", experts=8, k=2),
    ),
}
