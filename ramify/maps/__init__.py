"""A map asks the same question about every row of a table.

Each map is stored as one run that consists of many small ones.

    rows ──> RowQuestionMaker ─┬─> RowAnswerer ──> TableMapJournal ──> MapOutputWriter, in order
             (template)        │   plain call or session       ▲
                               └── answered before, ───────────┘
                                   or an equal row

| file | decides |
|---|---|
| `open_row_source.py` | what a row is: JSONL, CSV, Parquet, a folder, SQLite, a list, a DataFrame |
| `row_question.py` | what is asked of a row: a question and the row, or a template |
| `row_answerer.py` | how a row is answered: by a plain call if it fits one, else in a session |
| `batch_run.py` | which rows go through a provider's batch API, and how batches are found again |
| `map_journal.py` | what is recorded of a row, and in which bytes |
| `map_journal_state.py` | what a journal says: which rows are answered, and what was spent |
| `map_table.py` | a stored map as a table, and a direct row of it as the events of a run |
| `stored_ray_map_table.py` | a stored map of a Ray cluster as a table, from its output files |
| `stored_maps.py` | which of the two tables a stored map has |
| `map_output.py` | the columns and the file of the answers |
| `map_run.py` | the order of the work, one budget for all rows, and when it stops |
| `estimate.py` | the cost and duration of a whole map, from a sample of its rows |
| `ray_map.py` | a map on a Ray cluster, as one pipeline of Ray Data |
| `ray_row_partition.py` | which rows are a part, wherever the files are |
| `part_output.py` | the folder of the output, with a file for each part |
| `ray_source.py` | how Ray Data reads and writes parts |
| `ray_worker.py` | one worker: an engine that answers parts |
| `ray_data_stage.py` | a worker as a stage of other Ray Data pipelines |
| `shared_budget.py` | one budget and one rate limit for all workers |
| `api.py` | `ramify.map` and `ramify.amap` |

A row that needs a session is answered by an ordinary run, which the map's journal names. Maps can
be extended in two ways. A new way of answering a row is a `RowAnswerer` that
`create_row_answerers` returns. Several processes share a budget through the `shared` ledger of
their ledgers. How a single question is answered is defined in `ramify/engine`.
"""
