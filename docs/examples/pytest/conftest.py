import pytest

from userstream import testing


def pytest_configure():
    testing.simulate(devices=2)  # before the first driver call of the process


@pytest.fixture(autouse=True)
def _fresh_driver():
    yield
    testing.reset()  # no injection, error or count reaches the next test
