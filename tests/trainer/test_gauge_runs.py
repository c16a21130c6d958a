"""An adaptive clipping norm, and scaled gradients, in whole runs: from the arguments to logs,
ledger, statement and card, and over a resume."""

import json
import shutil
from pathlib import Path

import pytest
import tiny
import torch
import users
from peft import LoraConfig
from safetensors.torch import load_file, save
from transformers import TrainerCallback
from watch import watch

from hf_dp.accounting import PoissonSampledGaussian, epsilon
from hf_dp.cli.main import main
from hf_dp.errors import ConfigError, InvalidArgumentError, LedgerError, UnsupportedArgumentError
from hf_dp.mechanisms.gauge import FILE_NAME, Gauge
from hf_dp.mechanisms.scales import Scales
from hf_dp.plans.quantile import ClippingQuantile
from hf_dp.publishing.allowed import sort_files
from hf_dp.statement.evidence import disagreements, read
from hf_dp.trainer.trainer import DPTrainer
from hf_dp.tuners.rgp import RgpConfig

pytestmark = pytest.mark.usefixtures("unchecked")

BETA = {"gradient_scaling_beta": 0.7}
NORM = {"clipping_quantile": 0.5, "clipping_quantile_budget_ratio": 0.2, "accountant": "rdp"}
SAVING = {"save_strategy": "steps", "save_steps": 2}
RGP = {"peft_config": RgpConfig(rank=2, task_type="SEQ_CLS")}


def made(folder: Path, **options) -> DPTrainer:
    return tiny.trainer(folder, **{**NORM, **options})


def logged(trainer: DPTrainer) -> list[float]:
    history = trainer.state.log_history
    return [row["clipping_norm"] for row in history if "clipping_norm" in row]


@pytest.fixture(scope="module")
def paid(tmp_path_factory) -> DPTrainer:
    """The trainer of a run that spent its target, with checkpoints at 2 and 4."""
    folder = tmp_path_factory.mktemp("paid")
    trainer = tiny.trained(made(folder, target_epsilon=3.0, **SAVING, **BETA))
    trainer.save_model()
    return trainer


def test_ledger_statement_card_and_logs_name_it(paid):
    folder, plan = Path(paid.args.output_dir), paid.privacy_plan
    (event,) = paid.ledger.events
    assert event == plan.event() and set(event.noise_multipliers) == {"sum", "count"}
    assert 2.99 < epsilon(event, plan.delta, "rdp").value <= 3.0
    norms = logged(paid)
    assert norms[0] == 0.1 and len(set(norms)) == 4
    record = read(folder)
    assert record.status == "proven" and disagreements(record) == []
    assert main(["verify", str(folder)]) == 0
    written = json.loads((folder / "privacy.json").read_text())["plan"]["mechanism"]
    assert written["clipping_quantile"]["quantile"] == 0.5
    statement, card = paid.privacy_statement(), (folder / "README.md").read_text()
    named = "4 steps of DP-SGD with scaled gradients and a noised count with Poisson sampling"
    assert named in statement.sentence() and "(count)" in card
    assert statement.covered.endswith("norms in its logs, and whatever is computed from them")
    for said in ("The clipping norm is that of the first step.", "is divided by the scales"):
        assert said in card and said not in card.split("##")[0]
    goes, stays = sort_files(folder)
    assert FILE_NAME in stays and FILE_NAME not in goes


def goes_on_with_its_gauge(folder: Path) -> bool:
    """Whether a resumed run's first norm and scales are those that followed from the checkpoint."""

    def rows(gauge, engine):
        return {name: each.rows.tolist() for name, each in gauge.scales.now.items()}

    with pytest.MonkeyPatch.context() as patch:
        used = watch(patch, Gauge, "measure", before=rows)
        first = tiny.trained(made(folder, **SAVING, **BETA))
        again = tiny.resumed(made(folder, **SAVING, **BETA), 2)
    saved = float(load_file(folder / "checkpoint-2" / FILE_NAME)["ratio"])
    assert 0.1 * saved == pytest.approx(logged(first)[2])
    assert again.ledger.events == (PoissonSampledGaussian(1.0, 0.2, 6, beside={"count": 2.0}),)
    _, *steps, _, third, _ = used  # each run measures synthetic examples first
    assert len(steps) == 4 and steps[0] == {} and steps[2] and logged(first)[2] != 0.1
    return logged(again)[2] == logged(first)[2] and third == steps[2]


@pytest.mark.parametrize("planted", [(), (Gauge, "load"), (Scales, "go_on")])
def test_a_resumed_run_goes_on_with_its_norm_and_scales(planted, tmp_path, monkeypatch):
    if planted:
        monkeypatch.setattr(*planted, lambda *given: None)
    assert goes_on_with_its_gauge(tmp_path) == (not planted)


