"""Models of toy sizes, and a small text, for the scripts that train."""

import sysconfig
from pathlib import Path

import pytest

from cce_dist.tools.plan import Model, sizes
from models import CONFIGS


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in CONFIGS:
        is_tied = sizes.MODELS[name].is_tied
        monkeypatch.setitem(sizes.MODELS, name, Model(16, 400, 2, 4, 32, 2, 4, is_tied=is_tied))


@pytest.fixture
def corpus(tmp_path: Path) -> list[str]:
    """Return the options of a corpus of one file."""
    folder = tmp_path / "text"
    folder.mkdir()
    (folder / "a.txt").write_text((Path(sysconfig.get_path("stdlib")) / "argparse.py").read_text())
    return ["--corpus", str(folder), "--pattern", "*.txt", "--cache", str(tmp_path / "cache")]
