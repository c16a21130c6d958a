"""What was pushed loads in a fresh process by its name, computes what it computed here, and is
verified there."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import tiny
from loopback_hub import BASE, USER

from hf_dp.publishing.hub import publish

TEXTS = ["good film", "the plot was very bad and long", "fine"]
PROGRAM = """
import json, sys
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
    environment = {
        **os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"),
        "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_XET": "1",
        "NO_PROXY": "127.0.0.1",
    }  # fmt: skip
    del environment["HF_TOKEN"]  # they are public
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(TEXTS), USER],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    pulled = json.loads(done.stdout.splitlines()[-1])
    for method, rows in here.items():  # float32 sums depend on where in memory they are formed
        for found, expected in zip(pulled[method], rows, strict=True):
            assert found == pytest.approx(expected, abs=1e-6), method
    assert here["full"] != here["lora"]
