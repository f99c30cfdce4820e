"""The page that shows runs, training, evaluations and how two runs differ: ``ramify view``.

    journals, trajectory files, evaluations, folders of ramify train
      └─ run_locations.py run_kinds.py listing_rows.py run_library.py   what there is, and its address ─┐
         event_glances.py run_tree.py watched_run.py   one run, as it grows, at a glance          │
           picture.py                 its calls as columns of a table            ├─ view_server.py ─ HTTP, events ─ static/*.js
         call_detail.py                     one call, read when it is opened           │   guard.py: who may look
           transcript.py token_view.py search.py                                     │   answers.py page_script.py: how it is sent
         training.py evaluation.py    curves and samples; figures and attempts  ─┘   export.py: one file, offline

Everything that a model or a document said travels as JSON and is put on the page as text, never as
HTML.
"""
