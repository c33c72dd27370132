"""File names of objects whose names a file system refuses."""

import hypothesis
import hypothesis.strategies as st
import pytest

from cachedfs.mount.names import file_name, object_name, with_id, without_id


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


@pytest.mark.parametrize(
    ("name", "is_folder", "shown"),
    [
        ("a.jpg", False, "a (id 1-B_).jpg"), ("a.tar.gz", False, "a.tar (id 1-B_).gz"), (".a", False, ".a (id 1-B_)"),
        ("a. b", False, "a. b (id 1-B_)"), ("v1.2", True, "v1.2 (id 1-B_)"), ("a (id 2).b", False, "a (id 2) (id 1-B_).b"),
    ],
)  # fmt: skip
def test_an_id_is_put_before_the_suffix_of_a_file_and_leads_back(name, is_folder, shown):
    assert with_id(name, "1-B_", is_folder=is_folder) == shown


@hypothesis.given(st.text(alphabet=".a (id)%2E\n", min_size=1, max_size=12), st.booleans())
def test_name_and_id_are_found_again(name, is_folder):
    shown = file_name(with_id(name, "x", is_folder=is_folder))
    assert without_id(object_name(shown)) == (name, "x")
