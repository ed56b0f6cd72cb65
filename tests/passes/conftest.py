"""The option that rewrites golden cases: `pytest tests/passes --update-golden`; a person reads the diff."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite what golden cases expect")


@pytest.fixture
def update_golden(pytestconfig: pytest.Config) -> bool:
    # The default serves runs that collect this folder late, and so do not know the option.
    return bool(pytestconfig.getoption("--update-golden", default=False))
