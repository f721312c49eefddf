#!/usr/bin/env bash
# Builds the documentation's site in site/ (or the folder that is given), and fails where a link leads nowhere. Needs `uv`, which
# the extra [dev] brings: mkdocs is no part of .venv. `launch/site.sh serve` shows the site at http://127.0.0.1:8000 instead.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
run=(uv run --quiet --no-project --isolated --with mkdocs==1.6.1 --with mkdocs-material==9.7.7 --with mkdocstrings-python==2.0.9 mkdocs)
if [ "${1:-}" = serve ]; then
    exec "${run[@]}" serve
fi
exec "${run[@]}" build --strict --quiet --site-dir "$(realpath -m "${1:-site}")"
