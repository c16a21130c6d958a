"""A model remembers what trained it, and a statement counts all of that, names it, or is refused."""

import copy
import shutil
from functools import partial
from unittest import mock

import loops
import pytest
import tiny
import torch
import transformers as hf
from peft import LoraConfig, get_peft_model

from hf_dp import mechanism_for
from hf_dp.batches.loader import BatchOptions
from hf_dp.errors import UnsupportedModelError
from hf_dp.run import other_training
from hf_dp.run.options import RunOptions
from hf_dp.run.other_training import RestingWeights
from hf_dp.run.witnesses import read_run
from hf_dp.statement.evidence import disagreements, earlier_runs, read
from hf_dp.trainer.publishing import save_run

pytestmark = pytest.mark.usefixtures("unchecked")

REFUSED = "only counted steps have trained, got one that was trained by "
SHORT = {"max_steps": 1, "logging_strategy": "no"}


def trainer(folder, model, callback=None, **options):
    given = {"model": model, "callbacks": callback and [callback]}
    return tiny.trainer(folder, given=given, **{**SHORT, **options})


def train(folder, model, **options):
    made = tiny.trained(trainer(folder, model, **options))
    made.save_model()
    return made


def refused(folder, model, words="", **options):
    """No step is made of a model, and nothing is claimed of it."""
    with pytest.raises(UnsupportedModelError, match=REFUSED + f"(.|\n)*{words}"):
        train(folder, model, **options)
    assert not list(folder.glob("*.safetensors"))
    assert not (folder / "ledger.jsonl").exists() or not read_run(folder).ledger.steps()


def by_trainer(model, folder, **options):
    args = {"max_steps": 1, "use_cpu": True, "report_to": [], "disable_tqdm": True, **options}
    args = hf.TrainingArguments(
        str(folder / "plain"), save_strategy="no", learning_rate=0.1, **args
    )
    rows, collator = tiny.dataset(), tiny.DataCollatorWithPadding(tiny.tokenizer())
    hf.Trainer(model, args, train_dataset=rows, data_collator=collator).train()
    return model


def by_loop(model, folder, kind=torch.optim.AdamW, **options):
    """A loop that no callback sees."""
    optimizer = kind([p for p in model.parameters() if p.requires_grad], lr=0.1, **options)
    batch = tiny.DataCollatorWithPadding(tiny.tokenizer())(list(tiny.dataset().select(range(4))))
    model(**batch).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return model


def by_us(model, folder, **options):
    return train(folder / "plain", model, privacy_mode="non_private", **options).model


OTHERS = {
    "a plain Trainer": by_trainer,
    "a loop": by_loop,
    "fused steps": lambda *given: by_loop(*given, fused=True),
    "foreach steps": lambda *given: by_loop(*given, foreach=True),
    "plain steps": lambda *given: by_loop(*given, kind=torch.optim.SGD, foreach=False),
    "one layer": lambda m, folder: by_loop(
        m.requires_grad_(False) and m.classifier.requires_grad_() and m, folder
    ),
    "our own baseline": by_us,
    "a copy of our baseline": lambda *given: copy.deepcopy(by_us(*given)),
    "our baseline from its folder": lambda m, folder: _loaded(by_us(m, folder), folder / "plain"),
    "a checkpoint of it, resized": lambda m, folder: _resized(
        _loaded(
            by_us(m, folder, save_strategy="steps", save_steps=1), folder / "plain/checkpoint-1"
        )
    ),
    "a part of it in a new model": lambda m, folder: _with_encoder_of(by_loop(m, folder)),
}


def _loaded(trained, folder):
    """What was saved of it."""
    return hf.BertForSequenceClassification.from_pretrained(folder)


def _resized(model):
    model.resize_token_embeddings(24)
    return model


def _with_encoder_of(trained):
    model = tiny.model(seed=5)
    model.bert = trained.bert
    return model


