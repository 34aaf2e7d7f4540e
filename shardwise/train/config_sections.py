"""The sections of a configuration: their keys, defaults and ranges."""

from typing import Annotated, Any, Final, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    field_validator,
    model_validator,
)

from shardwise.core.errors import bad, expanded
from shardwise.core.tools import arguments
from shardwise.core.tools.arguments import CHECK_EVERY, CheckEvery

CLOSED: Final = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, strict=True)
MOST: Final = 10**9  # of anything that is counted
WARMUP: Final = 50
#: The class of `sw.callbacks` of each tracker.
TRACKERS: Final = {"tensorboard": "TensorBoard", "wandb": "WandB", "mlflow": "MLflow"}

Count = Annotated[int, Field(ge=0, le=MOST)]
Size = Annotated[int, Field(ge=1, le=MOST)]
Beta = Annotated[float, Field(ge=0, lt=1)]
Text = Annotated[str, Field(min_length=1, pattern=r"^[^\x00]*$")]


def _expanded(text: str) -> str:
    """A path, or `hf:` and a path, with `~` and variables replaced."""
    kind, colon, rest = text.partition(":")
    return f"{kind}:{expanded(rest)}" if colon and kind == "hf" else expanded(text)


#: Of a list as a tuple, which TOML has not, or of a single value.
Listed = BeforeValidator(
    lambda given: tuple(given) if isinstance(given, list | tuple) else (given,)
)
PathText = Annotated[Text, AfterValidator(_expanded)]


class ModelSection(BaseModel):
    """The model: by default a GPT of a named size, whose numbers the other keys override.

    Only `sequence` can be set for a model of transformers (`hf:./FOLDER`) and for your own
    (`file.py:build`). With `experts`, each feed-forward layer is a mixture of experts of
    `intermediate_size` features; the keys after it need it.
    """

    model_config = CLOSED

    name: Annotated[str, AfterValidator(_expanded)] = Field(
        default="gpt:quickstart",
        description="a named size, `hf:./FOLDER` (a folder of transformers with its weights), "
        "`hf:ID` (a model of the Hub) or `file.py:build` (your own model)",
    )
    vocabulary: Size | None = Field(
        default=None, description="rows of the embedding; unset: the size of the tokenizer"
    )
    layers: Size | None = Field(default=None, description="blocks")
    hidden_size: Size | None = Field(
        default=None, description="features of the stream between blocks, a multiple of 2 x heads"
    )
    heads: Size | None = Field(
        default=None, description="query heads; if set alone, it sets `kv_heads` too"
    )
    kv_heads: Size | None = Field(
        default=None, description="key and value heads, a divisor of `heads`"
    )
    intermediate_size: Size | None = Field(
        default=None, description="features inside the feed-forward layer, or inside each expert"
    )
    sequence: Size | None = Field(default=None, description="positions of a training sequence")
    tied: bool | None = Field(
        default=None, description="whether the output layer shares the embedding's weight"
    )
    experts: Size | None = Field(
        default=None, description="experts of each layer; unset: a dense model"
    )
    experts_per_token: Size | None = Field(
        default=None, description="experts that a token uses; unset: 2, or as the gate says"
    )
    gate: Text = Field(
        default="topk-renormalised",
        description="`switch`, `gshard`, `topk`, `topk-renormalised`, `topk-softmax-after`, "
        "`noisy-topk`, `sigmoid`, `expert-choice` or `hash`; `switch:1.25` has the capacity "
        "factor 1.25, and drops the tokens beyond it",
    )
    lora_rank: Size | None = Field(
        default=None,
        description="features of the adapters (LoRA by peft) of a model `hf:./FOLDER`, whose own "
        "weights are not trained; unset: none",
    )
    lora_alpha: float | None = Field(
        default=None, gt=0, description="adapters count `lora_alpha / lora_rank`; unset: 2"
    )
    lora_targets: Annotated[tuple[Text, ...], Listed] = Field(
        default=(),
        description="layers with adapters, such as `q_proj`; none: all linear ones but the head",
    )


