"""The web viewer, which the command ``ramify view`` starts. It shows runs, training runs,
evaluations, and comparisons between them.

    journals, trajectory files, evaluations, folders of ramify train
      │
      ├─ run_lookup.py run_catalog.py         find files, give each run an address, and list them
      ├─ run_tree.py watched_run.py           one run as it grows, in outline; one call in full
      │    run_overview.py                      its calls as columns of a table
      │    transcript.py search.py              a call as a page, read when it is opened
      │    provenance.py data_flow.py returned_value_index.py   which calls its values came from
      │    sibling_code.py                      code of a call that differs, beside its siblings'
      └─ training.py                          curves and rollouts; scores and attempts
           │
           ▼
         feed.py ──> view_server.py ──HTTP, server-sent events──> static/*.js
                       page_headers.py page_script.py    security headers; the page as one file

Text from models and documents travels as JSON and is put on the page as text, never as HTML.
"""
