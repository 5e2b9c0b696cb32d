"""What plugin authors use: problems drawn from a capability, conformance checks, fakes.

from dispatch.testing import check, problems

@pytest.mark.parametrize("problem", problems(MyBackend()), ids=str)
def test_conforms(problem):
    check(MyBackend(), problem)
"""

from dispatch.testing.conformance import check, operands, problems
from dispatch.testing.fakes import FakeBackend, fake_timings, registered

__all__ = ["FakeBackend", "check", "fake_timings", "operands", "problems", "registered"]
