"""docs/config.md is what the schema says."""

from tiered_zero.config import Config
from tiered_zero.config.deepspeed_keys import table
from tools.config_docs import PAGE, page


def test_the_page_is_current_and_has_every_key() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run python tools/config_docs.py"
    assert all(f"`{path}`" in page() for path in table(Config))
