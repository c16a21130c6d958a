"""What was pushed loads in a fresh process by its name, computes what it computed here, and is
verified there."""

from __future__ import annotations

import json
import os

import pytest
import tiny
from loopback_hub import BASE, USER
from warm import run_program

from hf_dp.publishing.hub import publish

TEXTS = ["good film", "the plot was very bad and long", "fine"]
# The Hub on loopback, as HF_ENDPOINT and HF_HOME would say; the client is imported already.
PROGRAM = """
import json, sys
from huggingface_hub import constants, hf_api
path = constants.HUGGINGFACE_CO_URL_TEMPLATE.removeprefix(constants.ENDPOINT)
constants.ENDPOINT = hf_api.api.endpoint = sys.argv[3]
constants.HUGGINGFACE_CO_URL_TEMPLATE = sys.argv[3] + path
constants.HF_HUB_CACHE, constants.HF_HUB_OFFLINE, constants.HF_HUB_DISABLE_XET = "cache", False, True
from transformers import pipeline
texts, found = json.loads(sys.argv[1]), {}
for method in ("full", "lora"):
    classify = pipeline("text-classification", model=f"{sys.argv[2]}/{method}", top_k=None)
    found[method] = [
        {row["label"]: row["score"] for row in rows} for rows in classify(texts)
    ]
from hf_dp.cli.main import main
for method in found:
    assert main(["verify", f"{sys.argv[2]}/{method}"]) == 0, method
print(json.dumps(found))
"""


def test_what_is_pulled_computes_what_was_pushed(hub, trained, base, tmp_path):
    from peft import AutoPeftModelForSequenceClassification
    from transformers import AutoModelForSequenceClassification, pipeline

    hub.add(BASE, {path.name: path.read_bytes() for path in base.iterdir()})
    here = {}
    for method in ("full", "lora"):
        publish(trained(method), f"{USER}/{method}", base_model=None if method == "full" else BASE)
        loader = (
            AutoModelForSequenceClassification
            if method == "full"
            else AutoPeftModelForSequenceClassification
        )
        model = loader.from_pretrained(trained(method))
        classify = pipeline(
            "text-classification", model=model, tokenizer=tiny.tokenizer(), top_k=None
        )
        here[method] = [{row["label"]: row["score"] for row in rows} for rows in classify(TEXTS)]
    environment = {key: value for key, value in os.environ.items() if key != "HF_TOKEN"}  # public
    words = [json.dumps(TEXTS), USER, hub.url]
    done = run_program(PROGRAM, tmp_path, words, environment)
    assert done.returncode == 0, done.stderr[-3000:]
    pulled = json.loads(done.stdout.splitlines()[-1])
    for method, rows in here.items():  # float32 sums depend on where in memory they are formed
        for found, expected in zip(pulled[method], rows, strict=True):
            assert found == pytest.approx(expected, abs=1e-6), method
    assert here["full"] != here["lora"]
