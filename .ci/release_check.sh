#!/usr/bin/env bash
# Build the wheel and the source archive, check both, and use the wheel where only the core's dependencies are.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
UV="${UV:-.venv/bin/uv}" PYTHON="${PYTHON:-.venv/bin/python}"
UV="$(realpath "$UV")" PYTHON="$(realpath -s "$PYTHON")"

rm -rf dist && "$UV" build --quiet --python "$PYTHON" --build-constraints constraints.txt
"$UV" tool run --quiet --python "$PYTHON" twine check --strict dist/*

bare="$(mktemp -d)"
trap 'rm -rf "$bare"' EXIT
"$UV" venv --quiet --python "$PYTHON" "$bare/venv"
"$UV" pip install --quiet --python "$bare/venv/bin/python" --constraints constraints.txt dist/*.whl
cp .ci/bare_use.py "$bare" && cd "$bare" && OMP_NUM_THREADS=1 venv/bin/python bare_use.py