@pytest.mark.parametrize("other", OTHERS)
def test_training_that_no_ledger_counts_is_refused_or_answered(tmp_path, other):
    """Right before: status "proven", as if the weights had been loaded a moment ago."""
    model = OTHERS[other](tiny.model(), tmp_path)
    refused(tmp_path / "run", model)
    trainer(tmp_path / "run", model, other_training="public_rows").run.other.refuse()


def test_runs_on_the_same_rows_are_counted_or_refused(tmp_path):
    """A loop over budgets with one model object. The ledgers together are what RDP composes."""
    model = tiny.model()
    train(tmp_path / "first", model)
    refused(tmp_path / "second", model, "in '.*first': status 'proven', epsilon .*, 1 releases")
    refused(tmp_path / "copy", copy.deepcopy(model))
    second = train(tmp_path / "second", model, earlier_runs=[str(tmp_path / "first")])
    assert second.ledger.steps() == 2
    again = {"earlier_runs": [str(tmp_path / "second")]}
    assert train(tmp_path / "third", model, **again).ledger.steps() == 3  # the whole chain


def test_what_a_run_released_after_it_was_counted_is_refused(tmp_path):
    """A snapshot of it counts what it had released then, and no weights from later."""
    options = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    first = train(tmp_path / "first", tiny.model(), **options)
    snapshot = shutil.copytree(tmp_path / "first" / "checkpoint-1", tmp_path / "snapshot")
    named = {"earlier_runs": [str(snapshot)]}
    refused(tmp_path / "second", _loaded(None, tmp_path / "first"), "in '.*first'", **named)
    refused(tmp_path / "second", first.model, "in '.*first'", **named)
    counted = train(tmp_path / "counted", _loaded(None, snapshot), **named)
    assert counted.ledger.steps() == 2
    # Through a run that counted the snapshot, too.
    named = {"earlier_runs": [str(tmp_path / "counted")]}
    refused(tmp_path / "third", _loaded(None, tmp_path / "first"), "in '.*first'", **named)
    for model in (_loaded(None, snapshot), counted.model):
        trainer(tmp_path / "third", model, **named).run.other.refuse()
    both = {"earlier_runs": [*named["earlier_runs"], str(tmp_path / "first")]}
    trainer(tmp_path / "third", first.model, **both).run.other.refuse()


def _saved_by_the_model(folder):
    tiny.trained(trainer(folder, tiny.model())).model.save_pretrained(folder)
    return {}


def _of_a_killed_save(folder):
    made = tiny.trained(trainer(folder, tiny.model()))
    killed = mock.patch("hf_dp.run.ledger.put_head", side_effect=KeyboardInterrupt)
    with killed, pytest.raises(KeyboardInterrupt):
        made.save_model()
    return {}


def _of_a_checkpoint_of_a_base(folder):
    train(folder, tiny.model(), save_strategy="steps", save_steps=1)
    tiny.model(seed=3).save_pretrained(folder)
    return {"subfolder": "checkpoint-1"}


def _of_a_folder_in_a_checkpoint(folder):
    made = train(folder, tiny.model(), save_strategy="steps", save_steps=1)
    tiny.model(seed=3).save_pretrained(folder)
    made.model.save_pretrained(folder / "checkpoint-1" / "again")
    return {"subfolder": "checkpoint-1/again"}


UNSAID = [
    _saved_by_the_model, _of_a_killed_save, _of_a_checkpoint_of_a_base, _of_a_folder_in_a_checkpoint
]  # fmt: skip


@pytest.mark.parametrize("make", UNSAID)
def test_weights_without_a_head_or_from_a_subfolder_are_of_the_run_beside_them(tmp_path, make):
    where = make(tmp_path / "first")
    base = hf.BertForSequenceClassification.from_pretrained(tmp_path / "first", **where)
    refused(tmp_path / "second", base, "the private run .* in '.*first")
    named = {"earlier_runs": [str(tmp_path / "first")]}
    trainer(tmp_path / "second", base, **named).run.other.refuse()


