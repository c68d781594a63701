"""map_in_threads returns all results in order and raises every error."""

import time

import pytest

from fedpara.engines.threads import map_in_threads


def test_results_come_in_the_items_order():
    def slow_first(i):
        time.sleep(0.01 * (4 - i))
        return i * i

    assert map_in_threads(slow_first, range(5)) == [0, 1, 4, 9, 16]
    assert map_in_threads(slow_first, []) == []


def test_an_error_is_raised_after_all_started_calls_have_ended():
    begun, ended = [], []

    def work(i):
        begun.append(i)
        time.sleep(0.01)
        if i == 1:
            raise OSError("the disk is full")
        ended.append(i)

    with pytest.raises(OSError, match="the disk is full"):
        map_in_threads(work, range(6))
    assert {*begun} - {1} == {*ended}
