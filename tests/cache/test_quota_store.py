"""What accounts use of a daily quota, in the index."""


def test_days_older_than_sixty_go(cache):
    for day in ("2026-09-25", "2026-09-26"):
        cache.quota.add("a", day, 5, 0)
    cache.quota.add("a", "2026-11-25", 5, 0)
    assert cache.quota.of_account("a", "2026-09-25") == (0, 0)
    assert cache.quota.of_account("a", "2026-09-26") == (5, 0)
