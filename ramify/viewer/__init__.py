"""Web viewer of runs, training, evaluations and comparisons: ``ramify view``.

    journals, trajectory files, evaluations, folders of ramify train
      │
      ├─ run_locations.py run_kinds.py        find files, and give each run an address
      │    listing_rows.py run_library.py       rows of the lists
      ├─ event_glances.py run_tree.py         one run as it grows, in outline
      │    watched_run.py picture.py            its calls as columns of a table
      ├─ call_detail.py                       one call in full, read when it is opened
      │    transcript.py token_view.py search.py
      └─ training.py evaluation.py            curves and rollouts; scores and attempts
           │
           ▼
         feed.py ──> view_server.py ──HTTP, server-sent events──> static/*.js
                       guard.py                access control
                       answers.py page_script.py    responses and static files
         export.py                             one run as an offline file

Text from models and documents travels as JSON and is put on the page as text, never as HTML.
"""
