"""The built package holds every folder, the two links point where they should, and the command line starts light."""

import json
import re
import subprocess
import sys
import types
from importlib.util import find_spec
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
from setuptools import find_packages

import cce_dist
from cce_dist import call, decide
from cce_dist.divergence import topk
from cce_dist.integrations import options
from cce_dist.kernels.divergence import heads
from cce_dist.tools import cli

ROOT = Path(__file__).resolve().parents[2]
LINKS = ("kernels", "integrations")


def test_every_folder_with_an_init_is_packaged():
    """Catches a package that the build does not find: those behind the links are found through them."""
    # Path.rglob does not follow links before Python 3.13, so the linked folders are walked where they really are.
    roots = {"cce_dist": ROOT / "cce_dist"} | {f"cce_dist.{link}": ROOT / link for link in LINKS}
    inits = (
        (name, init.parent.relative_to(root)) for name, root in roots.items() for init in root.rglob("__init__.py")
    )
    folders = {".".join((name, *folder.parts)) for name, folder in inits}
    assert set(find_packages(str(ROOT), include=["cce_dist*"])) == folders
    assert (ROOT / "cce_dist" / "py.typed").exists()


def git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("link", LINKS)
def test_git_keeps_the_link_as_a_link(link):
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    assert git("ls-files", "--stage", f"cce_dist/{link}").startswith("120000 ")
    assert (ROOT / "cce_dist" / link).resolve() == ROOT / link


def run_python(code: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)


VERSION = rf"cce-dist {re.escape(cce_dist.__version__)}( \(commit \w{{10,}}(-dirty)?\))?, python 3\."


@pytest.mark.parametrize(("argument", "says"), [("--help", "pretrain --tp 2"), ("--version", f"^{VERSION}")])
def test_help_and_version_are_said_without_torch(argument: str, says: str):
    code = f"import sys; sys.modules['torch'] = None; from cce_dist.tools.cli import main; main([{argument!r}])"
    result = run_python(code)
    assert result.returncode == 0, result.stderr
    assert re.search(says, result.stdout)


def test_the_version_has_the_commit(monkeypatch, tmp_path, capsys):
    """Of a checkout, of what pip installed from a repository, and none of what it installed from a folder or an index."""

    def said() -> str:
        with pytest.raises(SystemExit):
            cli.main(["--version"])
        return capsys.readouterr().out.split(", ")[0].removeprefix(f"cce-dist {cce_dist.__version__}")

    if (ROOT / ".git").exists():
        assert git("rev-parse", "HEAD").startswith(said().removeprefix(" (commit ").split("-dirty")[0].rstrip(")"))
    monkeypatch.setattr(cce_dist, "__file__", str(tmp_path / "cce_dist" / "__init__.py"))
    of_commit = '{"vcs_info": {"commit_id": "0123456789abcdef"}}'
    for record, told in ((of_commit, " (commit 0123456789)"), ('{"dir_info": {}}', ""), (None, "")):
        distribution = types.SimpleNamespace(version="1", read_text=lambda _, record=record: record)
        monkeypatch.setattr(cli.importlib.metadata, "distribution", lambda _, found=distribution: found)
        assert said() == told


def test_an_adapter_without_its_package_names_it_and_the_loss_imports_none():
    code = (
        "import sys, cce_dist\n"
        "assert not {'cce_dist.integrations.deferred', 'transformers'} & sys.modules.keys(), 'the import is light'\n"
        "sys.modules['spmd_types'] = sys.modules['torchtitan'] = None\n"
        "import cce_dist.integrations.torchtitan\n"
    )
    assert "needs torchtitan, which is not installed" in run_python(code).stderr


def test_a_picture_without_matplotlib_is_refused_before_the_plan(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert cli.main(["plan", "--model", "llama-3-8b", "--picture", "x.png"]) == 1
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1
    assert 'matplotlib, which is not installed: pip install "cce-dist[train]"' in said.err


def test_a_shell_completes_every_public_name():
    assert {*cce_dist.__all__, "objectives"} == {name for name in dir(cce_dist) if not name.startswith("_")}


RIGHT = """import torch
from torch import nn
import cce_dist
from cce_dist import linear_cross_entropy as loss

class Model(nn.Module):
    width: int = 8

x, ids = torch.randn(4, 8), torch.arange(4)
cce_dist.convert(Model(), filter="plain", filter_eps=0.1, reduce_dtype="float32").width.bit_count()
cce_dist.require(torch.compile(cce_dist.revert(Model())))
loss(x, x, ids, return_aux=("nll", "lse")).nll.sum()
loss(x, x, ids, token_loss=cce_dist.objectives.dft(), reduction="none").sum()
cce_dist.explain(x, x, ids, reduction="sum", return_aux=True)
"""
WRONG = """cce_dist.convert(Model(), filter="fast")
cce_dist.convert(Model(), filter_epsilon=0.1)
cce_dist.convert("gpt2")
cce_dist.convert(Model()).width.upper()
loss(x, x, ids, reduction="average")
loss(x, x, ids, backend="cuda")
loss(x, x, ids, token_loss=cce_dist.objectives.dft)
cce_dist.linear_kl_divergence(x, x, x, x, kind="backward")
cce_dist.topk_kl_divergence(x, x, ids, x, outside="rest")
cce_dist.explain(x, x, ids, labels_smoothing=0.1)
"""


@pytest.mark.skipif(find_spec("pyright") is None, reason="pyright is not installed")
def test_a_type_checker_finds_ten_wrong_calls(tmp_path):
    """Catches an option without a type, a function that returns Any, and right calls that are refused."""
    (tmp_path / "calls.py").write_text(RIGHT + WRONG)
    command = [sys.executable, "-m", "pyright", "--outputjson", str(tmp_path / "calls.py")]
    said = json.loads(subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout)
    found = {error["range"]["start"]["line"] for error in said["generalDiagnostics"]}
    assert found == {RIGHT.count("\n") + i for i in range(10)}


def test_types_are_the_names_that_the_checks_know():
    divergence, of_k_ids = (get_type_hints(f) for f in (cce_dist.linear_kl_divergence, cce_dist.topk_kl_divergence))
    assert get_args(divergence["kind"]) == heads.KINDS
    assert (get_args(of_k_ids["kind"]), get_args(of_k_ids["outside"])) == (topk.KINDS, topk.OUTSIDE)
    assert get_args(call.Backend) == decide.BACKENDS
    of_convert = get_type_hints(options.ConvertOptions)
    assert of_convert.keys() == set(options.ModelOptions.known())
    assert get_args(of_convert["reduce_dtype"]) == tuple(options.REDUCE_DTYPES)
