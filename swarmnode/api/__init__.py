"""The API thread: the live page, the state as JSON and as events, Prometheus metrics, a health check."""

from swarmnode.api.server import ApiError, ApiServer

__all__ = ["ApiServer", "ApiError"]