@pytest.mark.parametrize("main", [False, True])
def test_weights_of_another_revision_are_seen(tmp_path, monkeypatch, main):
    """The cache of the Hub: main is the base, if it is there, and a branch a private run from it."""
    model = tiny.model()
    model.bert.embeddings.requires_grad_(False)
    model.save_pretrained(tmp_path / "base")
    train(tmp_path / "first", model)
    cache = tmp_path / "hub"
    for revision, folder in {**({"main": "base"} if main else {}), "eps8": "first"}.items():
        commit = revision.encode().hex().ljust(40, "0")
        kept = cache / "models--you--model"
        shutil.copytree(
            tmp_path / folder,
            kept / "snapshots" / commit,
            ignore=shutil.ignore_patterns("_*", "led*"),
        )
        (kept / "refs").mkdir(exist_ok=True)
        (kept / "refs" / revision).write_text(commit)
    monkeypatch.setattr(other_training, "HF_HUB_CACHE", cache)
    load = partial(hf.BertForSequenceClassification.from_pretrained, "you/model", cache_dir=cache)
    refused(tmp_path / "second", load(revision="eps8"), "the private run .* in '.*snapshots")
    if main:  # whose frozen weights the branch has
        trainer(tmp_path / "second", load()).run.other.refuse()


def test_a_run_in_a_folder_of_its_base_says_nothing_of_the_base(tmp_path):
    model = tiny.model()
    model.bert.embeddings.requires_grad_(False)
    model.save_pretrained(tmp_path)
    train(tmp_path / "first", model)
    trainer(tmp_path / "second", _loaded(None, tmp_path)).run.other.refuse()
    refused(tmp_path / "second", _loaded(None, tmp_path / "first"))


def test_the_card_repeats_what_other_rows_there_were(tmp_path):
    """So does a later run that counts this one."""
    answer, words = "other_rows", "others than the training set"
    train(tmp_path / "run", by_loop(tiny.model(), tmp_path), other_training=answer)
    assert words in (tmp_path / "run" / "README.md").read_text()
    record = read(tmp_path / "run")
    assert record.weaknesses.other_training == answer and disagreements(record) == []
    assert earlier_runs(record)[0].other_training == answer
    later = train(tmp_path / "later", tiny.model(), earlier_runs=[str(tmp_path / "run")])
    assert any(words in line for line in later.privacy_statement().not_covered)
    assert later.privacy_statement().facts.other_training is None
    public = trainer(tmp_path / "public", tiny.model(), other_training="public_rows")
    public.run.other.refuse()
    assert any("to be public" in line for line in public.privacy_statement().not_covered)


def test_a_base_or_a_trainer_without_a_step_counts_or_is_refused(tmp_path):
    train(tmp_path / "first", tiny.model())
    base = hf.BertForSequenceClassification.from_pretrained(tmp_path / "first")
    refused(tmp_path / "second", base, "in '.*first': status 'proven'")
    train(tmp_path / "counted", base, earlier_runs=[str(tmp_path / "first")])
    # A statement of 0 for them would be untrue, whatever is named.
    base = hf.BertForSequenceClassification.from_pretrained(tmp_path / "first")
    for model in (base, by_loop(tiny.model(), tmp_path)):
        made = trainer(tmp_path / "third", model, earlier_runs=[str(tmp_path / "first")])
        with pytest.raises(UnsupportedModelError, match=REFUSED):
            made.save_model()
    assert not (tmp_path / "third" / "ledger.jsonl").exists()


# -- what is not refused --


def _from_config(model, folder):
    """Random weights, from the configuration beside weights that were trained without privacy."""
    by_us(model, folder)
    return hf.BertForSequenceClassification(hf.AutoConfig.from_pretrained(folder / "plain"))


def _after_unload(model, folder):
    """The base as it was, without the adapter that was trained."""
    wrapped = get_peft_model(model, LoraConfig(r=2, target_modules=["query"]))
    return by_us(wrapped, folder).unload().requires_grad_(True)


