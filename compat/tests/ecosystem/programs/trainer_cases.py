"""Runs of transformers' Trainer, one function for each, on any number of processes. Each returns what the run shows.

Start it with `python`, `torchrun` or `accelerate launch`, with CASE_FOLDER set and the names of cases as arguments.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch
from models import BATCH, WORLD, Classes, Stream, Tokens, arguments, bert, gpt2, pad, run_cases, summarize, t5, weigh
from transformers import (
    EarlyStoppingCallback,
    GPT2LMHeadModel,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainerCallback,
    get_linear_schedule_with_warmup,
)


def train(folder: str, model: Any = None, data: Any = None, **options: Any) -> Trainer:
    """Return a Trainer that has trained."""
    trainer = Trainer(
        model=model or gpt2(), args=arguments(folder, **options), train_dataset=data or Tokens(40), eval_dataset=Tokens(13, seed=1)
    )
    trainer.train()
    return trainer


def accuracy(prediction: Any) -> dict[str, float]:
    """Return the share of right labels, and how many there were."""
    labels = prediction.label_ids
    return {"accuracy": float((prediction.predictions.argmax(-1) == labels).mean()), "seen": float(labels.size)}


# -- losses against a plain loop ----------------------------------------------------------------------------------------


def plain(folder: str) -> dict[str, Any]:
    """A loop without Trainer and Accelerator: AdamW, linear schedule, clipping; samples in order."""
    model, data, losses, norms = gpt2(), Tokens(40), [], []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)
    schedule = get_linear_schedule_with_warmup(optimizer, 2, 6)
    for step in range(6):
        rows = [data[index % len(data)] for index in range(step * BATCH, (step + 1) * BATCH)]
        batch = pad(rows)
        loss = model(**batch, num_items_in_batch=batch["labels"].numel()).loss  # Trainer counts the first token of a sequence as well
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return {"losses": losses, "norms": norms, "weights": weigh(model)}


def ordered(folder: str) -> dict[str, Any]:
    """The same with Trainer."""
    return summarize(train(folder, train_sampling_strategy="sequential", max_grad_norm=0.5, warmup_steps=2, logging_steps=1))


def accumulated(folder: str) -> dict[str, Any]:
    """The same in two batches for each update."""
    options = {"per_device_train_batch_size": BATCH // WORLD // 2, "gradient_accumulation_steps": 2}
    return summarize(train(folder, train_sampling_strategy="sequential", max_grad_norm=0.5, warmup_steps=2, **options))


def shuffled(folder: str) -> dict[str, Any]:
    """Two epochs in random order, evaluated on a number of samples that does not divide."""
    return summarize(train(folder, max_steps=-1, num_train_epochs=2, eval_strategy="steps", eval_steps=4))


def ragged(folder: str) -> dict[str, Any]:
    """Sequences of different lengths, accumulated: the mean is over tokens, not over batches or processes."""
    trainer = Trainer(
        model=gpt2(), args=arguments(folder, per_device_train_batch_size=BATCH // WORLD // 2, gradient_accumulation_steps=2),
        train_dataset=Tokens(40, ragged=True), eval_dataset=Tokens(13, seed=1, ragged=True), data_collator=pad,
    )  # fmt: skip
    trainer.train()
    return summarize(trainer, evaluated=trainer.evaluate()["eval_loss"])


def tokens_per_device(folder: str) -> dict[str, Any]:
    """The same without the exchange of token counts."""
    trainer = Trainer(
        model=gpt2(), args=arguments(folder, average_tokens_across_devices=False), train_dataset=Tokens(40, ragged=True), data_collator=pad
    )
    trainer.train()
    return summarize(trainer)


def last_window(folder: str) -> dict[str, Any]:
    """An epoch that ends in the middle of an accumulation window, with the norm not clipped."""
    options = {"per_device_train_batch_size": BATCH // WORLD // 4, "gradient_accumulation_steps": 4, "max_grad_norm": 0}
    return summarize(train(folder, data=Tokens(44), max_steps=-1, num_train_epochs=2, **options))


def grouped(folder: str) -> dict[str, Any]:
    """Batches of sequences of similar length."""
    trainer = Trainer(
        model=gpt2(), args=arguments(folder, train_sampling_strategy="group_by_length"), train_dataset=Tokens(40, ragged=True),
        data_collator=pad,
    )  # fmt: skip
    trainer.train()
    return summarize(trainer)


def rebalanced(folder: str) -> dict[str, Any]:
    """Batches balanced over the processes by their tokens: Trainer's own sampler knows the ranks already."""
    trainer = Trainer(
        model=gpt2(), args=arguments(folder, train_sampling_strategy="batch_rebalance"), train_dataset=Tokens(40, ragged=True),
        data_collator=pad,
    )  # fmt: skip
    trainer.train()
    return summarize(trainer)


