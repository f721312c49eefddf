#!/usr/bin/env bash
# The checks of the project: ruff, pyright and pytest, in .venv.
#
#   launch/test.sh [PYTEST ARGUMENTS]       a newcomer's: every kind of thing once
#   launch/test.sh all [PYTEST ARGUMENTS]   what CI runs: all tests but sweeps, whether constraints.txt can be installed, the
#                                           kernels under the newest Triton, the package, and the site
#
# For example, `launch/test.sh -k merge`. `-m sweep` runs the sweeps (CONTRIBUTING.md).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. launch/prepare.sh dev

said=$(mktemp -d)
checks=("ruff check ." "ruff format --check ." pyright)
tests=(-m "not slow and not sweep")
if [ "${1:-}" = all ]; then
    shift
    checks+=(launch/resolve.sh launch/newest_triton.sh "launch/build.sh $said/dist" "launch/site.sh $said/site")
    tests=(-m "not sweep")
fi

# The checks run beside pytest, whose tests leave the network to them, and all of them even when one fails. What they say follows
# pytest's summary, and what failed closes the output.
trap 'rm -rf "$said"' EXIT
running=() failed=()
for number in "${!checks[@]}"; do
    ${checks[number]} >"$said/$number" 2>&1 &
    running+=($!)
done
# Two tests run side by side: most of them use one core. Tests of one `xdist_group` share what its first one made.
pytest -n 2 --dist loadgroup "${tests[@]}" "$@" || failed+=("pytest")
for number in "${!checks[@]}"; do
    wait "${running[number]}" || failed+=("${checks[number]}")
    cat "$said/$number"
done
if [ ${#failed[@]} -gt 0 ]; then
    printf 'FAILED: %s\n' "${failed[@]}" >&2
    exit 1
fi
