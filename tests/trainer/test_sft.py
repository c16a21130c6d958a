"""DPSFTTrainer: data as TRL prepares it, each row by itself, and a private run on it."""

import importlib
import sys
from typing import Any

import pytest
import tiny
import torch
import yaml
from chat import model, tokenizer, words
from datasets import Dataset
from transformers import HfArgumentParser
from trl import DPOConfig, GRPOConfig, RewardConfig, SFTConfig, SFTTrainer
from warm import run_program

from hf_dp import DPSeq2SeqTrainer, DPSeq2SeqTrainingArguments
from hf_dp.errors import DataError, InvalidArgumentError, UnsupportedArgumentError
from hf_dp.losses import per_example_loss
from hf_dp.statement.evidence import read
from hf_dp.tasks.generation.encoding import ChatEncoding
from hf_dp.trainer import trl_preparation
from hf_dp.trainer.dpo import DPO_REFUSED, DPO_WORKS, DPDPOConfig
from hf_dp.trainer.grpo import GRPO_REFUSED, GRPO_WORKS
from hf_dp.trainer.inherited import unknown_fields
from hf_dp.trainer.reward import REWARD_REFUSED, REWARD_WORKS, DPRewardConfig
from hf_dp.trainer.sft import SFT_REFUSED, SFT_WORKS, DPSFTConfig, DPSFTTrainer

ROWS = 24  # of fewer, the answers alone would tell rows apart


def prompts(count: int = ROWS, start: int = 0) -> Dataset:
    return Dataset.from_list(
        [
            {"prompt": f"{i}: {words(i, 1 + i % 3)}?", "completion": f" {words(i + 1, 1 + i % 4)}."}
            for i in range(start, start + count)
        ]
    )


def texts(count: int = ROWS, start: int = 0) -> Dataset:
    return Dataset.from_list(
        [{"text": f"{i} {words(i, 1 + i % 5)}"} for i in range(start, start + count)]
    )


def talks(count: int = ROWS, start: int = 0) -> Dataset:
    def turns(index: int) -> list[dict[str, str]]:
        said = [
            {"role": "user", "content": f"{index} {words(index, 1 + index % 3)}"},
            {"role": "assistant", "content": words(index + 2, 1 + index % 4)},
        ]
        return said * (1 + index % 2)

    return Dataset.from_list([{"messages": turns(i)} for i in range(start, start + count)])


FORMATS = {"prompts": prompts, "texts": texts, "talks": talks}


def arguments(folder: Any, **options: Any) -> Any:
    sizes = {"expected_batch_size": 6, "per_device_train_batch_size": 8, "max_steps": 2}
    return tiny.arguments(folder, DPSFTConfig, **{**sizes, **options})


def trainer(folder: Any, made: Any = prompts, given: dict[str, Any] | None = None, **options: Any):
    keywords = {"model": model(), "processing_class": tokenizer(), "train_dataset": made()}
    return DPSFTTrainer(args=arguments(folder, **options), **{**keywords, **(given or {})})


def as_trl_does(folder: Any, rows: Dataset, **options: Any) -> Dataset:
    """The training set of TRL's own trainer."""
    args = SFTConfig(str(folder), use_cpu=True, bf16=False, report_to="none", **options)
    made = SFTTrainer(model(), args, train_dataset=rows, processing_class=tokenizer())
    return made.train_dataset.select_columns(["input_ids", "labels"])


# -- what is trained on ---


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("max_length", [None, 12])
def test_rows_are_those_of_trl(form, max_length, tmp_path):
    rows = FORMATS[form]()
    expected = as_trl_does(tmp_path / "trl", rows, max_length=max_length)
    options = {"max_length": max_length, "privacy_mode": "non_private"}
    found = trainer(tmp_path, given={"train_dataset": rows}, **options).train_dataset
    assert found.select_columns(["input_ids", "labels"]).to_list() == expected.to_list()
    assert max(map(len, expected["input_ids"])) <= (max_length or 200)


