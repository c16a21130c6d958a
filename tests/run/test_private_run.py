"""A private run without a Trainer: a plain PyTorch loop and an Accelerate loop."""

import datasets
import pytest
import tiny
import torch
from accelerate import Accelerator
from loops import plan, run, steps
from peft import LoraConfig, get_peft_model
from watch import watch

from hf_dp import DpSgdPlan, FrozenPlan, PrivateRun, mechanism_for, save_run
from hf_dp.cards.verify import verify
from hf_dp.errors import (
    BudgetExceededError,
    DataError,
    InvalidArgumentError,
    LedgerError,
    SelfCheckError,
    UnsupportedArgumentError,
    UnsupportedModelError,
)
from hf_dp.losses import per_example_loss
from hf_dp.noise import SecretRandomness
from hf_dp.plans import Search
from hf_dp.publishing.publication import Publication
from hf_dp.run.ledger import RunLedger
from hf_dp.statement.evidence import disagreements, read
from hf_dp.trainer import publishing
from hf_dp.tuners.base import Tuner
from hf_dp.tuners.frost.tuner import FrostConfig


def loop(private: PrivateRun, optimizer: torch.optim.Optimizer) -> int:
    mechanism, count = mechanism_for(private), 0
    for _ in steps(mechanism):
        optimizer.step()
        count += 1
    save_run(mechanism)
    return count


def test_a_plain_loop(tmp_path):
    private = run(tmp_path)
    before = [p.detach().clone() for p in private.model.parameters()]
    assert loop(private, torch.optim.AdamW(private.model.parameters(), lr=1e-2)) == 4
    pairs = zip(before, private.model.parameters(), strict=True)
    assert not any(torch.equal(*pair) for pair in pairs)
    record = read(tmp_path)
    assert record.status == "proven" and record.ledger.steps("training") == 4
    assert disagreements(record) == []
    spent = record.ledger.epsilon(record.plan.delta, record.plan.accountant)
    assert private.epsilon().value == pytest.approx(spent.value)


def test_an_accelerate_loop(tmp_path):
    accelerator = Accelerator(cpu=True)
    model = tiny.model()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    private = run(tmp_path, model=model, accelerator=accelerator)
    assert loop(private, optimizer) == 4
    assert read(tmp_path).status == "proven"


@pytest.mark.usefixtures("without_noise")
def test_the_trainer_and_the_loop_make_the_same_weights(tmp_path):
    """With all examples in each step: DPTrainer is seams over the same lines."""
    plain = {"optim": "sgd", "lr_scheduler_type": "constant", "accountant": "rdp"}
    trainer = tiny.trained(tiny.trainer(tmp_path / "trainer", expected_batch_size=40, **plain))
    private = run(tmp_path / "loop", trainer.privacy_plan)
    loop(private, torch.optim.SGD(private.model.parameters(), lr=1e-2))
    for name, value in trainer.model.state_dict().items():
        torch.testing.assert_close(private.model.state_dict()[name], value, rtol=1e-5, atol=1e-7)


def test_it_stops_before_the_target_is_passed(tmp_path):
    planned = plan(mechanism=DpSgdPlan(clipping_norm=0.1), target_epsilon=1.0, max_steps=3)
    private = run(tmp_path, planned)
    assert loop(private, torch.optim.SGD(private.model.parameters(), lr=0.1)) == 3
    assert private.epsilon().value <= 1.0
    again = run(tmp_path / "second", planned, earlier_runs=[str(tmp_path)])
    with pytest.raises(BudgetExceededError, match="target_epsilon"):
        loop(again, torch.optim.SGD(again.model.parameters(), lr=0.1))


def test_no_gradient_without_a_release(tmp_path):
    """There is no way to ``p.grad`` but through what the gate gives."""
    private = run(tmp_path)
    mechanism = mechanism_for(private)
    for batches in mechanism.logical_batches():
        clipped = mechanism.clip(batches)
        assert all(p.grad is None for p in private.model.parameters())
        with private.release_step() as release:
            pass
        with pytest.raises(LedgerError, match="closed"):
            mechanism.set_gradients(clipped, release)
        break
    assert private.ledger.steps() == 1


def test_autocast_within_a_step_is_refused(tmp_path):
    """The draws were checked and cut for float32, which the card would state."""
    mechanism = mechanism_for(run(tmp_path))
    for batches in mechanism.logical_batches():
        with pytest.raises(UnsupportedArgumentError, match="`torch.autocast` to be None as when"):
            with torch.autocast("cpu", torch.bfloat16):
                mechanism.clip(batches)
        break
    private = run(tmp_path / "around")
    with torch.autocast("cpu", torch.bfloat16):
        loop(private, torch.optim.SGD(private.model.parameters(), lr=0.1))
    assert "bfloat16 autocast" in private.facts("all").precision


