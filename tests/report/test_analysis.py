"""What limits a run, as a table of measurements and verdicts."""

import dataclasses

import pytest

from cachedfs.report.analysis import RunFigures, analyse


def run(**figures):
    return RunFigures(**{"elapsed_s": 10.0, "wait_s": 8.0, **figures})


@pytest.mark.parametrize(
    ("figures", "limit"),
    [
        ({"wait_s": 1.0, "times": {"compute": 9.0, "link": 9.9}}, "compute"),
        ({"times": {"compute": 2.0, "link": 6.0, "latency": 1.0}}, "link"),
        ({"times": {"link": 1.0, "latency": 4.0, "other": 3.0}}, "latency"),
        ({"times": {"link": 1.0, "latency": 1.0, "other": 6.0}}, "other"),
        ({"times": {"other": 6.0}, "requests": 100, "refused": 1}, "quota"),
        ({"times": {"other": 6.0}, "requests": 1000, "refused": 1}, "other"),
        ({"times": {"link": 1.0, "latency": 3.0, "quota": 7.5}}, "quota"),
        ({"times": {"link": 6.0}, "requests": 9, "refused": 9}, "link"),
        ({"times": {"decode": 9.5, "load": 10.0}, "n_threads": 4}, "decode"),
        ({"times": {"decode": 2.0, "load": 9.5}, "n_threads": 4}, "load"),
        ({"times": {"decode": 5.0, "load": 8.0}, "n_threads": 4}, None),  # threads that are idle do not limit
        ({"times": {"link": 3.0, "latency": 2.0, "other": 3.0}}, None),
        ({"times": {"compute": 2.0}}, None),
        # The first batch took most of the waiting, but the later ones were waited for as well.
        ({"wait_s": 9.7, "first_wait_s": 6.0, "times": {"compute": 0.3, "link": 7.0}}, "link"),
        ({"wait_s": 9.7, "first_wait_s": 6.0, "times": {"compute": 0.3, "link": 1.0}}, None),
        ({"wait_s": 9.7, "first_wait_s": 9.7, "times": {"compute": 0.3, "link": 1.0}}, None),
        ({"wait_s": 3.2, "first_wait_s": 3.0, "times": {"compute": 6.8, "link": 9.0}}, "start"),
        ({"elapsed_s": 0.0, "wait_s": 0.0}, None),
    ],
)
def test_what_limits(figures, limit):
    assert analyse(run(**figures)).limit == limit


LINK = {"times": {"link": 9.7}, "bytes_fetched": 580_000_000, "bytes_per_s": 60e6}
MANY = {"times": {"latency": 9.6}, "requests": 770, "latency_s": 0.4, "n_at_once": 32}
COMPUTE = {"wait_s": 0.1, "times": {"compute": 9.9}}


@pytest.mark.parametrize(
    ("figures", "words"),
    [
        (LINK, "The link limits: the program waited 8.00 s of 10.0 s (80.0 %) for data; "),
        (
            LINK,
            "97.0 % of the time bytes were on their way, at 58 MB/s of 60 MB/s. To do: prefetch before it is",
        ),
        (
            {**LINK, "n_threads": 4, "held": 0.25},
            "To do: raise cache_size: the cache holds 25.0 % of the data; use batches twice (echo=2).",
        ),
        ({**LINK, "held": 1.0}, "nothing: the cache holds all of it"),
        ({**LINK, "can_store": False}, "let the cache store what comes"),
        (
            {**MANY, "n_threads": 4},
            "96.0 % of the time no answer had begun: 770 requests of 400 ms each, 32 at a time. To do: cachedfs pack: fewer and larger objects; raise concurrency.",
        ),
        (MANY, "read many objects at once (fs.cat)"),
        (
            {"times": {"quota": 7.9}, "requests": 1500, "requests_per_s": 190.0, "n_threads": 4},
            "1,500 requests at the 190 per second that the origin allows. To do: cachedfs pack: fewer and larger",
        ),
        (
            {"times": {"other": 8.0}, "requests": 300, "refused": 12},
            "the origin refused 12 of 300 requests (rate limit or quota). To do: cachedfs pack",
        ),
        (
            {"times": {"load": 10.0}, "n_threads": 4, "read_share": 0.75},
            "4 threads are busy 100.0 % of the time, and 75.0 % of it is reading. To do: raise n_threads if cores are free, else use a faster disk.",
        ),
        ({"times": {"load": 9.5}, "n_threads": 2}, "else use a dataset of cachedfs.datasets"),
        ({"times": {"decode": 9.5}, "n_threads": 2}, "raise n_threads if cores are free, else use a lighter"),
        (
            {"times": {"link": 3.0, "latency": 2.0}},
            "no part fills this time (link 30.0 %, latency 20.0 %). To do: prefetch in the order of the reads.",
        ),
        ({"times": {}, "n_threads": 2}, "raise n_threads or n_prefetch"),
        ({"wait_s": 5.0, "first_wait_s": 5.0}, "prefetch before the loop begins; in a longer run it does"),
        ({"wait_s": 9.7, "first_wait_s": 6.0}, "prefetch before the loop begins; prefetch in the order"),
        (COMPUTE, "Reading does not limit: the program waited 100 ms of 10.0 s (1.0 %) for data."),
        # A daily quota ends the program, without any waiting.
        (
            {**COMPUTE, "requests": 9, "refused": 1},
            "the origin refused 1 of 9 requests (rate limit or quota).",
        ),
        ({"elapsed_s": 0.0}, "Nothing was read yet."),
    ],
)
def test_the_sentence_has_the_numbers_and_the_advice(figures, words):
    assert words in analyse(run(**figures)).sentence


# Before a run: what doctor measured.

FORECAST = RunFigures(
    elapsed_s=0.2,
    times={"link": 0.2},
    bytes_fetched=10**6,
    bytes_per_s=5e6,
    n_at_once=16,
    n_to_fill=3,
    n_files=1,
    size=10**6,
    held=1.0,
)


@pytest.mark.parametrize(
    ("changed", "advice"),
    [
        ({}, []),
        ({"n_at_once": 2}, ["concurrency=3: fewer do not fill the link"]),
        ({"n_to_fill": None, "n_at_once": 8}, []),
        (
            {"size": 2 * 10**9, "held": 0.5, "could_hold": 10**10},
            ['cache_size="3GB": then all of the object stays'],
        ),
        (
            {"n_files": 3, "size": 2 * 10**9, "held": 0.5, "could_hold": 10**9},
            ["cache_dir= on a larger disk: the folder does not fit this one"],
        ),
        ({"is_drive": True, "is_immutable": True}, []),
        (
            {"is_drive": True},
            ['max_age="immutable", if the data does not change: then known files cost no request at all'],
        ),
        (
            {"n_files": 5000, "size": 5 * 10**7},
            ["cachedfs pack: 5,000 files of 10 kB become tens of objects"],
        ),
        ({"n_files": 999, "size": 10**6}, []),
    ],
)
def test_settings_follow_from_what_was_measured(changed, advice):
    found = analyse(dataclasses.replace(FORECAST, **changed))
    assert list(found.advice) == advice
    assert found.verdict == "The link limits: reading all of it takes about 200 ms; 1 MB at 5 MB/s."
