"""Training some of a model's own parameters: exact to clip, and a stock PEFT adapter of just
those."""

import copy
import json
import warnings
from dataclasses import dataclass

import pytest
import tiny
import torch
from models import ARCHITECTURES, INFILLING, assert_exact, collate, logits, shaken
from peft import LNTuningModel, LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import nn

from hf_dp.errors import ConfigError, InvalidArgumentError, UnsupportedModelError
from hf_dp.tuners.public_choice import BitFitConfig, HeadConfig, RandomConfig, TopBlocksConfig
from hf_dp.tuners.selection import SelectionConfig, register, target_modules

# Each kind of layer that owns parameters, and each way in which one is tied, reused or bare.
MODELS = {name: ARCHITECTURES[name] for name in (
    "bert", "albert", "deberta_v2", "modernbert", "mpnet", "bert_masked_lm", "gpt2_tied", "opt", "qwen3_tied",
    "gemma3", "phi3", "t5", "bart", "vit", "convnext",
)} | {f"infilling {name}": INFILLING[name] for name in ("bert untied", "albert")}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MODELS)
def test_a_random_half_of_any_model(name, tmp_path):
    architecture = MODELS[name]
    torch.manual_seed(0)
    plain = architecture.build()
    batch = collate(plain, architecture.examples(plain, (5, 1, 3)))
    plain.eval()
    expected = logits(architecture, plain, batch)
    state = {key: value.clone() for key, value in plain.state_dict().items()}
    base = {n: p.detach().clone() for n, p in plain.named_parameters()}
    task_type = "SEQ_CLS" if architecture.task == "classification" else None
    model = get_peft_model(plain, RandomConfig(unfreeze_ratio=0.5, task_type=task_type))
    assert torch.equal(logits(architecture, model, batch), expected)
    assert_exact(architecture, model.train(), architecture.examples(model, (5, 1, 3)))
    after = logits(architecture, shaken(model.eval()), batch)
    assert not torch.allclose(after, expected)
    trained = [n for n, p in model.named_parameters() if p.requires_grad]
    with model.disable_adapter():
        assert torch.equal(logits(architecture, model, batch), expected)
    assert [n for n, p in model.named_parameters() if p.requires_grad] == trained
    model.save_pretrained(tmp_path)

    torch.manual_seed(0)
    again = architecture.build()
    again.load_state_dict(state)
    stock = PeftModel.from_pretrained(again.eval(), tmp_path).eval()
    assert type(stock.base_model) is LNTuningModel
    assert torch.equal(logits(architecture, stock, batch), after)

    chosen = set(RandomConfig.from_pretrained(tmp_path).parameters)
    merged = model.merge_and_unload()
    assert torch.equal(logits(architecture, merged, batch), after)
    for parameter_name, parameter in merged.named_parameters():
        head = parameter_name.startswith("score") or "classifier" in parameter_name
        if parameter_name not in chosen and not head:
            assert torch.equal(parameter, base[parameter_name]), parameter_name


@pytest.mark.filterwarnings("ignore")
def test_only_what_trains_is_saved(tmp_path):
    model = get_peft_model(ARCHITECTURES["bert"].build(), BitFitConfig(task_type="SEQ_CLS"))
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "adapter_model.safetensors")
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert sum(value.numel() for value in saved.values()) == trained
    assert all(key.endswith("bias") or "classifier" in key for key in saved)


def copies_of_the_embedding(gpt2):
    """What trains of the tied embedding: in its own place, and in the head."""
    model = gpt2.base_model.model
    owners = (model.transformer.wte, model.lm_head)
    return [each.ln_tuning_layers["default"].weight for each in owners]


@pytest.mark.filterwarnings("ignore")
def test_a_tied_parameter_trains_as_one_and_is_saved_for_each_owner(tmp_path):
    base = ARCHITECTURES["gpt2_tied"].build()
    model = get_peft_model(base, RandomConfig(unfreeze_ratio=1.0))
    one, other = copies_of_the_embedding(model)
    assert one is other and one.requires_grad
    model.save_pretrained(tmp_path)
    saved = [key for key in load_file(tmp_path / "adapter_model.safetensors") if "ln_tun" in key]
    assert len([key for key in saved if "wte" in key or "lm_head" in key]) == 2
    merged = model.merge_and_unload()
    assert merged.lm_head.weight is merged.transformer.wte.weight


def chosen(config, name="bert"):
    model = ARCHITECTURES[name].build()
    return get_peft_model(model, config), dict(ARCHITECTURES[name].build().named_parameters())


def test_top_blocks():
    model, names = chosen(TopBlocksConfig(blocks=1, task_type="SEQ_CLS"))
    picked = model.peft_config["default"].parameters
    assert picked and all(name.startswith("bert.encoder.layer.1.") for name in picked)
    assert len(picked) == sum(name.startswith("bert.encoder.layer.1.") for name in names)
    assert all(p.requires_grad for n, p in model.named_parameters() if ".modules_to_save." in n)
    with pytest.raises(InvalidArgumentError, match="blocks"):
        chosen(TopBlocksConfig(blocks=9))
    equal, _ = chosen(TopBlocksConfig(blocks=1), "t5")  # of two stacks as long, the decoder's
    assert all("decoder.block." in name for name in equal.peft_config["default"].parameters)
    with pytest.raises(UnsupportedModelError, match="blocks"):
        chosen(TopBlocksConfig(), "albert")


