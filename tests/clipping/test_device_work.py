"""What a GPU would notice and a CPU hides: tensors on another device, operations, waiting.

No GPU is needed. Tensors on the ``meta`` device have no values, so that any operation that makes a
tensor elsewhere shows; operations and reads are counted as they are dispatched.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import models
import pytest
import tiny
import torch
from accelerate.state import AcceleratorState, PartialState
from forms import FORMS, force
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from hf_dp.clipping import ClippingEngine, forms, rounding
from hf_dp.distributed.processes import Processes, add_up_with_noise
from hf_dp.losses import per_example_loss
from hf_dp.noise import SecretRandomness
from hf_dp.run.private_run import PrivateRun
from hf_dp.run.training_data import TrainingData

LENGTH = 8
WIDE = {"hidden_size": 64, "intermediate_size": 256}


def gpt2(layers: int) -> Any:
    sizes = {"n_layer": layers, "n_embd": 64, "n_inner": 256}
    return models.gpt2(0.1, torch.float32, use_cache=False, **sizes)


def gpt2_lora(layers: int) -> Any:
    lora = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["c_attn"], fan_in_fan_out=True)
    return get_peft_model(gpt2(layers), lora)


def llama(layers: int) -> Any:
    return models.llama(dtype=torch.float32, num_hidden_layers=layers, use_cache=False, **WIDE)


def llama_lora(layers: int) -> Any:
    lora = LoraConfig(task_type="CAUSAL_LM", r=8, target_modules="all-linear")
    return get_peft_model(llama(layers), lora)


MODELS: dict[str, Callable[[int], Any]] = {
    "bert": lambda layers: models.bert(0.1, torch.float32, num_hidden_layers=layers, **WIDE),
    "gpt2": gpt2,
    "llama": llama,
    "gpt2_lora": gpt2_lora,
    "llama_lora": llama_lora,
}


def batch(model: nn.Module, device: str, length: int = LENGTH) -> dict[str, Tensor]:
    tokens = torch.randint(4, models.VOCABULARY, (4, length), device=device)
    labels = torch.ones(4, dtype=torch.long, device=device)
    if models.is_language_model(models.base_of(model)):
        labels = tokens.clone()
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": labels}


class Counted(TorchDispatchMode):
    """Counts operations by name, and those that a device would run: no views, no empty memory."""

    FREE = {getattr(torch.ops.aten, name) for name in "empty empty_like empty_strided new_empty detach alias _unsafe_view _reshape_alias".split()}  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self.launched = 0
        self.operations: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations[str(func)] += 1
        self.launched += not func.is_view and func.overloadpacket not in self.FREE
        return func(*args, **(kwargs or {}))

    def reads(self) -> int:
        """Count what needs a value or a shape that only the device knows."""
        waiting = ("_local_scalar_dense", "nonzero", "_unique2", "masked_select", "equal")
        return sum(self.operations[f"aten.{name}.default"] for name in waiting)


class OnMeta(TorchDispatchMode):
    """Notes what is made on another device, and answers reads, which ``meta`` cannot."""

    def __init__(self) -> None:
        super().__init__()
        self.elsewhere: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return args[0].dtype == torch.bool or 1  # all is kept, nothing in doubt
        if func is torch.ops.aten.equal.default:
            return False  # a step has changed the weights
        result = func(*args, **(kwargs or {}))
        for each in tree_flatten(result)[0]:
            # Numbers in expressions become tensors of no dimension; they travel with the launch.
            if isinstance(each, Tensor) and each.device.type != "meta" and each.dim() > 0:
                self.elsewhere.add(f"{func} on {each.device}")
        return result


def counted(model: nn.Module, private: bool, length: int = LENGTH) -> Counted:
    """Count one physical batch that is not the first."""
    inputs = batch(model, "cpu", length)
    if not private:
        with Counted() as counts:
            model(**inputs).loss.backward()
        model.zero_grad()
        return counts
    with ClippingEngine(model, 0.1) as engine:
        engine.backward(per_example_loss(model, inputs))
        with Counted() as counts:
            engine.backward(per_example_loss(model, inputs))
    return counts


def ratio(model: nn.Module, length: int) -> float:
    """How many times the operations of plain training a private physical batch takes."""
    plain, private = counted(model, False, length), counted(model, True, length)
    # Autograd adds to each gradient, too, after the first physical batch; that is not dispatched.
    additions = sum(parameter.requires_grad for parameter in model.parameters())
    return private.launched / (plain.launched + additions)


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """What is small, in numbers."""
    for limits in (forms._LARGEST, forms._SMALL, forms._WAITING, rounding._TOGETHER):
        monkeypatch.setitem(limits, "cpu", limits["cuda"])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["bert", "gpt2", "llama"])
def test_a_physical_batch_takes_few_more_operations(name, form, as_on_a_gpu, monkeypatch):
    """Where norms come from Gram matrices, and where gradients are explicit."""
    force(form, monkeypatch)
    assert ratio(MODELS[name](12).train(), LENGTH) <= 1.25


@pytest.mark.parametrize("length", [LENGTH, 32])
@pytest.mark.parametrize("name", ["gpt2_lora", "llama_lora"])
def test_so_do_adapters_in_the_form_that_is_chosen(name, length, as_on_a_gpu):
    assert ratio(MODELS[name](12).train(), length) <= 1.15


def test_planted_gradients_formed_one_by_one_are_seen(as_on_a_gpu, monkeypatch):
    monkeypatch.setattr(forms.Together, "add", lambda self, p, use, give: give(use.formed()))
    assert ratio(MODELS["bert"](12).train(), LENGTH) > 1.5
    assert ratio(MODELS["llama_lora"](12).train(), LENGTH) > 1.2


@pytest.mark.parametrize("name", MODELS)
def test_a_physical_batch_waits_hardly_more_often(name):
    model = MODELS[name](2).train()
    plain, private = counted(model, False), counted(model, True)
    # One for doubtful norms and examples to leave out; one for the side of the padding, where
    # transformers has just waited for the same mask.
    assert private.reads() <= plain.reads() + 2


def test_a_gpu_handles_the_gradients_of_adapters_together(as_on_a_gpu):
    """Matrices too large to be copied on a CPU, explicit because texts are long."""
    wide = {"hidden_size": 320, "intermediate_size": 640, "max_position_embeddings": 128}
    lora = LoraConfig(task_type="CAUSAL_LM", r=64, target_modules="all-linear")
    base = models.llama(dtype=torch.float32, num_hidden_layers=4, use_cache=False, **wide)
    assert ratio(get_peft_model(base, lora).train(), 128) <= 1.15


@pytest.fixture
def autocast_knows_meta(monkeypatch):
    """Let torch's autocast, which is off here, take the device's name."""
    autocast, is_enabled = torch.autocast, torch.is_autocast_enabled
    monkeypatch.setattr(torch, "autocast", lambda device, **given: autocast("cpu", **given))
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *device: is_enabled("cpu"))


@pytest.mark.parametrize(
    ("name", "strategy"),
    [(name, "book_keeping") for name in MODELS] + [("bert", "two_pass"), ("gpt2", "two_pass")],
)
def test_engine_and_step_stay_on_the_device(name, strategy, autocast_knows_meta):
    with torch.device("meta"):
        model = MODELS[name](1).train()
    inputs = batch(model, "meta")
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(trained.values())
    with OnMeta() as device:
        with ClippingEngine(model, 0.1, strategy=strategy) as engine:
            for _ in range(2):
                engine.backward(per_example_loss(model, inputs))
            sums = engine.collect()
        for name, parameter in trained.items():
            parameter.grad = (sums[name] / 4).to(parameter.dtype)
        optimizer.step()
    assert not device.elsewhere
    assert all(total.device.type == "meta" for total in sums.values())


def test_a_step_of_the_trainer_stays_on_the_device(tmp_path, monkeypatch, autocast_knows_meta):
    """Clipping, noise and what the Trainer gets; looking over rows and checking values need a CPU."""
    made = tiny.trainer(
        tmp_path, max_steps=3, logging_nan_inf_filter=False, save_strategy="no", optim="adamw_torch"
    )
    for shared in (PartialState, AcceleratorState):
        monkeypatch.setitem(shared._shared_state, "device", torch.device("meta"))
    made.args.__dict__["_setup_devices"] = torch.device("meta")
    made.model.to("meta")
    monkeypatch.setattr(SecretRandomness, "_generator_on", lambda self, device: None)
    monkeypatch.setattr(PrivateRun, "check_engine", lambda *_: None)
    monkeypatch.setattr(TrainingData, "check", lambda *_, **__: None)
    device, reading, steps = OnMeta(), OnMeta(), []
    step = made.training_step

    def watched(*given: Any) -> Tensor:
        with device:
            steps.append(step(*given))
        return steps[-1]

    monkeypatch.setattr(made, "training_step", watched)
    with reading:
        made.train()
    assert len(steps) == 3 and not device.elsewhere
    assert all(each.device.type == "meta" for each in (*steps, *made.model.parameters()))


@pytest.mark.parametrize("tensors", [1, 200])
def test_noise_takes_a_few_operations_however_many_tensors(tensors, monkeypatch):
    monkeypatch.setattr(SecretRandomness, "_generator_on", lambda self, device: None)
    sums = [torch.zeros(3, place + 1, device="meta") for place in range(tensors)]
    randomness = SecretRandomness()
    with OnMeta() as device, Counted() as counts:
        add_up_with_noise(sums, lambda like: randomness.gaussian_like(like, 1.0), Processes())
    started = {name: n for name, n in counts.operations.items() if "view" not in name}
    assert sum(started.values()) <= 6, started
    assert started["aten.normal_.default"] == 1
    assert not device.elsewhere


def test_planted_tensor_on_the_processor_is_seen():
    with OnMeta() as device:
        torch.zeros(3, device="meta")
        assert not device.elsewhere
        torch.zeros(3)
    assert device.elsewhere == {"aten.zeros.default on cpu"}