def smoothed(folder: str) -> dict[str, Any]:
    """Label smoothing."""
    return summarize(train(folder, label_smoothing_factor=0.1))


def half(folder: str) -> dict[str, Any]:
    """bf16."""
    return summarize(train(folder, bf16=True))


def compiled(folder: str) -> dict[str, Any]:
    """torch.compile, through TrainingArguments."""
    trainer = train(folder, torch_compile=True, torch_compile_backend="aot_eager", eval_strategy="steps", eval_steps=3)
    modules = [trainer.model_wrapped, trainer.model]  # compiled in place, or wrapped
    is_compiled = any(type(module).__name__ == "OptimizedModule" or module._compiled_call_impl is not None for module in modules)
    return summarize(trainer, compiled=is_compiled)


def checkpointed(folder: str) -> dict[str, Any]:
    """Gradient checkpointing, with dropout."""
    return summarize(train(folder, model=gpt2(dropout=0.1), gradient_checkpointing=True))


def streamed(folder: str) -> dict[str, Any]:
    """An IterableDataset, in the default way: on several processes the main process reads and hands out."""
    return summarize(train(folder, data=Stream(44), max_steps=8))


def streamed_apart(folder: str) -> dict[str, Any]:
    """An IterableDataset of which every process reads its own part."""
    return summarize(train(folder, data=Stream(44), max_steps=8, accelerator_config={"dispatch_batches": False}))


def dispatched(folder: str) -> dict[str, Any]:
    """The main process reads the batches and hands them out."""
    return summarize(train(folder, accelerator_config={"dispatch_batches": True}))


def split(folder: str) -> dict[str, Any]:
    """One batch for all processes, split between them."""
    return summarize(train(folder, accelerator_config={"split_batches": True}, per_device_train_batch_size=BATCH))


def seeded_sampler(folder: str) -> dict[str, Any]:
    """Without the seedable sampler."""
    return summarize(train(folder, accelerator_config={"use_seedable_sampler": False}, max_steps=8))


def uneven(folder: str) -> dict[str, Any]:
    """even_batches=False: evaluation over samples that do not divide."""
    trainer = Trainer(
        model=bert(), args=arguments(folder, accelerator_config={"even_batches": False}, per_device_eval_batch_size=2),
        train_dataset=Classes(48), eval_dataset=Classes(16, seed=1), compute_metrics=accuracy,
    )  # fmt: skip
    trainer.train()
    return summarize(trainer, final=trainer.evaluate()["eval_seen"])


def workers(folder: str) -> dict[str, Any]:
    """Loaders with worker processes."""
    options = {"dataloader_num_workers": 2, "dataloader_persistent_workers": True, "eval_strategy": "steps", "eval_steps": 3}
    return summarize(train(folder, max_steps=7, **options))


def dropped(folder: str) -> dict[str, Any]:
    """dataloader_drop_last with a number of samples that does not divide."""
    return summarize(train(folder, data=Tokens(43), dataloader_drop_last=True, max_steps=-1, num_train_epochs=2))


def filled(folder: str) -> dict[str, Any]:
    """Without drop_last: the last batch of an epoch is short on one process and filled on several."""
    return summarize(train(folder, data=Tokens(43), max_steps=-1, num_train_epochs=2))


def schedules(folder: str) -> dict[str, Any]:
    """Learning rates of several schedules."""
    rates = {}
    for kind in ("linear", "cosine", "constant_with_warmup", "polynomial", "inverse_sqrt", "cosine_with_min_lr"):
        more = {"lr_scheduler_kwargs": {"min_lr": 0.001}} if kind == "cosine_with_min_lr" else {}
        rates[kind] = summarize(train(f"{folder}/{kind}", lr_scheduler_type=kind, warmup_steps=2, max_steps=5, **more))["rates"]
    plateau = {"lr_scheduler_type": "reduce_lr_on_plateau", "lr_scheduler_kwargs": {"patience": 0, "mode": "max"}}
    trainer = train(f"{folder}/plateau", eval_strategy="steps", eval_steps=1, max_steps=5, metric_for_best_model="eval_loss", **plateau)
    rates["reduce_lr_on_plateau"] = summarize(trainer)["rates"]
    return {"rates": rates}


