"""The built package holds every folder, the two links point where they should, and the command line starts light."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from setuptools import find_packages

from cce_dist.tools.cli import COMMANDS

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
def test_link_resolves_to_the_folder_at_the_root(link):
    path = ROOT / "cce_dist" / link
    assert path.is_symlink()
    assert path.resolve() == ROOT / link


@pytest.mark.parametrize("link", LINKS)
def test_git_keeps_the_link_as_a_link(link):
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    entry = subprocess.run(
        ["git", "ls-files", "--stage", f"cce_dist/{link}"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert entry.startswith("120000 ")


def run_python(code: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)


def test_top_level_help_itself_imports_no_torch():
    code = "import sys; sys.modules['torch'] = None; import runpy; runpy.run_path({!r})['main'](['--help'])"
    result = run_python(code.format(str(ROOT / "cce_dist" / "tools" / "cli.py")))
    assert result.returncode == 0, result.stderr
    assert "cce-dist pretrain --tp 2" in result.stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_its_module(name):
    assert find_spec(COMMANDS[name].module) is not None


def test_unknown_command_names_the_choices():
    result = run_python("from cce_dist.tools.cli import main; main(['pretrian'])")
    assert result.returncode == 2
    assert "pretrain" in result.stderr.splitlines()[-1]


def test_missing_extra_is_one_line_that_names_it(monkeypatch, capsys):
    from cce_dist.tools import cli

    def run(args):
        import_of_an_extra = "matplotlib.pyplot"
        raise ModuleNotFoundError(f"No module named '{import_of_an_extra}'", name=import_of_an_extra)

    module = type(sys)("fake_command")
    module.add_arguments = lambda parser: None  # pyright: ignore[reportAttributeAccessIssue]
    module.run = run  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "fake_command", module)
    monkeypatch.setitem(cli.COMMANDS, "fake", cli.Command("fake_command", "do nothing", "cce-dist fake"))
    assert cli.main(["fake"]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert "pip install tokenizers filelock numpy matplotlib tqdm" in lines[0]
    assert "matplotlib" in lines[0]


def test_exit_code_is_what_run_returns(monkeypatch):
    from cce_dist.tools import cli

    module = type(sys)("fake_command")
    module.add_arguments = lambda parser: parser.add_argument("--code", type=int)  # pyright: ignore[reportAttributeAccessIssue]
    module.run = lambda args: args.code  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "fake_command", module)
    monkeypatch.setitem(cli.COMMANDS, "fake", cli.Command("fake_command", "do nothing", "cce-dist fake"))
    assert cli.main(["fake", "--code", "3"]) == 3


def test_the_version_is_said_without_torch():
    code = "import sys; sys.modules['torch'] = None; import cce_dist; from cce_dist.tools.cli import main; main(['--version'])"
    result = run_python(code)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("cce-dist 0.1.0, python 3.")


def test_an_adapter_without_its_package_names_it():
    code = "import sys; sys.modules['spmd_types'] = sys.modules['torchtitan'] = None; import cce_dist.integrations.torchtitan"
    assert "needs torchtitan, which is not installed" in run_python(code).stderr


def test_a_picture_without_matplotlib_is_refused_before_the_plan():
    code = "import sys; sys.modules['matplotlib'] = None; from cce_dist.tools.cli import main; sys.exit(main({}))"
    result = run_python(code.format(["plan", "--model", "llama-3-8b", "--picture", "x.png"]))
    assert (result.returncode, result.stdout) == (1, "") and "matplotlib" in result.stderr
