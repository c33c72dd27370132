"""File names of objects whose names a file system refuses."""

import hypothesis
import hypothesis.strategies as st
import pytest

from cachedfs.mount.names import file_name, object_name


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("a b.txt", "a b.txt"), ("100%", "100%"), ("%41", "%41"), ("..a", "..a"), (".", "%2E"), ("..", "%2E%2E"), ("a\0b", "a%00b"),
        ("%2E", "%252E"), ("%252E", "%25252E"), ("a%00b", "a%2500b"),
    ],
)  # fmt: skip
def test_only_what_a_file_system_refuses_or_what_looks_like_it_is_encoded(name, shown):
    assert file_name(name) == shown


@hypothesis.given(st.text(alphabet="%02E5.\0a", min_size=1, max_size=8))
def test_every_name_has_its_own_file_name_that_leads_back(name):
    shown = file_name(name)
    assert object_name(shown) == name
    assert shown not in (".", "..")
    assert "\0" not in shown
