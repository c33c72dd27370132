"""The number of threads that make batches."""

import pytest

pytest.importorskip("torch")

from cachedfs.datasets.thread_choice import FIRST, REST, TRIED, MadeBatch, ThreadChoice


def made(number, pace):
    """Return batch `number`: the seconds from one to the next, how many are made at a time, and the cores used."""
    each_s, at_once, cores = pace
    return MadeBatch(each_s * (number - at_once), each_s * number, each_s * cores)


def chosen(choice, n, pace):
    """Return the numbers of threads for the next batches, of which `pace(n_threads)` says the speed."""
    found = []
    for number in range(n):
        found.append(choice.next())
        choice.add(found[-1], made(number, pace(found[-1])))
    return found


def waiting_for_python(n_threads):
    return 0.01 + 0.001 * (n_threads - 1), n_threads, 1.0


def waiting_for_the_link(n_threads):
    return 0.01, n_threads, 0.1


def waiting_for_answers(n_threads):
    return 0.01 / n_threads, n_threads, 0.1


def decoding(n_threads):
    return 0.01 / n_threads, n_threads, 3.6


def long(n_threads):
    return 1.0, n_threads, 1.0


def test_one_thread_makes_batches_that_run_python_code():
    choice = ThreadChoice(4, is_fixed=False)
    assert chosen(choice, FIRST + TRIED + REST, waiting_for_python) == [4] * FIRST + [1] * (TRIED + REST)
    assert chosen(choice, TRIED + 1, waiting_for_python) == [4] * TRIED + [1]
    choice.begin()
    # In another epoch, a batch waits for answers: all threads are tried, and stay.
    assert chosen(choice, FIRST + TRIED + 3, waiting_for_answers) == [1] * FIRST + [4] * (TRIED + 3)


@pytest.mark.parametrize("pace", [waiting_for_the_link, waiting_for_answers])
def test_all_threads_make_batches_that_wait_for_something_else(pace):
    choice, tried = ThreadChoice(4, is_fixed=False), []
    for _ in range(4):
        choice.begin()
        found = chosen(choice, FIRST + TRIED + 100, pace)
        tried.append(found == [4] * FIRST + [1] * TRIED + [4] * 100)
        assert tried[-1] or found == [4] * len(found)
    # Where all are several times as fast, twice, later loops try one thread much later.
    assert tried == [True, True, pace is waiting_for_the_link, pace is waiting_for_the_link]


@pytest.mark.parametrize(("is_fixed", "pace"), [(False, decoding), (False, long), (True, waiting_for_python)])
def test_one_thread_is_not_tried_for_long_or_parallel_batches_or_where_a_number_was_asked_for(is_fixed, pace):
    assert chosen(ThreadChoice(4, is_fixed=is_fixed), 2000, pace) == [4] * 2000
