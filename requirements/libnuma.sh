#!/usr/bin/env bash
# Usage: libnuma.sh VENV
# vLLM's build for CPUs is linked against the system's libnuma.so.1, which a minimal Linux does not have and which no
# Python package is there to bring. Where it is missing, it is taken from a wheel that carries it for its own use, and
# put into VENV/lib/scalerl, from where only vLLM's server and tests take it.
set -euo pipefail
venv=$1
loads() { "$venv/bin/python" -c 'import ctypes, sys; ctypes.CDLL(sys.argv[1])' "$1"; }
rm -rf "$venv/lib/scalerl"
loads libnuma.so.1 2>/dev/null && exit
unpacked=$(mktemp -d "$venv/libnuma.XXXXXX")
trap 'rm -rf "$unpacked"' EXIT
"$venv/bin/uv" pip install -q --python "$venv/bin/python" --target "$unpacked" --no-deps --require-hashes \
  -r "$(dirname "$0")/libnuma.txt"
found=("$unpacked"/*.libs/libnuma-*.so.1*)
[ -e "${found[0]}" ] || { echo "libnuma.txt's wheel carries no libnuma any more: pin one that does" >&2; exit 2; }
loads "${found[0]}"
mkdir "$venv/lib/scalerl"
cp "${found[0]}" "$venv/lib/scalerl/libnuma.so.1"