def counted(folder: str) -> dict[str, Any]:
    """Tokens seen, noise on embeddings, evaluation before the first step."""
    options = {"include_num_input_tokens_seen": "all", "neftune_noise_alpha": 5.0, "eval_on_start": True, "eval_strategy": "steps"}
    trainer = train(folder, eval_steps=3, **options)
    return summarize(trainer, tokens=trainer.state.num_input_tokens_seen)


def own_loss(folder: str) -> dict[str, Any]:
    """A function for the loss, that divides by the tokens of the whole update."""

    def compute(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        logits = outputs.logits[:, :-1].flatten(0, 1)
        total = torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum")
        return total / num_items_in_batch

    options = {"per_device_train_batch_size": BATCH // WORLD // 2, "gradient_accumulation_steps": 2}
    trainer = Trainer(model=gpt2(), args=arguments(folder, **options), train_dataset=Tokens(40), compute_loss_func=compute)
    trainer.train()
    return summarize(trainer)


def own_optimizer(folder: str) -> dict[str, Any]:
    """Optimizer and scheduler made by the script, and trained twice with one Trainer."""
    model = gpt2()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    trainer = Trainer(model=model, args=arguments(folder), train_dataset=Tokens(40), optimizers=(optimizer, schedule))
    trainer.train()
    first = summarize(trainer)
    again = Trainer(model=model, args=arguments(folder), train_dataset=Tokens(40))
    again.train()
    again.train()
    return {**first, "again": summarize(again)}


# -- evaluation -----------------------------------------------------------------------------------------------------


def classify(folder: str) -> dict[str, Any]:
    """BERT with a metric, best model at the end, early stopping."""
    trainer = Trainer(
        model=bert(),
        args=arguments(
            folder, max_steps=40, eval_strategy="steps", eval_steps=2, save_strategy="steps", save_steps=2, load_best_model_at_end=True,
            metric_for_best_model="accuracy", greater_is_better=True, save_total_limit=2, learning_rate=0.02,
        ),
        train_dataset=Classes(64), eval_dataset=Classes(21, seed=1), compute_metrics=accuracy,
        callbacks=[EarlyStoppingCallback(early_stopping_patience=3)],
    )  # fmt: skip
    trainer.train()
    best = os.path.basename(str(trainer.state.best_model_checkpoint))
    kept = sorted(name for name in os.listdir(folder) if name.startswith("checkpoint"))
    return summarize(trainer, best=best, metric=trainer.state.best_metric, kept=kept, final=trainer.evaluate()["eval_accuracy"])


def predict(folder: str) -> dict[str, Any]:
    """Predictions, in order, of samples that do not divide; with and without moving them to the host in between; batch metrics."""
    reports: dict[str, Any] = {}
    data = Classes(21, seed=1)
    for name, options in {"plain": {}, "moved": {"eval_accumulation_steps": 1}, "lists": {"eval_do_concat_batches": False}}.items():
        trainer = Trainer(model=bert(), args=arguments(f"{folder}/{name}", **options))
        output = trainer.predict(data)
        parts = output.predictions if isinstance(output.predictions, list) else [output.predictions]
        labels = output.label_ids if isinstance(output.label_ids, list) else [output.label_ids]
        reports[name] = np.concatenate(parts)[:, 0].tolist()
        reports[name + " labels"] = np.concatenate(labels).tolist() == [int(data[index]["labels"]) for index in range(len(data))]
        reports[name + " loss"] = output.metrics["test_loss"]
    sums = {"right": 0.0, "seen": 0.0}

    def batch_metric(prediction: Any, compute_result: bool = False) -> dict[str, float]:
        sums["right"] += float((prediction.predictions.argmax(-1) == prediction.label_ids).sum())
        sums["seen"] += float(len(prediction.label_ids))
        return dict(sums)

    options = {"batch_eval_metrics": True}
    trainer = Trainer(model=bert(), args=arguments(folder, **options), eval_dataset=data, compute_metrics=batch_metric)
    metrics = trainer.evaluate()
    reports["batch metrics"] = [metrics["eval_right"], metrics["eval_seen"]]
    return reports


def several_sets(folder: str) -> dict[str, Any]:
    """A dictionary of evaluation sets, one smaller than the number of processes."""
    trainer = Trainer(model=bert(), args=arguments(folder), eval_dataset={"large": Classes(21, seed=1), "one": Classes(1, seed=2)})
    metrics = trainer.evaluate()
    return {"large": metrics["eval_large_loss"], "one": metrics["eval_one_loss"]}


def objects(folder: str) -> dict[str, Any]:
    """Predictions gathered as objects, by batches (Trainer itself joins lists of objects by their positions)."""
    data = Classes(21, seed=1)
    trainer = Trainer(model=bert(), args=arguments(folder, eval_use_gather_object=True, eval_do_concat_batches=False))
    labels = trainer.predict(data).label_ids
    found = np.concatenate([np.atleast_1d(part) for batch in labels for part in batch]).tolist()
    return {"count": len(found), "right": found == [int(data[index]["labels"]) for index in range(len(data))]}


def generate(folder: str) -> dict[str, Any]:
    """Seq2SeqTrainer, evaluated by what the model generates; lengths differ between batches. It keeps the samples that fill a batch."""
    trainer = Seq2SeqTrainer(
        model=t5(),
        args=arguments(folder, Seq2SeqTrainingArguments, predict_with_generate=True, generation_max_length=8),
        train_dataset=Tokens(40), eval_dataset=Tokens(16, seed=1, ragged=True), data_collator=pad,
        compute_metrics=lambda given: {"sum": float(given.predictions[given.predictions > 0].sum())},
    )  # fmt: skip
    trainer.train()
    metrics = trainer.evaluate(max_length=8)
    return summarize(trainer, sum=metrics["eval_sum"], generated=trainer.predict(Tokens(5, seed=2)).predictions[:5].tolist())


# -- failures and restarts ------------------------------------------------------------------------------------------------


class OutOfMemory(TrainerCallback):
    """Raises the error of a full device while a batch has more than `limit` samples."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.tried: list[int] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.tried.append(state.train_batch_size)
        if state.train_batch_size > self.limit:
            raise RuntimeError("CUDA out of memory. Tried to allocate")


def find_batch_size(folder: str) -> dict[str, Any]:
    """auto_find_batch_size: halves the batch until it fits."""
    callback = OutOfMemory(limit=4)
    args = arguments(folder, auto_find_batch_size=True, per_device_train_batch_size=16, max_steps=3)
    trainer = Trainer(model=gpt2(), args=args, train_dataset=Tokens(64), callbacks=[callback])
    trainer.train()
    return summarize(trainer, tried=callback.tried)


def resume(folder: str) -> dict[str, Any]:
    """Twelve steps of eight per epoch, with dropout; then again from steps 5 and 10."""
    options: dict[str, Any] = {"max_steps": 12, "save_strategy": "steps", "save_steps": 5}

    def make(place: str) -> Trainer:
        return Trainer(model=gpt2(dropout=0.1), args=arguments(place, **options), train_dataset=Tokens(64), eval_dataset=Tokens(13, seed=1))

    whole = make(folder)
    whole.train()
    report = summarize(whole)
    for step in (5, 10):
        resumed = make(folder + "-again")
        resumed.train(resume_from_checkpoint=f"{folder}/checkpoint-{step}")
        report[f"from {step}"] = summarize(resumed)
    return report


def resume_accumulated(folder: str) -> dict[str, Any]:
    """The same with accumulation, workers and sequences of different lengths."""
    options: dict[str, Any] = {
        "max_steps": 7, "save_strategy": "steps", "save_steps": 2, "gradient_accumulation_steps": 2,
        "per_device_train_batch_size": BATCH // WORLD // 2, "dataloader_num_workers": 1,
    }  # fmt: skip

    def make() -> Trainer:
        data = Tokens(40, ragged=True)
        return Trainer(model=gpt2(dropout=0.1), args=arguments(folder, **options), train_dataset=data, data_collator=pad)

    whole = make()
    whole.train()
    report = summarize(whole)
    resumed = make()
    resumed.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
    report["from 2"] = summarize(resumed)
    return report


def resume_stream(folder: str) -> dict[str, Any]:
    """An IterableDataset, resumed in its first epoch (Trainer does not know where the others begin)."""
    options: dict[str, Any] = {"max_steps": 7, "save_strategy": "steps", "save_steps": 3}

    def make() -> Trainer:
        return Trainer(model=gpt2(), args=arguments(folder, **options), train_dataset=Stream(80))

    whole = make()
    whole.train()
    report = summarize(whole)
    resumed = make()
    resumed.train(resume_from_checkpoint=f"{folder}/checkpoint-3")
    report["from 3"] = summarize(resumed)
    return report


class StopAt(TrainerCallback):
    """Stops a run as a user would, after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            control.should_training_stop = True


def _interruptible(folder: str, **options: Any) -> Trainer:
    chosen: dict[str, Any] = {"max_steps": 12, "save_strategy": "steps", "save_steps": 5, "lr_scheduler_type": "cosine", **options}
    return Trainer(model=gpt2(dropout=0.1), args=arguments(folder, **chosen), train_dataset=Tokens(64))


def stopped(folder: str) -> dict[str, Any]:
    """A run that ends after step 7, with a checkpoint of step 5; `continued` goes on in another process."""
    trainer = _interruptible(os.path.dirname(folder) + "/interrupted")
    trainer.add_callback(StopAt(7))
    trainer.train()
    return summarize(trainer)


def continued(folder: str) -> dict[str, Any]:
    """The rest of `stopped`, found by resume_from_checkpoint=True."""
    trainer = _interruptible(os.path.dirname(folder) + "/interrupted")
    trainer.train(resume_from_checkpoint=True)
    return summarize(trainer)


def undisturbed(folder: str) -> dict[str, Any]:
    """`stopped` and `continued` in one run."""
    trainer = _interruptible(folder)
    trainer.train()
    return summarize(trainer)


# -- sharded ----------------------------------------------------------------------------------------------------------


WRAPPED = {"version": 2, "transformer_layer_cls_to_wrap": ["GPT2Block"]}


def _summarize_kind(trainer: Trainer) -> dict[str, Any]:
    return summarize(trainer, kind=type(next(iter(trainer.model.parameters()))).__name__, enabled=trainer.is_fsdp_enabled)


def sharded(folder: str) -> dict[str, Any]:
    """FSDP through TrainingArguments."""
    return _summarize_kind(train(folder, fsdp=True, fsdp_config=WRAPPED, eval_strategy="steps", eval_steps=3))


def whole(folder: str) -> dict[str, Any]:
    """The same without FSDP in TrainingArguments; the flags of the launcher may ask for it."""
    return _summarize_kind(train(folder, eval_strategy="steps", eval_steps=3))


def sharded_options(folder: str) -> dict[str, Any]:
    """FSDP with further options: losses of each."""
    by_size = {"version": 2, "min_num_params": 100}
    halves = {"per_device_train_batch_size": BATCH // WORLD // 2, "gradient_accumulation_steps": 2}
    report = {}
    for name, fsdp, config, options in (
        ("offloaded", True, {**WRAPPED, "cpu_offload": True}, {}),
        ("recomputed", True, {**WRAPPED, "activation_checkpointing": True}, {}),
        ("kept", True, {**WRAPPED, "reshard_after_forward": False}, {}),
        ("by size", True, by_size, {}),
        ("accumulated", True, WRAPPED, halves),
        ("half", True, WRAPPED, {"bf16": True}),
        ("version 1", "full_shard auto_wrap", {**WRAPPED, "version": 1}, {}),
        ("version 1, gradients", "shard_grad_op auto_wrap", {**WRAPPED, "version": 1}, {}),
    ):
        report[name] = summarize(train(f"{folder}/{name}", fsdp=fsdp, fsdp_config=config, **options))["losses"]
    return report


def sharded_saved(folder: str) -> dict[str, Any]:
    """FSDP, saved with full and with sharded state dicts, and resumed."""
    report: dict[str, Any] = {}
    for kind in ("FULL_STATE_DICT", "SHARDED_STATE_DICT"):
        place = f"{folder}/{kind}"
        options: dict[str, Any] = {"fsdp": True, "fsdp_config": {**WRAPPED, "state_dict_type": kind}, "save_strategy": "steps"}
        report[kind] = summarize(train(place, save_steps=3, **options))
        again = Trainer(model=gpt2(), args=arguments(place, save_steps=3, **options), train_dataset=Tokens(40))
        again.train(resume_from_checkpoint=f"{place}/checkpoint-3")
        report[kind]["from 3"] = summarize(again)
        if kind == "FULL_STATE_DICT":
            again.save_model(place + "/final")
            again.accelerator.wait_for_everyone()
            report[kind]["loaded"] = weigh(GPT2LMHeadModel.from_pretrained(place + "/final"))
    return report


CASES = {
    case.__name__: case
    for case in (
        plain, ordered, accumulated, shuffled, ragged, tokens_per_device, last_window, grouped, rebalanced, smoothed, half, compiled,
        checkpointed, streamed, streamed_apart, dispatched, split, seeded_sampler, uneven, workers, dropped, filled, schedules, counted,
        own_loss, own_optimizer, classify, predict, several_sets, objects, generate, find_batch_size, resume, resume_accumulated,
        resume_stream, undisturbed, stopped, continued, sharded, sharded_options, whole, sharded_saved,
    )
}  # fmt: skip

if __name__ == "__main__":
    run_cases(CASES)
