"""A causal language model in a folder of `transformers` as the model of a run, and published sizes.

    config.json          the architecture; its own rates of dropout are kept
    *.safetensors        the weights, read unit by unit where their names are the model's own
    tokenizer.json       the tokens of the run, unless data.tokens names others

Architectures whose weights transformers renames or joins as it loads them (mixtral's experts, for
example) are read by `from_pretrained`, so that each rank holds all weights for a moment.

A published size (`llama:70b`) is the decoder of gpt.py or moe.py, which has the same layers:
RMSNorm, rotary positions, grouped heads, SwiGLU, no biases.  So the number of parameters is the
published one, exactly.  Weights are random, and only made if this host has room: the models answer
what a plan costs (`shardwise predict`, `table`).

    gpt:1b         1.1e9 parameters   TinyLlama, arXiv 2401.02385, section 2
    gpt:7b         6.7e9              LLaMA 7B, arXiv 2302.13971, table 2
    llama:8b       8.0e9              Llama 3 8B, arXiv 2407.21783, table 3
    llama:70b     70.6e9              Llama 3 70B, the same
    mixtral:8x7b  46.7e9              Mixtral 8x7B, arXiv 2401.04088, table 1

A row of a batch has as many positions as a sequence of the published training.
"""

from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from shardwise.checkpoint.weights_folder import open_weights
from shardwise.core.applied import Fill
from shardwise.core.errors import bad
from shardwise.models import hf
from shardwise.models.gpt import GPTConfig
from shardwise.models.moe import MoEConfig
from shardwise.models.trainable import Loss, generator
from shardwise.techniques.expert.gate import Gate

PREFIX: Final = "hf:"
#: Positions of a training sequence, unless the configuration or the model says fewer.
POSITIONS: Final = 1024
EXPERTS: Final = ("num_local_experts", "num_experts", "n_routed_experts")


@dataclass(frozen=True)
class Adapters:
    """LoRA (arXiv 2106.09685): W x + alpha / rank · B A x in the layers `targets`, of which A and B
    are trained; no targets: in each linear layer but that of the logits.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...] = ()

    def beside(self, model: nn.Module, path: Path) -> nn.Module:
        """The model of a folder with adapters, which its own weights do not train beside."""
        try:
            import peft
        except ModuleNotFoundError:
            given = f"model.lora_rank = {self.rank}, and peft is not installed"
            raise bad(given, "adapters with peft, or none", "pip install peft") from None
        config = peft.LoraConfig(
            r=self.rank,
            lora_alpha=self.alpha,  # pyright: ignore[reportArgumentType] (a factor)
            target_modules=list(self.targets) or "all-linear",
            base_model_name_or_path=str(path),
            task_type="CAUSAL_LM",
        )
        try:
            return peft.inject_adapter_in_model(config, model)
        except ValueError as error:
            raise bad(
                f"model.lora_targets = {list(self.targets)} ({error})",
                "names of linear layers, or their ends",
                'model.lora_targets = ["q_proj", "v_proj"]',
            ) from None

    @staticmethod
    def fill(weights: Fill, seed: int, name: str, tensor: Tensor) -> None:
        """A is uniform as a linear layer's weights, B is 0; the rest is `weights`."""
        if ".lora_A." in name:
            draw, bound = torch.empty(tensor.shape), tensor.shape[1] ** -0.5
            tensor.copy_(draw.uniform_(-bound, bound, generator=generator(name, seed)))
        elif ".lora_B." in name:
            tensor.zero_()
        else:
            weights(name.replace(".base_layer.", "."), tensor)


