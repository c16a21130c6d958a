"""A recipe in a folder, for tests of the command line."""

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from hf_dp.cli.main import main


class Recipe:
    """A configuration file, with its model and its data in the same folder.

    Attributes: out: where its run writes. said: what the last command wrote to stderr.
    """

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str], **values: Any) -> None:
        self.folder, self.out, self.file = folder, folder / "out", folder / "run.yaml"
        self.capsys, self.said = capsys, ""
        always = {
            "output_dir": str(self.out), "save_strategy": "no", "use_cpu": True,
            "disable_tqdm": True, "dataloader_pin_memory": False, "report_to": "none",
        }  # fmt: skip
        self.file.write_text(yaml.safe_dump({**always, **values}))

    def __str__(self) -> str:
        return str(self.file)

    @property
    def values(self) -> dict[str, Any]:
        return yaml.safe_load(self.file.read_text())

    def change(self, **values: Any) -> str:
        """Set these keys, or remove those that are None; return the file's name."""
        merged = self.values | values
        self.file.write_text(yaml.safe_dump({k: v for k, v in merged.items() if v is not None}))
        return str(self)

    def run(self, command: str = "train", *words: str, code: int = 0, **values: Any) -> str:
        """Run a command with this file, changed so, to this exit code; return what it prints."""
        self.capsys.readouterr()
        given = [*command.split(), "--config", self.change(**values), *words]
        found = main(given)
        printed, self.said = self.capsys.readouterr()
        assert found == code, self.said
        return printed

    def refused(self, message: str, command: str = "train", *words: str, **values: Any) -> str:
        """Run a command that is refused with a line that this pattern matches; return the line."""
        self.run(command, *words, code=2, **values)
        assert re.search(message, self.said), self.said
        return self.said

    def saved(self, name: str = "privacy.json") -> dict[str, Any]:
        """What is in a JSON file that the run wrote."""
        return json.loads((self.out / name).read_text())

    def lines(self, name: str, rows: Iterable[Mapping[str, Any]]) -> str:
        """Write a file of JSON lines; return its name."""
        file = self.folder / name
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(file)
