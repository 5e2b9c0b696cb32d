"""Where the environment says TOX_DISCARD, each tox environment is taken away once it has passed."""

from __future__ import annotations

import os
import shutil

from tox.execute.api import Outcome
from tox.plugin import impl
from tox.tox_env.api import ToxEnv


@impl
def tox_after_run_commands(tox_env: ToxEnv, exit_code: int, outcomes: list[Outcome]) -> None:
    """Remove what an environment has installed; one that failed stays to be looked into."""
    if os.environ.get("TOX_DISCARD") and exit_code == 0:
        shutil.rmtree(tox_env.env_dir, ignore_errors=True)
