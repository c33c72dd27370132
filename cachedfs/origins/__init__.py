"""Origins: the network room. `open_origin` makes one for a protocol; nothing here knows the cache."""

from cachedfs.origins.base import Origin, Reply

__all__ = ["Origin", "Reply"]
