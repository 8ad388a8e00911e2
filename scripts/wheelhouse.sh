#!/usr/bin/env bash
# Fills build/wheelhouse/ with everything that the container image installs, so that building it asks no package index.
#
# Usage: scripts/wheelhouse.sh        (or `make wheelhouse`, which runs it only when pyproject.toml has changed)
#   PYTHON     a Python 3.11 on x86-64 or arm64 Linux, as in the image (default: python3.11, then python3)
#   PIP_FLAGS  more flags for pip. Plain PyPI has only the CUDA build of torch, several gigabytes that the image has no
#              use for; name the index of PyTorch's CPU builds:
#                PIP_FLAGS="--extra-index-url URL" scripts/wheelhouse.sh
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-$(command -v python3.11 || command -v python3)}
wheelhouse=build/wheelhouse
fail() { echo "wheelhouse: $*" >&2; exit 1; }

version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
[[ $version == 3.11 ]] || fail "the image runs Python 3.11, this is $version ($python); set PYTHON to a Python 3.11"

mkdir -p build
# A virtual environment of its own: the host's pip may be too old to know the tags of current wheels.
tools=build/wheelhouse-venv
[[ -x $tools/bin/pip ]] || "$python" -m venv "$tools"
"$tools/bin/pip" install --quiet --upgrade pip

"$tools/bin/python" - >build/requirements.txt <<'PY'
import tomllib

with open("pyproject.toml", "rb") as file:
    project = tomllib.load(file)
print("\n".join(project["project"]["dependencies"]))
PY

# What has no wheel (fastecdsa, for one) comes as source and is compiled in the image's build stage, against that
# stage's libraries. It is compiled without an index, so what compiles it must lie in the wheelhouse too.
fresh=$(mktemp -d build/wheelhouse.XXXXXX)
trap 'rm -rf "$fresh"' EXIT
# shellcheck disable=SC2086 # PIP_FLAGS is a list of flags
"$tools/bin/pip" download --quiet --dest "$fresh" ${PIP_FLAGS:-} \
  --requirement build/requirements.txt pip setuptools wheel "hatchling>=1.27" "cython" poetry-core flit-core

if compgen -G "$fresh/nvidia_*" >/dev/null; then
  fail "pip chose the CUDA build of torch; set PIP_FLAGS to an index with CPU builds (see the top of this script)"
fi
rm -rf "$wheelhouse"
mv "$fresh" "$wheelhouse"
trap - EXIT
echo "wheelhouse: $(find "$wheelhouse" -type f | wc -l) files, $(du -sh "$wheelhouse" | cut -f1) in $wheelhouse"