def test_a_row_is_prepared_alone(tmp_path):
    """Other neighbors, the same tokens and labels."""
    rows = talks()
    options = {"assistant_only_loss": True}
    together = trainer(tmp_path / "a", given={"train_dataset": rows}, **options).train_dataset
    others = talks(ROWS, 100)
    for place in (0, ROWS - 1):
        row = rows.select([place]).to_list()
        among = Dataset.from_list([*others.to_list()[:3], *row, *others.to_list()[3:]])
        found = trainer(tmp_path / f"b{place}", given={"train_dataset": among}, **options)
        assert found.train_dataset[3]["input_ids"] == together[place]["input_ids"]
        assert found.train_dataset[3]["labels"] == together[place]["labels"]


def test_labels_stand_on_completions_and_on_what_a_function_formats(tmp_path):
    tested, rows = trainer(tmp_path), prompts()
    for row, made in zip(rows, tested.train_dataset):
        asked = tokenizer()(row["prompt"])["input_ids"]
        answered = tokenizer()(row["prompt"] + row["completion"] + "<|im_end|>")["input_ids"]
        assert made["labels"] == [-100] * len(asked) + answered[len(asked) :]
    rows = prompts().rename_columns({"prompt": "question", "completion": "answer"})
    made = {"formatting_func": lambda row: f"Q {row['question']} A{row['answer']}"}
    tested = trainer(tmp_path, given={**made, "train_dataset": rows})
    expected = tokenizer()(f"Q {rows[0]['question']} A{rows[0]['answer']}<|im_end|>")["input_ids"]
    assert tested.train_dataset[0]["input_ids"] == tested.train_dataset[0]["labels"] == expected


def by_roles(turns: list[dict[str, str]]) -> list[tuple[int, bool]]:
    """The tokens of a conversation, and whether the assistant says them; written out by hand."""
    encode, found = tokenizer().encode, []
    system = "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
    found += [(token, False) for token in encode(system)]
    for turn in turns:
        is_answer = turn["role"] == "assistant"
        found += [(token, False) for token in encode(f"<|im_start|>{turn['role']}")]
        # To TRL's template for Qwen2.5, the line breaks around an answer belong to it.
        said = encode("\n" + turn["content"] + "<|im_end|>\n")
        found += [(token, is_answer) for token in said]
    return found


def test_the_loss_sees_no_turn_of_the_user(tmp_path):
    """By hand: only tokens that the assistant says, and the end of its turns, have labels; and the
    gradient of the loss with respect to the logits of all other positions is 0."""
    tested = trainer(tmp_path, talks, assistant_only_loss=True)
    for row, made in zip(talks(), tested.train_dataset):
        expected = by_roles(row["messages"])
        assert made["input_ids"] == [token for token, _ in expected]
        assert made["labels"] == [token if said else -100 for token, said in expected]
    made = tested.train_dataset[1]
    batch = tested.data_collator([made])
    logits = []
    handle = tested.model.lm_head.register_forward_hook(
        lambda module, args, output: (output.retain_grad(), logits.append(output))[1]
    )
    per_example_loss(tested.model, batch).sum().backward()
    handle.remove()
    predicted = logits[0].grad.abs().sum(-1)[0, :-1] > 0
    assert predicted.tolist() == [label != -100 for label in made["labels"][1:]]


@pytest.mark.parametrize("rows", [prompts, talks])
def test_a_column_for_which_trl_ignores_a_formatting_function_is_named(rows, tmp_path):
    (column, *_) = rows().column_names
    with pytest.raises(InvalidArgumentError, match=f"`formatting_func` to be None.*'{column}'"):
        trainer(tmp_path, rows, given={"formatting_func": str})


# -- private runs ---


