"""The page that shows runs, training, evaluations and how two runs differ: ``ramify view``.

    journals, trajectory files, evaluations, folders of ramify train
      └─ places.py kinds.py rows.py library.py   what there is, and its address ─┐
         glance.py tree.py watch.py   one run, as it grows, at a glance          │
           picture.py                 its calls as columns of a table            ├─ server.py ─ HTTP, events ─ static/*.js
         whole.py                     one call, read when it is opened           │   guard.py: who may look
           transcript.py tokens.py search.py                                     │   answers.py script.py: how it is sent
         training.py evaluation.py    curves and samples; figures and attempts  ─┘   export.py: one file, offline

Everything that a model or a document said travels as JSON and is put on the page as text, never as HTML.
"""
