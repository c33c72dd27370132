"""Where the feeds of changes were left, and the folders that lead to what they watch: rows of the index."""

from __future__ import annotations

from cachedfs.cache.facts import Feed, Told, Watch, hash_of, sealed, unsealed
from cachedfs.cache.schema import Recorded, blob_of, origin_of, text_of

__all__ = ["FeedRows"]


class FeedRows(Recorded):
    """The statements about feeds."""

    def feed(self, identity: str, part: str) -> Feed | None:
        """Return where the feed of one part of an origin was left; None when there is none."""
        found = self._run(
            "SELECT id, token, checked_at, number FROM feeds WHERE origin = ? AND part = ?",
            (origin_of(identity), blob_of(part)),
        ).fetchone()
        return found and _feed(identity, *found)

    def feed_by_id(self, identity: str, id: int) -> Feed | None:
        found = self._run("SELECT id, token, checked_at, number FROM feeds WHERE id = ?", (id,)).fetchone()
        return found and _feed(identity, *found)

    def begin_feed(self, identity: str, part: str, token: str, checked_at: float) -> None:
        """Store where a feed begins, unless another process did."""
        text = sealed(None, identity, float(checked_at), 0, token) + token
        self._run(
            "INSERT OR IGNORE INTO feeds (origin, part, token, checked_at, number) VALUES (?, ?, ?, ?, 0)",
            (origin_of(identity), blob_of(part), text, checked_at),
        )

    def advance_feed(self, identity: str, feed: Feed) -> None:
        """Store where a feed is left now."""
        text = sealed(None, identity, float(feed.checked_at), feed.number, feed.token) + feed.token
        self._run(
            "UPDATE feeds SET token = ?, checked_at = ?, number = ? WHERE id = ?",
            (text, feed.checked_at, feed.number, feed.id),
        )

    def drop_feed(self, feed: Feed) -> None:
        """Forget a feed: it tells nothing any more of what was watched by it."""
        self._run("DELETE FROM feeds WHERE id = ?", (feed.id,))
        self._run("DELETE FROM folders WHERE feed = ?", (feed.id,))

    def folders_of(self, identity: str, feed: Feed, id: str) -> list[str]:
        """Return the paths of the folder of this id, if it leads to something that a feed watches."""
        values = (feed.id, hash_of(identity, id))
        return [
            text_of(path)
            for (path,) in self._run("SELECT path FROM folders WHERE feed = ? AND item = ?", values)
        ]

    def _watched(self, identity: str, watch: Watch | None) -> tuple[int | None, int | None]:
        """Return the feed that will tell of an answer, and whose folder it is about; Nones where it may have told already."""
        if watch is None:
            return None, None
        feed = self.feed_by_id(identity, watch.feed)
        if feed is None or feed.number != watch.number:
            return None, None
        hashes = {path: hash_of(identity, id) for path, id in watch.way}
        self._run_many(
            "INSERT OR IGNORE INTO folders VALUES (?, ?, ?)",
            [(watch.feed, item, blob_of(path)) for path, item in hashes.items()],
        )
        return watch.feed, next(iter(hashes.values()), 0)

    def _told(self, identity: str, feed: int | None, folder: int | None) -> Told | None:
        if feed is None or folder is None:
            return None
        now = self.feed_by_id(identity, feed)
        return now and Told(now.checked_at, folder)


def _feed(identity: str, id: int, text: str, checked_at: float, number: int) -> Feed:
    """Return the feed in a row. Raises ValueError when it is damaged."""
    token = text[8:]
    unsealed(text[:8], "", identity, checked_at, number, token)
    return Feed(id, token, checked_at, number)