def test_a_private_run_is_proven(tmp_path):
    tested = trainer(tmp_path, talks, given={"eval_dataset": talks(6, 100)}, eval_strategy="epoch")
    tested.train()
    assert tested.privacy_statement().status == "proven"
    tested.save_model(str(tmp_path))
    assert read(tmp_path).status == "proven" and tested.ledger.steps() == 2
    assert tested.privacy_plan.num_examples == ROWS
    assert tested.evaluate(talks(5, 200))["eval_loss"] > 0  # not tokenized
    assert tested.predict(talks(5, 300)).predictions.shape[0] == 5


def test_the_loss_is_the_mean_of_the_examples_own_tokens(tmp_path):
    """By hand, alone and unpadded, against a padded batch."""
    tested = trainer(tmp_path)
    rows = [tested.train_dataset[i] for i in (0, 3, 5)]
    together = tested.compute_per_example_loss(tested.model, tested.data_collator(rows))
    for row, got in zip(rows, together):
        logits = tested.model(torch.tensor([row["input_ids"]])).logits[0].log_softmax(-1)
        picked = [
            -logits[place, label] for place, label in enumerate(row["labels"][1:]) if label != -100
        ]
        torch.testing.assert_close(got, torch.stack(picked).mean())


def test_without_privacy_it_trains_as_trl_does(tmp_path):
    options = {
        "max_steps": 3, "per_device_train_batch_size": 4, "learning_rate": 1e-2, "optim": "sgd", "use_cpu": True,
        "lr_scheduler_type": "constant", "report_to": "none", "save_strategy": "no", "gradient_checkpointing": False,
        "disable_tqdm": True, "bf16": False, "logging_steps": 1, "max_grad_norm": 1.0,
    }  # fmt: skip
    given = {"train_dataset": prompts(), "processing_class": tokenizer()}
    theirs = tiny.trained(SFTTrainer(model(), SFTConfig(str(tmp_path / "trl"), **options), **given))
    args = DPSFTConfig(str(tmp_path / "ours"), privacy_mode="non_private", **options)
    ours = tiny.trained(DPSFTTrainer(model(), args, **given))
    start = dict(model().named_parameters())
    for name, weight in ours.model.named_parameters():
        torch.testing.assert_close(weight, theirs.model.get_parameter(name), rtol=1e-4, atol=1e-6)
    assert not torch.equal(weight, start[name])


@pytest.mark.usefixtures("unchecked")
def test_what_it_prepares_serves_generation_during_evaluation(tmp_path):
    made = trainer(tmp_path / "prepared", given={"eval_dataset": prompts(5, 100)})
    generating = {"predict_with_generate": True, "generation_max_length": 4}
    args = tiny.arguments(tmp_path / "run", DPSeq2SeqTrainingArguments, max_steps=1, **generating)
    names = ("data_collator", "train_dataset", "eval_dataset", "processing_class")
    given = {name: getattr(made, name) for name in names}
    given["compute_metrics"] = lambda prediction: {"tokens": prediction.predictions.shape[1]}
    tested = tiny.trained(DPSeq2SeqTrainer(model(), args, **given))
    assert tested.evaluate()["eval_tokens"] == 4
    labels = tested.predict(made.eval_dataset).label_ids
    said = tokenizer().batch_decode([[t for t in row if t != -100] for row in labels.tolist()])
    assert said == [row["completion"] + "<|im_end|>" for row in prompts(5, 100)]
    assert tested.privacy_statement().status == "proven"


# -- what is refused ---


@pytest.mark.parametrize("mode", ["dp_sgd", "non_private"])
@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("packing", True, "`packing` to be False.*with DPSFTConfig.*joins several rows"),
        ("eval_packing", True, "`eval_packing` to be False"),
        ("padding_free", True, "`padding_free` to be False.*flattens"),
        ("loss_type", "dft", "`loss_type` to be 'nll'.*tokens of the whole batch"),
        ("router_aux_loss_coef", 0.1, "`router_aux_loss_coef`.*mean over all tokens"),
        ("activation_offloading", True, "`activation_offloading` to be False"),
        ("chat_template_path", "org/chat", "`chat_template_path` to be a Jinja file"),
    ],
)
def test_what_needs_several_rows_is_refused(option, value, message, mode, tmp_path):
    with pytest.raises(UnsupportedArgumentError, match=message):
        arguments(tmp_path, privacy_mode=mode, **{option: value})