def test_head_alone():
    model, _ = chosen(HeadConfig(task_type="SEQ_CLS"))
    trained = {n.split(".")[2] for n, p in model.named_parameters() if p.requires_grad}
    assert trained == {"classifier"}
    with pytest.raises(UnsupportedModelError, match="modules_to_save"):
        chosen(HeadConfig())


def test_random_is_a_function_of_its_seed_within_its_ratio():
    def pick(seed, ratio=0.4):
        own = {"unfreeze_ratio": ratio, "selection_seed": seed}
        model, names = chosen(RandomConfig(**own, task_type="SEQ_CLS"))
        picked = model.peft_config["default"].parameters
        sizes = {n: p.numel() for n, p in names.items() if not n.startswith("classifier")}
        assert sum(sizes[n] for n in picked) <= ratio * sum(sizes.values())
        return picked

    assert pick(0) == pick(0) != pick(1)
    with pytest.raises(InvalidArgumentError, match="leave room for the smallest partition"):
        pick(0, 1e-6)


def test_random_draws_by_the_seed_of_its_run_unless_it_has_its_own(tmp_path):
    def drawn(seed, own=None):
        folder = tmp_path / f"{seed}-{own}"
        config = RandomConfig(unfreeze_ratio=0.4, selection_seed=own)
        model = tiny.trainer(folder, seed=seed, given={"peft_config": config}).model
        model.peft_config["default"].write_details(tmp_path)
        noted = json.loads((tmp_path / "selection.json").read_text())
        return noted["selection_seed"], noted["parameters"]

    (first, by_run), (second, other), (own, given) = drawn(3), drawn(4), drawn(4, own=3)
    assert (first, second, own) == (3, 4, 3)
    assert by_run == given != other


@pytest.mark.parametrize(
    "config",
    [
        RandomConfig(unfreeze_ratio=0.4),
        BitFitConfig(modules_to_save=["classifier"]),
        LoraConfig(target_modules=["query"], modules_to_save=["pooler"]),
    ],
    ids=lambda config: type(config).__name__,
)
def test_one_configuration_serves_many_runs(config, tmp_path):
    """The next run draws and completes anew, and takes nothing over from the run before."""
    before = copy.deepcopy(config)
    made = [tiny.trainer(tmp_path, seed=seed, given={"peft_config": config}) for seed in (0, 1)]
    assert config == before and config.task_type is None
    first, second = (trainer.model.peft_config["default"] for trainer in made)
    assert first.task_type == second.task_type == "SEQ_CLS"
    if isinstance(config, RandomConfig):
        assert first.parameters != second.parameters


def test_a_name_that_is_no_parameter_is_refused():
    with pytest.raises(InvalidArgumentError, match="'bert.nothing'"):
        chosen(RandomConfig(parameters=["bert.nothing"]))


def test_targets_are_exact_where_names_end_alike():
    decoder = nn.ModuleDict({"head": nn.Linear(2, 2)})
    model = nn.ModuleDict({"head": nn.Linear(2, 2), "decoder": decoder})
    assert target_modules(model, ["decoder.head.weight"]) == ["decoder.head"]
    # As a pattern, which PEFT matches in full.
    assert target_modules(model, ["head.weight"]) == "head"


def test_what_the_model_itself_owns_cannot_be_copied():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale, self.layer = nn.Parameter(torch.ones(2)), nn.Linear(2, 2)

    with pytest.raises(UnsupportedModelError, match="'scale' belongs to a module made of other"):
        target_modules(Own(), ["scale"])


def test_configurations_round_trip_and_refuse_others(tmp_path):
    own = {"unfreeze_ratio": 0.125, "selection_seed": 7}
    config = RandomConfig(**own, parameters=["a"], modules_to_save=["b"])
    config.save_pretrained(tmp_path)
    again = RandomConfig.from_pretrained(str(tmp_path))
    assert (again.options(), again.parameters) == (config.options(), config.parameters)
    with pytest.raises(ConfigError, match="the method 'bitfit', got 'random'"):
        BitFitConfig.from_pretrained(str(tmp_path))
    with pytest.raises(ConfigError, match="a readable selection.json"):
        RandomConfig.from_pretrained(str(tmp_path.parent))


def test_planted_untied_copies_are_seen(monkeypatch):
    """Without joining copies of a tied parameter the engine would train two halves of one
    gradient."""
    monkeypatch.setattr("hf_dp.tuners.selection.SelectionModel._join", lambda *a: None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = get_peft_model(ARCHITECTURES["gpt2_tied"].build(), RandomConfig(unfreeze_ratio=1.0))
    one, other = copies_of_the_embedding(model)
    assert one is not other


def test_a_method_of_ones_own(tmp_path):
    """What the documentation says: a dataclass with ``method`` and ``choose``."""

    @register
    @dataclass
    class LayerNorms(SelectionConfig):
        method = "layer_norms"

        def choose(self, model):
            return [name for name, _ in model.named_parameters() if "LayerNorm" in name]

    model, _ = chosen(LayerNorms(task_type="SEQ_CLS"))
    trained = [n for n, p in model.named_parameters() if p.requires_grad]
    assert all("LayerNorm" in name or "classifier" in name for name in trained)
