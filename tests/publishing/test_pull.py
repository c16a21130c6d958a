"""What was pushed loads by its name, computes what it computed here, and is verified there."""

import pytest
import tiny
from huggingface_hub import constants, hf_api
from loopback_hub import BASE, USER

from hf_dp.cli.main import main
from hf_dp.publishing.hub import publish

TEXTS = ["good film", "the plot was very bad and long", "fine"]


def test_what_is_pulled_computes_what_was_pushed(hub, trained, base, tmp_path, monkeypatch):
    from peft import AutoPeftModelForSequenceClassification
    from transformers import AutoModelForSequenceClassification, pipeline

    def scores(**model) -> list[dict[str, float]]:
        classify = pipeline("text-classification", top_k=None, **model)
        return [{row["label"]: row["score"] for row in rows} for rows in classify(TEXTS)]

    hub.add(BASE, {path.name: path.read_bytes() for path in base.iterdir()})
    loaders = {
        "full": AutoModelForSequenceClassification,
        "lora": AutoPeftModelForSequenceClassification,
    }
    here = {}
    for method, loader in loaders.items():
        publish(trained(method), f"{USER}/{method}", base_model=None if method == "full" else BASE)
        model = loader.from_pretrained(trained(method))
        here[method] = scores(model=model, tokenizer=tiny.tokenizer())
    assert here["full"] != here["lora"]
    # As HF_ENDPOINT and HF_HOME say for a reader, who has no token.
    path = constants.HUGGINGFACE_CO_URL_TEMPLATE.removeprefix(constants.ENDPOINT)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + path)
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(hf_api.api, "endpoint", hub.url)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("HF_TOKEN")
    for method, rows in here.items():  # float32 sums depend on where in memory they are formed
        name = f"{USER}/{method}"
        for found, expected in zip(scores(model=name), rows, strict=True):
            assert found == pytest.approx(expected, abs=1e-6), method
        assert main(["verify", name]) == 0
    assert list((tmp_path / "cache").glob("models--*"))
