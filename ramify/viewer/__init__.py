"""The web viewer of the command ``ramify view``.

It shows runs, training runs and evaluations, and compares them with each other.

    journals, trajectory files, evaluations, folders of ramify train
      │
      ├─ run_lookup.py run_catalog.py         find files, give each run an address, and list them
      ├─ run_call_tree.py watched_run.py      one run as it grows, in outline; one call in full
      │    run_overview.py                      its calls as columns of a table
      │    transcript.py run_text_search.py     a call as a page, read when it is opened
      │    provenance.py data_flow.py returned_value_index.py   which calls its values came from
      │    sibling_code.py                      code of a call that differs, beside its siblings'
      └─ training_and_evaluation_pages.py      curves and rollouts; scores and attempts
           │
           ▼
         file_change_feed.py ──> view_server.py ──HTTP, server-sent events──> static/*.js
                       page_headers.py script_bundle.py    security headers; the page as one file

Text from models and documents is sent as JSON and inserted into the page as text, never as HTML.
"""
