"""Which TrainingArguments a plan refuses.

Trainer's own code reads the other fields, or they are translated into the plan, the optimizer's
specification and the data shares (docs/how-to/trainer.md).
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from transformers import TrainingArguments

from shardwise.core.errors import Problem, bad, refusal
from shardwise.core.plan.plan import Plan

_RECOMPUTE = 'plan="zero3 recompute:full"'
_COMPILE = "a loop of your own with a compiled model and sw.parallelize"
_PRECISION = "a precision of the plan: plan='zero3 bf16' or plan='zero3 fp16'"
_ROWS = 'the word of the plan ("ddp", "zero1" to "zero3") instead of torch\'s wrapper'
_LOADER = "the default, since the plan decides which rows a rank reads"
#: What to write instead of each field that must have its default.
REFUSED: Final = {
    **dict.fromkeys(("fp16", "fp16_full_eval", "bf16_full_eval"), _PRECISION),
    "activation_checkpointing": _RECOMPUTE,
    "activation_checkpointing_kwargs": _RECOMPUTE,
    "gradient_checkpointing": _RECOMPUTE,
    "gradient_checkpointing_kwargs": _RECOMPUTE,
    **dict.fromkeys(("torch_compile", "torch_compile_backend", "torch_compile_mode"), _COMPILE),
    "use_liger_kernel": "the model patched before it is given to Trainer",
    "liger_kernel_config": "the model patched before it is given to Trainer",
    "neftune_noise_alpha": "the noise in the model's own embedding, before Trainer gets the model",
    "optim_target_modules": "optim='adamw_torch'",
    "auto_find_batch_size": "a batch size that fits; `shardwise predict` computes the memory",
    "torch_empty_cache_steps": "PYTORCH_ALLOC_CONF=expandable_segments:True in the environment",
    "eval_use_gather_object": "predictions that are tensors",
    "save_on_each_node": "an output_dir on storage that all hosts share",
    "enable_jit_checkpoint": "save_steps, and resume_from_checkpoint after a restart",
    "accelerator_config": _LOADER,
    "parallelism_config": "the axes of the plan, as plan='dp2 tp2'",
    **dict.fromkeys(("ddp_find_unused_parameters", "ddp_bucket_cap_mb"), _ROWS),
    **dict.fromkeys(("ddp_broadcast_buffers", "ddp_static_graph"), _ROWS),
    **dict.fromkeys(("fsdp", "fsdp_config"), "the plan alone: plan='zero3'"),
    "deepspeed": "the plan that `shardwise plan --from ds_config.json` prints",
    "debug": "the engine's own check, which names the first parameter that is not finite",
}
#: Optimizers of `optim` whose update of an element needs no other element.
OPTIMIZERS: Final = ("adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop")
SAMPLING: Final = ("random", "sequential")


def require_honoured(args: TrainingArguments, plan: Plan) -> None:
    """Raise InputError that lists every argument with which this plan cannot train."""
    default = TrainingArguments(output_dir=args.output_dir or "", use_cpu=args.use_cpu)
    found = [
        Problem(f"{name}={getattr(args, name)!r} with the plan '{plan}'", "its default", instead)
        for name, instead in REFUSED.items()
        if getattr(args, name) != getattr(default, name)
    ]
    for name, values in (("optim", OPTIMIZERS), ("train_sampling_strategy", SAMPLING)):
        value = str(getattr(getattr(args, name), "value", getattr(args, name)))
        if value not in values:
            instead = f"{name}='{values[0]}'"
            given = f"{name}='{value}' with the plan '{plan}'"
            found.append(Problem(given, ", ".join(values), instead))
    if not args.average_tokens_across_devices and args.world_size > 1:
        given = "average_tokens_across_devices=False"
        allowed = "its default: the loss of a plan is the mean over the tokens of all data ranks"
        found.append(Problem(given, allowed, "average_tokens_across_devices=True"))
    if args.n_gpu > 1:
        given = f"one process with {args.n_gpu} GPUs, which Trainer gives to DataParallel"
        instead = f"torchrun --nproc_per_node {args.n_gpu}, or CUDA_VISIBLE_DEVICES=0"
        found.append(Problem(given, "one process for each GPU", instead))
    if args.save_only_model and args.load_best_model_at_end:
        given = "save_only_model with load_best_model_at_end"
        found.append(Problem(given, "whole checkpoints to load from", "save_only_model=False"))
    if found:
        raise refusal("the TrainingArguments", found)


def completed_plan(args: TrainingArguments, plan: Plan) -> Plan:
    """The arguments' `bf16` and `accumulate:N` in the plan; InputError if it has others."""
    if args.bf16 and plan.precision not in (None, "bf16"):
        raise bad(f"bf16=True with the plan '{plan}'", "one precision", "bf16=False")
    if args.bf16:
        plan = replace(plan, precision="bf16")
    steps = args.gradient_accumulation_steps
    if steps > 1 and plan.accumulate > 1:
        raise bad(
            f"gradient_accumulation_steps={steps} with the plan '{plan}'",
            "one of the two",
            f"the plan without accumulate:{plan.accumulate}",
        )
    return replace(plan, accumulate=steps) if steps > 1 else plan


def require_trainable(
    trainer: type,
    base: type,
    plan: Plan,
    model_init: object,
    optimizers: Iterable[object],
    compute_metrics: object,
) -> None:
    """Raise InputError for what a plan cannot do: own optimizers, overridden steps."""
    if model_init is not None:
        raise bad(f"model_init with the plan '{plan}'", "the model itself", "model=model_init()")
    if any(each is not None for each in optimizers):
        raise bad(
            "optimizers=(...), which belong to the parameters before the plan shards them",
            "a class of optimizer and its options; lr_scheduler_type for the schedule",
            "optimizer_cls_and_kwargs=(torch.optim.AdamW, {'lr': 3e-4})",
        )
    own = [name for name in STEPS if getattr(trainer, name) is not getattr(base, name)]
    if own:
        raise bad(
            f"{trainer.__name__}.{own[0]} with the plan '{plan}', whose engine replaces it",
            "your own compute_loss, callbacks and create_scheduler",
            "compute_loss for the loss; a TrainerCallback for what happens around a step",
        )
    if plan.mesh.size_of("pp") > 1 and compute_metrics is not None:
        raise bad(
            f"compute_metrics with the plan '{plan}': only the last stage has predictions",
            "metrics in plans without a pipeline; the evaluation loss in any plan",
            "compute_metrics=None",
        )


#: Methods that the engine replaces.
STEPS: Final = (
    *("training_step", "prediction_step", "create_optimizer", "create_optimizer_and_scheduler"),
    *("_prepare_for_training", "_save_optimizer_and_scheduler", "_wrap_model"),
)
