"""The built package holds every folder, the two links point where they should, and the command line starts light."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from setuptools import find_packages

from cce_dist.tools import cli

ROOT = Path(__file__).resolve().parents[2]
LINKS = ("kernels", "integrations")


def test_every_folder_with_an_init_is_packaged():
    """Catches a package that the build does not find: those behind the links are found through them."""
    # Path.rglob does not follow links before Python 3.13, so the linked folders are walked where they really are.
    roots = {ROOT / "cce_dist": "cce_dist"} | {ROOT / link: f"cce_dist.{link}" for link in LINKS}
    folders = {
        ".".join((name, *init.parent.relative_to(root).parts))
        for root, name in roots.items()
        for init in root.rglob("__init__.py")
    }
    assert set(find_packages(str(ROOT), include=["cce_dist*"])) == folders
    assert (ROOT / "cce_dist" / "py.typed").exists()


@pytest.mark.parametrize("link", LINKS)
def test_git_keeps_the_link_as_a_link(link):
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    entry = subprocess.run(
        ["git", "ls-files", "--stage", f"cce_dist/{link}"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert entry.startswith("120000 ") and (ROOT / "cce_dist" / link).resolve() == ROOT / link


def run_python(code: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)


def test_top_level_help_itself_imports_no_torch():
    code = "import sys; sys.modules['torch'] = None; import runpy; runpy.run_path({!r})['main'](['--help'])"
    result = run_python(code.format(str(ROOT / "cce_dist" / "tools" / "cli.py")))
    assert result.returncode == 0, result.stderr
    assert "cce-dist pretrain --tp 2" in result.stdout


def test_unknown_command_names_the_choices(capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main(["pretrian"])
    assert "pretrain" in capsys.readouterr().err.splitlines()[-1]


@pytest.fixture
def fake(monkeypatch):
    """A command of the tests: the module behind ``cce-dist fake``."""
    module: Any = type(sys)("fake_command")
    module.add_arguments = lambda parser: parser.add_argument("--code", type=int)
    monkeypatch.setitem(sys.modules, "fake_command", module)
    monkeypatch.setitem(cli.COMMANDS, "fake", cli.Command("fake_command", "do nothing", "cce-dist fake"))
    return module


def test_missing_extra_is_one_line_that_names_it(fake, capsys):
    def run(args):
        import_of_an_extra = "matplotlib.pyplot"
        raise ModuleNotFoundError(f"No module named '{import_of_an_extra}'", name=import_of_an_extra)

    fake.run = run
    assert cli.main(["fake"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "pip install tokenizers filelock numpy matplotlib tqdm" in line


def test_exit_code_is_what_run_returns(fake):
    fake.run = lambda args: args.code
    assert cli.main(["fake", "--code", "3"]) == 3


def test_the_version_is_said_without_torch():
    code = "import sys; sys.modules['torch'] = None; import cce_dist; from cce_dist.tools.cli import main; main(['--version'])"
    result = run_python(code)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("cce-dist 0.1.0, python 3.")


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
    assert said.out == "" and "matplotlib" in said.err