def _unwrapped(change):
    def changed(model, folder):
        change(model)
        return model

    return changed


HARMLESS = {
    "resize": lambda m, folder: _resized(m),
    "cast": lambda m, folder: m.double().float(),
    "wrap": lambda m, folder: get_peft_model(
        m, LoraConfig(r=2, target_modules=["query"], modules_to_save=["classifier"])
    ),
    "freeze": _unwrapped(lambda m: m.bert.requires_grad_(False)),
    "initialize": _unwrapped(lambda m: m.init_weights()),
    "load weights": _unwrapped(lambda m: m.load_state_dict(tiny.model(seed=3).state_dict())),
    "from_config": _from_config,
    "checkpointing": _unwrapped(lambda m: m.gradient_checkpointing_enable()),
    "copy": lambda m, folder: copy.deepcopy(m),
    "another model trained": lambda m, folder: by_loop(tiny.model(), folder) and m,
    "an adapter trained and taken off": _after_unload,
    "a step without gradients": _unwrapped(lambda m: torch.optim.AdamW(m.parameters()).step()),
}


@pytest.mark.parametrize("change", HARMLESS)
def test_what_is_no_training_is_not_refused(tmp_path, change):
    model = HARMLESS[change](tiny.model(), tmp_path)
    trainer(tmp_path / "run", model).run.other.refuse()


@pytest.mark.slow
def test_four_bits_are_not_refused(tmp_path):
    """Nor is their digest lost; under FSDP2 tests/distributed/test_sharded_runs.py saves its runs."""
    pytest.importorskip("bitsandbytes")
    tiny.model().save_pretrained(tmp_path / "base")
    short = {"load_in_4bit": True, "bnb_4bit_compute_dtype": torch.float32}
    four = hf.BitsAndBytesConfig(**short, llm_int8_skip_modules=["classifier"])
    model = hf.BertForSequenceClassification.from_pretrained(
        tmp_path / "base", quantization_config=four, device_map="cpu", dtype=torch.float32
    )
    lora = LoraConfig(r=2, target_modules=["query"], modules_to_save=["classifier"])
    made = train(tmp_path / "run", get_peft_model(model, lora))
    assert made.ledger.steps() == 1 and disagreements(read(tmp_path / "run")) == []
    by_loop(made.model, tmp_path)
    with pytest.raises(UnsupportedModelError, match=REFUSED):
        made.save_model()


def test_going_on_is_not_refused(tmp_path):
    """A second train() of one trainer, and a trainer made again after a kill, with its model."""
    model = tiny.model()
    options = {"save_strategy": "steps", "save_steps": 1}
    train(tmp_path, model, **options).train()
    again = tiny.resumed(trainer(tmp_path, model, **options, max_steps=2), 1)
    assert again.ledger.steps() == 3
    options |= {"earlier_runs": [str(tmp_path)]}
    over = train(tmp_path / "second", model, **options)  # counts what it left behind
    assert over.ledger.steps() == 4


def test_model_init_makes_a_new_model_for_each_train(tmp_path):
    given = {"model": None, "model_init": lambda: tiny.model()}
    made = tiny.trained(tiny.trainer(tmp_path, given=given, **SHORT))
    made.train()
    made.save_model()


def test_a_folder_with_a_trainers_files_is_warned_of(tmp_path, warnings_of):
    folder = tmp_path / "plain"
    by_trainer(tiny.model(), tmp_path).save_pretrained(folder)
    torch.save({}, folder / "training_args.bin")
    said = warnings_of("run.other_training")
    base = hf.BertForSequenceClassification.from_pretrained(folder)
    train(tmp_path / "run", base)
    assert sum("where a Trainer left its files" in text for text in said) == 1


# -- between the steps, and after them --


class Between(hf.TrainerCallback):
    """Does something to the model at a point of the loop."""

    def __init__(self, act, when="on_step_end"):
        self._act, self._left = act, 1
        setattr(self, when, self._once)

    def _once(self, args, state, control, model=None, **kwargs):
        if self._left:
            self._left = 0
            self._act(model, kwargs["optimizer"])


