"""What hf_dp uses of other libraries beyond their public API: each name with its parameters.

A failure names what is gone or has changed, and so what of ours is to be read again.
"""

import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from accelerate import Accelerator
from peft import mapping
from torch.fx.experimental.proxy_tensor import make_fx
from transformers import T5PreTrainedModel, Trainer
from trl import SFTTrainer

ROOT = Path(__file__).parent.parent
LIBRARIES = ("transformers", "peft", "trl", "accelerate")

# Private methods that our classes override: the parameters of the overridden one.
OVERRIDDEN = {
    "BaseTuner._check_merge_allowed": "self",
    "BaseTuner._check_tied_modules": "self model peft_config",
    "BaseTuner._create_and_replace": "self peft_config adapter_name target target_name parent current_key parameter_name",
    "BaseTuner._get_adapter_state_dict": "model config adapter_name state_dict unwanted_adapter_names",
    "BaseTuner._prepare_adapter_config": "self peft_config model_config",
    "BaseTuner._replace_module": "self parent child_name new_module child",
    "DPOTrainer._prepare_dataset": "self dataset processing_class args dataset_name",
    "LNTuningModel._unload_and_optionally_merge": "self merge progressbar safe_merge adapter_names",
    "RewardTrainer._prepare_dataset": "self dataset processing_class args dataset_name",
    "SFTTrainer._prepare_dataset": "self dataset processing_class args packing formatting_func dataset_name",
    "Trainer._get_grad_norm": "self model grad_norm",
    "Trainer._get_output_dir": "self trial",
    "Trainer._load_best_model": "self",
    "Trainer._init_training_state": "self max_steps num_update_steps_per_epoch num_train_epochs resume_from_checkpoint trial",
    "Trainer._load_from_checkpoint": "self resume_from_checkpoint model",
    "Trainer._load_optimizer_and_scheduler": "self checkpoint",
    "Trainer._prepare_for_training": "self max_steps train_dataloader resume_from_checkpoint",
    "Trainer._prepare_inputs": "self inputs",
    "Trainer._push_from_checkpoint": "self checkpoint_folder",
    "Trainer._run_epoch": "self model epoch train_dataloader steps_in_epoch num_update_steps_per_epoch trial ignore_keys_for_eval start_time resume_from_checkpoint epochs_trained steps_trained_in_current_epoch",
    "Trainer._save": "self output_dir state_dict",
    "Trainer._save_checkpoint": "self model trial",
    "Trainer._set_signature_columns_if_needed": "self",
}
# Private methods of others that ours call.
CALLED: dict[Callable[..., Any], str] = {
    Trainer._get_collator_with_removed_columns: "self data_collator description",
    Trainer._remove_unused_columns: "self dataset description",
    T5PreTrainedModel._shift_right: "self input_ids",
    make_fx: "f decomposition_table tracing_mode _allow_non_fake_inputs pre_dispatch record_module_stack _allow_fake_constant _error_on_data_dependent_ops record_stack_traces proxy_module_inputs _disable_torch_fn_metadata_mode",
}
# Attributes that others set in a method: (where, by which words).
SET = [
    (Trainer.__init__, "self._train_batch_size = "),
    (Trainer.__init__, "self._signature_columns = "),
    (SFTTrainer.__init__, "self._tokenizer = "),
    (SFTTrainer.__init__, "super().__init__("),  # where its preparation ends
    (Accelerator.prepare_model, "model._original_forward = model.forward"),
]


def modules() -> Iterator[Any]:
    for path in sorted((ROOT / "hf_dp").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        yield importlib.import_module(".".join(p for p in parts if p != "__init__"))


def is_ours(each: type) -> bool:
    return each.__module__.startswith("hf_dp.")


def overridden(ours: type) -> Iterator[tuple[str, Callable[..., Any], Callable[..., Any]]]:
    """Yield (name, theirs, ours) of each private method of a library that a class overrides."""
    for place, each in enumerate(ours.__mro__):
        for name in vars(each) if is_ours(each) else ():
            if not re.fullmatch("_[a-z][a-z_]*", name) or not callable(getattr(ours, name)):
                continue
            for base in ours.__mro__[place + 1 :]:
                if name in vars(base) and base.__module__.split(".")[0] in LIBRARIES:
                    theirs = getattr(base, name)
                    yield f"{base.__name__}.{name}", theirs, getattr(each, name)
                    break


def parameters(method: Callable[..., Any]) -> str:
    return " ".join(inspect.signature(method).parameters)


def accepts(ours: Callable[..., Any], theirs: Callable[..., Any]) -> bool:
    """Whether ours has the parameters of theirs by name and place; *args stand for the last."""
    own = inspect.signature(ours).parameters.values()
    names = [each.name for each in own if each.kind is each.POSITIONAL_OR_KEYWORD]
    expected = list(inspect.signature(theirs).parameters)
    rest = any(each.kind is each.VAR_POSITIONAL for each in own)
    return names == (expected[: len(names)] if rest else expected)


def test_overridden_private_methods_are_listed_and_unchanged():
    found, unlike = {}, []
    classes = {
        each
        for module in modules()
        for each in vars(module).values()
        if inspect.isclass(each) and each.__module__ == module.__name__
    }
    for each in classes:
        for name, theirs, ours in overridden(each):
            found[name] = parameters(theirs)
            unlike += [] if accepts(ours, theirs) else [f"{ours.__qualname__} of {name}"]
    assert found == OVERRIDDEN
    assert not unlike


def test_planted_override_is_found():
    class Planted(Trainer):
        def _save(self, folder): ...

    Planted.__module__ = "hf_dp.planted"
    ((name, theirs, ours),) = overridden(Planted)
    assert name == "Trainer._save" and parameters(theirs) == OVERRIDDEN[name]
    assert not accepts(ours, theirs)


@pytest.mark.parametrize("method", CALLED, ids=lambda method: method.__qualname__)
def test_called_private_methods_are_unchanged(method):
    assert parameters(method) == CALLED[method]


@pytest.mark.parametrize(
    ("where", "words"), SET, ids=lambda each: getattr(each, "__qualname__", each)
)
def test_private_attributes_are_set_where_they_were(where, words):
    assert words in inspect.getsource(where)


def test_tables_of_peft_methods_are_dictionaries():
    for table in ("CONFIG", "TUNER", "PREFIX"):
        assert isinstance(getattr(mapping, f"PEFT_TYPE_TO_{table}_MAPPING"), dict)


@pytest.mark.parametrize(
    "name", ["_shift_right", "_original_forward", "PEFT_TYPE_TO_TUNER_MAPPING"]
)
def test_a_private_name_stands_behind_one_module(name):
    whole = re.compile(rf"(?<!\w){name}\b")
    found = {
        str(path.relative_to(ROOT / "hf_dp"))
        for path in (ROOT / "hf_dp").rglob("*.py")
        if whole.search(path.read_text(encoding="utf-8"))
    }
    assert found == {"_borrowed.py"}
