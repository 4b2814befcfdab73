from typing import Any, NamedTuple


class Metric(NamedTuple):
    key: str
    value: float
    timestamp: int
    step: int
    model_id: Any = None


class Param(NamedTuple):
    key: str
    value: str
