"""What accounts use of a daily quota, in the index."""

DAY = "2026-11-25"


def test_sums_of_accounts_and_days_survive_restarts(cache, open_cache):
    assert cache.quota.add("a", DAY, 100, 1) == (100, 1)
    assert cache.quota.add("a", DAY, 200, 2) == (300, 3)
    cache.quota.add("b", DAY, 5, 0)
    cache.quota.add("a", "2026-11-24", 7, 0)
    cache.close()
    again = open_cache()
    assert again.quota.of_day(DAY) == {"a": (300, 3), "b": (5, 0)}
    assert again.quota.of_account("a", "2026-11-24") == (7, 0)
    assert again.quota.of_account("c", DAY) == (0, 0)


def test_days_older_than_sixty_go(cache):
    for day in ("2026-09-25", "2026-09-26"):
        cache.quota.add("a", day, 5, 0)
    cache.quota.add("a", DAY, 5, 0)
    assert cache.quota.of_account("a", "2026-09-25") == (0, 0)
    assert cache.quota.of_account("a", "2026-09-26") == (5, 0)
