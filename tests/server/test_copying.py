"""Memory for copies: bounded, used again, and let go."""

from __future__ import annotations

from syncline.server.cow_snapshot import CopyMemory, new_memory

MIB = 1 << 20


def test_all_of_fresh_memory_can_be_written() -> None:
    for num_bytes in (0, 1, 2 * MIB - 1, 2 * MIB, 5 * MIB + 3):
        array = new_memory(num_bytes)
        array[:] = 7
        assert array.nbytes == num_bytes and array.sum() == 7 * num_bytes


def test_what_is_given_back_is_used_again_while_copies_are_to_come() -> None:
    memory = CopyMemory(0, 3)
    one = memory.take(100)
    assert one is not None
    memory.give_back(one)
    assert (memory.used, memory.num_spare) == (0, 100)
    assert memory.take(100) is one and memory.num_spare == 0
    two = memory.take(50)
    assert two is not None and memory.used == 150
    memory.give_back(two)
    assert (memory.used, memory.num_spare) == (100, 0), "there are no more to come"


def test_what_is_spare_counts_and_makes_room() -> None:
    memory = CopyMemory(100, 9)
    one = memory.take(60)
    assert one is not None and memory.take(50) is None
    memory.give_back(one)
    assert memory.num_spare == 60
    assert memory.take(50) is not None
    assert (memory.used, memory.num_spare) == (50, 0), "never more than so much, with what is spare"
