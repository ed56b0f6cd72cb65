"""The planned zoo, shared by the tests of this folder."""

import pytest
from tests.zoo.planned import PlannedZoo


@pytest.fixture(scope="session")
def zoo() -> PlannedZoo:
    return PlannedZoo()
