"""Pages of results say what the raw files hold: each table is what its command prints, and every file is named.

``python tests/tools/test_results.py`` writes the tables of the pages anew.
"""

import contextlib
import importlib
import io
import re
import shlex
import sys
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES, PICTURES = ROOT / "benchmarks" / "results", ROOT / "docs" / "results"
PAGES = [ROOT / "docs" / "results.md", *sorted(FILES.glob("*.md"))]
TABLE = re.compile(r"<!-- (python .+) -->\n\n((?:\|.*\n)*)")


def printed(command: str) -> str:
    _, script, *argv = shlex.split(command)
    assert {"--show", "--columns"} <= set(argv), "it must neither measure nor draw"
    argv = [arg.replace("benchmarks/", f"{ROOT}/benchmarks/") for arg in argv]
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        assert importlib.import_module(Path(script).stem).main(argv) == 0
    return output.getvalue()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_table_is_what_its_command_prints(page: Path) -> None:
    """Catches a number changed by hand, a printed column that changes its form, and a measured table without its command."""
    text = page.read_text()
    commands = TABLE.findall(text)
    assert len(commands) == text.count("<!-- python ")
    for command, table in commands:
        assert table == printed(command), command
    for before, block in pairwise(text.split("\n\n")):
        if block.startswith("|"):
            # test_plan.py compares a part of a plan's columns.
            assert before.startswith(("<!-- python ", "<!-- columns of: cce-dist plan ")), block


def test_pages_name_every_file_and_no_other() -> None:
    """Catches a file that no table or picture shows, and a link to a file that is not there."""
    text = "\n".join(page.read_text() for page in PAGES)
    named = set(re.findall(r"[/(]([\w.-]+\.(?:json|png))\b", text))
    assert named == {path.name for folder in (FILES, PICTURES) for path in folder.iterdir()} - {p.name for p in PAGES}
    linked = set(re.findall(r"benchmarks/results/([\w-]+\.md)", PAGES[0].read_text()))
    assert linked == {page.name for page in PAGES[1:]}


if __name__ == "__main__":
    sys.path.append(str(ROOT / "benchmarks"))
    for page in PAGES:
        page.write_text(TABLE.sub(lambda found: f"<!-- {found[1]} -->\n\n{printed(found[1])}", page.read_text()))
