"""Benchmark suites: tasks with questions over long contexts, generated from a seed or read from
public files.

    suite_common.py       options, splits and public files, as all suites have them
    fact_planting.py      facts among filler
    filler_text.py        invented names and sentences
    code_qa.py            values, callers and order in a package, with four choices
    mrcr.py               the nth of several equal requests in a conversation
    multihop.py           questions over a graph of entities, written as documents
    niah.py               RULER's needles, variables and word counts, and the task ``needle``
    oolong.py             counts over labelled texts, in the form of the benchmark OOLONG
    oolong_pairs.py       all pairs of users that satisfy a condition, over such texts
    planted.py            summaries whose planted facts are counted
    *_offline_model.py    how the offline model answers a suite (docs/suites.md)

Each suite has a row in ``ENTRY_POINTS`` of ``ramify/extras/__init__.py``. The rules of each suite,
its score, and the score of the best constant answer are in ``docs/suites.md``.
"""
