"""Attacks of hostile code in a session, as data, and the code that decides whether each was
contained.

    cases (one file per kind) ──> arena.py: a sandbox, a sibling session, a victim process,
                                            listeners, a key file
                                    └─> Verdict: contained or not, host alive, siblings untouched,
                                                 nothing leaked

``runner.py`` runs the attacks in a separate process, as a given user and on a restricted kernel;
``test_attacks.py`` asserts its results. An attack that the jail contains must reach its goal in a
provider without walls, if that is safe to try: a check that cannot fail shows nothing.
"""
