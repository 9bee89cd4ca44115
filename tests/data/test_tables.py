"""Tables: columns, row groups that are shared by number, Delta versions and partitions, and what is refused."""

from __future__ import annotations

import datetime as dt
import os
import pathlib
from typing import Any

import deltalake
import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import write_deltalake

from sgpu.contract.errors import DataError, InputError, VolumeError
from sgpu.data import DataLoader, TableDataset
from tests.data.conftest import being
from tests.data.formats import table


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    made = tmp_path / "table"
    made.mkdir()
    return made


def numbers(rows: Any) -> list[int]:
    return [row["n"] for row in rows]


def test_rows_come_as_they_stand_with_the_columns_asked_for(folder: pathlib.Path) -> None:
    body = {"n": [1, 2], "when": [dt.date(2026, 1, 2), None], "tags": [["a"], []], "at": [{"x": 1.5}, None]}
    pq.write_table(pa.table(body), folder / "a.parquet")
    assert list(TableDataset(folder)) == [{name: values[row] for name, values in body.items()} for row in range(2)]
    assert list(TableDataset(folder, columns=["tags", "n"])) == [{"tags": ["a"], "n": 1}, {"tags": [], "n": 2}]
    assert list(TableDataset(folder, transform=lambda row: row["n"] * 10)) == [10, 20]
    with pytest.raises(InputError, match=r"has no column nn; it has at, n, tags, when"):
        TableDataset(folder, columns=["nn"])
    with pytest.raises(InputError, match="columns must be several"):
        TableDataset(folder, columns="n")
    pq.write_table(pa.table({"m": [1]}), folder / "b.parquet")
    with pytest.raises(DataError, match=r"b\.parquet .*it has no column n; it has m"):
        list(TableDataset(folder, columns=["n"]))


def test_row_groups_of_one_file_are_shared_by_ranks_and_workers(folder: pathlib.Path) -> None:
    pq.write_table(table(range(1000)), folder / "a.parquet", row_group_size=100)
    whole = TableDataset(folder)
    assert (whole.rows, whole.groups, whole.version) == (1000, 10, None)
    seen = []
    for rank in range(2):
        with being(rank, 2):
            with DataLoader(TableDataset(folder, shuffle=True, seed=1), 32, num_workers=2, collate_fn=numbers) as mine:
                found = [n for batch in mine for n in batch]
        assert len(found) == 500
        seen += found
    assert sorted(seen) == list(range(1000))
    assert {n // 100 for n in seen[:64]} != {0}
    within = [n % 100 for n in seen if n // 100 == 3]
    assert within != sorted(within), "rows of a group are shuffled too"


def test_only_the_ends_of_files_are_read_to_know_the_groups(folder: pathlib.Path) -> None:
    memory = fsspec.filesystem("memory")
    for number in range(3):
        pq.write_table(table(range(number * 10, number * 10 + 10)), folder / "x", row_group_size=4)
        memory.pipe(f"/shop/{number}.parquet", (folder / "x").read_bytes())
    try:
        rows = TableDataset("memory://shop")
        assert (rows.groups, rows.rows) == (9, 30)
        assert rows.files.source.counts().downloads == 0
        assert numbers(rows) == list(range(30))
        assert rows.files.source.counts().downloads == 3
        assert TableDataset("memory://shop").rows == 30
    finally:
        memory.rm("/shop", recursive=True)


def test_a_delta_table_is_read_at_a_version(folder: pathlib.Path) -> None:
    write_deltalake(str(folder), table(range(5)))
    write_deltalake(str(folder), table(range(5, 9)), mode="append")
    write_deltalake(str(folder), table(range(100, 103)), mode="overwrite")
    newest = TableDataset(folder)
    assert (newest.version, newest.rows, numbers(newest)) == (2, 3, [100, 101, 102])
    first = TableDataset(folder, version=1)
    assert sorted(numbers(first)) == list(range(9))
    with pytest.raises(VolumeError, match=r"version 7\) cannot be read"):
        TableDataset(folder, version=7)
    os.unlink(folder / first.files.source.listing.path(0))
    with pytest.raises(VolumeError, match=r"lacks 1 of 2 files that were named.*vacuumed"):
        TableDataset(folder, version=1)


def test_a_run_stays_at_its_version_while_others_write(folder: pathlib.Path) -> None:
    write_deltalake(str(folder), table(range(5)))
    rows = TableDataset(folder)
    with DataLoader(rows, 2, num_workers=0, collate_fn=numbers) as running:
        state = running.state_dict()
        write_deltalake(str(folder), table(range(5, 9)), mode="append")
        assert [n for batch in running for n in batch] == list(range(5))
    again = DataLoader(TableDataset(folder, version=0), 2, num_workers=0, collate_fn=numbers)
    again.load_state_dict(state)
    assert [n for batch in again for n in batch] == list(range(5))


def test_partition_values_come_from_the_log(folder: pathlib.Path) -> None:
    body = pa.table({"n": range(6), "city": ["a b", "ü", "a b", None, "x/y", "ü"], "year": [1, 2, 1, 2, 1, 1]})
    write_deltalake(str(folder), body, partition_by=["city", "year"])
    rows = sorted(TableDataset(folder), key=lambda row: row["n"])
    assert rows == body.to_pylist()
    assert sorted(TableDataset(folder, columns=["year", "n"]), key=lambda row: row["n"]) == [
        {"n": row["n"], "year": row["year"]} for row in body.to_pylist()
    ]


def test_a_delta_table_whose_files_do_not_tell_its_rows_is_refused(folder: pathlib.Path) -> None:
    deltalake.DeltaTable.create(
        str(folder), schema=deltalake.Schema.from_arrow(table(range(1)).schema),
        configuration={"delta.columnMapping.mode": "name", "delta.minReaderVersion": "2"},
        raise_if_key_not_exists=False,
    )  # fmt: skip
    with pytest.raises(InputError, match=r"uses columnMapping.*Write a plain copy"):
        TableDataset(folder)


def test_versions_are_of_delta_tables_only(folder: pathlib.Path) -> None:
    pq.write_table(table(range(3)), folder / "a.parquet")
    with pytest.raises(InputError, match="version=1 needs a Delta table"):
        TableDataset(folder, version=1)
    (folder / "a.parquet").unlink()
    pq.write_table(table(range(0)), folder / "b.parquet")
    with pytest.raises(VolumeError, match="hold no rows"):
        TableDataset(folder)