class DataSection(BaseModel):
    """The text, and how it becomes tokens."""

    model_config = CLOSED

    source: Annotated[tuple[PathText, ...], Listed] = Field(
        default=("stdlib",),
        min_length=1,
        description="one source or a list: `stdlib` (the source of Python's standard library), a "
        "file (`.txt`, `.jsonl`, `.parquet`, `.arrow`), a folder of them, a glob, or "
        "`hf:NAME[:SPLIT]` (a data set of the Hub, or a folder like one)",
    )
    weights: Annotated[tuple[Annotated[float, Field(gt=0)], ...], Listed] = Field(
        default=(),
        description="the shares of the sources in each batch, of any sum; unset: each sequence "
        "once an epoch",
    )
    field: Text = Field(
        default="text",
        description="the field of a row that holds the text; `messages` holds conversations, of "
        "which the tokenizer's chat template makes text, with the loss on answers alone",
    )
    documents: bool = Field(
        default=False,
        description="each document, or conversation, attends to itself alone, and its positions "
        "begin anew; not with a model of a file",
    )
    tokens: PathText = Field(
        default="bytes",
        description="`bytes`, `bpe:SIZE` (trained on the data), or the path of a `tokenizer.json`; "
        "with the model `hf:./FOLDER` the one in that folder, if there is one",
    )
    validation: float = Field(
        default=0.05, gt=0, lt=1, description="the share of the sequences held out"
    )
    validation_source: PathText | None = Field(
        default=None,
        description="a source for validation; unset: `validation` of the sequences are held out",
    )
    cache: PathText | None = Field(
        default=None,
        description="folder of the tokenised data; unset: `tokens` beside the run's folder",
    )


class TrainSection(BaseModel):
    """Steps, batch and optimizer."""

    model_config = CLOSED

    steps: Size = Field(default=1000, description="updates")
    batch: Size = Field(
        default=16, description="sequences of the *global* batch, whatever the number of ranks"
    )
    optimizer: Literal["adamw", "lion", "adafactor", "muon"] = Field(
        default="adamw",
        description="`adamw`, `lion`, `adafactor`, or `muon` (AdamW for what is no matrix)",
    )
    lr: float = Field(default=1e-3, gt=0, description="the highest learning rate, after warmup")
    warmup: Count = Field(
        default=WARMUP, description="steps in which the rate rises; at most `steps`"
    )
    decay: Literal["cosine", "linear", "constant", "wsd"] = Field(
        default="cosine",
        description="`cosine`, `linear`, `constant`, or `wsd` (warmup-stable-decay: constant, then "
        "linear in the last fifth of the steps)",
    )
    min_lr_ratio: float = Field(
        default=0.1, ge=0, le=1, description="the fraction of `lr` at the end of the decay"
    )
    weight_decay: float = Field(
        default=0.1, ge=0, description="the weight decay of matrices; norms and biases have none"
    )
    betas: Annotated[tuple[Beta, Beta], Field(strict=False)] = Field(  # TOML has no tuples
        default=(0.9, 0.95), description="the two betas of AdamW or Lion"
    )
    clip: float = Field(
        default=1.0,
        ge=0,
        description="the largest norm of the gradient; `0` for none, which `pipedream` and `2bw` "
        "require",
    )
    on_nonfinite: Annotated[str, AfterValidator(arguments.on_nonfinite)] = Field(
        default="raise",
        description="if the loss or a gradient of a step is not finite: `raise` ends the run, "
        "`skip` skips the update (not with `pipedream` and `2bw`); `skip:6` also skips one whose "
        "gradient's norm is over 6 deviations above the mean of recent steps",
    )
    init_from: PathText | None = Field(
        default=None,
        description="the folder of a run, or a checkpoint in it, whose weights alone a new run of "
        "the same sizes begins with",
    )
    compile: bool = Field(
        default=False,
        description="compile the repeated blocks with torch.compile (not under `tp`, `cp`, `pp`)",
    )
    record_every: Size = Field(
        default=1,
        description="steps between two records; the host waits for the device and handles "
        "signals in these steps alone",
    )
    seed: int = Field(
        default=0,
        ge=0,
        lt=2**63,
        description="seed of the weights, the order of the data and the gates",
    )
    eval_every: Count = Field(
        default=100, description="steps between evaluations; `0`: only at the end"
    )
    eval_sequences: Size = Field(default=64, description="sequences of an evaluation")
    save_every: Count = Field(
        default=200, description="steps between checkpoints; `0`: only at the end"
    )
    keep: Size = Field(default=2, description="checkpoints to keep, the newest")
    keep_best: bool = Field(
        default=False,
        description="keep the checkpoint with the lowest validation loss too; each save then "
        "follows an evaluation",
    )
    async_save: bool = Field(
        default=False,
        description="write checkpoints beside the next steps, from a copy in host memory; not with "
        "states on a disk",
    )

    @model_validator(mode="before")
    @classmethod
    def _rise(cls, given: Any) -> Any:
        steps = given.get("steps") if isinstance(given, dict) else None
        if isinstance(steps, int) and not isinstance(steps, bool) and 0 < steps < WARMUP:
            return {"warmup": steps, **given}
        return given


