"""The sections of a configuration: their keys, defaults and ranges."""

from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

CLOSED: Final = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, strict=True)
MOST: Final = 10**9  # of anything that is counted
MOST_SAMPLED: Final = 10**5  # tokens, each a forward pass of the model
WARMUP: Final = 50
#: The class of `sw.callbacks` of each tracker.
TRACKERS: Final = {"tensorboard": "TensorBoard", "wandb": "WandB", "mlflow": "MLflow"}

Count = Annotated[int, Field(ge=0, le=MOST)]
Size = Annotated[int, Field(ge=1, le=MOST)]
Beta = Annotated[float, Field(ge=0, lt=1)]
Text = Annotated[str, Field(min_length=1, pattern=r"^[^\x00]*$")]


class ModelSection(BaseModel):
    """[model]: a named size of the GPT; single sizes given here override it.

    With the name hf:./FOLDER, a model of transformers and its weights, and with file.py:build the
    user's own; of the sizes only `sequence` can then be given.
    With `experts` its feed-forward layers are mixtures of experts of `hidden` features.
    """

    model_config = CLOSED

    name: str = "gpt:quickstart"
    vocabulary: Size | None = None
    layers: Size | None = None
    width: Size | None = None
    heads: Size | None = None
    kv_heads: Size | None = None
    hidden: Size | None = None
    sequence: Size | None = None
    tied: bool | None = None
    experts: Size | None = None
    experts_per_token: Size = 2
    gate: Text = "topk-renormalised"
    capacity: float | None = Field(default=None, ge=1, allow_inf_nan=False)
    shared_experts: Count = 0
    balance: float = Field(default=1e-2, ge=0)
    router_z: float = Field(default=1e-3, ge=0)


class DataSection(BaseModel):
    """[data]: the text and its tokens.

    source      "stdlib" or a path: a file (.txt, .jsonl, .parquet), a folder of them, a glob
    encoding    of .txt and .jsonl; with tokens "bytes" the bytes of a .txt are used unchanged
    tokens      "bytes", "bpe:SIZE" (trained on the data), or the path of a tokenizer.json; with the
                model hf:./FOLDER the tokenizer.json in that folder, if there is one
    validation  the fraction of the sequences held out
    cache       the folder of tokenised data; default: beside the run's folder
    """

    model_config = CLOSED

    source: Text = "stdlib"
    field: Text = "text"
    encoding: Text = "utf-8"
    tokens: Text = "bytes"
    validation: float = Field(default=0.05, gt=0, lt=1)
    cache: Text | None = None


class TrainSection(BaseModel):
    """[train]: steps, batch and optimizer.

    optimizer     with `lr`, `weight_decay` and, but for adafactor, `betas`
    batch         the global batch in sequences, independent of the number of ranks
    warmup        steps; at most `steps`
    final         the fraction of `lr` at the end of the decay
    clip          the largest norm of the gradient; 0: no clipping
    on_nonfinite  what to do with a step whose loss or gradient is not finite
    eval_every    as save_every: steps; 0: only at the end
    keep          the number of checkpoints to keep
    """

    model_config = CLOSED

    steps: Size = 1000
    batch: Size = 16
    optimizer: Literal["adamw", "lion", "adafactor"] = "adamw"
    lr: float = Field(default=1e-3, gt=0)
    warmup: Count = WARMUP
    decay: Literal["cosine", "linear", "constant"] = "cosine"
    final: float = Field(default=0.1, ge=0, le=1)
    weight_decay: float = Field(default=0.1, ge=0)
    betas: Annotated[tuple[Beta, Beta], Field(strict=False)] = (0.9, 0.95)  # TOML has no tuples
    clip: float = Field(default=1.0, ge=0)
    on_nonfinite: Literal["raise", "skip"] = "raise"
    seed: int = Field(default=0, ge=0, lt=2**63)
    eval_every: Count = 100
    eval_sequences: Size = 64
    save_every: Count = 200
    keep: Size = 2

    @model_validator(mode="before")
    @classmethod
    def _rise(cls, given: Any) -> Any:
        """Limit the default warmup to the number of steps."""
        steps = given.get("steps") if isinstance(given, dict) else None
        if isinstance(steps, int) and not isinstance(steps, bool) and 0 < steps < WARMUP:
            return {"warmup": steps, **given}
        return given


class PlanSection(BaseModel):
    """[plan]: `text` in plan words.

    `stages` balances a pipeline's stages by "parameters" or by measured "time", or names the
    modules that begin each stage except the first: "blocks.1, blocks.3". `table` is a file of
    styles of tensor parallelism, as `shardwise table` prints it.
    """

    model_config = CLOSED

    text: str = ""
    table: Text | None = None
    stages: Text = "parameters"

    @field_validator("stages", mode="before")
    @classmethod
    def _join_list(cls, given: Any) -> Any:
        """Accept a list of names too."""
        listed = isinstance(given, list) and all(isinstance(name, str) for name in given)
        return ", ".join(given) if listed else given


class SampleSection(BaseModel):
    """[sample]: the text generated at the end; `tokens = 0` for none, `top_k = 0` for all."""

    model_config = CLOSED

    tokens: Annotated[int, Field(ge=0, le=MOST_SAMPLED)] = 240
    prompt: Annotated[str, Field(min_length=0)] = ""  # the bound makes pydantic check UTF-8
    temperature: float = Field(default=0.8, ge=0)
    top_k: Count = 40


class RunSection(BaseModel):
    """[run]: the folder of results, and the device.

    device       "auto": a GPU if every rank on the machine can have one, else the CPU
    trackers     that get the metrics of each step, of tensorboard, wandb and mlflow
    callbacks    file.py:function, each of which returns a callback (shardwise/callbacks)
    trace        record a pipeline's timeline in a few steps after the first
    check_every  steps between two consistency checks along tensor, pipeline and data axes
    """

    model_config = CLOSED

    folder: Text = "runs/default"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    trackers: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] = ("tensorboard",)
    callbacks: tuple[Text, ...] = ()
    trace: bool = False
    check_every: Count = 100

    @field_validator("trackers", "callbacks", mode="before")
    @classmethod
    def _as_tuple(cls, given: Any) -> Any:
        """Accept a list, which TOML has, and names in one text: "wandb, mlflow"."""
        if isinstance(given, str):
            return tuple(name.strip() for name in given.split(",") if name.strip())
        return tuple(given) if isinstance(given, list) else given


class OffloadSection(BaseModel):
    """[offload]: the folder of states that rest on a disk, under a plan with offload to one."""

    model_config = CLOSED

    folder: Text | None = None
