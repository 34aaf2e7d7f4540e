"""`sw.hf.Trainer`: transformers' Trainer with an engine in place of its step.

An update's microbatches are kept until the last one, with which `engine.step` takes all rows. The
loop's own clipping and optimizer.step do nothing. checkpoint-N has the weights as save_pretrained
writes them, and `sw.save` in checkpoint-N/shardwise. Everything else is Trainer's own code.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import TrainerCallback, TrainingArguments
from transformers.trainer_utils import EvalPrediction, has_length

from shardwise.checkpoint.engines import load, save
from shardwise.comm.world import World, init
from shardwise.core.errors import bad
from shardwise.core.layouts.tensor_table import Table
from shardwise.core.plan.plan import Plan
from shardwise.core.plan.plan_check import require
from shardwise.engine.engine import Engine
from shardwise.engine.optimizer.optimizer_spec import Optim, OptimizerSpec
from shardwise.engine.parallelize import parallelize, plan_of
from shardwise.engine.state.full import full_state_dict
from shardwise.engine.step_end import Metrics
from shardwise.hf.shares import PADDING, DataRanks, Updated, first_rows, joined, rows_in
from shardwise.hf.training_arguments import completed_plan, require_honoured, require_trainable
from shardwise.models.trainable import without_decay
from shardwise.techniques.pipeline.trace.placeholders import twin

#: The folder of the engine's checkpoint in Trainer's, and the file of the scheduler.
ENGINE: Final = "shardwise"
SCHEDULER: Final = "scheduler.pt"
IGNORED: Final = -100


class Trainer(transformers.Trainer):
    """transformers' Trainer, training under a plan on all ranks that a launcher has started.

    The arguments are those of `transformers.Trainer`, and

    plan      text of plan words, or an sw.Plan: the same on all ranks
    world     the world of sw.init(); None: `sw.init()`
    tokens    tokens(batch), the number of elements in the mean of the loss; None: the labels that
              are not -100, or the rows of a batch without labels
    table     the styles of tensor parallelism; None: those of the model
    stages    the names of the modules that begin each stage of a pipeline except the first

    Raises:
        InputError: the plan, an argument or an overridden method cannot work; nothing was trained.
    """

    accelerator: DataRanks
    model: Any
    lr_scheduler: Any
    callback_handler: Any
    _outputs_only = False

    def __init__(
        self,
        model: nn.Module | None = None,
        args: TrainingArguments | None = None,
        data_collator: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        *,
        plan: Plan | str,
        world: World | None = None,
        tokens: Callable[[Any], float] | None = None,
        table: Table | Mapping[str, str] | None = None,
        stages: Sequence[str] | None = None,
        model_init: Any = None,
        compute_loss_func: Callable[..., Tensor] | None = None,
        compute_metrics: Callable[[EvalPrediction], dict[str, Any]] | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        optimizer_cls_and_kwargs: tuple[type[Optimizer], dict[str, Any]] | None = None,
        preprocess_logits_for_metrics: Callable[..., Tensor] | None = None,
    ) -> None:
        args = TrainingArguments(output_dir="tmp_trainer") if args is None else args
        self.world = world_of(args, world)  # first, since it shows errors as one paragraph
        whole = completed_plan(args, plan_of(plan))
        require_honoured(args, whole)
        require_trainable(type(self), Trainer, whole, model_init, optimizers, compute_metrics)
        require(whole, self.world.size)
        super().__init__(
            model,
            args,
            data_collator,
            train_dataset,
            eval_dataset,
            processing_class,
            compute_loss_func=compute_loss_func,
            compute_metrics=compute_metrics,
            callbacks=callbacks,
            optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics,
        )
        if self.is_deepspeed_enabled or self.is_fsdp_enabled:
            raise bad(
                "a launcher that asks for DeepSpeed or FSDP beside a plan",
                "one of them",
                "torchrun, or `accelerate launch` with a configuration of plain processes",
            )
        self._tokens = tokens
        self._microbatches: list[dict[str, Any]] = []
        self._outputs: Any = None
        self._evaluates = False
        self.metrics: Metrics | None = None
        self.engine = self._parallelized(whole, table, stages)
        self.accelerator.engine = self.engine
        self.optimizer = Updated(self.engine.optimizer)

    def _parallelized(
        self, plan: Plan, table: Table | Mapping[str, str] | None, stages: Sequence[str] | None
    ) -> Engine:
        self._whole = twin(self.model)
        count = getattr(self.model, "num_parameters", lambda **_: 0)
        self._flops_per_token = 6 * count(exclude_embeddings=True)
        return parallelize(
            self.model,
            plan,
            self.world,
            optimizer=self._specification(),
            loss=self._loss,
            tokens=self._count,
            clip=self.args.max_grad_norm or None,
            table=table,
            stages=stages,
        )

    def _specification(self) -> OptimizerSpec:
        kind, options = self.optimizer_cls_and_kwargs or self.get_optimizer_cls_and_kwargs(
            self.args, self.model
        )
        known = {key: value for key, value in options.items() if key != "fused"}
        known["weight_decay"] = decay = self.args.weight_decay
        decayed = {*self.get_decay_parameter_names(self.model)} if decay else set[str]()
        return Optim(kind, groups=without_decay(self.model, decayed) if decay else {}, **known)

    # --- what Trainer asks for before it trains ---------------------------------------------------

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        self._accelerator_args = super()._build_accelerator_args(**kwargs)
        return self._accelerator_args

    def create_accelerator_and_postprocess(self) -> None:
        """Make Trainer's accelerator, and put the one of data ranks in its place."""
        super().create_accelerator_and_postprocess()
        self.accelerator = DataRanks(**self._accelerator_args)
        self.gather_function = self.accelerator.gather_for_metrics

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None: ...

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> Any:
        return model

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        ranks = self.engine.data_ranks
        return self._train_batch_size * args.gradient_accumulation_steps * ranks

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None
    ) -> tuple[nn.Module, Any]:
        """The engine's model and a new scheduler, or those of a checkpoint."""
        if self._created_lr_scheduler:
            self.lr_scheduler, self._created_lr_scheduler = None, False
        self._require_rows(train_dataloader)
        model = self.accelerator.prepare_model(self.model)
        self._microbatches.clear()
        optimizer = self.engine.optimizer
        scheduler = self.create_scheduler(num_training_steps=max_steps, optimizer=optimizer)
        if resume_from_checkpoint is not None:
            folder = Path(resume_from_checkpoint)
            load(self.engine, folder / ENGINE)
            scheduler.load_state_dict(torch.load(folder / SCHEDULER, weights_only=True))
        handler = self.callback_handler
        handler.model, handler.optimizer, handler.lr_scheduler = model, self.optimizer, scheduler
        handler.train_dataloader = train_dataloader
        return model, train_dataloader

    def _require_rows(self, loader: Any) -> None:
        """Raise InputError if the last update of an epoch has too few rows for a pipeline."""
        if not self.engine.staging or not has_length(loader.dataset):
            return
        ranks, rows, least = (
            self.engine.data_ranks,
            self._train_batch_size,
            self.engine.microbatches,
        )
        batch, left = rows * ranks, len(loader.dataset)
        left -= left % batch if self.args.dataloader_drop_last else 0
        batches, over = divmod(left % (batch * self.args.gradient_accumulation_steps), batch)
        shares = {batches * rows + (over + add) // ranks for add in (0, ranks - 1)}
        if any(0 < share < least for share in shares):
            raise bad(
                f"{len(loader.dataset)} rows, of which the last update has {min(shares)}",
                f"a row for each of the {least} microbatches of '{self.engine.plan}'",
                "dataloader_drop_last=True",
            )

    # --- a step -----------------------------------------------------------------------------------

    def get_batch_samples(
        self, epoch_iterator: Any, num_batches: int, device: torch.device
    ) -> tuple[list[Any], None]:
        """The microbatches of an update; the engine counts their tokens."""
        pairs = zip(range(num_batches), epoch_iterator, strict=False)
        return [batch for _, batch in pairs], None

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None
    ) -> Tensor:
        """The loss of an update with its last microbatch, 0 with those before."""
        model.train()
        self._microbatches.append(dict(self._prepare_inputs(inputs)))
        zero = torch.zeros((), device=self.args.device)
        if not self.accelerator.sync_gradients:
            return zero
        batch = joined(self._microbatches, PADDING | {"input_ids": self._pad_id})
        self._microbatches.clear()
        self.metrics = self.engine.step(batch)
        self.accelerator.skipped = self.metrics.skipped
        return zero + self.metrics.loss

    @property
    def _pad_id(self) -> int:
        given = getattr(self.processing_class, "pad_token_id", None)
        given = getattr(self.model.config, "pad_token_id", None) if given is None else given
        return given or 0

    def _clip_grad_norm(self, model: nn.Module) -> None:
        """Do nothing: the engine has clipped."""

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> float | None:
        """The norm before clipping; None without `max_grad_norm`."""
        return self.metrics.grad_norm if self.metrics else None

    def _loss(self, model: nn.Module, part: dict[str, Any]) -> Tensor:
        """The mean over the tokens of a microbatch, by the model's or the user's own loss."""
        inputs, items = dict(part), self._items(part)
        if not self._evaluates:
            loss: Any = self.compute_loss(model, inputs, num_items_in_batch=items)
            return loss
        if self._outputs_only:
            self._outputs = model(**inputs)
            return torch.zeros((), device=self.args.device)
        both: Any = self.compute_loss(model, inputs, return_outputs=True, num_items_in_batch=items)
        loss, self._outputs = both
        return loss

    def _items(self, part: Mapping[str, Any]) -> Tensor | None:
        """`num_items_in_batch`, counted as Trainer does, by which a loss divides its sum."""
        labels = self._labels(part)
        counted = self.model_accepts_loss_kwargs or self.compute_loss_func is not None
        return labels.ne(IGNORED).sum() if labels is not None and counted else None

    def _labels(self, batch: Mapping[str, Any]) -> Tensor | None:
        """The labels in the loss: a causal loss does not predict the first position."""
        if isinstance(batch.get("shift_labels"), Tensor):
            return batch["shift_labels"]
        labels = batch.get("labels")
        if not isinstance(labels, Tensor):
            return None
        return labels[..., 1:] if self._loss_shifts_labels else labels

    def _count(self, batch: Mapping[str, Any]) -> float:
        if self._tokens is not None:
            return self._tokens(batch)
        labels = self._labels(batch)
        return rows_in(batch) if labels is None else int(labels.ne(IGNORED).sum())

    # --- evaluation -------------------------------------------------------------------------------

    def predict(
        self,
        test_dataset: Any,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "test",
    ) -> Any:
        """As Trainer's. Raises InputError under a pipeline, where only a stage has predictions."""
        if self.engine.staging:
            raise bad(
                f"trainer.predict with the plan '{self.engine.plan}'",
                "predictions in plans without a pipeline",
                "trainer.save_model(folder), and a plain model on one process",
            )
        return super().predict(test_dataset, ignore_keys, metric_key_prefix)

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Any, Any, Any]:
        """The loss of the global batch; the outputs and the labels of this rank's rows."""
        batch = dict(self._prepare_inputs(inputs))
        rows = self.accelerator.rows = rows_in(batch)
        names = self.label_names
        has_labels = bool(names) and all(batch.get(name) is not None for name in names)
        self._outputs_only = not has_labels and not (not names and self.can_return_loss)
        self._evaluates = True
        try:
            mean, _ = self.engine.evaluate(batch)
            outputs = self._outputs
        finally:
            self._evaluates, self._outputs = False, None
        loss = None if self._outputs_only else torch.tensor(mean, device=self.args.device)
        if prediction_loss_only:
            return loss, None, None
        labels = tuple(batch.get(name) for name in names) if has_labels else None
        predicted = first_rows(self._predicted(outputs, ignore_keys), rows)
        return loss, _one(predicted), _one(labels)

    def _predicted(self, outputs: Any, ignore_keys: list[str] | None) -> tuple[Any, ...]:
        if not isinstance(outputs, dict):
            outputs = tuple(outputs)
            return outputs if self._outputs_only else outputs[1:]
        default = getattr(self.model.config, "keys_to_ignore_at_inference", ["past_key_values"])
        left_out = {*(default if ignore_keys is None else ignore_keys), "loss"}
        return tuple(value for key, value in outputs.items() if key not in left_out)

    # --- checkpoints ------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the whole model as `save_pretrained` does. Called by all ranks."""
        state = full_state_dict(self.engine)
        model, self.model = self.model, self._whole
        try:
            self._save(output_dir or self.args.output_dir, state_dict=state)
        finally:
            self.model = model
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        save(self.engine, Path(output_dir) / ENGINE)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Check that there is an engine's checkpoint, which is loaded when the loop is ready."""
        if not (Path(resume_from_checkpoint) / ENGINE).is_dir():
            raise bad(
                f"resume_from_checkpoint='{resume_from_checkpoint}', which no plan has written",
                f"a checkpoint of this Trainer, with the folder '{ENGINE}' in it",
                "from_pretrained with that folder, to start from its weights",
            )

    def _load_best_model(self) -> None:
        load(self.engine, Path(self.state.best_model_checkpoint or "") / ENGINE)

    # --- numbers that Trainer sums over processes -------------------------------------------------

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """This process's part of the operations: ranks of one data rank share them."""
        found = inputs.get(getattr(self.model, "main_input_name", "input_ids"))
        tokens = found.numel() if isinstance(found, Tensor) else 0
        return self._flops_per_token * tokens * self.engine.data_ranks // self.world.size


def world_of(args: TrainingArguments, world: World | None) -> World:
    """The world of Trainer's processes. Raises InputError for another number of them."""
    device = args.device  # makes the process group, if a launcher has started this process
    world = init(device.type) if world is None else world
    if world.size != args.world_size:
        without_gpu = device.type == "cpu" and not args.use_cpu
        raise bad(
            f"a world of {world.size} ranks for TrainingArguments of {args.world_size} processes",
            "one process for each rank; without a GPU, transformers needs use_cpu=True",
            "use_cpu=True" if without_gpu else "torchrun --nproc_per_node 2 script.py",
        )
    return world


def _one(values: tuple[Any, ...] | None) -> Any:
    return values[0] if values is not None and len(values) == 1 else values
