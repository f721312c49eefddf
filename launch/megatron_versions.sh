#!/usr/bin/env bash
# Tests the Megatron adapter on other versions of megatron-core than CI's, one after the other, in the environment of test.sh:
#
#   launch/megatron_versions.sh 0.12.3 0.13.1 0.14.0 0.15.3 0.16.1      # and, with Python >= 3.12, 0.17.1 0.18.2 0.19.2
#
# Each is installed into a temporary folder, without its dependencies, and put before the environment's own.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
. launch/prepare.sh dev

failed=()
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
for version in "$@"; do
    echo "== megatron-core $version"
    pip install -q --disable-pip-version-check --no-deps --target "$folder/$version" "megatron-core==$version" &&
        PYTHONPATH="$folder/$version" pytest -q tests/adapters/test_megatron.py || failed+=("$version")
done
[ ${#failed[@]} -eq 0 ] || { echo "FAILED: ${failed[*]}" >&2; exit 1; }
