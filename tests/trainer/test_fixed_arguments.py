"""Once a trainer exists, an argument is read again when it is used, or it cannot change."""

import dataclasses
from contextlib import contextmanager

import pytest
import tiny
import torch
from transformers import TrainingArguments

from hf_dp import DPTrainer
from hf_dp.errors import UnsupportedArgumentError
from hf_dp.run.witnesses import read_run
from hf_dp.statement.evidence import read
from hf_dp.trainer import arguments as arguments_module
from hf_dp.trainer import private as trainer_module
from hf_dp.trainer.arguments import DPTrainingArguments
from hf_dp.trainer.inherited import REFUSED
from hf_dp.trainer.privacy_arguments import plan_of

pytestmark = pytest.mark.usefixtures("unchecked")

# By hand, from what users change between two calls: memory and loading, paths, logs, evaluation,
# saving, the Hub, and flags of scripts.
FREE = set(
    """
    per_device_train_batch_size max_tokens_per_physical_batch auto_physical_batch_size
    auto_physical_batch_length clipping_strategy clipping_memory_ratio dataloader_num_workers
    dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor
    dataloader_multiprocessing_context
    output_dir run_name project trackio_space_id trackio_bucket_id trackio_static_space_id
    logging_strategy logging_steps logging_first_step log_on_each_node log_level log_level_replica
    disable_tqdm
    eval_strategy eval_steps eval_delay per_device_eval_batch_size prediction_loss_only
    eval_on_start eval_do_concat_batches eval_use_gather_object eval_accumulation_steps
    include_for_metrics batch_eval_metrics bf16_full_eval fp16_full_eval metric_for_best_model
    greater_is_better
    save_steps save_total_limit save_only_model restore_callback_states_from_checkpoint
    resume_from_checkpoint push_to_hub hub_token hub_private_repo hub_model_id hub_always_push
    hub_revision ddp_backend ddp_timeout local_rank do_train do_eval do_predict
    """.split()
)


def fields():
    return [field.name for field in dataclasses.fields(DPTrainingArguments)]


def other(value):
    """A value that no field has."""
    return value + 1 if type(value) in (int, float) else object()


def changeable(args):
    """The fields that may be set to something else."""
    found = set()
    for name in fields():
        try:
            setattr(args, name, other(getattr(args, name)))
            found.add(name)
        except UnsupportedArgumentError as error:
            said = str(error)
            found |= set() if said.startswith(f"Expected `{name}` to stay as it was") else {said}
    return found


def test_every_field_is_free_or_fixed_and_what_plan_checks_and_statement_read_is_fixed(
    tmp_path, monkeypatch
):
    assert changeable(tiny.trainer(tmp_path).args) == FREE & set(fields())
    assert read_though_free(tmp_path, monkeypatch) <= {"output_dir"}  # which the run follows


@contextmanager
def reads_noted(monkeypatch):
    """The names of the fields that are read meanwhile."""
    names, read_names = set(fields()), set()
    original = TrainingArguments.__getattribute__

    def noting(self, name):
        if name in names:
            read_names.add(name)
        return original(self, name)

    with monkeypatch.context() as patch:
        patch.setattr(DPTrainingArguments, "__getattribute__", noting, raising=False)
        yield read_names


def read_though_free(tmp_path, monkeypatch):
    """The free fields that plan, statement or a check of one field read."""
    trainer = tiny.trainer(tmp_path)
    options = trainer_module.options_of(trainer.args)  # memory and speed alone
    monkeypatch.setattr(trainer_module, "options_of", lambda args: options)
    with reads_noted(monkeypatch) as noted:
        plan_of(trainer.args, 40, trainer.tuner)
        trainer.privacy_statement()
    assert noted >= {"noise_multiplier", "max_steps", "load_best_model_at_end"}
    return (noted | REFUSED.keys()) & changeable(trainer.args)


@pytest.mark.parametrize("name", ["target_epsilon", "max_steps", "lr_scheduler_type", "fp16"])
def test_planted_free_argument_is_seen(tmp_path, monkeypatch, name):
    monkeypatch.setattr(arguments_module, "OWN_FREE", arguments_module.OWN_FREE | {name})
    assert read_though_free(tmp_path, monkeypatch) - {"output_dir"} == {name}