def test_weights_that_change_after_a_loop_was_left_are_refused(tmp_path):
    mechanism = mechanism_for(run(tmp_path))
    for _ in mechanism.logical_batches():
        break
    with torch.no_grad():
        next(mechanism.run.model.parameters()).add_(1)
    with pytest.raises(UnsupportedModelError, match="since the last step"):
        save_run(mechanism)


def test_bad_input_is_refused_before_the_first_step(tmp_path):
    with pytest.raises(DataError, match="40"):
        loop(run(tmp_path / "a", train_dataset=tiny.dataset(30)), None)

    def coupled(model, batch):
        losses = per_example_loss(model, batch)
        return losses - losses.mean() / 2

    with pytest.raises(SelfCheckError):
        loop(run(tmp_path / "b", compute_per_example_loss=coupled), None)
    private = run(tmp_path / "c")
    with pytest.raises(UnsupportedArgumentError, match="evaluation set"):
        private.check_evaluation(private.train_dataset.select(range(5)))
    assert not (tmp_path / "a" / "ledger.jsonl").exists()


def test_a_loop_refuses_a_selection_that_another_run_made(tmp_path):
    names = ["bert.pooler.dense.weight"]
    made = [{"parameters": names, "magnitudes_without_noise": []}]
    named = FrostConfig(task_type="SEQ_CLS", parameters=names, made=made)
    private = run(tmp_path, model=get_peft_model(tiny.model(), named))
    with pytest.raises(UnsupportedModelError, match="adapter 'default' .* this run did not make"):
        loop(private, None)
    assert not list(tmp_path.iterdir())


def test_a_loop_in_a_private_search_evaluates_on_no_training_row(tmp_path):
    of_a_search = plan(mechanism=DpSgdPlan(0.1, 1.0, search=Search(5)))
    own = tiny.evaluation_set().rename_column("label", "labels")
    equal = tiny.dataset().rename_column("label", "labels")[3]
    one_equal = datasets.Dataset.from_list([*own.to_list(), equal])
    only_labels = own.select_columns(["labels"])
    released = ["evaluation_on_training_rows"]
    for number, given in enumerate(({}, {"released": released})):
        search = run(tmp_path / f"search{number}", of_a_search, **given)
        search.check_evaluation(own)
        with pytest.raises(UnsupportedArgumentError, match="holds rows equal to training rows"):
            search.check_evaluation({"far": one_equal})
        with pytest.raises(UnsupportedArgumentError, match="cannot be compared"):
            search.check_evaluation(only_labels)
    alone = run(tmp_path / "alone")
    alone.check_evaluation(one_equal)
    assert alone.book.weaknesses.evaluation_compared
    alone.check_evaluation(only_labels)
    assert not alone.book.weaknesses.evaluation_compared


def test_two_loops_cannot_share_a_folder(tmp_path):
    first = run(tmp_path)
    loop(first, torch.optim.SGD(first.model.parameters(), lr=0.1))
    with pytest.raises(LedgerError, match="another run"):
        loop(run(tmp_path), None)


def test_one_sample_pays_for_one_step(tmp_path):
    """Sampling hides who took part in one release, not in forty of the same sample."""
    private = run(tmp_path)
    mechanism = mechanism_for(private)
    for batches in mechanism.logical_batches():
        with private.release_step() as release:
            mechanism.set_gradients(mechanism.clip(batches), release)
        break
    for sampled in (private, run(tmp_path / "other")):  # once already, and never
        message = "logical batch for each step"
        with pytest.raises(LedgerError, match=message), sampled.release_step():
            pytest.fail("a release without a sample of its own")
    assert private.ledger.steps() == 1


def test_a_release_of_another_run_sets_no_gradient(tmp_path):
    """Its noise is scaled to another clipping norm."""
    loose = run(tmp_path / "loose", plan(mechanism=DpSgdPlan(1000.0, 1.0)))
    tight = run(tmp_path / "tight", plan(mechanism=DpSgdPlan(1e-6, 1.0)))
    of_loose, of_tight = mechanism_for(loose), mechanism_for(tight)
    for batches, _ in zip(of_loose.logical_batches(), of_tight.logical_batches(), strict=True):
        clipped = of_loose.clip(batches)
        message = "release of this run's step"
        with tight.release_step() as release, pytest.raises(LedgerError, match=message):
            of_loose.set_gradients(clipped, release)
        break
    assert all(p.grad is None for p in loose.model.parameters())


