#!/usr/bin/env bash
# Builds the package, and tries it: a source distribution and a wheel, checked by twine, and the wheel installed in an environment of
# its own, away from the source, where it computes a loss, runs the command and imports an adapter.
#
#   launch/build.sh [FOLDER] [REVISION]     FOLDER (default: dist) gets the files; links of the README lead to REVISION (main)
#
# Needs `uv`. Where .venv is there, the wheel borrows torch and the other packages from it; else torch is installed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=$(realpath -m "${1:-dist}") revision=${2:-main}
uv=$(command -v uv || echo "$PWD/.venv/bin/uv")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# A package index renders the README by itself: its relative links become links to the repository.
mkdir "$work/source"
git ls-files -z | xargs -0 tar c | tar x -C "$work/source"
repository=$(sed -n 's/^Repository = "\(.*\)"$/\1/p' pyproject.toml)
sed -i -E "s#\]\((docs/[^)]*\.(png|svg))\)#](${repository/github.com/raw.githubusercontent.com}/$revision/\1)#g
           s#\]\(([A-Za-z][A-Za-z_/.-]*\.md(\#[^)]*)?)\)#]($repository/blob/$revision/\1)#g" "$work/source/README.md"
(cd "$work/source" && "$uv" build --quiet --out-dir "$work/dist")
"$uv" tool run --quiet twine==7.0.0 check --strict "$work"/dist/*

python=$work/env/bin/python
if [ -x .venv/bin/python ]; then
    "$uv" venv --quiet --python .venv/bin/python "$work/env"
    "$uv" pip install --quiet --no-deps --python "$python" "$work"/dist/*.whl
    packages="import sysconfig; print(sysconfig.get_path('purelib'))"
    .venv/bin/python -c "$packages" >"$("$python" -c "$packages")/borrowed.pth"
else
    "$uv" venv --quiet "$work/env"
    "$uv" pip install --quiet --python "$python" --torch-backend cpu "$work"/dist/*.whl "transformers>=5"
fi
cd "$work"
"$work/env/bin/cce-dist" --version
"$python" -I - <<'PYTHON'
import torch, cce_dist
assert "/env/" in cce_dist.__file__, cce_dist.__file__
hidden, weight, labels = torch.randn(64, 32), torch.randn(1000, 32), torch.randint(1000, (64,))
ours = cce_dist.linear_cross_entropy(hidden.requires_grad_(), weight.requires_grad_(), labels)
ours.backward()
torch.testing.assert_close(ours, torch.nn.functional.cross_entropy(hidden @ weight.T, labels))
from transformers import LlamaConfig, LlamaForCausalLM
sizes = dict(vocab_size=1000, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)
model, ids = LlamaForCausalLM(LlamaConfig(**sizes)), torch.randint(1000, (2, 16))
stock = model(ids, labels=ids).loss
torch.testing.assert_close(cce_dist.convert(model)(ids, labels=ids).loss, stock)
print("the wheel computes a loss, and converts a model")
PYTHON
mkdir -p "$out" && cp "$work"/dist/* "$out"
echo "built: $(cd "$out" && echo *)"
