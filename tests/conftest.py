"""What every test has in common."""

import os

import pytest


@pytest.fixture(scope="session", autouse=True)
def disk_that_is_not_waited_for():
    """A sync only looks at its handle: no test here cuts the power. The killed processes of the tests do sync."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "fsync", lambda handle: os.fstat(handle) and None)
        yield
