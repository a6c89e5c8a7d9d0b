"""Makes pyarrow.parquet (with pyarrow 26.0.1): the witness of another implementation."""

import datetime

import pyarrow as pa
import pyarrow.parquet as pq

rows = [
    {
        "id": number,
        "question": None if number == 2 else f"what is {number}?",
        "messages": [{"role": "user", "content": f"say {number}", "name": None}],
        "score": number / 4,
        "tags": ["a", "é"][: number % 3],
        "meta": {"source": "web", "rank": number},
        "is_checked": number % 2 == 0,
        "seen": datetime.datetime(2026, 1, 2, 3, 4, number),
    }
    for number in range(6)
]
messages = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string()), ("name", pa.string())]))
schema = pa.schema(
    [
        ("id", pa.int64()),
        ("question", pa.string()),
        ("messages", messages),
        ("score", pa.float64()),
        ("tags", pa.list_(pa.string())),
        ("meta", pa.struct([("source", pa.string()), ("rank", pa.int32())])),
        ("is_checked", pa.bool_()),
        ("seen", pa.timestamp("ms")),
    ]
)
table = pa.Table.from_pylist(rows, schema=schema)
# Two row groups, dictionaries, pages of the second version.
pq.write_table(table, "pyarrow.parquet", row_group_size=4, compression="snappy", data_page_version="2.0")
