"""Watching the norms of a model while it trains: `watch`."""

from normkit.watching.reading import Reading as Reading
from normkit.watching.session import Watched as Watched
from normkit.watching.session import watch as watch
