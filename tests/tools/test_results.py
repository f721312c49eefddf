"""docs/results.md says what the raw files hold: each table is what its command prints, and every file is named.

``python tests/tools/test_results.py`` writes the tables of the page anew.
"""

import contextlib
import io
import re
import shlex
from itertools import pairwise
from pathlib import Path

from cce_dist.tools import cli

ROOT = Path(__file__).resolve().parents[2]
PAGE, FILES = ROOT / "docs" / "results.md", ROOT / "docs" / "results"
TABLE = re.compile(r"<!-- (cce-dist .+) -->\n\n((?:\|.*\n)*)")
TEXT = PAGE.read_text()
COMMANDS = TABLE.findall(TEXT)


def printed(command: str) -> str:
    """What a command of the page prints, from any folder."""
    argv = shlex.split(command.replace("docs/", f"{ROOT}/docs/"))[1:]
    assert {"--show", "--columns"} <= set(argv), "it must neither measure nor draw"
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        assert cli.main(argv) == 0
    return output.getvalue()


def test_a_table_is_what_its_command_prints():
    """Catches a number changed by hand, and a printed column that changes its form."""
    assert len(COMMANDS) == TEXT.count("<!-- cce-dist ") > 5
    for command, table in COMMANDS:
        assert table == printed(command), command


def test_every_table_has_its_command():
    """Catches a measured table that lost its command."""
    for before, block in pairwise(TEXT.split("\n\n")):
        if block.startswith("|"):
            # test_plan.py compares a part of a plan's columns.
            assert before.startswith(("<!-- cce-dist ", "<!-- columns of: cce-dist plan ")), block


def test_the_page_names_every_file_and_no_other():
    """Catches a file that no table or picture shows, and a link to a file that is not there."""
    named = set(re.findall(r"\bresults/([\w.-]+\.\w+)", TEXT))
    assert named == {path.name for path in FILES.iterdir()}


if __name__ == "__main__":
    PAGE.write_text(TABLE.sub(lambda found: f"<!-- {found[1]} -->\n\n{printed(found[1])}", TEXT))
