"""Maps: one question asked of every row of a table, as one stored run of many small trees.

    rows ──> RowQuestion ──> known? ──> RowMeans ──> MapJournal ──> answer ──> MapOutput, in order
             (template)         │       plain call or session            ▲
                                └── answered before, or an equal row ────┘

| file | decides |
|---|---|
| `rows.py` | what a row is: JSONL, CSV, Parquet, a folder, SQLite, a list, a DataFrame |
| `row_question.py` | what is asked of a row: a question and the row, or a template |
| `means.py` | by which means a row is answered: the smallest that fits |
| `batch_run.py` | which rows go through a provider's batch API, and how batches are found again |
| `map_journal.py` | what is recorded of a row, and in which bytes |
| `recorded_map.py` | what a journal says: which rows are answered, and what was spent |
| `map_table.py` | a stored map as a table, and a direct row of it as the events of a run |
| `ray_table.py` | the same of a map on a Ray cluster, from the parts of its output |
| `open_map_table.py` | which of the two tables a stored map has |
| `map_output.py` | the columns and the file of the answers |
| `map_run.py` | the order of the work, one budget for all rows, and when it stops |
| `estimate.py` | what a whole map will cost and take, from a sample of its rows |
| `ray_map.py` | a map on a Ray cluster, as one pipeline of Ray Data |
| `ray_rows.py` | which rows are a part, wherever the files are |
| `part_output.py` | the folder of the output, with a file for each part |
| `ray_source.py` | how Ray Data reads and writes parts |
| `ray_worker.py` | one worker: an engine that answers parts |
| `ray_asker.py` | the same worker as a stage of other pipelines |
| `shared_budget.py` | one budget and one rate limit for all workers |
| `api.py` | `ramify.map` and `ramify.amap` |

A row that needs a session is an ordinary run, which the map's journal names. Two seams are left for
what a map may get: a further means is a `RowMeans` in `means_of`, and a budget that many processes
share is the `shared` ledger of theirs. Not here: how one question is answered (`ramify/engine`).
"""