def test_a_changed_target_is_refused_and_nothing_else_is_written(tmp_path):
    trainer = tiny.trainer(tmp_path, target_epsilon=8.0, accountant="rdp", max_steps=1)
    message = r"`target_epsilon` to stay .* 8.0, got 1.0.*new DPTrainer"
    with pytest.raises(UnsupportedArgumentError, match=message):
        trainer.args.target_epsilon = 1.0
    trainer.train()
    trainer.save_model()
    saved = torch.load(tmp_path / "training_args.bin", weights_only=False)
    assert saved.target_epsilon == 8.0 and read(tmp_path).plan.target_epsilon == 8.0
    saved.target_epsilon = 2.0  # a copy belongs to no trainer


def replaced(trainer):
    trainer.args = dataclasses.replace(trainer.args, noise_multiplier=2.0)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda trainer: trainer.args.release.append("training_loss"), "release"),
        (lambda trainer: trainer.args.padding_values.update(own=1.0), "padding_values"),
        (replaced, "noise_multiplier"),
    ],
)
def test_what_no_assignment_shows_is_refused_before_a_step_and_a_save(tmp_path, change, name):
    trainer = tiny.trainer(tmp_path)
    change(trainer)
    for act in (trainer.train, trainer.save_model):
        with pytest.raises(UnsupportedArgumentError, match=f"`{name}` to stay"):
            act()


def test_the_users_own_arguments_stay_free_and_change_nothing(tmp_path):
    args = tiny.arguments(tmp_path, release=["training_loss"])
    trainer = DPTrainer(tiny.model(), args, train_dataset=tiny.dataset())
    args.noise_multiplier, args.max_steps = 3.0, 9
    args.release.clear()
    plan = trainer.privacy_plan
    assert (plan.noise_multiplier, plan.steps) == (1.0, 4)
    assert trainer.args.release == ["training_loss"] and args.max_steps == 9
    assert DPTrainer(tiny.model(), args, train_dataset=tiny.dataset()).privacy_plan.steps == 9


def test_free_arguments_take_effect(tmp_path):
    trainer = tiny.trainer(tmp_path / "before")
    trainer.args.output_dir = str(tmp_path / "after")
    trainer.args.per_device_train_batch_size = 1
    trainer.args.logging_steps = 4
    trainer.train()
    trainer.save_model()
    assert trainer.run.options.batches.physical_batch_size == 1
    assert len([row for row in trainer.state.log_history if "epsilon" in row]) == 2
    assert read_run(tmp_path / "after").ledger.steps() == 4
    assert not (tmp_path / "before" / "ledger.jsonl").exists()


def test_reading_the_run_changes_nothing(tmp_path):
    trainer = tiny.trainer(tmp_path)
    before = {name: id(value) for name, value in vars(trainer.run).items()}
    trainer.args.per_device_train_batch_size = 1
    trainer.model, trainer.data_collator = tiny.model(), list
    assert {name: id(value) for name, value in vars(trainer.run).items()} == before
    trainer.training.sync()
    assert trainer.run.options.batches.physical_batch_size == 1
    assert (trainer.run.model, trainer.run.data_collator) == (trainer.model, list)


def test_without_privacy_only_the_privacy_arguments_are_fixed(tmp_path):
    trainer = tiny.trainer(tmp_path, privacy_mode="non_private")
    trainer.args.learning_rate, trainer.args.max_steps = 1e-3, 1
    with pytest.raises(UnsupportedArgumentError, match="`target_epsilon` to stay"):
        trainer.args.target_epsilon = 1.0
    trainer.train()
    assert trainer.state.max_steps == 1


def test_a_users_own_fields_are_free(tmp_path):
    @dataclasses.dataclass
    class Mine(DPTrainingArguments):
        temperature: float = 1.0

    options = tiny.arguments(tmp_path).to_dict()
    trainer = DPTrainer(tiny.model(), Mine(**options), train_dataset=tiny.dataset())
    trainer.args.temperature = 2.0
    assert trainer.args.temperature == 2.0