def test_a_resume_with_another_norm_or_without_it_is_refused(paid, tmp_path):
    folder = Path(shutil.copytree(paid.args.output_dir, tmp_path / "copy"))
    for changed, name in (
        ({**NORM, **BETA, "clipping_quantile": 0.6}, "clipping_quantile"),
        ({"accountant": "rdp", **BETA}, "clipping_quantile"),
        (NORM, "gradient_scaling_beta"),
    ):
        again = tiny.trainer(folder, **{**SAVING, **changed, "target_epsilon": 3.0})
        with pytest.raises(LedgerError, match=f"`{name}`"):
            again.train(resume_from_checkpoint=True)
    again, state = made(folder, target_epsilon=3.0, **SAVING, **BETA), folder / "checkpoint-4"
    kept = load_file(state / FILE_NAME)
    ratios = [torch.tensor(each) for each in (1e9, 1e-3, torch.nan, [1.0, 1.0])]
    broken = [None, b"{", save({}), *(save({**kept, "ratio": each}) for each in ratios)]
    for name in (min(kept), max(kept)):  # of columns, and of rows
        for each in (kept[name][1:], kept[name] * torch.nan, kept[name] - 1):
            broken.append(save({**kept, name: each}))
        broken.append(save({other: each for other, each in kept.items() if other != name}))
    for each in broken:
        (state / FILE_NAME).unlink() if each is None else (state / FILE_NAME).write_bytes(each)
        with pytest.raises(ConfigError, match=FILE_NAME):
            again.train(resume_from_checkpoint=str(state))


class TellsIt(TrainerCallback):
    """Logs a number of its own under the names of released ones."""

    def on_step_end(self, args, state, control, **given):
        state.log_history.append({"clipping_norm": 7.0, "noised_loss": 7.0, "step": 7})


@pytest.mark.parametrize(("asks", "names"), [({}, {"step"}), (NORM, {"step", "clipping_norm"})])
def test_names_of_released_numbers_are_kept_where_the_run_releases_them(asks, names, tmp_path):
    given = {"callbacks": [TellsIt()]}
    trainer = tiny.trained(tiny.trainer(tmp_path, **asks, max_steps=2, given=given))
    trainer.save_state()
    rows = [row for row in trainer.state.log_history if row["step"] == 7]
    assert len(rows) == 2 and all(set(row) == names for row in rows)


@pytest.mark.parametrize("config", [RGP, {"peft_config": LoraConfig(r=2, task_type="SEQ_CLS")}])
def test_tuners_have_it(config, tmp_path):
    norms = logged(tiny.trained(made(tmp_path, given=config, max_steps=2)))
    assert len(norms) == 2 and norms[0] == 0.1 != norms[1]
    assert disagreements(read(tmp_path)) == []


def test_a_user_is_counted_once_in_however_many_parts(tmp_path, monkeypatch):
    """Of up to 7 rows, in physical batches of 2."""
    options = {"per_device_train_batch_size": 2, "max_rows_per_unit": 7, "max_steps": 3}
    trainer = users.trainer(tmp_path, **{**NORM, "accountant": "pld"}, **options)
    sampler = type(trainer.privacy_plan.sampler())
    counted = watch(monkeypatch, ClippingQuantile, "counted", lambda h, self, sizes, *_: len(sizes))
    drawn = watch(monkeypatch, sampler, "draw", lambda found, self: len(found))
    trainer.train()
    assert sum(counted) == sum(drawn[:3]) > 0
    assert "each user that is drawn counts" in trainer.privacy_statement().mechanism


# -- what is refused --

NEW, BAD = UnsupportedArgumentError, InvalidArgumentError
ITS_NORM, DP_FP = {"release": ["clipped_gradient_norm"]}, {"privacy_mode": "dp_fp", "dp_fp_variant": "private_encoder"}  # fmt: skip
REFUSED = [
    (NORM, {"clipping_quantile": 1.0}, BAD, "`clipping_quantile` to be in"),
    (NORM, {"clipping_quantile": None}, BAD, "`clipping_quantile_budget_ratio`"),
    (NORM, {"clipping": "automatic"}, BAD, "`clipping` to be 'flat'"),
    (NORM, {"clipping": "per_layer"}, NEW, "not implemented"),
    (NORM, {"adam_bc_floor": 0.1}, NEW, "`adam_bc_floor`.*not implemented"),
    (NORM, ITS_NORM, NEW, "not implemented"),
    (NORM, DP_FP, NEW, "`clipping_quantile`"),
    (NORM, {"sampling": "random_allocation", "accountant": "pld"}, NEW, "`clipping_quantile` to be left"),
    (BETA, {"gradient_scaling_beta": 1.0}, BAD, "`gradient_scaling_beta` to be in"),
    (BETA, {"adam_bc_floor": 0.1}, NEW, "`adam_bc_floor`.*not implemented"),
    (BETA, {"chunked_loss": True}, NEW, "`chunked_loss`.*not implemented"),
    (BETA, ITS_NORM, NEW, "not implemented"),
    (BETA, {"audit_canaries": 4, "audit_scores": "directions"}, NEW, "`gradient_scaling_beta`"),
    (BETA, DP_FP, NEW, "`gradient_scaling_beta`"),
]  # fmt: skip


@pytest.mark.parametrize(("asked", "options", "error", "match"), REFUSED)
def test_what_does_not_go_with_it_is_refused(asked, options, error, match, tmp_path):
    with pytest.raises(error, match=match) as refused:
        tiny.trainer(tmp_path, **{"accountant": "rdp", **asked, **options})
    assert refused.type is error


def test_scales_of_other_numbers_than_gradients_are_refused(tmp_path):
    trainer = tiny.trainer(tmp_path, given=RGP, **BETA)
    with pytest.raises(UnsupportedArgumentError, match="`peft_config` to be one without it"):
        trainer.train()
    assert trainer.ledger.steps() == 0
