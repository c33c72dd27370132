"""The number of threads that make batches."""

import pytest

pytest.importorskip("torch")

from cachedfs.datasets.thread_choice import FIRST, REST, TRIED, ThreadChoice


def chosen(choice, n, seconds):
    """Return the numbers of threads for the next batches, of which `seconds(n_threads)` says the times."""
    found = []
    for _ in range(n):
        found.append(choice.next())
        choice.add(found[-1], *seconds(found[-1]))
    return found


def waiting_for_python(n_threads):
    return 1.3 * n_threads - 0.3, 1.0


def waiting_for_the_link(n_threads):
    return float(n_threads), 0.1


def waiting_for_answers(n_threads):
    return 1.0, 0.1


def decoding(n_threads):
    return 1.0, 0.9


def test_one_thread_makes_batches_that_run_python_code():
    choice = ThreadChoice(4, is_fixed=False)
    assert chosen(choice, FIRST + TRIED + 3, waiting_for_python) == [4] * FIRST + [1] * (TRIED + 3)
    assert chosen(choice, REST - 3 + TRIED, waiting_for_python).count(4) == TRIED
    assert choice.current == 1
    choice.begin()
    # In another epoch, a batch waits for the link: all threads are tried, and stay.
    assert chosen(choice, FIRST + TRIED + 3, waiting_for_answers) == [1] * FIRST + [4] * (TRIED + 3)


@pytest.mark.parametrize("seconds", [waiting_for_the_link, waiting_for_answers])
def test_all_threads_make_batches_that_wait_for_something_else(seconds):
    choice = ThreadChoice(4, is_fixed=False)
    found = chosen(choice, FIRST + TRIED + REST, seconds)
    assert found == [4] * FIRST + [1] * TRIED + [4] * REST
    choice.begin()
    # Where all threads are several times as fast, no further loop tries one so soon.
    assert (1 in chosen(choice, FIRST + TRIED, seconds)) == (seconds is waiting_for_the_link)


@pytest.mark.parametrize(("is_fixed", "seconds"), [(False, decoding), (True, waiting_for_python)])
def test_threads_that_use_several_cores_or_were_asked_for_are_not_tried(is_fixed, seconds):
    assert chosen(ThreadChoice(4, is_fixed=is_fixed), 2000, seconds) == [4] * 2000


def test_a_single_thread_is_not_tried_against_itself():
    assert chosen(ThreadChoice(1, is_fixed=False), 100, waiting_for_python) == [1] * 100


def test_a_trial_that_was_cut_short_is_repeated_in_the_next_loop():
    choice = ThreadChoice(4, is_fixed=False)
    assert chosen(choice, FIRST + 2, waiting_for_python)[-2:] == [1, 1]
    choice.begin()
    assert chosen(choice, FIRST + TRIED + 1, waiting_for_python) == [4] * FIRST + [1] * (TRIED + 1)


def test_batches_from_before_a_decision_do_not_count_in_the_next_trial():
    choice = ThreadChoice(4, is_fixed=False)
    late = [choice.next() for _ in range(FIRST + TRIED + 5)]
    for n in late:
        choice.add(n, *waiting_for_python(n))
    assert choice.current == 1
    found = chosen(choice, REST + TRIED, waiting_for_python)
    assert found == [1] * REST + [4] * TRIED
