"""The page that shows runs, training and how two runs differ: ``ramify view``.

    journals, trajectory files, folders of ramify train
      └─ library.py   which runs there are          ─┐
         watch.py     one run, as it grows           ├─ server.py ─ HTTP and server-sent events ─ static/*.js
         picture.py   its calls as rows of a table   │
         transcript.py  one call, whole              │
         training.py  curves and samples            ─┘─ export.py ─ one file that works offline

Everything that a model or a document said travels as JSON and is put on the page as text, never as HTML.
"""
