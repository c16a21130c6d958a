"""DPTrainer's pushes: at the end, with every save, in several processes, and what they refuse."""

import json
import pickle
import shutil
from contextlib import nullcontext

import pytest
import tiny
from loopback_hub import TOKEN, USER
from peft import LoraConfig
from processes import results
from transformers import Trainer

from hf_dp.accounting import epsilon
from hf_dp.errors import HfDpError, PublishError, UnsupportedArgumentError
from hf_dp.publishing.hub import publish
from hf_dp.run.witnesses import read_run
from hf_dp.trainer.private import PrivateTraining

NAME = f"{USER}/model"
SAVES = {"save_strategy": "steps", "save_steps": 2}
PUSHES = {"push_to_hub": True, "hub_model_id": NAME}
EVERY_SAVE = {**PUSHES, **SAVES, "hub_strategy": "every_save", "hub_always_push": True}


@pytest.fixture
def warnings(warnings_of) -> list[str]:
    return warnings_of("trainer.publishing")


@pytest.fixture
def asked(monkeypatch) -> list[str]:
    """Which methods of Trainer were called that push."""
    found: list[str] = []
    for name in ("init_hf_repo", "_push_from_checkpoint", "push_to_hub"):
        monkeypatch.setattr(Trainer, name, lambda *_, name=name: found.append(name))
    return found


def evidence(hub, number: int) -> dict:
    return json.loads(hub.pushes(NAME)[number].files["privacy.json"])


def test_the_end_is_pushed_once_and_nothing_before(hub, tmp_path):
    options = {**PUSHES, **SAVES, "max_steps": 2, "hub_revision": "eps-8"}
    trainer = tiny.trainer(tmp_path / "run", **options)
    assert hub.repositories[NAME].private is False and not hub.pushes(NAME)
    trainer.train()
    assert not hub.pushes(NAME)
    done = trainer.push_to_hub()
    commit = hub.repositories[NAME].at("eps-8")
    assert done.oid == commit.oid and commit.message == "End of training"
    files = hub.files(NAME, "eps-8")
    names = {"README.md", "config.json", "model.safetensors", "privacy.json"}
    assert files.keys() == names | {"tokenizer.json", "tokenizer_config.json"}
    assert not hub.files(NAME)
    epsilon = trainer.epsilon().rounded_up()
    assert json.loads(files["privacy.json"])["statement"]["epsilon"] == epsilon
    assert f"{epsilon}" in files["README.md"].decode()
    trainer.save_model()  # pushes as in Trainer
    assert hub.repositories[NAME].at("eps-8").message == "Model save"


def test_push_to_hub_without_the_argument(hub, tmp_path):
    trainer = tiny.trained(tiny.trainer(tmp_path / "my-model", max_steps=1))
    trainer.push_to_hub(tags="mine", license="mit", private=True)
    card = hub.files(f"{USER}/my-model")["README.md"].decode()
    assert "mine" in card and "license: mit" in card
    assert hub.repositories[f"{USER}/my-model"].private


@pytest.mark.parametrize("adapter", [False, True])
def test_every_save_carries_the_epsilon_spent_so_far(hub, tmp_path, warnings, adapter, monkeypatch):
    """It is pushed before it is rotated away, and the token stands in no file."""
    monkeypatch.delenv("HF_TOKEN")
    given = {"peft_config": LoraConfig(r=2, target_modules=["query"], task_type="SEQ_CLS")}
    options = {**EVERY_SAVE, "save_total_limit": 1, "hub_token": TOKEN}
    made = tiny.trainer(tmp_path / "run", given=given if adapter else {}, **options)
    made.describe(base_model=f"{USER}/tiny-base")
    trainer = tiny.trained(made)
    assert len(hub.pushes(NAME)) == 2 and warnings == []
    for number, steps in ((0, 2), (1, 4)):
        statement = evidence(hub, number)["statement"]
        (event,) = trainer.ledger.events
        so_far = type(event)(event.noise_multiplier, event.sample_rate, steps)
        spent = epsilon(so_far, statement["delta"]).rounded_up(3)
        assert (statement["steps"], statement["epsilon"]) == (steps, spent)
        commit = hub.pushes(NAME)[number]
        said = f"step {steps} (proven, epsilon {spent} at delta 0.0125, {steps} releases)"
        assert said in commit.message
        assert str(statement["epsilon"]) in commit.files["README.md"].decode()
        weights = "adapter_model.safetensors" if adapter else "model.safetensors"
    assert [path.name for path in (tmp_path / "run").glob("checkpoint-*")] == ["checkpoint-4"]
    saved = tmp_path / "run" / "checkpoint-4" / weights
    assert commit.files[weights] == saved.read_bytes() != hub.pushes(NAME)[0].files[weights]
    trainer.push_to_hub()
    assert evidence(hub, 2)["statement"]["steps"] == 4 and trainer.args.hub_token == TOKEN
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert {"training_args.bin", "trainer_state.json"} <= {path.name for path in files}
    for path in files:
        assert TOKEN.encode() not in path.read_bytes(), path


