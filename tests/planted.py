"""Options that live outside the repository: a folder with a class and its YAML, as a user would add them."""

import json
from pathlib import Path

import pytest
from conftest import TINY, Finished, composed


def plant(folder: Path, group: str, name: str, code: str, **settings) -> str:
    """Write the option `group`=`name` below `folder`, and return the package that it has to be allowed by.

    code: of the module; its class is called Option.
    """
    (folder / "conf" / group).mkdir(parents=True, exist_ok=True)
    values = {"_target_": f"planted_{name}.Option", **settings}
    (folder / "conf" / group / f"{name}.yaml").write_text("".join(f"{key}: {value}\n" for key, value in values.items()))
    (folder / f"planted_{name}.py").write_text(code)
    return f"planted_{name}"


def train_planted(run_dir: Path, folder: Path, allowed: str, *overrides: str) -> Finished:
    """conftest.train_here, with the options planted in `folder`."""
    from forge.config import check, realise
    from forge.freeze import freeze
    from forge.stopping import Stopping
    from forge.worker import work

    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        settings = composed(f"hydra.searchpath=[file://{folder}/conf]", *TINY, *overrides, f"run_dir={run_dir}")
        check(realise(settings, (allowed,)))
        freeze(settings, run_dir)
        code = work(run_dir, (allowed,), Stopping())
    failures = [json.loads(path.read_text())["message"] for path in run_dir.glob("failures/*.json")]
    return Finished(int(code), "", "\n".join(failures), run_dir)