@dataclass(frozen=True)
class FolderConfig:
    """The folder of a model, and its sizes.

    sequence    positions of a training sequence
    parameters  a shared one counts once
    multiplied  parameters in matrix products of one token: no embedding, and of the routed experts
                those that a token uses
    """

    path: Path
    vocabulary: int
    layers: int
    hidden_size: int
    sequence: int
    parameters: int
    multiplied: int
    adapters: Adapters | None = None

    @property
    def loss(self) -> Loss:
        return hf.causal_loss

    @property
    def numbers(self) -> dict[str, Any]:
        """The sizes, without the path, which may be another when a run is resumed."""
        return {k: v for k, v in asdict(self).items() if k not in ("path", "multiplied")}

    def build(self) -> nn.Module:
        """The model, on the current default device if that is meta, else on the CPU."""
        on_meta = torch.get_default_device().type == "meta"
        found = _on_meta(self.path) if on_meta else hf.load(self.path, hf.config_of(self.path))
        return found if self.adapters is None else self.adapters.beside(found, self.path)

    def fill(self, seed: int) -> Fill:
        """Writes a parameter from the folder, for a model on the meta device."""
        weights, model = open_weights(self.path), _on_meta(self.path)
        whole = {name for name, _ in model.named_parameters()} <= {*weights.names}
        found = weights if whole else partial(_copy, self.path)
        return found if self.adapters is None else partial(Adapters.fill, found, seed)

    @property
    def flops_per_token(self) -> int:
        each = 6 if self.adapters is None else 4  # frozen weights have no gradients
        return each * self.multiplied + 12 * self.layers * self.hidden_size * self.sequence


def read(
    path: Path,
    sequence: int | None,
    adapters: Adapters | None = None,
    *,
    weights: bool = True,
) -> FolderConfig:
    """The sizes of the model in a folder; `sequence` None: as many positions as it has, to 1024.
    Raises InputError for another model, missing `weights`, or more positions than it has.
    """
    if weights:
        open_weights(path)
    config = hf.config_of(path)
    if hf.kind_of(config.model_type) is not hf.CAUSAL:
        raise bad(
            f"model.name = '{PREFIX}{path}', a {config.model_type}",
            "a causal language model, which predicts the next token",
            f"a program with sw.parallelize and the loss of the {config.model_type}",
        )
    text = config.get_text_config()
    most = int(getattr(text, "max_position_embeddings", POSITIONS))
    if sequence is not None and sequence > most:
        raise bad(
            f"model.sequence = {sequence} with model.name = '{PREFIX}{path}'",
            f"at most its {most} positions",
            f"model.sequence = {most}",
        )
    with hf.explained(path):
        model = _on_meta(path)
        model = model if adapters is None else adapters.beside(model, path)
        return FolderConfig(
            path,
            text.vocab_size,
            text.num_hidden_layers,
            text.hidden_size,
            sequence or min(most, POSITIONS),
            sum(p.numel() for p in model.parameters()),
            _multiplied(model, text),
            adapters,
        )


def _on_meta(path: Path) -> nn.Module:
    with torch.device("meta"):
        return hf.load(path, hf.config_of(path)).train()


def _multiplied(model: Any, config: Any) -> int:
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    tables -= {id(model.get_output_embeddings().weight)}  # a tied head is a product too
    experts = next((n for name in EXPERTS if (n := getattr(config, name, None))), 1)
    used = getattr(config, "num_experts_per_tok", experts)
    total = 0
    for name, p in model.named_parameters():
        if id(p) not in tables:
            total += p.numel() * used // experts if ".experts." in name else p.numel()
    return total


@cache
def _whole(path: Path) -> dict[str, Tensor]:
    return dict(hf.load(path, hf.config_of(path)).named_parameters())


def _copy(path: Path, name: str, tensor: Tensor) -> None:
    tensor.copy_(_whole(path)[name].detach())


# --- models of published sizes --------------------------------------------------------------------

PUBLISHED: Final[dict[str, GPTConfig | MoEConfig]] = {
    "gpt:1b": GPTConfig(
        32_000, 22, 2048, heads=32, kv_heads=4, intermediate_size=5632, sequence=2048
    ),
    "gpt:7b": GPTConfig(
        32_000, 32, 4096, heads=32, kv_heads=32, intermediate_size=11_008, sequence=2048
    ),
    "llama:8b": GPTConfig(
        128_256, 32, 4096, heads=32, kv_heads=8, intermediate_size=14_336, sequence=8192
    ),
    "llama:70b": GPTConfig(
        128_256, 80, 8192, heads=64, kv_heads=8, intermediate_size=28_672, sequence=8192
    ),
    "mixtral:8x7b": MoEConfig(
        GPTConfig(
            32_000, 32, 4096, heads=32, kv_heads=8, intermediate_size=14_336, sequence=32_768
        ),
        Gate("topk-renormalised", experts=8, k=2),
    ),
}