def test_a_push_that_fails_warns_and_training_goes_on(hub, tmp_path, warnings):
    trainer = tiny.trainer(tmp_path / "run", **EVERY_SAVE)
    hub.faults["commit"] = 403
    trainer.train()
    assert trainer.state.global_step == 4
    (warning,) = warnings
    assert "checkpoint-2 was not pushed, and training continues" in warning and NAME in warning
    assert TOKEN not in warning
    assert [evidence(hub, n)["statement"]["steps"] for n in range(1)] == [4]
    hub.faults["commit"] = 403
    with pytest.raises(PublishError, match="may not write"):
        trainer.push_to_hub()


def test_a_leak_in_a_checkpoint_warns_and_nothing_of_it_is_pushed(
    hub, tmp_path, warnings, monkeypatch
):
    write = PrivateTraining.write_beside_weights

    def leaks(self, folder):
        write(self, folder)
        (tmp_path / folder / "generation_config.json").write_text(f'{{"from": "{tmp_path}"}}')

    monkeypatch.setattr(PrivateTraining, "write_beside_weights", leaks)
    trainer = tiny.trained(tiny.trainer(tmp_path / "run", **EVERY_SAVE))
    assert len(warnings) == 2 and "generation_config.json: from" in warnings[0]
    assert not hub.pushes(NAME)
    with pytest.raises(PublishError, match=r"generation_config.json: from"):
        trainer.push_to_hub()


def test_a_repository_of_something_else_is_refused_before_anything_is_spent(hub, full, tmp_path):
    hub.add(NAME, {"model.safetensors": b"theirs"})
    publish(full, f"{NAME}-2")
    for name, why in ((NAME, "holds 'model.safetensors'"), (f"{NAME}-2", "holds the private run")):
        with pytest.raises(PublishError, match=f"exists and {why}"):
            tiny.trainer(tmp_path / "run", **{**PUSHES, "hub_model_id": name})
    assert not (tmp_path / "run" / "ledger.jsonl").exists()


def test_a_resumed_run_goes_on_in_its_repository(hub, tmp_path):
    options = {**EVERY_SAVE, "max_steps": 4}
    tiny.trainer(tmp_path / "run", **options).train()
    tiny.resumed(tiny.trainer(tmp_path / "run", **options), 2)
    assert read_run(tmp_path / "run").ledger.steps() == 6
    assert evidence(hub, -1)["statement"]["steps"] == 6


def test_a_run_with_a_known_seed_goes_only_on_explicit_request(hub, tmp_path):
    with pytest.raises(PublishError, match=r"insecure_seed.*not_private=True"):
        tiny.trainer(tmp_path / "run", **PUSHES, insecure_seed=1)
    options = {"hub_model_id": NAME, "insecure_seed": 1, "max_steps": 1}
    trainer = tiny.trained(tiny.trainer(tmp_path / "run", **options))
    with pytest.raises(PublishError, match=r"insecure_seed.*not_private=True"):
        trainer.push_to_hub()
    assert not hub.repositories
    trainer.push_to_hub(not_private=True)
    assert evidence(hub, 0)["statement"]["status"] == "not_private"


