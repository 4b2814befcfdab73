"""Why a rank left, for the ranks that only notice that it is gone."""

import json
from typing import Any

from heal.cluster.patience import Patience
from heal.cluster.side_group import own_store

KEY = "heal/left"
STORE_SECONDS = 3.0  # a store whose host is gone never answers


def post(rank: int, reason: str, exit_code: int) -> None:
    """Leave a message in the store of the default group; the first one counts."""
    told = json.dumps({"rank": rank, "reason": reason, "exit_code": int(exit_code)})
    _ask(lambda: own_store().compare_set(KEY, "", told))


def read() -> dict[str, Any] | None:
    """Return the message of the rank that left first; None if there is none."""

    def look() -> dict[str, Any] | None:
        store = own_store()
        page = json.loads(bytes(store.get(KEY))) if store.check([KEY]) else None
        return page if isinstance(page, dict) else None

    found: dict[str, Any] | None = _ask(look)
    return found


def _ask(call: Any) -> Any:
    patience = Patience(STORE_SECONDS)
    try:
        return patience.ask(call)
    finally:
        patience.close()
