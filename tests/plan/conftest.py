import jax
import pytest


@pytest.fixture
def as_users_run_it():
    """Without the 64-bit types of the other tests."""
    with jax.enable_x64(False):
        yield
