"""Work on many items is done for some of them at the same time, and ends with the error of one."""

import anyio
import pytest

from topoalign.core.model.errors import BusUnavailable
from topoalign.runtime.tasks import for_each

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(("items", "most"), [(0, 0), (2, 2), (3, 3), (10, 3)])
async def test_each_item_is_done_once_and_no_more_at_the_same_time_than_allowed(items: int, most: int) -> None:
    running, done = set[int](), list[int]()
    largest = 0

    async def run(item: int) -> None:
        nonlocal largest
        running.add(item)
        largest = max(largest, len(running))
        await anyio.lowlevel.checkpoint()
        running.remove(item)
        done.append(item)

    await for_each(range(items), run, at_once=3)

    assert (list(range(items)), most) == (sorted(done), largest)


async def test_the_first_error_ends_the_work_and_is_raised_as_itself() -> None:
    begun = list[int]()

    async def run(item: int) -> None:
        begun.append(item)
        await anyio.lowlevel.checkpoint()
        raise BusUnavailable("no bus")

    with pytest.raises(BusUnavailable, match="no bus"):
        await for_each(range(10), run, at_once=3)
    assert [0, 1, 2] == begun
