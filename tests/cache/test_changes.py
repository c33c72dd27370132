"""Change feeds: which metadata a change of an item removes."""

import dataclasses

import pytest

from cachedfs.cache.feed_store import overtaken
from cachedfs.common.types import ObjectInfo

FILE = ObjectInfo("d/x", size=3, fingerprint="1", id="X", details={"modified": 1})
NOW = dataclasses.replace(FILE, path="")


def test_what_is_stored_as_it_is_now_holds_wherever_it_is():
    elsewhere = dataclasses.replace(FILE, path="e/y")
    assert overtaken({"d/x": [FILE, FILE], "e/y": [elsewhere]}, {"d/x": NOW, "e/y": NOW}) == set()


@pytest.mark.parametrize("field", ["kind", "size", "fingerprint", "id", "details"])
def test_whatever_differs_does_not_hold(field):
    value = {"kind": "directory", "size": 4, "details": {"modified": 2}}.get(field, "other")
    assert overtaken({"d/x": [FILE]}, {"d/x": dataclasses.replace(NOW, **{field: value})}) == {"d/x"}


@pytest.mark.parametrize(
    ("infos", "now"),
    [
        ([FILE], {}),  # it is not there any more
        ([FILE], {"d/x": None}),  # in the trash
        ([None], {"d/x": NOW}),  # it was not there
        ([None], {"d/x": None}),  # it came and went: another of the name may show
        ([FILE, None], {"d/x": NOW}),  # one of two answers says otherwise
    ],
)
def test_coming_and_going_is_no_state_that_holds(infos, now):
    assert overtaken({"d/x": infos}, now) == {"d/x"}


def test_where_nothing_is_stored_there_is_nothing_to_forget():
    assert overtaken({"d/x": []}, {"d/x": NOW}) == set()