OF_HF_DP = set(
    "privacy_mode privacy_unit privacy_unit_column max_rows_per_unit unit_sampling "
    "max_tokens_per_physical_batch noised_loss_bound".split()
)


@pytest.mark.parametrize(
    ("config", "works", "refused", "more"),
    [
        (SFTConfig, SFT_WORKS, SFT_REFUSED, set()),
        (DPOConfig, DPO_WORKS, DPO_REFUSED, {"privacy_mode"}),
        (RewardConfig, REWARD_WORKS, REWARD_REFUSED, {"privacy_mode"}),
        (GRPOConfig, GRPO_WORKS, GRPO_REFUSED, OF_HF_DP),
    ],
)
def test_every_argument_of_trl_has_a_row(config, works, refused, more):
    new = {field.name for field in unknown_fields(config)}
    assert new | more == works | refused.keys() and not works & refused.keys()


def test_the_arguments_of_trl_itself_are_refused(tmp_path):
    args = SFTConfig(str(tmp_path), use_cpu=True, bf16=False)
    with pytest.raises(InvalidArgumentError, match="to be DPSFTConfig.*Replace SFTConfig"):
        DPSFTTrainer(model(), args, train_dataset=texts())


def with_row(made, row):
    return lambda: Dataset.from_list([*made().to_list(), row])


def without(made, column):
    return lambda: made().rename_column(column, "other")


# As SmolLM2's does, it puts a system's turn before those that begin without one.
PLAIN = (
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}"
    "<|im_start|>system\nShort.<|im_end|>\n{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
REWRITES = "{% for m in messages[-2:] %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
ONLY_USER = [{"role": "user", "content": "film"}]
PLAINLY = {"given": {"processing_class": tokenizer(PLAIN)}, "assistant_only_loss": True}
MISSING = "row 0 .*'other': .*Error: .*rename the columns"
UNFIT = {  # rows, what else is given, the message
    "nothing to predict": (
        with_row(prompts, {"prompt": "film " * 50, "completion": "."}), {"max_length": 40},
        "1 of the 25 rows have no token to predict within max_len",
    ),
    "no messages": (with_row(talks, {"messages": []}), {}, "Row 24 of the train_dataset has no messages as .'messages'"),
    "None": (with_row(talks, {"messages": None}), {}, "Row 24 of the train_dataset has None as .'messages'"),
    "a text": (
        with_row(talks, {"messages": [{"from": "user", "value": "film"}]}), {},
        "Row 24 of the train_dataset has a text as .'messages'",
    ),
    "no answer": (with_row(talks, {"messages": ONLY_USER}), PLAINLY, "Row 24 has no turn with the role 'assistant'"),
    "a template that rewrites turns": (
        talks, {"given": {"processing_class": tokenizer(REWRITES)}, "assistant_only_loss": True},
        "rewrites earlier turns .seen in row 1",
    ),
    "no prompts": (without(prompts, "prompt"), {}, MISSING),
    "no completions": (without(prompts, "completion"), {}, MISSING),
    "no texts": (without(texts, "text"), {}, MISSING),
    "a list": (lambda: prompts().to_list(), {}, r"to be a datasets\.Dataset, got list"),
    "pictures": (lambda: prompts().add_column("image", [0] * ROWS), {}, "the column 'image'"),
}  # fmt: skip


@pytest.mark.parametrize("case", UNFIT)
def test_rows_that_do_not_fit_are_refused(case, tmp_path):
    made, options, message = UNFIT[case]
    with pytest.raises(DataError, match=message):
        trainer(tmp_path, made, **options)


