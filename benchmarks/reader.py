"""Both sides of the rows about reading: a process that reads a Parquet file to NumPy, by us or by plain pyarrow."""

from __future__ import annotations

import sys
from typing import Any

from benchmarks.task import Task, read_arguments
from benchmarks.turns import Operation, Player, take_turns
from syncline.data.extra import needed

BATCH_SIZE = 1024


def batches(task: Task) -> Operation:
    """One pass by `syncline.data`, opened again: nothing is kept from the pass before."""
    import syncline.data

    def read() -> None:
        source = syncline.data.open(task.path)
        for _ in syncline.data.batches(source, BATCH_SIZE, shuffle=task.shuffle):
            pass

    return read


def _to_numpy(column: Any) -> Any:
    """As whoever reads with plain pyarrow would write it: lists of one length become rows."""
    if hasattr(column.type, "list_size"):
        return column.flatten().to_numpy(zero_copy_only=False).reshape(len(column), column.type.list_size)
    return column.to_numpy(zero_copy_only=False)


def iter_batches(task: Task) -> Operation:
    """One pass by pyarrow's own batches."""
    parquet = needed("pyarrow.parquet", "Parquet files")

    def read() -> None:
        with parquet.ParquetFile(task.path) as file:
            for batch in file.iter_batches(batch_size=BATCH_SIZE):
                for column in batch.columns:
                    _to_numpy(column)

    return read


def row_groups(task: Task) -> Operation:
    """One pass by whole row groups, which are no batches yet."""
    parquet = needed("pyarrow.parquet", "Parquet files")

    def read() -> None:
        with parquet.ParquetFile(task.path) as file:
            for number in range(file.num_row_groups):
                for column in file.read_row_group(number).columns:
                    for piece in column.chunks:
                        _to_numpy(piece)

    return read


READERS = {"batches": batches, "iter_batches": iter_batches, "row_groups": row_groups}


def main(arguments: list[str]) -> None:
    task, path = read_arguments(arguments)
    take_turns(path, Player(task.side, task.number), READERS[task.kind](task))


if __name__ == "__main__":
    main(sys.argv[1:])
