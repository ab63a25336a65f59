import pytest

from coca_hf.models import attention


@pytest.fixture(autouse=True)
def _log_scale_from_four_tokens(monkeypatch):
    """Sequences of the tests are shorter than 64 tokens."""
    monkeypatch.setattr(attention, "LOG_SCALE_FROM", 4)