def _again(model, optimizer):
    """A step of the run's own optimizer, by a gradient that nobody clipped or noised."""
    batch = tiny.DataCollatorWithPadding(tiny.tokenizer())(list(tiny.dataset().select(range(4))))
    model(**batch).loss.backward()
    optimizer.step()


BETWEEN = {
    "another optimizer": Between(lambda m, optimizer: by_loop(m, None)),
    "its own once more": Between(_again),
    "before its step": Between(lambda m, o: by_loop(m, None), "on_pre_optimizer_step"),
    "after its step": Between(lambda m, o: by_loop(m, None), "on_optimizer_step"),
    "after the last": Between(lambda m, o: by_loop(m, None), "on_train_end"),
}


@pytest.mark.parametrize("when", BETWEEN)
def test_steps_of_others_between_private_steps_are_not_saved_as_proven(tmp_path, when):
    with pytest.raises(UnsupportedModelError, match=REFUSED):
        train(tmp_path, tiny.model(), callback=copy.deepcopy(BETWEEN[when]), max_steps=2)
    assert not list(tmp_path.glob("*.safetensors"))


@pytest.mark.parametrize("gradient", [0.0, 1.0])
def test_a_step_at_rate_0_counts_unless_its_gradients_are_zeros(gradient):
    """The state of an optimizer keeps gradients; torch makes it by such a step on zeros."""
    model = torch.nn.Linear(2, 2)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, gradient)
    torch.optim.AdamW(model.parameters(), lr=0.0).step()
    assert len(list(other_training.trained_in_memory(model))) == bool(gradient)


class Wrapping(torch.optim.Optimizer):
    """An optimizer of an optimizer, as Lookahead and ZeroRedundancyOptimizer are; ``act`` is what
    else it does in a step."""

    def __init__(self, inner, act=lambda: None):
        super().__init__(inner.param_groups, dict(inner.defaults))
        self.inner, self.act = inner, act
        self.param_groups = inner.param_groups

    def step(self, closure=None):
        self.inner.step()
        self.act()


def test_a_step_of_an_optimizer_around_another_is_one_step(tmp_path):
    """Right before: the first step was paid for, and then refused."""
    model = tiny.model()
    optimizer = Wrapping(Wrapping(torch.optim.SGD(model.parameters(), lr=0.1)))
    given = {"model": model, "optimizers": (optimizer, None)}
    made = tiny.trained(tiny.trainer(tmp_path, given=given, **{**SHORT, "max_steps": 2}))
    made.save_model()
    assert made.ledger.steps() == 2


def test_no_payment_is_for_two_steps_of_optimizers_in_each_other():
    """Nor is that of a step that failed for a later one."""

    def unpaid(act=None, steps=1):
        model = torch.nn.Linear(2, 2)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        outer = Wrapping(inner, lambda: act and act(model, inner))
        other_training.pay_for_step(model)
        for _ in range(steps):
            try:
                outer.step()
            except KeyboardInterrupt:
                inner.step()
        return bool(list(other_training.trained_in_memory(model)))

    def fail(model, inner):
        raise KeyboardInterrupt

    def renew(model, inner):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)

    assert not unpaid()
    assert unpaid(steps=2)
    assert unpaid(lambda model, inner: inner.step())
    assert unpaid(lambda model, inner: torch.optim.SGD(model.parameters(), lr=0.1).step())
    assert unpaid(fail)
    # Nor for one by a gradient that was computed anew, as by sharpness-aware minimization.
    assert unpaid(renew)


CHANGES = {
    "one number": lambda m: m.classifier.bias[0].add_(1e-6),
    "two numbers swapped": lambda m: m.classifier.weight.copy_(m.classifier.weight.flip(1)),
    "other weights": lambda m: m.load_state_dict(tiny.model(seed=3).state_dict()),
    "a frozen weight": lambda m: m.bert.embeddings.word_embeddings.weight.mul_(1.001),
}