def test_rows_of_other_kinds_than_the_first_are_refused():
    said = ONLY_USER
    talk, text = {"prompt": said, "completion": None}, {"prompt": None, "completion": "film"}
    with pytest.raises(DataError, match="Row 1 of the train_dataset has a text as"):
        trl_preparation.check_rows(Dataset.from_list([talk, text]))
    ours, other = {"conversations": said}, {"conversations": [{"from": "user", "value": "film"}]}
    with pytest.raises(DataError, match=r"Row 1 .* has a conversation .from, value. as"):
        trl_preparation.check_rows(Dataset.from_list([ours, other]))
    trl_preparation.check_rows(Dataset.from_list([other, other]))


UNUSABLE = [  # rows, the place of one, what it has instead, options
    (texts, 0, {"text": None}, {}),
    (prompts, ROWS - 1, {"completion": None}, {}),
    (prompts, 0, {"prompt": None}, {}),
    (talks, ROWS - 1, {"messages": [{"role": "user", "content": None}]}, {}),
    (talks, 0, {"messages": ONLY_USER}, {"assistant_only_loss": True}),
]


@pytest.mark.parametrize(("made", "place", "wrong", "options"), UNUSABLE)
def test_the_row_that_trl_cannot_prepare_is_named(made, place, wrong, options, tmp_path):
    rows = made().to_list()
    rows[place] |= wrong
    with pytest.raises(DataError, match=rf"row {place} of the train set.*|Row {place} .* None as"):
        trainer(tmp_path, lambda: Dataset.from_list(rows), **options)


def test_a_row_to_evaluate_on_is_named_too(tmp_path, monkeypatch):
    rows = Dataset.from_list([*texts(4, 90).to_list(), {"text": None}])
    with pytest.raises(DataError, match="row 4 of the eval set, {'text': None}"):
        trainer(tmp_path, texts, given={"eval_dataset": rows})
    monkeypatch.setattr(trl_preparation, "by_row", lambda rows, prepare, name: prepare(rows))
    with pytest.raises(AttributeError):  # planted: rows that are not searched
        trainer(tmp_path, texts, given={"eval_dataset": rows})


def test_training_rows_are_known_by_their_texts(tmp_path):
    """Before TRL tokenizes them, and in any set and form that is evaluated."""
    rows, more = prompts(), prompts(60)
    part, mixed = rows.select(range(2, 4)), more.select([*range(6), *range(ROWS, 60)])
    for same, message in (
        (rows, "held-out set"),
        (part, "held-out set"),
        (mixed, "holds rows equal to training rows"),
    ):
        with pytest.raises(UnsupportedArgumentError, match=message):
            trainer(tmp_path, given={"train_dataset": rows, "eval_dataset": same})
    tested = trainer(tmp_path, given={"train_dataset": rows})
    for call in (tested.evaluate, tested.predict):
        for same in (rows, part, Dataset.from_list(part.to_list())):
            with pytest.raises(UnsupportedArgumentError, match="held-out set"):
                call(same)


def plainly(folder: Any) -> DPSFTTrainer:
    given = {"processing_class": tokenizer(PLAIN), "eval_dataset": talks(4, 90)}
    return trainer(folder, talks, given=given, assistant_only_loss=True)


@pytest.mark.usefixtures("unchecked")
def test_a_template_without_markers_is_taken_as_from_yaml(tmp_path):
    """Labels stand on what the assistant says, with the end of its turn, and nowhere else."""
    made, spelled = plainly(tmp_path), tokenizer(PLAIN)
    held_out = talks(4, 90)
    for dataset, rows in ((made.train_dataset, talks()), (made._prepared(held_out), held_out)):
        for encoded, row in zip(dataset, rows, strict=True):
            assert "system\nShort." in spelled.decode(encoded["input_ids"])
            labeled = [label for label in encoded["labels"] if label != -100]
            said = [t["content"] for t in row["messages"] if t["role"] == "assistant"]
            assert spelled.decode(labeled) == "".join(f"{each}<|im_end|>\n" for each in said)
    made.train()
    assert made.evaluate()["eval_loss"] > 0