class PlanSection(BaseModel):
    """How the model is distributed."""

    model_config = CLOSED

    text: str = Field(default="", description="plan words; ranks that no word uses are data ranks")
    table: PathText | None = Field(
        default=None,
        description="a file of styles of tensor parallelism, as `shardwise table` prints it; "
        "unset: the model's own table, or a derived one",
    )


class RunSection(BaseModel):
    """The folder of results, and the device."""

    model_config = CLOSED

    folder: PathText = Field(
        default="runs/default", description="the folder of all files of the run, seen by all ranks"
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto",
        description="`auto`, `cpu` or `cuda`; `auto` uses GPUs if every rank of the machine can "
        "have one",
    )
    trackers: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] = Field(
        default=("tensorboard",),
        description="what gets the metrics too: `tensorboard`, `wandb`, `mlflow`",
    )
    callbacks: tuple[PathText, ...] = Field(
        default=(), description="callbacks of your own, each `file.py:function`"
    )
    max_hours: float | None = Field(
        default=None,
        gt=0,
        description="hours of steps after which the run saves and ends with exit code 75, for a "
        "batch system that queues it again (`--resume auto`); unset: no limit",
    )
    profile: bool = Field(
        default=False,
        description="record five steps of each rank with torch.profiler: kernels, messages, the "
        "actions of a pipeline and, on CUDA, memory",
    )
    cluster: PathText | None = Field(
        default=None,
        description="the cluster of the run, a file of `shardwise doctor --save` or a preset of "
        "`shardwise predict`: the report has the predicted time of a step beside the measured one",
    )
    check_every: Count | Text = Field(
        default=CHECK_EVERY,
        description="steps between two comparisons of the ranks (batch, loss, gradients, "
        "replicated weights and optimizer states); `0`: in the first step only, and no weights; "
        '`"100 rerun:20"`: in every 20th step another rank also computes a microbatch of each data '
        "rank again",
    )

    @field_validator("check_every", mode="before")
    @classmethod
    def _as_checks(cls, given: Any) -> Any:
        checks = CheckEvery.parse(given)
        if max(checks.ranks, checks.rerun) > MOST:
            raise bad(f"check_every={given}", f"at most {MOST}", f"check_every={CHECK_EVERY}")
        return given

    @field_validator("trackers", "callbacks", mode="before")
    @classmethod
    def _as_tuple(cls, given: Any) -> Any:
        """A list, since TOML has no tuples; or names in one text: "wandb, mlflow"."""
        if isinstance(given, str):
            return tuple(name.strip() for name in given.split(",") if name.strip())
        return tuple(given) if isinstance(given, list) else given


class OffloadSection(BaseModel):
    """Where states rest that leave device and host memory."""

    model_config = CLOSED

    folder: PathText | None = Field(
        default=None,
        description="the folder of states on a disk, required by `offload:optim@disk` and others",
    )
