#!/usr/bin/env bash
# Usage: build_suffix.sh VENV DIR
# Builds the suffix trees that vLLM's `suffix` needs into DIR/arctic_inference: arctic-inference is a source package whose
# other parts need CUDA. Needs CMake and a C++20 compiler.
set -euo pipefail
bin=$1/bin
dir=$2
[ -d "$dir/arctic_inference" ] && exit
root=$(cd "$(dirname "$0")/../.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$bin/python" -m pip download -q --disable-pip-version-check --no-deps --no-build-isolation --require-hashes \
  -r "$root/requirements/suffix.txt" -d "$work"
"$bin/uv" pip install -q --python "$bin/python" --no-deps --target "$work/nanobind" "$work"/nanobind-*.whl
tar -xf "$work"/arctic_inference-*.tar.gz -C "$work"
source=$(echo "$work"/arctic_inference-*/)
export PYTHONPATH=$work/nanobind
cmake -S "$source/csrc/suffix_decoding" -B "$work/build" -DPython_EXECUTABLE="$(cd "$bin" && pwd)/python" > "$work/log"
cmake --build "$work/build" >> "$work/log" || { tail -30 "$work/log" >&2; exit 1; }
mkdir -p "$dir"
mkdir "$work/arctic_inference"
touch "$work/arctic_inference/__init__.py"
cp -r "$source/arctic_inference/suffix_decoding" "$work/arctic_inference/"
cp "$work"/build/_C*.so "$work/arctic_inference/suffix_decoding/"
cp -r "$work/arctic_inference" "$dir/"
