"""Fine-tuning on conversations, then DPO: a chat template, and adapters of peft (LoRA).

python examples/dpo.py                 under zero3
python examples/dpo.py tp2             under another plan

The template marks what the assistant says ({% generation %}), and only these tokens are targets.
Rows have different numbers of them, so `tokens=` counts them: the loss is the mean over all answers
of the global batch, on any number of ranks. Then the adapters are merged into the model, and new
ones are trained by DPO, whose reference is the model with its adapters off (Rafailov et al., arXiv
2305.18290, equation 7). Each row of a batch is a preference: a chosen and a rejected answer.
"""

import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, logsigmoid

import shardwise as sw

STEPS, POSITIONS, IGNORED, BETA = 6, 12, -100, 0.2
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}> {% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content }} <end>{% endgeneration %}{% else %}{{ m.content }}{% endif %} {% endfor %}"
)
NUMBERS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
WORDS = ["<pad>", "<user>", "<assistant>", "<end>", "after", "before", *NUMBERS]
Batch = dict[str, Tensor]


def tokenizer() -> Any:
    """Words as tokens, with a chat template; yours comes from AutoTokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    known = Tokenizer(models.WordLevel({word: n for n, word in enumerate(WORDS)}))
    known.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    found = PreTrainedTokenizerFast(tokenizer_object=known, chat_template=TEMPLATE)
    found.add_special_tokens({"pad_token": "<pad>"})
    return found


def base() -> Any:
    """A small Llama with random weights."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=2 * len(WORDS),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=POSITIONS,
        initializer_range=0.2,
    )
    return AutoModelForCausalLM.from_config(config)


def adapted(model: nn.Module) -> Any:
    """The model, frozen, with trained adapters of rank 4."""
    from peft import LoraConfig, get_peft_model

    layers = ["q_proj", "v_proj", "up_proj"]
    return get_peft_model(model, LoraConfig(r=4, lora_alpha=16, target_modules=layers))


def batch_of(answers: list[str]) -> Batch:
    """Inputs and targets [rows, POSITIONS] of a conversation for each answer."""
    talks: list[list[dict[str, str]]] = []
    for n, answer in enumerate(answers):
        user = {"role": "user", "content": f"after {NUMBERS[n]}"}
        talks.append([user, {"role": "assistant", "content": answer}])
    made = tokenizer().apply_chat_template(
        talks,
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
        padding="max_length",
        max_length=POSITIONS,
    )
    inputs = torch.tensor(made["input_ids"])
    spoken = torch.tensor(made["assistant_masks"]).bool()
    return {"inputs": inputs, "targets": inputs.masked_fill(~spoken, IGNORED)}


def chosen() -> Batch:
    """Right answers, of one to three words."""
    return batch_of([" ".join(NUMBERS[n + 1 : n + 2 + n % 3]) for n in range(8)])


def rejected() -> Batch:
    """Answers that begin with the question's own number."""
    return batch_of([" ".join(NUMBERS[n : n + 1 + n % 3]) for n in range(8)])


def targets_in(batch: Batch) -> int:
    """How many tokens the loss is the mean of."""
    return int((batch["targets"][:, 1:] != IGNORED).sum())


def tuning_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The mean over the tokens of answers."""
    logits = model(input_ids=batch["inputs"], use_cache=False).logits[:, :-1]
    targets = batch["targets"][:, 1:]
    return cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)


def likelihoods(model: nn.Module, batch: Batch) -> Tensor:
    """The log of the probability of each row's answer [rows]."""
    logits, targets = model(input_ids=batch["inputs"], use_cache=False).logits, batch["targets"]
    at = targets[:, 1:, None]
    found = logits[:, :-1].log_softmax(-1).gather(-1, at.clamp(min=0))
    return found.masked_fill(at == IGNORED, 0).sum((1, 2))


def preference_loss(model: Any, batch: dict[str, Batch]) -> Tensor:
    """The mean over the pairs: how much likelier than to the reference the chosen answer is."""
    parts = batch["chosen"], batch["rejected"]
    both = {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
    good, bad = likelihoods(model, both).chunk(2)
    with torch.no_grad(), model.disable_adapter():
        was_good, was_bad = likelihoods(model, both).chunk(2)
    return -logsigmoid(BETA * ((good - was_good) - (bad - was_bad))).mean()


def share(engine: sw.Engine, batch: Batch) -> Batch:
    """This rank's rows."""
    return {k: t.tensor_split(engine.data_ranks)[engine.data_rank] for k, t in batch.items()}


def train(plan: str) -> list[float]:
    """Tune, then prefer, on all ranks of the world; the loss of each step."""
    world, adamw = sw.init(), sw.AdamW(lr=1e-2)
    options = {"optimizer": adamw, "loss": tuning_loss, "tokens": targets_in}
    tuning = sw.parallelize(adapted(base()), plan, world, **options)
    losses = [tuning.step(share(tuning, chosen())).loss for _ in range(STEPS)]
    tuned = adapted(base())
    if state := sw.full_state_dict(tuning):  # called by all ranks; rank 0 gets it, and sends it
        tuned.load_state_dict(state)
    model = adapted(tuned.merge_and_unload())
    engine = sw.parallelize(model, plan, world, optimizer=adamw, loss=preference_loss)
    mine = {"chosen": share(engine, chosen()), "rejected": share(engine, rejected())}
    losses += [engine.step(mine).loss for _ in range(STEPS)]
    world.close()
    return losses


if __name__ == "__main__":
    plan = sys.argv[1] if len(sys.argv) > 1 else "zero3"
    alone = sw.spawn(train, ranks=1, args=("fp32",))[0]
    ranks = sw.spawn(train, ranks=2, args=(plan,))[0]
    for step, (one, two) in enumerate(zip(alone, ranks, strict=True), start=1):
        what = "tuning" if step <= STEPS else "preference"
        print(f"step {step}, {what}: one process {one:.6f}, two ranks {two:.6f}")
