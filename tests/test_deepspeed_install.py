"""install, the launcher, and sections of ds_config that nobody reads."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import cce_dist
from cce_dist.integrations import deepspeed as cce
from cce_dist.integrations import transformers as hugging_face

pytest.importorskip("deepspeed")


class Engine:
    def __init__(self, module: nn.Module) -> None:
        self.module = module


@pytest.fixture
def deepspeed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """deepspeed, whose own ``initialize`` makes no engine, so that no group of ranks is needed."""
    import deepspeed

    def initialize(args: Any = None, model: Any = None, config: Any = None, mpu: Any = None, config_params: Any = None):
        return Engine(model), None, None, None

    monkeypatch.setattr(deepspeed, "initialize", initialize)
    monkeypatch.setattr(cce.engine, "convert", lambda engine, options: setattr(engine, "cce_heads", options))  # pyright: ignore
    yield deepspeed


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lm_head = nn.Linear(4, 8)


ON = {"cce_dist": {"enabled": True, "filter": "plain"}}


def test_install_twice_reads_the_section_once(deepspeed: Any) -> None:
    own = deepspeed.initialize
    cce.install()
    cce.install()
    assert deepspeed.initialize.cce_original is own
    for call in (deepspeed.initialize, cce.initialize):
        assert call(model=Model(), config_params=ON)[0].cce_heads.grad_filter is not None
        assert not hasattr(call(model=Model(), config=None)[0], "cce_heads")
    assert deepspeed.initialize.cce_converted == 1  # the other call was cce_dist's own
    with pytest.raises(ValueError, match='has no key "fliter"'):
        deepspeed.initialize(model=Model(), config={"cce_dist": {"enabled": True, "fliter": "plain"}})
    cce.uninstall()
    assert deepspeed.initialize is own


def test_an_assignment_says_what_to_do(deepspeed: Any) -> None:
    deepspeed.initialize = cce.initialize
    with pytest.raises(RuntimeError, match=r"in place of the assignment call .*install\(\)"):
        deepspeed.initialize(model=Model(), config=ON)


def test_a_model_is_not_converted_twice(deepspeed: Any) -> None:
    with pytest.raises(ValueError, match="converted already: leave out"):
        cce.initialize(model=cce_dist.convert(Model()), config=ON)


def test_a_section_that_nobody_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hugging_face, "section_of_trainer", lambda: ON["cce_dist"])
    with pytest.raises(RuntimeError, match='nobody has read "cce_dist" of ds_config'):
        cce_dist.require(Model())
    with pytest.raises(ValueError, match="is enabled in ds_config, and"):
        cce_dist.convert(Model())


def launched(folder: Path, script: str, *arguments: str) -> subprocess.CompletedProcess:
    (folder / "beside.py").write_text("HERE = True\n")
    (folder / "train.py").write_text(script)
    command = [sys.executable, "-m", "cce_dist.integrations.deepspeed", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder.parent)


@pytest.mark.slow
def test_launcher(tmp_path: Path) -> None:
    script = (
        "import sys, beside, deepspeed\nprint(hasattr(deepspeed.initialize, 'cce_original'), __name__, sys.argv[1:])\n"
    )
    done = launched(tmp_path, script, "--local_rank=0", str(tmp_path / "train.py"), "--lr", "1")
    assert done.returncode == 0, done.stderr
    assert "True __main__ ['--local_rank=0', '--lr', '1']" in done.stdout
    assert "no model was converted: no ds_config that reached" in done.stderr
    done = launched(tmp_path, script, str(tmp_path / "absent.py"))
    assert done.returncode == 2 and "no such script" in done.stderr