def test_a_push_in_the_background_is_refused(hub, tmp_path):
    trainer = tiny.trainer(tmp_path / "run", max_steps=1, hub_model_id=NAME)
    with pytest.raises(UnsupportedArgumentError, match="`blocking` to be True"):
        trainer.push_to_hub(blocking=False)
    assert not hub.requests


@pytest.mark.parametrize("strategy", ["every_save", "checkpoint"])
def test_pushes_of_a_public_run_are_trainers_business(tmp_path, asked, strategy):
    options = {**EVERY_SAVE, "hub_strategy": strategy, "privacy_mode": "non_private"}
    tiny.trained(tiny.trainer(tmp_path / "run", **options)).push_to_hub()
    assert asked == ["init_hf_repo", *["_push_from_checkpoint"] * 2, "push_to_hub"]


CLAIMS = {
    "weights": ("model.safetensors", "of the private run"),
    "weights in a checkpoint": ("checkpoint-2/model.safetensors", "of the private run"),
    "evidence": ("privacy.json", "holds privacy.json"),
    "a tag": ("tags:\n- differential-privacy\n", "claims differential privacy"),
    "a key": ("differential_privacy:\n  epsilon: 1\n", "claims differential privacy"),
    "nothing below": ("tags:\n- differential-privacy\n---", "claims differential privacy"),
    "the text alone": ("", None),
}


@pytest.mark.parametrize("name", CLAIMS)
def test_a_public_run_whose_folder_claims_privacy_is_not_pushed(
    full, tmp_path, asked, warnings, name
):
    """Trainer would upload the whole folder."""
    options = {"privacy_mode": "non_private", "hub_strategy": "every_save", "hub_model_id": NAME}
    trainer = tiny.trainer(tmp_path / "run", **options)
    claim, message = CLAIMS[name]
    if (full / claim).is_file():
        (tmp_path / "run" / claim).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(full / claim, tmp_path / "run" / claim)
    else:
        body = "" if claim.endswith("---") else "---\n\nno differential_privacy here\n---\n"
        text = f"---\nlicense: mit\n{claim}{body}"
        (tmp_path / "run").mkdir(exist_ok=True)
        (tmp_path / "run" / "README.md").write_text(text)
    trainer._push_from_checkpoint(str(tmp_path / "run" / "checkpoint-2"))
    for push in (trainer.init_hf_repo, trainer.push_to_hub):
        with pytest.raises(PublishError, match=message) if message else nullcontext():
            push()
    assert len(asked) == (0 if message else 3) and len(warnings) == bool(message)
    with pytest.raises(PublishError, match=r"whole folder|claims differential privacy"):
        trainer.push_to_hub(tags="differential-privacy")


# -- the token --


def test_arguments_are_pickled_without_the_token_and_copied_with_it(tmp_path):
    args = tiny.arguments(tmp_path, hub_token=TOKEN)
    assert TOKEN.encode() not in pickle.dumps(args)
    loaded = pickle.loads(pickle.dumps(args))
    assert loaded.hub_token is None and loaded.noise_multiplier == args.noise_multiplier
    copied = type(args).own_copy(args)
    assert copied.hub_token == args.hub_token == TOKEN and copied is not args
    assert TOKEN not in str(args) and TOKEN not in json.dumps(args.to_dict(), default=str)


# -- several processes --


def test_of_several_processes_one_pushes_and_all_learn_of_a_failure(hub, tmp_path):
    def run() -> tuple[int, bool, str]:
        trainer = tiny.trained(tiny.trainer(tmp_path / "run", **EVERY_SAVE))
        done = trainer.push_to_hub()
        trainer.args.hub_model_id = "someone-else/model"
        trainer.hub_model_id = None
        with pytest.raises(HfDpError) as caught:
            trainer.push_to_hub()
        return trainer.args.process_index, done is None, caught.typename

    assert results(2, run) == [(0, False, "PublishError"), (1, True, "DistributedError")]
    assert [evidence(hub, n)["statement"]["steps"] for n in range(3)] == [2, 4, 4]
