"""The command `dispatch`.

Exit codes: 0 done; 1 the answer is no (a policy file with an error, a doctor's finding, a backend that cannot run what
was asked); 2 the command line itself is wrong.
"""

from dispatch.cli._app import main

__all__ = ["main"]
