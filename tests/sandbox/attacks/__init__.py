"""What hostile code tries in a session, as data, and the machinery that says of each whether it was
contained.

    cases (one file per kind) ──> arena.py: a sandbox, a sibling session, a victim process, listeners, a key file
                                     └─> Verdict: contained or not, host alive, siblings untouched, nothing leaked

``runner.py`` does this in a process of its own, as a user and on a kernel as poor as asked;
``test_attacks.py`` asserts what it says. An attack that is contained by the jail must reach its
goal in a provider without walls, where that is safe to try: a check that cannot fail shows nothing.
"""