def test_planted_labels_on_every_turn_are_seen(tmp_path, monkeypatch):
    honest = ChatEncoding.masked

    def on_all(self, *turns):
        return honest(self, *turns)[0], [1] * len(honest(self, *turns)[0])

    monkeypatch.setattr(ChatEncoding, "masked", on_all)
    labels = plainly(tmp_path).train_dataset[0]["labels"]
    assert "user" in tokenizer(PLAIN).decode([each for each in labels if each != -100])


@pytest.mark.parametrize("module", ["sft", "dpo", "reward"])
def test_without_trl_the_message_names_the_extra(module, monkeypatch):
    monkeypatch.setitem(sys.modules, "trl", None)
    for each in (module, "trl_preparation"):
        monkeypatch.delitem(sys.modules, f"hf_dp.trainer.{each}", raising=False)
        monkeypatch.delattr(f"hf_dp.trainer.{each}", raising=False)
    with pytest.raises(ImportError, match=r"Run `pip install hf-dp\[trl\]`"):
        importlib.import_module(f"hf_dp.trainer.{module}")


def test_the_public_names_need_no_trl(tmp_path):
    named = "import hf_dp, sys; [getattr(hf_dp, name) for name in hf_dp.__all__]"
    done = run_program(f"{named}; print('trl' in sys.modules)", tmp_path)
    assert done.stdout.strip() == "False", done.stderr


@pytest.mark.parametrize(
    "config", [DPSFTConfig, DPDPOConfig, DPRewardConfig, DPSeq2SeqTrainingArguments]
)
def test_arguments_are_read_from_yaml(config, tmp_path):
    text = {
        "output_dir": str(tmp_path), "target_epsilon": "3", "learning_rate": "5e-4", "use_cpu": True,
        "expected_batch_size": 8,
    }  # fmt: skip
    if config is not DPSeq2SeqTrainingArguments:
        text["model_init_kwargs"] = '{"dtype": "float32"}'
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(text))
    (args,) = HfArgumentParser(config).parse_yaml_file(str(tmp_path / "a.yaml"))
    assert (args.learning_rate, args.target_epsilon) == (5e-4, 3.0)
    assert args.gradient_checkpointing is False
    assert getattr(args, "model_init_kwargs", {"dtype": "float32"}) == {"dtype": "float32"}
    (line,) = HfArgumentParser(config).parse_args_into_dataclasses(
        ["--output_dir", str(tmp_path), "--noise_multiplier", "1", "--expected_batch_size", "8", "--use_cpu"]
    )  # fmt: skip
    assert line.noise_multiplier == 1.0 and line.logging_steps == 0.1


@pytest.mark.usefixtures("unchecked")
def test_users_keep_their_rows_also_where_trl_would_shuffle(tmp_path):
    owners = [f"u{(i * i) % 7}" for i in range(ROWS)]
    options = {"shuffle_dataset": True, "target_delta": 1e-3, "expected_batch_size": 2}
    given = {"train_dataset": prompts().add_column("who", owners)}
    by_user = {"privacy_unit": "user", "privacy_unit_column": "who"}
    found = trainer(tmp_path, given=given, **by_user, **options)
    assert len(found.run.units) == len(set(owners)) and "who" not in found.train_dataset[0]
    alone = trainer(tmp_path, prompts, **{**options, "shuffle_dataset": False}).train_dataset
    for unit in range(len(found.run.units)):
        rows = found.run.units.rows(unit).tolist()
        assert len({owners[row] for row in rows}) == 1
        for row in rows:
            assert found.train_dataset[row]["input_ids"] == alone[row]["input_ids"]
    found.train()