@torch.no_grad()
def test_weights_that_changed_after_the_run_are_not_saved_as_proven(tmp_path):
    model = tiny.model()
    model.bert.embeddings.requires_grad_(False)
    made = trainer(tmp_path, model)
    with torch.enable_grad():
        made.train()
    ended = copy.deepcopy(model.state_dict())
    for change in CHANGES.values():
        change(model)
        for act in (made.save_model, made.train):
            with pytest.raises(UnsupportedModelError, match="something else since the last step"):
                act()
        model.load_state_dict(ended)
    made.model = tiny.model(seed=4)
    with pytest.raises(UnsupportedModelError, match="something else since the last step"):
        made.save_model()
    assert not list(tmp_path.glob("*.safetensors")) and made.ledger.steps() == 1

    # What changes no value, or adds some, is no training.
    made.model = model
    for cast in (lambda m: m.bfloat16(), lambda m: m.half(), lambda m: m.bfloat16().float()):
        cast(model)
        made.save_model()
        model.float().load_state_dict(ended)
    _resized(model)
    made.save_model()


def test_digests_tell_any_change_of_one_number_and_planted_sums_alone_are_seen(monkeypatch):
    """Against a comparison number by number, over several chunks."""
    layer = torch.nn.Linear(3, other_training._CHUNK)
    known = RestingWeights()
    known.note(layer)
    assert known.changed(layer) is None
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for _ in range(5):
            place = int(torch.randint(layer.weight.numel(), (), generator=generator))
            number = layer.weight.view(-1)[place]
            before = number.clone()
            number.copy_(torch.nextafter(before, torch.tensor(9.0)))
            assert known.changed(layer) == "weight"
            number.copy_(before)
            assert known.changed(layer) is None
    ends = [0, other_training._CHUNK - 1]
    layer.weight.data[ends] = layer.weight.data[ends[::-1]].clone()
    assert known.changed(layer) == "weight"
    # Which two numbers that changed places would not change.
    ones = torch.ones(other_training._CHUNK, dtype=torch.int32)
    monkeypatch.setattr(other_training, "_factors", lambda device: ones)
    layer, known = torch.nn.Linear(4, 2), RestingWeights()
    known.note(layer)
    layer.weight.data = layer.weight.data.flip(1)
    assert known.changed(layer) is None


def test_a_loop_of_ones_own_is_watched_too(tmp_path):
    def run(name, model, **options):
        options = RunOptions(**options, batches=BatchOptions(4, quiet=True))
        mechanism = mechanism_for(loops.run(tmp_path / name, model=model, options=options))
        halves = [[*model.bert.parameters()], [*model.classifier.parameters()]]
        optimizers = [torch.optim.SGD(half, lr=0.1) for half in halves]
        for _ in loops.steps(mechanism):
            for optimizer in optimizers:
                optimizer.step()
        return mechanism

    model = tiny.model()
    first = run("first", model)
    assert save_run(first).status == "proven"
    with pytest.raises(UnsupportedModelError, match=f"{REFUSED}the private run"):
        run("second", model)
    third = save_run(run("third", model, other_training="other_rows"))
    assert any("states to be others" in line for line in third.not_covered)
    with pytest.raises(UnsupportedModelError, match=REFUSED):
        save_run(first)


# -- planted --


def test_planted_optimizers_that_are_not_watched_are_seen(tmp_path, monkeypatch):
    model = by_loop(tiny.model(), tmp_path)
    monkeypatch.setattr(other_training, "_unpaid", {})
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        refused(tmp_path / "run", model)


def test_planted_notes_that_a_copy_loses_are_seen(tmp_path, monkeypatch):
    model = train(tmp_path / "first", tiny.model()).model
    for module in model.modules():
        vars(module).pop(other_training._NOTE, None)
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        refused(tmp_path / "second", copy.deepcopy(model))