def test_vectors_that_were_not_released_are_not_trained_on(tmp_path, monkeypatch):
    """A release that fails leaves nothing that the next attempt takes for released."""
    private = run(tmp_path, plan(mechanism=FrozenPlan(1.0, 100.0), accountant="pld"))
    mechanism = mechanism_for(private)
    original = RunLedger.append

    def full_disk(self, event, purpose):
        raise OSError("no space left on device")

    monkeypatch.setattr(RunLedger, "append", full_disk)
    with pytest.raises(OSError):
        next(mechanism.logical_batches())
    monkeypatch.setattr(RunLedger, "append", original)
    next(mechanism.logical_batches())
    assert mechanism._vectors.norm(dim=1).min() > 10  # noise of 100 in each of 16 coordinates
    assert private.ledger.steps("release") == 1


def test_the_tuner_is_asked_before_each_step(tmp_path):
    seen = []

    class Watching(Tuner):
        def before_step(self, run, step):
            seen.append(step)

    for _ in steps(mechanism_for(run(tmp_path), Watching())):
        pass
    assert seen == [0, 1, 2, 3]


def test_processes_that_do_not_know_of_each_other_are_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UnsupportedArgumentError, match="started 2 processes.*init_process_group"):
        loop(run(tmp_path), None)


# -- what it saves by one call: weights, tokenizer, card, evidence --


def trained(folder, model, **given):
    private = run(folder, plan(max_steps=1), model=model, **given)
    mechanism, optimizer = mechanism_for(private), torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in steps(mechanism):
        optimizer.step()
    return mechanism


def test_an_adapter_that_would_be_saved_elsewhere_is_refused(tmp_path):
    lora = LoraConfig(r=2, target_modules=["query"], task_type="SEQ_CLS")
    model = get_peft_model(tiny.model(), lora, adapter_name="mine")
    with pytest.raises(UnsupportedModelError, match=r"own name, 'default', got \['mine'\]"):
        trained(tmp_path, model)
    assert not (tmp_path / "ledger.jsonl").exists()


def test_a_model_is_saved_as_it_can_be_verified_loaded_and_published(tmp_path):
    mechanism = trained(tmp_path, tiny.model(), processing_class=tiny.tokenizer())
    metrics = {"eval_accuracy": 0.75}
    statement = save_run(mechanism, metrics=metrics, license="mit", dataset="org/reviews")
    assert verify(tmp_path).outcome == "ok"
    card = (tmp_path / "README.md").read_text()
    assert statement.sentence() in card and "org/reviews" in card and "0.75" in card
    assert "license: mit" in card and "text-classification" in card
    again = type(mechanism.run.model).from_pretrained(tmp_path)
    assert not tiny.moved(tiny.weights(mechanism.run.model), again)
    assert "tokenizer_config.json" in Publication.of(tmp_path).files
    Publication.of(tmp_path).refuse()


def test_an_adapter_is_saved_without_its_base_and_what_a_card_cannot_say_refused(tmp_path):
    lora = LoraConfig(task_type="SEQ_CLS", target_modules=["query"], r=2)
    save_run(trained(tmp_path, get_peft_model(tiny.model(), lora)), tiny.tokenizer())
    assert verify(tmp_path).outcome == "ok"
    assert (tmp_path / "adapter_model.safetensors").exists()
    assert (tmp_path / "tokenizer_config.json").exists()
    assert not (tmp_path / "model.safetensors").exists()
    mechanism = trained(tmp_path / "refused", tiny.model())
    with pytest.raises(InvalidArgumentError, match="A card has no 'licence'"):
        save_run(mechanism, licence="mit")
    assert not (tmp_path / "refused" / "model.safetensors").exists()


def test_planted_weights_that_are_saved_after_the_evidence_are_seen(tmp_path, monkeypatch):
    mechanism = trained(tmp_path, tiny.model())

    def then_the_weights(_, folder, *others):
        mechanism.run.model.save_pretrained(folder)

    watch(monkeypatch, publishing, "write_card", then_the_weights)
    save_run(mechanism)
    assert verify(tmp_path).outcome != "ok"


def test_randomness_that_can_be_reproduced_is_never_private(tmp_path):
    private = run(tmp_path)
    private.randomness = SecretRandomness(insecure_seed=3)
    loop(private, torch.optim.SGD(private.model.parameters(), lr=0.1))
    assert read(tmp_path).status == "not_private"
