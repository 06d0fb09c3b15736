#!/usr/bin/env bash
# Writes the locks from the members' pyproject files. Run through `make lock`.
#   control  operator (with lifecycle and autoscaling), curve-fit, coordinator, CLI (with local), for the operator's image: no torch, no matplotlib
#   cpu/gpu  everything, with the vLLM build of that device (the two exclude each other)
#   dev      what lint and tests need beside cpu, at cpu's versions
#   uv       the installer itself
#   s3       what trainer.export.to: s3://… needs: in the trainer's image, and in dev
#   trackers what spec.trackers.wandb and .mlflow need, beside the coordinator, and in dev
#   bench    what benchmarks compare against
#   sbom     what writes the bills of materials of a release (release/build.py), in an environment of its own
#   openenv  a server of another project, which a test of make test-full runs in an environment of its own
#   textarena  games that a test of make test-full plays, in an environment of its own over this project's
#   suffix   arctic-inference, of which a benchmark builds a part
#   libnuma  a wheel that carries libnuma, for machines without (libnuma.sh)
set -euo pipefail
cd "$(dirname "$0")/.."
UV=${UV:-uv}
lock() {
  "$UV" pip compile -q --universal --python-version 3.11 --generate-hashes --no-header --no-annotate \
    --override requirements/overrides.txt --no-emit-package scalerl-api --no-emit-package scalerl-tasks \
    --no-emit-package scalerl-operator --no-emit-package scalerl-curvefit --no-emit-package scalerl-processes \
    --no-emit-package scalerl-lifecycle --no-emit-package scalerl-autoscaling --no-emit-package scalerl-local \
    --no-emit-package scalerl-coordinator --no-emit-package scalerl-analysis --no-emit-package scalerl-cli "$@"
}
members() { printf '%s/pyproject.toml ' "$@"; }
all=$(members processes api tasks curvefit coordinator trainer generator lifecycle autoscaling local operator analysis cli extras)
control=$(members processes api tasks curvefit coordinator lifecycle autoscaling local operator analysis cli extras)
# shellcheck disable=SC2086
{
  lock $all --extra cpu -o requirements/cpu.txt
  lock $all --extra gpu -c requirements/gpu-constraints.txt -o requirements/gpu.txt
  lock $control --override requirements/control-overrides.txt -c requirements/cpu.txt -o requirements/control.txt
  # These two are in cpu.txt and gpu.txt, at versions that differ.
  lock requirements/dev.in -c requirements/cpu.txt --override requirements/trackers-overrides.txt \
    --no-emit-package setuptools --no-emit-package protobuf -o requirements/dev.txt
}
lock requirements/sbom.in -o requirements/sbom.txt
lock requirements/uv.in -c requirements/dev.txt -o requirements/uv.txt
lock requirements/s3.in -c requirements/cpu.txt -o requirements/s3.txt
lock requirements/trackers.in --override requirements/trackers-overrides.txt -c requirements/dev.txt -c requirements/cpu.txt \
  --no-emit-package protobuf -o requirements/trackers.txt
lock requirements/bench.in -c requirements/cpu.txt -o requirements/bench.txt
lock requirements/libnuma.in --no-deps -o requirements/libnuma.txt
lock requirements/suffix.in --no-deps -o requirements/suffix.txt
lock requirements/openenv.in --override requirements/openenv-overrides.txt -o requirements/openenv.txt
lock requirements/textarena.in -c requirements/cpu.txt -o requirements/textarena.txt
