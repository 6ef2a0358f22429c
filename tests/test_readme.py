"""Every Python example of the README runs as it stands, and prints what its comments say."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
EXAMPLES = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)


def test_the_faces_are_shown() -> None:
    text = "\n".join(EXAMPLES)
    for name in ("KVManager", "paged_attention", "LLM(", "AsyncEngine(", "LLM.resume(", "LeafCache(", "leafkv.torch"):
        assert name in text


def test_links_and_paths_lead_to_files() -> None:
    for document in ROOT.glob("*.md"):
        text = document.read_text()
        links = re.findall(r"\]\(([^)#:]+)\)", text)
        paths = re.findall(r"`((?:python|rust|examples|tests|benches)/[\w./-]+)`", text)
        for path in links + paths:
            assert (ROOT / path).exists(), f"{document.name}: {path}"


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda code: code.strip().splitlines()[0])
def test_example(example: str, capsys: pytest.CaptureFixture[str]) -> None:
    if "import torch" in example:
        pytest.importorskip("torch")
    namespace: dict[str, Any] = {"__name__": "readme"}
    exec(compile(example, str(README), "exec"), namespace)
    printed = capsys.readouterr().out.splitlines()
    # `print(...)  # text` promises a line of output.
    promised = re.findall(r"^\s*print\(.*\)  # (.+)$", example, re.MULTILINE)
    assert promised, "an example shows nothing"
    for line in promised:
        assert line in printed
